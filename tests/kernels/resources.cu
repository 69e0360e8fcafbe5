// SPDX-License-Identifier: AGPL-3.0-only
//
// Instantiates every kernel that the library's tunings pick, in float and a 16-bit type, for
// tools/kernel-resources.
#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/expert_delta.cuh"
#include "atlas/lora/kernels/expert_plan.cuh"
#include "atlas/lora/kernels/overlay_embed.cuh"
#include "atlas/lora/kernels/overlay_head.cuh"
#include "atlas/lora/kernels/pair_delta.cuh"
#include "atlas/lora/kernels/row_diff.cuh"
#include "atlas/lora/kernels/row_plan.cuh"
#include "atlas/lora/kernels/split_delta.cuh"

namespace atlas_test {

using namespace atlas::lora;

template <class... Operations>
void instantiate() {
  auto const visit = [](void const*, std::int32_t, std::int32_t, std::int32_t) {};
  (Operations::for_each_kernel(visit), ...);
}

void instantiate_all() {
  instantiate<Delta<float>, Delta<__half>, Delta<__nv_bfloat16>, Delta<__nv_bfloat16, float>>();
  // What differs between the 16-bit types are the instructions that convert and multiply, so one will do
  // below.
  instantiate<SplitDelta<float>, SplitDelta<__nv_bfloat16>>();
  instantiate<ExpertDelta<float>, ExpertDelta<__nv_bfloat16>, ExpertPlanning>();
  instantiate<PairDelta<__nv_bfloat16>, PairDelta<__nv_bfloat16, 16>, RowPlanning>();
  instantiate<OverlayHead<float>, OverlayHead<__nv_bfloat16>, OverlayHead<__nv_bfloat16, float>>();
  instantiate<OverlayEmbed<float>, OverlayEmbed<__nv_bfloat16>, RowDiff<float>, RowDiff<__nv_bfloat16>>();
}

}  // namespace atlas_test
