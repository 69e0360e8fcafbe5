// SPDX-License-Identifier: AGPL-3.0-only
//
// The kernels of the delta in two launches: shrink and expand, with complete sums of xa between them, or
// segment sums where one launch's blocks cannot exchange. Weights go from device memory straight to
// registers.
//
// A team of blocks works on one row tile: each takes a share of the segments for the shrink and a share of
// the output tiles for the expand. In the split form's shrink a team is a cluster where there are any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/shrink.cuh"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Dynamic shared memory, in order: chunk sums, two buffers of segment sums, xa.
inline constexpr std::size_t chunk_bytes = sizeof(float4) * chunk_sums * warp_threads;
inline constexpr std::size_t segment_bytes = 2 * sizeof(float4) * segment_buffer;

/// Bytes of xa in shared memory.
ATLAS_HD constexpr std::size_t xa_bytes(std::int32_t stride, std::size_t element_bytes) noexcept {
  return static_cast<std::size_t>(tile_rows) * static_cast<std::size_t>(stride) * element_bytes;
}

/// The block's row tile.
template <Element T>
__device__ inline RowTile<T>& shared_row_tile() {
  __shared__ RowTileBytes<T> tile;
  return reinterpret_cast<RowTile<T>&>(tile);
}

/// Loads row tile `index` into shared memory for the whole block.
template <class Source, Element T, Element Y>
__device__ inline void load_row_tile(RowTile<T>& tile, Source const& source, Operands<T, Y> const& p,
                                     std::int32_t index) {
  __syncthreads();  // the last tile is done with
  if (threadIdx.x < warp_threads) source.load(tile, p, index);
  __syncthreads();
}

/// Asks for the tile's weights of this block's share: A below the segments, B of the output tiles.
template <class Source, Element T, Element Y>
__device__ void prefetch_weights(RowTile<T> const& tile, Operands<T, Y> const& p, Share segments,
                                 Share outputs) {
  constexpr std::int64_t line = 128 / sizeof(T);
  Contraction const cut(p.k_in);
  std::int64_t const k_first =
      static_cast<std::int64_t>(segments.first) * cut.segment_blocks() * block_elements;
  std::int64_t const k_last =
      min(p.k_in, static_cast<std::int64_t>(segments.last) * cut.segment_blocks() * block_elements);
  std::int64_t const lines = divide_up(k_last - k_first, line);
  std::int32_t first_tile = 0;
  for (int i = 0; i < p.num_projections; ++i) {
    std::int32_t const tiles = output_tiles(p.projections[i].table.n_out);
    RouteCell<T> const& cell = tile.cell[i];
    std::int64_t const n_first = static_cast<std::int64_t>(max(outputs.first - first_tile, 0)) * tile_outputs;
    std::int64_t const n_last = min(p.projections[i].table.n_out,
                                    static_cast<std::int64_t>(outputs.last - first_tile) * tile_outputs);
    first_tile += tiles;
    std::int32_t const rank = rank_of<Source>(tile, i);
    if (rank == 0) continue;
    for (std::int64_t n = threadIdx.x; n < lines * rank; n += blockDim.x) {
      prefetch_l2(cell.a + n / lines * p.k_in + k_first + n % lines * line);
    }
    std::int64_t const b_first = n_first * cell.b_row_stride;
    std::int64_t const b_last = (n_last - 1) * cell.b_row_stride + rank;
    for (std::int64_t n = b_first + threadIdx.x * line; n < b_last; n += blockDim.x * line)
      prefetch_l2(cell.b + n);
  }
}

/// Zeroes xa in shared memory, so that what lies between a rank and the end of its last block is zero.
template <Element T, Element Y>
__device__ inline void clear_xa(Operands<T, Y> const& p, T* xa) {
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * p.xa_shared_stride;
       i += static_cast<int>(blockDim.x)) {
    xa[i] = round_to<T>(0.0F);
  }
}

/// Writes xa into shared memory.
template <Element T, Element Y>
struct SharedXa {
  Operands<T, Y> const& p;
  T* xa;
  __device__ void operator()(int row, int projection, std::int32_t j, T value) const {
    xa[row * p.xa_shared_stride + xa_shared_offset(p, projection) + j] = value;
  }
};

/// Writes xa into the split form's scratch.
template <Element T, Element Y>
struct ScratchXa {
  Operands<T, Y> const& p;
  RowTile<T> const& tile;
  __device__ void operator()(int row, int projection, std::int32_t j, T value) const {
    if (tile.row[row] < 0) return;
    p.xa[tile.row[row] * p.xa_row_stride + xa_scratch_offset(p, projection) + j] = value;
  }
};

/// The shrink of one row tile by a cluster of `Cluster` blocks: every block gets every segment sum, slab by
/// slab, and `fold(ranks, buffer)` is called with them. `parity` says which of the two buffers is next.
template <class Source, bool Wide, int Cluster, Element T, Element Y, class Fold>
__device__ void shrink_by_cluster(RowTile<T> const& tile, Operands<T, Y> const& p, int block, float4* chunks,
                                  float4* buffers, int& parity, Fold const& fold) {
  Share const segments = share_of(Contraction(p.k_in).segments(), Cluster, block);
  std::int32_t const all = tile.first_rank_tile[max_projections];
  for (std::int32_t first = 0; first < all; first += slab_rank_tiles) {
    Share const ranks{first, min(first + slab_rank_tiles, all)};
    float4* const buffer = buffers + parity * segment_buffer;
    shrink_segments<Source, Wide>(
        tile, p, segments, ranks, chunks, Cluster,
        [buffer](int target, std::int32_t segment, std::int32_t rank_tile, int lane, float4 const& sum) {
          float4* const place = buffer + (segment * slab_rank_tiles + rank_tile) * warp_threads + lane;
          if constexpr (Cluster == 1) {
            *place = sum;
          } else {
            store_to_block(place, static_cast<std::uint32_t>(target), sum);
          }
        });
    if constexpr (Cluster == 1) {
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
    fold(ranks, buffer);
    // The other buffer takes the next slab. A block writes this one again only after the next barrier, which
    // no block passes before all have folded it.
    parity ^= 1;
    if constexpr (Cluster == 1) __syncthreads();
  }
}

/// The first half into complete sums, xa in T.
template <Element T, Element Y, class Source, class Tuning>
__global__ void __launch_bounds__(Tuning::value.threads, blocks_of(Tuning::value, sizeof(T)))
    shrink_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
  constexpr int cluster = Tuning::value.cluster;
  extern __shared__ float4 shared[];
  RowTile<T>& tile = shared_row_tile<T>();
  float4* const chunks = shared;
  float4* const buffers = chunks + chunk_sums * warp_threads;
  int const block = static_cast<int>(blockIdx.x) % cluster;
  if constexpr (cluster > 1) cluster_arrive();
  bool started = false;
  bool entered = !p.inputs_settled;
  if (entered) enter();
  int parity = 0;
  for (auto index = static_cast<std::int32_t>(blockIdx.x) / cluster;;
       index += static_cast<std::int32_t>(gridDim.x) / cluster) {
    load_row_tile(tile, source, p, index);
    if (tile.exists == 0) break;
    if (!entered) {
      prefetch_weights<Source>(tile, p, share_of(Contraction(p.k_in).segments(), cluster, block), Share{});
      enter();
      entered = true;
    }
    if constexpr (cluster > 1) {
      if (!started) cluster_wait();
      started = true;
    }
    auto const work = [&]<bool Wide>() {
      shrink_by_cluster<Source, Wide, cluster>(
          tile, p, block, chunks, buffers, parity, [&](Share ranks, float4 const* buffer) {
            fold_segments<Source>(
                tile, p, ranks, block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x),
                cluster * static_cast<int>(blockDim.x),
                [buffer](std::int32_t segment, std::int32_t rank_tile, int lane) {
                  return buffer[(segment * slab_rank_tiles + rank_tile) * warp_threads + lane];
                },
                ScratchXa<T, Y>{p, tile});
          });
    };
    if (tile.wide != 0 && p.wide) {
      work.template operator()<true>();
    } else {
      work.template operator()<false>();
    }
  }
  if (!entered) enter();
  if constexpr (cluster > 1) {
    if (!started) cluster_wait();
  }
}

/// Where a lane's segment sum lies in the two-launch scratch, in float4.
template <Element T, Element Y>
ATLAS_HD inline std::int64_t segment_place(Operands<T, Y> const& p, std::int32_t tile, std::int32_t segment,
                                           std::int32_t rank_tile, int lane) {
  std::int64_t const sum = static_cast<std::int64_t>(tile) * max_segments + segment;
  return (sum * p.segment_rank_tiles + rank_tile) * warp_threads + lane;
}

/// The first half into segment sums: `parts` blocks share a row tile, each with its segments.
template <Element T, Element Y, class Source, class Tuning>
__global__ void __launch_bounds__(Tuning::value.threads, blocks_of(Tuning::value, sizeof(T)))
    segment_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
  extern __shared__ float4 shared[];
  RowTile<T>& tile = shared_row_tile<T>();
  enter();
  std::int32_t const segments = Contraction(p.k_in).segments();
  for (auto item = static_cast<std::int32_t>(blockIdx.x);; item += static_cast<std::int32_t>(gridDim.x)) {
    std::int32_t const index = item / p.parts;
    load_row_tile(tile, source, p, index);
    if (tile.exists == 0) break;
    Share const share = share_of(segments, p.parts, item % p.parts);
    auto const work = [&]<bool Wide>() {
      shrink_segments<Source, Wide>(
          tile, p, share, Share{0, tile.first_rank_tile[max_projections]}, shared, 1,
          [&](int, std::int32_t segment, std::int32_t rank_tile, int lane, float4 const& sum) {
            p.segments[segment_place(p, index, segment, rank_tile, lane)] = sum;
          });
    };
    if (tile.wide != 0 && p.wide) {
      work.template operator()<true>();
    } else {
      work.template operator()<false>();
    }
  }
}

/// The second half: `parts` blocks share a row tile, each with its output tiles. xa comes from complete sums,
/// or is folded here from segment sums.
template <bool FromSegments, Element T, Element Y, class Source, class Tuning>
__global__ void __launch_bounds__(Tuning::value.threads, blocks_of(Tuning::value, sizeof(T)))
    expand_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
  extern __shared__ float4 shared[];
  RowTile<T>& tile = shared_row_tile<T>();
  T* const xa = reinterpret_cast<T*>(shared);
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  bool entered = !p.inputs_settled;
  if (entered) enter();
  for (auto item = static_cast<std::int32_t>(blockIdx.x);; item += static_cast<std::int32_t>(gridDim.x)) {
    std::int32_t const index = item / p.parts;
    load_row_tile(tile, source, p, index);
    if (tile.exists == 0) break;
    Share const outputs = share_of(total_output_tiles(p), p.parts, item % p.parts);
    if (!entered) {
      prefetch_weights<Source>(tile, p, Share{}, outputs);
      enter();
      entered = true;
    }
    clear_xa(p, xa);
    __syncthreads();
    if constexpr (FromSegments) {
      fold_segments<Source>(
          tile, p, Share{0, tile.first_rank_tile[max_projections]}, thread, threads,
          [&](std::int32_t segment, std::int32_t rank_tile, int lane) {
            return p.segments[segment_place(p, index, segment, rank_tile, lane)];
          },
          SharedXa<T, Y>{p, xa});
    } else {
      SharedXa<T, Y> const put{p, xa};
      for (int projection = 0; projection < p.num_projections; ++projection) {
        std::int32_t const rank = rank_of<Source>(tile, projection);
        for (int i = thread; i < tile_rows * rank; i += threads) {
          std::int32_t const row = tile.row[i / rank];
          if (row < 0) continue;
          put(i / rank, projection, i % rank,
              p.xa[row * p.xa_row_stride + xa_scratch_offset(p, projection) + i % rank]);
        }
      }
    }
    __syncthreads();
    if (tile.wide != 0 && p.wide) {
      expand_tiles<Source, true>(tile, p, outputs, xa);
    } else {
      expand_tiles<Source, false>(tile, p, outputs, xa);
    }
  }
  if (!entered) enter();
}

}  // namespace atlas::lora::inline v0::detail
