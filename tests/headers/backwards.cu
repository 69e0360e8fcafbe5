// SPDX-License-Identifier: AGPL-3.0-only
//
// The kernels' headers from the umbrella's last to its first: a name of one must not stand for another's, in
// whatever order a user includes them.
#include <atlas/lora/kernels/split_delta.cuh>
// clang-format off
#include <atlas/lora/kernels/row_diff.cuh>
#include <atlas/lora/kernels/overlay_head.cuh>
#include <atlas/lora/kernels/overlay_embed.cuh>
#include <atlas/lora/kernels/expert_plan.cuh>
#include <atlas/lora/kernels/expert_delta.cuh>
#include <atlas/lora/kernels/pair_delta.cuh>
#include <atlas/lora/kernels/device.cuh>
#include <atlas/lora/kernels/delta.cuh>
// clang-format on
