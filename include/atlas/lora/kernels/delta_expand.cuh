// SPDX-License-Identifier: AGPL-3.0-only
//
// The warps of a block of the one-launch delta that expand: they wait for the segment sums of a row tile,
// fold them into xa, multiply by the block's share of B and fold the products into y.
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
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/pool/pair.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

/// The expanding warps of a block, `Warps` of them, behind as many that shrink.
template <class Source, int Warps, Element T, Element Y>
class DeltaExpand {
 public:
  __device__ DeltaExpand(Operands<T, Y> const& p, DeltaShared<T> const& shared)
      : p_(p),
        shared_(shared),
        warp_(warp_index() - Warps),
        thread_(static_cast<int>(threadIdx.x) - Warps * warp_threads) {}

  /// The row tiles of a window, which has `count` of them and is the last one where `ends`.
  __device__ void window(int count, bool ends) {
    end_stage_ = stage_;
    for (int i = 0; i < count; ++i) {
      end_stage_ += static_cast<std::uint32_t>(
          (shared_.tile(i).first_rank_tile[max_projections] + p_.shape.slab - 1) / p_.shape.slab);
    }
    if (!ends) end_stage_ += 2;
#pragma unroll 1
    for (int i = 0; i < count; ++i) tile(i, count);
  }

  [[nodiscard]] __device__ DeltaShared<T> const& shared() const { return shared_; }

  /// Waits for the launch's dependencies and for the cluster, unless it has.
  __device__ void settle() { settle_once(settled_, p_.inputs_settled); }

 private:
  __device__ void tile(int index, int count) {
    RowTile<T> const& tile = shared_.tile(index);
    std::int32_t const all = tile.first_rank_tile[max_projections];
    if (!settled_) prefetch_b(tile);
    if (index + 1 < count) prefetch_b(shared_.tile(index + 1));
    if (all == 0) return;
    row_ = tile.row[group()];
    int first = 0;
    while (tile.cell[first].rank == 0) ++first;
    // B and y of this warp's first output tiles are on their way while segment sums cross.
    Held held{};
    int2 const own = shared_.head->own[first];
    std::int32_t const end = fast_end(tile, first, own.y);
    load_b_ahead(held, tile, first, own.x + warp_, end);
    settle();
    load_y_ahead<0>(held, outputs(first), own.x + warp_, end, tile_units_log2(rank_of<Source>(tile, first)));
#pragma unroll 1
    for (std::int32_t slab = 0; slab < all; slab += p_.shape.slab) {
      fold(tile, slab, min(p_.shape.slab, all - slab));
    }
#pragma unroll 1
    for (int i = first; i < p_.num_projections; ++i) {
      if (tile.cell[i].rank > 0) expand(held, tile, i, i > first);
    }
    ++tiles_;
  }

  /// This row tile's buffer of xa: others may still read that of the one before.
  __device__ T* xa_buffer() const { return shared_.xa + (tiles_ & 1u) * (tile_rows * p_.xa_shared_stride); }

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
    return {xa_buffer() + row * p_.xa_shared_stride + p_.shape.xa_offset[projection] + j, j < rank,
            local % 2 == 0 && (local + 1) * tile_ranks >= rank};
  }

  /// Folds the segments of `ranks` rank tiles from `slab`, all segments that there could be, into xa, zero
  /// from the rank to the end of its block. The cluster's blocks hear of it where the buffer is used again.
  __device__ void fold(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks) {
    static_assert(Warps * warp_threads >= rank_tile_values);
    std::uint32_t const buffer = stage_ & 1u;
    Barrier& full = shared_.head->sums_full[buffer];
    if (thread_ == 0) {
      full.arrive_expecting(static_cast<std::uint32_t>(p_.shape.segments * ranks * 8 * tile.quads) *
                            sizeof(float4));
    }
    auto const* own = reinterpret_cast<float const*>(shared_.segments) +
                      (static_cast<int>(buffer) * p_.shape.slab) * rank_tile_segments + thread_;
    XaPlace to = xa_place(tile, slab, thread_);
    full.wait(stage_ / 2 & 1u);
#pragma unroll 1
    for (std::int32_t r = 0; r < ranks && thread_ < rank_tile_values; ++r) {
      if (r > 0) to = xa_place(tile, slab + r, thread_);
      float total = own[0];
#pragma unroll
      for (int s = 1; s < max_segments; ++s) total = add_rn(total, own[s * rank_tile_values]);
      T const zero = round_to<T>(0.0F);
      to.xa[0] = to.inside ? round_to<T>(total) : zero;
      if (to.half) to.xa[tile_ranks] = zero;
      own += rank_tile_segments;
    }
    sync_expand_warps<Warps>();
    if (stage_ + 2 < end_stage_ && thread_ < 1 << p_.shape.cluster_log2)
      shared_.head->sums_empty[buffer].arrive_at(static_cast<std::uint32_t>(thread_));
    ++stage_;
  }

  /// Blocks of the rank, of one output tile or of several, that a warp holds of B.
  static constexpr int units = sizeof(T) == 2 && sizeof(Y) == 2 ? 4 : 2;
  static constexpr int units_log2 = units == 4 ? 2 : 1;

  /// What a warp holds of B and y.
  struct Held {
    Pack<T> b[units][4];
    Pack<Y> y[2];
  };

  /// Units that an output tile takes, as a power of two: all of them where its rank has more blocks.
  [[nodiscard]] __device__ static int tile_units_log2(std::int32_t rank) {
    return rank <= block_elements ? 0 : rank <= 2 * block_elements ? 1 : units_log2;
  }

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
  __device__ Y* outputs(int projection) const {
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    return target.y + row_ * target.y_row_stride + quad() * pack_elements;
  }

  /// Loads what comes first of B of the output tiles from `output_tile` to `end`, every `Warps`-th.
  __device__ void load_b_ahead(Held& held, RowTile<T> const& tile, int projection, std::int32_t output_tile,
                               std::int32_t end) const {
    int const log2 = tile_units_log2(rank_of<Source>(tile, projection));
#pragma unroll
    for (int u = 0; u < units; ++u) {
      load_b(held.b[u], tile, projection, output_tile + (u >> log2) * Warps,
             (u & ((1 << log2) - 1)) * block_elements, end);
    }
  }
  /// Loads y of the first two of the same output tiles, or with `First` of 2 of the two after them; `y` is the
  /// projection's `outputs`.
  template <int First>
  __device__ void load_y_ahead(Held& held, Y const* y, std::int32_t output_tile, std::int32_t end,
                               int log2) const {
    if (row_ < 0) return;
#pragma unroll
    for (int u = First; u < First + 2; ++u) {
      std::int32_t const t = output_tile + u * Warps;
      if (t < end && u << log2 < units) held.y[u % 2] = load_vectors(y + t * tile_outputs);
    }
  }

  /// Expands the block's output tiles of one projection and folds them into y. What comes first is in `held`
  /// unless `late`.
  __device__ void expand(Held& held, RowTile<T> const& tile, int projection, bool late) {
    int2 const own = shared_.head->own[projection];
    std::int32_t const end = fast_end(tile, projection, own.y);
    std::int32_t t = own.x + warp_;
    Y* const y = outputs(projection);
    std::int32_t const rank = rank_of<Source>(tile, projection);
    int const log2 = tile_units_log2(rank);
    if (late) {
      held = Held{};
      load_b_ahead(held, tile, projection, t, end);
      load_y_ahead<0>(held, y, t, end, log2);
    }
    T const* const xa =
        xa_buffer() + group() * p_.xa_shared_stride + p_.shape.xa_offset[projection] + quad() * pack_elements;
#pragma unroll 1
    while (t < end) {
      Accumulator<T> sums[units][2];
      multiply_held(sums, held, tile, projection, t, end, xa, log2);
#pragma unroll
      for (int u = 0; u < units; ++u) {
        if (u << log2 < units && t + u * Warps < end)
          fold_outputs(tile, projection, y, t + u * Warps, sums[u], held.y[u % 2]);
        if (units > 2 && u == 1) load_y_ahead<units - 2>(held, y, t, end, log2);
      }
      t += Warps << (units_log2 - log2);
      if (t < end) {
        load_b_ahead(held, tile, projection, t, end);
        load_y_ahead<0>(held, y, t, end, log2);
      }
    }
    if (end >= own.y) return;
#pragma unroll 1
    for (t = own.x + warp_; t < own.y; t += Warps) {
      if (t >= end) expand_tile<Source, false>(tile, p_, projection, t, xa_buffer() + p_.shape.xa_offset[projection]);
    }
  }

  /// Multiplies what is held, and for a rank of more blocks what comes after it, by xa.
  __device__ void multiply_held(Accumulator<T> (&sums)[units][2], Held& held, RowTile<T> const& tile,
                                int projection, std::int32_t output_tile, std::int32_t end, T const* xa,
                                int log2) const {
    std::int32_t const rank = rank_of<Source>(tile, projection);
    if (log2 == 0) {
      Pack<T> const x = load_vectors(xa);
#pragma unroll
      for (int u = 0; u < units; ++u) multiply_outputs(sums[u], held.b[u], x, rank);
      return;
    }
    if (units > 2 && log2 == 1) {
      Pack<T> const x[2] = {load_vectors(xa), load_vectors(xa + block_elements)};
#pragma unroll
      for (int u = 0; u < units; ++u)
        multiply_outputs(sums[u / 2], held.b[u], x[u % 2], rank - u % 2 * block_elements);
      return;
    }
#pragma unroll
    for (int u = 0; u < units; ++u) {
      if (u * block_elements < rank)
        multiply_outputs(sums[0], held.b[u], load_vectors(xa + u * block_elements), rank - u * block_elements);
    }
#pragma unroll 1
    for (std::int32_t j = units * block_elements; j < rank; j += block_elements) {
      if (rank - j < block_elements) clear(held.b[0]);
      load_b(held.b[0], tile, projection, output_tile, j, end);
      multiply_outputs(sums[0], held.b[0], load_vectors(xa + j), rank - j);
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
    Pack<T> const delta = finish_outputs(cell, p_.projections[projection].table.n_out,
                                         output_tile * tile_outputs, sums);
    if (row_ >= 0) store_vectors(y + output_tile * tile_outputs, folded(before, delta, cell.scale));
  }


  /// Asks for the block's share of a row tile's B, a thread a projection.
  __device__ void prefetch_b(RowTile<T> const& tile) const {
    int const i = Warps * warp_threads - 1 - thread_;
    if (i >= p_.num_projections || tile.wide == 0) return;
    RouteCell<T> const& cell = tile.cell[i];
    int2 const own = shared_.head->own[i];
    std::int32_t const n = own.x * tile_outputs;
    std::int32_t const n_last =
        min(own.y * tile_outputs, static_cast<std::int32_t>(p_.projections[i].table.n_out));
    if (cell.rank == 0) return;
    prefetch_elements(cell.b + static_cast<std::int64_t>(n) * cell.b_row_stride,
                      static_cast<std::int64_t>(n_last - n) * cell.b_row_stride);
  }


  Operands<T, Y> const& p_;
  DeltaShared<T> const& shared_;
  int warp_;
  int thread_;
  bool settled_ = false;         ///< dependencies are complete and the cluster's blocks have started
  std::int32_t row_ = -1;        ///< batch row of this lane's group
  std::uint32_t stage_ = 0;      ///< slabs folded
  std::uint32_t end_stage_ = 0;  ///< slabs of all row tiles that are known, and two where there may be more
  std::uint32_t tiles_ = 0;      ///< row tiles done
};

}  // namespace atlas::lora::inline v0::detail
