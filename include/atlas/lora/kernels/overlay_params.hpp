// SPDX-License-Identifier: AGPL-3.0-only
//
// The operands of token overlays: plain values with device pointers, checked by the launchers; and how the
// head's product is divided among blocks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/route/row_plan.hpp"
#include "atlas/lora/tables/overlay_table.hpp"

namespace atlas::lora::inline v0 {

/// `h[row] = the slot's own embedding row of the row's token`, where it has one. Goes right after the gather
/// from the base's embedding, before anything scales or reads it. Rows are copied, nothing is rounded. Rows
/// that are base, slots and tokens out of range, and tokens that the slot leaves alone keep h's bytes.
template <Element T>
struct OverlayEmbedParams {
  T* h = nullptr;                           ///< `[rows, table.hidden]`, device, element-aligned
  std::int64_t h_row_stride = 0;            ///< elements between rows, at least `table.hidden`
  std::int32_t rows = 0;                    ///< rows of h
  std::int32_t const* tokens = nullptr;     ///< `[rows]`, device
  std::int32_t const* row_slots = nullptr;  ///< `[rows]`, device; negative is base. A plan's, for one
  OverlayTable<T> table{};                  ///< by value; its cells are device memory
  /// Promises that tokens, row slots and cells are settled before this launch's dependencies, as
  /// `DeltaParams::inputs_settled`: the gather that comes before it is enough where it is launched in full,
  /// or waits before it triggers. h need not be.
  bool inputs_settled = false;
};

/// `logits[row, id] = Y(sum_k x[row, k] * the slot's own head row of id)` for every id that the row's slot
/// overrides: written, not added. Goes right after the head's product, before the delta of the head, if there
/// is one, and before anything caps or reads the logits. Sums are in f32 in the order of contraction.hpp over
/// `table.hidden` and are rounded once. Other logits, and pads beyond the vocabulary, keep their bytes.
template <Element T, Element Y = T>
struct OverlayHeadParams {
  T const* x = nullptr;                ///< `[rows, table.hidden]`, device, element-aligned
  std::int64_t x_row_stride = 0;       ///< elements between rows, at least `table.hidden`
  Y* logits = nullptr;                 ///< `[rows, table.vocab]`, device; must not overlap x
  std::int64_t logits_row_stride = 0;  ///< elements between rows, at least `table.vocab`
  std::int32_t rows =
      0;  ///< rows of x and logits; at most `plan.capacity_rows`. Rows of the plan beyond are left out
  RowPlan plan{};               ///< of the rows that the head sees; device memory, read by the kernel
  OverlayTable<T> table{};      ///< by value; its cells are device memory
  bool inputs_settled = false;  ///< as `DeltaParams::inputs_settled`, for plan and cells
};

static_assert(std::is_trivially_copyable_v<OverlayHeadParams<float>>);

namespace detail {

/// Warps of a block of the head's kernel.
inline constexpr std::int32_t head_warps = 8;
/// Override rows of a multiplied tile.
inline constexpr std::int32_t head_tile_overrides = 16;
/// Most batch rows of a small streamed item: its warps take one tile of overrides, else two.
inline constexpr std::int32_t few_stream_rows = 16;
/// Small streamed items that a block multiplies in the time of a large one, of 64 rows and twice the
/// overrides; whole numbers, and fewer rather than more.
inline constexpr std::int32_t small_in_large_item = 2;

/// From how many overrides on a group's rows stream: with fewer, whole blocks for 128 rows or more each would
/// leave most of a machine without work; with more, batch rows must share one read of the weights.
[[nodiscard]] ATLAS_HD constexpr bool streams(std::int32_t overrides, std::int32_t rows) noexcept {
  return overrides >= (rows > few_stream_rows ? 4096 : 16384);
}
/// Whether some slot of a table may stream.
[[nodiscard]] ATLAS_HD constexpr bool may_stream(std::int32_t max_head_count) noexcept {
  return streams(max_head_count, few_stream_rows + 1);
}

/// What a form of the kernel can hold.
struct HeadForm {
  std::int32_t tile_rows = 0;     ///< batch rows of a tile
  std::int32_t across_tiles = 1;  ///< most tiles along the overrides of a spread item
  std::int32_t down_tiles = 1;    ///< most of them along the batch rows; a power of 2
  std::int32_t stream_rows = 0;   ///< most batch rows of a streamed item
};

/// How one group's product, overrides by batch rows, is cut into items. Spread: a team of blocks takes an
/// item, its warps segments of k. Streamed: a block takes an item, its warps override tiles over all of k.
struct HeadWork {
  std::int32_t item_overrides = 0;
  std::int32_t item_rows = 0;
  std::int32_t across = 0;  ///< items along the overrides
  std::int32_t down = 0;    ///< items along the batch rows
  bool streamed = false;

  [[nodiscard]] ATLAS_HD constexpr std::int32_t items() const noexcept { return across * down; }
  /// The first override and the first row of item `index`. Neighbours share the rows of x.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t first_override(std::int32_t index) const noexcept {
    return (down == 1 ? index : index % across) * item_overrides;
  }
  [[nodiscard]] ATLAS_HD constexpr std::int32_t first_row(std::int32_t index) const noexcept {
    return down == 1 ? 0 : index / across * item_rows;
  }
  friend constexpr bool operator==(HeadWork const&, HeadWork const&) = default;
};

/// `a / b` rounded up for positive numbers, in 32 bits: every block divides before it asks for its first
/// weights.
[[nodiscard]] ATLAS_HD constexpr std::int32_t parts_of(std::int32_t a, std::int32_t b) noexcept {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(a) - 1U) / static_cast<std::uint32_t>(b)) + 1;
}

/// The streamed work of a group for `blocks` blocks: small items where batch rows are few, or where large
/// ones would leave so many blocks without that small ones are done sooner.
[[nodiscard]] ATLAS_HD constexpr HeadWork streamed_work(std::int32_t overrides, std::int32_t rows,
                                                        std::int32_t blocks, HeadForm form) noexcept {
  std::int32_t const overrides_each = head_warps * head_tile_overrides;
  std::int32_t const few = form.stream_rows < few_stream_rows ? form.stream_rows : few_stream_rows;
  HeadWork const small{overrides_each, few, parts_of(overrides, overrides_each), parts_of(rows, few), true};
  if (rows <= few_stream_rows || form.stream_rows <= few_stream_rows) return small;
  HeadWork const large{2 * overrides_each, form.stream_rows, parts_of(overrides, 2 * overrides_each),
                       parts_of(rows, form.stream_rows), true};
  bool const sooner =
      parts_of(small.items(), blocks) <= small_in_large_item * parts_of(large.items(), blocks);
  return sooner ? small : large;
}

/// The work of one of `groups` groups for `teams` teams, which are blocks where it streams. A spread item is
/// one tile where teams are enough for that; else batch rows share a read of the weights first, and then
/// overrides one of x.
[[nodiscard]] ATLAS_HD constexpr HeadWork head_work(std::int32_t overrides, std::int32_t rows,
                                                    std::int32_t groups, std::int32_t teams,
                                                    HeadForm form) noexcept {
  if (overrides < 1 || rows < 1) return HeadWork{1, 1, 0, 0, false};
  std::int32_t const own_teams = groups > 1 ? (teams > groups ? teams / groups : 1) : teams;
  if (streams(overrides, rows)) return streamed_work(overrides, rows, own_teams, form);
  std::int32_t const all_across = parts_of(overrides, head_tile_overrides);
  std::int32_t down = parts_of(rows, form.tile_rows);
  std::int32_t across_tiles = 1;
  std::int32_t down_tiles = 1;
  while (down > 1 && down_tiles<form.down_tiles&& static_cast<std::int64_t>(all_across) * down> own_teams) {
    down_tiles *= 2;
    down = (down + 1) / 2;
  }
  if (static_cast<std::int64_t>(all_across) * down > own_teams) {
    std::int32_t const along = down == 1 ? own_teams : own_teams > down ? own_teams / down : 1;
    across_tiles = parts_of(all_across, along);
    if (across_tiles > form.across_tiles) across_tiles = form.across_tiles;
  }
  return HeadWork{across_tiles * head_tile_overrides, down_tiles * form.tile_rows,
                  across_tiles == 1 ? all_across : parts_of(all_across, across_tiles), down, false};
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
