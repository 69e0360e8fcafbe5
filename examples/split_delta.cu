// SPDX-License-Identifier: AGPL-3.0-only
//
// What does a delta cost after its base product, and what if its first half runs beside it? A base product is
// bound by its weights' way from memory and leaves room for a few more bytes: an engine can launch the shrink
// on a side stream under it, and only the expand and fold after it. For a few numbers of rows this program
// times the base product alone, with the whole delta after it, and with the split form around it, all weights
// from device memory as in serving, and says what each form adds. Both forms must leave the same bits.
//
//   split_delta          prints a table; fails when the bits differ
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <atlas/lora.hpp>

#include "../tools/bench_support.cuh"

namespace {

using namespace atlas::lora;
using namespace atlas_bench;

constexpr std::int64_t k_in = 4096, n_out = 4096;
constexpr std::int32_t rank = 16, adapters = 32;
constexpr int layers = 16;  // 32 MB of base weights each, so that none is in the cache when its turn comes
constexpr std::int64_t pair = rank * (k_in + n_out);  // elements

/// Layers of one linear and its adapters, the rows of a step, and the forms of a delta beside the base
/// product.
class Step {
 public:
  Step(std::int32_t rows, Machine const& machine) : rows_(rows), machine_(machine) {
    weights_ = memory_.filled(layers * n_out * k_in, 1, 0.02F);
    pairs_ = memory_.filled(layers * adapters * pair, 2, 0.05F);
    x_ = memory_.filled(rows * k_in, 3, 1.0F);
    y_ = memory_.filled(rows * n_out, 4, 1.0F);
    xa_ = memory_.filled(rows * std::int64_t{rank}, 5, 1.0F);
    std::vector<RouteCell<T>> cells;
    for (int i = 0; i < layers * adapters; ++i) {
      T const* const a = pairs_ + i * pair;
      cells.push_back({a, a + rank * k_in, nullptr, 2.0F, rank, rank, 0});
    }
    cells_ = memory_.uploaded(cells);
    make_plan();
    scratch_bytes_ = delta_scratch_bytes(delta_params(0), machine);
    scratch_ = memory_.allocate(scratch_bytes_);
    // The first half is the smaller one: whatever the base product leaves free is its.
    int least = 0, greatest = 0;
    CHECKED(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECKED(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest));
    CHECKED(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming));
    CHECKED(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming));
    CHECKED(cublasCreate(&cublas_));
    CHECKED(cublasSetStream(cublas_, stream_));
    CHECKED(cublasSetWorkspace(cublas_, memory_.allocate(32 << 20), 32 << 20));
    CHECKED(cudaStreamSynchronize(stream_));
  }
  ~Step() {
    static_cast<void>(cublasDestroy(cublas_));
    static_cast<void>(cudaEventDestroy(fork_));
    static_cast<void>(cudaEventDestroy(join_));
    static_cast<void>(cudaStreamDestroy(side_));
  }
  Step(Step const&) = delete;
  Step& operator=(Step const&) = delete;

  /// Microseconds of one layer, from one graph of all layers.
  double base_us() {
    return median_us(stream_, layers, [&](int l) { base(l); });
  }
  double whole_us() {
    return median_us(stream_, layers, [&](int l) {
      base(l);
      CHECKED(launch_delta(delta_params(l), machine_, stream_));
    });
  }
  double split_us() {
    return median_us(stream_, layers, [&](int l) {
      CHECKED(cudaEventRecord(fork_, stream_));
      CHECKED(cudaStreamWaitEvent(side_, fork_));
      CHECKED(launch_shrink(shrink_params(l), machine_, side_));
      CHECKED(cudaEventRecord(join_, side_));
      base(l);
      CHECKED(cudaStreamWaitEvent(stream_, join_));
      CHECKED(launch_expand(expand_params(l), machine_, stream_));
    });
  }

  /// What the last layer of the last replay left in y, as bits.
  [[nodiscard]] std::vector<std::uint16_t> y() const {
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows_ * n_out));
    CHECKED(cudaMemcpy(bits.data(), y_, bits.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return bits;
  }

 private:
  void make_plan() {
    std::vector<std::int32_t> slots;
    for (std::int32_t row = 0; row < rows_; ++row) slots.push_back(row % adapters);
    RowPlanLayout const layout{rows_, adapters};
    plan_ = layout.at(memory_.allocate(layout.bytes()));
    CHECKED(
        cudaMemcpy(plan_.row_slots, slots.data(), slots.size() * sizeof(slots[0]), cudaMemcpyHostToDevice));
    CHECKED(launch_row_plan(plan_, rows_, machine_, stream_));
  }

  [[nodiscard]] RouteTable<T> table(int layer) const {
    return {cells_ + layer * adapters, sizeof(RouteCell<T>), adapters, rank, k_in, n_out};
  }
  // Plan and tables were written long before any launch: the promise of `inputs_settled` holds for all of
  // them.
  [[nodiscard]] DeltaParams<T> delta_params(int layer) const {
    DeltaParams<T> p;
    p.x = x_;
    p.x_row_stride = k_in;
    p.rows = rows_;
    p.plan = plan_;
    p.projections[0] = {table(layer), y_, n_out};
    p.scratch = scratch_;
    p.scratch_bytes = scratch_bytes_;
    p.inputs_settled = true;
    return p;
  }
  [[nodiscard]] ShrinkParams<T> shrink_params(int layer) const {
    ShrinkParams<T> p;
    p.x = x_;
    p.x_row_stride = k_in;
    p.rows = rows_;
    p.plan = plan_;
    p.tables[0] = table(layer);
    p.xa = xa_;
    p.xa_row_stride = rank;
    p.inputs_settled = true;
    return p;
  }
  [[nodiscard]] ExpandParams<T> expand_params(int layer) const {
    ExpandParams<T> p;
    p.xa = xa_;
    p.xa_row_stride = rank;
    p.rows = rows_;
    p.plan = plan_;
    p.projections[0] = {table(layer), y_, n_out};
    p.inputs_settled = true;
    return p;
  }

  /// y = x @ W^T.
  void base(int layer) {
    float const one = 1.0F, zero = 0.0F;
    CHECKED(cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, n_out, rows_, k_in, &one,
                         weights_ + layer * n_out * k_in, CUDA_R_16BF, k_in, x_, CUDA_R_16BF, k_in, &zero, y_,
                         CUDA_R_16BF, n_out, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

  std::int32_t rows_;
  Machine const& machine_;
  DeviceMemory memory_;
  cudaStream_t stream_ = memory_.stream();
  cudaStream_t side_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  cublasHandle_t cublas_ = nullptr;
  T* weights_ = nullptr;
  T* pairs_ = nullptr;
  T* x_ = nullptr;
  T* y_ = nullptr;
  T* xa_ = nullptr;
  RouteCell<T>* cells_ = nullptr;
  RowPlan plan_;
  void* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
};

/// Times one number of rows and prints a line; whether the forms agree.
bool measure(std::int32_t rows, Machine const& machine) {
  Step step(rows, machine);
  double const base = step.base_us();
  auto const without = step.y();
  double const whole = step.whole_us();
  auto const of_whole = step.y();
  double const split = step.split_us();
  bool const same = step.y() == of_whole;
  bool const adapted = without != of_whole;
  char const* const bits = !same ? "DIFFERENT" : adapted ? "the same" : "NO DELTA";
  std::printf("%6d %9d %10.2f %14.2f %6.2f %14.2f %6.2f   %s\n", rows, std::min(rows, adapters), base, whole,
              whole - base, split, split - base, bits);
  return same && adapted;
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {
    std::printf("split_delta: takes no arguments\n");
    return EXIT_SUCCESS;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("split_delta: there is no GPU that this program can use\n");
    return 77;  // which test runners read as "not run here"
  }
  auto const machine = prepare<Delta<T>, SplitDelta<T>, RowPlanning>(0);
  if (!machine) stop(machine.error().message);
  std::printf("%lld -> %lld, rank %d, bf16, microseconds a layer\n", static_cast<long long>(k_in),
              static_cast<long long>(n_out), rank);
  std::printf("  rows  adapters  base alone   whole after  +      split around  +       bits of the forms\n");
  bool good = true;
  for (std::int32_t const rows : {1, 8, 64, 256}) good &= measure(rows, *machine);
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
