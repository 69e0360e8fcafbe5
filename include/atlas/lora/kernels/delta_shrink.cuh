// SPDX-License-Identifier: AGPL-3.0-only
//
// The warps of a block of the one-launch delta that shrink: they multiply the block's chunks of a row tile,
// fold them into segment sums and send those to every block of the cluster.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The shrinking warps of a block, `Warps` of them.
///
/// Weight rows and batch rows do not mix in a product, so what stands in a row that does not exist (ranks
/// beyond the true one, batch rows of a short tile) is some row that does, multiplied and never used. Along a
/// contraction everything beyond the extent is zeroed on both operands.
///
/// Few warps hide little latency, so every instruction between the launch's dependencies and the first output
/// counts: what can be worked out before is.
template <class Source, int Warps, Element T, Element Y>
class DeltaShrink {
 public:
  __device__ DeltaShrink(Operands<T, Y> const& p, DeltaShared<T> const& shared, int block)
      : p_(p), shared_(shared), segments_(p.shape.segments_of(block)), warp_(warp_index()) {}

  /// The row tiles of a window, which has `count` of them.
  __device__ void window(int count, bool) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) tile(i, count);
  }

  [[nodiscard]] __device__ DeltaShared<T> const& shared() const { return shared_; }

  /// Waits for the launch's dependencies and for the cluster, unless it has.
  __device__ void settle() { settle_once(settled_, p_.inputs_settled); }

 private:
  static constexpr int warps_log2 = Warps == 4 ? 2 : 3;
  static_assert(1 << warps_log2 == Warps);
  /// Whether several blocks fit into registers at once.
  static constexpr bool many = sizeof(T) == 2;

  __device__ void tile(int index, int count) {
    RowTile<T> const& tile = shared_.tile(index);
    std::int32_t const all = tile.first_rank_tile[max_projections];
    // What is not loaded at once is asked for.
    if (!settled_ && all > p_.shape.slab) prefetch_a(tile);
    if (index + 1 < count) prefetch_a(shared_.tile(index + 1));
#pragma unroll 1
    for (std::int32_t slab = 0; slab < all; slab += p_.shape.slab) {
      shrink(tile, slab, min(p_.shape.slab, all - slab));
    }
  }

  /// Multiplies the block's chunks of `ranks` rank tiles from `slab` and sends the segment sums to every
  /// block of the cluster.
  __device__ void shrink(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks) {
    DeltaShape const& shape = p_.shape;
    std::int32_t s = segments_.first;
#pragma unroll 1
    do {
      std::int32_t const last = min(s + shape.group, segments_.last);
      std::int32_t const sums = (last - s) * ranks;
      multiply_group(tile, slab, ranks, s, last);
      settle();
      // Others may still read the chunks of the turn before, which lie in the other buffer.
      sync_shrink_warps<Warps>();
      if (s == segments_.first && stage_ >= 2) shared_.head->sums_empty[stage_ & 1u].wait((stage_ / 2 - 1) & 1u);
      send_sums(sending_of(0, s, ranks, sums), s, ranks, sums, tile.quads);
      ++turn_;
      s = last;
    } while (s < segments_.last);
    ++stage_;
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
      if constexpr (many) {
        // Four rank tiles at once where chunks are short and a warp takes one at a time.
        if (second.size() == 0 && first.size() == 2 && r + 3 * teams < ranks) {
          multiply_ranks<4>(tile, slab, r, slot, first, second);
          r += 4 * teams;
        }
#pragma unroll 1
        for (; r + teams < ranks; r += 2 * teams) multiply_ranks<2>(tile, slab, r, slot, first, second);
      }
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

  /// This turn's buffer of chunk sums.
  __device__ float4* chunks() const {
    return shared_.chunks + (turn_ & 1u) * (p_.shape.slab * p_.shape.chunk_slots * warp_threads);
  }
  /// This lane's place for the sums of a chunk of rank tile `r` of the slab.
  __device__ float4* chunk_sums(std::int32_t r, int slot) const {
    return chunks() + (r * p_.shape.chunk_slots + slot) * warp_threads + lane_index();
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
    if constexpr (Ranks == 4) {
      add_blocks<Ranks, 2, 2>(sums, low, high, x, 0, 0);
    } else if (many && first.size() == pair_chunk_blocks && second.size() == pair_chunk_blocks) {
      add_blocks<Ranks, many ? 4 : 1, pair_chunk_blocks>(sums, low, high, x, 0, gap);
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
      if constexpr (Chunk == 0) {
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
      sum.add(load_elements(low + k, left), load_elements(high + k, left), load_elements(x + k, left));
    }
    return sum.finish();
  }

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
    auto const done = shared_address(&shared_.head->sums_full[stage_ & 1u]);
    std::int32_t i = warp_ >> sharing;
    if (i >= sums) return;
    for (std::int32_t turn = 1;; ++turn) {
      float4 const* const from = chunks() + sending.from * warp_threads + lane_index();
      auto const to = shared_address(shared_.segments + (stage_ & 1u) * (p_.shape.slab * max_segments * warp_threads) +
                                     sending.to * warp_threads + lane_index());
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

  /// Asks for the block's share of a row tile's A, a thread a row.
  __device__ void prefetch_a(RowTile<T> const& tile) const {
    if (tile.wide == 0) return;
    std::int32_t const segment_elements = p_.shape.segment_blocks * block_elements;
    std::int32_t const k = segments_.first * segment_elements;
    std::int32_t const k_last = min(static_cast<std::int32_t>(p_.k_in), segments_.last * segment_elements);
#pragma unroll 1
    for (int i = 0; i < p_.num_projections; ++i) {
      RouteCell<T> const& cell = tile.cell[i];
#pragma unroll 1
      for (auto j = static_cast<std::int32_t>(threadIdx.x); j < cell.rank; j += Warps * warp_threads)
        prefetch_elements(a_row(tile, i, j) + k, k_last - k);
    }
  }


  Operands<T, Y> const& p_;
  DeltaShared<T> const& shared_;
  Share segments_;  ///< the block's
  int warp_;
  bool settled_ = false;     ///< dependencies are complete and the cluster's blocks have started
  std::uint32_t stage_ = 0;  ///< slabs sent
  std::uint32_t turn_ = 0;   ///< groups of segments multiplied
};

}  // namespace atlas::lora::inline v0::detail
