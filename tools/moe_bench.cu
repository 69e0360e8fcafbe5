// SPDX-License-Identifier: AGPL-3.0-only
//
// Times the experts' delta as a server runs it: weights from device memory, many layers in one captured graph
// on one stream, medians of replays. Beside it in the same run: a launch that only touches the same weights
// (the floor's main part), the two-launch form, and the launch that makes the plan, which an engine needs
// once a layer for gate, up and down. Every cell is checked against double precision before it is timed. The
// floor is the touch plus the bytes of x and y at the copy bandwidth, or the operations at the rate of the
// matrix instruction where that takes longer ("matrix").
//
//   moe_bench [--json FILE] [--only TEXT] [--all]
//
// TEXT is part of a cell's name, such as "gather" or "tokens64". --all adds a wide sweep, which takes long.
#include <algorithm>
#include <string>
#include <vector>

#include "moe_bench_case.cuh"

namespace {

using namespace moe_bench;

struct Timing {
  double us, plain_us, touch_us, floor_us, two_launch_us, plan_us;
  bool matrix_bound;  ///< whether the matrix instruction's rate is the floor
};

struct Model {
  std::int32_t experts, top_k;
  std::int64_t hidden, intermediate;
};
constexpr Model qwen{128, 8, 2048, 768};     // Qwen3-30B-A3B
constexpr Model mixtral{8, 2, 4096, 14336};  // Mixtral-8x7B

/// Gate and up, and down, at two ranks. Few tokens come as they are chosen (decode), many sorted (prefill).
void add(std::vector<Cell>& cells, Model const& m, std::vector<std::int32_t> const& all_tokens,
         std::vector<std::int32_t> const& all_adapters) {
  for (std::int32_t const tokens : all_tokens) {
    for (std::int32_t const adapters : all_adapters) {
      if (adapters > tokens) continue;
      for (std::int32_t const rank : {16, 64}) {
        char const* const op = tokens <= 64 ? "moe_gather" : "moe_grouped";
        Cell const gate_up{op,       m.experts, m.top_k,  tokens,
                           adapters, rank,      m.hidden, {m.intermediate, m.intermediate},
                           false};
        Cell const down{op, m.experts, m.top_k, tokens, adapters, rank, m.intermediate, {m.hidden}, true};
        for (Cell const& cell : {gate_up, down}) {
          auto const same = [&](Cell const& other) { return other.name() == cell.name(); };
          if (std::none_of(cells.begin(), cells.end(), same)) cells.push_back(cell);
        }
      }
    }
  }
}

/// The cells that have a target come first.
std::vector<Cell> all_cells(bool wide) {
  std::vector<Cell> cells;
  add(cells, qwen, {1, 16, 64, 2048}, {1, 4});
  add(cells, mixtral, {1, 16, 64, 2048}, {1, 4});
  add(cells, qwen, {4, 16, 64, 256, 2048}, {1, 4, 16});
  if (wide) {
    add(cells, qwen, {1024, 4096}, {1, 4, 16});
    add(cells, mixtral, {1, 4, 16, 64, 256, 1024, 2048, 4096}, {1, 4, 16});
  }
  return cells;
}

Timing time_cell(Cell const& cell, Machine const& machine) {
  Case run(cell, machine);
  double const error = run.error();
  if (!(error <= most_error)) stop(cell.name() + ": wrong by " + std::to_string(error));
  Timing t{};
  t.us = run.ours(true);
  t.plain_us = run.ours(false);
  t.touch_us = run.touch();
  t.two_launch_us = run.two_launches();
  t.plan_us = run.plan();
  double const x_bytes = 2.0 * run.x_rows() * static_cast<double>(cell.k_in);
  double const y_bytes = 4.0 * cell.rows() * static_cast<double>(cell.outputs());
  double const memory_us = t.touch_us + (x_bytes + y_bytes) / copy_rate;
  double a_row = 0.0;
  for (std::int64_t const n : cell.n_out) a_row += 2.0 * cell.rank * static_cast<double>(cell.k_in + n);
  double const matrix_us = cell.rows() * a_row / matrix_rate;
  t.floor_us = std::max(memory_us, matrix_us);
  t.matrix_bound = matrix_us > memory_us;
  return t;
}

void write_cell(std::FILE* json, Cell const& cell, Timing const& t) {
  std::string n_out;
  for (std::int64_t const n : cell.n_out) n_out += (n_out.empty() ? "" : ", ") + std::to_string(n);
  std::fprintf(json,
               "{\"op\": \"%s\", \"k_in\": %lld, \"n_out\": [%s], \"rank\": %d, \"experts\": %d, "
               "\"top_k\": %d, \"tokens\": %d, \"rows\": %d, \"adapters\": %d, \"us\": %.2f, "
               "\"plain_us\": %.2f, \"floor_us\": %.2f, \"bound\": \"%s\", \"touch_us\": %.2f, "
               "\"two_launch_us\": %.2f, \"plan_us\": %.2f}",
               cell.op, static_cast<long long>(cell.k_in), n_out.c_str(), cell.rank, cell.experts, cell.top_k,
               cell.tokens, cell.rows(), cell.adapters, t.us, t.plain_us, t.floor_us,
               t.matrix_bound ? "matrix" : "memory", t.touch_us, t.two_launch_us, t.plan_us);
}

void print_cell(Cell const& cell, Timing const& t) {
  std::printf("%-62s %8.2f %8.2f %8.2f %8.2f %7.2f %8.2f %8.2f%s\n", cell.name().c_str(), t.us, t.plain_us,
              t.touch_us, t.floor_us, t.us / t.floor_us, t.two_launch_us, t.plan_us,
              t.matrix_bound ? "  matrix" : "");
}

}  // namespace

int main(int count, char** arguments) {
  Arguments const told(count, arguments);
  auto const machine = prepare<ExpertDelta<T>, ExpertPlanning>(0);
  if (!machine) stop(machine.error().message);
  std::printf("%-62s %8s %8s %8s %8s %7s %8s %8s\n", "microseconds", "ours", "plain", "touch", "floor",
              "ratio", "two", "plan");
  run_cells(told, *machine, all_cells(told.all), time_cell, print_cell, write_cell);
  return 0;
}
