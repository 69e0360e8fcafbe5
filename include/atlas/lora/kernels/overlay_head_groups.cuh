// SPDX-License-Identifier: AGPL-3.0-only
//
// What blocks of the head's recompute know of a step: the plan's groups, up to 32 at a time, with each slot's
// own rows of the head and the items that its product is cut into; and where results go.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"
#include "atlas/lora/kernels/ptx.cuh"

namespace atlas::lora::inline v0::detail {

/// Most row tiles of a streamed item. Float's sums live in registers of many lanes, which bound it.
template <Element T>
inline constexpr int stream_tiles = sizeof(T) == 2 ? 8 : 1;
/// Most row tiles of a spread item of a team of `Cluster` blocks: a block alone holds x of all segments.
template <int Cluster, Element T>
inline constexpr int most_down_tiles = sizeof(T) == 2 && Cluster > 1 ? 4 : 1;
/// What a team of `Cluster` blocks can hold.
template <int Cluster, Element T>
inline constexpr HeadForm head_form{most_down_tiles<Cluster, T>, stream_tiles<T>* head_tile_rows};

/// What the head's kernel takes.
template <Element T, Element Y>
struct HeadOperands {
  OverlayHeadParams<T, Y> params;
  bool wide = false;             ///< x and the width of a row allow 16-byte loads
  std::int32_t slice_packs = 0;  ///< packs of a slice of x that streams, a multiple of `stream_slice_unit`
};

/// One group of the plan and its slot's own rows of the head.
template <Element T>
struct HeadGroup {
  T const* weights;
  std::int32_t const* ids;
  std::int32_t overrides;
  std::int32_t first_row;  ///< index into the plan's rows
  std::int32_t rows;
  std::int32_t wide;  ///< the weights allow 16-byte loads, and so does x
  HeadWork work;
};

/// Up to 32 groups in shared memory, and how many items they and those before them have.
template <Element T>
struct HeadBatch {
  HeadGroup<T> group[warp_threads];
  std::int32_t spread_end[warp_threads];
  std::int32_t streamed_end[warp_threads];
  std::int32_t last;      ///< whether no group follows
  std::int32_t rows[64];  ///< of the block's item, -1 for none
  Barrier full;           ///< the segment sums of an item that the block folds are there

  /// The group of spread item `item`, below `spread_end[31]`. The whole warp calls it.
  __device__ int spread_group(std::int32_t item) const { return count_up_to(spread_end, item); }
  __device__ int streamed_group(std::int32_t item) const { return count_up_to(streamed_end, item); }

 private:
  __device__ static int count_up_to(std::int32_t const* ends, std::int32_t item) {
    return __popc(__ballot_sync(0xffffffffu, ends[lane_index()] <= item));
  }
};

/// Bytes of a batch. It lies at the head of dynamic shared memory: static memory would take from what other
/// kernels that are prepared beside this one may use.
template <Element T>
inline constexpr std::size_t head_batch_bytes = (sizeof(HeadBatch<T>) + 127) / 128 * 128;

__device__ inline std::int32_t scan_warp(std::int32_t value) {
  for (int step = 1; step < warp_threads; step *= 2) {
    std::int32_t const other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane_index() >= step) value += other;
  }
  return value;
}

/// Loads the groups from `first` on. One warp calls it, whole.
template <int Cluster, Element T, Element Y>
__device__ void load_head_groups(HeadBatch<T>& batch, HeadOperands<T, Y> const& p, std::int32_t first,
                                 std::int32_t teams) {
  RowPlan const& plan = p.params.plan;
  OverlayTable<T> const& table = p.params.table;
  std::int32_t const index = first + lane_index();
  // Groups are read beside the header: those that do not occur have no rows.
  RowGroup mine = index < plan.max_groups ? plan.groups[index] : RowGroup{};
  std::int32_t const groups = min(max(plan.header->num_groups, 0), plan.max_groups);
  if (index >= groups) mine = RowGroup{};
  mine.first = min(max(mine.first, 0), plan.capacity_rows);
  mine.count = min(max(mine.count, 0), plan.capacity_rows - mine.first);
  OverlayCell<T> cell{};
  bool const within = mine.count > 0 && mine.slot >= 0 && mine.slot < table.max_slots;
  if (within) cell = *table.cell(mine.slot);
  // More rows than the table's largest would not fit what was sized by it; such a cell does nothing.
  bool const heads = cell.heads() && cell.head_count <= table.max_head_count;
  HeadWork const work =
      head_work(heads ? cell.head_count : 0, mine.count, groups, teams, head_form<Cluster, T>);
  bool const wide = p.wide && reinterpret_cast<std::uintptr_t>(cell.head_rows) % 16 == 0;
  batch.group[lane_index()] = HeadGroup<T>{
      cell.head_rows, cell.head_ids, cell.head_count, mine.first, mine.count, wide ? 1 : 0, work};
  batch.spread_end[lane_index()] = scan_warp(work.streamed ? 0 : work.items());
  batch.streamed_end[lane_index()] = scan_warp(work.streamed ? work.items() : 0);
  if (lane_index() == 0) batch.last = first + warp_threads >= groups ? 1 : 0;
}

/// The row of x and logits that is row `index` of a group; -1 for none.
template <Element T, Element Y>
__device__ inline std::int32_t head_row(HeadOperands<T, Y> const& p, HeadGroup<T> const& group,
                                        std::int32_t index) {
  if (index >= group.rows) return -1;
  std::int32_t const row = p.params.plan.rows[group.first_row + index];
  return row >= 0 && row < p.params.rows ? row : -1;
}

/// Reads the rows of the item that begins at row `first` of a group into shared memory, -1 beyond them. The
/// whole block calls it.
template <Element T, Element Y>
__device__ inline void find_item_rows(HeadBatch<T>& batch, HeadOperands<T, Y> const& p,
                                      HeadGroup<T> const& group_of, std::int32_t first) {
  auto const thread = static_cast<int>(threadIdx.x);
  if (thread < group_of.work.item_rows) batch.rows[thread] = head_row(p, group_of, first + thread);
}

/// Where the four values of a lane's accumulator go: the logits of its weight rows, the rows of its columns;
/// negative for nowhere.
struct HeadTarget {
  std::int32_t id[2];
  std::int32_t row[2];
};

/// The logits of override rows `first + group()` and 8 further on.
template <Element T, Element Y>
__device__ inline void find_ids(HeadTarget& target, HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of,
                                std::int32_t first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::int32_t const j = first + half * tile_batch_rows + group();
    std::int32_t const id = j < group_of.overrides ? group_of.ids[j] : -1;
    target.id[half] = id < p.params.table.vocab ? id : -1;
  }
}
/// The rows of a row tile, from those of an item.
__device__ inline void take_rows(HeadTarget& target, std::int32_t const* rows, int tile) {
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    target.row[column] = rows[tile * tile_batch_rows + 2 * quad() + column];
  }
}

/// Rounds a lane's sums and writes them.
template <Element T, Element Y>
__device__ inline void write_logits(HeadOperands<T, Y> const& p, HeadTarget const& target,
                                    float4 const& sum) {
  float const value[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      if (target.id[half] < 0 || target.row[column] < 0) continue;
      p.params.logits[target.row[column] * p.params.logits_row_stride + target.id[half]] =
          round_to<Y>(value[half][column]);
    }
  }
}

}  // namespace atlas::lora::inline v0::detail
