// SPDX-License-Identifier: AGPL-3.0-only
//
// What is the user's own on the GPU: a tuning of the delta's launch, and a kernel with an epilogue.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include <atlas/lora.hpp>

#include "../tiny_model/memory.hpp"

namespace own_policy {

using namespace atlas::lora;

/// Clusters of four blocks at every number of rows, which no tuning of the library does at few. A type, since
/// kernels take policy types.
using OwnTuning = Constant<DeltaTuning, DeltaTuning{256, 4, 1, 1}>;

inline bool gpu_available() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorName(error));
}

__device__ inline float silu(float x) { return x / (1.0F + __expf(-x)); }

/// Writes y with its delta to `sums` and `silu` of that to `activated`, and leaves y alone; all are `[rows,
/// n_out]`. Base rows are in no tile of the plan, so they are written apart.
template <Element T>
__global__ void own_kernel(__grid_constant__ DeviceDelta<T> const delta, RowPlan const plan,
                           std::int32_t rows, std::int64_t n_out, T const* y, T* sums, T* activated) {
  extern __shared__ float4 shared[];
  auto const write = [&](std::int64_t at, float value) {
    sums[at] = from_f32<T>(value);
    activated[at] = from_f32<T>(silu(to_f32(sums[at])));
  };
  DeltaBlock<T> block(delta, shared);
  for (auto tile = static_cast<std::int32_t>(blockIdx.x); block.load(tile);
       tile += static_cast<std::int32_t>(gridDim.x)) {
    block.shrink();
    block.expand(Share{0, delta.output_tiles()}, [&](DeltaRun const& run) {
      std::int64_t const first = run.row * n_out + run.n;
#pragma unroll
      for (int e = 0; e < pack_elements; ++e) {  // unrolled, so that `run` stays in registers
        if (e < run.count) write(first + e, run.folded(to_f32(y[first + e]), e));
      }
    });
  }
  for (auto row = static_cast<std::int32_t>(blockIdx.x); row < rows;
       row += static_cast<std::int32_t>(gridDim.x)) {
    if (plan.row_slots[row] >= 0 && plan.row_slots[row] < plan.max_slots) continue;
    for (std::int64_t n = threadIdx.x; n < n_out; n += blockDim.x)
      write(row * n_out + n, to_f32(y[row * n_out + n]));
  }
}

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// What a launch gave.
template <class T>
struct OutputsOf {
  std::vector<T> y, activated;
};
using Outputs = OutputsOf<__nv_bfloat16>;

/// One batch on the GPU, and the launches of it. No stream but the memory's.
class OwnRun {
 public:
  using T = __nv_bfloat16;
  using Memory = tiny_model::Memory<CudaBackend>;

  OwnRun(Memory& memory, RouteTable<T> const& table, std::vector<std::int32_t> const& slots,
         std::vector<T> const& x, std::vector<T> const& base)
      : memory_(memory),
        machine_(tiny_model::expect(prepare<Delta<T>, TunedDelta<OwnTuning, T>>(0))),
        base_(base),
        x_(memory.allocate<T>(static_cast<std::int64_t>(x.size()))),
        y_(memory.allocate<T>(static_cast<std::int64_t>(base.size()))),
        sums_(memory.allocate<T>(static_cast<std::int64_t>(base.size()))),
        activated_(memory.allocate<T>(static_cast<std::int64_t>(base.size()))) {
    RowPlanLayout const layout{static_cast<std::int32_t>(slots.size()), table.max_slots};
    std::vector<RowGroup> plan(layout.bytes() / sizeof(RowGroup));  // for its alignment
    std::vector<std::int32_t> scratch(static_cast<std::size_t>(table.max_slots));
    if (build_row_plan(slots, layout.at(plan.data()), scratch) != Errc::ok)
      throw std::runtime_error("no plan for the rows");
    plan_ = memory.allocate<RowGroup>(static_cast<std::int64_t>(plan.size()));
    memory.upload(std::span<RowGroup const>(plan), plan_.data());
    memory.upload(std::span<T const>(x), x_.data());
    memory.synchronize();
    params_.x = x_.data();
    params_.x_row_stride = table.k_in;
    params_.rows = layout.capacity_rows;
    params_.plan = layout.at(plan_.data());
    params_.projections[0] = {table, y_.data(), table.n_out};
    params_.scratch_bytes = delta_scratch_bytes(params_, machine_);  // none where there are clusters
    scratch_ = memory.allocate<std::byte>(
        std::max<std::int64_t>(1, static_cast<std::int64_t>(params_.scratch_bytes)));
    params_.scratch = scratch_.data();
  }

  /// In the tuning that the library picks.
  [[nodiscard]] Outputs library() {
    reset();
    check(launch_delta(params_, machine_, memory_.stream()));
    return outputs(y_);
  }

  /// In the user's, where the architecture has clusters.
  [[nodiscard]] Outputs tuned() {
    if (!has_clusters(machine_.compute)) return library();
    reset();
    check(launch_delta_tuned<OwnTuning>(params_, machine_, memory_.stream()));
    return outputs(y_);
  }

  /// By the user's kernel.
  [[nodiscard]] Outputs own_kernel() {
    reset();
    DeviceDelta<T> const delta = tiny_model::expect(device_delta(params_));
    int const blocks = 3;  // fewer than there are tiles
    own_policy::own_kernel<T><<<blocks, 128, delta.shared_bytes(), memory_.stream()>>>(
        delta, params_.plan, params_.rows, params_.projections[0].table.n_out, y_.data(), sums_.data(),
        activated_.data());
    check(cudaGetLastError());
    return outputs(sums_);
  }

 private:
  void reset() { memory_.upload(std::span<T const>(base_), y_.data()); }

  Outputs outputs(tiny_model::Array<T, CudaBackend> const& y) {
    Outputs outputs{std::vector<T>(y.size()), std::vector<T>(y.size())};
    memory_.download(y.data(), std::span<T>(outputs.y));
    memory_.download(activated_.data(), std::span<T>(outputs.activated));
    return outputs;
  }

  Memory& memory_;
  Machine machine_;
  std::vector<T> base_;
  tiny_model::Array<T, CudaBackend> x_, y_, sums_, activated_;
  tiny_model::Array<RowGroup, CudaBackend> plan_;
  tiny_model::Array<std::byte, CudaBackend> scratch_;
  DeltaParams<T> params_;
};

}  // namespace own_policy
