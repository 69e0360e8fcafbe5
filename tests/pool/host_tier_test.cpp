// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/host_tier.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

// A reader that counts its calls, does what the test says before it answers, and fails when the test says so.
struct Files {
  std::atomic<int> reads = 0;
  std::atomic<bool> broken = false;
  std::function<void(std::string_view, std::stop_token const&)> before{};

  // Content by the name's first letter; rank 8 at site 0: (8 * 10 + 6 * 8) * 4 = 512 bytes; "large" twice
  // that.
  Result<Adapter> read(std::string_view name, std::stop_token const& stop) {
    ++reads;
    if (before) before(name, stop);
    if (stop.stop_requested()) return fail(Errc::cancelled, "reading was cancelled");
    if (broken) return fail(Errc::io, std::string(name) + ": cannot be read");
    auto const content = static_cast<std::uint32_t>(name[0]);
    return tiny_adapter(tiny_shape(), content, 8,
                        name == "large" ? std::vector<std::size_t>{0, 2} : std::vector<std::size_t>{0});
  }
};
struct Reader {
  Files* files;
  Result<Adapter> operator()(std::string_view name, std::stop_token const& stop) const noexcept {
    return files->read(name, stop);
  }
};
using Tier = HostTier<float, Reader>;
static_assert(AdapterReader<Reader> && !AdapterReader<int>);

// In blocks of half of the smallest adapter.
PinnedArena arena_of(std::size_t bytes, HostBackend const& backend = {}) {
  auto arena = PinnedArena::create(backend, bytes, 256);
  REQUIRE(arena.has_value());
  return *arena;
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

Tier::Content get(Tier& tier, std::string_view name) {
  auto content = tier.get(name);
  CHECK(content.has_value());
  return content ? *content : nullptr;
}

std::vector<std::string> names_in(Tier const& tier) {
  std::vector<std::string> names;
  for (HostTierEntry const& entry : tier.snapshot().entries) names.push_back(entry.name);
  return names;
}

TEST_CASE("an adapter is read once and kept, and its bytes are counted") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  Tier::Content const first = get(tier, "a");
  CHECK(first->outline().digest == Digest{'a', 1});
  CHECK(get(tier, "a") == first);
  CHECK(files.reads == 1);
  HostTierSnapshot const now = tier.snapshot();
  REQUIRE(now.entries.size() == 1);
  CHECK(now.entries[0] == HostTierEntry{"a", 512, true, 2});
  CHECK(now.bytes == 512);
  CHECK(now.budget_bytes == 2048);
  CHECK(now.reading == 0);
  CHECK(now.counters == HostTierCounters{1, 1, 0, 0, 0, 0});
}

TEST_CASE(
    "an adapter takes whole blocks of pinned memory, which is taken once and given back with the last "
    "holder") {
  Files files;
  HostBackend backend;
  Tier::Content held;
  {
    Tier tier(tiny_shape(), arena_of(2048, backend), {&files});
    CHECK(backend.live_bytes() == 2048);
    held = get(tier, "a");
    get(tier, "b");
    CHECK(backend.live_bytes() == 2048);
    tier.forget("a");
    CHECK(tier.snapshot().bytes == 2 * 512);  // it is held all the same
    CHECK(tier.snapshot().entries.size() == 1);
  }
  CHECK(backend.live_bytes() == 2048);
  held.reset();
  CHECK(backend.live_bytes() == 0);
}

TEST_CASE("a bias and every rank come out of a tier's blocks into a slot as they went in") {
  HostBackend backend;
  for (std::size_t const block_bytes : {4U, 52U, 256U, 100'000U}) {  // pieces of an element and of all
    auto arena = PinnedArena::create(backend, 100'000, block_bytes);
    REQUIRE(arena.has_value());
    auto const read = [](std::string_view name, std::stop_token const&) noexcept {
      return Result<Adapter>(tiny_adapter(tiny_shape(), 5, name[0] - '0', {0, 1, 4}, true));
    };
    HostTier<float, decltype(read)> tier(tiny_shape(), *arena, read);
    Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8, .biases = true});
    for (char const* const rank : {"1", "3", "8"}) {
      auto const staged = promote(pool, tier, rank);
      REQUIRE(staged.has_value());
      step(pool);
      Adapter const expected = tiny_adapter(tiny_shape(), 5, rank[0] - '0', {0, 1, 4}, true);
      CHECK(slot_holds(pool, 0, &expected));
      auto const direct = pool.load(rank, expected);  // the same content, whichever way it comes
      REQUIRE(direct.has_value());
      CHECK(direct->key == staged->key);
      step(pool);
    }
  }
}

TEST_CASE("a pool refuses by name what was audited or packed for another model, and what has no room in it") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"k", 6, 10, {0}, {}}};  // q's widths and place, and another linear
  ModelShape const other = *ModelShape::create(d);
  auto pool = *AdapterPool<float, HostBackend>::create(other, {.max_slots = 1, .max_rank = 8});
  auto const packed = pool.load("a", *get(tier, "a"));
  REQUIRE_FALSE(packed.has_value());
  CHECK(packed.error() == Error{Errc::shape_mismatch,
                                "adapter 'a': was audited for another model than the pool's (ModelShape)"});
  Adapter adapter = tiny_adapter(tiny_shape(), 1, 8, {0});
  CHECK(pool.load("by hand", adapter).has_value());
  adapter.model = tiny_shape().fingerprint();
  CHECK(code(pool.load("audited", adapter)) == Errc::shape_mismatch);
  CHECK(pool.snapshot().counters.refused(Errc::shape_mismatch) == 2);
  auto narrow = *AdapterPool<float, HostBackend>::create(tiny_shape(), {.max_slots = 1, .max_rank = 1});
  CHECK(narrow.load("a", *get(tier, "a")).has_value());  // rounded up to 8
  auto const read = [](std::string_view, std::stop_token const&) noexcept {
    return Result<Adapter>(tiny_adapter(tiny_shape(), 5, 9, {0}, true));
  };
  HostTier<float, decltype(read)> wide(tiny_shape(), arena_of(4096), read);
  auto const refused = promote(narrow, wide, "w");
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error() == Error{Errc::rank_exceeds_pool,
                                 "adapter 'w': layer 0 'q': rank 9 exceeds the pool's 8\n"
                                 "adapter 'w': layer 0 'q': the pool was made without biases"});
}

TEST_CASE("an arena holds whole blocks, and refuses what makes none") {
  HostBackend backend;
  auto const arena = PinnedArena::create(backend, 1000, 300);
  REQUIRE(arena.has_value());
  CHECK(arena->blocks() == 3);
  CHECK(backend.live_bytes() == 900);
  CHECK(arena->blocks_for(0) == 0);
  CHECK(arena->blocks_for(300) == 1);
  CHECK(arena->blocks_for(301) == 2);
  CHECK_FALSE(arena->take(4).has_value());
  {
    auto const two = arena->take(2);
    REQUIRE(two.has_value());
    CHECK(two->size() == 600);
    CHECK(arena->free_blocks() == 1);
  }
  CHECK(arena->free_blocks() == 3);
  CHECK(code(PinnedArena::create(backend, 299, 300)) == Errc::invalid_argument);
  CHECK(code(PinnedArena::create(backend, 0, 0)) == Errc::invalid_argument);
  ScriptedBackend failing;
  failing.script().fail_at = 0;
  CHECK(code(PinnedArena::create(failing, 300, 300)) == Errc::device);
}

TEST_CASE("a hundred threads that ask for one adapter cause one read, and all see it") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  files.before = [&](std::string_view, std::stop_token const&) {
    CHECK(soon([&] { return tier.snapshot().counters.joins == 99; }));  // the tier answers while it reads
    CHECK(tier.snapshot().reading == 1);
  };
  std::vector<Tier::Content> seen(100);
  std::vector<std::thread> threads;
  for (Tier::Content& content : seen) threads.emplace_back([&] { content = get(tier, "a"); });
  for (std::thread& thread : threads) thread.join();
  CHECK(files.reads == 1);
  for (Tier::Content const& content : seen) CHECK(content == seen[0]);
  REQUIRE(seen[0] != nullptr);
}

TEST_CASE("a hundred threads that ask for one adapter see its one error, and the next one reads again") {
  Files files;
  files.broken = true;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  files.before = [&](std::string_view, std::stop_token const&) {
    CHECK(soon([&] { return tier.snapshot().counters.joins == 99; }));
  };
  std::atomic<int> errors = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 100; ++i) {
    threads.emplace_back([&] {
      auto const content = tier.get("a");
      if (!content && content.error() == Error{Errc::io, "a: cannot be read"}) ++errors;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(errors == 100);
  CHECK(files.reads == 1);
  CHECK(tier.snapshot().counters.failures == 1);
  CHECK(names_in(tier).empty());
  files.before = {};
  files.broken = false;
  CHECK(get(tier, "a") != nullptr);
}

TEST_CASE("the adapter that was asked for longest ago leaves for a new one, and one that is held stays") {
  Files files;
  Tier tier(tiny_shape(), arena_of(3 * 512), {&files});
  for (char const* const name : {"a", "b", "c"}) get(tier, name);
  CHECK(tier.snapshot().bytes == 3 * 512);  // the budget is used to its last byte
  get(tier, "a");
  get(tier, "d");
  CHECK(names_in(tier) == std::vector<std::string>{"a", "c", "d"});
  Tier::Content const held = get(tier, "c");
  get(tier, "a");
  get(tier, "d");
  get(tier, "large");  // c is the oldest, and held
  CHECK(names_in(tier) == std::vector<std::string>{"c", "large"});
  CHECK(tier.snapshot().counters.evictions == 3);
}

TEST_CASE("what does not fit beside what is held is told to retry, what never fits is not, nothing leaves") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2 * 512), {&files});
  Tier::Content held = get(tier, "a");
  get(tier, "b");
  auto const later = tier.get("large");
  REQUIRE_FALSE(later.has_value());
  CHECK(later.error().code == Errc::pool_full);
  CHECK(retryable(later.error().code));
  CHECK(later.error().message ==
        "adapter 'large': host tier: 1024 bytes do not fit 1024 of which 512 are in use");
  CHECK(names_in(tier) == std::vector<std::string>{"a", "b"});
  held.reset();
  CHECK(get(tier, "large") != nullptr);
  CHECK(tier.snapshot().counters.refusals == 1);
  Tier small(tiny_shape(), arena_of(1023), {&files});  // three blocks
  get(small, "a");
  auto const never = small.get("large");
  REQUIRE_FALSE(never.has_value());
  CHECK(never.error().code == Errc::out_of_memory);
  CHECK(names_in(small) == std::vector<std::string>{"a"});
}

TEST_CASE("what was prefetched is read no more, and a prefetch waits for nobody") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  REQUIRE(tier.prefetch("a").has_value());
  REQUIRE(tier.prefetch("a").has_value());
  CHECK(files.reads == 1);
  get(tier, "a");
  CHECK(files.reads == 1);
  std::atomic<bool> go = false;
  files.before = [&](std::string_view, std::stop_token const&) { CHECK(soon([&] { return go.load(); })); };
  std::thread reading([&] { get(tier, "b"); });
  CHECK(soon([&] { return files.reads == 2; }));
  CHECK(tier.prefetch("b").has_value());  // returns while b is read
  go = true;
  reading.join();
  files.broken = true;
  CHECK(code(tier.prefetch("c")) == Errc::io);
}

TEST_CASE("the reader may use the tier, and two names are read at one time") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  files.before = [&](std::string_view name, std::stop_token const&) {
    if (name == "a") CHECK(tier.prefetch("b").has_value());
  };
  get(tier, "a");
  CHECK(names_in(tier) == std::vector<std::string>{"a", "b"});
  files.before = [&](std::string_view, std::stop_token const&) {
    CHECK(soon([&] { return tier.snapshot().reading == 2 || tier.snapshot().entries.size() > 2; }));
  };
  std::thread other([&] { get(tier, "c"); });
  get(tier, "d");
  other.join();
}

TEST_CASE("who cancels ends its own wait, and when it is the one that reads, another one reads") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  std::stop_source first;
  std::stop_source second;
  files.before = [&](std::string_view, std::stop_token const& stop) {
    if (stop != first.get_token()) return;
    CHECK(soon([&] { return stop.stop_requested(); }));
  };
  std::thread leader([&] { CHECK(code(tier.get("a", first.get_token())) == Errc::cancelled); });
  CHECK(soon([&] { return files.reads == 1; }));
  std::thread impatient([&] { CHECK(code(tier.get("a", second.get_token())) == Errc::cancelled); });
  std::thread patient([&] { CHECK(get(tier, "a") != nullptr); });
  CHECK(soon([&] { return tier.snapshot().counters.joins == 2; }));
  second.request_stop();
  impatient.join();
  CHECK(files.reads == 1);  // the one that reads goes on
  first.request_stop();
  leader.join();
  patient.join();
  CHECK(files.reads == 2);
  CHECK(names_in(tier) == std::vector<std::string>{"a"});
}

TEST_CASE("a name that is forgotten is read again, and what was being read meanwhile is not kept") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  Tier::Content const old_content = get(tier, "a");
  tier.forget("a");
  tier.forget("nobody");
  CHECK(names_in(tier).empty());
  CHECK(get(tier, "a") != old_content);
  CHECK(files.reads == 2);
  files.before = [&](std::string_view name, std::stop_token const&) { tier.forget(name); };
  CHECK(get(tier, "b") != nullptr);
  CHECK(names_in(tier) == std::vector<std::string>{"a"});
  CHECK(tier.snapshot().reading == 0);
}

TEST_CASE("an adapter that is promoted from the tier is read by no file") {
  Files files;
  Tier tier(tiny_shape(), arena_of(2048), {&files});
  Pool pool = make_pool({.max_slots = 1, .spare = 1, .max_rank = 8});
  for (char const* const name : {"a", "b", "a", "b"}) {
    REQUIRE(promote(pool, tier, name).has_value());
    step(pool);
    Adapter const read = tiny_adapter(pool.shape(), static_cast<std::uint32_t>(name[0]), 8, {0});
    CHECK(slot_holds(pool, acquire(pool, name).slot(), &read));
    step(pool);
  }
  CHECK(files.reads == 2);
  files.broken = true;
  CHECK(code(promote(pool, tier, "c")) == Errc::io);
  CHECK(pool.names() == std::vector<std::string>{"b"});
}

TEST_CASE(
    "ten threads for each of three names cause three reads and three loads, and agree on slots and ids") {
  Files files;
  Tier tier(tiny_shape(), arena_of(4096), {&files});
  auto pool =
      *AdapterPool<float, HostBackend>::create(tiny_shape(), {.max_slots = 3, .spare = 2, .max_rank = 8});
  std::vector<std::string> const names{"a", "b", "c"};
  std::vector<Staged> staged(30);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < staged.size(); ++i) {
    threads.emplace_back([&, i] {
      auto const outcome = promote(pool, tier, names[i % 3]);
      CHECK(outcome.has_value());
      if (outcome) staged[i] = *outcome;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(files.reads == 3);
  CHECK(pool.snapshot().counters.loads == 3);
  CHECK(tier.snapshot().reading == 0);
  for (std::size_t i = 3; i < staged.size(); ++i) {
    CHECK(staged[i].key == staged[i % 3].key);
    CHECK(staged[i].id == staged[i % 3].id);
  }
}

}  // namespace
