// SPDX-License-Identifier: AGPL-3.0-only
//
// An adapter's token rows on their way into their block, a part at a time through staging.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/overlay/select.hpp"
#include "atlas/lora/pool/overlay_layout.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Packs overlays through `staging`, which is aligned for T and holds a row at least.
template <Element T>
struct OverlayPacker {
  std::span<std::byte> staging;
  ConversionPolicy policy;

  /// Puts the whole overlay, as `overlay_layout` says. `ready()` is called before staging is filled,
  /// `put(offset, bytes)` when its head holds what comes `offset` bytes into the block; both give a
  /// `Result<void>`. Errors: theirs, and those of `convert`.
  template <class Ready, class Put>
  [[nodiscard]] Result<ConversionCounts> pack(TokenOverlay const& overlay, Ready const& ready,
                                              Put const& put) const {
    OverlayLayout const at = overlay_layout(packed_overlay(overlay, sizeof(T), 0), sizeof(T));
    ConversionCounts counts;
    auto const put_ids = [&](std::span<std::int32_t const> ids, std::size_t offset) {
      return put_parts(ids.size(), sizeof(std::int32_t), offset, ready, put,
                       [&](std::size_t first, std::size_t count) {
                         std::memcpy(staging.data(), ids.data() + first, count * sizeof(std::int32_t));
                         return Result<void>();
                       });
    };
    auto const put_rows = [&](HostTensor const& rows, std::size_t offset) {
      return put_parts(
          static_cast<std::size_t>(rows.shape[0]), static_cast<std::size_t>(rows.shape[1]) * sizeof(T),
          offset, ready, put,
          [&](std::size_t first, std::size_t count) { return convert_rows(rows, first, count, counts); });
    };
    Result<void> done;
    if (!overlay.embedding.empty()) {
      std::vector<std::int32_t> map(static_cast<std::size_t>(overlay.vocab));
      fill_slot_map(overlay.embedding.ids, map);
      done = put_ids(map, at.slot_map);
      if (done) done = put_rows(overlay.embedding.rows, at.embed_rows);
      if (done && at.head_rows != at.embed_ids) done = put_ids(overlay.embedding.ids, at.embed_ids);
    }
    if (done && !overlay.head.empty()) {
      done = put_rows(overlay.head.rows, at.head_rows);
      if (done) done = put_ids(overlay.head.ids, at.head_ids);
    }
    if (!done) return cuda::std::unexpected<Error>(done.error());
    return counts;
  }

 private:
  // Calls `fill(first, count)` for parts of `units` that fit staging, and puts each.
  template <class Ready, class Put, class Fill>
  Result<void> put_parts(std::size_t units, std::size_t unit_bytes, std::size_t offset, Ready const& ready,
                         Put const& put, Fill const& fill) const {
    std::size_t const most = staging.size() / unit_bytes;
    for (std::size_t first = 0; first < units; first += most) {
      if (Result<void> free = ready(); !free) return free;
      std::size_t const count = std::min(most, units - first);
      if (Result<void> filled = fill(first, count); !filled) return filled;
      Result<void> done = put(offset + first * unit_bytes, count * unit_bytes);
      if (!done) return done;
    }
    return {};
  }

  // Rows `[first, first + count)` to the head of staging.
  Result<void> convert_rows(HostTensor const& rows, std::size_t first, std::size_t count,
                            ConversionCounts& counts) const {
    auto const width = static_cast<std::size_t>(rows.shape[1]);
    std::size_t const row_bytes = width * element_bytes(rows.type);
    auto const begin = rows.bytes.begin() + static_cast<std::ptrdiff_t>(first * row_bytes);
    HostTensor const part{
        rows.name,
        rows.type,
        {},
        std::vector<std::byte>(begin, begin + static_cast<std::ptrdiff_t>(count * row_bytes))};
    std::span<T> const out(reinterpret_cast<T*>(staging.data()), count * width);
    auto const converted = convert<T>(part, out, policy);
    if (!converted) return cuda::std::unexpected<Error>(converted.error());
    add_counts(counts, *converted);
    return {};
  }
};

}  // namespace atlas::lora::inline v0::detail
