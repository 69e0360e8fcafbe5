// SPDX-License-Identifier: AGPL-3.0-only
//
// Who does what: the arithmetic that divides rows, ranks, outputs and segments among blocks and warps. It is
// shared by the kernels and by the CPU tests, which prove that everything is covered exactly once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/route/row_plan.hpp"

namespace atlas::lora::inline v0 {

/// Most projections of one x in one launch: q, k, v and one more.
inline constexpr std::int32_t max_projections = 4;
/// Weight rows of a rank tile.
inline constexpr std::int32_t tile_ranks = 16;
/// Outputs of an output tile.
inline constexpr std::int32_t tile_outputs = 32;
/// Rank tiles whose segment sums are exchanged at once.
inline constexpr std::int32_t slab_rank_tiles = 4;

/// `a / b` rounded up, for `a >= 0` and `b > 0`.
[[nodiscard]] ATLAS_HD constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept {
  return (a + b - 1) / b;
}
/// `a` rounded up to a multiple of `b`.
[[nodiscard]] ATLAS_HD constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) noexcept {
  return divide_up(a, b) * b;
}

/// A half-open range of things to do.
struct Share {
  std::int32_t first = 0;  ///< the first
  std::int32_t last = 0;   ///< one past the last

  /// How many they are.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t size() const noexcept { return last - first; }
  friend constexpr bool operator==(Share const&, Share const&) = default;
};

/// The `part`-th of `parts` contiguous shares of `[0, total)`, sizes within one of each other.
[[nodiscard]] ATLAS_HD constexpr Share share_of(std::int32_t total, std::int32_t parts,
                                                std::int32_t part) noexcept {
  auto const wide = static_cast<std::int64_t>(total);
  return {static_cast<std::int32_t>(wide * part / parts),
          static_cast<std::int32_t>(wide * (part + 1) / parts)};
}

/// Rank tiles of a rank.
[[nodiscard]] ATLAS_HD constexpr std::int32_t rank_tiles(std::int32_t rank) noexcept {
  return static_cast<std::int32_t>(divide_up(rank, tile_ranks));
}
/// Output tiles of a projection.
[[nodiscard]] ATLAS_HD constexpr std::int32_t output_tiles(std::int64_t n_out) noexcept {
  return static_cast<std::int32_t>(divide_up(n_out, tile_outputs));
}

/// Blocks that share a row tile in the expand: enough to fill `multiprocessors` twice, and no more than give
/// each an output tile a warp.
[[nodiscard]] ATLAS_HD constexpr std::int32_t expand_parts(std::int32_t tiles, std::int32_t outputs,
                                                           std::int32_t multiprocessors) noexcept {
  std::int64_t const wanted = divide_up(std::int64_t{2} * multiprocessors, tiles < 1 ? 1 : tiles);
  std::int64_t const most = divide_up(outputs, 8);
  std::int64_t const parts = wanted < most ? wanted : most;
  return parts < 1 ? 1 : static_cast<std::int32_t>(parts);
}

/// The output that lane `lane` (0 to 31) multiplies in matrix `matrix` (0 to 3) of an output tile, from the
/// tile's first. The order is chosen so that after a transposition each lane holds eight consecutive outputs
/// of a row.
[[nodiscard]] ATLAS_HD constexpr std::int32_t output_of(std::int32_t lane, std::int32_t matrix) noexcept {
  std::int32_t const weight_row = lane / 4;
  return 8 * (weight_row / 2) + 2 * matrix + weight_row % 2;
}

}  // namespace atlas::lora::inline v0
