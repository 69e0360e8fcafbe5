// SPDX-License-Identifier: AGPL-3.0-only
//
// The head's recompute where overrides are few: a team of blocks, a cluster where there are any, takes an
// item, its warps take segments of k of the item's tiles, and the segment sums meet in the shared memory of
// the block that folds a tile. What an item reads is under way at once.
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
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Tiles of an item that one block of a team folds.
template <int Cluster>
inline constexpr int folded_tiles = most_spread_tiles / Cluster;
/// Float4 values of a buffer of segment sums.
template <int Cluster>
inline constexpr int spread_buffer = max_segments* folded_tiles<Cluster>* warp_threads;

/// One tile's operands, as this lane reads them.
template <Element T>
struct HeadTile {
  T const* weights;  ///< weight row `group()` of the tile, or some row where that is not there
  T const* x;        ///< batch row `group()`
  std::int64_t hidden;
  bool low, high, batch;  ///< whether weight rows `group()`, `group() + 8` and the batch row are there
};

template <Element T, Element Y>
__device__ inline HeadTile<T> head_tile(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of,
                                        std::int32_t first_override, std::int32_t first_row) {
  std::int64_t const hidden = p.params.table.hidden;
  std::int32_t const j = first_override + group();
  std::int32_t const row = head_row(p, group_of, first_row + group());
  bool const low = j < group_of.overrides;
  return HeadTile<T>{group_of.weights + (low ? j : 0) * hidden,
                     p.params.x + row * p.params.x_row_stride,
                     hidden,
                     low,
                     j + tile_batch_rows < group_of.overrides,
                     row >= 0};
}

/// Blocks of k whose weights a warp has under way together. They wait in shared memory, each pack where its
/// own lane put it, because registers would hold half of them; a block alone has no room for that.
template <bool Wide, int Cluster, Element T>
inline constexpr int weights_ahead = !Wide          ? 1
                                     : Cluster == 1 ? (sizeof(T) == 2 ? 4 : 1)
                                                    : (sizeof(T) == 2 ? 8 : 4);
/// Packs of a warp's weights that wait.
template <int Cluster, Element T>
inline constexpr int waiting_packs = Cluster == 1 ? 0 : weights_ahead<true, Cluster, T> * 2 * warp_threads;
/// Bytes of a block's.
template <int Cluster, Element T>
inline constexpr std::size_t waiting_bytes = sizeof(Pack<T>) *
                                             static_cast<std::size_t>(head_warps* waiting_packs<Cluster, T>);

/// The weights of some blocks of k of a tile, in registers or in shared memory.
template <bool Wide, int Cluster, Element T>
class WaitingWeights {
 public:
  static constexpr int ahead = weights_ahead<Wide, Cluster, T>;
  static constexpr bool shared = Wide && Cluster > 1;

  __device__ explicit WaitingWeights(Pack<T>* waiting) : waiting_(waiting + lane_index()) {}

  __device__ void ask(int i, T const* low, std::int64_t low_valid, T const* high, std::int64_t high_valid) {
    if constexpr (shared) {
      copy_pack<true>(waiting_ + 2 * i * warp_threads, low, low_valid);
      copy_pack<true>(waiting_ + (2 * i + 1) * warp_threads, high, high_valid);
    } else {
      low_[i] = load_operand<Wide>(low, low_valid);
      high_[i] = load_operand<Wide>(high, high_valid);
    }
  }
  __device__ void asked() const {
    if constexpr (shared) commit_copies();
  }
  __device__ void wait() const {
    if constexpr (shared) wait_copies<0>();
  }
  __device__ Pack<T> low(int i) const {
    if constexpr (shared) return read_pack(waiting_ + 2 * i * warp_threads);
    return low_[i];
  }
  __device__ Pack<T> high(int i) const {
    if constexpr (shared) return read_pack(waiting_ + (2 * i + 1) * warp_threads);
    return high_[i];
  }

 private:
  Pack<T>* waiting_;
  Pack<T> low_[shared ? 1 : ahead];
  Pack<T> high_[shared ? 1 : ahead];
};

/// The sum of one segment of one tile: the accumulator of this lane. Weights are asked for before what the
/// launch depends on is waited for, x after. `waiting` is the warp's shared memory.
template <bool Wide, int Cluster, Element T>
__device__ float4 multiply_segment(HeadTile<T> const& tile, BlockRange blocks, std::int32_t chunk_blocks,
                                   Pack<T>* waiting, bool& entered) {
  WaitingWeights<Wide, Cluster, T> weights(waiting);
  constexpr int ahead = weights.ahead;
  Accumulator<T> chunk;
  float4 total{};
  bool first = true;
  std::int32_t left = chunk_blocks;
  for (std::int32_t block = blocks.first; block < blocks.last; block += ahead) {
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      std::int64_t const k = block + i < blocks.last ? k_of(block + i, quad(), 0) : tile.hidden;
      bool const low = tile.low && k < tile.hidden;
      bool const high = tile.high && k < tile.hidden;
      weights.ask(i, tile.weights + (low ? k : 0), low ? tile.hidden - k : 0,
                  tile.weights + (high ? tile_batch_rows * tile.hidden + k : 0), high ? tile.hidden - k : 0);
    }
    weights.asked();
    if (!entered) enter();
    entered = true;
    Pack<T> x[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      std::int64_t const k = k_of(block + i, quad(), 0);
      x[i] = load_operand<Wide>(tile.x + k, block + i < blocks.last && tile.batch ? tile.hidden - k : 0);
    }
    weights.wait();
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (block + i >= blocks.last) continue;
      chunk.add(weights.low(i), weights.high(i), x[i]);
      if (--left > 0 && block + i + 1 < blocks.last) continue;
      float4 const sum = chunk.finish();
      total = first ? sum : add_rn(total, sum);
      first = false;
      chunk = Accumulator<T>();
      left = chunk_blocks;
    }
  }
  return total;
}

/// Writes what an item's warps multiply to the blocks that fold it.
template <bool Wide, int Cluster, Element T, Element Y>
__device__ void multiply_item(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of,
                              std::int32_t first_override, std::int32_t first_row, int block, float4* buffer,
                              Pack<T>* waiting, bool& entered) {
  Contraction const cut(p.params.table.hidden);
  Share const segments = share_of(cut.segments(), Cluster, block);
  int const across = group_of.work.item_overrides / head_tile_overrides;
  int const tiles = across * (group_of.work.item_rows / head_tile_rows);
  int const warp = static_cast<int>(threadIdx.x) / warp_threads;
  for (int task = warp; task < segments.size() * tiles; task += head_warps) {
    int const tile = task % tiles;
    std::int32_t const j = first_override + tile % across * head_tile_overrides;
    std::int32_t const row = first_row + tile / across * head_tile_rows;
    if (j >= group_of.overrides || row >= group_of.rows) continue;
    std::int32_t const segment = segments.first + task / tiles;
    float4 const sum = multiply_segment<Wide, Cluster>(head_tile(p, group_of, j, row), cut.segment(segment),
                                                       cut.chunk_blocks(),
                                                       waiting + warp * waiting_packs<Cluster, T>, entered);
    float4* const place =
        buffer + (segment * folded_tiles<Cluster> + tile / Cluster) * warp_threads + lane_index();
    if constexpr (Cluster == 1) {
      *place = sum;
    } else {
      store_to_block(place, static_cast<std::uint32_t>(tile % Cluster), sum);
    }
  }
}

/// One spread item by a team of `Cluster` blocks. All threads of all its blocks call it. `waiting` is shared
/// memory for weights under way. `parity` says which
/// of the two buffers is next; a team of one block has one buffer.
template <int Cluster, Element T, Element Y>
__device__ void spread_item(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of, std::int32_t index,
                            int block, float4* buffers, Pack<T>* waiting, int& parity, bool& entered) {
  std::int32_t const first_override = group_of.work.first_override(index);
  std::int32_t const first_row = group_of.work.first_row(index);
  float4* const buffer = buffers + parity * spread_buffer<Cluster>;
  if (group_of.wide != 0) {
    multiply_item<true, Cluster>(p, group_of, first_override, first_row, block, buffer, waiting, entered);
  } else {
    multiply_item<false, Cluster>(p, group_of, first_override, first_row, block, buffer, waiting, entered);
  }
  // The tile that this warp folds; where it goes is found while others still multiply.
  int const across = group_of.work.item_overrides / head_tile_overrides;
  int const tile = static_cast<int>(threadIdx.x) / warp_threads * Cluster + block;
  std::int32_t const j = first_override + tile % across * head_tile_overrides;
  std::int32_t const row = first_row + tile / across * head_tile_rows;
  bool const folds = tile < across * (group_of.work.item_rows / head_tile_rows) && j < group_of.overrides &&
                     row < group_of.rows;
  HeadTarget target{};
  if (folds) {
    find_ids(target, p, group_of, j);
    find_rows(target, p, group_of, row);
  }
  if (!entered) enter();
  entered = true;
  if constexpr (Cluster == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }
  if (folds) {
    float4 const* const own = buffer + tile / Cluster * warp_threads + lane_index();
    int const segments = Contraction(p.params.table.hidden).segments();
    float4 total = own[0];
    for (int s = 1; s < segments; ++s) {
      total = add_rn(total, own[s * folded_tiles<Cluster> * warp_threads]);
    }
    write_logits(p, target, total);
  }
  // The other buffer takes the next item. A block writes this one again only after the next barrier, which no
  // block passes before all have folded it.
  if constexpr (Cluster == 1) {
    __syncthreads();
  } else {
    parity ^= 1;
  }
}

}  // namespace atlas::lora::inline v0::detail
