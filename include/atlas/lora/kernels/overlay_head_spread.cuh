// SPDX-License-Identifier: AGPL-3.0-only
//
// The head's recompute where overrides are few: a team of blocks, a cluster where there are any, takes an
// item, its warps take segments of k of its tiles, and the segment sums meet in the shared memory of
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

/// Tiles of the same weights, `Down` along the batch rows, as this lane reads them.
template <int Down, Element T>
struct HeadTiles {
  T const* weights;  ///< weight row `group()` of the tiles, or some row where that is not there
  T const* x[Down];  ///< batch row `group()` of each tile
  std::int64_t hidden;
  bool low, high;  ///< whether weight rows `group()` and `group() + 8` are there
  bool batch[Down];
};

template <int Down, Element T, Element Y>
__device__ inline HeadTiles<Down, T> head_tiles(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of,
                                                std::int32_t first_override, std::int32_t first_row) {
  HeadTiles<Down, T> tiles;
  tiles.hidden = p.params.table.hidden;
  std::int32_t const j = first_override + group();
  tiles.low = j < group_of.overrides;
  tiles.high = j + tile_batch_rows < group_of.overrides;
  tiles.weights = group_of.weights + (tiles.low ? j : 0) * tiles.hidden;
#pragma unroll
  for (int t = 0; t < Down; ++t) {
    std::int32_t const row = head_row(p, group_of, first_row + t * tile_batch_rows + group());
    tiles.x[t] = p.params.x + row * p.params.x_row_stride;
    tiles.batch[t] = row >= 0;
  }
  return tiles;
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

/// The sums of one segment of some tiles: `total[t]` is this lane's accumulator of tile t. Weights are asked
/// for before what the launch depends on is waited for, x after. `waiting` is the warp's shared memory.
template <bool Wide, int Cluster, int Down, Element T>
__device__ void multiply_segment(HeadTiles<Down, T> const& tiles, BlockRange blocks,
                                 std::int32_t chunk_blocks, Pack<T>* waiting, float4 (&total)[Down],
                                 bool& entered) {
  WaitingWeights<Wide, Cluster, T> weights(waiting);
  constexpr int ahead = weights.ahead;
  constexpr int x_ahead = ahead > Down ? ahead / Down : 1;  // x waits in registers
  Accumulator<T> chunk[Down];
  bool first = true;
  std::int32_t left = chunk_blocks;
  for (std::int32_t block = blocks.first; block < blocks.last; block += ahead) {
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      std::int64_t const k = block + i < blocks.last ? k_of(block + i, quad(), 0) : tiles.hidden;
      bool const low = tiles.low && k < tiles.hidden;
      bool const high = tiles.high && k < tiles.hidden;
      weights.ask(i, tiles.weights + (low ? k : 0), low ? tiles.hidden - k : 0,
                  tiles.weights + (high ? tile_batch_rows * tiles.hidden + k : 0),
                  high ? tiles.hidden - k : 0);
    }
    weights.asked();
    if (!entered) enter();
    entered = true;
#pragma unroll
    for (int part = 0; part < ahead; part += x_ahead) {
      Pack<T> x[Down][x_ahead];
#pragma unroll
      for (int t = 0; t < Down; ++t) {
#pragma unroll
        for (int i = 0; i < x_ahead; ++i) {
          std::int64_t const k = k_of(block + part + i, quad(), 0);
          bool const there = block + part + i < blocks.last && tiles.batch[t];
          x[t][i] = load_operand<Wide>(tiles.x[t] + k, there ? tiles.hidden - k : 0);
        }
      }
      if (part == 0) weights.wait();
#pragma unroll
      for (int i = 0; i < x_ahead; ++i) {
        std::int32_t const here = block + part + i;
        if (here >= blocks.last) continue;
        Pack<T> const low = weights.low(part + i);
        Pack<T> const high = weights.high(part + i);
#pragma unroll
        for (int t = 0; t < Down; ++t) chunk[t].add(low, high, x[t][i]);
        if (--left > 0 && here + 1 < blocks.last) continue;
#pragma unroll
        for (int t = 0; t < Down; ++t) {
          float4 const sum = chunk[t].finish();
          total[t] = first ? sum : add_rn(total[t], sum);
          chunk[t] = Accumulator<T>();
        }
        first = false;
        left = chunk_blocks;
      }
    }
  }
}

/// Writes what an item's warps multiply to the blocks that fold it. Tile `m + across * t` is the t-th along
/// the batch rows.
template <bool Wide, int Cluster, int Down, Element T, Element Y>
__device__ void multiply_item(HeadOperands<T, Y> const& p, HeadGroup<T> const& group_of,
                              std::int32_t first_override, std::int32_t first_row, int block, float4* buffer,
                              Pack<T>* waiting, bool& entered) {
  Contraction const cut(p.params.table.hidden);
  Share const segments = share_of(cut.segments(), Cluster, block);
  int const across = group_of.work.item_overrides / head_tile_overrides;
  int const warp = static_cast<int>(threadIdx.x) / warp_threads;
  for (int task = warp; task < segments.size() * across; task += head_warps) {
    int const m = task % across;
    std::int32_t const j = first_override + m * head_tile_overrides;
    if (j >= group_of.overrides) continue;
    std::int32_t const segment = segments.first + task / across;
    float4 sum[Down];
    multiply_segment<Wide, Cluster>(head_tiles<Down>(p, group_of, j, first_row), cut.segment(segment),
                                    cut.chunk_blocks(), waiting + warp * waiting_packs<Cluster, T>, sum,
                                    entered);
#pragma unroll
    for (int t = 0; t < Down; ++t) {
      int const tile = m + across * t;
      float4* const place =
          buffer + (segment * folded_tiles<Cluster> + tile / Cluster) * warp_threads + lane_index();
      if constexpr (Cluster == 1) {
        *place = sum[t];
      } else {
        store_to_block(place, static_cast<std::uint32_t>(tile % Cluster), sum[t]);
      }
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
  auto const multiply = [&]<bool Wide, int Down>() {
    multiply_item<Wide, Cluster, Down>(p, group_of, first_override, first_row, block, buffer, waiting,
                                       entered);
  };
  bool const two = group_of.work.item_rows > head_tile_rows;
  if (group_of.wide != 0 && two) {
    multiply.template operator()<true, 2>();
  } else if (group_of.wide != 0) {
    multiply.template operator()<true, 1>();
  } else if (two) {
    multiply.template operator()<false, 2>();
  } else {
    multiply.template operator()<false, 1>();
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
