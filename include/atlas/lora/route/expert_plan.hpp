// SPDX-License-Identifier: AGPL-3.0-only
//
// The rows of a mixture-of-experts layer grouped by (slot, expert): found once a layer, read by every delta
// launch over the same rows, whether they are sorted or not.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/route/expert_rows.hpp"
#include "atlas/lora/route/row_plan.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// A row tile: up to `tile_rows` rows of one (slot, expert); a pair with more rows has several groups in a
/// row, all full but the last.
struct alignas(16) ExpertGroup {
  std::int32_t slot = 0;                                           ///< in `[0, max_slots)`
  std::int32_t expert = 0;                                         ///< in `[0, num_experts)`
  std::int32_t count = 0;                                          ///< at least 1
  std::int32_t reserved = 0;                                       ///< zero
  std::int32_t row[tile_rows] = {-1, -1, -1, -1, -1, -1, -1, -1};  ///< ascending; -1 beyond `count`

  friend constexpr bool operator==(ExpertGroup const&, ExpertGroup const&) = default;
};

/// The counts at the head of a plan.
struct alignas(16) ExpertPlanHeader {
  std::int32_t num_groups = 0;        ///< groups that are valid
  std::int32_t num_rows = 0;          ///< rows that are in a group
  std::int32_t reserved[2] = {0, 0};  ///< zero

  friend constexpr bool operator==(ExpertPlanHeader const&, ExpertPlanHeader const&) = default;
};

/// A plan in device memory: pointers into one buffer laid out by `ExpertPlanLayout`. Trivially copyable; its
/// addresses and capacities are fixed, so a captured graph reads whatever the buffer holds at replay. Groups
/// are ascending by (slot, expert), rows ascending over the groups of one pair. Rows that are base, and those
/// whose slot, token or expert is out of range, are in no group. Whether a slot adapts an expert is not
/// known to the plan.
struct ExpertPlan {
  ExpertPlanHeader* header = nullptr;  ///< one; device
  ExpertGroup* groups = nullptr;       ///< `[max_groups]`, the first `num_groups` valid, the others arbitrary
  std::int32_t capacity_rows = 0;      ///< most rows of one plan
  std::int32_t max_slots = 0;          ///< slots `>= max_slots` are base
  std::int32_t num_experts = 0;        ///< experts `>= num_experts` are no experts
  std::int32_t max_groups = 0;         ///< `ExpertPlanLayout::max_groups` of the capacities
};
static_assert(std::is_trivially_copyable_v<ExpertPlan>);

/// Where a plan's parts lie in its buffer, in bytes. The buffer needs `bytes()` bytes, aligned to 16. No
/// field may be negative, and `max_slots * num_experts` must be below 2^31.
struct ExpertPlanLayout {
  std::int32_t capacity_rows = 0;  ///< most rows of one plan: of all rows, or of a window of them
  std::int32_t max_slots = 0;      ///< slots `>= max_slots` are base
  std::int32_t num_experts = 0;    ///< experts of the layer

  /// Pairs of a slot and an expert.
  [[nodiscard]] constexpr std::int64_t keys() const noexcept {
    return static_cast<std::int64_t>(max_slots) * num_experts;
  }
  /// Most groups of `rows` rows: one with c rows makes at most 1 + (c - 1) / 8.
  [[nodiscard]] constexpr std::int32_t max_groups(std::int32_t rows) const noexcept {
    return max_row_tiles(rows, static_cast<std::int32_t>(std::min<std::int64_t>(rows, keys())));
  }
  /// Most groups of any plan in the buffer.
  [[nodiscard]] constexpr std::int32_t max_groups() const noexcept { return max_groups(capacity_rows); }
  /// Bytes of the buffer.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept {
    return sizeof(ExpertPlanHeader) + static_cast<std::size_t>(max_groups()) * sizeof(ExpertGroup);
  }

  /// The plan in `buffer`, host or device, which holds at least `bytes()` bytes and is aligned to 16.
  [[nodiscard]] ExpertPlan at(void* buffer) const noexcept {
    auto* const base = static_cast<std::byte*>(buffer);
    return ExpertPlan{reinterpret_cast<ExpertPlanHeader*>(base),
                      reinterpret_cast<ExpertGroup*>(base + sizeof(ExpertPlanHeader)),
                      capacity_rows,
                      max_slots,
                      num_experts,
                      max_groups()};
  }
};

namespace detail {

/// The number of a pair, or -1 where slot or expert is out of range.
[[nodiscard]] ATLAS_HD constexpr std::int32_t expert_key(std::int32_t slot, std::int32_t expert,
                                                         std::int32_t max_slots,
                                                         std::int32_t num_experts) noexcept {
  bool const inside = slot >= 0 && slot < max_slots && expert >= 0 && expert < num_experts;
  return inside ? slot * num_experts + expert : -1;
}

/// Whether rows can be read for a plan.
[[nodiscard]] constexpr bool usable(ExpertRows const& rows) noexcept {
  constexpr std::int32_t most = 1 << 30;
  return rows.rows >= 0 && rows.first_row >= 0 && rows.first_row <= most &&
         rows.rows <= most - rows.first_row && rows.tokens >= 0 && rows.top_k >= 1 &&
         (rows.tokens == 0 || rows.token_slots != nullptr) &&
         (rows.rows == 0 || rows.expert_ids != nullptr || rows.expert_offsets != nullptr);
}

}  // namespace detail

/// Groups `rows` on the host, into the header and `groups` `[max_groups()]` of a plan of `layout`. All
/// pointers are host memory. `scratch` `[2 * keys]` holds counts meanwhile. O(rows + keys), allocates
/// nothing. Error: `invalid_argument`, and nothing written, when there are more rows than `capacity_rows`,
/// a pointer is null, or a part is too small.
[[nodiscard]] constexpr Errc build_expert_plan(ExpertRows const& rows, ExpertPlanLayout layout,
                                               ExpertPlanHeader& header, std::span<ExpertGroup> groups,
                                               std::span<std::int32_t> scratch) noexcept {
  if (layout.capacity_rows < 0 || layout.max_slots < 0 || layout.num_experts < 0 || !detail::usable(rows) ||
      rows.rows > layout.capacity_rows || layout.keys() > 0x7fffffff) {
    return Errc::invalid_argument;
  }
  auto const keys = static_cast<std::size_t>(layout.keys());
  if (groups.size() < static_cast<std::size_t>(layout.max_groups()) || scratch.size() < 2 * keys) {
    return Errc::invalid_argument;
  }
  std::span<std::int32_t> const count = scratch.first(keys);
  std::span<std::int32_t> const first_group = scratch.subspan(keys, keys);
  std::fill(count.begin(), count.end(), 0);
  auto const key_of = [&](std::int32_t i) {
    std::int32_t const row = rows.first_row + i;
    return detail::expert_key(rows.slot(row), rows.expert(row, layout.num_experts), layout.max_slots,
                              layout.num_experts);
  };
  header = ExpertPlanHeader{};
  for (std::int32_t i = 0; i < rows.rows; ++i) {
    std::int32_t const key = key_of(i);
    if (key < 0) continue;
    ++count[static_cast<std::size_t>(key)];
    ++header.num_rows;
  }
  for (std::size_t key = 0; key < keys; ++key) {
    first_group[key] = header.num_groups;
    header.num_groups += row_tiles(count[key]);
    count[key] = 0;  // from a pair's rows to how many of them have their places
  }
  for (std::int32_t i = 0; i < rows.rows; ++i) {
    std::int32_t const key = key_of(i);
    if (key < 0) continue;
    std::int32_t& placed = count[static_cast<std::size_t>(key)];
    ExpertGroup& group =
        groups[static_cast<std::size_t>(first_group[static_cast<std::size_t>(key)] + placed / tile_rows)];
    if (placed % tile_rows == 0) {
      group = ExpertGroup{};
      group.slot = key / layout.num_experts;
      group.expert = key % layout.num_experts;
    }
    group.row[placed++ % tile_rows] = rows.first_row + i;
    ++group.count;
  }
  return Errc::ok;
}

/// The same into `plan`, which must lie in host memory; uploading the buffer uploads it.
[[nodiscard]] inline Errc build_expert_plan(ExpertRows const& rows, ExpertPlan const& plan,
                                            std::span<std::int32_t> scratch) noexcept {
  return build_expert_plan(
      rows, ExpertPlanLayout{plan.capacity_rows, plan.max_slots, plan.num_experts}, *plan.header,
      std::span<ExpertGroup>(plan.groups, static_cast<std::size_t>(std::max(plan.max_groups, 0))), scratch);
}

}  // namespace atlas::lora::inline v0
