// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/delta_shape.hpp"

#include <doctest/doctest.h>

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
                    std::int32_t second_tiles) {
  DeltaShape shape;
  shape.first_output[1] = first_tiles;
  shape.first_output[2] = first_tiles + second_tiles;
  shape.set(Contraction(k_in), cluster, 8, 2);
  return shape;
}

TEST_CASE("the blocks of a cluster multiply every chunk once, a warp each") {
  for (std::int64_t const k_in : {1, 33, 100, 768, 1000, 2048, 4096, 8192, 14336, 17408, 28672}) {
    Contraction const cut(k_in);
    for (std::int32_t const cluster : {1, 2, 4, 8, 16}) {
      INFO("k_in " << k_in << ", cluster " << cluster);
      DeltaShape const shape = shape_of(k_in, cluster, 1, 0);
      REQUIRE(shape.group >= 1);
      REQUIRE(shape.group * shape.segment_chunks <= max_chunks);
      std::vector<int> times(static_cast<std::size_t>(cut.blocks()), 0);
      for (std::int32_t block = 0; block < cluster; ++block) {
        Share const segments = shape.segments_of(block);
        for (std::int32_t s = segments.first; s < segments.last; s += shape.group) {
          for (std::int32_t slot = 0; slot < max_chunks; ++slot) {
            std::int32_t const segment = s + slot / shape.segment_chunks;
            std::int32_t const chunk = slot % shape.segment_chunks;
            BlockRange const blocks = shape.chunk_of_slot(s, segments.last, slot);
            if (blocks.size() == 0) continue;
            CHECK(blocks == cut.chunk(segment, chunk));
            for (std::int32_t b = blocks.first; b < blocks.last; ++b) ++times[static_cast<std::size_t>(b)];
          }
        }
      }
      for (int const t : times) REQUIRE(t == 1);
    }
  }
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
              Share const own = shape.outputs_of(i % cluster, i / cluster, parts, projection);
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

TEST_CASE("row tiles are shared by at most half of the clusters, and by no more than there is work for") {
  DeltaShape const shape = shape_of(4096, 8, 448, 0);  // 56 output tiles a block: 7 for each of 8 warps
  CHECK(shape.max_parts == 7);
  CHECK(shape.parts_of(30, 0) == 1);
  CHECK(shape.parts_of(30, 1) == 7);
  CHECK(shape.parts_of(30, 3) == 5);
  CHECK(shape.parts_of(30, 7) == 2);
  CHECK(shape.parts_of(30, 8) == 1);
  CHECK(shape.parts_of(1, 1) == 1);
  CHECK(shape.parts_of(30, 1 << 30) == 1);
  CHECK(shape.parts_of(30, -5) == 1);
}

}  // namespace
