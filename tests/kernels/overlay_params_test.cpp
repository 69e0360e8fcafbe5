// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/overlay_params.hpp"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

using namespace atlas::lora;
using namespace atlas::lora::detail;

namespace {

// Whether the items of a work cover overrides by rows exactly once.
bool covers_once(HeadWork const& work, std::int32_t overrides, std::int32_t rows) {
  std::vector<int> covered(static_cast<std::size_t>(overrides) * static_cast<std::size_t>(rows));
  for (std::int32_t item = 0; item < work.items(); ++item) {
    std::int32_t const j0 = work.first_override(item);
    std::int32_t const r0 = work.first_row(item);
    if (j0 >= overrides || r0 >= rows) return false;  // an item without work
    for (std::int32_t j = j0; j < j0 + work.item_overrides && j < overrides; ++j) {
      for (std::int32_t r = r0; r < r0 + work.item_rows && r < rows; ++r) {
        ++covered[static_cast<std::size_t>(j) * static_cast<std::size_t>(rows) + static_cast<std::size_t>(r)];
      }
    }
  }
  for (int const count : covered) {
    if (count != 1) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("the items of the head's product cover every override and row exactly once") {
  for (std::int32_t const overrides : {1, 3, 15, 16, 17, 127, 128, 129, 300, 1000, 4095, 4096, 5000, 16384}) {
    for (std::int32_t const rows : {1, 7, 8, 9, 16, 17, 33, 64, 65, 130}) {
      for (std::int32_t const teams : {1, 16, 33, 132}) {
        for (std::int32_t const groups : {1, 5, 64}) {
          HeadWork const work = head_work(overrides, rows, groups, teams, 64);
          INFO(overrides << " by " << rows << ", " << teams << " teams, " << groups << " groups");
          if (overrides * rows < 400000) CHECK(covers_once(work, overrides, rows));
          std::int32_t const tiles =
              work.item_overrides / head_tile_overrides * (work.item_rows / head_tile_rows);
          CHECK(work.streamed == streams(overrides, rows));
          if (!work.streamed) CHECK((tiles == 1 || tiles == 2 || tiles == 4 || tiles == 8));
        }
      }
    }
  }
}

TEST_CASE("a spread item is as small as gives every team one, and shares weights where batch rows are many") {
  CHECK(head_work(300, 1, 1, 33, 64) == HeadWork{16, 8, 19, 1, false});  // 19 tiles for 33 teams
  CHECK(head_work(300, 16, 1, 33, 64) == HeadWork{16, 16, 19, 1, false});
  CHECK(head_work(300, 64, 1, 33, 64) == HeadWork{64, 16, 5, 4, false});
  CHECK(head_work(300, 1, 64, 33, 64) == HeadWork{128, 8, 3, 1, false});  // many groups: large items
  CHECK(head_work(300, 12, 64, 33, 64) == HeadWork{64, 16, 5, 1, false});
  CHECK(head_work(3, 1, 1, 33, 64) == HeadWork{16, 8, 1, 1, false});
}

TEST_CASE(
    "many overrides stream, sooner where batch rows must share them, and a whole vocabulary fits the grid") {
  CHECK_FALSE(streams(16383, 16));
  CHECK(streams(16384, 1));
  CHECK_FALSE(streams(4095, 64));
  CHECK(streams(4096, 17));
  CHECK(head_work(248320, 64, 1, 33, 64) == HeadWork{128, 64, 1940, 1, true});
  CHECK(head_work(248320, 8192, 1, 33, 64).items() == 1940 * 128);
  CHECK(may_stream(4096));
  CHECK_FALSE(may_stream(4095));
}

TEST_CASE("a slot without rows or a group without rows has no items") {
  CHECK(head_work(0, 5, 1, 33, 64).items() == 0);
  CHECK(head_work(5, 0, 1, 33, 64).items() == 0);
}
