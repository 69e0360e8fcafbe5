// SPDX-License-Identifier: AGPL-3.0-only
//
// The first half of the prefill form: segment sums of a piece, and the fold of them into xa.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/prefill_ring.cuh"
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
  /// fold them; without a cluster it folds all but the last of them. No warp is still at what the ring's
  /// memory held.
  __device__ void multiply(Piece<T> const& piece, std::int32_t slab, std::int32_t ranks) {
    if (piece.wide == 0 || !p_.wide) {
      multiply_narrow(p_, shared_.sums, piece, slab, ranks);
      return;
    }
    ShrinkSplit const split(p_.shape.team[0].block_segments, ranks, piece.tiles);
    if (split.group_blocks() == 1) {
      if (ranks == 1) {
        multiply_segments<1, 2, 1>(piece, slab, ranks);
      } else if (split.tile_step() <= 2) {
        multiply_segments<2, 2, 1>(piece, slab, ranks);
      } else {
        multiply_segments<2, 4, 1>(piece, slab, ranks);
      }
    } else if (ranks == 1) {
      multiply_segments<1, 1, 2>(piece, slab, ranks);
    } else {
      multiply_segments<2, 2, 2>(piece, slab, ranks);
    }
  }

  /// Folds the segments of this block's share of the slab's sums, rounds, and gives every block of the
  /// cluster the xa, zero from the rank to the end of its block. A warp takes a row tile's rank tile.
  __device__ void fold(Piece<T> const& piece, std::int32_t slab, std::int32_t ranks) const {
    int const cluster_log2 = p_.shape.team[0].log2;
    std::int32_t const own = folded_sums(piece.tiles * ranks, cluster_log2, block_of(p_));
    // Without a cluster all rounds but the last are folded.
    std::int32_t const groups = ShrinkSplit(p_.shape.team[0].block_segments, ranks, piece.tiles).groups();
    std::int32_t const parts = lone() ? (p_.shape.segments - 1) % groups + 1 : p_.shape.segments;
#pragma unroll 1
    for (std::int32_t i = warp_index(); i < own; i += prefill_warps) {
      std::int32_t const sum = block_of(p_) + (i << cluster_log2);
      std::int32_t const tile = sum / ranks;
      send_xa(piece, tile, slab + sum - tile * ranks, folded_sum(i, parts));
    }
  }

 private:
  /// Whether the block is without a cluster and has all segments.
  [[nodiscard]] __device__ bool lone() const { return p_.shape.team[0].log2 == 0; }
  /// Whether the sums of a warp leave it no registers for what can be found again.
  template <int Tiles>
  static constexpr bool lean = Tiles == 4;

  /// The block's segments of `Ranks` rank tiles and up to `Tiles` row tiles a warp, its group having `Blocks`
  /// blocks of k of a stage.
  template <int Ranks, int Tiles, int Blocks>
  __device__ void multiply_segments(Piece<T> const& piece, std::int32_t slab, std::int32_t ranks) const {
    constexpr int groups = stage_blocks / Blocks;
    ShrinkSplit const split(groups, ranks, piece.tiles);
    Share const own = p_.shape.segments_of(p_.shape.team[0], block_of(p_));
    if (own.first + group_of<Blocks>() >= own.last) {
      // It has no segment, and takes part in the others' rounds.
      for (std::int32_t first = own.first; first < own.last; first += groups)
        end_round(piece, ranks, first + groups);
      return;
    }
    PrefillRing<Blocks, lean<Tiles>, Source, T, Y> ring(p_, shared_, piece, slab, ranks,
                                                        own.first + group_of<Blocks>(), own.last);
#pragma unroll 1
    for (std::int32_t first = own.first; first < own.last; first += groups) {
      if (first + group_of<Blocks>() < own.last) {
        Sums<Ranks, Tiles> sums;
        multiply_blocks<Blocks>(sums, ring, ranks, split, first + group_of<Blocks>());
        send_sums(sums, ranks, split, group_of<Blocks>() + (lone() ? 0 : first), lone() && first > 0);
      }
      end_round(piece, ranks, first + groups);
    }
  }
  /// The thread's group, asked for again rather than held.
  template <int Blocks>
  static __device__ int group_of() {
    return thread_here() / (prefill_warps * warp_threads * Blocks / stage_blocks);
  }
  /// Folds a round of the groups without a cluster, where segments from `next` on come after it.
  __device__ void end_round(Piece<T> const& piece, std::int32_t ranks, std::int32_t next) const {
    if (!lone() || next >= p_.shape.segments) return;
    __syncthreads();
    std::int32_t const count = piece.tiles * ranks;
#pragma unroll 1
    for (std::int32_t i = warp_index(); i < count; i += prefill_warps)
      *kept_sum(i, 0) = folded_sum(i, most_groups);
    __syncthreads();
  }

  /// Sums of a warp: of a chunk and of the segment.
  template <int Ranks, int Tiles>
  struct Sums {
    Accumulator<T> chunk[Ranks][Tiles];
    float4 segment[Ranks][Tiles];

    __device__ Sums() {
#pragma unroll
      for (int r = 0; r < Ranks; ++r) {
#pragma unroll
        for (int t = 0; t < Tiles; ++t) segment[r][t] = make_float4(-0.0F, -0.0F, -0.0F, -0.0F);
      }
    }
    __device__ void end_chunk() {
#pragma unroll
      for (int r = 0; r < Ranks; ++r) {
#pragma unroll
        for (int t = 0; t < Tiles; ++t) {
          segment[r][t] = PrefillShrink::add(segment[r][t], chunk[r][t].finish());
          chunk[r][t] = Accumulator<T>{};
        }
      }
    }
  };

  /// The blocks of k of one segment. What the warp has no rows or ranks for it multiplies all the same, and
  /// does not send.
  template <int Blocks, int Ranks, int Tiles>
  __device__ void multiply_blocks(Sums<Ranks, Tiles>& sums,
                                  PrefillRing<Blocks, lean<Tiles>, Source, T, Y>& ring, std::int32_t ranks,
                                  ShrinkSplit const& split, std::int32_t segment) const {
    Share const own_ranks = split.ranks_of(warp_index());
    Share const own_tiles = split.tiles_of(warp_index());
    std::uint32_t a_at[Ranks];
#pragma unroll
    for (int r = 0; r < Ranks; ++r)
      a_at[r] = (piece_rows + min(own_ranks.first + r, ranks - 1) * tile_ranks) * stage_row_bytes;
    std::uint32_t const x_at = (own_tiles.size() > 0 ? own_tiles.first : 0) * tile_rows * stage_row_bytes;
    std::int32_t left = min(p_.shape.segment_blocks, p_.shape.blocks - segment * p_.shape.segment_blocks);
    std::int32_t const chunk_blocks =
        lean<Tiles> ? p_.shape.chunk_blocks : in_register(p_.shape.chunk_blocks);
    std::int32_t in_chunk = chunk_blocks;
#pragma unroll 1
    while (left > 0) {
      std::uint32_t at = ring.next();
#pragma unroll
      for (int i = 0; i < Blocks; ++i) {
        if (i > 0 && left == 0) break;
        uint4 low[Ranks];
        uint4 high[Ranks];
        uint4 x[2];
#pragma unroll
        for (int r = 0; r < Ranks; ++r) {
          low[r] = load_shared(at + a_at[r]);
          high[r] = load_shared(at + a_at[r] + tile_batch_rows * stage_row_bytes);
        }
        auto const load_x = [&](int t) {
          if (t < Tiles) x[t % 2] = load_shared(at + x_at + t * tile_rows * stage_row_bytes);
        };
        load_x(0);
        load_x(1);
        if (i == 0) ring.refill();
#pragma unroll
        for (int t = 0; t < Tiles; ++t) {
#pragma unroll
          for (int r = 0; r < Ranks; ++r)
            sums.chunk[r][t].add(pack_of(low[r]), pack_of(high[r]), pack_of(x[t % 2]));
          load_x(t + 2);
        }
        at += ring.block_bytes();
        --left;
        if (--in_chunk > 0 && left > 0) continue;
        in_chunk = chunk_blocks;
        sums.end_chunk();
      }
    }
  }

  /// Sends a warp's sums to the blocks that fold them, as `part` of those that are kept, or adds them to what
  /// has been folded there before.
  template <int Ranks, int Tiles>
  __device__ void send_sums(Sums<Ranks, Tiles> const& sums, std::int32_t ranks, ShrinkSplit const& split,
                            std::int32_t part, bool adds) const {
    Share const own_ranks = split.ranks_of(warp_index());
    Share const own_tiles = split.tiles_of(warp_index());
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
        if (r >= own_ranks.size() || t >= own_tiles.size()) continue;
        std::int32_t const index = (own_tiles.first + t) * ranks + own_ranks.first + r;
        float4 sum = sums.segment[r][t];
        if (adds && part == 0) sum = add(*kept_sum(index, 0), sum);
        send_sum(p_, shared_.sums, index, part, sum);
      }
    }
  }
  /// This lane's `part` of the sum that this block folds as its `index`-th.
  __device__ float4* kept_sum(std::int32_t index, std::int32_t part) const {
    std::int32_t const parts = sum_parts(p_.shape.team[0].log2);
    return shared_.sums + (index * parts + part) * warp_threads + lane_index();
  }
  static __device__ Pack<T> pack_of(uint4 const& v) { return {{v.x, v.y, v.z, v.w}}; }

  /// All of this warp's share of a slab for operands that vectors cannot load: a call, so that it takes no
  /// registers where they can.
  static __device__ __noinline__ void multiply_narrow(Operands<T, Y> const& p, float4* sums,
                                                      Piece<T> const& piece, std::int32_t slab,
                                                      std::int32_t ranks) {
    Share const own = p.shape.segments_of(p.shape.team[0], block_of(p));
    bool const lone = p.shape.team[0].log2 == 0;
    std::int32_t const parts = lone ? 1 : own.size();
    std::int32_t const count = parts * ranks * piece.tiles;
#pragma unroll 1
    for (std::int32_t i = warp_index(); i < count; i += prefill_warps) {
      std::int32_t const above = i / piece.tiles;
      std::int32_t const segment = own.first + above / ranks;
      std::int32_t const tile = i % piece.tiles;
      if (!lone) {
        send_sum(p, sums, tile * ranks + above % ranks, segment,
                 narrow_sum(p, piece, segment, slab + above % ranks, tile));
        continue;
      }
      float4 const none = make_float4(-0.0F, -0.0F, -0.0F, -0.0F);
      float4 sum = none;
#pragma unroll 1
      for (std::int32_t s = own.first; s < own.last; ++s)
        sum = add(sum, narrow_sum(p, piece, s, slab + above % ranks, tile));
#pragma unroll 1
      for (std::int32_t part = 0; part < most_groups; ++part)
        send_sum(p, sums, tile * ranks + above % ranks, part, part == 0 ? sum : none);
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
    std::int32_t const place = (index >> cluster_log2) * sum_parts(cluster_log2) + segment;
    store_to_block(sums + place * warp_threads + lane_index(),
                   static_cast<std::uint32_t>(index & ((1 << cluster_log2) - 1)), sum);
  }

  /// The first `parts` of the sum that this block folds as its `index`-th.
  __device__ float4 folded_sum(std::int32_t index, std::int32_t parts) const {
    float4 const* const from = kept_sum(index, 0);
    float4 total = from[0];
#pragma unroll
    for (int s = 1; s < max_segments; ++s) {
      if (s < parts) total = add(total, from[s * warp_threads]);
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
