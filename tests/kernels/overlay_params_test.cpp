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
          for (HeadForm const form : {HeadForm{16, 4, 2, 64}, HeadForm{16, 2, 1, 64}, HeadForm{8, 4, 1, 8}}) {
            HeadWork const work = head_work(overrides, rows, groups, teams, form);
            INFO(overrides << " by " << rows << ", " << teams << " teams, " << groups << " groups, "
                           << form.tile_rows << " rows a tile, " << form.across_tiles << " by "
                           << form.down_tiles);
            if (overrides * rows < 400000) CHECK(covers_once(work, overrides, rows));
            CHECK(work.streamed == streams(overrides, rows));
            if (work.streamed) {
              CHECK(work.item_rows <= form.stream_rows);
              continue;
            }
            CHECK(work.item_rows % form.tile_rows == 0);
            CHECK(work.item_rows <= form.tile_rows * form.down_tiles);
            CHECK(work.item_overrides % head_tile_overrides == 0);
            CHECK(work.item_overrides <= head_tile_overrides * form.across_tiles);
          }
        }
      }
    }
  }
}

constexpr HeadForm form{16, 4, 2, 64};

TEST_CASE("a spread item is one tile where teams are enough, and shares weights where batch rows are many") {
  CHECK(head_work(3, 1, 1, 16, form) == HeadWork{16, 16, 1, 1, false});
  CHECK(head_work(3, 64, 1, 16, form) == HeadWork{16, 16, 1, 4, false});
  CHECK(head_work(300, 1, 1, 33, form) == HeadWork{16, 16, 19, 1, false});  // 19 tiles for 33 teams
  CHECK(head_work(300, 1, 1, 16, form) == HeadWork{32, 16, 10, 1, false});
  CHECK(head_work(300, 17, 1, 16, form) == HeadWork{32, 32, 10, 1, false});
  CHECK(head_work(300, 64, 1, 16, form) == HeadWork{48, 32, 7, 2, false});
  CHECK(head_work(300, 64, 1, 16, HeadForm{16, 2, 1, 64}) == HeadWork{32, 16, 10, 4, false});
  CHECK(head_work(300, 12, 64, 33, form) == HeadWork{64, 16, 5, 1, false});  // many groups: large items
}

TEST_CASE(
    "many overrides stream, sooner where batch rows must share them, and a whole vocabulary fits the grid") {
  CHECK_FALSE(streams(16383, 16));
  CHECK(streams(16384, 1));
  CHECK_FALSE(streams(4095, 64));
  CHECK(streams(4096, 17));
  CHECK(head_work(248320, 1, 1, 132, form) == HeadWork{128, 16, 1940, 1, true});
  CHECK(head_work(248320, 64, 1, 132, form) == HeadWork{256, 64, 970, 1, true});
  CHECK(head_work(248320, 17, 1, 132, form) == HeadWork{256, 64, 970, 1, true});
  CHECK(head_work(248320, 64, 1, 132, HeadForm{8, 4, 1, 8}) == HeadWork{128, 8, 1940, 8, true});  // of float
  CHECK(head_work(248320, 8192, 1, 132, form).items() == 970 * 128);
  CHECK(may_stream(4096));
  CHECK_FALSE(may_stream(4095));
}

TEST_CASE("what streams in one large item a block is cut into small ones that give every block some") {
  CHECK(head_work(4096, 64, 1, 132, form) == HeadWork{128, 16, 32, 4, true});   // not 16 items for 132 blocks
  CHECK(head_work(8192, 64, 1, 132, form) == HeadWork{128, 16, 64, 4, true});   // two a block, not 32 items
  CHECK(head_work(16384, 64, 1, 132, form) == HeadWork{256, 64, 64, 1, true});  // small ones would be four
  CHECK(head_work(4096, 64, 16, 132, form) == HeadWork{256, 64, 16, 1, true});  // many groups: 8 blocks each
}

TEST_CASE("a slot without rows or a group without rows has no items") {
  CHECK(head_work(0, 5, 1, 33, form).items() == 0);
  CHECK(head_work(5, 0, 1, 33, form).items() == 0);
}
