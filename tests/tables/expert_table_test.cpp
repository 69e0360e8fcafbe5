// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/tables/expert_table.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace atlas::lora;

namespace {

static_assert(expert_index_bytes(1) == 32);
static_assert(expert_index_bytes(4) == 32);
static_assert(expert_index_bytes(5) == 48);
static_assert(expert_index_bytes(128) == 16 + 512);

// Two slots of three experts; slot 1 adapts experts 2 and 0, in this order of groups.
struct World {
  float weights[4] = {1, 2, 3, 4};
  std::vector<RouteCell<float>> cells{{weights, weights, nullptr, 1.0F, 1, 8, 0},
                                      {weights, weights, nullptr, 2.0F, 1, 8, 0},
                                      {weights, weights, nullptr, 3.0F, 1, 8, 0},
                                      {weights, weights, nullptr, 4.0F, 1, 8, 0}};
  alignas(16) std::byte memory[2 * expert_index_bytes(3)] = {};
  ExpertTable<float> table{
      reinterpret_cast<ExpertIndex<float>*>(memory), expert_index_bytes(3), 2, 3, 2, 1, 8, 8, 8};

  World() {
    auto* const index = reinterpret_cast<ExpertIndex<float>*>(memory + expert_index_bytes(3));
    index->cells = cells.data();
    index->num_groups = 2;
    index->places()[2] = 1;
    index->places()[0] = 2;
  }
};

}  // namespace

TEST_CASE("only adapted experts have cells, and a linear finds its own of them") {
  World world;
  CHECK(world.table.find(1, 2).scale == 2.0F);  // group 0, cell 1
  CHECK(world.table.find(1, 0).scale == 4.0F);
  CHECK_FALSE(world.table.find(1, 1).adapted());
  world.table.cell = 0;
  CHECK(world.table.find(1, 2).scale == 1.0F);
}

TEST_CASE("a slot whose index is zero adapts nothing") {
  World const world;
  for (std::int32_t expert = 0; expert < 3; ++expert) CHECK_FALSE(world.table.find(0, expert).adapted());
}

TEST_CASE("slots and experts out of range, and a table without indexes, are not read through") {
  World world;
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
  for (std::int32_t const bad : {-1, 2, most, least}) CHECK_FALSE(world.table.find(bad, 0).adapted());
  for (std::int32_t const bad : {-1, 3, most, least}) CHECK_FALSE(world.table.find(1, bad).adapted());
  CHECK_FALSE(ExpertTable<float>{}.find(0, 0).adapted());
}

TEST_CASE("a place beyond the groups is not read through") {
  World world;
  auto* const index = reinterpret_cast<ExpertIndex<float>*>(world.memory + expert_index_bytes(3));
  index->places()[1] = 3;
  CHECK_FALSE(world.table.find(1, 1).adapted());
  index->places()[1] = -1;
  CHECK_FALSE(world.table.find(1, 1).adapted());
}
