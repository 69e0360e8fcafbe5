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
  SlotState state = SlotState::empty;
  /// Ready, and may be taken: no lease, all work of earlier ones done, and not the active adapter.
  bool idle = false;
  std::int64_t leases = 0;
  std::uint64_t last_use = 0;  ///< the pool's tick when it was last leased or published; larger is later
  std::uint64_t uses = 0;      ///< leases taken in this tenancy
  std::size_t bytes = 0;       ///< of A, B and bias as packed
};

/// Which slot gives way: `policy(views)` is an index into `views`, which are the slots that may be taken in
/// slot order, or none when all are in use. A pool takes only a slot that is empty or idle, whatever the
/// policy says.
template <class P> concept VictimPolicy = requires(P const policy, std::span<SlotView const> views) {
  { policy(views) }
  noexcept->std::same_as<std::optional<std::uint32_t>>;
};

/// The first empty slot; else the idle one that was used longest ago, the first of equals; else none.
struct LruIdle {
  [[nodiscard]] constexpr std::optional<std::uint32_t> operator()(
      std::span<SlotView const> views) const noexcept {
    constexpr std::uint64_t never = ~std::uint64_t{0};  // beyond any tick
    std::uint64_t oldest_use = never;
    std::uint32_t oldest = 0;
    for (std::uint32_t i = 0; i < views.size(); ++i) {
      SlotView const& view = views[i];
      if (view.state == SlotState::empty) return i;
      // Without a branch: which slots are idle is as good as random.
      std::uint64_t const use = view.idle ? view.last_use : never;
      oldest = use < oldest_use ? i : oldest;
      oldest_use = std::min(use, oldest_use);
    }
    return oldest_use == never ? std::nullopt : std::optional(oldest);
  }
};
static_assert(VictimPolicy<LruIdle>);

}  // namespace atlas::lora::inline v0
