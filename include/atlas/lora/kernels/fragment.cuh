// SPDX-License-Identifier: AGPL-3.0-only
//
// What one warp holds of a product and how it multiplies: packs of eight elements, and the accumulator of 16
// weight rows by 8 batch rows whose order of sums is contraction.hpp's.
//
// Lane `l` has `group() = l / 4` and `quad() = l % 4`. As an operand a pack is elements `8 * quad()` to
// `8 * quad() + 7` of a block of 32: of weight row `group()` and of row `group() + 8` for weights, of batch
// row `group()` for x. The accumulator's values are {weight row group(), batch rows 2 quad() and 2 quad() +
// 1}, then the same for weight row group() + 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/ptx.cuh"

namespace atlas::lora::inline v0::detail {

inline constexpr int warp_threads = 32;
/// Weight rows of an accumulator.
inline constexpr int tile_weight_rows = 16;
/// Batch rows of an accumulator.
inline constexpr int tile_batch_rows = 8;

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % warp_threads); }
/// This thread's index, read where it stands: what follows from it is not worked out ahead of a loop, where
/// it would hold registers all the way.
__device__ inline int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
/// `value`, which the compiler then keeps in a register and does not work out again.
__device__ inline int in_register(int value) {
  int kept;
  asm volatile("mov.b32 %0, %1;" : "=r"(kept) : "r"(value));
  return kept;
}
/// This thread's warp, which the compiler then knows to be the same for all its lanes.
__device__ inline int warp_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / warp_threads, 0);
}
__device__ inline int group() { return lane_index() / 4; }
__device__ inline int quad() { return lane_index() % 4; }

/// Eight consecutive elements in registers.
template <Element T>
struct Pack {
  static constexpr int words = static_cast<int>(pack_elements * sizeof(T) / 4);
  std::uint32_t word[words];
};

/// The eight elements at `p`, which is 16-byte aligned.
template <Element T>
__device__ inline Pack<T> load_vectors(T const* p) {
  Pack<T> pack;
  auto const* const vectors = reinterpret_cast<uint4 const*>(p);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i) {
    uint4 const v = vectors[i];
    pack.word[4 * i] = v.x;
    pack.word[4 * i + 1] = v.y;
    pack.word[4 * i + 2] = v.z;
    pack.word[4 * i + 3] = v.w;
  }
  return pack;
}

/// Loads the eight elements at `p` in global memory, which is 16-byte aligned, where `condition` holds, and
/// leaves the pack as it is elsewhere: in place, so that nothing waits for the load but what uses it.
template <Element T>
__device__ inline void load_if(Pack<T>& pack, T const* p, bool condition) {
  auto const address = __cvta_generic_to_global(p);
#pragma unroll
  for (int i = 0; i < Pack<T>::words; i += 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(pack.word[i]), "+r"(pack.word[i + 1]), "+r"(pack.word[i + 2]), "+r"(pack.word[i + 3])
                 : "l"(address + static_cast<std::size_t>(i) * 4), "r"(static_cast<int>(condition)));
  }
}

/// Stores a pack at `p` in global memory, which is 16-byte aligned, where `condition` holds.
template <Element T>
__device__ inline void store_if(T* p, Pack<T> const& pack, bool condition) {
  auto const address = __cvta_generic_to_global(p);
#pragma unroll
  for (int i = 0; i < Pack<T>::words; i += 4) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p st.global.v4.u32 [%4], {%0, %1, %2, %3};\n}" ::"r"(
            pack.word[i]),
        "r"(pack.word[i + 1]), "r"(pack.word[i + 2]), "r"(pack.word[i + 3]),
        "l"(address + static_cast<std::size_t>(i) * 4), "r"(static_cast<int>(condition))
        : "memory");
  }
}

/// The first `valid` of the eight elements at `p`, one by one; the others zero and not loaded.
template <Element T>
__device__ inline Pack<T> load_elements(T const* p, std::int64_t valid) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::words; ++i) pack.word[i] = 0;
#pragma unroll
  for (int e = 0; e < pack_elements; ++e) {
    if (e < valid) {
      if constexpr (sizeof(T) == 4) {
        pack.word[e] = __float_as_uint(p[e]);
      } else {
        std::uint32_t const bits = detail::bit_cast<std::uint16_t>(p[e]);
        pack.word[e / 2] |= e % 2 == 0 ? bits : bits << 16;
      }
    }
  }
  return pack;
}

/// The first `valid` of the eight elements at `p`, the others zero. `Wide` promises 16-byte alignment and
/// that all eight may be read when any may, and that they are zeroed by the caller (`keep`) or are valid.
template <bool Wide, Element T>
__device__ inline Pack<T> load_operand(T const* p, std::int64_t valid) {
  if constexpr (Wide) {
    if (valid > 0) return load_vectors(p);
    return Pack<T>{};
  } else {
    return load_elements(p, valid);
  }
}

/// Zeroes the elements from `valid` on.
template <Element T>
__device__ inline void keep(Pack<T>& pack, std::int32_t valid) {
#pragma unroll
  for (int i = 0; i < Pack<T>::words; ++i) {
    if constexpr (sizeof(T) == 4) {
      if (i >= valid) pack.word[i] = 0;
    } else {
      if (2 * i >= valid) {
        pack.word[i] = 0;
      } else if (2 * i + 1 >= valid) {
        pack.word[i] &= 0xffffu;
      }
    }
  }
}

/// Moves every element of a pack one place down, towards element 0.
template <Element T>
__device__ inline void shift_down(Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < Pack<T>::words; ++i) {
    std::uint32_t const next = i + 1 < Pack<T>::words ? pack.word[i + 1] : 0;
    pack.word[i] = sizeof(T) == 4 ? next : __funnelshift_r(pack.word[i], next, 16);
  }
}

/// `load_elements` as a call: for operands that are seldom too little aligned for vectors, so that they take
/// no room where they are not.
template <Element T>
__device__ __noinline__ Pack<T> load_narrow(T const* p, std::int32_t valid) {
  return load_elements(p, valid);
}

/// The first `valid` elements at `p`, the others zero and not loaded; by vectors where all eight are valid
/// and `wide` promises alignment.
template <Element T>
__device__ inline Pack<T> load_padded(T const* p, std::int32_t valid, bool wide) {
  if (wide && valid >= pack_elements) return load_vectors(p);
  if (valid <= 0) return Pack<T>{};
  return load_narrow(p, valid);
}

/// As `load_padded`, `Wide` where the caller knows it.
template <bool Wide, Element T>
__device__ inline Pack<T> load_pack(T const* p, std::int64_t valid) {
  if constexpr (Wide) {
    return load_padded(p, static_cast<std::int32_t>(min(valid, std::int64_t{pack_elements})), true);
  } else {
    return load_elements(p, valid);
  }
}

/// Element `e` of a pack, in f32.
template <Element T>
__device__ inline float element(Pack<T> const& pack, int e) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(pack.word[e]);
  } else {
    return value_of<T>((pack.word[e / 2] >> (e % 2 * 16)) & 0xffffu);
  }
}

/// One chain of blocks on tensor cores, for 16-bit types.
template <Element T>
class Accumulator {
 public:
  /// Adds one block: weight rows `group()` and `group() + 8`, batch row `group()`.
  __device__ void add(Pack<T> const& low, Pack<T> const& high, Pack<T> const& x) {
    mma_m16n8k16<T>(c_, low.word[0], high.word[0], low.word[1], high.word[1], x.word[0], x.word[1]);
    mma_m16n8k16<T>(c_, low.word[2], high.word[2], low.word[3], high.word[3], x.word[2], x.word[3]);
  }
  /// The chain's values; nothing may be added after.
  __device__ float4 finish() const { return make_float4(c_[0], c_[1], c_[2], c_[3]); }

 private:
  float c_[4] = {0.0F, 0.0F, 0.0F, 0.0F};
};

/// One chain of blocks in fused multiply-adds. Each lane sums its own elements of its two weight rows against
/// all eight batch rows, whose packs come from the lanes that hold them; `finish` adds the four lanes of a
/// row.
template <>
class Accumulator<float> {
 public:
  __device__ void add(Pack<float> const& low, Pack<float> const& high, Pack<float> const& x) {
#pragma unroll
    for (int column = 0; column < tile_batch_rows; ++column) {
#pragma unroll
      for (int e = 0; e < pack_elements; ++e) {
        float const xe = __uint_as_float(__shfl_sync(0xffffffffu, x.word[e], column * 4 + quad()));
        sum_[0][column] = fma_rn(__uint_as_float(low.word[e]), xe, sum_[0][column]);
        sum_[1][column] = fma_rn(__uint_as_float(high.word[e]), xe, sum_[1][column]);
      }
    }
  }
  __device__ float4 finish() const {
    float value[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < tile_batch_rows; ++column) {
        float total = sum_[half][column];
        total = add_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
        total = add_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
        if (column / 2 == quad()) value[half * 2 + column % 2] = total;
      }
    }
    return make_float4(value[0], value[1], value[2], value[3]);
  }

 private:
  float sum_[2][tile_batch_rows] = {};
};

/// One chain of blocks with batch rows as the 16-row operand, of which eight are used: eight batch rows by
/// eight weight rows, with the bits of `Accumulator`. A lane ends with batch row `group()` and weight rows `2
/// quad()` and one more, which needs no transposition on the way to memory.
template <Element T>
class RowAccumulator {
 public:
  /// Adds one block to each of the first chains: of batch row `group()`, and of each chain's weight row
  /// `group()`.
  template <int Most, int Chains>
  __device__ static void add(RowAccumulator (&chains)[Most], Pack<T> const (&weights)[Chains],
                             Pack<T> const& x) {
    static_assert(Chains <= Most);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // What stands in the eight rows that are not used is multiplied and dropped: whatever the registers
      // hold.
      std::uint32_t unused[2];
      asm("" : "=r"(unused[0]), "=r"(unused[1]));
#pragma unroll
      for (int i = 0; i < Chains; ++i) {
        mma_m16n8k16<T>(chains[i].c_, x.word[2 * half], unused[0], x.word[2 * half + 1], unused[1],
                        weights[i].word[2 * half], weights[i].word[2 * half + 1]);
      }
    }
  }
  /// The chain's values; nothing may be added after.
  __device__ float2 finish() const { return make_float2(c_[0], c_[1]); }

 private:
  float c_[4] = {0.0F, 0.0F, 0.0F, 0.0F};
};

/// The same in fused multiply-adds. Each lane sums its own elements of its weight row against all eight batch
/// rows; `finish` adds the four lanes of a row and gives every lane its two.
template <>
class RowAccumulator<float> {
 public:
  template <int Most, int Chains>
  __device__ static void add(RowAccumulator (&chains)[Most], Pack<float> const (&weights)[Chains],
                             Pack<float> const& x) {
    static_assert(Chains <= Most);
#pragma unroll
    for (int column = 0; column < tile_batch_rows; ++column) {
#pragma unroll
      for (int e = 0; e < pack_elements; ++e) {
        float const xe = __uint_as_float(__shfl_sync(0xffffffffu, x.word[e], column * 4 + quad()));
#pragma unroll
        for (int i = 0; i < Chains; ++i) {
          chains[i].sum_[column] = fma_rn(__uint_as_float(weights[i].word[e]), xe, chains[i].sum_[column]);
        }
      }
    }
  }
  __device__ float2 finish() const {
    float2 value{};
#pragma unroll
    for (int column = 0; column < tile_batch_rows; ++column) {
      float total = sum_[column];
      total = add_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
      total = add_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
      float const first = __shfl_sync(0xffffffffu, total, 8 * quad());
      float const second = __shfl_sync(0xffffffffu, total, 8 * quad() + 4);
      if (column == group()) value = make_float2(first, second);
    }
    return value;
  }

 private:
  float sum_[tile_batch_rows] = {};
};

/// Four accumulator quarters, weight rows `r` = 0 to 7 of matrices 0 to 3, given back as the eight weight
/// rows `2 quad()`, `2 quad() + 1` of matrix 0, then 1, 2, 3 of batch row `group()`, rounded to `T`. `value[2
/// m]` and `value[2 m + 1]` are matrix m's weight row `group()` at batch rows `2 quad()` and one more.
template <Element T>
__device__ inline Pack<T> transpose(float const (&value)[8]) {
  Pack<T> pack;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      pack.word[m] = transpose_8x8(pair_bits_rn<T>(value[2 * m], value[2 * m + 1]));
    }
  } else {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const source = (2 * quad() + half) * 4 + group() / 2;
        float const even = __shfl_sync(0xffffffffu, value[2 * m], source);
        float const odd = __shfl_sync(0xffffffffu, value[2 * m + 1], source);
        pack.word[2 * m + half] = __float_as_uint(group() % 2 == 0 ? even : odd);
      }
    }
  }
  return pack;
}

}  // namespace atlas::lora::inline v0::detail
