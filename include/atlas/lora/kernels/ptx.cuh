// SPDX-License-Identifier: AGPL-3.0-only
//
// The instructions that CUDA C++ has no spelling for, or whose spelling depends on the user's flags: f32
// arithmetic that neither -use_fast_math nor --fmad changes, matrix products, cluster exchange, programmatic
// dependent launch. PTX ISA 8.x names them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"

namespace atlas::lora::inline v0::detail {

/// `a + b` rounded to nearest, subnormals kept.
__device__ inline float add_rn(float a, float b) {
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
/// `a * b` rounded to nearest, subnormals kept.
__device__ inline float mul_rn(float a, float b) {
  float d;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
/// `a * b + c` rounded once, to nearest, subnormals kept.
__device__ inline float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

/// The bits of `x` rounded to the 16-bit type `T`.
template <Element T>
__device__ inline std::uint32_t bits_rn(float x) {
  static_assert(sizeof(T) == 2);
  std::uint16_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  } else {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  return bits;
}

/// The bits of `low` and `high` rounded to the 16-bit type `T`, `low` in the lower half.
template <Element T>
__device__ inline std::uint32_t pair_bits_rn(float low, float high) {
  static_assert(sizeof(T) == 2);
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

/// The f32 value of 16-bit element bits.
template <Element T>
__device__ inline float value_of(std::uint32_t bits) {
  static_assert(sizeof(T) == 2);
  if constexpr (std::is_same_v<T, __half>) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<std::uint16_t>(bits)));
    return x;
  } else {
    return __uint_as_float(bits << 16);
  }
}

/// `x` rounded to `T`.
template <Element T>
__device__ inline T round_to(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return detail::bit_cast<T>(static_cast<std::uint16_t>(bits_rn<T>(x)));
  }
}
/// `x` in f32.
template <Element T>
__device__ inline float widen(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return value_of<T>(detail::bit_cast<std::uint16_t>(x));
  }
}

/// `c += a * b` for one m16n8k16 product: `a` 16 weight rows, `b` 8 batch rows, f32 accumulators.
template <Element T>
__device__ inline void mma_m16n8k16(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

/// Transposes an 8x8 matrix of 16-bit elements held by a warp, a row by four lanes.
__device__ inline std::uint32_t transpose_8x8(std::uint32_t row) {
  std::uint32_t column;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

/// Waits until the grids this one depends on are complete and their writes visible.
__device__ inline void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets dependent grids start; they still wait for this grid's end where they execute the wait.
__device__ inline void trigger_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Arrives at the cluster's barrier, releasing this thread's writes to the cluster's shared memory.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/// Arrives at the cluster's barrier without releasing anything: only for knowing that the others are there.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
/// Waits for all threads of the cluster to arrive, acquiring their writes.
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// Stores 16 bytes into the shared memory of block `rank` of the cluster, where this block has `local`.
__device__ inline void store_to_block(float4* local, std::uint32_t rank, float4 value) {
#if __CUDA_ARCH__ >= 900
  auto const address = static_cast<std::uint32_t>(__cvta_generic_to_shared(local));
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(remote), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
#endif
}

/// Asks for the L2 line at `address`, without waiting for it.
__device__ inline void prefetch_l2(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace atlas::lora::inline v0::detail
