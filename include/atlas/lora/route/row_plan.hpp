// SPDX-License-Identifier: AGPL-3.0-only
//
// The rows of a step grouped by slot: found once per step, read by every delta launch over the same rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// One slot that occurs and where its rows lie in `RowPlan::rows`.
struct alignas(16) RowGroup {
  std::int32_t slot = 0;      ///< in `[0, max_slots)`
  std::int32_t first = 0;     ///< index into `rows`
  std::int32_t count = 0;     ///< at least 1
  std::int32_t reserved = 0;  ///< zero

  friend constexpr bool operator==(RowGroup const&, RowGroup const&) = default;
};

/// Rows of a row tile: rows of one slot that are multiplied together.
inline constexpr std::int32_t tile_rows = 8;

/// Row tiles of a group of `rows` rows.
[[nodiscard]] ATLAS_HD constexpr std::int32_t row_tiles(std::int32_t rows) noexcept {
  return rows / tile_rows + (rows % tile_rows != 0 ? 1 : 0);
}
/// The most row tiles that `rows` rows in at most `max_groups` groups can make.
[[nodiscard]] ATLAS_HD constexpr std::int32_t max_row_tiles(std::int32_t rows,
                                                            std::int32_t max_groups) noexcept {
  // A group of c rows makes at most 1 + (c - 1) / 8 tiles.
  std::int32_t const groups = rows < max_groups ? rows : max_groups;
  return groups <= 0 ? 0 : groups + (rows - groups) / tile_rows;
}

/// The counts at the head of a plan.
struct alignas(16) RowPlanHeader {
  std::int32_t num_groups = 0;  ///< groups that are valid
  std::int32_t num_rows = 0;    ///< rows that have an adapter: the counts of all groups
  std::int32_t num_tiles = 0;   ///< row tiles of all groups
  std::int32_t reserved = 0;    ///< zero
};

/// A plan in device memory: pointers into one buffer laid out by `RowPlanLayout`. Trivially copyable; its
/// addresses and capacities are fixed, so a captured graph reads whatever the buffer holds at replay. Groups
/// are ascending by slot; rows are ascending within a group; base rows (and slots out of range) are in no
/// group.
struct RowPlan {
  RowPlanHeader* header = nullptr;    ///< one; device
  std::int32_t* row_slots = nullptr;  ///< `[capacity_rows]`: the slot of each row; negative is base
  RowGroup* groups = nullptr;         ///< `[max_groups]`, the first `num_groups` valid, zero behind
  std::int32_t* rows = nullptr;       ///< `[capacity_rows]`, the first `num_rows` valid
  RowGroup* tiles = nullptr;          ///< `[max_tiles]`: the groups in order, cut into pieces of at most
                                      ///< `tile_rows` rows; the first `num_tiles` valid, zero behind
  std::int32_t capacity_rows = 0;     ///< most rows of one plan
  std::int32_t max_slots = 0;         ///< slots `>= max_slots` are base
  std::int32_t max_groups = 0;        ///< the smaller of the two above
  std::int32_t max_tiles = 0;         ///< `max_row_tiles` of them
};
static_assert(std::is_trivially_copyable_v<RowPlan>);

/// Where a plan's parts lie in its buffer, in bytes. The buffer needs `bytes()` bytes, aligned to 16; the row
/// slots come directly behind the header, so that a host-built plan is one upload of the whole buffer and
/// uploading the row slots alone is one copy too.
struct RowPlanLayout {
  std::int32_t capacity_rows = 0;  ///< most rows of one plan
  std::int32_t max_slots = 0;      ///< slots `>= max_slots` are base

  /// Groups that can occur. Both fields must not be negative.
  [[nodiscard]] constexpr std::int32_t max_groups() const noexcept {
    return std::min(capacity_rows, max_slots);
  }
  /// Row tiles that can occur.
  [[nodiscard]] constexpr std::int32_t max_tiles() const noexcept {
    return max_row_tiles(capacity_rows, max_groups());
  }
  /// Where the row slots begin, in bytes from the head.
  [[nodiscard]] constexpr std::size_t row_slots_offset() const noexcept { return sizeof(RowPlanHeader); }
  /// Where the groups begin, likewise.
  [[nodiscard]] constexpr std::size_t groups_offset() const noexcept {
    return row_slots_offset() + round_up_16(static_cast<std::size_t>(capacity_rows) * sizeof(std::int32_t));
  }
  /// Where the rows begin, likewise.
  [[nodiscard]] constexpr std::size_t rows_offset() const noexcept {
    return groups_offset() + static_cast<std::size_t>(max_groups()) * sizeof(RowGroup);
  }
  /// Where the row tiles begin, likewise.
  [[nodiscard]] constexpr std::size_t tiles_offset() const noexcept {
    return rows_offset() + round_up_16(static_cast<std::size_t>(capacity_rows) * sizeof(std::int32_t));
  }
  /// Bytes of the buffer.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept {
    return tiles_offset() + static_cast<std::size_t>(max_tiles()) * sizeof(RowGroup);
  }

  /// The plan in `buffer`, host or device, which holds at least `bytes()` bytes and is aligned to 16.
  [[nodiscard]] RowPlan at(void* buffer) const noexcept {
    auto* const base = static_cast<std::byte*>(buffer);
    return RowPlan{reinterpret_cast<RowPlanHeader*>(base),
                   reinterpret_cast<std::int32_t*>(base + row_slots_offset()),
                   reinterpret_cast<RowGroup*>(base + groups_offset()),
                   reinterpret_cast<std::int32_t*>(base + rows_offset()),
                   reinterpret_cast<RowGroup*>(base + tiles_offset()),
                   capacity_rows,
                   max_slots,
                   max_groups(),
                   max_tiles()};
  }

 private:
  static constexpr std::size_t round_up_16(std::size_t n) noexcept { return (n + 15) / 16 * 16; }
};

/// Groups `slots` on the host, into the parts of a plan of `layout`: the header, `row_slots`
/// `[capacity_rows]`, `groups` `[max_groups()]`, `rows` `[capacity_rows]` and `tiles` `[max_tiles()]`.
/// `scratch` `[max_slots]` holds counts meanwhile. A slot that is negative or `>= max_slots` is base and is
/// written as `base_slot`, and so is every row slot beyond `slots`. O(capacity_rows + max_slots), allocates
/// nothing. Error: `invalid_argument`, and nothing written, when there are more slots than `capacity_rows` or
/// a part is too small.
[[nodiscard]] constexpr Errc build_row_plan(std::span<std::int32_t const> slots, RowPlanLayout layout,
                                            RowPlanHeader& header, std::span<std::int32_t> row_slots,
                                            std::span<RowGroup> groups, std::span<std::int32_t> rows,
                                            std::span<RowGroup> tiles,
                                            std::span<std::int32_t> scratch) noexcept {
  if (layout.capacity_rows < 0 || layout.max_slots < 0) return Errc::invalid_argument;
  auto const capacity = static_cast<std::size_t>(layout.capacity_rows);
  if (slots.size() > capacity || row_slots.size() < capacity || rows.size() < capacity ||
      groups.size() < static_cast<std::size_t>(layout.max_groups()) ||
      tiles.size() < static_cast<std::size_t>(layout.max_tiles()) ||
      scratch.size() < static_cast<std::size_t>(layout.max_slots)) {
    return Errc::invalid_argument;
  }
  std::span<std::int32_t> const next = scratch.first(static_cast<std::size_t>(layout.max_slots));
  std::fill(next.begin(), next.end(), 0);
  for (std::size_t i = 0; i < capacity; ++i) {
    bool const adapted = i < slots.size() && slots[i] >= 0 && slots[i] < layout.max_slots;
    row_slots[i] = adapted ? slots[i] : base_slot;
    if (adapted) ++next[static_cast<std::size_t>(slots[i])];
  }
  header = RowPlanHeader{};
  for (std::size_t slot = 0; slot < next.size(); ++slot) {
    std::int32_t const count = next[slot];
    next[slot] = header.num_rows;  // from a slot's count to where its next row goes
    if (count == 0) continue;
    groups[static_cast<std::size_t>(header.num_groups++)] =
        RowGroup{static_cast<std::int32_t>(slot), header.num_rows, count, 0};
    for (std::int32_t row = 0; row < count; row += tile_rows) {
      tiles[static_cast<std::size_t>(header.num_tiles++)] = RowGroup{
          static_cast<std::int32_t>(slot), header.num_rows + row, std::min(tile_rows, count - row), 0};
    }
    header.num_rows += count;
  }
  std::fill(groups.begin() + header.num_groups, groups.end(), RowGroup{});
  std::fill(tiles.begin() + header.num_tiles, tiles.end(), RowGroup{});
  for (std::size_t i = 0; i < capacity; ++i) {
    if (row_slots[i] < 0) continue;
    std::int32_t& place = next[static_cast<std::size_t>(row_slots[i])];
    rows[static_cast<std::size_t>(place++)] = static_cast<std::int32_t>(i);
  }
  return Errc::ok;
}

/// The same into `plan`, which must lie in host memory: uploading `RowPlanLayout::bytes()` bytes of its
/// buffer uploads slots and plan at once.
[[nodiscard]] inline Errc build_row_plan(std::span<std::int32_t const> slots, RowPlan const& plan,
                                         std::span<std::int32_t> scratch) noexcept {
  auto const capacity = static_cast<std::size_t>(std::max(plan.capacity_rows, 0));
  return build_row_plan(
      slots, RowPlanLayout{plan.capacity_rows, plan.max_slots}, *plan.header,
      std::span<std::int32_t>(plan.row_slots, capacity),
      std::span<RowGroup>(plan.groups, static_cast<std::size_t>(std::max(plan.max_groups, 0))),
      std::span<std::int32_t>(plan.rows, capacity),
      std::span<RowGroup>(plan.tiles, static_cast<std::size_t>(std::max(plan.max_tiles, 0))), scratch);
}

}  // namespace atlas::lora::inline v0
