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

/// Batch rows of a tile of 16 override rows. In 16 bits x is the 16-row operand of the product and the
/// weights are its columns, whose packs are operands as they come from memory.
template <Element T>
inline constexpr int head_tile_rows = sizeof(T) == 2 ? 16 : 8;
/// Float4 values that a lane holds of a tile's sums.
template <Element T>
inline constexpr int tile_vectors = head_tile_rows<T> / 8;
/// Most row tiles of a streamed item. Float's sums live in registers of many lanes, which bound it.
template <Element T>
inline constexpr int stream_tiles = sizeof(T) == 2 ? 4 : 1;
/// Most tiles of a spread item of a team of `Cluster` blocks, along the overrides and along the batch rows. A
/// block alone holds the sums of all of them and x of more segments.
template <int Cluster>
inline constexpr int most_across_tiles = Cluster > 1 ? 4 : 2;
template <int Cluster, Element T>
inline constexpr int most_down_tiles = sizeof(T) == 2 && Cluster > 1 ? 2 : 1;
/// What a team of `Cluster` blocks can hold.
template <int Cluster, Element T>
inline constexpr HeadForm head_form{head_tile_rows<T>, most_across_tiles<Cluster>,
                                    most_down_tiles<Cluster, T>, stream_tiles<T>* head_tile_rows<T>};

/// What the head's kernel takes.
template <Element T, Element Y>
struct HeadOperands {
  OverlayHeadParams<T, Y> params;
  bool wide = false;                       ///< x and the width of a row allow 16-byte loads
  Contraction cut;                         ///< of the width of a row; here, where it takes no registers
  std::int32_t segments = cut.segments();  ///< kept, since finding them takes a division
  std::int32_t slice_packs = 0;  ///< packs of a slice of x that streams, a multiple of `stream_slice_unit`
  bool rings = false;            ///< shared memory has room for rings of weights
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
  std::int32_t first;          ///< of these groups in the plan
  std::int32_t next_spread;    ///< the block's first item of these groups
  std::int32_t next_streamed;  ///< likewise
  std::int32_t last;           ///< whether no group follows
  std::int32_t ids[64];        ///< of the block's spread item, -1 for none
  std::int32_t rows[64];       ///< of the block's item, -1 for none
  std::uint32_t phase;         ///< of `full` that the block's last item completed or completes
  Barrier full;                ///< the segment sums of an item that the block folds are there

  /// The group of spread item `item`, below `spread_end[31]`. The whole warp calls it.
  __device__ int spread_group(std::int32_t item) const { return count_up_to(spread_end, item); }
  __device__ int streamed_group(std::int32_t item) const { return count_up_to(streamed_end, item); }
  /// Finds the block's first items in the groups that come next, before those are loaded: items of all groups
  /// are dealt in turn. Kept here, where it takes no registers. One thread calls it.
  __device__ void find_next(bool more, std::int32_t team, std::int32_t teams, std::int32_t blocks) {
    first = more ? first + warp_threads : 0;
    next_spread = more ? next_of(next_spread, spread_end[warp_threads - 1], teams) : team;
    next_streamed = more ? next_of(next_streamed, streamed_end[warp_threads - 1], blocks)
                         : static_cast<std::int32_t>(blockIdx.x);
  }

 private:
  /// The first of `item`, `item + step`, ... that is not below `end`, counted from there.
  __device__ static std::int32_t next_of(std::int32_t item, std::int32_t end, std::int32_t step) {
    if (item >= end) return item - end;
    return item + parts_of(end - item, step) * step - end;
  }
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

/// Loads the groups from `batch.first` on. One warp calls it, whole.
template <int Cluster, Element T, Element Y>
__device__ void load_head_groups(HeadBatch<T>& batch, HeadOperands<T, Y> const& p, std::int32_t teams) {
  RowPlan const& plan = p.params.plan;
  OverlayTable<T> const& table = p.params.table;
  std::int32_t const index = batch.first + lane_index();
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
  if (lane_index() == 0) batch.last = batch.first + warp_threads >= groups ? 1 : 0;
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
/// The logit of override row `j` of a group; -1 for none.
template <Element T, Element Y>
__device__ inline std::int32_t head_id(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of,
                                       std::int32_t j) {
  std::int32_t const id = j < group_of.overrides ? group_of.ids[j] : -1;
  return id < p.params.table.vocab ? id : -1;
}
/// Likewise the ids of a spread item from override row `first` on, by threads that `find_item_rows` leaves.
template <Element T, Element Y>
__device__ inline void find_item_ids(HeadBatch<T>& batch, HeadOperands<T, Y> const& p,
                                     HeadGroup<T> const& group_of, std::int32_t first) {
  auto const thread = static_cast<int>(threadIdx.x) - 64;
  if (thread >= 0 && thread < group_of.work.item_overrides) {
    batch.ids[thread] = head_id(p, group_of, first + thread);
  }
}

/// Where one of a lane's float4 values of a tile's sums goes: to the logits `id` of the rows `row`; negative
/// for nowhere. In 16 bits x and y are of the first row, z and w of the second, and x and z of the first id;
/// in float it is the other way round.
struct HeadTarget {
  std::int32_t id[2];
  std::int32_t row[2];
};

/// The override row of a tile that `HeadTarget::id[i]` of vector `vector` is of.
template <Element T>
__device__ inline int tile_override(int vector, int i) {
  return sizeof(T) == 2 ? vector * 8 + 2 * quad() + i : i * tile_batch_rows + group();
}
/// The logits of vector `vector` of tile `tile`, from those of an item.
template <Element T>
__device__ inline void take_ids(HeadTarget& target, std::int32_t const* ids, int tile, int vector) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    target.id[i] = ids[tile * head_tile_overrides + tile_override<T>(vector, i)];
  }
}
/// The rows of row tile `tile`, from those of an item.
template <Element T>
__device__ inline void take_rows(HeadTarget& target, std::int32_t const* rows, int tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const local = sizeof(T) == 2 ? group() + i * tile_batch_rows : 2 * quad() + i;
    target.row[i] = rows[tile * head_tile_rows<T> + local];
  }
}

/// Rounds a lane's sums and writes them.
template <Element T, Element Y>
__device__ inline void write_logits(HeadOperands<T, Y> const& p, HeadTarget const& target,
                                    float4 const& sum) {
  float const value[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (target.id[i] < 0 || target.row[r] < 0) continue;
      p.params.logits[target.row[r] * p.params.logits_row_stride + target.id[i]] =
          round_to<Y>(sizeof(T) == 2 ? value[r][i] : value[i][r]);
    }
  }
}

}  // namespace atlas::lora::inline v0::detail
