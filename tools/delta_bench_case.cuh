// SPDX-License-Identifier: AGPL-3.0-only
//
// One cell of the delta benchmark: its operands in device memory, and what is timed on them. Only
// delta_bench.cu includes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <atlas/lora.hpp>

#include "bench_support.cuh"

namespace delta_bench {

using namespace atlas::lora;
using namespace atlas_bench;

/// What is timed: one shape with one mix of adapters, or a decoder layer's four launches.
struct Cell {
  std::int64_t k_in;
  std::vector<std::int64_t> n_out;  ///< of the projections that share x; none for a decoder layer
  std::int32_t rank;
  std::int32_t rows;
  std::string
      adapters;  ///< same, distinct (at most 64), zipf (32, skewed), half (every second row base), seg8, base
  std::int32_t pool_rank = 0;  ///< the largest rank that the pool takes; 0 for `rank`

  [[nodiscard]] bool is_layer() const { return n_out.empty(); }
  [[nodiscard]] std::int32_t max_rank() const { return std::max(rank, pool_rank); }
  [[nodiscard]] std::string name() const {
    std::string text = is_layer() ? "layer of Llama-3.1-8B" : std::to_string(k_in) + "->";
    for (std::size_t p = 0; p < n_out.size(); ++p) text += (p == 0 ? "" : "+") + std::to_string(n_out[p]);
    text += " r" + std::to_string(rank) + (pool_rank == 0 ? "" : " of " + std::to_string(pool_rank));
    return text + " rows" + std::to_string(rows) + " " + adapters;
  }
  /// What an engine launches, in its order: of a decoder layer q, k and v; o; gate and up; down.
  [[nodiscard]] std::vector<Cell> launches() const {
    if (!is_layer()) return {*this};
    return {{4096, {4096, 1024, 1024}, rank, rows, adapters},
            {4096, {4096}, rank, rows, adapters},
            {4096, {14336, 14336}, rank, rows, adapters},
            {14336, {4096}, rank, rows, adapters}};
  }
  [[nodiscard]] std::int64_t outputs() const {
    std::int64_t sum = 0;
    for (std::int64_t const n : n_out) sum += n;
    return sum;
  }
};

inline std::vector<std::int32_t> row_slots(Cell const& cell) {
  std::vector<std::int32_t> slots(static_cast<std::size_t>(cell.rows));
  double total = 0.0;
  for (int i = 0; i < 32; ++i) total += 1.0 / (i + 1);
  std::uint64_t state = 12345;
  for (std::int32_t r = 0; r < cell.rows; ++r) {
    std::int32_t& slot = slots[static_cast<std::size_t>(r)];
    if (cell.adapters == "same") slot = 0;
    if (cell.adapters == "distinct") slot = r % 64;
    if (cell.adapters == "half") slot = r % 2 == 1 ? -1 : r / 2 % 64;
    if (cell.adapters == "base") slot = -1;
    if (cell.adapters == "seg8") slot = static_cast<std::int32_t>(std::int64_t{8} * r / cell.rows);
    if (cell.adapters == "zipf") {
      state = state * 6364136223846793005u + 1442695040888963407u;
      double draw = static_cast<double>(state >> 11) / 9007199254740992.0 * total;
      for (slot = 0; slot < 31 && draw > 1.0 / (slot + 1); ++slot) draw -= 1.0 / (slot + 1);
    }
  }
  return slots;
}

struct Tables {
  RouteTable<T> table[max_projections];
};

/// Reads plan and cells as the delta does, then the weights of every group with 16-byte loads, and nothing
/// else.
template <int Loads>
__global__ void __launch_bounds__(256)
    touch_kernel(RowPlan plan, __grid_constant__ Tables const tables, int count, int rank, int* sink) {
  unsigned seen = 0;
  auto const blocks = static_cast<int>(gridDim.x);
  int const groups = plan.header->num_groups;
  int before = 0;
  for (int t = 0; t < count; ++t) {
    RouteTable<T> const& table = tables.table[t];
    auto const of_a = rank * static_cast<int>(table.k_in) / 8;
    auto const of_b = static_cast<int>(table.n_out) * rank / 8;
    int const runs_a = (of_a + Loads * 256 - 1) / (Loads * 256);
    int const runs = runs_a + (of_b + Loads * 256 - 1) / (Loads * 256);
    // Blocks go on where the last table's runs ended.
    for (int turn = (static_cast<int>(blockIdx.x) + blocks - before % blocks) % blocks;
         turn < runs * plan.max_groups; turn += blocks) {
      RowGroup const group = plan.groups[turn / runs];
      if (group.count == 0) break;
      RouteCell<T> const cell = detail::load_cell(table.cell(group.slot));
      bool const is_a = turn % runs < runs_a;
      auto const* const from = reinterpret_cast<uint4 const*>(is_a ? cell.a : cell.b);
      int const all = is_a ? of_a : of_b;
      int const first =
          (is_a ? turn % runs : turn % runs - runs_a) * Loads * 256 + static_cast<int>(threadIdx.x);
      uint4 values[Loads];
#pragma unroll
      for (int i = 0; i < Loads; ++i)
        values[i] = first + i * 256 < all ? __ldcs(from + first + i * 256) : uint4{};
#pragma unroll
      for (int i = 0; i < Loads; ++i) seen ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
    }
    before += runs * groups;
  }
  detail::enter();
  if (seen == 0x12345678u) *sink = 1;
}

/// Adapters that occur in a launch.
inline std::int32_t adapters_of(Cell const& launch) {
  std::set<std::int32_t> adapters;
  for (std::int32_t const slot : row_slots(launch)) {
    if (slot >= 0) adapters.insert(slot);
  }
  return static_cast<std::int32_t>(adapters.size());
}

/// Bytes of one layer's weights of the adapters that occur in a launch.
inline double layer_bytes(Cell const& launch) {
  double bytes = 0.0;
  for (std::int64_t const n : launch.n_out) bytes += 2.0 * launch.rank * static_cast<double>(launch.k_in + n);
  return bytes * std::max(adapters_of(launch), 1);
}

/// Layer copies with which each of a cell's launches passes 300 MB, so that weights come from memory.
inline int layer_copies(Cell const& cell) {
  double least = 1e30;
  for (Cell const& launch : cell.launches()) least = std::min(least, layer_bytes(launch));
  return static_cast<int>(std::clamp(300e6 / least, 8.0, 400.0));
}

/// One launch's operands in `layers` copies of every adapter.
class Case {
 public:
  explicit Case(Cell const& cell, int layers, Machine const& machine, DeviceMemory& memory)
      : cell_(cell), machine_(machine), slots_(row_slots(cell)), layers_(layers), memory_(memory) {
    for (std::int32_t const slot : slots_) {
      if (slot >= 0) ++rows_of_[slot];
    }
    num_slots_ = rows_of_.empty() ? 1 : rows_of_.rbegin()->first + 1;
    for (std::int64_t const n : cell.n_out) pair_ += cell.max_rank() * (cell.k_in + n);
    weights_ = memory_.filled(static_cast<std::int64_t>(layers_) * num_slots_ * pair_, 1, 0.05F);
    x_ = memory_.filled(cell.rows * cell.k_in, 2, 1.0F);
    y_ = memory_.filled(cell.rows * cell.outputs(), 3, 1.0F);
    xa_ = memory_.filled(static_cast<std::int64_t>(cell.rows) * cell.rank, 4, 1.0F);
    make_tables();
    make_plan();
    scratch_bytes_ = two_launch_scratch_bytes(params(0, true));
    scratch_ = memory_.allocate(scratch_bytes_);
    sink_ = static_cast<int*>(memory_.allocate(sizeof(int)));
    CHECKED(cublasCreate(&cublas_));
    CHECKED(cublasSetStream(cublas_, stream_));
    CHECKED(cublasSetWorkspace(cublas_, memory_.allocate(32 << 20), 32 << 20));
    CHECKED(cudaStreamSynchronize(stream_));
  }
  ~Case() { static_cast<void>(cublasDestroy(cublas_)); }
  Case(Case const&) = delete;
  Case& operator=(Case const&) = delete;

  [[nodiscard]] bool adapted() const { return !rows_of_.empty(); }

  /// Bytes of x, read once, and of y, read and written.
  [[nodiscard]] double row_bytes() const {
    return 2.0 * cell_.rows * static_cast<double>(cell_.k_in + 2 * cell_.outputs());
  }
  /// Multiplications and additions of the rows that have an adapter.
  [[nodiscard]] double operations() const {
    double a_row = 0.0;
    for (std::int64_t const n : cell_.n_out) a_row += 2.0 * cell_.rank * static_cast<double>(cell_.k_in + n);
    return a_row * static_cast<double>(
                       std::count_if(slots_.begin(), slots_.end(), [](auto slot) { return slot >= 0; }));
  }

  /// Enqueues one layer's delta, by the form's launch.
  void ours(int layer, bool settled) { CHECKED(launch_delta(params(layer, settled), machine_, stream_)); }
  void two_launches(int layer) {
    CHECKED(launch_delta_in_two_launches(params(layer, true), machine_, stream_));
  }

  /// Enqueues a launch that only reads the same weights.
  void touch(int layer, TouchShape shape) {
    if (shape.loads == 1) launch_touch(touch_kernel<1>, shape.blocks, layer);
    if (shape.loads == 4) launch_touch(touch_kernel<4>, shape.blocks, layer);
    if (shape.loads == 8) launch_touch(touch_kernel<8>, shape.blocks, layer);
  }
  /// The fastest shape of such a launch.
  TouchShape best_touch() {
    TouchShape best;
    double least = 1e30;
    for (int const blocks : {66, 132, 264, 528}) {
      for (int const loads : {1, 4, 8}) {
        TouchShape const shape{loads, blocks};
        double const us = median_us(
            stream_, layers_, [&](int l) { touch(l, shape); }, Replays::quick);
        if (us < least) best = shape;
        least = std::min(least, us);
      }
    }
    return best;
  }

  /// Enqueues two matrix products an adapter and projection, on rows sorted by adapter.
  void cublas(int layer) {
    for (int p = 0; p < static_cast<int>(cell_.n_out.size()); ++p) {
      std::int64_t row = 0;
      for (auto const& [slot, rows] : rows_of_) {
        multiply(layer, p, slot, row, rows);
        row += rows;
      }
    }
  }

  /// Relative error of the first layer's delta, some rows against double precision; resets y.
  double error() {
    std::int64_t const n_all = cell_.outputs();
    std::vector<T> const before = download(y_, cell_.rows * n_all);
    CHECKED(launch_delta(params(0, false), machine_, stream_));
    CHECKED(cudaStreamSynchronize(stream_));
    std::vector<T> const after = download(y_, cell_.rows * n_all);
    CHECKED(cudaMemcpy(y_, before.data(), before.size() * sizeof(T), cudaMemcpyHostToDevice));
    std::vector<T> const x = download(x_, cell_.rows * cell_.k_in);
    double error = 0.0;
    double size = 0.0;
    for (std::int32_t r = 0; r < cell_.rows; r += std::max(1, cell_.rows / 3)) {
      std::int64_t first = 0;
      for (std::size_t p = 0; p < cell_.n_out.size(); ++p) {
        row_error(r, p, first, x, before, after, error, size);
        first += cell_.n_out[p];
      }
    }
    return size == 0.0 ? 0.0 : std::sqrt(error / size);
  }

 private:
  [[nodiscard]] RouteCell<T> cell_of(int layer, std::size_t projection, std::int32_t slot) const {
    T const* base = weights_ + (static_cast<std::int64_t>(layer) * num_slots_ + slot) * pair_;
    for (std::size_t p = 0; p < projection; ++p) base += cell_.max_rank() * (cell_.k_in + cell_.n_out[p]);
    return {base, base + cell_.rank * cell_.k_in, nullptr, 2.0F, cell_.rank, cell_.rank, 0};
  }

  void make_tables() {
    std::vector<RouteCell<T>> cells;
    for (int l = 0; l < layers_; ++l) {
      for (std::size_t p = 0; p < cell_.n_out.size(); ++p) {
        for (std::int32_t s = 0; s < num_slots_; ++s) cells.push_back(cell_of(l, p, s));
      }
    }
    RouteCell<T>* const device = memory_.uploaded(cells);
    for (int l = 0; l < layers_; ++l) {
      Tables tables;
      for (std::size_t p = 0; p < cell_.n_out.size(); ++p) {
        auto const row = static_cast<std::int64_t>(l) * static_cast<std::int64_t>(cell_.n_out.size()) +
                         static_cast<std::int64_t>(p);
        tables.table[p] = {device + row * num_slots_, sizeof(RouteCell<T>), num_slots_,
                           cell_.max_rank(),          cell_.k_in,           cell_.n_out[p]};
      }
      tables_.push_back(tables);
    }
  }

  void make_plan() {
    RowPlanLayout const layout{cell_.rows, num_slots_};
    plan_ = layout.at(memory_.allocate(layout.bytes()));
    CHECKED(cudaMemcpy(plan_.row_slots, slots_.data(), slots_.size() * sizeof(slots_[0]),
                       cudaMemcpyHostToDevice));
    CHECKED(launch_row_plan(plan_, cell_.rows, machine_, stream_));
  }

  [[nodiscard]] DeltaParams<T> params(int layer, bool settled) const {
    DeltaParams<T> p;
    p.x = x_;
    p.x_row_stride = cell_.k_in;
    p.rows = cell_.rows;
    p.plan = plan_;
    p.num_projections = static_cast<std::int32_t>(cell_.n_out.size());
    std::int64_t first = 0;
    for (std::size_t i = 0; i < cell_.n_out.size(); ++i) {
      p.projections[i] = {tables_[static_cast<std::size_t>(layer)].table[i], y_ + first, cell_.outputs()};
      first += cell_.n_out[i];
    }
    p.scratch = scratch_;
    p.scratch_bytes = scratch_bytes_;
    p.inputs_settled = settled;
    p.expected_slots = adapters_;
    return p;
  }

  template <class Kernel>
  void launch_touch(Kernel kernel, int blocks, int layer) {
    CHECKED(detail::launch(kernel, detail::LaunchShape{blocks, 256, 1, 0}, machine_, stream_, plan_,
                           tables_[static_cast<std::size_t>(layer)], static_cast<int>(cell_.n_out.size()),
                           cell_.rank, sink_));
  }

  void multiply(int layer, int projection, std::int32_t slot, std::int64_t row, int rows) {
    auto const p = static_cast<std::size_t>(projection);
    RouteCell<T> const cell = cell_of(layer, p, slot);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < p; ++i) first += cell_.n_out[i];
    auto const n_out = static_cast<int>(cell_.n_out[p]);
    auto const k_in = static_cast<int>(cell_.k_in);
    float const one = 1.0F;
    float const zero = 0.0F;
    CHECKED(cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, cell.rank, rows, k_in, &one, cell.a, CUDA_R_16BF,
                         k_in, x_ + row * cell_.k_in, CUDA_R_16BF, k_in, &zero, xa_, CUDA_R_16BF, cell.rank,
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    CHECKED(cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, n_out, rows, cell.rank, &cell.scale, cell.b,
                         CUDA_R_16BF, cell.b_row_stride, xa_, CUDA_R_16BF, cell.rank, &one,
                         y_ + row * cell_.outputs() + first, CUDA_R_16BF, static_cast<int>(cell_.outputs()),
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

  void row_error(std::int32_t row, std::size_t p, std::int64_t first, std::vector<T> const& x,
                 std::vector<T> const& before, std::vector<T> const& after, double& error,
                 double& size) const {
    std::int32_t const slot = slots_[static_cast<std::size_t>(row)];
    if (slot < 0) return;
    RouteCell<T> const cell = cell_of(0, p, slot);
    std::vector<T> const a = download(cell.a, cell.rank * cell_.k_in);
    std::vector<T> const b = download(cell.b, cell.rank * cell_.n_out[p]);
    std::vector<double> xa(static_cast<std::size_t>(cell.rank), 0.0);
    for (std::size_t i = 0; i < a.size(); ++i) {
      auto const k = static_cast<std::int64_t>(i) % cell_.k_in;
      xa[i / static_cast<std::size_t>(cell_.k_in)] +=
          static_cast<double>(to_f32(a[i])) * to_f32(x[static_cast<std::size_t>(row * cell_.k_in + k)]);
    }
    for (std::int64_t n = 0; n < cell_.n_out[p]; ++n) {
      double delta = 0.0;
      for (std::int32_t j = 0; j < cell.rank; ++j) {
        delta += xa[static_cast<std::size_t>(j)] * to_f32(b[static_cast<std::size_t>(n * cell.rank + j)]);
      }
      auto const i = static_cast<std::size_t>(row * cell_.outputs() + first + n);
      double const want = to_f32(before[i]) + static_cast<double>(cell.scale) * delta;
      error += (to_f32(after[i]) - want) * (to_f32(after[i]) - want);
      size += want * want;
    }
  }

  Cell const& cell_;
  std::int32_t adapters_ = adapters_of(cell_);
  Machine const& machine_;
  std::vector<std::int32_t> slots_;
  std::map<std::int32_t, int> rows_of_;  ///< rows of each slot that occurs
  std::int32_t num_slots_ = 0;
  std::int64_t pair_ = 0;  ///< elements of one adapter's pairs in one layer
  int layers_;
  DeviceMemory& memory_;
  cudaStream_t stream_ = memory_.stream();
  cublasHandle_t cublas_ = nullptr;
  T* weights_ = nullptr;
  T* x_ = nullptr;
  T* y_ = nullptr;
  T* xa_ = nullptr;
  std::vector<Tables> tables_;
  RowPlan plan_;
  void* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
  int* sink_ = nullptr;
};

}  // namespace delta_bench
