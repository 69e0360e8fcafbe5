// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/reference/overlay.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace atlas::lora;

namespace {

constexpr std::int64_t vocab = 6;
constexpr std::int64_t hidden = 3;
constexpr std::int32_t far_out = std::numeric_limits<std::int32_t>::max();

// Slot 0 has rows of its own for tokens 1 and 4 in the embedding, and 4 in the head; slot 1 nothing; slot 2
// shares its embedding's row of token 4 with the head.
template <Element T>
struct World {
  std::vector<std::int32_t> map0{-1, 0, -1, -1, 1, -1}, map2{-1, -1, -1, -1, 0, 7};  // 7: beyond its rows
  std::vector<T> rows0, head0, rows2;
  std::vector<std::int32_t> ids0{4}, ids2{4};
  std::vector<OverlayCell<T>> cells{3};
  OverlayTable<T> table;

  World() {
    for (float const v : {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F}) rows0.push_back(from_f32<T>(v));
    for (float const v : {1.0F, -1.0F, 2.0F}) head0.push_back(from_f32<T>(v));
    for (float const v : {7.0F, 8.0F, 9.0F}) rows2.push_back(from_f32<T>(v));
    cells[0] = {map0.data(), rows0.data(), head0.data(), ids0.data(), 2, 1};
    cells[2] = {map2.data(), rows2.data(), rows2.data(), ids2.data(), 1, 1};
    table.cells = cells.data();
    table.max_slots = 3;
    table.max_head_count = 1;
    table.vocab = vocab;
    table.hidden = hidden;
  }
};

template <Element T>
std::vector<float> f32(std::vector<T> const& values) {
  std::vector<float> out;
  for (T const value : values) out.push_back(to_f32(value));
  return out;
}

}  // namespace

TEST_CASE_TEMPLATE("rows take the embedding of their own slot, and others keep theirs", T, float, __half,
                   __nv_bfloat16) {
  World<T> const world;
  // One token in three slots and base; slots out of range; a token whose map points beyond the rows.
  std::vector<std::int32_t> const slots{
      0, -1, 2, 1, 0, 3, far_out, 2, std::numeric_limits<std::int32_t>::min()};
  std::vector<std::int32_t> const tokens{4, 4, 4, 4, 1, 4, 4, 5, 4};
  std::vector<T> h(slots.size() * 4, from_f32<T>(0.5F));  // a row stride of 4
  reference_embed_overlay<T>(world.table, slots, tokens, h.data(), 4);
  std::vector<float> want(h.size(), 0.5F);
  auto const put = [&](std::size_t row, float a, float b, float c) {
    want[row * 4] = a, want[row * 4 + 1] = b, want[row * 4 + 2] = c;
  };
  put(0, 4, 5, 6);
  put(2, 7, 8, 9);
  put(4, 1, 2, 3);
  CHECK(f32(h) == want);
}

TEST_CASE("token ids out of range are base and are never looked up") {
  World<float> const world;
  for (std::int32_t const token : {-1, 6, far_out, std::numeric_limits<std::int32_t>::min()}) {
    std::vector<std::int32_t> const slots{0}, tokens{token};
    std::vector<float> h(hidden, 0.5F);
    reference_embed_overlay<float>(world.table, slots, tokens, h.data(), hidden);
    CHECK(h == std::vector<float>(hidden, 0.5F));
  }
}

TEST_CASE_TEMPLATE("a row's logits are recomputed where its slot says so, rounded once into their type", Y,
                   float, __half, __nv_bfloat16) {
  using T = __nv_bfloat16;
  World<T> const world;
  std::vector<std::int32_t> const slots{0, -1, 2, 1, 9};
  std::vector<T> x;
  for (std::size_t row = 0; row < slots.size(); ++row) {
    for (float const v : {2.0F, 3.0F, 0.5F, 99.0F}) x.push_back(from_f32<T>(v));  // a row stride of 4
  }
  std::vector<Y> logits(slots.size() * 8, from_f32<Y>(0.25F));  // a row stride of 8, 2 beyond the vocabulary
  reference_head_overlay<T, Y>(world.table, slots, x.data(), 4, logits.data(), 8);
  std::vector<float> want(logits.size(), 0.25F);
  want[0 * 8 + 4] = 0.0F;   // 2 - 3 + 1
  want[2 * 8 + 4] = 42.5F;  // 14 + 24 + 4.5
  CHECK(f32(logits) == want);
}

TEST_CASE("head ids beyond the vocabulary are skipped") {
  World<float> world;
  world.ids0[0] = 6;
  world.ids2[0] = -1;
  std::vector<std::int32_t> const slots{0, 2};
  std::vector<float> const x(2 * hidden, 1.0F);
  std::vector<float> logits(2 * 8, 0.25F);
  reference_head_overlay<float, float>(world.table, slots, x.data(), hidden, logits.data(), 8);
  CHECK(logits == std::vector<float>(2 * 8, 0.25F));
}

TEST_CASE("a vocabulary of 49,159 in logits padded to 49,216: pads and ids outside are never touched") {
  constexpr std::int64_t tokens = 49159, padded = 49216;
  std::vector<float> const own(hidden, 2.0F), x(hidden, 1.0F);
  std::vector<std::int32_t> const slots{0};
  for (std::int32_t const id : {49158, 49159, 49215, -1, far_out}) {
    OverlayCell<float> const cell{nullptr, nullptr, own.data(), &id, 0, 1};
    OverlayTable<float> const table{&cell, sizeof cell, 1, 1, tokens, hidden};
    std::vector<float> logits(padded, 0.25F);
    reference_head_overlay<float, float>(table, slots, x.data(), hidden, logits.data(), padded);
    std::vector<float> want(padded, 0.25F);
    if (id == 49158) want[49158] = 6.0F;
    CHECK(logits == want);
  }
}

TEST_CASE("a logit is summed in the order of contractions") {
  std::int64_t const width = 1000;
  std::vector<float> row(width), x(width);
  for (std::int64_t k = 0; k < width; ++k) {
    row[static_cast<std::size_t>(k)] = 1.0F / static_cast<float>(k + 1);
    x[static_cast<std::size_t>(k)] = k % 3 == 0 ? 1e4F : -1.5F;
  }
  std::int32_t const id = 2;
  OverlayCell<float> const cell{nullptr, nullptr, row.data(), &id, 0, 1};
  OverlayTable<float> const table{&cell, sizeof cell, 1, 1, vocab, width};
  std::vector<std::int32_t> const slots{0};
  std::vector<float> logits(vocab);
  reference_head_overlay<float, float>(table, slots, x.data(), width, logits.data(), vocab);
  CHECK(logits[2] == reference_contract(row.data(), x.data(), width));
}
