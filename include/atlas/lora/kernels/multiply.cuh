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
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The warps of a block.
///
/// Weight rows and batch rows do not mix in a product, so what stands in a row that does not exist (ranks
/// beyond the true one, outputs beyond n_out, batch rows of a short tile) is some row that does, or zero,
/// multiplied and never used. Along a contraction everything beyond the extent is zeroed on both operands.
///
/// Few warps hide little latency, so every instruction between the launch's dependencies and the first output
/// counts: what can be worked out before is.
template <class Source, int Warps, Element T, Element Y>
class Multiply {
 public:
  __device__ Multiply(Operands<T, Y> const& p, DeltaShared<Warps, T> const& shared, int block)
      : p_(p), shared_(shared), segments_(p.shape.segments_of(block)), warp_(warp_index()) {}

  /// All of row tile `index` of the window. The next one's weights are asked for on the way.
  __device__ void tile(int index) {
    RowTile<T> const& tile = shared_.tile(index);
    std::int32_t const all = tile.first_rank_tile[max_projections];
    if (all == 0) return;
    row_ = tile.row[group()];
    unsigned const exist = __ballot_sync(0xffffffffu, row_ >= 0);
    quads_ = (32 - __clz(static_cast<int>(exist)) + 7) / 8;
    int first = 0;
    while (tile.cell[first].rank == 0) ++first;
    // The first tile's B was not asked for on the way of another.
    if (!settled_) prefetch_b(tile);
    OutputTile output;
    std::int32_t const own = shared_.head->own[first].x + warp_;
#pragma unroll 1
    for (std::int32_t slab = 0; slab < all; slab += slab_rank_tiles) {
      std::int32_t const ranks = min(slab_rank_tiles, all - slab);
      bool const last = slab + ranks == all;
      shrink(tile, slab, ranks);
      // B and y of this warp's first output tile are on their way while segment sums cross.
      load_b(output, tile, first, own, 0);
      load_y(output, first, own);
      XaPlace const place = xa_place(tile, slab, static_cast<int>(threadIdx.x));
      bool const known = last && index + 1 < Warps;
      if (known) {
        prefetch_a(shared_.tile(index + 1));
        prefetch_b(shared_.tile(index + 1));
      }
      fold(tile, slab, ranks, place, known && shared_.tile(index + 1).exists == 0);
    }
#pragma unroll 1
    for (int i = first; i < p_.num_projections; ++i) {
      if (tile.cell[i].rank > 0) expand(output, tile, i, i > first);
    }
  }

  /// Waits for the launch's dependencies and for the cluster, unless it has.
  __device__ void settle() {
    if (settled_) return;
    cluster_wait();
    if (p_.inputs_settled) enter();
    settled_ = true;
  }

  /// Whether other blocks may still arrive at this block's barriers.
  [[nodiscard]] __device__ bool expects_arrivals() const { return expects_arrivals_; }

 private:
  /// Warps of one chunk slot, which take rank tiles in turn.
  static constexpr int teams = Warps / max_chunks;
  static_assert(teams >= 1 && Warps % max_chunks == 0);

  // --- Shrink --------------------------------------------------------------------------------------------

  /// Multiplies the block's chunks of `ranks` rank tiles from `slab` and sends the segment sums to every
  /// block of the cluster.
  __device__ void shrink(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks) {
    DeltaShape const& shape = p_.shape;
    std::int32_t s = segments_.first;
#pragma unroll 1
    do {
      std::int32_t const last = min(s + shape.group, segments_.last);
      std::int32_t const sums = (last - s) * ranks;
      Sending const sending = sending_of(0, s, ranks, sums);
      BlockRange const blocks = shape.chunk_of_slot(s, last, warp_ % max_chunks);
      if (blocks.size() > 0) {
        // With one rank tile twice as many blocks fit into registers at once.
        constexpr bool many = sizeof(T) == 2;
        std::int32_t r = teams == 1 ? 0 : warp_ / max_chunks;
        if constexpr (many) {
#pragma unroll 1
          for (; r + teams < ranks; r += 2 * teams) multiply_chunk<2, 2>(tile, slab, r, blocks);
        }
#pragma unroll 1
        for (; r < ranks; r += teams) multiply_chunk<1, many ? 4 : 1>(tile, slab, r, blocks);
      }
      settle();
      __syncthreads();
      if (s == segments_.first && slabs_ > 0) shared_.head->sums_empty.wait((slabs_ - 1) & 1u);
      send_sums(sending, s, ranks, sums);
      s = last;
      if (s < segments_.last) __syncthreads();
    } while (s < segments_.last);
  }

  /// One chunk of `Ranks` rank tiles: `slab` + `first`, and every `teams`-th after it. The loads of `Ahead`
  /// blocks of each are in flight together.
  template <int Ranks, int Ahead>
  __device__ void multiply_chunk(RowTile<T> const& tile, std::int32_t slab, std::int32_t first,
                                 BlockRange blocks) {
    Accumulator<T> sum[Ranks];
    T const* low[Ranks];
    bool has_low[Ranks];
    bool has_high[Ranks];
    std::int32_t const k = blocks.first * block_elements + quad() * pack_elements;
    auto const k_in = static_cast<std::int32_t>(p_.k_in);
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
      std::int32_t const rank_tile = slab + first + r * teams;
      int const projection = projection_of(tile, rank_tile);
      std::int32_t const last = rank_of<Source>(tile, projection) - 1;
      std::int32_t const j = (rank_tile - tile.first_rank_tile[projection]) * tile_ranks + group();
      T const* const a = tile.cell[projection].a + k;
      low[r] = a + static_cast<std::int64_t>(j) * k_in;
      has_low[r] = j <= last;
      has_high[r] = j + tile_batch_rows <= last;
    }
    T const* const x = p_.x + max(tile.x_row[group()], 0) * p_.x_row_stride + k;
#pragma unroll 1
    for (std::int32_t b = 0; b < blocks.size(); b += Ahead) {
      Pack<T> a_low[Ranks][Ahead];
      Pack<T> a_high[Ranks][Ahead];
      Pack<T> x_pack[Ahead];
      auto const inside = [&](int i) {
        return b + i < blocks.size() ? k_in - k - (b + i) * block_elements : 0;
      };
      auto const load_a = [&](auto const& load) {
#pragma unroll
        for (int r = 0; r < Ranks; ++r) {
#pragma unroll
          for (int i = 0; i < Ahead; ++i) {
            T const* const a = low[r] + (b + i) * block_elements;
            a_low[r][i] = load(a, has_low[r] ? inside(i) : 0);
            a_high[r][i] = load(a + tile_batch_rows * p_.k_in, has_high[r] ? inside(i) : 0);
          }
        }
      };
      if (tile.wide != 0) {
        load_a([](T const* a, std::int32_t valid) { return load_operand<true>(a, valid); });
      } else {
        load_a([](T const* a, std::int32_t valid) { return load_padded(a, valid, false); });
      }
      settle();
#pragma unroll
      for (int i = 0; i < Ahead; ++i)
        x_pack[i] = load_padded(x + (b + i) * block_elements, inside(i), p_.wide);
#pragma unroll
      for (int r = 0; r < Ranks; ++r) {
#pragma unroll
        for (int i = 0; i < Ahead; ++i) {
          if (b + i < blocks.size()) sum[r].add(a_low[r][i], a_high[r][i], x_pack[i]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
      shared_.chunks[((first + r * teams) * max_chunks + warp_ % max_chunks) * warp_threads + lane_index()] =
          sum[r].finish();
    }
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
    constexpr int warps_log2 = Warps == 8 ? 3 : 4;
    static_assert(1 << warps_log2 == Warps);
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
    return {chunks, r * max_chunks + (segment - first) * shape.segment_chunks, segment * slab_rank_tiles + r};
  }

  /// Folds the chunks of the group of segments from `first` and sends the sums of rows that exist to every
  /// block of the cluster. Warps share a sum's targets where there are fewer sums than warps.
  __device__ void send_sums(Sending sending, std::int32_t first, std::int32_t ranks,
                            std::int32_t sums) const {
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
      for (int target = warp_ & ((1 << sharing) - 1); target < 1 << p_.shape.cluster_log2;
           target += 1 << sharing) {
        std::uint32_t const there = address_in_block(local, static_cast<std::uint32_t>(target)) - local;
        if (quad() < quads_) send(there + to, total, there + done);
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
  /// block; `place` is this thread's first. The cluster's other blocks hear of it unless nothing comes after.
  __device__ void fold(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks, XaPlace place,
                       bool last) {
    DeltaHead<Warps, T>& head = *shared_.head;
    if (threadIdx.x == 0) {
      head.sums_full.arrive_expecting(static_cast<std::uint32_t>(p_.shape.segments * ranks * 8 * quads_) *
                                      sizeof(float4));
    }
    auto const* own = reinterpret_cast<float const*>(shared_.segments) + threadIdx.x;
    auto i = static_cast<int>(threadIdx.x);
    head.sums_full.wait(slabs_ & 1u);
    while (i < ranks * rank_tile_values) {
      float total = own[0];
#pragma unroll
      for (int s = 1; s < max_segments; ++s) {
        total = add_rn(total, own[s * slab_rank_tiles * rank_tile_values]);
      }
      T const zero = round_to<T>(0.0F);
      place.xa[0] = place.inside ? round_to<T>(total) : zero;
      if (place.half) place.xa[tile_ranks] = zero;
      i += Warps * warp_threads;
      own += Warps * warp_threads;
      if (i >= ranks * rank_tile_values) break;
      place = xa_place(tile, slab, i);
    }
    __syncthreads();
    expects_arrivals_ = !last;
    if (!last && threadIdx.x < 1 << p_.shape.cluster_log2) head.sums_empty.arrive_at(threadIdx.x);
    ++slabs_;
  }

  // --- Expand --------------------------------------------------------------------------------------------

  /// Blocks of the rank whose B is loaded together, as registers allow.
  static constexpr int held_blocks = sizeof(T) == 2 && sizeof(Y) == 2 ? 2 : 1;

  /// What one output tile needs from memory: this lane's packs of B, and its eight outputs of y.
  struct OutputTile {
    Pack<T> b[held_blocks][4];
    Pack<Y> y;
  };

  /// B of an output tile's blocks from rank `j` on; of outputs beyond n_out some that are.
  __device__ void load_b(OutputTile& output, RowTile<T> const& tile, int projection, std::int32_t output_tile,
                         std::int32_t j) const {
    RouteCell<T> const& cell = tile.cell[projection];
    std::int32_t const n = output_tile * tile_outputs + output_of(lane_index(), 0);
    auto const n_last = static_cast<std::int32_t>(p_.projections[projection].table.n_out) - 1;
    j += quad() * pack_elements;
    std::int32_t const left = rank_of<Source>(tile, projection) - j;
    auto const load_rows = [&](auto const& load) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        T const* const b = cell.b + static_cast<std::int64_t>(min(n + 2 * m, n_last)) * cell.b_row_stride + j;
#pragma unroll
        for (int i = 0; i < held_blocks; ++i)
          output.b[i][m] = load(b + i * block_elements, left - i * block_elements);
      }
    };
    if (tile.wide != 0) {
      load_rows([](T const* b, std::int32_t valid) { return load_operand<true>(b, valid); });
    } else {
      load_rows([](T const* b, std::int32_t valid) { return load_padded(b, valid, false); });
    }
  }

  /// y of an output tile, zero where the block has none.
  __device__ void load_y(OutputTile& output, int projection, std::int32_t output_tile) const {
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    std::int32_t const n = output_tile * tile_outputs + quad() * pack_elements;
    bool const exists = output_tile < shared_.head->own[projection].y && row_ >= 0;
    output.y = load_padded(target.y + row_ * target.y_row_stride + n,
                           exists ? static_cast<std::int32_t>(target.table.n_out) - n : 0, p_.wide);
  }

  /// Expands the block's output tiles of one projection and folds them into y. The warp's first is in
  /// `output` unless `late`.
  __device__ void expand(OutputTile& output, RowTile<T> const& tile, int projection, bool late) {
    constexpr std::int32_t held = held_blocks * block_elements;
    int2 const own = shared_.head->own[projection];
    RouteCell<T> const& cell = tile.cell[projection];
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    std::int32_t const rank = rank_of<Source>(tile, projection);
    auto const n_out = static_cast<std::int32_t>(target.table.n_out);
    T const* const xa =
        shared_.xa + group() * p_.xa_shared_stride + p_.shape.xa_offset[projection] + quad() * pack_elements;
    std::int32_t t = own.x + warp_;
    if (t >= own.y) return;
    if (late) {
      load_b(output, tile, projection, t, 0);
      load_y(output, projection, t);
    }
    Y* const y = target.y + row_ * target.y_row_stride + quad() * pack_elements;
    std::int32_t const y_left = row_ >= 0 ? n_out - quad() * pack_elements : 0;
    for (bool more = true; more;) {
      Accumulator<T> sums[2];
      multiply_outputs(sums, output, xa, rank);
#pragma unroll 1
      for (std::int32_t j = held; j < rank; j += held) {
        load_b(output, tile, projection, t, j);
        multiply_outputs(sums, output, xa + j, rank - j);
      }
      Pack<Y> const before = output.y;
      std::int32_t const n = t * tile_outputs;
      t += Warps;
      more = t < own.y;
      if (more) {
        load_b(output, tile, projection, t, 0);
        load_y(output, projection, t);
      }
      Pack<T> const delta = finish_outputs(cell, n_out, n, sums);
      store_padded(y + n, folded(before, delta, cell.scale), y_left - n, p_.wide);
    }
  }

  /// Adds the blocks in `output` to an output tile's chains; `rank` is what is left of it.
  __device__ static void multiply_outputs(Accumulator<T> (&sums)[2], OutputTile& output, T const* xa,
                                          std::int32_t rank) {
    if (rank % pack_elements != 0) {
#pragma unroll
      for (int i = 0; i < held_blocks; ++i) {
#pragma unroll
        for (int m = 0; m < 4; ++m) keep(output.b[i][m], rank - i * block_elements - quad() * pack_elements);
      }
    }
#pragma unroll
    for (int i = 0; i < held_blocks; ++i) {
      if (i * block_elements >= rank) break;
      Pack<T> const x = load_vectors(xa + i * block_elements);
      sums[0].add(output.b[i][0], output.b[i][1], x);
      sums[1].add(output.b[i][2], output.b[i][3], x);
    }
  }

  // --- The next tile -------------------------------------------------------------------------------------

  /// Asks for the block's share of a row tile's A, a lane of every warp.
  __device__ void prefetch_a(RowTile<T> const& tile) const {
    if (tile.exists == 0 || tile.wide == 0 || lane_index() != 0) return;
    std::int32_t const segment_elements = p_.shape.segment_blocks * block_elements;
    std::int32_t const k = segments_.first * segment_elements;
    std::int32_t const k_last = min(static_cast<std::int32_t>(p_.k_in), segments_.last * segment_elements);
#pragma unroll 1
    for (int i = 0; i < p_.num_projections; ++i) {
      RouteCell<T> const& cell = tile.cell[i];
#pragma unroll 1
      for (std::int32_t j = warp_; j < cell.rank; j += Warps)
        prefetch_elements(cell.a + static_cast<std::int64_t>(j) * p_.k_in + k, k_last - k);
    }
  }

  /// Asks for the block's share of a row tile's B, a thread a projection.
  __device__ void prefetch_b(RowTile<T> const& tile) const {
    auto const i = static_cast<int>(Warps * warp_threads - 1 - threadIdx.x);
    if (i >= p_.num_projections || tile.exists == 0 || tile.wide == 0) return;
    RouteCell<T> const& cell = tile.cell[i];
    int2 const own = shared_.head->own[i];
    std::int32_t const n = own.x * tile_outputs;
    std::int32_t const n_last =
        min(own.y * tile_outputs, static_cast<std::int32_t>(p_.projections[i].table.n_out));
    if (cell.rank == 0) return;
    prefetch_elements(cell.b + static_cast<std::int64_t>(n) * cell.b_row_stride,
                      static_cast<std::int64_t>(n_last - n) * cell.b_row_stride);
  }

  /// Asks for `count` neighbouring elements, or for as many as are worth it.
  __device__ static void prefetch_elements(T const* from, std::int64_t count) {
    constexpr std::int64_t most = (std::int64_t{1} << 18) / sizeof(T);
    if (count > 0) prefetch_bulk(from, static_cast<std::uint32_t>(min(most, count) * sizeof(T)));
  }

  Operands<T, Y> const& p_;
  DeltaShared<Warps, T> const& shared_;
  Share segments_;  ///< the block's
  int warp_;
  bool settled_ = false;  ///< dependencies are complete and the cluster's blocks have started
  bool expects_arrivals_ = false;
  std::int32_t row_ = -1;    ///< batch row of this lane's group
  int quads_ = 0;            ///< lanes of four whose batch rows exist
  std::uint32_t slabs_ = 0;  ///< folded
};

}  // namespace atlas::lora::inline v0::detail
