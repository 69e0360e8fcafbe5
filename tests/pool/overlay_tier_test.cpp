// SPDX-License-Identifier: AGPL-3.0-only
//
// Token rows in both tiers, alone and beside experts: packed in pinned host memory, and from there in a slot.
#include "atlas/lora/pool/host_tier.hpp"

#include <cstddef>
#include <cstdint>

#include <doctest/doctest.h>

#include "both_tiers.hpp"
#include "moe_pool.hpp"
#include "overlay_pool.hpp"
#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

// The model with experts, and a vocabulary.
ModelShape both_shape() {
  ModelDescription d;
  d.num_layers = 2;
  d.modules = {{"q", 6, 10, {0, 1}, {}}};
  d.moe = {4, {1}, 10, 6, {}};
  d.vocab = vocab;
  d.hidden = hidden;
  return *ModelShape::create(d);
}

Adapter both_adapter(std::uint32_t content) {
  Adapter adapter = moe_adapter(content, 5, every_linear(), true, true);
  adapter.overlay = overlaid(content, {0, 9}, {3, 4, 10}).overlay;
  return adapter;
}

}  // namespace

TEST_CASE_TEMPLATE("token rows come through the host tier as from a direct load, whatever the blocks", T,
                   float, __nv_bfloat16) {
  ModelShape const shape = vocabulary_shape();
  PoolOptions const options{.max_slots = 1, .max_rank = 8, .overlay_bytes = 4096};
  for (Adapter const& adapter : {overlaid(1, {9, 11}, {}), overlaid(1, {0, 9}, {3, 4, 10}),
                                 overlaid(1, {9}, {}, true), overlaid(1, {}, {7})}) {
    for (std::size_t const block_bytes : {std::size_t{4}, std::size_t{52}, std::size_t{64} << 10}) {
      INFO("blocks of ", block_bytes);
      auto tier = tier_of<T>(shape, adapter, block_bytes);
      auto pool = pool_of<T>(shape, options);
      auto const staged = promote(pool, tier, "a");
      REQUIRE(staged.has_value());
      step(pool);
      CHECK(slot_holds(pool, 0, &adapter));
      check_cell(pool, 0, adapter, 1);
      CHECK(load(pool, "a", adapter).key == staged->key);  // the same content, whichever way it comes
      REQUIRE(pool.unload("a").has_value());
      REQUIRE(promote(pool, tier, "a").has_value());
      step(pool);
      check_cell(pool, 0, adapter, 1);
      CHECK(tier.snapshot().counters.reads == 1);
    }
  }
}

TEST_CASE("token rows count in the bytes of both tiers") {
  ModelShape const shape = vocabulary_shape();
  auto tier = tier_of<float>(shape, overlaid(1, {0, 9}, {3}), 4);
  auto pool = pool_of<float>(shape, {.max_slots = 1, .max_rank = 8, .overlay_bytes = 4096});
  REQUIRE(promote(pool, tier, "a").has_value());
  step(pool);
  // q of rank 2: 2 * 10 + 6 * 8 elements; map 48, two rows 40 -> 48, one row 20 -> 32, one id 4 -> 16.
  constexpr std::size_t bytes = 4 * 68 + 48 + 48 + 32 + 16;
  CHECK(tier.snapshot().bytes == bytes);
  CHECK(pool.snapshot().slots[0].bytes == bytes);
}

TEST_CASE(
    "a pool without room for packed token rows refuses them, or leaves them out where either side says so") {
  ModelShape const shape = both_shape();
  Adapter const adapter = both_adapter(3);
  auto strict = tier_of<float>(shape, adapter, 64);
  auto lenient = tier_of<float>(shape, adapter, 64, {.leave_out_unserved = true});
  StageOptions const leave_out{.packing = {.leave_out_unserved = true}};
  auto experts_alone = pool_of<float>(
      shape, {.max_slots = 1, .max_rank = 8, .biases = true, .expert_bytes = std::size_t{1} << 20});
  auto const refused = promote(experts_alone, strict, "a");
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error() ==
        Error{Errc::unsupported, "adapter 'a': token rows: the pool was made without token overlays"});
  auto const direct = load(experts_alone, "a", adapter, leave_out);
  CHECK(promote(experts_alone, strict, "a", leave_out)->key == direct.key);
  CHECK(promote(experts_alone, lenient, "a")->key == direct.key);
  REQUIRE(experts_alone.unload("a").has_value());
  REQUIRE(promote(experts_alone, lenient, "a").has_value());
  step(experts_alone);
  CHECK(holds_experts(experts_alone, 0, &adapter));
  CHECK(experts_alone.snapshot().slots[0].bytes ==
        detail::outline_of(adapter, shape, sizeof(float), {}, true).bytes);
  auto rows_alone =
      pool_of<float>(shape, {.max_slots = 1, .max_rank = 8, .biases = true, .overlay_bytes = 4096});
  CHECK(code(promote(rows_alone, strict, "a")) == Errc::unsupported);
  REQUIRE(promote(rows_alone, strict, "a", leave_out).has_value());
  step(rows_alone);
  CHECK(slot_holds(rows_alone, 0, &adapter));
  check_cell(rows_alone, 0, adapter, 3);
  CHECK(rows_alone.snapshot().slots[0].bytes == 4 * (5 * 10 + 6 * 8) + bytes_of(2, 3));
  auto narrow = pool_of<float>(
      shape, {.max_slots = 1, .max_rank = 8, .biases = true, .overlay_bytes = bytes_of(2, 3) - 1});
  CHECK(code(promote(narrow, strict, "a", leave_out)) == Errc::out_of_memory);
}

TEST_CASE(
    "a record holds route cells, experts and an overlay cell, aligned, of a direct load and of a promotion") {
  ModelShape const shape = both_shape();
  PoolOptions const options{.max_slots = 3,
                            .max_rank = 8,
                            .biases = true,
                            .expert_bytes = std::size_t{1} << 20,
                            .overlay_bytes = 4096};
  auto const memory = detail::PoolMemory::plan(shape, options, 4);
  REQUIRE(memory.has_value());
  CHECK(memory->overlay_cell_offset % 16 == 0);
  CHECK(memory->overlay_cell_offset >= memory->indexes_in_record + memory->expert_index_stride);
  CHECK(memory->record_bytes == memory->overlay_cell_offset + 48);
  CHECK(memory->overlays_offset >= memory->experts_offset + options.expert_bytes);
  auto pool = pool_of<float>(shape, options);
  Adapter const a = both_adapter(1);
  Adapter const b = both_adapter(2);
  auto tier = tier_of<float>(shape, b, 52);
  load(pool, "a", a);
  REQUIRE(promote(pool, tier, "b").has_value());
  step(pool);
  for (auto const& [slot, adapter] : {std::pair(0, &a), std::pair(1, &b)}) {
    CHECK(slot_holds(pool, slot, adapter));
    CHECK(holds_experts(pool, slot, adapter));
    check_cell(pool, slot, *adapter, static_cast<std::uint32_t>(slot) + 1);
  }
}

TEST_CASE("a promotion of experts and token rows that fails on the way gives the memory of both back") {
  ModelShape const shape = both_shape();
  Adapter const adapter = both_adapter(3);
  auto tier = tier_of<float>(shape, adapter, 64);
  ScriptedBackend backend;
  auto pool = pool_of<float>(shape,
                             {.max_slots = 1,
                              .spare = 2,
                              .max_rank = 8,
                              .biases = true,
                              .expert_bytes = std::size_t{1} << 20,
                              .overlay_bytes = bytes_of(2, 3)},
                             backend);
  CHECK(promote_through_faults(pool, tier, backend) > 20);
  step(pool);
  CHECK(holds_experts(pool, 0, &adapter));
  check_cell(pool, 0, adapter, 3);
}
