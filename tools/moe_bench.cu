// SPDX-License-Identifier: AGPL-3.0-only
//
// Times the experts' delta as a server runs it: weights from device memory, many layers in one captured graph
// on one stream, medians of replays. Beside it in the same run: a launch that only touches the same weights
// (the floor's main part), the two-launch form, and the launch that makes the plan, which an engine needs
// once a layer for gate, up and down. Every cell is checked against double precision before it is timed. The
// floor is the touch, plus the bytes of x and y at the copy bandwidth.
//
//   moe_bench [--json FILE] [--only TEXT]     TEXT: part of a cell's name, such as "gather" or "tokens64"
#include "moe_bench_case.cuh"

namespace {

using namespace moe_bench;

struct Timing {
  double us, plain_us, touch_us, floor_us, two_launch_us, plan_us;
};

std::vector<Cell> all_cells() {
  struct Model {
    std::int32_t experts, top_k;
    std::int64_t hidden, intermediate;
  };
  std::vector<Cell> cells;
  // Qwen3-30B-A3B and Mixtral-8x7B. Few tokens come as they are chosen (decode), many sorted (prefill).
  for (Model const& m : {Model{128, 8, 2048, 768}, Model{8, 2, 4096, 14336}}) {
    for (std::int32_t const tokens : {1, 4, 16, 64, 256, 1024, 2048, 4096}) {
      for (std::int32_t const adapters : {1, 4, 16}) {
        if (adapters > tokens) continue;
        for (std::int32_t const rank : {16, 64}) {
          char const* const op = tokens <= 64 ? "moe_gather" : "moe_grouped";
          cells.push_back({op,
                           m.experts,
                           m.top_k,
                           tokens,
                           adapters,
                           rank,
                           m.hidden,
                           {m.intermediate, m.intermediate},
                           false});
          cells.push_back({op, m.experts, m.top_k, tokens, adapters, rank, m.intermediate, {m.hidden}, true});
        }
      }
    }
  }
  return cells;
}

Timing time_cell(Cell const& cell, Machine const& machine) {
  Case run(cell, machine);
  double const error = run.error();
  if (error > most_error) stop(cell.name() + ": wrong by " + std::to_string(error));
  Timing t{};
  t.us = run.ours(true);
  t.plain_us = run.ours(false);
  t.touch_us = run.touch(true);
  t.two_launch_us = run.two_launches();
  t.plan_us = run.plan();
  double const x_bytes = 2.0 * run.x_rows() * static_cast<double>(cell.k_in);
  double const y_bytes = 4.0 * cell.rows() * static_cast<double>(cell.outputs());
  t.floor_us = t.touch_us + (x_bytes + y_bytes) / copy_rate;
  return t;
}

void write_cell(std::FILE* json, Cell const& cell, Timing const& t) {
  std::string n_out;
  for (std::int64_t const n : cell.n_out) n_out += (n_out.empty() ? "" : ", ") + std::to_string(n);
  std::fprintf(json,
               "{\"op\": \"%s\", \"k_in\": %lld, \"n_out\": [%s], \"rank\": %d, \"experts\": %d, "
               "\"top_k\": %d, \"tokens\": %d, \"rows\": %d, \"adapters\": %d, \"us\": %.2f, "
               "\"plain_us\": %.2f, \"floor_us\": %.2f, \"touch_us\": %.2f, \"two_launch_us\": %.2f, "
               "\"plan_us\": %.2f}",
               cell.op, static_cast<long long>(cell.k_in), n_out.c_str(), cell.rank, cell.experts, cell.top_k,
               cell.tokens, cell.rows(), cell.adapters, t.us, t.plain_us, t.floor_us, t.touch_us,
               t.two_launch_us, t.plan_us);
}

void print_cell(Cell const& cell, Timing const& t) {
  std::printf("%-62s %8.2f %8.2f %8.2f %8.2f %7.2f %8.2f %8.2f\n", cell.name().c_str(), t.us, t.plain_us,
              t.touch_us, t.floor_us, t.us / t.floor_us, t.two_launch_us, t.plan_us);
}

}  // namespace

int main(int count, char** arguments) {
  Arguments const told(count, arguments);
  auto const machine = prepare<ExpertDelta<T>, ExpertPlanning>(0);
  if (!machine) stop(machine.error().message);
  std::printf("%-62s %8s %8s %8s %8s %7s %8s %8s\n", "microseconds", "ours", "plain", "touch", "floor",
              "ratio", "two", "plan");
  run_cells(told, *machine, all_cells(), time_cell, print_cell, write_cell);
  return 0;
}
