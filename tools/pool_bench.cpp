// SPDX-License-Identifier: AGPL-3.0-only
//
// Times what a server asks of a pool between kernels, on the CPU: a lease taken and given back, the choice of
// a victim among many slots, an operator's snapshot. Each line is the best of many
// rounds, which is what it takes where nobody else is on the core.
//
//   pool_bench [--json FILE]
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <atlas/lora.hpp>

namespace {

using namespace atlas::lora;
using Pool = AdapterPool<float, HostBackend>;

constexpr int rounds = 100;
constexpr std::int32_t many_slots = 4096;

struct Row {
  char const* what;
  double ns;
  double limit_ns;  // 0 for none
};

[[noreturn]] void stop(std::string const& why) {
  std::fprintf(stderr, "pool_bench: %s\n", why.c_str());
  std::exit(1);
}

template <class V>
V expect(Result<V> result) {
  if (!result) stop(result.error().message);
  if constexpr (!std::is_void_v<V>) return *std::move(result);
}

// Nanoseconds of one of `times` calls, in the best of the rounds.
double time_ns(int times, std::function<void(int)> const& run) {
  double best = std::numeric_limits<double>::max();
  for (int round = 0; round < rounds; ++round) {
    auto const begin = std::chrono::steady_clock::now();
    run(times);
    double const ns =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, ns / times);
  }
  return best;
}

// A pool of `slots` slots, each with an adapter that changes nothing.
Pool make_pool(std::int32_t slots, std::vector<SlotKey>& keys) {
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"q", 8, 8, {0}, {}}};
  Pool pool = expect(Pool::create(expect(ModelShape::create(d)), {.max_slots = slots, .max_rank = 8}));
  Adapter adapter;
  for (std::int32_t i = 0; i < slots; ++i) {
    adapter.digest = Digest{static_cast<std::uint64_t>(i), 1};
    keys.push_back(expect(pool.load("adapter " + std::to_string(i), adapter)).key);
    expect(pool.begin_step(0));
    expect(pool.end_step(0));
  }
  return pool;
}

double acquire_by_key(Pool& pool, SlotKey key) {
  return time_ns(20'000, [&](int times) {
    for (int i = 0; i < times; ++i) {
      if (!pool.acquire(key)) stop("a lease was refused");
    }
  });
}

std::vector<Row> lease_rows() {
  std::vector<SlotKey> keys;
  Pool pool = make_pool(64, keys);
  std::thread([] {}).join();  // as in a server, the program is no longer known to have one thread
  std::vector<Row> rows;
  rows.push_back({"acquire and release, by key", acquire_by_key(pool, keys[1]), 50.0});
  rows.push_back({"acquire and release, by name",
                  time_ns(20'000,
                          [&](int times) {
                            for (int i = 0; i < times; ++i) {
                              if (!pool.acquire("adapter 1")) stop("refused");
                            }
                          }),
                  0.0});
  return rows;
}

std::vector<Row> choice_rows() {
  std::mt19937 random(1);
  std::vector<SlotView> views(many_slots);
  for (SlotView& view : views) {
    view.state = SlotState::ready;
    view.last_use = random();
    view.idle = random() % 2 == 0;
  }
  std::uint64_t sum = 0;
  std::vector<Row> rows;
  rows.push_back({"victim among 4096 slots",
                  time_ns(200,
                          [&](int times) {
                            for (int i = 0; i < times; ++i) {
                              std::uint32_t const victim = LruIdle{}(views).value_or(0);
                              sum += victim;
                              views[victim].last_use += 1;
                            }
                          }),
                  5000.0});
  if (sum == 0) stop("no victim was found");

  std::vector<SlotKey> keys;
  Pool pool = make_pool(many_slots, keys);
  rows.push_back({"snapshot of 4096 slots",
                  time_ns(20,
                          [&](int times) {
                            for (int i = 0; i < times; ++i) {
                              if (pool.snapshot().slots.size() != many_slots) stop("?");
                            }
                          }),
                  0.0});
  return rows;
}

void write_json(char const* path, std::vector<Row> const& rows) {
  std::FILE* const json = std::fopen(path, "w");
  if (json == nullptr) stop(std::string("cannot write ") + path);
  std::fprintf(json, "{\"rows\": [");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::fprintf(json, "%s\n  {\"op\": \"%s\", \"ns\": %.1f, \"limit_ns\": %.1f}", i == 0 ? "" : ",",
                 rows[i].what, rows[i].ns, rows[i].limit_ns);
  }
  std::fprintf(json, "\n ]}\n");
  std::fclose(json);
}

}  // namespace

int main(int count, char** arguments) {
  bool const to_file = count == 3 && std::strcmp(arguments[1], "--json") == 0;
  if (count != 1 && !to_file) stop("pool_bench [--json FILE]");
  std::vector<Row> rows = lease_rows();
  for (Row const& row : choice_rows()) rows.push_back(row);
  std::printf("%-44s %12s %12s\n", "nanoseconds", "best", "at most");
  for (Row const& row : rows) {
    std::printf("%-44s %12.1f ", row.what, row.ns);
    row.limit_ns == 0.0 ? std::printf("%12s\n", "-") : std::printf("%12.1f\n", row.limit_ns);
  }
  if (to_file) write_json(arguments[2], rows);
  return 0;
}
