// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/tables/route_table.hpp"

#include <array>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;

// Three 8-byte addresses, a 4-byte scale, three 4-byte counts: kernels read a cell as three 16-byte words.
static_assert(sizeof(RouteCell<__nv_bfloat16>) == 3 * 8 + 4 * 4 + 8);
static_assert(alignof(RouteCell<__half>) == 16);
static_assert(offsetof(RouteCell<float>, a) == 0 && offsetof(RouteCell<float>, b) == 8);
static_assert(offsetof(RouteCell<float>, bias) == 16 && offsetof(RouteCell<float>, scale) == 24);
static_assert(offsetof(RouteCell<float>, rank) == 28 && offsetof(RouteCell<float>, b_row_stride) == 32);
static_assert(std::is_trivially_copyable_v<RouteTable<__half>>);

constexpr std::array<float, 4> weights{1.0F, 2.0F, 3.0F, 4.0F};

// A slot adapts a module only if it has rank, A and B; a bias alone is nothing.
static_assert(!RouteCell<float>{}.adapted());
static_assert(RouteCell<float>{weights.data(), weights.data(), nullptr, 1.0F, 1, 8, 0}.adapted());
static_assert(!RouteCell<float>{weights.data(), weights.data(), nullptr, 1.0F, 0, 8, 0}.adapted());
static_assert(!RouteCell<float>{nullptr, weights.data(), nullptr, 1.0F, 1, 8, 0}.adapted());
static_assert(!RouteCell<float>{weights.data(), nullptr, weights.data(), 1.0F, 1, 8, 0}.adapted());
static_assert(!RouteCell<float>{weights.data(), weights.data(), nullptr, 1.0F, -1, 8, 0}.adapted());

TEST_CASE("an engine's own array of cells is a table with the default stride") {
  std::vector<RouteCell<float>> cells(4);
  RouteTable<float> table;
  table.cells = cells.data();
  table.max_slots = 4;
  CHECK(table.cell(0) == &cells[0]);
  CHECK(table.cell(3) == &cells[3]);
}

TEST_CASE("cells of one module lie a record apart when slots hold records") {
  constexpr std::size_t sites = 3;
  std::vector<RouteCell<float>> records(4 * sites);  // [slot][site]
  RouteTable<float> table;
  table.cells = &records[1];  // the second site of slot 0
  table.cell_stride_bytes = sites * sizeof(RouteCell<float>);
  table.max_slots = 4;
  CHECK(table.cell(0) == &records[1]);
  CHECK(table.cell(2) == &records[2 * sites + 1]);
}

}  // namespace
