// SPDX-License-Identifier: AGPL-3.0-only
//
// The rows of a mixture-of-experts layer: what token and expert each is of, in the forms that engines have.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// The rows of the experts' outputs in one layer, one for each (token, choice) of its top-k, each with a
/// token, whose slot it has, and an expert. Which token comes from `sorted_tokens`, or from the row where
/// that is null; which expert from `expert_ids`, or from `expert_offsets` where that is null. Any token, slot
/// or expert may be out of range: such a row is in no plan. A pair that occurs twice has two rows. Pointers
/// are device memory for the launchers and host memory for the CPU's functions. Trivially copyable.
struct ExpertRows {
  std::int32_t const* token_slots = nullptr;  ///< `[tokens]`, as `RowPlan::row_slots`; negative is base
  std::int32_t tokens = 0;
  std::int32_t first_row = 0;  ///< the rows are `[first_row, first_row + rows)`: a window of all rows, or
                               ///< all; at most 2^30 of them
  std::int32_t rows = 0;
  std::int32_t top_k = 1;  ///< without `sorted_tokens`: row `r` is of token `r / top_k`; at least 1
  std::int32_t const* sorted_tokens = nullptr;  ///< by row: its token
  std::int32_t const* expert_ids = nullptr;     ///< by row: its expert
  std::int32_t const* expert_offsets =
      nullptr;  ///< `[experts + 1]`: expert `e` has `[offsets[e], offsets[e+1])`

  /// Decode: `tokens * top_k` rows, those of one token neighbours. `expert_ids` `[tokens * top_k]`.
  [[nodiscard]] static constexpr ExpertRows slot_major(std::int32_t const* token_slots, std::int32_t tokens,
                                                       std::int32_t top_k,
                                                       std::int32_t const* expert_ids) noexcept {
    return {token_slots, tokens, 0, tokens * top_k, top_k, nullptr, expert_ids, nullptr};
  }

  /// Prefill: `rows` rows sorted by expert. `sorted_tokens` `[rows]`; `expert_offsets` `[experts + 1]`,
  /// prefix sums; rows at and beyond the last of them are of no expert.
  [[nodiscard]] static constexpr ExpertRows sorted(std::int32_t const* token_slots, std::int32_t tokens,
                                                   std::int32_t rows, std::int32_t const* sorted_tokens,
                                                   std::int32_t const* expert_offsets) noexcept {
    return {token_slots, tokens, 0, rows, 1, sorted_tokens, nullptr, expert_offsets};
  }

  /// The same rows, but only those in `[first, last)`, for an engine that works in windows.
  [[nodiscard]] constexpr ExpertRows window(std::int32_t first, std::int32_t last) const noexcept {
    ExpertRows part = *this;
    part.first_row = first;
    part.rows = last - first;
    return part;
  }

  /// The slot of a row; negative for base.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t slot(std::int32_t row) const noexcept {
    std::int32_t const token = sorted_tokens != nullptr ? sorted_tokens[row] : row / top_k;
    return token >= 0 && token < tokens ? token_slots[token] : base_slot;
  }

  /// The expert of a row; negative for none. `offsets` stands for `expert_offsets`, perhaps in faster memory.
  /// Offsets that are not ascending give some expert or none, the same on the CPU and the device.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t expert(std::int32_t row, std::int32_t num_experts,
                                                       std::int32_t const* offsets) const noexcept {
    if (expert_ids != nullptr) return expert_ids[row];
    std::int32_t first = 0;  // of the offsets, the first beyond the row is in [first, last]
    std::int32_t last = num_experts + 1;
    while (first < last) {
      std::int32_t const middle = first + (last - first) / 2;
      if (offsets[middle] > row) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    return first <= num_experts ? first - 1 : -1;
  }
  /// The same with the rows' own offsets.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t expert(std::int32_t row,
                                                       std::int32_t num_experts) const noexcept {
    return expert(row, num_experts, expert_offsets);
  }
};
static_assert(std::is_trivially_copyable_v<ExpertRows>);

/// Which row of x a row of y reads: gate and up read their token's, down reads its own. Trivially copyable.
struct ExpertInput {
  std::int32_t const* tokens = nullptr;  ///< by row: the row of x; null: `row / divisor`
  std::int32_t divisor = 1;              ///< at least 1
  std::int32_t x_rows = 0;               ///< a row whose row of x is not below this is left out

  /// Every row its own: down.
  [[nodiscard]] static constexpr ExpertInput own_rows(std::int32_t x_rows) noexcept {
    return {nullptr, 1, x_rows};
  }
  /// Row `r` reads row `r / top_k`: gate and up of slot-major rows.
  [[nodiscard]] static constexpr ExpertInput of_tokens(std::int32_t top_k, std::int32_t tokens) noexcept {
    return {nullptr, top_k, tokens};
  }
  /// Row `r` reads row `sorted_tokens[r]`: gate and up of sorted rows.
  [[nodiscard]] static constexpr ExpertInput of_sorted(std::int32_t const* sorted_tokens,
                                                       std::int32_t tokens) noexcept {
    return {sorted_tokens, 1, tokens};
  }

  /// The row of x, or -1.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t x_row(std::int32_t row) const noexcept {
    std::int32_t const read = tokens != nullptr ? tokens[row] : row / divisor;
    return read >= 0 && read < x_rows ? read : -1;
  }
};
static_assert(std::is_trivially_copyable_v<ExpertInput>);

}  // namespace atlas::lora::inline v0
