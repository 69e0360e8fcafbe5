// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pack.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

constexpr bool rows_spread_to_their_stride() {
  std::array<float, 12> data{1, 2, 3, 4, 5, 6, 9, 9, 9, 9, 9, 9};
  detail::spread_rows<float>(data, 3, 2, 4);
  return data == std::array<float, 12>{1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0, 0};
}
static_assert(rows_spread_to_their_stride());

constexpr bool rows_without_gaps_stay() {
  std::array<float, 4> data{1, 2, 3, 4};
  detail::spread_rows<float>(data, 2, 2, 2);
  return data == std::array<float, 4>{1, 2, 3, 4};
}
static_assert(rows_without_gaps_stay());

constexpr bool a_single_row_gets_its_pads() {
  std::array<float, 8> data{1, 2, 3, 9, 9, 9, 9, 9};
  detail::spread_rows<float>(data, 1, 3, 8);
  return data == std::array<float, 8>{1, 2, 3, 0, 0, 0, 0, 0};
}
static_assert(a_single_row_gets_its_pads());

TEST_CASE("a pair is packed as A, then B at its padded rank, then the bias") {
  ModelShape const shape = tiny_shape();
  Adapter const adapter = tiny_adapter(shape, 1, 3, {4}, true);  // lm_head: k_in 3, n_out 7
  std::vector<float> out(3 * 3 + 7 * 8 + 7, -1.0F);
  auto const counts =
      detail::pack_pair<float>(adapter.pairs[0], shape.module(shape.sites()[4]), std::span(out), {});
  REQUIRE(counts.has_value());
  CHECK(*counts == ConversionCounts{});
  for (std::size_t i = 0; i < 9; ++i) CHECK(out[i] == element(1, 4, 0, i));
  for (std::size_t n = 0; n < 7; ++n) {
    for (std::size_t j = 0; j < 8; ++j)
      CHECK(out[9 + n * 8 + j] == (j < 3 ? element(1, 4, 1, n * 3 + j) : 0.0F));
    CHECK(out[9 + 56 + n] == element(1, 4, 2, n));
  }
  CHECK(detail::outline_of(adapter, shape, sizeof(float), {}, false).bytes == out.size() * sizeof(float));
}

struct Fault {
  char const* what;
  std::function<void(Adapter&)> plant;
  Errc code;
  char const* word;
};

std::vector<Fault> const faults{
    {"no digest", [](Adapter& a) { a.digest = {}; }, Errc::invalid_argument, "digest"},
    {"a layer too many", [](Adapter& a) { a.pairs[1].site.layer = 7; }, Errc::not_found, "layer 7"},
    {"no such module", [](Adapter& a) { a.pairs[1].site.module = -3; }, Errc::not_found, "module -3"},
    {"a site twice", [](Adapter& a) { a.pairs[1].site = a.pairs[0].site; }, Errc::invalid_argument, "twice"},
    {"order", [](Adapter& a) { std::swap(a.pairs[0], a.pairs[1]); }, Errc::invalid_argument, "order"},
    {"negative rank", [](Adapter& a) { a.pairs[0].rank = -1; }, Errc::invalid_argument, "rank is -1"},
    {"rank", [](Adapter& a) { a.pairs[0].rank = 17; }, Errc::rank_exceeds_pool,
     "rank 17 exceeds the pool's 16"},
    {"rank unlike A", [](Adapter& a) { a.pairs[0].rank = 9; }, Errc::shape_mismatch, "site 0.lora_A"},
    {"scale", [](Adapter& a) { a.pairs[0].scale = std::numeric_limits<float>::infinity(); },
     Errc::out_of_range, "scale"},
    {"A and B swapped", [](Adapter& a) { std::swap(a.pairs[0].a, a.pairs[0].b); }, Errc::shape_mismatch,
     "is not [8, 10]"},
    {"A of another width", [](Adapter& a) { a.pairs[0].a.shape[1] = 11; }, Errc::shape_mismatch,
     "site 0.lora_A"},
    {"three dimensions", [](Adapter& a) { a.pairs[0].a.shape.push_back(1); }, Errc::shape_mismatch,
     "site 0.lora_A"},
    {"B cut short", [](Adapter& a) { a.pairs[0].b.bytes.resize(8); }, Errc::shape_mismatch, "site 0.lora_B"},
    {"a bias", [](Adapter& a) { a.pairs[0].bias = tensor(1, 0, 2, {6}); }, Errc::unsupported,
     "site 0.lora_B.bias"},
    {"experts", [](Adapter& a) { a.experts.push_back({.a = tensor(1, 9, 0, {1}), .b = {}, .bias = {}}); },
     Errc::unsupported, "site 9"},
    {"a router", [](Adapter& a) { a.routers.push_back({.a = tensor(1, 9, 0, {1}), .b = {}, .bias = {}}); },
     Errc::unsupported, "site 9"},
    {"token rows", [](Adapter& a) { a.raw_overlay.head.table = tensor(1, 9, 0, {1}); }, Errc::unsupported,
     "site 9.lora_A': token rows that build_overlay has not built"},
};

TEST_CASE("an adapter that a pool cannot hold is refused by name and costs nothing") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .max_rank = 16}, backend);
  for (Fault const& fault : faults) {
    INFO(fault.what);
    Adapter adapter = tiny_adapter(pool.shape(), 1, 8, {0, 2, 4});
    fault.plant(adapter);
    auto const calls = backend.script().calls;
    auto const staged = pool.load("a", adapter);
    REQUIRE_FALSE(staged.has_value());
    CHECK(staged.error().code == fault.code);
    CHECK(staged.error().message.find(fault.word) != std::string::npos);
    CHECK(staged.error().message.find("adapter 'a'") != std::string::npos);
    CHECK(backend.script().calls == calls);
  }
  CHECK(pool.view(0).state == SlotState::empty);
  CHECK(load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0})).id == adapter_id("a"));  // no generation moved
}

TEST_CASE("all faults of an adapter are reported at once") {
  ModelShape const shape = tiny_shape();
  Adapter adapter = tiny_adapter(shape, 1, 8, {0, 2, 4});
  adapter.pairs[0].a.bytes.clear();
  adapter.pairs[1].scale = std::numeric_limits<float>::quiet_NaN();
  adapter.pairs[2].rank = 99;
  adapter.routers.push_back({.a = tensor(1, 9, 0, {1}), .b = {}, .bias = {}});
  auto const checked = detail::check_adapter("many", adapter, shape, 16, false, false);
  REQUIRE_FALSE(checked.has_value());
  CHECK(checked.error().code == Errc::shape_mismatch);
  for (char const* const word : {"site 0.lora_A", "layer 1 'q': scale", "rank 99", "site 9.lora_A"}) {
    CHECK(checked.error().message.find(word) != std::string::npos);
  }
}

TEST_CASE("an adapter with parts that a pool does not serve is loaded without them where that is asked for") {
  Pool pool = make_pool({.max_slots = 1, .max_rank = 16});
  Adapter adapter = tiny_adapter(pool.shape(), 1, 8, {0, 2});
  adapter.experts.push_back({.a = tensor(1, 9, 0, {1}), .b = {}, .bias = {}});
  load(pool, "a", adapter, {.packing = {.leave_out_unserved = true}});
  step(pool);
  CHECK(slot_holds(pool, acquire(pool, "a").slot(), &adapter));
}

TEST_CASE("a name that no adapter may have is refused") {
  Pool pool = make_pool({.max_slots = 1, .max_rank = 16});
  for (std::string const& name : {std::string(), std::string("a\n"), std::string(257, 'a')}) {
    CHECK(code(pool.load(name, tiny_adapter(pool.shape(), 1, 8, {0}))) == Errc::invalid_argument);
  }
}

}  // namespace
