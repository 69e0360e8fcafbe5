// SPDX-License-Identifier: AGPL-3.0-only
//
// What tests of fallible functions ask: the value that there must be, the error that there must be, and its
// words.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <string_view>
#include <utility>

#include "atlas/lora/status.hpp"

namespace atlas::lora::testing {

/// The value of a result that must have one.
template <class V>
V good(Result<V> result) {
  REQUIRE_MESSAGE(result, (result ? "" : result.error().message));
  return *std::move(result);
}

/// The error of a result that must have one.
template <class V>
Error bad(Result<V> const& result) {
  REQUIRE_FALSE(result);
  return result.error();
}

inline bool says(std::string const& message, std::string_view words) {
  return message.find(words) != std::string::npos;
}

}  // namespace atlas::lora::testing
