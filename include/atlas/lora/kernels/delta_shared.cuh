// SPDX-License-Identifier: AGPL-3.0-only
//
// The shared memory of a block of the one-launch delta, and what the block does of every row tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta_stages.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ring.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Row tiles that the fetching warp may be ahead.
inline constexpr int tiles_ahead = 2;
/// Most stages of the ring.
inline constexpr int max_stages = 16;
/// Float4 values of the chunk sums of a slab: rank tiles, chunk slots, lanes.
inline constexpr int slab_chunk_sums = slab_rank_tiles * max_chunks * warp_threads;
/// Float4 values of the segment sums of a slab.
inline constexpr int slab_segment_sums = max_segments * slab_rank_tiles * warp_threads;

/// What a block keeps in shared memory beside the arrays.
template <Element T>
struct alignas(128) DeltaHead {
  Barrier stage_full[max_stages];
  Barrier stage_empty[max_stages];
  Barrier tile_full[tiles_ahead];
  Barrier tile_empty[tiles_ahead];
  Barrier sums_full;   ///< all segment sums of a slab are here
  Barrier sums_empty;  ///< all blocks of the cluster have folded theirs
  alignas(16) unsigned char tile[tiles_ahead][(sizeof(RowTile<T>) + 15) / 16 * 16];
};

/// Bytes before the ring: head, segment sums, chunk sums, xa.
template <Element T>
ATLAS_HD constexpr std::size_t delta_fixed_bytes(std::int32_t xa_shared_stride) noexcept {
  std::size_t const xa =
      static_cast<std::size_t>(tile_rows) * static_cast<std::size_t>(xa_shared_stride) * sizeof(T);
  return sizeof(DeltaHead<T>) + sizeof(float4) * (slab_segment_sums + slab_chunk_sums) +
         (xa + 127) / 128 * 128;
}

/// A block's shared memory by name.
template <Element T, Element Y>
struct DeltaShared {
  DeltaHead<T>* head;
  float4* segments;  ///< [max_segments][slab_rank_tiles][32]
  float4* chunks;    ///< [slab_rank_tiles][max_chunks][32]
  T* xa;             ///< [tile_rows][xa_shared_stride]
  std::byte* ring;

  __device__ DeltaShared(float4* base, Operands<T, Y> const& p) {
    auto* const bytes = reinterpret_cast<std::byte*>(base);
    head = reinterpret_cast<DeltaHead<T>*>(bytes);
    segments = reinterpret_cast<float4*>(bytes + sizeof(DeltaHead<T>));
    chunks = segments + slab_segment_sums;
    xa = reinterpret_cast<T*>(chunks + slab_chunk_sums);
    ring = bytes + delta_fixed_bytes<T>(p.xa_shared_stride);
  }
  __device__ RowTile<T>& tile(int index) const { return *reinterpret_cast<RowTile<T>*>(head->tile[index]); }
  __device__ T* stage(Operands<T, Y> const& p, RingPlace const& place) const {
    return reinterpret_cast<T*>(ring + static_cast<std::size_t>(place.stage) *
                                           static_cast<std::size_t>(p.shape.stages.bytes));
  }
};

/// What a block does of every row tile.
struct BlockShare {
  Share segments;
  Share outputs;  ///< output tiles, counted over the projections
};

/// The output tiles of one projection that fall into a block's share, counted from the projection's first.
__device__ inline Share own_outputs(DeltaShape const& shape, Share share, int projection) {
  std::int32_t const first = shape.first_output[projection];
  std::int32_t const tiles = shape.first_output[projection + 1] - first;
  return {min(max(share.first - first, 0), tiles), min(max(share.last - first, 0), tiles)};
}

/// Output tiles of B in a stage, B's rows `padded` elements long.
template <Element T>
__device__ inline std::int32_t outputs_of_stage(DeltaShape const& shape, std::int32_t padded) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(shape.stages.bytes) /
                                   (static_cast<std::uint32_t>(padded) * tile_outputs * sizeof(T)));
}

/// Sets the block's barriers and makes them known to the cluster.
template <int Cluster, Element T>
__device__ inline void start(DeltaHead<T>& head, int warps) {
  auto const i = static_cast<int>(threadIdx.x);
  if (i < max_stages) {
    head.stage_full[i].init(1);
    head.stage_empty[i].init(warps);
  } else if (i < max_stages + tiles_ahead) {
    head.tile_full[i - max_stages].init(1);
    head.tile_empty[i - max_stages].init(warps);
  } else if (i == max_stages + tiles_ahead) {
    head.sums_full.init(1);
    head.sums_empty.init(Cluster);
  }
  if (i <= max_stages + tiles_ahead) publish_barriers();
  __syncthreads();
}

}  // namespace atlas::lora::inline v0::detail
