// SPDX-License-Identifier: AGPL-3.0-only
//
// An adapter's token rows on their way into a pool's memory, a part at a time through pinned staging.
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
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/load_lanes.hpp"
#include "atlas/lora/pool/overlay_memory.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Packs overlays on one lane. `staging` is pinned and holds a row at least.
template <Element T, Backend B>
struct OverlayPacker {
  B& backend;
  typename LoadLanes<B>::Lane const& lane;
  std::span<std::byte> staging;
  StageOptions const& how;

  /// Writes the whole overlay into the block at `to`, as `overlay_layout` says. Enqueues the last copies,
  /// which read staging. Errors: those of `convert`; `cancelled`; the backend's.
  [[nodiscard]] Result<ConversionCounts> pack(TokenOverlay const& overlay, std::byte* to) {
    ConversionCounts counts;
    OverlayLayout const at = overlay_layout(overlay, sizeof(T));
    if (at.bytes == 0) return counts;
    Result<void> sent;
    if (!overlay.embedding.empty()) {
      std::vector<std::int32_t> map(static_cast<std::size_t>(overlay.vocab));
      fill_slot_map(overlay.embedding.ids, map);
      sent = send_ids(map, to + at.slot_map);
      if (sent) sent = send_rows(overlay.embedding.rows, to + at.embed_rows, counts);
      if (sent && at.head_rows != at.embed_ids) sent = send_ids(overlay.embedding.ids, to + at.embed_ids);
    }
    if (sent && !overlay.head.empty()) {
      sent = send_rows(overlay.head.rows, to + at.head_rows, counts);
      if (sent) sent = send_ids(overlay.head.ids, to + at.head_ids);
    }
    if (!sent) return cuda::std::unexpected<Error>(sent.error());
    return counts;
  }

 private:
  // Calls `fill(first, count)` for parts of `units` that fit staging, and sends each.
  template <class Fill>
  Result<void> send(std::size_t units, std::size_t unit_bytes, std::byte* to, Fill const& fill) {
    std::size_t const most = staging.size() / unit_bytes;
    for (std::size_t first = 0; first < units; first += most) {
      if (how.stop.stop_requested()) {
        return fail(Errc::cancelled, "token rows: cancelled before they were packed");
      }
      if (auto ready = LoadLanes<B>::drain(backend, lane); !ready) return ready;
      std::size_t const count = std::min(most, units - first);
      if (auto filled = fill(first, count); !filled) return filled;
      auto sent = backend.copy(to + first * unit_bytes, staging.data(), count * unit_bytes, *lane.stream);
      if (!sent) return sent;
    }
    return {};
  }

  Result<void> send_ids(std::span<std::int32_t const> ids, std::byte* to) {
    return send(ids.size(), sizeof(std::int32_t), to, [&](std::size_t first, std::size_t count) {
      std::memcpy(staging.data(), ids.data() + first, count * sizeof(std::int32_t));
      return Result<void>();
    });
  }

  Result<void> send_rows(HostTensor const& rows, std::byte* to, ConversionCounts& counts) {
    auto const width = static_cast<std::size_t>(rows.shape[1]);
    std::size_t const row_bytes = width * element_bytes(rows.type);
    auto const total = static_cast<std::size_t>(rows.shape[0]);
    return send(total, width * sizeof(T), to, [&](std::size_t first, std::size_t count) -> Result<void> {
      auto const begin = rows.bytes.begin() + static_cast<std::ptrdiff_t>(first * row_bytes);
      HostTensor const part{
          rows.name,
          rows.type,
          {},
          std::vector<std::byte>(begin, begin + static_cast<std::ptrdiff_t>(count * row_bytes))};
      auto const converted =
          convert<T>(part, std::span<T>(reinterpret_cast<T*>(staging.data()), count * width), how.conversion);
      if (!converted) return cuda::std::unexpected<Error>(converted.error());
      add_counts(counts, *converted);
      return {};
    });
  }
};

}  // namespace atlas::lora::inline v0::detail
