// SPDX-License-Identifier: AGPL-3.0-only
//
// A stage of a warp of the one-launch delta in shared memory: packs of weights and of x or y, each lane's own
// vectors 16 bytes of every 512.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/fragment.cuh"

namespace atlas::lora::inline v0::detail {

/// Bytes from one of a lane's 16-byte vectors in a stage to its next: all lanes' lie between.
inline constexpr std::uint32_t stage_vector_bytes = 16 * warp_threads;
/// Bytes of a stage of a warp: four packs of weights, two of x, where y lies instead in the expand.
template <Element T>
inline constexpr std::uint32_t stage_bytes = 6 * stage_vector_bytes*(sizeof(Pack<T>) / 16);

/// Copies a pack to the shared address `to`: its first `valid` elements at `from`, the others as zeroes.
/// `wide` promises 16-byte alignment and that all eight may be read where any may.
template <Element T>
__device__ inline void copy_stage_pack(std::uint32_t to, T const* from, std::int32_t valid, bool wide) {
  constexpr int vectors = Pack<T>::words / 4;
  if (wide) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      copy_line_part(to + v * stage_vector_bytes, reinterpret_cast<uint4 const*>(from) + v,
                     valid > 0 ? 16 : 0);
    }
    return;
  }
  Pack<T> const pack = load_elements(from, valid);
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    store_shared(to + v * stage_vector_bytes, make_uint4(pack.word[4 * v], pack.word[4 * v + 1],
                                                         pack.word[4 * v + 2], pack.word[4 * v + 3]));
  }
}
/// `count` packs, `step` elements from one to the next, of which the first `inside` are. A call, so that it
/// takes no room where all is aligned and inside.
template <Element T>
__device__ __noinline__ void copy_stage_packs(std::uint32_t to, T const* from, std::int64_t step, int count,
                                              int inside, std::int32_t valid, bool wide) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    copy_stage_pack(to, from, i < inside ? valid : 0, wide);
    to += Pack<T>::words / 4 * stage_vector_bytes;
    from += step;
  }
}
/// All of a pack, which is 16-byte aligned.
template <Element T>
__device__ inline void copy_whole_pack(std::uint32_t to, T const* from) {
  copy_stage_pack(to, from, pack_elements, true);
}

/// A pack of a stage from the shared address `from` on.
template <Element Z>
__device__ inline Pack<Z> load_stage_pack(std::uint32_t from) {
  Pack<Z> pack;
#pragma unroll
  for (int i = 0; i < Pack<Z>::words; i += 4) {
    uint4 const v = load_shared(from + i / 4 * stage_vector_bytes);
    pack.word[i] = v.x;
    pack.word[i + 1] = v.y;
    pack.word[i + 2] = v.z;
    pack.word[i + 3] = v.w;
  }
  return pack;
}

}  // namespace atlas::lora::inline v0::detail
