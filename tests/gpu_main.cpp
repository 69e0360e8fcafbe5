// SPDX-License-Identifier: AGPL-3.0-only
//
// The main of the GPU suites: 77, which Meson reports as a skip, on a machine without a device.
#include <cstdio>

#include <cuda_runtime_api.h>

#include "suite.hpp"

int main(int argc, char** argv) {
  int devices = 0;
  cudaError_t const status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorName(status));
    return 77;
  }
  return atlas_test::run_suite(argc, argv);
}
