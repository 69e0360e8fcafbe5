// SPDX-License-Identifier: AGPL-3.0-only
//
// Token overlays in a pool: packed, published, replaced and cleared with their slot.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../outcome.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "overlay_pool.hpp"
#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;
using atlas::lora::testing::says;

template <Element T = float>
AdapterPool<T, ScriptedBackend> overlay_pool(PoolOptions const& options,
                                             ScriptedBackend const& backend = {}) {
  return pool_of<T>(vocabulary_shape(), options, backend);
}

template <class P>
bool blank(P const& pool, std::int32_t slot) {
  using Cell = std::remove_cvref_t<decltype(*pool.overlay()->cell(slot))>;
  return *pool.overlay()->cell(slot) == Cell{};
}

}  // namespace

TEST_CASE_TEMPLATE("a loaded adapter's rows are in its slot's cell after the next step begins", T, float,
                   __half, __nv_bfloat16) {
  auto pool = overlay_pool<T>({.max_slots = 3, .max_rank = 8, .overlay_bytes = 4096});
  auto const table = pool.overlay();
  REQUIRE(table.has_value());
  CHECK(table->vocab == vocab);
  CHECK(table->hidden == hidden);
  CHECK(table->max_slots == 3);
  CHECK(table->max_head_count == vocab);
  CHECK(table->cell_stride_bytes == 2 * 48);  // one linear, one overlay
  CHECK(pool.route(0, "q")->cell_stride_bytes == 2 * 48);
  Adapter const a = overlaid(1, {9, 11}, {});
  Adapter const b = overlaid(2, {0, 9}, {3, 4, 10});
  Adapter const c = overlaid(3, {9}, {}, true);
  load(pool, "a", a);
  load(pool, "b", b);
  CHECK(blank(pool, 0));
  step(pool);
  load(pool, "c", c);
  step(pool);
  check_cell(pool, 0, a, 1);
  check_cell(pool, 1, b, 2);
  check_cell(pool, 2, c, 3);
  CHECK(pool.overlay()->cells == table->cells);
}

TEST_CASE("rows are replaced and cleared with their slot, and nothing of the last tenant survives") {
  ScriptedBackend backend;
  auto pool = overlay_pool({.max_slots = 1, .max_rank = 8, .overlay_bytes = 4096}, backend);
  load(pool, "a", overlaid(1, {1, 2, 3}, {4, 5}));
  step(pool);
  Adapter const smaller = overlaid(2, {}, {7});
  load(pool, "a", smaller);
  step(pool);
  check_cell(pool, 0, smaller, 2);
  CHECK(pool.overlay()->cell(0)->slot_map == nullptr);
  step(pool);
  load(pool, "a", tiny_adapter(pool.shape(), 3, 2, {0}));
  step(pool);
  CHECK(blank(pool, 0));
  load(pool, "a", overlaid(4, {1}, {}));
  step(pool);
  step(pool);
  REQUIRE(pool.unload("a").has_value());
  step(pool);
  CHECK(blank(pool, 0));
}

TEST_CASE("an adapter's rows count as its bytes, and move the generation of its name") {
  auto pool = overlay_pool({.max_slots = 2, .max_rank = 8, .overlay_bytes = 4096});
  Adapter const plain = tiny_adapter(pool.shape(), 1, 2, {0});
  std::uint64_t const first = load(pool, "a", plain).id;
  step(pool);
  std::size_t const bytes = pool.view(0).bytes;
  Adapter rows = overlaid(1, {9}, {3});
  rows.digest = Digest{1, 2};  // build_overlay and load_adapter digest the rows
  std::uint64_t const second = load(pool, "a", rows).id;
  step(pool);
  CHECK(first != second);
  CHECK(pool.view(pool.find("a")->slot).bytes == bytes + bytes_of(1, 1));
}

TEST_CASE("memory for overlays is what the engine gives, and the preflight says it") {
  auto const shape = vocabulary_shape();
  PoolOptions const options{.max_slots = 2, .max_rank = 8, .overlay_bytes = 1000};
  PoolOptions without = options;
  without.overlay_bytes = 0;
  auto const with_rows = detail::PoolMemory::plan(shape, options, 4);
  auto const plain = detail::PoolMemory::plan(shape, without, 4);
  REQUIRE(with_rows.has_value());
  REQUIRE(plain.has_value());
  CHECK(plain->record_bytes == 48);
  CHECK(with_rows->record_bytes == 96);
  CHECK(with_rows->overlays_offset % 256 == 0);
  CHECK(with_rows->needed.device_bytes == plain->needed.device_bytes + 1024);  // 1000 rounded up
  HostBackend backend;
  auto const pool = AdapterPool<float, HostBackend>::create(shape, options, backend);
  REQUIRE(pool.has_value());
  CHECK(backend.live_bytes() == with_rows->needed.device_bytes + with_rows->needed.pinned_bytes);
  auto const unknown = Pool::memory_needed(tiny_shape(), options);
  REQUIRE_FALSE(unknown.has_value());
  CHECK(unknown.error().code == Errc::invalid_argument);
  CHECK(code(overlay_pool(without).overlay()) == Errc::not_found);
}

TEST_CASE("rows that a pool cannot hold are refused by name, cost nothing, and are left out where asked") {
  ScriptedBackend backend;
  auto pool = overlay_pool({.max_slots = 1, .max_rank = 8, .overlay_bytes = bytes_of(2, 0)}, backend);
  auto const refused = [&](Adapter const& adapter, Errc expected, std::string const& words) {
    auto const calls = backend.script().calls;
    auto const staged = pool.load("a", adapter);
    REQUIRE_FALSE(staged.has_value());
    CHECK(staged.error().code == expected);
    CHECK_MESSAGE(says(staged.error().message, words), staged.error().message);
    CHECK(backend.script().calls == calls);
  };
  refused(overlaid(1, {1, 2, 3}, {}), Errc::out_of_memory, "token rows need");
  refused(overlaid(1, {2, 1}, {}), Errc::out_of_range, "token 1 is out of order");
  refused(overlaid(1, {}, {12}), Errc::out_of_range, "token 12 is out of order or beyond the vocabulary");
  Adapter cut = overlaid(1, {1}, {});
  cut.overlay.embedding.rows.bytes.resize(8);
  refused(cut, Errc::shape_mismatch, "site 0.lora_A");
  Adapter other = overlaid(1, {1}, {});
  other.overlay.vocab = 13;
  refused(other, Errc::shape_mismatch, "was built for 13 tokens of 5, the model has 12 of 5");
  Adapter raw = tiny_adapter(pool.shape(), 1, 2, {0});
  raw.raw_overlay.embedding.rows = tensor(1, 0, 0, {1, hidden});
  refused(raw, Errc::unsupported, "token rows that build_overlay has not built");
  raw.pairs[0].rank = 99;  // all faults at once
  refused(raw, Errc::rank_exceeds_pool, "token rows that build_overlay has not built");
  auto bare = overlay_pool({.max_slots = 1, .max_rank = 8});
  Adapter const one = overlaid(1, {1}, {});
  auto const without = bare.load("a", one);
  REQUIRE_FALSE(without.has_value());
  CHECK(without.error().code == Errc::unsupported);
  CHECK(says(without.error().message, "the pool was made without token overlays"));
  load(bare, "a", one, {.packing = {.leave_out_unserved = true}});
}

TEST_CASE("adapters that nobody reads give way to rows that need their room, and read ones do not") {
  auto pool = overlay_pool({.max_slots = 3, .max_rank = 8, .overlay_bytes = 1024});
  REQUIRE(bytes_of(12, 0) > 256);
  REQUIRE(bytes_of(12, 0) <= 512);
  load(pool, "a", overlaid(1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {}));
  load(pool, "b", overlaid(2, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {}));
  step(pool);
  Adapter const c = overlaid(3, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {});
  Lease a = acquire(pool, "a");
  {
    Lease const b = acquire(pool, "b");
    auto const busy = pool.load("c", c);
    REQUIRE_FALSE(busy.has_value());
    CHECK(busy.error().code == Errc::overlay_memory_busy);
    CHECK(retryable(busy.error().code));
    CHECK(says(busy.error().message, "adapter 'c'"));
    CHECK(pool.names() == std::vector<std::string>{"a", "b"});
  }
  step(pool);
  step(pool);
  load(pool, "c", c);
  CHECK(pool.names() == std::vector<std::string>{"a"});
  step(pool);
  check_cell(pool, pool.find("c")->slot, c, 3);
  check_cell(pool, a.slot(), overlaid(1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {}), 1);
  CHECK(pool.snapshot().counters.evictions == 1);
  // Adapters without rows are not in the way.
  load(pool, "plain", tiny_adapter(pool.shape(), 4, 2, {0}));
  CHECK(pool.names() == std::vector<std::string>{"a", "c"});
}

TEST_CASE("new rows of a name do not evict its old ones, which stay when there is no room for both") {
  auto pool = overlay_pool({.max_slots = 2, .max_rank = 8, .overlay_bytes = 512});
  Adapter const old = overlaid(1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {});
  load(pool, "a", old);
  step(pool);
  CHECK(code(pool.load("a", overlaid(2, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {}))) ==
        Errc::overlay_memory_busy);
  step(pool);
  check_cell(pool, acquire(pool, "a").slot(), old, 1);
  CHECK(pool.snapshot().spare == 2);  // of three places one is held; what was taken is spare again
}

TEST_CASE("rows go through staging in parts of any size, and a cancelled load leaves no trace") {
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"q", 1, 1, {0}, {}}};
  d.vocab = 70000;  // a map of 280,000 bytes and rows of 1.4 MB through 1 MiB of staging
  d.hidden = hidden;
  auto const shape = *ModelShape::create(d);
  Adapter adapter = tiny_adapter(shape, 1, 1, {0});
  Ids ids(70000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
  adapter.overlay = {own_rows(1, 0, ids), {}, false, d.vocab, hidden};
  auto pool = AdapterPool<float, ScriptedBackend>::create(
      shape, {.max_slots = 1, .max_rank = 8, .overlay_bytes = std::size_t{4} << 20}, ScriptedBackend());
  REQUIRE(pool.has_value());
  StageOptions cancelled;
  std::stop_source source;
  source.request_stop();
  cancelled.stop = source.get_token();
  CHECK(code(pool->load("a", adapter, cancelled)) == Errc::cancelled);
  load(*pool, "a", adapter);
  step(*pool);
  auto const& cell = *pool->overlay()->cell(0);
  bool right = cell.embed_count == 70000;
  for (std::size_t i = 0; i < ids.size() && right; ++i) {
    right = cell.slot_map[i] == static_cast<std::int32_t>(i);
    for (std::size_t k = 0; k < hidden; ++k) {
      right = right && cell.embed_rows[i * hidden + k] == atlas_test::element(1, 0, 0, i * hidden + k);
    }
  }
  CHECK(right);
}
