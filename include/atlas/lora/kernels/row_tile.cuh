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
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
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
  std::int32_t expected_slots = 0;
  bool wide = false;       ///< x, y and xa allow 16-byte accesses
  DeltaShape shape{};      ///< of the one-launch kernel
  PrefillShape prefill{};  ///< of the prefill kernel
};

/// What rows of one slot share, in shared memory.
template <Element T>
struct SlotCells {
  std::int32_t exists;
  std::int32_t wide;  ///< the weights allow 16-byte accesses
  RouteCell<T> cell[max_projections];
  std::int32_t first_rank_tile[max_projections + 1];  ///< prefix counts over the projections
};

/// A row tile in shared memory.
template <Element T>
struct RowTile : SlotCells<T> {
  std::int32_t divided;           ///< 1 where teams share its outputs; set by the one-launch kernel alone
  std::int32_t rows;              ///< up to the last that exists
  std::int32_t row[tile_rows];    ///< row of y, or -1 for none
  std::int32_t x_row[tile_rows];  ///< row of x; -1 exactly where `row` is
};

/// Neighbouring row tiles of one slot in shared memory.
template <Element T>
struct alignas(16) Piece : SlotCells<T> {
  std::int32_t tiles;
  alignas(16) std::uint64_t y_row[piece_rows];  ///< address of a projection's row of y, 0 for none
  std::int32_t row[piece_rows];                 ///< row of y, or -1 for none
  std::int32_t x_row[piece_rows];               ///< row of x; -1 exactly where `row` is
};

/// A row tile's place in shared memory, which takes no initialised type.
template <Element T>
struct alignas(16) RowTileBytes {
  unsigned char bytes[sizeof(RowTile<T>)];
};

/// Fills the rows: lane i of the first `tile_rows` has row i of y and of x, or -1 for both. One warp calls
/// it, whole.
template <Element T>
__device__ void set_rows(RowTile<T>& tile, std::int32_t row, std::int32_t x_row) {
  int const lane = lane_index();
  unsigned const exist = __ballot_sync(0xffffffffu, lane < tile_rows && row >= 0);
  if (lane < tile_rows) {
    tile.row[lane] = row;
    tile.x_row[lane] = x_row;
  }
  if (lane == 0) tile.rows = 32 - __clz(static_cast<int>(exist));
}

/// Fills the cells and what follows from them. One warp calls it, whole: lane i has projection i's cell,
/// lanes beyond the projections an empty one.
template <Element T, Element Y>
__device__ void describe(SlotCells<T>& tile, Operands<T, Y> const& p, RouteCell<T> cell) {
  int const lane = thread_here() % warp_threads;
  // A rank beyond the table's would not fit what was sized by it; such a cell does nothing.
  bool const adapts =
      lane < p.num_projections && cell.adapted() && cell.rank <= p.projections[lane].table.max_rank;
  if (!adapts) cell.rank = 0;
  auto const addresses = reinterpret_cast<std::uintptr_t>(cell.a) | reinterpret_cast<std::uintptr_t>(cell.b);
  bool const wide = !adapts || (addresses % 16 == 0 && cell.b_row_stride % pack_elements == 0);
  bool const all_wide = __all_sync(0xffffffffu, wide) != 0 && p.k_in % pack_elements == 0;
  std::int32_t first = 0;
  std::int32_t const tiles = (cell.rank + tile_ranks - 1) / tile_ranks;
#pragma unroll
  for (int i = 0; i < max_projections; ++i) {
    std::int32_t const before = __shfl_sync(0xffffffffu, tiles, i);
    if (i < lane) first += before;
  }
  if (lane < max_projections) tile.cell[lane] = cell;
  if (lane <= max_projections) tile.first_rank_tile[lane] = first;
  if (lane == 0) tile.wide = all_wide ? 1 : 0;
}

/// Leaves a row tile to one projection alone. The warp that filled it calls it, whole.
template <Element T, Element Y>
__device__ void keep_projection(RowTile<T>& tile, Operands<T, Y> const& p, int projection) {
  __syncwarp();
  if (tile.exists == 0) return;
  RouteCell<T> cell;
  if (lane_index() == projection) cell = tile.cell[projection];
  __syncwarp();
  describe(tile, p, cell);
}

/// A cell, by three 16-byte loads.
template <Element T>
__device__ inline RouteCell<T> load_cell(RouteCell<T> const* from) {
  auto const* const vectors = reinterpret_cast<ulonglong2 const*>(from);
  ulonglong2 const pointers = vectors[0];
  ulonglong2 const middle = vectors[1];
  ulonglong2 const end = vectors[2];
  RouteCell<T> cell;
  cell.a = reinterpret_cast<T const*>(pointers.x);
  cell.b = reinterpret_cast<T const*>(pointers.y);
  cell.bias = reinterpret_cast<T const*>(middle.x);
  cell.scale = __uint_as_float(static_cast<std::uint32_t>(middle.y));
  cell.rank = static_cast<std::int32_t>(middle.y >> 32);
  cell.b_row_stride = static_cast<std::int32_t>(static_cast<std::uint32_t>(end.x));
  return cell;
}

/// Lanes before the first for which `condition` does not hold. A whole warp calls it.
__device__ inline std::int32_t leading_lanes(bool condition) {
  return __ffs(static_cast<int>(~__ballot_sync(0xffffffffu, condition))) - 1;
}

/// Row tiles from a plan and the projections' tables.
struct PlanSource {
  static constexpr std::int32_t static_rank = dynamic_rank;
  static constexpr bool one_pair = false;

  /// Row tiles that a launch can find, as the host knows it.
  template <Element T, Element Y>
  std::int32_t most_tiles(Operands<T, Y> const& p) const noexcept {
    return p.plan.max_tiles;
  }

  /// Row tiles that exist; a plan that says nonsense may say more or fewer, but none beyond its capacity.
  template <Element T, Element Y>
  __device__ std::int32_t num_tiles(Operands<T, Y> const& p) const {
    return min(p.plan.header->num_tiles, p.plan.max_tiles);
  }

  /// Fills `tile` with the `index`-th row tile. One warp calls it, whole.
  template <Element T, Element Y>
  __device__ void load(RowTile<T>& tile, Operands<T, Y> const& p, std::int32_t index) const {
    int const lane = lane_index();
    RowPlan const& plan = p.plan;
    RowGroup rows{base_slot, 0, 0, 0};
    if (index < plan.max_tiles) {
      int4 const words = *reinterpret_cast<int4 const*>(plan.tiles + index);
      rows = RowGroup{words.x, words.y, words.z, 0};
    }
    if (lane == 0) tile.exists = rows.count > 0 ? 1 : 0;
    if (rows.count <= 0) return;
    RouteCell<T> cell;
    if (lane < p.num_projections) {
      RouteTable<T> const& table = p.projections[lane].table;
      bool const within = rows.slot >= 0 && rows.slot < table.max_slots && table.cells != nullptr;
      if (within) cell = load_cell(table.cell(rows.slot));
    }
    bool const within =
        lane < min(rows.count, tile_rows) && rows.first >= 0 && rows.first < plan.capacity_rows - lane;
    std::int32_t row = within ? plan.rows[rows.first + lane] : -1;
    if (row >= p.rows || row < 0) row = -1;
    set_rows(tile, row, row);
    describe(tile, p, cell);
  }

  /// Fills `piece` with the row tiles from the `first`-th on that are of its slot, at most `most` of them,
  /// and says how many they are, at least one. One warp calls it, whole.
  template <Element T, Element Y>
  __device__ std::int32_t load(Piece<T>& piece, Operands<T, Y> const& p, std::int32_t first,
                               std::int32_t most) const {
    int const lane = thread_here() % warp_threads;
    RowPlan const& plan = p.plan;
    RowGroup rows{base_slot, 0, 0, 0};
    if (lane < most && first + lane < plan.max_tiles) {
      int4 const words = *reinterpret_cast<int4 const*>(plan.tiles + first + lane);
      rows = RowGroup{words.x, words.y, words.z, 0};
    }
    std::int32_t const slot = __shfl_sync(0xffffffffu, rows.slot, 0);
    std::int32_t const tiles = leading_lanes(lane < most && rows.slot == slot && rows.count > 0);
    RouteCell<T> cell;
    if (lane < p.num_projections) {
      RouteTable<T> const& table = p.projections[lane].table;
      bool const within = slot >= 0 && slot < table.max_slots && table.cells != nullptr;
      if (within) cell = load_cell(table.cell(slot));
    }
    // Whole warps, since lanes read each other's tiles.
#pragma unroll
    for (int i = lane; i < lane + piece_rows; i += warp_threads) {
      std::int32_t const begin = __shfl_sync(0xffffffffu, rows.first, i / tile_rows);
      std::int32_t const count = __shfl_sync(0xffffffffu, rows.count, i / tile_rows);
      bool const exists = i < tiles * tile_rows && i % tile_rows < count;
      bool const within = exists && begin >= 0 && begin < plan.capacity_rows - i % tile_rows;
      std::int32_t const row = within ? plan.rows[begin + i % tile_rows] : -1;
      if (i < piece_rows) piece.x_row[i] = piece.row[i] = row >= 0 && row < p.rows ? row : -1;
    }
    if (lane == 0) piece.tiles = tiles;
    describe(piece, p, tiles > 0 ? cell : RouteCell<T>{});
    return max(tiles, 1);
  }
};

/// Row tiles of rows in order, all of one pair.
template <Element T, std::int32_t Rank>
struct PairSource {
  static constexpr std::int32_t static_rank = Rank;
  static constexpr bool one_pair = true;
  RouteCell<T> cell;

  /// As of a `PlanSource`.
  template <Element Y>
  std::int32_t most_tiles(Operands<T, Y> const& p) const noexcept {
    return row_tiles(p.rows);
  }
  /// As of a `PlanSource`.
  template <Element Y>
  __device__ std::int32_t num_tiles(Operands<T, Y> const& p) const {
    return row_tiles(p.rows);
  }
  /// As of a `PlanSource`.
  template <Element Y>
  __device__ void load(RowTile<T>& tile, Operands<T, Y> const& p, std::int32_t index) const {
    int const lane = lane_index();
    std::int64_t const at = static_cast<std::int64_t>(index) * tile_rows + lane;
    auto const row = at < p.rows ? static_cast<std::int32_t>(at) : -1;
    set_rows(tile, row, row);
    describe(tile, p, lane == 0 ? cell : RouteCell<T>{});
    if (lane == 0) tile.exists = index < row_tiles(p.rows) ? 1 : 0;
  }
  /// As of a `PlanSource`.
  template <Element Y>
  __device__ std::int32_t load(Piece<T>& piece, Operands<T, Y> const& p, std::int32_t first,
                               std::int32_t most) const {
    int const lane = thread_here() % warp_threads;
#pragma unroll 1
    for (int i = lane; i < piece_rows; i += warp_threads) {
      std::int64_t const row = static_cast<std::int64_t>(first) * tile_rows + i;
      bool const within = i < most * tile_rows && row < p.rows;
      piece.x_row[i] = piece.row[i] = within ? static_cast<std::int32_t>(row) : -1;
    }
    if (lane == 0) piece.tiles = most;
    describe(piece, p, lane == 0 ? cell : RouteCell<T>{});
    return most;
  }
};

/// A projection's rank, a constant where the source knows it.
template <class Source, Element T>
__device__ inline std::int32_t rank_of(SlotCells<T> const& tile, int projection) {
  if constexpr (Source::static_rank > 0) {
    return tile.cell[projection].rank == 0 ? 0 : Source::static_rank;
  } else {
    return tile.cell[projection].rank;
  }
}

/// The projection that rank tile `index` of a row tile belongs to; the last one where it does not exist.
template <Element T>
__device__ inline int projection_of(SlotCells<T> const& tile, std::int32_t index) {
  int projection = 0;
  while (projection + 1 < max_projections && index >= tile.first_rank_tile[projection + 1]) ++projection;
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
