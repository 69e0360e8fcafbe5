// SPDX-License-Identifier: AGPL-3.0-only
#include "victim_models.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <doctest/doctest.h>

#include "atlas/lora/pool/pool.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

constexpr SlotView idle(std::uint64_t uses, std::uint64_t tick, std::size_t bytes = 0) {
  return SlotView{SlotState::ready, true, 0, tick, uses, bytes};
}
constexpr SlotView leased(std::uint64_t uses, std::uint64_t tick) {
  return SlotView{SlotState::ready, false, 1, tick, uses, 0};
}

constexpr LeastFrequentlyUsed frequency;
static_assert(frequency(std::array{idle(3, 1), idle(1, 9), idle(2, 2)}) == 1U);
static_assert(frequency(std::array{idle(2, 7), idle(2, 4), idle(2, 9)}) == 1U, "of equals the oldest");
static_assert(frequency(std::array{leased(0, 1), idle(5, 2)}) == 1U);
static_assert(frequency(std::array{idle(0, 1), SlotView{}}) == 1U, "an empty slot costs nobody anything");
static_assert(frequency(std::array{leased(0, 1), leased(0, 2)}) == std::nullopt);
static_assert(frequency({}) == std::nullopt);

constexpr CheapestToReload cost{100};
// Costs at tick 10: (100 + 900) * 1 / 1 = 1000; (100 + 100) * 1 / 1 = 200.
static_assert(cost(std::array{idle(0, 10, 900), idle(0, 10, 100)}) == 1U, "the smaller of equally old ones");
// (100 + 100) * 1 / 1 = 200; (100 + 900) * 1 / 10 = 100.
static_assert(cost(std::array{idle(0, 10, 100), idle(0, 1, 900)}) == 1U, "a large one that nobody uses");
// (100 + 900) * 5 / 10 = 500; (100 + 100) * 1 / 1 = 200.
static_assert(cost(std::array{idle(4, 1, 900), idle(0, 10, 100)}) == 1U, "an often used one stays");
static_assert(cost(std::array{leased(0, 1), idle(9, 9, 900)}) == 1U);
static_assert(cost(std::array{idle(0, 1), SlotView{}}) == 1U);
static_assert(cost(std::array{leased(0, 1)}) == std::nullopt);
static_assert(cost({}) == std::nullopt);

template <class V>
std::string evicted_by(V victim, std::int32_t rank_of_a, int leases_of_a) {
  auto made =
      AdapterPool<float, HostBackend, V>::create(tiny_shape(), {.max_slots = 2, .max_rank = 64}, {}, victim);
  REQUIRE(made.has_value());
  load(*made, "a", tiny_adapter(made->shape(), 1, rank_of_a, {0}));
  step(*made);
  for (int i = 0; i < leases_of_a; ++i) acquire(*made, "a").release();
  load(*made, "b", tiny_adapter(made->shape(), 2, 8, {0}));
  step(*made);
  acquire(*made, "b").release();
  step(*made);
  load(*made, "c", tiny_adapter(made->shape(), 3, 8, {0}));
  return made->names() == std::vector<std::string>{"a"} ? "b" : "a";
}

TEST_CASE("a pool keeps the adapter that its policy prefers, and each of three prefers another") {
  CHECK(evicted_by(LruIdle{}, 8, 3) == "a");              // b was used last
  CHECK(evicted_by(LeastFrequentlyUsed{}, 8, 3) == "b");  // a was used more often
  CHECK(evicted_by(CheapestToReload{0}, 8, 1) == "a");    // as large, as often used, and older
  CHECK(evicted_by(CheapestToReload{0}, 64, 1) == "b");   // a is 8 times as large and 3 ticks old
}

}  // namespace
