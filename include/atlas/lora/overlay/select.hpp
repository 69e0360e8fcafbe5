// SPDX-License-Identifier: AGPL-3.0-only
//
// Which rows of a table an adapter overrides, and where each comes from: arithmetic alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"

namespace atlas::lora::inline v0 {

/// Whether an element, given by the f32 bits of its two values, counts as changed: they differ by more than
/// `threshold`, or, where that is 0, at all (0 and -0 do not differ). NaN on either side is a change. Exact
/// under any compiler flags where the threshold is 0.
[[nodiscard]] ATLAS_HD constexpr bool element_changed(std::uint32_t a, std::uint32_t b,
                                                      float threshold) noexcept {
  bool const nan = (a & 0x7fffffffu) > 0x7f800000u || (b & 0x7fffffffu) > 0x7f800000u;
  if (nan) return true;
  if (a == b || ((a | b) & 0x7fffffffu) == 0) return false;
  if (!(threshold > 0.0F)) return true;
  float const difference = detail::bit_cast<float>(a) - detail::bit_cast<float>(b);
  return !((difference < 0.0F ? -difference : difference) <= threshold);
}

/// An overridden row: the token it stands for, and where its values are.
struct RowSource {
  std::int32_t id = 0;
  std::int32_t retrained = -1;  ///< index into the retrained rows; -1: the adapter's own table, row `id`

  friend constexpr bool operator==(RowSource const&, RowSource const&) = default;
};

/// The rows that an adapter overrides, ascending by token, none twice: those whose place in `changed` is not
/// 0, from the adapter's own table, and the retrained ones, which win. `retrained[i]` is the token of
/// retrained row i, in any order, none twice, each in `[0, 2^31)`.
[[nodiscard]] constexpr std::vector<RowSource> select_rows(std::span<std::uint8_t const> changed,
                                                           std::span<std::int64_t const> retrained) {
  std::vector<RowSource> own;
  for (std::size_t i = 0; i < retrained.size(); ++i) {
    own.push_back(RowSource{static_cast<std::int32_t>(retrained[i]), static_cast<std::int32_t>(i)});
  }
  std::sort(own.begin(), own.end(), [](RowSource const& a, RowSource const& b) { return a.id < b.id; });
  std::vector<RowSource> out;
  auto next = own.begin();
  for (std::size_t row = 0; row < changed.size(); ++row) {
    auto const id = static_cast<std::int32_t>(row);
    while (next != own.end() && next->id < id) out.push_back(*next++);
    if (next != own.end() && next->id == id) {
      out.push_back(*next++);
    } else if (changed[row] != 0) {
      out.push_back(RowSource{id, -1});
    }
  }
  out.insert(out.end(), next, own.end());
  return out;
}

/// Fills `map` `[vocab]`: for each token the index of its override, -1 for none. `ids` ascend, all below the
/// map's size.
constexpr void fill_slot_map(std::span<std::int32_t const> ids, std::span<std::int32_t> map) noexcept {
  std::fill(map.begin(), map.end(), -1);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    map[static_cast<std::size_t>(ids[i])] = static_cast<std::int32_t>(i);
  }
}

}  // namespace atlas::lora::inline v0
