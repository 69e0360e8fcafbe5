// SPDX-License-Identifier: AGPL-3.0-only
//
// The experts' delta on the CPU in plain loops, row by row; rounding and order of sums as in delta.hpp. A
// router needs no function of its own: `reference_delta` with the router's table, on logits of either type.
#pragma once

#include <cstdint>
#include <span>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/reference/delta.hpp"
#include "atlas/lora/route/expert_rows.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// `y[row] += scale * (x[input.x_row(row)] @ A^T) @ B^T` for every row whose slot adapts its expert's linear,
/// sorted or not. All pointers, the table's too, are host memory. `x` is `[x_rows, k_in]` and `y` has a row
/// for every row of `rows`; row strides in elements. `xa` is scratch of at least `table.max_rank` elements.
/// All other rows keep their bytes.
template <Element T, Element Y>
void reference_expert_delta(ExpertTable<T> const& table, ExpertRows const& rows, ExpertInput const& input,
                            T const* x, std::int64_t x_row_stride, Y* y, std::int64_t y_row_stride,
                            std::span<T> xa) noexcept {
  for (std::int32_t i = 0; i < rows.rows; ++i) {
    std::int32_t const row = rows.first_row + i;
    std::int32_t const x_row = input.x_row(row);
    RouteCell<T> const cell = table.find(rows.slot(row), rows.expert(row, table.num_experts));
    if (x_row < 0 || !cell.adapted()) continue;
    reference_shrink(cell, x + x_row * x_row_stride, table.k_in, xa);
    reference_expand<T, Y>(cell, xa, table.n_out, y + row * y_row_stride);
  }
}

}  // namespace atlas::lora::inline v0
