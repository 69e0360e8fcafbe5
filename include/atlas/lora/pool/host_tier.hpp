// SPDX-License-Identifier: AGPL-3.0-only
//
// Adapters kept packed in pinned host memory under a byte budget, so that bringing one into a pool reads no
// files and converts nothing.
#pragma once

#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
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
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/by_name.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/packed_adapter.hpp"
#include "atlas/lora/pool/pinned_arena.hpp"
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

/// What a host tier has done. Counts only grow.
struct HostTierCounters {
  std::uint64_t reads = 0;      ///< calls of the reader
  std::uint64_t hits = 0;       ///< asked for and kept already
  std::uint64_t joins = 0;      ///< asked for while another caller read it
  std::uint64_t failures = 0;   ///< reads that failed
  std::uint64_t refusals = 0;   ///< adapters that were read and found no room
  std::uint64_t evictions = 0;  ///< adapters that left because another needed their bytes

  friend bool operator==(HostTierCounters const&, HostTierCounters const&) = default;
};

/// One adapter in a host tier.
struct HostTierEntry {
  std::string name;
  std::size_t bytes = 0;       ///< of its blocks
  bool in_use = false;         ///< somebody holds it, so that it is not evicted
  std::uint64_t last_use = 0;  ///< the tier's tick when it was last asked for; larger is later

  friend bool operator==(HostTierEntry const&, HostTierEntry const&) = default;
};

/// A host tier at one moment.
struct HostTierSnapshot {
  std::vector<HostTierEntry> entries;  ///< by name
  std::size_t bytes =
      0;  ///< of all blocks in use: of entries, of what is held though forgotten, of what is packed now
  std::size_t budget_bytes = 0;  ///< of all blocks
  std::size_t reading = 0;       ///< names that are being read now
  HostTierCounters counters;     ///< since the tier was made

  friend bool operator==(HostTierSnapshot const&, HostTierSnapshot const&) = default;
};

/// Adapters by name, packed for pools of one model and element type, experts, routers and token rows too, in
/// one arena of pinned memory. What was asked for longest ago leaves first; what somebody holds does not
/// leave. However many callers ask for a name at one time, it is read once, on the thread of the first, and
/// all get that result or that error; an error is not kept. A caller that cancels ends its own wait alone:
/// when it is the one that reads, another that waits reads instead. What the reader gives lies in ordinary
/// memory until it is packed. Every function may be called from any thread; the tier has no threads of its
/// own and outlives all calls.
template <Element T, AdapterReader R>
class HostTier {
 public:
  /// An adapter that stays alive, and in the tier, as long as it is held.
  using Content = std::shared_ptr<PackedAdapter<T> const>;

  /// A tier that has the whole of `arena`, which nobody else may take from. `packing` is how all adapters are
  /// packed; experts, routers and token rows are kept wherever the model has them, whatever the pools serve.
  HostTier(ModelShape shape, PinnedArena arena, R reader, PackOptions const& packing = {})
      : shape_(std::move(shape)), arena_(std::move(arena)), reader_(std::move(reader)), packing_(packing) {}
  HostTier(HostTier const&) = delete;
  HostTier& operator=(HostTier const&) = delete;

  /// The adapter `name`, read and packed if it is not kept. Errors: the reader's; those of
  /// `detail::check_adapter` and `convert`; `out_of_memory` when it is larger than the budget; retryable
  /// `pool_full` when it does not fit beside what is in use; `cancelled`.
  [[nodiscard]] Result<Content> get(std::string_view name, std::stop_token const& stop = {}) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (Entry* const entry = touch(name)) {
        ++counters_.hits;
        return entry->content;
      }
      auto const* const found = flights_.find(name);
      if (found == nullptr) return read(name, stop, lock);
      std::shared_ptr<Flight> const flight = *found;
      ++counters_.joins;
      flight->landed.wait(lock, stop, [&] { return flight->outcome.has_value(); });
      if (!flight->outcome) return fail(Errc::cancelled, quoted(name) + "cancelled while another reads it");
      if (!flight->cancelled) return *flight->outcome;
    }
  }

  /// Makes `get(name)` a hit: reads on this thread, unless the name is kept, or another caller reads it,
  /// which is not waited for. Errors: those of `get`.
  [[nodiscard]] Result<void> prefetch(std::string_view name, std::stop_token const& stop = {}) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (touch(name) != nullptr || flights_.find(name) != nullptr) return {};
    auto const content = read(name, stop, lock);
    if (!content) return cuda::std::unexpected<Error>(content.error());
    return {};
  }

  /// Makes the next `get(name)` read again, as after a change of its files. Who holds the adapter keeps it,
  /// and what is being read now is not kept.
  void forget(std::string_view name) {
    std::lock_guard<std::mutex> const lock(mutex_);
    flights_.erase(name);
    entries_.erase(name);
  }

  /// What an operator sees; O(entries).
  [[nodiscard]] HostTierSnapshot snapshot() const {
    std::lock_guard<std::mutex> const lock(mutex_);
    HostTierSnapshot all{{},
                         in_use() * arena_.block_bytes(),
                         arena_.blocks() * arena_.block_bytes(),
                         flights_.size(),
                         counters_};
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      auto const& [name, entry] = entries_[i];
      all.entries.push_back(
          HostTierEntry{name, entry.blocks * arena_.block_bytes(), entry.held(), entry.last_use});
    }
    return all;
  }

 private:
  struct Entry {
    Content content;
    std::size_t blocks = 0;
    std::uint64_t last_use = 0;

    // Under the tier's mutex nobody becomes the second holder meanwhile.
    [[nodiscard]] bool held() const noexcept { return content.use_count() > 1; }
  };

  using Entries = detail::ByName<Entry>;

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
    Entry* const found = entries_.find(name);
    if (found != nullptr) found->last_use = ++tick_;
    return found;
  }

  // Reads and packs `name` without the lock, and keeps it. The lock is held before and after.
  Result<Content> read(std::string_view name, std::stop_token const& stop,
                       std::unique_lock<std::mutex>& lock) {
    auto const flight = std::make_shared<Flight>();
    flights_.put(name, flight);
    ++counters_.reads;
    lock.unlock();
    Result<Content> outcome = read_and_pack(name, stop);
    lock.lock();
    auto const* const found = flights_.find(name);
    bool const wanted = found != nullptr && *found == flight;
    if (wanted) flights_.erase(name);
    if (outcome && wanted) {
      std::size_t const blocks = arena_.blocks_for((*outcome)->outline().bytes);
      entries_.put(name, Entry{*outcome, blocks, ++tick_});
    }
    flight->cancelled = !outcome && outcome.error().code == Errc::cancelled && stop.stop_requested();
    flight->outcome = outcome;
    flight->landed.notify_all();
    return outcome;
  }

  Result<Content> read_and_pack(std::string_view name, std::stop_token const& stop) {
    auto const adapter = reader_(name, stop);
    detail::PoolRoom const any{largest_pool_rank, true, shape_.moe().num_experts > 0,
                               std::numeric_limits<std::size_t>::max()};
    auto outline = adapter ? detail::checked_outline<T>(name, *adapter, shape_, any, packing_)
                           : Result<PackedOutline>(cuda::std::unexpected<Error>(adapter.error()));
    if (!outline) return failed(outline.error());
    auto blocks = make_room(name, outline->bytes);
    if (!blocks) return cuda::std::unexpected<Error>(blocks.error());
    auto packed = PackedAdapter<T>::pack(*adapter, *std::move(outline), shape_, packing_.conversion,
                                         *std::move(blocks));
    if (!packed) return failed(packed.error());
    return Content(std::make_shared<PackedAdapter<T> const>(*std::move(packed)));
  }

  cuda::std::unexpected<Error> failed(Error const& error) {
    std::lock_guard<std::mutex> const lock(mutex_);
    ++counters_.failures;
    return cuda::std::unexpected<Error>(error);
  }

  [[nodiscard]] std::size_t in_use() const { return arena_.blocks() - arena_.free_blocks(); }

  // Blocks for `bytes` bytes, from which adapters that nobody holds give way; on failure none has left.
  Result<PinnedBlocks> make_room(std::string_view name, std::size_t bytes) {
    std::lock_guard<std::mutex> const lock(mutex_);
    std::size_t const needed = arena_.blocks_for(bytes);
    std::size_t idle = 0;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      idle += entries_[i].value.held() ? 0 : entries_[i].value.blocks;
    }
    std::size_t const free = arena_.free_blocks();  // only ever more, as long as the lock is held
    if (needed > free + idle) {
      ++counters_.refusals;
      std::size_t const budget = arena_.blocks() * arena_.block_bytes();
      std::string const fault =
          quoted(name) + std::to_string(bytes) + " bytes do not fit " + std::to_string(budget);
      if (needed > arena_.blocks()) return fail(Errc::out_of_memory, fault);
      std::size_t const busy = (arena_.blocks() - free - idle) * arena_.block_bytes();
      return fail(Errc::pool_full, fault + " of which " + std::to_string(busy) + " are in use");
    }
    while (needed > arena_.free_blocks()) {
      typename Entries::Node const* oldest = nullptr;
      for (std::size_t i = 0; i < entries_.size(); ++i) {
        if (entries_[i].value.held()) continue;
        if (oldest == nullptr || entries_[i].value.last_use < oldest->value.last_use) oldest = &entries_[i];
      }
      ATLAS_ASSERT(oldest != nullptr, "what is not held was counted above, and stays so");
      entries_.erase(oldest->name);
      ++counters_.evictions;
    }
    return *arena_.take(needed);
  }

  ModelShape const shape_;
  PinnedArena const arena_;
  R const reader_;
  PackOptions const packing_;
  mutable std::mutex mutex_;
  Entries entries_;
  detail::ByName<std::shared_ptr<Flight>> flights_;
  std::uint64_t tick_ = 0;
  HostTierCounters counters_;
};

/// Brings `name` from the host tier into the pool, reading it first if it is not kept. Errors: those of
/// `HostTier::get` and of `AdapterPool::load`.
template <class Pool, Element T, AdapterReader R>
[[nodiscard]] Result<Staged> promote(Pool& pool, HostTier<T, R>& tier, std::string_view name,
                                     StageOptions const& options = {}) {
  auto const content = tier.get(name, options.stop);
  if (!content) return cuda::std::unexpected<Error>(content.error());
  return pool.load(name, **content, options);
}

}  // namespace atlas::lora::inline v0
