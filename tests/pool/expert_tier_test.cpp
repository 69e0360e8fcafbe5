// SPDX-License-Identifier: AGPL-3.0-only
//
// Experts and routers in both tiers: packed in pinned host memory, and from there in a slot.
#include "atlas/lora/pool/host_tier.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "both_tiers.hpp"
#include "moe_pool.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

constexpr PoolOptions one_slot{
    .max_slots = 1, .spare = 1, .max_rank = 8, .expert_bytes = std::size_t{1} << 20};

// All that a slot 0's cell reaches: A at the padded rank, B and bias.
template <Element T>
std::string bytes_of(RouteCell<T> const& cell, std::int64_t k_in, std::int64_t n_out) {
  std::string bytes = std::to_string(cell.rank) + " " + std::to_string(cell.scale) + " " +
                      std::to_string(cell.b_row_stride) + ": ";
  auto const add = [&bytes](T const* from, std::int64_t count) {
    std::size_t const size = from == nullptr ? 0 : static_cast<std::size_t>(count) * sizeof(T);
    std::string part(size, '\0');
    if (size > 0) std::memcpy(part.data(), from, size);
    bytes += part;
  };
  add(cell.a, cell.b_row_stride * k_in);
  add(cell.b, cell.b_row_stride * n_out);
  add(cell.bias, n_out);
  return bytes;
}

// The slot and the memory for experts that slot 0 of a pool speaks of, linear by linear.
template <class P>
std::vector<std::string> contents(P const& pool) {
  std::vector<std::string> all;
  for (Site const site : pool.shape().sites()) {
    auto const table = pool.route(site);
    all.push_back(bytes_of(*table->cell(0), table->k_in, table->n_out));
  }
  auto const router = pool.router(1);
  all.push_back(bytes_of(*router->cell(0), router->k_in, router->n_out));
  for (auto const& [expert, linear] : every_linear()) {
    auto const table = pool.expert(1, linear);
    all.push_back(bytes_of(table->find(0, expert), table->k_in, table->n_out));
  }
  return all;
}

// Whether A's rows from the true rank to the padded one are zero, in all experts and the router.
template <class P>
bool tails_are_zero(P const& pool) {
  auto const is_zero = [](auto const& cell, std::int64_t k_in) {
    for (std::int64_t i = cell.rank * k_in; i < cell.b_row_stride * k_in; ++i) {
      if (to_f32(cell.a[i]) != 0.0F) return false;
    }
    return true;
  };
  bool zero = is_zero(*pool.router(1)->cell(0), pool.router(1)->k_in);
  for (auto const& [expert, linear] : every_linear()) {
    auto const table = pool.expert(1, linear);
    zero = zero && is_zero(table->find(0, expert), table->k_in);
  }
  return zero;
}

}  // namespace

TEST_CASE_TEMPLATE("an adapter with experts comes through the host tier with the bytes of a direct load", T,
                   float, __nv_bfloat16) {
  Adapter const before = moe_adapter(7, 8, every_linear(), true, true);  // what its blocks held until then
  for (std::int32_t const rank : {1, 5, 8}) {
    Adapter const some = moe_adapter(3, rank, {{1, ExpertLinear::up}, {3, ExpertLinear::down}}, false);
    Adapter const biased = moe_adapter(4, rank, every_linear(), true, true);
    for (Adapter const& adapter : {some, biased, fused(biased)}) {
      auto direct = pool_of<T>(moe_shape(), one_slot);
      load(direct, "x", before);
      step(direct);
      REQUIRE(direct.unload("x").has_value());
      load(direct, "a", adapter);
      step(direct);
      REQUIRE(holds_experts(direct, 0, &adapter));
      for (std::size_t const block_bytes : {sizeof(T), std::size_t{52}, std::size_t{64} << 10}) {
        INFO("rank ", rank, ", blocks of ", block_bytes);
        auto tier = tier_of<T>(moe_shape(), adapter, block_bytes);
        auto pool = pool_of<T>(moe_shape(), one_slot);
        load(pool, "x", before);
        step(pool);
        REQUIRE(pool.unload("x").has_value());
        auto const staged = promote(pool, tier, "a");
        REQUIRE(staged.has_value());
        step(pool);
        CHECK(slot_holds(pool, 0, &adapter));
        CHECK(holds_experts(pool, 0, &adapter));
        CHECK(tails_are_zero(pool));
        CHECK(contents(pool) == contents(direct));
        CHECK(pool.snapshot().slots[0].bytes == direct.snapshot().slots[0].bytes);
        CHECK(load(pool, "a", adapter).key == staged->key);  // the same content, whichever way it comes
        REQUIRE(pool.unload("a").has_value());
        REQUIRE(promote(pool, tier, "a").has_value());  // evicted, and back without another read
        step(pool);
        CHECK(contents(pool) == contents(direct));
        CHECK(tier.snapshot().counters.reads == 1);
      }
    }
  }
}

TEST_CASE("experts and routers count in the bytes of both tiers, and an A that is shared counts once") {
  Adapter const adapter =
      fused(moe_adapter(3, 8, {{0, ExpertLinear::gate}, {0, ExpertLinear::up}}, true, true));
  // q: 8 * 10 + 6 * 8 elements; router: 8 * 10 + 4 * 8; gate: 8 * 10 + 6 * 8 + 6; up: 6 * 8 + 6.
  constexpr std::size_t bytes = 4 * (128 + 112 + 134 + 54);
  auto tier = tier_of<float>(moe_shape(), adapter, 4);
  auto pool = pool_of<float>(moe_shape(), one_slot);
  REQUIRE(promote(pool, tier, "a").has_value());
  step(pool);
  CHECK(tier.snapshot().bytes == bytes);
  CHECK(pool.snapshot().slots[0].bytes == bytes);
  CHECK(pool.snapshot().content_bytes == bytes);
}

TEST_CASE(
    "a pool without memory for experts refuses them packed, or leaves them out where either side says so") {
  Adapter const adapter = moe_adapter(3, 5, every_linear());
  auto strict = tier_of<float>(moe_shape(), adapter, 64);
  auto lenient = tier_of<float>(moe_shape(), adapter, 64, {.leave_out_unserved = true});
  StageOptions const leave_out{.packing = {.leave_out_unserved = true}};
  auto pool = pool_of<float>(moe_shape(), {.max_slots = 1, .spare = 1, .max_rank = 8});
  auto const refused = promote(pool, strict, "a");
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error() == Error{Errc::unsupported,
                                 "adapter 'a': 13 pairs of experts and routers: the pool was made without "
                                 "memory for experts"});
  auto const direct = load(pool, "a", adapter, leave_out);
  CHECK(promote(pool, strict, "a", leave_out)->key == direct.key);
  CHECK(promote(pool, lenient, "a")->key == direct.key);
  REQUIRE(pool.unload("a").has_value());
  REQUIRE(promote(pool, lenient, "a").has_value());
  step(pool);
  CHECK(slot_holds(pool, 0, &adapter));
  CHECK(pool.snapshot().slots[0].rank == 5);
  CHECK(pool.snapshot().slots[0].bytes == 4 * (5 * 10 + 6 * 8));  // q alone
  auto serving = pool_of<float>(moe_shape(), one_slot);
  REQUIRE(promote(serving, lenient, "a").has_value());  // here they are served, and so not left out
  step(serving);
  CHECK(holds_experts(serving, 0, &adapter));
}

TEST_CASE("ranks of packed experts and routers beyond the pool's are refused by name") {
  auto tier = tier_of<float>(moe_shape(), moe_adapter(3, 9, {{2, ExpertLinear::down}}), 64);
  auto pool = pool_of<float>(moe_shape(), one_slot);
  auto const refused = promote(pool, tier, "a");
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error() == Error{Errc::rank_exceeds_pool,
                                 "adapter 'a': layer 0 'q': rank 9 exceeds the pool's 8\n"
                                 "adapter 'a': layer 1 router: rank 9 exceeds the pool's 8\n"
                                 "adapter 'a': layer 1 expert 2: rank 9 exceeds the pool's 8"});
}

TEST_CASE("a promotion that fails on the way gives its memory for experts back") {
  Adapter const adapter = moe_adapter(3, 5, every_linear());
  auto tier = tier_of<float>(moe_shape(), adapter, 64);
  ScriptedBackend backend;
  MoePool pool = make_moe_pool(1, needed(adapter), backend);
  CHECK(promote_through_faults(pool, tier, backend) > 20);
  step(pool);
  CHECK(holds_experts(pool, 0, &adapter));
}
