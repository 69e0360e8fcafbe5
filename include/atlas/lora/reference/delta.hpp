// SPDX-License-Identifier: AGPL-3.0-only
//
// The routed delta on the CPU in plain loops: the same rounding points and the same order of sums as the
// kernels. For float its bits equal the kernels'. For 16-bit types the tensor cores' own rounding inside one
// product of 16 elements is not specified; here such a product is summed in f64 and rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Keeps the compiler from fusing `value` with what comes next, whatever it may contract
/// (-ffp-contract=fast). A build that lets it reorder sums (-ffast-math) has bits of its own.
inline float rounded(float value) noexcept {
  asm volatile("" : "+m"(value));
  return value;
}

/// `a * b + c`, rounded once. The builtin, because <cmath> brings its special functions into every unit.
inline float fused(float a, float b, float c) noexcept { return __builtin_fmaf(a, b, c); }

/// One chain over `blocks` of `w[k] * x[k]`, k below `k_end`, from zero.
template <Element T>
float chain(T const* w, T const* x, BlockRange blocks, std::int64_t k_end) noexcept {
  if constexpr (std::is_same_v<T, float>) {
    float lanes[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    for (std::int32_t block = blocks.first; block < blocks.last; ++block) {
      for (std::int32_t lane = 0; lane < 4; ++lane) {
        for (std::int32_t e = 0; e < pack_elements; ++e) {
          std::int64_t const k = k_of(block, lane, e);
          if (k < k_end) lanes[lane] = fused(w[k], x[k], lanes[lane]);
        }
      }
    }
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  } else {
    float sum = 0.0F;
    for (std::int32_t block = blocks.first; block < blocks.last; ++block) {
      for (std::int32_t half = 0; half < 2; ++half) {
        double products = static_cast<double>(sum);
        for (std::int32_t lane = 0; lane < 4; ++lane) {
          for (std::int32_t e = half * 4; e < half * 4 + 4; ++e) {
            std::int64_t const k = k_of(block, lane, e);
            if (k < k_end) products += static_cast<double>(to_f32(w[k])) * static_cast<double>(to_f32(x[k]));
          }
        }
        sum = static_cast<float>(products);
      }
    }
    return sum;
  }
}

}  // namespace detail

/// `sum_k w[k] * x[k]` over `k_in` elements in the library's order, in f32, not yet rounded to `T`.
template <Element T>
[[nodiscard]] float reference_contract(T const* w, T const* x, std::int64_t k_in) noexcept {
  Contraction const cut(k_in);
  float sum = 0.0F;
  for (std::int32_t s = 0; s < cut.segments(); ++s) {
    float segment = 0.0F;
    for (std::int32_t c = 0; c < cut.chunks(s); ++c) {
      float const chunk = detail::chain(w, x, cut.chunk(s, c), k_in);
      segment = c == 0 ? chunk : segment + chunk;
    }
    sum = s == 0 ? segment : sum + segment;
  }
  return sum;
}

/// The first half for one row: `xa[j] = T(sum_k x[k] * A[j, k])` for `j` below `cell.rank`.
template <Element T>
void reference_shrink(RouteCell<T> const& cell, T const* x, std::int64_t k_in, std::span<T> xa) noexcept {
  for (std::int32_t j = 0; j < cell.rank; ++j) {
    xa[static_cast<std::size_t>(j)] = from_f32<T>(reference_contract(cell.a + j * k_in, x, k_in));
  }
}

/// The second half for one row: `y[n] = Y(y[n] + scale * T(sum_j xa[j] * B[n, j] + bias[n]))`, the product
/// rounded to f32 before the sum.
template <Element T, Element Y>
void reference_expand(RouteCell<T> const& cell, std::span<T const> xa, std::int64_t n_out, Y* y) noexcept {
  BlockRange const all{0, rank_blocks(cell.rank)};
  for (std::int64_t n = 0; n < n_out; ++n) {
    float sum = detail::chain(cell.b + n * cell.b_row_stride, xa.data(), all, cell.rank);
    if (cell.bias != nullptr) sum = detail::rounded(sum) + to_f32(cell.bias[n]);
    float const delta = to_f32(from_f32<T>(sum));
    float const scaled = detail::rounded(cell.scale * delta);
    y[n] = from_f32<Y>(to_f32(y[n]) + scaled);
  }
}

/// `y[row] += scale * (x[row] @ A_s^T) @ B_s^T` for every row whose slot `s` adapts the module; all pointers,
/// the table's too, are host memory. `x` is `[rows, k_in]` and `y` `[rows, n_out]`, row strides in elements;
/// `row_slots` has one slot a row, negative or `>= table.max_slots` meaning base. `xa` is scratch of at least
/// `table.max_rank` elements. Rows that are base keep their bytes.
template <Element T, Element Y>
void reference_delta(RouteTable<T> const& table, std::span<std::int32_t const> row_slots, T const* x,
                     std::int64_t x_row_stride, Y* y, std::int64_t y_row_stride, std::span<T> xa) noexcept {
  if (table.cells == nullptr) return;
  for (std::size_t i = 0; i < row_slots.size(); ++i) {
    std::int32_t const slot = row_slots[i];
    if (slot < 0 || slot >= table.max_slots) continue;
    RouteCell<T> const& cell = *table.cell(slot);
    if (!cell.adapted()) continue;
    auto const row = static_cast<std::int64_t>(i);
    reference_shrink(cell, x + row * x_row_stride, table.k_in, xa);
    reference_expand<T, Y>(cell, xa, table.n_out, y + row * y_row_stride);
  }
}

}  // namespace atlas::lora::inline v0
