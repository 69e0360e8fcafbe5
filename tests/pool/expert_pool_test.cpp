// SPDX-License-Identifier: AGPL-3.0-only
//
// Experts and routers in a pool: what a slot's record says of them, and who gives way when their memory runs
// out.
#include "atlas/lora/pool/pool.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "moe_pool.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

TEST_CASE("a slot's record finds the experts and the router that its adapter has, and no others") {
  MoePool pool = make_moe_pool(2, 1 << 20);
  Adapter const whole = moe_adapter(3, 5, every_linear());
  Adapter const some = moe_adapter(
      4, 8, {{1, ExpertLinear::up}, {3, ExpertLinear::gate}, {3, ExpertLinear::down}}, false, true);
  load(pool, "whole", whole);
  load(pool, "some", some);
  step(pool);
  CHECK(holds_experts(pool, acquire(pool, "whole").slot(), &whole));
  CHECK(holds_experts(pool, acquire(pool, "some").slot(), &some));
  CHECK(slot_holds(pool, acquire(pool, "some").slot(), &some));
}

TEST_CASE("each linear's table finds its own experts and no other linear's") {
  MoePool pool = make_moe_pool(1, 1 << 20);
  Adapter const adapter =
      moe_adapter(3, 8, {{0, ExpertLinear::up}, {2, ExpertLinear::gate}, {3, ExpertLinear::down}}, false);
  load(pool, "a", adapter);
  step(pool);
  auto const experts_of = [&](ExpertLinear linear) {
    std::vector<std::int32_t> found;
    for (std::int32_t e = 0; e < 4; ++e) {
      if (pool.expert(1, linear)->find(0, e).adapted()) found.push_back(e);
    }
    return found;
  };
  CHECK(experts_of(ExpertLinear::gate) == std::vector<std::int32_t>{2});
  CHECK(experts_of(ExpertLinear::up) == std::vector<std::int32_t>{0});
  CHECK(experts_of(ExpertLinear::down) == std::vector<std::int32_t>{3});
  CHECK(pool.expert(1, ExpertLinear::up)->of_slot(0)->num_groups == 3);  // experts 0, 2 and 3 have cells
}

TEST_CASE("A begins a block, and B comes behind A's rows at the padded rank") {
  AdapterPool<__nv_bfloat16, ScriptedBackend> pool = *AdapterPool<__nv_bfloat16, ScriptedBackend>::create(
      moe_shape(), {.max_slots = 1, .max_rank = 16, .expert_bytes = 1 << 20}, ScriptedBackend{});
  load(pool, "a", moe_adapter(3, 12, {{0, ExpertLinear::down}}));
  step(pool);
  // Down: k_in 6, n_out 10, rank 12 in rows of 16.
  RouteCell<__nv_bfloat16> const cell = pool.expert(1, ExpertLinear::down)->find(0, 0);
  CHECK(cell.rank == 12);
  CHECK(cell.b_row_stride == 16);
  CHECK(cell.b - cell.a == 16 * 6);
  CHECK(reinterpret_cast<std::uintptr_t>(cell.a) % 16 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(cell.b) % 16 == 0);
  CHECK(to_f32(cell.b[16]) == element(3, 10, 1, 12));  // row 1 begins at element 16 with its own first value
  for (int j = 12; j < 16; ++j) CHECK(to_f32(cell.b[16 + j]) == 0.0F);
  CHECK(pool.router(1)->cell(0)->b - pool.router(1)->cell(0)->a == 16 * 10);
}

TEST_CASE("gate and up of a fused parameter keep one A, and a pair that only says so is refused") {
  MoePool pool = make_moe_pool(1, 1 << 20);
  Adapter const fused = atlas_test::fused(moe_adapter(3, 5, every_linear()));
  load(pool, "a", fused);
  step(pool);
  CHECK(holds_experts(pool, 0, &fused));
  for (std::int32_t e = 0; e < 4; ++e) {
    auto const gate = pool.expert(1, ExpertLinear::gate)->find(0, e);
    auto const up = pool.expert(1, ExpertLinear::up)->find(0, e);
    CHECK(gate.a == up.a);
    CHECK(gate.b != up.b);
  }
  Adapter apart = fused;
  for (ExpertPair& pair : apart.experts) pair.shares_a = false;
  // Four experts' A of 5 * 10 elements, and at the padded rank 8 * 10, of 4 bytes.
  CHECK(detail::outline_of(apart, pool.shape(), 4, {}, true).bytes - pool.snapshot().slots[0].bytes ==
        std::size_t{4} * 5 * 10 * 4);
  auto const bytes = [&](Adapter const& adapter) {
    std::size_t sum = 0;
    PackedOutline const outline = detail::outline_of(adapter, pool.shape(), 4, {}, true);
    for (std::size_t const size : detail::expert_block_sizes(outline, pool.shape(), 4)) sum += size;
    return sum;
  };
  CHECK(bytes(apart) - bytes(fused) == std::size_t{4} * 8 * 10 * 4);
  Adapter lying = apart;
  lying.experts[1].a = tensor(77, 9, 0, {5, 10});
  lying.experts[1].shares_a = true;  // up of expert 0
  lying.experts[3].shares_a = true;  // gate of expert 1
  auto const refused = pool.load("b", lying);
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().message.find("expert 0: shares_a") != std::string::npos);
  CHECK(refused.error().message.find("expert 1: shares_a") != std::string::npos);
}

TEST_CASE("nothing of a slot's last experts survives a replace, an adapter without experts, or an unload") {
  MoePool pool = make_moe_pool(1, 1 << 20);
  load(pool, "a", moe_adapter(3, 5, every_linear()));
  step(pool);
  Adapter const next = moe_adapter(4, 2, {{2, ExpertLinear::down}}, false);
  load(pool, "a", next);
  step(pool);
  CHECK(holds_experts(pool, 0, &next));
  Adapter const dense = moe_adapter(5, 2, {}, false);
  load(pool, "a", dense);
  step(pool);
  CHECK(holds_experts(pool, 0, &dense));
  load(pool, "a", next);
  step(pool);
  REQUIRE(pool.unload("a").has_value());
  step(pool);
  CHECK(holds_experts(pool, 0, nullptr));
}

TEST_CASE("tables keep their addresses, and say the model's widths") {
  MoePool pool = make_moe_pool(2, 1 << 20);
  auto const before = pool.expert(1, ExpertLinear::up);
  auto const router = pool.router(1);
  REQUIRE(before.has_value());
  REQUIRE(router.has_value());
  load(pool, "a", moe_adapter(3, 5, every_linear()));
  step(pool);
  CHECK(pool.expert(1, ExpertLinear::up)->index == before->index);
  CHECK(before->find(0, 3).adapted());
  CHECK(before->k_in == 10);
  CHECK(before->n_out == 6);
  CHECK(pool.expert(1, ExpertLinear::down)->k_in == 6);
  CHECK(router->cell(0)->adapted());
  CHECK(router->n_out == 4);
  CHECK(code(pool.expert(0, ExpertLinear::up)) == Errc::not_found);
  CHECK(code(pool.router(7)) == Errc::not_found);
}

TEST_CASE("a pool without memory for experts refuses them, or leaves them out where that is asked for") {
  MoePool pool = make_moe_pool(1, 0);
  Adapter const adapter = moe_adapter(3, 5, every_linear());
  auto const refused = pool.load("a", adapter);
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().code == Errc::unsupported);
  CHECK(refused.error().message.find("without memory for experts") != std::string::npos);
  load(pool, "a", adapter, {.packing = {.leave_out_unserved = true}});
  step(pool);
  CHECK(pool.expert(1, ExpertLinear::up)->index == nullptr);
  CHECK(pool.router(1)->cells == nullptr);
  CHECK(pool.snapshot().slots[0].bytes == detail::outline_of(adapter, pool.shape(), 4, {}, false).bytes);
}

TEST_CASE("experts count among an adapter's bytes and ranks") {
  MoePool pool = make_moe_pool(1, 1 << 20);
  Adapter const adapter = moe_adapter(3, 5, {{0, ExpertLinear::gate}}, false);
  load(pool, "a", adapter);
  step(pool);
  SlotStatus const status = pool.snapshot().slots[0];
  CHECK(status.rank == 5);
  // q: 5 * 10 + 6 * 8 elements; gate of expert 0: 5 * 10 + 6 * 8.
  CHECK(status.bytes == 4 * (98 + 98));
}

TEST_CASE("idle adapters give way to experts, the oldest first, and leased ones do not") {
  Adapter const one = moe_adapter(1, 8, every_linear()), two = moe_adapter(2, 8, every_linear()),
                three = moe_adapter(3, 8, every_linear());
  // A slab is 8 * 768 bytes, eight of the cells. Pairs take 512 bytes, twelve in a slab: one adapter's 13
  // need two slabs and its cells one; two adapters' 26 need three and one; three adapters' 39 need four and
  // one.
  CHECK(needed(one) == std::size_t{3} * 8 * 768);
  MoePool pool = make_moe_pool(4, std::size_t{4} * 8 * 768);
  load(pool, "one", one);
  load(pool, "two", two);
  step(pool);
  {
    Lease const first = acquire(pool, "one"), second = acquire(pool, "two");
    CHECK(code(pool.load("three", three)) == Errc::expert_memory_busy);
    CHECK(holds_experts(pool, first.slot(), &one));
    CHECK(holds_experts(pool, second.slot(), &two));
    CHECK(pool.names() == std::vector<std::string>{"one", "two"});
  }
  step(pool);
  Lease const kept = acquire(pool, "one");  // used later than two
  load(pool, "three", three);
  step(pool);
  CHECK(code(pool.acquire("two")) == Errc::not_found);
  CHECK(holds_experts(pool, kept.slot(), &one));
  CHECK(holds_experts(pool, acquire(pool, "three").slot(), &three));
  CHECK(pool.snapshot().counters.evictions == 1);
}

TEST_CASE("an adapter without experts does not give way to experts") {
  Adapter const one = moe_adapter(1, 8, every_linear());
  MoePool pool = make_moe_pool(4, needed(one));
  load(pool, "dense", moe_adapter(9, 8, {}, false));
  load(pool, "one", one);
  step(pool);
  load(pool, "two", moe_adapter(2, 8, every_linear()));
  step(pool);
  CHECK(code(pool.acquire("one")) == Errc::not_found);
  CHECK(pool.acquire("dense").has_value());
}

TEST_CASE("new content under a name does not take the memory of the old one before it is published") {
  Adapter const one = moe_adapter(1, 8, every_linear());
  MoePool pool = make_moe_pool(2, needed(one));
  load(pool, "one", one);
  step(pool);
  CHECK(code(pool.load("one", moe_adapter(2, 8, every_linear()))) == Errc::expert_memory_busy);
  CHECK(holds_experts(pool, acquire(pool, "one").slot(), &one));
}

TEST_CASE("experts that can never fit are an error that no waiting mends, and nobody leaves for them") {
  Adapter const small = moe_adapter(1, 8, {{0, ExpertLinear::gate}}, false);
  Adapter const large = moe_adapter(2, 8, every_linear());
  MoePool pool = make_moe_pool(2, needed(small));
  load(pool, "small", small);
  step(pool);
  CHECK(code(pool.load("large", large)) == Errc::out_of_memory);
  CHECK(pool.acquire("small").has_value());
}

TEST_CASE("a load that fails gives its memory for experts back") {
  Adapter const one = moe_adapter(1, 8, every_linear());
  ScriptedBackend backend;
  MoePool pool = make_moe_pool(2, needed(one), backend);
  Adapter bad = moe_adapter(2, 8, every_linear());
  float const nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bad.experts.back().b.bytes.data(), &nan, sizeof nan);
  for (int i = 0; i < 3; ++i) CHECK(code(pool.load("bad", bad)) == Errc::out_of_range);
  load(pool, "one", one);
  step(pool);
  CHECK(holds_experts(pool, acquire(pool, "one").slot(), &one));
}

TEST_CASE("two hundred rotations through memory for two adapters never wear it out") {
  Adapter const first = moe_adapter(1, 8, every_linear());
  MoePool pool = make_moe_pool(3, 2 * needed(first));
  for (std::uint32_t i = 1; i <= 200; ++i) {
    Adapter const adapter = moe_adapter(1 + i % 5, 1 + static_cast<std::int32_t>(i % 8), every_linear());
    std::string const name = "n" + std::to_string(i % 7);
    load(pool, name, adapter);
    step(pool);
    CHECK(holds_experts(pool, acquire(pool, name).slot(), &adapter));
    step(pool);
  }
}

TEST_CASE("threads that load experts into scarce memory get all of theirs or none, and never another's") {
  Adapter const first = moe_adapter(1, 8, every_linear());
  auto pool = *AdapterPool<float, HostBackend>::create(
      moe_shape(), {.max_slots = 4, .spare = 2, .max_rank = 8, .expert_bytes = 2 * needed(first)});
  std::atomic<int> running{3};
  std::atomic<int> loaded{0};
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint32_t i = 0; i < 60; ++i) {
        std::int32_t const rank = 1 + static_cast<std::int32_t>((i + t) % 8);
        auto const staged =
            pool.load("t" + std::to_string(t), moe_adapter(10 * t + 1 + i % 5, rank, every_linear()));
        if (staged) ++loaded;
        if (!staged && !retryable(staged.error().code)) loaded = -1000000;
      }
      --running;
    });
  }
  bool right = true;
  while (running > 0) {
    step(pool);
    for (std::uint32_t t = 0; t < 3; ++t) {
      auto const lease = pool.acquire("t" + std::to_string(t));
      if (!lease) continue;
      auto const gate = pool.expert(1, ExpertLinear::gate)->find(lease->slot(), 2);
      auto const content = static_cast<std::uint32_t>(gate.scale);
      Adapter const whole = moe_adapter(content, gate.rank, every_linear());
      right = right && (content - 1) / 10 == t && holds_experts(pool, lease->slot(), &whole);
    }
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right);
  CHECK(loaded > 0);
}

TEST_CASE("every fault of routers and experts is named") {
  MoePool pool = make_moe_pool(1, 1 << 20);
  Adapter adapter = moe_adapter(1, 8, {{0, ExpertLinear::gate}, {1, ExpertLinear::up}});
  adapter.experts.push_back(adapter.experts[1]);  // twice
  adapter.experts.push_back(adapter.experts[1]);
  adapter.experts.back().expert = 4;  // not there
  adapter.experts[0].a.shape = {8, 11};
  adapter.routers[0].rank = 9;
  auto const refused = pool.load("a", adapter);
  REQUIRE_FALSE(refused.has_value());
  for (char const* const word : {"layer 1 expert 1: twice", "layer 1 expert 4: the model does not have it",
                                 "is not [8, 10]", "layer 1 router: rank 9 exceeds the pool's 8"}) {
    CHECK_MESSAGE(refused.error().message.find(word) != std::string::npos, refused.error().message);
  }
}

TEST_CASE("memory for experts on a model without them is refused, and is part of what creation takes") {
  auto const refused = MoePool::memory_needed(tiny_shape(), {.expert_bytes = 256});
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().message.find("expert_bytes") != std::string::npos);
  PoolOptions options{.max_slots = 2, .max_rank = 8};
  auto const without = MoePool::memory_needed(moe_shape(), options);
  options.expert_bytes = 1000;
  auto const with = MoePool::memory_needed(moe_shape(), options);
  REQUIRE(with.has_value());
  // Records of 2 + 1 cells and an index of four experts: 3 * 48 + 32 bytes for each of two slots, where there
  // were 2 * 48; both round up: 352 to 512 and 192 to 256. Then 1000 rounded up to 1024.
  CHECK(with->device_bytes - without->device_bytes == 512 - 256 + 1024);
}

// A victim policy that lets the test act between its choice of an idle slot and what the pool makes of it, as
// another thread may.
struct Interrupted {
  std::function<void(std::uint32_t)>* on_idle;
  std::optional<std::uint32_t> operator()(std::span<SlotView const> views) const noexcept {
    auto const chosen = LruIdle{}(views);
    if (chosen && views[*chosen].idle && *on_idle) (*on_idle)(*chosen);
    return chosen;
  }
};
using InterruptedPool = AdapterPool<float, HostBackend, Interrupted>;

TEST_CASE(
    "an adapter that is leased at the moment of its choice does not give way to experts; the next does") {
  Adapter const one = moe_adapter(1, 8, every_linear()), two = moe_adapter(2, 8, every_linear()),
                three = moe_adapter(3, 8, every_linear());
  std::function<void(std::uint32_t)> on_idle;
  auto pool = *InterruptedPool::create(
      moe_shape(),
      {.max_slots = 4, .spare = 2, .max_rank = 8, .expert_bytes = std::size_t{4} * 8 * 768},  // for two
      HostBackend{}, Interrupted{&on_idle});
  load(pool, "one", one);
  load(pool, "two", two);
  step(pool);
  SlotKey const key = *pool.find("one");
  std::vector<Lease> leases;
  on_idle = [&](std::uint32_t slot) {
    if (slot == static_cast<std::uint32_t>(key.slot) && leases.empty()) leases.push_back(*pool.acquire(key));
  };
  load(pool, "three", three);
  step(pool);
  REQUIRE(leases.size() == 1);
  CHECK(holds_experts(pool, leases[0].slot(), &one));
  CHECK(code(pool.acquire("two")) == Errc::not_found);
  CHECK(holds_experts(pool, acquire(pool, "three").slot(), &three));
}

TEST_CASE(
    "adapters that were chosen to give way can be leased again when their experts' memory is not enough") {
  // Three slabs: of 512 bytes for routers and gates, of 768 for cells and what has biases, of 256 for the up
  // that shares its gate's A. The large one needs 13 blocks of 768: where two stays, there are seven.
  Adapter const one = moe_adapter(1, 8, {{0, ExpertLinear::gate}});
  Adapter const two = fused(moe_adapter(2, 8, {{0, ExpertLinear::gate}, {0, ExpertLinear::up}}, false));
  Adapter const large = moe_adapter(3, 8, every_linear(), true, true);
  std::function<void(std::uint32_t)> on_idle;
  auto pool = *InterruptedPool::create(
      moe_shape(), {.max_slots = 4, .spare = 2, .max_rank = 8, .expert_bytes = std::size_t{3} * 8 * 768},
      HostBackend{}, Interrupted{&on_idle});
  load(pool, "one", one);
  load(pool, "two", two);
  step(pool);
  SlotKey const key = *pool.find("two");
  std::vector<Lease> leases;
  on_idle = [&](std::uint32_t slot) {
    if (slot == static_cast<std::uint32_t>(key.slot)) leases.push_back(*pool.acquire(key));
  };
  CHECK(code(pool.load("large", large)) == Errc::expert_memory_busy);
  CHECK(leases.size() == 1);
  CHECK(holds_experts(pool, acquire(pool, "one").slot(), &one));
  CHECK(pool.snapshot().counters.evictions == 0);
  leases.clear();
  on_idle = nullptr;
  step(pool);
  load(pool, "large", large);
  step(pool);
  CHECK(code(pool.acquire("two")) == Errc::not_found);
  CHECK(holds_experts(pool, acquire(pool, "large").slot(), &large));
}

}  // namespace
