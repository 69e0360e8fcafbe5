// SPDX-License-Identifier: AGPL-3.0-only
//
// The second half of the delta for one row tile: y[row, n] = Y(y[row, n] + scale * T(sum_j xa[row, j] * B[n,
// j] + bias[n])).
//
// A warp takes an output tile of 32 outputs by 8 rows and chains over the true rank. xa is in shared memory,
// `[8, xa_shared_stride]`, zero from the rank to the end of its last block. B is `[n_out, rank]`, row stride
// `b_row_stride`.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Writes a pack to `p`, which is 16-byte aligned.
template <Element T>
__device__ inline void store_vectors(T* p, Pack<T> const& pack) {
  auto* const vectors = reinterpret_cast<uint4*>(p);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i) {
    vectors[i] =
        make_uint4(pack.word[4 * i], pack.word[4 * i + 1], pack.word[4 * i + 2], pack.word[4 * i + 3]);
  }
}

/// Writes the first `valid` elements of a pack; by vectors where all are valid and `wide` promises alignment.
template <Element T>
__device__ inline void store_padded(T* p, Pack<T> pack, std::int32_t valid, bool wide) {
  if (wide && valid >= pack_elements) {
    store_vectors(p, pack);
    return;
  }
#pragma unroll 1
  for (int e = 0; e < min(valid, pack_elements); ++e) {
    p[e] = round_to<T>(element(pack, 0));
    shift_down(pack);
  }
}

/// `y + scale * delta` on a pack, the product rounded to f32 before the sum.
template <Element T, Element Y>
__device__ inline Pack<Y> folded(Pack<Y> const& y, Pack<T> const& delta, float scale) {
  Pack<Y> out;
  float sum[pack_elements];
#pragma unroll
  for (int e = 0; e < pack_elements; ++e) sum[e] = add_rn(element(y, e), mul_rn(scale, element(delta, e)));
  if constexpr (sizeof(Y) == 4) {
#pragma unroll
    for (int e = 0; e < pack_elements; ++e) out.word[e] = __float_as_uint(sum[e]);
  } else {
#pragma unroll
    for (int e = 0; e < pack_elements; e += 2) out.word[e / 2] = pair_bits_rn<Y>(sum[e], sum[e + 1]);
  }
  return out;
}

/// Adds the bias to the sums of an output tile from `first`, rounds, and gives a lane its eight consecutive
/// outputs of its batch row. A whole warp calls it.
template <Element T>
__device__ Pack<T> finish_outputs(RouteCell<T> const& cell, std::int64_t n_out, std::int64_t first,
                                  Accumulator<T> const (&sums)[2]) {
  float4 const low = sums[0].finish();
  float4 const high = sums[1].finish();
  float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (cell.bias != nullptr) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      std::int64_t const n = first + output_of(lane_index(), m);
      float const bias = n < n_out ? widen(cell.bias[n]) : 0.0F;
      value[2 * m] = add_rn(value[2 * m], bias);
      value[2 * m + 1] = add_rn(value[2 * m + 1], bias);
    }
  }
  return transpose<T>(value);
}

/// The rounded delta of outputs `first` to `first + 31` for the tile's rows: of batch row `group()`, the
/// eight outputs from `first + 8 * quad()`. A whole warp calls it.
template <bool Wide, Element T>
__device__ Pack<T> expand_outputs(RouteCell<T> const& cell, std::int32_t rank, std::int64_t n_out,
                                  std::int64_t first, T const* xa, std::int32_t xa_stride) {
  T const* const xa_row = xa + group() * xa_stride + quad() * pack_elements;
  Accumulator<T> sums[2];
  for (std::int32_t block = 0; block < rank_blocks(rank); ++block) {
    std::int32_t const j = block * block_elements + quad() * pack_elements;
    Pack<T> b[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      std::int64_t const n = first + output_of(lane_index(), m);
      b[m] = load_operand<Wide>(cell.b + n * cell.b_row_stride + j, n < n_out ? rank - j : 0);
      if (Wide && rank - j < pack_elements) keep(b[m], rank - j);
    }
    Pack<T> const x = load_vectors(xa_row + block * block_elements);
    sums[0].add(b[0], b[1], x);
    sums[1].add(b[2], b[3], x);
  }
  return finish_outputs(cell, n_out, first, sums);
}

/// Output tiles of all projections of a launch.
template <Element T, Element Y>
ATLAS_HD inline std::int32_t total_output_tiles(Operands<T, Y> const& p) {
  std::int32_t total = 0;
  for (int i = 0; i < p.num_projections; ++i) total += output_tiles(p.projections[i].table.n_out);
  return total;
}

/// Expands and folds one output tile of a projection that has a rank into y; `xa` is the projection's. A
/// whole warp calls it.
template <class Source, bool Wide, Element T, Element Y>
__device__ void expand_tile(RowTile<T> const& tile, Operands<T, Y> const& p, int projection,
                            std::int32_t output_tile, T const* xa) {
  RouteCell<T> const& cell = tile.cell[projection];
  DeltaProjection<T, Y> const& target = p.projections[projection];
  std::int32_t const row = tile.row[group()];
  std::int64_t const n_out = target.table.n_out;
  std::int64_t const first = static_cast<std::int64_t>(output_tile) * tile_outputs;
  std::int64_t const n = first + quad() * pack_elements;
  Y* const y = target.y + row * target.y_row_stride + n;
  std::int64_t const valid = row >= 0 ? n_out - n : 0;
  Pack<Y> const before = load_pack<Wide>(y, valid);
  Pack<T> const delta =
      expand_outputs<Wide>(cell, rank_of<Source>(tile, projection), n_out, first, xa, p.xa_shared_stride);
  store_padded(y, folded(before, delta, cell.scale),
               static_cast<std::int32_t>(min(valid, std::int64_t{pack_elements})), Wide);
}

/// Expands and folds the output tiles `tiles`, counted over the projections in order, into y. All warps of
/// the block call it and take tiles in turn.
template <class Source, bool Wide, Element T, Element Y>
__device__ void expand_tiles(RowTile<T> const& tile, Operands<T, Y> const& p, Share tiles, T const* xa) {
  int const warps = static_cast<int>(blockDim.x) / warp_threads;
  for (std::int32_t t = tiles.first + static_cast<int>(threadIdx.x) / warp_threads; t < tiles.last;
       t += warps) {
    int projection = 0;
    std::int32_t local = t;
    while (local >= output_tiles(p.projections[projection].table.n_out)) {
      local -= output_tiles(p.projections[projection].table.n_out);
      ++projection;
    }
    if (rank_of<Source>(tile, projection) == 0) continue;
    expand_tile<Source, Wide>(tile, p, projection, local, xa + xa_shared_offset(p, projection));
  }
}

}  // namespace atlas::lora::inline v0::detail
