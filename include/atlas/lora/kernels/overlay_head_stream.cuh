// SPDX-License-Identifier: AGPL-3.0-only
//
// The head's recompute where overrides are many: a block takes 128 of them by up to 64 batch rows, a warp 16,
// and walks k in stages through a ring in shared memory, so that batch rows share one read of the weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"

namespace atlas::lora::inline v0::detail {

/// Blocks of k in a stage, and their packs.
inline constexpr int stage_blocks = 2;
inline constexpr int stage_packs = stage_blocks * block_elements / pack_elements;
/// Packs of weights in a stage: [block of k][warp][low, high][lane].
inline constexpr int stage_weights = stage_packs * stream_overrides;
/// Packs of x in a stage: [block of k][row tile][lane].
template <Element T>
inline constexpr int stage_x = stage_packs* stream_tiles<T>* tile_batch_rows;
/// Stages of the ring: none for a kernel that never streams, as many as fit 99 KB of shared memory, or as
/// many as keep a multiprocessor's share of the memory's bandwidth under way.
enum class RingDepth : std::int32_t { none, shallow, deep };
template <Element T, RingDepth Depth>
inline constexpr int stream_stages = Depth == RingDepth::none      ? 0
                                     : Depth == RingDepth::shallow ? (sizeof(T) == 2 ? 3 : 2)
                                                                   : (sizeof(T) == 2 ? 6 : 5);
/// Bytes of the ring.
template <Element T, RingDepth Depth>
inline constexpr std::size_t ring_bytes = sizeof(Pack<T>) *
                                          static_cast<std::size_t>(stream_stages<T, Depth>) *
                                          static_cast<std::size_t>(stage_weights + stage_x<T>);

/// A block's streamed item: what it reads, and its ring.
template <bool Wide, RingDepth Depth, Element T, Element Y>
struct HeadStream {
  static constexpr int stages_in_ring = stream_stages<T, Depth>;
  HeadOperands<T, Y> const& p;
  HeadGroup<T> const& group_of;
  std::int32_t first_override;
  int tiles;                 ///< row tiles that have rows
  std::int32_t const* rows;  ///< shared: the item's rows, -1 for none
  Pack<T>* ring;

  __device__ Pack<T>* stage(int index) const {
    return ring + index % stages_in_ring * (stage_weights + stage_x<T>);
  }

  /// Neighbouring threads take neighbouring packs of a row, so that whole lines are asked for.
  __device__ void load_weights(int index) const {
    Pack<T>* const to = stage(index);
    std::int64_t const hidden = p.params.table.hidden;
    // The sums take the registers that more addresses, or packs gathered by elements, would need.
#pragma unroll(Wide ? 4 : 1)
    for (int i = static_cast<int>(threadIdx.x); i < stage_weights; i += head_warps * warp_threads) {
      int const pack = i % stage_packs;
      int const row = i / stage_packs;
      std::int64_t const k = k_of(index * stage_blocks + pack / 4, pack % 4, 0);
      std::int32_t const j = first_override + row;
      bool const there = j < group_of.overrides && k < hidden;
      int const place = (pack / 4 * head_warps + row / 16) * 64 + row % 16 * 4 + pack % 4;
      copy_pack<Wide>(to + place, there ? group_of.weights + j * hidden + k : group_of.weights,
                      there ? hidden - k : 0);
    }
  }
  __device__ void load_x(int index) const {
    Pack<T>* const to = stage(index) + stage_weights;
    std::int64_t const hidden = p.params.table.hidden;
#pragma unroll(Wide ? 2 : 1)
    for (int i = static_cast<int>(threadIdx.x); i < tiles * tile_batch_rows * stage_packs;
         i += head_warps * warp_threads) {
      int const pack = i % stage_packs;
      int const local = i / stage_packs;
      std::int64_t const k = k_of(index * stage_blocks + pack / 4, pack % 4, 0);
      std::int32_t const row = rows[local];
      bool const there = row >= 0 && k < hidden;
      int const place = (pack / 4 * stream_tiles<T> + local / 8) * warp_threads + local % 8 * 4 + pack % 4;
      copy_pack<Wide>(to + place, there ? p.params.x + row * p.params.x_row_stride + k : p.params.x,
                      there ? hidden - k : 0);
    }
  }

  /// The item's sums: `sum[t]` is this lane's accumulator of row tile t.
  __device__ void multiply(float4 (&sum)[stream_tiles<T>], bool& entered) const {
    Contraction const cut(p.params.table.hidden);
    int const stages = (cut.blocks() + stage_blocks - 1) / stage_blocks;
    for (int s = 0; s < stages_in_ring - 1 && s < stages; ++s) load_weights(s);
    if (!entered) enter();
    entered = true;
    for (int s = 0; s < stages_in_ring - 1; ++s) {
      if (s < stages) load_x(s);
      commit_copies();
    }
    Accumulator<T> chunk[stream_tiles<T>];
    float4 segment[stream_tiles<T>];
    std::int32_t chunk_end = cut.chunk(0, 0).last;
    std::int32_t segment_end = cut.segment(0).last;
    clear(segment);
    clear(sum);
    for (int s = 0; s < stages; ++s) {
      wait_copies<stages_in_ring - 2>();
      __syncthreads();  // the stage is there for all, and all are done with the one that is filled next
      if (int const next = s + stages_in_ring - 1; next < stages) {
        load_weights(next);
        load_x(next);
      }
      commit_copies();
#pragma unroll
      for (int b = 0; b < stage_blocks; ++b) {
        std::int32_t const block = s * stage_blocks + b;
        if (block >= cut.blocks()) break;
        add_block(s, b, chunk);
        if (block + 1 < chunk_end) continue;
        fold_chunk(chunk, segment);
        chunk_end = min(chunk_end + cut.chunk_blocks(), segment_end);
        if (block + 1 < segment_end) continue;
        fold_segment(segment, sum);
        chunk_end = segment_end + cut.chunk_blocks();
        segment_end = min(segment_end + cut.segment_blocks(), cut.blocks());
        chunk_end = min(chunk_end, segment_end);
      }
    }
  }

 private:
  __device__ void add_block(int index, int block, Accumulator<T> (&chunk)[stream_tiles<T>]) const {
    Pack<T> const* const from = stage(index);
    int const warp = static_cast<int>(threadIdx.x) / warp_threads;
    int const row = group() * 4 + quad();
    Pack<T> const low = read_pack(from + (block * head_warps + warp) * 64 + row);
    Pack<T> const high = read_pack(from + (block * head_warps + warp) * 64 + 32 + row);
#pragma unroll
    for (int t = 0; t < stream_tiles<T>; ++t) {
      if (t < tiles) {
        chunk[t].add(low, high,
                     read_pack(from + stage_weights + (block * stream_tiles<T> + t) * warp_threads + row));
      }
    }
  }
  // A fold starts from its first member: -0 leaves whatever is added to it as it is.
  __device__ static void clear(float4 (&fold)[stream_tiles<T>]) {
#pragma unroll
    for (int t = 0; t < stream_tiles<T>; ++t) fold[t] = make_float4(-0.0F, -0.0F, -0.0F, -0.0F);
  }
  __device__ static void fold_chunk(Accumulator<T> (&chunk)[stream_tiles<T>],
                                    float4 (&segment)[stream_tiles<T>]) {
#pragma unroll
    for (int t = 0; t < stream_tiles<T>; ++t) {
      segment[t] = add_rn(segment[t], chunk[t].finish());
      chunk[t] = Accumulator<T>();
    }
  }
  __device__ static void fold_segment(float4 (&segment)[stream_tiles<T>], float4 (&sum)[stream_tiles<T>]) {
#pragma unroll
    for (int t = 0; t < stream_tiles<T>; ++t) sum[t] = add_rn(sum[t], segment[t]);
    clear(segment);
  }
};

/// One streamed item by the block. `rows` and `shared` are shared memory for the item's rows and the ring.
template <bool Wide, RingDepth Depth, Element T, Element Y>
__device__ void stream_item(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of, std::int32_t index,
                            std::int32_t* rows, float4* shared, bool& entered) {
  std::int32_t const first_override = group_of.work.first_override(index);
  std::int32_t const first_row = group_of.work.first_row(index);
  __syncthreads();  // the last item is done with
  if (int const thread = static_cast<int>(threadIdx.x); thread < stream_tiles<T> * tile_batch_rows) {
    rows[thread] = head_row(p, group_of, first_row + thread);
  }
  __syncthreads();
  int const tiles = min(stream_tiles<T>, row_tiles(group_of.rows - first_row));
  HeadStream<Wide, Depth, T, Y> const stream{p,     group_of, first_override,
                                             tiles, rows,     reinterpret_cast<Pack<T>*>(shared)};
  float4 sum[stream_tiles<T>];
  stream.multiply(sum, entered);
  HeadTarget target{};
  find_ids(target, p, group_of,
           first_override + static_cast<int>(threadIdx.x) / warp_threads * head_tile_overrides);
#pragma unroll
  for (int t = 0; t < stream_tiles<T>; ++t) {
    if (t >= tiles) continue;
    target.row[0] = rows[t * tile_batch_rows + 2 * quad()];
    target.row[1] = rows[t * tile_batch_rows + 2 * quad() + 1];
    write_logits(p, target, sum[t]);
  }
}

}  // namespace atlas::lora::inline v0::detail
