// SPDX-License-Identifier: AGPL-3.0-only
//
// Times the routed delta as a server runs it: weights from device memory, many layers in one captured graph
// on one stream, medians of replays. Beside it in the same run: a launch that only touches the same weights
// (the floor's main part), the two-launch form, and cuBLAS adapter by adapter. Every cell is checked against
// double precision before it is timed. The floor is the touch, plus the bytes of x and y at the copy
// bandwidth.
//
//   delta_bench [--json FILE] [--only TEXT]     TEXT: part of a cell's name, such as "r64" or "zipf"
#include "delta_bench_case.cuh"

namespace {

using namespace delta_bench;

struct Timing {
  double us, plain_us, touch_us, floor_us, two_launch_us, cublas_us;
};

std::vector<Cell> all_cells() {
  std::vector<Cell> cells;
  auto const add = [&](std::int64_t k_in, std::vector<std::int64_t> n_out, std::int32_t rows,
                       char const* adapters) {
    for (std::int32_t const rank : {16, 64}) cells.push_back({k_in, n_out, rank, rows, adapters});
  };
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
  for (std::int32_t const rows : {512, 2048, 8192}) {
    add(4096, {4096}, rows, "same");
    add(4096, {4096}, rows, "seg8");
    add(4096, {14336}, rows, "same");
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
  if (run.adapted()) {
    t.touch_us = run.touch(true);
    t.two_launch_us = run.two_launches();
    t.cublas_us = run.cublas();
  }
  double const bytes = 2.0 * cell.rows * static_cast<double>(cell.k_in + 2 * cell.outputs());
  t.floor_us = t.touch_us + (run.adapted() ? bytes / copy_rate : 0.0);
  return t;
}

void write_cell(std::FILE* json, Cell const& cell, Timing const& t) {
  std::string n_out;
  for (std::int64_t const n : cell.n_out) n_out += (n_out.empty() ? "" : ", ") + std::to_string(n);
  std::fprintf(
      json,
      "{\"op\": \"delta\", \"k_in\": %lld, \"n_out\": [%s], \"rank\": %d, \"rows\": %d, \"adapters\": "
      "\"%s\", "
      "\"us\": %.2f, \"plain_us\": %.2f, \"floor_us\": %.2f, \"touch_us\": %.2f, \"two_launch_us\": %.2f, "
      "\"cublas_us\": %.2f}",
      static_cast<long long>(cell.k_in), n_out.c_str(), cell.rank, cell.rows, cell.adapters.c_str(), t.us,
      t.plain_us, t.floor_us, t.touch_us, t.two_launch_us, t.cublas_us);
}

void print_cell(Cell const& cell, Timing const& t) {
  std::printf("%-44s %8.2f %8.2f %8.2f %8.2f %7.2f %8.2f %8.2f\n", cell.name().c_str(), t.us, t.plain_us,
              t.touch_us, t.floor_us, t.floor_us == 0.0 ? 0.0 : t.us / t.floor_us, t.two_launch_us,
              t.cublas_us);
}

}  // namespace

int main(int count, char** arguments) {
  Arguments const told(count, arguments);
  auto const machine = prepare<Delta<T>, RowPlanning>(0);
  if (!machine) stop(machine.error().message);
  std::printf("%-44s %8s %8s %8s %8s %7s %8s %8s\n", "microseconds", "ours", "plain", "touch", "floor",
              "ratio", "two", "cuBLAS");
  run_cells(told, *machine, all_cells(), time_cell, print_cell, write_cell);
  return 0;
}
