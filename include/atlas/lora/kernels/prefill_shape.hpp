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
inline constexpr std::int32_t piece_tiles = 10;
/// Most rows of a piece.
inline constexpr std::int32_t piece_rows = piece_tiles * tile_rows;
/// Warps of a block of the prefill form.
inline constexpr std::int32_t prefill_warps = 8;

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

/// What a warp of a block multiplies at a time in the shrink of a piece.
struct ShrinkUnit {
  std::int32_t segment = 0;  ///< counted from the block's first
  Share ranks;               ///< one or two rank tiles of the slab
  Share tiles;               ///< one to three row tiles of the piece
};

/// The units of a block: its `segments` by `ranks` rank tiles by `tiles` row tiles, pairs of rank tiles and
/// of row tiles as far as that leaves every warp a unit, three row tiles where that gives none a second.
/// Units that share operands are neighbours, so that the warps that take them find each other's in L1.
class ShrinkUnits {
 public:
  ATLAS_HD constexpr ShrinkUnits(std::int32_t segments, std::int32_t ranks, std::int32_t tiles) noexcept
      : segments_(segments), ranks_(ranks), tiles_(tiles) {
    std::int32_t const pairs = segments * half(ranks) * half(tiles);
    rank_step_ = segments * half(ranks) * tiles < prefill_warps ? 1 : 2;
    bool const thirds = ranks == 1 && pairs > prefill_warps && segments * ((tiles + 2) / 3) <= prefill_warps;
    tile_step_ = pairs < prefill_warps ? 1 : thirds ? 3 : 2;
    rank_groups_ = rank_step_ == 2 ? half(ranks) : ranks;
    tile_groups_ = (tiles + tile_step_ - 1) / tile_step_;
  }

  /// How many there are.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t count() const noexcept {
    return segments_ * rank_groups_ * tile_groups_;
  }
  /// The `index`-th.
  [[nodiscard]] ATLAS_HD constexpr ShrinkUnit unit(std::int32_t index) const noexcept {
    std::int32_t const above = index / tile_groups_;
    std::int32_t const segment = above / rank_groups_;
    return {segment, step((above - segment * rank_groups_) * rank_step_, rank_step_, ranks_),
            step((index - above * tile_groups_) * tile_step_, tile_step_, tiles_)};
  }

 private:
  [[nodiscard]] ATLAS_HD static constexpr std::int32_t half(std::int32_t n) noexcept { return (n + 1) / 2; }
  [[nodiscard]] ATLAS_HD static constexpr Share step(std::int32_t first, std::int32_t size,
                                                     std::int32_t end) noexcept {
    return {first, first + size < end ? first + size : end};
  }

  std::int32_t segments_;
  std::int32_t ranks_;
  std::int32_t tiles_;
  std::int32_t rank_step_ = 1;
  std::int32_t tile_step_ = 1;
  std::int32_t rank_groups_ = 0;
  std::int32_t tile_groups_ = 0;
};

/// What is folded of a piece's slab is the sums of a row tile and a rank tile; they are counted, row tile by
/// row tile, and block `block` of a cluster of `1 << cluster_log2` folds every `1 << cluster_log2`-th: this
/// many of `count`.
[[nodiscard]] ATLAS_HD constexpr std::int32_t folded_sums(std::int32_t count, std::int32_t cluster_log2,
                                                          std::int32_t block) noexcept {
  return block < count ? ((count - 1 - block) >> cluster_log2) + 1 : 0;
}
/// Where a block keeps what `segment` adds to the sum that it folds as its `index`-th; counted in sums.
[[nodiscard]] ATLAS_HD constexpr std::int32_t sum_place(std::int32_t index, std::int32_t segment) noexcept {
  return index * max_segments + segment;
}
/// Sums of segments that a block keeps at once, of pieces of at most `tiles` row tiles.
[[nodiscard]] ATLAS_HD constexpr std::int32_t kept_sums(std::int32_t tiles, std::int32_t cluster_log2,
                                                        std::int32_t slab) noexcept {
  return folded_sums(tiles * slab, cluster_log2, 0) * max_segments;
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
/// Rank tiles that are exchanged at once, of a launch whose slots have at most `rank_tiles`.
[[nodiscard]] ATLAS_HD constexpr std::int32_t prefill_slab(std::int32_t rank_tiles) noexcept {
  return rank_tiles < slab_rank_tiles ? rank_tiles : slab_rank_tiles;
}

}  // namespace atlas::lora::inline v0
