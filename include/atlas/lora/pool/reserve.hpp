// SPDX-License-Identifier: AGPL-3.0-only
//
// Memory for the experts and token rows of a load, for which idle adapters give way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/expert_arena.hpp"
#include "atlas/lora/pool/overlay_memory.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Evicts idle adapters of the cache region whose physical slot `holds(place)` says to hold what is needed,
/// in the order of `victim`, until `fits(place)`, which is called with the place of each, says that it is
/// enough; never the one under `name`, which a failing load must not lose. Returns whether it was; if not,
/// nobody has left. The ledger's mutex is held.
template <VictimPolicy V, class Holds, class Fits>
[[nodiscard]] bool evict_until(SlotLedger& ledger, std::string_view name, V const& victim, Holds const& holds,
                               Fits const& fits) {
  std::vector<SlotView> views;
  for (std::int32_t slot = 0; ledger.contains(slot); ++slot) {
    SlotView& view = views.emplace_back(ledger.view(slot));
    view.idle = view.idle && !ledger.is_pinned(slot) && ledger.published(name) != slot &&
                holds(ledger.at(slot).tenant->place);
    if (!view.idle) view.state = SlotState::draining;  // an empty one gives no memory
  }
  std::vector<std::int32_t> leaving;
  bool enough = false;
  while (!enough) {
    auto const chosen = victim(views);
    if (!chosen || *chosen >= views.size() || !views[*chosen].idle) break;
    auto const slot = static_cast<std::int32_t>(*chosen);
    views[*chosen].idle = false;
    views[*chosen].state = SlotState::draining;
    if (!ledger.claim(ledger.at(slot))) continue;  // somebody has leased it meanwhile
    leaving.push_back(slot);
    enough = fits(ledger.at(slot).tenant->place);
  }
  for (std::int32_t const slot : leaving) {
    if (enough) {
      ledger.evict(slot);
    } else {
      ledger.at(slot).gate.reopen();  // it was idle, so it was open
    }
  }
  return enough;
}

/// Gives physical slot `place` a block of each of `sizes`, for which idle adapters give way. Errors:
/// `expert_memory_busy` as long as they can ever fit, else `out_of_memory`. The ledger's mutex is held.
template <VictimPolicy V>
[[nodiscard]] Result<void> reserve_experts(SlotLedger& ledger, std::string_view name, std::int32_t place,
                                           std::span<std::size_t const> sizes, V const& victim) {
  if (sizes.empty()) return {};
  ExpertArena trial = ledger.experts;
  bool const fits =
      trial.allocate(sizes).has_value() ||
      evict_until(
          ledger, name, victim, [&](std::int32_t other) { return !ledger.expert_blocks(other).empty(); },
          [&](std::int32_t other) {
            trial.release(ledger.expert_blocks(other));
            return trial.allocate(sizes).has_value();
          });
  if (!fits) {
    bool const ever = ledger.experts.emptied().allocate(sizes).has_value();
    return fail(ever ? Errc::expert_memory_busy : Errc::out_of_memory,
                SlotLedger::quoted(name) + (ever ? ": the memory for experts is held by adapters in use"
                                                 : ": its experts exceed the pool's memory for experts"));
  }
  ledger.hold_experts(place, *ledger.experts.allocate(sizes));  // fits, for the trial did
  return {};
}

/// Gives physical slot `place` a block of `bytes`, which can ever fit, for token rows, likewise. Errors:
/// `overlay_memory_busy`. The ledger's mutex is held.
template <VictimPolicy V>
[[nodiscard]] Result<void> reserve_overlay(SlotLedger& ledger, std::string_view name, std::int32_t place,
                                           std::size_t bytes, V const& victim) {
  auto const is_spare = [&](std::int32_t other) { return ledger.is_spare(other); };
  if (ledger.overlays.take(place, bytes, is_spare)) return {};
  std::vector<std::int32_t> leaving;
  bool const fits = evict_until(
      ledger, name, victim, [&](std::int32_t other) { return ledger.overlays.holds(other); },
      [&](std::int32_t other) {
        leaving.push_back(other);
        return ledger.overlays.fits(bytes, [&](std::int32_t one) {
          return is_spare(one) || std::find(leaving.begin(), leaving.end(), one) != leaving.end();
        });
      });
  if (!fits || !ledger.overlays.take(place, bytes, is_spare)) {
    return fail(Errc::overlay_memory_busy, SlotLedger::quoted(name) + ": token rows of " +
                                               std::to_string(bytes) +
                                               " bytes do not fit beside those in use");
  }
  return {};
}

}  // namespace atlas::lora::inline v0::detail
