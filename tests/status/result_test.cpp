// SPDX-License-Identifier: AGPL-3.0-only
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "atlas/lora/status.hpp"

namespace {

using namespace atlas::lora;

using Words = Result<std::string>;
using Owner = Result<std::unique_ptr<int>>;

// Long enough to lie on the heap, so that a lost or doubled destructor shows under a sanitizer.
std::string const long_words(100, 'w');

static_assert(std::is_copy_constructible_v<Words> && std::is_copy_assignable_v<Words>);
static_assert(!std::is_copy_constructible_v<Owner> && !std::is_copy_assignable_v<Owner>);
static_assert(std::is_nothrow_move_constructible_v<Owner> && std::is_nothrow_move_assignable_v<Owner>);

TEST_SUITE("status/result") {
  TEST_CASE("a result is its value or its error, and copies and moves are too") {
    Words const value = long_words;
    Words const error = fail(Errc::io, long_words);
    REQUIRE(value.has_value());
    CHECK(*value == long_words);
    REQUIRE_FALSE(error.has_value());
    CHECK(error.error() == Error{Errc::io, long_words});
    Words copy = error;
    Words moved = std::move(copy);
    REQUIRE_FALSE(moved.has_value());
    CHECK(moved.error() == error.error());
    REQUIRE(Words().has_value());
    CHECK(Words()->empty());
  }

  TEST_CASE("assignment goes between value and error in both directions") {
    Words const value = long_words;
    Words const error = fail(Errc::stale, long_words);
    Words result = value;
    result = error;
    REQUIRE_FALSE(result.has_value());
    CHECK(result.error().code == Errc::stale);
    result = Words(long_words + "!");
    REQUIRE(result.has_value());
    CHECK(*result == long_words + "!");
    auto const& same = result;
    result = same;
    REQUIRE(result.has_value());
    CHECK(result->size() == 101);
  }

  TEST_CASE("a result of what cannot be copied is moved, in a vector too") {
    std::vector<Owner> results;
    for (int i = 0; i < 8; ++i) results.emplace_back(std::make_unique<int>(i));
    results.emplace_back(fail(Errc::device, long_words));
    REQUIRE(results[7].has_value());
    CHECK(**results[7] == 7);
    REQUIRE_FALSE(results[8].has_value());
    CHECK(results[8].error().message.size() == 100);
    std::unique_ptr<int> const taken = *std::move(results[3]);
    CHECK(*taken == 3);
  }
}

}  // namespace
