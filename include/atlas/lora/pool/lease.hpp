// SPDX-License-Identifier: AGPL-3.0-only
//
// The right to use a slot, and what it is acquired by.
#pragma once

#include <cstdint>
#include <utility>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// One tenancy of one slot. `tenancy` is never used twice in a pool, so a key whose tenant has gone finds
/// nobody else. A default key is base.
struct SlotKey {
  std::int32_t slot = base_slot;  ///< the row slot
  std::uint64_t tenancy = 0;      ///< counted through the pool, from 1; 0 for base

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
      : ledger_(std::exchange(other.ledger_, nullptr)),
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
  Lease(detail::SlotLedger* ledger, SlotKey key, std::uint64_t id) noexcept
      : ledger_(ledger), key_(key), id_(id) {}

  detail::SlotLedger* ledger_ = nullptr;  // which stays for as long as it has leases
  SlotKey key_;
  std::uint64_t id_ = base_id;
};

}  // namespace atlas::lora::inline v0
