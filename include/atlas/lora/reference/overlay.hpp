// SPDX-License-Identifier: AGPL-3.0-only
//
// Token overlays on the CPU in plain loops: the same rounding point and the same order of sums as the
// kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/reference/delta.hpp"
#include "atlas/lora/tables/overlay_table.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// The overlay cell of a row's slot; null for base, a slot out of range or a table without cells.
template <Element T>
[[nodiscard]] OverlayCell<T> const* overlay_cell(OverlayTable<T> const& table, std::int32_t slot) noexcept {
  return table.cells == nullptr || slot < 0 || slot >= table.max_slots ? nullptr : table.cell(slot);
}

}  // namespace detail

/// `h[row] = the slot's own row of the row's token`, where it has one; all pointers are host memory. `h` is
/// `[rows, hidden]`, its row stride in elements; `tokens` and `row_slots` have one entry a row. Rows that are
/// base, or whose token is out of range or not the slot's own, keep their bytes.
template <Element T>
void reference_embed_overlay(OverlayTable<T> const& table, std::span<std::int32_t const> row_slots,
                             std::span<std::int32_t const> tokens, T* h, std::int64_t h_row_stride) noexcept {
  for (std::size_t i = 0; i < row_slots.size(); ++i) {
    OverlayCell<T> const* const cell = detail::overlay_cell(table, row_slots[i]);
    if (cell == nullptr || !cell->embeds() || tokens[i] < 0 || tokens[i] >= table.vocab) continue;
    std::int32_t const row = cell->slot_map[tokens[i]];
    if (row < 0 || row >= cell->embed_count) continue;
    std::copy_n(cell->embed_rows + row * table.hidden, table.hidden,
                h + static_cast<std::int64_t>(i) * h_row_stride);
  }
}

/// `logits[row, id] = Y(sum_k x[row, k] * the slot's own head row of id)` for every id that the row's slot
/// overrides; all pointers are host memory. `x` is `[rows, hidden]` and `logits` `[rows, vocab]`, row strides
/// in elements. Other logits keep their bytes, and so do ids that are out of range.
template <Element T, Element Y>
void reference_head_overlay(OverlayTable<T> const& table, std::span<std::int32_t const> row_slots, T const* x,
                            std::int64_t x_row_stride, Y* logits, std::int64_t logits_row_stride) noexcept {
  for (std::size_t i = 0; i < row_slots.size(); ++i) {
    OverlayCell<T> const* const cell = detail::overlay_cell(table, row_slots[i]);
    if (cell == nullptr || !cell->heads()) continue;
    auto const row = static_cast<std::int64_t>(i);
    for (std::int32_t j = 0; j < cell->head_count; ++j) {
      std::int32_t const id = cell->head_ids[j];
      if (id < 0 || id >= table.vocab) continue;
      logits[row * logits_row_stride + id] = from_f32<Y>(
          reference_contract(cell->head_rows + j * table.hidden, x + row * x_row_stride, table.hidden));
    }
  }
}

}  // namespace atlas::lora::inline v0
