// SPDX-License-Identifier: AGPL-3.0-only
//
// The first half of the prefill form: segment sums of a piece, and the fold of them into xa.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/prefill_shared.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The shrink of a block. What stands in ranks and rows that do not exist is as in `Multiply`.
template <class Source, Element T, Element Y>
class PrefillShrink {
 public:
  __device__ PrefillShrink(Operands<T, Y> const& p, PrefillShared<T> const& shared)
      : p_(p), shared_(shared) {}

  /// Multiplies the block's segments of `ranks` rank tiles from `slab` and sends the sums to the blocks that
  /// fold them.
  __device__ void multiply(Piece<T> const& piece, std::int32_t slab, std::int32_t ranks) {
    if (piece.wide == 0 || !p_.wide) {
      multiply_narrow(p_, shared_.sums, piece, slab);
      return;
    }
    Share const segments = p_.shape.segments_of(p_.shape.team[0], block_of(p_));
    ShrinkUnits const units(segments.size(), ranks, piece.tiles);
    std::int32_t const count = units.count();
#pragma unroll 1
    for (std::int32_t i = warp_index(); i < count; i += prefill_warps) {
      ShrinkUnit unit = units.unit(i);
      unit.segment += segments.first;
      if (unit.ranks.size() == 2) {
        if (unit.tiles.size() == 2) {
          multiply_unit<2, 2, ahead(2)>(piece, slab, unit);
        } else {
          multiply_unit<2, 1, ahead(3)>(piece, slab, unit);
        }
      } else if (unit.tiles.size() == 3) {
        multiply_unit<1, 3, ahead(3)>(piece, slab, unit);
      } else if (unit.tiles.size() == 2) {
        multiply_unit<1, 2, ahead(4)>(piece, slab, unit);
      } else {
        multiply_unit<1, 1, ahead(5)>(piece, slab, unit);
      }
    }
  }

  /// Folds the segments of this block's share of the slab's sums, rounds, and gives every block of the
  /// cluster the xa, zero from the rank to the end of its block. A warp takes a row tile's rank tile.
  __device__ void fold(Piece<T> const& piece, std::int32_t slab, std::int32_t ranks) const {
    int const cluster_log2 = p_.shape.team[0].log2;
    std::int32_t const own = folded_sums(piece.tiles * ranks, cluster_log2, block_of(p_));
#pragma unroll 1
    for (std::int32_t i = warp_index(); i < own; i += prefill_warps) {
      std::int32_t const sum = block_of(p_) + (i << cluster_log2);
      std::int32_t const tile = sum / ranks;
      send_xa(piece, tile, slab + sum - tile * ranks, folded_sum(i));
    }
  }

 private:
  /// Blocks on their way: one fewer where y is float, two where there is one pair, which leave fewer
  /// registers.
  static ATLAS_HD constexpr int ahead(int most) {
    if (Source::one_pair) return most > 2 ? most - 2 : 1;
    return sizeof(Y) == 2 ? most : most - 1;
  }

  /// One segment of `Ranks` rank tiles and `Tiles` row tiles. `Ahead` blocks are always on their way; the
  /// place of one that was multiplied takes the next.
  template <int Ranks, int Tiles, int Ahead>
  __device__ void multiply_unit(Piece<T> const& piece, std::int32_t slab, ShrinkUnit const& unit) {
    BlockRange const blocks{unit.segment * p_.shape.segment_blocks,
                            min((unit.segment + 1) * p_.shape.segment_blocks, p_.shape.blocks)};
    std::int32_t const k = blocks.first * block_elements + quad() * pack_elements;
    // A block is this lane's where it begins before `left`, counted from the loop's.
    std::int32_t left = min(blocks.size() * block_elements, static_cast<std::int32_t>(p_.k_in) - k);
    T const* low[Ranks];
    T const* high[Ranks];
    T const* x[Tiles];
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
      std::int32_t const rank_tile = slab + unit.ranks.first + r;
      int const projection = projection_of(piece, rank_tile);
      std::int32_t const last = rank_of<Source>(piece, projection) - 1;
      std::int32_t const j = (rank_tile - piece.first_rank_tile[projection]) * tile_ranks + group();
      T const* const a = piece.cell[projection].a + k;
      low[r] = a + min(j, last) * p_.k_in;
      high[r] = a + min(j + tile_batch_rows, last) * p_.k_in;
    }
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      std::int32_t const row = piece.x_row[(unit.tiles.first + t) * tile_rows + group()];
      x[t] = p_.x + max(row, 0) * p_.x_row_stride + k;
    }
    Pack<T> a_low[Ahead][Ranks];
    Pack<T> a_high[Ahead][Ranks];
    Pack<T> x_pack[Ahead][Tiles];
    // The sum's last block may be shorter than this lane's place in it.
    auto const load = [&](Pack<T>& pack, T const* from, int b) {
      pack = Pack<T>{};
      load_if(pack, from + b * block_elements, b * block_elements < left);
    };
    auto const load_a = [&](int place, int b) {
#pragma unroll
      for (int r = 0; r < Ranks; ++r) {
        load(a_low[place][r], low[r], b);
        load(a_high[place][r], high[r], b);
      }
    };
    auto const load_x = [&](int place, int b) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) load(x_pack[place][t], x[t], b);
    };
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      load_a(i, i);
      load_x(i, i);
    }
    Accumulator<T> sum[Ranks][Tiles];
    // The sum that changes nothing.
    float4 total[Ranks][Tiles];
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) total[r][t] = make_float4(-0.0F, -0.0F, -0.0F, -0.0F);
    }
    std::int32_t in_chunk = 0;
#pragma unroll 1
    for (std::int32_t todo = blocks.size(); todo > 0; todo -= Ahead) {
#pragma unroll
      for (int i = 0; i < Ahead; ++i) {
        if (i >= todo) break;
#pragma unroll
        for (int r = 0; r < Ranks; ++r) {
#pragma unroll
          for (int t = 0; t < Tiles; ++t) sum[r][t].add(a_low[i][r], a_high[i][r], x_pack[i][t]);
        }
        load_a(i, i + Ahead);
        load_x(i, i + Ahead);
        if (++in_chunk < p_.shape.chunk_blocks && i + 1 < todo) continue;
        in_chunk = 0;
#pragma unroll
        for (int r = 0; r < Ranks; ++r) {
#pragma unroll
          for (int t = 0; t < Tiles; ++t) {
            total[r][t] = add(total[r][t], sum[r][t].finish());
            sum[r][t] = Accumulator<T>{};
          }
        }
      }
      left -= Ahead * block_elements;
#pragma unroll
      for (int r = 0; r < Ranks; ++r) {
        low[r] += Ahead * block_elements;
        high[r] += Ahead * block_elements;
      }
#pragma unroll
      for (int t = 0; t < Tiles; ++t) x[t] += Ahead * block_elements;
    }
    std::int32_t const ranks =
        min(prefill_slab(p_.segment_rank_tiles), piece.first_rank_tile[max_projections] - slab);
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t)
        send_sum(p_, shared_.sums, (unit.tiles.first + t) * ranks + unit.ranks.first + r, unit.segment,
                 total[r][t]);
    }
  }

  /// All of this warp's share of a slab for operands that vectors cannot load: a call, so that it takes no
  /// registers where they can.
  static __device__ __noinline__ void multiply_narrow(Operands<T, Y> const& p, float4* sums,
                                                      Piece<T> const& piece, std::int32_t slab) {
    Share const segments = p.shape.segments_of(p.shape.team[0], block_of(p));
    std::int32_t const ranks =
        min(prefill_slab(p.segment_rank_tiles), piece.first_rank_tile[max_projections] - slab);
    std::int32_t const count = segments.size() * ranks * piece.tiles;
#pragma unroll 1
    for (std::int32_t i = warp_index(); i < count; i += prefill_warps) {
      std::int32_t const above = i / piece.tiles;
      std::int32_t const segment = segments.first + above / ranks;
      float4 const sum = narrow_sum(p, piece, segment, slab + above % ranks, i % piece.tiles);
      send_sum(p, sums, i % piece.tiles * ranks + above % ranks, segment, sum);
    }
  }
  /// The sum of a segment for a rank tile and a row tile.
  static __device__ float4 narrow_sum(Operands<T, Y> const& p, Piece<T> const& piece, std::int32_t segment,
                                      std::int32_t rank_tile, std::int32_t tile) {
    std::int32_t const first = segment * p.shape.segment_blocks;
    std::int32_t const last = min(first + p.shape.segment_blocks, p.shape.blocks);
    int const projection = projection_of(piece, rank_tile);
    std::int32_t const rank = rank_of<Source>(piece, projection);
    std::int32_t const j = (rank_tile - piece.first_rank_tile[projection]) * tile_ranks + group();
    T const* const a = piece.cell[projection].a + j * p.k_in;
    T const* const x = p.x + max(piece.x_row[tile * tile_rows + group()], 0) * p.x_row_stride;
    float4 total = make_float4(-0.0F, -0.0F, -0.0F, -0.0F);
#pragma unroll 1
    for (std::int32_t chunk = first; chunk < last; chunk += p.shape.chunk_blocks) {
      Accumulator<T> sum;
#pragma unroll 1
      for (std::int32_t b = chunk; b < min(chunk + p.shape.chunk_blocks, last); ++b) {
        std::int64_t const k = k_of(b, quad(), 0);
        std::int64_t const valid = p.k_in - k;
        Pack<T> const low = load_elements(a + k, j < rank ? valid : 0);
        Pack<T> const high =
            load_elements(a + tile_batch_rows * p.k_in + k, j + tile_batch_rows < rank ? valid : 0);
        sum.add(low, high, load_elements(x + k, valid));
      }
      total = add(total, sum.finish());
    }
    return total;
  }

  /// Sends a segment's share of the slab's `index`-th sum to the block that folds it.
  static __device__ void send_sum(Operands<T, Y> const& p, float4* sums, std::int32_t index,
                                  std::int32_t segment, float4 const& sum) {
    int const cluster_log2 = p.shape.team[0].log2;
    store_to_block(sums + sum_place(index >> cluster_log2, segment) * warp_threads + lane_index(),
                   static_cast<std::uint32_t>(index & ((1 << cluster_log2) - 1)), sum);
  }

  /// The sum of all segments that this block folds as its `index`-th.
  __device__ float4 folded_sum(std::int32_t index) const {
    float4 const* const from = shared_.sums + sum_place(index, 0) * warp_threads + lane_index();
    float4 total = from[0];
#pragma unroll
    for (int s = 1; s < max_segments; ++s) {
      if (s < p_.shape.segments) total = add(total, from[s * warp_threads]);
    }
    return total;
  }

  /// Rounds the sums of a row tile and a rank tile, counted over the projections, and gives them to every
  /// block of the cluster. A lane first has two ranks of a row, then a vector for every other block.
  __device__ void send_xa(Piece<T> const& piece, std::int32_t tile, std::int32_t rank_tile,
                          float4 const& total) const {
    int const projection = projection_of(piece, rank_tile);
    std::int32_t const rank = rank_of<Source>(piece, projection);
    std::int32_t const local = rank_tile - piece.first_rank_tile[projection];
    std::int32_t const left = rank - local * tile_ranks - group();
    std::uint32_t const low = pair_of_ranks(left > 0 ? total.x : 0.0F, left > 0 ? total.y : 0.0F);
    bool const upper = left > pack_elements;
    std::uint32_t const high = pair_of_ranks(upper ? total.z : 0.0F, upper ? total.w : 0.0F);
    int const eighth = lane_index() / 4 % 2;
    int const half = lane_index() / 8 % 2;
    std::uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const source = (4 * half + i) * 4 + quad();
      std::uint32_t const of_low = __shfl_sync(0xffffffffu, low, source);
      std::uint32_t const of_high = __shfl_sync(0xffffffffu, high, source);
      word[i] = eighth != 0 ? of_high : of_low;
    }
    float4 const vector = make_float4(__uint_as_float(word[0]), __uint_as_float(word[1]),
                                      __uint_as_float(word[2]), __uint_as_float(word[3]));
    std::int32_t const block = p_.shape.xa_offset[projection] / block_elements + local / 2;
    auto* const to = reinterpret_cast<float4*>(shared_.xa) +
                     xa_vector(block, tile * tile_rows + 2 * quad(), local % 2 * 2 + eighth, half);
    // The tile is the rank's last and fills half of a block.
    bool const last = local % 2 == 0 && (local + 1) * tile_ranks >= rank;
#pragma unroll 1
    for (int target = lane_index() / 16; target < 1 << p_.shape.team[0].log2; target += 2) {
      auto const there = static_cast<std::uint32_t>(target);
      store_to_block(to, there, vector);
      if (last) store_to_block(to + 2, there, float4{});
    }
  }
  /// Of one rank's values of batch rows 2 quad() and 2 quad() + 1, which a lane has: two ranks' of one row,
  /// rounded. Lanes of even ranks have the first row, those of uneven ranks the second.
  static __device__ std::uint32_t pair_of_ranks(float first, float second) {
    bool const odd = group() % 2 != 0;
    float const other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
    return odd ? pair_bits_rn<T>(other, second) : pair_bits_rn<T>(first, other);
  }

  __device__ static float4 add(float4 const& a, float4 const& b) {
    return make_float4(add_rn(a.x, b.x), add_rn(a.y, b.y), add_rn(a.z, b.z), add_rn(a.w, b.w));
  }

  Operands<T, Y> const& p_;
  PrefillShared<T> shared_;
};

}  // namespace atlas::lora::inline v0::detail
