// SPDX-License-Identifier: AGPL-3.0-only
//
// All that is wrong with an adapter, gathered so that it is said at once.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// A name from a file as a message may show it: on one line, and not endless.
[[nodiscard]] inline std::string printable(std::string_view text) {
  constexpr std::size_t longest = 240;
  std::string out(text.substr(0, longest));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text.size() > longest ? out + "..." : out;
}

/// The faults found so far: one line each, under the code of the first.
class Faults {
 public:
  void add(Errc code, std::string const& line) {
    if (error_.code == Errc::ok) {
      error_.code = code;
    } else {
      error_.message += '\n';
    }
    error_.message += line;
  }
  void add(Error const& error) { add(error.code, error.message); }

  [[nodiscard]] bool empty() const noexcept { return error_.code == Errc::ok; }
  [[nodiscard]] Error const& error() const noexcept { return error_; }

  /// The failing outcome of any `Result<T>`; at least one fault must have been added.
  [[nodiscard]] cuda::std::unexpected<Error> failure() const { return cuda::std::unexpected<Error>(error_); }

 private:
  Error error_;
};

}  // namespace atlas::lora::inline v0::detail
