// SPDX-License-Identifier: AGPL-3.0-only
//
// Memory for the experts of a load, for which idle adapters give way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/expert_arena.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Gives physical slot `place` a block of each of `sizes`. While they do not fit, idle adapters of the cache
/// region that hold such memory leave, in the order of `victim`; never the one under `name`, which a failing
/// load must not lose. Nobody leaves unless it then fits. The ledger's mutex is held. Errors:
/// `expert_memory_busy` as long as it can ever fit, else `out_of_memory`.
template <VictimPolicy V>
[[nodiscard]] Result<void> reserve_experts(SlotLedger& ledger, std::string_view name, std::int32_t place,
                                           std::span<std::size_t const> sizes, V const& victim) {
  if (sizes.empty()) return {};
  ExpertArena trial = ledger.experts;
  std::vector<SlotView> views;
  for (std::int32_t slot = 0; ledger.contains(slot); ++slot) {
    SlotView& view = views.emplace_back(ledger.view(slot));
    view.idle = view.idle && !ledger.is_pinned(slot) && ledger.published(name) != slot &&
                !ledger.expert_blocks(ledger.at(slot).tenant->place).empty();
    if (!view.idle) view.state = SlotState::draining;  // an empty one gives no memory
  }
  std::vector<std::int32_t> leaving;
  auto blocks = trial.allocate(sizes);
  while (!blocks) {
    auto const chosen = victim(views);
    if (!chosen || *chosen >= views.size() || !views[*chosen].idle) break;
    auto const slot = static_cast<std::int32_t>(*chosen);
    views[*chosen].idle = false;
    views[*chosen].state = SlotState::draining;
    if (!ledger.claim(ledger.at(slot))) continue;  // somebody has leased it meanwhile
    leaving.push_back(slot);
    trial.release(ledger.expert_blocks(ledger.at(slot).tenant->place));
    blocks = trial.allocate(sizes);
  }
  if (!blocks) {
    for (std::int32_t const slot : leaving) ledger.at(slot).gate.reopen();  // it was idle, so it was open
    bool const ever = ledger.experts.emptied().allocate(sizes).has_value();
    return fail(ever ? Errc::expert_memory_busy : Errc::out_of_memory,
                SlotLedger::quoted(name) + (ever ? ": the memory for experts is held by adapters in use"
                                                 : ": its experts exceed the pool's memory for experts"));
  }
  for (std::int32_t const slot : leaving) ledger.evict(slot);
  ledger.hold_experts(place, *ledger.experts.allocate(sizes));  // fits, for the trial did
  return {};
}

}  // namespace atlas::lora::inline v0::detail
