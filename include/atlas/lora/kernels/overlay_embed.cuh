// SPDX-License-Identifier: AGPL-3.0-only
//
// An adapter's own embedding rows, copied over what the gather from the base's embedding left.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/overlay_params.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Threads of an embedding block, which takes a row.
inline constexpr int embed_threads = 256;
/// Embedding blocks of a multiprocessor.
inline constexpr int embed_blocks = 8;

/// Whether a table's fields are such that kernels can read through it.
template <Element T>
bool usable(OverlayTable<T> const& table) noexcept {
  constexpr std::int64_t widest = std::int64_t{1} << 30;
  bool const cells =
      reinterpret_cast<std::uintptr_t>(table.cells) % 16 == 0 && table.cell_stride_bytes % 16 == 0;
  return cells && table.cell_stride_bytes >= static_cast<std::int64_t>(sizeof(OverlayCell<T>)) &&
         table.max_slots >= 0 && table.max_head_count >= 0 && table.hidden >= 1 && table.hidden <= widest &&
         table.vocab >= 0 && table.vocab < (std::int64_t{1} << 31);
}

/// Waits for what the launch depends on, once.
__device__ inline void enter_once(bool& entered) {
  if (!entered) enter();
  entered = true;
}

/// Copies `count` elements, by 16 bytes where both sides allow it. The whole block calls it. `from` is read
/// before what the launch depends on is waited for, `to` is written after.
template <Element T>
__device__ inline void copy_row(T* to, T const* from, std::int64_t count, bool& entered) {
  int const thread = static_cast<int>(threadIdx.x);
  auto const addresses = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (addresses % 16 == 0 && count * static_cast<std::int64_t>(sizeof(T)) % 16 == 0) {
    constexpr int ahead = 4;
    auto const* const source = reinterpret_cast<uint4 const*>(from);
    auto* const target = reinterpret_cast<uint4*>(to);
    std::int64_t const vectors = count * static_cast<std::int64_t>(sizeof(T)) / 16;
    for (std::int64_t first = thread; first < vectors; first += ahead * embed_threads) {
      uint4 value[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (first + i * embed_threads < vectors) value[i] = source[first + i * embed_threads];
      }
      enter_once(entered);
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        if (first + i * embed_threads < vectors) target[first + i * embed_threads] = value[i];
      }
    }
  } else {
    enter_once(entered);
    for (std::int64_t i = thread; i < count; i += embed_threads) to[i] = from[i];
  }
}

template <Element T, int Threads>
__global__ void __launch_bounds__(Threads)
    overlay_embed_kernel(__grid_constant__ OverlayEmbedParams<T> const p) {
  bool entered = !p.inputs_settled;
  if (entered) enter();
  for (auto row = static_cast<std::int32_t>(blockIdx.x); row < p.rows;
       row += static_cast<std::int32_t>(gridDim.x)) {
    std::int32_t const slot = p.row_slots[row];
    std::int32_t const token = p.tokens[row];
    if (slot < 0 || slot >= p.table.max_slots || token < 0 || token >= p.table.vocab) continue;
    OverlayCell<T> const cell = *p.table.cell(slot);
    if (!cell.embeds()) continue;
    std::int32_t const own = cell.slot_map[token];
    if (own < 0 || own >= cell.embed_count) continue;
    copy_row(p.h + row * p.h_row_stride, cell.embed_rows + own * p.table.hidden, p.table.hidden, entered);
  }
  enter_once(entered);
}

}  // namespace detail

/// The operation that `prepare` takes for `launch_overlay_embed`.
template <Element T>
struct OverlayEmbed {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    visit(reinterpret_cast<void const*>(&detail::overlay_embed_kernel<T, detail::embed_threads>), 1,
          detail::embed_threads, detail::embed_blocks);
  }
};

/// Writes the rows of `params.h` whose slot has a row of its own for the row's token. Enqueues only; safe in
/// graph capture, and a captured launch is right for every later content of tokens, row slots and cells.
/// Returns `cudaErrorInvalidValue`, before anything is enqueued, for bad parameters or an operation that was
/// not prepared; else what the launch returned.
template <Element T>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_overlay_embed(OverlayEmbedParams<T> const& params,
                                                            Machine const& machine,
                                                            cudaStream_t stream) noexcept {
  bool const good = machine.prepared(operation_id<OverlayEmbed<T>>()) && detail::usable(params.table) &&
                    params.rows >= 0 && params.h != nullptr && params.tokens != nullptr &&
                    params.row_slots != nullptr && params.h_row_stride >= params.table.hidden;
  if (!good) return cudaErrorInvalidValue;
  if (params.rows == 0 || params.table.cells == nullptr || params.table.max_slots == 0) return cudaSuccess;
  std::int32_t const blocks = std::min(params.rows, machine.multiprocessors * detail::embed_blocks);
  return detail::launch(detail::overlay_embed_kernel<T, detail::embed_threads>,
                        detail::LaunchShape{blocks, detail::embed_threads, 1, 0}, machine, stream, params);
}

}  // namespace atlas::lora::inline v0
