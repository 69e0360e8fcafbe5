// SPDX-License-Identifier: AGPL-3.0-only
//
// Who is in which slot, who reads it and since when: a pool's book-keeping, without any memory or device.
#pragma once

#include <algorithm>
#include <atomic>
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
#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/expert_arena.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/pool/lease.hpp"
#include "atlas/lora/pool/lease_gate.hpp"
#include "atlas/lora/pool/overlay_memory.hpp"
#include "atlas/lora/pool/slot.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Slots, names, leases, steps and physical places. Every function expects `mutex` to be held by the caller,
/// unless it says otherwise; none waits, and none calls a device.
class SlotLedger {
 public:
  /// Ends a ledger when its pool has gone, and with it the last lease.
  struct Retire {
    void operator()(SlotLedger* ledger) const noexcept { ledger->retire(); }
  };
  using Owner = std::unique_ptr<SlotLedger, Retire>;

  [[nodiscard]] static Owner create(std::int32_t max_slots, std::int32_t pinned, std::int32_t places) {
    return Owner(new SlotLedger(max_slots, pinned, places));
  }

  std::mutex mutex;
  std::vector<Slot> slots;
  std::vector<StreamProgress> streams;  ///< by index
  NameRegistry names;
  std::string active;  ///< name of the active adapter; empty for none
  PoolCounters counters;
  ExpertArena experts;       ///< memory of experts and routers
  OverlayMemory overlays;    ///< memory of token rows, by place
  std::int32_t loading = 0;  ///< loads that have taken a place and not staged it

  // --- what is where

  [[nodiscard]] bool contains(std::int32_t slot) const noexcept {
    return slot >= 0 && static_cast<std::size_t>(slot) < slots.size();
  }
  [[nodiscard]] Slot& at(std::int32_t slot) noexcept { return slots[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] Slot const& at(std::int32_t slot) const noexcept {
    return slots[static_cast<std::size_t>(slot)];
  }

  /// The slot that `name` finds; `base_slot` for none.
  [[nodiscard]] std::int32_t published(std::string_view name) const noexcept {
    return find([&](Slot const& slot) { return slot.named && slot.tenant->name == name; });
  }
  /// The slot in which content for `name` waits for publication; `base_slot` for none.
  [[nodiscard]] std::int32_t staged(std::string_view name) const noexcept {
    return find([&](Slot const& slot) { return slot.staged && slot.staged->name == name; });
  }

  /// Whether the work of all steps that may read the slot, apart from those of leases, or write its record is
  /// done.
  [[nodiscard]] bool quiet(Slot const& slot) const noexcept {
    std::uint64_t const last = slot.gate.last_step();
    bool const reads = std::any_of(streams.begin(), streams.end(),
                                   [&](StreamProgress const& stream) { return stream.oldest <= last; });
    return !reads && (slot.written == 0 || streams[slot.writer].passed >= slot.written);
  }

  /// Whether nobody reads the slot, and nothing enqueued earlier still does. Of a slot whose gate is open,
  /// true a moment ago.
  [[nodiscard]] bool unread(Slot const& slot) const noexcept {
    return slot.gate.leases() == 0 && quiet(slot);
  }

  [[nodiscard]] SlotView view(std::int32_t index) const noexcept {
    Slot const& slot = at(index);
    SlotView view;
    view.leases = static_cast<std::int32_t>(slot.gate.leases());
    view.last_use = slot.last_use.load(std::memory_order_relaxed);
    view.uses = slot.uses.load(std::memory_order_relaxed);
    if (slot.staged) {
      view.state = SlotState::staged;
      view.bytes = slot.staged->bytes;
    } else if (slot.tenant) {
      view.state = slot.named ? SlotState::ready : SlotState::draining;
      view.bytes = slot.tenant->bytes;
      view.idle = slot.named && slot.tenant->name != active && unread(slot);
    } else {
      view.state = quiet(slot) ? SlotState::empty : SlotState::draining;
    }
    return view;
  }

  // --- leases

  /// A lease on what `name` finds.
  [[nodiscard]] Result<Lease> acquire(std::string_view name) {
    std::int32_t const slot = published(name);
    if (slot != base_slot && !at(slot).staged) return lease({slot, at(slot).tenant->tenancy});
    if (staged(name) != base_slot) {
      return fail(Errc::slot_busy, quoted(name) + ": staged; the next begin_step publishes it");
    }
    return fail(Errc::not_found, quoted(name) + ": not in the pool");
  }

  /// A lease on exactly this tenancy, which may have lost its name as long as others lease it.
  [[nodiscard]] Result<Lease> acquire(SlotKey key) {
    std::string const words = "slot " + std::to_string(key.slot) + ": ";
    if (contains(key.slot)) {
      Slot const& slot = at(key.slot);
      bool const present = slot.tenant && slot.tenant->tenancy == key.tenancy;
      if (present && (slot.gate.leases() > 0 || slot.gate.open())) {
        if (auto taken = lease(key); taken || taken.error().code != Errc::stale) return taken;
      }
      if (slot.staged && slot.staged->tenancy == key.tenancy) {
        return fail(Errc::slot_busy, words + "staged; the next begin_step publishes it");
      }
      if (present && slot.named) {
        return fail(Errc::slot_busy, words + "other content is staged; the next begin_step ends tenancy " +
                                         std::to_string(key.tenancy));
      }
    }
    return fail(Errc::stale, words + "tenancy " + std::to_string(key.tenancy) + " has ended");
  }

  /// The same without `mutex`, and without a reason where there is none to be had.
  [[nodiscard]] std::optional<Lease> try_acquire(SlotKey key) noexcept {
    if (!contains(key.slot) || at(key.slot).gate.enter(key.tenancy) != Entry::entered) return std::nullopt;
    return entered(key);
  }

  /// Ends one lease, without `mutex`.
  void release(std::int32_t index) noexcept {
    if (at(index).gate.leave(steps_begun_.load(std::memory_order_relaxed))) drop();
  }

  /// Leases taken so far: the tick counts them and publications.
  [[nodiscard]] std::uint64_t leases_taken() const noexcept {
    return tick_.load(std::memory_order_relaxed) - counters.publications;
  }

  /// Closes the slot, which was chosen for other content, unless somebody was quicker; then it is as it was.
  [[nodiscard]] bool claim(Slot& slot) noexcept {
    bool const was_open = slot.gate.open();
    if (slot.gate.close() != 0) return false;
    if (quiet(slot)) return true;
    if (was_open) slot.gate.reopen();
    return false;
  }

  // --- steps

  /// The number of the step that is about to begin.
  [[nodiscard]] std::uint64_t number_step() noexcept {
    return steps_begun_.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  /// Opens step `number` on stream `stream`.
  void open_step(std::size_t stream, std::uint64_t number) noexcept {
    streams[stream].open = number;
    streams[stream].oldest = std::min(streams[stream].oldest, number);
  }

  /// What comes before the slot's record is overwritten for step `number` of stream `stream`: even if that
  /// fails half-way, its tenant can no longer be leased, and the slot waits until a step of that stream is
  /// done that comes after it.
  void overwrite(Slot& slot, std::size_t stream, std::uint64_t number) noexcept {
    slot.named = false;
    slot.gate.cut();
    slot.blank_due = true;  // until the publication is known to have succeeded
    slot.writer = stream;
    slot.written = number;
  }

  // --- places

  [[nodiscard]] std::optional<std::int32_t> take_place() noexcept {
    if (free_places_.empty()) return std::nullopt;
    std::int32_t const place = free_places_.back();
    free_places_.pop_back();
    return place;
  }
  void give_back_place(std::int32_t place) {
    auto& blocks = expert_blocks_[static_cast<std::size_t>(place)];
    if (!blocks.empty()) experts.release(std::exchange(blocks, {}));
    free_places_.push_back(place);
  }
  [[nodiscard]] bool is_spare(std::int32_t place) const noexcept {
    return std::find(free_places_.begin(), free_places_.end(), place) != free_places_.end();
  }
  /// The blocks of `experts` that belong to a place, and are given back with it.
  [[nodiscard]] std::vector<std::size_t> const& expert_blocks(std::int32_t place) const noexcept {
    return expert_blocks_[static_cast<std::size_t>(place)];
  }
  void hold_experts(std::int32_t place, std::vector<std::size_t> blocks) {
    expert_blocks_[static_cast<std::size_t>(place)] = std::move(blocks);
  }
  [[nodiscard]] std::size_t free_places() const noexcept { return free_places_.size(); }

  /// Slots of the pinned region, which are the first ones, and whether `slot` is one of them.
  [[nodiscard]] std::int32_t pinned() const noexcept { return pinned_; }
  [[nodiscard]] bool is_pinned(std::int32_t slot) const noexcept { return slot < pinned_; }

  /// Takes the adapter of `slot`, which was claimed, out of the pool.
  void evict(std::int32_t slot) {
    at(slot).named = false;
    ++counters.evictions;
    settle();
  }

  /// Ends the tenancies that lost their name and only waited for readers: their places are spare again.
  void settle() {
    for (Slot& slot : slots) {
      if (!slot.tenant || slot.named || slot.staged || !unread(slot)) continue;
      give_back_place(slot.tenant->place);
      slot.tenant.reset();
      slot.blank_due = true;
    }
  }

  // --- tenants come and go

  /// The key and id under which `digest` is the newest content of `name`, if it is, in a pinned slot where
  /// `pinned` asks for one.
  [[nodiscard]] std::optional<std::pair<SlotKey, std::uint64_t>> present(std::string_view name,
                                                                         Digest const& digest,
                                                                         bool pinned) const noexcept {
    std::int32_t const waiting = staged(name);
    std::int32_t const slot = waiting != base_slot ? waiting : published(name);
    if (slot == base_slot || (pinned && slot >= pinned_)) return std::nullopt;
    Tenant const& tenant = waiting != base_slot ? *at(slot).staged : *at(slot).tenant;
    if (!(tenant.digest == digest)) return std::nullopt;
    return std::pair(SlotKey{slot, tenant.tenancy}, tenant.id);
  }

  /// Puts content into `slot`, which was claimed, where the next publication finds it. An adapter of another
  /// name that was there is evicted now; other content staged under the same name is dropped. Returns its
  /// key.
  [[nodiscard]] SlotKey stage(std::int32_t index, Tenant tenant) {
    Slot& slot = at(index);
    if (slot.staged) give_back_place(slot.staged->place);
    slot.staged.reset();
    if (std::int32_t const before = staged(tenant.name); before != base_slot) unstage(at(before));
    if (slot.named && slot.tenant->name != tenant.name) {
      slot.named = false;
      ++counters.evictions;
    }
    ++counters.loads;
    tenant.tenancy = ++tenancies_;
    slot.staged = std::move(tenant);
    return SlotKey{index, slot.staged->tenancy};
  }

  /// The staged content of `slot` becomes its tenant and takes over its name; the bytes of the tenant before
  /// are spare again, and the slot that had the name drains.
  void publish(Slot& slot) {
    if (std::int32_t const before = published(slot.staged->name); before != base_slot) {
      at(before).named = false;
      at(before).gate.cut();
    }
    if (slot.tenant) give_back_place(slot.tenant->place);  // unread since it was staged over
    slot.tenant = std::exchange(slot.staged, std::nullopt);
    slot.named = true;
    slot.blank_due = false;
    slot.uses = 0;
    slot.last_use = tick_.fetch_add(1, std::memory_order_relaxed) + 1;
    ++counters.publications;
    slot.gate.admit(slot.tenant->tenancy);
  }

  /// Takes `name` and its content away.
  [[nodiscard]] Result<void> unload(std::string_view name) {
    std::int32_t const resident = published(name);
    std::int32_t const waiting = staged(name);
    if (resident == base_slot && waiting == base_slot) {
      return fail(Errc::not_found, quoted(name) + ": not in the pool");
    }
    std::uint64_t leases = resident == base_slot ? 0 : at(resident).gate.leases();
    if (leases == 0 && name == active) {
      return fail(Errc::invalid_argument, quoted(name) + ": is the active adapter");
    }
    if (leases == 0 && resident != base_slot) leases = at(resident).gate.close();
    if (leases > 0) return fail(Errc::slot_busy, quoted(name) + ": " + std::to_string(leases) + " leases");
    if (resident != base_slot) at(resident).named = false;
    if (waiting != base_slot) unstage(at(waiting));
    settle();
    ++counters.unloads;
    return {};
  }

  [[nodiscard]] static std::string quoted(std::string_view name) {
    return "adapter '" + std::string(name) + "'";
  }

 private:
  SlotLedger(std::int32_t max_slots, std::int32_t pinned, std::int32_t places)
      : slots(static_cast<std::size_t>(max_slots)),
        pinned_(pinned),
        expert_blocks_(static_cast<std::size_t>(places)) {
    for (std::int32_t place = places; place-- > 0;) free_places_.push_back(place);
  }

  void retire() noexcept {
    for (Slot& slot : slots) {
      holders_.fetch_add(1, std::memory_order_relaxed);
      if (!slot.gate.abandon()) drop();
    }
    drop();
  }
  void drop() noexcept {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  template <class Condition>
  std::int32_t find(Condition const& condition) const noexcept {
    auto const found = std::find_if(slots.begin(), slots.end(), condition);
    return found == slots.end() ? base_slot : static_cast<std::int32_t>(found - slots.begin());
  }

  Result<Lease> lease(SlotKey key) {
    switch (at(key.slot).gate.enter(key.tenancy)) {
      case Entry::entered: return entered(key);
      case Entry::full:
        return fail(Errc::slot_busy, "slot " + std::to_string(key.slot) + ": " +
                                         std::to_string(LeaseGate::most_leases) + " leases, the most");
      case Entry::closed: break;
    }
    return fail(Errc::stale, "slot " + std::to_string(key.slot) + ": its last lease has just ended");
  }

  // The lease of whoever has entered; without `mutex`, since nobody changes what is leased.
  Lease entered(SlotKey key) noexcept {
    Slot& slot = at(key.slot);
    slot.uses.fetch_add(1, std::memory_order_relaxed);
    slot.last_use.store(tick_.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return Lease(this, key, slot.tenant->id);
  }

  // Drops what is staged; what it would have replaced can be leased again.
  void unstage(Slot& slot) {
    give_back_place(slot.staged->place);
    slot.staged.reset();
    if (slot.named) slot.gate.reopen();
  }

  std::int32_t pinned_;
  std::vector<std::int32_t> free_places_;
  std::vector<std::vector<std::size_t>> expert_blocks_;  // by place
  std::atomic<std::uint64_t> tick_{0};
  std::atomic<std::uint64_t> steps_begun_{0};
  std::uint64_t tenancies_ = 0;
  std::atomic<std::size_t> holders_{1};  // the owner and, once it has gone, slots with leases
};

}  // namespace detail

inline void Lease::release() noexcept {
  if (auto* const ledger = std::exchange(ledger_, nullptr)) ledger->release(key_.slot);
  key_ = {};
  id_ = base_id;
}

}  // namespace atlas::lora::inline v0
