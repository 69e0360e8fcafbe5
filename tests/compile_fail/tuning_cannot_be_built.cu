// SPDX-License-Identifier: AGPL-3.0-only
//
// A tuning of the user's own is checked where it is named.
// EXPECT: threads, cluster or blocks_per_multiprocessor cannot be built
#include "atlas/lora/kernels/delta.cuh"

using namespace atlas::lora;
using Tuning = Constant<DeltaTuning, DeltaTuning{100, 3, 1}>;

cudaError_t launch(DeltaParams<float> const& params, Machine const& machine) {
  return launch_delta_tuned<Tuning>(params, machine, nullptr);
}
