// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/load_lanes.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/pool/pool.hpp"
#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

// The host, which calls `gate` when a load begins to write its physical slot.
class GatedBackend : public HostBackend {
 public:
  std::function<void()>& gate() noexcept { return *gate_; }

  Result<void> fill(void* to, std::byte byte, std::size_t bytes, Stream on) noexcept {
    if (*gate_) (*gate_)();
    return HostBackend::fill(to, byte, bytes, on);
  }

 private:
  std::shared_ptr<std::function<void()>> gate_ = std::make_shared<std::function<void()>>();
};
using GatedPool = AdapterPool<float, GatedBackend>;

GatedPool make_gated(PoolOptions const& options) {
  auto pool = GatedPool::create(tiny_shape(), options);
  REQUIRE(pool.has_value());
  return *std::move(pool);
}

// Whether `condition` comes true within ten seconds.
bool soon(std::function<bool()> const& condition) {
  auto const end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST_CASE("two adapters are packed at one time, and both are whole") {
  GatedPool pool = make_gated({.max_slots = 2, .spare = 1, .max_rank = 8});
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const b = tiny_adapter(pool.shape(), 2, 5, {0, 2, 4});
  std::atomic<int> inside = 0;
  pool.backend().gate() = [&] {
    ++inside;
    CHECK(soon([&] { return inside == 2; }));  // neither goes on before both are there
  };
  std::thread other([&] { load(pool, "b", b); });
  load(pool, "a", a);
  other.join();
  pool.backend().gate() = {};
  step(pool);
  CHECK(slot_holds(pool, acquire(pool, "a").slot(), &a));
  CHECK(slot_holds(pool, acquire(pool, "b").slot(), &b));
  CHECK(pool.snapshot().counters.loads == 2);
  CHECK(pool.snapshot().loading == 0);
  CHECK(pool.snapshot().spare == 1);
}

TEST_CASE("two threads that load the same content under one name get one adapter") {
  GatedPool pool = make_gated({.max_slots = 2, .spare = 1, .max_rank = 8});
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  std::atomic<int> inside = 0;
  pool.backend().gate() = [&] {
    ++inside;
    CHECK(soon([&] { return inside == 2; }));
  };
  Staged theirs;
  std::thread other([&] { theirs = load(pool, "a", a); });
  Staged const ours = load(pool, "a", a);
  other.join();
  pool.backend().gate() = {};
  CHECK(ours.key == theirs.key);
  CHECK(ours.id == theirs.id);
  CHECK(pool.snapshot().counters.loads == 1);
  CHECK(pool.snapshot().counters.hits == 1);
  CHECK(pool.snapshot().spare == 2);
}

TEST_CASE("a third load waits for a lane, and can be cancelled while it waits") {
  GatedPool pool = make_gated({.max_slots = 4, .spare = 1, .max_rank = 8});
  Adapter const adapter = tiny_adapter(pool.shape(), 1, 8, {0});
  std::atomic<bool> go = false;
  pool.backend().gate() = [&] { CHECK(soon([&] { return go.load(); })); };
  std::thread first([&] { load(pool, "a", adapter); });
  std::thread second([&] { load(pool, "b", adapter); });
  CHECK(soon([&] { return pool.snapshot().loading == 2; }));
  std::stop_source stop;
  std::thread cancelled(
      [&] { CHECK(code(pool.load("c", adapter, {.stop = stop.get_token()})) == Errc::cancelled); });
  std::thread third([&] { load(pool, "d", adapter); });
  stop.request_stop();
  cancelled.join();  // before any lane is free
  CHECK(pool.snapshot().loading == 2);
  go = true;
  for (std::thread* const thread : {&first, &second, &third}) thread->join();
  pool.backend().gate() = {};
  step(pool);
  CHECK(pool.names().size() == 3);
  CHECK(pool.snapshot().counters.refused(Errc::cancelled) == 1);
}

TEST_CASE("a load that is cancelled while it packs changes nothing and keeps no memory") {
  GatedPool pool = make_gated({.max_slots = 1, .spare = 1, .max_rank = 8});
  Adapter const old_content = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const new_content = tiny_adapter(pool.shape(), 2, 8, every_site);
  load(pool, "a", old_content);
  step(pool);
  std::uint64_t const id = pool.adapter_id(0);
  for (int i = 0; i < 3; ++i) {
    std::stop_source stop;
    pool.backend().gate() = [&] { stop.request_stop(); };
    auto const outcome = pool.load("a", new_content, {.stop = stop.get_token()});
    REQUIRE_FALSE(outcome.has_value());
    CHECK(outcome.error().code == Errc::cancelled);
    CHECK_FALSE(retryable(outcome.error().code));
    pool.backend().gate() = {};
    CHECK(pool.snapshot().spare == 1);
    CHECK(pool.snapshot().loading == 0);
    step(pool);
    CHECK(slot_holds(pool, 0, &old_content));
    CHECK(pool.adapter_id(0) == id);
  }
  load(pool, "a", new_content);
  step(pool);
  CHECK(slot_holds(pool, 0, &new_content));
}

TEST_CASE("a load whose token is stopped already does nothing, and one that is staged stays") {
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8});
  std::stop_source stop;
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0}), {.stop = stop.get_token()});
  stop.request_stop();
  step(pool);
  CHECK(pool.find("a").has_value());
  auto const calls = pool.backend().script().calls;
  CHECK(code(pool.load("b", tiny_adapter(pool.shape(), 2, 8, {}), {.stop = stop.get_token()})) ==
        Errc::cancelled);
  CHECK(pool.backend().script().calls == calls);
}

TEST_CASE("memory to which a failed load may still copy is not used before the device says that it is done") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8}, backend);
  Adapter const full = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const sparse = tiny_adapter(pool.shape(), 2, 3, {1});
  step(pool);
  backend.script().deferred = true;
  // Polls nothing, zeroes, waits and copies A; from the copy of B on all calls fail, so nothing is known.
  backend.script().fail_at = backend.script().calls + 4;
  backend.script().fail_always = true;
  CHECK(code(pool.load("a", full)) == Errc::device);
  CHECK(backend.script().calls > backend.script().fail_at + 1);
  CHECK(pool.snapshot().spare == 1);  // of two places
  backend.script().fail_at = -1;
  backend.script().fail_always = false;
  load(pool, "a", sparse);            // on the same lane, after its copies
  CHECK(pool.snapshot().spare == 1);  // one is spare again, and one holds what is staged
  backend.run_all();
  step(pool);
  backend.run_all();
  CHECK(slot_holds(pool, 0, &sparse));
}

}  // namespace
