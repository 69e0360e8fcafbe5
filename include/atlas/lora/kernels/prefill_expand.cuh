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
#include "atlas/lora/kernels/barrier.cuh"
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

  /// Adds one block of the rank: `b` as `expand_outputs` loads it, `xa` the shared address of the lane's
  /// vectors of the rows.
  template <Element T>
  __device__ void add(Pack<T> const (&b)[4], std::uint32_t xa) {
    uint4 const first = load_shared(xa);
    uint4 const second = load_shared(xa + warp_threads * 16);
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
 private:
  static constexpr int row_groups = piece_rows / row_group;

 public:
  __device__ PrefillExpand(Operands<T, Y> const& p, PrefillShared<T> const& shared)
      : p_(p), shared_(shared) {}

  /// B of an output tile at up to two blocks of the rank. With more than two, the second place takes what
  /// comes behind the first again for every group of rows.
  struct Weights {
    Pack<T> b[2][4];
  };
  /// What is asked for before xa is there: B of the warp's first output tile, and y up to an output tile and
  /// a group of rows.
  struct Begun {
    Weights weights;
    std::int32_t output_tile;
    std::int32_t group;
  };

  /// Puts down what `begin` needs; a barrier of the block, or the cluster's, lies between.
  __device__ void prepare(Piece<T>& piece) const { place_rows(piece, next_projection(piece, 0)); }
  /// Asks for what the warp's first output tile needs of a piece, in its first projection that adapts.
  __device__ void begin(Begun& begun, Piece<T> const& piece) const {
    load_first(begun, target_of(piece, next_projection(piece, 0)));
  }

  /// Expands the block's output tiles of a piece and folds them into y. `begun` is what `begin` asked for.
  __device__ void all(Begun& begun, Piece<T>& piece) const {
#pragma unroll 1
    for (int i = next_projection(piece, 0);;) {
      Target const target = target_of(piece, i);
      bool const plain = target.rank <= 2 * block_elements && piece.cell[target.projection].bias == nullptr;
      if (target.wide && plain) {
        expand<true>(begun, target);
      } else if (target.wide) {
        expand<false>(begun, target);
      } else {
        expand_narrow(p_, shared_.xa, piece, i);
      }
      i = next_projection(piece, i + 1);
      if (i == p_.num_projections) break;
      __syncthreads();
      place_rows(piece, i);
      __syncthreads();
      load_first(begun, target_of(piece, i));
    }
  }

 private:
  /// Bytes of xa of a group of rows, and of a block of the rank.
  static constexpr std::uint32_t group_bytes = 2 * warp_threads * 16;
  static constexpr std::uint32_t block_bytes = row_groups * group_bytes;
  /// Bytes of y on its way: of a lane's vectors of a row, and of a group of rows.
  static constexpr std::uint32_t lane_bytes = pack_elements * sizeof(Y);
  static constexpr std::uint32_t y_row_bytes = warp_threads * lane_bytes;
  static constexpr std::uint32_t y_group_bytes = 2 * y_row_bytes;
#ifdef __CUDA_ARCH__
  static constexpr std::int32_t y_vectors = warp_y_vectors(__CUDA_ARCH__ / 10);
#else
  static constexpr std::int32_t y_vectors = warp_y_vectors(90);
#endif
  /// Groups of rows of y that are on their way to a warp.
  static constexpr int ahead = static_cast<int>(y_vectors * 16 / y_group_bytes);

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
    // The thread is asked for again, so that nothing that follows from it is held through the shrink.
    int const lane = thread_here() % warp_threads;
    std::int32_t const n = output_tile * tile_outputs + output_of(lane, 0);
    j += lane % 4 * pack_elements;
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
  __device__ void load_weights(Weights& weights, Target const& target, std::int32_t output_tile) const {
    load_b(weights.b[0], target, output_tile, 0);
    load_b(weights.b[1], target, output_tile, block_elements);
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
  static __device__ Rows rows_of(std::uint32_t rows, std::int32_t group_index) {
    uint4 const v = load_shared(rows + group_index * row_group * 8);
    return {{reinterpret_cast<Y*>(std::uint64_t{v.y} << 32 | v.x),
             reinterpret_cast<Y*>(std::uint64_t{v.w} << 32 | v.z)}};
  }
  /// The shared address of the first group's.
  static __device__ std::uint32_t rows_place(Piece<T> const& piece) {
    return shared_address(piece.y_row) + group() * 16;
  }
  /// The shared address of this lane's y on its way, of its first row; the second's is `y_row_bytes` further.
  __device__ std::uint32_t y_place() const {
    return shared_address(shared_.ring) + warp_index() * y_vectors * 16 + lane_index() * lane_bytes;
  }
  /// Groups of rows of a piece.
  static __device__ std::int32_t groups_of(Piece<T> const& piece) {
    return (piece.tiles * tile_rows + row_group - 1) / row_group;
  }

  /// Asks for the y that `begun` names, to `place`, and goes on to the next one. What a lane asks for no
  /// other lane reads.
  __device__ static void load_y(Begun& begun, std::int32_t outputs_last, std::int32_t n_out,
                                std::uint32_t rows, std::int32_t groups, std::uint32_t place) {
    std::int32_t const n = begun.output_tile * tile_outputs + quad() * pack_elements;
    bool const inside = begun.output_tile < outputs_last && n < n_out;
    Rows const at = rows_of(rows, begun.group);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int part = 0; part < static_cast<int>(lane_bytes) / 16; ++part)
        copy_line_part_if(place + i * y_row_bytes + part * 16,
                          reinterpret_cast<uint4 const*>(at.y[i] + n) + part, 16,
                          inside && at.y[i] != nullptr);
    }
    commit_copies();
    if (++begun.group < groups) return;
    begun.group = 0;
    begun.output_tile += prefill_warps;
  }

  /// B and y for what the warp does first of a projection, nothing where vectors cannot load them.
  __device__ void load_first(Begun& begun, Target const& target) const {
    begun.output_tile = target.wide ? target.own.first + warp_index() : target.own.last;
    begun.group = 0;
    load_weights(begun.weights, target, begun.output_tile);
    std::int32_t const groups = groups_of(target.piece);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i)
      load_y(begun, target.own.last, target.n_out, rows_place(target.piece), groups,
             y_place() + i * y_group_bytes);
  }

  /// Expands the warp's output tiles of one projection, the first of which was asked for. `Plain` ones have
  /// no bias and at most two blocks of the rank: what is seldom does not stand in their loop.
  template <bool Plain>
  __device__ void expand(Begun& begun, Target const& target) const {
    std::int32_t const groups = groups_of(target.piece);
    float const scale = target.piece.cell[target.projection].scale;
    std::int32_t const n_out = target.n_out;
    std::int32_t const last = target.own.last;
    std::uint32_t const first_xa =
        shared_address(shared_.xa +
                       xa_vector(p_.shape.xa_offset[target.projection] / block_elements, 0, 0, 0)) +
        lane_index() * 16;
    std::uint32_t const rows = rows_place(target.piece);
    std::uint32_t const first_place = y_place();
    std::uint32_t place = first_place;
    Weights& weights = begun.weights;
#pragma unroll 1
    for (std::int32_t t = target.own.first + warp_index(); t < last; t += prefill_warps) {
      Weights next;
      load_weights(next, target, t + prefill_warps);
      keep_rank(weights.b[0], target.rank, 0);
      keep_rank(weights.b[1], target.rank, block_elements);
      std::int32_t const n = t * tile_outputs + quad() * pack_elements;
#pragma unroll 1
      for (std::int32_t g = 0; g < groups; ++g) {
        OutputSums sums;
        std::uint32_t const xa = first_xa + g * group_bytes;
        sums.add(weights.b[0], xa);
        if constexpr (Plain) {
          if (target.rank > block_elements) sums.add(weights.b[1], xa + block_bytes);
        } else {
          add_ranks(sums, weights, target, t, xa);
          add_bias(sums, target, t);
        }
        Rows const at = rows_of(rows, g);
        wait_copies<ahead - 1>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Pack<Y> const before = load_y_pack(place + i * y_row_bytes);
          store_if(at.y[i] + n, folded(before, sums.template delta<T>(i), scale),
                   n < n_out && at.y[i] != nullptr);
        }
        load_y(begun, last, n_out, rows, groups, place);
        place += y_group_bytes;
        if (place == first_place + ahead * y_group_bytes) place = first_place;
      }
      weights = next;
    }
  }
  static __device__ Pack<Y> load_y_pack(std::uint32_t from) {
    Pack<Y> pack;
#pragma unroll
    for (int i = 0; i < Pack<Y>::words; i += 4) {
      uint4 const v = load_shared(from + i * 4);
      pack.word[i] = v.x;
      pack.word[i + 1] = v.y;
      pack.word[i + 2] = v.z;
      pack.word[i + 3] = v.w;
    }
    return pack;
  }

  /// Adds what comes behind the first block of the rank; `xa` is the shared address of the lane's first
  /// vectors of a group of rows.
  __device__ void add_ranks(OutputSums& sums, Weights& weights, Target const& target,
                            std::int32_t output_tile, std::uint32_t xa) const {
#pragma unroll 1
    for (std::int32_t j = block_elements; j < target.rank; j += block_elements) {
      xa += block_bytes;
      load_b(weights.b[1], target, output_tile, j);
      keep_rank(weights.b[1], target.rank, j);
      sums.add(weights.b[1], xa);
    }
  }
  __device__ static void add_bias(OutputSums& sums, Target const& target, std::int32_t output_tile) {
    T const* const bias = target.piece.cell[target.projection].bias;
    if (bias != nullptr)
      sums.add_bias(bias, output_tile * tile_outputs + quad() * pack_elements, target.n_out);
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
          sums.add(b, shared_address(xa + xa_vector(block + i, row, 0, 0) + lane_index()));
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
  ///< whose y is asked for next
};

}  // namespace atlas::lora::inline v0::detail
