// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/reference/moe.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/reference/delta.hpp"

using namespace atlas::lora;

namespace {

/// Slot 0 adapts experts 0 and 1 of three with rank 1, k_in 2, n_out 2; slot 1 none of them.
struct World {
  std::vector<float> a{1, 2, 3, 4};  // experts 0 and 1
  std::vector<float> b{10, 20, 30, 40};
  std::vector<RouteCell<float>> cells{{a.data(), b.data(), nullptr, 1.0F, 1, 1, 0},
                                      {a.data() + 2, b.data() + 2, nullptr, 2.0F, 1, 1, 0}};
  alignas(16) std::byte memory[2 * expert_index_bytes(3)] = {};
  ExpertTable<float> table{
      reinterpret_cast<ExpertIndex<float>*>(memory), expert_index_bytes(3), 2, 3, 1, 0, 1, 2, 2};
  std::vector<float> xa = std::vector<float>(1);

  World() {
    auto* const index = reinterpret_cast<ExpertIndex<float>*>(memory);
    index->cells = cells.data();
    index->num_groups = 2;
    index->places()[0] = 1;
    index->places()[1] = 2;
  }
  std::vector<float> run(ExpertRows const& rows, ExpertInput const& input, std::vector<float> const& x,
                         std::size_t y_rows) {
    std::vector<float> y(2 * y_rows, 0.5F);
    reference_expert_delta<float, float>(table, rows, input, x.data(), 2, y.data(), 2, xa);
    return y;
  }
};

using Ints = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("each row gets the delta of its slot's pair for its expert, and base rows keep theirs") {
  World world;
  // Token 0 in slot 0 chose experts 0 and 1, token 1 is base, token 2 in slot 1 adapts nothing.
  Ints const slots{0, -1, 1}, ids{0, 1, 0, 1, 0, 1};
  auto const y = world.run(ExpertRows::slot_major(slots.data(), 3, 2, ids.data()),
                           ExpertInput::of_tokens(2, 3), {1, 1, 1, 1, 1, 1}, 6);
  // Expert 0: xa = 1 + 2 = 3, B 10 and 20; expert 1: xa = 3 + 4 = 7, B 30 and 40, scale 2.
  CHECK(y ==
        std::vector<float>{30.5F, 60.5F, 420.5F, 560.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F});
}

TEST_CASE("sorted rows give the same as slot-major ones, for gate and for down") {
  World world;
  Ints const slots{0, 0}, ids{1, 0, 0, 2};
  std::vector<float> const x{1, 2, 3, 4};
  auto const major =
      world.run(ExpertRows::slot_major(slots.data(), 2, 2, ids.data()), ExpertInput::of_tokens(2, 2), x, 4);
  // Sorted: expert 0 has rows 1 and 2 (tokens 0 and 1), expert 1 row 0 (token 0), expert 2 row 3.
  Ints const tokens{0, 1, 0, 1}, offsets{0, 2, 3, 4};
  auto const sorted = world.run(ExpertRows::sorted(slots.data(), 2, 4, tokens.data(), offsets.data()),
                                ExpertInput::of_sorted(tokens.data(), 2), x, 4);
  std::size_t const place[] = {2, 0, 1, 3};  // of each slot-major row among the sorted ones
  for (std::size_t row = 0; row < 4; ++row) {
    CHECK(std::memcmp(&major[2 * row], &sorted[2 * place[row]], 2 * sizeof(float)) == 0);
  }
  std::vector<float> const wide{1, 0, 0, 1, 1, 1, 2, 2};  // a row of x for each row
  auto const down =
      world.run(ExpertRows::slot_major(slots.data(), 2, 2, ids.data()), ExpertInput::own_rows(4), wide, 4);
  CHECK(down[0] == 0.5F + 2 * 3 * 30);  // row 0, expert 1: xa = 3
  CHECK(down[2] == 0.5F + 2 * 10);      // row 1, expert 0: xa = 2
}

TEST_CASE("a pair that occurs twice is added to both of its rows, once each") {
  World world;
  Ints const slots{0}, ids{0, 0};
  auto const y = world.run(ExpertRows::slot_major(slots.data(), 1, 2, ids.data()),
                           ExpertInput::of_tokens(2, 1), {1, 1}, 2);
  CHECK(y == std::vector<float>{30.5F, 60.5F, 30.5F, 60.5F});
}

TEST_CASE("rows whose expert, slot or input is out of range keep their bytes") {
  World world;
  Ints const slots{0, 7, 0}, ids{3, 0, 0};
  auto const y = world.run(ExpertRows::slot_major(slots.data(), 3, 1, ids.data()), ExpertInput::own_rows(2),
                           {1, 1, 1, 1}, 3);
  CHECK(y == std::vector<float>(6, 0.5F));
}

TEST_CASE("base rows among adapted ones on one expert are byte-equal to a run without adapters") {
  World world;
  Ints const slots{-1, 0, -1}, ids(6, 1);
  auto const y = world.run(ExpertRows::slot_major(slots.data(), 3, 2, ids.data()),
                           ExpertInput::of_tokens(2, 3), {1, 1, 1, 1, 1, 1}, 6);
  for (std::size_t const row : {0U, 1U, 4U, 5U}) {
    CHECK(y[2 * row] == 0.5F);
    CHECK(y[2 * row + 1] == 0.5F);
  }
  CHECK(y[4] == 0.5F + 2 * 7 * 30);
  CHECK(y[6] == y[4]);
}
