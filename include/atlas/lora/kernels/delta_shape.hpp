// SPDX-License-Identifier: AGPL-3.0-only
//
// How the one-launch delta divides a row tile among the blocks of a team and their warps: arithmetic
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

/// Blocks of k of a rank tile that a stage, what a warp of the one-launch delta fetches at a time, holds in
/// the shrink. In the expand it holds one block of the rank of an output tile.
inline constexpr std::int32_t delta_stage_blocks = 2;
/// Most stages of a warp.
inline constexpr std::int32_t most_delta_stages = 3;

/// What stands for a row tile that does not exist.
inline constexpr std::int32_t no_tile = std::int32_t{1} << 30;

/// The row tiles of a team: first `whole` of its own, the `i`-th one `i` times the teams after the first,
/// then one that is divided among `parts` teams: projections among them, or their outputs, of which each
/// then does all of the shrink. So a last round that is not full lasts less long.
struct TileWalk {
  std::int32_t whole = 0;
  std::int32_t shared = no_tile;  ///< the row tile after those, or `no_tile`
  std::int32_t part = 0;          ///< this team's
  std::int32_t parts = 1;

  friend constexpr bool operator==(TileWalk const&, TileWalk const&) = default;
};

/// How the warps of a block share the segment sums of a slab of rank tiles: where there are fewer sums than
/// warps, several warps take neighbouring chunks of each, a task.
struct ShrinkTasks {
  std::int32_t ranks = 1;         ///< rank tiles of the slab, which run fastest among sums
  std::int32_t inverse = 256;     ///< `sum * inverse >> 8` is `sum / ranks`
  std::int32_t sharing_log2 = 0;  ///< tasks of a sum, as a power of two
  std::int32_t task_chunks = 0;   ///< of a task; a sum's last tasks may have fewer, or none

  constexpr ShrinkTasks() = default;
  /// Of a block with at most `segments` segments.
  constexpr ShrinkTasks(std::int32_t segments, std::int32_t rank_tiles, std::int32_t segment_chunks,
                        std::int32_t warps) noexcept
      : ranks(rank_tiles), inverse((255 + rank_tiles) / rank_tiles) {
    while (segments * ranks << (sharing_log2 + 1) <= warps && 1 << sharing_log2 < segment_chunks)
      ++sharing_log2;
    task_chunks = (segment_chunks + (1 << sharing_log2) - 1) >> sharing_log2;
  }
  /// Tasks of a block that has `segments` segments.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t count(std::int32_t segments) const noexcept {
    return segments * ranks << sharing_log2;
  }
};

/// One task of a warp.
struct ShrinkTask {
  std::int32_t sum = 0;        ///< of the block's: segment by rank tile
  std::int32_t segment = 0;    ///< counted from the block's first
  std::int32_t rank_tile = 0;  ///< of the slab
  std::int32_t part = 0;       ///< of the sum
  BlockRange blocks{};         ///< of k
};

/// How the work on a row tile is divided in a team of one size.
struct TeamShape {
  std::int32_t log2 = 0;               ///< blocks of the team, as a power of two
  std::int32_t block_segments = 0;     ///< segments of a block
  std::int32_t block_outputs = 0;      ///< output tiles of a block of a team that has a row tile to itself
  std::int32_t max_parts = 1;          ///< teams that a row tile can occupy
  std::int32_t lone_teams = no_tile;   ///< most teams that work where no team has a row tile to itself before
  ShrinkTasks tasks[slab_rank_tiles];  ///< of a slab of 1, 2, 3 and 4 rank tiles
};

/// What every block of a one-launch delta would otherwise work out for itself. Blocks take neighbouring
/// shares of segments and output tiles, all of one size but the last ones.
struct DeltaShape {
  TeamShape team[2];        ///< a cluster as one team, and a half of it; the same twice where it is never two
  std::int32_t blocks = 0;  ///< of k
  std::int32_t segments = 0;  ///< of k
  std::int32_t segment_blocks = 0;
  std::int32_t segment_chunks = 0;
  std::int32_t chunk_blocks = 0;
  std::int32_t chunk_sums = 0;  ///< that a block has room for behind the segment sums of a slab
  std::int32_t stages = 1;      ///< of a warp
  std::int32_t slab = 1;        ///< rank tiles whose sums are exchanged at once
  std::int32_t projections = 1;
  std::int32_t most_tiles = no_tile;  ///< that the launch can find; `no_tile` where that is not known
  std::int32_t most_whole_tiles = 0;  ///< row tiles up to which a cluster is one team; 0: always
  std::int32_t first_output[max_projections + 1] = {};  ///< prefix counts of output tiles
  std::int32_t xa_offset[max_projections] = {};         ///< of a projection in a row of xa

  /// Sets what follows from the contraction, the cluster (a power of two), the row tiles up to which it is
  /// one team (0: always), the warps of a block, the most rank tiles of a row tile and `first_output`.
  constexpr void set(Contraction const& cut, std::int32_t cluster, std::int32_t whole_tiles,
                     std::int32_t warps, std::int32_t rank_tiles, std::int32_t num_projections) noexcept {
    blocks = cut.blocks();
    segments = cut.segments();
    segment_blocks = cut.segment_blocks();
    segment_chunks = cut.segment_chunks();
    chunk_blocks = cut.chunk_blocks();
    projections = num_projections;
    most_whole_tiles = whole_tiles;
    set_team(0, cluster, warps, first_output[num_projections]);
    set_team(1, whole_tiles > 0 ? cluster / 2 : cluster, warps, first_output[num_projections]);
    slab = rank_tiles < slab_rank_tiles ? rank_tiles : slab_rank_tiles;
    set_chunk_sums();
  }

  /// The segments of block `block` of a team.
  [[nodiscard]] ATLAS_HD constexpr Share segments_of(TeamShape const& of, std::int32_t block) const noexcept {
    return clipped(block * of.block_segments, of.block_segments, 0, segments);
  }
  /// The row tiles of team `index` of `teams` that find `tiles` row tiles.
  [[nodiscard]] ATLAS_HD constexpr TileWalk walk_of(TeamShape const& of, std::int32_t teams,
                                                    std::int32_t tiles, std::int32_t index) const noexcept {
    // The common cases need no division.
    std::int32_t const rounds = tiles < teams ? 0 : tiles < 2 * teams ? 1 : tiles / teams;
    std::int32_t const left = tiles - rounds * teams;
    TileWalk walk{rounds, rounds * teams + index, 0, 1};
    if (left < 1) {
      walk.shared = no_tile;
      return walk;
    }
    // Where that is all, some teams are left out, so that the next launch's can start beside the others.
    std::int32_t const most = rounds == 0 && of.lone_teams < teams ? of.lone_teams : teams;
    std::int32_t parts = left <= most / 2 ? most / left : 1;
    // Teams that have a projection each have no work in common.
    if (projections > 1 && projections * left <= most) {
      std::int32_t const more = (parts + projections - 1) / projections * projections;
      parts = more * left <= most ? more : parts - parts % projections;
    }
    walk.parts = parts < of.max_parts ? parts : of.max_parts;
    walk.part = walk.parts == 1 ? 0 : index / left;
    bool const has = walk.parts == 1 ? index < left : walk.part < walk.parts;
    walk.shared = has ? rounds * teams + index - walk.part * left : no_tile;
    return walk;
  }
  /// The one projection of part `part` of `parts`, or -1 where parts have outputs of all.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t projection_of_part(std::int32_t part,
                                                                   std::int32_t parts) const noexcept {
    return projections > 1 && parts % projections == 0 ? part % projections : -1;
  }
  /// The output tiles of one projection that are block `block`'s of a team with part `part` of `parts`,
  /// counted from the projection's first.
  [[nodiscard]] ATLAS_HD constexpr Share outputs_of(TeamShape const& of, std::int32_t block,
                                                    std::int32_t part, std::int32_t parts,
                                                    std::int32_t projection) const noexcept {
    std::int32_t const first = first_output[projection];
    std::int32_t const size = first_output[projection + 1] - first;
    std::int32_t const only = projection_of_part(part, parts);
    if (only >= 0) {
      if (projection != only) return {};
      std::int32_t const blocks_of_all = parts / projections << of.log2;
      std::int32_t const count = (size + blocks_of_all - 1) / blocks_of_all;
      return clipped(((part / projections << of.log2) + block) * count, count, 0, size);
    }
    std::int32_t const all = of.block_outputs;
    std::int32_t const count = parts == 1 ? all : (all + parts - 1) / parts;
    std::int32_t const begin = ((part << of.log2) + block) * count;
    return clipped(begin - first, count, 0, size);
  }
  /// Task `task` of a block whose segments begin with `first_segment`; its blocks may be none.
  [[nodiscard]] ATLAS_HD constexpr ShrinkTask task_of(ShrinkTasks const& tasks, std::int32_t first_segment,
                                                      std::int32_t task) const noexcept {
    ShrinkTask found;
    found.sum = task >> tasks.sharing_log2;
    found.part = task & ((1 << tasks.sharing_log2) - 1);
    found.segment = found.sum * tasks.inverse >> 8;
    found.rank_tile = found.sum - found.segment * tasks.ranks;
    std::int32_t const size = tasks.task_chunks * chunk_blocks;
    std::int32_t const begin = (first_segment + found.segment) * segment_blocks;
    std::int32_t const end = begin + segment_blocks < blocks ? begin + segment_blocks : blocks;
    std::int32_t const first = begin + found.part * size < end ? begin + found.part * size : end;
    found.blocks = {first, first + size < end ? first + size : end};
    return found;
  }

  /// Where the chunk sums of a slab of `ranks` rank tiles begin, counted in segment sums: over those of rank
  /// tiles that there are not, unless what counts for segments that there are not stands there.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t first_chunk_sum(std::int32_t ranks) const noexcept {
    return (segments == max_segments ? ranks : slab) * max_segments;
  }
  /// Sets what follows from the slab.
  constexpr void set_chunk_sums() noexcept {
    chunk_sums = 0;
    for (TeamShape const& of : team) {
      for (std::int32_t ranks = 1; ranks <= slab; ++ranks) {
        if (of.tasks[ranks - 1].sharing_log2 == 0) continue;
        std::int32_t const end = first_chunk_sum(ranks) + of.block_segments * ranks * segment_chunks;
        if (end - slab * max_segments > chunk_sums) chunk_sums = end - slab * max_segments;
      }
    }
  }

 private:
  constexpr void set_team(int size, std::int32_t blocks_of_team, std::int32_t warps,
                          std::int32_t outputs) noexcept {
    TeamShape& t = team[size];
    t.log2 = 0;
    while (1 << t.log2 < blocks_of_team) ++t.log2;
    t.block_segments = static_cast<std::int32_t>(divide_up(segments, blocks_of_team));
    for (std::int32_t ranks = 1; ranks <= slab_rank_tiles; ++ranks)
      t.tasks[ranks - 1] = ShrinkTasks(t.block_segments, ranks, segment_chunks, warps);
    t.block_outputs = static_cast<std::int32_t>(divide_up(outputs, blocks_of_team));
    t.max_parts = static_cast<std::int32_t>(round_up(divide_up(t.block_outputs, warps), projections));
  }
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
