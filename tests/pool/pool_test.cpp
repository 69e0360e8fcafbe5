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

TEST_CASE_TEMPLATE("a loaded adapter can be leased after the next step begins, and its cells hold it", T,
                   float, __half, __nv_bfloat16) {
  auto pool = make_pool<T>({.max_slots = 2, .max_rank = 12});
  CHECK(pool.layout().max_rank() == 16);
  Adapter const a = tiny_adapter(pool.shape(), 1, 3, {0, 3, 4});
  Staged const staged = load(pool, "a", a);
  CHECK(staged.key.slot == 0);
  CHECK(code(pool.acquire("a")) == Errc::slot_busy);
  CHECK(code(pool.acquire(staged.key)) == Errc::slot_busy);
  CHECK(code(pool.find("a")) == Errc::not_found);
  CHECK(slot_holds(pool, 0, nullptr));
  step(pool);
  Lease const lease = acquire(pool, "a");
  CHECK(lease.slot() == 0);
  CHECK(lease.key() == staged.key);
  CHECK(lease.id() == adapter_id("a"));
  CHECK(staged.id == lease.id());
  CHECK(slot_holds(pool, 0, &a));
  CHECK(slot_holds(pool, 1, nullptr));
}

TEST_CASE("a rank-8 adapter in a rank-64 pool is packed at rank 8") {
  auto pool = make_pool({.max_slots = 1, .max_rank = 64});
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0}));
  step(pool);
  CHECK(pool.route(0, "q")->cell(0)->b_row_stride == 8);
  CHECK(pool.view(0).bytes == (8 * 10 + 6 * 8) * sizeof(float));
  CHECK(pool.layout().b_offset(0) == 64 * 10 * sizeof(float));
  auto const distance = reinterpret_cast<std::byte const*>(pool.route(0, "q")->cell(0)->b) -
                        reinterpret_cast<std::byte const*>(pool.route(0, "q")->cell(0)->a);
  CHECK(static_cast<std::size_t>(distance) == pool.layout().b_offset(0));
}

TEST_CASE("a table says its site's widths and never moves") {
  auto pool = make_pool({.max_slots = 3, .max_rank = 8});
  auto const before = pool.route(1, "up");
  REQUIRE(before.has_value());
  CHECK(before->k_in == 10);
  CHECK(before->n_out == 9);
  CHECK(before->max_slots == 3);
  CHECK(before->max_rank == 8);
  CHECK(before->cell_stride_bytes == 5 * 48);
  load(pool, "a", tiny_adapter(pool.shape(), 1, 8, every_site));
  step(pool);
  CHECK(pool.route(1, "up")->cells == before->cells);
  CHECK(pool.route(Site{1, 1})->cells == before->cells);
  CHECK(pool.route(model_wide, "lm_head")->n_out == 7);
  CHECK(code(pool.route(1, "v")) == Errc::not_found);
  CHECK(code(pool.route(2, "q")) == Errc::not_found);
  CHECK(code(pool.route(0, "lm_head")) == Errc::not_found);
  CHECK(code(pool.route(Site{0, 9})) == Errc::not_found);
}

TEST_CASE("a replaced slot's memory equals that of a fresh load, byte for byte") {
  ScriptedBackend backend;
  auto const slot_bytes = [](auto const& pool, RouteCell<float> const* first) {
    auto const* const bytes = reinterpret_cast<std::byte const*>(first->a) - pool.layout().a_offset(0);
    return std::vector<std::byte>(bytes, bytes + pool.layout().slot_bytes());
  };
  PoolOptions const options{.max_slots = 1, .max_rank = 16, .biases = true};
  auto fresh = make_pool(options);
  Adapter const sparse = tiny_adapter(fresh.shape(), 7, 3, {0, 4});
  load(fresh, "x", sparse);
  step(fresh);

  auto reused = make_pool(options);
  for (std::uint32_t content = 1; content <= 3; ++content) {  // through every physical slot
    load(reused, "x", tiny_adapter(reused.shape(), content, 16, every_site, true));
    step(reused);
    step(reused);
  }
  load(reused, "x", sparse);
  step(reused);
  CHECK(slot_bytes(reused, reused.route(0, "q")->cell(0)) == slot_bytes(fresh, fresh.route(0, "q")->cell(0)));
  CHECK(slot_holds(reused, 0, &sparse));
}

TEST_CASE("an adapter without pairs, or of rank 0, is base in every cell") {
  auto pool = make_pool({.max_slots = 1, .max_rank = 8});
  load(pool, "full", tiny_adapter(pool.shape(), 1, 8, every_site));
  step(pool);
  load(pool, "none", tiny_adapter(pool.shape(), 2, 1, {}));
  step(pool);
  CHECK(slot_holds(pool, acquire(pool, "none").slot(), nullptr));
  Adapter zero = tiny_adapter(pool.shape(), 3, 1, {0});
  zero.pairs[0].rank = 0;
  step(pool);
  load(pool, "zero", zero);
  step(pool);
  CHECK(slot_holds(pool, acquire(pool, "zero").slot(), nullptr));
}

TEST_CASE("when all slots are leased a third adapter is told to retry, and base needs no slot") {
  auto pool = make_pool({.max_slots = 2, .max_rank = 8});
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const b = tiny_adapter(pool.shape(), 2, 8, every_site);
  load(pool, "a", a);
  load(pool, "b", b);
  step(pool);
  Lease const chunk_a = acquire(pool, "a");
  Lease chunk_b = acquire(pool, "b");  // a chunked prefill holds it over several steps
  Lease const base;
  CHECK(base.slot() == base_slot);
  CHECK(base.id() == base_id);
  CHECK_FALSE(base);
  for (int chunk = 0; chunk < 3; ++chunk) {
    step(pool);
    auto const third = pool.load("c", tiny_adapter(pool.shape(), 3, 8, {0}));
    REQUIRE_FALSE(third.has_value());
    CHECK(third.error().code == Errc::pool_full);
    CHECK(retryable(third.error().code));
    CHECK(slot_holds(pool, 0, &a));
    CHECK(slot_holds(pool, 1, &b));
  }
  CHECK(pool.names() == std::vector<std::string>{"a", "b"});
  chunk_b.release();
  CHECK(load(pool, "c", tiny_adapter(pool.shape(), 3, 8, {0})).key.slot == 1);
  step(pool);
  CHECK(pool.names() == std::vector<std::string>{"a", "c"});
  CHECK(code(pool.acquire("b")) == Errc::not_found);
}

TEST_CASE("the adapter that was used longest ago is evicted, and its key finds nobody") {
  auto pool = make_pool({.max_slots = 2, .max_rank = 8});
  SlotKey const a = load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0})).key;
  SlotKey const b = load(pool, "b", tiny_adapter(pool.shape(), 2, 8, {0})).key;
  step(pool);
  acquire(pool, "b").release();
  acquire(pool, "a").release();
  step(pool);
  SlotKey const c = load(pool, "c", tiny_adapter(pool.shape(), 3, 8, {0})).key;
  CHECK(c.slot == b.slot);
  CHECK(code(pool.acquire(b)) == Errc::stale);
  CHECK(code(pool.acquire("b")) == Errc::not_found);
  step(pool);
  CHECK(code(pool.acquire(b)) == Errc::stale);
  CHECK(pool.acquire(a).has_value());
  CHECK(pool.acquire(c).has_value());
  CHECK(code(pool.acquire(SlotKey{})) == Errc::stale);
  CHECK(code(pool.acquire(SlotKey{2, 1})) == Errc::stale);
}

TEST_CASE("new content under a leased name goes to another slot, and the old one drains with its readers") {
  auto pool = make_pool({.max_slots = 2, .max_rank = 8});
  Adapter const old_content = tiny_adapter(pool.shape(), 1, 8, every_site);
  Adapter const new_content = tiny_adapter(pool.shape(), 2, 4, {1});
  Staged const first = load(pool, "t", old_content);
  step(pool);
  Lease reader = acquire(pool, "t");
  Staged const second = load(pool, "t", new_content);
  CHECK(second.key.slot != first.key.slot);
  CHECK(second.id != first.id);
  CHECK(acquire(pool, "t").slot() == first.key.slot);  // the name moves at publication
  step(pool);
  CHECK(acquire(pool, "t").slot() == second.key.slot);
  CHECK(pool.view(first.key.slot).state == SlotState::draining);
  CHECK(slot_holds(pool, first.key.slot, &old_content));
  CHECK(slot_holds(pool, second.key.slot, &new_content));
  CHECK(pool.acquire(first.key).has_value());  // a fork of the reader
  reader.release();
  step(pool);
  step(pool);
  CHECK(code(pool.acquire(first.key)) == Errc::stale);
}

TEST_CASE("identity follows content, reload and unload, and not rotation") {
  auto pool = make_pool({.max_slots = 2, .max_rank = 8});
  Adapter const a = tiny_adapter(pool.shape(), 1, 8, {0});
  Adapter const b = tiny_adapter(pool.shape(), 2, 8, {0});
  std::uint64_t const id1 = load(pool, "t", a).id;
  step(pool);
  std::uint64_t const id2 = load(pool, "t", b).id;
  step(pool);
  auto const calls = pool.backend().script().calls;
  Staged const again = load(pool, "t", b);
  CHECK(pool.backend().script().calls == calls);  // the same content is there already
  std::uint64_t const id3 = again.id;
  CHECK(pool.acquire(again.key).has_value());
  REQUIRE(pool.set_active("t").has_value());
  CHECK(acquire(pool, "t").id() == id2);  // a rotation moves nothing
  REQUIRE(pool.set_active("").has_value());
  step(pool);
  REQUIRE(pool.unload("t").has_value());
  step(pool);
  std::uint64_t const id4 = load(pool, "t", a).id;
  step(pool);
  CHECK(id1 != id2);
  CHECK(id3 == id2);
  CHECK(id4 != id1);
  CHECK(id4 != id2);
  CHECK(pool.adapter_id(again.key.slot) == id4);
  load(pool, "other", a);
  step(pool);
  CHECK(pool.adapter_id(1) == adapter_id("other"));
  CHECK(pool.adapter_id(2) == base_id);
  CHECK(pool.adapter_id(99) == base_id);
  CHECK(pool.adapter_id(-1) == base_id);
}

TEST_CASE("content that is evicted and comes back keeps its id") {
  auto pool = make_pool({.max_slots = 1, .max_rank = 8});
  std::uint64_t const id = load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0})).id;
  step(pool);
  load(pool, "b", tiny_adapter(pool.shape(), 2, 8, {0}));
  step(pool);
  CHECK(load(pool, "a", tiny_adapter(pool.shape(), 1, 8, {0})).id == id);
}

}  // namespace
