// SPDX-License-Identifier: AGPL-3.0-only
//
// Files of the safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes with
// neither holes nor overlaps.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/file.hpp"
#include "atlas/lora/adapter/json.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

static_assert(std::endian::native == std::endian::little, "the bytes of a file are used as they are");

/// Where a tensor lies in its file.
struct TensorInfo {
  std::string name;                 ///< as the file spells it
  std::string dtype;                ///< as the format spells it: `"F32"`, `"BF16"`, `"I32"`, ...
  std::vector<std::int64_t> shape;  ///< extents, the slowest first
  std::uint64_t offset = 0;         ///< of its first byte, from the beginning of the file
  std::uint64_t bytes = 0;          ///< what its elements take

  friend bool operator==(TensorInfo const&, TensorInfo const&) = default;
};

/// A tensor of any type in host memory: row-major, contiguous, little-endian.
struct RawTensor {
  std::string name;                 ///< as the file spells it
  std::string dtype;                ///< as `TensorInfo::dtype`
  std::vector<std::int64_t> shape;  ///< extents, the slowest first
  std::vector<std::byte> bytes;     ///< product of `shape` elements
};

namespace detail {

/// Bits of one element of a dtype; 0 for a name that the format does not have.
[[nodiscard]] constexpr std::uint64_t dtype_bits(std::string_view dtype) noexcept {
  struct Row {
    std::string_view name;
    std::uint64_t bits;
  };
  constexpr Row rows[] = {{"F32", 32},    {"F16", 16},    {"BF16", 16}, {"F64", 64},    {"I64", 64},
                          {"I32", 32},    {"I16", 16},    {"I8", 8},    {"U64", 64},    {"U32", 32},
                          {"U16", 16},    {"U8", 8},      {"BOOL", 8},  {"C64", 64},    {"F8_E4M3", 8},
                          {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F4", 4},    {"F6_E2M3", 6}, {"F6_E3M2", 6}};
  for (Row const& row : rows) {
    if (row.name == dtype) return row.bits;
  }
  return 0;
}

/// Builds the list of tensors from a header's events. It knows the one structure a header may have and
/// refuses anything else at once, so what it keeps is never much larger than the header.
class HeaderEvents : public JsonPlace {
 public:
  using JsonPlace::JsonPlace;

  std::vector<TensorInfo> tensors;  ///< offsets from the beginning of the data until they are checked

  bool null() { return refuse("null is not expected here"); }
  bool boolean(bool) { return refuse("a boolean is not expected here"); }
  bool number_integer(std::int64_t value) { return refuse(std::to_string(value) + " is negative"); }
  bool number_float(double, std::string const& text) { return refuse(text + " is not an integer"); }
  bool binary(nlohmann::json::binary_t&) { return refuse("binary values are not JSON"); }

  bool number_unsigned(std::uint64_t value) {
    if (where_ == Where::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return refuse(std::to_string(value) + " is beyond 63 bits");
      }
      if (tensors.back().shape.size() == most_dimensions) return refuse("too many dimensions");
      tensors.back().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (where_ != Where::offsets) return refuse("a number is not expected here");
    if (offsets_ == 2) return refuse("more than two offsets");
    (offsets_++ == 0 ? tensors.back().offset : end_) = value;
    return true;
  }

  bool string(std::string& value) {
    if (where_ == Where::metadata) return true;
    if (where_ != Where::tensor || key_ != "dtype") return refuse("a string is not expected here");
    tensors.back().dtype = std::move(value);
    return true;
  }

  bool start_object(std::size_t) {
    if (where_ == Where::top) {
      where_ = Where::tensors;
    } else if (where_ == Where::tensors && key_ == "__metadata__") {
      where_ = Where::metadata;
    } else if (where_ == Where::tensors) {
      where_ = Where::tensor;
      tensors.emplace_back().name = std::move(key_);
    } else {
      return refuse("an object is not expected here");
    }
    keys_.emplace_back();
    enter();
    return true;
  }

  bool key(std::string& value) {
    name(value);
    if (where_ != Where::tensors) {  // names of tensors are compared when all are known
      auto& said = keys_.back();
      if (std::find(said.begin(), said.end(), value) != said.end()) return refuse("said twice");
      if (where_ == Where::tensor && value != "dtype" && value != "shape" && value != "data_offsets") {
        return refuse("not a part of a tensor");
      }
      if (said.size() == most_metadata) return refuse("too many entries");
      said.push_back(value);
    }
    key_ = std::move(value);
    return true;
  }

  bool start_array(std::size_t) {
    if (where_ == Where::tensor && key_ == "shape") {
      where_ = Where::shape;
    } else if (where_ == Where::tensor && key_ == "data_offsets") {
      where_ = Where::offsets;
      offsets_ = 0;
    } else {
      return refuse("a list is not expected here");
    }
    enter();
    return true;
  }

  bool end_array() {
    leave();
    if (where_ == Where::offsets && offsets_ != 2) return refuse("two offsets expected");
    where_ = Where::tensor;
    return true;
  }

  bool end_object() {
    leave();
    if (where_ == Where::tensor) {
      if (keys_.back().size() != 3) return refuse("dtype, shape and data_offsets are needed");
      if (end_ < tensors.back().offset) return refuse("data_offsets go backwards");
      tensors.back().bytes = end_ - tensors.back().offset;
    }
    keys_.pop_back();
    where_ = where_ == Where::tensors ? Where::top : Where::tensors;
    return true;
  }

 private:
  enum class Where : std::uint8_t { top, tensors, tensor, metadata, shape, offsets };
  static constexpr std::size_t most_metadata = 4096;
  static constexpr std::size_t most_dimensions = 64;

  Where where_ = Where::top;
  std::string key_;
  std::vector<std::vector<std::string>> keys_;  // said so far in each open object
  std::uint64_t end_ = 0;
  int offsets_ = 0;
};

/// The words of what is wrong with one tensor's type, shape and size, or nothing.
[[nodiscard]] inline std::string check_tensor(TensorInfo const& tensor, std::uint64_t data_bytes) {
  std::uint64_t const bits = dtype_bits(tensor.dtype);
  if (bits == 0) return "unknown dtype '" + printable(tensor.dtype) + "'";
  if (tensor.offset > data_bytes || tensor.bytes > data_bytes - tensor.offset)
    return "lies beyond the end of the file";
  std::uint64_t total = bits;
  for (std::int64_t const extent : tensor.shape) {
    if (__builtin_mul_overflow(total, static_cast<std::uint64_t>(extent), &total))
      return "shape overflows 64 bits";
  }
  if (total % 8 != 0 || total / 8 != tensor.bytes) {
    return "dtype and shape need " + std::to_string(total / 8) + " bytes, data_offsets give " +
           std::to_string(tensor.bytes);
  }
  return {};
}

}  // namespace detail

/// An open safetensors file whose header has been checked. Move-only. Reading is positioned and const, so
/// several threads may read through one object; nothing is mapped, and no read is larger than the file.
class SafetensorsFile {
 public:
  /// Opens a file and checks its header: bounds, holes, overlaps, types, names said twice, sizes against
  /// shapes. Errors: `not_found`, `io`, or `bad_file` naming the tensor.
  [[nodiscard]] static Result<SafetensorsFile> open(std::string const& path) {
    auto file = detail::File::open(path);
    if (!file) return cuda::std::unexpected<Error>(std::move(file).error());
    SafetensorsFile out;
    out.file_ = std::move(*file);
    if (Error error = out.read_header(); error.code != Errc::ok) {
      return cuda::std::unexpected<Error>(std::move(error));
    }
    return out;
  }

  /// The file's path as it was given.
  [[nodiscard]] std::string const& path() const noexcept { return file_.path(); }

  /// Every tensor, sorted by name.
  [[nodiscard]] std::span<TensorInfo const> tensors() const noexcept { return tensors_; }

  /// The tensor of that name; null when the file has none.
  [[nodiscard]] TensorInfo const* find(std::string_view name) const noexcept {
    auto const at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                     [](TensorInfo const& t, std::string_view n) { return t.name < n; });
    return at != tensors_.end() && at->name == name ? &*at : nullptr;
  }

  /// Reads a tensor of any type. Errors: `not_found`, `io`, `out_of_memory`.
  [[nodiscard]] Result<RawTensor> read_raw(std::string_view name) const {
    TensorInfo const* const info = find(name);
    if (info == nullptr)
      return fail(Errc::not_found, path() + ": no tensor '" + detail::printable(name) + "'");
    auto bytes = file_.read(info->offset, static_cast<std::size_t>(info->bytes));
    if (!bytes) return cuda::std::unexpected<Error>(std::move(bytes).error());
    return RawTensor{info->name, info->dtype, info->shape, std::move(*bytes)};
  }

  /// Reads a tensor of F32, F16 or BF16, kept in that type. Errors: those of `read_raw`, and `unsupported`
  /// naming any other type.
  [[nodiscard]] Result<HostTensor> read(std::string_view name) const {
    TensorInfo const* const info = find(name);
    if (info != nullptr && !element_type_of(info->dtype)) {
      return fail(Errc::unsupported, path() + ": tensor '" + detail::printable(name) + "' is " + info->dtype +
                                         "; F32, F16 or BF16 expected");
    }
    auto raw = read_raw(name);
    if (!raw) return cuda::std::unexpected<Error>(std::move(raw).error());
    return HostTensor{std::move(raw->name), *element_type_of(raw->dtype), std::move(raw->shape),
                      std::move(raw->bytes)};
  }

  /// The element type that a dtype names; none for the types that operands never have.
  [[nodiscard]] static std::optional<ElementType> element_type_of(std::string_view dtype) noexcept {
    for (ElementType const type : {ElementType::f32, ElementType::f16, ElementType::bf16}) {
      if (dtype == to_string(type)) return type;
    }
    return std::nullopt;
  }

 private:
  SafetensorsFile() = default;

  [[nodiscard]] Error bad(std::string const& what) const { return {Errc::bad_file, path() + ": " + what}; }
  [[nodiscard]] Error bad(TensorInfo const& tensor, std::string const& what) const {
    return bad("tensor '" + detail::printable(tensor.name) + "': " + what);
  }

  [[nodiscard]] Error read_header() {
    constexpr std::uint64_t prefix = 8;
    constexpr std::uint64_t largest = 100'000'000;  // the format's own limit
    if (file_.size() < prefix) return bad("shorter than the 8 bytes of its header's length");
    auto const length_bytes = file_.read(0, prefix);
    if (!length_bytes) return length_bytes.error();
    std::uint64_t length = 0;
    std::memcpy(&length, length_bytes->data(), prefix);
    if (length > file_.size() - prefix) {
      return bad("header of " + std::to_string(length) + " bytes is larger than the file");
    }
    if (length > largest)
      return bad("header of " + std::to_string(length) + " bytes is beyond the format's limit");
    auto const header = file_.read(prefix, static_cast<std::size_t>(length));
    if (!header) return header.error();
    detail::HeaderEvents events({reinterpret_cast<char const*>(header->data()), header->size()}, path());
    if (Error error =
            detail::run_json({reinterpret_cast<char const*>(header->data()), header->size()}, events);
        error.code != Errc::ok) {
      return error;
    }
    tensors_ = std::move(events.tensors);
    return check(prefix + length);
  }

  // Checks every tensor and the whole; makes offsets count from the beginning of the file.
  [[nodiscard]] Error check(std::uint64_t data_begin) {
    std::uint64_t const data_bytes = file_.size() - data_begin;
    for (TensorInfo const& tensor : tensors_) {
      if (auto const fault = detail::check_tensor(tensor, data_bytes); !fault.empty())
        return bad(tensor, fault);
    }
    std::sort(tensors_.begin(), tensors_.end(), [](TensorInfo const& a, TensorInfo const& b) {
      return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
    });
    std::uint64_t end = 0;
    for (TensorInfo const& tensor : tensors_) {
      if (tensor.offset < end) return bad(tensor, "overlaps the tensor before it");
      if (tensor.offset > end) {
        return bad(tensor, "a hole of " + std::to_string(tensor.offset - end) + " bytes before it");
      }
      end = tensor.offset + tensor.bytes;
    }
    if (end != data_bytes) return bad(std::to_string(data_bytes - end) + " bytes after the last tensor");
    std::sort(tensors_.begin(), tensors_.end(),
              [](TensorInfo const& a, TensorInfo const& b) { return a.name < b.name; });
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (i > 0 && tensors_[i].name == tensors_[i - 1].name) return bad(tensors_[i], "said twice");
      tensors_[i].offset += data_begin;
    }
    return {};
  }

  detail::File file_;
  std::vector<TensorInfo> tensors_;
};

}  // namespace atlas::lora::inline v0
