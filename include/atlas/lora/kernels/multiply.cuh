// SPDX-License-Identifier: AGPL-3.0-only
//
// The warps of a block of the one-launch delta that multiply: chunks of the shrink, the exchange of segment
// sums in the cluster, output tiles of the expand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/multiply_chunks.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// One output tile of a projection, whatever its alignment: a call, so that it takes no registers where all
/// is aligned.
template <class Source, Element T, Element Y>
__device__ __noinline__ void expand_narrow(RowTile<T> const& tile, Operands<T, Y> const& p, int projection,
                                           std::int32_t output_tile, T const* xa) {
  expand_tile<Source, false>(tile, p, projection, output_tile, xa);
}

/// The warps of a block: chunks, the exchange of segment sums in the cluster, output tiles.
template <class Source, int Warps, bool Splits, Element T, Element Y>
class Multiply : public MultiplyChunks<Source, Warps, Splits, T, Y> {
  using Chunks = MultiplyChunks<Source, Warps, Splits, T, Y>;

 public:
  using Chunks::Chunks;

  /// All of the row tile at `index`. The next one's weights are asked for on the way.
  __device__ void tile(int index) {
    RowTile<T> const& tile = shared_.tile(index);
    std::int32_t const all = tile.first_rank_tile[max_projections];
    if (all == 0) return;
    // The first tile's weights were not asked for on the way of another's.
    if (!settled_) {
      if (all > 1) prefetch_a(tile);
      prefetch_b(tile);
    }
    std::int32_t slab = 0;
    std::int32_t ranks;
#pragma unroll 1
    for (;; slab += p_.shape.slab) {
      ranks = min(p_.shape.slab, tile.first_rank_tile[max_projections] - slab);
      shrink(tile, slab, ranks);
      if (slab + ranks >= tile.first_rank_tile[max_projections]) break;
      fold(tile, slab, ranks, xa_place(tile, slab, thread_here()), false);
    }
    // B and y of this warp's first output tile are on their way while segment sums cross.
    OutputTile held{};
    int first = 0;
    while (tile.cell[first].rank == 0) ++first;
    int2 const own = own_outputs(tile, first);
    std::int32_t const end = fast_end(tile, first, own.y);
    load_b_ahead(held, tile, first, own.x + warp_, end);
    load_y(held.y, tile, outputs(tile, first), own.x + warp_, end);
    XaPlace const place = xa_place(tile, slab, thread_here());
    bool const known = index + 1 < shared_.head->window_end;
    if (known) {
      prefetch_a(shared_.tile(index + 1));
      prefetch_b(shared_.tile(index + 1));
    }
    fold(tile, slab, ranks, place, known && shared_.tile(index + 1).exists == 0);
#pragma unroll 1
    for (int i = first; i < p_.num_projections; ++i) {
      if (tile.cell[i].rank > 0) expand(held, tile, i, i > first);
    }
  }

  /// Waits for what may still be under way to this block, which must not leave before: the team's other
  /// blocks arrive after every slab but the last of a row tile that was known to be the last. The row tile at
  /// `index` is the first that does not exist.
  __device__ void finish(int index) {
    settle();
    bool const known = index > 0 && shared_.tile(index - 1).first_rank_tile[max_projections] > 0;
    if (slabs_ > 0 && !known) shared_.head->sums_empty.wait((slabs_ - 1) & 1u);
  }

 private:
  using Chunks::multiply_group;
  using Chunks::own_segments;
  using Chunks::p_;
  using Chunks::prefetch_a;
  using Chunks::prefetch_elements;
  using Chunks::settle;
  using Chunks::settled_;
  using Chunks::shared_;
  using Chunks::team;
  using Chunks::warp_;
  using Chunks::warps_log2;

  // --- Shrink --------------------------------------------------------------------------------------------

  /// Multiplies the block's chunks of `ranks` rank tiles from `slab` and sends the segment sums to every
  /// block of the team.
  __device__ void shrink(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks) {
    DeltaShape const& shape = p_.shape;
    Share const own = own_segments();
    std::int32_t s = own.first;
#pragma unroll 1
    do {
      std::int32_t const last = min(s + team().group, own.last);
      std::int32_t const sums = (last - s) * ranks;
      Sending const sending = sending_of(0, s, ranks, sums);
      multiply_group(tile, slab, ranks, s, last);
      settle();
      __syncthreads();
      if (s == own.first && slabs_ > 0) shared_.head->sums_empty.wait((slabs_ - 1) & 1u);
      send_sums(sending, s, ranks, sums, tile.quads);
      s = last;
      if (s < own.last) __syncthreads();
    } while (s < own.last);
  }

  // --- Exchange ------------------------------------------------------------------------------------------

  /// One segment sum and where it goes.
  struct Sending {
    std::int32_t chunks;  ///< to fold
    std::int32_t from;    ///< the first of them, counted in `chunks` of shared memory
    std::int32_t to;      ///< counted in `segments`
  };

  /// Warps that share the targets of one of `sums` sums, as a power of two.
  [[nodiscard]] __device__ static int sharing_log2(std::int32_t sums) {
    return max(warps_log2 - (32 - __clz(sums - 1)), 0);
  }

  /// This warp's `turn`-th sum of the group of segments from `first`.
  __device__ Sending sending_of(std::int32_t turn, std::int32_t first, std::int32_t ranks,
                                std::int32_t sums) const {
    DeltaShape const& shape = p_.shape;
    int const sharing = sharing_log2(sums);
    std::int32_t r = (warp_ >> sharing) + turn * (Warps >> sharing);
    std::int32_t segment = first;
    while (r >= ranks) {
      r -= ranks;
      ++segment;
    }
    std::int32_t const here = min(shape.segment_blocks, shape.blocks - segment * shape.segment_blocks);
    std::int32_t const chunks = here == shape.segment_blocks
                                    ? shape.segment_chunks
                                    : (here + shape.chunk_blocks - 1) / shape.chunk_blocks;
    return {chunks, r * shape.chunk_slots + (segment - first) * shape.segment_chunks,
            r * max_segments + segment};
  }

  /// Folds the chunks of the group of segments from `first` and sends the sums of rows that exist to every
  /// block of the team. Warps share a sum's targets where there are fewer sums than warps.
  __device__ void send_sums(Sending sending, std::int32_t first, std::int32_t ranks, std::int32_t sums,
                            int quads) const {
    int const sharing = sharing_log2(sums);
    auto const local = shared_address(shared_.head);
    auto const done = shared_address(&shared_.head->sums_full);
    std::int32_t i = warp_ >> sharing;
    if (i >= sums) return;
    for (std::int32_t turn = 1;; ++turn) {
      float4 const* const from = shared_.chunks + sending.from * warp_threads + lane_index();
      auto const to = shared_address(shared_.segments + sending.to * warp_threads + lane_index());
      float4 total = from[0];
#pragma unroll
      for (int c = 1; c < max_chunks; ++c) {
        if (c < sending.chunks) total = add(total, from[c * warp_threads]);
      }
#pragma unroll 1
      for (int target = warp_ & ((1 << sharing) - 1); target < 1 << team().log2; target += 1 << sharing) {
        std::uint32_t const there = address_in_block(local, block_of_team(target)) - local;
        if (quad() < quads) send(there + to, total, there + done);
      }
      i += Warps >> sharing;
      if (i >= sums) return;
      sending = sending_of(turn, first, ranks, sums);
    }
  }
  __device__ static float4 add(float4 const& a, float4 const& b) {
    return make_float4(add_rn(a.x, b.x), add_rn(a.y, b.y), add_rn(a.z, b.z), add_rn(a.w, b.w));
  }

  /// Where one value of a rank tile's sums goes in xa.
  struct XaPlace {
    T* xa;
    bool inside;  ///< below the rank
    bool half;    ///< its tile is the rank's last and fills half of a block
  };

  /// Of value `value` of a slab's sums, counted over rank tiles, lanes and their four each.
  __device__ XaPlace xa_place(RowTile<T> const& tile, std::int32_t slab, int value) const {
    std::int32_t const rank_tile = slab + value / rank_tile_values;
    value %= rank_tile_values;
    int const projection = projection_of(tile, rank_tile);
    std::int32_t const rank = rank_of<Source>(tile, projection);
    std::int32_t const local = rank_tile - tile.first_rank_tile[projection];
    std::int32_t const j = local * tile_ranks + value / 16 + value % 4 / 2 * tile_batch_rows;
    int const row = value / 4 % 4 * 2 + value % 2;
    return {shared_.xa + row * p_.xa_shared_stride + p_.shape.xa_offset[projection] + j, j < rank,
            local % 2 == 0 && (local + 1) * tile_ranks >= rank};
  }

  /// Folds the segments of a slab, all that there could be, into xa, zero from the rank to the end of its
  /// block; `place` is this thread's first. The team's other blocks hear of it unless nothing comes after.
  __device__ void fold(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks, XaPlace place,
                       bool last) {
    DeltaHead<Warps, T>& head = *shared_.head;
    if (threadIdx.x == 0) {
      head.sums_full.arrive_expecting(static_cast<std::uint32_t>(p_.shape.segments * ranks * 8 * tile.quads) *
                                      sizeof(float4));
    }
    int i = thread_here();
    constexpr int step = Warps * warp_threads / rank_tile_values;
    auto const* own = reinterpret_cast<float const*>(shared_.segments) +
                      i / rank_tile_values * rank_tile_segments + i % rank_tile_values;
    head.sums_full.wait(slabs_ & 1u);
    while (i < ranks * rank_tile_values) {
      float total = own[0];
#pragma unroll
      for (int s = 1; s < max_segments; ++s) {
        total = add_rn(total, own[s * rank_tile_values]);
      }
      T const zero = round_to<T>(0.0F);
      place.xa[0] = place.inside ? round_to<T>(total) : zero;
      if (place.half) place.xa[tile_ranks] = zero;
      i += Warps * warp_threads;
      own += step * rank_tile_segments;
      if (i >= ranks * rank_tile_values) break;
      place = xa_place(tile, slab, i);
    }
    __syncthreads();
    auto const thread = static_cast<int>(threadIdx.x);
    if (!last && thread < 1 << team().log2) head.sums_empty.arrive_at(block_of_team(thread));
    ++slabs_;
  }

  /// Where block `block` of the team is in the cluster.
  [[nodiscard]] __device__ std::uint32_t block_of_team(int block) const {
    if constexpr (!Splits) return static_cast<std::uint32_t>(block);
    int const cluster = (1 << p_.shape.team[0].log2) - 1;
    int const within = (1 << team().log2) - 1;
    return static_cast<std::uint32_t>((static_cast<int>(blockIdx.x) & cluster & ~within) + block);
  }

  // --- Expand --------------------------------------------------------------------------------------------

  /// The block's output tiles of a projection of a row tile: first and last.
  [[nodiscard]] __device__ int2 own_outputs(RowTile<T> const& tile, int projection) const {
    return shared_.head->own[tile.divided][projection];
  }

  /// What a warp holds of an output tile: two blocks of the rank's B, and y.
  struct OutputTile {
    Pack<T> b[2][4];
    Pack<Y> y;
  };

  /// The end of a block's output tiles of a projection that are aligned and whole.
  __device__ std::int32_t fast_end(RowTile<T> const& tile, int projection, std::int32_t last) const {
    auto const n_out = static_cast<std::int32_t>(p_.projections[projection].table.n_out);
    return tile.wide != 0 && p_.wide ? min(last, n_out / tile_outputs) : 0;
  }

  /// B of an output tile before `end` at the block of the rank from `j` on. Lanes beyond the rank keep what
  /// they have.
  __device__ void load_b(Pack<T> (&b)[4], RowTile<T> const& tile, int projection, std::int32_t output_tile,
                         std::int32_t j, std::int32_t end) const {
    RouteCell<T> const& cell = tile.cell[projection];
    std::int32_t const n = output_tile * tile_outputs + output_of(lane_index(), 0);
    j += quad() * pack_elements;
    if (output_tile >= end || j >= rank_of<Source>(tile, projection)) return;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      b[m] = load_global(cell.b + static_cast<std::int64_t>(n + 2 * m) * cell.b_row_stride + j);
  }

  /// Where this lane's outputs of a projection's first output tile are.
  __device__ Y* outputs(RowTile<T> const& tile, int projection) const {
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    return target.y + tile.row[group()] * target.y_row_stride + quad() * pack_elements;
  }

  /// Loads what comes first of B of an output tile before `end`.
  __device__ void load_b_ahead(OutputTile& held, RowTile<T> const& tile, int projection,
                               std::int32_t output_tile, std::int32_t end) const {
    load_b(held.b[0], tile, projection, output_tile, 0, end);
    load_b(held.b[1], tile, projection, output_tile, block_elements, end);
  }
  /// y of an output tile before `end`; `y` is the projection's `outputs`.
  __device__ void load_y(Pack<Y>& held, RowTile<T> const& tile, Y const* y, std::int32_t output_tile,
                         std::int32_t end) const {
    if (tile.row[group()] >= 0 && output_tile < end) held = load_vectors(y + output_tile * tile_outputs);
  }

  /// Expands the block's output tiles of one projection and folds them into y. The warp's first is in `held`
  /// unless `late`.
  __device__ void expand(OutputTile& held, RowTile<T> const& tile, int projection, bool late) {
    int2 const own = own_outputs(tile, projection);
    std::int32_t const end = fast_end(tile, projection, own.y);
    std::int32_t t = own.x + warp_;
    Y* const y = outputs(tile, projection);
    std::int32_t const rank = rank_of<Source>(tile, projection);
    if (late) {
      held = OutputTile{};
      load_b_ahead(held, tile, projection, t, end);
      load_y(held.y, tile, y, t, end);
    }
    T const* const xa =
        shared_.xa + group() * p_.xa_shared_stride + p_.shape.xa_offset[projection] + quad() * pack_elements;
#pragma unroll 1
    while (t < end) {
      std::int32_t const now = t;
      Accumulator<T> sums[2];
      multiply_outputs(sums, held.b[0], load_vectors(xa), rank);
      if (rank > block_elements)
        multiply_outputs(sums, held.b[1], load_vectors(xa + block_elements), rank - block_elements);
#pragma unroll 1
      for (std::int32_t j = 2 * block_elements; j < rank; j += block_elements) {
        if (rank - j < block_elements) clear(held.b[0]);
        load_b(held.b[0], tile, projection, now, j, end);
        multiply_outputs(sums, held.b[0], load_vectors(xa + j), rank - j);
      }
      Pack<Y> const before = held.y;
      t += Warps;
      load_b_ahead(held, tile, projection, t, end);
      load_y(held.y, tile, y, t, end);
      fold_outputs(tile, projection, y, now, sums, before);
    }
    if (end >= own.y) return;
#pragma unroll 1
    for (t = own.x + warp_; t < own.y; t += Warps) {
      if (t >= end)
        expand_narrow<Source>(tile, p_, projection, t, shared_.xa + p_.shape.xa_offset[projection]);
    }
  }

  /// Adds one block of the rank, of which `left` are left, to an output tile's chains.
  __device__ static void multiply_outputs(Accumulator<T> (&sums)[2], Pack<T> (&b)[4], Pack<T> const& x,
                                          std::int32_t left) {
    if (left % pack_elements != 0) {
#pragma unroll
      for (int m = 0; m < 4; ++m) keep(b[m], left - quad() * pack_elements);
    }
    sums[0].add(b[0], b[1], x);
    sums[1].add(b[2], b[3], x);
  }
  __device__ static void clear(Pack<T> (&b)[4]) {
#pragma unroll
    for (int m = 0; m < 4; ++m) b[m] = Pack<T>{};
  }

  /// Finishes an output tile and folds it into y, which was `before`.
  __device__ void fold_outputs(RowTile<T> const& tile, int projection, Y* y, std::int32_t output_tile,
                               Accumulator<T> const (&sums)[2], Pack<Y> const& before) const {
    RouteCell<T> const& cell = tile.cell[projection];
    Pack<T> const delta =
        finish_outputs(cell, p_.projections[projection].table.n_out, output_tile * tile_outputs, sums);
    if (tile.row[group()] >= 0)
      store_vectors(y + output_tile * tile_outputs, folded(before, delta, cell.scale));
  }

  // --- The next tile -------------------------------------------------------------------------------------

  /// Asks for the block's share of a row tile's B, a thread a projection.
  __device__ void prefetch_b(RowTile<T> const& tile) const {
    auto const i = static_cast<int>(Warps * warp_threads - 1 - threadIdx.x);
    if (i >= p_.num_projections || tile.exists == 0 || tile.wide == 0) return;
    RouteCell<T> const& cell = tile.cell[i];
    int2 const own = own_outputs(tile, i);
    std::int32_t const n = own.x * tile_outputs;
    std::int32_t const n_last =
        min(own.y * tile_outputs, static_cast<std::int32_t>(p_.projections[i].table.n_out));
    if (cell.rank == 0) return;
    prefetch_elements(cell.b + static_cast<std::int64_t>(n) * cell.b_row_stride,
                      static_cast<std::int64_t>(n_last - n) * cell.b_row_stride);
  }

  std::uint32_t slabs_ = 0;  ///< folded
};

}  // namespace atlas::lora::inline v0::detail
