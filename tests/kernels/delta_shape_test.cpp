// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/delta_shape.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace atlas::lora;

// 512 elements are 1,024 bytes; rows 64 bytes apart modulo 128 need 64 more, 32 elements.
static_assert(shared_stride(512, 2) == 544 && shared_stride(32, 2) == 32 && shared_stride(64, 2) == 96);
static_assert(shared_stride(16, 4) == 16 && shared_stride(32, 4) == 48);
TEST_CASE("rows of xa are 64 bytes apart modulo 128") {
  for (std::int32_t width = 8; width < 2000; width += 8) {
    CHECK(shared_stride(width, 2) >= width);
    CHECK(shared_stride(width, 2) * 2 % 128 == 64);
    CHECK(shared_stride(width, 4) * 4 % 128 == 64);
  }
}

/// The shape of a launch with two projections of `k_in`.
DeltaShape shape_of(std::int64_t k_in, std::int32_t cluster, std::int32_t first_tiles,
                    std::int32_t second_tiles, std::int32_t whole_tiles = 0) {
  DeltaShape shape;
  shape.first_output[1] = first_tiles;
  shape.first_output[2] = first_tiles + second_tiles;
  shape.set(Contraction(k_in), cluster, whole_tiles, 8, 4, second_tiles > 0 ? 2 : 1);
  return shape;
}

TEST_CASE("the warps of a cluster's blocks multiply every chunk of every rank tile once") {
  constexpr std::int32_t warps = 8;
  for (std::int64_t const k_in :
       {1, 33, 100, 768, 1000, 1056, 2048, 2880, 4096, 5120, 8192, 11008, 14336, 17408, 28672}) {
    Contraction const cut(k_in);
    for (std::int32_t const cluster : {1, 2, 4, 8, 16}) {
      for (std::int32_t const ranks : {1, 2, 3, 4}) {
        INFO("k_in " << k_in << ", cluster " << cluster << ", rank tiles " << ranks);
        DeltaShape const shape = shape_of(k_in, cluster, 1, 0);
        std::vector<int> times(static_cast<std::size_t>(cut.blocks() * ranks), 0);
        for (std::int32_t block = 0; block < cluster; ++block) {
          Share const own = shape.segments_of(shape.team[0], block);
          ShrinkTasks const& tasks = shape.team[0].tasks[ranks - 1];
          // Warps that share sums have one task each, and room for its chunks.
          if (tasks.sharing_log2 > 0) {
            REQUIRE(tasks.count(own.size()) <= warps);
            std::int32_t const first = shape.first_chunk_sum(ranks);
            REQUIRE(first + own.size() * ranks * shape.segment_chunks <=
                    shape.slab * max_segments + shape.chunk_sums);
            // Neither over the slab's own sums nor over what counts for segments that there are not.
            REQUIRE(first >= ranks * max_segments);
            REQUIRE((shape.segments == max_segments || first >= shape.slab * max_segments));
          }
          for (std::int32_t task = 0; task < tasks.count(own.size()); ++task) {
            ShrinkTask const found = shape.task_of(tasks, own.first, task);
            REQUIRE(found.segment * ranks + found.rank_tile == found.sum);
            REQUIRE((found.rank_tile >= 0 && found.rank_tile < ranks));
            std::int32_t const segment = found.segment;
            BlockRange const blocks = found.blocks;
            for (std::int32_t b = blocks.first; b < blocks.last; ++b)
              ++times[static_cast<std::size_t>(b * ranks + found.rank_tile)];
            if (blocks.size() == 0) continue;
            // A task is whole chunks of one segment.
            BlockRange const all = cut.segment(own.first + segment);
            REQUIRE(blocks.first >= all.first);
            REQUIRE(blocks.last <= all.last);
            CHECK((blocks.first - all.first) % cut.chunk_blocks() == 0);
            CHECK((blocks.last == all.last || (blocks.last - all.first) % cut.chunk_blocks() == 0));
          }
        }
        for (int const t : times) REQUIRE(t == 1);
      }
    }
  }
}

TEST_CASE("warps share segment sums where a block has fewer of them than warps") {
  // 128 blocks in 16 segments of 4 chunks: a block of a cluster of 16 has one, of 4 has four.
  CHECK(ShrinkTasks(1, 1, 4, 8).sharing_log2 == 2);
  CHECK(ShrinkTasks(1, 4, 4, 8).sharing_log2 == 1);
  CHECK(ShrinkTasks(4, 1, 4, 8).sharing_log2 == 1);
  CHECK(ShrinkTasks(2, 4, 4, 8).sharing_log2 == 0);
  CHECK(ShrinkTasks(4, 4, 4, 8).count(4) == 16);
  // Seven chunks among four warps: two each, the last one has one.
  CHECK(ShrinkTasks(2, 1, 7, 8).task_chunks == 2);
  CHECK(shape_of(14336, 8, 1, 0).task_of(ShrinkTasks(2, 1, 7, 8), 0, 3).blocks == BlockRange{24, 28});
}

TEST_CASE("the blocks of the clusters of a row tile take every output tile of every projection once") {
  for (std::int32_t const cluster : {2, 4, 8, 16}) {
    for (std::int32_t const parts : {1, 2, 3, 7}) {
      for (std::int32_t const first : {1, 7, 32, 128, 449}) {
        for (std::int32_t const second : {0, 1, 16, 128}) {
          INFO("cluster " << cluster << ", parts " << parts << ", tiles " << first << " and " << second);
          DeltaShape const shape = shape_of(256, cluster, first, second);
          for (std::int32_t projection = 0; projection < 2; ++projection) {
            std::int32_t next = 0;
            for (std::int32_t i = 0; i < cluster * parts; ++i) {
              Share const own = shape.outputs_of(shape.team[0], i % cluster, i / cluster, parts, projection);
              if (own.size() == 0) continue;
              CHECK(own.first == next);
              next = own.last;
            }
            CHECK(next == (projection == 0 ? first : second));
          }
        }
      }
    }
  }
}

TEST_CASE("half of a cluster has no more chunk sums than its blocks have room for") {
  for (std::int64_t const k_in : {33, 768, 4096, 8192, 14336, 28672}) {
    for (std::int32_t const cluster : {4, 8, 16}) {
      INFO("k_in " << k_in << ", cluster " << cluster);
      DeltaShape const split = shape_of(k_in, cluster, 64, 0, 5);
      DeltaShape const half = shape_of(k_in, cluster / 2, 64, 0);
      CHECK(split.team[0].log2 == split.team[1].log2 + 1);
      CHECK(split.team[1].block_segments == half.team[0].block_segments);
      CHECK(split.team[1].block_outputs == half.team[0].block_outputs);
      CHECK(split.chunk_sums >= half.chunk_sums);
    }
  }
}

/// How often each output tile of each row tile is taken by the teams' walks, over the projections in order.
std::vector<int> taken(DeltaShape const& shape, std::int32_t teams, std::int32_t lone_teams,
                       std::int32_t tiles) {
  TeamShape team = shape.team[0];
  team.lone_teams = lone_teams;
  std::int32_t const outputs = shape.first_output[shape.projections];
  std::vector<int> times(static_cast<std::size_t>(tiles * outputs), 0);
  auto const take = [&](std::int32_t tile, std::int32_t part, std::int32_t parts) {
    for (std::int32_t block = 0; block < 1 << team.log2; ++block) {
      for (std::int32_t p = 0; p < shape.projections; ++p) {
        Share const own = shape.outputs_of(team, block, part, parts, p);
        std::int32_t const only = shape.projection_of_part(part, parts);
        CHECK((only < 0 || only == p || own.size() == 0));
        for (std::int32_t t = own.first; t < own.last; ++t)
          ++times[static_cast<std::size_t>(tile * outputs + shape.first_output[p] + t)];
      }
    }
  };
  for (std::int32_t index = 0; index < teams; ++index) {
    TileWalk const walk = shape.walk_of(team, teams, tiles, index);
    for (std::int32_t i = 0; i < walk.whole; ++i) take(index + i * teams, 0, 1);
    if (walk.shared < tiles) take(walk.shared, walk.part, walk.parts);
  }
  return times;
}

TEST_CASE("the teams' walks take every output of every row tile once") {
  for (std::int32_t const outputs : {1, 8, 128, 448}) {
    for (std::int32_t const projections : {1, 2, 3, 4}) {
      DeltaShape shape;
      for (std::int32_t p = 0; p < projections; ++p)
        shape.first_output[p + 1] = shape.first_output[p] + (p == 0 ? outputs : outputs / 4);
      shape.set(Contraction(4096), 8, 0, 8, 4, projections);
      for (std::int32_t const teams : {1, 6, 28, 30, 60}) {
        for (std::int32_t const tiles :
             {0, 1, 2, 5, 7, 14, 15, 27, 28, 29, 31, 56, 59, 60, 61, 64, 90, 180, 181, 999}) {
          INFO(outputs << " outputs, " << projections << " projections, " << teams << " teams, " << tiles
                       << " row tiles");
          for (std::int32_t const lone_teams : {teams, (teams + 1) / 2}) {
            for (int const t : taken(shape, teams, lone_teams, tiles)) REQUIRE(t == 1);
          }
        }
      }
    }
  }
}

TEST_CASE("teams that a row tile can occupy have a projection each") {
  DeltaShape shape;
  shape.first_output[1] = 128;
  shape.first_output[2] = 160;
  shape.first_output[3] = 192;
  shape.set(Contraction(4096), 16, 0, 8, 4, 3);
  TeamShape const& team = shape.team[0];
  CHECK(team.max_parts == 3);
  CHECK(shape.walk_of(team, 3, 1, 2) == TileWalk{0, 0, 2, 3});
  CHECK(shape.projection_of_part(2, 3) == 2);
  // q's 128 output tiles among 16 blocks, and none of k's.
  CHECK(shape.outputs_of(team, 1, 0, 3, 0) == Share{8, 16});
  CHECK(shape.outputs_of(team, 1, 0, 3, 1) == Share{0, 0});
  // Two teams are too few for that: they share the outputs of all.
  CHECK(shape.walk_of(team, 2, 1, 1) == TileWalk{0, 0, 1, 2});
  CHECK(shape.projection_of_part(1, 2) == -1);
}

TEST_CASE("a last round that is not full is divided, and one alone by at most half of the teams") {
  DeltaShape const shape = shape_of(4096, 8, 448, 0);  // 56 output tiles a block: 7 for each of 8 warps
  TeamShape team = shape.team[0];
  team.lone_teams = 15;
  CHECK(team.max_parts == 7);
  CHECK(shape.walk_of(team, 30, 1, 3) == TileWalk{0, 0, 3, 7});
  CHECK(shape.walk_of(team, 30, 1, 7) == TileWalk{0, no_tile, 7, 7});
  CHECK(shape.walk_of(team, 30, 3, 14) == TileWalk{0, 2, 4, 5});
  CHECK(shape.walk_of(team, 30, 8, 7) == TileWalk{0, 7, 0, 1});
  CHECK(shape.walk_of(team, 30, 8, 8) == TileWalk{0, no_tile, 0, 1});
  CHECK(shape.walk_of(team, 30, 34, 0) == TileWalk{1, 30, 0, 7});
  CHECK(shape.walk_of(team, 30, 34, 27) == TileWalk{1, 33, 6, 7});
  CHECK(shape.walk_of(team, 30, 34, 28) == TileWalk{1, no_tile, 7, 7});
  CHECK(shape.walk_of(team, 30, 60, 29) == TileWalk{2, no_tile, 0, 1});
}

TEST_CASE("a plan that says nonsense gives no team a row tile that it could not have") {
  DeltaShape const shape = shape_of(4096, 8, 448, 0);
  for (std::int32_t const tiles : {0, -1, -5, -1000000}) {
    TileWalk const walk = shape.walk_of(shape.team[0], 30, tiles, 3);
    CHECK(walk.whole == 0);
    CHECK(walk.shared == no_tile);
  }
  CHECK(shape.walk_of(shape.team[0], 1, 1, 0) == TileWalk{1, no_tile, 0, 1});
}

}  // namespace
