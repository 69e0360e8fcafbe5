// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/route/row_plan.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;
using Rows = std::vector<std::int32_t>;

// Layout: header 16 bytes, 5 row slots padded from 20 to 32, min(5, 3) groups of 16, 5 rows padded to 32, and
// tiles of 16: 3 groups, and (5 - 3) / 8 = 0 more.
constexpr RowPlanLayout small{5, 3};
static_assert(small.row_slots_offset() == 16);
static_assert(small.groups_offset() == 16 + 32);
static_assert(small.rows_offset() == 16 + 32 + 3 * 16);
static_assert(small.tiles_offset() == 16 + 32 + 3 * 16 + 32);
static_assert(small.bytes() == 16 + 32 + 3 * 16 + 32 + 3 * 16);
static_assert(RowPlanLayout{100, 2}.max_tiles() == 2 + 98 / 8);
static_assert(RowPlanLayout{2, 1000}.max_groups() == 2);

constexpr bool rows_are_grouped_by_slot() {
  std::array<std::int32_t, 5> const slots{2, -1, 0, 2, 3};  // 3 is no slot of a plan of three
  RowPlanHeader header{};
  std::array<std::int32_t, 5> row_slots{};
  std::array<RowGroup, 3> groups{};
  std::array<std::int32_t, 5> rows{};
  std::array<RowGroup, 3> tiles{};
  std::array<std::int32_t, 3> scratch{};
  return build_row_plan(slots, small, header, row_slots, groups, rows, tiles, scratch) == Errc::ok &&
         header.num_groups == 2 && header.num_rows == 3 && header.num_tiles == 2 && tiles == groups &&
         row_slots == std::array<std::int32_t, 5>{2, -1, 0, 2, -1} && groups[0] == RowGroup{0, 0, 1, 0} &&
         groups[1] == RowGroup{2, 1, 2, 0} && rows[0] == 2 && rows[1] == 0 && rows[2] == 3;
}
static_assert(rows_are_grouped_by_slot());

// A plan in memory of its own, as an engine's staging buffer is.
struct HostPlan {
  explicit HostPlan(RowPlanLayout layout)
      : buffer(layout.bytes() / sizeof(Block) + 1),
        plan(layout.at(buffer.data())),
        scratch(static_cast<std::size_t>(layout.max_slots), 77) {
    std::memset(buffer.data(), 0x5a, buffer.size() * sizeof(Block));
  }
  Errc build(Rows const& slots) { return build_row_plan(slots, plan, scratch); }

  struct alignas(16) Block {
    std::array<std::byte, 16> bytes;
  };
  std::vector<Block> buffer;
  RowPlan plan;
  Rows scratch;
};

// What a plan must say, found the slow way: slots ascending, rows ascending within each.
void check_against_slow_grouping(HostPlan const& host, Rows const& slots) {
  RowPlan const& plan = host.plan;
  std::int32_t group = 0;
  std::int32_t place = 0;
  std::int32_t tile = 0;
  for (std::int32_t slot = 0; slot < plan.max_slots; ++slot) {
    Rows expected;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == slot) expected.push_back(static_cast<std::int32_t>(i));
    }
    if (expected.empty()) continue;
    REQUIRE(group < plan.header->num_groups);
    CHECK(plan.groups[group] == RowGroup{slot, place, static_cast<std::int32_t>(expected.size()), 0});
    CHECK(Rows(plan.rows + place, plan.rows + place + plan.groups[group].count) == expected);
    for (std::int32_t row = 0; row < plan.groups[group].count; row += 8) {
      std::int32_t const here = std::min(8, plan.groups[group].count - row);
      REQUIRE(tile < plan.max_tiles);
      CHECK(plan.tiles[tile++] == RowGroup{slot, place + row, here, 0});
    }
    place += plan.groups[group].count;
    ++group;
  }
  CHECK(plan.header->num_groups == group);
  CHECK(plan.header->num_rows == place);
  CHECK(plan.header->num_tiles == tile);
  for (; tile < plan.max_tiles; ++tile) CHECK(plan.tiles[tile] == RowGroup{});
  for (std::int32_t i = 0; i < plan.capacity_rows; ++i) {
    auto const row = static_cast<std::size_t>(i);
    bool const adapted = row < slots.size() && slots[row] >= 0 && slots[row] < plan.max_slots;
    CHECK(plan.row_slots[i] == (adapted ? slots[row] : base_slot));
  }
}

TEST_CASE("a plan in a buffer groups random rows as a slow search does") {
  constexpr unsigned seed = 1234;
  std::mt19937 random(seed);
  for (auto const& layout :
       {RowPlanLayout{64, 4}, RowPlanLayout{64, 64}, RowPlanLayout{7, 1000}, RowPlanLayout{1, 1}}) {
    HostPlan host(layout);
    for (int repeat = 0; repeat < 50; ++repeat) {
      INFO("seed " << seed << " capacity " << layout.capacity_rows << " repeat " << repeat);
      Rows slots(random() % (static_cast<std::size_t>(layout.capacity_rows) + 1));
      for (auto& slot : slots) {
        slot = static_cast<std::int32_t>(random() % (static_cast<unsigned>(layout.max_slots) + 4)) - 2;
      }
      REQUIRE(host.build(slots) == Errc::ok);
      check_against_slow_grouping(host, slots);
    }
  }
}

TEST_CASE("a long prefill of one slot keeps its rows in one run") {
  HostPlan host(RowPlanLayout{8192, 8});
  REQUIRE(host.build(Rows(8192, 5)) == Errc::ok);
  CHECK(host.plan.header->num_groups == 1);
  CHECK(host.plan.groups[0] == RowGroup{5, 0, 8192, 0});
  CHECK(host.plan.header->num_tiles == 1024);
  CHECK(host.plan.tiles[1023] == RowGroup{5, 8184, 8, 0});
  for (std::int32_t i = 0; i < 8192; ++i) REQUIRE(host.plan.rows[i] == i);
}

TEST_CASE("a batch of base rows, of extreme values or of nothing has no group") {
  HostPlan host(RowPlanLayout{4, 2});
  constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  for (Rows const& slots : {Rows{}, Rows{-1, -1, -1, -1}, Rows{least, most, 2, -7}}) {
    REQUIRE(host.build(slots) == Errc::ok);
    CHECK(host.plan.header->num_groups == 0);
    CHECK(host.plan.header->num_rows == 0);
    CHECK(Rows(host.plan.row_slots, host.plan.row_slots + 4) == Rows(4, base_slot));
  }
}

TEST_CASE("a smaller step leaves nothing of the step before") {
  HostPlan host(RowPlanLayout{8, 2});
  REQUIRE(host.build(Rows(8, 1)) == Errc::ok);
  Rows const step{1, 0, 1};
  REQUIRE(host.build(step) == Errc::ok);
  check_against_slow_grouping(host, step);
}

TEST_CASE("more rows than the plan's capacity are refused and nothing is written") {
  HostPlan host(RowPlanLayout{4, 2});
  auto const before = host.buffer;
  CHECK(host.build(Rows(5, 0)) == Errc::invalid_argument);
  CHECK(std::memcmp(before.data(), host.buffer.data(), before.size() * sizeof(HostPlan::Block)) == 0);
  CHECK(host.scratch == Rows(2, 77));
}

TEST_CASE("parts that are too small for the layout are refused and nothing is written") {
  std::array<std::int32_t, 2> const slots{0, 1};
  RowPlanHeader header{};
  std::array<std::int32_t, 4> row_slots{77, 77, 77, 77};
  std::array<RowGroup, 4> groups{};
  std::array<std::int32_t, 4> rows{};
  std::array<RowGroup, 4> tiles{};
  std::array<std::int32_t, 4> scratch{};
  RowPlanLayout const layout{4, 4};
  std::span<std::int32_t> const short_ints = std::span<std::int32_t>(rows).first(3);
  std::span<RowGroup> const short_groups = std::span<RowGroup>(groups).first(3);
  CHECK(build_row_plan(slots, layout, header, short_ints, groups, rows, tiles, scratch) ==
        Errc::invalid_argument);
  CHECK(build_row_plan(slots, layout, header, row_slots, short_groups, rows, tiles, scratch) ==
        Errc::invalid_argument);
  CHECK(build_row_plan(slots, layout, header, row_slots, groups, short_ints, tiles, scratch) ==
        Errc::invalid_argument);
  CHECK(build_row_plan(slots, layout, header, row_slots, groups, rows, short_groups, scratch) ==
        Errc::invalid_argument);
  CHECK(build_row_plan(slots, layout, header, row_slots, groups, rows, tiles, short_ints) ==
        Errc::invalid_argument);
  CHECK(build_row_plan(slots, RowPlanLayout{-1, 4}, header, row_slots, groups, rows, tiles, scratch) ==
        Errc::invalid_argument);
  CHECK(build_row_plan(slots, RowPlanLayout{4, -1}, header, row_slots, groups, rows, tiles, scratch) ==
        Errc::invalid_argument);
  CHECK(row_slots == std::array<std::int32_t, 4>{77, 77, 77, 77});
  CHECK(header.num_groups == 0);
}

TEST_CASE("a plan of no rows or of no slots is right and empty") {
  HostPlan no_slots(RowPlanLayout{4, 0});
  REQUIRE(no_slots.build(Rows{0, 1, -1, 2}) == Errc::ok);
  CHECK(no_slots.plan.header->num_groups == 0);
  HostPlan no_rows(RowPlanLayout{0, 4});
  REQUIRE(no_rows.build(Rows{}) == Errc::ok);
  CHECK(no_rows.plan.header->num_rows == 0);
  CHECK(no_rows.build(Rows{0}) == Errc::invalid_argument);
}

}  // namespace
