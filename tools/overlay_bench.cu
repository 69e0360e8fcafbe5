// SPDX-License-Identifier: AGPL-3.0-only
//
// Times token overlays as a server runs them: rows from device memory, many launches in one captured graph on
// one stream, medians of replays, the L2 swept before each. Beside them in the same run: a launch that only
// touches the same rows (the floor, or the rate of the matrix instruction where that takes longer), the head
// without clusters, and cuBLAS on the same rows. Every cell is checked against double precision before it is
// timed.
//
//   overlay_bench [--json FILE] [--only TEXT]     TEXT: part of a cell's name, such as "head" or "rows64"
#include "overlay_bench_case.cuh"

namespace {

using namespace overlay_bench;

struct Timing {
  double us, plain_us, touch_us, floor_us, without_clusters_us, cublas_us;
};

std::vector<Cell> all_cells() {
  std::vector<Cell> cells;
  for (bool const head : {false, true}) {
    for (std::int32_t const overrides : {3, 300, 248320}) {
      for (std::int32_t const rows : {1, 16, 64}) cells.push_back({head, overrides, rows});
    }
  }
  return cells;
}

Timing time_cell(Cell const& cell, Machine const& machine) {
  Case run(cell, machine);
  if (double const error = run.error(); !(error <= most_error)) {
    stop(cell.name() + ": wrong by " + std::to_string(error));
  }
  Timing t{};
  t.us = run.ours(true);
  t.plain_us = run.ours(false);
  t.touch_us = run.touch();
  t.without_clusters_us = run.without_clusters();
  t.cublas_us = run.cublas();
  double const operations = cell.head ? 2.0 * cell.overrides * cell.rows * hidden : 0.0;
  t.floor_us = std::max(t.touch_us, operations / matrix_rate);
  return t;
}

void write_cell(std::FILE* json, Cell const& cell, Timing const& t) {
  std::fprintf(json,
               "{\"op\": \"%s\", \"hidden\": %lld, \"overrides\": %d, \"rows\": %d, \"us\": %.2f, "
               "\"plain_us\": %.2f, \"floor_us\": %.2f, \"touch_us\": %.2f, \"without_clusters_us\": %.2f, "
               "\"cublas_us\": %.2f}",
               cell.op(), static_cast<long long>(hidden), cell.overrides, cell.rows, t.us, t.plain_us,
               t.floor_us, t.touch_us, t.without_clusters_us, t.cublas_us);
}

void print_cell(Cell const& cell, Timing const& t) {
  bool const within = t.us <= std::max(1.5 * t.floor_us, t.floor_us + 1.2);
  std::printf("%-38s %8.2f %8.2f %8.2f %8.2f %7.2f %7s %9.2f %8.2f\n", cell.name().c_str(), t.us, t.plain_us,
              t.touch_us, t.floor_us, t.us / t.floor_us, within ? "yes" : "NO", t.without_clusters_us,
              t.cublas_us);
}

}  // namespace

int main(int count, char** arguments) {
  Arguments const told(count, arguments);
  auto const machine = prepare<OverlayEmbed<T>, OverlayHead<T>, RowPlanning>(0);
  if (!machine) stop(machine.error().message);
  std::printf("%-38s %8s %8s %8s %8s %7s %7s %9s %8s\n", "microseconds", "ours", "plain", "touch", "floor",
              "ratio", "within", "no clust.", "cuBLAS");
  run_cells(told, *machine, all_cells(), time_cell, print_cell, write_cell);
  return 0;
}
