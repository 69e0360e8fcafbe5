// SPDX-License-Identifier: AGPL-3.0-only
//
// The delta of many rows in one launch, for 16-bit types. A cluster works on one piece after another, up to
// 64 rows of a slot that read the slot's weights together: each of its blocks multiplies a share of the
// segments, folds a share of the sums, whose xa it gives to all blocks, and expands a share of the output
// tiles. Where there are row tiles enough, every block is without a cluster and does all of a piece.
//
// x and A come through shared memory, some stages ahead, and are read from there by all warps that multiply
// them. y has the same memory in the expand, several groups of rows ahead, each lane's own. Between blocks
// there are two barriers a slab of ranks: before the first a block's segment sums are on their way to the
// blocks that fold them, before the second xa to all.
//   - A block writes sums of a slab after the second barrier of the one before, when all have folded it.
//   - A block writes xa after a first barrier, when all have expanded the piece before.
// So sums and xa need no second buffer, and no block writes to another after the last barrier.
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

/// What lies between the halves of an exchange: the cluster's barrier, or the block's where it is `lone`.
__device__ inline void exchange_arrive(bool lone) {
  if (!lone) cluster_arrive();
}
__device__ inline void exchange_wait(bool lone) {
  if (lone) {
    __syncthreads();
  } else {
    cluster_wait();
  }
}

/// The whole delta of many rows. The grid is a multiple of the cluster, whose size is `p.shape`'s.
template <Element T, Element Y, class Source>
__global__ void __launch_bounds__(prefill_warps* warp_threads, 1)
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
    shared.head->slab = 0;
    __syncwarp();
    find_piece(shared.piece(), left, p, source);
  }
  PrefillShrink<Source, T, Y> shrink(p, shared);
  PrefillExpand<Source, T, Y> expand(p, shared);
  __syncthreads();
  // Weights do not depend on the launches before; by the time these end they are in L2.
  prefetch_weights(shared.piece(), p);
  cluster_wait();
  if (p.inputs_settled) enter();
  bool const lone = p.shape.team[0].log2 == 0;
  while (shared.piece().exists != 0) {
    // The slab is in shared memory, where it takes no register of the warps that multiply.
    for (;;) {
      std::int32_t const slab = shared.head->slab;
      std::int32_t const ranks = min(p.prefill.slab, shared.piece().first_rank_tile[max_projections] - slab);
      shrink.multiply(shared.piece(), slab, ranks);
      if (shared.head->slab == 0) expand.prepare(shared.piece());
      exchange_arrive(lone);
      if (shared.head->slab == 0 && warp_index() == prefill_warps - 1)
        find_piece(shared.next(), left, p, source);
      exchange_wait(lone);
      shrink.fold(shared.piece(), shared.head->slab, ranks);
      // Asked before arriving: the first thread goes on to the next slab when all have.
      bool const last = shared.head->slab + ranks == shared.piece().first_rank_tile[max_projections];
      exchange_arrive(lone);
      if (last) break;
      exchange_wait(lone);
      if (threadIdx.x == 0) shared.head->slab += p.prefill.slab;
      __syncthreads();
    }
    // B and y of this warp's first output tile are on their way while xa crosses.
    typename PrefillExpand<Source, T, Y>::Begun begun;
    expand.begin(begun, shared.piece());
    exchange_wait(lone);
    prefetch_x(shared.next(), p);
    prefetch_weights(shared.next(), p);
    expand.all(begun, shared.piece());
    // The ring is y's until here, and the piece the last one.
    __syncthreads();
    shared.go_on();
    __syncthreads();
  }
#endif
}

}  // namespace atlas::lora::inline v0::detail
