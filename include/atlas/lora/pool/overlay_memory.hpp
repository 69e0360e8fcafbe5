// SPDX-License-Identifier: AGPL-3.0-only
//
// The region of a pool's memory that holds token overlays, and whether an adapter's can be in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/overlay_layout.hpp"
#include "atlas/lora/pool/pack_check.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

inline void check_rows(OverrideRows const& own, TokenOverlay const& overlay, PackFaults& faults) {
  if (own.empty()) return;
  check_tensor(own.rows, {std::ssize(own.ids), overlay.hidden}, faults);
  std::int64_t previous = -1;
  for (std::int32_t const id : own.ids) {
    if (id <= previous || id >= overlay.vocab) {
      faults.add(Errc::out_of_range, "tensor '" + own.rows.name + "': token " + std::to_string(id) +
                                         " is out of order or beyond the vocabulary");
      return;
    }
    previous = id;
  }
}

inline void check_overlay_room(std::size_t needed, std::size_t overlay_bytes, PackFaults& faults) {
  if (needed <= overlay_bytes) return;
  faults.add(Errc::out_of_memory, "token rows need " + std::to_string(needed) + " bytes, the pool has " +
                                      std::to_string(overlay_bytes) + " for all overlays");
}

/// Whether a pool of `overlay_bytes` can hold an adapter's token rows; every fault is named. Errors:
/// `unsupported` for rows that are not built, or a pool without overlays, unless they are to be left out;
/// `shape_mismatch`; `out_of_range` for a token; `out_of_memory` for rows that can never fit.
[[nodiscard]] inline Result<void> check_overlay(std::string_view name, Adapter const& adapter,
                                                ModelShape const& shape, std::size_t overlay_bytes,
                                                std::size_t element_bytes, bool leave_out_unserved) {
  PackFaults faults(name);
  if (!leave_out_unserved) {
    adapter.raw_overlay.for_each([&](HostTensor const& tensor) {
      faults.add(Errc::unsupported,
                 "tensor '" + tensor.name + "': token rows that build_overlay has not built");
    });
  }
  TokenOverlay const& overlay = adapter.overlay;
  if (overlay.empty() || (overlay_bytes == 0 && leave_out_unserved)) return faults.outcome();
  OverrideRows const& some = overlay.embedding.empty() ? overlay.head : overlay.embedding;
  if (overlay_bytes == 0) {
    faults.add(Errc::unsupported,
               "tensor '" + some.rows.name + "': the pool was made without token overlays");
    return faults.outcome();
  }
  if (overlay.vocab != shape.vocab() || overlay.hidden != shape.hidden()) {
    faults.add(Errc::shape_mismatch,
               "tensor '" + some.rows.name + "': was built for " + std::to_string(overlay.vocab) +
                   " tokens of " + std::to_string(overlay.hidden) + ", the model has " +
                   std::to_string(shape.vocab()) + " of " + std::to_string(shape.hidden()));
    return faults.outcome();
  }
  check_rows(overlay.embedding, overlay, faults);
  check_rows(overlay.head, overlay, faults);
  check_overlay_room(packed_overlay(overlay, element_bytes, 0).bytes, overlay_bytes, faults);
  return faults.outcome();
}

/// Which part of the region each physical slot holds. A block stays its slot's until the slot, spare again,
/// takes another, or another needs the room. Expects the ledger's mutex to be held, as the ledger does.
class OverlayMemory {
 public:
  OverlayMemory() = default;
  OverlayMemory(std::size_t bytes, std::size_t places) : bytes_(bytes), blocks_(places) {}

  /// Whether `bytes` fit where the blocks of places with `gives_up(place)` do not count.
  template <class GivesUp>
  [[nodiscard]] bool fits(std::size_t bytes, GivesUp const& gives_up) const {
    return find_gap(bytes, gives_up).has_value();
  }

  /// Gives `place` a block in place of its last one; spare places (`is_spare(place)`) lose theirs when that
  /// is needed. None when there is no room; then nothing has changed but that `place` has no block.
  template <class IsSpare>
  [[nodiscard]] bool take(std::int32_t place, std::size_t bytes, IsSpare const& is_spare) {
    if (holds(place)) at(place).reset();
    if (bytes == 0) return true;
    auto gap = find_gap(bytes, [](std::int32_t) { return false; });
    if (!gap) {
      gap = find_gap(bytes, is_spare);
      if (!gap) return false;
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        if (is_spare(static_cast<std::int32_t>(i))) blocks_[i].reset();
      }
    }
    at(place) = Block{*gap, aligned_up(bytes, alignment)};
    return true;
  }

  /// Whether `place` has a block.
  [[nodiscard]] bool holds(std::int32_t place) const noexcept {
    return static_cast<std::size_t>(place) < blocks_.size() &&
           blocks_[static_cast<std::size_t>(place)].has_value();
  }

  /// Where the block of `place` begins; bytes into the region, a multiple of 256. 0 when it has none.
  [[nodiscard]] std::size_t offset(std::int32_t place) const noexcept {
    return holds(place) ? blocks_[static_cast<std::size_t>(place)]->offset : 0;
  }

 private:
  static constexpr std::size_t alignment = 256;
  struct Block {
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };

  std::optional<Block>& at(std::int32_t place) noexcept { return blocks_[static_cast<std::size_t>(place)]; }

  // The first gap between the blocks that count.
  template <class GivesUp>
  [[nodiscard]] std::optional<std::size_t> find_gap(std::size_t bytes, GivesUp const& gives_up) const {
    std::vector<Block> held;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i] && !gives_up(static_cast<std::int32_t>(i))) held.push_back(*blocks_[i]);
    }
    std::sort(held.begin(), held.end(), [](Block const& a, Block const& b) { return a.offset < b.offset; });
    std::size_t begin = 0;
    for (Block const& block : held) {
      if (block.offset - begin >= bytes) return begin;
      begin = block.offset + block.bytes;
    }
    return begin <= bytes_ && bytes_ - begin >= bytes ? std::optional(begin) : std::nullopt;
  }

  std::size_t bytes_ = 0;
  std::vector<std::optional<Block>> blocks_;
};

}  // namespace atlas::lora::inline v0::detail
