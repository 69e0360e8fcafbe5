// SPDX-License-Identifier: AGPL-3.0-only
//
// The second half of the prefill form: a warp takes an output tile, has its B in registers, and multiplies
// one group of 16 rows of the piece after another by it. The rows are the products' 16-row operand here,
// which gives a lane its eight outputs of two rows as they lie in y.
//
// y is on its way to shared memory for some groups ahead, beyond the output tile too. Registers would not do:
// a warp waits for loads to registers by a few counters that all of them share, so that the first to be used
// would wait for the last to be asked for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/prefill_shared.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// 16 rows by an output tile: `c[m]` is {row 2 group(), outputs 8 quad() + 2 m and one more}, then the same
/// of the row after it.
struct OutputSums {
  float c[4][4] = {};

  /// Adds one block of the rank: `b` as `expand_outputs` loads it, `xa` the lane's vectors of the rows in
  /// shared memory.
  template <Element T>
  __device__ void add(Pack<T> const (&b)[4], uint4 const* xa) {
    uint4 const first = xa[0];
    uint4 const second = xa[warp_threads];
#pragma unroll
    for (int m = 0; m < 4; ++m)
      mma_m16n8k16<T>(c[m], first.x, first.y, first.z, first.w, b[m].word[0], b[m].word[1]);
#pragma unroll
    for (int m = 0; m < 4; ++m)
      mma_m16n8k16<T>(c[m], second.x, second.y, second.z, second.w, b[m].word[2], b[m].word[3]);
  }

  /// Adds the bias of the lane's eight outputs from `n` on, of `n_out`, to both rows.
  template <Element T>
  __device__ void add_bias(T const* bias, std::int64_t n, std::int64_t n_out) {
#pragma unroll
    for (int e = 0; e < pack_elements; ++e) {
      float const value = n + e < n_out ? widen(bias[n + e]) : 0.0F;
      c[e / 2][e % 2] = add_rn(c[e / 2][e % 2], value);
      c[e / 2][e % 2 + 2] = add_rn(c[e / 2][e % 2 + 2], value);
    }
  }

  /// The rounded delta of the lane's first or second row.
  template <Element T>
  __device__ Pack<T> delta(int row) const {
    Pack<T> pack;
#pragma unroll
    for (int m = 0; m < 4; ++m) pack.word[m] = pair_bits_rn<T>(c[m][2 * row], c[m][2 * row + 1]);
    return pack;
  }
};

/// The expand of a block.
template <class Source, Element T, Element Y>
class PrefillExpand {
 public:
  __device__ PrefillExpand(Operands<T, Y> const& p, PrefillShared<T> const& shared)
      : p_(p), shared_(shared) {}

  /// B of an output tile at up to two blocks of the rank. With one, the second place is the next output
  /// tile's; with more than two, it takes what comes behind the first again for every group of rows.
  struct Weights {
    Pack<T> b[2][4];
  };
  /// Where in a projection's outputs and rows: an output tile and a group of rows.
  struct Place {
    std::int32_t output_tile;
    std::int32_t group;
  };

  /// Puts down what `begin` needs; a barrier of the block, or the cluster's, lies between.
  __device__ void prepare(Piece<T>& piece) const { place_rows(piece, next_projection(piece, 0)); }
  /// Asks for what the warp's first output tile needs of a piece, in its first projection that adapts.
  __device__ void begin(Weights& weights, Piece<T> const& piece) {
    load_first(weights, target_of(piece, next_projection(piece, 0)));
  }

  /// Expands the block's output tiles of a piece and folds them into y. `weights` is what `begin` asked for.
  __device__ void all(Weights& weights, Piece<T>& piece) {
#pragma unroll 1
    for (int i = next_projection(piece, 0);;) {
      Target const target = target_of(piece, i);
      if (target.wide) {
        expand(weights, target);
      } else {
        expand_narrow(p_, shared_.xa, piece, i);
      }
      i = next_projection(piece, i + 1);
      if (i == p_.num_projections) break;
      __syncthreads();
      place_rows(piece, i);
      __syncthreads();
      load_first(weights, target_of(piece, i));
    }
  }

 private:
  static constexpr int ahead = prefill_y_ahead<Y>;
  /// Vectors of xa of a block of the rank, and of a group of rows.
  static constexpr int block_vectors = piece_rows / row_group * 2 * warp_threads;
  static constexpr int group_vectors = 2 * warp_threads;

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
    for (int m = 0; m < 4; ++m) {
      b[m] = Pack<T>{};
      load_if(b[m], row(m), left > 0);
    }
  }
  /// Zeroes what stands beyond the rank in B from rank `j` on.
  static __device__ void keep_rank(Pack<T> (&b)[4], std::int32_t rank, std::int32_t j) {
    if (rank % pack_elements == 0) return;
#pragma unroll
    for (int m = 0; m < 4; ++m) keep(b[m], rank - j - quad() * pack_elements);
  }

  /// Puts down where a piece's rows of y of a projection are, so that no lane works it out for every output
  /// tile. All threads call it.
  __device__ void place_rows(Piece<T>& piece, int projection) const {
    auto const thread = static_cast<int>(threadIdx.x);
    if (thread >= piece_rows) return;
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    std::int32_t const row = piece.row[thread];
    piece.y_row[thread] = row < 0 ? 0 : reinterpret_cast<std::uint64_t>(target.y + row * target.y_row_stride);
  }
  /// Where y lies in the lane's two rows of a group of rows; null for a row that does not exist.
  struct Rows {
    Y* y[2];
  };
  static __device__ Rows rows_of(Piece<T> const& piece, std::int32_t group_index) {
    auto const* const rows = reinterpret_cast<ulonglong2 const*>(piece.y_row);
    ulonglong2 const pair = rows[group_index * (row_group / 2) + group()];
    return {{reinterpret_cast<Y*>(pair.x), reinterpret_cast<Y*>(pair.y)}};
  }

  /// Place `slot` of this lane's y on its way: its first row's, the second's is `slot_row` elements further.
  /// A whole warp calls it.
  __device__ Y* slot_of(int slot) const {
    int const at = (warp_index() * ahead + slot) * 2 * warp_threads + lane_index();
    return reinterpret_cast<Y*>(shared_.y) + at * pack_elements;
  }
  static constexpr int slot_row = warp_threads * pack_elements;

  /// Asks for the y of the place that `ahead_` names, into `slot`, and goes on to the next one. What a lane
  /// asks for no other lane reads.
  __device__ void load_y(Target const& target, std::int32_t groups, int slot) {
    std::int32_t const n = ahead_.output_tile * tile_outputs + quad() * pack_elements;
    Y* const place = slot_of(slot);
    if (ahead_.output_tile < target.own.last && n < target.n_out) {
      Rows const rows = rows_of(target.piece, ahead_.group);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (rows.y[i] == nullptr) continue;
        auto* const to = reinterpret_cast<uint4*>(place + i * slot_row);
        auto const* const from = reinterpret_cast<uint4 const*>(rows.y[i] + n);
#pragma unroll
        for (int part = 0; part < Pack<Y>::words / 4; ++part) copy_16_async(to + part, from + part, true);
      }
    }
    commit_copies();
    if (++ahead_.group < groups) return;
    ahead_.group = 0;
    ahead_.output_tile += prefill_warps;
  }

  /// Groups of rows of a piece.
  static __device__ std::int32_t groups_of(Piece<T> const& piece) {
    return (piece.tiles * tile_rows + row_group - 1) / row_group;
  }

  /// B and y for what the warp does first of a projection, nothing where vectors cannot load them.
  __device__ void load_first(Weights& weights, Target const& target) {
    ahead_ = {target.wide ? target.own.first + warp_index() : target.own.last, 0};
    load_b(weights.b[0], target, ahead_.output_tile, 0);
    load_b(weights.b[1], target, ahead_.output_tile, block_elements);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) load_y(target, groups_of(target.piece), i);
  }

  /// Expands the warp's output tiles of one projection, the first of which was asked for.
  __device__ void expand(Weights& weights, Target const& target) {
    bool const one_block = target.rank <= block_elements;
    std::int32_t const groups = groups_of(target.piece);
    bool const biased = target.piece.cell[target.projection].bias != nullptr;
    uint4 const* const xa = shared_.xa +
                            xa_vector(p_.shape.xa_offset[target.projection] / block_elements, 0, 0, 0) +
                            lane_index();
    int slot = 0;
#pragma unroll 1
    for (std::int32_t t = target.own.first + warp_index(); t < target.own.last; t += prefill_warps) {
      std::int32_t const next = t + prefill_warps;
      keep_rank(weights.b[0], target.rank, 0);
      if (one_block) {
        load_b(weights.b[1], target, next, 0);
      } else {
        keep_rank(weights.b[1], target.rank, block_elements);
      }
#pragma unroll 1
      for (std::int32_t g = 0; g < groups; ++g) {
        OutputSums sums;
        add_ranks(sums, weights, target, t, xa + g * group_vectors);
        if (biased) add_bias(sums, target, t);
        wait_copies<ahead - 1>();
        fold(sums, target, t, g, slot);
        load_y(target, groups, slot);
        slot = slot == ahead - 1 ? 0 : slot + 1;
      }
      if (one_block) {
#pragma unroll
        for (int m = 0; m < 4; ++m) weights.b[0][m] = weights.b[1][m];
      } else {
        load_b(weights.b[0], target, next, 0);
        load_b(weights.b[1], target, next, block_elements);
      }
    }
  }

  /// The sums over the rank of an output tile and a group of rows, of which `xa` are the lane's first
  /// vectors.
  __device__ void add_ranks(OutputSums& sums, Weights& weights, Target const& target,
                            std::int32_t output_tile, uint4 const* xa) const {
    sums.add(weights.b[0], xa);
    if (target.rank <= block_elements) return;
    if (target.rank <= 2 * block_elements) {
      sums.add(weights.b[1], xa + block_vectors);
      return;
    }
#pragma unroll 1
    for (std::int32_t j = block_elements; j < target.rank; j += block_elements) {
      xa += block_vectors;
      load_b(weights.b[1], target, output_tile, j);
      keep_rank(weights.b[1], target.rank, j);
      sums.add(weights.b[1], xa);
    }
  }
  __device__ static void add_bias(OutputSums& sums, Target const& target, std::int32_t output_tile) {
    sums.add_bias(target.piece.cell[target.projection].bias,
                  output_tile * tile_outputs + quad() * pack_elements, target.n_out);
  }
  /// Rounds the delta of a group of rows at an output tile and folds it into y, which is in `slot`.
  __device__ void fold(OutputSums const& sums, Target const& target, std::int32_t output_tile,
                       std::int32_t group_index, int slot) const {
    std::int32_t const n = output_tile * tile_outputs + quad() * pack_elements;
    float const scale = target.piece.cell[target.projection].scale;
    Rows const rows = rows_of(target.piece, group_index);
    Y const* const place = slot_of(slot);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (rows.y[i] == nullptr || n >= target.n_out) continue;
      __builtin_assume(__isGlobal(rows.y[i]));
      store_vectors(rows.y[i] + n,
                    folded(load_vectors(place + i * slot_row), sums.template delta<T>(i), scale));
    }
  }

  /// The same of operands that vectors cannot load: a call, so that it takes no registers where they can.
  static __device__ __noinline__ void expand_narrow(Operands<T, Y> const& p, uint4 const* xa,
                                                    Piece<T> const& piece, int projection) {
    DeltaProjection<T, Y> const& target = p.projections[projection];
    RouteCell<T> const& cell = piece.cell[projection];
    std::int64_t const n_out = target.table.n_out;
    std::int32_t const rank = rank_of<Source>(piece, projection);
    Share const own = p.shape.outputs_of(p.shape.team[0], block_of(p), 0, 1, projection);
    std::int32_t const block = p.shape.xa_offset[projection] / block_elements;
#pragma unroll 1
    for (std::int32_t t = own.first + warp_index(); t < own.last; t += prefill_warps) {
      std::int64_t const first = static_cast<std::int64_t>(t) * tile_outputs;
      std::int64_t const n = first + quad() * pack_elements;
#pragma unroll 1
      for (std::int32_t row = 0; row < piece.tiles * tile_rows; row += row_group) {
        OutputSums sums;
#pragma unroll 1
        for (std::int32_t i = 0; i < rank_blocks(rank); ++i) {
          std::int32_t const j = i * block_elements + quad() * pack_elements;
          Pack<T> b[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            std::int64_t const output = first + output_of(lane_index(), m);
            b[m] = load_elements(cell.b + output * cell.b_row_stride + j, output < n_out ? rank - j : 0);
          }
          sums.add(b, xa + xa_vector(block + i, row, 0, 0) + lane_index());
        }
        if (cell.bias != nullptr) sums.add_bias(cell.bias, n, n_out);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          std::int32_t const y_row = piece.row[row + 2 * group() + i];
          Y* const y = target.y + y_row * target.y_row_stride + n;
          std::int64_t const valid = y_row >= 0 ? n_out - n : 0;
          Pack<Y> const before = load_elements(y, valid);
          store_padded(y, folded(before, sums.template delta<T>(i), cell.scale),
                       static_cast<std::int32_t>(min(valid, std::int64_t{pack_elements})), false);
        }
      }
    }
  }

  Operands<T, Y> const& p_;
  PrefillShared<T> shared_;
  Place ahead_{};  ///< whose y is asked for next
};

}  // namespace atlas::lora::inline v0::detail
