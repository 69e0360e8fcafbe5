// SPDX-License-Identifier: AGPL-3.0-only
//
// One cell of the overlay benchmark: its operands in device memory, and what is timed on them. Only
// overlay_bench.cu includes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <atlas/lora.hpp>

#include "bench_support.cuh"

namespace overlay_bench {

using namespace atlas::lora;
using namespace atlas_bench;

inline constexpr std::int64_t hidden = 4096;
inline constexpr std::int64_t vocab = 248320;

/// What is timed: all rows are of one adapter that overrides so many tokens.
struct Cell {
  bool head;  ///< the head's recompute; else the embedding's rows
  std::int32_t overrides;
  std::int32_t rows;

  [[nodiscard]] char const* op() const { return head ? "overlay_head" : "overlay_embed"; }
  [[nodiscard]] std::string name() const {
    return std::string(op()) + " overrides" + std::to_string(overrides) + " rows" + std::to_string(rows);
  }
};

/// Maps token i to row i where there is one.
template <int Threads>
__global__ void __launch_bounds__(Threads) map_kernel(std::int32_t* map, std::int64_t count, int rows) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * Threads) {
    map[i] = i % vocab < rows ? static_cast<std::int32_t>(i % vocab) : -1;
  }
}

/// Reads memory, so that nothing else is left in the L2, and leaves nothing to be written back.
template <int Threads>
__global__ void __launch_bounds__(Threads) sweep_kernel(uint4 const* from, std::int64_t count, int* sink) {
  unsigned seen = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * Threads) {
    uint4 const v = from[i];
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (seen == 0x12345678u) *sink = 1;
}

/// What a touch reads: rows of `hidden` elements, all of a slot's for the head, those of some tokens for the
/// embedding.
struct Touched {
  RowPlan plan;
  OverlayTable<T> table;
  std::int32_t const* tokens;
  std::int32_t rows;
};

/// Reads plan and cell as the operations do, then the rows with 16-byte loads, and nothing else.
template <int Loads>
__global__ void __launch_bounds__(256) touch_kernel(__grid_constant__ Touched const t, int* sink) {
  constexpr std::int64_t row_vectors = hidden / 8;
  unsigned seen = 0;
  std::int32_t const slot = t.plan.groups[0].slot;
  OverlayCell<T> const cell = *t.table.cell(slot);
  bool const head = t.tokens == nullptr;
  auto const* const from = reinterpret_cast<uint4 const*>(head ? cell.head_rows : cell.embed_rows);
  std::int64_t const all = (head ? cell.head_count : t.rows) * row_vectors;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * Loads * 256 + threadIdx.x; first < all;
       first += static_cast<std::int64_t>(gridDim.x) * Loads * 256) {
    uint4 values[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      std::int64_t const at = first + i * 256;
      std::int64_t const row = head || at >= all ? 0 : t.tokens[at / row_vectors];
      values[i] = at < all ? __ldcs(from + (head ? at : row * row_vectors + at % row_vectors)) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < Loads; ++i) seen ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  }
  detail::enter();
  if (seen == 0x12345678u) *sink = 1;
}

/// One cell's operands: launches enough that each finds its rows outside of the L2, which is swept before
/// every replay.
class Case {
 public:
  Case(Cell const& cell, Machine const& machine) : cell_(cell), machine_(machine) {
    // Tables of their own for the launches of a small set; of a large one each launch takes other tokens.
    std::int64_t const table_bytes = cell.overrides * hidden * 2;
    tables_ = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{1} << 30) / table_bytes, 1, 100));
    launches_ = cell.head ? std::max(tables_, 2) : 100;
    if (cell.head && tables_ == 1) tables_ = 2;
    weights_ = memory_.filled(static_cast<std::int64_t>(tables_) * cell.overrides * hidden, 1, 0.05F);
    x_ = memory_.filled(cell.rows * hidden, 2, 1.0F);
    logits_ = memory_.filled(cell.rows * vocab, 3, 1.0F);
    product_ = memory_.filled(static_cast<std::int64_t>(cell.rows) * cell.overrides, 4, 1.0F);
    sweep_ = static_cast<uint4*>(memory_.allocate(sweep_bytes));
    CHECKED(cudaMemset(sweep_, 0, sweep_bytes));
    sink_ = static_cast<int*>(memory_.allocate(sizeof(int)));
    make_cells();
    make_tokens();
    RowPlanLayout const layout{cell.rows, 1};
    plan_ = layout.at(memory_.allocate(layout.bytes()));
    CHECKED(cudaMemset(plan_.row_slots, 0, static_cast<std::size_t>(cell.rows) * sizeof(std::int32_t)));
    CHECKED(launch_row_plan(plan_, cell.rows, machine_, stream_));
    CHECKED(cublasCreate(&cublas_));
    CHECKED(cublasSetStream(cublas_, stream_));
    CHECKED(cublasSetWorkspace(cublas_, memory_.allocate(32 << 20), 32 << 20));
    CHECKED(cudaStreamSynchronize(stream_));
  }
  ~Case() { static_cast<void>(cublasDestroy(cublas_)); }
  Case(Case const&) = delete;
  Case& operator=(Case const&) = delete;

  /// Microseconds of one operation.
  double ours(bool settled) {
    return time([&](int l) { CHECKED(enqueue(l, settled, true)); });
  }
  double without_clusters() {
    return cell_.head ? time([&](int l) { CHECKED(enqueue(l, true, false)); }) : 0.0;
  }
  /// The best of several shapes of a launch that only reads the same rows.
  double touch() {
    double best = 1e30;
    for (int const blocks : {8, 66, 132, 264, 528, 1056}) {
      best = std::min(best, time([&](int l) { launch_touch(touch_kernel<1>, blocks, l); }));
      best = std::min(best, time([&](int l) { launch_touch(touch_kernel<4>, blocks, l); }));
      best = std::min(best, time([&](int l) { launch_touch(touch_kernel<8>, blocks, l); }));
    }
    return best;
  }
  /// One matrix product with the same rows, which still has to be scattered to the logits.
  double cublas() {
    if (!cell_.head) return 0.0;
    float const one = 1.0F, zero = 0.0F;
    return time([&](int l) {
      CHECKED(cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, cell_.overrides, cell_.rows, hidden, &one,
                           weights(l), CUDA_R_16BF, hidden, x_, CUDA_R_16BF, hidden, &zero, product_,
                           CUDA_R_16BF, cell_.overrides, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    });
  }

  /// Relative error of some rows against double precision; for the embedding, whether a copy differs.
  double error() {
    CHECKED(enqueue(0, false, true));
    CHECKED(cudaStreamSynchronize(stream_));
    double error = 0.0, size = 0.0;
    std::vector<T> const x = download(x_, cell_.rows * hidden);
    for (std::int32_t r = 0; r < cell_.rows; r += std::max(1, cell_.rows / 3)) {
      for (std::int32_t j = 0; j < cell_.overrides; j += std::max(1, cell_.overrides / 7)) {
        if (cell_.head) {
          std::vector<T> const row = download(weights(0) + j * hidden, hidden);
          double want = 0.0;
          for (std::int64_t k = 0; k < hidden; ++k) {
            want += static_cast<double>(to_f32(row[static_cast<std::size_t>(k)])) *
                    to_f32(x[static_cast<std::size_t>(r * hidden + k)]);
          }
          double const got = to_f32(download(logits_ + r * vocab + j, 1)[0]);
          error += (got - want) * (got - want);
          size += want * want;
        } else {
          std::int32_t token = 0;
          CHECKED(cudaMemcpy(&token, tokens_ + r, sizeof token, cudaMemcpyDeviceToHost));
          std::vector<T> const row = download(weights(0) + token * hidden, hidden);
          bool const same = std::equal(row.begin(), row.end(), x.begin() + r * hidden,
                                       [](T a, T b) { return to_f32(a) == to_f32(b); });
          if (!same) return 1.0;
        }
      }
    }
    return size == 0.0 ? 0.0 : std::sqrt(error / size);
  }

 private:
  static constexpr std::size_t sweep_bytes = std::size_t{256} << 20;

  [[nodiscard]] T const* weights(int launch) const {
    return weights_ + static_cast<std::int64_t>(launch % tables_) * cell_.overrides * hidden;
  }

  void make_cells() {
    auto* const map = static_cast<std::int32_t*>(memory_.allocate(
        static_cast<std::size_t>(tables_) * static_cast<std::size_t>(vocab) * sizeof(std::int32_t)));
    map_kernel<256><<<1024, 256, 0, stream_>>>(map, tables_ * vocab, cell_.overrides);
    CHECKED(cudaGetLastError());
    std::vector<OverlayCell<T>> cells;
    for (int t = 0; t < tables_; ++t) {
      // Token i has row i: the map's first entries are the ids too.
      cells.push_back(
          {map + t * vocab, weights(t), weights(t), map + t * vocab, cell_.overrides, cell_.overrides});
    }
    cells_ = memory_.uploaded(cells);
  }
  void make_tokens() {
    std::vector<std::int32_t> tokens;
    for (std::int64_t i = 0; i < std::int64_t{launches_} * cell_.rows; ++i) {
      tokens.push_back(static_cast<std::int32_t>(i * 7919 % cell_.overrides));
    }
    tokens_ = memory_.uploaded(tokens);
  }

  [[nodiscard]] OverlayTable<T> table(int launch) const {
    return {cells_ + launch % tables_, sizeof(OverlayCell<T>), 1, cell_.overrides, vocab, hidden};
  }
  cudaError_t enqueue(int launch, bool settled, bool clusters) {
    if (!cell_.head) {
      return launch_overlay_embed(OverlayEmbedParams<T>{x_, hidden, cell_.rows, tokens_ + launch * cell_.rows,
                                                        plan_.row_slots, table(launch), settled},
                                  machine_, stream_);
    }
    OverlayHeadParams<T> const p{x_, hidden, logits_, vocab, cell_.rows, plan_, table(launch), settled};
    return clusters ? launch_overlay_head(p, machine_, stream_)
                    : launch_overlay_head_without_clusters(p, machine_, stream_);
  }
  template <class Kernel>
  void launch_touch(Kernel kernel, int blocks, int launch) {
    Touched const touched{plan_, table(launch), cell_.head ? nullptr : tokens_ + launch * cell_.rows,
                          cell_.rows};
    CHECKED(
        detail::launch(kernel, detail::LaunchShape{blocks, 256, 1, 0}, machine_, stream_, touched, sink_));
  }

  template <class Enqueue>
  double time(Enqueue const& enqueue_one) {
    return median_us(stream_, launches_, enqueue_one, [this] {
      sweep_kernel<256>
          <<<1056, 256, 0, stream_>>>(sweep_, static_cast<std::int64_t>(sweep_bytes / 16), sink_);
      CHECKED(cudaGetLastError());
    });
  }

  Cell const& cell_;
  Machine const& machine_;
  int tables_ = 0;
  int launches_ = 0;
  DeviceMemory memory_;
  cudaStream_t stream_ = memory_.stream();
  cublasHandle_t cublas_ = nullptr;
  T* weights_ = nullptr;
  T* x_ = nullptr;  ///< also what the embedding writes
  T* logits_ = nullptr;
  T* product_ = nullptr;
  uint4* sweep_ = nullptr;
  int* sink_ = nullptr;
  OverlayCell<T>* cells_ = nullptr;
  std::int32_t* tokens_ = nullptr;
  RowPlan plan_;
};

}  // namespace overlay_bench
