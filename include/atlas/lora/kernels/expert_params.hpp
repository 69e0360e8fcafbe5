// SPDX-License-Identifier: AGPL-3.0-only
//
// The operands of the experts' delta: plain values with device pointers, checked by the launchers; and how
// its launch is shaped.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/route/expert_plan.hpp"
#include "atlas/lora/route/expert_rows.hpp"
#include "atlas/lora/tables/expert_table.hpp"

namespace atlas::lora::inline v0 {

/// One linear of the experts: whose weights, and which y it adds to.
template <Element T, Element Y = T>
struct ExpertProjection {
  ExpertTable<T> table{};  ///< by value; what it points at is device memory
  Y* y = nullptr;          ///< `[rows, n_out]`, device, element-aligned; must not overlap x or another y
  std::int64_t y_row_stride = 0;  ///< elements between rows, at least `n_out`, so that no two rows coincide
};

/// `y_p[row] += scale * (x[input.x_row(row)] @ A^T) @ B^T` for every projection p and every row of the plan
/// whose slot adapts its expert's linear. Gate and up are two projections of one x; down is a launch of its
/// own. In a forward pass gate and up come before the activation, down before the weighted sum over a token's
/// experts, whose weights then multiply base and delta alike.
///
/// The rows lie as the engine has them, sorted by expert or not; only the plan and `input` differ. Rounding
/// and order of sums are those of `DeltaParams`: the bits of a row depend on neither. Rows that are in no
/// group and linears that a slot does not adapt keep y's bytes. A (token, expert) that occurs twice has two
/// rows, and each gets the delta.
template <Element T, Element Y = T>
struct ExpertDeltaParams {
  T const* x = nullptr;           ///< `[input.x_rows, k_in]`, device, element-aligned
  std::int64_t x_row_stride = 0;  ///< elements between rows, at least `k_in`
  ExpertInput input{};            ///< which row of x a row reads; its pointer is device memory
  std::int32_t rows = 0;          ///< rows of y; rows of the plan beyond are left out
  ExpertPlan plan{};              ///< device memory, read by the kernel
  ExpertProjection<T, Y> projections[max_projections]{};  ///< the first `num_projections` are used
  std::int32_t num_projections = 1;                       ///< in `[1, max_projections]`, of one `k_in`
  void* scratch = nullptr;        ///< device, 16-byte aligned; needed where `delta_scratch_bytes` is not 0
  std::size_t scratch_bytes = 0;  ///< of `scratch`
  /// As `DeltaParams::inputs_settled`, of plan, tables and `input.tokens`. For the first launch behind the
  /// one that makes the plan it holds only if a full edge, or a kernel that waits before it triggers, lies
  /// between: the experts' own product, say.
  bool inputs_settled = false;
  /// As `DeltaParams::expected_slots`; 0 counts as one.
  std::int32_t expected_slots = 0;
};
static_assert(std::is_trivially_copyable_v<ExpertDeltaParams<float>>);

/// Row tiles that a plan of up to `rows` rows can hold.
[[nodiscard]] constexpr std::int32_t expert_tiles(ExpertPlan const& plan, std::int32_t rows) noexcept {
  ExpertPlanLayout const layout{plan.capacity_rows, plan.max_slots, plan.num_experts};
  std::int32_t const tiles = layout.max_groups(rows < plan.capacity_rows ? rows : plan.capacity_rows);
  return tiles < plan.max_groups ? tiles : plan.max_groups;
}

/// The index into `delta_tunings` for at most `tiles` row tiles of rows of `row_elements` elements (k_in and
/// every n_out): the fewer they are, and the longer, the more blocks share one. Measured on one H200, bf16,
/// rank 16 and 64, microseconds in clusters of 16, 8, 4 and 2. 2048 -> 768 twice, of up to 8 row tiles 4.9
/// and 8.3, 3.4 and 8.0, 4.1 and 11.6, 6.4 and 16.7; of 32 (4 adapters) 11.6 and 23.4, 7.6 and 17.3, 5.0
/// and 12.7, 6.8 and 18.4; of 128 (one adapter) 28.9 and 55, 15.3 and 29.3, 12.3 and 28.2, 9.1 and 23.6.
/// 4096 -> 14336 twice, of up to 11: 9.6 and 18.2, 12.7 and 24.0, 11.8 and 25.6, 12.3 and 32.3; of 44 (4
/// adapters) 26.1 and 58, 22.6 and 56.2, 24.0 and 56.2, 24.9 and 60.7.
[[nodiscard]] constexpr std::size_t expert_tuning(std::int32_t max_cluster, std::int32_t tiles,
                                                  std::int64_t row_elements) noexcept {
  constexpr std::int64_t long_row = 8192;
  std::int64_t const weighed = row_elements > long_row ? tiles : std::int64_t{tiles} * 4;
  if (weighed <= 16 && max_cluster >= 16) return 0;
  if (weighed <= 64) return 1;
  return weighed <= 256 ? 2 : 3;
}

namespace detail {

/// Threads of the block that makes a plan, and of a warp.
inline constexpr std::int32_t expert_plan_threads = 1024;
inline constexpr std::int32_t expert_plan_warp = 32;

/// Shared memory of the planning block in bytes: for each pair a counter of every counting warp, its rows and
/// its first group; and the sorted form's offsets.
[[nodiscard]] constexpr std::size_t expert_plan_bytes(std::int64_t keys, std::int32_t num_experts,
                                                      std::int32_t warps) noexcept {
  std::int64_t const words = (warps + 2) * keys + num_experts + 1;
  return static_cast<std::size_t>(words) * sizeof(std::int32_t);
}

/// Counting warps for `rows` rows: as many as have 32 rows each and counters that fit `bytes`; 0 when not
/// even one's do.
[[nodiscard]] constexpr std::int32_t expert_plan_warps(std::int32_t rows, std::int64_t keys,
                                                       std::int32_t num_experts, std::size_t bytes) noexcept {
  constexpr std::int32_t most = expert_plan_threads / expert_plan_warp;
  std::int32_t warps = std::clamp(rows / expert_plan_warp, std::int32_t{1}, most);
  while (warps > 0 && expert_plan_bytes(keys, num_experts, warps) > bytes) --warps;
  return warps;
}

}  // namespace detail

/// Bytes of `ExpertDeltaParams::scratch` that `launch_expert_delta_in_two_launches` needs, whatever the plan
/// holds: for an engine that has less, windows with plans of fewer rows need less.
template <Element T, Element Y>
[[nodiscard]] constexpr std::size_t two_launch_scratch_bytes(ExpertDeltaParams<T, Y> const& params) noexcept {
  std::size_t ranks = 0;
  for (std::int32_t i = 0; i < params.num_projections && i < max_projections; ++i) {
    ranks += static_cast<std::size_t>(rank_tiles(params.projections[i].table.max_rank));
  }
  constexpr std::size_t tile_bytes = std::size_t{16} * 32;  // a float4 for each lane of a warp
  std::int32_t const tiles = params.plan.max_groups < 0 ? 0 : params.plan.max_groups;
  return static_cast<std::size_t>(tiles) * max_segments * ranks * tile_bytes;
}

/// Bytes of `ExpertDeltaParams::scratch` that `launch_expert_delta` needs on `machine`: none where the delta
/// is one launch.
template <Element T, Element Y>
[[nodiscard]] constexpr std::size_t delta_scratch_bytes(ExpertDeltaParams<T, Y> const& params,
                                                        Machine const& machine) noexcept {
  return delta_form(machine.compute) == DeltaForm::one_launch ? 0 : two_launch_scratch_bytes(params);
}

}  // namespace atlas::lora::inline v0
