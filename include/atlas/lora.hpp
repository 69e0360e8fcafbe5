// SPDX-License-Identifier: AGPL-3.0-only
//
// The whole library but the file readers, which are in atlas/peft.hpp.
#pragma once

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/status.hpp"

#include "atlas/lora/model/families.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/model/module.hpp"

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"

#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/overlay_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

#include "atlas/lora/overlay/build.hpp"
#include "atlas/lora/overlay/select.hpp"

#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/cuda_backend.hpp"
#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/host_tier.hpp"
#include "atlas/lora/pool/identity.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/pair.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/victim.hpp"

#include "atlas/lora/route/expert_plan.hpp"
#include "atlas/lora/route/expert_rows.hpp"
#include "atlas/lora/route/levers.hpp"
#include "atlas/lora/route/policy.hpp"
#include "atlas/lora/route/row_map.hpp"
#include "atlas/lora/route/row_plan.hpp"

#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_params.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/expert_params.hpp"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/overlay_params.hpp"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"

#include "atlas/lora/reference/delta.hpp"
#include "atlas/lora/reference/moe.hpp"
#include "atlas/lora/reference/overlay.hpp"

#if defined(__CUDACC__)
#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/device.cuh"
#include "atlas/lora/kernels/expert_delta.cuh"
#include "atlas/lora/kernels/expert_plan.cuh"
#include "atlas/lora/kernels/overlay_embed.cuh"
#include "atlas/lora/kernels/overlay_head.cuh"
#include "atlas/lora/kernels/pair_delta.cuh"
#include "atlas/lora/kernels/row_diff.cuh"
#include "atlas/lora/kernels/row_plan.cuh"
#include "atlas/lora/kernels/split_delta.cuh"
#endif
