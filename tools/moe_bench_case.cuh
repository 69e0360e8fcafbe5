// SPDX-License-Identifier: AGPL-3.0-only
//
// One cell of the experts' benchmark: its operands in device memory, and what is timed on them. Only
// moe_bench.cu includes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench_support.cuh"

namespace moe_bench {

using namespace atlas_bench;

/// What is timed: one layer's linears that read the same x, with one routing.
struct Cell {
  char const* op;  ///< moe_gather: rows as tokens chose them; moe_grouped: sorted by expert
  std::int32_t experts, top_k, tokens, adapters, rank;
  std::int64_t k_in;
  std::vector<std::int64_t> n_out;
  bool own_rows;  ///< down: x has a row for each row of y

  [[nodiscard]] bool sorted() const { return std::string(op) == "moe_grouped"; }
  [[nodiscard]] std::int32_t rows() const { return tokens * top_k; }
  [[nodiscard]] std::int64_t outputs() const {
    std::int64_t sum = 0;
    for (std::int64_t const n : n_out) sum += n;
    return sum;
  }
  [[nodiscard]] std::string name() const {
    std::string text = std::string(op) + " " + std::to_string(k_in) + "->";
    for (std::size_t p = 0; p < n_out.size(); ++p) text += (p == 0 ? "" : "+") + std::to_string(n_out[p]);
    return text + " r" + std::to_string(rank) + " top" + std::to_string(top_k) + " of " +
           std::to_string(experts) + " tokens" + std::to_string(tokens) + " adapters" +
           std::to_string(adapters);
  }
};

struct Tables {
  ExpertTable<T> table[max_projections];
};

/// Reads plan and cells as the delta does, then the weights of every group with 16-byte loads, and nothing
/// else. The plan has one group for each pair.
template <int Loads>
__global__ void __launch_bounds__(256)
    touch_kernel(ExpertPlan plan, __grid_constant__ Tables const tables, int count, int rank, int* sink) {
  unsigned seen = 0;
  std::int64_t const groups = plan.header->num_groups;
  std::int64_t before = 0;
  for (int t = 0; t < count; ++t) {
    ExpertTable<T> const& table = tables.table[t];
    std::int64_t const of_a = rank * table.k_in / 8;
    std::int64_t const of_b = table.n_out * rank / 8;
    std::int64_t const runs_a = divide_up(of_a, Loads * 256);
    std::int64_t const runs = runs_a + divide_up(of_b, Loads * 256);
    // Blocks go on where the last table's runs ended.
    for (std::int64_t r = (blockIdx.x + gridDim.x - before % gridDim.x) % gridDim.x; r < runs * groups;
         r += gridDim.x) {
      ExpertGroup const& group = plan.groups[r / runs];
      RouteCell<T> const cell = table.find(group.slot, group.expert);
      bool const is_a = r % runs < runs_a;
      auto const* const from = reinterpret_cast<uint4 const*>(is_a ? cell.a : cell.b);
      std::int64_t const all = is_a ? of_a : of_b;
      std::int64_t const first = (is_a ? r % runs : r % runs - runs_a) * Loads * 256 + threadIdx.x;
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

/// One cell's operands: enough layer copies of the pairs that occur to pass 300 MB, so that weights come from
/// memory.
class Case {
 public:
  explicit Case(Cell const& cell, Machine const& machine) : cell_(cell), machine_(machine) {
    route();
    for (std::int64_t const n : cell.n_out) pair_ += cell.rank * (cell.k_in + n);
    double const bytes = static_cast<double>(places_.size()) * static_cast<double>(pair_) * 2;
    layers_ = static_cast<int>(std::clamp(300e6 / bytes, 2.0, 400.0));
    weights_ = memory_.filled(static_cast<std::int64_t>(layers_) * std::ssize(places_) * pair_, 1, 0.05F);
    x_ = memory_.filled(x_rows() * cell.k_in, 2, 1.0F);
    y_ = memory_.filled(cell.rows() * cell.outputs(), 3, 1.0F);
    make_tables();
    plan_ = make_plan(rows_);
    pairs_plan_ = make_plan(pair_rows_);
    scratch_bytes_ = two_launch_scratch_bytes(params(0, true));
    scratch_ = memory_.allocate(scratch_bytes_);
    sink_ = static_cast<int*>(memory_.allocate(sizeof(int)));
    CHECKED(cudaStreamSynchronize(memory_.stream()));
  }

  [[nodiscard]] std::int64_t x_rows() const { return cell_.own_rows ? cell_.rows() : cell_.tokens; }

  /// Microseconds of one delta, by the form's launch.
  double ours(bool settled) {
    return time([&](int l) { CHECKED(launch_expert_delta(params(l, settled), machine_, memory_.stream())); });
  }
  double two_launches() {
    return time([&](int l) {
      CHECKED(launch_expert_delta_in_two_launches(params(l, true), machine_, memory_.stream()));
    });
  }
  /// The launch that groups the rows.
  double plan() {
    return time([&](int) { CHECKED(launch_expert_plan(plan_, rows_, machine_, memory_.stream())); });
  }
  /// A launch that only reads the same weights: the fastest of several shapes.
  double touch() {
    double least = 1e30;
    TouchShape best;
    for (int const blocks : {66, 132, 264, 528}) {
      for (int const loads : {1, 4, 8}) {
        TouchShape const shape{loads, blocks};
        double const us = time([&](int l) { touch(l, shape); }, Replays::quick);
        if (us < least) best = shape;
        least = std::min(least, us);
      }
    }
    return time([&](int l) { touch(l, best); });
  }

  /// Relative error of some rows against double precision.
  double error() {
    std::vector<std::int32_t> rows;
    for (std::int32_t row = 0; row < cell_.rows(); row += std::max(1, cell_.rows() / 3)) rows.push_back(row);
    std::int64_t const n_all = cell_.outputs();
    std::vector<std::vector<T>> before;
    for (std::int32_t const row : rows) before.push_back(download(y_ + row * n_all, n_all));
    CHECKED(launch_expert_delta(params(0, false), machine_, memory_.stream()));
    CHECKED(cudaStreamSynchronize(memory_.stream()));
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::vector<T> const after = download(y_ + rows[i] * n_all, n_all);
      std::int64_t first = 0;
      for (std::size_t p = 0; p < cell_.n_out.size(); ++p) {
        row_error(rows[i], p, first, before[i], after, error, size);
        first += cell_.n_out[p];
      }
    }
    return size == 0.0 ? 0.0 : std::sqrt(error / size);
  }

 private:
  using Key = std::pair<std::int32_t, std::int32_t>;  // slot and expert

  /// Tokens take turns among the adapters and choose `top_k` different experts each.
  void route() {
    std::uint64_t state = 12345;
    auto const draw = [&state](std::int32_t n) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(n));
    };
    std::vector<std::int32_t> slots, ids;
    for (std::int32_t t = 0; t < cell_.tokens; ++t) {
      slots.push_back(t % cell_.adapters);
      std::vector<std::int32_t> all;
      for (std::int32_t e = 0; e < cell_.experts; ++e) all.push_back(e);
      for (std::int32_t k = 0; k < cell_.top_k; ++k) {
        std::swap(all[static_cast<std::size_t>(k)],
                  all[static_cast<std::size_t>(k + draw(cell_.experts - k))]);
        ids.push_back(all[static_cast<std::size_t>(k)]);
      }
    }
    std::vector<std::int32_t> order(ids.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    auto const expert = [&](std::int32_t row) { return ids[static_cast<std::size_t>(row)]; };
    if (cell_.sorted()) {
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return expert(a) < expert(b); });
    }
    std::vector<std::int32_t> offsets(static_cast<std::size_t>(cell_.experts) + 1);
    for (std::int32_t const row : order) {
      tokens_.push_back(row / cell_.top_k);
      keys_.push_back({slots[static_cast<std::size_t>(row / cell_.top_k)], expert(row)});
      places_.emplace(keys_.back(), 0);
      ++offsets[static_cast<std::size_t>(expert(row)) + 1];
    }
    for (std::size_t e = 1; e < offsets.size(); ++e) offsets[e] += offsets[e - 1];
    std::vector<std::int32_t> pair_slots, pair_experts;
    for (auto& [key, place] : places_) {
      place = static_cast<std::int32_t>(pair_slots.size());
      pair_slots.push_back(key.first);
      pair_experts.push_back(key.second);
    }
    auto const pairs = static_cast<std::int32_t>(pair_slots.size());
    std::int32_t const* const device_tokens = memory_.uploaded(tokens_);
    std::int32_t const* const device_slots = memory_.uploaded(slots);
    rows_ = cell_.sorted()
                ? ExpertRows::sorted(device_slots, cell_.tokens, cell_.rows(), device_tokens,
                                     memory_.uploaded(offsets))
                : ExpertRows::slot_major(device_slots, cell_.tokens, cell_.top_k, memory_.uploaded(ids));
    pair_rows_ =
        ExpertRows::slot_major(memory_.uploaded(pair_slots), pairs, 1, memory_.uploaded(pair_experts));
    input_ = cell_.own_rows   ? ExpertInput::own_rows(cell_.rows())
             : cell_.sorted() ? ExpertInput::of_sorted(device_tokens, cell_.tokens)
                              : ExpertInput::of_tokens(cell_.top_k, cell_.tokens);
  }

  [[nodiscard]] RouteCell<T> cell_of(int layer, std::size_t projection, std::int32_t place) const {
    T const* base = weights_ + (static_cast<std::int64_t>(layer) * std::ssize(places_) + place) * pair_;
    for (std::size_t p = 0; p < projection; ++p) base += cell_.rank * (cell_.k_in + cell_.n_out[p]);
    return {base, base + cell_.rank * cell_.k_in, nullptr, 2.0F, cell_.rank, cell_.rank, 0};
  }

  void make_tables() {
    std::size_t const linears = cell_.n_out.size();
    std::vector<RouteCell<T>> cells;
    for (int l = 0; l < layers_; ++l) {
      for (auto const& [key, place] : places_) {
        for (std::size_t p = 0; p < linears; ++p) cells.push_back(cell_of(l, p, place));
      }
    }
    RouteCell<T> const* const device_cells = memory_.uploaded(cells);
    std::size_t const stride = expert_index_bytes(cell_.experts);
    auto const slots = static_cast<std::size_t>(cell_.adapters);
    std::vector<std::byte> indexes(static_cast<std::size_t>(layers_) * slots * stride);
    for (int l = 0; l < layers_; ++l) {
      for (auto const& [key, place] : places_) {
        std::size_t const at = static_cast<std::size_t>(l) * slots + static_cast<std::size_t>(key.first);
        auto* const index = reinterpret_cast<ExpertIndex<T>*>(indexes.data() + at * stride);
        if (index->cells == nullptr) {
          std::int64_t const first = static_cast<std::int64_t>(l) * std::ssize(places_) + place;
          index->cells = device_cells + first * static_cast<std::int64_t>(linears);
        }
        index->places()[key.second] = ++index->num_groups;
      }
    }
    std::byte const* const device_indexes = memory_.uploaded(indexes);
    for (int l = 0; l < layers_; ++l) {
      Tables tables;
      for (std::size_t p = 0; p < linears; ++p) {
        tables.table[p] = {reinterpret_cast<ExpertIndex<T> const*>(
                               device_indexes + static_cast<std::size_t>(l) * slots * stride),
                           static_cast<std::int64_t>(stride),
                           cell_.adapters,
                           cell_.experts,
                           static_cast<std::int32_t>(linears),
                           static_cast<std::int32_t>(p),
                           cell_.rank,
                           cell_.k_in,
                           cell_.n_out[p]};
      }
      tables_.push_back(tables);
    }
  }

  ExpertPlan make_plan(ExpertRows const& rows) {
    ExpertPlanLayout const layout{rows.rows, cell_.adapters, cell_.experts};
    ExpertPlan const plan = layout.at(memory_.allocate(layout.bytes()));
    CHECKED(launch_expert_plan(plan, rows, machine_, memory_.stream()));
    return plan;
  }

  [[nodiscard]] ExpertDeltaParams<T> params(int layer, bool settled) const {
    ExpertDeltaParams<T> p;
    p.x = x_;
    p.x_row_stride = cell_.k_in;
    p.input = input_;
    p.rows = cell_.rows();
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
    p.expected_slots = cell_.adapters;
    return p;
  }

  /// Enqueues a launch that only reads the layer's weights.
  void touch(int layer, TouchShape shape) {
    if (shape.loads == 1) launch_touch(touch_kernel<1>, shape.blocks, layer);
    if (shape.loads == 4) launch_touch(touch_kernel<4>, shape.blocks, layer);
    if (shape.loads == 8) launch_touch(touch_kernel<8>, shape.blocks, layer);
  }
  template <class Kernel>
  void launch_touch(Kernel kernel, int blocks, int layer) {
    CHECKED(detail::launch(kernel, detail::LaunchShape{blocks, 256, 1, 0}, machine_, memory_.stream(),
                           pairs_plan_, tables_[static_cast<std::size_t>(layer)],
                           static_cast<int>(cell_.n_out.size()), cell_.rank, sink_));
  }

  /// Adds up row `row`'s error of projection `p`; `at` is where its outputs begin in the row of y.
  void row_error(std::int32_t row, std::size_t p, std::int64_t at, std::vector<T> const& before,
                 std::vector<T> const& after, double& error, double& size) const {
    RouteCell<T> const cell = cell_of(0, p, places_.at(keys_[static_cast<std::size_t>(row)]));
    std::int64_t const x_row = cell_.own_rows ? row : tokens_[static_cast<std::size_t>(row)];
    std::vector<T> const x = download(x_ + x_row * cell_.k_in, cell_.k_in);
    std::vector<T> const a = download(cell.a, cell.rank * cell_.k_in);
    std::vector<T> const b = download(cell.b, cell.rank * cell_.n_out[p]);
    std::vector<double> xa(static_cast<std::size_t>(cell.rank), 0.0);
    for (std::size_t i = 0; i < a.size(); ++i) {
      xa[i / x.size()] += static_cast<double>(to_f32(a[i])) * to_f32(x[i % x.size()]);
    }
    for (std::int64_t n = 0; n < cell_.n_out[p]; ++n) {
      double delta = 0.0;
      for (std::int32_t j = 0; j < cell.rank; ++j) {
        delta += xa[static_cast<std::size_t>(j)] * to_f32(b[static_cast<std::size_t>(n * cell.rank + j)]);
      }
      auto const i = static_cast<std::size_t>(at + n);
      double const want = to_f32(before[i]) + static_cast<double>(cell.scale) * delta;
      error += (to_f32(after[i]) - want) * (to_f32(after[i]) - want);
      size += want * want;
    }
  }

  template <class Enqueue>
  double time(Enqueue const& enqueue, Replays replays = Replays::thorough) {
    return median_us(memory_.stream(), layers_, enqueue, replays);
  }

  Cell const& cell_;
  Machine const& machine_;
  DeviceMemory memory_;
  std::vector<std::int32_t> tokens_;    ///< of each row
  std::vector<Key> keys_;               ///< of each row
  std::map<Key, std::int32_t> places_;  ///< of each pair that occurs, its place among the weights
  std::int64_t pair_ = 0;               ///< elements of one pair's linears
  int layers_ = 0;
  ExpertRows rows_, pair_rows_;
  ExpertInput input_;
  T* weights_ = nullptr;
  T* x_ = nullptr;
  T* y_ = nullptr;
  std::vector<Tables> tables_;
  ExpertPlan plan_, pairs_plan_;
  void* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
  int* sink_ = nullptr;
};

}  // namespace moe_bench
