// SPDX-License-Identifier: AGPL-3.0-only
//
// A pool and its host tier, and the threads that change what is in them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <atlas/lora.hpp>

#include "workload.hpp"

namespace hot_swap {

/// The files' stand-in: the newest version of each name.
struct Reader {
  Workload const* workload;
  ModelShape const* shape;
  std::vector<std::atomic<std::size_t>> const* newest;

  Result<Adapter> operator()(std::string_view name, std::stop_token const&) const noexcept {
    for (std::size_t i = 0; i < workload->names; ++i) {
      if (name == workload->name(i)) {
        return make_adapter(*workload, *shape, i * workload->versions + (*newest)[i]);
      }
    }
    return fail(Errc::not_found, std::string(name));
  }
};

template <class Device>
class Server {
 public:
  using T = typename Device::element;
  using Pool = AdapterPool<T, typename Device::Backend>;

  Server(Device& device, Workload const& workload, ModelShape const& shape)
      : workload_(workload),
        newest_(workload.names),
        pool_(expect(
            Pool::create(shape, {.max_slots = workload.slots, .spare = 2, .max_rank = workload.largest_rank},
                         device.backend()))),
        tier_(shape, make_arena(device, workload, shape), Reader{&workload_, &pool_.shape(), &newest_}) {}
  Server(Server const&) = delete;
  Server& operator=(Server const&) = delete;
  ~Server() { stop(); }

  [[nodiscard]] Pool& pool() { return pool_; }
  [[nodiscard]] HostTierSnapshot tier_snapshot() const { return tier_.snapshot(); }

  /// Starts two threads that promote adapters at random, and with `changes` one that replaces files and
  /// unloads.
  void start(bool changes) {
    stop_ = false;
    for (std::uint32_t seed : {1U, 2U}) threads_.emplace_back([this, seed] { promote_at_random(seed); });
    if (changes) threads_.emplace_back([this] { change_at_random(); });
  }
  void stop() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  /// Brings `name` in, and waits until its load is told of.
  void load(std::size_t name) { record(name, expect(tier_.get(workload_.name(name)))); }

  /// Reads what is newest of every name.
  void prefetch() {
    for (std::size_t name = 0; name < workload_.names; ++name) expect(tier_.prefetch(workload_.name(name)));
  }

  /// The content that a load was told to have this id; the load may still be about to tell.
  [[nodiscard]] std::size_t content_of(std::uint64_t id) {
    for (;;) {
      {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (auto const known = contents_.find(id); known != contents_.end()) return known->second;
      }
      std::this_thread::yield();
    }
  }

  /// Loads that were refused and neither retryable nor to be expected.
  [[nodiscard]] int refused_for_no_reason() const { return refused_for_no_reason_; }

 private:
  static PinnedArena make_arena(Device& device, Workload const& workload, ModelShape const& shape) {
    std::size_t elements = 0;  // of the largest content
    for (Site const site : shape.sites()) {
      Module const& linear = shape.module(site);
      auto const rank = static_cast<std::size_t>(padded_rank(workload.largest_rank));
      elements += rank * static_cast<std::size_t>(linear.k_in + linear.n_out);
    }
    std::size_t const blocks = workload.kept * (elements * sizeof(T) / workload.block_bytes + 1);
    return expect(PinnedArena::create(device.backend(), blocks * workload.block_bytes, workload.block_bytes));
  }

  void check(Errc outcome) {
    if (!retryable(outcome) && outcome != Errc::ok && outcome != Errc::not_found) ++refused_for_no_reason_;
  }

  template <class Content>
  void record(std::size_t name, Content const& content) {
    auto const staged = pool_.load(workload_.name(name), *content);
    check(staged ? Errc::ok : staged.error().code);
    if (!staged) return;
    std::lock_guard<std::mutex> const lock(mutex_);
    contents_[staged->id] = content->outline().digest.low;
  }

  void promote_at_random(std::uint32_t seed) {
    std::minstd_rand random(seed);
    while (!stop_) {
      std::size_t const name = random() % workload_.names;
      auto const content = tier_.get(workload_.name(name));
      check(content ? Errc::ok : content.error().code);
      if (content) record(name, *content);
    }
  }

  void change_at_random() {
    std::minstd_rand random(99);
    while (!stop_) {
      std::size_t const name = random() % workload_.names;
      newest_[name] = random() % workload_.versions;
      tier_.forget(workload_.name(name));
      auto const unloaded = pool_.unload(workload_.name(random() % workload_.names));
      check(unloaded ? Errc::ok : unloaded.error().code);
      std::this_thread::sleep_for(workload_.change_every);
    }
  }

  Workload const workload_;
  std::vector<std::atomic<std::size_t>> newest_;
  Pool pool_;
  HostTier<T, Reader> tier_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> refused_for_no_reason_ = 0;
  std::mutex mutex_;
  std::map<std::uint64_t, std::size_t> contents_;  // by id, as loads were told
  std::vector<std::thread> threads_;
};

}  // namespace hot_swap
