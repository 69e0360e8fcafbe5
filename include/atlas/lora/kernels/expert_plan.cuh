// SPDX-License-Identifier: AGPL-3.0-only
//
// The expert plan made on the device, part of the captured step: the same groups as the host builder's,
// whichever way the rows lie. One block: each of some warps counts its own stretch of rows by (slot, expert),
// the block turns counts into places, and the same warps put their rows there; so rows stay ascending.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/kernels/expert_params.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_plan.cuh"
#include "atlas/lora/route/expert_plan.hpp"
#include "atlas/lora/route/expert_rows.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

static_assert(expert_plan_threads == plan_threads && expert_plan_warp == warp_threads);

/// Rows of a warp whose loads are in flight together, in rows a lane.
inline constexpr int plan_rows_ahead = 8;

/// The planning block's shared memory.
struct ExpertPlanShared {
  std::int32_t* counts;   ///< [counting warps][keys]: rows of each warp, then how many come before them
  std::int32_t* totals;   ///< [keys]: rows of a key
  std::int32_t* groups;   ///< [keys]: its first group
  std::int32_t* offsets;  ///< [experts + 1]: a copy of the sorted form's offsets

  __device__ ExpertPlanShared(std::int32_t* memory, int warps, std::int32_t keys)
      : counts(memory),
        totals(counts + static_cast<std::ptrdiff_t>(warps) * keys),
        groups(totals + keys),
        offsets(groups + keys) {}
};

/// Calls `visit(row, key, peers)` with every row of `[first, last)`, 32 neighbouring rows at a time: its key
/// or -1, and the lanes whose rows have the same key. One warp calls it, whole.
template <class Visit>
__device__ void for_expert_rows(ExpertPlan const& plan, ExpertRows const& rows, std::int32_t const* offsets,
                                std::int32_t first, std::int32_t last, Visit const& visit) {
  int const lane = lane_index();
  for (std::int32_t base = first; base < last; base += plan_rows_ahead * warp_threads) {
    // Loads of one kind for all rows, then of the next, so that they are in flight together.
    std::int32_t slot[plan_rows_ahead];
    std::int32_t expert[plan_rows_ahead];
#pragma unroll
    for (int i = 0; i < plan_rows_ahead; ++i) {
      slot[i] = rows.slot(min(base + i * warp_threads + lane, last - 1));
    }
    if (rows.expert_ids != nullptr) {
#pragma unroll
      for (int i = 0; i < plan_rows_ahead; ++i) {
        expert[i] = rows.expert_ids[min(base + i * warp_threads + lane, last - 1)];
      }
    } else {
#pragma unroll
      for (int i = 0; i < plan_rows_ahead; ++i) {
        expert[i] = rows.expert(min(base + i * warp_threads + lane, last - 1), plan.num_experts, offsets);
      }
    }
#pragma unroll
    for (int i = 0; i < plan_rows_ahead; ++i) {
      if (base + i * warp_threads >= last) break;
      std::int32_t const row = base + i * warp_threads + lane;
      std::int32_t const key =
          row < last ? expert_key(slot[i], expert[i], plan.max_slots, plan.num_experts) : -1;
      visit(row, key, __match_any_sync(0xffffffffu, key));
    }
  }
}

/// Turns each warp's counts into how many rows of the key come before its own, and finds every key's groups.
/// All threads call it, each for neighbouring keys.
__device__ inline void place_experts(ExpertPlan const& plan, ExpertPlanShared const& shared, int warps,
                                     std::int32_t keys, std::int32_t* scan) {
  std::int32_t const each = (keys + plan_threads - 1) / plan_threads;
  std::int32_t const first = min(static_cast<std::int32_t>(threadIdx.x) * each, keys);
  std::int32_t const last = min(first + each, keys);
  std::int32_t my_groups = 0;
  std::int32_t my_rows = 0;
  for (std::int32_t key = first; key < last; ++key) {
    std::int32_t total = 0;
    for (int w = 0; w < warps; ++w) {
      std::int32_t& count = shared.counts[static_cast<std::ptrdiff_t>(w) * keys + key];
      std::int32_t const mine = count;
      count = total;
      total += mine;
    }
    shared.totals[key] = total;
    my_groups += row_tiles(total);
    my_rows += total;
  }
  std::int32_t all_groups = 0;
  std::int32_t all_rows = 0;
  std::int32_t group = scan_block(my_groups, scan, all_groups);
  scan_block(my_rows, scan, all_rows);
  for (std::int32_t key = first; key < last; ++key) {
    shared.groups[key] = group;
    group += row_tiles(shared.totals[key]);
  }
  if (threadIdx.x == 0) *plan.header = ExpertPlanHeader{all_groups, all_rows, {0, 0}};
}

/// Puts the `rank`-th row of a key into its group, whose head the group's first row writes.
__device__ inline void put_expert_row(ExpertPlan const& plan, ExpertPlanShared const& shared,
                                      std::int32_t key, std::int32_t rank, std::int32_t row) {
  ExpertGroup& group = plan.groups[shared.groups[key] + rank / tile_rows];
  std::int32_t const place = rank % tile_rows;
  group.row[place] = row;
  if (place != 0) return;
  std::int32_t const count = min(shared.totals[key] - rank, tile_rows);
  group.slot = key / plan.num_experts;
  group.expert = key % plan.num_experts;
  group.count = count;
  group.reserved = 0;
  for (std::int32_t i = count; i < tile_rows; ++i) group.row[i] = -1;
}

/// Groups rows by (slot, expert). One block of `Threads` threads, of which the first `warps` warps read rows.
template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    expert_plan_kernel(__grid_constant__ ExpertPlan const plan, __grid_constant__ ExpertRows const rows,
                       int const warps) {
  extern __shared__ std::int32_t plan_memory[];
  __shared__ std::int32_t scan[plan_threads / warp_threads];
  enter();
  std::int32_t const keys = plan.max_slots * plan.num_experts;
  ExpertPlanShared const shared(plan_memory, warps, keys);
  int const thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < warps * keys; i += Threads) shared.counts[i] = 0;
  if (rows.rows > 0 && rows.expert_ids == nullptr) {
    for (int i = thread; i <= plan.num_experts; i += Threads) shared.offsets[i] = rows.expert_offsets[i];
  }
  __syncthreads();
  int const warp = thread / warp_threads;
  std::int32_t const stretch =
      ((rows.rows + warps - 1) / warps + warp_threads - 1) / warp_threads * warp_threads;
  // In 64 bits, for a stretch of the last warps may begin beyond all rows.
  auto const end = static_cast<std::int64_t>(rows.first_row) + rows.rows;
  std::int64_t const begin =
      static_cast<std::int64_t>(rows.first_row) + static_cast<std::int64_t>(warp) * stretch;
  auto const first = static_cast<std::int32_t>(min(begin, end));
  auto const last = static_cast<std::int32_t>(min(begin + stretch, end));
  std::int32_t* const counts = shared.counts + static_cast<std::ptrdiff_t>(warp) * keys;
  unsigned const below = (1u << lane_index()) - 1u;
  if (warp < warps) {
    for_expert_rows(plan, rows, shared.offsets, first, last,
                    [&](std::int32_t, std::int32_t key, unsigned peers) {
                      if (key >= 0 && (peers & below) == 0) counts[key] += __popc(peers);
                      __syncwarp();
                    });
  }
  __syncthreads();
  place_experts(plan, shared, warps, keys, scan);
  __syncthreads();
  if (warp < warps) {
    for_expert_rows(plan, rows, shared.offsets, first, last,
                    [&](std::int32_t row, std::int32_t key, unsigned peers) {
                      std::int32_t const before = key >= 0 ? counts[key] : 0;
                      __syncwarp();
                      if (key >= 0 && (peers & below) == 0) counts[key] = before + __popc(peers);
                      __syncwarp();
                      if (key >= 0) put_expert_row(plan, shared, key, before + __popc(peers & below), row);
                    });
  }
}

}  // namespace detail

/// The operation that `prepare` takes for `launch_expert_plan`.
struct ExpertPlanning {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    visit(reinterpret_cast<void const*>(&detail::expert_plan_kernel<detail::plan_threads>), 1,
          detail::plan_threads, 1);
  }
};

/// Fills `plan` from `rows`, all on the device: row counts and offsets are read there, so one captured launch
/// is right for every later routing. Enqueues only; safe in graph capture. Returns `cudaErrorInvalidValue`
/// when something is null or negative, there are more rows than `capacity_rows`, three counters for each of
/// `max_slots * num_experts` do not fit the block's shared memory (19,000 pairs on an H200), or the operation
/// was not prepared.
[[nodiscard]] ATLAS_HIDDEN inline cudaError_t launch_expert_plan(ExpertPlan const& plan,
                                                                 ExpertRows const& rows,
                                                                 Machine const& machine,
                                                                 cudaStream_t stream) noexcept {
  bool const bad = plan.header == nullptr || plan.groups == nullptr || plan.max_slots < 0 ||
                   plan.num_experts < 0 || plan.capacity_rows < rows.rows || !detail::usable(rows) ||
                   !machine.prepared(operation_id<ExpertPlanning>());
  if (bad) return cudaErrorInvalidValue;
  ExpertPlanLayout const layout{plan.capacity_rows, plan.max_slots, plan.num_experts};
  int const warps =
      detail::expert_plan_warps(rows.rows, layout.keys(), plan.num_experts, machine.shared_bytes_per_block);
  if (warps == 0 || plan.max_groups < layout.max_groups(rows.rows)) return cudaErrorInvalidValue;
  std::size_t const shared = detail::expert_plan_bytes(layout.keys(), plan.num_experts, warps);
  return detail::launch(detail::expert_plan_kernel<detail::plan_threads>,
                        detail::LaunchShape{1, detail::plan_threads, 1, shared}, machine, stream, plan, rows,
                        warps);
}

}  // namespace atlas::lora::inline v0
