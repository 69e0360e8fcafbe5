// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

constexpr std::int32_t other = 2;

TEST_CASE("no step begins or ends while its stream is captured, and nothing is enqueued then") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .max_rank = 8}, backend);
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  load(pool, "a", a);
  backend.script().capturing = {stream};
  CHECK(code(pool.begin_step(stream)) == Errc::capturing);
  CHECK(slot_holds(pool, 0, nullptr));
  CHECK(code(pool.acquire("a")) == Errc::slot_busy);
  backend.script().capturing = {};
  REQUIRE(pool.begin_step(stream).has_value());
  CHECK(slot_holds(pool, 0, &a));
  backend.script().capturing = {stream};
  CHECK(code(pool.end_step(stream)) == Errc::capturing);
  Lease lease = acquire(pool, "a");  // leases come and go during capture
  lease.release();
  backend.script().capturing = {};
  CHECK(pool.end_step(stream).has_value());
}

TEST_CASE("steps of one stream neither nest nor end twice") {
  Pool pool = make_pool({.max_slots = 1, .max_rank = 8});
  CHECK(code(pool.end_step(stream)) == Errc::invalid_argument);
  REQUIRE(pool.begin_step(stream).has_value());
  CHECK(code(pool.begin_step(stream)) == Errc::invalid_argument);
  REQUIRE(pool.begin_step(other).has_value());
  REQUIRE(pool.end_step(stream).has_value());
  CHECK(code(pool.end_step(stream)) == Errc::invalid_argument);
  CHECK(pool.end_step(other).has_value());
}

TEST_CASE("another stream sees a publication before its next work, and one being captured at its next step") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 2, .max_rank = 8}, backend);
  step(pool, other);
  backend.script().deferred = true;
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  load(pool, "a", a);
  REQUIRE(pool.begin_step(stream).has_value());
  bool seen = false;
  backend.launch(other, [&] { seen = slot_holds(pool, 0, &a); });
  backend.run(other);
  CHECK_FALSE(seen);  // it waits
  backend.run(stream);
  backend.run(other);
  CHECK(seen);
  REQUIRE(pool.end_step(stream).has_value());
  backend.run_all();

  Adapter const b = tiny_adapter(pool.shape(), 2, 8, every_site);
  load(pool, "b", b);
  backend.script().capturing = {other};
  std::size_t const waits = backend.script().waits;
  REQUIRE(pool.begin_step(stream).has_value());
  CHECK(backend.script().waits == waits);  // a wait would have become part of the graph
  backend.script().capturing = {};
  REQUIRE(pool.begin_step(other).has_value());
  CHECK(backend.script().waits == waits + 1);
  seen = false;
  backend.launch(other, [&] { seen = slot_holds(pool, 1, &b); });
  backend.run(other);
  CHECK_FALSE(seen);
  backend.run_all();
  CHECK(seen);
}

TEST_CASE("a slot is idle only when the steps of all streams that were open at its release are done") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8}, backend);
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0}));
  step(pool);
  step(pool, other);
  backend.script().deferred = true;
  Adapter const next = tiny_adapter(pool.shape(), 2, 8, {0});
  REQUIRE(pool.begin_step(stream).has_value());
  REQUIRE(pool.begin_step(other).has_value());
  acquire(pool, "a").release();
  CHECK(code(pool.load("b", next)) == Errc::pool_full);
  REQUIRE(pool.end_step(stream).has_value());
  backend.run(stream);
  CHECK(code(pool.load("b", next)) == Errc::pool_full);  // the other stream's step is still open
  REQUIRE(pool.end_step(other).has_value());
  CHECK(code(pool.load("b", next)) == Errc::pool_full);  // and now not done
  backend.run(other);
  CHECK(pool.load("b", next).has_value());
}

TEST_CASE("a host that runs many steps ahead still sees steps pass") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8}, backend);
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0}));
  step(pool);
  backend.script().deferred = true;
  Adapter const next = tiny_adapter(pool.shape(), 2, 8, {0});
  for (int i = 0; i < 30; ++i) step(pool);
  acquire(pool, "a").release();  // stamped with the last of them
  CHECK(code(pool.load("b", next)) == Errc::pool_full);
  for (int i = 0; i < 100 && code(pool.load("b", next)) == Errc::pool_full; ++i) {
    step(pool);  // and goes on, as far ahead as before
    backend.run(stream, 1);
  }
  CHECK(pool.load("b", next).has_value());
}

TEST_CASE("a stream is forgotten when its work is done, and another one may take its place") {
  ScriptedBackend backend;
  Pool pool = make_pool({.max_slots = 2, .max_rank = 8}, backend);
  CHECK(code(pool.forget_stream(other)) == Errc::not_found);
  step(pool);
  backend.script().deferred = true;
  REQUIRE(pool.begin_step(other).has_value());
  CHECK(code(pool.forget_stream(other)) == Errc::slot_busy);
  REQUIRE(pool.end_step(other).has_value());
  CHECK(code(pool.forget_stream(other)) == Errc::slot_busy);
  backend.run(other);
  REQUIRE(pool.forget_stream(other).has_value());
  std::size_t const waits = backend.script().waits;
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  load(pool, "a", a);
  step(pool);
  CHECK(backend.script().waits == waits);  // nobody else to wait
  std::size_t const handles = backend.script().memory.live_handles();
  constexpr std::int32_t third = 3;
  REQUIRE(pool.begin_step(third).has_value());
  bool seen = false;
  backend.launch(third, [&] { seen = slot_holds(pool, 0, &a); });
  backend.run(third);
  CHECK_FALSE(seen);  // a new stream comes after what was published before it
  backend.run_all();
  CHECK(seen);
  REQUIRE(pool.end_step(third).has_value());
  CHECK(pool.begin_step(third).has_value());
  CHECK(backend.script().memory.live_handles() == handles);
}

// Random loads, unloads, leases and steps on two streams of a device that lags behind at random. Each
// launched reader checks, when it runs, that the slot it was given holds exactly the content that was leased.
class RandomEngine {
 public:
  explicit RandomEngine(unsigned seed)
      : random_(seed),
        pool_(make_pool({.max_slots = 3, .spare = 1, .max_rank = 16, .biases = true}, backend_)) {
    for (std::uint32_t content = 0; content < 40; ++content) {
      std::vector<std::size_t> sites;
      for (std::size_t site = 0; site < 5; ++site) {
        if (pick(3) != 0) sites.push_back(site);
      }
      auto const rank = static_cast<std::int32_t>(pick(16) + 1);
      contents_.push_back(tiny_adapter(pool_.shape(), content + 1, rank, sites, pick(2) == 0));
    }
    backend_.script().deferred = true;
  }

  void act() {
    switch (pick(10)) {
      case 0:
      case 1: load_something(); break;
      case 2: static_cast<void>(pool_.unload(names_[pick(names_.size())])); break;
      case 3:
      case 4: toggle_step(stream + static_cast<std::int32_t>(pick(2))); break;
      case 5: lease_something(); break;
      case 6:
        if (!leases_.empty())
          leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(pick(leases_.size())));
        break;
      default: backend_.run(stream + static_cast<std::int32_t>(pick(2)), pick(30));
    }
    read_with_leases();
  }

  void finish() {
    leases_.clear();
    for (auto& [on, open] : open_) {
      if (open) CHECK(pool_.end_step(on).has_value());
    }
    backend_.run_all();
  }

  int reads = 0;
  int wrong_reads = 0;
  int loads = 0;
  int refused = 0;

 private:
  struct Held {
    Lease lease;
    Adapter const* content;
  };

  std::size_t pick(std::size_t below) { return random_() % below; }

  void load_something() {
    std::string const& name = names_[pick(names_.size())];
    Adapter const& content = contents_[pick(contents_.size())];
    auto const staged = pool_.load(name, content);
    if (staged) {
      ++loads;
      by_tenancy_[staged->key.tenancy] = &content;
    } else {
      ++refused;
      CHECK(retryable(staged.error().code));
    }
  }

  void toggle_step(std::int32_t on) {
    bool& open = open_[on];
    CHECK((open ? pool_.end_step(on) : pool_.begin_step(on)).has_value());
    open = !open;
  }

  void lease_something() {
    auto lease = pool_.acquire(names_[pick(names_.size())]);
    if (!lease) return;
    Adapter const* const content = by_tenancy_.at(lease->key().tenancy);
    leases_.push_back(Held{*std::move(lease), content});
  }

  // A step that is open reads through any lease that is held now.
  void read_with_leases() {
    for (auto const& [on, open] : open_) {
      if (!open || leases_.empty()) continue;
      Held const& held = leases_[pick(leases_.size())];
      backend_.launch(on, [this, slot = held.lease.slot(), content = held.content] {
        ++reads;
        if (!slot_holds(pool_, slot, content)) ++wrong_reads;
      });
    }
  }

  std::mt19937 random_;
  ScriptedBackend backend_;
  Pool pool_;
  std::vector<std::string> names_{"a", "b", "c", "d", "e"};
  std::vector<Adapter> contents_;
  std::map<std::uint64_t, Adapter const*> by_tenancy_;
  std::vector<Held> leases_;
  std::map<std::int32_t, bool> open_;
};

TEST_CASE("on a device that lags at random, every reader finds the content it leased, whole") {
  int reads = 0;
  int loads = 0;
  int refused = 0;
  for (unsigned seed = 1; seed <= 40; ++seed) {
    INFO("seed " << seed);
    RandomEngine engine(seed);
    for (int i = 0; i < 600; ++i) engine.act();
    engine.finish();
    CHECK(engine.wrong_reads == 0);
    reads += engine.reads;
    loads += engine.loads;
    refused += engine.refused;
  }
  CHECK(reads > 4000);  // the test is of something
  CHECK(loads > 800);
  CHECK(refused > 400);
}

}  // namespace
