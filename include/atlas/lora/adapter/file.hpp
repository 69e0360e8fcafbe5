// SPDX-License-Identifier: AGPL-3.0-only
//
// Bounded reads of files. Nothing is mapped: a file that is rewritten or cut while it is read gives an error
// and never a signal.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <new>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// A regular file open for reading. Move-only; closes itself. Reads are positioned, so several threads may
/// read through one object.
class File {
 public:
  File() = default;
  File(File&& other) noexcept
      : path_(std::move(other.path_)),
        size_(other.size_),
        descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(size_, other.size_);
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  File(File const&) = delete;
  File& operator=(File const&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  /// Errors: `not_found`, or `io` for anything but a readable regular file.
  [[nodiscard]] static Result<File> open(std::string const& path) {
    File file;
    file.path_ = path;
    // A pipe must not block the open; for a regular file the flag means nothing.
    file.descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file.descriptor_ < 0) {
      bool const absent = errno == ENOENT || errno == ENOTDIR;
      return fail(absent ? Errc::not_found : Errc::io, path + ": " + std::strerror(errno));
    }
    struct ::stat status {};
    if (::fstat(file.descriptor_, &status) != 0) return fail(Errc::io, path + ": " + std::strerror(errno));
    if (!S_ISREG(status.st_mode)) return fail(Errc::io, path + ": not a regular file");
    file.size_ = static_cast<std::uint64_t>(status.st_size);
    return file;
  }

  [[nodiscard]] std::string const& path() const noexcept { return path_; }

  /// Bytes of the file when it was opened.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  /// Reads `bytes` bytes at `offset`; the range must lie in `[0, size())`. Errors: `io`, also when the file
  /// has become shorter; `out_of_memory`.
  [[nodiscard]] Result<std::vector<std::byte>> read(std::uint64_t offset, std::size_t bytes) const {
    // A vector that cannot have its memory would end a program built without exceptions, so it is asked for
    // first.
    if (std::unique_ptr<std::byte[]> const probe(new (std::nothrow) std::byte[bytes]); probe == nullptr) {
      return fail(Errc::out_of_memory, path_ + ": no memory for " + std::to_string(bytes) + " bytes");
    }
    std::vector<std::byte> out(bytes);
    std::size_t done = 0;
    while (done < bytes) {
      ::ssize_t const got =
          ::pread(descriptor_, out.data() + done, bytes - done, static_cast<::off_t>(offset + done));
      if (got > 0) {
        done += static_cast<std::size_t>(got);
      } else if (got == 0) {
        return fail(Errc::io, path_ + ": became shorter while it was read");
      } else if (errno != EINTR) {
        return fail(Errc::io, path_ + ": " + std::strerror(errno));
      }
    }
    return out;
  }

 private:
  std::string path_;
  std::uint64_t size_ = 0;
  int descriptor_ = -1;
};

/// The whole text of a file of at most `most` bytes. Errors: those of `File`, and `bad_file` when it is
/// larger.
[[nodiscard]] inline Result<std::string> read_text(std::string const& path, std::uint64_t most) {
  auto const file = File::open(path);
  if (!file) return cuda::std::unexpected<Error>(file.error());
  if (file->size() > most) {
    return fail(Errc::bad_file, path + ": " + std::to_string(file->size()) + " bytes, at most " +
                                    std::to_string(most) + " expected");
  }
  auto const bytes = file->read(0, static_cast<std::size_t>(file->size()));
  if (!bytes) return cuda::std::unexpected<Error>(bytes.error());
  return std::string(reinterpret_cast<char const*>(bytes->data()), bytes->size());
}

/// Whether something is there under `path`.
[[nodiscard]] inline bool exists(std::string const& path) noexcept {
  struct ::stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace atlas::lora::inline v0::detail
