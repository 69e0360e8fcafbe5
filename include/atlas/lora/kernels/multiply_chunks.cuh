// SPDX-License-Identifier: AGPL-3.0-only
//
// The chunks of the shrink in the one-launch delta: which warp multiplies which, and with how many loads in
// flight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The warps of a block as they multiply chunks, into shared memory.
///
/// Weight rows and batch rows do not mix in a product, so what stands in a row that does not exist (ranks
/// beyond the true one, outputs beyond n_out, batch rows of a short tile) is some row that does, or zero,
/// multiplied and never used. Along a contraction everything beyond the extent is zeroed on both operands.
///
/// Few warps hide little latency, so every instruction between the launch's dependencies and the first output
/// counts: what can be worked out before is.
template <class Source, int Warps, bool Splits, Element T, Element Y>
class MultiplyChunks {
 public:
  __device__ MultiplyChunks(Operands<T, Y> const& p, DeltaShared<Warps, T> const& shared)
      : p_(p), shared_(shared), warp_(warp_index()) {}

  /// Waits for the launch's dependencies and for the cluster, unless it has.
  __device__ void settle() {
    if (settled_) return;
    cluster_wait();
    if (p_.inputs_settled) enter();
    settled_ = true;
  }

 protected:
  static constexpr int warps_log2 = Warps == 8 ? 3 : 4;
  static_assert(1 << warps_log2 == Warps);
  /// Whether several blocks fit into registers at once.
  static constexpr bool many = sizeof(T) == 2;

  /// The shape of the block's team.
  [[nodiscard]] __device__ TeamShape const& team() const {
    if constexpr (Splits) return shared_.head->team;
    return p_.shape.team[0];
  }
  /// The block's segments.
  [[nodiscard]] __device__ Share own_segments() const {
    return p_.shape.segments_of(team(), static_cast<int>(blockIdx.x) & ((1 << team().log2) - 1));
  }

  /// The chunks of the segments from `s` to `last`. Warps of one chunk slot, mates, take rank tiles in turn.
  __device__ void multiply_group(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks,
                                 std::int32_t s, std::int32_t last) {
    DeltaShape const& shape = p_.shape;
    int const warps = Warps >> team().mates_log2;
    int const slots = (last - s) * shape.segment_chunks;
    int const mate = warp_ >> (warps_log2 - team().mates_log2);
#pragma unroll 1
    for (int slot = (warp_ & (warps - 1)) << team().pairs_log2; slot < slots;
         slot += warps << team().pairs_log2) {
      BlockRange const first = shape.chunk_of_slot(s, last, slot);
      BlockRange second;
      if (team().pairs_log2 > 0) second = shape.chunk_of_slot(s, last, slot + 1);
      if (first.size() > 0) multiply_slots(tile, slab, ranks, mate, slot, first, second);
    }
  }

  /// The chunks of chunk slot `slot` and, where a warp takes pairs, of the one after it, of the rank tiles
  /// from `slab` that are `mate`'s.
  __device__ void multiply_slots(RowTile<T> const& tile, std::int32_t slab, std::int32_t ranks, int mate,
                                 int slot, BlockRange first, BlockRange second) {
    std::int32_t const end = max(first.last, second.last) * block_elements;
    bool const fast = tile.wide != 0 && p_.wide && end <= static_cast<std::int32_t>(p_.k_in);
    int const mates = 1 << team().mates_log2;
    std::int32_t r = mate;
    if (fast) {
#if __CUDA_ARCH__ < 1000  // two at once take more registers than the compiler finds on the others
      if constexpr (many) {
#pragma unroll 1
        for (; r + mates < ranks; r += 2 * mates) multiply_ranks<2>(tile, slab, r, slot, first, second);
      }
#endif
#pragma unroll 1
      for (; r < ranks; r += mates) multiply_ranks<1>(tile, slab, r, slot, first, second);
      return;
    }
    settle();
#pragma unroll 1
    for (; r < ranks; r += mates) {
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

  /// The same where all is aligned and inside, of `Ranks` rank tiles: `slab` + `r`, and the mate's next.
  template <int Ranks>
  __device__ void multiply_ranks(RowTile<T> const& tile, std::int32_t slab, std::int32_t r, int slot,
                                 BlockRange first, BlockRange second) {
    int const mates = 1 << team().mates_log2;
    T const* low[Ranks];
    T const* high[Ranks];
    std::int32_t const k = first.first * block_elements + quad() * pack_elements;
#pragma unroll
    for (int i = 0; i < Ranks; ++i) {
      std::int32_t const rank_tile = slab + r + i * mates;
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
      float4* const to = chunk_sums(r + i * mates, slot);
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

  /// Asks for `count` neighbouring elements, or for as many as are worth it.
  __device__ static void prefetch_elements(T const* from, std::int64_t count) {
    constexpr std::int64_t most = (std::int64_t{1} << 18) / sizeof(T);
    if (count > 0) prefetch_bulk(from, static_cast<std::uint32_t>(min(most, count) * sizeof(T)));
  }

  Operands<T, Y> const& p_;
  DeltaShared<Warps, T> const& shared_;
  int warp_;
  bool settled_ = false;  ///< dependencies are complete and the cluster's blocks have started
};

}  // namespace atlas::lora::inline v0::detail
