// SPDX-License-Identifier: AGPL-3.0-only
//
// Packs on their way from device to shared memory, in groups that are waited for in order. PTX ISA 7.0.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/fragment.cuh"

namespace atlas::lora::inline v0::detail {

/// Copies 16 bytes, or zeroes where `valid` is false; nothing is read then. Both addresses are 16-byte
/// aligned.
__device__ inline void copy_16_async(void* to_shared, void const* from, bool valid) {
  auto const to = static_cast<std::uint32_t>(__cvta_generic_to_shared(to_shared));
  int const bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// Copies `bytes` of 16 bytes, all or none, to the shared address `to` and zeroes the others: one of the
/// parts of whole lines of memory that lie in a row, each read once.
__device__ inline void copy_line_part(std::uint32_t to, void const* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
/// Likewise all of them to `to_shared`, or none where `valid` is false.
__device__ inline void copy_line_part(void* to_shared, void const* from, bool valid) {
  copy_line_part(static_cast<std::uint32_t>(__cvta_generic_to_shared(to_shared)), from, valid ? 16 : 0);
}
/// Copies `bytes` of 16 bytes, all or none, to the shared address `to` and zeroes the others, where
/// `condition` holds: one of the parts of whole lines of memory that lie in a row. It is fastest where `to`
/// is aligned as `from` is, to 32 bytes at least.
__device__ inline void copy_line_part_if(std::uint32_t to, void const* from, int bytes, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(static_cast<int>(condition))
      : "memory");
}
/// Writes 16 bytes to the shared address `to`.
__device__ inline void store_shared(std::uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
/// The 16 bytes at the shared address `from`.
__device__ inline uint4 load_shared(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
/// Ends a group of this thread's copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `Newest` of this thread's newest groups are under way.
template <int Newest>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
}

/// Copies the first `valid` of the eight elements at `from` to shared memory, the others as zeroes. `Wide`
/// promises 16-byte alignment and that all eight are valid or none; else the elements are there at once.
/// `from` is readable only as far as `valid` says.
template <bool Wide, Element T>
__device__ inline void copy_pack(Pack<T>* to_shared, T const* from, std::int64_t valid) {
  if constexpr (Wide) {
#pragma unroll
    for (int i = 0; i < Pack<T>::words / 4; ++i) {
      copy_16_async(reinterpret_cast<uint4*>(to_shared) + i, reinterpret_cast<uint4 const*>(from) + i,
                    valid > 0);
    }
  } else {
    *to_shared = load_elements(from, valid);
  }
}

/// A pack in shared memory, 16-byte aligned.
template <Element T>
__device__ inline Pack<T> read_pack(Pack<T> const* from) {
  return load_vectors(reinterpret_cast<T const*>(from));
}

}  // namespace atlas::lora::inline v0::detail
