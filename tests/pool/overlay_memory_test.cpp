// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/overlay_memory.hpp"

#include <cstddef>
#include <cstdint>

#include <doctest/doctest.h>

using namespace atlas::lora;
using namespace atlas::lora::detail;

namespace {

auto const none = [](std::int32_t) { return false; };
auto only(std::int32_t which) {
  return [which](std::int32_t place) { return place == which; };
}

}  // namespace

TEST_CASE("an overlay holds a map of the vocabulary, its rows and ids, and each part is 16-byte aligned") {
  // 3 rows of the embedding, of 5 elements of 2 bytes, and a vocabulary of 10: 40 bytes of map.
  OverlayLayout const tied = overlay_layout(3, 0, true, 10, 5, 2);
  CHECK(tied == OverlayLayout{0, 48, 80, 96, 96, 96});  // rows 30 -> 32, ids 12 -> 16
  OverlayLayout const untied = overlay_layout(3, 0, false, 10, 5, 2);
  CHECK(untied.bytes == 80);
  OverlayLayout const own = overlay_layout(3, 2, true, 10, 5, 2);
  CHECK(own == OverlayLayout{0, 48, 80, 80, 112, 128});  // head rows 20 -> 32, ids 8 -> 16
  OverlayLayout const head = overlay_layout(0, 2, false, 10, 5, 2);
  CHECK(head == OverlayLayout{0, 0, 0, 0, 32, 48});  // no map without rows of the embedding
  CHECK(overlay_layout(0, 0, true, 10, 5, 2).bytes == 0);
}

TEST_CASE("blocks do not overlap, and room that was given up is used again") {
  OverlayMemory memory(1024, 4);
  CHECK(memory.take(0, 300, none));  // 300 -> 512
  CHECK(memory.take(1, 256, none));
  CHECK(memory.take(2, 200, none));
  CHECK(memory.offset(0) == 0);
  CHECK(memory.offset(1) == 512);
  CHECK(memory.offset(2) == 768);
  CHECK_FALSE(memory.take(3, 1, none));
  CHECK_FALSE(memory.fits(1, none));
  CHECK(memory.fits(256, only(1)));
  CHECK_FALSE(memory.fits(257, only(1)));
  CHECK(memory.take(3, 256, only(1)));  // place 1 is spare and loses its block
  CHECK(memory.offset(3) == 512);
  CHECK(memory.take(0, 512, none));  // its own block is given up first
  CHECK(memory.offset(0) == 0);
  CHECK(memory.take(0, 0, none));
  CHECK(memory.take(1, 512, none));
  CHECK(memory.offset(1) == 0);
}

TEST_CASE("a block that can never fit finds no room and takes none") {
  OverlayMemory memory(1000, 2);
  CHECK_FALSE(memory.take(0, 1001, only(1)));
  CHECK(memory.take(0, 1000, none));
  CHECK_FALSE(memory.take(1, 1, none));
}
