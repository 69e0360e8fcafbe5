// SPDX-License-Identifier: AGPL-3.0-only
//
// The whole delta in one launch. A cluster works on one row tile after another; each of its blocks takes a
// share of the segments for the shrink and a share of the output tiles for the expand, and segment sums cross
// by distributed shared memory.
//
// Weights go from memory straight to the registers of the warps that multiply them. A cluster finds its next
// row tiles together, a warp each, and asks for their weights a tile ahead, so that they come from L2 when
// their turn is there. Where `inputs_settled` allows it, plan, cells and the first weights are read before
// the launch's dependencies are complete.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/multiply.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The whole delta. The grid is a multiple of the cluster, whose size is `p.shape`'s.
template <int Warps, int BlocksPerMultiprocessor, Element T, Element Y, class Source>
__global__ void __launch_bounds__(Warps* warp_threads, BlocksPerMultiprocessor)
    delta_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic[];
  DeltaShared<Warps, T> const shared(dynamic, p.shape);
  if (!p.inputs_settled) enter();
  int const block = static_cast<int>(blockIdx.x) & ((1 << p.shape.cluster_log2) - 1);
  int const warp = warp_index();
  auto const clusters = static_cast<std::int32_t>(gridDim.x) >> p.shape.cluster_log2;
  auto const index = static_cast<std::int32_t>(blockIdx.x) >> p.shape.cluster_log2;
  // Row tiles are found a window at a time, a warp each.
  source.load(shared.tile(warp), p, index + warp * clusters);
  std::int32_t const tiles = source.num_tiles(p);
  std::int32_t const parts = p.shape.parts_of(clusters, tiles);
  std::int32_t const part = parts > 1 ? index / tiles : 0;
  if (part > 0 && warp == 0) source.load(shared.tile(0), p, part < parts ? index % tiles : tiles);
  if (threadIdx.x < p.num_projections) {
    Share const own = p.shape.outputs_of(block, part, parts, static_cast<std::int32_t>(threadIdx.x));
    shared.head->own[threadIdx.x] = make_int2(own.first, own.last);
  } else if (threadIdx.x == warp_threads) {
    shared.head->sums_full.init(1);
    shared.head->sums_empty.init(1 << p.shape.cluster_log2);
    publish_barriers();
  }
  // Segments that do not exist count as the sum that changes nothing.
  for (int i = static_cast<int>(threadIdx.x);
       p.shape.segments < max_segments && i < p.shape.slab * rank_tile_segments; i += Warps * warp_threads) {
    if (i % rank_tile_segments >= p.shape.segments * rank_tile_values)
      reinterpret_cast<float*>(shared.segments)[i] = -0.0F;
  }
  Multiply<Source, Warps, T, Y> multiply(p, shared);
  __syncthreads();
  // The wait stands before the first word to another block.
  cluster_arrive_relaxed();
  int i = 0;
  for (std::int32_t turn = Warps;; turn += Warps) {
#pragma unroll 1
    for (i = 0; i < Warps; ++i) {
      if (shared.tile(i).exists == 0) break;
      multiply.tile(i);
    }
    if (i < Warps) break;
    __syncthreads();
    source.load(shared.tile(warp), p, index + (turn + warp) * clusters);
    __syncthreads();
  }
  multiply.settle();
  // No block leaves while another may still arrive at its barriers; the release makes the arrivals come
  // first.
  if (multiply.expects_arrivals(i)) {
    cluster_arrive();
    cluster_wait();
  }
#endif
}

}  // namespace atlas::lora::inline v0::detail
