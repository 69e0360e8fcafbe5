// SPDX-License-Identifier: AGPL-3.0-only
//
// How the prefill form of the delta divides its work: row tiles among clusters, a cluster's row tiles into
// pieces, a piece's shrink among the warps of a block. Arithmetic shared by launcher, kernel and CPU tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0 {

/// Most row tiles of a piece: neighbours of one slot that read the slot's weights together.
inline constexpr std::int32_t piece_tiles = 8;
/// Most rows of a piece.
inline constexpr std::int32_t piece_rows = piece_tiles * tile_rows;
/// Warps of a block of the prefill form.
inline constexpr std::int32_t prefill_warps = 16;

/// The row tiles of cluster `cluster` of `clusters`, of `num_tiles` in all: neighbours, so that weights are
/// read once for many of them. All clusters but the last ones have the same number.
[[nodiscard]] ATLAS_HD constexpr Share tiles_of_cluster(std::int32_t num_tiles, std::int32_t clusters,
                                                        std::int32_t cluster) noexcept {
  auto const size = static_cast<std::int32_t>(divide_up(num_tiles, clusters));
  std::int64_t const begin = static_cast<std::int64_t>(cluster) * size;
  std::int32_t const first = begin < num_tiles ? static_cast<std::int32_t>(begin) : num_tiles;
  return {first, size < num_tiles - first ? first + size : num_tiles};
}

/// Most row tiles of the next piece of a cluster that has `left >= 1` row tiles left: what makes all its
/// pieces alike where they are of one slot.
[[nodiscard]] ATLAS_HD constexpr std::int32_t next_piece(std::int32_t left) noexcept {
  return static_cast<std::int32_t>(divide_up(left, divide_up(left, piece_tiles)));
}

/// Blocks of k whose x and A are fetched together, a stage.
inline constexpr std::int32_t stage_blocks = 4;
/// Bytes of a row of x or of A in a block of k of a stage.
inline constexpr std::uint32_t stage_row_bytes = std::uint32_t{block_elements} * 2;
/// Most groups of warps of a block in the shrink: each has a block of every stage at least.
inline constexpr std::int32_t most_groups = stage_blocks;
/// Rank tiles that are multiplied, and exchanged, at once, of a launch whose slots have at most `rank_tiles`.
[[nodiscard]] ATLAS_HD constexpr std::int32_t prefill_slab(std::int32_t rank_tiles) noexcept {
  return rank_tiles < slab_rank_tiles ? rank_tiles : slab_rank_tiles;
}

/// How the warps of a block share the shrink of a slab: groups multiply a segment each at a time, and in a
/// group each warp has rank tiles, in pairs, and row tiles of its own.
class ShrinkSplit {
 public:
  /// Of a block that has at most `segments` segments; of `ranks` rank tiles by `tiles` row tiles.
  ATLAS_HD constexpr ShrinkSplit(std::int32_t segments, std::int32_t ranks, std::int32_t tiles) noexcept
      : groups_log2_(segments <= 2 ? 1 : 2), ranks_(ranks), tiles_(tiles) {
    row_parts_log2_ = warps_log2 - groups_log2_ - (ranks > 2 ? 1 : 0);
    tile_step_ = (tiles + (1 << row_parts_log2_) - 1) >> row_parts_log2_;
  }

  /// How many groups there are.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t groups() const noexcept { return 1 << groups_log2_; }
  /// Blocks of k that a group has of a stage.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t group_blocks() const noexcept {
    return stage_blocks >> groups_log2_;
  }
  /// Warps of a group.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t group_warps() const noexcept {
    return prefill_warps >> groups_log2_;
  }
  /// The group of a warp.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t group_of(std::int32_t warp) const noexcept {
    return warp >> (warps_log2 - groups_log2_);
  }
  /// Most row tiles of a warp.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t tile_step() const noexcept { return tile_step_; }
  /// A warp's rank tiles of the slab, at most two.
  [[nodiscard]] ATLAS_HD constexpr Share ranks_of(std::int32_t warp) const noexcept {
    return step(part_of(warp) >> row_parts_log2_, 2, ranks_);
  }
  /// A warp's row tiles of the piece.
  [[nodiscard]] ATLAS_HD constexpr Share tiles_of(std::int32_t warp) const noexcept {
    return step(part_of(warp) & ((1 << row_parts_log2_) - 1), tile_step_, tiles_);
  }

 private:
  static constexpr std::int32_t warps_log2 = 4;
  static_assert(1 << warps_log2 == prefill_warps);

  [[nodiscard]] ATLAS_HD constexpr std::int32_t part_of(std::int32_t warp) const noexcept {
    return warp & (group_warps() - 1);
  }
  [[nodiscard]] ATLAS_HD static constexpr Share step(std::int32_t index, std::int32_t size,
                                                     std::int32_t end) noexcept {
    std::int32_t const first = index * size;
    if (first >= end) return {end, end};
    return {first, first + size < end ? first + size : end};
  }

  std::int32_t groups_log2_;
  std::int32_t ranks_;
  std::int32_t tiles_;
  std::int32_t row_parts_log2_ = 0;
  std::int32_t tile_step_ = 0;
};

/// What is folded of a piece's slab is the sums of a row tile and a rank tile; they are counted, row tile by
/// row tile, and block `block` of a cluster of `1 << cluster_log2` folds every `1 << cluster_log2`-th: this
/// many of `count`.
[[nodiscard]] ATLAS_HD constexpr std::int32_t folded_sums(std::int32_t count, std::int32_t cluster_log2,
                                                          std::int32_t block) noexcept {
  return block < count ? ((count - 1 - block) >> cluster_log2) + 1 : 0;
}
/// Sums that a block keeps of what is folded into one: all segments', or without a cluster those of one round
/// of its groups, which it folds at once.
[[nodiscard]] ATLAS_HD constexpr std::int32_t sum_parts(std::int32_t cluster_log2) noexcept {
  return cluster_log2 == 0 ? most_groups : max_segments;
}
/// Sums that a block keeps at once, of pieces of at most `tiles` row tiles.
[[nodiscard]] ATLAS_HD constexpr std::int32_t kept_sums(std::int32_t tiles, std::int32_t cluster_log2,
                                                        std::int32_t slab) noexcept {
  return folded_sums(tiles * slab, cluster_log2, 0) * sum_parts(cluster_log2);
}
/// Rows that the expand takes together.
inline constexpr std::int32_t row_group = 16;
/// Where xa of a piece lies in shared memory, in vectors of 16 bytes: eight ranks by two rows are two
/// vectors, as a lane takes them for its two products. `block` counts blocks of the rank over all
/// projections, `row` is of the piece, `quad` says which eight ranks of the block and `half` which four of
/// those.
[[nodiscard]] ATLAS_HD constexpr std::int32_t xa_vector(std::int32_t block, std::int32_t row,
                                                        std::int32_t quad, std::int32_t half) noexcept {
  std::int32_t const group = block * (piece_rows / row_group) + row / row_group;
  return (group * 2 + half) * 32 + row % row_group / 2 * 4 + quad;
}

/// Vectors of 16 bytes of one block of k of a stage: its rows of x, then the slab's ranks of A, four a row,
/// and four unused, so that neighbouring blocks of a row lie in different banks.
[[nodiscard]] ATLAS_HD constexpr std::int32_t stage_block_vectors(std::int32_t slab) noexcept {
  return (piece_rows + slab * tile_ranks + 1) * 4;
}
/// Vectors of 16 bytes of y that are on their way to a warp in the expand of code for `compute`: 16 rows by
/// an output tile, six times, of a 16-bit type; twice where shared memory is 99 KB.
[[nodiscard]] ATLAS_HD constexpr std::int32_t warp_y_vectors(std::int32_t compute) noexcept {
  return (compute >= 120 ? 2 : 6) * row_group * tile_outputs / pack_elements;
}
/// Vectors of 16 bytes of a sum of a row tile and a rank tile: one a lane.
inline constexpr std::int32_t sum_vectors = 32;
/// Most stages of x and A that there are in shared memory, and fewest.
inline constexpr std::int32_t most_stages = 4;
inline constexpr std::int32_t fewest_stages = 3;

/// What the blocks of a launch of the prefill form share. Behind the pieces, their shared memory holds the
/// ring: stages of x and A in the shrink, y on its way in the expand; then sums, then xa.
struct PrefillShape {
  std::int32_t slab = 0;         ///< rank tiles that are multiplied at once
  std::int32_t stages = 0;       ///< of the ring
  std::int32_t stage_bytes = 0;  ///< of its x and A, and of what lies between
  std::int32_t sums_begin = 0;   ///< vectors of 16 bytes from the ring's first
  std::int32_t xa_begin = 0;     ///< likewise

  /// For slots of at most `rank_tiles` rank tiles and pieces of at most `tiles` row tiles, in code for
  /// `compute`.
  constexpr PrefillShape() = default;
  constexpr PrefillShape(std::int32_t rank_tiles, std::int32_t tiles, std::int32_t cluster_log2,
                         std::int32_t num_stages, std::int32_t compute) noexcept
      : slab(prefill_slab(rank_tiles)),
        stages(num_stages),
        stage_bytes(16 * stage_blocks * stage_block_vectors(slab)) {
    std::int32_t const of_stages = stages * stage_bytes / 16;
    std::int32_t const of_y = prefill_warps * warp_y_vectors(compute);
    sums_begin = of_stages > of_y ? of_stages : of_y;
    xa_begin = sums_begin + sum_vectors * kept_sums(tiles, cluster_log2, slab);
  }
  /// Bytes from the ring's first to the end, with `xa_width` elements of 16 bits a row of xa.
  [[nodiscard]] constexpr std::size_t bytes(std::int32_t xa_width) const noexcept {
    return static_cast<std::size_t>(std::int64_t{xa_begin} * 16 + std::int64_t{piece_rows} * xa_width * 2);
  }
};

}  // namespace atlas::lora::inline v0
