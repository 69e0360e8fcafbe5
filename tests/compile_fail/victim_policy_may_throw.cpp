// SPDX-License-Identifier: AGPL-3.0-only
//
// The pool calls its victim policy where nothing may throw.
// EXPECT: VictimPolicy
// EXPECT: noexcept
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "atlas/lora/pool/victim.hpp"

struct Throwing {
  std::optional<std::uint32_t> operator()(std::span<atlas::lora::SlotView const>) const { return 0U; }
};
using Pool = atlas::lora::AdapterPool<float, atlas::lora::HostBackend, Throwing>;
