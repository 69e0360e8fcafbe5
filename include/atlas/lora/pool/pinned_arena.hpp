// SPDX-License-Identifier: AGPL-3.0-only
//
// Host memory that a device copies from, taken once and given out in blocks of one size: pinning memory while
// a server runs would stall its device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// The blocks of one arena that are not given out. Thread-safe.
class BlockList {
 public:
  BlockList(std::shared_ptr<void> memory, std::size_t count, std::size_t block_bytes)
      : memory_(std::move(memory)), count_(count), block_bytes_(block_bytes) {
    for (std::size_t i = count; i-- > 0;) {
      free_.push_back(static_cast<std::byte*>(memory_.get()) + i * block_bytes);
    }
  }

  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  [[nodiscard]] std::size_t block_bytes() const noexcept { return block_bytes_; }
  [[nodiscard]] std::size_t free() const {
    std::lock_guard<std::mutex> const lock(mutex_);
    return free_.size();
  }
  [[nodiscard]] std::optional<std::vector<std::byte*>> take(std::size_t count) {
    std::lock_guard<std::mutex> const lock(mutex_);
    if (count > free_.size()) return std::nullopt;
    auto const first = free_.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<std::byte*> blocks(first, free_.end());
    free_.erase(first, free_.end());
    return blocks;
  }
  void give_back(std::vector<std::byte*> const& blocks) {
    std::lock_guard<std::mutex> const lock(mutex_);
    free_.insert(free_.end(), blocks.begin(), blocks.end());
  }

 private:
  std::shared_ptr<void> memory_;
  std::size_t count_;
  std::size_t block_bytes_;
  mutable std::mutex mutex_;
  std::vector<std::byte*> free_;
};

}  // namespace detail

/// Blocks of an arena, given back when they are destroyed; together they hold bytes `[0, size())`. Move-only;
/// may outlive the arena.
class PinnedBlocks {
 public:
  PinnedBlocks() noexcept = default;
  PinnedBlocks(PinnedBlocks&& other) noexcept
      : list_(std::move(other.list_)), blocks_(std::move(other.blocks_)) {
    other.blocks_.clear();
  }
  PinnedBlocks& operator=(PinnedBlocks&& other) noexcept {
    std::swap(list_, other.list_);
    std::swap(blocks_, other.blocks_);
    return *this;
  }
  ~PinnedBlocks() {
    if (list_ && !blocks_.empty()) list_->give_back(blocks_);
  }

  /// Bytes of all blocks.
  [[nodiscard]] std::size_t size() const noexcept {
    return list_ ? blocks_.size() * list_->block_bytes() : 0;
  }

  /// Calls `body(address, bytes)` for each contiguous piece of `[offset, offset + bytes)`, in order, until
  /// one does not succeed; returns the last outcome. The range lies in `[0, size())`.
  template <class Body>
  [[nodiscard]] Result<void> for_each_piece(std::size_t offset, std::size_t bytes, Body const& body) const {
    while (bytes > 0) {
      std::size_t const at = offset % list_->block_bytes();
      std::size_t const piece = std::min(bytes, list_->block_bytes() - at);
      if (auto outcome = body(blocks_[offset / list_->block_bytes()] + at, piece); !outcome) return outcome;
      offset += piece;
      bytes -= piece;
    }
    return {};
  }

  /// Copies `bytes` bytes from host memory to `[offset, offset + bytes)`, which lies in `[0, size())`.
  void write(std::size_t offset, void const* from, std::size_t bytes) noexcept {
    auto const* source = static_cast<std::byte const*>(from);
    static_cast<void>(for_each_piece(offset, bytes, [&](std::byte* to, std::size_t piece) {
      std::memcpy(to, source, piece);
      source += piece;
      return Result<void>{};
    }));
  }

 private:
  friend class PinnedArena;
  PinnedBlocks(std::shared_ptr<detail::BlockList> list, std::vector<std::byte*> blocks) noexcept
      : list_(std::move(list)), blocks_(std::move(blocks)) {}

  std::shared_ptr<detail::BlockList> list_;
  std::vector<std::byte*> blocks_;
};

/// A budget of pinned host memory. Copies are the same arena; the memory goes back to the backend with the
/// last of them and of their blocks. Thread-safe.
class PinnedArena {
 public:
  /// Large enough that a copy of one block takes the device longer than asking for it takes the host.
  static constexpr std::size_t usual_block_bytes = std::size_t{256} << 10;

  /// Takes `bytes`, rounded down to whole blocks of `block_bytes`. Errors: `invalid_argument` for an arena or
  /// blocks of no bytes; the backend's.
  template <Backend B>
  [[nodiscard]] static Result<PinnedArena> create(B backend, std::size_t bytes,
                                                  std::size_t block_bytes = usual_block_bytes) {
    if (block_bytes == 0 || bytes < block_bytes) {
      return fail(Errc::invalid_argument, "pinned arena: " + std::to_string(bytes) +
                                              " bytes do not make one block of " +
                                              std::to_string(block_bytes));
    }
    std::size_t const count = bytes / block_bytes;
    auto const memory = backend.allocate_pinned(count * block_bytes);
    if (!memory) return cuda::std::unexpected<Error>(memory.error());
    std::shared_ptr<void> owner(*memory, [backend](void* pinned) mutable { backend.free_pinned(pinned); });
    PinnedArena arena;
    arena.list_ = std::make_shared<detail::BlockList>(std::move(owner), count, block_bytes);
    return arena;
  }

  /// Bytes of one block.
  [[nodiscard]] std::size_t block_bytes() const noexcept { return list_->block_bytes(); }
  /// Blocks in all.
  [[nodiscard]] std::size_t blocks() const noexcept { return list_->count(); }
  /// Blocks that can be taken now.
  [[nodiscard]] std::size_t free_blocks() const { return list_->free(); }
  /// Blocks that hold `bytes` bytes.
  [[nodiscard]] std::size_t blocks_for(std::size_t bytes) const noexcept {
    return bytes / block_bytes() + (bytes % block_bytes() == 0 ? 0 : 1);
  }

  /// `count` blocks; none, and nothing taken, when fewer are free.
  [[nodiscard]] std::optional<PinnedBlocks> take(std::size_t count) const {
    auto blocks = list_->take(count);
    if (!blocks) return std::nullopt;
    return PinnedBlocks(list_, *std::move(blocks));
  }

 private:
  PinnedArena() = default;

  std::shared_ptr<detail::BlockList> list_;
};

}  // namespace atlas::lora::inline v0
