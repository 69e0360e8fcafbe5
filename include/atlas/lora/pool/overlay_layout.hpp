// SPDX-License-Identifier: AGPL-3.0-only
//
// Where the parts of one adapter's token rows lie, packed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/tables/overlay_table.hpp"

namespace atlas::lora::inline v0 {

/// An adapter's token rows as packed, apart from ids and elements: a block of `bytes`, which a pool copies as
/// it is.
struct PackedOverlay {
  std::size_t embed_count = 0;     ///< rows of the embedding
  std::size_t head_count = 0;      ///< the head's own rows
  bool head_is_embedding = false;  ///< as `TokenOverlay::head_is_embedding`
  std::int64_t vocab = 0;          ///< tokens of the model
  std::int64_t hidden = 0;         ///< elements of a row
  std::size_t bytes = 0;           ///< of the block; 0 for an adapter without token rows
  std::size_t offset = 0;          ///< bytes before the block, which lies behind all pairs
};

namespace detail {

/// Where the parts of one adapter's overlay lie in its block, in bytes, multiples of 16: a map of the
/// vocabulary, the embedding's rows, the embedding's ids where the head shares them, the head's rows and ids.
struct OverlayLayout {
  std::size_t slot_map = 0;
  std::size_t embed_rows = 0;
  std::size_t embed_ids = 0;
  std::size_t head_rows = 0;
  std::size_t head_ids = 0;
  std::size_t bytes = 0;  ///< of the whole; 0 for an adapter without token rows

  friend constexpr bool operator==(OverlayLayout const&, OverlayLayout const&) = default;
};

/// The layout for so many rows. The numbers come from an adapter that is in host memory, so nothing
/// overflows.
[[nodiscard]] constexpr OverlayLayout overlay_layout(std::size_t embed_count, std::size_t head_count,
                                                     bool head_is_embedding, std::size_t vocab,
                                                     std::size_t hidden, std::size_t element_bytes) noexcept {
  OverlayLayout layout;
  std::size_t const row = hidden * element_bytes;
  layout.embed_rows = embed_count == 0 ? 0 : aligned_up(vocab * sizeof(std::int32_t), 16);
  layout.embed_ids = layout.embed_rows + aligned_up(embed_count * row, 16);
  bool const shares = head_is_embedding && head_count == 0;
  layout.head_rows = layout.embed_ids + (shares ? aligned_up(embed_count * sizeof(std::int32_t), 16) : 0);
  layout.head_ids = layout.head_rows + aligned_up(head_count * row, 16);
  layout.bytes = layout.head_ids + aligned_up(head_count * sizeof(std::int32_t), 16);
  return layout;
}
[[nodiscard]] constexpr OverlayLayout overlay_layout(PackedOverlay const& overlay,
                                                     std::size_t element_bytes) noexcept {
  return overlay_layout(overlay.embed_count, overlay.head_count, overlay.head_is_embedding,
                        static_cast<std::size_t>(overlay.vocab), static_cast<std::size_t>(overlay.hidden),
                        element_bytes);
}

/// What a checked overlay is as packed, `offset` bytes behind the first pair.
[[nodiscard]] inline PackedOverlay packed_overlay(TokenOverlay const& overlay, std::size_t element_bytes,
                                                  std::size_t offset) noexcept {
  PackedOverlay packed{overlay.embedding.ids.size(),
                       overlay.head.ids.size(),
                       overlay.head_is_embedding,
                       overlay.vocab,
                       overlay.hidden,
                       0,
                       offset};
  packed.bytes = overlay_layout(packed, element_bytes).bytes;
  return packed;
}

/// Bytes of token rows that are staged at once, where a row does not need more.
inline constexpr std::size_t most_overlay_staging = std::size_t{1} << 20;

/// Bytes of staging that one overlay is packed through: a row at least, and no more than it has.
[[nodiscard]] constexpr std::size_t overlay_staging_bytes(PackedOverlay const& overlay,
                                                          std::size_t element_bytes) noexcept {
  return std::max(static_cast<std::size_t>(overlay.hidden) * element_bytes,
                  std::min(overlay.bytes, most_overlay_staging));
}

/// The cell of an overlay that was packed at `block`.
template <Element T>
[[nodiscard]] OverlayCell<T> overlay_cell_at(PackedOverlay const& overlay, std::byte const* block) noexcept {
  if (overlay.bytes == 0) return {};
  OverlayLayout const at = overlay_layout(overlay, sizeof(T));
  OverlaySets<T> sets;
  sets.slot_map = reinterpret_cast<std::int32_t const*>(block + at.slot_map);
  sets.embed_rows = reinterpret_cast<T const*>(block + at.embed_rows);
  sets.embed_ids = reinterpret_cast<std::int32_t const*>(block + at.embed_ids);
  sets.embed_count = static_cast<std::int32_t>(overlay.embed_count);
  sets.head_rows = reinterpret_cast<T const*>(block + at.head_rows);
  sets.head_ids = reinterpret_cast<std::int32_t const*>(block + at.head_ids);
  sets.head_count = static_cast<std::int32_t>(overlay.head_count);
  sets.vocab = overlay.vocab;
  return wire_overlay(sets, overlay.head_is_embedding);
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
