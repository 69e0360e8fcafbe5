// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/identity.hpp"

#include <string>
#include <string_view>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;
using namespace std::string_view_literals;

static_assert(adapter_id("sparky") == 0x582352aca69bb7a9 && adapter_id("sparky", 1) == 0x71723ddf83013ca8 &&
              adapter_id("sparky", 2) == 0xce6292faa3cf1b0b);
static_assert(adapter_id("vega") == 0x66fdea01023ff308 && adapter_id("vega", 1) == 0x5c5c984b05e5ee29 &&
              adapter_id("vega", 2) == 0x7b575f5410d5384a);
static_assert(adapter_id("alpha") == 0x8ac625bb85ed202b && adapter_id("alpha", 1) == 0x161b24ff7a13496a &&
              adapter_id("alpha", 2) == 0xf7205df66f23ff49);
static_assert(adapter_id("beta") == 0x7627619b954620a7 && adapter_id("beta", 1) == 0xea53d7c97a743166 &&
              adapter_id("beta", 2) == 0xcb5910c06f84e745);
static_assert(adapter_id("sol") == 0x824fa3195cf2e6c1 && adapter_id("sol", 1) == 0x0121fbac1f433ec0 &&
              adapter_id("sol", 2) == 0x5e1250c740111d23);
static_assert(adapter_id("") == 0xcbf29ce484222325 && adapter_id("", 1) == 0x89cd31291d2aefa4 &&
              adapter_id("", 2) == 0xe6bd86443df8ce07);
static_assert(adapter_id("a") == 0xaf63dc4c8601ec8c);
static_assert(adapter_id("\xc3\xa9") ==
                  ((0xcbf29ce484222325U ^ 0xc3U) * 0x100000001b3U ^ 0xa9U) * 0x100000001b3U,
              "bytes above 0x7f are not sign-extended");

// A generation's bytes could be spelled by a longer name, if names could have control bytes.
static_assert(adapter_id("a", 1) == adapter_id("a\x01\0\0\0\0\0\0\0"sv));
static_assert(!valid_name("a\x01\0\0\0\0\0\0\0"sv));

static_assert(valid_name("a") && valid_name("summarise: v2 / de") && valid_name("\xc3\xa9t\xc3\xa9"));
static_assert(!valid_name("") && !valid_name("a\n") && !valid_name("\x1f") && !valid_name("\x7f") &&
              !valid_name("\0"sv));

constexpr Digest first{1, 0};
constexpr Digest second{2, 0};

std::uint64_t identify(NameRegistry& registry, std::string_view name, Digest const& digest) {
  auto const id = registry.identify(name, digest);
  REQUIRE(id.has_value());
  return *id;
}

TEST_CASE("an id moves with the content of its name and with nothing else") {
  NameRegistry registry;
  std::uint64_t const id1 = identify(registry, "t", first);
  std::uint64_t const id2 = identify(registry, "t", second);
  std::uint64_t const id3 = identify(registry, "t", second);
  std::uint64_t const id4 = identify(registry, "t", first);
  CHECK(id1 == adapter_id("t", 0));
  CHECK(id2 == adapter_id("t", 1));
  CHECK(id3 == id2);
  CHECK(id4 == adapter_id("t", 2));
  CHECK(id4 != id1);
  CHECK(base_id == 0);
}

TEST_CASE("both halves of a digest count") {
  NameRegistry registry;
  std::uint64_t const id = identify(registry, "t", Digest{1, 1});
  CHECK(identify(registry, "t", Digest{1, 2}) != id);
  CHECK(identify(registry, "t", Digest{2, 2}) == adapter_id("t", 2));
}

TEST_CASE("the same content under two names has two ids, and neither moves the other") {
  NameRegistry registry;
  std::uint64_t const a = identify(registry, "a", first);
  std::uint64_t const ab = identify(registry, "ab", first);
  CHECK(a != ab);
  static_cast<void>(identify(registry, "ab", second));
  CHECK(identify(registry, "a", first) == a);
}

TEST_CASE("two names whose hashes collide have different ids") {
  // Two strings that FNV-1a maps to 0x4eac0c95540867e4.
  constexpr std::string_view one = "8yn0iYCKYHlIj4-BwPqk";
  constexpr std::string_view other = "GReLUrM4wMqfg9yzV3KQ";
  static_assert(adapter_id(one) == adapter_id(other) && adapter_id(one, 1) == adapter_id(other, 1));
  NameRegistry registry;
  CHECK(identify(registry, one, first) == adapter_id(one, 0));
  CHECK(identify(registry, other, first) == adapter_id(other, 1));
  CHECK(identify(registry, other, first) == adapter_id(other, 1));
  CHECK(identify(registry, one, second) == adapter_id(one, 2));
}

TEST_CASE("names that are empty, too long or hold control bytes are refused") {
  NameRegistry registry;
  for (std::string const& name : {std::string(), std::string("a\tb"), std::string("a\0b", 3),
                                  std::string("\x7f"), std::string(longest_name + 1, 'a')}) {
    auto const id = registry.identify(name, first);
    REQUIRE_FALSE(id.has_value());
    CHECK(id.error().code == Errc::invalid_argument);
  }
  CHECK(registry.identify(std::string(longest_name, 'a'), first).has_value());
}

}  // namespace
