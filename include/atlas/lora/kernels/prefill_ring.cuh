// SPDX-License-Identifier: AGPL-3.0-only
//
// What the shrink of the prefill form reads: stages of x and A in shared memory, some of them always on their
// way. A stage is four blocks of k; groups of warps share them, each of which fetches and multiplies its own
// and waits for itself alone.
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/prefill_shared.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The ring of stages as a thread fills and a warp reads it, for a slab of a piece. A group has `Blocks`
/// blocks of k of a stage. A `Lean` one leaves it to the compiler to hold or to find again what follows from
/// the launch alone: for warps that have no registers left.
template <int Blocks, bool Lean, class Source, Element T, Element Y>
class PrefillRing {
 public:
  /// Of the group's segments: every `stage_blocks / Blocks`-th from `segment` on before `last`.
  __device__ PrefillRing(Operands<T, Y> const& p, PrefillShared<T> const& shared, Piece<T> const& piece,
                         std::int32_t slab, std::int32_t ranks, std::int32_t segment, std::int32_t last)
      : p_(p) {
    std::uint32_t const ring = shared_address(shared.ring);
    // Neighbouring threads fetch a row's neighbouring elements, over all of the group's blocks of the stage.
    int const in_block = thread_here();
    int const thread = in_block % group_threads;
    int const group = in_block / group_threads;
    int const quad = thread % 4;
    int const block = thread / 4 % Blocks;
    int const row = thread / 4 / Blocks;
    int const element = quad * pack_elements;
    std::uint32_t const of_group = ring + group * Blocks * block_bytes();
    to_ = of_group + block * block_bytes() + (row * 4 + quad) * 16;
    from_ = of_group + in_block % warp_threads * 16;
    stage_bytes_ = held(p.prefill.stage_bytes);
    ring_bytes_ = held(p.prefill.stages * p.prefill.stage_bytes);
    all_stages_ = held(p.prefill.stages == most_stages ? 1 : 0);
    segment_blocks_ = held(p.shape.segment_blocks);
    end_ = ring + ring_bytes_;
    barrier_ = in_register(group + 1);
#pragma unroll
    for (int i = 0; i < x_turns; ++i) {
      bool const inside = row + i * turn_rows < piece.tiles * tile_rows;
      x_[i] = p.x + max(inside ? piece.x_row[row + i * turn_rows] : 0, 0) * p.x_row_stride + element;
      if (inside) fetched_ |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < a_turns; ++i) {
      std::int32_t const rank_tile = slab + (i * turn_rows + row) / tile_ranks;
      a_[i] = nullptr;
      if (rank_tile >= slab + ranks) continue;
      fetched_ |= 1u << (x_turns + i);
      int const projection = projection_of(piece, rank_tile);
      // Ranks beyond the true one multiply the last one's weights and are never used.
      std::int32_t const j = (rank_tile - piece.first_rank_tile[projection]) * tile_ranks + row % tile_ranks;
      a_[i] = piece.cell[projection].a + min(j, rank_of<Source>(piece, projection) - 1) * p.k_in + element;
    }
    begin(segment, last, block, element);
  }

  /// Bytes from one of the stage's blocks of k to the next.
  [[nodiscard]] __device__ std::uint32_t block_bytes() const { return p_.prefill.stage_bytes / stage_blocks; }

  /// Waits for the group's next stage and gives the shared address of its first block of k, as of this lane.
  /// `refill` comes after.
  __device__ std::uint32_t next() {
    if (all_stages_ != 0) {
      wait_copies<most_stages - 2>();
    } else {
      wait_copies<fewest_stages - 2>();
    }
    wait_for_group();
    std::uint32_t const stage = from_;
    from_ = after(from_);
    return stage;
  }
  /// Asks for a stage in the place that all had left at the last `next`.
  __device__ void refill() {
    if (left_ > 0) {
      int const bytes = k_ < inputs_ ? 16 : 0;
#pragma unroll
      for (int i = 0; i < x_turns; ++i)
        copy_line_part_if(to_ + i * turn_bytes, x_[i] + k_, bytes, (fetched_ >> i & 1u) != 0);
#pragma unroll
      for (int i = 0; i < a_turns; ++i) {
        copy_line_part_if(to_ + (x_turns + i) * turn_bytes, a_[i] + k_, bytes,
                          (fetched_ >> (x_turns + i) & 1u) != 0);
      }
    }
    commit_copies();
    --left_;
    k_ += Blocks * block_elements;
    if constexpr (Blocks == 1) {
      if (--in_segment_ == 0) {
        k_ += (stage_blocks - 1) * segment_blocks_ * block_elements;
        in_segment_ = segment_blocks_;
      }
    }
    to_ = after(to_);
  }

 private:
  /// Threads of a group, rows that it fetches at a time of each of its blocks, and how many times of x and of
  /// A.
  static constexpr int group_threads = prefill_warps * warp_threads * Blocks / stage_blocks;
  static constexpr int turn_rows = group_threads / Blocks / 4;
  static constexpr int turn_bytes = turn_rows * static_cast<int>(stage_row_bytes);
  static constexpr int x_turns = piece_rows / turn_rows;
  static constexpr int a_turns = slab_rank_tiles * tile_ranks / turn_rows;
  static_assert(piece_rows % turn_rows == 0 && turn_rows % tile_ranks == 0);
  static_assert(most_stages == 4 && fewest_stages == 3);

  /// Asks for the first stages when the group has left what the ring held before.
  __device__ void begin(std::int32_t segment, std::int32_t last, int block, int element) {
    std::int32_t const size = p_.shape.segment_blocks;
    in_segment_ = size;
    k_ = (segment * size + block) * block_elements;
    inputs_ = static_cast<std::int32_t>(p_.k_in) - element;
    // The group's last segment may be short; a group with two blocks of a stage has one segment alone.
    std::int32_t const before = (last - 1 - segment) / (stage_blocks / Blocks);
    std::int32_t const of_last = segment + before * (stage_blocks / Blocks);
    left_ = (min(size, p_.shape.blocks - of_last * size) - block + Blocks - 1) / Blocks + before * size;
    wait_for_group();
    refill();
    refill();
    if (all_stages_ != 0) refill();
  }

  /// A value that follows from the launch alone.
  static __device__ int held(int value) {
    if constexpr (Lean) return value;
    return in_register(value);
  }

  /// The same place of the stage after.
  __device__ std::uint32_t after(std::uint32_t place) const {
    place += static_cast<std::uint32_t>(stage_bytes_);
    return place >= end_ ? place - static_cast<std::uint32_t>(ring_bytes_) : place;
  }

  /// All threads of the group meet.
  __device__ void wait_for_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_), "n"(group_threads) : "memory");
  }

  Operands<T, Y> const& p_;
  int stage_bytes_;
  int ring_bytes_;
  int all_stages_;
  std::int32_t segment_blocks_;
  std::uint32_t to_;    ///< shared address that this thread fills next
  std::uint32_t from_;  ///< that this lane reads next
  std::uint32_t end_;   ///< of the ring
  int barrier_;
  T const* x_[x_turns];
  T const* a_[a_turns];
  unsigned fetched_ = 0;         ///< a bit for each of them
  std::int32_t k_ = 0;           ///< that this thread fetches next, but for its place in a block
  std::int32_t inputs_ = 0;      ///< of x, from that place on
  std::int32_t left_ = 0;        ///< stages that it still fetches
  std::int32_t in_segment_ = 0;  ///< of those, the ones of the same segment
};

}  // namespace atlas::lora::inline v0::detail
