// SPDX-License-Identifier: AGPL-3.0-only
//
// The shared memory of a block of the prefill form, and what its warps ask to come to L2.
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

/// What a block keeps in shared memory beside the arrays. The ring behind it begins with a line of memory's
/// worth: copies that are not aligned as where they come from take longer, 2048 rows 21.9 us instead of 19.0.
template <Element T>
struct alignas(128) PrefillHead {
  PieceBytes<T> piece;  ///< that the block works on
  PieceBytes<T> next;   ///< that is found meanwhile
  int2 left;            ///< the cluster's row tiles that no piece has had
  std::int32_t slab;    ///< the first rank tile of the piece that is multiplied at once with others
};

/// A block's shared memory by name.
template <Element T>
struct PrefillShared {
  PrefillHead<T>* head;
  uint4* ring;   ///< stages of x and A in the shrink; in the expand y on its way, a part a warp
  float4* sums;  ///< [kept_sums / sum_parts][sum_parts][32]
  uint4* xa;     ///< by `xa_vector`

  template <Element Y>
  __device__ PrefillShared(float4* base, Operands<T, Y> const& p)
      : head(reinterpret_cast<PrefillHead<T>*>(base)), ring(reinterpret_cast<uint4*>(head + 1)) {
    sums = reinterpret_cast<float4*>(ring + p.prefill.sums_begin);
    xa = ring + p.prefill.xa_begin;
  }
  __device__ Share& left() const { return reinterpret_cast<Share&>(head->left); }
  __device__ Piece<T>& piece() const { return reinterpret_cast<Piece<T>&>(head->piece); }
  __device__ Piece<T>& next() const { return reinterpret_cast<Piece<T>&>(head->next); }
  /// Makes the next piece the one that the block works on. All threads call it, between barriers.
  __device__ void go_on() const {
    constexpr int vectors = sizeof(PieceBytes<T>) / sizeof(uint4);
    static_assert(vectors <= prefill_warps * warp_threads);
    auto const thread = static_cast<int>(threadIdx.x);
    if (thread == 0) head->slab = 0;
    if (thread < vectors)
      reinterpret_cast<uint4*>(&head->piece)[thread] = reinterpret_cast<uint4 const*>(&head->next)[thread];
  }
};

/// This block's index in its cluster.
template <Element T, Element Y>
__device__ inline int block_of(Operands<T, Y> const& p) {
  return static_cast<int>(blockIdx.x) & ((1 << p.shape.team[0].log2) - 1);
}

/// Asks for the lines of `count` neighbouring elements to come to L2. A warp calls it, whole.
template <Element T>
__device__ inline void prefetch_elements(T const* from, std::int64_t count) {
  constexpr std::int64_t line = 128 / sizeof(T);
#pragma unroll 1
  for (std::int64_t i = lane_index() * line; i < count; i += warp_threads * line) prefetch_l2(from + i);
}

}  // namespace atlas::lora::inline v0::detail
