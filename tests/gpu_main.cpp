// SPDX-License-Identifier: AGPL-3.0-only
//
// The main of the GPU suites: 77, which Meson reports as a skip, on a machine without a device.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  int devices = 0;
  cudaError_t const status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorName(status));
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
