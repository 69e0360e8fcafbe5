// SPDX-License-Identifier: AGPL-3.0-only
//
// Who is in which slot, who reads it and since when: a pool's book-keeping, without any memory or device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/victim.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// One tenancy of one slot. `tenancy` is never used twice in a pool, so a key whose tenant has gone finds
/// nobody else. A default key is base.
struct SlotKey {
  std::int32_t slot = base_slot;
  std::uint64_t tenancy = 0;

  friend constexpr bool operator==(SlotKey const&, SlotKey const&) = default;
};

namespace detail {
class SlotLedger;
}

/// The right to use one slot's adapter, given back when it is destroyed. While it lives, the slot keeps its
/// content. Move-only; safe to release from any thread, during capture, and after the pool has gone. A
/// default-constructed lease is base: slot `base_slot`, id `base_id`.
class Lease {
 public:
  Lease() noexcept = default;
  Lease(Lease&& other) noexcept
      : ledger_(std::move(other.ledger_)),
        key_(std::exchange(other.key_, {})),
        id_(std::exchange(other.id_, base_id)) {}
  Lease& operator=(Lease&& other) noexcept {
    Lease taken(std::move(other));
    std::swap(ledger_, taken.ledger_);
    std::swap(key_, taken.key_);
    std::swap(id_, taken.id_);
    return *this;
  }
  ~Lease() { release(); }

  /// The row slot to route to.
  [[nodiscard]] std::int32_t slot() const noexcept { return key_.slot; }
  /// What more leases on the same tenancy are acquired by.
  [[nodiscard]] SlotKey key() const noexcept { return key_; }
  /// The adapter's id: what a prefix cache is keyed by.
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  /// Whether it holds a slot.
  [[nodiscard]] explicit operator bool() const noexcept { return ledger_ != nullptr; }

  /// Gives the slot back now; the lease is base afterwards. Work in steps that are open now, or ended and not
  /// done, may still read the slot; the pool waits for it.
  void release() noexcept;

 private:
  friend class detail::SlotLedger;
  Lease(std::shared_ptr<detail::SlotLedger> ledger, SlotKey key, std::uint64_t id) noexcept
      : ledger_(std::move(ledger)), key_(key), id_(id) {}

  std::shared_ptr<detail::SlotLedger> ledger_;
  SlotKey key_;
  std::uint64_t id_ = base_id;
};

namespace detail {

/// An adapter in a pool. `place` is the physical slot that holds its bytes.
struct Tenant {
  std::string name;
  std::uint64_t id = base_id;
  std::uint64_t tenancy = 0;
  Digest digest;
  std::int32_t place = 0;
  std::size_t bytes = 0;
  std::int32_t rank = 0;
  std::uint64_t generation = 0;
};

/// For each stream, by index, the number of its last step that may read something; 0 or absent means none.
using Stamps = std::vector<std::uint64_t>;

struct Slot {
  std::optional<Tenant> tenant;  ///< whom the slot's record in the tables speaks of
  std::optional<Tenant> staged;  ///< whom the next publication puts there
  bool named = false;            ///< whether `tenant` is the one that its name finds
  bool blank_due = false;        ///< the record still speaks of a tenant that has gone
  std::int64_t leases = 0;
  std::uint64_t last_use = 0;
  std::uint64_t uses = 0;
  Stamps stamps;
};

/// Steps of one stream, counted from 1. The work of all up to `passed` is done.
struct StepCounts {
  std::uint64_t begun = 0;
  std::uint64_t ended = 0;
  std::uint64_t passed = 0;

  [[nodiscard]] bool open() const noexcept { return begun > ended; }
};

/// Slots, names, leases, stamps and physical places. Every function expects `mutex` to be held by the caller,
/// unless it says otherwise; none waits, and none calls a device.
class SlotLedger : public std::enable_shared_from_this<SlotLedger> {
 public:
  SlotLedger(std::int32_t max_slots, std::int32_t pinned, std::int32_t places)
      : slots(static_cast<std::size_t>(max_slots)), pinned_(pinned) {
    for (std::int32_t place = places; place-- > 0;) free_places_.push_back(place);
  }

  std::mutex mutex;
  std::vector<Slot> slots;
  std::vector<StepCounts> steps;  ///< by stream index
  NameRegistry names;
  std::string active;  ///< name of the active adapter; empty for none
  PoolCounters counters;
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

  [[nodiscard]] bool all_passed(Stamps const& stamps) const noexcept {
    for (std::size_t i = 0; i < stamps.size(); ++i) {
      if (stamps[i] > steps[i].passed) return false;
    }
    return true;
  }

  /// Whether nobody reads the slot, and nothing enqueued earlier still does.
  [[nodiscard]] bool unread(Slot const& slot) const noexcept {
    return slot.leases == 0 && all_passed(slot.stamps);
  }

  [[nodiscard]] SlotView view(std::int32_t index) const noexcept {
    Slot const& slot = at(index);
    SlotView view;
    view.leases = slot.leases;
    view.last_use = slot.last_use;
    view.uses = slot.uses;
    if (slot.staged) {
      view.state = SlotState::staged;
      view.bytes = slot.staged->bytes;
    } else if (slot.tenant) {
      view.state = slot.named ? SlotState::ready : SlotState::draining;
      view.bytes = slot.tenant->bytes;
      view.idle = slot.named && slot.tenant->name != active && unread(slot);
    } else {
      view.state = all_passed(slot.stamps) ? SlotState::empty : SlotState::draining;
    }
    return view;
  }

  // --- leases

  /// A lease on what `name` finds.
  [[nodiscard]] Result<Lease> acquire(std::string_view name) {
    std::int32_t const slot = published(name);
    if (slot != base_slot && !at(slot).staged) return lease(slot);
    if (staged(name) != base_slot) {
      return fail(Errc::slot_busy, quoted(name) + ": staged; the next begin_step publishes it");
    }
    return fail(Errc::not_found, quoted(name) + ": not in the pool");
  }

  /// A lease on exactly this tenancy, which may have lost its name as long as others lease it.
  [[nodiscard]] Result<Lease> acquire(SlotKey key) {
    if (contains(key.slot)) {
      Slot const& slot = at(key.slot);
      bool const present = slot.tenant && slot.tenant->tenancy == key.tenancy;
      if (present && (slot.leases > 0 || (slot.named && !slot.staged))) return lease(key.slot);
      if (slot.staged && slot.staged->tenancy == key.tenancy) {
        return fail(Errc::slot_busy,
                    "slot " + std::to_string(key.slot) + ": staged; the next begin_step publishes it");
      }
    }
    return fail(Errc::stale, "slot " + std::to_string(key.slot) + ": tenancy " + std::to_string(key.tenancy) +
                                 " has ended");
  }

  /// Ends one lease. Takes `mutex` itself.
  void release(std::int32_t index) noexcept {
    std::lock_guard<std::mutex> const lock(mutex);
    Slot& slot = at(index);
    --slot.leases;
    slot.stamps.resize(steps.size());
    for (std::size_t i = 0; i < steps.size(); ++i) slot.stamps[i] = std::max(slot.stamps[i], steps[i].begun);
  }

  /// What comes before the slot's record is overwritten in the step that stream `stream` opens next: even if
  /// that fails half-way, its tenant can no longer be leased, and the slot waits for that step.
  void overwrite(Slot& slot, std::size_t stream) {
    slot.named = false;
    slot.blank_due = true;  // until the publication is known to have succeeded
    if (slot.stamps.size() <= stream) slot.stamps.resize(stream + 1);
    slot.stamps[stream] = std::max(slot.stamps[stream], steps[stream].begun + 1);
  }

  // --- places

  [[nodiscard]] std::optional<std::int32_t> take_place() noexcept {
    if (free_places_.empty()) return std::nullopt;
    std::int32_t const place = free_places_.back();
    free_places_.pop_back();
    return place;
  }
  void give_back_place(std::int32_t place) { free_places_.push_back(place); }
  [[nodiscard]] bool is_spare(std::int32_t place) const noexcept {
    return std::find(free_places_.begin(), free_places_.end(), place) != free_places_.end();
  }
  [[nodiscard]] std::size_t free_places() const noexcept { return free_places_.size(); }

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

  /// Takes the idle adapter in `slot` out, for what it holds; its place is spare.
  void evict(std::int32_t slot) {
    at(slot).named = false;
    ++counters.evictions;
    settle();
  }

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

  /// The slot into which content for `name` goes: its own where nobody reads it, else an empty or idle one of
  /// the same region. Errors: `pool_full`, or what says that no wait can help.
  template <VictimPolicy V>
  [[nodiscard]] Result<std::int32_t> choose(std::string_view name, bool pinned, V const& victim) const {
    auto const is_pinned = [&](std::int32_t slot) { return slot != base_slot && slot < pinned_; };
    std::int32_t const waiting = staged(name);
    std::int32_t const resident = published(name);
    bool const into_pinned = pinned || is_pinned(waiting) || is_pinned(resident);
    for (std::int32_t const own : {waiting, resident}) {
      if (own != base_slot && is_pinned(own) == into_pinned && unread(at(own))) return own;
    }
    std::int32_t const first = into_pinned ? 0 : pinned_;
    std::int32_t const last = into_pinned ? pinned_ : static_cast<std::int32_t>(slots.size());
    if (first == last) {
      return fail(Errc::invalid_argument,
                  quoted(name) + ": the pool has " + (into_pinned ? "no" : "only") + " pinned slots");
    }
    std::vector<SlotView> views;
    bool changes = false;  // whether a slot is on its way to being free
    for (std::int32_t slot = first; slot < last; ++slot) {
      views.push_back(view(slot));
      if (into_pinned) views.back().idle = false;  // never evicted
      changes = changes || views.back().state == SlotState::draining || slot == resident || slot == waiting;
    }
    std::optional<std::uint32_t> const chosen = into_pinned ? LruIdle{}(views) : victim(views);
    if (chosen && *chosen < views.size() &&
        (views[*chosen].state == SlotState::empty || views[*chosen].idle)) {
      return first + static_cast<std::int32_t>(*chosen);
    }
    std::string const all = quoted(name) + ": all " + std::to_string(views.size());
    if (into_pinned && !changes) {
      return fail(Errc::out_of_memory,
                  all + " pinned slots are taken, and pinned adapters are never evicted");
    }
    return fail(Errc::pool_full, all + (into_pinned ? " pinned" : "") + " slots are in use");
  }

  /// Puts content into `slot`, where the next publication finds it. An adapter of another name that was there
  /// is evicted now; other content staged under the same name is dropped. Returns its key.
  [[nodiscard]] SlotKey stage(std::int32_t index, Tenant tenant) {
    if (std::int32_t const before = staged(tenant.name); before != base_slot) unstage(at(before));
    Slot& slot = at(index);
    if (slot.staged) unstage(slot);
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
    }
    if (slot.tenant) give_back_place(slot.tenant->place);  // unread since it was staged over
    slot.tenant = std::exchange(slot.staged, std::nullopt);
    slot.named = true;
    slot.blank_due = false;
    slot.uses = 0;
    slot.last_use = ++tick_;
    ++counters.publications;
  }

  /// Takes `name` and its content away.
  [[nodiscard]] Result<void> unload(std::string_view name) {
    std::int32_t const resident = published(name);
    std::int32_t const waiting = staged(name);
    if (resident == base_slot && waiting == base_slot) {
      return fail(Errc::not_found, quoted(name) + ": not in the pool");
    }
    if (resident != base_slot && at(resident).leases > 0) {
      return fail(Errc::slot_busy, quoted(name) + ": " + std::to_string(at(resident).leases) + " leases");
    }
    if (name == active) return fail(Errc::invalid_argument, quoted(name) + ": is the active adapter");
    if (waiting != base_slot) unstage(at(waiting));
    if (resident != base_slot) at(resident).named = false;
    settle();
    ++counters.unloads;
    return {};
  }

  [[nodiscard]] static std::string quoted(std::string_view name) {
    return "adapter '" + std::string(name) + "'";
  }

 private:
  template <class Condition>
  std::int32_t find(Condition const& condition) const noexcept {
    auto const found = std::find_if(slots.begin(), slots.end(), condition);
    return found == slots.end() ? base_slot : static_cast<std::int32_t>(found - slots.begin());
  }

  Lease lease(std::int32_t index) {
    Slot& slot = at(index);
    ++slot.leases;
    ++slot.uses;
    ++counters.leases;
    slot.last_use = ++tick_;
    return Lease(shared_from_this(), SlotKey{index, slot.tenant->tenancy}, slot.tenant->id);
  }

  void unstage(Slot& slot) {
    give_back_place(slot.staged->place);
    slot.staged.reset();
  }

  std::int32_t pinned_;
  std::vector<std::int32_t> free_places_;
  std::uint64_t tick_ = 0;
  std::uint64_t tenancies_ = 0;
};

}  // namespace detail

inline void Lease::release() noexcept {
  if (auto const ledger = std::exchange(ledger_, nullptr)) ledger->release(key_.slot);
  key_ = {};
  id_ = base_id;
}

}  // namespace atlas::lora::inline v0
