// SPDX-License-Identifier: AGPL-3.0-only
//
// The operands of the routed delta, whole and split: plain values with device pointers, checked by the
// launchers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/route/row_plan.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// One projection of x: whose weights, and which y it adds to.
template <Element T, Element Y = T>
struct DeltaProjection {
  RouteTable<T> table{};  ///< by value; its cells are device memory
  Y* y = nullptr;         ///< `[rows, n_out]`, device, element-aligned; must not overlap x or another y
  std::int64_t y_row_stride = 0;  ///< elements between rows, at least `n_out`
};

/// `y_p[row] += scale * (x[row] @ A_s^T) @ B_s^T` for every projection p and every row of the plan.
///
/// Rounding: `xa = T(sum)`, `delta = T(sum + bias)`, `y = Y(y + scale * delta)`, sums in f32 in the order of
/// contraction.hpp. Rows that are in no group, slots out of range and cells that do not adapt keep y's bytes.
template <Element T, Element Y = T>
struct DeltaParams {
  T const* x = nullptr;           ///< `[rows, k_in]`, device, element-aligned
  std::int64_t x_row_stride = 0;  ///< elements between rows, at least `k_in`
  std::int32_t rows =
      0;           ///< rows of x and y; at most `plan.capacity_rows`. Rows of the plan beyond are left out
  RowPlan plan{};  ///< device memory, read by the kernel
  DeltaProjection<T, Y> projections[max_projections]{};
  std::int32_t num_projections = 1;
  void* scratch = nullptr;  ///< device, 16-byte aligned; needed where `delta_scratch_bytes` is not 0
  std::size_t scratch_bytes = 0;
  /// Promises that row slots, plan and tables are settled before this launch's dependencies: since their last
  /// writer the stream has had a full edge, or a kernel that waits before it triggers. Weights are then on
  /// their way before x is ready. A delta without this promise is such a kernel; one with it lets the next
  /// launch start as early as itself.
  bool inputs_settled = false;
  /// Slots that the rows are of, as far as the host knows; 0 where it does not. Decides which kernel serves
  /// many rows, so speed and never bits.
  std::int32_t expected_slots = 0;
};

/// The first half: `xa[row, offset_p + j] = T(sum_k x[row, k] * A[j, k])`, for an engine that overlaps it
/// with its own product or puts a collective between.
template <Element T>
struct ShrinkParams {
  T const* x = nullptr;
  std::int64_t x_row_stride = 0;
  std::int32_t rows = 0;
  RowPlan plan{};
  RouteTable<T> tables[max_projections]{};
  std::int32_t num_projections = 1;
  T* xa = nullptr;  ///< `[rows, xa_row_stride]`, device, 16-byte aligned; projection p at `xa_offset(p)`
  std::int64_t xa_row_stride = 0;  ///< elements, at least `xa_width` of the tables, a multiple of 8
  bool inputs_settled = false;
};

/// The second half: expands and folds what `launch_shrink` (and perhaps a collective) left in `xa`.
template <Element T, Element Y = T>
struct ExpandParams {
  T const* xa = nullptr;  ///< as `ShrinkParams::xa`
  std::int64_t xa_row_stride = 0;
  std::int32_t rows = 0;
  RowPlan plan{};
  DeltaProjection<T, Y> projections[max_projections]{};
  std::int32_t num_projections = 1;
  bool inputs_settled = false;
};

/// Elements that a projection of this `max_rank` takes in a row of `xa`.
[[nodiscard]] ATLAS_HD constexpr std::int64_t xa_projection_width(std::int32_t max_rank) noexcept {
  return round_up(max_rank, pack_elements);
}

/// Elements of a row of `xa` for `num_projections` tables: the least `xa_row_stride`.
template <Element T>
[[nodiscard]] constexpr std::int64_t xa_width(RouteTable<T> const* tables,
                                              std::int32_t num_projections) noexcept {
  std::int64_t width = 0;
  for (std::int32_t p = 0; p < num_projections; ++p) width += xa_projection_width(tables[p].max_rank);
  return width;
}

/// Bytes of the scratch of the split form.
[[nodiscard]] constexpr std::size_t split_scratch_bytes(std::int64_t rows, std::int64_t xa_row_stride,
                                                        std::size_t element_bytes) noexcept {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(xa_row_stride) * element_bytes;
}

static_assert(std::is_trivially_copyable_v<DeltaParams<float>>);

}  // namespace atlas::lora::inline v0
