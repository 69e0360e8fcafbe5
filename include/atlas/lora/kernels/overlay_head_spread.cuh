// SPDX-License-Identifier: AGPL-3.0-only
//
// The head's recompute where overrides are few: a team of blocks, a cluster where there are any, takes an
// item, its warps take segments of k of its tiles, and the segment sums meet in the shared memory of
// the block that folds a tile.
//
// Latency is all there is, so what does not depend on the launch's dependencies comes before them: the first
// weights are asked for as soon as the cell is known, then rows and ids; x alone comes after.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_head_walk.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// Most tiles of an item that one block of a team folds, a warp each of their vectors.
template <int Cluster, Element T>
inline constexpr int head_folded_tiles =
    (most_across_tiles<Cluster> * most_down_tiles<Cluster, T> + Cluster - 1) / Cluster;
/// Bytes of the segment sums that a block folds: `[segment][folded tile][vector][lane]`.
template <int Cluster, Element T>
inline constexpr std::size_t folded_bytes =
    sizeof(float4) * max_segments* head_folded_tiles<Cluster, T>* tile_vectors<T>* warp_threads;
/// Bytes of x of a window of blocks of k: of all segments that warps multiply together, a step or more each.
template <int Cluster>
inline constexpr std::size_t spread_x_bytes = std::size_t{Cluster > 1 ? 32 : 64} << 10;
template <int Cluster, Element T>
inline constexpr std::size_t spread_bytes = folded_bytes<Cluster, T> + spread_x_bytes<Cluster>;

/// Most segments of a block of a team, and whether warps are enough for all by all tiles along the overrides.
template <int Cluster>
inline constexpr int most_own_segments = (max_segments + Cluster - 1) / Cluster;
template <int Cluster>
inline constexpr bool one_round = most_own_segments<Cluster>* most_across_tiles<Cluster> <= head_warps;

/// Which blocks of k of x a block has in shared memory together, with room for `Room` of them, read `Ahead`
/// at a time: so many of each segment that its warps multiply in a round, each segment a run, and one window
/// after the other; or all of them, which are one run then, since segments follow each other.
template <int Cluster, int Ahead, std::int32_t Room>
struct XWindow {
  static constexpr bool one = one_round<Cluster>;  ///< whether there is one round

  std::int32_t first;     ///< segment
  std::int32_t segments;  ///< at least 1
  std::int32_t blocks;    ///< of a segment, a multiple of `Ahead`
  bool whole;

  __device__ XWindow(Contraction const& cut, Share own, std::int32_t task, std::int32_t tasks,
                     std::int32_t across) {
    std::int32_t const before = one ? 0 : task / across;
    first = own.first + before;
    segments = max(one ? own.size() : (min(task + head_warps, tasks) - 1) / across - before + 1, 1);
    blocks = (cut.segment_blocks() + Ahead - 1) / Ahead * Ahead;
    whole = segments * blocks <= Room;
    // Of the most segments that there can be: a division would take long, and registers.
    constexpr int most = one ? most_own_segments<Cluster> : head_warps;
    static_assert(Room / most >= Ahead);
    if (!whole) blocks = Room / most / Ahead * Ahead;
  }
  __device__ std::int32_t runs() const { return whole ? 1 : segments; }
  /// The first block of a run in the window from block `w` of a segment on.
  __device__ std::int32_t from(Contraction const& cut, std::int32_t run, std::int32_t w) const {
    return (first + run) * cut.segment_blocks() + w;
  }
  /// Its blocks; none where it is negative.
  __device__ std::int32_t count(Contraction const& cut, std::int32_t run, std::int32_t w) const {
    std::int32_t const all = whole ? segments * cut.segment_blocks() : min(blocks, cut.segment_blocks() - w);
    return min(all, cut.blocks() - from(cut, run, w));
  }
  /// Where the `segment`-th segment begins among the blocks in shared memory, from the block's first on.
  __device__ std::int32_t place(Contraction const& cut, Share own, std::int32_t segment) const {
    return (own.first + segment - first) * (whole ? cut.segment_blocks() : blocks);
  }
};

/// One spread item of a team of `Cluster` blocks, as one of them sees it. `Down` are its row tiles.
template <bool Wide, int Cluster, int Down, Element T, Element Y>
class SpreadItem {
 public:
  __device__ SpreadItem(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                        std::int32_t index, int block, float4* shared)
      : p_(p),
        batch_(batch),
        group_of_(group_of),
        own_(share_of(p.segments, Cluster, block)),
        first_override_(group_of.work.first_override(index)),
        first_row_(group_of.work.first_row(index)),
        across_(group_of.work.item_overrides / head_tile_overrides),
        block_(block),
        warp_(warp_index()),
        sums_(shared),
        x_(reinterpret_cast<Pack<T>*>(shared + folded_bytes<Cluster, T> / sizeof(float4))) {}

  /// Multiplies, sends and folds. All threads of all the team's blocks call it.
  __device__ void run(bool first, bool& entered) {
    // Nobody sends before everybody is done with the item before.
    if constexpr (Cluster > 1) {
      if (first) {
        cluster_arrive_relaxed();
      } else {
        cluster_arrive();
      }
    }
    std::int32_t const tasks = own_.size() * across_;
    int const warp = this_warp();
    auto brought = Brought::nothing;
#pragma unroll 1
    for (std::int32_t task = 0; task == 0 || (!one_round<Cluster> && task < tasks); task += head_warps) {
      bool const works = task + warp < tasks;
      std::int32_t const segment = works ? (task + warp) / across_ : 0;
      std::int32_t const m = task + warp - segment * across_;
      bool const exists = works && override_of(m) < group_of_.overrides;
      BlockRange const blocks = p_.cut.segment(own_.first + segment);
      Walk walk(group_of_, p_.params.table.hidden, override_of(exists ? m : 0), p_.cut,
                exists ? blocks : BlockRange{blocks.first, blocks.first});
      Window const window(p_.cut, own_, task, tasks, across_);
      if (task == 0) {
        if (!first) __syncthreads();  // rows and ids of the item before have been folded
        if constexpr (early) ask_rows();
        ask_ids();
        brought = bring_first(window, entered);
      }
      multiply(walk, window, brought, segment, blocks.first);
      brought = Brought::nothing;
      if (exists) send(walk, m, own_.first + segment);
    }
    fold(this_warp() / vectors * Cluster + block_);
  }

 private:
  using Walk = HeadWalk<Wide, Down, T>;
  static constexpr int vectors = tile_vectors<T>;
  /// Whether lanes know the rows that they copy before all warps have met; float's sums leave no registers.
  static constexpr bool early = Wide && sizeof(T) == 2;
  /// Blocks of k whose x a warp brings through registers at once.
  static constexpr int held_blocks = 2;
  /// Ids that come from memory together, whatever their alignment to lines.
  static constexpr std::int32_t ids_of_sector = 32 / sizeof(std::int32_t);
  /// Packs of x of a block of k.
  static constexpr int block_packs = Down * tile_packs<T>;
  using Window = XWindow<Cluster, Walk::ahead,
                         static_cast<std::int32_t>(spread_x_bytes<Cluster> / sizeof(Pack<T>)) / block_packs>;
  static_assert(head_folded_tiles<Cluster, T> * vectors <= head_warps);
  static_assert(Cluster == 1 || held_blocks * head_warps * block_packs <=
                                    static_cast<int>(spread_x_bytes<Cluster> / sizeof(Pack<T>)));
  /// What has come, or was asked for, of a round's first window of x before the round multiplies.
  enum class Brought { nothing, first_run, all };

  /// This warp: in a cluster, whose weights leave no register for it, asked for wherever it is needed; over
  /// the rounds of a block alone, kept.
  __device__ int this_warp() const { return Cluster > 1 ? warp_index() : warp_; }
  __device__ std::int32_t override_of(std::int32_t m) const {
    return first_override_ + m * head_tile_overrides;
  }
  /// Where tile `tile` of the item, below `Down * across`, is along the batch rows: no division, which takes
  /// time and registers.
  __device__ int down_of(int tile) const {
    static_assert(Down <= 2);
    return Down == 2 && tile >= across_ ? 1 : 0;
  }
  /// Whether it exists. Tile `m + across * t` is the t-th along the batch rows.
  __device__ bool folds(int tile) const {
    int const t = down_of(tile);
    return tile < across_ * Down && override_of(tile - t * across_) < group_of_.overrides &&
           first_row_ + t * head_tile_rows<T> < group_of_.rows;
  }

  /// Asks for the rows of x that this lane copies. Nothing waits for them here.
  __device__ void ask_rows() {
#pragma unroll
    for (int i = 0; i < Down * vectors; ++i) {
      std::int32_t const row = first_row_ + i * tile_batch_rows + group();
      rows_[i] = row < group_of_.rows ? p_.params.plan.rows[group_of_.first_row + row] : -1;
    }
  }
  /// Brings the item's ids as far as the L2: found only when x is on its way, they come no later than it
  /// does.
  __device__ void ask_ids() {
    std::int32_t const i = static_cast<std::int32_t>(threadIdx.x) * ids_of_sector;
    std::int32_t const j = first_override_ + i;
    if (i < group_of_.work.item_overrides && j < group_of_.overrides) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(group_of_.ids + j));
    }
  }
  /// Waits for what the launch depends on, once, asks for the first run of x and finds rows and ids while it
  /// is on its way. All that asking needs is worked out before, which the compiler would put off.
  __device__ Brought bring_first(Window const& window, bool& entered) {
    int const warp = this_warp();
    std::int32_t from = window.from(p_.cut, 0, 0);
    std::int32_t end = window.count(p_.cut, 0, 0);
    asm volatile("" : "+r"(from), "+r"(end));
    if (!entered) enter();
    entered = true;
    auto brought = Brought::nothing;
    if constexpr (early) {
#pragma unroll
      for (int i = 0; i < Down * vectors; ++i) {
        rows_[i] = rows_[i] < p_.params.rows ? max(rows_[i], 0) : 0;
      }
      if constexpr (Cluster > 1) {
        if (window.whole && end <= held_blocks * head_warps) {
          hold_all(from + warp, from + end);
          return Brought::all;
        }
      }
#pragma unroll 1
      for (std::int32_t b = warp; b < end; b += head_warps) copy_block(x_ + b * block_packs, from + b);
      brought = Brought::first_run;
    }
    meet();
    return brought;
  }
  /// Brings through registers x of the blocks up to `end`, from this warp's first on: so few that all are
  /// under way together.
  __device__ void hold_all(std::int32_t from, std::int32_t end) {
    HeldX<held_blocks, Down, T> held;
    held.ask(
        p_, [&](int i) { return rows_[i]; }, from, end);
    meet();
    held.store(x_ + this_warp() * block_packs);
  }
  /// Finds the item's rows and ids for all, and meets the team, while x is on its way.
  __device__ void meet() {
    find_item_rows(batch_, p_, group_of_, first_row_);
    find_item_ids(batch_, p_, group_of_, first_override_);
    // Phases are of items of which the block folds something: nobody waits for any other.
    if (Cluster > 1 && threadIdx.x == 0 && folds(block_)) batch_.phase ^= 1U;
    if constexpr (Cluster > 1) cluster_wait();
  }
  /// Reads the rows that this lane copies again, which are not kept while registers hold a walk. Behind it
  /// what was copied before is done with.
  __device__ void read_rows() {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Down * vectors; ++i) {
      rows_[i] = max(batch_.rows[i * tile_batch_rows + group()], 0);
    }
  }
  __device__ void copy_block(Pack<T>* to, std::int32_t block) {
    if constexpr (early) {
      copy_x_block<Down, Down * vectors>(
          to, p_, [&](int i) { return rows_[i]; }, block);
    } else {
      copy_present_rows<Wide, Down>(to, p_, batch_.rows, block);
    }
  }

  /// Walks this warp's blocks from `first_block` on, while the block copies x of the round's segments, window
  /// by window.
  __device__ void multiply(Walk& walk, Window const& window, Brought brought, std::int32_t segment,
                           std::int32_t first_block) {
    if (brought == Brought::nothing) read_rows();
#pragma unroll 1
    for (std::int32_t w = 0;;) {
      // Each warp copies and orders some of the blocks.
      auto const each_block = [&](std::int32_t first_run, auto const& visit) {
        int const warp = this_warp();
#pragma unroll 1
        for (std::int32_t run = first_run; run < window.runs(); ++run) {
          std::int32_t const from = window.from(p_.cut, run, w);
          std::int32_t const end = window.count(p_.cut, run, w);
#pragma unroll 1
          for (std::int32_t b = warp; b < end; b += head_warps) {
            visit(x_ + (run * window.blocks + b) * block_packs, from + b);
          }
        }
      };
      if (brought != Brought::all) {
        each_block(brought == Brought::first_run ? 1 : 0,
                   [&](Pack<T>* to, std::int32_t block) { copy_block(to, block); });
        commit_copies();
        wait_copies<0>();
        each_block(0, [](Pack<T>* at, std::int32_t) { order_x_block<Down>(at); });
      }
      brought = Brought::nothing;
      __syncthreads();
      walk.to(first_block + w + window.blocks, x_ + window.place(p_.cut, own_, segment) * block_packs,
              KeepSegment{});
      w += window.blocks;
      if (w >= p_.cut.segment_blocks()) break;
      read_rows();
    }
  }

  /// Brings a segment's sums of override tile `m` to the blocks that fold them.
  __device__ void send(Walk const& walk, std::int32_t m, std::int32_t segment) {
#pragma unroll
    for (int t = 0; t < Down; ++t) {
      int const tile = m + across_ * t;
      if (first_row_ + t * head_tile_rows<T> >= group_of_.rows) continue;
      auto const to = static_cast<std::uint32_t>(tile % Cluster);
      float4* const place =
          sums_ + (segment * head_folded_tiles<Cluster, T> + tile / Cluster) * vectors * warp_threads +
          lane_index();
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        if constexpr (Cluster == 1) {
          place[v * warp_threads] = walk.segment(t * vectors + v);
        } else {
          detail::send(address_in_block(shared_address(place + v * warp_threads), to),
                       walk.segment(t * vectors + v), address_in_block(shared_address(&batch_.full), to));
        }
      }
    }
  }

  /// Folds this warp's vector of its tile, if there is one, into the logits.
  __device__ void fold(int tile) {
    int const segments = p_.segments;
    if constexpr (Cluster == 1) {
      __syncthreads();
    } else {
      // The warps that fold a block's one tile wait, the first among them.
      static_assert(head_folded_tiles<Cluster, T> == 1);
      if (threadIdx.x == 0 && folds(block_)) {
        batch_.full.arrive_expecting(static_cast<std::uint32_t>(segments * vectors * warp_threads) *
                                     sizeof(float4));
      }
    }
    if (!folds(tile)) return;
    // No warp is a phase behind: all meet before the next item's sums are sent.
    if constexpr (Cluster > 1) batch_.full.wait(batch_.phase);
    float4 const* const own = sums_ + this_warp() * warp_threads + lane_index();
    float4 total = own[0];
#pragma unroll
    for (int s = 1; s < max_segments; ++s) {
      if (s < segments)
        total = add_rn(total, own[s * head_folded_tiles<Cluster, T> * vectors * warp_threads]);
    }
    HeadTarget target;
    int const t = down_of(tile);
    take_ids<T>(target, batch_.ids, tile - t * across_, this_warp() % vectors);
    take_rows<T>(target, batch_.rows, t);
    write_logits(p_, target, total);
  }

  HeadOperands<T, Y> const& p_;
  HeadBatch<T>& batch_;
  HeadGroup<T> const& group_of_;
  Share own_;  ///< the block's segments
  std::int32_t first_override_;
  std::int32_t first_row_;
  std::int32_t across_;  ///< tiles along the overrides
  int block_;
  int warp_;
  float4* sums_;
  Pack<T>* x_;
  std::int32_t rows_[Down * vectors];  ///< of x, that this lane copies
};

/// One spread item by a team of `Cluster` blocks. All threads of all its blocks call it. `shared` is memory
/// for sums and x; `first` says that the team had no item before.
template <int Cluster, Element T, Element Y>
__device__ void spread_item(HeadOperands<T, Y> const& p, HeadBatch<T>& batch, HeadGroup<T> const& group_of,
                            std::int32_t index, int block, float4* shared, bool first, bool& entered) {
  auto const run = [&]<bool Wide, int Down>() {
    SpreadItem<Wide, Cluster, Down, T, Y>(p, batch, group_of, index, block, shared).run(first, entered);
  };
  auto const run_down = [&]<int Down>() {
    if (group_of.wide != 0) {
      run.template operator()<true, Down>();
    } else {
      run.template operator()<false, Down>();
    }
  };
  if constexpr (most_down_tiles<Cluster, T> == 2) {
    if (group_of.work.item_rows == 2 * head_tile_rows<T>) return run_down.template operator()<2>();
  }
  run_down.template operator()<1>();
}

}  // namespace atlas::lora::inline v0::detail
