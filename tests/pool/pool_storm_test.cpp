// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/pool/host_tier.hpp"
#include "overlay_pool.hpp"
#include "tiny_pool.hpp"

// Sixteen threads on one pool and one host tier while calls of the device and of the reader fail at random:
// two engines with a stream each, eight requests, four loaders, an operator and an observer. Half of the
// contents have token rows, for which the pool's room is short.
namespace {

using namespace atlas_test;

constexpr std::size_t num_names = 10;
constexpr std::uint32_t versions = 4;  // contents of each name
// Calls of the pool and the tier, by all threads together; ATLAS_TEST_STORM says how many for a long storm.
std::uint64_t operations_wanted() {
  char const* const said = std::getenv("ATLAS_TEST_STORM");
  return said == nullptr ? 200'000 : std::strtoull(said, nullptr, 10);
}

enum class Call : std::uint8_t {
  allocate_device,
  allocate_pinned,
  copy,
  fill,
  create_stream,
  create_event,
  record,
  wait,
  query,
  synchronize,
  is_capturing
};
constexpr std::size_t num_calls = 11;

// The host, with every `period`-th fallible call failing; 0 for none.
class FailingBackend : public HostBackend {
 public:
  std::atomic<std::uint64_t>& period() noexcept { return faults_->period; }
  /// How many calls of a kind have failed.
  [[nodiscard]] std::uint64_t failed(std::size_t call) const noexcept { return faults_->failed[call]; }

  Result<void*> allocate_device(std::size_t bytes) noexcept {
    return fails(Call::allocate_device) ? Result<void*>(fault()) : HostBackend::allocate_device(bytes);
  }
  Result<void*> allocate_pinned(std::size_t bytes) noexcept {
    return fails(Call::allocate_pinned) ? Result<void*>(fault()) : HostBackend::allocate_pinned(bytes);
  }
  Result<void> copy(void* to, void const* from, std::size_t bytes, Stream on) noexcept {
    return fails(Call::copy) ? Result<void>(fault()) : HostBackend::copy(to, from, bytes, on);
  }
  Result<void> fill(void* to, std::byte byte, std::size_t bytes, Stream on) noexcept {
    return fails(Call::fill) ? Result<void>(fault()) : HostBackend::fill(to, byte, bytes, on);
  }
  Result<Stream> create_stream() noexcept {
    return fails(Call::create_stream) ? Result<Stream>(fault()) : HostBackend::create_stream();
  }
  Result<Event> create_event() noexcept {
    return fails(Call::create_event) ? Result<Event>(fault()) : HostBackend::create_event();
  }
  Result<void> record(Event event, Stream on) noexcept {
    return fails(Call::record) ? Result<void>(fault()) : HostBackend::record(event, on);
  }
  Result<void> wait(Stream on, Event event) noexcept {
    return fails(Call::wait) ? Result<void>(fault()) : HostBackend::wait(on, event);
  }
  Result<bool> query(Event event) noexcept {
    return fails(Call::query) ? Result<bool>(fault()) : HostBackend::query(event);
  }
  Result<void> synchronize(Event event) noexcept {
    return fails(Call::synchronize) ? Result<void>(fault()) : HostBackend::synchronize(event);
  }
  Result<bool> is_capturing(Stream on) noexcept {
    return fails(Call::is_capturing) ? Result<bool>(fault()) : HostBackend::is_capturing(on);
  }

 private:
  struct Faults {
    std::atomic<std::uint64_t> calls = 0;
    std::atomic<std::uint64_t> period = 0;
    std::array<std::atomic<std::uint64_t>, num_calls> failed{};
  };
  bool fails(Call call) noexcept {
    std::uint64_t const period = faults_->period;
    if (period == 0 || ++faults_->calls % period != 0) return false;
    ++faults_->failed[static_cast<std::size_t>(call)];
    return true;
  }
  static cuda::std::unexpected<Error> fault() { return fail(Errc::device, "injected"); }

  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
};
using StormPool = AdapterPool<float, FailingBackend>;

std::string name_at(std::size_t index) { return "tenant " + std::to_string(index % num_names); }

// Content `version` of name `index` says who it is for: its scale is 1 + index * versions + version.
std::uint32_t content_of(std::size_t index, std::uint32_t version) {
  return static_cast<std::uint32_t>(index % num_names) * versions + version % versions + 1;
}

// The model, with a vocabulary.
ModelShape storm_shape() { return tiny_shape(vocab, hidden); }

bool has_rows(std::uint32_t content) { return content % 2 == 0; }
Ids own_tokens(std::uint32_t content) {
  auto const first = static_cast<std::int32_t>(content % 6);
  return {first, first + 6};
}
// As much as three contents with rows, or one with all rows, take.
constexpr std::size_t room_for_rows = 3 * 256;

Adapter storm_adapter(std::uint32_t content) {
  Adapter adapter =
      tiny_adapter(storm_shape(), content, 1 + static_cast<std::int32_t>(content % 8), {0, 3, 4});
  if (has_rows(content)) {
    adapter.overlay = {own_rows(content, 0, own_tokens(content)), own_rows(content, 1, {11}), false, vocab,
                       hidden};
  }
  return adapter;
}

struct Files {
  std::array<std::atomic<std::uint32_t>, num_names> version{};
  std::atomic<std::uint64_t> reads = 0;
};
struct Reader {
  Files* files;
  Result<Adapter> operator()(std::string_view name, std::stop_token const& stop) const noexcept {
    if (++files->reads % 7 == 0) return fail(Errc::io, "injected");
    if (stop.stop_requested()) return fail(Errc::cancelled, "cancelled");
    auto const index = static_cast<std::size_t>(name.back() - '0');
    std::uint32_t const content = content_of(index, files->version[index]);
    return storm_adapter(content);
  }
};

// Whether a slot's overlay cell and its rows are those of the content.
bool rows_are_whole(OverlayTable<float> const& table, std::int32_t slot, std::uint32_t content) {
  OverlayCell<float> const& cell = *table.cell(slot);
  if (!has_rows(content)) return cell == OverlayCell<float>{};
  if (cell.embed_count != 2 || cell.head_count != 1 || cell.head_ids[0] != 11) return false;
  Ids const tokens = own_tokens(content);
  if (cell.slot_map[tokens[0]] != 0 || cell.slot_map[tokens[1]] != 1) return false;
  constexpr std::size_t last = 2 * hidden - 1;
  return cell.embed_rows[0] == element(content, 0, 0, 0) &&
         cell.embed_rows[last] == element(content, 0, 0, last) &&
         cell.head_rows[hidden - 1] == element(content, 0, 1, hidden - 1);
}

// The content that all sites of a slot speak of; 0 when they do not agree with one another or with the bytes.
std::uint32_t whole_content(std::array<RouteTable<float>, 3> const& tables, OverlayTable<float> const& rows,
                            std::int32_t slot) {
  constexpr std::array<std::size_t, 3> sites{0, 3, 4};
  auto const content = static_cast<std::uint32_t>(tables[0].cell(slot)->scale);
  for (std::size_t i = 0; i < tables.size(); ++i) {
    RouteCell<float> const& cell = *tables[i].cell(slot);
    std::int32_t const rank = 1 + static_cast<std::int32_t>(content % 8);
    if (!cell.adapted() || cell.rank != rank || cell.scale != static_cast<float>(content)) return 0;
    std::int64_t const last = rank * tables[i].k_in - 1;
    if (cell.a[0] != element(content, sites[i], 0, 0)) return 0;
    if (cell.a[last] != element(content, sites[i], 0, static_cast<std::size_t>(last))) return 0;
    if (cell.b[0] != element(content, sites[i], 1, 0)) return 0;
  }
  return rows_are_whole(rows, slot, content) ? content : 0;
}

struct Storm {
  std::uint64_t const wanted = operations_wanted();
  FailingBackend backend;
  StormPool pool;
  Files files;
  HostTier<float, Reader> tier;
  std::array<RouteTable<float>, 3> tables;
  OverlayTable<float> rows;
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> operations = 0;
  std::atomic<std::uint64_t> served = 0;
  std::atomic<std::uint64_t> served_with_rows = 0;
  std::mutex mutex;
  std::map<std::string, int> wrong;
  std::map<std::uint64_t, std::uint32_t> content_by_id;

  Storm(StormPool made, PinnedArena arena)
      : backend(made.backend()),
        pool(std::move(made)),
        tier(storm_shape(), std::move(arena), Reader{&files}) {
    tables = {*pool.route(0, "q"), *pool.route(1, "up"), *pool.route(model_wide, "lm_head")};
    rows = *pool.overlay();
  }

  void broke(std::string const& promise) {
    std::lock_guard<std::mutex> const lock(mutex);
    ++wrong[promise];
  }

  // An injected fault, or one of those that a storm makes; anything else is a fault of the pool.
  void accept(Errc outcome) {
    ++operations;
    bool const expected = retryable(outcome) || outcome == Errc::ok || outcome == Errc::device ||
                          outcome == Errc::io || outcome == Errc::not_found || outcome == Errc::cancelled;
    if (!expected) broke(std::string("refused for no reason: ") + to_string(outcome));
  }

  // Whether all that was wanted has happened, a fault of every kind of call too.
  [[nodiscard]] bool enough() const {
    if (operations < wanted || served < wanted / 100) return false;
    for (std::size_t call = 0; call < num_calls; ++call) {
      if (backend.failed(call) == 0) return false;
    }
    return true;
  }

  void engine(std::int32_t on) {
    while (!stop) {
      auto const begun = pool.begin_step(on);
      accept(code(begun));
      for (bool open = begun.has_value(); open; ++operations) {
        open = !pool.end_step(on);  // only for injected faults
      }
    }
  }

  void request(std::size_t seed) {
    std::minstd_rand random(static_cast<std::uint32_t>(seed + 1));
    while (!enough()) {
      std::size_t const index = random() % num_names;
      auto lease = pool.acquire(name_at(index));
      accept(code(lease));
      if (!lease) {
        std::this_thread::yield();
        continue;
      }
      std::uint32_t const content = whole_content(tables, rows, lease->slot());
      if (content < content_of(index, 0) || content > content_of(index, versions - 1)) {
        broke("a lease found another tenant's content, or torn content");
      }
      auto const fork = pool.acquire(lease->key());
      ++operations;
      if (!fork || fork->id() != lease->id() || lease->id() == base_id) {
        broke("a leased tenancy could not be leased again");
      }
      if (whole_content(tables, rows, lease->slot()) != content) broke("content changed under a lease");
      {
        std::lock_guard<std::mutex> const lock(mutex);
        if (content_by_id.try_emplace(lease->id(), content).first->second != content)
          ++wrong["an id was given to two contents"];
      }
      ++served;
      if (has_rows(content)) ++served_with_rows;
    }
  }

  void loader(std::size_t seed) {
    std::minstd_rand random(static_cast<std::uint32_t>(seed + 1));
    while (!stop) {
      std::size_t const index = random() % num_names;
      std::stop_source source;
      if (random() % 8 == 0) source.request_stop();
      if (random() % 4 == 0) accept(code(tier.prefetch(name_at(random() % num_names))));
      accept(code(promote(pool, tier, name_at(index), {.stop = source.get_token()})));
    }
  }

  void change() {  // the operator's turn
    std::minstd_rand random(1);
    while (!stop) {
      std::size_t const index = random() % num_names;
      ++files.version[index];
      tier.forget(name_at(index));
      auto const unloaded = pool.unload(name_at(random() % num_names));
      if (code(unloaded) != Errc::invalid_argument) accept(code(unloaded));  // that is the active one's
      accept(code(pool.set_active(random() % 3 == 0 ? std::string() : name_at(random() % num_names))));
      make_another();
      std::this_thread::yield();
    }
  }

  // Another pool and another tier's memory on the same device come and go, so that their allocations fail
  // too.
  void make_another() {
    auto other = StormPool::create(tiny_shape(), {.max_slots = 1, .max_rank = 8}, backend);
    auto const arena = PinnedArena::create(backend, 1024, 512);
    accept(code(other));
    accept(code(arena));
    if (other) accept(code(other->load("other", tiny_adapter(tiny_shape(), 1, 8, {0, 3, 4}))));
  }

  void observe() {
    while (!stop) {
      operations += 2;
      PoolSnapshot const now = pool.snapshot();
      for (SlotStatus const& slot : now.slots) {
        if (slot.leases < 0) broke("fewer than no leases");
        if (slot.state == SlotState::empty && !slot.name.empty()) broke("a name in an empty slot");
      }
      HostTierSnapshot const host = tier.snapshot();
      if (host.bytes > host.budget_bytes) broke("the host tier exceeds its budget");
      std::this_thread::yield();
    }
  }
};

TEST_CASE("a storm of loads, steps, requests and faults loses no lease, no byte and no identity") {
  FailingBackend backend;
  {
    auto made = StormPool::create(
        storm_shape(), {.max_slots = 6, .spare = 3, .max_rank = 8, .overlay_bytes = room_for_rows}, backend);
    REQUIRE(made.has_value());
    auto arena = PinnedArena::create(backend, std::size_t{16} << 10, 512);
    REQUIRE(arena.has_value());
    Storm storm(*std::move(made), *arena);
    std::size_t const bytes = backend.live_bytes();
    backend.period() = 97;
    std::vector<std::thread> requests;
    std::vector<std::thread> others;
    others.emplace_back([&] { storm.engine(1); });
    others.emplace_back([&] { storm.engine(2); });
    for (std::size_t i = 0; i < 8; ++i) requests.emplace_back([&, i] { storm.request(i); });
    for (std::size_t i = 0; i < 4; ++i) others.emplace_back([&, i] { storm.loader(i); });
    others.emplace_back([&] { storm.change(); });
    others.emplace_back([&] { storm.observe(); });
    for (std::thread& thread : requests) thread.join();
    storm.stop = true;
    for (std::thread& thread : others) thread.join();
    for (auto const& [promise, times] : storm.wrong) FAIL_CHECK(times << " times: " << promise);
    CHECK(storm.tier.snapshot().counters.failures > 0);
    CHECK(storm.served_with_rows > 0);
    std::uint64_t failed = 0;
    for (std::size_t call = 0; call < num_calls; ++call) failed += backend.failed(call);
    MESSAGE(storm.operations.load() << " operations, " << storm.served.load() << " requests, " << failed
                                    << " faults");
    backend.period() = 0;

    // Afterwards all is as it was: no lease, every place spare or named, and every name can be loaded.
    StormPool& pool = storm.pool;
    REQUIRE(pool.set_active("").has_value());
    for (int i = 0; i < 2; ++i) {
      for (std::int32_t const on : {1, 2}) step(pool, on);
    }
    for (SlotStatus const& slot : pool.snapshot().slots) CHECK(slot.leases == 0);
    for (std::string const& name : pool.names()) CHECK(pool.unload(name).has_value());
    for (std::size_t index = 0; index < num_names; ++index) {  // gives back what lanes still hold
      auto const content = tiny_adapter(pool.shape(), 250, 8, {0});
      CHECK(pool.load("after", content).has_value());
      CHECK(pool.unload("after").has_value());
    }
    step(pool);
    // No place holds token rows any more: an adapter that needs all their room finds it.
    Ids const all{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    REQUIRE(bytes_of(12, 12) > room_for_rows - 256);
    Adapter full = tiny_adapter(pool.shape(), 250, 8, {0});
    full.overlay = {own_rows(250, 0, all), own_rows(250, 1, all), false, vocab, hidden};
    load(pool, "full", full);
    CHECK(pool.unload("full").has_value());
    step(pool);
    PoolSnapshot const after = pool.snapshot();
    CHECK(after.spare == 9);
    CHECK(after.content_bytes == 0);
    CHECK(after.loading == 0);
    CHECK(after.counters.loads >= after.counters.publications);
    CHECK(backend.live_bytes() == bytes);
  }
  CHECK(backend.live_bytes() == 0);
  CHECK(backend.live_handles() == 0);
}

}  // namespace
