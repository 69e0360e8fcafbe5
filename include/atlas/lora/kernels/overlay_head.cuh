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
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/overlay_embed.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_head_spread.cuh"
#include "atlas/lora/kernels/overlay_head_stream.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0 {

template <Element T, Element Y = T>
struct OverlayHead;

namespace detail {

inline constexpr int head_threads = head_warps * warp_threads;
/// Blocks of a team where there are clusters.
inline constexpr int head_cluster = 8;
/// Blocks of a multiprocessor that registers allow. A warp that streams holds the sums of 32 override rows
/// by 64 batch rows, twice.
template <bool Streams>
inline constexpr int head_blocks = Streams ? 1 : 2;

/// Walks the items of a step's groups. Each item of a team of blocks is spread; each of a block streams.
template <int Cluster, bool Streams, Element T, Element Y>
__global__ void __launch_bounds__(head_threads, head_blocks<Streams>)
    overlay_head_kernel(__grid_constant__ HeadOperands<T, Y> const p) {
  extern __shared__ float4 shared[];
  HeadBatch<T>& batch = *reinterpret_cast<HeadBatch<T>*>(shared);
  float4* const work = shared + head_batch_bytes<T> / sizeof(float4);
  auto const blocks = static_cast<std::int32_t>(gridDim.x);
  std::int32_t const teams = blocks / Cluster;
  auto const team = static_cast<std::int32_t>(blockIdx.x) / Cluster;
  int const block = static_cast<int>(blockIdx.x) % Cluster;
  if (Cluster > 1 && threadIdx.x == head_threads - 1) {
    batch.phase = 1;  // the first item's is the one after
    batch.full.init(1);
    publish_barriers();
  }
  bool entered = !p.params.inputs_settled;
  if (entered) enter();
  for (bool more = false;; more = true) {
    __syncthreads();
    if (threadIdx.x < warp_threads) {
      if (threadIdx.x == 0) batch.find_next(more, team, teams, blocks);
      __syncwarp();
      load_head_groups<Cluster>(batch, p, teams);
    }
    __syncthreads();
    for (std::int32_t item = batch.next_spread; item < batch.spread_end[warp_threads - 1]; item += teams) {
      int const g = batch.spread_group(item);
      bool const first_item = batch.first == 0 && item < teams;
      spread_item<Cluster>(p, batch, batch.group[g], item - (g == 0 ? 0 : batch.spread_end[g - 1]), block,
                           work, first_item, entered);
    }
    if constexpr (Streams) {
      for (std::int32_t item = batch.next_streamed; item < batch.streamed_end[warp_threads - 1];
           item += blocks) {
        int const g = batch.streamed_group(item);
        stream_item(p, batch, batch.group[g], item - (g == 0 ? 0 : batch.streamed_end[g - 1]), work, entered);
      }
    }
    if (batch.last != 0) break;
  }
  if (!entered) enter();
}

/// Bytes of dynamic shared memory: the batch of groups, and behind it what spread and streamed items use in
/// turn.
template <int Cluster, Element T>
inline constexpr std::size_t head_spread_bytes = head_batch_bytes<T> + spread_bytes<Cluster, T>;
/// Likewise where blocks stream, without the slices of x.
template <Element T>
inline constexpr std::size_t head_stream_bytes = head_batch_bytes<T> + stream_sums_bytes<1, T>;
/// Likewise with rings of weights and the slices of x beside them.
template <Element T>
inline constexpr std::size_t head_ring_bytes =
    head_batch_bytes<T> + stream_sums_bytes<ring_up, T> + ring_bytes + 2 * ring_slice_bytes;

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
  return {params, aligned && params.table.hidden % pack_elements == 0, Contraction(params.table.hidden)};
}

template <int Cluster, Element T, Element Y>
cudaError_t launch_spreading(HeadOperands<T, Y> const& p, Machine const& machine,
                             cudaStream_t stream) noexcept {
  OverlayHeadParams<T, Y> const& params = p.params;
  constexpr std::size_t shared = head_spread_bytes<Cluster, T>;
  if (shared > machine.shared_bytes_per_block) return cudaErrorInvalidValue;
  // No more than the largest slot in every row could use; and room beside them for the next launch's blocks,
  // where those may come early.
  std::int32_t const groups = std::max(1, std::min(params.rows, params.plan.max_groups));
  std::int32_t const row_tiles = groups + (params.rows - groups) / head_tile_rows<T>;
  std::int64_t const items =
      std::int64_t{divide_up(params.table.max_head_count, head_tile_overrides)} * row_tiles;
  std::int64_t const most = machine.resident_teams(Cluster, has_clusters(machine.compute) ? 1 : 2);
  std::int64_t const teams = std::max<std::int64_t>(1, std::min(items, most));
  return launch(overlay_head_kernel<Cluster, false, T, Y>,
                LaunchShape{static_cast<std::int32_t>(teams) * Cluster, head_threads, Cluster, shared},
                machine, stream, p);
}

/// Without clusters, which fill fewer multiprocessors: graphics processing clusters do not divide evenly.
/// What little such a table's smaller slots have is then spread over blocks alone.
template <Element T, Element Y>
cudaError_t launch_streaming(HeadOperands<T, Y> p, Machine const& machine, cudaStream_t stream) noexcept {
  constexpr std::size_t unit = stream_slice_unit<T> * sizeof(Pack<T>);
  if (head_stream_bytes<T> + 2 * unit > machine.shared_bytes_per_block) return cudaErrorInvalidValue;
  std::size_t const free = (machine.shared_bytes_per_block - head_stream_bytes<T>) / 2;
  std::size_t const slice = std::min(free, most_slice_bytes) / unit * unit;
  p.slice_packs = static_cast<std::int32_t>(slice / sizeof(Pack<T>));
  // Few rows take weights straight to registers: loads under way need the L1 that rings would take.
  p.rings = sizeof(T) == 2 && p.params.rows > few_stream_rows &&
            head_ring_bytes<T> <= machine.shared_bytes_per_block;
  std::size_t const shared = std::max({head_stream_bytes<T> + 2 * slice, head_spread_bytes<1, T>,
                                       p.rings ? head_ring_bytes<T> : std::size_t{0}});
  if (shared > machine.shared_bytes_per_block) return cudaErrorInvalidValue;
  return launch(overlay_head_kernel<1, true, T, Y>,
                LaunchShape{machine.multiprocessors, head_threads, 1, shared}, machine, stream, p);
}

/// Launches the form that the table's largest slot asks for; teams of `Cluster` blocks where nothing streams.
template <int Cluster, Element T, Element Y>
cudaError_t launch_head(OverlayHeadParams<T, Y> const& params, Machine const& machine,
                        cudaStream_t stream) noexcept {
  bool const good = machine.prepared(operation_id<OverlayHead<T, Y>>()) && usable(params);
  if (!good) return cudaErrorInvalidValue;
  bool const idle = params.rows == 0 || params.table.cells == nullptr || params.table.max_slots == 0 ||
                    params.table.max_head_count == 0;
  if (idle) return cudaSuccess;
  HeadOperands<T, Y> const p = head_operands(params);
  return may_stream(params.table.max_head_count) ? launch_streaming(p, machine, stream)
                                                 : launch_spreading<Cluster>(p, machine, stream);
}

}  // namespace detail

/// The operation that `prepare` takes for `launch_overlay_head`.
template <Element T, Element Y>
struct OverlayHead {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    constexpr int cluster = detail::head_cluster;
    auto const visit_kernel = [&](auto* kernel, int blocks_of_team, int blocks) {
      visit(reinterpret_cast<void const*>(kernel), blocks_of_team, detail::head_threads, blocks);
    };
    visit_kernel(&detail::overlay_head_kernel<cluster, false, T, Y>, cluster, detail::head_blocks<false>);
    visit_kernel(&detail::overlay_head_kernel<1, false, T, Y>, 1, detail::head_blocks<false>);
    visit_kernel(&detail::overlay_head_kernel<1, true, T, Y>, 1, detail::head_blocks<true>);
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
