// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/contraction.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

namespace {

using namespace atlas::lora;

// 4096: 128 blocks, 8 a segment (ceil(128 / 16)), 2 a chunk: 16 segments of 4 chunks.
static_assert(Contraction(4096).blocks() == 128 && Contraction(4096).segments() == 16);
static_assert(Contraction(4096).segment_chunks() == 4 && Contraction(4096).chunk_blocks() == 2);
// 14336: 448 blocks, 28 a segment, 4 a chunk (ceil(28 / 8)): 16 segments of 7 chunks.
static_assert(Contraction(14336).segments() == 16 && Contraction(14336).segment_chunks() == 7);
static_assert(Contraction(14336).chunk(15, 6) == BlockRange{444, 448});
// 17408: 544 blocks, 34 a segment, 5 a chunk: the last chunk of a segment has 34 - 6 * 5 = 4.
static_assert(Contraction(17408).chunk(0, 6) == BlockRange{30, 34});
// 1: one block, one segment, one chunk.
static_assert(Contraction(1).segments() == 1 && Contraction(1).chunks(0) == 1);
static_assert(Contraction(1).chunk(0, 0) == BlockRange{0, 1});
// 100: 4 blocks, the least segment of 2: two segments of one chunk.
static_assert(Contraction(100).segments() == 2 && Contraction(100).segment(1) == BlockRange{2, 4});
static_assert(rank_blocks(1) == 1 && rank_blocks(32) == 1 && rank_blocks(33) == 2);
static_assert(k_of(3, 2, 5) == 3 * 32 + 2 * 8 + 5);

std::vector<std::int64_t> lengths() {
  std::vector<std::int64_t> all;
  for (std::int64_t k = 1; k <= 1200; ++k) all.push_back(k);
  for (std::int64_t const k :
       {2048, 2560, 3584, 4095, 4096, 4097, 5120, 8192, 9216, 14336, 17408, 28672, 100'000}) {
    all.push_back(k);
  }
  return all;
}

TEST_CASE("every k is in one place, in order") {
  for (std::int64_t const k_in : lengths()) {
    Contraction const cut(k_in);
    INFO("k_in " << k_in);
    REQUIRE(cut.segments() >= 1);
    REQUIRE(cut.segments() <= max_segments);
    REQUIRE(cut.segment_chunks() <= max_chunks);
    std::int32_t next = 0;
    for (std::int32_t s = 0; s < cut.segments(); ++s) {
      REQUIRE(cut.segment(s).first == next);
      REQUIRE(cut.chunks(s) >= 1);
      REQUIRE(cut.chunks(s) <= cut.segment_chunks());
      for (std::int32_t c = 0; c < cut.chunks(s); ++c) {
        BlockRange const chunk = cut.chunk(s, c);
        REQUIRE(chunk.first == next);
        REQUIRE(chunk.size() >= 1);
        next = chunk.last;
      }
      REQUIRE(cut.segment(s).last == next);
      REQUIRE(cut.chunk(s, cut.chunks(s)).size() == 0);
    }
    REQUIRE(next == cut.blocks());
    REQUIRE(k_of(next - 1, 0, 0) < k_in);
    REQUIRE(k_of(next, 0, 0) >= k_in);
  }
}

TEST_CASE("a block's lanes hold its 32 elements once each") {
  std::vector<int> seen(32, 0);
  for (std::int32_t lane = 0; lane < 4; ++lane) {
    for (std::int32_t e = 0; e < pack_elements; ++e)
      ++seen[static_cast<std::size_t>(k_of(7, lane, e) - 7 * 32)];
  }
  for (int const times : seen) CHECK(times == 1);
}

}  // namespace
