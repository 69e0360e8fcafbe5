// SPDX-License-Identifier: AGPL-3.0-only
//
// How the library launches: one call, with the attributes that the architecture has and no error state of the
// engine's read or cleared; and `prepare`, which finds what launchers need to know.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Waits for the grids this one depends on, then lets the next ones start. Every block of every kernel of the
/// library calls it once, also a block with no work.
__device__ inline void enter() {
  wait_for_dependencies();
  trigger_dependents();
}

/// The shape of a launch.
struct LaunchShape {
  std::int32_t blocks;
  std::int32_t threads;
  std::int32_t cluster;
  std::size_t shared_bytes;
};

/// Enqueues `kernel`. Programmatic dependent launch where the code has the dependency wait.
template <class... Parameters, class... Arguments>
ATLAS_HIDDEN cudaError_t launch(void (*kernel)(Parameters...), LaunchShape const& shape,
                                Machine const& machine, cudaStream_t stream,
                                Arguments const&... arguments) noexcept {
  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  if (has_clusters(machine.compute)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
    // Clusters that have work then do not share multiprocessors with each other while others stand idle: 32
    // adapters in 32 rows, rank 16, 5.6 us instead of 6.6 on an H200.
    attributes[count].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[count].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// A failed device call as an `Error`.
[[nodiscard]] inline Error device_error(char const* call, cudaError_t error) {
  return Error{Errc::device, std::string(call) + ": " + cudaGetErrorName(error)};
}

/// Makes `device` current for its life.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) noexcept {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) error_ = cudaSetDevice(device);
  }
  ~CurrentDevice() { static_cast<void>(cudaSetDevice(previous_)); }
  CurrentDevice(CurrentDevice const&) = delete;
  CurrentDevice& operator=(CurrentDevice const&) = delete;
  [[nodiscard]] cudaError_t error() const noexcept { return error_; }

 private:
  int previous_ = 0;
  cudaError_t error_ = cudaSuccess;
};

/// Sets what one kernel needs and lowers the machine's limits to what it allows.
inline cudaError_t prepare_kernel(void const* kernel, std::int32_t cluster, std::size_t shared_limit,
                                  Machine& machine) noexcept {
  cudaFuncAttributes attributes{};
  if (cudaError_t const error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
    return error;
  machine.compute = std::min(machine.compute, static_cast<std::int32_t>(attributes.ptxVersion));
  std::size_t const dynamic = shared_limit - std::min(shared_limit, attributes.sharedSizeBytes);
  machine.shared_bytes_per_block = std::min(machine.shared_bytes_per_block, dynamic);
  if (cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     static_cast<int>(dynamic));
      error != cudaSuccess) {
    return error;
  }
  if (cluster <= 8 || machine.max_cluster <= 8) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

/// Finds how many clusters of a kernel run at once.
inline cudaError_t count_clusters(void const* kernel, std::int32_t cluster, std::int32_t threads,
                                  std::int32_t most, Machine& machine) noexcept {
  if (cluster == 1 || cluster > machine.max_cluster || !has_clusters(machine.compute)) return cudaSuccess;
  std::int32_t row = 0;
  while (cluster > 2 << row) ++row;
  for (std::int32_t blocks = 1; blocks <= std::min(most, 2); ++blocks) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = std::min(machine.shared_bytes_per_block, shared_budget(machine, blocks));
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    if (cudaError_t const error = cudaOccupancyMaxActiveClusters(&count, kernel, &config);
        error != cudaSuccess) {
      return error;
    }
    std::int32_t& known = machine.resident_clusters[row][blocks - 1];
    known = known == 0 ? count : std::min(known, count);
  }
  return cudaSuccess;
}

}  // namespace detail

/// Makes `device` ready for the named operations (`Delta<T, Y>`, `SplitDelta<T, Y>`, `PairDelta<T, Rank, Y>`,
/// `RowPlanning`, ...): once per device, outside capture. The result is what launchers take. Errors
/// (`device`, naming the call): no such device, or code that does not fit it; `invalid_argument`: more than
/// `Machine::max_operations` operations.
template <class... Operations>
[[nodiscard]] ATLAS_HIDDEN Result<Machine> prepare(int device) {
  static_assert(sizeof...(Operations) >= 1 && sizeof...(Operations) <= Machine::max_operations);
  detail::CurrentDevice const current(device);
  if (current.error() != cudaSuccess) {
    return cuda::std::unexpected<Error>(detail::device_error("cudaSetDevice", current.error()));
  }
  cudaError_t error = cudaSuccess;
  auto const attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, name, device);
    return value;
  };
  Machine machine;
  machine.device = device;
  machine.compute =
      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  machine.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  machine.shared_bytes_per_multiprocessor =
      static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  auto const shared_limit = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  if (error != cudaSuccess)
    return cuda::std::unexpected<Error>(detail::device_error("cudaDeviceGetAttribute", error));
  machine.shared_bytes_per_block = shared_limit;
  machine.max_cluster = largest_cluster(machine.compute);
  (Operations::for_each_kernel([&](void const* kernel, std::int32_t cluster, std::int32_t, std::int32_t) {
     if (error == cudaSuccess) error = detail::prepare_kernel(kernel, cluster, shared_limit, machine);
   }),
   ...);
  if (!has_clusters(machine.compute)) machine.max_cluster = 1;
  (Operations::for_each_kernel(
       [&](void const* kernel, std::int32_t cluster, std::int32_t threads, std::int32_t blocks) {
         if (error == cudaSuccess) error = detail::count_clusters(kernel, cluster, threads, blocks, machine);
       }),
   ...);
  if (error != cudaSuccess) return cuda::std::unexpected<Error>(detail::device_error("prepare", error));
  (machine.add(operation_id<Operations>()), ...);
  return machine;
}

}  // namespace atlas::lora::inline v0
