// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

// A pool with the names in slots 0, 1, ..., each with a content of its own.
Pool pool_with(std::vector<std::string> const& names, std::int32_t max_slots) {
  Pool pool = make_pool({.max_slots = max_slots, .spare = 1, .max_rank = 8});
  for (std::size_t i = 0; i < names.size(); ++i) {
    load(pool, names[i], tiny_adapter(pool.shape(), static_cast<std::uint32_t>(i + 1), 8, every_site));
    step(pool);
  }
  return pool;
}

TEST_CASE("leases by key and on the active adapter count on the slot that they resolved to, and age it") {
  Pool pool = pool_with({"zero", "one"}, 2);
  SlotKey const zero = *pool.find("zero");
  REQUIRE(pool.set_active("one").has_value());
  std::uint64_t const tick = pool.view(1).last_use;
  auto first = pool.acquire(zero);
  REQUIRE(first.has_value());
  CHECK(pool.view(0).leases == 1);
  CHECK(pool.view(0).last_use == tick + 1);
  auto active = pool.acquire_active();
  REQUIRE(active.has_value());
  CHECK(active->slot() == 1);
  CHECK(pool.view(1).last_use == tick + 2);
  auto again = pool.acquire(zero);
  REQUIRE(again.has_value());
  CHECK(pool.view(0).leases == 2);
  CHECK(pool.view(0).last_use == tick + 3);
  first->release();
  again->release();
  CHECK(pool.view(0).leases == 0);
  CHECK(pool.view(0).last_use == tick + 3);
  CHECK(pool.view(1).last_use == tick + 2);
  again->release();
  CHECK(pool.view(0).leases == 0);
  CHECK(code(pool.acquire(SlotKey{99, zero.tenancy})) == Errc::stale);
  CHECK(code(pool.acquire(SlotKey{-1, zero.tenancy})) == Errc::stale);
}

TEST_CASE("a rotation between a lease and its release hits no other slot's count") {
  Pool pool = pool_with({"a", "b"}, 2);
  REQUIRE(pool.set_active("a").has_value());
  Lease request = *pool.acquire_active();
  REQUIRE(pool.set_active("b").has_value());  // leases on either adapter do not hinder it
  Lease const later = *pool.acquire_active();
  CHECK(request.slot() == 0);
  CHECK(later.slot() == 1);
  CHECK(pool.view(0).leases == 1);
  CHECK(pool.view(1).leases == 1);
  request.release();
  CHECK(pool.view(0).leases == 0);
  CHECK(pool.view(1).leases == 1);
}

TEST_CASE("a rotation moves no content, no table, no id and no lease, and costs the device nothing") {
  Pool pool = pool_with({"a", "b"}, 2);
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const b = tiny_adapter(pool.shape(), 2, 8, every_site);
  auto const ids = std::pair(pool.adapter_id(0), pool.adapter_id(1));
  auto const slots = std::pair(*pool.find("a"), *pool.find("b"));
  auto const calls = pool.backend().script().calls;
  for (std::string const name : {"a", "b", "b", "", "a"}) {
    REQUIRE(pool.set_active(name).has_value());
    CHECK(pool.active() == (name.empty() ? SlotKey{} : *pool.find(name)));
  }
  CHECK(pool.backend().script().calls == calls);
  CHECK(slot_holds(pool, 0, &a));
  CHECK(slot_holds(pool, 1, &b));
  CHECK(ids == std::pair(pool.adapter_id(0), pool.adapter_id(1)));
  CHECK(slots == std::pair(*pool.find("a"), *pool.find("b")));
}

TEST_CASE("after a rotation every site shows the new adapter, and base at sites that it does not adapt") {
  Pool pool = make_pool({.max_slots = 2, .spare = 1, .max_rank = 8});
  Adapter const full = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const sparse = tiny_adapter(pool.shape(), 2, 3, {1});
  load(pool, "full", full);
  load(pool, "sparse", sparse);
  step(pool);
  REQUIRE(pool.set_active("full").has_value());
  CHECK(slot_holds(pool, pool.acquire_active()->slot(), &full));
  REQUIRE(pool.set_active("sparse").has_value());
  CHECK(slot_holds(pool, pool.acquire_active()->slot(), &sparse));
  step(pool);
  load(pool, "sparse", full);  // and likewise after other content under the active name
  step(pool);
  CHECK(slot_holds(pool, pool.acquire_active()->slot(), &full));
}

TEST_CASE("a rotation to a name that is not there is refused and the active one stays") {
  Pool pool = pool_with({"a"}, 2);
  REQUIRE(pool.set_active("a").has_value());
  CHECK(code(pool.set_active("b")) == Errc::not_found);
  CHECK(pool.active() == *pool.find("a"));
  load(pool, "b", tiny_adapter(pool.shape(), 9, 8, {0}));
  CHECK(code(pool.set_active("b")) == Errc::not_found);  // staged alone
  step(pool);
  CHECK(pool.set_active("b").has_value());
}

TEST_CASE("a load activates nobody, and base stays base whoever is active") {
  Pool pool = pool_with({"a", "b"}, 3);
  CHECK(pool.active() == SlotKey{});
  CHECK_FALSE(*pool.acquire_active());
  REQUIRE(pool.set_active("a").has_value());
  load(pool, "c", tiny_adapter(pool.shape(), 3, 8, {0}));
  step(pool);
  CHECK(pool.active() == *pool.find("a"));
  CHECK(pool.adapter_id(base_slot) == base_id);
  CHECK(Lease().slot() == base_slot);
}

TEST_CASE("a second load that follows at once does not take the slot of the first") {
  Pool pool = pool_with({"a", "b"}, 2);
  SlotKey const first = load(pool, "c", tiny_adapter(pool.shape(), 3, 8, {0})).key;
  step(pool);
  step(pool);
  SlotKey const second = load(pool, "d", tiny_adapter(pool.shape(), 4, 8, {0})).key;
  CHECK(first.slot == 0);
  CHECK(second.slot == 1);
}

TEST_CASE("ids belong to names wherever they are, and slots without a name have base's") {
  Pool pool = pool_with({"alpha", "beta"}, 3);
  CHECK(pool.adapter_id(0) == 0x8ac625bb85ed202bU);
  CHECK(pool.adapter_id(1) == 0x7627619b954620a7U);
  CHECK(pool.adapter_id(2) == base_id);
  CHECK(pool.adapter_id(99) == base_id);
  CHECK(pool.names() == std::vector<std::string>{"alpha", "beta"});
  CHECK(code(pool.load("", tiny_adapter(pool.shape(), 3, 8, {0}))) == Errc::invalid_argument);
  CHECK(code(pool.find("")) == Errc::not_found);
}

TEST_CASE("other content moves a name's id by one generation, and a request keeps the id of its prefill") {
  Pool pool = pool_with({"sparky"}, 2);
  Lease const prefilled = acquire(pool, "sparky");
  CHECK(prefilled.id() == 0x582352aca69bb7a9U);
  load(pool, "sparky", tiny_adapter(pool.shape(), 2, 8, {0}));
  step(pool);
  CHECK(acquire(pool, "sparky").id() == 0x71723ddf83013ca8U);
  CHECK(prefilled.id() == 0x582352aca69bb7a9U);
  CHECK(pool.acquire(prefilled.key())->id() == prefilled.id());  // resumed after a preemption
}

TEST_CASE("when the active adapter's new content cannot be published, it is unreadable and then whole") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8}, backend);
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, every_site));
  step(pool);
  REQUIRE(pool.set_active("a").has_value());
  Adapter const next = tiny_adapter(pool.shape(), 2, 3, {4});
  load(pool, "a", next);
  backend.script().fail_at = backend.script().calls + 2;  // is_capturing, query, then the copy
  CHECK(code(pool.begin_step(stream)) == Errc::device);
  backend.script().fail_at = -1;
  CHECK(code(pool.acquire_active()) == Errc::slot_busy);
  CHECK(code(pool.unload("a")) == Errc::invalid_argument);  // it is still the active one
  step(pool);
  CHECK(slot_holds(pool, pool.acquire_active()->slot(), &next));
}

}  // namespace
