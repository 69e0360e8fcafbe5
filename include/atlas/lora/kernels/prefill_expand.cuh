// SPDX-License-Identifier: AGPL-3.0-only
//
// The second half of the prefill form: a warp takes an output tile, has its B in registers, and multiplies it
// by one row tile of the piece after another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/prefill_shared.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The expand of a block.
template <class Source, Element T, Element Y>
class PrefillExpand {
 public:
  __device__ PrefillExpand(Operands<T, Y> const& p, PrefillShared<T> const& shared)
      : p_(p), shared_(shared) {}

  /// What an output tile needs from memory.
  struct Output {
    /// Of up to two blocks of the rank. With one, the second place is the next output tile's; with more than
    /// two, it takes what comes behind the first again for every row tile.
    Pack<T> b[2][4];
    Pack<Y> y[sizeof(Y) == 2 ? 4 : 2];  ///< of the next row tiles, as registers allow
  };

  /// Asks for what the warp's first output tile needs of a piece, in its first projection that adapts.
  __device__ void begin(Output& output, Piece<T> const& piece) const {
    load_first(output, target_of(piece, next_projection(piece, 0)));
  }

  /// Expands the block's output tiles of a piece and folds them into y. `output` is what `begin` asked for.
  __device__ void all(Output& output, Piece<T> const& piece) const {
#pragma unroll 1
    for (int i = next_projection(piece, 0);;) {
      Target const target = target_of(piece, i);
      if (target.wide) {
        expand(output, target);
      } else {
        expand_narrow(p_, shared_.xa, piece, i);
      }
      i = next_projection(piece, i + 1);
      if (i == p_.num_projections) break;
      load_first(output, target_of(piece, i));
    }
  }

 private:
  static constexpr int ahead = sizeof(Output::y) / sizeof(Pack<Y>);

  /// The first projection from `i` on that adapts.
  __device__ int next_projection(Piece<T> const& piece, int i) const {
    while (i < p_.num_projections && piece.cell[i].rank == 0) ++i;
    return i;
  }

  /// One projection of a piece.
  struct Target {
    Piece<T> const& piece;
    int projection;
    std::int32_t rank;
    std::int32_t n_out;
    bool wide;  ///< its B and y are whole vectors
    Share own;  ///< the block's output tiles
  };
  __device__ Target target_of(Piece<T> const& piece, int projection) const {
    auto const n_out = static_cast<std::int32_t>(p_.projections[projection].table.n_out);
    bool const wide = piece.wide != 0 && p_.wide && n_out % pack_elements == 0;
    std::int32_t const rank = rank_of<Source>(piece, projection);
    return {piece, projection, rank,
            n_out, wide,       p_.shape.outputs_of(p_.shape.team[0], block_of(p_), 0, 1, projection)};
  }

  /// B of an output tile's block from rank `j` on; of outputs beyond n_out some that are. Nothing of output
  /// tiles that are not the block's.
  __device__ void load_b(Pack<T> (&b)[4], Target const& target, std::int32_t output_tile,
                         std::int32_t j) const {
    RouteCell<T> const& cell = target.piece.cell[target.projection];
    std::int32_t const n = output_tile * tile_outputs + output_of(lane_index(), 0);
    j += quad() * pack_elements;
    std::int32_t const left = output_tile < target.own.last ? target.rank - j : 0;
    T const* const from = cell.b + j;
    auto const row = [&](int m) {
      return from + static_cast<std::int64_t>(min(n + 2 * m, target.n_out - 1)) * cell.b_row_stride;
    };
#pragma unroll
    for (int m = 0; m < 4; ++m) b[m] = load_operand<true>(row(m), left);
  }
  /// Zeroes what stands beyond the rank in B from rank `j` on.
  static __device__ void keep_rank(Pack<T> (&b)[4], std::int32_t rank, std::int32_t j) {
    if (rank % pack_elements == 0) return;
#pragma unroll
    for (int m = 0; m < 4; ++m) keep(b[m], rank - j - quad() * pack_elements);
  }

  /// Where y of an output tile and a row tile of the piece lies for this lane.
  struct Place {
    Y* y;
    bool exists;
  };
  __device__ Place place_of(Target const& target, std::int32_t output_tile, std::int32_t tile) const {
    DeltaProjection<T, Y> const& projection = p_.projections[target.projection];
    std::int32_t const row = target.piece.row[tile * tile_rows + group()];
    std::int32_t const n = output_tile * tile_outputs + quad() * pack_elements;
    return {projection.y + row * projection.y_row_stride + n, row >= 0 && n < target.n_out};
  }
  __device__ Pack<Y> load_y(Target const& target, std::int32_t output_tile, std::int32_t tile) const {
    Place const place = place_of(target, output_tile, tile);
    return load_operand<true>(place.y, place.exists && output_tile < target.own.last ? pack_elements : 0);
  }

  /// B and y for the warp's first output tile, nothing where vectors cannot load them. Rows of row tiles that
  /// do not exist do not exist.
  __device__ void load_first(Output& output, Target const& target) const {
    std::int32_t const t = target.wide ? target.own.first + warp_index() : target.own.last;
    load_b(output.b[0], target, t, 0);
    load_b(output.b[1], target, t, block_elements);
#pragma unroll
    for (int i = 0; i < ahead; ++i) output.y[i] = load_y(target, t, i);
  }

  /// Expands the warp's output tiles of one projection, the first of which was asked for.
  __device__ void expand(Output& output, Target const& target) const {
    bool const one_block = target.rank <= block_elements;
#pragma unroll 1
    for (std::int32_t t = target.own.first + warp_index(); t < target.own.last; t += prefill_warps) {
      std::int32_t const next = t + prefill_warps;
      keep_rank(output.b[0], target.rank, 0);
      if (one_block) {
        load_b(output.b[1], target, next, 0);
      } else {
        keep_rank(output.b[1], target.rank, block_elements);
      }
#pragma unroll 1
      for (std::int32_t tile = 0; tile < target.piece.tiles; tile += ahead) {
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          if (tile + i < target.piece.tiles) expand_tile(output, output.y[i], target, t, next, tile + i);
        }
      }
      if (one_block) {
#pragma unroll
        for (int m = 0; m < 4; ++m) output.b[0][m] = output.b[1][m];
      } else {
        load_b(output.b[0], target, next, 0);
        load_b(output.b[1], target, next, block_elements);
      }
    }
  }

  /// One output tile of one row tile, whose y is in `y`; the place takes the y of the row tile that comes
  /// `ahead` later, of this output tile or of `next`.
  __device__ void expand_tile(Output& output, Pack<Y>& y, Target const& target, std::int32_t output_tile,
                              std::int32_t next, std::int32_t tile) const {
    // Addresses of all row tiles, worked out before the loop, would not fit into registers.
    asm volatile("" : "+r"(tile), "+r"(next), "+r"(output_tile));
    T const* const xa = xa_of(target, tile);
    Accumulator<T> sums[2];
    add_block(sums, output.b[0], xa);
    if (target.rank > 2 * block_elements) {
#pragma unroll 1
      for (std::int32_t j = block_elements; j < target.rank; j += block_elements) {
        load_b(output.b[1], target, output_tile, j);
        keep_rank(output.b[1], target.rank, j);
        add_block(sums, output.b[1], xa + j);
      }
    } else if (target.rank > block_elements) {
      add_block(sums, output.b[1], xa + block_elements);
    }
    Pack<Y> const before = y;
    std::int32_t const later = tile + ahead;
    bool const same = later < target.piece.tiles;
    y = load_y(target, same ? output_tile : next, same ? later : tile % ahead);
    finish(target, output_tile, tile, sums, before);
  }

  /// Rounds an output tile of a row tile and folds it into y, which was `before`.
  __device__ void finish(Target const& target, std::int32_t output_tile, std::int32_t tile,
                         Accumulator<T> const (&sums)[2], Pack<Y> const& before) const {
    RouteCell<T> const& cell = target.piece.cell[target.projection];
    Pack<T> const delta = finish_outputs(cell, target.n_out, output_tile * tile_outputs, sums);
    Place const place = place_of(target, output_tile, tile);
    if (place.exists) store_padded(place.y, folded(before, delta, cell.scale), pack_elements, true);
  }

  /// The same of operands that vectors cannot load: a call, so that it takes no registers where they can.
  static __device__ __noinline__ void expand_narrow(Operands<T, Y> const& p, T const* xa,
                                                    Piece<T> const& piece, int projection) {
    DeltaProjection<T, Y> const& target = p.projections[projection];
    RouteCell<T> const& cell = piece.cell[projection];
    Share const own = p.shape.outputs_of(p.shape.team[0], block_of(p), 0, 1, projection);
    xa += p.shape.xa_offset[projection];
#pragma unroll 1
    for (std::int32_t t = own.first + warp_index(); t < own.last; t += prefill_warps) {
      std::int64_t const first = static_cast<std::int64_t>(t) * tile_outputs;
      std::int64_t const n = first + quad() * pack_elements;
#pragma unroll 1
      for (std::int32_t tile = 0; tile < piece.tiles; ++tile) {
        std::int32_t const row = piece.row[tile * tile_rows + group()];
        Y* const y = target.y + row * target.y_row_stride + n;
        std::int64_t const valid = row >= 0 ? target.table.n_out - n : 0;
        Pack<T> const delta =
            expand_outputs<false>(cell, rank_of<Source>(piece, projection), target.table.n_out, first,
                                  xa + tile * tile_rows * p.xa_shared_stride, p.xa_shared_stride);
        Pack<Y> const before = load_elements(y, valid);
        store_padded(y, folded(before, delta, cell.scale),
                     static_cast<std::int32_t>(min(valid, std::int64_t{pack_elements})), false);
      }
    }
  }

  /// This lane's first pack of a row tile's xa.
  __device__ T const* xa_of(Target const& target, std::int32_t tile) const {
    return shared_.xa + (tile * tile_rows + group()) * p_.xa_shared_stride +
           p_.shape.xa_offset[target.projection] + quad() * pack_elements;
  }

  /// Adds one block of the rank to the chains of an output tile.
  static __device__ void add_block(Accumulator<T> (&sums)[2], Pack<T> const (&b)[4], T const* xa) {
    Pack<T> const x = load_vectors(xa);
    sums[0].add(b[0], b[1], x);
    sums[1].add(b[2], b[3], x);
  }

  Operands<T, Y> const& p_;
  PrefillShared<T> shared_;
};

}  // namespace atlas::lora::inline v0::detail
