// SPDX-License-Identifier: AGPL-3.0-only
//
// The device's row plan against its definition: groups ascending by slot, rows ascending within a group, base
// and out-of-range slots in none.
#include "support.cuh"

#include <algorithm>
#include <map>

namespace atlas_test {
namespace {

Machine const& planner() {
  static Machine const made = ready_machine<RowPlanning>();
  return made;
}

/// Plans `slots` on the device and checks every part of the plan.
void check_plan(std::vector<std::int32_t> const& slots, std::int32_t capacity, std::int32_t max_slots) {
  RowPlanLayout const layout{capacity, max_slots};
  DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
  RowPlan const plan = layout.at(buffer.data());
  CUDA_OK(
      cudaMemcpy(plan.row_slots, slots.data(), slots.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
  auto const rows = static_cast<std::int32_t>(slots.size());
  CUDA_OK(launch_row_plan(plan, rows, planner(), nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  std::vector<std::byte> host = buffer.download();
  RowPlan const got = layout.at(host.data());

  std::map<std::int32_t, std::vector<std::int32_t>> want;
  for (std::int32_t r = 0; r < rows; ++r) {
    std::int32_t const slot = slots[static_cast<std::size_t>(r)];
    if (slot >= 0 && slot < max_slots) want[slot].push_back(r);
  }
  REQUIRE(got.header->num_groups == static_cast<std::int32_t>(want.size()));
  std::int32_t group = 0;
  std::int32_t first = 0;
  std::int32_t tile = 0;
  for (auto const& [slot, members] : want) {
    RowGroup const expected{slot, first, static_cast<std::int32_t>(members.size()), 0};
    REQUIRE(got.groups[group] == expected);
    for (std::size_t i = 0; i < members.size(); ++i)
      REQUIRE(got.rows[first + static_cast<std::int32_t>(i)] == members[i]);
    for (std::int32_t row = 0; row < expected.count; row += tile_rows, ++tile) {
      REQUIRE(got.tiles[tile] == RowGroup{slot, first + row, std::min(tile_rows, expected.count - row), 0});
    }
    first += expected.count;
    ++group;
  }
  CHECK(got.header->num_rows == first);
  CHECK(got.header->num_tiles == tile);
  for (; tile < got.max_tiles; ++tile) REQUIRE(got.tiles[tile] == RowGroup{});
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("the device groups rows as the definition says") {
    for (std::int32_t const max_slots : {1, 5, 64, 1500}) {
      for (std::int32_t const rows : {1, 2, 31, 32, 33, 64, 1000, 1024, 1025, 4100}) {
        INFO("rows " << rows << ", slots " << max_slots);
        check_plan(mixed_slots(rows, max_slots, static_cast<std::uint64_t>(rows)), rows + 3, max_slots);
        if (small_shapes() && rows >= 33) break;
      }
    }
  }
  TEST_CASE("rows of one slot, of none, and in runs are grouped") {
    check_plan(std::vector<std::int32_t>(100, 3), 100, 4);
    check_plan(std::vector<std::int32_t>(100, -1), 100, 4);
    check_plan(std::vector<std::int32_t>(100, 4), 100, 4);
    std::vector<std::int32_t> runs;
    for (std::int32_t run = 7; run >= 0; --run) runs.insert(runs.end(), 150, run);
    check_plan(runs, 1200, 8);
  }
  TEST_CASE("more rows than 16 bits count are grouped") {
    if (small_shapes()) return;
    check_plan(mixed_slots(70'001, 9, 2), 70'001, 9);
  }
  TEST_CASE("bad plans are refused before anything is enqueued") {
    RowPlanLayout const layout{8, 4};
    DeviceArray<std::byte> const buffer(layout.bytes());
    RowPlan const plan = layout.at(buffer.data());
    CHECK(launch_row_plan(plan, 9, planner(), nullptr) == cudaErrorInvalidValue);
    CHECK(launch_row_plan(plan, -1, planner(), nullptr) == cudaErrorInvalidValue);
    CHECK(launch_row_plan(RowPlan{}, 0, planner(), nullptr) == cudaErrorInvalidValue);
    CHECK(launch_row_plan(plan, 1, Machine{}, nullptr) == cudaErrorInvalidValue);
    RowPlan huge = plan;
    huge.max_slots = 1 << 20;
    CHECK(launch_row_plan(huge, 1, planner(), nullptr) == cudaErrorInvalidValue);
  }
}

}  // namespace atlas_test
