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
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Values of one rank tile's sums: its lanes' accumulators.
inline constexpr int rank_tile_values = 4 * warp_threads;
/// Values of one rank tile's segment sums.
inline constexpr int rank_tile_segments = max_segments * rank_tile_values;

/// What a block keeps in shared memory beside the arrays.
template <int Warps, Element T>
struct alignas(16) DeltaHead {
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

/// Bytes of a block's shared memory: head, segment sums, chunk sums, xa.
template <int Warps, Element T>
ATLAS_HD constexpr std::size_t delta_shared_bytes(DeltaShape const& shape,
                                                  std::int32_t xa_shared_stride) noexcept {
  auto const sums = static_cast<std::size_t>(shape.slab) *
                    (max_segments + static_cast<std::size_t>(shape.chunk_slots)) * warp_threads;
  std::size_t const xa =
      static_cast<std::size_t>(tile_rows) * static_cast<std::size_t>(xa_shared_stride) * sizeof(T);
  return sizeof(DeltaHead<Warps, T>) + sizeof(float4) * sums + xa;
}

/// A block's shared memory by name.
template <int Warps, Element T>
struct DeltaShared {
  DeltaHead<Warps, T>* head;
  float4* segments;  ///< [slab][max_segments][32]
  float4* chunks;    ///< [slab][chunk_slots][32]
  T* xa;             ///< [tile_rows][xa_shared_stride]

  __device__ DeltaShared(float4* base, DeltaShape const& shape)
      : head(reinterpret_cast<DeltaHead<Warps, T>*>(base)),
        segments(base + sizeof(DeltaHead<Warps, T>) / sizeof(float4)),
        chunks(segments + shape.slab * max_segments * warp_threads),
        xa(reinterpret_cast<T*>(chunks + shape.slab * shape.chunk_slots * warp_threads)) {}
  /// The team's `item`-th row tile.
  [[nodiscard]] __device__ std::int32_t row_tile(std::int32_t item) const {
    TileWalk const& walk = head->walk;
    if (item < walk.whole) return head->index + item * head->teams;
    return item == walk.whole ? walk.shared : no_tile;
  }
  __device__ RowTile<T>& tile(int index) const { return reinterpret_cast<RowTile<T>&>(head->tile[index]); }
};

}  // namespace atlas::lora::inline v0::detail
