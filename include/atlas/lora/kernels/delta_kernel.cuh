// SPDX-License-Identifier: AGPL-3.0-only
//
// The whole delta in one launch. A cluster works on one row tile after another; each of its blocks takes a
// share of the segments for the shrink and a share of the output tiles for the expand, and segment sums cross
// by distributed shared memory.
//
// In each block one warp fetches: it finds the row tiles and fills a ring of stages with the weights that the
// block will need, tile after tile, as far ahead as the ring is long, before the launch's dependencies are
// complete where `inputs_settled` allows it. The other warps multiply. So weights are under way at every
// moment, and what is left on the critical path after the wait is x, the exchange and y.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/fetch.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/multiply.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/ring.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The whole delta. `Tuning::value.threads` multiply and 32 more fetch. The grid is a multiple of the
/// cluster.
template <bool Wide, Element T, Element Y, class Source, class Tuning>
__global__ void __launch_bounds__(Tuning::value.threads + warp_threads, blocks_of(Tuning::value, sizeof(T)))
    delta_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
#if __CUDA_ARCH__ >= 900
  constexpr int cluster = Tuning::value.cluster;
  constexpr int threads = Tuning::value.threads;
  extern __shared__ float4 dynamic[];
  DeltaShared<T, Y> const shared(dynamic, p);
  DeltaHead<T>& head = *shared.head;
  start<cluster>(head, threads / warp_threads);
  // The other half stands before the first word to another block.
  if constexpr (cluster > 1) cluster_arrive_relaxed();
  int const block = static_cast<int>(blockIdx.x) % cluster;
  BlockShare const share{share_of(p.shape.segments, cluster, block),
                         share_of(p.shape.first_output[p.num_projections], cluster, block)};
  auto index = static_cast<std::int32_t>(blockIdx.x) / cluster;
  auto const step = static_cast<std::int32_t>(gridDim.x) / cluster;
  RingPlace place;
  if (threadIdx.x >= threads) {
    if (!p.inputs_settled) enter();
    Fetch<Source, T, Y> fetch(p, shared);
    for (bool exists = true; exists; index += step) {
      head.tile_empty[place.stage].wait(place.pass ^ 1u);
      RowTile<T>& tile = shared.tile(static_cast<int>(place.stage));
      source.load(tile, p, index);
      __syncwarp();
      exists = tile.exists != 0;
      if (lane_index() == 0) head.tile_full[place.stage].arrive();
      place.advance(tiles_ahead);
      if (exists) fetch.tile(tile, share);
    }
    if (p.inputs_settled) enter();
    if constexpr (cluster > 1) cluster_wait();
  } else {
    enter();
    if constexpr (cluster > 1) cluster_wait();
    Multiply<Source, Wide, cluster, threads, T, Y> multiply(p, shared);
    for (;;) {
      head.tile_full[place.stage].wait(place.pass);
      RowTile<T> const& tile = shared.tile(static_cast<int>(place.stage));
      if (tile.exists == 0) break;
      multiply.tile(tile, share);
      __syncwarp();
      if (lane_index() == 0) head.tile_empty[place.stage].arrive();
      place.advance(tiles_ahead);
    }
  }
  // No block leaves while another may still write to its shared memory.
  if constexpr (cluster > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
#endif
}

}  // namespace atlas::lora::inline v0::detail
