// SPDX-License-Identifier: AGPL-3.0-only
//
// The delta of many rows in one launch, for 16-bit types. A cluster works on one piece after another, up to
// 64 rows of a slot that read the slot's weights together: each of its blocks multiplies a share of the
// segments, folds a share of the row tiles, whose xa it gives to all blocks, and expands a share of the
// output tiles.
//
// What a warp multiplies goes from memory straight to its registers, always some blocks ahead; chunks fold
// there too. Between blocks there are two barriers a slab of ranks: before the first a block's segment sums
// are on their way to the blocks that fold them, before the second xa to all.
//   - A block writes sums of a slab after the second barrier of the one before, when all have folded it.
//   - A block writes xa after a first barrier, when all have expanded the piece before.
// So nothing needs two buffers, and no block writes to another after the last barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/prefill_expand.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/prefill_shared.cuh"
#include "atlas/lora/kernels/prefill_shrink.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Fills `piece` with the next one of this block's cluster that any projection adapts. `left` in shared
/// memory is the cluster's row tiles that no piece has had. One warp calls it, whole.
template <class Source, Element T, Element Y>
__device__ void find_piece(Piece<T>& piece, Share& left, Operands<T, Y> const& p, Source const& source) {
  Share tiles = left;
  bool found = false;
#pragma unroll 1
  while (!found && tiles.first < tiles.last) {
    tiles.first += source.load(piece, p, tiles.first, next_piece(tiles.size()));
    __syncwarp();
    found = piece.first_rank_tile[max_projections] > 0;
    __syncwarp();
  }
  if (lane_index() == 0) {
    left = tiles;
    piece.exists = found ? 1 : 0;
  }
  __syncwarp();
}

/// Asks for what the block will read of a piece's x and A, and of its B: rows of x and A a thread each.
template <Element T, Element Y>
__device__ void prefetch_piece(Piece<T> const& piece, Operands<T, Y> const& p) {
  if (piece.exists == 0 || piece.wide == 0 || !p.wide) return;
  auto const thread = static_cast<int>(threadIdx.x);
  Share const segments = p.shape.segments_of(p.shape.team[0], block_of(p));
  std::int32_t const segment_elements = p.shape.segment_blocks * block_elements;
  std::int32_t const k = segments.first * segment_elements;
  std::int32_t const count = min(static_cast<std::int32_t>(p.k_in), segments.last * segment_elements) - k;
  if (count <= 0) return;
  if (thread < piece_rows && piece.x_row[thread] >= 0)
    prefetch_elements(p.x + piece.x_row[thread] * p.x_row_stride + k, count);
#pragma unroll 1
  for (int i = 0; i < p.num_projections; ++i) {
    RouteCell<T> const& cell = piece.cell[i];
#pragma unroll 1
    for (std::int32_t j = thread - piece_rows; j < cell.rank; j += prefill_warps * warp_threads) {
      if (j >= 0) prefetch_elements(cell.a + static_cast<std::int64_t>(j) * p.k_in + k, count);
    }
  }
}

/// Asks for the block's share of a piece's B, a thread a projection.
template <Element T, Element Y>
__device__ void prefetch_b(Piece<T> const& piece, Operands<T, Y> const& p) {
  auto const i = static_cast<int>(prefill_warps * warp_threads - 1 - threadIdx.x);
  if (i >= p.num_projections || piece.exists == 0 || piece.wide == 0) return;
  RouteCell<T> const& cell = piece.cell[i];
  Share const own = p.shape.outputs_of(p.shape.team[0], block_of(p), 0, 1, i);
  std::int64_t const n = static_cast<std::int64_t>(own.first) * tile_outputs;
  std::int64_t const n_last =
      min(static_cast<std::int64_t>(own.last) * tile_outputs, p.projections[i].table.n_out);
  if (cell.rank > 0) prefetch_elements(cell.b + n * cell.b_row_stride, (n_last - n) * cell.b_row_stride);
}

/// The whole delta of many rows. The grid is a multiple of the cluster, whose size is `p.shape`'s.
template <Element T, Element Y, class Source>
__global__ void __launch_bounds__(prefill_warps* warp_threads, 2)
    prefill_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic[];
  PrefillShared<T> const shared(dynamic, p);
  if (!p.inputs_settled) enter();
  cluster_arrive_relaxed();
  Share& left = shared.left();
  if (warp_index() == prefill_warps - 1) {
    left = tiles_of_cluster(max(source.num_tiles(p), 0),
                            static_cast<std::int32_t>(gridDim.x) >> p.shape.team[0].log2,
                            static_cast<std::int32_t>(blockIdx.x) >> p.shape.team[0].log2);
    __syncwarp();
    find_piece(shared.piece(0), left, p, source);
  }
  PrefillShrink<Source, T, Y> shrink(p, shared);
  PrefillExpand<Source, T, Y> expand(p, shared);
  __syncthreads();
  prefetch_b(shared.piece(0), p);
  std::int32_t const slab_tiles = prefill_slab(p.segment_rank_tiles);
  // The next piece is found while warps may still be at the last one, so there are three.
  for (int current = 0; shared.piece(current).exists != 0;) {
    Piece<T> const& piece = shared.piece(current);
    current = current == PrefillHead<T>::pieces - 1 ? 0 : current + 1;
    Piece<T>& next = shared.piece(current);
    std::int32_t const all = piece.first_rank_tile[max_projections];
#pragma unroll 1
    for (std::int32_t slab = 0;; slab += slab_tiles) {
      std::int32_t const ranks = min(slab_tiles, all - slab);
      shrink.multiply(piece, slab, ranks);
      cluster_arrive();
      if (slab == 0 && warp_index() == prefill_warps - 1) find_piece(next, left, p, source);
      cluster_wait();
      shrink.fold(piece, slab, ranks);
      cluster_arrive();
      if (slab + ranks == all) break;
      cluster_wait();
    }
    // B and y of this warp's first output tile are on their way while xa crosses.
    typename PrefillExpand<Source, T, Y>::Output output;
    expand.begin(output, piece);
    cluster_wait();
    prefetch_piece(next, p);
    prefetch_b(next, p);
    expand.all(output, piece);
  }
  shrink.settle();
#endif
}

}  // namespace atlas::lora::inline v0::detail
