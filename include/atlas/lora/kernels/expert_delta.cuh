// SPDX-License-Identifier: AGPL-3.0-only
//
// The experts' launchers: y[row] += scale * (x[row's input] @ A^T) @ B^T, where (A, B) is of the row's slot
// and expert, for rows sorted by expert (prefill) or not (decode) in one launch over all slots and experts.
// A router is not here: it is a linear, `launch_delta` with the router's table, and logits of T or float.
//
// Every launcher only enqueues: no allocation, no synchronisation, nothing read back. All are safe in graph
// capture, and a captured launch is right for every later content of plan and tables. Errors:
// `cudaErrorInvalidValue` for bad parameters or an operation that was not prepared, before anything is
// enqueued; else what the launch returned.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/expert_params.hpp"
#include "atlas/lora/kernels/expert_source.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Whether a table's fields are such that kernels can read through it.
template <Element T>
bool usable(ExpertTable<T> const& table) noexcept {
  bool const address = reinterpret_cast<std::uintptr_t>(table.index) % 16 == 0;
  bool const stride = table.index_stride_bytes % 16 == 0 && table.index_stride_bytes >= 0;
  return address && stride && table.max_slots >= 0 && table.num_experts >= 0 && table.cell >= 0 &&
         table.cell < table.group_cells;
}

/// The rest of the parameters as the delta's kernels take them.
template <Element T, Element Y>
bool complete(Operands<T, Y>& p, ExpertSource<T>& source, ExpertDeltaParams<T, Y> const& params) noexcept {
  if (params.num_projections < 1 || params.num_projections > max_projections) return false;
  p.x = params.x;
  p.x_row_stride = params.x_row_stride;
  p.rows = params.rows;
  p.num_projections = params.num_projections;
  p.inputs_settled = params.inputs_settled;
  p.expected_slots = params.expected_slots;
  source.plan = params.plan;
  source.input = params.input;
  for (std::int32_t i = 0; i < params.num_projections; ++i) {
    ExpertProjection<T, Y> const& projection = params.projections[i];
    if (!usable(projection.table)) return false;
    source.tables[i] = projection.table;
    p.projections[i].table.max_rank = projection.table.max_rank;
    p.projections[i].table.k_in = projection.table.k_in;
    p.projections[i].table.n_out = projection.table.n_out;
    p.projections[i].y = projection.y;
    p.projections[i].y_row_stride = projection.y_row_stride;
  }
  bool const input = params.input.divisor >= 1 && params.input.x_rows >= 0;
  bool const plan =
      params.plan.header != nullptr && params.plan.groups != nullptr && params.plan.max_groups >= 0;
  return input && plan && complete(p, true, true);
}

/// Whether no row can have a delta.
template <Element T, Element Y>
bool idle(Operands<T, Y> const& p, ExpertSource<T> const& source) noexcept {
  return idle(p) || source.plan.max_groups == 0 || source.input.x_rows == 0;
}

}  // namespace detail

/// The operation of `launch_expert_delta`, in either form.
template <Element T, Element Y = T>
struct ExpertDelta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    using Source = detail::ExpertSource<T>;
    detail::visit_built<T, Y, Source>(visit);
    visit(reinterpret_cast<void const*>(&detail::segment_kernel<T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
    visit(reinterpret_cast<void const*>(&detail::expand_kernel<true, T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
  }
};

/// The delta in two launches, segment sums crossing by `params.scratch`: the form of architectures without
/// clusters, right everywhere. Same bits as every other form.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_expert_delta_in_two_launches(
    ExpertDeltaParams<T, Y> const& params, Machine const& machine, cudaStream_t stream) noexcept {
  detail::Operands<T, Y> p;
  detail::ExpertSource<T> source{};
  bool const prepared = machine.prepared(operation_id<ExpertDelta<T, Y>>());
  if (!prepared || !detail::complete(p, source, params)) return cudaErrorInvalidValue;
  if (detail::idle(p, source)) return cudaSuccess;
  bool const scratch = params.scratch != nullptr &&
                       params.scratch_bytes >= two_launch_scratch_bytes(params) &&
                       reinterpret_cast<std::uintptr_t>(params.scratch) % 16 == 0;
  if (!scratch) return cudaErrorInvalidValue;
  p.segments = static_cast<float4*>(params.scratch);
  return detail::launch_in_two(p, source, expert_tiles(params.plan, params.rows), machine, stream);
}

/// The operation of `launch_expert_delta_tuned`.
template <class Tuning, Element T, Element Y = T>
struct TunedExpertDelta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    detail::visit_whole<T, Y, detail::ExpertSource<T>, Tuning, false>(visit);
  }
};

/// The delta in one launch of a tuning of the caller's, as `launch_delta_tuned`; its kernel must have been
/// prepared as `TunedExpertDelta<Tuning, T, Y>`. Same bits as every other form.
template <class Tuning, Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_expert_delta_tuned(ExpertDeltaParams<T, Y> const& params,
                                                                 Machine const& machine,
                                                                 cudaStream_t stream) noexcept {
  static_assert(valid(Tuning::value), "threads, cluster or blocks_per_multiprocessor cannot be built");
  detail::Operands<T, Y> p;
  detail::ExpertSource<T> source{};
  bool const prepared = machine.prepared(operation_id<TunedExpertDelta<Tuning, T, Y>>());
  if (!prepared || !has_clusters(machine.compute) || !detail::complete(p, source, params))
    return cudaErrorInvalidValue;
  if (detail::idle(p, source)) return cudaSuccess;
  return detail::launch_whole<Tuning>(p, source, expert_tiles(params.plan, params.rows), machine, stream);
}

/// The delta of up to `max_projections` linears of the experts that read the same x. The form and its shape
/// come from `machine` and from capacities. Where `delta_scratch_bytes` is not 0, `params.scratch` must hold
/// that much.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_expert_delta(ExpertDeltaParams<T, Y> const& params,
                                                           Machine const& machine,
                                                           cudaStream_t stream) noexcept {
  if (delta_form(machine.compute) == DeltaForm::two_launches) {
    return launch_expert_delta_in_two_launches(params, machine, stream);
  }
  detail::Operands<T, Y> p;
  detail::ExpertSource<T> source{};
  bool const prepared = machine.prepared(operation_id<ExpertDelta<T, Y>>());
  if (!prepared || !detail::complete(p, source, params)) return cudaErrorInvalidValue;
  if (detail::idle(p, source)) return cudaSuccess;
  std::int32_t const tiles = expert_tiles(params.plan, params.rows);
  cudaError_t error = cudaSuccess;
  std::int64_t const pairs =
      std::int64_t{params.plan.num_experts} * (p.expected_slots > 0 ? p.expected_slots : 1);
  if (detail::launch_many(p, source, tiles, pairs, machine, stream, error)) return error;
  using detail::BuiltTuning;
  switch (expert_tuning(machine.max_cluster, tiles, detail::row_elements(p))) {
    case 0: return detail::launch_whole<BuiltTuning<0, T>>(p, source, tiles, machine, stream);
    case 1: return detail::launch_whole<BuiltTuning<1, T>>(p, source, tiles, machine, stream);
    case 2: return detail::launch_whole<BuiltTuning<2, T>>(p, source, tiles, machine, stream);
    default: return detail::launch_whole<BuiltTuning<3, T>>(p, source, tiles, machine, stream);
  }
}

}  // namespace atlas::lora::inline v0
