// SPDX-License-Identifier: AGPL-3.0-only
//
// The device table of token overlays: for each slot, which rows of the embedding and of the head are its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What one slot does to embedding and head. Null rows, or a count of 0, mean that it leaves that table
/// alone. Kernels read a cell with ordinary 16-byte loads, so it is aligned to 16 bytes.
template <Element T>
struct alignas(16) OverlayCell {
  /// `[vocab]`: the index of a token's row in `embed_rows`, negative for none; device.
  std::int32_t const* slot_map = nullptr;
  T const* embed_rows =
      nullptr;  ///< `[embed_count, hidden]`, contiguous; device; element-aligned (16 is fast)
  T const* head_rows = nullptr;  ///< `[head_count, hidden]`, likewise
  std::int32_t const* head_ids =
      nullptr;                        ///< `[head_count]`: the logit of each row of `head_rows`, ascending
  std::int32_t embed_count = 0;       ///< values of `slot_map` from here on are read as none
  std::int32_t head_count = 0;        ///< rows of `head_rows`
  std::int32_t reserved[2] = {0, 0};  ///< zero

  /// Whether the slot has rows of the embedding.
  [[nodiscard]] ATLAS_HD constexpr bool embeds() const noexcept {
    return embed_count > 0 && slot_map != nullptr && embed_rows != nullptr;
  }
  /// Whether it has rows of the head.
  [[nodiscard]] ATLAS_HD constexpr bool heads() const noexcept {
    return head_count > 0 && head_rows != nullptr && head_ids != nullptr;
  }

  friend constexpr bool operator==(OverlayCell const&, OverlayCell const&) = default;
};
static_assert(std::is_trivially_copyable_v<OverlayCell<float>> && sizeof(OverlayCell<float>) == 48);

/// All slots' overlay cells, `cell_stride_bytes` apart. Trivially copyable; passed to kernels by value. Cells
/// may change between launches; their addresses stay for the table's life, so captured graphs stay right.
template <Element T>
struct OverlayTable {
  OverlayCell<T> const* cells = nullptr;  ///< slot 0's cell; device; null means that no slot has an overlay
  std::int64_t cell_stride_bytes = sizeof(OverlayCell<T>);  ///< multiple of 16
  std::int32_t max_slots = 0;       ///< slots `>= max_slots` are base and are never read through
  std::int32_t max_head_count = 0;  ///< no cell's `head_count` exceeds it; sizes launches, not work
  std::int64_t vocab = 0;   ///< tokens of every cell's `slot_map`; ids beyond are base and are never read
  std::int64_t hidden = 0;  ///< elements of a row

  /// The cell of `slot`, which must be in `[0, max_slots)`.
  [[nodiscard]] ATLAS_HD OverlayCell<T> const* cell(std::int32_t slot) const noexcept {
    return reinterpret_cast<OverlayCell<T> const*>(reinterpret_cast<std::byte const*>(cells) +
                                                   slot * cell_stride_bytes);
  }
};
static_assert(std::is_trivially_copyable_v<OverlayTable<float>>);

/// One slot's sets of overrides in device memory, before they are wired into a cell.
template <Element T>
struct OverlaySets {
  std::int32_t const* slot_map = nullptr;   ///< as in `OverlayCell`
  T const* embed_rows = nullptr;            ///< likewise
  std::int32_t const* embed_ids = nullptr;  ///< `[embed_count]`, ascending
  std::int32_t embed_count = 0;             ///< rows of the embedding; 0 for none
  T const* head_rows = nullptr;             ///< the head's own set
  std::int32_t const* head_ids = nullptr;   ///< `[head_count]`, ascending
  std::int32_t head_count = 0;              ///< rows of the head; 0 for none
  std::int64_t vocab = 0;                   ///< tokens that `slot_map` and the ids speak of

  /// Whether the slot has no rows of its own.
  [[nodiscard]] ATLAS_HD constexpr bool empty() const noexcept { return embed_count == 0 && head_count == 0; }
};

/// The cell of one slot: the head takes its own set, whatever the head is; else the embedding's where
/// `head_is_embedding`; else nothing.
template <Element T>
[[nodiscard]] constexpr OverlayCell<T> wire_overlay(OverlaySets<T> const& sets,
                                                    bool head_is_embedding) noexcept {
  OverlayCell<T> cell;
  if (sets.embed_count > 0) {
    cell.slot_map = sets.slot_map;
    cell.embed_rows = sets.embed_rows;
    cell.embed_count = sets.embed_count;
  }
  bool const own = sets.head_count > 0;
  if (!own && (!head_is_embedding || sets.embed_count == 0)) return cell;
  cell.head_rows = own ? sets.head_rows : sets.embed_rows;
  cell.head_ids = own ? sets.head_ids : sets.embed_ids;
  cell.head_count = own ? sets.head_count : sets.embed_count;
  return cell;
}

/// What the sets of all slots have in common.
struct OverlayExtent {
  std::int64_t vocab = 0;           ///< 0 when no slot has a set
  std::int32_t max_head_count = 0;  ///< the largest of the cells

  friend constexpr bool operator==(OverlayExtent const&, OverlayExtent const&) = default;
};

/// Wires every slot's sets into `cells`, as many, for an engine that owns its memory. Errors, and nothing is
/// written: `invalid_argument` when the numbers of slots differ; `shape_mismatch` when two sets are of
/// different vocabularies.
template <Element T>
[[nodiscard]] constexpr cuda::std::expected<OverlayExtent, Errc> wire_overlays(
    std::span<OverlaySets<T> const> sets, bool head_is_embedding, std::span<OverlayCell<T>> cells) noexcept {
  if (sets.size() != cells.size()) return cuda::std::unexpected<Errc>(Errc::invalid_argument);
  OverlayExtent extent;
  for (OverlaySets<T> const& slot : sets) {
    if (slot.empty()) continue;
    if (extent.vocab != 0 && extent.vocab != slot.vocab) {
      return cuda::std::unexpected<Errc>(Errc::shape_mismatch);
    }
    extent.vocab = slot.vocab;
  }
  for (std::size_t i = 0; i < sets.size(); ++i) {
    cells[i] = wire_overlay(sets[i], head_is_embedding);
    extent.max_head_count = std::max(extent.max_head_count, cells[i].head_count);
  }
  return extent;
}

}  // namespace atlas::lora::inline v0
