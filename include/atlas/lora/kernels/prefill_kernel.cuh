// SPDX-License-Identifier: AGPL-3.0-only
//
// The delta of many rows in one launch, for 16-bit types. A cluster works on one piece after another, up to
// 80 rows of a slot that read the slot's weights together: each of its blocks multiplies a share of the
// segments, folds a share of the sums, whose xa it gives to all blocks, and expands a share of the output
// tiles.
//
// x and weights go from memory straight to registers, always some blocks ahead; chunks fold there too. y
// comes through shared memory, several groups of rows ahead, each lane's own. Between blocks there are two
// barriers a slab of ranks: before the first a block's segment sums are on their way to the blocks that fold
// them, before the second xa to all.
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

/// The block's part of k: first and last.
template <Element T, Element Y>
__device__ Share inputs_of(Operands<T, Y> const& p) {
  Share const segments = p.shape.segments_of(p.shape.team[0], block_of(p));
  std::int32_t const segment_elements = p.shape.segment_blocks * block_elements;
  auto const k_in = static_cast<std::int32_t>(p.k_in);
  return {min(k_in, segments.first * segment_elements), min(k_in, segments.last * segment_elements)};
}

/// Asks for what the block will read of a piece's x, a warp a row.
template <Element T, Element Y>
__device__ void prefetch_x(Piece<T> const& piece, Operands<T, Y> const& p) {
  if (piece.exists == 0) return;
  Share const k = inputs_of(p);
#pragma unroll 1
  for (int row = warp_index(); row < piece.tiles * tile_rows; row += prefill_warps) {
    if (piece.x_row[row] >= 0) prefetch_elements(p.x + piece.x_row[row] * p.x_row_stride + k.first, k.size());
  }
}

/// Asks for what it will read of its A and B, a warp a row of A.
template <Element T, Element Y>
__device__ void prefetch_weights(Piece<T> const& piece, Operands<T, Y> const& p) {
  if (piece.exists == 0) return;
  Share const k = inputs_of(p);
#pragma unroll 1
  for (int i = 0; i < p.num_projections; ++i) {
    RouteCell<T> const& cell = piece.cell[i];
    if (cell.rank == 0) continue;
#pragma unroll 1
    for (std::int32_t j = warp_index(); j < cell.rank; j += prefill_warps)
      prefetch_elements(cell.a + static_cast<std::int64_t>(j) * p.k_in + k.first, k.size());
    Share const own = p.shape.outputs_of(p.shape.team[0], block_of(p), 0, 1, i);
    // Each warp has its output tiles' rows.
#pragma unroll 1
    for (std::int32_t t = own.first + warp_index(); t < own.last; t += prefill_warps) {
      std::int64_t const n = static_cast<std::int64_t>(t) * tile_outputs;
      std::int64_t const outputs = min(std::int64_t{tile_outputs}, p.projections[i].table.n_out - n);
      prefetch_elements(cell.b + n * cell.b_row_stride, outputs * cell.b_row_stride);
    }
  }
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
  // Weights do not depend on the launches before; by the time these end they are in L2.
  prefetch_weights(shared.piece(0), p);
  cluster_wait();
  if (p.inputs_settled) enter();
  std::int32_t const slab_tiles = prefill_slab(p.segment_rank_tiles);
  // The next piece is found while warps may still be at the last one, so there are three.
  for (int at = 0; shared.piece(at).exists != 0; at = shared.after(at)) {
#pragma unroll 1
    for (std::int32_t slab = 0;; slab += slab_tiles) {
      std::int32_t const ranks = min(slab_tiles, shared.piece(at).first_rank_tile[max_projections] - slab);
      shrink.multiply(shared.piece(at), slab, ranks);
      if (slab == 0) expand.prepare(shared.piece(at));
      cluster_arrive();
      if (slab == 0 && warp_index() == prefill_warps - 1)
        find_piece(shared.piece(shared.after(at)), left, p, source);
      cluster_wait();
      shrink.fold(shared.piece(at), slab, ranks);
      cluster_arrive();
      if (slab + ranks == shared.piece(at).first_rank_tile[max_projections]) break;
      cluster_wait();
    }
    // B and y of this warp's first output tile are on their way while xa crosses.
    typename PrefillExpand<Source, T, Y>::Weights weights;
    expand.begin(weights, shared.piece(at));
    cluster_wait();
    prefetch_x(shared.piece(shared.after(at)), p);
    prefetch_weights(shared.piece(shared.after(at)), p);
    expand.all(weights, shared.piece(at));
  }
#endif
}

}  // namespace atlas::lora::inline v0::detail
