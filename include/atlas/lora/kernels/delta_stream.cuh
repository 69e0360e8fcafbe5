// SPDX-License-Identifier: AGPL-3.0-only
//
// What a warp of the one-launch delta reads: stages of weights and of x or y in shared memory, in the order
// in which the warp multiplies them, some of them always on their way. The stream goes on over the border of
// shrink and expand and into the next row tile, so that memory is busy while blocks wait for each other.
// Each lane fetches what it alone will read, so that no lane waits for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/delta_stage.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The stream of one warp.
///
/// Weight rows and batch rows do not mix in a product, so what stands in a row that does not exist (ranks
/// beyond the true one, batch rows of a short tile) is some row that does, or what was there before,
/// multiplied and never used. Along a contraction everything beyond the extent is zeroed on both operands.
///
/// Few warps hide little latency, so every instruction between the launch's dependencies and the first output
/// counts: what can be worked out before is.
template <class Source, int Warps, bool Splits, Element T, Element Y>
class DeltaStream {
 public:
  __device__ DeltaStream(Operands<T, Y> const& p, DeltaShared<Warps, T> const& shared)
      : p_(p), shared_(shared), warp_(warp_index()) {
    ring_bytes_ = static_cast<std::uint32_t>(p.shape.stages) * stage_bytes<T>;
    stage_ =
        shared_address(shared.stages) + static_cast<std::uint32_t>(warp_) * ring_bytes_ + lane_index() * 16;
    end_of_stages_ = stage_ + ring_bytes_;
  }

  /// Asks for the weights of the first stages of the window's row tiles from `index` on; their x and y are
  /// asked for by `settle`.
  __device__ void begin(int index) {
    own_ = p_.shape.segments_of(team(), static_cast<int>(blockIdx.x) & ((1 << team().log2) - 1));
    index_ = index;
    filled_ = 0;
#pragma unroll 1
    while (seek_tile()) {
#pragma unroll 1
      while (seek_task()) {
        bool through = false;
#pragma unroll 1
        while (!through) {
          if (filled_ == p_.shape.stages) return;
          through = issue_shrink<true>(stage_of(filled_));
          ++filled_;
        }
      }
      seek_expand();
#pragma unroll 1
      while (seek_outputs()) {
        bool through = false;
#pragma unroll 1
        while (!through) {
          if (filled_ == p_.shape.stages) return;
          through = issue_expand<true>(stage_of(filled_));
          ++filled_;
        }
      }
      ++index_;
    }
  }
  /// Waits for the launch's dependencies and for the cluster's blocks to have started.
  __device__ void enter_launch() const {
    cluster_wait();
    if (p_.inputs_settled) wait_for_dependencies();
  }
  /// Asks for x and y of the first stages and waits for all of them: at the first call when the launch's
  /// dependencies are complete and the cluster's blocks have started.
  __device__ void settle(bool first) {
    if (first) enter_launch();
#pragma unroll 1
    for (int i = 0; i < filled_; ++i) take_noted(stage_of(i));
    commit_copies();
    wait_copies<0>();
  }

  /// Waits for the next stage and gives its address, as of this lane.
  __device__ std::uint32_t next() const {
    wait_copies<most_delta_stages - 1>();
    return stage_;
  }
  /// Asks for what comes next into the stage that `next` gave, which has been read.
  __device__ void refill() {
    bool through = false;
    if (phase_ == Phase::shrink) {
      through = issue_shrink<false>(stage_);
    } else if (phase_ == Phase::expand) {
      through = issue_expand<false>(stage_);
    }
    commit_copies();
    // Groups for the stages that there could be, so that `next` always waits for the same number.
    if (p_.shape.stages < most_delta_stages) {
      commit_copies();
      if (p_.shape.stages < most_delta_stages - 1) commit_copies();
    }
    stage_ = stage_of(1);
    if (through) seek();
  }
  /// Pack `index` of a stage: of weights 0 to 3, of x 4 and 5.
  __device__ static Pack<T> pack(std::uint32_t stage, int index) {
    return load_stage_pack<T>(stage + static_cast<std::uint32_t>(index) * pack_bytes);
  }
  /// The pack of y of a stage.
  __device__ static Pack<Y> y(std::uint32_t stage) { return load_stage_pack<Y>(stage + activations); }

  /// The block's segments.
  [[nodiscard]] __device__ Share own_segments() const { return own_; }
  /// The shape of the block's team.
  [[nodiscard]] __device__ TeamShape const& team() const {
    if constexpr (Splits) return shared_.head->team;
    return p_.shape.team[0];
  }
  /// The block's output tiles of a projection of a row tile: first and last.
  [[nodiscard]] __device__ int2 own_outputs(RowTile<T> const& tile, int projection) const {
    return shared_.head->own[tile.divided][projection];
  }

 private:
  /// Bytes from a pack of T of a stage to the next.
  static constexpr std::uint32_t pack_bytes = Pack<T>::words / 4 * stage_vector_bytes;
  static constexpr std::uint32_t activations = 4 * pack_bytes;
  static_assert(sizeof(Pack<Y>) <= 2 * sizeof(Pack<T>));
  static_assert(most_delta_stages == 3);
  /// Elements that are left where none is missing; no contraction is longer.
  static constexpr std::int32_t all_inside = std::int32_t{1} << 30;

  enum class Phase : std::int32_t { none, shrink, expand };

  /// The `i`-th stage after the one that is read next.
  [[nodiscard]] __device__ std::uint32_t stage_of(int i) const {
    std::uint32_t const stage = stage_ + static_cast<std::uint32_t>(i) * stage_bytes<T>;
    return stage >= end_of_stages_ ? stage - ring_bytes_ : stage;
  }

  // --- Where the stream is -------------------------------------------------------------------------------

  /// Goes to what the warp multiplies next: a task of the slab or of the next slab, the output tiles of a
  /// projection, the next row tile.
  __device__ void seek() {
#pragma unroll 1
    while (true) {
      if (phase_ == Phase::shrink) {
        if (seek_task()) return;
        seek_expand();
      }
      if (phase_ == Phase::expand) {
        if (seek_outputs()) return;
        ++index_;
      }
      if (!seek_tile()) return;
    }
  }
  /// Goes to the first row tile from `index_` on that has a rank; false where the window has none.
  __device__ bool seek_tile() {
    int const end = shared_.head->window_end;
    phase_ = Phase::none;
    std::int32_t all = 0;
#pragma unroll 1
    for (; index_ < end; ++index_) {
      RowTile<T> const& tile = shared_.tile(index_);
      all = tile.exists != 0 ? tile.first_rank_tile[max_projections] : -1;
      if (all != 0) break;
    }
    if (index_ >= end || all < 0) return false;
    slab_ = 0;
    task_ = warp_;
    phase_ = Phase::shrink;
    return true;
  }
  __device__ void seek_expand() {
    phase_ = Phase::expand;
    projection_ = -1;
  }
  /// Goes to task `task_` of the slab, or to the warp's first one of a later slab; false where the row tile
  /// has none.
  __device__ bool seek_task() {
    RowTile<T> const& tile = shared_.tile(index_);
    std::int32_t const all = tile.first_rank_tile[max_projections];
#pragma unroll 1
    while (slab_ < all) {
      ShrinkTasks const& tasks = team().tasks[min(p_.shape.slab, all - slab_) - 1];
      if (task_ < tasks.count(own_.size())) {
        ShrinkTask const task = p_.shape.task_of(tasks, own_.first, task_);
        task_ += Warps;
        if (task.blocks.size() == 0) continue;
        begin_task(tile, slab_ + task.rank_tile, task.blocks);
        return true;
      }
      slab_ += p_.shape.slab;
      task_ = warp_;
    }
    return false;
  }
  __device__ void begin_task(RowTile<T> const& tile, std::int32_t rank_tile, BlockRange blocks) {
    int const projection = p_.num_projections == 1 ? 0 : projection_of(tile, rank_tile);
    // Ranks beyond the true one multiply the last one's weights and are never used.
    std::int32_t const last = rank_of<Source>(tile, projection) - 1;
    std::int32_t const first = p_.num_projections == 1 ? 0 : tile.first_rank_tile[projection];
    std::int32_t const j = (rank_tile - first) * tile_ranks + group();
    std::int32_t const k = blocks.first * block_elements + quad() * pack_elements;
    auto const k_in = static_cast<std::int32_t>(p_.k_in);
    T const* const a = tile.cell[projection].a + k;
    low_ = a + static_cast<std::int64_t>(min(j, last)) * k_in;
    high_ = a + static_cast<std::int64_t>(min(j + tile_batch_rows, last)) * k_in;
    // A row that does not exist is the tile's first, so that no memory is read for it.
    std::int32_t const row = tile.x_row[group()];
    active_ = p_.x + max(row < 0 ? tile.x_row[0] : row, 0) * p_.x_row_stride + k;
    at_ = blocks.first;
    end_ = blocks.last;
    chunk_end_ = min(at_ + p_.shape.chunk_blocks, end_);
    whole_ = tile.wide != 0 && p_.wide && end_ * block_elements <= k_in;
  }
  /// Goes to the warp's output tiles of the next projection; false where the row tile has none.
  __device__ bool seek_outputs() {
    RowTile<T> const& tile = shared_.tile(index_);
#pragma unroll 1
    while (++projection_ < p_.num_projections) {
      RouteCell<T> const& cell = tile.cell[projection_];
      int2 const own = own_outputs(tile, projection_);
      at_ = own.x + warp_;
      end_ = own.y;
      rank_ = rank_of<Source>(tile, projection_);
      if (rank_ == 0 || at_ >= end_) continue;
      std::int64_t const n = static_cast<std::int64_t>(at_) * tile_outputs;
      b_row_stride_ = cell.b_row_stride;
      low_ = cell.b + (n + output_of(lane_index(), 0)) * b_row_stride_ + quad() * pack_elements;
      DeltaProjection<T, Y> const& target = p_.projections[projection_];
      std::int32_t const row = tile.row[group()];
      active_ = row < 0 ? nullptr : target.y + row * target.y_row_stride + n + quad() * pack_elements;
      chunk_end_ = 0;
      whole_ =
          tile.wide != 0 && p_.wide && end_ * tile_outputs <= static_cast<std::int32_t>(target.table.n_out);
      return true;
    }
    return false;
  }

  // --- Fetching ------------------------------------------------------------------------------------------

  // `Note` leaves x and y for later, as a note where they will be.

  /// Asks for the next stage of the task; whether it was the last one.
  template <bool Note>
  __device__ bool issue_shrink(std::uint32_t stage) {
    bool const second = at_ + 1 < chunk_end_;
    std::int32_t const blocks = second ? 2 : 1;
    auto const* const x = static_cast<T const*>(active_);
    std::int32_t left = all_inside;
    if (whole_) {
      copy_whole_pack(stage, low_);
      copy_whole_pack(stage + pack_bytes, high_);
      if (second) {
        copy_whole_pack(stage + 2 * pack_bytes, low_ + block_elements);
        copy_whole_pack(stage + 3 * pack_bytes, high_ + block_elements);
      }
      if constexpr (!Note) {
        copy_whole_pack(stage + activations, x);
        if (second) copy_whole_pack(stage + activations + pack_bytes, x + block_elements);
      }
    } else {
      bool const wide = shared_.tile(index_).wide != 0;
      left = static_cast<std::int32_t>(p_.k_in) - at_ * block_elements - quad() * pack_elements;
      copy_stage_packs(stage, low_, high_ - low_, 2, 2, left, wide);
      if (second) {
        copy_stage_packs(stage + 2 * pack_bytes, low_ + block_elements, high_ - low_, 2, 2,
                         left - block_elements, wide);
      }
      if constexpr (!Note) take(stage, x, left, blocks);
    }
    if constexpr (Note) note(stage, x, left, blocks, false);
    at_ += blocks;
    low_ += blocks * block_elements;
    high_ += blocks * block_elements;
    active_ = x + blocks * block_elements;
    if (at_ < chunk_end_) return false;
    chunk_end_ = min(at_ + p_.shape.chunk_blocks, end_);
    return at_ == end_;
  }

  /// Asks for the next stage of the projection; whether it was the last one.
  template <bool Note>
  __device__ bool issue_expand(std::uint32_t stage) {
    std::int32_t const j = chunk_end_ * block_elements;
    std::int32_t const j_left = rank_ - j - quad() * pack_elements;
    bool const last = j + block_elements >= rank_;
    auto const* const y = static_cast<Y const*>(active_);
    std::int32_t y_left = all_inside;
    if (whole_) {
#pragma unroll
      for (int m = 0; m < 4; ++m)
        copy_stage_pack(stage + m * pack_bytes, low_ + 2 * m * static_cast<std::int64_t>(b_row_stride_) + j,
                        j_left, true);
      if constexpr (!Note) {
        if (last && y != nullptr) copy_whole_pack(stage + activations, y);
      }
    } else {
      std::int32_t const n_left =
          static_cast<std::int32_t>(p_.projections[projection_].table.n_out) - at_ * tile_outputs;
      y_left = n_left - quad() * pack_elements;
      int const inside = max(n_left - output_of(lane_index(), 0) + 1, 0) / 2;
      copy_stage_packs(stage, low_ + j, 2 * static_cast<std::int64_t>(b_row_stride_), 4, inside, j_left,
                       shared_.tile(index_).wide != 0);
      if constexpr (!Note) {
        if (last && y != nullptr) take(stage, y, y_left, 1);
      }
    }
    if constexpr (Note) note(stage, y, y_left, last && y != nullptr ? 1 : 0, true);
    ++chunk_end_;
    if (!last) return false;
    chunk_end_ = 0;
    low_ += Warps * tile_outputs * static_cast<std::int64_t>(b_row_stride_);
    if (y != nullptr) active_ = y + Warps * tile_outputs;
    at_ += Warps;
    return at_ >= end_;
  }

  /// Notes `packs` packs of x, which are a block apart, or of y for `settle`; `left` elements are inside from
  /// the first one on.
  __device__ static void note(std::uint32_t stage, void const* from, std::int32_t left, int packs,
                              bool of_y) {
    auto const address = reinterpret_cast<std::uintptr_t>(from);
    store_shared(
        stage + activations,
        make_uint4(static_cast<std::uint32_t>(address), static_cast<std::uint32_t>(address >> 32),
                   static_cast<std::uint32_t>(left), static_cast<std::uint32_t>(packs) | (of_y ? 4u : 0u)));
  }
  /// Asks for what was noted.
  __device__ void take_noted(std::uint32_t stage) const {
    uint4 const note = load_shared(stage + activations);
    std::uintptr_t const address = note.x | static_cast<std::uintptr_t>(note.y) << 32;
    auto const left = static_cast<std::int32_t>(note.z);
    auto const packs = static_cast<int>(note.w & 3u);
    if (packs == 0) return;
    if ((note.w & 4u) == 0 || std::is_same_v<T, Y>) {
      take(stage, reinterpret_cast<T const*>(address), left, packs);
    } else {
      take(stage, reinterpret_cast<Y const*>(address), left, packs);
    }
  }
  /// Asks for `packs` packs of x, which are a block apart, or of y.
  template <Element Z>
  __device__ void take(std::uint32_t stage, Z const* from, std::int32_t left, int packs) const {
    std::uint32_t const to = stage + activations;
    if (p_.wide && left == all_inside) {
      copy_whole_pack(to, from);
      if (packs == 2) copy_whole_pack(to + pack_bytes, from + block_elements);
      return;
    }
    bool const wide = p_.wide && (left >= pack_elements || left <= 0);
    copy_stage_packs(to, from, 0, 1, 1, left, wide);
    if (packs == 2)
      copy_stage_packs(to + pack_bytes, from + block_elements, 0, 1, 1, left - block_elements, wide);
  }

  Operands<T, Y> const& p_;
  DeltaShared<Warps, T> const& shared_;
  int warp_;
  Share own_;            ///< the block's segments
  std::uint32_t stage_;  ///< shared address of the stage that is read next, as of this lane
  std::uint32_t end_of_stages_;
  std::uint32_t ring_bytes_;  ///< of all stages
  int filled_ = 0;            ///< stages that `begin` filled

  // What is asked for next.
  Phase phase_ = Phase::none;
  bool whole_ = false;             ///< all of it is aligned and inside
  int index_ = 0;                  ///< of the row tile in the window
  std::int32_t slab_ = 0;          ///< the slab's first rank tile
  std::int32_t task_ = 0;          ///< of the slab, the warp's next
  int projection_ = 0;             ///< in the expand
  std::int32_t rank_ = 0;          ///< the projection's
  std::int32_t b_row_stride_ = 0;  ///< the projection's
  std::int32_t at_ = 0;            ///< block of k; output tile
  std::int32_t chunk_end_ = 0;     ///< end of the chunk in blocks of k; block of the rank
  std::int32_t end_ = 0;           ///< end of the task in blocks of k; of the block's output tiles
  T const* low_ = nullptr;         ///< this lane's pack of its first row of A; of B, of rank 0
  T const* high_ = nullptr;        ///< its pack of its second row of A
  void const* active_ = nullptr;   ///< its pack of x; of y, null for none
};

}  // namespace atlas::lora::inline v0::detail
