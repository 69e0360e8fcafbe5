// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/layout.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;

static_assert(padded_rank(0) == 0 && padded_rank(1) == 8 && padded_rank(8) == 8 && padded_rank(9) == 16);
static_assert(padded_rank(largest_pool_rank) == largest_pool_rank);
static_assert(detail::multiply_add(3, 5, 2) == std::size_t{17});
static_assert(detail::multiply_add(0, 5, 2) == std::size_t{2} &&
              detail::multiply_add(5, 0, 2) == std::size_t{2});
static_assert(detail::multiply_add(std::size_t{1} << 62, 1, (std::size_t{1} << 62) - 1).has_value());
static_assert(!detail::multiply_add(std::size_t{1} << 62, 1, std::size_t{1} << 62).has_value());
static_assert(!detail::multiply_add(std::size_t{1} << 62, 4, 0).has_value());
static_assert(!detail::multiply_add(1, 1, std::numeric_limits<std::size_t>::max()).has_value());

// A hybrid model as the goldens have it: every fourth layer has full attention, the others a linear one.
struct Hybrid {
  std::int32_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t intermediate = 0;  // 0: the feed-forward part is experts
  std::int64_t linear_value = 0;
};

ModelShape shape_of(Hybrid const& h) {
  constexpr std::int64_t head_dim = 256;
  std::vector<std::int32_t> all;
  std::vector<std::int32_t> full;
  std::vector<std::int32_t> linear;
  for (std::int32_t layer = 0; layer < h.layers; ++layer) {
    all.push_back(layer);
    ((layer + 1) % 4 == 0 ? full : linear).push_back(layer);
  }
  ModelDescription d;
  d.num_layers = h.layers;
  std::int64_t const query = h.heads * head_dim;  // doubled by its gate in q
  d.modules.push_back({"q", 2 * query, h.hidden, full, {}});
  d.modules.push_back({"k", h.kv_heads * head_dim, h.hidden, full, {}});
  d.modules.push_back({"v", h.kv_heads * head_dim, h.hidden, full, {}});
  d.modules.push_back({"o", h.hidden, query, full, {}});
  if (h.intermediate > 0) {
    d.modules.push_back({"gate", h.intermediate, h.hidden, all, {}});
    d.modules.push_back({"up", h.intermediate, h.hidden, all, {}});
    d.modules.push_back({"down", h.hidden, h.intermediate, all, {}});
  }
  d.modules.push_back({"out", h.hidden, h.linear_value, linear, {}});
  auto shape = ModelShape::create(d);
  REQUIRE(shape.has_value());
  return *shape;
}

constexpr Hybrid factory{48, 2048, 16, 2, 0, 32 * 128};
constexpr Hybrid dense_0_8b{24, 1024, 8, 2, 3584, 16 * 128};

std::size_t slot_bytes(Hybrid const& model, std::int32_t max_rank) {
  auto const layout = SlotLayout::create(shape_of(model), max_rank, 2);
  REQUIRE(layout.has_value());
  return layout->slot_bytes();
}

struct Offsets {
  std::size_t a;
  std::size_t b;
  bool operator==(Offsets const&) const = default;
};

Offsets offsets(Hybrid const& model, std::int32_t layer, std::string const& module) {
  ModelShape const shape = shape_of(model);
  auto const layout = SlotLayout::create(shape, 16, 2);
  auto const site = shape.find(layer, module);
  REQUIRE(layout.has_value());
  REQUIRE(site.has_value());
  return {layout->a_offset(*site), layout->b_offset(*site)};
}

TEST_CASE("slots take the bytes that the reference's do") {
  CHECK(slot_bytes(factory, 16) == 15335424);
  CHECK(slot_bytes({64, 5120, 24, 4, 17408, 48 * 128}, 8) == 88342528);
  CHECK(slot_bytes({64, 5120, 24, 4, 17408, 48 * 128}, 64) == 706740224);
  CHECK(slot_bytes(dense_0_8b, 64) == 58195968);
  CHECK(slot_bytes({40, 2048, 16, 2, 0, 32 * 128}, 16) == 12779520);
  CHECK(slot_bytes({32, 2560, 16, 4, 9216, 32 * 128}, 16) == 47579136);
}

TEST_CASE(
    "the reference's earlier lists of modules, on full attention layers alone, give its earlier sizes") {
  std::vector<std::int32_t> full;
  for (std::int32_t layer = 3; layer < 48; layer += 4) full.push_back(layer);
  ModelDescription d;
  d.num_layers = 48;
  d.modules = {{"k", 512, 2048, full, {}},     {"v", 512, 2048, full, {}},   {"o", 2048, 4096, full, {}},
               {"gate", 5120, 2048, full, {}}, {"up", 5120, 2048, full, {}}, {"down", 2048, 5120, full, {}}};
  CHECK(SlotLayout::create(*ModelShape::create(d), 16, 2)->slot_bytes() == 12582912);
  d.modules.insert(d.modules.begin(), {"q", 8192, 2048, full, {}});
  CHECK(SlotLayout::create(*ModelShape::create(d), 16, 2)->slot_bytes() == 16515072);
}

TEST_CASE("A and B lie where the reference's do") {
  CHECK(offsets(factory, 0, "out") == Offsets{0, 131072});
  CHECK(offsets(factory, 3, "q") == Offsets{589824, 655360});
  CHECK(offsets(factory, 3, "k") == Offsets{917504, 983040});
  CHECK(offsets(factory, 3, "v").a == 999424);  // the end of k
  CHECK(offsets(factory, 47, "o") == Offsets{15138816, 15269888});
  CHECK(15269888 + 2048 * 16 * 2 == 15335424);  // the last B ends with the slot
  CHECK(offsets(dense_0_8b, 0, "gate") == Offsets{0, 32768});
  CHECK(offsets(dense_0_8b, 0, "up") == Offsets{147456, 180224});
  CHECK(offsets(dense_0_8b, 0, "down") == Offsets{294912, 409600});
  CHECK(offsets(dense_0_8b, 0, "out") == Offsets{442368, 507904});
  CHECK(offsets(dense_0_8b, 3, "q") == Offsets{1622016, 1654784});
  CHECK(offsets(dense_0_8b, 3, "down") == Offsets{2277376, 2392064});
  CHECK(2392064 + 1024 * 16 * 2 == 2424832);
}

TEST_CASE("a layer without a module has no offset for it") {
  CHECK_FALSE(shape_of(factory).find(0, "k").has_value());
  CHECK_FALSE(shape_of(factory).find(3, "out").has_value());
}

TEST_CASE("sites follow one another without gap, each A and B and bias on 16 bytes") {
  ModelDescription d;
  d.num_layers = 2;
  d.modules = {{"odd", 7, 3, {0, 1}, {}}, {"one", 1, 1, {1}, {}}, {"lm_head", 5, 9, {model_wide}, {}}};
  auto const shape = ModelShape::create(d);
  REQUIRE(shape.has_value());
  for (std::size_t const element : {std::size_t{2}, std::size_t{4}}) {
    auto const layout = SlotLayout::create(*shape, 3, element);
    REQUIRE(layout.has_value());
    CHECK(layout->max_rank() == 8);
    CHECK(layout->sites() == 4);
    std::size_t end = 0;
    for (std::size_t i = 0; i < layout->sites(); ++i) {
      Module const& module = shape->module(shape->sites()[i]);
      CHECK(layout->a_offset(i) == end);
      CHECK(layout->b_offset(i) == end + 8 * static_cast<std::size_t>(module.k_in) * element);
      end = layout->b_offset(i) + 8 * static_cast<std::size_t>(module.n_out) * element;
      CHECK(layout->a_offset(i) % 16 == 0);
      CHECK(layout->b_offset(i) % 16 == 0);
      CHECK(layout->bias_offset(i) % 16 == 0);
    }
    CHECK(layout->slot_bytes() == end);
  }
  // 2-byte biases of 7, 7, 1 and 5 elements, each on 16 bytes; the largest site is lm_head's 8 * (9 + 5).
  auto const layout = SlotLayout::create(*shape, 3, 2);
  CHECK(layout->bias_bytes() == 16 + 16 + 16 + 16);
  CHECK(layout->largest_site_bytes() == 8 * (9 + 5) * 2 + 16);
}

TEST_CASE("a slot for bad ranks, for no linears or beyond 63 bits is refused") {
  ModelShape const shape = shape_of(factory);
  for (std::int32_t const rank : {0, -1, largest_pool_rank + 1, std::numeric_limits<std::int32_t>::max()}) {
    auto const layout = SlotLayout::create(shape, rank, 2);
    REQUIRE_FALSE(layout.has_value());
    CHECK(layout.error().code == Errc::invalid_argument);
    CHECK(layout.error().message.find(std::to_string(rank)) != std::string::npos);
  }
  CHECK(SlotLayout::create(ModelShape(), 8, 2).error().code == Errc::invalid_argument);

  // 2^16 sites of 2 * (2^31 - 1) * 2^16 * 2 bytes, 2^49 each, would be 2^65.
  constexpr std::int64_t widest = std::numeric_limits<std::int32_t>::max();
  ModelDescription d;
  d.num_layers = 1 << 16;
  std::vector<std::int32_t> all;
  for (std::int32_t layer = 0; layer < d.num_layers; ++layer) all.push_back(layer);
  d.modules = {{"wide", widest, widest, all, {}}};
  auto const wide = ModelShape::create(d);
  REQUIRE(wide.has_value());
  auto const layout = SlotLayout::create(*wide, largest_pool_rank, 2);
  REQUIRE_FALSE(layout.has_value());
  CHECK(layout.error().code == Errc::out_of_range);
  CHECK(layout.error().message.find("wide") != std::string::npos);
}

}  // namespace
