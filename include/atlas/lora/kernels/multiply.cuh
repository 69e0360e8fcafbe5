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

/// One output tile of a projection, whatever its alignment: a call, so that it takes no registers where all is
/// aligned.
template <class Source, Element T, Element Y>
__device__ __noinline__ void expand_narrow(RowTile<T> const& tile, Operands<T, Y> const& p, int projection,
                                           std::int32_t output_tile, T const* xa) {
  expand_tile<Source, false>(tile, p, projection, output_tile, xa);
}

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
  __device__ Multiply(Operands<T, Y> const& p, DeltaShared<Warps, T> const& shared)
      : p_(p), shared_(shared), warp_(warp_index()) {}

  /// All of row tile `index` of the window. The next one's weights are asked for on the way.
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
    int2 const own = shared_.head->own[first];
    std::int32_t const end = fast_end(tile, first, own.y);
    load_b_ahead(held, tile, first, own.x + warp_, end);
    load_y(held.y, tile, outputs(tile, first), own.x + warp_, end);
    XaPlace const place = xa_place(tile, slab, thread_here());
    bool const known = index + 1 < Warps;
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

  /// Waits for the launch's dependencies and for the cluster, unless it has.
  __device__ void settle() {
    if (settled_) return;
    cluster_wait();
    if (p_.inputs_settled) enter();
    settled_ = true;
  }

  /// Whether other blocks may still arrive at this block's barriers when row tile `index` of the window is
  /// the first that does not exist: they do after every tile but one that was known to be the last.
  [[nodiscard]] __device__ bool expects_arrivals(int index) const {
    return slabs_ > 0 && (index == 0 || shared_.tile(index - 1).first_rank_tile[max_projections] == 0);
  }

 private:
  static constexpr int warps_log2 = Warps == 8 ? 3 : 4;
  static_assert(1 << warps_log2 == Warps);
  /// Whether several blocks fit into registers at once.
  static constexpr bool many = sizeof(T) == 2;

  /// The block's segments.
  [[nodiscard]] __device__ Share own_segments() const {
    return p_.shape.segments_of(static_cast<int>(blockIdx.x) & ((1 << p_.shape.cluster_log2) - 1));
  }

  // --- Shrink --------------------------------------------------------------------------------------------

  /// Multiplies the block's chunks of `ranks` rank tiles from `slab` and sends the segment sums to every
  /// block of the cluster.
  __device__ void shrink(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks) {
    DeltaShape const& shape = p_.shape;
    Share const own = own_segments();
    std::int32_t s = own.first;
#pragma unroll 1
    do {
      std::int32_t const last = min(s + shape.group, own.last);
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

  /// The chunks of the segments from `s` to `last`. Teams of warps take rank tiles in turn, the warps of a
  /// team chunk slots.
  __device__ void multiply_group(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks, std::int32_t s,
                                 std::int32_t last) {
    DeltaShape const& shape = p_.shape;
    int const warps = Warps >> shape.teams_log2;
    int const slots = (last - s) * shape.segment_chunks;
    int const team = warp_ >> (warps_log2 - shape.teams_log2);
#pragma unroll 1
    for (int slot = (warp_ & (warps - 1)) << shape.pairs_log2; slot < slots;
         slot += warps << shape.pairs_log2) {
      BlockRange const first = shape.chunk_of_slot(s, last, slot);
      BlockRange second;
      if (shape.pairs_log2 > 0) second = shape.chunk_of_slot(s, last, slot + 1);
      if (first.size() > 0) multiply_slots(tile, slab, ranks, team, slot, first, second);
    }
  }

  /// The chunks of chunk slot `slot` and, where a warp takes pairs, of the one after it, of the rank tiles
  /// from `slab` that are `team`'s.
  __device__ void multiply_slots(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks, int team,
                                 int slot, BlockRange first, BlockRange second) {
    std::int32_t const end = max(first.last, second.last) * block_elements;
    bool const fast = tile.wide != 0 && p_.wide && end <= static_cast<std::int32_t>(p_.k_in);
    int const teams = 1 << p_.shape.teams_log2;
    std::int32_t r = team;
    if (fast) {
#if __CUDA_ARCH__ < 1000  // two at once take more registers than the compiler finds on the others
      if constexpr (many) {
#pragma unroll 1
        for (; r + teams < ranks; r += 2 * teams) multiply_ranks<2>(tile, slab, r, slot, first, second);
      }
#endif
#pragma unroll 1
      for (; r < ranks; r += teams) multiply_ranks<1>(tile, slab, r, slot, first, second);
      return;
    }
    settle();
#pragma unroll 1
    for (; r < ranks; r += teams) {
      chunk_sums(r, slot)[0] = multiply_slow(tile, slab + r, first);
      if (second.size() > 0) chunk_sums(r, slot + 1)[0] = multiply_slow(tile, slab + r, second);
    }
  }

  /// Row `j` of a projection's A.
  __device__ T const* a_row(RowTile<T> const& tile, int projection, std::int32_t j) const {
    return tile.cell[projection].a + static_cast<std::int64_t>(j) * static_cast<std::int32_t>(p_.k_in);
  }

  /// This lane's place for the sums of a chunk of rank tile `r` of the slab.
  __device__ float4* chunk_sums(std::int32_t r, int slot) const {
    return shared_.chunks + (r * p_.shape.chunk_slots + slot) * warp_threads + lane_index();
  }

  /// The same where all is aligned and inside, of `Ranks` rank tiles: `slab` + `r`, and one more of the team.
  template <int Ranks>
  __device__ void multiply_ranks(RowTile<T> const& tile, std::int32_t slab, std::int32_t r, int slot,
                                 BlockRange first, BlockRange second) {
    int const teams = 1 << p_.shape.teams_log2;
    T const* low[Ranks];
    T const* high[Ranks];
    std::int32_t const k = first.first * block_elements + quad() * pack_elements;
#pragma unroll
    for (int i = 0; i < Ranks; ++i) {
      std::int32_t const rank_tile = slab + r + i * teams;
      int const projection = projection_of(tile, rank_tile);
      // Ranks beyond the true one multiply the last one's weights and are never used.
      std::int32_t const last = rank_of<Source>(tile, projection) - 1;
      std::int32_t const j = (rank_tile - tile.first_rank_tile[projection]) * tile_ranks + group();
      low[i] = a_row(tile, projection, min(j, last)) + k;
      high[i] = a_row(tile, projection, min(j + tile_batch_rows, last)) + k;
    }
    T const* const x = p_.x + max(tile.x_row[group()], 0) * p_.x_row_stride + k;
    std::int32_t const gap = (second.first - first.last) * block_elements;
    Accumulator<T> sums[Ranks][2];
    if (many && Ranks == 1 && first.size() == pair_chunk_blocks && second.size() == pair_chunk_blocks) {
      add_blocks<Ranks, many && Ranks == 1 ? 4 : 1, pair_chunk_blocks>(sums, low, high, x, 0, gap);
    } else {
      add_chunk<Ranks, 0>(sums, low, high, x, 0, first.size());
      if (second.size() > 0)
        add_chunk<Ranks, 1>(sums, low, high, x, first.size() * block_elements + gap, second.size());
    }
#pragma unroll
    for (int i = 0; i < Ranks; ++i) {
      float4* const to = chunk_sums(r + i * teams, slot);
      to[0] = sums[i][0].finish();
      if (second.size() > 0) to[warp_threads] = sums[i][1].finish();
    }
  }

  /// Adds `Blocks` blocks from `at` on, whose loads are in flight together, to the chains of one chunk; those
  /// from `Split` on, which lie `gap` elements further, to the next chunk's.
  template <int Ranks, int Blocks, int Split>
  __device__ void add_blocks(Accumulator<T> (&sums)[Ranks][2], T const* const (&low)[Ranks],
                             T const* const (&high)[Ranks], T const* x, std::int32_t at, std::int32_t gap) {
    constexpr int first_chunk = Split == 0 ? 1 : 0;
    Pack<T> a_low[Ranks][Blocks];
    Pack<T> a_high[Ranks][Blocks];
    Pack<T> x_pack[Blocks];
    auto const place = [&](int i) { return at + i * block_elements + (Split > 0 && i >= Split ? gap : 0); };
#pragma unroll
    for (int r = 0; r < Ranks; ++r) {
#pragma unroll
      for (int i = 0; i < Blocks; ++i) {
        a_low[r][i] = load_global(low[r] + place(i));
        a_high[r][i] = load_global(high[r] + place(i));
      }
    }
    settle();
#pragma unroll
    for (int i = 0; i < Blocks; ++i) x_pack[i] = load_vectors(x + place(i));
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
#pragma unroll
      for (int r = 0; r < Ranks; ++r) {
        sums[r][Split > 0 && i >= Split ? 1 : first_chunk].add(a_low[r][i], a_high[r][i], x_pack[i]);
      }
    }
  }

  /// Adds `blocks` blocks from `at` on to the chains of chunk `Chunk`, 0 or 1.
  template <int Ranks, int Chunk>
  __device__ void add_chunk(Accumulator<T> (&sums)[Ranks][2], T const* const (&low)[Ranks],
                            T const* const (&high)[Ranks], T const* x, std::int32_t at, std::int32_t blocks) {
    auto const add = [&]<int Blocks>() {
      add_blocks<Ranks, Blocks, Chunk == 1 ? 0 : Blocks>(sums, low, high, x, at, 0);
      at += Blocks * block_elements;
      blocks -= Blocks;
    };
    if constexpr (many) {
      if constexpr (Chunk == 0 && Ranks == 1) {
#pragma unroll 1
        while (blocks >= 4) add.template operator()<4>();
      }
#pragma unroll 1
      while (blocks >= 2) add.template operator()<2>();
    }
#pragma unroll 1
    while (blocks > 0) add.template operator()<1>();
  }

  /// A chunk of one rank tile, whatever its alignment and whether its blocks are whole.
  __device__ float4 multiply_slow(RowTile<T> const& tile, std::int32_t rank_tile, BlockRange blocks) const {
    int const projection = projection_of(tile, rank_tile);
    std::int32_t const last = rank_of<Source>(tile, projection) - 1;
    std::int32_t const j = (rank_tile - tile.first_rank_tile[projection]) * tile_ranks + group();
    T const* const low = a_row(tile, projection, min(j, last));
    T const* const high = a_row(tile, projection, min(j + tile_batch_rows, last));
    T const* const x = p_.x + max(tile.x_row[group()], 0) * p_.x_row_stride;
    Accumulator<T> sum;
#pragma unroll 1
    for (std::int32_t b = blocks.first; b < blocks.last; ++b) {
      std::int32_t const k = b * block_elements + quad() * pack_elements;
      auto const left = static_cast<std::int32_t>(p_.k_in) - k;
      Pack<T> const a_low = load_narrow(low + k, left);
      Pack<T> const a_high = load_narrow(high + k, left);
      sum.add(a_low, a_high, load_narrow(x + k, left));
    }
    return sum.finish();
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
    return {chunks, r * shape.chunk_slots + (segment - first) * shape.segment_chunks, r * max_segments + segment};
  }

  /// Folds the chunks of the group of segments from `first` and sends the sums of rows that exist to every
  /// block of the cluster. Warps share a sum's targets where there are fewer sums than warps.
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
      for (int target = warp_ & ((1 << sharing) - 1); target < 1 << p_.shape.cluster_log2;
           target += 1 << sharing) {
        std::uint32_t const there = address_in_block(local, static_cast<std::uint32_t>(target)) - local;
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
  /// block; `place` is this thread's first. The cluster's other blocks hear of it unless nothing comes after.
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
    if (!last && threadIdx.x < 1 << p_.shape.cluster_log2) head.sums_empty.arrive_at(threadIdx.x);
    ++slabs_;
  }

  // --- Expand --------------------------------------------------------------------------------------------

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
    int2 const own = shared_.head->own[projection];
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
      if (t >= end) expand_narrow<Source>(tile, p_, projection, t, shared_.xa + p_.shape.xa_offset[projection]);
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
    if (tile.row[group()] >= 0) store_vectors(y + output_tile * tile_outputs, folded(before, delta, cell.scale));
  }

  // --- The next tile -------------------------------------------------------------------------------------

  /// Asks for the block's share of a row tile's A, a thread a row.
  __device__ void prefetch_a(RowTile<T> const& tile) const {
    if (tile.exists == 0 || tile.wide == 0) return;
    std::int32_t const segment_elements = p_.shape.segment_blocks * block_elements;
    Share const own = own_segments();
    std::int32_t const k = own.first * segment_elements;
    std::int32_t const k_last = min(static_cast<std::int32_t>(p_.k_in), own.last * segment_elements);
#pragma unroll 1
    for (int i = 0; i < p_.num_projections; ++i) {
      RouteCell<T> const& cell = tile.cell[i];
#pragma unroll 1
      for (auto j = static_cast<std::int32_t>(threadIdx.x); j < cell.rank; j += Warps * warp_threads)
        prefetch_elements(a_row(tile, i, j) + k, k_last - k);
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
  int warp_;
  bool settled_ = false;  ///< dependencies are complete and the cluster's blocks have started
  std::uint32_t slabs_ = 0;  ///< folded
};

}  // namespace atlas::lora::inline v0::detail
