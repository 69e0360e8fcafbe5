// SPDX-License-Identifier: AGPL-3.0-only
//
// Which slot of a cache gives way to a new adapter.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

/// Where a slot stands. `AdapterPool` chooses a slot when a load has packed its adapter, so none of its slots
/// is ever `loading`; a pool that chooses first has them.
enum class SlotState : std::uint8_t {
  empty,     ///< no adapter
  loading,   ///< chosen by a load that is not done
  staged,    ///< an adapter is packed and waits for its record to be published
  ready,     ///< an adapter can be leased by name
  draining,  ///< its adapter lost its name, or left, and work may still read it
};

/// What a victim policy sees of a slot.
struct SlotView {
  SlotState state = SlotState::empty;  ///< where the slot stands
  /// Ready, and may be taken: no lease, all work of earlier ones done, and not the active adapter.
  bool idle = false;
  std::int32_t leases = 0;     ///< held now
  std::uint64_t last_use = 0;  ///< the pool's tick when it was last leased or published; larger is later
  std::uint64_t uses = 0;      ///< leases taken in this tenancy
  std::size_t bytes = 0;       ///< of A, B and bias as packed
};

/// Which slot gives way: `policy(views)` is an index into `views`, which are the slots that may be taken in
/// slot order, or none when all are in use. A pool takes only a slot that is empty or idle, whatever the
/// policy says. It is called with the pool's lock held, so it calls nothing of the pool.
template <class P> concept VictimPolicy = requires(P const policy, std::span<SlotView const> views) {
  { policy(views) }
  noexcept->std::same_as<std::optional<std::uint32_t>>;
};

/// The first empty slot; else the idle one that was used longest ago, the first of equals; else none.
struct LruIdle {
  /// O(views), without an allocation.
  [[nodiscard]] constexpr std::optional<std::uint32_t> operator()(
      std::span<SlotView const> views) const noexcept {
    // Without a branch for each slot, since which are idle is as good as random, and in two chains, which a
    // processor follows at one time.
    Oldest even;
    Oldest odd;
    auto const size = static_cast<std::uint32_t>(views.size());
    std::uint32_t i = 0;
    for (; i + 1 < size; i += 2) {
      if (views[i].state == SlotState::empty) return i;
      if (views[i + 1].state == SlotState::empty) return i + 1;
      even.offer(views[i], i);
      odd.offer(views[i + 1], i + 1);
    }
    if (i < size) {
      if (views[i].state == SlotState::empty) return i;
      even.offer(views[i], i);
    }
    bool const is_odd = odd.use != even.use ? odd.use < even.use : odd.slot < even.slot;
    Oldest const& oldest = is_odd ? odd : even;
    return oldest.use == Oldest::never ? std::nullopt : std::optional(oldest.slot);
  }

 private:
  struct Oldest {
    static constexpr std::uint64_t never = ~std::uint64_t{0};  // beyond any tick
    std::uint64_t use = never;
    std::uint32_t slot = 0;

    constexpr void offer(SlotView const& view, std::uint32_t index) noexcept {
      std::uint64_t const own = view.last_use | (std::uint64_t{view.idle} - 1);  // never, unless it is idle
      slot = own < use ? index : slot;
      use = std::min(own, use);
    }
  };
};
static_assert(VictimPolicy<LruIdle>);

}  // namespace atlas::lora::inline v0
