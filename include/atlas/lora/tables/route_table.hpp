// SPDX-License-Identifier: AGPL-3.0-only
//
// The device table that says, for one (layer, module), where each slot's A and B lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"

namespace atlas::lora::inline v0 {

/// The row slot that means base: no adapter. Every negative value means it; this is the one we write.
inline constexpr std::int32_t base_slot = -1;

/// What one slot does to one module. Rank 0, or a null `a` or `b`, means that the slot does not adapt it.
/// Kernels read a cell with ordinary 16-byte loads, so it is aligned to 16 bytes.
template <Element T>
struct alignas(16) RouteCell {
  T const* a = nullptr;  ///< `[rank, k_in]`, row stride `k_in`; device; element-aligned (16 bytes is fast)
  T const* b = nullptr;  ///< `[n_out, rank]`, row stride `b_row_stride`; device; element-aligned (16 is fast)
  T const* bias = nullptr;  ///< `[n_out]`, or null for none; device
  float scale = 0.0F;       ///< multiplies the rounded delta
  std::int32_t rank = 0;    ///< true rank; the contraction runs over it and over nothing else
  /// Elements between rows of B, at least `rank`. Multiples of 8 are fast, and then all `n_out *
  /// b_row_stride` elements are readable; what lies beyond the rank never reaches a sum.
  std::int32_t b_row_stride = 0;
  std::int32_t reserved = 0;  ///< zero

  /// Whether the slot adapts the module.
  [[nodiscard]] ATLAS_HD constexpr bool adapted() const noexcept {
    return rank > 0 && a != nullptr && b != nullptr;
  }

  friend constexpr bool operator==(RouteCell const&, RouteCell const&) = default;
};
static_assert(std::is_trivially_copyable_v<RouteCell<float>> && sizeof(RouteCell<float>) == 48);

/// One (layer, module)'s cells, one per slot, `cell_stride_bytes` apart: in a pool the cells of one slot are
/// neighbours (its record), so that one copy publishes a slot; an engine with an array of its own says
/// `sizeof(RouteCell<T>)`. Trivially copyable; passed to kernels by value. Cells may change between
/// launches; their addresses stay for the table's life, so captured graphs stay right.
template <Element T>
struct RouteTable {
  RouteCell<T> const* cells = nullptr;  ///< slot 0's cell; device; null means that no slot adapts the module
  std::int64_t cell_stride_bytes = sizeof(RouteCell<T>);  ///< multiple of 16
  std::int32_t max_slots = 0;  ///< slots `>= max_slots` are base and are never read through
  std::int32_t max_rank = 0;   ///< no cell's rank exceeds it; sizes scratch and shared memory, not work
  std::int64_t k_in = 0;       ///< elements of a row of x
  std::int64_t n_out = 0;      ///< elements of a row of y

  /// The cell of `slot`, which must be in `[0, max_slots)`.
  [[nodiscard]] ATLAS_HD RouteCell<T> const* cell(std::int32_t slot) const noexcept {
    return reinterpret_cast<RouteCell<T> const*>(reinterpret_cast<std::byte const*>(cells) +
                                                 slot * cell_stride_bytes);
  }
};
static_assert(std::is_trivially_copyable_v<RouteTable<float>>);

}  // namespace atlas::lora::inline v0
