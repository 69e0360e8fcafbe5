// SPDX-License-Identifier: AGPL-3.0-only
//
// A pool's ledger as an operator sees it.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/memory.hpp"
#include "atlas/lora/pool/slot.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/victim.hpp"

namespace atlas::lora::inline v0::detail {

/// What an operator sees of the ledger of a pool that took `memory`. The ledger's mutex is held.
[[nodiscard]] inline PoolSnapshot snapshot_of(SlotLedger const& ledger, MemoryNeeded const& memory) {
  PoolSnapshot all;
  all.memory = memory;
  all.loading = ledger.loading;
  all.spare = static_cast<std::int32_t>(ledger.free_places());
  all.counters = ledger.counters;
  all.counters.leases = ledger.leases_taken();
  all.slots.reserve(ledger.slots.size());
  for (std::int32_t i = 0; ledger.contains(i); ++i) {
    Slot const& slot = ledger.at(i);
    SlotView const view = ledger.view(i);
    SlotStatus& status = all.slots.emplace_back();
    status.state = view.state;
    status.bytes = view.bytes;
    status.leases = view.leases;
    status.last_use = view.last_use;
    status.uses = view.uses;
    status.pinned = ledger.is_pinned(i);
    for (auto const* const content : {&slot.staged, &slot.tenant}) {
      if (*content) all.content_bytes += (*content)->bytes;
    }
    auto const& shown = slot.staged ? slot.staged : slot.tenant;
    if (!shown) continue;
    status.name = shown->name;
    status.id = shown->id;
    status.generation = shown->generation;
    status.tenancy = shown->tenancy;
    status.rank = shown->rank;
    status.active = slot.named && slot.tenant->name == ledger.active;
  }
  return all;
}

}  // namespace atlas::lora::inline v0::detail
