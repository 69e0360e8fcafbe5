// SPDX-License-Identifier: AGPL-3.0-only
//
// How a warp of the head's kernel multiplies where both overrides and batch rows are many: its weights come
// through a ring of shared memory of its own. Registers hold sums alone then, and what is under way does not
// depend on how far the products are. For 16-bit types; the order of sums is contraction.hpp's.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_head_walk.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"

namespace atlas::lora::inline v0::detail {

/// Override tiles of a warp that walks by a ring.
inline constexpr int ring_up = 2;
/// Steps that a ring holds.
inline constexpr int ring_stages = 3;
/// Blocks of k of a step: one chunk of the shortest, and a whole line of memory of every override row.
inline constexpr int ring_blocks = min_chunk_blocks;
/// Packs of an override row in a step.
inline constexpr int ring_row_packs = ring_blocks * block_elements / pack_elements;
/// Packs of a warp's step.
inline constexpr int ring_stage_packs = ring_up * head_tile_overrides * ring_row_packs;
/// Bytes of the rings of a block's warps, in 16 bits.
inline constexpr std::size_t ring_bytes = std::size_t{16} * head_warps * ring_stages * ring_stage_packs;
/// Bytes of one of the two slices of x beside them: of at least so many steps as a ring holds.
inline constexpr std::size_t ring_slice_bytes = std::size_t{32} << 10;

/// Whether all steps of a contraction are whole chunks of it, each of one segment.
__device__ inline bool whole_steps(Contraction const& cut) {
  return cut.chunk_blocks() == ring_blocks && cut.segment_blocks() % ring_blocks == 0 &&
         cut.blocks() % ring_blocks == 0;
}

/// A warp's walk over all of k: `ring_up` tiles of override rows by `Tiles` row tiles. `Whole` promises
/// `whole_steps`.
template <bool Whole, int Tiles, Element T>
class RingWalk {
 public:
  /// Float4 values of its sums: `[override tile][row tile][vector]`.
  static constexpr int sums = ring_up * Tiles * tile_vectors<T>;

  /// A walk along override rows from `first_override` on; those that do not exist are zero. `ring` is this
  /// warp's, `ring_stages * ring_stage_packs`.
  __device__ RingWalk(HeadGroup<T> const& group_of, std::int64_t const& hidden, std::int32_t first_override,
                      Contraction const& cut, Pack<T>* ring)
      : hidden_(hidden),
        left_(static_cast<std::int32_t>(hidden) - lane_index() % ring_row_packs * pack_elements),
        cut_(cut),
        to_(ring + place(lane_index() / ring_row_packs, lane_index() % ring_row_packs)),
        read_(ring + place(group(), quad())) {
    std::int32_t const row = lane_index() / ring_row_packs;
    rows_ = group_of.overrides - first_override - row;
    from_ = group_of.weights + (rows_ > 0 ? first_override + row : 0) * hidden +
            lane_index() % ring_row_packs * pack_elements;
    segment_end_ = min(cut.segment_blocks(), cut.blocks());
    chunk_end_ = min(cut.chunk_blocks(), segment_end_);
#pragma unroll
    for (int c = 0; c < sums; ++c) segment_[c] = fold_start();
  }

  /// Copies the weights of the step after the last that was asked for, zeroes behind the end, to the stage
  /// that was multiplied last, and goes on to the next stage. All lanes have read what was there.
  __device__ void ask() {
    constexpr int rows_at_once = warp_threads / ring_row_packs;
    T const* from = from_;
#pragma unroll
    for (int i = 0; i < ring_up * head_tile_overrides / rows_at_once; ++i) {
      copy_line_part(to_ + stage_ + i * rows_at_once * ring_row_packs, from,
                     left_ > 0 && i * rows_at_once < rows_);
      from += rows_at_once * hidden_;
    }
    from_ += ring_blocks * block_elements;
    left_ -= ring_blocks * block_elements;
    stage_ = stage_ == (ring_stages - 1) * ring_stage_packs ? 0 : stage_ + ring_stage_packs;
  }

  /// Multiplies the stage's step, whose weights have come for all lanes. `x` is ordered shared memory,
  /// `[block][row tile]`. `fold(c, sum)` is told every segment's sums.
  template <class Fold>
  __device__ void multiply(Pack<T> const* x, Fold const& fold) {
    if constexpr (Whole) {
      TileSum<T> chunk[ring_up * Tiles];
#pragma unroll
      for (int i = 0; i < ring_blocks; ++i) multiply_block(chunk, i, x + i * Tiles * tile_packs<T>);
      fold_chunks(segment_, chunk);
      next_ += ring_blocks;
      if (next_ == segment_end_) end_segment(fold);
    } else {
#pragma unroll
      for (int i = 0; i < ring_blocks; ++i) {
        if (next_ == cut_.blocks()) break;
        multiply_block(chunk_, i, x + i * Tiles * tile_packs<T>);
        ++next_;
        if (next_ == chunk_end_) end_chunk(fold);
      }
    }
  }

 private:
  /// Where pack `pack` of row `row` of a step lies: eight lanes that read two rows at once meet no bank
  /// twice.
  __device__ static int place(int row, int pack) {
    return row * ring_row_packs + (pack ^ row % 2 * (ring_row_packs / 2));
  }
  __device__ void multiply_block(TileSum<T> (&chunk)[ring_up * Tiles], int i, Pack<T> const* x) {
    // The second block lies behind the first, or before it where `place` made them change places.
    static_assert(ring_blocks == 2);
    Pack<T> const* const from = read_ + stage_ + (i == 0 ? 0 : group() % 2 == 0 ? 4 : -4);
    Pack<T> weights[2 * ring_up];
#pragma unroll
    for (int r = 0; r < 2 * ring_up; ++r) weights[r] = read_pack(from + r * tile_batch_rows * ring_row_packs);
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      Pack<T> pack[tile_vectors<T>];
#pragma unroll
      for (int v = 0; v < tile_vectors<T>; ++v) {
        pack[v] = read_pack(x + t * tile_packs<T> + v * warp_threads + lane_index());
      }
#pragma unroll
      for (int u = 0; u < ring_up; ++u) chunk[u * Tiles + t].add(weights[2 * u], weights[2 * u + 1], pack);
    }
  }
  template <class Fold>
  __device__ void end_chunk(Fold const& fold) {
    fold_chunks(segment_, chunk_);
#pragma unroll
    for (int c = 0; c < ring_up * Tiles; ++c) chunk_[c] = TileSum<T>();
    if (chunk_end_ == segment_end_) end_segment(fold);
    chunk_end_ = min(chunk_end_ + cut_.chunk_blocks(), segment_end_);
  }
  template <class Fold>
  __device__ void end_segment(Fold const& fold) {
#pragma unroll
    for (int c = 0; c < sums; ++c) {
      fold(c, segment_[c]);
      segment_[c] = fold_start();
    }
    segment_end_ = min(segment_end_ + cut_.segment_blocks(), cut_.blocks());
  }

  T const* from_;  ///< this lane's pack of its first override row, where it is asked for next
  std::int64_t const& hidden_;
  std::int32_t rows_;      ///< override rows from this lane's first on
  std::int32_t left_;      ///< elements of a row from this lane's next on
  std::int32_t next_ = 0;  ///< block
  std::int32_t segment_end_;
  std::int32_t chunk_end_;
  Contraction const& cut_;
  Pack<T>* to_;             ///< where this lane's first pack of stage 0 goes
  Pack<T> const* read_;     ///< where its first operand of stage 0 lies
  std::int32_t stage_ = 0;  ///< packs before the stage that is multiplied and asked for next
  TileSum<T> chunk_[ring_up * Tiles];
  float4 segment_[sums];
};

}  // namespace atlas::lora::inline v0::detail
