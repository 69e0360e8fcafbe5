// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;
using HostPool = AdapterPool<float, HostBackend>;

constexpr std::uint32_t contents = 6;

// The cells of a leased slot and the bytes that they speak of must all be of one content.
bool is_whole(HostPool const& pool, Lease const& lease) {
  RouteCell<float> const* const q = pool.route(0, "q")->cell(lease.slot());
  RouteCell<float> const* const head = pool.route(model_wide, "lm_head")->cell(lease.slot());
  auto const content = static_cast<std::uint32_t>(q->scale);
  return q->adapted() && head->adapted() && head->scale == q->scale && q->a[0] == element(content, 0, 0, 0) &&
         head->b[0] == element(content, 4, 1, 0);
}

TEST_CASE(
    "loads, unloads, steps of two streams and leases from five threads leave every reader a whole adapter") {
  auto made = HostPool::create(tiny_shape(), {.max_slots = 3, .spare = 2, .max_rank = 8});
  REQUIRE(made.has_value());
  HostPool pool = *std::move(made);
  std::vector<std::string> const names{"a", "b", "c", "d"};
  std::vector<Adapter> adapters;
  for (std::uint32_t content = 1; content <= contents; ++content) {
    adapters.push_back(tiny_adapter(pool.shape(), content, 8, every_site));
  }
  std::atomic<bool> stop = false;
  std::atomic<int> loads = 0;
  std::atomic<int> reads = 0;
  std::atomic<int> wrong = 0;

  auto const loader = [&](std::size_t first) {
    for (std::size_t i = first; !stop; i += 3) {
      auto const staged = pool.load(names[i % names.size()], adapters[i % adapters.size()]);
      if (staged) ++loads;
      if (!staged && !retryable(staged.error().code)) ++wrong;
      if (i % 17 == 0) static_cast<void>(pool.unload(names[(i / 17) % names.size()]));
    }
  };
  auto const engine = [&](std::int32_t on) {
    for (std::size_t i = 0; !stop; ++i) {
      if (!pool.begin_step(on)) ++wrong;
      auto lease = pool.acquire(names[i % names.size()]);
      if (lease) {
        ++reads;
        if (!is_whole(pool, *lease)) ++wrong;
        auto const fork = pool.acquire(lease->key());
        if (!fork) ++wrong;
      }
      if (!pool.end_step(on)) ++wrong;
    }
  };
  auto const observer = [&] {
    while (!stop) {
      for (std::int32_t slot = 0; slot < pool.max_slots(); ++slot) {
        if (pool.view(slot).leases < 0) ++wrong;
      }
      static_cast<void>(pool.names());
      static_cast<void>(pool.adapter_id(0));
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back(loader, 0);
  threads.emplace_back(loader, 1);
  threads.emplace_back(engine, 1);
  threads.emplace_back(engine, 2);
  threads.emplace_back(observer);
  while (loads < 300 || reads < 300) std::this_thread::yield();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  for (std::int32_t slot = 0; slot < pool.max_slots(); ++slot) CHECK(pool.view(slot).leases == 0);
}

TEST_CASE("leases are released from other threads than those that took them") {
  auto made = HostPool::create(tiny_shape(), {.max_slots = 1, .max_rank = 8});
  REQUIRE(made.has_value());
  HostPool pool = *std::move(made);
  REQUIRE(pool.load("a", tiny_adapter(pool.shape(), 1, 8, {0})).has_value());
  REQUIRE(pool.begin_step(1).has_value());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    std::vector<Lease> leases;
    for (int k = 0; k < 200; ++k) leases.push_back(*pool.acquire("a"));
    threads.emplace_back([taken = std::move(leases)]() mutable { taken.clear(); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.view(0).leases == 0);
  CHECK(pool.view(0).uses == 800);
}

}  // namespace
