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
  static constexpr bool one_pair = false;
  ExpertPlan plan;
  ExpertInput input;
  ExpertTable<T> tables[max_projections];

  /// As of a `PlanSource`.
  template <Element Y>
  std::int32_t most_tiles(Operands<T, Y> const&) const noexcept {
    return plan.max_groups;
  }
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

  /// As of a `PlanSource`: groups of one slot and expert.
  template <Element Y>
  __device__ std::int32_t load(Piece<T>& piece, Operands<T, Y> const& p, std::int32_t first,
                               std::int32_t most) const {
    int const lane = thread_here() % warp_threads;
    int4 words = make_int4(base_slot, -1, 0, 0);
    if (lane < most) words = *reinterpret_cast<int4 const*>(plan.groups + first + lane);
    std::int32_t const slot = __shfl_sync(0xffffffffu, words.x, 0);
    std::int32_t const expert = __shfl_sync(0xffffffffu, words.y, 0);
    std::int32_t const tiles =
        leading_lanes(lane < most && words.x == slot && words.y == expert && words.z > 0);
    RouteCell<T> cell;
    if (tiles > 0 && lane < p.num_projections) cell = tables[lane].find(slot, expert);
      // Whole warps, since lanes read each other's tiles.
#pragma unroll
    for (int i = lane; i < lane + piece_rows; i += warp_threads) {
      std::int32_t const count = __shfl_sync(0xffffffffu, words.z, i / tile_rows);
      bool const exists = i < tiles * tile_rows && i % tile_rows < count;
      std::int32_t const row = exists ? plan.groups[first + i / tile_rows].row[i % tile_rows] : -1;
      std::int32_t const x_row = row >= 0 && row < p.rows ? input.x_row(row) : -1;
      if (i < piece_rows) {
        piece.x_row[i] = x_row;
        piece.row[i] = x_row >= 0 ? row : -1;
      }
    }
    if (lane == 0) piece.tiles = tiles;
    describe(piece, p, cell);
    return max(tiles, 1);
  }
};

}  // namespace atlas::lora::inline v0::detail
