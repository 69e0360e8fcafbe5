// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/reference/delta.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

using namespace atlas::lora;
using bf16 = __nv_bfloat16;

template <class T>
std::vector<T> of(std::vector<float> const& values) {
  std::vector<T> out;
  for (float const value : values) out.push_back(from_f32<T>(value));
  return out;
}

float uniform(std::uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
}

TEST_CASE("the worked fold gives its numbers") {
  // k_in 8, rank 2, n_out 2, scale 2: xa 2.25, -2.25; sums 4.5, -3.8232421875; delta 4.5, -3.828125; y 19,
  // -7.75.
  auto const x = of<bf16>({1, 2, -1, 0.5F, 0, 4, -3, 1});
  auto const a = of<bf16>({0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F, 0.5F,  //
                           0.25F, 0, 1, 0, 0, 0.125F, 0, -2});
  auto const b = of<bf16>({1, -1, 0.3F, 2});
  RouteCell<bf16> const cell{a.data(), b.data(), nullptr, 2.0F, 2, 2, 0};
  std::vector<bf16> xa(2);
  reference_shrink(cell, x.data(), 8, std::span<bf16>(xa));
  CHECK(to_f32(xa[0]) == 2.25F);
  CHECK(to_f32(xa[1]) == -2.25F);
  auto y = of<bf16>({10.0F, -0.1F});
  reference_expand<bf16, bf16>(cell, xa, 2, y.data());
  CHECK(to_f32(y[0]) == 19.0F);
  CHECK(to_f32(y[1]) == -7.75F);
}

TEST_CASE("the scale multiplies the rounded delta, not the accumulator") {
  // The sum is 1.0068359375; bf16 rounds it to 1.0078125 before the scale: 3.0234375 -> 3.03125, 0.755859375
  // -> 0.7578125.
  auto const x = of<bf16>({1});
  auto const a = of<bf16>({1, 1});
  auto const b = of<bf16>({1, 0.0068359375F});
  for (auto const& [scale, want] : {std::pair{3.0F, 3.03125F}, std::pair{0.75F, 0.7578125F}}) {
    RouteCell<bf16> const cell{a.data(), b.data(), nullptr, scale, 2, 2, 0};
    std::vector<bf16> xa(2);
    reference_shrink(cell, x.data(), 1, std::span<bf16>(xa));
    auto y = of<bf16>({0});
    reference_expand<bf16, bf16>(cell, xa, 1, y.data());
    CHECK(to_f32(y[0]) == want);
  }
}

TEST_CASE("the product is rounded before the sum, whatever the compiler may contract") {
  // scale * delta = (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, a tie that rounds to 1 + 2^-11; a fused sum with -(1 +
  // 2^-11) would give 2^-24.
  float const one = 1.0F + std::ldexp(1.0F, -12);
  float const a = 1.0F;
  float const x = 1.0F;
  RouteCell<float> const cell{&a, &one, nullptr, one, 1, 1, 0};
  std::vector<float> xa(1);
  reference_shrink(cell, &x, 1, std::span<float>(xa));
  float y = -(1.0F + std::ldexp(1.0F, -11));
  reference_expand<float, float>(cell, xa, 1, &y);
  CHECK(y == 0.0F);
}

TEST_CASE("float sums are fused multiply-adds in the order that contraction.hpp says") {
  std::uint32_t state = 1;
  for (std::int64_t const k_in : {1, 7, 32, 33, 100, 513, 4096}) {
    std::vector<float> w(static_cast<std::size_t>(k_in));
    std::vector<float> x(w.size());
    for (float& value : w) value = uniform(state);
    for (float& value : x) value = uniform(state);
    Contraction const cut(k_in);
    // The same order written the other way round: every k finds its own place.
    std::vector<float> lanes(static_cast<std::size_t>(max_segments * max_chunks * 4), 0.0F);
    std::vector<bool> used(static_cast<std::size_t>(max_segments * max_chunks), false);
    for (std::int64_t k = 0; k < k_in; ++k) {
      auto const block = static_cast<std::int32_t>(k / 32);
      std::int32_t const segment = block / cut.segment_blocks();
      std::int32_t const chunk = block % cut.segment_blocks() / cut.chunk_blocks();
      auto const place = static_cast<std::size_t>(segment * max_chunks + chunk);
      used[place] = true;
      float& lane = lanes[place * 4 + static_cast<std::size_t>(k % 32 / 8)];
      lane = std::fma(w[static_cast<std::size_t>(k)], x[static_cast<std::size_t>(k)], lane);
    }
    float sum = 0.0F;
    for (std::size_t s = 0; s < max_segments; ++s) {
      float segment = 0.0F;
      for (std::size_t c = 0; c < max_chunks; ++c) {
        std::size_t const place = s * max_chunks + c;
        if (!used[place]) continue;
        float const* const l = &lanes[place * 4];
        float const value = (l[0] + l[1]) + (l[2] + l[3]);
        segment = c == 0 ? value : segment + value;
      }
      if (used[s * max_chunks]) sum = s == 0 ? segment : sum + segment;
    }
    INFO("k_in " << k_in);
    CHECK(reference_contract(w.data(), x.data(), k_in) == sum);
  }
}

TEST_CASE_TEMPLATE("ranks of zero columns give equal values", T, float, __half, bf16) {
  // The same pair declared at its rank and at 64 with zero columns.
  std::uint32_t state = 5;
  std::int64_t const n_out = 24;
  std::vector<T> xa(64, from_f32<T>(0.0F));
  std::vector<T> narrow(static_cast<std::size_t>(n_out * 12));
  std::vector<T> padded(static_cast<std::size_t>(n_out * 64), from_f32<T>(0.0F));
  for (std::size_t j = 0; j < 12; ++j) xa[j] = from_f32<T>(uniform(state));
  for (std::size_t n = 0; n < static_cast<std::size_t>(n_out); ++n) {
    for (std::size_t j = 0; j < 12; ++j)
      narrow[n * 12 + j] = padded[n * 64 + j] = from_f32<T>(uniform(state));
  }
  std::vector<T> y(static_cast<std::size_t>(n_out), from_f32<T>(0.25F));
  std::vector<T> z = y;
  T const unused{};
  reference_expand<T, T>(RouteCell<T>{&unused, narrow.data(), nullptr, 1.5F, 12, 12, 0}, xa, n_out, y.data());
  reference_expand<T, T>(RouteCell<T>{&unused, padded.data(), nullptr, 1.5F, 64, 64, 0}, xa, n_out, z.data());
  for (std::size_t n = 0; n < y.size(); ++n) CHECK(to_f32(y[n]) == to_f32(z[n]));
}

TEST_CASE_TEMPLATE("rows without an adapter keep their bytes, and NaN in pads reaches nothing", T, float,
                   __half, bf16) {
  T const nan = from_f32<T>(std::numeric_limits<float>::quiet_NaN());
  std::vector<T> a(3 * 5 + 4, nan);
  std::vector<T> b(2 * 8, nan);
  for (std::size_t i = 0; i < 15; ++i) a[i] = from_f32<T>(1.0F);
  for (std::size_t n = 0; n < 2; ++n) {
    for (std::size_t j = 0; j < 3; ++j) b[n * 8 + j] = from_f32<T>(1.0F);
  }
  std::vector<RouteCell<T>> const cells{{a.data(), b.data(), nullptr, 1.0F, 3, 8, 0}, {}};
  RouteTable<T> const table{cells.data(), sizeof(RouteCell<T>), 2, 3, 5, 2};
  std::vector<T> x(6 * 7, nan);  // row stride 7
  std::vector<T> y(6 * 3, nan);  // row stride 3
  for (std::size_t r = 0; r < 6; ++r) {
    for (std::size_t k = 0; k < 5; ++k) x[r * 7 + k] = from_f32<T>(1.0F);
    for (std::size_t n = 0; n < 2; ++n) y[r * 3 + n] = from_f32<T>(0.5F);
  }
  std::vector<T> const before = y;
  std::vector<T> xa(3);
  std::vector<std::int32_t> const slots{0, -1, 1, 2, 1 << 30, std::numeric_limits<std::int32_t>::min()};
  reference_delta<T, T>(table, slots, x.data(), 7, y.data(), 3, std::span<T>(xa));
  CHECK(to_f32(y[0]) == 15.5F);  // 3 ranks of 5 ones each, plus 0.5
  CHECK(to_f32(y[1]) == 15.5F);
  CHECK(std::memcmp(y.data() + 2, before.data() + 2, (y.size() - 2) * sizeof(T)) == 0);
}

TEST_CASE("a bias is added last, before the rounding and the scale") {
  auto const x = of<bf16>({1});
  auto const a = of<bf16>({1});
  auto const b = of<bf16>({1});
  auto const bias = of<bf16>({0.0068359375F});
  RouteCell<bf16> const cell{a.data(), b.data(), bias.data(), 3.0F, 1, 1, 0};
  std::vector<bf16> xa(1);
  reference_shrink(cell, x.data(), 1, std::span<bf16>(xa));
  auto y = of<bf16>({0});
  reference_expand<bf16, bf16>(cell, xa, 1, y.data());
  CHECK(to_f32(y[0]) == 3.03125F);  // 3 * bf16(1.0068359375), rounded
}

}  // namespace
