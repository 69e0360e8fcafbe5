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
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Values of one rank tile's sums: its lanes' accumulators.
inline constexpr int rank_tile_values = 4 * warp_threads;
/// Values of one rank tile's segment sums.
inline constexpr int rank_tile_segments = max_segments * rank_tile_values;

/// Row tiles that a block knows at a time: it finds them together, a warp each.
inline constexpr int window_tiles = 8;

/// What a block keeps in shared memory beside the arrays. Sums have two buffers, used in turn.
template <Element T>
struct alignas(16) DeltaHead {
  Barrier sums_full[2];       ///< all segment sums of a slab are here
  Barrier sums_empty[2];      ///< all blocks of the cluster have folded theirs
  int2 own[max_projections];  ///< the block's output tiles of every projection: first and last
  RowTileBytes<T> tile[window_tiles];
};

/// Bytes of a block's shared memory: head, and two buffers each of segment sums, chunk sums and xa.
template <Element T>
ATLAS_HD constexpr std::size_t delta_shared_bytes(DeltaShape const& shape,
                                                  std::int32_t xa_shared_stride) noexcept {
  auto const sums = static_cast<std::size_t>(shape.slab) *
                    (max_segments + static_cast<std::size_t>(shape.chunk_slots)) * warp_threads;
  std::size_t const xa =
      static_cast<std::size_t>(tile_rows) * static_cast<std::size_t>(xa_shared_stride) * sizeof(T);
  return sizeof(DeltaHead<T>) + 2 * (sizeof(float4) * sums + xa);
}

/// A block's shared memory by name.
template <Element T>
struct DeltaShared {
  DeltaHead<T>* head;
  float4* segments;  ///< [2][slab][max_segments][32]
  float4* chunks;    ///< [2][slab][chunk_slots][32]
  T* xa;             ///< [2][tile_rows][xa_shared_stride]

  __device__ DeltaShared(float4* base, DeltaShape const& shape)
      : head(reinterpret_cast<DeltaHead<T>*>(base)),
        segments(base + sizeof(DeltaHead<T>) / sizeof(float4)),
        chunks(segments + 2 * shape.slab * max_segments * warp_threads),
        xa(reinterpret_cast<T*>(chunks + 2 * shape.slab * shape.chunk_slots * warp_threads)) {}
  __device__ RowTile<T>& tile(int index) const { return reinterpret_cast<RowTile<T>&>(head->tile[index]); }
};

/// Waits for the launch's dependencies and for the cluster, unless `settled`. A whole warp calls it; every
/// warp of the block does once.
__device__ inline void settle_once(bool& settled, bool inputs_settled) {
  if (settled) return;
  cluster_wait();
  if (inputs_settled) enter();
  settled = true;
}

/// Waits for the block's other shrinking, or expanding, warps.
template <int Warps>
__device__ inline void sync_shrink_warps() {
  sync_threads_of<1, Warps * warp_threads>();
}
template <int Warps>
__device__ inline void sync_expand_warps() {
  sync_threads_of<2, Warps * warp_threads>();
}

/// Asks for `count` neighbouring elements, or for as many as are worth it.
template <Element T>
__device__ inline void prefetch_elements(T const* from, std::int64_t count) {
  constexpr std::int64_t most = (std::int64_t{1} << 18) / sizeof(T);
  if (count > 0) prefetch_bulk(from, static_cast<std::uint32_t>(min(most, count) * sizeof(T)));
}

}  // namespace atlas::lora::inline v0::detail
