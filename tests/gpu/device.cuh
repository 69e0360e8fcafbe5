// SPDX-License-Identifier: AGPL-3.0-only
//
// Device memory and random values for the GPU tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/status.hpp"

namespace atlas_test {

using namespace atlas::lora;

/// The value of a result that must have one.
template <class V>
V need(Result<V> result) {
  if (!result) {
    MESSAGE(result.error().message);
    FAIL("a step of the set-up failed");
    std::abort();
  }
  if constexpr (!std::is_void_v<V>) return std::move(*result);
}

/// Stops the test at a failed device call.
inline void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) {
    MESSAGE(std::string(what) << ": " << std::string(cudaGetErrorName(error)));
    FAIL("a device call failed");
    std::abort();  // later calls would only report the same sticky error
  }
}
#define CUDA_OK(call) ::atlas_test::check((call), #call)

/// Small shapes only, for runs under compute-sanitizer.
inline bool small_shapes() { return std::getenv("ATLAS_TEST_SMALL") != nullptr; }
/// Only a shape or two, for racecheck, to which a launch of clusters is a second.
inline bool few_shapes() {
  char const* const small = std::getenv("ATLAS_TEST_SMALL");
  return small != nullptr && std::strcmp(small, "few") == 0;
}

/// The first device made ready for `Operations`. `ATLAS_TEST_CLUSTERS_OF_16` says how many clusters of 16
/// blocks a launch may have, for synccheck: that of compute-sanitizer 2025.3.1 ends every kernel of eight of
/// them with an illegal address, also one that does nothing but initialise a barrier and wait for its
/// cluster.
template <class... Operations>
Machine ready_machine() {
  Machine machine = need(prepare<Operations...>(0));
  if (char const* const most = std::getenv("ATLAS_TEST_CLUSTERS_OF_16")) {
    for (std::int32_t& clusters : machine.resident_clusters[3])
      clusters = std::min(clusters, std::atoi(most));
  }
  return machine;
}

/// Device memory, freed with its owner.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    CUDA_OK(cudaMalloc(&data_, bytes() == 0 ? 1 : bytes()));
  }
  explicit DeviceArray(std::vector<T> const& host) : DeviceArray(host.size()) { upload(host); }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
  }
  DeviceArray(DeviceArray const&) = delete;
  DeviceArray& operator=(DeviceArray const&) = delete;
  DeviceArray& operator=(DeviceArray&&) = delete;

  void upload(std::vector<T> const& host) {
    CUDA_OK(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> host(count_);
    CUDA_OK(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

/// splitmix64; uniform values in [-1, 1).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  float uniform() { return static_cast<float>(next() >> 40) / 8388608.0F - 1.0F; }
  std::int32_t below(std::int32_t n) {
    return static_cast<std::int32_t>(next() % static_cast<std::uint64_t>(n));
  }

 private:
  std::uint64_t state_;
};

template <Element T>
T poison() {
  return from_f32<T>(std::numeric_limits<float>::quiet_NaN());
}

template <class T>
bool same_bytes(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace atlas_test
