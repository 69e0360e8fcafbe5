// SPDX-License-Identifier: AGPL-3.0-only
//
// Which slot a load goes into, as a pool's ledger stands.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

/// The slot into which content for `name` goes: its own where nobody reads it, else an empty or idle one of
/// the same region. Errors: `pool_full`, or what says that no wait can help. The
/// ledger's mutex is held.
template <VictimPolicy V>
[[nodiscard]] Result<std::int32_t> choose_slot(SlotLedger const& ledger, std::string_view name, bool pinned,
                                               V const& victim) {
  auto const is_pinned = [&](std::int32_t slot) { return slot != base_slot && ledger.is_pinned(slot); };
  std::int32_t const waiting = ledger.staged(name);
  std::int32_t const resident = ledger.published(name);
  bool const into_pinned = pinned || is_pinned(waiting) || is_pinned(resident);
  for (std::int32_t const own : {waiting, resident}) {
    if (own != base_slot && is_pinned(own) == into_pinned && ledger.unread(ledger.at(own))) return own;
  }
  std::int32_t const first = into_pinned ? 0 : ledger.pinned();
  std::int32_t const last = into_pinned ? ledger.pinned() : static_cast<std::int32_t>(ledger.slots.size());
  if (first == last) {
    return fail(Errc::invalid_argument, SlotLedger::quoted(name) + ": the pool has " +
                                            (into_pinned ? "no" : "only") + " pinned slots");
  }
  std::vector<SlotView> views;
  bool changes = false;  // whether a slot is on its way to being free
  for (std::int32_t slot = first; slot < last; ++slot) {
    views.push_back(ledger.view(slot));
    if (into_pinned) views.back().idle = false;  // never evicted
    changes = changes || views.back().state == SlotState::draining || slot == resident || slot == waiting;
  }
  std::optional<std::uint32_t> const chosen = into_pinned ? LruIdle{}(views) : victim(views);
  if (chosen && *chosen < views.size() && (views[*chosen].state == SlotState::empty || views[*chosen].idle)) {
    return first + static_cast<std::int32_t>(*chosen);
  }
  std::string const all = SlotLedger::quoted(name) + ": all " + std::to_string(views.size());
  if (into_pinned && !changes) {
    return fail(Errc::out_of_memory, all + " pinned slots are taken, and pinned adapters are never evicted");
  }
  return fail(Errc::pool_full, all + (into_pinned ? " pinned" : "") + " slots are in use");
}

}  // namespace atlas::lora::inline v0::detail
