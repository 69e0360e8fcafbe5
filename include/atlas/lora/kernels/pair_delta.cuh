// SPDX-License-Identifier: AGPL-3.0-only
//
// One pair for all rows: y[row] += scale * (x[row] @ A^T) @ B^T without plan or tables, for a model with one
// adapter or a phase of one. Same bits as the routed delta of the same pair. A static rank is a constant in
// the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/pool/pair.hpp"

namespace atlas::lora::inline v0 {

/// The rows that `launch_delta` of a pair works on.
template <Element T, Element Y = T>
struct PairDeltaParams {
  T const* x = nullptr;           ///< `[rows, k_in]`, device, element-aligned
  std::int64_t x_row_stride = 0;  ///< elements between rows, at least `k_in`
  Y* y = nullptr;                 ///< `[rows, n_out]`, device, element-aligned; must not overlap x
  std::int64_t y_row_stride = 0;  ///< elements between rows, at least `n_out`
  std::int32_t rows = 0;
  void* scratch = nullptr;  ///< as `DeltaParams::scratch`, of `delta_scratch_bytes`
  std::size_t scratch_bytes = 0;
  bool inputs_settled =
      false;  ///< as `DeltaParams::inputs_settled`: the pair's weights were written long before
};

/// The operation of `launch_delta` of a pair.
template <Element T, std::int32_t Rank = dynamic_rank, Element Y = T>
struct PairDelta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    using Source = detail::PairSource<T, Rank>;
    detail::visit_built<T, Y, Source>(visit);
    visit(reinterpret_cast<void const*>(&detail::segment_kernel<T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
    visit(reinterpret_cast<void const*>(&detail::expand_kernel<true, T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
  }
};

/// Bytes of scratch that `launch_delta` of `pair` for `rows` rows needs on `machine`.
template <Element T, std::int32_t Rank>
[[nodiscard]] constexpr std::size_t delta_scratch_bytes(LoraPair<T, Rank> const& pair, std::int32_t rows,
                                                        Machine const& machine) noexcept {
  if (delta_form(machine.compute) == DeltaForm::one_launch) return 0;
  return static_cast<std::size_t>(row_tiles(rows)) * max_segments *
         static_cast<std::size_t>(rank_tiles(pair.rank())) * detail::warp_threads * sizeof(float4);
}

/// Adds `pair`'s delta to every row. Enqueues only; safe in graph capture. A null `a` or `b` or a rank below
/// 1 is `cudaErrorInvalidValue`, as are the errors of the routed `launch_delta`.
template <Element T, std::int32_t Rank, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_delta(LoraPair<T, Rank> const& pair,
                                                    PairDeltaParams<T, Y> const& params,
                                                    Machine const& machine, cudaStream_t stream) noexcept {
  detail::Operands<T, Y> p;
  p.x = params.x;
  p.x_row_stride = params.x_row_stride;
  p.rows = params.rows;
  p.num_projections = 1;
  p.inputs_settled = params.inputs_settled;
  p.projections[0].table.max_rank = pair.rank();
  p.projections[0].table.k_in = pair.k_in;
  p.projections[0].table.n_out = pair.n_out;
  p.projections[0].y = params.y;
  p.projections[0].y_row_stride = params.y_row_stride;
  bool const good = machine.prepared(operation_id<PairDelta<T, Rank, Y>>()) && pair.cell().adapted() &&
                    pair.b_row_stride >= pair.rank() && detail::complete(p, true, true);
  if (!good) return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  detail::PairSource<T, Rank> const source{pair.cell()};
  std::int32_t const tiles = row_tiles(p.rows);
  if (delta_form(machine.compute) == DeltaForm::two_launches) {
    std::size_t const needed = delta_scratch_bytes(pair, p.rows, machine);
    if (params.scratch == nullptr || params.scratch_bytes < needed) return cudaErrorInvalidValue;
    if (reinterpret_cast<std::uintptr_t>(params.scratch) % 16 != 0) return cudaErrorInvalidValue;
    p.segments = static_cast<float4*>(params.scratch);
    return detail::launch_in_two(p, source, tiles, machine, stream);
  }
  return detail::launch_built(p, source, tiles, machine, stream);
}

}  // namespace atlas::lora::inline v0
