// SPDX-License-Identifier: AGPL-3.0-only
//
// The row plan made on the device, part of the captured step: row slots `[rows]` in, groups and rows out, the
// same as the host builder's. One block counts, scans and places; rows stay ascending within a slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/route/row_plan.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Threads of the planning block.
inline constexpr int plan_threads = 1024;

/// The sum of `value` over the threads before this one, and over all threads in `total`. `warps` is shared
/// memory of 32 values. All threads call it.
__device__ inline std::int32_t scan_block(std::int32_t value, std::int32_t* warps, std::int32_t& total) {
  int const lane = lane_index();
  int const warp = static_cast<int>(threadIdx.x) / warp_threads;
  std::int32_t sum = value;
  for (int step = 1; step < warp_threads; step *= 2) {
    std::int32_t const other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == warp_threads - 1) warps[warp] = sum;
  __syncthreads();
  std::int32_t before = 0;
  total = 0;
#pragma unroll 4
  for (int w = 0; w < plan_threads / warp_threads; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  __syncthreads();
  return before + sum - value;
}

/// What a plan's block knows of every slot, in shared memory.
struct SlotPlaces {
  std::int32_t* next;        ///< `[max_slots]`: the count, then where the slot's next row goes
  std::int32_t* first;       ///< `[max_slots + 1]`: where its rows begin, and where the next slot's do
  std::int32_t* first_tile;  ///< `[max_slots]`

  static constexpr std::size_t bytes(std::int32_t max_slots) noexcept {
    return (3 * static_cast<std::size_t>(max_slots) + 1) * sizeof(std::int32_t);
  }
  __device__ SlotPlaces(std::int32_t* base, std::int32_t max_slots)
      : next(base), first(base + max_slots), first_tile(base + 2 * max_slots + 1) {}
};

/// Writes the groups and turns counts into the places of each slot's first row and tile.
__device__ inline void write_groups(RowPlan const& plan, SlotPlaces const& slots, std::int32_t* warps) {
  std::int32_t groups = 0;
  std::int32_t placed = 0;
  std::int32_t tiles = 0;
  for (std::int32_t first = 0; first < plan.max_slots; first += plan_threads) {
    std::int32_t const slot = first + static_cast<std::int32_t>(threadIdx.x);
    std::int32_t const mine = slot < plan.max_slots ? slots.next[slot] : 0;
    std::int32_t new_groups = 0;
    std::int32_t new_rows = 0;
    std::int32_t new_tiles = 0;
    std::int32_t const group = groups + scan_block(mine > 0 ? 1 : 0, warps, new_groups);
    std::int32_t const row = placed + scan_block(mine, warps, new_rows);
    std::int32_t const tile = tiles + scan_block(row_tiles(mine), warps, new_tiles);
    if (mine > 0) plan.groups[group] = RowGroup{slot, row, mine, 0};
    if (slot < plan.max_slots) {
      slots.next[slot] = slots.first[slot] = row;
      slots.first_tile[slot] = tile;
    }
    groups += new_groups;
    placed += new_rows;
    tiles += new_tiles;
  }
  auto const thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t g = groups + thread; g < plan.max_groups; g += plan_threads) plan.groups[g] = RowGroup{};
  for (std::int32_t t = tiles + thread; t < plan.max_tiles; t += plan_threads) plan.tiles[t] = RowGroup{};
  if (thread == 0) {
    slots.first[plan.max_slots] = placed;
    *plan.header = RowPlanHeader{groups, placed, tiles, 0};
  }
}

/// Writes a row's place, and its tile where it is the first of one.
__device__ inline void write_row(RowPlan const& plan, SlotPlaces const& slots, std::int32_t slot,
                                 std::int32_t row, std::int32_t place) {
  plan.rows[place] = row;
  std::int32_t const offset = place - slots.first[slot];
  if (offset % tile_rows != 0) return;
  plan.tiles[slots.first_tile[slot] + offset / tile_rows] =
      RowGroup{slot, place, min(tile_rows, slots.first[slot + 1] - place), 0};
}

/// Groups the rows of a step by slot. One block of `Threads` threads.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    row_plan_kernel(__grid_constant__ RowPlan const plan, std::int32_t const rows) {
  extern __shared__ std::int32_t dynamic_places[];
  __shared__ std::int32_t warps[plan_threads / warp_threads];
  SlotPlaces const slots(dynamic_places, plan.max_slots);
  enter();
  int const thread = static_cast<int>(threadIdx.x);
  for (std::int32_t slot = thread; slot < plan.max_slots; slot += plan_threads) slots.next[slot] = 0;
  __syncthreads();
  for (std::int32_t row = thread; row < rows; row += plan_threads) {
    std::int32_t const slot = plan.row_slots[row];
    if (slot >= 0 && slot < plan.max_slots) atomicAdd(&slots.next[slot], 1);
  }
  __syncthreads();
  write_groups(plan, slots, warps);
  __syncthreads();
  // Warps place their rows in turn, so that a slot's rows stay in order.
  int const warp = thread / warp_threads;
  for (std::int32_t first = 0; first < rows; first += plan_threads) {
    std::int32_t const row = first + thread;
    std::int32_t const slot = row < rows ? plan.row_slots[row] : base_slot;
    bool const routed = slot >= 0 && slot < plan.max_slots;
    unsigned const peers = __match_any_sync(0xffffffffu, routed ? slot : base_slot);
    int const rank = __popc(peers & ((1u << lane_index()) - 1u));
    int const turns = min((rows - first + warp_threads - 1) / warp_threads, plan_threads / warp_threads);
    std::int32_t place = 0;
    for (int turn = 0; turn < turns; ++turn) {
      if (warp == turn && routed) place = slots.next[slot] + rank;
      __syncwarp();
      if (warp == turn && routed && rank == 0) slots.next[slot] += __popc(peers);
      __syncthreads();
    }
    if (routed) write_row(plan, slots, slot, row, place);
  }
}

}  // namespace detail

/// The operation that `prepare` takes for `launch_row_plan`.
struct RowPlanning {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    visit(reinterpret_cast<void const*>(&detail::row_plan_kernel<detail::plan_threads>), 1,
          detail::plan_threads, 1);
  }
};

/// Fills `plan`'s header, groups, rows and tiles from its first `rows` row slots, all on the device. Enqueues
/// only; safe in graph capture. Returns `cudaErrorInvalidValue` when something is null, `rows` is not in `[0,
/// capacity_rows]`, `max_slots` counters do not fit the block's shared memory, or the operation was not
/// prepared.
[[nodiscard]] ATLAS_HIDDEN inline cudaError_t launch_row_plan(RowPlan const& plan, std::int32_t rows,
                                                              Machine const& machine,
                                                              cudaStream_t stream) noexcept {
  std::size_t const shared = detail::SlotPlaces::bytes(plan.max_slots < 0 ? 0 : plan.max_slots);
  bool const bad = plan.header == nullptr || plan.row_slots == nullptr || plan.groups == nullptr ||
                   plan.rows == nullptr || plan.tiles == nullptr || rows < 0 || rows > plan.capacity_rows ||
                   plan.max_slots < 0 || shared > machine.shared_bytes_per_block ||
                   !machine.prepared(operation_id<RowPlanning>());
  if (bad) return cudaErrorInvalidValue;
  return detail::launch(detail::row_plan_kernel<detail::plan_threads>,
                        detail::LaunchShape{1, detail::plan_threads, 1, shared}, machine, stream, plan, rows);
}

}  // namespace atlas::lora::inline v0
