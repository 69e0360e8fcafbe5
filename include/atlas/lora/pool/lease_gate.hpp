// SPDX-License-Identifier: AGPL-3.0-only
//
// Who may enter a slot, and how many are in it, in one atomic word: leases come and go without a lock, and a
// slot is taken from its tenant only at a moment when nobody is in it.
#pragma once

#include <atomic>
#include <cstdint>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

/// What became of an attempt to enter.
enum class Entry : std::uint8_t {
  entered,
  closed,  ///< another tenancy, or this one and nobody may enter any more
  full,    ///< as many leases as can be counted
};

/// The gate of one slot. `enter` and `leave` may be called from any thread at any time and never wait; all
/// else by one thread at a time, which holds the ledger's mutex. `Atomic` is `std::atomic`, or a test's.
///
/// The word is a tenancy, a bit for whether its name finds it (open), one for whether the pool has gone
/// (abandoned), and the leases on it. A tenancy may
/// be entered while it is open, and, once it is not, while others are in it. So a word that is closed and
/// without leases stays as it is until the next `admit` or `reopen`, and what it guarded can be taken apart.
template <template <class> class Atomic = std::atomic>
class BasicLeaseGate {
 public:
  /// Leases that one slot can have at one time.
  static constexpr std::uint64_t most_leases = (std::uint64_t{1} << 20) - 1;
  /// Tenancies that a pool can ever have: a thousand each second for 139 years.
  static constexpr std::uint64_t last_tenancy = (std::uint64_t{1} << 42) - 1;

  /// Takes one lease of `tenancy`, if it may be had.
  [[nodiscard]] Entry enter(std::uint64_t tenancy) noexcept {
    std::uint64_t word = word_.load(std::memory_order_relaxed);
    for (;;) {
      bool const may = (word & open_bit) != 0 || (word & most_leases) != 0;
      if (word >> tenancy_shift != tenancy || !may) return Entry::closed;
      if ((word & most_leases) == most_leases) return Entry::full;
      if (word_.compare_exchange_weak(word, word + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        return Entry::entered;
      }
    }
  }

  /// Gives one lease back. Steps up to number `step` may still read the slot: `last_step` says so to whoever
  /// sees that the lease has gone. Returns whether the gate is abandoned and this was the last lease;
  /// otherwise what the gate belongs to may be gone by now.
  [[nodiscard]] bool leave(std::uint64_t step) noexcept {
    std::uint64_t last = last_step_.load(std::memory_order_relaxed);
    while (last < step && !last_step_.compare_exchange_weak(last, step, std::memory_order_relaxed,
                                                            std::memory_order_relaxed)) {
    }
    std::uint64_t const word = word_.fetch_sub(1, std::memory_order_acq_rel);
    return (word & abandoned_bit) != 0 && (word & most_leases) == 1;
  }

  /// Opens the gate for a new tenancy; it must be closed and without leases.
  void admit(std::uint64_t tenancy) noexcept {
    ATLAS_ASSERT(tenancy != 0 && tenancy <= last_tenancy, "a tenancy is beyond what a word holds");
    word_.store(tenancy << tenancy_shift | open_bit, std::memory_order_release);
  }

  /// Closes the gate if nobody is in; it may be closed already. Returns the leases that prevent it.
  [[nodiscard]] std::uint64_t close() noexcept {
    std::uint64_t word = word_.load(std::memory_order_acquire);
    while ((word & most_leases) == 0) {
      if (word_.compare_exchange_weak(word, word & ~open_bit, std::memory_order_acquire,
                                      std::memory_order_acquire)) {
        return 0;
      }
    }
    return word & most_leases;
  }

  /// Closes the gate whoever is in; it can be entered only until the last one leaves.
  void cut() noexcept { word_.fetch_and(~open_bit, std::memory_order_acquire); }

  /// Opens a closed gate for the tenancy that it had.
  void reopen() noexcept { word_.fetch_or(open_bit, std::memory_order_release); }

  /// The pool has gone. Returns whether somebody is still in; then the last `leave` says so.
  [[nodiscard]] bool abandon() noexcept {
    return (word_.fetch_or(abandoned_bit, std::memory_order_acq_rel) & most_leases) != 0;
  }

  /// Whether the gate is open.
  [[nodiscard]] bool open() const noexcept { return (word_.load(std::memory_order_acquire) & open_bit) != 0; }
  /// Leases now; what those who have left did happened before.
  [[nodiscard]] std::uint64_t leases() const noexcept {
    return word_.load(std::memory_order_acquire) & most_leases;
  }
  /// The last step that leases given back so far may have been used in; 0 for none.
  [[nodiscard]] std::uint64_t last_step() const noexcept {
    return last_step_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr std::uint64_t open_bit = most_leases + 1;
  static constexpr std::uint64_t abandoned_bit = open_bit << 1;
  static constexpr int tenancy_shift = 22;

  Atomic<std::uint64_t> word_{0};
  Atomic<std::uint64_t> last_step_{0};
};

using LeaseGate = BasicLeaseGate<>;

}  // namespace detail
}  // namespace atlas::lora::inline v0
