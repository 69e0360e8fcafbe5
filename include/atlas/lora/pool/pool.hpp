// SPDX-License-Identifier: AGPL-3.0-only
//
// Adapters in slots of fixed memory: loaded beside running work, published between steps, kept while leased.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/loading.hpp"
#include "atlas/lora/pool/memory.hpp"
#include "atlas/lora/pool/observe.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/packed_adapter.hpp"
#include "atlas/lora/pool/pool_state.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/overlay_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// Adapters in `max_slots` slots. A slot is a name for a *record*, the route cells of all sites and routers,
/// the indexes of all experts and the cell of the token overlay; the bytes that they speak of lie in one of
/// `max_slots + spare` physical slots, those of routers and experts, and those of token rows, in memory that
/// all adapters share (`PoolOptions::expert_bytes`, `PoolOptions::overlay_bytes`).
///
/// An engine encloses each step in `begin_step(stream)` and `end_step(stream)`, takes a lease for each
/// request before its rows name the slot, and releases it when no later step will. `load` may be called from
/// any thread at any time: it packs into memory that nothing reads, and ends *staged*; the next `begin_step`
/// publishes. Memory is fixed at creation; table addresses are fixed for the pool's life, so graphs that were
/// captured stay right. Nothing here synchronises the device, and nothing becomes part of a captured graph.
/// Every function may be called from any thread; one stream's steps come from one thread at a time, and no
/// stream of the pool starts to be captured while `begin_step` runs for another one.
///
/// When a call fails, what was there before is still there, whole; except that a load whose experts or token
/// rows need the memory of idle adapters evicts them before it packs, and may fail after that.
template <Element T, Backend B, VictimPolicy V = LruIdle>
class AdapterPool {
 public:
  using Stream = typename B::Stream;

  /// What `create` would take. Errors: `invalid_argument` for an option out of range or a model without
  /// linears; `out_of_range` for 2^63 bytes or more.
  [[nodiscard]] static Result<MemoryNeeded> memory_needed(ModelShape const& shape,
                                                          PoolOptions const& options) {
    auto const memory = detail::PoolMemory::plan(shape, options, sizeof(T));
    if (!memory) return forward_error(memory);
    return memory->needed;
  }

  /// A pool whose slots are all empty, its memory zeroed. Errors: those of `memory_needed`, and the
  /// backend's.
  [[nodiscard]] static Result<AdapterPool> create(ModelShape shape, PoolOptions const& options,
                                                  B backend = B(), V victim = V()) {
    auto memory = detail::PoolMemory::plan(shape, options, sizeof(T));
    if (!memory) return forward_error(memory);
    auto state = std::make_unique<State>(std::move(shape), options, *std::move(memory), std::move(backend));
    if (auto const made = state->allocate(); !made) return forward_error(made);
    return AdapterPool(std::move(state), std::move(victim));
  }

  // --- the life of an adapter

  /// Packs `adapter` and stages it under `name`, in its own slot when nobody reads that, else in an empty or
  /// idle one; an adapter that has to give way leaves now (for the room of experts or token rows, before they
  /// are packed). Two loads pack at one time and further ones wait; nothing else waits for them. The same
  /// content under the same name is not loaded again. The host waits for its copies, on streams of the pool's
  /// own. Errors: what `detail::check_adapter`, `detail::check_overlay` and `convert` say of the adapter; a
  /// name that is not `valid_name`; `cancelled` by `options.stop`; retryable `pool_full`, `spare_busy`,
  /// `expert_memory_busy` and `overlay_memory_busy`; `out_of_memory` when all pinned slots are taken, or when
  /// its experts or token rows can never fit; the backend's.
  [[nodiscard]] Result<Staged> load(std::string_view name, Adapter const& adapter,
                                    StageOptions const& options = {}) {
    return load_any(name, adapter, options);
  }

  /// The same of an adapter that is packed already, as `HostTier` keeps them: the device copies it, experts,
  /// routers and token rows too, and nothing is converted. Who calls holds it until the call returns. Errors:
  /// likewise, but for those of `convert`; `shape_mismatch` when it is packed for another model.
  [[nodiscard]] Result<Staged> load(std::string_view name, PackedAdapter<T> const& adapter,
                                    StageOptions const& options = {}) {
    return load_any(name, adapter, options);
  }

  /// Takes `name` out of the pool; its memory is spare once nothing reads it. Errors: `not_found`;
  /// `slot_busy` with the number of leases; `invalid_argument` for the active adapter.
  [[nodiscard]] Result<void> unload(std::string_view name) {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return tally(ledger().unload(name));
  }

  // --- steps

  /// Opens a step on `stream`, which is registered by its first one. Enqueues one copy for each staged
  /// record; other registered streams go on after them. Errors: `capturing`; `invalid_argument` when a step
  /// is open; the backend's, and then everything staged is still staged and no step is open, and what was in
  /// the slots that it is for cannot be leased until a later step begins.
  [[nodiscard]] Result<void> begin_step(Stream stream) {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return tally(open_step(stream));
  }

  /// Ends the step that is open on `stream`, after its last work was enqueued. Errors: `capturing`;
  /// `invalid_argument` when none is open; the backend's, and then it is still open.
  [[nodiscard]] Result<void> end_step(Stream stream) {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return tally(close_step(stream));
  }

  /// Ends the pool's use of `stream`, which the engine will destroy. Errors: `not_found`; `slot_busy`
  /// (retryable) while a step is open or not known to be done; the backend's.
  [[nodiscard]] Result<void> forget_stream(Stream stream) {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    auto const index = state_->steps.find(stream);
    if (!index) return fail(Errc::not_found, "forget_stream: no step was ever begun on the stream");
    if (auto outcome = state_->steps.poll(backend(), ledger()); !outcome) return outcome;
    return state_->steps.forget(ledger(), *index);
  }

  // --- leases

  /// A lease on the adapter that `name` finds. Errors: `not_found`; `slot_busy` while it is staged and the
  /// next `begin_step` has to publish it.
  [[nodiscard]] Result<Lease> acquire(std::string_view name) {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return tally(ledger().acquire(name));
  }

  /// A lease on exactly this tenancy: what loads return and leases carry. Content that has lost its name can
  /// be leased as long as others lease it. Takes no lock where there is a lease to be had. Errors: `stale`;
  /// `slot_busy` while it is staged, or while nobody leases it and other content for its slot is.
  [[nodiscard]] Result<Lease> acquire(SlotKey key) {
    if (auto lease = ledger().try_acquire(key)) return *std::move(lease);
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return tally(ledger().acquire(key));
  }

  /// A lease on the active adapter; an empty one, which is base, when none is active. Errors: `slot_busy`.
  [[nodiscard]] Result<Lease> acquire_active() {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    if (ledger().active.empty()) return Lease();
    return tally(ledger().acquire(ledger().active));
  }

  /// Makes the adapter under `name` the active one, whatever content the name finds later; the empty name
  /// makes none active. The active adapter is never evicted. Error: `not_found` when it is not published.
  [[nodiscard]] Result<void> set_active(std::string_view name) {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    if (!name.empty() && ledger().published(name) == base_slot) return tally(Result<void>(not_found(name)));
    ledger().active = name;
    return {};
  }

  /// The active adapter's key; base when none is active.
  [[nodiscard]] SlotKey active() const {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return key_of(ledger().active);
  }

  // --- tables and views

  /// The table of a site. It may be taken before anything is loaded, and stays right for the pool's life.
  /// Error: `not_found` when the model does not have the site.
  [[nodiscard]] Result<RouteTable<T>> route(Site site) const {
    return table(shape().find(site), site.layer, std::to_string(site.module));
  }
  /// The same by a module's name; `layer` is `model_wide` for a model-wide one.
  [[nodiscard]] Result<RouteTable<T>> route(std::int32_t layer, std::string_view module) const {
    return table(shape().find(layer, module), layer, std::string(module));
  }

  /// The table of token overlays, of the whole pool's life like the others. Error: `not_found` when the pool
  /// was made without overlays.
  [[nodiscard]] Result<OverlayTable<T>> overlay() const {
    if (!state_->serves_overlays()) return fail(Errc::not_found, "the pool was made without token overlays");
    return state_->overlay_table();
  }

  /// The table of one linear of the experts of `layer`, for the pool's life. In a pool without memory for
  /// experts it adapts nothing. Error: `not_found` when the layer has no experts.
  [[nodiscard]] Result<ExpertTable<T>> expert(std::int32_t layer, ExpertLinear linear) const {
    MoeShape const& moe = shape().moe();
    auto const index = moe.find(layer);
    if (!index) return no_experts(layer);
    Module const widths = moe.linear(*index, linear);
    return ExpertTable<T>{state_->expert_index(*index),
                          static_cast<std::int64_t>(state_->memory.record_bytes),
                          max_slots(),
                          moe.num_experts,
                          static_cast<std::int32_t>(expert_linears),
                          static_cast<std::int32_t>(linear),
                          layout().max_rank(),
                          widths.k_in,
                          widths.n_out};
  }
  /// The table of the router of `layer`, likewise: a linear from the hidden state to the experts' logits, to
  /// be added before the top-k.
  [[nodiscard]] Result<RouteTable<T>> router(std::int32_t layer) const {
    MoeShape const& moe = shape().moe();
    auto const index = moe.find(layer);
    if (!index) return no_experts(layer);
    return RouteTable<T>{state_->router(*index),
                         static_cast<std::int64_t>(state_->memory.record_bytes),
                         max_slots(),
                         layout().max_rank(),
                         moe.hidden,
                         moe.num_experts};
  }

  /// The key that `name` finds. Error: `not_found` when it is not published. While other content for its slot
  /// is staged, acquiring it is `slot_busy`.
  [[nodiscard]] Result<SlotKey> find(std::string_view name) const {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    SlotKey const key = key_of(name);
    if (key.slot == base_slot) return not_found(name);
    return key;
  }

  /// The id of the adapter that its name finds in `slot`; `base_id` for a slot without one or out of range.
  [[nodiscard]] std::uint64_t adapter_id(std::int32_t slot) const {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    bool const named = ledger().contains(slot) && ledger().at(slot).named;
    return named ? ledger().at(slot).tenant->id : base_id;
  }

  /// The published names, in slot order.
  [[nodiscard]] std::vector<std::string> names() const {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    std::vector<std::string> names;
    for (detail::Slot const& slot : ledger().slots) {
      if (slot.named) names.push_back(slot.tenant->name);
    }
    return names;
  }

  /// What a victim policy sees of `slot`, which is in `[0, max_slots())`; as of the last load or step.
  [[nodiscard]] SlotView view(std::int32_t slot) const {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    ATLAS_ASSERT(ledger().contains(slot), "view: the slot is out of range");
    return ledger().view(slot);
  }

  /// What an operator sees: all slots at one moment, bytes, and what has been done. O(max_slots) and without
  /// a call of the backend, so that it may be asked for every second.
  [[nodiscard]] PoolSnapshot snapshot() const {
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    return detail::snapshot_of(ledger(), state_->memory.needed);
  }

  /// The model that it serves; what `load` takes must have been audited against it.
  [[nodiscard]] ModelShape const& shape() const noexcept { return state_->shape; }
  /// Where each site lies in a physical slot; its `max_rank` is the options' rounded up to a multiple of 8.
  [[nodiscard]] SlotLayout const& layout() const noexcept { return state_->memory.layout; }
  /// What it was created with.
  [[nodiscard]] PoolOptions const& options() const noexcept { return state_->options; }
  /// Slots that rows can name; a row slot of this or more is base.
  [[nodiscard]] std::int32_t max_slots() const noexcept { return state_->options.max_slots; }
  /// The device that it is on.
  [[nodiscard]] B& backend() noexcept { return state_->backend; }

 private:
  using State = detail::PoolState<T, B>;

  AdapterPool(std::unique_ptr<State> state, V victim) noexcept
      : state_(std::move(state)), victim_(std::move(victim)) {}

  [[nodiscard]] detail::SlotLedger& ledger() const noexcept { return *state_->ledger; }

  template <class R>
  static cuda::std::unexpected<Error> forward_error(R const& result) {
    return cuda::std::unexpected<Error>(result.error());
  }
  static cuda::std::unexpected<Error> not_found(std::string_view name) {
    return fail(Errc::not_found, detail::SlotLedger::quoted(name) + ": not in the pool");
  }

  static cuda::std::unexpected<Error> no_experts(std::int32_t layer) {
    return fail(Errc::not_found, "layer " + std::to_string(layer) + " of the model has no experts");
  }

  SlotKey key_of(std::string_view name) const {
    std::int32_t const slot = ledger().published(name);
    return slot == base_slot ? SlotKey{} : SlotKey{slot, ledger().at(slot).tenant->tenancy};
  }

  Result<RouteTable<T>> table(std::optional<std::size_t> site, std::int32_t layer,
                              std::string const& name) const {
    if (!site) {
      return fail(Errc::not_found,
                  "layer " + std::to_string(layer) + ": the model has no '" + name + "' there");
    }
    Module const& linear = shape().module(shape().sites()[*site]);
    return RouteTable<T>{state_->record(0) + *site,
                         static_cast<std::int64_t>(state_->memory.record_bytes),
                         max_slots(),
                         layout().max_rank(),
                         linear.k_in,
                         linear.n_out};
  }

  // Both expect the ledger's mutex to be held.
  void count_refusal(Errc code) const noexcept {
    ++ledger().counters.refusals[static_cast<std::size_t>(code)];
  }
  template <class R>
  R tally(R outcome) const {
    if (!outcome) count_refusal(outcome.error().code);
    return outcome;
  }

  template <class A>
  Result<Staged> load_any(std::string_view name, A const& adapter, StageOptions const& options) {
    auto staged = detail::Loading<T, B, V>(*state_, victim_).load(name, adapter, options);
    if (staged) return staged;
    std::lock_guard<std::mutex> const lock(ledger().mutex);
    count_refusal(staged.error().code);
    return staged;
  }

  Result<void> open_step(Stream stream) {
    if (auto outcome = refuse_capture(stream); !outcome) return outcome;
    auto const index = state_->steps.find_or_add(backend(), ledger(), stream);
    if (!index) return forward_error(index);
    if (ledger().streams[*index].open != 0) {
      return fail(Errc::invalid_argument, "begin_step: a step is open on the stream");
    }
    if (auto outcome = state_->steps.poll(backend(), ledger()); !outcome) return outcome;
    if (auto outcome = state_->steps.follow(backend(), *index); !outcome) return outcome;
    std::uint64_t const number = ledger().number_step();
    if (auto outcome = state_->publish(*index, number, stream); !outcome) return outcome;
    ledger().open_step(*index, number);
    return {};
  }

  Result<void> close_step(Stream stream) {
    auto const index = state_->steps.find(stream);
    if (!index || ledger().streams[*index].open == 0) {
      return fail(Errc::invalid_argument, "end_step: no step is open on the stream");
    }
    if (auto outcome = refuse_capture(stream); !outcome) return outcome;
    return state_->steps.end(backend(), ledger(), *index);
  }

  Result<void> refuse_capture(Stream stream) const {
    auto const capturing = state_->backend.is_capturing(stream);
    if (!capturing) return forward_error(capturing);
    if (*capturing) {
      return fail(Errc::capturing, "a step neither begins nor ends while its stream is captured");
    }
    return {};
  }

  std::unique_ptr<State> state_;
  V victim_;
};

}  // namespace atlas::lora::inline v0
