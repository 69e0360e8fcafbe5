// SPDX-License-Identifier: AGPL-3.0-only
//
// Measurement levers: steps that leave deltas out while everything else, residency and leases too, goes on.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/pool/identity.hpp"

namespace atlas::lora::inline v0 {

/// What one step applies. The engine sets it for each step; nothing reads it from an environment.
///
/// It works through row slots: `resolve_slots` with `RouteContext::apply` unset makes every row base, with
/// the verdicts that it would have had. Every launch that reads those rows, or a plan of them, then adds
/// nothing, eager or in a graph captured before, and a later step applies again. Modules on which the levers
/// differ need row slots and a plan of their own: an engine that offers `apply_ffn` gives the modules with
/// `Module::ffn` a second plan over the same rows, and resolves it with `applies`. Without one, or for a
/// single pair that goes to all rows, the launch is left out instead, which a captured graph cannot follow.
struct StepLevers {
  bool apply = true;      ///< false: no delta at all
  bool apply_ffn = true;  ///< false: no delta of modules with `Module::ffn`

  /// Whether the step applies the deltas of `module`.
  [[nodiscard]] constexpr bool applies(Module const& module) const noexcept {
    return apply && (apply_ffn || !module.ffn);
  }

  friend constexpr bool operator==(StepLevers const&, StepLevers const&) = default;
};

/// What keys a prefix cache in steps under `levers`: `id` itself when they leave nothing out, and else an id
/// of its own, so that no other step finds what such a step cached. Base stays base.
[[nodiscard]] constexpr std::uint64_t levered_id(std::uint64_t id, StepLevers levers) noexcept {
  if (id == base_id || levers == StepLevers{}) return id;
  std::uint64_t const left_out = levers.apply ? 1 : 2;  // without `apply`, `apply_ffn` changes nothing
  std::uint64_t const hash = (id ^ left_out) * 0x100000001b3U;  // a step of `adapter_id`'s hash
  return hash == base_id ? 1 : hash;
}

}  // namespace atlas::lora::inline v0
