// SPDX-License-Identifier: AGPL-3.0-only
//
// How the one-launch delta divides its shared memory and its weights into stages: arithmetic shared by
// launcher, kernel and CPU tests.
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

/// Segments whose chunks a block multiplies together, a warp each: a group.
[[nodiscard]] ATLAS_HD constexpr std::int32_t group_segments(Contraction const& cut) noexcept {
  std::int32_t const segments = max_chunks / cut.segment_chunks();
  return segments < 1 ? 1 : segments;
}

/// The ring of weight stages. A stage holds `chunks` neighbouring chunks of one rank tile, or as many whole
/// output tiles of B as fit.
struct DeltaStages {
  std::int32_t bytes = 0;   ///< of a stage, a multiple of 128
  std::int32_t chunks = 0;  ///< of a rank tile in a stage
  std::int32_t count = 0;   ///< stages; fewer than 2 means that they do not fit

  friend constexpr bool operator==(DeltaStages const&, DeltaStages const&) = default;
};

/// Elements of a row of a stage of A.
[[nodiscard]] ATLAS_HD constexpr std::int32_t stage_width(Contraction const& cut,
                                                          std::int32_t chunks) noexcept {
  return chunks * cut.chunk_blocks() * block_elements;
}

/// Output tiles of B that a stage holds, B's rows `padded_rank` elements long.
[[nodiscard]] ATLAS_HD constexpr std::int32_t stage_output_tiles(std::int32_t stage_bytes,
                                                                 std::int32_t padded_rank,
                                                                 std::size_t element_bytes) noexcept {
  std::int64_t const tile =
      static_cast<std::int64_t>(tile_outputs) * padded_rank * static_cast<std::int64_t>(element_bytes);
  return static_cast<std::int32_t>(stage_bytes / tile);
}

/// Stages in `shared_bytes` of shared memory for a contraction and the largest rank of a launch. Stages are
/// as large as a group of chunks wants, but not so large that fewer than three fit where smaller ones would
/// do.
[[nodiscard]] constexpr DeltaStages delta_stages(Contraction const& cut, std::int32_t max_rank,
                                                 std::size_t element_bytes,
                                                 std::size_t shared_bytes) noexcept {
  auto const b_bytes = round_up(
      tile_outputs * round_up(max_rank, pack_elements) * static_cast<std::int64_t>(element_bytes), 128);
  DeltaStages best;
  for (std::int32_t chunks = group_segments(cut) * cut.segment_chunks(); chunks >= 1;
       chunks = chunks == 1 ? 0 : (chunks + 1) / 2) {
    std::int64_t const a_bytes = std::int64_t{tile_ranks} *
                                 shared_stride(stage_width(cut, chunks), element_bytes) *
                                 static_cast<std::int64_t>(element_bytes);
    std::int64_t const bytes = round_up(a_bytes < b_bytes ? b_bytes : a_bytes, 128);
    auto const count = static_cast<std::int32_t>(static_cast<std::int64_t>(shared_bytes) / bytes);
    best = {static_cast<std::int32_t>(bytes), chunks, count};
    if (count >= 3) break;
  }
  return best;
}

/// What every block of a one-launch delta would otherwise work out for itself.
struct DeltaShape {
  DeltaStages stages{};
  std::int32_t blocks = 0;    ///< of k
  std::int32_t segments = 0;  ///< of k
  std::int32_t segment_blocks = 0;
  std::int32_t segment_chunks = 0;
  std::int32_t chunk_blocks = 0;
  std::int32_t group = 0;                               ///< segments whose chunks are multiplied together
  std::int32_t parts = 0;                               ///< stages of a group and rank tile
  std::int32_t stage_stride = 0;                        ///< elements between the ranks of a stage of A
  std::int32_t first_output[max_projections + 1] = {};  ///< prefix counts of output tiles
  std::int32_t xa_offset[max_projections] = {};         ///< of a projection in a row of xa

  /// Sets what follows from the contraction and the stages.
  constexpr void set(Contraction const& cut, DeltaStages const& the_stages,
                     std::size_t element_bytes) noexcept {
    stages = the_stages;
    blocks = cut.blocks();
    segments = cut.segments();
    segment_blocks = cut.segment_blocks();
    segment_chunks = cut.segment_chunks();
    chunk_blocks = cut.chunk_blocks();
    group = group_segments(cut);
    parts = static_cast<std::int32_t>(divide_up(group * segment_chunks, stages.chunks));
    stage_stride = shared_stride(stage_width(cut, stages.chunks), element_bytes);
  }
};

/// The first block of chunk slot `slot` of the group of segments that begins with `segment`.
[[nodiscard]] ATLAS_HD constexpr std::int32_t slot_block(DeltaShape const& shape, std::int32_t segment,
                                                         std::int32_t slot) noexcept {
  return (segment + slot / shape.segment_chunks) * shape.segment_blocks +
         slot % shape.segment_chunks * shape.chunk_blocks;
}

}  // namespace atlas::lora::inline v0
