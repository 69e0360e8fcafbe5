// SPDX-License-Identifier: AGPL-3.0-only
//
// The head's recompute where overrides are many: a block takes 128 or 256 of them by up to 64 batch rows, a
// warp one or two tiles, and walks all of k. Warps share x alone, in slices of shared memory, and meet once a
// slice while each keeps its own weights under way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_head_ring.cuh"
#include "atlas/lora/kernels/overlay_head_walk.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"

namespace atlas::lora::inline v0::detail {

/// Bytes of the sums of what a block multiplies at once, `Up` override tiles a warp: registers hold those of
/// chunks and segments already.
template <int Up, Element T>
inline constexpr std::size_t stream_sums_bytes =
    sizeof(float4) * head_warps* warp_threads* Up* stream_tiles<T>* tile_vectors<T>;
/// Packs of a slice of x are a multiple of this, so that a slice is a whole number of walked steps.
template <Element T>
inline constexpr std::int32_t stream_slice_unit = blocks_ahead<true, T>* stream_tiles<T>* tile_packs<T>;
/// Most bytes of a slice: with it 64 rows of 512 elements in 16 bits.
inline constexpr std::size_t most_slice_bytes = std::size_t{64} << 10;

/// Writes a warp's sums of an item, `[override tile][row tile][vector][lane]` from this lane's first on. `id`
/// is the logit of the warp's override row `lane_index()`. One warp calls it, whole.
template <int Up, int Tiles, Element T, Element Y>
__device__ void write_stream_sums(HeadOperands<T, Y> const& p, HeadBatch<T> const& batch, std::int32_t id,
                                  float4 const* sums) {
  HeadTarget target{};
#pragma unroll 1
  for (int i = 0; i < Up * tile_vectors<T>; ++i) {
    int const u = i / tile_vectors<T>, v = i % tile_vectors<T>;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      target.id[n] = __shfl_sync(0xffffffffu, id, u * head_tile_overrides + tile_override<T>(v, n));
    }
#pragma unroll 1
    for (int t = 0; t < Tiles; ++t) {
      take_rows<T>(target, batch.rows, t);
      write_logits(p, target, sums[((u * Tiles + t) * tile_vectors<T> + v) * warp_threads]);
    }
  }
}

/// As much of a streamed item as a block multiplies at once with weights in registers: an override tile a
/// warp by `Tiles` row tiles.
template <bool Wide, int Tiles, Element T, Element Y>
__device__ void stream_tile(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                            std::int32_t first_override, std::int32_t first_row, float4* shared,
                            bool& entered) {
  using Walk = HeadWalk<Wide, Tiles, T>;
  int const warp = warp_index();
  Contraction const& cut = p.cut;
  std::int32_t const j = first_override + warp * head_tile_overrides;
  bool const works = j < group_of.overrides;
  Walk walk(group_of, p.params.table.hidden, j, cut, BlockRange{0, works ? cut.blocks() : 0});
  float4* const sums = shared + warp * Walk::sums * warp_threads + lane_index();
  auto* const x = reinterpret_cast<Pack<T>*>(shared + stream_sums_bytes<1, T> / sizeof(float4));
  __syncthreads();  // the last item is done with
#pragma unroll
  for (int c = 0; c < Walk::sums; ++c) sums[c * warp_threads] = fold_start();
  find_item_rows(batch, p, group_of, first_row);
  if (!entered) enter();
  entered = true;
  __syncthreads();
  std::int32_t const slice = p.slice_packs / (Tiles * tile_packs<T>) / Walk::ahead * Walk::ahead;
  // Each warp copies and orders some of a slice's blocks.
  auto const each_block = [&](std::int32_t from, int buffer, auto const& visit) {
#pragma unroll 1
    for (std::int32_t b = warp; b < slice && from + b < cut.blocks(); b += head_warps) {
      visit(x + buffer * p.slice_packs + b * Tiles * tile_packs<T>, from + b);
    }
  };
  auto const copy_slice = [&](std::int32_t from, int buffer) {
    each_block(from, buffer, [&](Pack<T>* to, std::int32_t block) {
      copy_present_rows<Wide, Tiles>(to, p, batch.rows, block);
    });
    commit_copies();
  };
  copy_slice(0, 0);
  int buffer = 0;
#pragma unroll 1
  for (std::int32_t from = 0; from < cut.blocks(); from += slice) {
    wait_copies<0>();
    each_block(from, buffer, [](Pack<T>* at, std::int32_t) { order_x_block<Tiles>(at); });
    __syncthreads();  // the slice is there for all, and all are done with the one that is filled next
    if (from + slice < cut.blocks()) copy_slice(from + slice, buffer ^ 1);
    walk.to(from + slice, x + buffer * p.slice_packs, [&](int c, float4 const& segment) {
      sums[c * warp_threads] = add_rn(sums[c * warp_threads], segment);
    });
    buffer ^= 1;
  }
  if (works) write_stream_sums<1, Tiles>(p, batch, head_id(p, group_of, j + lane_index()), sums);
}

/// One streamed item by the block, weights by rings: two override tiles a warp by `Tiles` row tiles.
template <bool Whole, int Tiles, Element T, Element Y>
__device__ void stream_rings(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                             std::int32_t first_override, std::int32_t first_row, float4* shared,
                             bool& entered) {
  using Walk = RingWalk<Whole, Tiles, T>;
  constexpr std::int32_t slice_packs = ring_slice_bytes / sizeof(Pack<T>);
  constexpr std::int32_t slice = slice_packs / (Tiles * tile_packs<T>);
  // x of a slice is asked for with a step of the slice before, so that waiting for a step waits for it too.
  static_assert(slice % ring_blocks == 0 && slice / ring_blocks >= ring_stages);
  int const warp = warp_index();
  Contraction const& cut = p.cut;
  std::int32_t const j = first_override + warp * ring_up * head_tile_overrides;
  bool const works = j < group_of.overrides;
  auto* const rings = reinterpret_cast<Pack<T>*>(shared + stream_sums_bytes<ring_up, T> / sizeof(float4));
  Pack<T>* const x = rings + ring_bytes / sizeof(Pack<T>);
  Walk walk(group_of, p.params.table.hidden, j, cut, rings + warp * ring_stages * ring_stage_packs);
  __syncthreads();  // the last item is done with
#pragma unroll
  for (int s = 0; s < ring_stages; ++s) walk.ask();
  commit_copies();
  float4* const sums = shared + warp * Walk::sums * warp_threads + lane_index();
  std::int32_t const id = head_id(p, group_of, j + lane_index());
#pragma unroll
  for (int c = 0; c < Walk::sums; ++c) sums[c * warp_threads] = fold_start();
  find_item_rows(batch, p, group_of, first_row);
  if (!entered) enter();
  entered = true;
  __syncthreads();
  // Each warp copies and orders some of a slice's blocks.
  auto const each_block = [&](std::int32_t from, int buffer, auto const& visit) {
#pragma unroll 1
    for (std::int32_t b = warp; b < slice && from + b < cut.blocks(); b += head_warps) {
      visit(x + buffer * slice_packs + b * Tiles * tile_packs<T>, from + b);
    }
  };
  auto const copy_slice = [&](std::int32_t from, int buffer) {
    each_block(from, buffer, [&](Pack<T>* to, std::int32_t block) {
      copy_x_block<Tiles, 2>(
          to, p, [&](int i) { return max(batch.rows[i * tile_batch_rows + group()], 0); }, block);
    });
  };
  copy_slice(0, 0);
  commit_copies();
  wait_copies<0>();
  int buffer = 0;
#pragma unroll 1
  for (std::int32_t from = 0; from < cut.blocks(); from += slice) {
    wait_copies<ring_stages - 1>();
    each_block(from, buffer, [](Pack<T>* at, std::int32_t) { order_x_block<Tiles>(at); });
    __syncthreads();  // the slice is there for all, and all are done with the one that is filled next
#pragma unroll 1
    for (std::int32_t b = 0; b < slice && from + b < cut.blocks(); b += ring_blocks) {
      wait_copies<ring_stages - 1>();
      __syncwarp();
      if (works) {
        walk.multiply(x + buffer * slice_packs + b * Tiles * tile_packs<T>,
                      [&](int c, float4 const& segment) {
                        sums[c * warp_threads] = add_rn(sums[c * warp_threads], segment);
                      });
      }
      __syncwarp();
      if (b == 0) copy_slice(from + slice, buffer ^ 1);
      walk.ask();
      commit_copies();
    }
    buffer ^= 1;
  }
  wait_copies<0>();  // of zeroes behind the end, to memory that the next item may use otherwise
  if (works) write_stream_sums<ring_up, Tiles>(p, batch, id, sums);
}

/// One streamed item by the block. `shared` is memory for its sums and two slices of x.
template <Element T, Element Y>
__device__ void stream_item(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                            std::int32_t index, float4* shared, bool& entered) {
  std::int32_t const first_override = group_of.work.first_override(index);
  std::int32_t const first_row = group_of.work.first_row(index);
  auto const stream = [&]<int Tiles>(std::int32_t from) {
    if (group_of.wide != 0) {
      stream_tile<true, Tiles>(p, batch, group_of, from, first_row, shared, entered);
    } else {
      stream_tile<false, Tiles>(p, batch, group_of, from, first_row, shared, entered);
    }
  };
  if (group_of.work.item_rows <= few_stream_rows) return stream.template operator()<1>(first_override);
  if constexpr (stream_tiles < T >> 1) {
    auto const ring = [&]<bool Whole, int Tiles>() {
      stream_rings<Whole, Tiles>(p, batch, group_of, first_override, first_row, shared, entered);
    };
    if (p.rings && group_of.wide != 0) {
      if (!whole_steps(p.cut)) return ring.template operator()<false, 4>();
      if (group_of.rows - first_row <= 2 * head_tile_rows<T>) return ring.template operator()<true, 2>();
      return ring.template operator()<true, 4>();
    }
    std::int32_t const end = min(first_override + group_of.work.item_overrides, group_of.overrides);
#pragma unroll 1
    for (std::int32_t from = first_override; from < end; from += head_warps * head_tile_overrides) {
      stream.template operator()<stream_tiles<T>>(from);
    }
  }
}

}  // namespace atlas::lora::inline v0::detail
