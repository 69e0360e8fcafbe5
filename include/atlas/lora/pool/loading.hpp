// SPDX-License-Identifier: AGPL-3.0-only
//
// How an adapter comes into a pool: the room that it needs, packing beside running work, and staging.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/choose.hpp"
#include "atlas/lora/pool/expert_pack.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/pool/lease.hpp"
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/packed_adapter.hpp"
#include "atlas/lora/pool/pool_state.hpp"
#include "atlas/lora/pool/reserve.hpp"
#include "atlas/lora/pool/slot.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What a load has done. The adapter can be leased once the next `begin_step` has published it.
struct Staged {
  SlotKey key;                 ///< what it is acquired by
  std::uint64_t id = base_id;  ///< what a prefix cache is keyed by
  ConversionCounts counts;     ///< zero where the same content was there already
};

namespace detail {

/// Loads into one pool; what `AdapterPool::load` does but for counting refusals.
template <Element T, Backend B, VictimPolicy V>
class Loading {
 public:
  Loading(PoolState<T, B>& state, V const& victim) noexcept : state_(state), victim_(victim) {}

  /// `adapter` is an `Adapter` or a `PackedAdapter<T>`. Expects the ledger's mutex not to be held.
  template <class A>
  [[nodiscard]] Result<Staged> load(std::string_view name, A const& adapter, StageOptions const& options) {
    if (!valid_name(name)) {
      return fail(Errc::invalid_argument, "adapter name: 1 to " + std::to_string(longest_name) +
                                              " bytes without control bytes needed");
    }
    auto const checked = checked_outline<T>(name, adapter, state_.shape, state_.room(), options.packing);
    if (!checked) return forward_error(checked);
    PackedOutline const& outline = *checked;
    auto const lane = state_.lanes.take(options.stop);
    if (!lane) return fail(Errc::cancelled, SlotLedger::quoted(name) + ": cancelled while it waited");
    if (auto const settled = state_.settle(**lane); !settled) return forward_error(settled);
    std::int32_t place = 0;
    LoadRoom room;
    {
      std::lock_guard<std::mutex> const lock(ledger().mutex);
      if (auto const present = hit(name, outline.digest, options.pinned)) return *present;
      auto const slot = choose(name, options.pinned);  // early, so that a full pool costs no work
      if (!slot) return forward_error(slot);
      auto const spare = ledger().take_place();
      if (!spare) {
        return fail(Errc::spare_busy, SlotLedger::quoted(name) + ": no physical slot is spare");
      }
      place = *spare;
      if (auto const reserved = reserve(name, place, outline); !reserved) {
        ledger().give_back_place(place);
        return forward_error(reserved);
      }
      room = {place, ledger().expert_blocks(place), ledger().overlays.offset(place)};
      ++ledger().loading;
    }
    auto const counts = state_.pack(**lane, room, adapter, outline, options);
    bool const is_quiet = counts || state_.drain(**lane);  // whether no copy still goes to the place
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    --ledger().loading;
    // Another load may have brought the same meanwhile.
    auto const present = counts ? hit(name, outline.digest, options.pinned) : std::nullopt;
    auto staged = present  ? Result<Staged>(*present)
                  : counts ? stage(name, outline, options.pinned, place)
                           : Result<Staged>(forward_error(counts));
    if (!is_quiet) (**lane).unsettled = place;
    if (is_quiet && (present || !staged)) ledger().give_back_place(place);
    if (staged && !present) staged->counts = *counts;
    return staged;
  }

 private:
  [[nodiscard]] SlotLedger& ledger() const noexcept { return *state_.ledger; }

  template <class R>
  static cuda::std::unexpected<Error> forward_error(R const& result) {
    return cuda::std::unexpected<Error>(result.error());
  }

  // All that follow expect the ledger's mutex to be held.

  // What a load of content that is there already returns.
  std::optional<Staged> hit(std::string_view name, Digest const& digest, bool pinned) const {
    auto const present = ledger().present(name, digest, pinned);
    if (!present) return std::nullopt;
    ++ledger().counters.hits;
    return Staged{present->first, present->second, {}};
  }

  // Memory for the experts and token rows of what is loaded into `place`.
  Result<void> reserve(std::string_view name, std::int32_t place, PackedOutline const& outline) {
    auto const sizes = expert_block_sizes(outline, state_.shape, sizeof(T));
    auto reserved = reserve_experts(ledger(), name, place, sizes, victim_);
    if (!reserved) return reserved;
    return reserve_overlay(ledger(), name, place, outline.overlay.bytes, victim_);
  }

  // The slot for `name`, as things stand now.
  Result<std::int32_t> choose(std::string_view name, bool pinned) {
    if (auto const polled = state_.steps.poll(state_.backend, ledger()); !polled) {
      return forward_error(polled);
    }
    return choose_slot(ledger(), name, pinned, victim_);
  }

  // Stages what is packed in `place`; on failure nothing has changed.
  Result<Staged> stage(std::string_view name, PackedOutline const& outline, bool pinned, std::int32_t place) {
    auto slot = choose(name, pinned);
    if (!slot) return forward_error(slot);
    auto const id = ledger().names.identify(name, outline.digest);
    if (!id) return forward_error(id);
    while (!ledger().claim(ledger().at(*slot))) {  // somebody has leased it meanwhile
      slot = choose(name, pinned);
      if (!slot) return forward_error(slot);
    }
    state_.write_image(*slot, place, outline);
    SlotKey const key =
        ledger().stage(*slot, Tenant{std::string(name), *id, 0, outline.digest, place, outline.bytes,
                                     outline.max_rank, ledger().names.generation(name)});
    return Staged{key, *id, {}};
  }

  PoolState<T, B>& state_;
  V const& victim_;
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
