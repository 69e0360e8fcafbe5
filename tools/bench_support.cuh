// SPDX-License-Identifier: AGPL-3.0-only
//
// What the benchmarks share: checks that stop, random operands, and the head of what they write.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <cuda_runtime.h>

#include <atlas/lora.hpp>

namespace atlas_bench {

inline void stop(std::string const& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}
/// Stops at a failed call of CUDA or cuBLAS; both say success with 0.
template <class Status>
void check(Status status, char const* what) {
  if (status != Status{}) stop(std::string(what) + ": status " + std::to_string(static_cast<int>(status)));
}
#define CHECKED(call) ::atlas_bench::check((call), #call)

/// Fills with values in [-spread, spread).
template <int Threads>
__global__ void __launch_bounds__(Threads)
    fill_kernel(__nv_bfloat16* to, std::int64_t count, std::uint64_t seed, float spread) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    std::uint64_t z = (static_cast<std::uint64_t>(i) + seed) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    to[i] = __float2bfloat16((static_cast<float>((z ^ (z >> 31)) >> 40) / 8388608.0F - 1.0F) * spread);
  }
}

/// Begins a JSON file: what the numbers are of.
inline void write_header(std::FILE* json, atlas::lora::Machine const& machine) {
  cudaDeviceProp properties{};
  int driver = 0;
  int runtime = 0;
  CHECKED(cudaGetDeviceProperties(&properties, machine.device));
  CHECKED(cudaDriverGetVersion(&driver));
  CHECKED(cudaRuntimeGetVersion(&runtime));
  char const* const sources = std::getenv("ATLAS_DEVICE_HASH");
  std::fprintf(
      json, "{\"header\": {\"card\": \"%s\", \"driver\": %d, \"toolkit\": %d, \"device_sources\": \"%s\"},\n",
      properties.name, driver, runtime, sources == nullptr ? "" : sources);
  std::fprintf(json, " \"cells\": [");
}

}  // namespace atlas_bench
