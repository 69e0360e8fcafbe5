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

/// What a block keeps in shared memory beside the arrays.
template <Element T>
struct alignas(16) PrefillHead {
  /// One at which warps may still be, one that others go on with, one that is being found.
  static constexpr int pieces = 3;
  PieceBytes<T> piece[pieces];
  int2 left;  ///< the cluster's row tiles that no piece has had
};

/// Bytes of y that are on their way to a warp: 16 rows by an output tile, six times, of a 16-bit type.
inline constexpr std::size_t warp_y_bytes = std::size_t{6} * row_group * tile_outputs * 2;
/// Groups of rows that they are.
template <Element Y>
inline constexpr int prefill_y_ahead = static_cast<int>(warp_y_bytes /
                                                        (row_group * tile_outputs * sizeof(Y)));

/// Bytes of a block's shared memory: pieces, `kept_sums` segment sums, y on its way, xa of `xa_width`
/// elements a row.
template <Element T>
constexpr std::size_t prefill_shared_bytes(std::int32_t kept_sums, std::int32_t xa_width) noexcept {
  std::size_t const sums = sizeof(float4) * warp_threads * static_cast<std::size_t>(kept_sums);
  std::size_t const xa = static_cast<std::size_t>(piece_rows) * static_cast<std::size_t>(xa_width);
  return sizeof(PrefillHead<T>) + sums + prefill_warps * warp_y_bytes + xa * sizeof(T);
}

/// A block's shared memory by name.
template <Element T>
struct PrefillShared {
  PrefillHead<T>* head;
  float4* sums;  ///< [kept_sums][32], by `sum_place`
  uint4* y;      ///< what is on its way, `warp_y_bytes` a warp
  uint4* xa;     ///< by `xa_vector`

  template <Element Y>
  __device__ PrefillShared(float4* base, Operands<T, Y> const& p)
      : head(reinterpret_cast<PrefillHead<T>*>(base)), sums(base + sizeof(PrefillHead<T>) / sizeof(float4)) {
    y = reinterpret_cast<uint4*>(sums + p.kept_sums * warp_threads);
    xa = y + prefill_warps * warp_y_bytes / sizeof(uint4);
  }
  __device__ Share& left() const { return reinterpret_cast<Share&>(head->left); }
  /// The piece at `at`, bytes from the first; `after` gives the place after one.
  __device__ Piece<T>& piece(int at) const {
    return *reinterpret_cast<Piece<T>*>(reinterpret_cast<unsigned char*>(head->piece) + at);
  }
  __device__ static int after(int at) {
    constexpr int size = sizeof(PieceBytes<T>);
    return at == (PrefillHead<T>::pieces - 1) * size ? 0 : at + size;
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
