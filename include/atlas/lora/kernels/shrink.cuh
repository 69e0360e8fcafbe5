// SPDX-License-Identifier: AGPL-3.0-only
//
// The first half of the delta for one row tile: xa[row, j] = T(sum_k x[row, k] * A[j, k]).
//
// Warps multiply chunks, each its 16 ranks by 8 rows by one chunk of k; a block folds the chunks of its
// segments; whoever holds all the segments of a tile folds them into sums. x is `[rows, k_in]`, A `[rank,
// k_in]`.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Chunk sums that a block holds at once, an accumulator each.
inline constexpr int chunk_sums = 32;
/// Float4 values of a buffer of segment sums: a slab of rank tiles for every segment.
inline constexpr int segment_buffer = max_segments * slab_rank_tiles * warp_threads;

/// One chunk of one rank tile: the accumulator of this lane.
template <class Source, bool Wide, Element T, Element Y>
__device__ float4 multiply_chunk(RowTile<T> const& tile, Operands<T, Y> const& p, std::int32_t rank_tile,
                                 BlockRange blocks) {
  int const projection = projection_of(tile, rank_tile);
  std::int32_t const rank = rank_of<Source>(tile, projection);
  std::int32_t const j = (rank_tile - tile.first_rank_tile[projection]) * tile_ranks + group();
  std::int32_t const row = tile.x_row[group()];
  T const* const a_low = tile.cell[projection].a + j * p.k_in;
  T const* const a_high = a_low + tile_batch_rows * p.k_in;
  T const* const x = p.x + row * p.x_row_stride;
  std::int64_t const low_end = j < rank ? p.k_in : 0;
  std::int64_t const high_end = j + tile_batch_rows < rank ? p.k_in : 0;
  std::int64_t const x_end = row >= 0 ? p.k_in : 0;
  Accumulator<T> sum;
  constexpr int ahead = sizeof(T) == 2 ? 4 : 1;  // blocks whose loads are in flight together
  for (std::int32_t block = blocks.first; block < blocks.last; block += ahead) {
    Pack<T> low[ahead], high[ahead], x_pack[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      std::int64_t const k = k_of(block + i, quad(), 0);
      bool const inside = block + i < blocks.last;
      low[i] = load_operand<Wide>(a_low + k, inside ? low_end - k : 0);
      high[i] = load_operand<Wide>(a_high + k, inside ? high_end - k : 0);
      x_pack[i] = load_operand<Wide>(x + k, inside ? x_end - k : 0);
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (block + i < blocks.last) sum.add(low[i], high[i], x_pack[i]);
    }
  }
  return sum.finish();
}

/// The sums of segments `segments` for the rank tiles `ranks`, given to `put(target, segment, rank tile from
/// ranks.first, lane, sums)` for every target in `[0, targets)`. All threads of the block call it. `chunks`
/// is shared memory of `chunk_sums * 32` values.
template <class Source, bool Wide, Element T, Element Y, class Put>
__device__ void shrink_segments(RowTile<T> const& tile, Operands<T, Y> const& p, Share segments, Share ranks,
                                float4* chunks, int targets, Put const& put) {
  Contraction const cut(p.k_in);
  int const warp = static_cast<int>(threadIdx.x) / warp_threads;
  int const warps = static_cast<int>(blockDim.x) / warp_threads;
  int const per_sum = cut.segment_chunks();
  int const sums_at_once = chunk_sums / per_sum;
  int const sums = segments.size() * ranks.size();
  for (int first = 0; first < sums; first += sums_at_once) {
    int const here = min(sums_at_once, sums - first);
    for (int task = warp; task < here * per_sum; task += warps) {
      int const sum = first + task / per_sum;
      BlockRange const blocks = cut.chunk(segments.first + sum / ranks.size(), task % per_sum);
      if (blocks.size() == 0) continue;
      chunks[task * warp_threads + lane_index()] =
          multiply_chunk<Source, Wide>(tile, p, ranks.first + sum % ranks.size(), blocks);
    }
    __syncthreads();
    int const values = here * warp_threads;
    for (int i = static_cast<int>(threadIdx.x); i < values * targets; i += static_cast<int>(blockDim.x)) {
      int const sum = first + i % values / warp_threads;
      int const segment = segments.first + sum / ranks.size();
      int const lane = i % warp_threads;
      float4 const* const own = chunks + (sum - first) * per_sum * warp_threads + lane;
      float4 total = own[0];
      for (int c = 1; c < cut.chunks(segment); ++c) {
        float4 const chunk = own[c * warp_threads];
        total = make_float4(add_rn(total.x, chunk.x), add_rn(total.y, chunk.y), add_rn(total.z, chunk.z),
                            add_rn(total.w, chunk.w));
      }
      put(i / values, segment, sum % ranks.size(), lane, total);
    }
    __syncthreads();
  }
}

/// Folds segment sums into xa: `get(segment, rank tile from ranks.first, lane)` gives a sum, `put(row of the
/// tile, projection, j, value)` takes xa. Every thread of `[0, threads)` handles its part; `thread` is this
/// one's number.
template <class Source, Element T, Element Y, class Get, class Put>
__device__ void fold_segments(RowTile<T> const& tile, Operands<T, Y> const& p, Share ranks, int thread,
                              int threads, Get const& get, Put const& put) {
  int const segments = Contraction(p.k_in).segments();
  for (int i = thread; i < ranks.size() * warp_threads; i += threads) {
    int const lane = i % warp_threads;
    int const rank_tile = i / warp_threads;
    float4 total = get(0, rank_tile, lane);
    for (int s = 1; s < segments; ++s) {
      float4 const segment = get(s, rank_tile, lane);
      total = make_float4(add_rn(total.x, segment.x), add_rn(total.y, segment.y), add_rn(total.z, segment.z),
                          add_rn(total.w, segment.w));
    }
    int const projection = projection_of(tile, ranks.first + rank_tile);
    std::int32_t const rank = rank_of<Source>(tile, projection);
    std::int32_t const j =
        (ranks.first + rank_tile - tile.first_rank_tile[projection]) * tile_ranks + lane / 4;
    int const row = lane % 4 * 2;
    if (j < rank) {
      put(row, projection, j, round_to<T>(total.x));
      put(row + 1, projection, j, round_to<T>(total.y));
    }
    if (j + tile_batch_rows < rank) {
      put(row, projection, j + tile_batch_rows, round_to<T>(total.z));
      put(row + 1, projection, j + tile_batch_rows, round_to<T>(total.w));
    }
  }
}

}  // namespace atlas::lora::inline v0::detail
