// SPDX-License-Identifier: AGPL-3.0-only
//
// One slot per sequence -> one slot per row, for each way in which a step packs its rows. Everything here is
// O(rows), allocates nothing, and writes nothing unless it returns `Errc::ok`. Every negative slot is written
// as `base_slot`; rows beyond those of the sequences are padding and hold `base_slot`. Input and output must
// not overlap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

namespace detail {
constexpr std::int32_t or_base(std::int32_t slot) noexcept { return slot < 0 ? base_slot : slot; }

constexpr std::span<std::int32_t> put_rows(std::span<std::int32_t> rows, std::size_t count,
                                           std::int32_t slot) noexcept {
  std::fill_n(rows.begin(), count, or_base(slot));
  return rows.subspan(count);
}
}  // namespace detail

/// Decode: one row per sequence. `slots` `[sequences]`; `rows` `[padded rows]`, at least as many.
/// Error: `invalid_argument` when there are fewer rows than sequences.
[[nodiscard]] constexpr Errc decode_row_slots(std::span<std::int32_t const> slots,
                                              std::span<std::int32_t> rows) noexcept {
  if (rows.size() < slots.size()) return Errc::invalid_argument;
  for (std::int32_t const slot : slots) rows = detail::put_rows(rows, 1, slot);
  detail::put_rows(rows, rows.size(), base_slot);
  return Errc::ok;
}

/// Packed prefill: sequence `i` has the rows `[cu_seqlens[i], cu_seqlens[i + 1])`; it may have none.
/// `cu_seqlens` `[sequences + 1]`, prefix sums of the tokens that are processed in this step; `slots`
/// `[sequences]`; `rows` `[padded rows]`, at least `cu_seqlens.back()`. The whole of `cu_seqlens` is checked
/// first. Error: `invalid_argument` when it has fewer than two entries, does not start at 0 or goes back,
/// when `slots` is not one shorter, or when there are too few rows.
[[nodiscard]] constexpr Errc prefill_row_slots(std::span<std::int32_t const> cu_seqlens,
                                               std::span<std::int32_t const> slots,
                                               std::span<std::int32_t> rows) noexcept {
  if (cu_seqlens.size() < 2 || slots.size() != cu_seqlens.size() - 1) return Errc::invalid_argument;
  if (cu_seqlens.front() != 0 || !std::is_sorted(cu_seqlens.begin(), cu_seqlens.end())) {
    return Errc::invalid_argument;
  }
  if (rows.size() < static_cast<std::size_t>(cu_seqlens.back())) return Errc::invalid_argument;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    rows = detail::put_rows(rows, static_cast<std::size_t>(cu_seqlens[i + 1] - cu_seqlens[i]), slots[i]);
  }
  detail::put_rows(rows, rows.size(), base_slot);
  return Errc::ok;
}

/// Speculative decode and its verification: `rows_per_sequence` neighbouring rows for each sequence. `slots`
/// `[sequences]`; `rows` `[padded rows]`. Error: `invalid_argument` when `rows_per_sequence` is below 1 or
/// there are too few rows.
[[nodiscard]] constexpr Errc speculative_row_slots(std::span<std::int32_t const> slots,
                                                   std::int32_t rows_per_sequence,
                                                   std::span<std::int32_t> rows) noexcept {
  if (rows_per_sequence < 1) return Errc::invalid_argument;
  auto const each = static_cast<std::size_t>(rows_per_sequence);
  if (rows.size() / each < slots.size()) return Errc::invalid_argument;
  for (std::int32_t const slot : slots) rows = detail::put_rows(rows, each, slot);
  detail::put_rows(rows, rows.size(), base_slot);
  return Errc::ok;
}

/// Rows of which the head computes logits: output row `i` is row `head_rows[i]` of the step. `row_slots`
/// `[rows of the step]`; `head_rows` `[head rows]`, in any order; `rows` `[padded head rows]`.
/// Error: `invalid_argument` when a head row is not a row of the step or there are too few rows.
[[nodiscard]] constexpr Errc head_row_slots(std::span<std::int32_t const> row_slots,
                                            std::span<std::int32_t const> head_rows,
                                            std::span<std::int32_t> rows) noexcept {
  if (rows.size() < head_rows.size()) return Errc::invalid_argument;
  for (std::int32_t const row : head_rows) {
    if (row < 0 || static_cast<std::size_t>(row) >= row_slots.size()) return Errc::invalid_argument;
  }
  for (std::int32_t const row : head_rows) {
    rows = detail::put_rows(rows, 1, row_slots[static_cast<std::size_t>(row)]);
  }
  detail::put_rows(rows, rows.size(), base_slot);
  return Errc::ok;
}

}  // namespace atlas::lora::inline v0
