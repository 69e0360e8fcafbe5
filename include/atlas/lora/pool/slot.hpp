// SPDX-License-Identifier: AGPL-3.0-only
//
// One slot of a pool, who is in it, and how far a stream that reads it has come.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/pool/lease_gate.hpp"

namespace atlas::lora::inline v0 {
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

/// Steps of all streams are numbered together, from 1, as they begin.
inline constexpr std::uint64_t no_step = ~std::uint64_t{0};

/// Where one stream stands.
struct StreamProgress {
  std::uint64_t open = 0;          ///< the step that is open; 0 for none
  std::uint64_t oldest = no_step;  ///< the oldest step whose work is not known to be done
  std::uint64_t passed = 0;        ///< the last step whose work, like that of all before, is done
};

struct Slot {
  std::optional<Tenant> tenant;  ///< whom the slot's record in the tables speaks of
  std::optional<Tenant> staged;  ///< whom the next publication puts there
  bool named = false;            ///< whether `tenant` is the one that its name finds
  bool blank_due = false;        ///< the record still speaks of a tenant that has gone
  std::size_t writer = 0;        ///< the stream, by index, that wrote the record last, or tried to
  std::uint64_t written = 0;     ///< the step that it did so for; 0 for none

  // What leases touch, which take no lock; on a cache line of their own.
  alignas(64) LeaseGate gate;  ///< open exactly while a lease may be had by name
  std::atomic<std::uint64_t> last_use{0};
  std::atomic<std::uint64_t> uses{0};
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
