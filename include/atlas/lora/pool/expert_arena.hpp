// SPDX-License-Identifier: AGPL-3.0-only
//
// Which bytes of the memory for experts are whose. Blocks of one size share slabs, so that pairs that come
// and go leave holes that the next pairs of their size fill, whatever adapters they are of.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/layout.hpp"

namespace atlas::lora::inline v0::detail {

/// Slabs by index, none twice. Descending, so that the least, which is used first, comes and goes at the end.
/// Not std::set: its header and its instances are costly to every unit that includes the library.
class SlabSet {
 public:
  [[nodiscard]] bool empty() const noexcept { return slabs_.empty(); }
  /// How many there are, and the `i`-th from the least.
  [[nodiscard]] std::size_t size() const noexcept { return slabs_.size(); }
  [[nodiscard]] std::size_t operator[](std::size_t i) const noexcept { return slabs_[size() - 1 - i]; }

  /// Puts in a slab that is not there.
  void insert(std::size_t slab) {
    std::size_t at = size();
    slabs_.push_back(slab);
    for (; at > 0 && slabs_[at - 1] < slab; --at) slabs_[at] = slabs_[at - 1];
    slabs_[at] = slab;
  }
  /// Takes out a slab, if it is there.
  void erase(std::size_t slab) {
    std::size_t at = size();
    while (at > 0 && slabs_[at - 1] < slab) --at;
    if (at == 0 || slabs_[at - 1] != slab) return;
    for (; at < size(); ++at) slabs_[at - 1] = slabs_[at];
    slabs_.pop_back();
  }

 private:
  std::vector<std::size_t> slabs_;
};

/// A sub-allocator over `[0, bytes)`; it touches no memory. Copies are how a pool tries out what would fit.
class ExpertArena {
 public:
  /// All blocks begin at multiples of this, and sizes are rounded up to it.
  static constexpr std::size_t alignment = 256;

  ExpertArena() = default;
  /// `largest` bytes is the largest block that will be asked for. A slab holds eight of them, so that at most
  /// an eighth of it is left over by any size.
  ExpertArena(std::size_t bytes, std::size_t largest)
      : bytes_(bytes / alignment * alignment),
        slab_bytes_(std::min(bytes_, 8 * aligned_up(std::max<std::size_t>(largest, 1), alignment))) {
    std::size_t const count = slab_bytes_ == 0 ? 0 : (bytes_ + slab_bytes_ - 1) / slab_bytes_;
    slabs_.resize(count);
    for (std::size_t i = count; i-- > 0;) empty_.insert(i);
  }

  /// A block of each of `sizes` (at least 1 byte each), in their order, as offsets; none, and nothing
  /// changed, when one does not fit.
  [[nodiscard]] std::optional<std::vector<std::size_t>> allocate(std::span<std::size_t const> sizes) {
    std::vector<std::size_t> blocks;
    blocks.reserve(sizes.size());
    for (std::size_t const size : sizes) {
      auto const block = allocate_one(aligned_up(size, alignment));
      if (!block) {
        release(blocks);
        return std::nullopt;
      }
      blocks.push_back(*block);
    }
    return blocks;
  }

  /// Gives blocks back.
  void release(std::span<std::size_t const> blocks) {
    for (std::size_t const offset : blocks) {
      std::size_t const index = offset / slab_bytes_;
      Slab& slab = slabs_[index];
      slab.free.push_back(offset);
      if (slab.free.size() < slab.blocks) {
        if (slab.free.size() == 1) open_of(slab.block_bytes).insert(index);
        continue;
      }
      open_of(slab.block_bytes).erase(index);
      slab = Slab{};
      empty_.insert(index);
    }
  }

  /// The same arena with nothing in it.
  [[nodiscard]] ExpertArena emptied() const { return ExpertArena(bytes_, slab_bytes_ / 8); }

 private:
  struct Slab {
    std::size_t block_bytes = 0;
    std::size_t blocks = 0;
    std::vector<std::size_t> free;  // offsets; the last is taken next
  };
  struct Open {
    std::size_t block_bytes = 0;
    SlabSet slabs;
  };

  std::optional<std::size_t> allocate_one(std::size_t size) {
    SlabSet& open = open_of(size);
    if (open.empty()) {
      std::size_t at = 0;
      while (at < empty_.size() && bytes_of(empty_[at]) < size) ++at;
      if (at == empty_.size()) return std::nullopt;
      std::size_t const taken = empty_[at];
      divide(taken, size);
      open.insert(taken);
      empty_.erase(taken);
    }
    std::size_t const index = open[0];
    Slab& slab = slabs_[index];
    std::size_t const offset = slab.free.back();
    slab.free.pop_back();
    if (slab.free.empty()) open.erase(index);
    return offset;
  }

  // The slabs of blocks of `size` that have free ones.
  SlabSet& open_of(std::size_t size) {
    for (Open& open : open_) {
      if (open.block_bytes == size) return open.slabs;
    }
    return open_.emplace_back(Open{size, {}}).slabs;
  }

  [[nodiscard]] std::size_t bytes_of(std::size_t slab) const {
    return std::min(slab_bytes_, bytes_ - slab * slab_bytes_);
  }

  void divide(std::size_t index, std::size_t size) {
    Slab& slab = slabs_[index];
    slab.block_bytes = size;
    slab.blocks = bytes_of(index) / size;
    for (std::size_t i = slab.blocks; i-- > 0;) slab.free.push_back(index * slab_bytes_ + i * size);
  }

  std::size_t bytes_ = 0;
  std::size_t slab_bytes_ = 0;
  std::vector<Slab> slabs_;
  SlabSet empty_;           // slabs of no size
  std::vector<Open> open_;  // of each size that was ever asked for; adapters have few
};

}  // namespace atlas::lora::inline v0::detail
