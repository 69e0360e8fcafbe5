// SPDX-License-Identifier: AGPL-3.0-only
//
// How the one-launch delta divides a row tile among the blocks of a cluster and their warps: arithmetic
// shared by launcher, kernel and CPU tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0 {

/// Elements between rows of `width` elements in shared memory: rows lie 64 bytes apart modulo 128, so that
/// the eight lanes of a 16-byte access phase, four packs of two rows, touch all banks once.
[[nodiscard]] ATLAS_HD constexpr std::int32_t shared_stride(std::int32_t width,
                                                            std::size_t element_bytes) noexcept {
  std::size_t const bytes = static_cast<std::size_t>(width) * element_bytes;
  std::size_t const pad = (192 - bytes % 128) % 128;
  return width + static_cast<std::int32_t>(pad / element_bytes);
}

/// Chunk sums that a block keeps for a rank tile at once.
inline constexpr std::int32_t max_chunk_slots = 32;
/// Most blocks of a chunk of which a warp takes two together.
inline constexpr std::int32_t pair_chunk_blocks = 2;

/// What every block of a one-launch delta would otherwise work out for itself. Blocks take neighbouring
/// shares of segments and output tiles, all of one size but the last ones.
struct DeltaShape {
  std::int32_t cluster_log2 = 0;
  std::int32_t blocks = 0;    ///< of k
  std::int32_t segments = 0;  ///< of k
  std::int32_t segment_blocks = 0;
  std::int32_t segment_chunks = 0;
  std::int32_t chunk_blocks = 0;
  std::int32_t chunk_inverse =
      0;  ///< `slot * chunk_inverse >> 8` is `slot / segment_chunks` for a chunk slot
  std::int32_t block_segments = 0;  ///< segments of a block of the cluster
  std::int32_t group = 0;           ///< of those, the ones whose chunks a block multiplies together
  std::int32_t pairs_log2 = 0;      ///< chunk slots that a warp takes together, as a power of two: 1 or 2
  std::int32_t teams_log2 = 0;      ///< warps that share the rank tiles of one chunk slot, likewise
  std::int32_t chunk_slots = 0;     ///< chunk sums that a block keeps for a rank tile
  std::int32_t slab = 1;            ///< rank tiles whose sums are exchanged at once
  std::int32_t block_outputs = 0;   ///< output tiles of a block of a cluster that has a row tile to itself
  std::int32_t max_parts = 1;       ///< clusters that a row tile's outputs can occupy
  std::int32_t first_output[max_projections + 1] = {};  ///< prefix counts of output tiles
  std::int32_t xa_offset[max_projections] = {};         ///< of a projection in a row of xa

  /// Sets what follows from the contraction, the cluster (a power of two), the warps of a block, the most
  /// rank tiles of a row tile and `first_output`.
  constexpr void set(Contraction const& cut, std::int32_t cluster, std::int32_t warps,
                     std::int32_t rank_tiles, std::int32_t num_projections) noexcept {
    slab = rank_tiles < slab_rank_tiles ? rank_tiles : slab_rank_tiles;
    cluster_log2 = 0;
    while (1 << cluster_log2 < cluster) ++cluster_log2;
    blocks = cut.blocks();
    segments = cut.segments();
    segment_blocks = cut.segment_blocks();
    segment_chunks = cut.segment_chunks();
    chunk_blocks = cut.chunk_blocks();
    chunk_inverse = (256 + segment_chunks - 1) / segment_chunks;
    block_segments = static_cast<std::int32_t>(divide_up(segments, cluster));
    group = max_chunk_slots / segment_chunks;
    if (group > block_segments) group = block_segments;
    chunk_slots = group * segment_chunks;
    pairs_log2 = chunk_blocks <= pair_chunk_blocks && chunk_slots > warps ? 1 : 0;
    teams_log2 = 0;
    while ((chunk_slots << (teams_log2 + 1)) <= (warps << pairs_log2)) ++teams_log2;
    block_outputs = static_cast<std::int32_t>(divide_up(first_output[num_projections], cluster));
    max_parts = static_cast<std::int32_t>(divide_up(block_outputs, warps));
  }

  /// The segments of block `block` of the cluster.
  [[nodiscard]] ATLAS_HD constexpr Share segments_of(std::int32_t block) const noexcept {
    return clipped(block * block_segments, block_segments, 0, segments);
  }
  /// Clusters that share a row tile's outputs, each with all of its shrink, where `clusters` find `tiles` row
  /// tiles: cluster `c` takes part `c / tiles` of row tile `c % tiles`. No more than half of the clusters
  /// work then, so that the next launch's can start beside them; where that leaves one a row tile, clusters
  /// take row tiles in turn.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t parts_of(std::int32_t clusters,
                                                         std::int32_t tiles) const noexcept {
    // The common case needs no division.
    if (tiles < 1 || tiles > clusters / 4) return 1;
    std::int32_t const parts = clusters / 2 / tiles;
    return parts < max_parts ? parts : max_parts;
  }
  /// The output tiles of one projection that are block `block`'s of a cluster with part `part` of `parts`,
  /// counted from the projection's first.
  [[nodiscard]] ATLAS_HD constexpr Share outputs_of(std::int32_t block, std::int32_t part, std::int32_t parts,
                                                    std::int32_t projection) const noexcept {
    std::int32_t const first = first_output[projection];
    std::int32_t const size = parts == 1 ? block_outputs : (block_outputs + parts - 1) / parts;
    std::int32_t const begin = ((part << cluster_log2) + block) * size;
    return clipped(begin - first, size, 0, first_output[projection + 1] - first);
  }
  /// The blocks of k that chunk slot `slot` multiplies in the group that begins with `segment`, of segments
  /// before `last`; empty for a slot that has none.
  [[nodiscard]] ATLAS_HD constexpr BlockRange chunk_of_slot(std::int32_t segment, std::int32_t last,
                                                            std::int32_t slot) const noexcept {
    std::int32_t const slot_segment = slot * chunk_inverse >> 8;
    std::int32_t const slot_chunk = slot - slot_segment * segment_chunks;
    segment += slot_segment;
    if (slot_segment >= group || segment >= last) return {};
    std::int32_t end = (segment + 1) * segment_blocks;
    if (end > blocks) end = blocks;
    std::int32_t first = segment * segment_blocks + slot_chunk * chunk_blocks;
    if (first > end) first = end;
    return {first, first + chunk_blocks < end ? first + chunk_blocks : end};
  }

 private:
  [[nodiscard]] ATLAS_HD static constexpr Share clipped(std::int32_t first, std::int32_t size,
                                                        std::int32_t least, std::int32_t most) noexcept {
    std::int32_t last = first + size;
    if (first < least) first = least;
    if (last > most) last = most;
    if (first > most) first = most;
    return {first, last < first ? first : last};
  }
};

}  // namespace atlas::lora::inline v0
