// SPDX-License-Identifier: AGPL-3.0-only
//
// The logits of tokens whose head rows are an adapter's own, recomputed where the base's head left its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/overlay_embed.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_head_spread.cuh"
#include "atlas/lora/kernels/overlay_head_stream.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0 {

template <Element T, Element Y = T>
struct OverlayHead;

namespace detail {

inline constexpr int head_threads = head_warps * warp_threads;
/// Blocks of a team where there are clusters.
inline constexpr int head_cluster = 8;
/// Blocks of a multiprocessor that registers allow. A block that streams holds the sums of 64 batch rows.
template <Element T, RingDepth Depth>
inline constexpr int head_blocks = sizeof(T) == 2 && Depth == RingDepth::none ? 2 : 1;
/// Bytes of the buffers of segment sums. A block alone shares them with its ring.
template <int Cluster>
inline constexpr std::size_t spread_bytes = sizeof(float4) * spread_buffer<Cluster>*(Cluster == 1 ? 1 : 2);

template <int Cluster, RingDepth Depth, Element T, Element Y>
__global__ void __launch_bounds__(head_threads, head_blocks<T, Depth>)
    overlay_head_kernel(__grid_constant__ HeadOperands<T, Y> const p) {
  extern __shared__ float4 shared[];
  HeadBatch<T>& batch = *reinterpret_cast<HeadBatch<T>*>(shared);
  float4* const sums = shared + head_batch_bytes<T> / sizeof(float4);
  float4* const ring = sums + (Cluster == 1 ? 0 : 2 * spread_buffer<Cluster>);
  auto const blocks = static_cast<std::int32_t>(gridDim.x);
  std::int32_t const teams = blocks / Cluster;
  auto const team = static_cast<std::int32_t>(blockIdx.x) / Cluster;
  int const block = static_cast<int>(blockIdx.x) % Cluster;
  if constexpr (Cluster > 1) cluster_arrive_relaxed();
  bool started = Cluster == 1;
  bool entered = !p.params.inputs_settled;
  if (entered) enter();
  int parity = 0;
  std::int32_t spread_before = 0, streamed_before = 0;  // items of earlier groups, where the next go on
  for (std::int32_t first = 0;; first += warp_threads) {
    __syncthreads();
    if (threadIdx.x < warp_threads) load_head_groups(batch, p, first, teams);
    __syncthreads();
    if constexpr (Cluster > 1) {
      if (!started) cluster_wait();
    }
    started = true;
    std::int32_t const spread = batch.spread_end[warp_threads - 1];
    for (std::int32_t item = (team + teams - spread_before % teams) % teams; item < spread; item += teams) {
      int const g = batch.spread_group(item);
      spread_item<Cluster>(p, batch.group[g], item - (g == 0 ? 0 : batch.spread_end[g - 1]), block, sums,
                           reinterpret_cast<Pack<T>*>(ring), parity, entered);
    }
    if constexpr (Depth != RingDepth::none) {
      std::int32_t const streamed = batch.streamed_end[warp_threads - 1];
      std::int32_t const begin = static_cast<std::int32_t>(blockIdx.x) + blocks - streamed_before % blocks;
      for (std::int32_t item = begin % blocks; item < streamed; item += blocks) {
        int const g = batch.streamed_group(item);
        HeadGroup<T> const& group_of = batch.group[g];
        std::int32_t const index = item - (g == 0 ? 0 : batch.streamed_end[g - 1]);
        if (group_of.wide != 0) {
          stream_item<true, Depth>(p, group_of, index, batch.stream_rows, ring, entered);
        } else {
          stream_item<false, Depth>(p, group_of, index, batch.stream_rows, ring, entered);
        }
      }
      streamed_before = (streamed_before + streamed) % blocks;
    }
    spread_before = (spread_before + spread) % teams;
    if (batch.last != 0) break;
  }
  if (!entered) enter();
}

/// Bytes of dynamic shared memory: the batch of groups, the buffers of segment sums, and behind them the
/// ring, which holds the weights of spread items too; or, for a block alone, one in the other's place.
template <int Cluster, RingDepth Depth, Element T>
inline constexpr std::size_t head_shared_bytes =
    head_batch_bytes<T> +
    (Cluster == 1 ? std::max(spread_bytes<1>, ring_bytes<T, Depth>)
                  : spread_bytes<Cluster> + std::max(ring_bytes<T, Depth>, waiting_bytes<Cluster, T>));

/// Visits the kernels of one team size.
template <int Cluster, Element T, Element Y, class Visit>
void visit_head(Visit const& visit) {
  visit(reinterpret_cast<void const*>(&overlay_head_kernel<Cluster, RingDepth::none, T, Y>), Cluster,
        head_threads, head_blocks<T, RingDepth::none>);
  visit(reinterpret_cast<void const*>(&overlay_head_kernel<Cluster, RingDepth::shallow, T, Y>), Cluster,
        head_threads, head_blocks<T, RingDepth::shallow>);
  visit(reinterpret_cast<void const*>(&overlay_head_kernel<Cluster, RingDepth::deep, T, Y>), Cluster,
        head_threads, head_blocks<T, RingDepth::deep>);
}

/// Checks the parameters; false for what no kernel may be given.
template <Element T, Element Y>
bool usable(OverlayHeadParams<T, Y> const& params) noexcept {
  RowPlan const& plan = params.plan;
  return usable(params.table) && params.rows >= 0 && params.rows <= plan.capacity_rows &&
         plan.header != nullptr && plan.groups != nullptr && plan.rows != nullptr && params.x != nullptr &&
         params.logits != nullptr && params.x_row_stride >= params.table.hidden &&
         params.logits_row_stride >= params.table.vocab;
}

template <Element T, Element Y>
HeadOperands<T, Y> head_operands(OverlayHeadParams<T, Y> const& params) noexcept {
  bool const aligned = reinterpret_cast<std::uintptr_t>(params.x) % 16 == 0 &&
                       params.x_row_stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
  return {params, aligned && params.table.hidden % pack_elements == 0};
}

template <int Cluster, RingDepth Depth, Element T, Element Y>
cudaError_t launch_head(HeadOperands<T, Y> const& p, Machine const& machine, cudaStream_t stream) noexcept {
  OverlayHeadParams<T, Y> const& params = p.params;
  std::size_t const shared = head_shared_bytes<Cluster, Depth, T>;
  if (shared > machine.shared_bytes_per_block) return cudaErrorInvalidValue;
  std::int64_t teams = machine.resident_teams(Cluster, head_blocks<T, Depth>);
  if (Depth == RingDepth::none) {  // no more than the largest slot in every row could use
    std::int64_t const items = divide_up(params.table.max_head_count, head_tile_overrides) *
                               max_row_tiles(params.rows, params.plan.max_groups);
    teams = std::max<std::int64_t>(1, std::min(items, teams));
  }
  return launch(overlay_head_kernel<Cluster, Depth, T, Y>,
                LaunchShape{static_cast<std::int32_t>(teams) * Cluster, head_threads, Cluster, shared},
                machine, stream, p);
}

/// Launches the form for a team size that the table's largest slot and the machine's shared memory ask for.
template <int Cluster, Element T, Element Y>
cudaError_t launch_head(OverlayHeadParams<T, Y> const& params, Machine const& machine,
                        cudaStream_t stream) noexcept {
  bool const good = machine.prepared(operation_id<OverlayHead<T, Y>>()) && usable(params);
  if (!good) return cudaErrorInvalidValue;
  bool const idle = params.rows == 0 || params.table.cells == nullptr || params.table.max_slots == 0 ||
                    params.table.max_head_count == 0;
  if (idle) return cudaSuccess;
  HeadOperands<T, Y> const p = head_operands(params);
  if (!may_stream(params.table.max_head_count)) {
    return launch_head<Cluster, RingDepth::none>(p, machine, stream);
  }
  if (head_shared_bytes<Cluster, RingDepth::deep, T> <= machine.shared_bytes_per_block) {
    return launch_head<Cluster, RingDepth::deep>(p, machine, stream);
  }
  return launch_head<Cluster, RingDepth::shallow>(p, machine, stream);
}

}  // namespace detail

/// The operation that `prepare` takes for `launch_overlay_head`.
template <Element T, Element Y>
struct OverlayHead {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    detail::visit_head<detail::head_cluster, T, Y>(visit);
    detail::visit_head<1, T, Y>(visit);
  }
};

/// Recomputes the logits that the rows' slots override, in one launch whose blocks form no clusters: the form
/// of architectures without them, right everywhere. Same bits as every other form.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_overlay_head_without_clusters(
    OverlayHeadParams<T, Y> const& params, Machine const& machine, cudaStream_t stream) noexcept {
  return detail::launch_head<1>(params, machine, stream);
}

/// Recomputes the logits that the rows' slots override, in one launch. Enqueues only; safe in graph capture,
/// and a captured launch is right for every later content of plan and cells. Returns `cudaErrorInvalidValue`,
/// before anything is enqueued, for bad parameters or an operation that was not prepared; else what the
/// launch returned.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_overlay_head(OverlayHeadParams<T, Y> const& params,
                                                           Machine const& machine,
                                                           cudaStream_t stream) noexcept {
  if (machine.max_cluster < detail::head_cluster) return detail::launch_head<1>(params, machine, stream);
  return detail::launch_head<detail::head_cluster>(params, machine, stream);
}

}  // namespace atlas::lora::inline v0
