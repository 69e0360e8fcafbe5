// SPDX-License-Identifier: AGPL-3.0-only
//
// The routed delta in two halves: `launch_shrink` and `launch_expand`, for an engine that runs the first
// beside its own product, or puts a collective between. As the launchers of delta.cuh they only enqueue, are
// safe in graph capture and have the same errors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/delta_params.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/operands.cuh"
#include "atlas/lora/kernels/split_kernels.cuh"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

template <class Tuning, Element T, class Source>
cudaError_t launch_sums(Operands<T, T> const& p, Source const& source, std::int32_t tiles,
                        Machine const& machine, cudaStream_t stream) noexcept {
  std::size_t const shared = chunk_bytes + segment_bytes;
  if (shared > machine.shared_bytes_per_block || Tuning::value.cluster > machine.max_cluster) {
    return cudaErrorInvalidValue;
  }
  return launch(shrink_kernel<T, T, Source, Tuning>,
                team_shape(Tuning::value, blocks_of(Tuning::value, sizeof(T)), tiles, shared, machine),
                machine, stream, p, source);
}

}  // namespace detail

/// The operation of `launch_shrink` and `launch_expand`.
template <Element T, Element Y = T>
struct SplitDelta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    using Source = detail::PlanSource;
    using Tuning = detail::BuiltTuning<1, T>;
    visit(reinterpret_cast<void const*>(&detail::shrink_kernel<T, T, Source, Tuning>), Tuning::value.cluster,
          Tuning::value.threads, blocks_of(Tuning::value, sizeof(T)));
    visit(reinterpret_cast<void const*>(&detail::shrink_kernel<T, T, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
    visit(reinterpret_cast<void const*>(&detail::expand_kernel<false, T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
  }
};

/// The first half: complete sums, rounded to T, into `params.xa`. Only elements below a row's true ranks are
/// written.
template <Element T, Element Y = T>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_shrink(ShrinkParams<T> const& params, Machine const& machine,
                                                     cudaStream_t stream) noexcept {
  detail::Operands<T, T> p;
  detail::take_rows(p, params);
  p.x = params.x;
  p.x_row_stride = params.x_row_stride;
  p.xa = params.xa;
  p.xa_row_stride = params.xa_row_stride;
  for (int i = 0; i < max_projections; ++i) p.projections[i].table = params.tables[i];
  bool const good = machine.prepared(operation_id<SplitDelta<T, Y>>()) && detail::complete(p, true, false) &&
                    detail::usable(p.plan, p.rows) && p.xa != nullptr &&
                    p.xa_row_stride >= xa_width(params.tables, p.num_projections);
  if (!good) return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  std::int32_t const tiles = max_row_tiles(p.rows, p.plan.max_groups);
  if (machine.max_cluster >= detail::BuiltTuning<1, T>::value.cluster) {
    return detail::launch_sums<detail::BuiltTuning<1, T>>(p, detail::PlanSource{}, tiles, machine, stream);
  }
  return detail::launch_sums<detail::LoneTuning>(p, detail::PlanSource{}, tiles, machine, stream);
}

/// The second half: expands what is in `params.xa` and folds it into every y. Together with `launch_shrink`
/// it gives the bits of `launch_delta`; a collective on xa between the two changes them.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_expand(ExpandParams<T, Y> const& params, Machine const& machine,
                                                     cudaStream_t stream) noexcept {
  detail::Operands<T, Y> p;
  detail::take_rows(p, params);
  p.xa = const_cast<T*>(params.xa);  // one operand struct serves both halves; this one only reads it
  p.xa_row_stride = params.xa_row_stride;
  std::copy(params.projections, params.projections + max_projections, p.projections);
  bool good = machine.prepared(operation_id<SplitDelta<T, Y>>()) && detail::complete(p, false, true) &&
              detail::usable(p.plan, p.rows) && p.xa != nullptr;
  std::int64_t width = 0;
  for (int i = 0; good && i < p.num_projections; ++i)
    width += xa_projection_width(p.projections[i].table.max_rank);
  good = good && p.xa_row_stride >= width;
  if (!good) return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  return detail::launch_second<false>(p, detail::PlanSource{}, max_row_tiles(p.rows, p.plan.max_groups),
                                      machine, stream);
}

}  // namespace atlas::lora::inline v0
