// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

Adapter small(Pool const& pool, std::uint32_t content) { return tiny_adapter(pool.shape(), content, 8, {0}); }

TEST_CASE("unload is refused with the number of leases until the last is released") {
  Pool pool = make_pool({.max_slots = 2, .max_rank = 8});
  load(pool, "a", small(pool, 1));
  step(pool);
  std::vector<Lease> leases;  // 3 requests of 16 samples
  for (int i = 0; i < 48; ++i) leases.push_back(acquire(pool, "a"));
  CHECK(pool.view(0).leases == 48);
  CHECK(pool.view(0).uses == 48);
  auto const refused = pool.unload("a");
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().code == Errc::slot_busy);
  CHECK(retryable(refused.error().code));
  CHECK(refused.error().message.find("48") != std::string::npos);
  while (leases.size() > 1) leases.pop_back();  // some finish, some are cancelled: all are released
  CHECK(code(pool.unload("a")) == Errc::slot_busy);
  leases.clear();
  CHECK(pool.view(0).leases == 0);
  CHECK(pool.unload("a").has_value());
  CHECK(code(pool.unload("a")) == Errc::not_found);
  CHECK(code(pool.acquire("a")) == Errc::not_found);
  step(pool);
  CHECK(slot_holds(pool, 0, nullptr));  // a row that still names the slot gets base
}

TEST_CASE("leases move, and are released once") {
  Pool pool = make_pool({.max_slots = 1, .max_rank = 8});
  load(pool, "a", small(pool, 1));
  step(pool);
  Lease first = acquire(pool, "a");
  Lease second = std::move(first);
  CHECK(first.slot() == base_slot);  // NOLINT: what a moved-from lease is, is part of the promise
  CHECK(second.slot() == 0);
  CHECK(pool.view(0).leases == 1);
  second = acquire(pool, "a");
  CHECK(pool.view(0).leases == 1);
  Lease& same = second;
  second = std::move(same);
  CHECK(second.slot() == 0);
  second.release();
  second.release();
  CHECK(second.id() == base_id);
  CHECK(pool.view(0).leases == 0);
}

TEST_CASE("a lease may outlive its pool") {
  Lease lease;
  {
    Pool pool = make_pool({.max_slots = 1, .max_rank = 8});
    load(pool, "a", small(pool, 1));
    step(pool);
    lease = acquire(pool, "a");
  }
  CHECK(lease.slot() == 0);
  lease.release();
  CHECK(lease.slot() == base_slot);
}

TEST_CASE("a thousand loads and unloads leave memory as it was, and none is left with the pool") {
  ScriptedBackend backend;
  {
    Pool pool = make_pool({.max_slots = 2, .max_rank = 8}, backend);
    step(pool);
    std::size_t const bytes = backend.script().memory.live_bytes();
    std::size_t const handles = backend.script().memory.live_handles();
    auto const needed = Pool::memory_needed(pool.shape(), pool.options());
    REQUIRE(needed.has_value());
    CHECK(bytes == needed->device_bytes + needed->pinned_bytes);
    for (std::uint32_t i = 0; i < 1000; ++i) {
      load(pool, "a", small(pool, i + 1));
      step(pool);
      acquire(pool, "a").release();
      REQUIRE(pool.unload("a").has_value());
      step(pool);
    }
    CHECK(backend.script().memory.live_bytes() == bytes);
    CHECK(backend.script().memory.live_handles() == handles);
    step(pool);
    CHECK(pool.view(0).state == SlotState::empty);
  }
  CHECK(backend.script().memory.live_bytes() == 0);
  CHECK(backend.script().memory.live_handles() == 0);
}

TEST_CASE("a load finds no spare memory until the work that reads the old content is done") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8}, backend);
  load(pool, "a", small(pool, 1));
  step(pool);
  backend.script().deferred = true;
  load(pool, "a", small(pool, 2));  // into the one spare place
  REQUIRE(pool.begin_step(stream).has_value());
  auto const busy = pool.load("a", small(pool, 3));
  REQUIRE_FALSE(busy.has_value());
  CHECK(busy.error().code == Errc::pool_full);  // the step that publishes 2 reads its slot's record
  REQUIRE(pool.end_step(stream).has_value());
  CHECK(code(pool.load("a", small(pool, 3))) == Errc::pool_full);
  backend.run_all();
  CHECK(pool.load("a", small(pool, 3)).has_value());
}

TEST_CASE("with two slots and one spare place, the third load before a step is told to retry") {
  Pool pool = make_pool({.max_slots = 2, .spare = 1, .max_rank = 8});
  load(pool, "a", small(pool, 1));
  load(pool, "b", small(pool, 2));
  step(pool);
  load(pool, "a", small(pool, 3));
  auto const busy = pool.load("b", small(pool, 4));
  REQUIRE_FALSE(busy.has_value());
  CHECK(busy.error().code == Errc::spare_busy);
  CHECK(retryable(busy.error().code));
  step(pool);
  CHECK(code(pool.load("b", small(pool, 4))) == Errc::ok);
}

TEST_CASE("content staged twice is published once, as the last") {
  Pool pool = make_pool({.max_slots = 1, .spare = 2, .max_rank = 8});
  Adapter const second = small(pool, 2);
  Staged const dropped = load(pool, "a", small(pool, 1));
  load(pool, "a", second);
  step(pool);
  CHECK(slot_holds(pool, 0, &second));
  CHECK(code(pool.acquire(dropped.key)) == Errc::stale);
}

TEST_CASE("unloading what is only staged gives its memory back and leaves its slot empty") {
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8});
  for (std::uint32_t i = 1; i <= 5; ++i) {
    load(pool, "a", small(pool, i));
    REQUIRE(pool.unload("a").has_value());
  }
  CHECK(pool.view(0).state == SlotState::empty);
  step(pool);
  CHECK(slot_holds(pool, 0, nullptr));
}

TEST_CASE("pinned slots are never evicted, and a full pinned region is an error without a wait") {
  Pool pool = make_pool({.max_slots = 3, .spare = 2, .max_rank = 8, .pinned = 2});
  CHECK(load(pool, "cached", small(pool, 1)).key.slot == 2);
  CHECK(load(pool, "startup", small(pool, 2), {.pinned = true}).key.slot == 0);
  step(pool);
  CHECK(load(pool, "other", small(pool, 3)).key.slot ==
        2);  // evicts the cached one, with a pinned slot empty
  CHECK(load(pool, "third", small(pool, 4), {.pinned = true}).key.slot == 1);
  step(pool);
  auto const full = pool.load("fourth", small(pool, 5), {.pinned = true});
  CHECK(code(full) == Errc::out_of_memory);
  CHECK_FALSE(retryable(code(full)));
  CHECK(load(pool, "startup", small(pool, 6)).key.slot == 0);  // a replacement stays pinned
  step(pool);
  step(pool);
  Lease const lease = acquire(pool, "startup");
  CHECK(code(pool.load("startup", small(pool, 7))) == Errc::pool_full);
  CHECK(pool.names() == std::vector<std::string>{"startup", "third", "other"});
}

TEST_CASE("a cached adapter can be pinned, and a pool may have slots of one kind alone") {
  Pool pool = make_pool({.max_slots = 2, .max_rank = 8, .pinned = 1});
  CHECK(load(pool, "a", small(pool, 1)).key.slot == 1);
  step(pool);
  CHECK(load(pool, "a", small(pool, 1), {.pinned = true}).key.slot == 0);
  step(pool);
  CHECK(pool.names() == std::vector<std::string>{"a"});
  CHECK(pool.find("a")->slot == 0);
  Pool all_cache = make_pool({.max_slots = 1, .max_rank = 8});
  CHECK(code(all_cache.load("a", small(pool, 1), {.pinned = true})) == Errc::invalid_argument);
  Pool all_pinned = make_pool({.max_slots = 1, .max_rank = 8, .pinned = 1});
  CHECK(code(all_pinned.load("a", small(pool, 1))) == Errc::invalid_argument);
}

TEST_CASE("the active adapter follows its name, is not evicted and is not unloaded") {
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8});
  CHECK(pool.active() == SlotKey{});
  CHECK_FALSE(*pool.acquire_active());
  CHECK(code(pool.set_active("a")) == Errc::not_found);
  load(pool, "a", small(pool, 1));
  CHECK(code(pool.set_active("a")) == Errc::not_found);
  step(pool);
  REQUIRE(pool.set_active("a").has_value());
  CHECK(pool.active() == *pool.find("a"));
  CHECK(code(pool.load("b", small(pool, 2))) == Errc::pool_full);
  CHECK(code(pool.unload("a")) == Errc::invalid_argument);
  SlotKey const before = pool.active();
  load(pool, "a", small(pool, 3));
  CHECK(code(pool.acquire_active()) == Errc::slot_busy);
  step(pool);
  CHECK(pool.active() != before);
  CHECK(pool.acquire_active()->slot() == 0);
  REQUIRE(pool.set_active("").has_value());
  CHECK(pool.active() == SlotKey{});
  step(pool);
  CHECK(pool.unload("a").has_value());
}

struct NewestIdle {
  std::optional<std::uint32_t> operator()(std::span<SlotView const> views) const noexcept {
    std::optional<std::uint32_t> newest;
    for (std::uint32_t i = 0; i < views.size(); ++i) {
      if (views[i].state == SlotState::empty) return i;
      if (views[i].idle && (!newest || views[i].last_use > views[*newest].last_use)) newest = i;
    }
    return newest;
  }
};
struct AlwaysFirst {
  std::optional<std::uint32_t> operator()(std::span<SlotView const>) const noexcept { return 0U; }
};

TEST_CASE("a policy of the engine's own chooses, but never a slot in use") {
  auto newest =
      AdapterPool<float, ScriptedBackend, NewestIdle>::create(tiny_shape(), {.max_slots = 2, .max_rank = 8});
  REQUIRE(newest.has_value());
  Adapter const adapter = tiny_adapter(newest->shape(), 1, 8, {0});
  load(*newest, "a", adapter);
  load(*newest, "b", adapter);
  step(*newest);
  CHECK(load(*newest, "c", adapter).key.slot == 1);

  auto first =
      AdapterPool<float, ScriptedBackend, AlwaysFirst>::create(tiny_shape(), {.max_slots = 2, .max_rank = 8});
  REQUIRE(first.has_value());
  load(*first, "a", adapter);
  step(*first);
  Lease const lease = acquire(*first, "a");
  CHECK(code(first->load("b", adapter)) == Errc::pool_full);
  CHECK(first->names() == std::vector<std::string>{"a"});
}

}  // namespace
