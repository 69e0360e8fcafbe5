// SPDX-License-Identifier: AGPL-3.0-only
//
// What a request asks for, and what a policy makes of it: requests -> one slot per sequence.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <cuda/std/expected>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// What one request asks for: no adapter, whichever is active, or a slot. Three things with three spellings;
/// a default-constructed selector is base.
class Selector {
 public:
  /// What is asked for.
  enum class Kind : std::uint8_t { base, active, slot };

  constexpr Selector() noexcept = default;
  /// No adapter.
  [[nodiscard]] static constexpr Selector base() noexcept { return {}; }
  /// Whichever adapter is active when the step is built.
  [[nodiscard]] static constexpr Selector active() noexcept { return Selector(Kind::active, base_slot); }
  /// The adapter in slot `index`.
  [[nodiscard]] static constexpr Selector slot(std::int32_t index) noexcept {
    return Selector(Kind::slot, index);
  }

  /// Which of the three it is.
  [[nodiscard]] constexpr Kind kind() const noexcept { return kind_; }
  /// The slot asked for; `base_slot` unless `kind()` is `Kind::slot`.
  [[nodiscard]] constexpr std::int32_t index() const noexcept { return index_; }

  friend constexpr bool operator==(Selector const&, Selector const&) = default;

 private:
  constexpr Selector(Kind kind, std::int32_t index) noexcept : kind_(kind), index_(index) {}

  Kind kind_ = Kind::base;
  std::int32_t index_ = base_slot;
};

/// What a policy knows of the step.
struct RouteContext {
  std::int32_t active = base_slot;  ///< slot of the active adapter; negative when none is
  std::int32_t max_slots = 0;       ///< slots `>= max_slots` hold no adapter
  bool has_delta = true;            ///< whether the operation that is routed has any delta at all
  bool apply = true;                ///< false: every row is base, whatever the verdict; see `StepLevers`

  /// Whether `slot` can hold an adapter.
  [[nodiscard]] constexpr bool contains(std::int32_t slot) const noexcept {
    return slot >= 0 && slot < max_slots;
  }
};

/// Whether a request's delta is applied, left out because it asked for base, or cannot be served.
enum class RouteVerdict : std::uint8_t { fold, skip, refuse };

/// What a policy decides for one request. `slot` is the row slot to use: negative unless the verdict is
/// `fold`, so that a refused request that leaks into a batch gets base.
struct RouteDecision {
  RouteVerdict verdict = RouteVerdict::skip;  ///< what becomes of the request's delta
  std::int32_t slot = base_slot;              ///< the row slot to use

  friend constexpr bool operator==(RouteDecision const&, RouteDecision const&) = default;
};

/// What a request's selector means: `policy(selector, context)` is a `RouteDecision`.
template <class P>
concept RoutePolicy = requires(P const policy, Selector selector, RouteContext const context) {
  { policy(selector, context) }
  noexcept->std::same_as<RouteDecision>;
};

namespace detail {
constexpr RouteDecision fold_or_skip(std::int32_t slot, RouteContext const& context) noexcept {
  return context.contains(slot) ? RouteDecision{RouteVerdict::fold, slot} : RouteDecision{};
}
constexpr RouteDecision fold_or_refuse(std::int32_t slot, RouteContext const& context) noexcept {
  return context.contains(slot) ? RouteDecision{RouteVerdict::fold, slot}
                                : RouteDecision{RouteVerdict::refuse, base_slot};
}
}  // namespace detail

/// Every request its own: base is base, active is the active adapter (base when none is), a slot is that
/// slot, refused when it is out of range.
struct PerRequest {
  /// What `selector` means in `context`.
  [[nodiscard]] constexpr RouteDecision operator()(Selector selector,
                                                   RouteContext const& context) const noexcept {
    switch (selector.kind()) {
      case Selector::Kind::base: return {};
      case Selector::Kind::active: return detail::fold_or_skip(context.active, context);
      case Selector::Kind::slot: break;
    }
    return detail::fold_or_refuse(selector.index(), context);
  }
};
static_assert(RoutePolicy<PerRequest>);

/// A request that names no slot gets the active adapter: under this policy nothing can ask for base while an
/// adapter is active.
struct DeferToActive {
  /// What `selector` means in `context`.
  [[nodiscard]] constexpr RouteDecision operator()(Selector selector,
                                                   RouteContext const& context) const noexcept {
    if (selector.kind() != Selector::Kind::slot) return detail::fold_or_skip(context.active, context);
    return detail::fold_or_refuse(selector.index(), context);
  }
};
static_assert(RoutePolicy<DeferToActive>);

/// Only the active adapter can be applied: base skips, the active one folds, any other slot is refused. Where
/// there is no delta everything folds, into nothing.
struct SingleActive {
  /// What `selector` means in `context`.
  [[nodiscard]] constexpr RouteDecision operator()(Selector selector,
                                                   RouteContext const& context) const noexcept {
    if (!context.has_delta) return {RouteVerdict::fold, context.active};
    if (selector.kind() == Selector::Kind::base) return {};
    if (selector.kind() == Selector::Kind::active) return detail::fold_or_skip(context.active, context);
    if (selector.index() != context.active) return {RouteVerdict::refuse, base_slot};
    return detail::fold_or_refuse(context.active, context);
  }
};
static_assert(RoutePolicy<SingleActive>);

/// Writes each sequence's slot, `base_slot` where the policy does not fold or nothing is applied, and returns
/// the batch's verdict: refuse if any sequence is refused, else fold if any folds, else skip (of an empty
/// batch too). Error: `invalid_argument`, and nothing written, when `slots` and `selectors` differ in size.
template <RoutePolicy P>
[[nodiscard]] constexpr cuda::std::expected<RouteVerdict, Errc> resolve_slots(
    P const& policy, std::span<Selector const> selectors, RouteContext const& context,
    std::span<std::int32_t> slots) noexcept {
  if (slots.size() != selectors.size()) return cuda::std::unexpected<Errc>(Errc::invalid_argument);
  bool folds = false;
  bool refused = false;
  for (std::size_t i = 0; i < selectors.size(); ++i) {
    RouteDecision const decision = policy(selectors[i], context);
    folds = folds || decision.verdict == RouteVerdict::fold;
    refused = refused || decision.verdict == RouteVerdict::refuse;
    bool const folds_here = context.apply && decision.verdict == RouteVerdict::fold && decision.slot >= 0;
    slots[i] = folds_here ? decision.slot : base_slot;
  }
  return refused ? RouteVerdict::refuse : folds ? RouteVerdict::fold : RouteVerdict::skip;
}

/// Stops a step whose batch holds a request that its policy refuses, before any work is done for it. `path`
/// names the step for the message. Error: `unsupported`.
[[nodiscard]] inline Result<void> require_served(RouteVerdict verdict, std::string_view path) {
  if (verdict != RouteVerdict::refuse) return {};
  return fail(Errc::unsupported,
              std::string(path) + ": a request names a non-active adapter or a slot out of range");
}

}  // namespace atlas::lora::inline v0
