// SPDX-License-Identifier: AGPL-3.0-only
//
// A policy says what becomes of a request, not only where it goes.
// EXPECT: RoutePolicy
// EXPECT: constraint
#include "atlas/lora/route/policy.hpp"

struct SlotOnly {
  constexpr std::int32_t operator()(atlas::lora::Selector, atlas::lora::RouteContext const&) const noexcept {
    return 0;
  }
};

void route(std::span<atlas::lora::Selector const> selectors, std::span<std::int32_t> slots) {
  static_cast<void>(atlas::lora::resolve_slots(SlotOnly{}, selectors, {}, slots));
}
