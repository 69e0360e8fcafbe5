// SPDX-License-Identifier: AGPL-3.0-only
//
// What can an engine put in place of the library's own choices? A policy of which slot gives way (the largest
// idle adapter), a policy of what a request means (whose adapter has gone gets the active one), and on the
// GPU a tuning of a delta's launch and a kernel that does with the delta what the library's do not: y goes to
// a buffer of its own and through an activation. Everything is compared with the library's reference on the
// CPU.
//
// Compiled by g++ it runs the host's part; own_policy.cu is the same program compiled by nvcc, with both.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <atlas/lora.hpp>

#include "tiny_model/memory.hpp"

#if defined(__CUDACC__)
#include "own_policy/own_kernel.cuh"
#endif

namespace own_policy {

using namespace atlas::lora;
using tiny_model::expect;

using T = __nv_bfloat16;

/// Whoever holds the most memory gives way first.
struct LargestIdle {
  [[nodiscard]] std::optional<std::uint32_t> operator()(std::span<SlotView const> views) const noexcept {
    std::optional<std::uint32_t> largest;
    for (std::uint32_t i = 0; i < views.size(); ++i) {
      if (views[i].state == SlotState::empty) return i;
      if (views[i].idle && (!largest || views[i].bytes > views[*largest].bytes)) largest = i;
    }
    return largest;
  }
};
static_assert(VictimPolicy<LargestIdle>);

/// A request whose slot does not exist gets the active adapter, where `PerRequest` would refuse it.
struct OrActive {
  [[nodiscard]] constexpr RouteDecision operator()(Selector selector,
                                                   RouteContext const& context) const noexcept {
    bool const there = selector.kind() != Selector::Kind::slot || context.contains(selector.index());
    return PerRequest{}(there ? selector : Selector::active(), context);
  }
};
static_assert(RoutePolicy<OrActive>);

constexpr std::int64_t k_in = 200, n_out = 136;  // no multiples of a tile
constexpr std::int32_t max_slots = 2, rows = 37;

/// Values in [-1, 1).
std::vector<float> random_values(std::uint32_t seed, std::int64_t count) {
  std::uint32_t state = seed * 2654435761U + 1;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
  }
  return values;
}

std::vector<T> random_elements(std::uint32_t seed, std::int64_t count) {
  std::vector<T> elements;
  for (float const value : random_values(seed, count)) elements.push_back(from_f32<T>(value));
  return elements;
}

HostTensor random_tensor(std::uint32_t seed, std::int64_t height, std::int64_t width) {
  std::vector<float> const values = random_values(seed, height * width);
  HostTensor tensor;
  tensor.name = "random";
  tensor.shape = {height, width};
  tensor.bytes.resize(values.size() * sizeof(float));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

ModelShape make_shape() {
  ModelDescription model;
  model.num_layers = 1;
  model.modules.push_back({"gate", n_out, k_in, {0}});
  return expect(ModelShape::create(model));
}

Adapter make_adapter(ModelShape const& shape, std::uint32_t seed, std::int32_t rank) {
  Adapter adapter;
  adapter.max_rank = rank;
  adapter.pairs.push_back({shape.sites()[0], rank, 0.25F, random_tensor(2 * seed, rank, k_in),
                           random_tensor(2 * seed + 1, n_out, rank), std::nullopt});
  adapter.modules_present = adapter.modules_applied = 1;
  adapter.digest = Digest{seed, 1};
  adapter.model = shape.fingerprint();
  return adapter;
}

template <class B>
using Pool = AdapterPool<T, B, LargestIdle>;

/// A pool of two slots that has seen three adapters: the policy decides which two it holds.
template <class B>
Pool<B> fill_pool(tiny_model::Memory<B>& memory) {
  ModelShape const shape = make_shape();
  auto pool = expect(Pool<B>::create(shape, {.max_slots = max_slots, .max_rank = 32}, memory.backend()));
  auto const load = [&](char const* name, std::uint32_t seed, std::int32_t rank) {
    expect(pool.load(name, make_adapter(shape, seed, rank)));
    expect(pool.begin_step(memory.stream()));
    expect(pool.end_step(memory.stream()));
    memory.synchronize();
  };
  load("small", 1, 8);
  load("large", 2, 32);
  load("newcomer", 3, 12);
  return pool;
}

/// One slot a row: what `OrActive` makes of requests for base, each adapter, a slot that is not there, and
/// the active adapter, in turns.
std::vector<std::int32_t> route_rows(std::int32_t small, std::int32_t newcomer) {
  std::array const requests{Selector::base(), Selector::slot(small), Selector::slot(newcomer),
                            Selector::slot(max_slots + 5), Selector::active()};
  std::vector<Selector> selectors;
  for (std::size_t row = 0; row < rows; ++row) selectors.push_back(requests[row % requests.size()]);
  std::vector<std::int32_t> slots(selectors.size());
  auto const verdict =
      resolve_slots(OrActive{}, selectors, {.active = newcomer, .max_slots = max_slots}, slots);
  if (!verdict || *verdict != RouteVerdict::fold) slots.clear();
  return slots;
}

bool report(char const* what, bool good) {
  std::cout << (good ? "right: " : "WRONG: ") << what << '\n';
  return good;
}

/// What y is on the CPU, given the tables of a pool there.
std::vector<T> reference(RouteTable<T> const& table, std::vector<std::int32_t> const& slots,
                         std::vector<T> const& x, std::vector<T> y) {
  std::vector<T> xa(static_cast<std::size_t>(table.max_rank));
  reference_delta(table, slots, x.data(), k_in, y.data(), n_out, std::span<T>(xa));
  return y;
}

bool same_row(std::vector<T> const& a, std::vector<T> const& b, std::size_t row) {
  return std::memcmp(&a[row * n_out], &b[row * n_out], n_out * sizeof(T)) == 0;
}

#if defined(__CUDACC__)

constexpr int skipped = 77;  // the exit status that test runners read as "not run here"

/// The largest distance from `want`, as a part of its magnitude or of 1.
float distance(std::vector<T> const& got, std::vector<T> const& want) {
  float largest = 0.0F;
  for (std::size_t i = 0; i < want.size(); ++i) {
    float const value = to_f32(want[i]);
    float const off = std::abs(to_f32(got[i]) - value) / std::max(1.0F, std::abs(value));
    largest = off <= largest ? largest : off;  // takes over what is not a number
  }
  return largest;
}

bool run_on_gpu(std::vector<T> const& x, std::vector<T> const& base) {
  tiny_model::Memory<CudaBackend> memory;
  auto pool = fill_pool(memory);
  std::int32_t const small = expect(pool.find("small")).slot, newcomer = expect(pool.find("newcomer")).slot;
  std::vector<std::int32_t> const slots = route_rows(small, newcomer);
  OwnRun run(memory, expect(pool.route(0, "gate")), slots, x, base);

  tiny_model::Memory<HostBackend> host_memory;
  auto host_pool = fill_pool(host_memory);
  std::vector<T> const want = reference(expect(host_pool.route(0, "gate")), slots, x, base);
  std::vector<T> activated;
  for (T const y : want) activated.push_back(from_f32<T>(to_f32(y) / (1.0F + std::exp(-to_f32(y)))));

  Outputs const library = run.library(), tuned = run.tuned(), own = run.own_kernel();
  bool good = report("the library's delta is near the CPU's", distance(library.y, want) < 0.02F);
  good &= report("the user's tuning has the library's bits", same_bits(tuned.y, library.y));
  good &= report("the user's kernel has the library's bits", same_bits(own.y, library.y));
  good &= report("the user's epilogue applied its activation", distance(own.activated, activated) < 0.02F);
  return good;
}

#endif

bool run_on_host(std::vector<T> const& x, std::vector<T> const& base) {
  tiny_model::Memory<HostBackend> memory;
  auto pool = fill_pool(memory);
  std::vector<std::string> names = pool.names();
  std::sort(names.begin(), names.end());
  bool good = report("the largest adapter gave way, not the one used longest ago",
                     names == std::vector<std::string>{"newcomer", "small"});
  if (!good) return false;

  std::int32_t const small = expect(pool.find("small")).slot, newcomer = expect(pool.find("newcomer")).slot;
  std::vector<std::int32_t> const slots = route_rows(small, newcomer);
  std::array const first{base_slot, small, newcomer, newcomer, newcomer};
  good = report("a request for a slot that is not there gets the active adapter",
                slots.size() == rows && std::equal(first.begin(), first.end(), slots.begin()));
  if (!good) return false;

  std::vector<T> const y = reference(expect(pool.route(0, "gate")), slots, x, base);
  bool routed = true;
  for (std::size_t row = 0; row < rows; ++row) routed &= same_row(y, base, row) == (slots[row] == base_slot);
  return report("rows of adapters change and base rows do not", routed);
}

int run() {
  std::vector<T> const x = random_elements(10, rows * k_in), base = random_elements(11, rows * n_out);
  if (!run_on_host(x, base)) return EXIT_FAILURE;
#if defined(__CUDACC__)
  if (!gpu_available()) {
    std::cout << "there is no GPU that this program can use: the tuning and the kernel were not run\n";
    return skipped;
  }
  if (!run_on_gpu(x, base)) return EXIT_FAILURE;
#endif
  return EXIT_SUCCESS;
}

}  // namespace own_policy

int main() {
  try {
    return own_policy::run();
  } catch (std::exception const& error) {
    std::cerr << "own_policy: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
