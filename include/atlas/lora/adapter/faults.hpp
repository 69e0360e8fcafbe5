// SPDX-License-Identifier: AGPL-3.0-only
//
// All that is wrong with an adapter, gathered so that it is said at once.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// The faults found so far: one line each, under the code of the first. After `most_lines` the rest is only
/// counted.
class Faults {
 public:
  static constexpr std::size_t most_lines = 1000;

  void add(Errc code, std::string const& line) {
    if (lines_++ == 0) error_.code = code;
    if (lines_ > most_lines) return;
    if (lines_ > 1) error_.message += '\n';
    error_.message += line;
  }
  void add(Error const& error) { add(error.code, error.message); }

  [[nodiscard]] bool empty() const noexcept { return lines_ == 0; }

  /// The failing outcome of any `Result<T>`; at least one fault must have been added.
  [[nodiscard]] cuda::std::unexpected<Error> failure() const {
    Error error = error_;
    if (lines_ > most_lines) error.message += "\nand " + std::to_string(lines_ - most_lines) + " more";
    return cuda::std::unexpected<Error>(std::move(error));
  }

 private:
  Error error_;
  std::size_t lines_ = 0;
};

}  // namespace atlas::lora::inline v0::detail
