// SPDX-License-Identifier: AGPL-3.0-only
//
// The delta's operands from the public parameters: checked, and what follows from them filled in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta_params.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/route/row_plan.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

template <class T>
bool aligned(T const* pointer, std::int64_t stride) noexcept {
  auto const address = reinterpret_cast<std::uintptr_t>(pointer);
  return address % 16 == 0 && stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

/// Whether a table's fields are such that kernels can read through it.
template <Element T>
bool usable(RouteTable<T> const& table) noexcept {
  constexpr std::int64_t widest = std::int64_t{1} << 30;
  bool const cells =
      reinterpret_cast<std::uintptr_t>(table.cells) % 16 == 0 && table.cell_stride_bytes % 16 == 0;
  return cells && table.cell_stride_bytes >= static_cast<std::int64_t>(sizeof(RouteCell<T>)) &&
         table.max_slots >= 0 && table.max_rank >= 0 && table.k_in >= 1 && table.n_out >= 1 &&
         table.k_in <= widest && table.n_out <= widest;
}

/// Whether a plan can be read for `rows` rows.
inline bool usable(RowPlan const& plan, std::int32_t rows) noexcept {
  return plan.header != nullptr && plan.tiles != nullptr && plan.rows != nullptr &&
         rows <= plan.capacity_rows;
}

/// Checks the projections and fills what is derived from them.
template <Element T, Element Y>
bool complete(Operands<T, Y>& p, bool reads_x, bool writes_y) noexcept {
  if (p.num_projections < 1 || p.num_projections > max_projections || p.rows < 0) return false;
  p.k_in = p.projections[0].table.k_in;
  p.wide = !reads_x || (aligned(p.x, p.x_row_stride) && p.k_in % pack_elements == 0);
  if (reads_x && (p.x == nullptr || p.x_row_stride < p.k_in)) return false;
  std::int32_t width = 0;
  for (std::int32_t i = 0; i < p.num_projections; ++i) {
    DeltaProjection<T, Y> const& projection = p.projections[i];
    if (!usable(projection.table) || projection.table.k_in != p.k_in) return false;
    if (writes_y) {
      if (projection.y == nullptr || projection.y_row_stride < projection.table.n_out) return false;
      p.wide = p.wide && aligned(projection.y, projection.y_row_stride);
    }
    width += static_cast<std::int32_t>(round_up(projection.table.max_rank, block_elements));
    p.segment_rank_tiles += rank_tiles(projection.table.max_rank);
  }
  p.xa_shared_stride = shared_stride(width, sizeof(T));
  return true;
}

/// Takes what every launch over a row plan says.
template <Element T, Element Y, class Params>
void take_rows(Operands<T, Y>& p, Params const& params) noexcept {
  p.rows = params.rows;
  p.plan = params.plan;
  p.num_projections = params.num_projections;
  p.inputs_settled = params.inputs_settled;
}

template <Element T, Element Y>
bool complete(Operands<T, Y>& p, DeltaParams<T, Y> const& params) noexcept {
  take_rows(p, params);
  p.x = params.x;
  p.x_row_stride = params.x_row_stride;
  p.expected_slots = params.expected_slots;
  std::copy(params.projections, params.projections + max_projections, p.projections);
  return complete(p, true, true) && usable(p.plan, p.rows);
}

/// Whether no cell of the launch can adapt anything.
template <Element T, Element Y>
bool idle(Operands<T, Y> const& p) noexcept {
  return p.rows == 0 || p.segment_rank_tiles == 0;
}

}  // namespace atlas::lora::inline v0::detail
