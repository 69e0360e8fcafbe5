// SPDX-License-Identifier: AGPL-3.0-only
//
// The main of suites compiled for fused multiply-add: 77, which Meson reports as a skip, on a processor
// without it. Compiled itself without that flag.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include <doctest/doctest.h>

int main(int argc, char** argv) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) {
    std::printf("skipped: this processor has no fused multiply-add\n");
    return 77;
  }
#endif
  return doctest::Context(argc, argv).run();
}
