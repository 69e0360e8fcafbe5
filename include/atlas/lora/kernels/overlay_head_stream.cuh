// SPDX-License-Identifier: AGPL-3.0-only
//
// The head's recompute where overrides are many: a block takes 128 or 256 of them by up to 64 batch rows, a
// warp one or two tiles, and walks all of k. Only x goes through shared memory, in slices, so warps meet once
// a slice while each keeps its own weights under way.
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
#include "atlas/lora/kernels/overlay_head_walk.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"

namespace atlas::lora::inline v0::detail {

/// Bytes of the sums of a block's items: registers hold those of chunks and segments already.
template <Element T>
inline constexpr std::size_t stream_sums_bytes =
    sizeof(float4) * head_warps* warp_threads* stream_tiles<T>* tile_vectors<T>*(sizeof(T) == 2 ? 2 : 1);
/// Packs of a slice of x are a multiple of this, so that a slice is a whole number of walked steps.
template <Element T>
inline constexpr std::int32_t stream_slice_unit = 4 * stream_tiles<T>* warp_threads;
/// Most bytes of a slice: with it 64 rows of 512 elements in 16 bits.
inline constexpr std::size_t most_slice_bytes = std::size_t{64} << 10;

/// One streamed item by the block: `Up` override tiles a warp by `Tiles` row tiles.
template <bool Wide, int Up, int Tiles, Element T, Element Y>
__device__ void stream_tile(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                            std::int32_t first_override, std::int32_t first_row, float4* shared,
                            bool& entered) {
  using Walk = HeadWalk<Wide, Up, Tiles, T>;
  int const warp = warp_index();
  Contraction const& cut = p.cut;
  std::int32_t const j = first_override + warp * Up * head_tile_overrides;
  bool const works = j < group_of.overrides;
  Walk walk(group_of, p.params.table.hidden, j, cut, BlockRange{0, works ? cut.blocks() : 0});
  float4* const sums = shared + warp * Walk::sums * warp_threads + lane_index();
  auto* const x = reinterpret_cast<Pack<T>*>(shared + stream_sums_bytes<T> / sizeof(float4));
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
    each_block(from, buffer,
               [&](Pack<T>* to, std::int32_t block) { copy_x_block<Wide, Tiles>(to, p, batch.rows, block); });
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
  if (!works) return;
  HeadTarget target{};
#pragma unroll 1
  for (int i = 0; i < Up * tile_vectors<T>; ++i) {
    int const u = i / tile_vectors<T>, v = i % tile_vectors<T>;
    find_ids(target, p, group_of, j + u * head_tile_overrides, v);
#pragma unroll 1
    for (int t = 0; t < Tiles; ++t) {
      take_rows<T>(target, batch.rows, t);
      write_logits(p, target, sums[((u * Tiles + t) * tile_vectors<T> + v) * warp_threads]);
    }
  }
}

/// One streamed item by the block. `shared` is memory for its sums and two slices of x.
template <Element T, Element Y>
__device__ void stream_item(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                            std::int32_t index, float4* shared, bool& entered) {
  std::int32_t const first_override = group_of.work.first_override(index);
  std::int32_t const first_row = group_of.work.first_row(index);
  auto const stream = [&]<bool Wide, int Up, int Tiles>() {
    stream_tile<Wide, Up, Tiles>(p, batch, group_of, first_override, first_row, shared, entered);
  };
  if constexpr (sizeof(T) == 4) {
    if (group_of.wide != 0) {
      stream.template operator()<true, 1, 1>();
    } else {
      stream.template operator()<false, 1, 1>();
    }
  } else {
    bool const few = group_of.work.item_rows <= few_stream_rows;
    if (group_of.wide == 0) {
      if (few) {
        stream.template operator()<false, 1, 1>();
      } else {
        stream.template operator()<false, 2, 4>();
      }
    } else if (few) {
      stream.template operator()<true, 1, 1>();
    } else if (group_of.rows - first_row <= 2 * head_tile_rows<T>) {
      stream.template operator()<true, 2, 2>();
    } else {
      stream.template operator()<true, 2, 4>();
    }
  }
}

}  // namespace atlas::lora::inline v0::detail
