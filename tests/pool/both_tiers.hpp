// SPDX-License-Identifier: AGPL-3.0-only
//
// One adapter in both tiers: packed in pinned host memory, and from there in a pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <string_view>

#include <doctest/doctest.h>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/host_tier.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace atlas_test {

/// Gives every name one adapter.
struct OneAdapter {
  Adapter adapter;
  Result<Adapter> operator()(std::string_view, std::stop_token const&) const noexcept { return adapter; }
};

/// A tier of 64 KiB in such blocks.
template <Element T>
HostTier<T, OneAdapter> tier_of(ModelShape const& shape, Adapter const& adapter, std::size_t block_bytes,
                                PackOptions const& packing = {}) {
  auto const arena = PinnedArena::create(HostBackend{}, 64 << 10, block_bytes);
  REQUIRE(arena.has_value());
  return HostTier<T, OneAdapter>(shape, *arena, OneAdapter{adapter}, packing);
}

/// Promotes "a" again and again while one call after the other of the device fails; returns how many failed
/// before one promotion went through.
template <Element T>
int promote_through_faults(AdapterPool<T, ScriptedBackend>& pool, HostTier<T, OneAdapter>& tier,
                           ScriptedBackend& backend) {
  for (int failures = 0; failures < 1000; ++failures) {
    arm(backend, failures);
    auto const staged = promote(pool, tier, "a");
    if (!disarm(backend)) {
      CHECK(staged.has_value());
      return failures;
    }
    REQUIRE_FALSE(staged.has_value());
    CHECK(staged.error().code == Errc::device);
  }
  FAIL("every call of a promotion failed");
  return 0;
}

}  // namespace atlas_test
