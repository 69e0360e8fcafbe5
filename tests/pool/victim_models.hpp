// SPDX-License-Identifier: AGPL-3.0-only
//
// Two victim policies that an engine might write, as examples of the concept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "atlas/lora/pool/victim.hpp"

namespace atlas_test {

using atlas::lora::SlotState;
using atlas::lora::SlotView;

/// The first empty slot; else the idle one that was leased least often in its tenancy, of equals the one that
/// was used longest ago; else none.
struct LeastFrequentlyUsed {
  [[nodiscard]] constexpr std::optional<std::uint32_t> operator()(
      std::span<SlotView const> views) const noexcept {
    std::optional<std::uint32_t> least;
    for (std::uint32_t i = 0; i < views.size(); ++i) {
      if (views[i].state == SlotState::empty) return i;
      if (!views[i].idle) continue;
      if (!least || less(views[i], views[*least])) least = i;
    }
    return least;
  }

 private:
  static constexpr bool less(SlotView const& a, SlotView const& b) noexcept {
    return a.uses != b.uses ? a.uses < b.uses : a.last_use < b.last_use;
  }
};
static_assert(atlas::lora::VictimPolicy<LeastFrequentlyUsed>);

/// The first empty slot; else the idle one whose loss costs least: the bytes that bringing it back would
/// copy, times how often it was used for each tick that it has not been used since. A base cost stands for
/// what every load costs, however small. Of equals the first; else none.
struct CheapestToReload {
  std::size_t base_bytes = 1 << 20;

  [[nodiscard]] constexpr std::optional<std::uint32_t> operator()(
      std::span<SlotView const> views) const noexcept {
    std::uint64_t now = 0;
    for (SlotView const& view : views) now = view.last_use > now ? view.last_use : now;
    std::optional<std::uint32_t> cheapest;
    for (std::uint32_t i = 0; i < views.size(); ++i) {
      if (views[i].state == SlotState::empty) return i;
      if (!views[i].idle) continue;
      if (!cheapest || cost(views[i], now) < cost(views[*cheapest], now)) cheapest = i;
    }
    return cheapest;
  }

 private:
  constexpr double cost(SlotView const& view, std::uint64_t now) const noexcept {
    double const bytes = static_cast<double>(base_bytes) + static_cast<double>(view.bytes);
    double const age = static_cast<double>(now - view.last_use + 1);
    return bytes * static_cast<double>(view.uses + 1) / age;
  }
};
static_assert(atlas::lora::VictimPolicy<CheapestToReload>);

}  // namespace atlas_test
