// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

constexpr PoolOptions roomy{.max_slots = 2, .spare = 1, .max_rank = 16, .biases = true};

TEST_CASE("a pool that cannot be made whole leaves nothing behind") {
  std::int64_t failures = 0;
  for (bool came = true; came; ++failures) {
    ScriptedBackend backend;
    arm(backend, failures);
    {
      auto const pool = Pool::create(tiny_shape(), roomy, backend);
      CHECK(pool.has_value() == (backend.script().calls <= backend.script().fail_at));
      if (!pool) CHECK(pool.error().code == Errc::device);
    }
    came = disarm(backend);
    CHECK(backend.script().memory.live_bytes() == 0);
    CHECK(backend.script().memory.live_handles() == 0);
  }
  CHECK(failures > 7);  // stream, two events, two allocations, fill, record, synchronise
}

TEST_CASE("a load that fails anywhere leaves the old content whole, and the next one succeeds") {
  ScriptedBackend backend;
  Pool pool = make_pool(roomy, backend);
  Adapter old_content = tiny_adapter(pool.shape(), 1, 8, every_site, true);
  load(pool, "a", old_content);
  step(pool);
  step(pool);
  std::int64_t failures = 0;
  std::uint32_t content = 2;
  for (bool came = true; came; ++failures, ++content) {
    INFO("failing call " << failures);
    Adapter const new_content = tiny_adapter(pool.shape(), content, 13, {0, 2, 4}, true);
    SlotKey const before = *pool.find("a");
    std::uint64_t const id = pool.adapter_id(before.slot);
    arm(backend, failures);
    auto const staged = pool.load("a", new_content);
    came = disarm(backend);
    CHECK(staged.has_value() == !came);
    if (!staged) {
      CHECK(staged.error().code == Errc::device);
      CHECK(*pool.find("a") == before);
      CHECK(pool.adapter_id(before.slot) == id);
      CHECK(pool.view(before.slot).state == SlotState::ready);
      CHECK(acquire(pool, "a").key() == before);
      CHECK(slot_holds(pool, before.slot, &old_content));
      step(pool);  // publishes nothing
      CHECK(slot_holds(pool, before.slot, &old_content));
      CHECK(pool.load("a", new_content).has_value());  // no memory was lost
    }
    step(pool);
    CHECK(slot_holds(pool, acquire(pool, "a").slot(), &new_content));
    step(pool);
    old_content = new_content;
  }
  CHECK(failures > 20);  // 3 pairs with A, B and bias, waits and polls
}

// A pool in which the next step publishes a replacement, an eviction and a blank record, with a reader of
// another stream that must go on after them.
struct Eventful {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 4, .spare = 2, .max_rank = 16}, backend);
  Adapter kept = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter replaced = tiny_adapter(pool.shape(), 2, 8, every_site);
  Adapter gone = tiny_adapter(pool.shape(), 3, 8, every_site);
  Adapter replacement = tiny_adapter(pool.shape(), 4, 4, {1});
  Adapter arriving = tiny_adapter(pool.shape(), 5, 16, {2, 3});

  Eventful() {
    load(pool, "replaced", replaced);
    load(pool, "gone", gone);
    load(pool, "kept", kept);
    step(pool, 2);
    step(pool);
    REQUIRE(pool.unload("gone").has_value());
    load(pool, "replaced", replacement);
  }
};

TEST_CASE("a step that fails to begin publishes nothing, and the next one publishes all") {
  std::int64_t failures = 0;
  for (bool came = true; came; ++failures) {
    INFO("failing call " << failures);
    Eventful e;
    Lease const lease = acquire(e.pool, "kept");
    arm(e.backend, failures);
    auto const begun = e.pool.begin_step(stream);
    came = disarm(e.backend);
    CHECK(begun.has_value() == !came);
    if (!begun) {
      CHECK(begun.error().code == Errc::device);
      CHECK(code(e.pool.end_step(stream)) == Errc::invalid_argument);  // no step is open
      CHECK(code(e.pool.acquire("replaced")) == Errc::slot_busy);      // neither the old nor the new, yet
      CHECK(slot_holds(e.pool, lease.slot(), &e.kept));
      REQUIRE(e.pool.begin_step(stream).has_value());
    }
    CHECK(slot_holds(e.pool, acquire(e.pool, "replaced").slot(), &e.replacement));
    CHECK(slot_holds(e.pool, 1, nullptr));
    CHECK(slot_holds(e.pool, lease.slot(), &e.kept));
    REQUIRE(e.pool.end_step(stream).has_value());
    CHECK(load(e.pool, "arriving", e.arriving).key.slot != lease.slot());
    step(e.pool);
    CHECK(slot_holds(e.pool, acquire(e.pool, "arriving").slot(), &e.arriving));
  }
  CHECK(failures == 6 + 1);  // captured?, copy, fill, record, the other captured?, wait; and none of them
}

TEST_CASE("after a step that failed to begin, other loads and unloads find no half-written record") {
  for (std::int64_t failing = 0; failing < 12; ++failing) {
    for (bool const unloads : {false, true}) {
      INFO("failing call " << failing << std::string(unloads ? ", then unload" : ", then load"));
      Eventful e;
      arm(e.backend, failing);
      static_cast<void>(e.pool.begin_step(stream));
      if (!disarm(e.backend)) REQUIRE(e.pool.end_step(stream).has_value());
      Adapter const latest = tiny_adapter(e.pool.shape(), 6, 5, {0, 4});
      if (unloads) {
        REQUIRE(e.pool.unload("replaced").has_value());
        CHECK(code(e.pool.acquire("replaced")) == Errc::not_found);
      }
      load(e.pool, "replaced", latest);
      CHECK(code(e.pool.acquire("replaced")) != Errc::ok);
      step(e.pool, 2);  // another stream publishes
      CHECK(slot_holds(e.pool, acquire(e.pool, "replaced").slot(), &latest));
      step(e.pool);
      step(e.pool);
      CHECK(slot_holds(e.pool, acquire(e.pool, "kept").slot(), &e.kept));
      CHECK(slot_holds(e.pool, acquire(e.pool, "replaced").slot(), &latest));
    }
  }
}

TEST_CASE(
    "a slot whose record a failed step may still overwrite is not taken before that stream's next step is "
    "done") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8}, backend);
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, every_site));
  step(pool);
  step(pool);
  REQUIRE(pool.unload("a").has_value());
  backend.script().deferred = true;
  arm(backend, 2);  // captured?, fill, record: the blank record is on its way, and nobody can wait for it
  CHECK(code(pool.begin_step(stream)) == Errc::device);
  CHECK(disarm(backend));
  Adapter const b = tiny_adapter(pool.shape(), 2, 8, every_site);
  CHECK(code(pool.load("b", b)) == Errc::pool_full);
  step(pool, 2);  // another stream's step says nothing of it
  CHECK(code(pool.load("b", b)) == Errc::pool_full);
  step(pool);
  backend.run_all();
  load(pool, "b", b);
  step(pool, 2);
  backend.run_all();
  CHECK(slot_holds(pool, acquire(pool, "b").slot(), &b));
}

TEST_CASE("a stream that is forgotten after a step that could not begin holds no slot back") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 2, .max_rank = 8}, backend);
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, every_site));
  step(pool, 2);
  step(pool, 2);
  load(pool, "a", tiny_adapter(pool.shape(), 2, 8, every_site));
  std::int64_t const register_stream = 8;  // its events
  arm(backend, 1 + register_stream + 3);   // captured?, then query, wait and copy, and the event's record
  CHECK(code(pool.begin_step(stream)) == Errc::device);
  CHECK(disarm(backend));
  CHECK(code(pool.load("b", tiny_adapter(pool.shape(), 3, 8, every_site))) == Errc::pool_full);
  REQUIRE(pool.forget_stream(stream).has_value());
  Adapter const c = tiny_adapter(pool.shape(), 4, 8, {1});
  load(pool, "a", c);
  step(pool, 2);
  CHECK(slot_holds(pool, acquire(pool, "a").slot(), &c));
  step(pool, 2);
  CHECK(pool.load("b", tiny_adapter(pool.shape(), 3, 8, every_site)).has_value());
}

TEST_CASE("a step that cannot end stays open and can be ended later") {
  ScriptedBackend backend;
  Pool pool = make_pool(roomy, backend);
  REQUIRE(pool.begin_step(stream).has_value());
  for (std::int64_t failing = 0; failing < 2; ++failing) {  // is it captured?, record
    arm(backend, failing);
    CHECK(code(pool.end_step(stream)) == Errc::device);
    CHECK(disarm(backend));
  }
  CHECK(pool.end_step(stream).has_value());
  CHECK(pool.begin_step(stream).has_value());
}

TEST_CASE("on a device that fails for good, every call says so and nothing is left") {
  ScriptedBackend backend;
  {
    Pool pool = make_pool(roomy, backend);
    load(pool, "a", tiny_adapter(pool.shape(), 1, 8, every_site));
    step(pool);
    Lease const lease = acquire(pool, "a");
    arm(backend, 0);
    backend.script().fail_always = true;
    CHECK(code(pool.load("c", tiny_adapter(pool.shape(), 3, 8, {0}))) == Errc::device);
    CHECK(code(pool.begin_step(stream)) == Errc::device);
    CHECK(code(pool.begin_step(7)) == Errc::device);
    CHECK(code(pool.end_step(stream)) == Errc::invalid_argument);
    CHECK(code(pool.forget_stream(stream)) == Errc::device);
    CHECK(code(pool.unload("a")) == Errc::slot_busy);
    CHECK(pool.acquire("a").has_value());
  }
  CHECK(backend.script().memory.live_bytes() == 0);
  CHECK(backend.script().memory.live_handles() == 0);
}

TEST_CASE("an element that the pool's type cannot hold stops the load at any pair and changes nothing") {
  auto pool = make_pool<__half>({.max_slots = 1, .max_rank = 16, .biases = true});
  Adapter const old_content = tiny_adapter(pool.shape(), 1, 8, every_site, true);
  load(pool, "a", old_content);
  step(pool);
  step(pool);
  for (std::size_t site = 0; site < 5; ++site) {
    for (int part = 0; part < 3; ++part) {
      Adapter bad = tiny_adapter(pool.shape(), 2, 8, every_site, true);
      AdapterPair& pair = bad.pairs[site];
      HostTensor& tensor = part == 0 ? pair.a : part == 1 ? pair.b : *pair.bias;
      float const value = site % 2 == 0 ? 70000.0F : std::numeric_limits<float>::quiet_NaN();
      std::memcpy(tensor.bytes.data() + tensor.bytes.size() - sizeof(value), &value, sizeof(value));
      auto const staged = pool.load("a", bad);
      REQUIRE_FALSE(staged.has_value());
      CHECK(staged.error().code == Errc::out_of_range);
      CHECK(staged.error().message.find(tensor.name) != std::string::npos);
      step(pool);
      CHECK(slot_holds(pool, acquire(pool, "a").slot(), &old_content));
    }
  }
  Adapter large = tiny_adapter(pool.shape(), 3, 8, {0});
  float const value = -70000.0F;
  std::memcpy(large.pairs[0].a.bytes.data(), &value, sizeof(value));
  step(pool);
  Staged const saturated = load(pool, "a", large, {.packing = {.conversion = {.saturate_overflow = true}}});
  CHECK(saturated.counts.overflow == 1);
  step(pool);
  CHECK(to_f32(pool.route(0, "q")->cell(0)->a[0]) == -65504.0F);
  // Taken strictly, the same file is other content, and refused.
  CHECK(code(pool.load("a", large)) == Errc::out_of_range);
  Adapter const small = tiny_adapter(pool.shape(), 4, 8, {0});
  std::uint64_t const strict = load(pool, "b", small).id;
  step(pool);
  CHECK(load(pool, "b", small, {.packing = {.conversion = {.saturate_overflow = true}}}).id != strict);
}

TEST_CASE("after a publication that failed at any call, a slot without a tenant comes to hold nothing") {
  std::int64_t failures = 0;
  for (bool failed = true; failed; ++failures) {
    ScriptedBackend backend;
    Pool pool = make_pool({.max_slots = 2, .max_rank = 8}, backend);
    Adapter const first = tiny_adapter(pool.shape(), 1, 8, every_site);
    Adapter const second = tiny_adapter(pool.shape(), 2, 2, every_site);
    load(pool, "x", first);
    arm(backend, failures);
    failed = !pool.begin_step(stream).has_value();
    backend.script().fail_at = -1;
    if (!failed) break;
    REQUIRE(pool.unload("x").has_value());
    load(pool, "y", second);
    for (int i = 0; i < 3; ++i) step(pool);
    std::int32_t const slot = acquire(pool, "y").slot();
    CHECK(slot_holds(pool, slot, &second));
    CHECK(slot_holds(pool, 1 - slot, nullptr));
  }
  CHECK(failures >= 2);  // the copy and the event's record at least
}

}  // namespace
