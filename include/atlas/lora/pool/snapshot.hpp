// SPDX-License-Identifier: AGPL-3.0-only
//
// What an operator sees of a pool: its slots, its bytes, and what it has done so far.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/pool/memory.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What a pool has done since it was created. Counts only grow.
struct PoolCounters {
  std::uint64_t loads = 0;         ///< contents packed and staged
  std::uint64_t hits = 0;          ///< loads whose content was there already
  std::uint64_t leases = 0;        ///< leases on adapters; base's are not counted
  std::uint64_t publications = 0;  ///< contents that became what their name finds
  std::uint64_t evictions = 0;     ///< adapters that left because a load needed their slot
  std::uint64_t unloads = 0;       ///< adapters that were taken out by name
  /// Calls of `load`, `unload`, `acquire`, `acquire_active`, `set_active`, `begin_step` and `end_step` that
  /// failed, by code.
  std::array<std::uint64_t, static_cast<std::size_t>(Errc::cancelled) + 1> refusals{};

  /// Those with this code.
  [[nodiscard]] constexpr std::uint64_t refused(Errc code) const noexcept {
    auto const index = static_cast<std::size_t>(code);
    return index < refusals.size() ? refusals[index] : 0;
  }

  friend bool operator==(PoolCounters const&, PoolCounters const&) = default;
};

/// One slot. Where content is staged, it is what is described; else the content that the slot's record
/// speaks of.
struct SlotStatus {
  SlotState state = SlotState::empty;  ///< where the slot stands
  std::string name;                    ///< empty when the slot holds nothing
  std::uint64_t id = base_id;          ///< what a prefix cache is keyed by
  std::uint64_t generation = 0;        ///< how often content under the name has changed
  std::uint64_t tenancy = 0;           ///< of the key that it is acquired by
  std::int32_t rank = 0;               ///< largest rank of its pairs
  std::size_t bytes = 0;               ///< of A, B and bias as packed
  std::int32_t leases = 0;             ///< on what the record speaks of
  std::uint64_t last_use = 0;  ///< the pool's tick when it was last leased or published; larger is later
  std::uint64_t uses = 0;      ///< leases taken in this tenancy
  bool pinned = false;         ///< in the region that is never evicted
  bool active = false;         ///< the active adapter's

  friend bool operator==(SlotStatus const&, SlotStatus const&) = default;
};

/// A pool at one moment; which steps are done is as of the last load or step.
struct PoolSnapshot {
  std::vector<SlotStatus> slots;  ///< `[max_slots]`
  MemoryNeeded memory;            ///< what the pool took when it was created
  std::size_t content_bytes = 0;  ///< of all contents as packed: published, staged and draining
  std::int32_t loading = 0;       ///< loads that are packing now
  std::int32_t spare = 0;         ///< physical slots that a load can take now
  PoolCounters counters;          ///< since the pool was made

  friend bool operator==(PoolSnapshot const&, PoolSnapshot const&) = default;
};

}  // namespace atlas::lora::inline v0
