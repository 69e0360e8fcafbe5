// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/prefill_shape.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace atlas::lora;

// 256 row tiles are 8 for each of 32 clusters; of 300, clusters have 10, and the last two none.
static_assert(tiles_of_cluster(256, 32, 31) == Share{248, 256});
static_assert(tiles_of_cluster(300, 32, 29) == Share{290, 300});
static_assert(tiles_of_cluster(300, 32, 30) == Share{300, 300} && tiles_of_cluster(0, 32, 5) == Share{0, 0});
// Eleven row tiles are six and five, not ten and one.
static_assert(next_piece(1) == 1 && next_piece(10) == 10 && next_piece(11) == 6 && next_piece(4) == 4);
static_assert(next_piece(21) == 7 && next_piece(80) == 10);
// Ten row tiles of rank 64 are 40 sums: ten for each of four blocks, of 16 segments.
static_assert(kept_sums(10, 2, 4) == 160 && kept_sums(10, 3, 4) == 80 && kept_sums(9, 3, 1) == 32);
static_assert(kept_sums(1, 3, 4) == 16);
static_assert(prefill_slab(1) == 1 && prefill_slab(4) == 4 && prefill_slab(9) == 4);

TEST_CASE("clusters take every row tile once, in pieces of at most ten") {
  for (std::int32_t const clusters : {1, 2, 31, 32, 33, 66, 132}) {
    for (std::int32_t tiles = 0; tiles < 700; ++tiles) {
      std::int32_t next = 0;
      std::int32_t most = 0;
      for (std::int32_t cluster = 0; cluster < clusters; ++cluster) {
        Share share = tiles_of_cluster(tiles, clusters, cluster);
        REQUIRE(share.first == next);
        REQUIRE(share.last >= share.first);
        most = std::max(most, share.size());
        next = share.last;
        while (share.size() > 0) {
          std::int32_t const piece = next_piece(share.size());
          REQUIRE(piece >= 1);
          REQUIRE(piece <= piece_tiles);
          share.first += piece;
        }
        REQUIRE(share.first == share.last);
      }
      REQUIRE(next == tiles);
      REQUIRE(most == divide_up(tiles, clusters));
    }
  }
}

TEST_CASE("units take every segment, rank tile and row tile once") {
  for (std::int32_t segments = 0; segments <= 8; ++segments) {
    for (std::int32_t ranks = 1; ranks <= slab_rank_tiles; ++ranks) {
      for (std::int32_t tiles = 1; tiles <= piece_tiles; ++tiles) {
        INFO(segments << " segments, " << ranks << " rank tiles, " << tiles << " row tiles");
        ShrinkUnits const units(segments, ranks, tiles);
        std::vector<int> times(static_cast<std::size_t>(segments * ranks * tiles), 0);
        for (std::int32_t i = 0; i < units.count(); ++i) {
          ShrinkUnit const unit = units.unit(i);
          REQUIRE((unit.ranks.size() == 1 || unit.ranks.size() == 2));
          REQUIRE((unit.tiles.size() >= 1 && unit.tiles.size() <= (unit.ranks.size() == 1 ? 3 : 2)));
          for (std::int32_t r = unit.ranks.first; r < unit.ranks.last; ++r) {
            for (std::int32_t t = unit.tiles.first; t < unit.tiles.last; ++t)
              ++times.at(static_cast<std::size_t>((unit.segment * ranks + r) * tiles + t));
          }
        }
        for (int const t : times) REQUIRE(t == 1);
      }
    }
  }
}

TEST_CASE("units are pairs as far as every warp has one") {
  CHECK(ShrinkUnits(2, 4, 8).count() == 16);  // rank 64 in clusters of 8
  CHECK(ShrinkUnits(2, 1, 8).count() == 8);   // rank 16: one each
  CHECK(ShrinkUnits(4, 1, 2).count() == 8);   // 512 rows: 4 pairs would leave half of the warps idle
  CHECK(ShrinkUnits(4, 4, 1).count() == 8);
  CHECK(ShrinkUnits(2, 4, 1).count() == 8);  // neither ranks nor row tiles in pairs
  CHECK(ShrinkUnits(2, 2, 1).count() == 4);
  CHECK(ShrinkUnits(2, 1, 9).count() == 6);  // rank 16, 2048 rows: with pairs two warps had two units
}

TEST_CASE("blocks of a cluster fold every sum once and keep its segments in places of their own") {
  for (std::int32_t const cluster_log2 : {1, 2, 3}) {
    for (std::int32_t count = 1; count <= piece_tiles * slab_rank_tiles; ++count) {
      std::vector<int> times(static_cast<std::size_t>(count), 0);
      for (std::int32_t block = 0; block < 1 << cluster_log2; ++block) {
        std::vector<int> used(static_cast<std::size_t>(kept_sums(count, cluster_log2, 1)), 0);
        for (std::int32_t i = 0; i < folded_sums(count, cluster_log2, block); ++i) {
          std::int32_t const sum = block + (i << cluster_log2);
          ++times.at(static_cast<std::size_t>(sum));
          CHECK((sum >> cluster_log2) == i);
          for (std::int32_t s = 0; s < max_segments; ++s)
            ++used.at(static_cast<std::size_t>(sum_place(i, s)));
        }
        for (int const u : used) CHECK(u <= 1);
      }
      for (int const t : times) CHECK(t == 1);
    }
  }
}

TEST_CASE("every two rows of xa have vectors of their own, and a warp reads neighbours") {
  constexpr std::int32_t blocks = 3;
  std::vector<int> used(static_cast<std::size_t>(blocks * piece_rows * block_elements / pack_elements), 0);
  for (std::int32_t block = 0; block < blocks; ++block) {
    for (std::int32_t row = 0; row < piece_rows; row += 2) {
      for (std::int32_t quad = 0; quad < 4; ++quad) {
        for (std::int32_t half = 0; half < 2; ++half) {
          std::int32_t const vector = xa_vector(block, row, quad, half);
          ++used.at(static_cast<std::size_t>(vector));
          CHECK(xa_vector(block, row + 1, quad, half) == vector);
          std::int32_t const lane = row % row_group / 2 * 4 + quad;
          CHECK(vector == xa_vector(block, row - row % row_group, 0, half) + lane);
        }
      }
    }
  }
  for (int const u : used) CHECK(u == 1);
}

}  // namespace
