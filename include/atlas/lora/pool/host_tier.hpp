// SPDX-License-Identifier: AGPL-3.0-only
//
// Adapters kept in host memory under a byte budget, so that bringing one into a pool reads no files.
#pragma once

#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What a host tier has from elsewhere: `reader(name, stop)` is the adapter of that name. It is called from
/// any thread, for different names at one time, and never under a lock. When `stop` is requested it may give
/// up with `cancelled`.
template <class R>
concept AdapterReader = requires(R const& reader, std::string_view name, std::stop_token stop) {
  { reader(name, stop) }
  noexcept->std::same_as<Result<Adapter>>;
};

/// Bytes of all tensors of an adapter, as it holds them.
[[nodiscard]] inline std::size_t host_bytes(Adapter const& adapter) noexcept {
  std::size_t bytes = 0;
  for (AdapterPair const& pair : adapter.pairs) {
    bytes += pair.a.bytes.size() + pair.b.bytes.size() + (pair.bias ? pair.bias->bytes.size() : 0);
  }
  for (auto const* const part : {&adapter.experts, &adapter.router}) {
    for (HostTensor const& tensor : *part) bytes += tensor.bytes.size();
  }
  adapter.raw_overlay.for_each([&](HostTensor const& tensor) { bytes += tensor.bytes.size(); });
  for (OverrideRows const* const own : {&adapter.overlay.embedding, &adapter.overlay.head}) {
    bytes += own->rows.bytes.size() + own->ids.size() * sizeof(std::int32_t);
  }
  return bytes;
}

/// What a host tier has done. Counts only grow.
struct HostTierCounters {
  std::uint64_t reads = 0;      ///< calls of the reader
  std::uint64_t hits = 0;       ///< asked for and kept already
  std::uint64_t joins = 0;      ///< asked for while another caller read it
  std::uint64_t failures = 0;   ///< reads that failed
  std::uint64_t refusals = 0;   ///< adapters that were read and did not fit
  std::uint64_t evictions = 0;  ///< adapters that left because another needed their bytes

  friend bool operator==(HostTierCounters const&, HostTierCounters const&) = default;
};

/// One adapter in a host tier.
struct HostTierEntry {
  std::string name;
  std::size_t bytes = 0;
  bool in_use = false;         ///< somebody holds it, so that it is not evicted
  std::uint64_t last_use = 0;  ///< the tier's tick when it was last asked for; larger is later

  friend bool operator==(HostTierEntry const&, HostTierEntry const&) = default;
};

/// A host tier at one moment.
struct HostTierSnapshot {
  std::vector<HostTierEntry> entries;  ///< by name
  std::size_t bytes = 0;               ///< of all entries
  std::size_t budget_bytes = 0;
  std::size_t reading = 0;  ///< names that are being read now
  HostTierCounters counters;

  friend bool operator==(HostTierSnapshot const&, HostTierSnapshot const&) = default;
};

/// Adapters by name in at most `budget_bytes` of host memory. What was asked for longest ago leaves first;
/// what somebody holds does not leave. However many callers ask for a name at one time, it is read once, on
/// the thread of the first, and all get that result or that error; an error is not kept. A caller that
/// cancels ends its own wait alone: when it is the one that reads, another that waits reads instead. Every
/// function may be called from any thread; the tier has no threads of its own and outlives all calls.
template <AdapterReader R>
class HostTier {
 public:
  /// An adapter that stays alive, and in the tier, as long as it is held.
  using Content = std::shared_ptr<Adapter const>;

  HostTier(std::size_t budget_bytes, R reader) : budget_(budget_bytes), reader_(std::move(reader)) {}
  HostTier(HostTier const&) = delete;
  HostTier& operator=(HostTier const&) = delete;

  /// The adapter `name`, read if it is not kept. Errors: the reader's; `out_of_memory` when it is larger than
  /// the budget; retryable `pool_full` when it does not fit beside what is held; `cancelled`.
  [[nodiscard]] Result<Content> get(std::string_view name, std::stop_token const& stop = {}) {
    std::vector<Content> evicted;  // destroyed when the lock has gone
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (Entry* const entry = touch(name)) {
        ++counters_.hits;
        return entry->content;
      }
      auto const found = flights_.find(name);
      if (found == flights_.end()) return read(name, stop, lock, evicted);
      std::shared_ptr<Flight> const flight = found->second;
      ++counters_.joins;
      flight->landed.wait(lock, stop, [&] { return flight->outcome.has_value(); });
      if (!flight->outcome) return fail(Errc::cancelled, quoted(name) + "cancelled while another reads it");
      if (!flight->cancelled) return *flight->outcome;
    }
  }

  /// Makes `get(name)` a hit: reads on this thread, unless the name is kept, or another caller reads it,
  /// which is not waited for. Errors: those of `get`.
  [[nodiscard]] Result<void> prefetch(std::string_view name, std::stop_token const& stop = {}) {
    std::vector<Content> evicted;
    std::unique_lock<std::mutex> lock(mutex_);
    if (touch(name) != nullptr || flights_.find(name) != flights_.end()) return {};
    auto const content = read(name, stop, lock, evicted);
    if (!content) return cuda::std::unexpected<Error>(content.error());
    return {};
  }

  /// Makes the next `get(name)` read again, as after a change of its files. Who holds the adapter keeps it,
  /// and what is being read now is not kept.
  void forget(std::string_view name) {
    Content forgotten;
    std::lock_guard<std::mutex> const lock(mutex_);
    if (auto const flight = flights_.find(name); flight != flights_.end()) flights_.erase(flight);
    auto const entry = entries_.find(name);
    if (entry == entries_.end()) return;
    bytes_ -= entry->second.bytes;
    forgotten = std::move(entry->second.content);
    entries_.erase(entry);
  }

  /// What an operator sees; O(entries).
  [[nodiscard]] HostTierSnapshot snapshot() const {
    std::lock_guard<std::mutex> const lock(mutex_);
    HostTierSnapshot all{{}, bytes_, budget_, flights_.size(), counters_};
    for (auto const& [name, entry] : entries_) {
      all.entries.push_back(HostTierEntry{name, entry.bytes, entry.held(), entry.last_use});
    }
    return all;
  }

 private:
  struct Entry {
    Content content;
    std::size_t bytes = 0;
    std::uint64_t last_use = 0;

    // Under the tier's mutex nobody becomes the second holder meanwhile.
    [[nodiscard]] bool held() const noexcept { return content.use_count() > 1; }
  };

  // One read, and those who wait for it.
  struct Flight {
    std::condition_variable_any landed;
    std::optional<Result<Content>> outcome;
    bool cancelled = false;  // by its own caller: those who wait have to read themselves
  };

  static std::string quoted(std::string_view name) {
    return "adapter '" + std::string(name) + "': host tier: ";
  }

  Entry* touch(std::string_view name) {
    auto const found = entries_.find(name);
    if (found == entries_.end()) return nullptr;
    found->second.last_use = ++tick_;
    return &found->second;
  }

  // Reads `name` without the lock, and keeps it. The lock is held before and after.
  Result<Content> read(std::string_view name, std::stop_token const& stop, std::unique_lock<std::mutex>& lock,
                       std::vector<Content>& evicted) {
    auto const flight = std::make_shared<Flight>();
    flights_.emplace(name, flight);
    ++counters_.reads;
    lock.unlock();
    auto adapter = reader_(name, stop);
    Result<Content> outcome = adapter
                                  ? Result<Content>(std::make_shared<Adapter const>(*std::move(adapter)))
                                  : Result<Content>(cuda::std::unexpected<Error>(std::move(adapter).error()));
    lock.lock();
    auto const found = flights_.find(name);
    bool const wanted = found != flights_.end() && found->second == flight;
    if (wanted) flights_.erase(found);
    if (!outcome) ++counters_.failures;
    flight->cancelled = !outcome && outcome.error().code == Errc::cancelled && stop.stop_requested();
    if (outcome && wanted) {
      auto const kept = keep(name, *outcome, evicted);
      if (!kept) outcome = cuda::std::unexpected<Error>(kept.error());
    }
    flight->outcome = outcome;
    flight->landed.notify_all();
    return outcome;
  }

  // Makes room for `content` and keeps it; on failure nothing has left.
  Result<void> keep(std::string_view name, Content const& content, std::vector<Content>& evicted) {
    std::size_t const bytes = host_bytes(*content);
    std::size_t held = 0;
    for (auto const& [other, entry] : entries_) held += entry.held() ? entry.bytes : 0;
    if (bytes > budget_ || bytes > budget_ - held) {
      ++counters_.refusals;
      std::string const fault = quoted(name) + std::to_string(bytes) + " bytes do not fit ";
      if (bytes > budget_) return fail(Errc::out_of_memory, fault + std::to_string(budget_));
      return fail(Errc::pool_full,
                  fault + std::to_string(budget_) + " of which " + std::to_string(held) + " are in use");
    }
    while (bytes > budget_ - bytes_) {
      auto oldest = entries_.end();
      for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
        if (entry->second.held()) continue;
        if (oldest == entries_.end() || entry->second.last_use < oldest->second.last_use) oldest = entry;
      }
      ATLAS_ASSERT(oldest != entries_.end(), "what is not held was counted above, and stays so");
      bytes_ -= oldest->second.bytes;
      evicted.push_back(std::move(oldest->second.content));
      entries_.erase(oldest);
      ++counters_.evictions;
    }
    bytes_ += bytes;
    entries_.insert_or_assign(std::string(name), Entry{content, bytes, ++tick_});
    return {};
  }

  std::size_t const budget_;
  R const reader_;
  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, std::shared_ptr<Flight>, std::less<>> flights_;
  std::size_t bytes_ = 0;
  std::uint64_t tick_ = 0;
  HostTierCounters counters_;
};

/// Brings `name` from the host tier into the pool, reading it first if it is not kept. Errors: those of
/// `HostTier::get` and of `AdapterPool::load`.
template <class Pool, AdapterReader R>
[[nodiscard]] Result<Staged> promote(Pool& pool, HostTier<R>& tier, std::string_view name,
                                     StageOptions const& options = {}) {
  auto const content = tier.get(name, options.stop);
  if (!content) return cuda::std::unexpected<Error>(content.error());
  return pool.load(name, **content, options);
}

}  // namespace atlas::lora::inline v0
