// SPDX-License-Identifier: AGPL-3.0-only
//
// One A and B as an operand: the extent of its rank is part of the type when it is known.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// The rank extent of a pair whose rank is known at run time only, as `std::dynamic_extent` is for spans.
inline constexpr std::int32_t dynamic_rank = -1;

namespace detail {
/// Holds a rank in the type.
template <std::int32_t Rank>
struct RankExtent {
  static_assert(Rank >= 1, "a static rank is at least 1");
  constexpr RankExtent() noexcept = default;
  [[nodiscard]] ATLAS_HD static constexpr std::int32_t rank() noexcept { return Rank; }
};
/// Holds a rank in the value.
template <>
struct RankExtent<dynamic_rank> {
  std::int32_t value = 0;
  [[nodiscard]] ATLAS_HD constexpr std::int32_t rank() const noexcept { return value; }
};
}  // namespace detail

/// A view of one pair: `delta = scale * ((x @ A^T) @ B^T + bias)`. Trivially copyable; owns nothing. `Rank`
/// is the true rank, or `dynamic_rank`; `rank()` reads the same in both, as extents of `std::span` do.
template <Element T, std::int32_t Rank = dynamic_rank>
struct LoraPair {
  T const* a = nullptr;           ///< `[rank, k_in]`, row stride `k_in`; element-aligned
  T const* b = nullptr;           ///< `[n_out, rank]`, row stride `b_row_stride`; element-aligned
  T const* bias = nullptr;        ///< `[n_out]`, or null for none
  float scale = 0.0F;             ///< multiplies the rounded delta
  std::int32_t b_row_stride = 0;  ///< elements, at least `rank()`
  std::int64_t k_in = 0;          ///< elements of a row of x
  std::int64_t n_out = 0;         ///< elements of a row of y
  [[no_unique_address]] detail::RankExtent<Rank> extent{};  ///< the rank, where `Rank` does not say it

  /// The true rank.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t rank() const noexcept { return extent.rank(); }

  /// The same pair as a table's cell.
  [[nodiscard]] ATLAS_HD constexpr RouteCell<T> cell() const noexcept {
    return RouteCell<T>{a, b, bias, scale, rank(), b_row_stride, 0};
  }
};
static_assert(std::is_trivially_copyable_v<LoraPair<float>> &&
              std::is_trivially_copyable_v<LoraPair<float, 16>>);

}  // namespace atlas::lora::inline v0
