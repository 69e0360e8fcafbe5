// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/expert_arena.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/layout.hpp"

using namespace atlas::lora;
using detail::ExpertArena;

namespace {

using Sizes = std::vector<std::size_t>;

// Two bytes an element. The reference's factory widths: gate and up 2048 -> 512, down 512 -> 2048, router
// 2048 -> 512.
static_assert(expert_pair_bytes(16, 2048, 512, 2) == 81920);  // 16 * (2048 + 512) * 2
static_assert(expert_pair_bytes(12, 2048, 512, 2) == 81920, "rank 12 is packed at 16");
static_assert(expert_pair_bytes(12, 512, 2048, 2) == 81920);
static_assert(3 * expert_pair_bytes(8, 2048, 512, 2) == 15360 * 8);  // 35B-A3B, a layer's expert
static_assert(expert_pair_bytes(4, 8, 5, 2, true) == 8 * 13 * 2 + 16, "a bias of 10 bytes takes 16");
static_assert(padded_rank(0) == 0 && padded_rank(1) == 8 && padded_rank(8) == 8 && padded_rank(9) == 16 &&
              padded_rank(12) == 16 && padded_rank(16) == 16);

}  // namespace

TEST_CASE("blocks fill the memory to the last byte, and no two overlap") {
  ExpertArena arena(3 * 81920, 81920);
  auto const blocks = arena.allocate(Sizes{81920, 81920, 81920});
  REQUIRE(blocks);
  CHECK(*blocks == Sizes{0, 81920, 163840});
  CHECK_FALSE(arena.allocate(Sizes{1}));
}

TEST_CASE("what does not fit whole takes nothing") {
  ExpertArena arena(4 * 256, 256);
  CHECK_FALSE(arena.allocate(Sizes{256, 256, 256, 256, 256}));
  CHECK(arena.allocate(Sizes{256, 256, 256, 256}));
  CHECK(arena.allocate(Sizes{}));
}

TEST_CASE("a slab that nobody uses serves another size") {
  ExpertArena arena(8 * 1024, 1024);  // one slab
  auto const small = arena.allocate(Sizes{256});
  REQUIRE(small);
  CHECK_FALSE(arena.allocate(Sizes{1024}));
  arena.release(*small);
  CHECK(arena.allocate(Sizes(8, 1024)));
}

TEST_CASE("a block larger than any slab never fits, nor does any in no memory") {
  CHECK_FALSE(ExpertArena(1000, 4096).allocate(Sizes{1024}));
  CHECK_FALSE(ExpertArena(0, 4096).allocate(Sizes{1}));
  CHECK_FALSE(ExpertArena().allocate(Sizes{1}));
  CHECK(ExpertArena(1024, 4096).emptied().allocate(Sizes{1024}));
}

TEST_CASE("ten thousand loads and releases of mixed sizes never overlap and never wear the memory out") {
  std::array<std::size_t, 4> const sizes{768, 1024, 2560, 4096};
  std::size_t const bytes = 20 * 8 * 4096;
  ExpertArena arena(bytes, 4096);
  std::vector<std::pair<Sizes, Sizes>> held;  // sizes, blocks
  std::map<std::size_t, std::size_t> used;    // begin, end
  std::uint64_t state = 7;
  auto const draw = [&state](std::uint64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % n;
  };
  for (int step = 0; step < 10000; ++step) {
    if (held.size() < 6 && draw(2) == 0) {
      Sizes wanted;
      for (std::uint64_t i = 0; i < 1 + draw(20); ++i) wanted.push_back(sizes[draw(4)]);
      auto const blocks = arena.allocate(wanted);
      REQUIRE(blocks);  // six adapters of 20 blocks take at most 6 * 20 / 8 + 4 slabs of the 20
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        std::size_t const begin = (*blocks)[i], end = begin + wanted[i];
        REQUIRE(begin % ExpertArena::alignment == 0);
        REQUIRE(end <= bytes);
        auto const after = used.lower_bound(begin);
        REQUIRE((after == used.end() || after->first >= end));
        REQUIRE((after == used.begin() || std::prev(after)->second <= begin));
        used[begin] = end;
      }
      held.emplace_back(wanted, *blocks);
    } else if (!held.empty()) {
      auto const leaving = held.begin() + static_cast<std::ptrdiff_t>(draw(held.size()));
      arena.release(leaving->second);
      for (std::size_t const block : leaving->second) used.erase(block);
      held.erase(leaving);
    }
  }
  for (auto const& [wanted, blocks] : held) arena.release(blocks);
  CHECK(arena.allocate(Sizes(160, 4096)));
}
