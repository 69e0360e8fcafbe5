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
// Nine row tiles are five and four, not eight and one.
static_assert(next_piece(1) == 1 && next_piece(8) == 8 && next_piece(9) == 5 && next_piece(4) == 4);
static_assert(next_piece(21) == 7 && next_piece(64) == 8);
// Eight row tiles of rank 64 are 32 sums: eight for each of four blocks, of 16 segments; all for a block
// without a cluster, of the four that its groups multiply at a time.
static_assert(kept_sums(8, 2, 4) == 128 && kept_sums(8, 3, 4) == 64 && kept_sums(8, 0, 4) == 128);
static_assert(kept_sums(1, 3, 4) == 16 && kept_sums(5, 3, 1) == 16 && kept_sums(8, 0, 1) == 32);
static_assert(prefill_slab(1) == 1 && prefill_slab(4) == 4 && prefill_slab(9) == 4);

TEST_CASE("clusters take every row tile once, in pieces of at most eight") {
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

TEST_CASE("in the shrink a group's warps take every rank tile and row tile once") {
  for (std::int32_t segments = 1; segments <= max_segments; ++segments) {
    for (std::int32_t ranks = 1; ranks <= slab_rank_tiles; ++ranks) {
      for (std::int32_t tiles = 1; tiles <= piece_tiles; ++tiles) {
        INFO(segments << " segments, " << ranks << " rank tiles, " << tiles << " row tiles");
        ShrinkSplit const split(segments, ranks, tiles);
        REQUIRE(split.groups() * split.group_warps() == prefill_warps);
        REQUIRE(split.groups() * split.group_blocks() == stage_blocks);
        // There are kernels of one and of two blocks of a stage, of up to two row tiles, with one block and
        // two rank tiles of up to four.
        REQUIRE((split.group_blocks() == 1 || split.group_blocks() == 2));
        REQUIRE(split.tile_step() <= (split.group_blocks() == 2 || ranks == 1 ? 2 : 4));
        if (split.group_blocks() == 2 && ranks == 1) REQUIRE(split.tile_step() == 1);
        // Rounds are of four groups, which fold at once.
        REQUIRE((segments <= split.groups() || split.groups() == stage_blocks));
        std::vector<int> times(static_cast<std::size_t>(split.groups() * ranks * tiles), 0);
        for (std::int32_t warp = 0; warp < prefill_warps; ++warp) {
          Share const own_ranks = split.ranks_of(warp);
          Share const own_tiles = split.tiles_of(warp);
          REQUIRE((own_ranks.size() <= 2 && own_tiles.size() <= split.tile_step()));
          for (std::int32_t r = own_ranks.first; r < own_ranks.last; ++r) {
            for (std::int32_t t = own_tiles.first; t < own_tiles.last; ++t)
              ++times.at(static_cast<std::size_t>((split.group_of(warp) * ranks + r) * tiles + t));
          }
          // A warp reads as many row tiles as its kernel is built for, wherever its own begin.
          std::int32_t const built = split.tile_step() <= 2 ? 2 : 4;
          if (own_tiles.size() > 0)
            REQUIRE((own_tiles.first + built) * tile_rows * 4 <= stage_block_vectors(ranks));
        }
        for (int const t : times) REQUIRE(t == 1);
      }
    }
  }
}

// Rank 16 has room in the 99 KB of sm_120, without a cluster and in clusters of four, and rank 64 in 227 KB.
static_assert(PrefillShape(1, 8, 0, 3, 120).bytes(32) < 96 * 1024);
static_assert(PrefillShape(1, 8, 2, 3, 120).bytes(32) < 96 * 1024);
static_assert(PrefillShape(4, 8, 0, 3, 90).bytes(64) < 224 * 1024);
static_assert(PrefillShape(4, 8, 2, 3, 100).bytes(64) < 224 * 1024);

TEST_CASE("what is in shared memory does not overlap") {
  for (std::int32_t ranks = 1; ranks <= 12; ++ranks) {
    for (std::int32_t tiles = 1; tiles <= piece_tiles; ++tiles) {
      for (std::int32_t cluster_log2 = 0; cluster_log2 <= 3; ++cluster_log2) {
        for (std::int32_t stages = fewest_stages; stages <= most_stages; ++stages) {
          std::int32_t const compute = stages == fewest_stages ? 120 : 90;
          PrefillShape const shape(ranks, tiles, cluster_log2, stages, compute);
          CHECK((piece_rows + shape.slab * tile_ranks) * 4 <= stage_block_vectors(shape.slab));
          CHECK(shape.stage_bytes == 16 * stage_blocks * stage_block_vectors(shape.slab));
          CHECK(stages * shape.stage_bytes <= 16 * shape.sums_begin);
          CHECK(prefill_warps * warp_y_vectors(compute) <= shape.sums_begin);
          CHECK(shape.sums_begin + sum_vectors * kept_sums(tiles, cluster_log2, shape.slab) ==
                shape.xa_begin);
          CHECK(shape.bytes(32) == static_cast<std::size_t>(shape.xa_begin * 16 + piece_rows * 64));
        }
      }
    }
  }
}

TEST_CASE("blocks of a cluster fold every sum once and keep its segments in places of their own") {
  for (std::int32_t const cluster_log2 : {0, 1, 2, 3}) {
    for (std::int32_t count = 1; count <= piece_tiles * slab_rank_tiles; ++count) {
      std::vector<int> times(static_cast<std::size_t>(count), 0);
      for (std::int32_t block = 0; block < 1 << cluster_log2; ++block) {
        std::vector<int> used(static_cast<std::size_t>(kept_sums(count, cluster_log2, 1)), 0);
        for (std::int32_t i = 0; i < folded_sums(count, cluster_log2, block); ++i) {
          std::int32_t const sum = block + (i << cluster_log2);
          ++times.at(static_cast<std::size_t>(sum));
          CHECK((sum >> cluster_log2) == i);
          for (std::int32_t s = 0; s < sum_parts(cluster_log2); ++s)
            ++used.at(static_cast<std::size_t>(i * sum_parts(cluster_log2) + s));
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
