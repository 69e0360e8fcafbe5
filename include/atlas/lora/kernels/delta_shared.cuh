// SPDX-License-Identifier: AGPL-3.0-only
//
// The shared memory of a block of the one-launch delta.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/delta_stage.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Values of one rank tile's sums: its lanes' accumulators.
inline constexpr int rank_tile_values = 4 * warp_threads;
/// Values of one rank tile's segment sums.
inline constexpr int rank_tile_segments = max_segments * rank_tile_values;

/// What a block keeps in shared memory beside the arrays. The stages behind it begin with a line of memory's
/// worth, as what is copied to them does.
template <int Warps, Element T>
struct alignas(128) DeltaHead {
  Barrier sums_full;   ///< all segment sums of a slab are here
  Barrier sums_empty;  ///< all blocks of the team have folded theirs
  TeamShape team;      ///< of the block's team
  std::int32_t teams;
  std::int32_t index;         ///< the team's
  TileWalk walk;              ///< the team's
  std::int32_t window_end;    ///< of the row tiles in `tile`
  std::int32_t window_items;  ///< row tiles of the team up to there
  /// The block's output tiles of every projection, first and last: of whole row tiles, and of the divided
  /// one.
  int2 own[2][max_projections];
  RowTileBytes<T> tile[Warps];
};

/// Elements of one of the two places of xa.
ATLAS_HD constexpr std::int32_t xa_elements(std::int32_t xa_shared_stride) noexcept {
  return tile_rows * xa_shared_stride;
}

/// Bytes of a block's shared memory: head, stages, segment sums, chunk sums, xa twice.
template <int Warps, Element T>
constexpr std::size_t delta_shared_bytes(DeltaShape const& shape, std::int32_t xa_shared_stride) noexcept {
  auto const stages = static_cast<std::size_t>(Warps * shape.stages) * stage_bytes<T>;
  auto const sums = static_cast<std::size_t>(shape.slab * max_segments + shape.chunk_sums) * warp_threads;
  std::size_t const xa = 2 * sizeof(T) * static_cast<std::size_t>(xa_elements(xa_shared_stride));
  return sizeof(DeltaHead<Warps, T>) + stages + sizeof(float4) * sums + xa;
}

/// A block's shared memory by name.
template <int Warps, Element T>
struct DeltaShared {
  DeltaHead<Warps, T>* head;
  float4* stages;  ///< [Warps][stages], `stage_bytes` each
  /// [slab][max_segments][32], and [chunk_sums][32] behind; chunk sums lie by `first_chunk_sum`.
  float4* segments;
  T* xa;  ///< [2][tile_rows][xa_shared_stride], taken in turn by row tiles

  __device__ DeltaShared(float4* base, DeltaShape const& shape)
      : head(reinterpret_cast<DeltaHead<Warps, T>*>(base)),
        stages(base + sizeof(DeltaHead<Warps, T>) / sizeof(float4)),
        segments(stages + Warps * shape.stages * static_cast<int>(stage_bytes<T> / sizeof(float4))),
        xa(reinterpret_cast<T*>(segments + (shape.slab * max_segments + shape.chunk_sums) * warp_threads)) {}
  /// The team's `item`-th row tile.
  [[nodiscard]] __device__ std::int32_t row_tile(std::int32_t item) const {
    TileWalk const& walk = head->walk;
    if (item < walk.whole) return head->index + item * head->teams;
    return item == walk.whole ? walk.shared : no_tile;
  }
  __device__ RowTile<T>& tile(int index) const { return reinterpret_cast<RowTile<T>&>(head->tile[index]); }
};

}  // namespace atlas::lora::inline v0::detail
