// SPDX-License-Identifier: AGPL-3.0-only
//
// The shared memory of a block of the prefill form.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// A piece's place in shared memory, which takes no initialised type.
template <Element T>
struct alignas(16) PieceBytes {
  unsigned char bytes[sizeof(Piece<T>)];
};

/// What a block keeps in shared memory beside the arrays.
template <Element T>
struct alignas(16) PrefillHead {
  static constexpr int pieces = 3;
  PieceBytes<T> piece[pieces];
  int2 left;  ///< the cluster's row tiles that no piece has had
};

/// Bytes of a block's shared memory: pieces, segment sums, xa.
template <Element T>
ATLAS_HD constexpr std::size_t prefill_shared_bytes(std::int32_t cluster_log2, std::int32_t slab,
                                                    std::int32_t xa_shared_stride) noexcept {
  std::size_t const sums =
      sizeof(float4) * warp_threads * static_cast<std::size_t>(kept_sums(cluster_log2, slab));
  std::size_t const xa = static_cast<std::size_t>(piece_rows) * static_cast<std::size_t>(xa_shared_stride);
  return sizeof(PrefillHead<T>) + sums + xa * sizeof(T);
}

/// A block's shared memory by name.
template <Element T>
struct PrefillShared {
  PrefillHead<T>* head;
  float4* sums;  ///< [kept_sums][32], by `sum_place`
  T* xa;         ///< [piece_rows][xa_shared_stride]

  template <Element Y>
  __device__ PrefillShared(float4* base, Operands<T, Y> const& p)
      : head(reinterpret_cast<PrefillHead<T>*>(base)), sums(base + sizeof(PrefillHead<T>) / sizeof(float4)) {
    std::int32_t const kept = kept_sums(p.shape.team[0].log2, prefill_slab(p.segment_rank_tiles));
    xa = reinterpret_cast<T*>(sums + kept * warp_threads);
  }
  __device__ Share& left() const { return reinterpret_cast<Share&>(head->left); }
  __device__ Piece<T>& piece(int index) const { return reinterpret_cast<Piece<T>&>(head->piece[index]); }
};

/// This block's index in its cluster.
template <Element T, Element Y>
__device__ inline int block_of(Operands<T, Y> const& p) {
  return static_cast<int>(blockIdx.x) & ((1 << p.shape.team[0].log2) - 1);
}

/// Asks for `count` neighbouring elements to come to L2, or for as many as are worth it. Address and bytes
/// are multiples of 16.
template <Element T>
__device__ inline void prefetch_elements(T const* from, std::int64_t count) {
  constexpr std::int64_t most = (std::int64_t{1} << 18) / sizeof(T);
  if (count > 0) prefetch_bulk(from, static_cast<std::uint32_t>(min(most, count) * sizeof(T)));
}

}  // namespace atlas::lora::inline v0::detail
