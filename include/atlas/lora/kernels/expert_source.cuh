// SPDX-License-Identifier: AGPL-3.0-only
//
// Row tiles of the experts' delta: a group of the plan is a tile. To everything behind it, an expert's linear
// is a slot's linear, and a row of x is not the row of y.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/pool/pair.hpp"
#include "atlas/lora/route/expert_plan.hpp"
#include "atlas/lora/route/expert_rows.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

/// Row tiles from an expert plan and the projections' tables.
template <Element T>
struct ExpertSource {
  static constexpr std::int32_t static_rank = dynamic_rank;
  ExpertPlan plan;
  ExpertInput input;
  ExpertTable<T> tables[max_projections];

  /// Row tiles that exist.
  template <Element Y>
  __device__ std::int32_t num_tiles(Operands<T, Y> const&) const {
    return min(plan.header->num_groups, plan.max_groups);
  }

  /// Fills `tile` with the `index`-th group. One warp calls it, whole.
  template <Element Y>
  __device__ void load(RowTile<T>& tile, Operands<T, Y> const& p, std::int32_t index) const {
    int const lane = lane_index();
    // The group is read beside the header; one that does not exist is read and dropped.
    ExpertGroup const& group = plan.groups[min(index, plan.max_groups - 1)];
    bool const exists = index < num_tiles(p);
    if (lane == 0) tile.exists = exists ? 1 : 0;
    RouteCell<T> cell;
    if (exists && lane < p.num_projections) cell = tables[lane].find(group.slot, group.expert);
    std::int32_t const row = lane < tile_rows ? group.row[lane] : -1;
    bool const inside = exists && lane < group.count && row >= 0 && row < p.rows;
    std::int32_t const x_row = inside ? input.x_row(row) : -1;
    set_rows(tile, x_row >= 0 ? row : -1, x_row);
    describe(tile, p, cell);
  }
};

}  // namespace atlas::lora::inline v0::detail
