// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/work.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

namespace {

using namespace atlas::lora;

static_assert(share_of(16, 8, 3) == Share{6, 8});
static_assert(share_of(3, 8, 7) == Share{2, 3} && share_of(3, 8, 0) == Share{0, 0});
static_assert(row_tiles(0) == 0 && row_tiles(1) == 1 && row_tiles(8) == 1 && row_tiles(9) == 2);
static_assert(rank_tiles(16) == 1 && rank_tiles(17) == 2);
static_assert(output_tiles(49159) == 1537);  // 49159 / 32 = 1536.2
// 64 rows of 64 slots are 64 tiles; of one slot 8; of two at most 2 + 62 / 8 = 9.
static_assert(max_row_tiles(64, 64) == 64 && max_row_tiles(64, 1) == 8 && max_row_tiles(64, 2) == 9);
static_assert(max_row_tiles(0, 5) == 0 && max_row_tiles(5, 0) == 0);

TEST_CASE("shares cover everything once, for any number of parts") {
  for (std::int32_t total = 0; total < 70; ++total) {
    for (std::int32_t parts = 1; parts <= 17; ++parts) {
      std::int32_t next = 0;
      for (std::int32_t part = 0; part < parts; ++part) {
        Share const share = share_of(total, parts, part);
        REQUIRE(share.first == next);
        REQUIRE(share.size() >= total / parts);
        REQUIRE(share.size() <= total / parts + 1);
        next = share.last;
      }
      REQUIRE(next == total);
    }
  }
}

TEST_CASE("an output tile's lanes and matrices hold its 32 outputs once each") {
  std::set<std::int32_t> seen;
  for (std::int32_t lane = 0; lane < 32; lane += 4) {
    for (std::int32_t matrix = 0; matrix < 4; ++matrix) {
      CHECK(output_of(lane, matrix) == output_of(lane + 3, matrix));  // the four lanes of a weight row
      seen.insert(output_of(lane, matrix));
    }
  }
  CHECK(seen.size() == 32);
  CHECK(*seen.begin() == 0);
  CHECK(*seen.rbegin() == 31);
}

TEST_CASE("after a transposition lane t holds eight consecutive outputs") {
  for (std::int32_t t = 0; t < 4; ++t) {
    std::int32_t next = 8 * t;
    for (std::int32_t matrix = 0; matrix < 4; ++matrix) {
      for (std::int32_t half = 0; half < 2; ++half) CHECK(output_of((2 * t + half) * 4, matrix) == next++);
    }
  }
}

TEST_CASE("no way of grouping rows makes more tiles than the bound") {
  for (std::int32_t rows = 1; rows <= 40; ++rows) {
    for (std::int32_t groups = 1; groups <= 12; ++groups) {
      // The worst case: groups of 1 row, and the rest in groups of 8 n + 1.
      std::int32_t worst = 0;
      for (std::int32_t used = 1; used <= std::min(groups, rows); ++used) {
        worst = std::max(worst, used - 1 + row_tiles(rows - (used - 1)));
      }
      CHECK(max_row_tiles(rows, groups) >= worst);
      CHECK(max_row_tiles(rows, groups) <= rows);
    }
  }
}

TEST_CASE("the expand's parts are at least one and no more than there are tiles for") {
  CHECK(expand_parts(1, 128, 132) == 16);  // 264 wanted, 128 / 8 = 16
  CHECK(expand_parts(64, 128, 132) == 5);  // ceil(264 / 64)
  CHECK(expand_parts(1000, 128, 132) == 1);
  CHECK(expand_parts(0, 0, 132) == 1);
}

}  // namespace
