// SPDX-License-Identifier: AGPL-3.0-only
//
// The whole delta in one launch. A team of blocks, a cluster or half of one, works on one row tile after
// another; each of its blocks takes a share of the segments for the shrink and a share of the output tiles
// for the expand, and segment sums cross by distributed shared memory.
//
// Every warp has a stream of stages in shared memory, which holds what it multiplies next and goes on over
// the borders of shrink, expand and row tile. A team finds its next row tiles together, a warp each. Where
// `inputs_settled` allows it, plan, cells and the first weights are read before the launch's dependencies are
// complete.
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

/// Finds the team's first row tiles, a warp each, and fills the head; gives the first one's place in the
/// window. Both sizes of team have half of it, since row tiles are found beside their number.
template <int Warps, bool Splits, Element T, Element Y, class Source>
__device__ int begin_block(Operands<T, Y> const& p, Source const& source,
                           DeltaShared<Warps, T> const& shared) {
  std::int32_t const tiles = source.num_tiles(p);
  int const warp = warp_index();
  auto const grid = static_cast<std::int32_t>(gridDim.x);
  auto const place = static_cast<std::int32_t>(blockIdx.x);
  constexpr int first_window = Splits ? Warps / 2 : Warps;
  int const guess = warp / first_window;
  int const guess_log2 = p.shape.team[0].log2 - guess;
  std::int32_t guessed = (place >> guess_log2) + (warp - guess * first_window) * (grid >> guess_log2);
  // Where teams share row tiles, the one that would be this team's if there were as many as there can be.
  if (warp == guess * first_window && guessed < p.shape.team[guess].lone_teams) {
    while (guessed >= p.shape.most_tiles) guessed -= p.shape.most_tiles;
  }
  source.load(shared.tile(warp), p, guessed);
  int const size = Splits && tiles > p.shape.most_whole_tiles ? 1 : 0;
  TeamShape const& team = p.shape.team[size];
  TileWalk const walk = p.shape.walk_of(team, grid >> team.log2, tiles, place >> team.log2);
  int const begin = size * first_window;
  bool const ends = guess == size && warp == begin + walk.whole;
  if (ends && walk.shared != guessed) source.load(shared.tile(warp), p, walk.shared);
  int const only = p.shape.projection_of_part(walk.part, walk.parts);
  if (ends && only >= 0) keep_projection(shared.tile(warp), p, only);
  int const lane = lane_index();
  if (lane == 0) shared.tile(warp).divided = ends ? 1 : 0;
  if (warp == 0) {
    int const block = place & ((1 << team.log2) - 1);
    if (lane < p.num_projections) {
      Share const whole = p.shape.outputs_of(team, block, 0, 1, lane);
      shared.head->own[0][lane] = make_int2(whole.first, whole.last);
      Share const part = p.shape.outputs_of(team, block, walk.part, walk.parts, lane);
      shared.head->own[1][lane] = make_int2(part.first, part.last);
    }
  } else if (lane == 0 && warp == 1) {
    shared.head->sums_full.init(1);
    shared.head->sums_empty.init(1 << team.log2);
    publish_barriers();
  } else if (lane == 0 && warp == 2) {
    shared.head->window_end = begin + first_window;
    shared.head->window_items = first_window;
    shared.head->teams = grid >> team.log2;
    shared.head->index = place >> team.log2;
    shared.head->walk = walk;
  } else if (Splits && lane == 0 && warp == 3) {
    shared.head->team = team;
  }
  return begin;
}

/// Finds the team's next row tiles. All threads call it.
template <int Warps, Element T, Element Y, class Source>
__device__ void next_window(Operands<T, Y> const& p, Source const& source,
                            DeltaShared<Warps, T> const& shared) {
  // The warp is asked for again, so that nothing that follows from it is held all the way.
  int const warp = thread_here() / warp_threads;
  std::int32_t const items = shared.head->window_items;
  __syncthreads();
  source.load(shared.tile(warp), p, shared.row_tile(items + warp));
  TileWalk const& walk = shared.head->walk;
  bool const ends = items + warp == walk.whole;
  int const only = p.shape.projection_of_part(walk.part, walk.parts);
  if (ends && only >= 0) keep_projection(shared.tile(warp), p, only);
  if (lane_index() == 0) shared.tile(warp).divided = ends ? 1 : 0;
  if (threadIdx.x == 0) {
    shared.head->window_end = Warps;
    shared.head->window_items = items + Warps;
  }
  __syncthreads();
}

/// The whole delta. The grid is a multiple of the cluster, which is `p.shape`'s, and may be two teams where
/// the kernel `Splits`.
template <int Warps, int BlocksPerMultiprocessor, bool Splits, Element T, Element Y, class Source>
__global__ void __launch_bounds__(Warps* warp_threads, BlocksPerMultiprocessor)
    delta_kernel(__grid_constant__ Operands<T, Y> const p, __grid_constant__ Source const source) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Splits && __CUDA_ARCH__ >= 1200) return;  // it is not launched where no cluster of 16 is
  extern __shared__ float4 dynamic[];
  DeltaShared<Warps, T> const shared(dynamic, p.shape);
  // Where nothing but x and y depends on launches before, the next launch may start as early as this one.
  if (p.inputs_settled) {
    trigger_dependents();
  } else {
    enter();
  }
  int const begin = begin_block<Warps, Splits>(p, source, shared);
  // Segments that do not exist count as the sum that changes nothing.
  for (int i = static_cast<int>(threadIdx.x);
       p.shape.segments < max_segments && i < p.shape.slab * rank_tile_segments; i += Warps * warp_threads) {
    if (i % rank_tile_segments >= p.shape.segments * rank_tile_values)
      reinterpret_cast<float*>(shared.segments)[i] = -0.0F;
  }
  Multiply<Source, Warps, Splits, T, Y> multiply(p, shared);
  __syncthreads();
  // The wait stands before the first word to another block.
  cluster_arrive_relaxed();
#pragma unroll 1
  for (int i = begin;; i = 0) {
    multiply.begin(i);
#pragma unroll 1
    while (i < shared.head->window_end && shared.tile(i).exists != 0) {
      if (!multiply.tile(i++)) return;
    }
    if (i < shared.head->window_end) break;
    next_window(p, source, shared);
  }
  multiply.finish();
#endif
}

}  // namespace atlas::lora::inline v0::detail
