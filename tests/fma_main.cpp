// SPDX-License-Identifier: AGPL-3.0-only
//
// The main of suites compiled for fused multiply-add: 77, which Meson reports as a skip, on a processor
// without it. Compiled itself without that flag.
#include <cstdio>

#include "suite.hpp"

int main(int argc, char** argv) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) {
    std::printf("skipped: this processor has no fused multiply-add\n");
    return 77;
  }
#endif
  return atlas_test::run_suite(argc, argv);
}
