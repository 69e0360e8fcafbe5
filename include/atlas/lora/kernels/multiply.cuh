// SPDX-License-Identifier: AGPL-3.0-only
//
// The warps of a block of the one-launch delta that multiply: chunks of the shrink from stages of A, the
// exchange of segment sums in the cluster, output tiles of the expand from stages of B.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/delta_stages.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/ring.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The multiplying warps. `Wide`: x and y allow 16-byte accesses.
///
/// Weight rows and batch rows do not mix in a product, so what stands in a row that does not exist (ranks
/// beyond the true one, outputs beyond n_out, batch rows of a short tile) is multiplied and never used. Along
/// a contraction everything beyond the extent is zeroed on both operands.
template <class Source, bool Wide, int Cluster, int Threads, Element T, Element Y>
class Multiply {
 public:
  __device__ Multiply(Operands<T, Y> const& p, DeltaShared<T, Y> const& shared)
      : p_(p),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / warp_threads),
        slot_(warp_ % max_chunks),
        slot_segment_(slot_ / p.shape.segment_chunks),
        slot_chunk_(slot_ % p.shape.segment_chunks),
        part_(slot_ / p.shape.stages.chunks),
        part_block_(slot_block(p.shape, 0, part_ * p.shape.stages.chunks)) {}

  /// All of one row tile.
  __device__ void tile(RowTile<T> const& tile, BlockShare const& share) {
    std::int32_t const all = tile.first_rank_tile[max_projections];
    if (all == 0) return;
    unsigned const exist =
        __ballot_sync(0xffffffffu, lane_index() < tile_rows && tile.row[lane_index() % tile_rows] >= 0);
    quads_ = (32 - __clz(static_cast<int>(exist)) + 1) / 2;
    row_ = tile.row[group()];
    x_ = p_.x + max(tile.x_row[group()], 0) * p_.x_row_stride + quad() * pack_elements;
    std::int32_t first = 0;
    while (tile.cell[first].rank == 0) ++first;
    Pack<Y> ahead{};
    for (std::int32_t slab = 0; slab < all; slab += slab_rank_tiles) {
      Share const ranks{slab, min(slab + slab_rank_tiles, all)};
      shrink(ranks, share.segments);
      // y of this warp's first output tile is on its way while segment sums cross.
      if (prefetches && ranks.last == all)
        ahead = load_y(first, own_outputs(p_.shape, share.outputs, first).first + warp_);
      fold(tile, ranks);
    }
    for (int i = first; i < p_.num_projections; ++i) {
      if (tile.cell[i].rank > 0) expand(tile, i, own_outputs(p_.shape, share.outputs, i), ahead, i > first);
    }
  }

 private:
  __device__ static void synchronize() { asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory"); }
  __device__ T const* wait_stage() const {
    shared_.head->stage_full[place_.stage].wait(place_.pass);
    return shared_.stage(p_, place_);
  }
  __device__ void release_stage() {
    __syncwarp();
    if (lane_index() == 0) shared_.head->stage_empty[place_.stage].arrive();
    place_.advance(static_cast<std::uint32_t>(p_.shape.stages.count));
  }

  /// Whether y is loaded an output tile ahead. A float y would take too many registers, as would any on
  /// sm_100 and sm_103, whose compiler needs more of them.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030)
  static constexpr bool prefetches = false;
#else
  static constexpr bool prefetches = Wide && sizeof(Y) == 2;
#endif
  static constexpr int ahead_blocks = sizeof(T) == 2 ? 4 : 1;
  /// Warps of one chunk slot, which take rank tiles in turn.
  static constexpr int teams = Threads / warp_threads / max_chunks;
  static_assert(teams >= 1 && Threads % (warp_threads * max_chunks) == 0);

  /// Multiplies the block's chunks of a slab and sends the segment sums to every block of the cluster.
  __device__ void shrink(Share ranks, Share segments) {
    DeltaShape const& shape = p_.shape;
    for (std::int32_t s = segments.first; s < segments.last; s += shape.group) {
      std::int32_t const segment = s + slot_segment_;
      BlockRange blocks;
      if (slot_segment_ < shape.group && segment < segments.last) {
        std::int32_t const end = min((segment + 1) * shape.segment_blocks, shape.blocks);
        blocks.first = min(segment * shape.segment_blocks + slot_chunk_ * shape.chunk_blocks, end);
        blocks.last = min(blocks.first + shape.chunk_blocks, end);
      }
      Pack<T> x[ahead_blocks];
      load_x(x, blocks.first, blocks.last);
      bool const once = blocks.size() <= ahead_blocks;
      std::int32_t const offset = (blocks.first - s * shape.segment_blocks - part_block_) * block_elements;
      for (std::int32_t r = 0; r < ranks.size(); ++r) {
        for (std::int32_t part = 0; part < shape.parts; ++part) {
          T const* const stage = wait_stage();
          if (part == part_ && r % teams == warp_ / max_chunks && blocks.size() > 0) {
            Accumulator<T> sum;
            T const* a = stage + offset + group() * shape.stage_stride + quad() * pack_elements;
            for (std::int32_t b = blocks.first; b < blocks.last; b += ahead_blocks) {
              if (!once) load_x(x, b, blocks.last);
              multiply(sum, a, x, b, blocks.last);
              a += ahead_blocks * block_elements;
            }
            shared_.chunks[(r * max_chunks + slot_) * warp_threads + lane_index()] = sum.finish();
          }
          release_stage();
        }
      }
      synchronize();
      if (Cluster > 1 && s == segments.first) shared_.head->sums_empty.wait(sums_pass_ ^ 1u);
      send_segments(s, min(s + shape.group, segments.last), ranks.size());
      if (s + shape.group < segments.last) synchronize();
    }
  }

  /// x of the blocks from `block`, zero beyond `last` and k_in.
  __device__ void load_x(Pack<T> (&x)[ahead_blocks], std::int32_t block, std::int32_t last) const {
#pragma unroll
    for (int i = 0; i < ahead_blocks; ++i) {
      std::int32_t const k = (block + i) * block_elements;
      x[i] = load_operand<Wide>(x_ + k, block + i < last ? p_.k_in - k - quad() * pack_elements : 0);
    }
  }

  /// Adds up to `ahead_blocks` blocks from stage memory.
  __device__ void multiply(Accumulator<T>& sum, T const* a, Pack<T> const (&x)[ahead_blocks],
                           std::int32_t block, std::int32_t last) const {
    std::int32_t const stride = tile_batch_rows * p_.shape.stage_stride;
#pragma unroll
    for (int i = 0; i < ahead_blocks; ++i) {
      if (block + i >= last) break;
      Pack<T> low = load_vectors(a + i * block_elements);
      Pack<T> high = load_vectors(a + stride + i * block_elements);
      if ((block + i + 1) * block_elements > p_.k_in) {
        auto const inside =
            static_cast<std::int32_t>(p_.k_in - (block + i) * block_elements) - quad() * pack_elements;
        keep(low, inside);
        keep(high, inside);
      }
      sum.add(low, high, x[i]);
    }
  }

  /// Folds the chunks of the segments `[first, last)` and sends the sums of rows that exist: a warp per rank
  /// tile, segment and target.
  __device__ void send_segments(std::int32_t first, std::int32_t last, std::int32_t ranks) const {
    DeltaShape const& shape = p_.shape;
    bool const exists = quad() < quads_;
    std::int32_t segment = first;
    std::int32_t r = warp_ / Cluster;
    for (std::int32_t i = warp_; i < (last - first) * ranks * Cluster; i += Threads / warp_threads) {
      // i counts targets fastest, then rank tiles, then segments.
      r = i / Cluster;
      segment = first;
      while (r >= ranks) {
        r -= ranks;
        ++segment;
      }
      std::int32_t const here = min(shape.segment_blocks, shape.blocks - segment * shape.segment_blocks);
      float4 const* const own = shared_.chunks +
                                (r * max_chunks + (segment - first) * shape.segment_chunks) * warp_threads +
                                lane_index();
      float4 total = own[0];
      std::int32_t done = shape.chunk_blocks;
#pragma unroll
      for (int c = 1; c < max_chunks; ++c) {
        if (done < here) total = add(total, own[c * warp_threads]);
        done += shape.chunk_blocks;
      }
      float4* const place = shared_.segments + (segment * slab_rank_tiles + r) * warp_threads + lane_index();
      if constexpr (Cluster == 1) {
        *place = total;
      } else {
        if (exists) send(place, static_cast<std::uint32_t>(i % Cluster), total, shared_.head->sums_full);
      }
    }
  }

  /// Folds the segments of a slab into xa, zero from the rank to the end of its block.
  __device__ void fold(RowTile<T> const& tile, Share ranks) {
    DeltaHead<T>& head = *shared_.head;
    if constexpr (Cluster == 1) {
      synchronize();
    } else {
      if (threadIdx.x == 0) {
        head.sums_full.arrive_expecting(
            static_cast<std::uint32_t>(p_.shape.segments * ranks.size() * 8 * quads_) * sizeof(float4));
      }
      head.sums_full.wait(sums_pass_);
    }
    if (warp_ < ranks.size() && quad() < quads_) {
      float4 const* const own = shared_.segments + warp_ * warp_threads + lane_index();
      constexpr int stride = slab_rank_tiles * warp_threads;
      float4 total = own[0];
#pragma unroll
      for (int s = 1; s < max_segments; ++s) {
        if (s < p_.shape.segments) total = add(total, own[s * stride]);
      }
      put_xa(tile, ranks.first + warp_, total);
    }
    synchronize();
    if (Cluster > 1 && threadIdx.x < Cluster) head.sums_empty.arrive_at(threadIdx.x);
    sums_pass_ ^= 1u;
  }

  __device__ static float4 add(float4 const& a, float4 const& b) {
    return make_float4(add_rn(a.x, b.x), add_rn(a.y, b.y), add_rn(a.z, b.z), add_rn(a.w, b.w));
  }

  __device__ void put_xa(RowTile<T> const& tile, std::int32_t rank_tile, float4 const& sum) const {
    int const projection = projection_of(tile, rank_tile);
    std::int32_t const rank = rank_of<Source>(tile, projection);
    std::int32_t const local = rank_tile - tile.first_rank_tile[projection];
    std::int32_t const j = local * tile_ranks + group();
    T* const low = shared_.xa + quad() * 2 * p_.xa_shared_stride + p_.shape.xa_offset[projection] + j;
    T* const high = low + p_.xa_shared_stride;
    T const zero = round_to<T>(0.0F);
    low[0] = j < rank ? round_to<T>(sum.x) : zero;
    high[0] = j < rank ? round_to<T>(sum.y) : zero;
    low[tile_batch_rows] = j + tile_batch_rows < rank ? round_to<T>(sum.z) : zero;
    high[tile_batch_rows] = j + tile_batch_rows < rank ? round_to<T>(sum.w) : zero;
    // A rank whose tiles do not fill its last block leaves half of it.
    if (local % 2 == 0 && (local + 1) * tile_ranks >= rank) {
      low[tile_ranks] = high[tile_ranks] = zero;
      low[tile_ranks + tile_batch_rows] = high[tile_ranks + tile_batch_rows] = zero;
    }
  }

  /// This lane's eight outputs of y in an output tile of a projection, zero where there are none.
  __device__ Pack<Y> load_y(int projection, std::int32_t output_tile) const {
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    std::int64_t const n = static_cast<std::int64_t>(output_tile) * tile_outputs + quad() * pack_elements;
    return load_pack<Wide>(target.y + row_ * target.y_row_stride + n, row_ >= 0 ? target.table.n_out - n : 0);
  }

  /// Expands the block's output tiles of one projection and folds them into y. `before` is y of this warp's
  /// first unless `late`.
  __device__ void expand(RowTile<T> const& tile, int projection, Share own, Pack<Y> before, bool late) {
    constexpr int warps = Threads / warp_threads;
    RouteCell<T> const& cell = tile.cell[projection];
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    std::int32_t const rank = rank_of<Source>(tile, projection);
    std::int32_t const padded = (rank + pack_elements - 1) / pack_elements * pack_elements;
    std::int32_t const step = outputs_of_stage<T>(p_.shape, padded);
    std::int64_t const n_out = target.table.n_out;
    T const* const xa =
        shared_.xa + group() * p_.xa_shared_stride + p_.shape.xa_offset[projection] + quad() * pack_elements;
    std::int32_t next = own.first + warp_;
    if (prefetches && late && next < own.last) before = load_y(projection, next);
    for (std::int32_t t = own.first; t < own.last; t += step) {
      T const* const stage = wait_stage() + output_of(lane_index(), 0) * padded + quad() * pack_elements;
      for (; next < min(t + step, own.last); next += warps) {
        Pack<Y> ahead{};
        if (prefetches && next + warps < own.last) ahead = load_y(projection, next + warps);
        Accumulator<T> sums[2];
        contract(sums, stage + (next - t) * tile_outputs * padded, padded, rank, xa);
        std::int64_t const first = static_cast<std::int64_t>(next) * tile_outputs;
        Pack<T> const delta = finish_outputs(cell, n_out, first, sums);
        if (!prefetches) before = load_y(projection, next);
        std::int64_t const n = first + quad() * pack_elements;
        store_pack<Wide>(target.y + row_ * target.y_row_stride + n, folded(before, delta, cell.scale),
                         row_ >= 0 ? n_out - n : 0);
        before = ahead;
      }
      release_stage();
    }
  }

  /// One output tile's chains over the rank.
  __device__ static void contract(Accumulator<T> (&sums)[2], T const* b, std::int32_t padded,
                                  std::int32_t rank, T const* xa) {
    std::int32_t const step = 2 * padded;  // from one matrix's row to the next one's
    for (std::int32_t j = 0; j < rank; j += block_elements) {
      Pack<T> packs[4];
      std::int32_t const inside = rank - j - quad() * pack_elements;
#pragma unroll
      for (int m = 0; m < 4; ++m) packs[m] = load_operand<true>(b + m * step + j, inside);
      if (rank % pack_elements != 0) {
#pragma unroll
        for (int m = 0; m < 4; ++m) keep(packs[m], inside);
      }
      Pack<T> const x = load_vectors(xa + j);
      sums[0].add(packs[0], packs[1], x);
      sums[1].add(packs[2], packs[3], x);
    }
  }

  Operands<T, Y> const& p_;
  DeltaShared<T, Y> const& shared_;
  int warp_;
  int slot_;                   ///< this warp's chunk slot in a group
  std::int32_t slot_segment_;  ///< of the slot, from the group's first
  std::int32_t slot_chunk_;
  std::int32_t part_;        ///< the stage of a group that holds the slot
  std::int32_t part_block_;  ///< its first block, from the group's
  std::int32_t row_ = -1;    ///< batch row of this lane's group
  T const* x_ = nullptr;     ///< its x at this lane's place in a block
  int quads_ = 0;            ///< lanes of four whose batch rows exist
  std::uint32_t sums_pass_ = 0;
  RingPlace place_{};
};

}  // namespace atlas::lora::inline v0::detail
