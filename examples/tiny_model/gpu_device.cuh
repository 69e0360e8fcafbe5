// SPDX-License-Identifier: AGPL-3.0-only
//
// The tiny model on a GPU: one thread an item, cuBLAS for the base model's products, the library's kernels
// for the deltas, and a step captured as a CUDA graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <atlas/lora.hpp>

#include "memory.hpp"

namespace tiny_model {

inline void check(cudaError_t error, char const* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

inline void check(cublasStatus_t status, char const* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(call) + ": " + cublasGetStatusString(status));
}

[[nodiscard]] inline bool gpu_available() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

template <class Operation>
__global__ void run_items(Operation const operation, std::int64_t const count) {
  std::int64_t const item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item < count) operation(item);
}

/// An executable graph; calling it replays it on its stream.
class CudaGraph {
 public:
  CudaGraph(cudaGraphExec_t graph, cudaStream_t stream) : graph_(graph), stream_(stream) {}
  CudaGraph(CudaGraph&& other) noexcept
      : graph_(std::exchange(other.graph_, nullptr)), stream_(other.stream_) {}
  ~CudaGraph() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  void operator()() const { check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t graph_;
  cudaStream_t stream_;
};

template <atlas::lora::Element T>
class GpuDevice : public Memory<atlas::lora::CudaBackend> {
 public:
  using element = T;
  using Backend = atlas::lora::CudaBackend;
  using Graph = CudaGraph;
  using Projections = std::span<atlas::lora::DeltaProjection<T> const>;
  using ExpertProjections = std::span<atlas::lora::ExpertProjection<T> const>;

  static constexpr char const* kind = "gpu";
  /// How far float logits may be from PEFT's.
  static constexpr float float_limit = 1e-4F;

  [[nodiscard]] static std::string name() {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    return properties.name;
  }

  GpuDevice()
      : machine_(expect(
            atlas::lora::prepare<atlas::lora::RowPlanning, atlas::lora::Delta<T>, atlas::lora::ExpertPlanning,
                                 atlas::lora::ExpertDelta<T>, atlas::lora::OverlayEmbed<T>,
                                 atlas::lora::OverlayHead<T, float>, atlas::lora::RowDiff<T>>(0))) {
    check(cublasCreate(&cublas_), "cublasCreate");
    check(cublasSetStream(cublas_, stream()), "cublasSetStream");
    // A workspace of our own has the fixed address that captured products need.
    workspace_ = allocate<std::byte>(std::int64_t{32} << 20);
    check(cublasSetWorkspace(cublas_, workspace_.data(), workspace_.size()), "cublasSetWorkspace");
    check(cublasSetMathMode(cublas_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
  }
  ~GpuDevice() { cublasDestroy(cublas_); }

  /// Enqueues items 0 .. count - 1 of an operation of ops.hpp.
  template <class Operation>
  void run(Operation const& operation, std::int64_t count) {
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(64);
    config.gridDim = dim3(static_cast<unsigned>((count + 63) / 64));
    config.stream = stream();
    check(cudaLaunchKernelEx(&config, run_items<Operation>, operation, count), "cudaLaunchKernelEx");
  }

  /// y = x @ w^T; x `[rows, k_in]`, w `[n_out, k_in]`, y `[rows, n_out]` with a row stride of its own. cuBLAS
  /// is column-major, so it computes y^T = w @ x^T. Sums in f32, without TF32.
  template <class Y>
  void multiply(T const* x, T const* w, Y* y, std::int64_t y_row_stride, std::int64_t rows,
                std::int64_t n_out, std::int64_t k_in) {
    float const one = 1.0F, zero = 0.0F;
    int const k = static_cast<int>(k_in);
    check(cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n_out), static_cast<int>(rows), k,
                       &one, w, type_of<T>(), k, x, type_of<T>(), k, &zero, y, type_of<Y>(),
                       static_cast<int>(y_row_stride), CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  }

  /// Makes sure that the scratch suffices for such deltas; not while capturing.
  void reserve(atlas::lora::RowPlan const& plan, std::int32_t rows, Projections projections) {
    auto const bytes = atlas::lora::delta_scratch_bytes(params(plan, rows, nullptr, projections), machine_);
    if (bytes > scratch_.size()) scratch_ = allocate<std::byte>(static_cast<std::int64_t>(bytes));
  }

  /// Groups the rows of the step by slot, once for all its deltas.
  void plan_rows(atlas::lora::RowPlan const& plan, std::int32_t rows) {
    check(atlas::lora::launch_row_plan(plan, rows, machine_, stream()), "launch_row_plan");
  }

  /// Adds the deltas of projections that share x `[rows, k_in]`, in one launch.
  void add_deltas(atlas::lora::RowPlan const& plan, std::int32_t rows, T const* x, Projections projections) {
    check(atlas::lora::launch_delta(params(plan, rows, x, projections), machine_, stream()), "launch_delta");
  }

  /// Puts the embedding rows that are a row's own adapter's over what the gather left in h `[rows, hidden]`.
  void replace_rows(atlas::lora::OverlayTable<T> const& table, atlas::lora::RowPlan const& plan,
                    std::int32_t rows, std::int32_t const* tokens, T* h) {
    atlas::lora::OverlayEmbedParams<T> params;
    params.h = h;
    params.h_row_stride = table.hidden;
    params.rows = rows;
    params.tokens = tokens;
    params.row_slots = plan.row_slots;
    params.table = table;
    check(atlas::lora::launch_overlay_embed(params, machine_, stream()), "launch_overlay_embed");
  }

  /// Recomputes the logits `[rows, vocab]` whose head rows are a row's own adapter's.
  void recompute_logits(atlas::lora::OverlayTable<T> const& table, atlas::lora::RowPlan const& plan,
                        std::int32_t rows, T const* x, float* logits) {
    atlas::lora::OverlayHeadParams<T, float> params;
    params.x = x;
    params.x_row_stride = table.hidden;
    params.logits = logits;
    params.logits_row_stride = table.vocab;
    params.rows = rows;
    params.plan = plan;
    params.table = table;
    check(atlas::lora::launch_overlay_head(params, machine_, stream()), "launch_overlay_head");
  }

  /// A table of the base model's, `[vocab, hidden]`, for adapters to be compared with.
  [[nodiscard]] atlas::lora::DeviceServedTable<T> served(T const* table, std::int64_t hidden) {
    synchronize();
    return expect(atlas::lora::DeviceServedTable<T>::create(table, hidden, machine_, backend()));
  }

  /// The same for experts.
  void reserve_experts(atlas::lora::ExpertPlan const& plan, ExpertProjections projections) {
    auto const bytes = atlas::lora::delta_scratch_bytes(
        expert_params(plan, plan.capacity_rows, {}, nullptr, projections), machine_);
    if (bytes > scratch_.size()) scratch_ = allocate<std::byte>(static_cast<std::int64_t>(bytes));
  }

  /// Groups a layer's rows by slot and expert, once for gate, up and down.
  void plan_experts(atlas::lora::ExpertPlan const& plan, atlas::lora::ExpertRows const& rows) {
    check(atlas::lora::launch_expert_plan(plan, rows, machine_, stream()), "launch_expert_plan");
  }

  /// Adds the deltas of experts' linears that read the same x, in one launch.
  void add_expert_deltas(atlas::lora::ExpertPlan const& plan, atlas::lora::ExpertRows const& rows,
                         atlas::lora::ExpertInput const& input, T const* x, ExpertProjections projections) {
    check(atlas::lora::launch_expert_delta(expert_params(plan, rows.rows, input, x, projections), machine_,
                                           stream()),
          "launch_expert_delta");
  }

  /// The graph of what `step` enqueues.
  template <class Step>
  [[nodiscard]] Graph capture(Step step) {
    check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    step();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream(), &graph), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    cudaError_t const error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
    return Graph(executable, stream());
  }

 private:
  template <class V>
  static constexpr cudaDataType_t type_of() {
    return std::is_same_v<V, float> ? CUDA_R_32F : std::is_same_v<V, __half> ? CUDA_R_16F : CUDA_R_16BF;
  }

  atlas::lora::DeltaParams<T> params(atlas::lora::RowPlan const& plan, std::int32_t rows, T const* x,
                                     Projections projections) const {
    atlas::lora::DeltaParams<T> params;
    params.x = x;
    params.x_row_stride = projections[0].table.k_in;
    params.rows = rows;
    params.plan = plan;
    params.num_projections = static_cast<std::int32_t>(projections.size());
    std::copy(projections.begin(), projections.end(), params.projections);
    params.scratch = scratch_.data();
    params.scratch_bytes = scratch_.size();
    return params;
  }

  atlas::lora::ExpertDeltaParams<T> expert_params(atlas::lora::ExpertPlan const& plan, std::int32_t rows,
                                                  atlas::lora::ExpertInput const& input, T const* x,
                                                  ExpertProjections projections) const {
    atlas::lora::ExpertDeltaParams<T> params;
    params.x = x;
    params.x_row_stride = projections[0].table.k_in;
    params.input = input;
    params.rows = rows;
    params.plan = plan;
    params.num_projections = static_cast<std::int32_t>(projections.size());
    std::copy(projections.begin(), projections.end(), params.projections);
    params.scratch = scratch_.data();
    params.scratch_bytes = scratch_.size();
    return params;
  }

  atlas::lora::Machine machine_;
  cublasHandle_t cublas_ = nullptr;
  Array<std::byte, Backend> workspace_, scratch_;
};

}  // namespace tiny_model
