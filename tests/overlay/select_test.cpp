// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/overlay/select.hpp"

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

using namespace atlas::lora;

namespace {

using Sources = std::vector<RowSource>;

Sources select(std::vector<std::uint8_t> const& changed, std::vector<std::int64_t> const& retrained) {
  return select_rows(changed, retrained);
}

constexpr bool changed(float a, float b, float threshold = 0.0F) {
  return element_changed(std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b), threshold);
}

}  // namespace

TEST_CASE("changed and retrained rows come together, ascending, and retrained ones win") {
  // Rows 2 and 5 differ; tokens 5 and 1 are retrained, by rows 0 and 1.
  CHECK(select({0, 0, 1, 0, 0, 1}, {5, 1}) == Sources{{1, 1}, {2, -1}, {5, 0}});
  CHECK(select({}, {7, 5, 9}) == Sources{{5, 1}, {7, 0}, {9, 2}});
  CHECK(select({0, 0, 1}, {7, 5, 9})[0] == RowSource{2, -1});  // its own table's, verbatim
  CHECK(select({1, 1}, {}) == Sources{{0, -1}, {1, -1}});
  CHECK(select({0, 0, 0}, {}).empty());
  CHECK(select({0, 0, 0}, {2, 0}) == Sources{{0, 1}, {2, 0}});
  CHECK(select({1, 0, 1}, {1}) == Sources{{0, -1}, {1, 0}, {2, -1}});
}

TEST_CASE("rows differ by more than the threshold, by anything where it is 0, and always where one is NaN") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  CHECK_FALSE(changed(1.0F, 1.0F));
  CHECK(changed(1.0F, 1.0000001F));
  CHECK_FALSE(changed(0.0F, -0.0F));
  CHECK(changed(std::numeric_limits<float>::denorm_min(), 0.0F));
  CHECK(changed(nan, nan));
  CHECK(changed(nan, 1.0F, 10.0F));
  CHECK(changed(1.0F, nan, 10.0F));
  CHECK_FALSE(changed(infinity, infinity));
  CHECK(changed(infinity, -infinity, 10.0F));
  CHECK_FALSE(changed(1.0F, 1.125F, 0.125F));  // strictly more
  CHECK(changed(1.0F, 1.25F, 0.125F));
  CHECK(changed(1.25F, 1.0F, 0.125F));
}

static_assert([] {
  std::array<std::int32_t, 8> map{};
  std::array<std::int32_t, 2> const ids{2, 5};
  fill_slot_map(ids, map);
  return map == std::array<std::int32_t, 8>{-1, -1, 0, -1, -1, 1, -1, -1};
}());
static_assert([] {
  std::array<std::uint8_t, 6> const flags{0, 0, 1, 0, 0, 1};
  std::array<std::int64_t, 2> const retrained{5, 1};
  return select_rows(flags, retrained) == std::vector<RowSource>{{1, 1}, {2, -1}, {5, 0}};
}());
