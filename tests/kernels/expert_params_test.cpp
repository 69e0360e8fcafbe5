// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/expert_params.hpp"

#include <cstddef>
#include <cstdint>

#include <doctest/doctest.h>

using namespace atlas::lora;

namespace {

constexpr std::size_t h200 = 227 * 1024;  // shared memory of a block

constexpr ExpertPlan plan(std::int32_t rows, std::int32_t slots, std::int32_t experts) {
  return {nullptr, nullptr, rows, slots, experts, ExpertPlanLayout{rows, slots, experts}.max_groups()};
}

// A plan with room for a prefill does not make a decode look large.
static_assert(expert_tiles(plan(32768, 4, 128), 8) == 8);
static_assert(expert_tiles(plan(32768, 4, 128), 32768) == 512 + (32768 - 512) / 8);
static_assert(expert_tiles(plan(64, 4, 128), 1000) == 64, "a window's plan holds no more than its rows");
static_assert(expert_tiles(plan(64, 1, 1), 64) == 8);
static_assert(expert_tiles(ExpertPlan{}, 64) == 0);

static_assert(expert_tuning(16, 1, 3584) == 0 && expert_tuning(8, 1, 3584) == 1);
static_assert(expert_tuning(16, 8, 3584) == 1 && expert_tuning(16, 32, 3584) == 2);
static_assert(expert_tuning(16, 128, 3584) == 3 && expert_tuning(16, 1 << 30, 3584) == 3);
// Of long rows it takes four times as many.
static_assert(expert_tuning(16, 16, 32768) == 0 && expert_tuning(16, 17, 32768) == 1);
static_assert(expert_tuning(16, 65, 32768) == 2 && expert_tuning(16, 257, 32768) == 3);

// Two projections of rank 64 have four rank tiles each; every group has max_segments sums of 32 float4 a
// tile.
constexpr ExpertDeltaParams<float> two_of_64() {
  ExpertDeltaParams<float> params;
  params.plan = plan(16, 1, 1);
  params.num_projections = 2;
  params.projections[0].table.max_rank = params.projections[1].table.max_rank = 64;
  return params;
}
static_assert(two_launch_scratch_bytes(two_of_64()) == std::size_t{2} * max_segments * 8 * 32 * 16);

// Four slots of 128 experts: a warp for each 32 rows, up to all 32 of the block.
static_assert(detail::expert_plan_warps(8, 512, 128, h200) == 1);
static_assert(detail::expert_plan_warps(64, 512, 128, h200) == 2);
static_assert(detail::expert_plan_warps(32768, 512, 128, h200) == 32);
// Sixteen slots: 26 warps' counters and two words for each of 2,048 pairs are 28 * 8192 bytes and the
// offsets.
static_assert(detail::expert_plan_warps(32768, 2048, 128, h200) == 26);
static_assert(detail::expert_plan_bytes(2048, 128, 26) == std::size_t{28} * 8192 + 129 * 4);
// 64 slots of 256 experts: three words for each of 16,384 pairs; and the most pairs of an H200.
static_assert(detail::expert_plan_warps(32768, 16384, 256, h200) == 1);
static_assert(detail::expert_plan_warps(32768, 19000, 256, h200) == 1);
static_assert(detail::expert_plan_warps(32768, 19400, 256, h200) == 0);

}  // namespace

TEST_CASE("the planning block's counters fit whatever shared memory there is, or there is no launch") {
  for (std::int64_t keys = 1; keys < 70000; keys = keys * 3 / 2 + 1) {
    for (std::int32_t const rows : {0, 1, 32, 33, 1000, 32768}) {
      for (std::size_t const bytes : {std::size_t{48} * 1024, std::size_t{99} * 1024, h200}) {
        std::int32_t const warps = detail::expert_plan_warps(rows, keys, 256, bytes);
        CHECK(warps <= 32);
        if (warps > 0) CHECK(detail::expert_plan_bytes(keys, 256, warps) <= bytes);
        if (warps == 0) CHECK(detail::expert_plan_bytes(keys, 256, 1) > bytes);
      }
    }
  }
}
