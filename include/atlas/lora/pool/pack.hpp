// SPDX-License-Identifier: AGPL-3.0-only
//
// From the pairs of an audited adapter to the elements of a slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// How an adapter is loaded into a pool.
struct StageOptions {
  bool pinned = false;  ///< into a slot that is never evicted
  /// A `PackedAdapter` is converted already; experts, routers and token rows that the pool does not serve are
  /// left out of it when either these options or those that it was packed with say so.
  PackOptions packing{};
  /// Ends the load with `cancelled`, while it waits for other loads or packs. What is staged is staged.
  std::stop_token stop{};
};

namespace detail {

/// Spreads `rows` rows of `width` elements, which lie at the head of `data` without gaps, to `stride`
/// elements each; the new columns are zero. `data` `[rows * stride]`.
template <Element T>
constexpr void spread_rows(std::span<T> data, std::size_t rows, std::size_t width,
                           std::size_t stride) noexcept {
  if (width == stride) return;
  for (std::size_t row = rows; row-- > 0;) {  // from the last, so that no row is overwritten before it moves
    auto const from = data.begin() + static_cast<std::ptrdiff_t>(row * width);
    auto const to = data.begin() + static_cast<std::ptrdiff_t>(row * stride);
    if (row > 0) {
      std::copy_backward(from, from + static_cast<std::ptrdiff_t>(width),
                         to + static_cast<std::ptrdiff_t>(width));
    }
    std::fill_n(to + static_cast<std::ptrdiff_t>(width), stride - width, T{});
  }
}

inline void add_counts(ConversionCounts& sum, ConversionCounts const& more) noexcept {
  sum.overflow += more.overflow;
  sum.underflow += more.underflow;
  sum.nan += more.nan;
  sum.infinity += more.infinity;
}

/// Writes a checked pair as packed: A unless it has its gate's, B and bias behind one another at the head of
/// `out`. Returns what the conversion counted. Errors: those of `convert`.
template <Element T, class Pair>
[[nodiscard]] Result<ConversionCounts> pack_pair(Pair const& pair, Module const& module, std::span<T> out,
                                                 ConversionPolicy policy) {
  PackedExtent const extent = packed_extent(pair, module);
  auto const n_out = static_cast<std::size_t>(module.n_out);
  auto const rank = static_cast<std::size_t>(pair.rank);
  std::span<T> const b = out.subspan(extent.a, extent.b);
  ConversionCounts counts;
  if (extent.a > 0) {
    auto const a_counts = convert<T>(pair.a, out.first(extent.a), policy);
    if (!a_counts) return a_counts;
    counts = *a_counts;
  }
  auto const b_counts = convert<T>(pair.b, b.first(n_out * rank), policy);
  if (!b_counts) return b_counts;
  spread_rows<T>(b, n_out, rank, static_cast<std::size_t>(padded_rank(pair.rank)));
  add_counts(counts, *b_counts);
  if (!pair.bias) return counts;
  auto const bias_counts = convert<T>(*pair.bias, out.subspan(extent.a + extent.b, extent.bias), policy);
  if (!bias_counts) return bias_counts;
  add_counts(counts, *bias_counts);
  return counts;
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
