// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/snapshot.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <doctest/doctest.h>

#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

// Floats of a pair at site 0, q [6, 10]: A is [rank, 10], B is [6, rank rounded up to 8].
constexpr std::size_t bytes_of_q(std::size_t rank) { return (rank * 10 + 6 * ((rank + 7) / 8 * 8)) * 4; }
static_assert(bytes_of_q(8) == 512 && bytes_of_q(3) == 312);

TEST_CASE("a snapshot of a new pool has empty slots, all bytes of the pre-flight, and nothing done") {
  Pool pool = make_pool({.max_slots = 3, .spare = 2, .max_rank = 8, .pinned = 1});
  PoolSnapshot const now = pool.snapshot();
  REQUIRE(now.slots.size() == 3);
  CHECK(now.memory == *Pool::memory_needed(pool.shape(), pool.options()));
  CHECK(now.content_bytes == 0);
  CHECK(now.spare == 5);
  CHECK(now.counters == PoolCounters{});
  SlotStatus pinned;
  pinned.pinned = true;
  CHECK(now.slots[0] == pinned);
  CHECK(now.slots[1] == SlotStatus{});
}

TEST_CASE("a snapshot says who is where, how large, how new, how used, and which is active") {
  Pool pool = make_pool({.max_slots = 2, .spare = 2, .max_rank = 8, .pinned = 1});
  load(pool, "start", tiny_adapter(pool.shape(), 1, 3, {0}), {.pinned = true});
  step(pool);
  Staged const staged = load(pool, "t", tiny_adapter(pool.shape(), 2, 8, {0}));
  SlotStatus const waiting = pool.snapshot().slots[1];
  CHECK(waiting.state == SlotState::staged);
  CHECK(waiting.name == "t");
  CHECK(waiting.id == staged.id);
  CHECK(waiting.tenancy == staged.key.tenancy);
  step(pool);
  REQUIRE(pool.set_active("t").has_value());
  Lease const lease = acquire(pool, "t");
  Lease const fork = acquire(pool, "t");
  PoolSnapshot const now = pool.snapshot();
  CHECK(now.slots[0].name == "start");
  CHECK(now.slots[0].rank == 3);
  CHECK(now.slots[0].bytes == bytes_of_q(3));
  CHECK(now.slots[0].pinned);
  CHECK_FALSE(now.slots[0].active);
  CHECK(now.slots[1].state == SlotState::ready);
  CHECK(now.slots[1].rank == 8);
  CHECK(now.slots[1].bytes == bytes_of_q(8));
  CHECK(now.slots[1].leases == 2);
  CHECK(now.slots[1].uses == 2);
  CHECK(now.slots[1].last_use == 4);  // two publications and two leases
  CHECK(now.slots[1].generation == 0);
  CHECK(now.slots[1].active);
  CHECK_FALSE(now.slots[1].pinned);
  CHECK(now.content_bytes == bytes_of_q(3) + bytes_of_q(8));
  CHECK(now.spare == 2);
}

TEST_CASE("a name's generation moves with its content and is back with none of its earlier ones") {
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8});
  for (std::uint64_t generation = 0; generation < 4; ++generation) {
    auto const content = static_cast<std::uint32_t>(generation % 2 + 1);  // 1, 2, 1, 2
    load(pool, "t", tiny_adapter(pool.shape(), content, 8, {0}));
    CHECK(pool.snapshot().slots[0].generation == generation);
    CHECK(pool.snapshot().slots[0].id == adapter_id("t", generation));
    step(pool);
    step(pool);
  }
}

TEST_CASE("content that is replaced while it is leased is counted until its readers are done") {
  Pool pool = make_pool({.max_slots = 2, .spare = 1, .max_rank = 8});
  load(pool, "t", tiny_adapter(pool.shape(), 1, 8, {0}));
  step(pool);
  Lease reader = acquire(pool, "t");
  load(pool, "t", tiny_adapter(pool.shape(), 2, 3, {0}));
  step(pool);
  PoolSnapshot const both = pool.snapshot();
  CHECK(both.content_bytes == bytes_of_q(8) + bytes_of_q(3));
  CHECK(both.spare == 1);
  CHECK(both.slots[0].state == SlotState::draining);
  CHECK(both.slots[0].leases == 1);
  reader.release();
  step(pool);
  CHECK(pool.snapshot().content_bytes == bytes_of_q(3));
  CHECK(pool.snapshot().spare == 2);
  CHECK(pool.snapshot().slots[0].name.empty());
}

TEST_CASE("counters count loads, hits, leases, publications, evictions, unloads, and refusals by reason") {
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8});
  Adapter const adapter = tiny_adapter(pool.shape(), 1, 8, {0});
  load(pool, "a", adapter);
  load(pool, "a", adapter);                                        // a hit
  CHECK(code(pool.acquire("a")) == Errc::slot_busy);               // 1
  CHECK(code(pool.begin_step(stream)) == Errc::ok);                // publishes a
  CHECK(code(pool.begin_step(stream)) == Errc::invalid_argument);  // 1
  CHECK(code(pool.end_step(stream)) == Errc::ok);
  CHECK(code(pool.end_step(stream)) == Errc::invalid_argument);  // 2
  Lease lease = acquire(pool, "a");
  CHECK(code(pool.load("b", adapter)) == Errc::pool_full);  // 1
  CHECK(code(pool.unload("a")) == Errc::slot_busy);         // 2
  lease.release();
  load(pool, "b", adapter);                                       // evicts a
  step(pool);                                                     // publishes b
  CHECK(code(pool.acquire(lease.key())) == Errc::stale);          // 1
  CHECK(code(pool.set_active("a")) == Errc::not_found);           // 1
  CHECK(code(pool.load("", adapter)) == Errc::invalid_argument);  // 3
  CHECK(code(pool.load("c", tiny_adapter(pool.shape(), 2, 9, {0}))) == Errc::rank_exceeds_pool);
  pool.backend().script().capturing.insert(stream);
  CHECK(code(pool.begin_step(stream)) == Errc::capturing);
  pool.backend().script().capturing.clear();
  CHECK(code(pool.unload("b")) == Errc::ok);
  PoolCounters expected;
  expected.loads = 2;
  expected.hits = 1;
  expected.leases = 1;
  expected.publications = 2;
  expected.evictions = 1;
  expected.unloads = 1;
  auto const refusals = [&](Errc reason) -> std::uint64_t& {
    return expected.refusals[static_cast<std::size_t>(reason)];
  };
  refusals(Errc::slot_busy) = 2;
  refusals(Errc::invalid_argument) = 3;
  refusals(Errc::pool_full) = 1;
  refusals(Errc::stale) = 1;
  refusals(Errc::not_found) = 1;
  refusals(Errc::rank_exceeds_pool) = 1;
  refusals(Errc::capturing) = 1;
  CHECK(pool.snapshot().counters == expected);
  CHECK(expected.refused(Errc::invalid_argument) == 3);
  CHECK(expected.refused(static_cast<Errc>(200)) == 0);
}

TEST_CASE("a snapshot calls no backend and changes nothing") {
  Pool pool = make_pool({.max_slots = 2, .spare = 1, .max_rank = 8});
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0}));
  step(pool);
  auto const calls = pool.backend().script().calls;
  PoolSnapshot const first = pool.snapshot();
  CHECK(pool.snapshot() == first);
  CHECK(pool.backend().script().calls == calls);
}

}  // namespace
