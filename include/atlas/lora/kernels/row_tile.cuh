// SPDX-License-Identifier: AGPL-3.0-only
//
// One row tile: up to eight rows of one slot, the slot's cells and where their ranks lie. A block finds it
// from the plan, or from one pair for all rows, and keeps it in shared memory while it works on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta_params.hpp"
#include "atlas/lora/kernels/delta_stages.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/pool/pair.hpp"
#include "atlas/lora/route/row_plan.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

/// What every kernel of the delta takes: the public parameters of the whole and split forms in one.
template <Element T, Element Y>
struct Operands {
  T const* x = nullptr;
  std::int64_t x_row_stride = 0;
  std::int64_t k_in = 0;
  RowPlan plan{};
  DeltaProjection<T, Y> projections[max_projections]{};
  std::int32_t num_projections = 0;
  std::int32_t rows = 0;
  std::int32_t parts = 1;             ///< blocks that share a row tile where no cluster does
  std::int32_t xa_shared_stride = 0;  ///< elements between rows of xa in shared memory
  T* xa = nullptr;                    ///< the split form's scratch
  std::int64_t xa_row_stride = 0;
  float4* segments = nullptr;           ///< the two-launch form's scratch of segment sums
  std::int32_t segment_rank_tiles = 0;  ///< rank tiles that `segments` holds per segment
  bool inputs_settled = false;
  bool wide = false;   ///< x, y and xa allow 16-byte accesses
  DeltaShape shape{};  ///< of the one-launch kernel
};

/// A row tile in shared memory.
template <Element T>
struct RowTile {
  std::int32_t exists;
  std::int32_t wide;              ///< the weights allow 16-byte accesses
  std::int32_t row[tile_rows];    ///< row of y, or -1 for none
  std::int32_t x_row[tile_rows];  ///< row of x; -1 exactly where `row` is
  RouteCell<T> cell[max_projections];
  std::int32_t first_rank_tile[max_projections + 1];  ///< prefix counts over the projections
};

/// Fills what follows from the cells. One thread calls it.
template <Element T, Element Y>
__device__ void describe(RowTile<T>& tile, Operands<T, Y> const& p) {
  bool wide = p.k_in % pack_elements == 0;
  std::int32_t first = 0;
  for (int i = 0; i < max_projections; ++i) {
    tile.first_rank_tile[i] = first;
    if (i >= p.num_projections) continue;
    RouteCell<T>& cell = tile.cell[i];
    // A rank beyond the table's would not fit what was sized by it; such a cell does nothing.
    if (!cell.adapted() || cell.rank > p.projections[i].table.max_rank) cell.rank = 0;
    if (cell.rank == 0) continue;
    first += rank_tiles(cell.rank);
    auto const addresses =
        reinterpret_cast<std::uintptr_t>(cell.a) | reinterpret_cast<std::uintptr_t>(cell.b);
    wide = wide && addresses % 16 == 0 && cell.b_row_stride % pack_elements == 0;
  }
  tile.first_rank_tile[max_projections] = first;
  tile.wide = wide ? 1 : 0;
}

/// Row tiles from a plan and the projections' tables: the plan's groups in order, eight rows a tile.
struct PlanSource {
  static constexpr std::int32_t static_rank = dynamic_rank;

  /// Fills `tile` with the `index`-th row tile. One warp calls it, whole.
  template <Element T, Element Y>
  __device__ void load(RowTile<T>& tile, Operands<T, Y> const& p, std::int32_t index) const {
    int const lane = lane_index();
    RowPlan const& plan = p.plan;
    // The first groups are read beside the header: groups that do not occur have no rows.
    RowGroup mine = lane < plan.max_groups ? plan.groups[lane] : RowGroup{};
    std::int32_t const groups = min(max(plan.header->num_groups, 0), plan.max_groups);
    std::int32_t before = 0;
    RowGroup found{-1, 0, 0, 0};
    bool exists = false;
    for (std::int32_t first = 0; first < groups && !exists; first += warp_threads) {
      if (first > 0) mine = first + lane < groups ? plan.groups[first + lane] : RowGroup{};
      mine.first = min(max(mine.first, 0), plan.capacity_rows);
      mine.count = first + lane < groups ? min(max(mine.count, 0), plan.capacity_rows - mine.first) : 0;
      std::int32_t last = row_tiles(mine.count);
      for (int step = 1; step < warp_threads; step *= 2) {
        std::int32_t const other = __shfl_up_sync(0xffffffffu, last, step);
        if (lane >= step) last += other;
      }
      last += before;
      unsigned const beyond = __ballot_sync(0xffffffffu, index < last);
      before = __shfl_sync(0xffffffffu, last, warp_threads - 1);
      if (beyond == 0) continue;
      int const owner = __ffs(static_cast<int>(beyond)) - 1;
      std::int32_t const offset = (index - (last - row_tiles(mine.count))) * tile_rows;
      found.slot = __shfl_sync(0xffffffffu, mine.slot, owner);
      found.first = __shfl_sync(0xffffffffu, mine.first + offset, owner);
      found.count = __shfl_sync(0xffffffffu, mine.count - offset, owner);
      exists = true;
    }
    if (exists) fill(tile, p, found);
    if (lane == 0) tile.exists = exists ? 1 : 0;
  }

 private:
  template <Element T, Element Y>
  __device__ static void fill(RowTile<T>& tile, Operands<T, Y> const& p, RowGroup const& group) {
    int const lane = lane_index();
    if (lane < tile_rows) {
      std::int32_t const row = lane < group.count ? p.plan.rows[group.first + lane] : -1;
      tile.x_row[lane] = tile.row[lane] = row >= 0 && row < p.rows ? row : -1;
    } else if (lane < tile_rows + p.num_projections) {
      int const i = lane - tile_rows;
      RouteTable<T> const& table = p.projections[i].table;
      bool const within = group.slot >= 0 && group.slot < table.max_slots && table.cells != nullptr;
      tile.cell[i] = within ? *table.cell(group.slot) : RouteCell<T>{};
    }
    __syncwarp();
    if (lane == 0) describe(tile, p);
  }
};

/// Row tiles of rows in order, all of one pair.
template <Element T, std::int32_t Rank>
struct PairSource {
  static constexpr std::int32_t static_rank = Rank;
  RouteCell<T> cell;

  template <Element Y>
  __device__ void load(RowTile<T>& tile, Operands<T, Y> const& p, std::int32_t index) const {
    int const lane = lane_index();
    if (lane < tile_rows) {
      std::int64_t const row = static_cast<std::int64_t>(index) * tile_rows + lane;
      tile.x_row[lane] = tile.row[lane] = row < p.rows ? static_cast<std::int32_t>(row) : -1;
    }
    if (lane == 0) {
      tile.cell[0] = cell;
      tile.exists = index < row_tiles(p.rows) ? 1 : 0;
      describe(tile, p);
    }
  }
};

/// A projection's rank, a constant where the source knows it.
template <class Source, Element T>
__device__ inline std::int32_t rank_of(RowTile<T> const& tile, int projection) {
  if constexpr (Source::static_rank > 0) {
    return tile.cell[projection].rank == 0 ? 0 : Source::static_rank;
  } else {
    return tile.cell[projection].rank;
  }
}

/// The projection that rank tile `index` of a row tile belongs to.
template <Element T>
__device__ inline int projection_of(RowTile<T> const& tile, std::int32_t index) {
  int projection = 0;
#pragma unroll
  for (int i = 1; i < max_projections; ++i) {
    if (index >= tile.first_rank_tile[i]) projection = i;
  }
  return projection;
}

/// Where projection `index` begins in a row of xa in shared memory, in elements: whole blocks, so that a
/// chain never crosses into the next projection.
template <Element T, Element Y>
ATLAS_HD inline std::int32_t xa_shared_offset(Operands<T, Y> const& p, int index) {
  std::int32_t offset = 0;
  for (int i = 0; i < index; ++i) {
    offset += static_cast<std::int32_t>(round_up(p.projections[i].table.max_rank, block_elements));
  }
  return offset;
}

/// Where projection `index` begins in a row of the split form's xa, in elements.
template <Element T, Element Y>
__device__ inline std::int64_t xa_scratch_offset(Operands<T, Y> const& p, int index) {
  std::int64_t offset = 0;
  for (int i = 0; i < index; ++i) offset += xa_projection_width(p.projections[i].table.max_rank);
  return offset;
}

}  // namespace atlas::lora::inline v0::detail
