// SPDX-License-Identifier: AGPL-3.0-only
//
// Shared-memory barriers and what crosses a cluster under them. sm_90 and newer; empty before, where no
// kernel that uses it is launched. PTX ISA 8.0: mbarrier, st.async, mapa.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0::detail {

__device__ inline std::uint32_t shared_address(void const* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
/// Where block `rank` of the cluster has what this block has at the shared address `local`.
__device__ inline std::uint32_t address_in_block(std::uint32_t local, std::uint32_t rank) {
  std::uint32_t remote = local;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
#endif
  return remote;
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
  /// Arrives once and adds `bytes` to what asynchronous stores must still bring in this phase.
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
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(shared_address(&state_), rank))
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

 private:
  std::uint64_t state_;
};

/// Makes initialised barriers visible to the cluster.
__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
/// Stores 16 bytes at the cluster address `to`, counted by the barrier at the cluster address `done`, which
/// is of the same block.
__device__ inline void send(std::uint32_t to, float4 const& value, std::uint32_t done) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(done)
      : "memory");
#endif
}

}  // namespace atlas::lora::inline v0::detail
