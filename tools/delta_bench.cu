// SPDX-License-Identifier: AGPL-3.0-only
//
// Times the routed delta as a server runs it: weights from device memory, many layers in one captured graph
// on one stream, medians of replays. Beside it in the same run: a launch that only touches the same weights
// (the floor's main part), the two-launch form, and cuBLAS adapter by adapter. Every cell is checked against
// double precision before it is timed. The floor is the touch plus the bytes of x and y at the copy
// bandwidth, or the operations at the rate of the matrix instruction where that takes longer ("matrix").
// A cell named "layer" is a decoder layer's four launches in a row; its floor is the sum of theirs, its touch
// the same chain of four touches.
//
//   delta_bench [--json FILE] [--only TEXT] [--all]
//
// TEXT is part of a cell's name, such as "r64" or "zipf". --all adds a wide sweep, which takes long.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "delta_bench_case.cuh"

namespace {

using namespace delta_bench;

struct Timing {
  double us, plain_us, touch_us, floor_us, two_launch_us, cublas_us;
  bool matrix_bound;  ///< whether the matrix instruction's rate is a floor that counts
};

std::vector<Cell> default_cells() {
  std::vector<Cell> cells;
  auto const add = [&](std::int64_t k_in, std::vector<std::int64_t> n_out, std::int32_t rows,
                       char const* adapters) {
    for (std::int32_t const rank : {16, 64}) cells.push_back({k_in, n_out, rank, rows, adapters});
  };
  add(4096, {}, 1, "same");
  add(4096, {}, 64, "zipf");
  add(4096, {4096}, 1, "same");
  for (std::int32_t const rows : {8, 32, 64, 256}) {
    for (char const* const adapters : {"same", "distinct", "zipf"}) add(4096, {4096}, rows, adapters);
  }
  for (std::vector<std::int64_t> const& n_out :
       {std::vector<std::int64_t>{1024}, {14336}, {4096, 1024, 1024}, {14336, 14336}}) {
    add(4096, n_out, 1, "same");
    add(4096, n_out, 64, "zipf");
  }
  add(14336, {4096}, 1, "same");
  add(14336, {4096}, 64, "zipf");
  add(8192, {8192}, 1, "same");
  add(8192, {8192}, 64, "zipf");
  add(4096, {4096}, 64, "half");
  cells.push_back({4096, {4096}, 16, 64, "base"});
  for (std::int32_t const rank : {8, 32, 128, 256}) cells.push_back({4096, {4096}, rank, 64, "zipf"});
  cells.push_back({4096, {4096}, 8, 64, "distinct"});
  cells.push_back({4096, {4096}, 8, 64, "distinct", 64});
  cells.push_back({4096, {4096}, 8, 64, "zipf", 64});
  for (std::int32_t const rows : {512, 2048, 8192}) {
    add(4096, {4096}, rows, "same");
    add(4096, {4096}, rows, "seg8");
    add(4096, {14336}, rows, "same");
  }
  return cells;
}

/// Adds the linears of Llama-3.1-8B and of a 70B over rows, ranks and mixes of adapters, but for what is
/// there.
void add_sweep(std::vector<Cell>& cells) {
  std::set<std::string> known;
  for (Cell const& cell : cells) known.insert(cell.name());
  auto const add = [&](Cell const& cell) {
    if (known.insert(cell.name()).second) cells.push_back(cell);
  };
  struct Linear {
    std::int64_t k_in;
    std::vector<std::int64_t> n_out;
  };
  for (Linear const& linear :
       {Linear{4096, {4096}}, Linear{4096, {1024}}, Linear{4096, {4096, 1024, 1024}}, Linear{4096, {14336}},
        Linear{4096, {14336, 14336}}, Linear{14336, {4096}}, Linear{8192, {8192}}, Linear{8192, {1024}},
        Linear{8192, {28672}}, Linear{28672, {8192}}}) {
    for (std::int32_t const rank : {8, 16, 32, 64, 128, 256}) {
      add({linear.k_in, linear.n_out, rank, 1, "same"});
      for (std::int32_t const rows : {8, 64, 512, 8192}) {
        for (char const* const adapters : {"same", "zipf"})
          add({linear.k_in, linear.n_out, rank, rows, adapters});
      }
    }
    for (std::int32_t const rank : {16, 64}) {
      for (std::int32_t const rows : {2, 4, 16, 32, 128, 256, 1024, 2048, 4096}) {
        add({linear.k_in, linear.n_out, rank, rows, "zipf"});
      }
      for (std::int32_t const rows : {8, 64, 1024}) {
        for (char const* const adapters : {"distinct", "half", "base"})
          add({linear.k_in, linear.n_out, rank, rows, adapters});
      }
    }
  }
}

/// A cell's launches in a row, all their layers in one graph.
class Chain {
 public:
  explicit Chain(Cell const& cell, Machine const& machine)
      : launches_(cell.launches()), layers_(layer_copies(cell)) {
    for (Cell const& launch : launches_) {
      cases_.push_back(std::make_unique<Case>(launch, layers_, machine, memory_));
    }
  }

  /// The largest relative error of a launch, or the first that is too large or no number.
  double error() {
    double most = 0.0;
    for (auto const& one : cases_) {
      double const error = one->error();
      if (!(error <= most_error)) return error;
      most = std::max(most, error);
    }
    return most;
  }
  /// Microseconds of a layer, each launch enqueued by `enqueue(launch, layer)`.
  template <class Enqueue>
  double time(Enqueue const& enqueue) {
    return median_us(memory_.stream(), layers_, [&](int l) {
      for (auto const& one : cases_) enqueue(*one, l);
    });
  }
  /// Times every launch's touch, alone and all in a row, and adds up their floors.
  void touch(Timing& t) {
    std::vector<TouchShape> shapes;
    for (auto const& one : cases_) {
      TouchShape const shape = one->best_touch();
      shapes.push_back(shape);
      double const us = median_us(memory_.stream(), layers_, [&](int l) { one->touch(l, shape); });
      double const memory_us = us + one->row_bytes() / copy_rate;
      double const matrix_us = one->operations() / matrix_rate;
      t.floor_us += std::max(memory_us, matrix_us);
      t.matrix_bound = t.matrix_bound || matrix_us > memory_us;
      t.touch_us = us;
    }
    if (cases_.size() == 1) return;
    t.touch_us = median_us(memory_.stream(), layers_, [&](int l) {
      for (std::size_t i = 0; i < cases_.size(); ++i) cases_[i]->touch(l, shapes[i]);
    });
  }
  [[nodiscard]] bool adapted() const { return cases_.front()->adapted(); }

 private:
  std::vector<Cell> launches_;
  int layers_;
  DeviceMemory memory_;
  std::vector<std::unique_ptr<Case>> cases_;
};

Timing time_cell(Cell const& cell, Machine const& machine) {
  Chain run(cell, machine);
  double const error = run.error();
  if (!(error <= most_error)) stop(cell.name() + ": wrong by " + std::to_string(error));
  Timing t{};
  t.us = run.time([](Case& one, int l) { one.ours(l, true); });
  t.plain_us = run.time([](Case& one, int l) { one.ours(l, false); });
  if (run.adapted()) {
    run.touch(t);
    t.two_launch_us = run.time([](Case& one, int l) { one.two_launches(l); });
    t.cublas_us = run.time([](Case& one, int l) { one.cublas(l); });
  }
  return t;
}

void write_cell(std::FILE* json, Cell const& cell, Timing const& t) {
  std::string n_out;
  for (Cell const& launch : cell.launches()) {
    for (std::int64_t const n : launch.n_out) n_out += (n_out.empty() ? "" : ", ") + std::to_string(n);
  }
  std::fprintf(json,
               "{\"op\": \"%s\", \"k_in\": %lld, \"n_out\": [%s], \"rank\": %d, \"pool_rank\": %d, "
               "\"rows\": %d, \"adapters\": \"%s\", \"us\": %.2f, \"plain_us\": %.2f, \"floor_us\": %.2f, "
               "\"bound\": \"%s\", \"touch_us\": %.2f, \"two_launch_us\": %.2f, \"cublas_us\": %.2f}",
               cell.is_layer() ? "layer" : "delta", static_cast<long long>(cell.k_in), n_out.c_str(),
               cell.rank, cell.max_rank(), cell.rows, cell.adapters.c_str(), t.us, t.plain_us, t.floor_us,
               t.matrix_bound ? "matrix" : "memory", t.touch_us, t.two_launch_us, t.cublas_us);
}

void print_cell(Cell const& cell, Timing const& t) {
  std::printf("%-44s %8.2f %8.2f %8.2f %8.2f %7.2f %8.2f %8.2f%s\n", cell.name().c_str(), t.us, t.plain_us,
              t.touch_us, t.floor_us, t.floor_us == 0.0 ? 0.0 : t.us / t.floor_us, t.two_launch_us,
              t.cublas_us, t.matrix_bound ? "  matrix" : "");
}

}  // namespace

int main(int count, char** arguments) {
  Arguments const told(count, arguments);
  auto const machine = prepare<Delta<T>, RowPlanning>(0);
  if (!machine) stop(machine.error().message);
  std::printf("%-44s %8s %8s %8s %8s %7s %8s %8s\n", "microseconds", "ours", "plain", "touch", "floor",
              "ratio", "two", "cuBLAS");
  std::vector<Cell> cells = default_cells();
  if (told.all) add_sweep(cells);
  run_cells(told, *machine, cells, time_cell, print_cell, write_cell);
  return 0;
}
