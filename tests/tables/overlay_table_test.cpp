// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/tables/overlay_table.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

using namespace atlas::lora;

namespace {

// A, B, C of one slot: rows, ids, map. D, E: a head's own rows and ids.
float const a0[1] = {}, d0[1] = {};
std::int32_t const b0[1] = {}, c0[1] = {}, e0[1] = {};

OverlaySets<float> embedding(std::int32_t count, std::int64_t vocab = 640) {
  OverlaySets<float> sets;
  sets.slot_map = c0;
  sets.embed_rows = a0;
  sets.embed_ids = b0;
  sets.embed_count = count;
  sets.vocab = vocab;
  return sets;
}
OverlaySets<float> with_own_head(OverlaySets<float> sets, std::int32_t count) {
  sets.head_rows = d0;
  sets.head_ids = e0;
  sets.head_count = count;
  sets.vocab = 640;
  return sets;
}

struct Wired {
  std::vector<OverlayCell<float>> cells;
  cuda::std::expected<OverlayExtent, Errc> extent;
};
Wired wire(std::vector<OverlaySets<float>> const& sets, bool head_is_embedding) {
  OverlayCell<float> stale;
  stale.head_count = 99;
  std::vector<OverlayCell<float>> cells(sets.size(), stale);
  auto const extent = wire_overlays<float>(sets, head_is_embedding, cells);
  return {cells, extent};
}

}  // namespace

TEST_CASE("a head that is the embedding takes the embedding's rows; an empty slot is all null") {
  auto const [cells, extent] = wire({embedding(3), {}}, true);
  CHECK(cells[0] == OverlayCell<float>{c0, a0, a0, b0, 3, 3});
  CHECK(cells[1] == OverlayCell<float>{});
  CHECK(*extent == OverlayExtent{640, 3});
}

TEST_CASE("a head of its own without rows of its own is left alone") {
  auto const [cells, extent] = wire({embedding(3)}, false);
  CHECK(cells[0] == OverlayCell<float>{c0, a0, nullptr, nullptr, 3, 0});
  CHECK(*extent == OverlayExtent{640, 0});
}

TEST_CASE("the head's own rows are honoured whatever the head is, and without an embedding's too") {
  for (bool const tied : {false, true}) {
    auto const [cells, extent] = wire({with_own_head(embedding(3), 2)}, tied);
    CHECK(cells[0] == OverlayCell<float>{c0, a0, d0, e0, 3, 2});
    CHECK(*extent == OverlayExtent{640, 2});
    auto const alone = wire({with_own_head({}, 2)}, tied);
    CHECK(alone.cells[0] == OverlayCell<float>{nullptr, nullptr, d0, e0, 0, 2});
    CHECK(*alone.extent == OverlayExtent{640, 2});
  }
}

TEST_CASE("slots without overlays have no vocabulary") {
  auto const [cells, extent] = wire({{}, {}}, true);
  CHECK(cells == std::vector<OverlayCell<float>>(2));
  CHECK(*extent == OverlayExtent{0, 0});
}

TEST_CASE("two vocabularies are refused and nothing is written") {
  auto const [cells, extent] = wire({embedding(3), embedding(3, 768)}, true);
  CHECK(extent.error() == Errc::shape_mismatch);
  CHECK(cells[0].head_count == 99);
  std::vector<OverlayCell<float>> too_few(1);
  std::vector<OverlaySets<float>> const two(2);
  CHECK(wire_overlays<float>(two, true, too_few).error() == Errc::invalid_argument);
}

TEST_CASE("a table steps from cell to cell by its stride") {
  std::array<std::byte, 256> const memory{};
  OverlayTable<__half> table;
  table.cells = reinterpret_cast<OverlayCell<__half> const*>(memory.data());
  table.cell_stride_bytes = 96;
  CHECK(reinterpret_cast<std::byte const*>(table.cell(2)) == memory.data() + 192);
}
