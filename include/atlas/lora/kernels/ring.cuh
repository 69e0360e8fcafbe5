// SPDX-License-Identifier: AGPL-3.0-only
//
// Shared-memory barriers and the ring of stages between the warp that fetches weights and the warps that
// multiply them. sm_90 and newer; empty before, where no kernel that uses it is launched. PTX ISA 8.0:
// mbarrier, cp.async.bulk, st.async.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0::detail {

__device__ inline std::uint32_t shared_address(void const* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// An mbarrier in shared memory.
class Barrier {
 public:
  /// Sets how many arrivals complete a phase. One thread calls it, before any use.
  __device__ void init(int arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state_)), "r"(arrivals)
                 : "memory");
#endif
  }
  /// Arrives once.
  __device__ void arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state_)) : "memory");
#endif
  }
  /// Arrives once and adds `bytes` to what asynchronous copies must still bring in this phase.
  __device__ void arrive_expecting(std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)),
                 "r"(bytes)
                 : "memory");
#endif
  }
  /// Arrives once at the same barrier of block `rank` of the cluster.
  __device__ void arrive_at(std::uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(&state_)),
        "r"(rank)
        : "memory");
#endif
  }
  /// Waits until the phase of this parity is complete; sees what other blocks of the cluster sent before it.
  __device__ void wait(std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
        "%1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
#endif
  }
  [[nodiscard]] __device__ std::uint32_t address() const { return shared_address(&state_); }

 private:
  std::uint64_t state_;
};

/// Makes initialised barriers visible to the cluster and to asynchronous copies.
__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
#endif
}
/// Orders this thread's ordinary writes to shared memory before later asynchronous ones.
__device__ inline void order_before_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/// Starts a copy of `bytes` bytes, a multiple of 16, from device to shared memory, both 16-byte aligned.
__device__ inline void copy_bulk(void* to, void const* from, std::uint32_t bytes, Barrier const& done) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(done.address())
      : "memory");
#endif
}
/// Sends 16 bytes to where block `rank` has `local`, counted by its `done`.
__device__ inline void send(float4* local, std::uint32_t rank, float4 const& value, Barrier const& done) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 to;\n.reg .b32 bar;\nmapa.shared::cluster.u32 to, %0, %1;\nmapa.shared::cluster.u32 bar, "
      "%2, %1;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [bar];\n}" ::"r"(
          shared_address(local)),
      "r"(rank), "r"(done.address()), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
#endif
}

/// A place in a ring: which stage, and which pass over it.
struct RingPlace {
  std::uint32_t stage = 0;
  std::uint32_t pass = 0;  ///< parity

  __device__ void advance(std::uint32_t stages) {
    if (++stage == stages) {
      stage = 0;
      pass ^= 1;
    }
  }
};

}  // namespace atlas::lora::inline v0::detail
