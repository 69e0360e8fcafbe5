// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/victim.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;

constexpr SlotView filled(std::int32_t leases, std::uint64_t tick) {
  return SlotView{SlotState::ready, leases == 0, leases, tick, 0, 0};
}
constexpr SlotView empty(std::uint64_t tick = 0) { return SlotView{SlotState::empty, false, 0, tick, 0, 0}; }

template <std::size_t N>
constexpr std::optional<std::uint32_t> victim(std::array<SlotView, N> const& views) {
  return LruIdle{}(std::span<SlotView const>(views));
}

// Indices are into the cache region, which begins at slot 2 in the reference's table.
static_assert(victim(std::array{filled(0, 1), empty(0), filled(0, 9)}) == 1U);
static_assert(victim(std::array{filled(0, 1), empty(99), filled(0, 9)}) == 1U);
static_assert(victim(std::array{filled(0, 50), filled(1, 5), filled(0, 12)}) == 2U);
static_assert(victim(std::array{filled(1, 1), filled(2, 2)}) == std::nullopt);
static_assert(victim(std::array{filled(3, 1), empty(), filled(7, 2)}) == 1U);
static_assert(victim(std::array{filled(3, 1), filled(0, 8), filled(7, 2)}) == 1U);
static_assert(LruIdle{}(std::span<SlotView const>()) == std::nullopt);

static_assert(victim(std::array{filled(0, 4), filled(0, 4)}) == 0U, "the first of equals");
static_assert(victim(std::array{filled(0, 9), empty(), empty()}) == 1U, "the first empty one");

constexpr SlotView in_state(SlotState state) { return SlotView{state, false, 0, 0, 0, 0}; }
static_assert(victim(std::array{in_state(SlotState::loading), in_state(SlotState::staged),
                                in_state(SlotState::draining), in_state(SlotState::ready)}) == std::nullopt,
              "only empty and idle slots give way");

struct NotNoexcept {
  std::optional<std::uint32_t> operator()(std::span<SlotView const>) const { return {}; }
};
static_assert(VictimPolicy<LruIdle> && !VictimPolicy<NotNoexcept> && !VictimPolicy<int>);

TEST_CASE("the slot that was used longest ago gives way, wherever it stands") {
  for (std::size_t oldest = 0; oldest < 4; ++oldest) {
    std::array<SlotView, 4> views{filled(0, 10), filled(0, 11), filled(0, 12), filled(0, 13)};
    views[oldest].last_use = 1;
    CHECK(victim(views) == static_cast<std::uint32_t>(oldest));
  }
}

}  // namespace
