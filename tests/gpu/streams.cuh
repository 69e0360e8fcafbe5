// SPDX-License-Identifier: AGPL-3.0-only
//
// Streams for the GPU tests, and the neighbours that an engine's kernels are in them.
#pragma once

#include <cuda_runtime.h>

#include "device.cuh"

namespace atlas_test {

/// Copies `count` elements, as a programmatic kernel that waits before it triggers: a well-behaved writer.
template <class T>
__global__ void copy_kernel(T* to, T const* from, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  // Long enough that a kernel which does not wait for it is seen to be early.
  for (int i = 0; i < 20; ++i) __nanosleep(1000);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = from[i];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// A short kernel that triggers at once and waits late, as an engine's norm may.
template <class Sink>
__global__ void early_trigger_kernel(Sink* sink) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (sink != nullptr && threadIdx.x == 0) *sink = 1;
}

template <class... P, class... A>
void launch_programmatic(void (*kernel)(P...), int threads, cudaStream_t stream, bool programmatic,
                         A... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = 1;
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  CUDA_OK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

class Stream {
 public:
  Stream() { CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(Stream const&) = delete;
  Stream& operator=(Stream const&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace atlas_test
