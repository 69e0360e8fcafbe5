// SPDX-License-Identifier: AGPL-3.0-only
//
// The warps of a block of the one-launch delta that multiply: chunks of the shrink, the exchange of segment
// sums in the cluster, output tiles of the expand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/barrier.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shape.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/delta_stream.cuh"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// `store_padded` as a call, so that it takes no registers where all is aligned.
template <Element Y>
__device__ __noinline__ void store_narrow(Y* y, Pack<Y> pack, std::int32_t valid) {
  store_padded(y, pack, valid, false);
}

/// The warps of a block: chunks, the exchange of segment sums in the cluster, output tiles.
template <class Source, int Warps, bool Splits, Element T, Element Y>
class Multiply {
 public:
  __device__ Multiply(Operands<T, Y> const& p, DeltaShared<Warps, T> const& shared)
      : p_(p), shared_(shared), stream_(p, shared), warp_(warp_index()) {}

  /// Asks for the first weights of the window's row tiles from `index` on.
  __device__ void begin(int index) {
    stream_.begin(index);
    settled_ = false;
  }

  /// All of the row tile at `index`; false where it is known that none follows.
  __device__ bool tile(int index) {
    RowTile<T> const& tile = shared_.tile(index);
    std::int32_t const all = tile.first_rank_tile[max_projections];
    if (all == 0) return true;
    bool const last = index + 1 < shared_.head->window_end && shared_.tile(index + 1).exists == 0;
    // What can be known of the outputs is found before the launch's dependencies are complete.
    int projection = 0;
    while (tile.cell[projection].rank == 0) ++projection;
    Outputs outputs = outputs_of(tile, projection);
#pragma unroll 1
    for (std::int32_t slab = 0; slab < all; slab += p_.shape.slab) {
      std::int32_t const ranks = min(p_.shape.slab, all - slab);
      XaPlace const place = xa_place(tile, slab);
      shrink(tile, ranks);
      fold(tile, ranks, place, last && slab + ranks >= all);
    }
#pragma unroll 1
    while (true) {
      expand(outputs, tile.cell[projection]);
      do {
        if (++projection >= p_.num_projections) return finished(last);
      } while (tile.cell[projection].rank == 0);
      outputs = outputs_of(tile, projection);
    }
  }

  /// Waits for what may still be under way to this block, which must not leave before. The team's other
  /// blocks arrive after every slab but the last of a row tile that was known to be the last.
  __device__ void finish() {
    if (!entered_) stream_.enter_launch();
    if (slabs_ > 0) wait_for_room();
  }

 private:
  using Stream = DeltaStream<Source, Warps, Splits, T, Y>;
  static constexpr int warps_log2 = Warps == 8 ? 3 : 4;
  static_assert(1 << warps_log2 == Warps);

  /// Goes on to the place of the next row tile's xa unless that was the last; false then. A block must not
  /// leave before it has the others' word of the slab before the last, which no warp has waited for where the
  /// block has no segments.
  __device__ bool finished(bool last) {
    if (!last) {
      xa_ = xa_ == 0 ? xa_elements(p_.xa_shared_stride) : 0;
    } else if (slabs_ > 1) {
      shared_.head->sums_empty.wait(slabs_ & 1u);
    }
    return !last;
  }

  // --- Shrink --------------------------------------------------------------------------------------------

  /// Asks for x and y of the first stages, unless it has; at first when the launch's dependencies are
  /// complete and the cluster is there.
  __device__ void settle() {
    if (settled_) return;
    stream_.settle(!entered_);
    entered_ = true;
    settled_ = true;
  }

  /// Multiplies the block's chunks of the next slab, of `ranks` rank tiles, and sends the segment sums to
  /// every block of the team.
  __device__ void shrink(RowTile<T> const& tile, std::int32_t ranks) {
    ShrinkTasks const& tasks = stream_.team().tasks[ranks - 1];
    Share const own = stream_.own_segments();
    std::int32_t const count = tasks.count(own.size());
    bool const shared = tasks.sharing_log2 > 0;
    ShrinkTask task = p_.shape.task_of(tasks, own.first, warp_);
    int const rows = tile.rows;
    Sending const sending = sending_of(tasks, own);
    settle();
#pragma unroll 1
    for (std::int32_t i = warp_; i < count; i += Warps) {
      if (i > warp_) task = p_.shape.task_of(tasks, own.first, i);
      std::int32_t const chunk = task.sum * p_.shape.segment_chunks + task.part * tasks.task_chunks;
      float4 const total = multiply(task.blocks, shared ? p_.shape.first_chunk_sum(ranks) + chunk : -1);
      if (shared) break;
      if (i == warp_ && slabs_ > 0) wait_for_room();
      send_to_team(total, task.rank_tile * max_segments + own.first + task.segment, rows, 0, 1);
    }
    if (shared) {
      __syncthreads();
      if (sending.from >= 0) {
        float4 const* const from = sum_at(sending.from);
        float4 total = from[0];
#pragma unroll
        for (int c = 1; c < max_chunks; ++c) {
          if (c < sending.chunks) total = add(total, from[c * warp_threads]);
        }
        if (slabs_ > 0) wait_for_room();
        int const warps = 1 << sending.together_log2;
        send_to_team(total, sending.to, rows, warp_ & (warps - 1), warps);
      }
    }
  }

  /// The sum of the chunks of blocks `blocks`; each on its own is kept from `chunk_sum` on, counted in
  /// segment sums, unless that is negative. Of a rank tile a lane has batch row `group()` and ranks `2
  /// quad()`, one more, and eight beyond these.
  __device__ float4 multiply(BlockRange blocks, std::int32_t chunk_sum) {
    float4 total = make_float4(-0.0F, -0.0F, -0.0F, -0.0F);
    std::int32_t b = blocks.first;
#pragma unroll 1
    while (b < blocks.last) {
      std::int32_t const end = min(b + p_.shape.chunk_blocks, blocks.last);
      RowAccumulator<T> sums[2];
#pragma unroll 1
      while (b < end) {
        std::uint32_t const stage = stream_.next();
        Pack<T> const first[2] = {Stream::pack(stage, 0), Stream::pack(stage, 1)};
        Pack<T> const second[2] = {Stream::pack(stage, 2), Stream::pack(stage, 3)};
        Pack<T> const x[2] = {Stream::pack(stage, 4), Stream::pack(stage, 5)};
        RowAccumulator<T>::add(sums, first, x[0]);
        if (++b < end) {
          RowAccumulator<T>::add(sums, second, x[1]);
          ++b;
        }
        stream_.refill();
      }
      float2 const low = sums[0].finish();
      float2 const high = sums[1].finish();
      float4 const chunk = make_float4(low.x, low.y, high.x, high.y);
      if (chunk_sum >= 0) {
        *sum_at(chunk_sum++) = chunk;
      } else {
        total = add(total, chunk);
      }
    }
    return total;
  }

  // --- Exchange ------------------------------------------------------------------------------------------

  /// A segment sum that warps share, which this one folds and sends to some blocks of the team.
  struct Sending {
    std::int32_t from;           ///< its first chunk, counted in segment sums; negative where there is none
    std::int32_t chunks;         ///< to fold
    std::int32_t to;             ///< counted likewise
    std::int32_t together_log2;  ///< warps that send it, as a power of two
  };
  __device__ Sending sending_of(ShrinkTasks const& tasks, Share own) const {
    std::int32_t const sums = own.size() * tasks.ranks;
    int const together = warps_log2 - max(32 - __clz(sums - 1), 0);
    int const sum = warp_ >> together;
    int const segment = sum * tasks.inverse >> 8;
    if (sums == 0 || sum >= sums) return {-1, 0, 0, 0};
    std::int32_t const first = (own.first + segment) * p_.shape.segment_blocks;
    std::int32_t const last = min(first + p_.shape.segment_blocks, p_.shape.blocks);
    // A segment that is short has chunks to spare; all others are alike.
    std::int32_t const chunks = last - first == p_.shape.segment_blocks
                                    ? p_.shape.segment_chunks
                                    : (last - first + p_.shape.chunk_blocks - 1) / p_.shape.chunk_blocks;
    return {p_.shape.first_chunk_sum(tasks.ranks) + sum * p_.shape.segment_chunks, chunks,
            (sum - segment * tasks.ranks) * max_segments + own.first + segment, together};
  }
  /// This lane's values of a sum of a segment or a chunk.
  [[nodiscard]] __device__ float4* sum_at(std::int32_t sum) const {
    return shared_.segments + sum * warp_threads + lane_index();
  }

  /// Waits until all blocks of the team have folded the last slab.
  __device__ void wait_for_room() const { shared_.head->sums_empty.wait((slabs_ - 1) & 1u); }

  /// Sends this lane's values of a segment sum to the blocks of the team from `target` on, every `step`-th,
  /// where its row is one of `rows`; `to` counts in `segments` of shared memory.
  __device__ void send_to_team(float4 const& total, std::int32_t to, int rows, int target, int step) const {
    auto const done = shared_address(&shared_.head->sums_full);
    auto const place = shared_address(sum_at(to));
    std::uint32_t const first = block_of_team(0);
    int const blocks = 1 << stream_.team().log2;
    if (group() >= rows) return;
#pragma unroll 1
    for (; target < blocks; target += step)
      send(address_in_block(place, first + target), total, address_in_block(done, first + target));
  }

  __device__ static float4 add(float4 const& a, float4 const& b) {
    return make_float4(add_rn(a.x, b.x), add_rn(a.y, b.y), add_rn(a.z, b.z), add_rn(a.w, b.w));
  }

  /// Where two neighbouring values of a rank tile's sums go in xa.
  struct XaPlace {
    std::int32_t at;    ///< elements of `shared_.xa`
    std::int32_t left;  ///< ranks from there on
    bool half;          ///< the rank tile is the rank's last and fills half of a block
  };

  /// Of this thread's two of a slab's sums, counted over rank tiles, lanes and their two pairs each.
  __device__ XaPlace xa_place(RowTile<T> const& tile, std::int32_t slab) const {
    int const pair = thread_here();
    std::int32_t const rank_tile = slab + pair / (2 * warp_threads);
    int const projection = p_.num_projections == 1 ? 0 : projection_of(tile, rank_tile);
    std::int32_t const rank = rank_of<Source>(tile, projection);
    std::int32_t const local = rank_tile - (p_.num_projections == 1 ? 0 : tile.first_rank_tile[projection]);
    int const lane = pair / 2 % warp_threads;
    std::int32_t const j = local * tile_ranks + pair % 2 * tile_batch_rows + lane % 4 * 2;
    return {xa_ + lane / 4 * p_.xa_shared_stride + p_.shape.xa_offset[projection] + j, rank - j,
            local % 2 == 0 && (local + 1) * tile_ranks >= rank};
  }

  /// Folds the segments of a slab, all that there could be, into xa, zero from the rank to the end of its
  /// block; `place` is this thread's. The team's other blocks hear of it unless nothing comes after.
  __device__ void fold(RowTile<T> const& tile, std::int32_t ranks, XaPlace const& place, bool last) {
    DeltaHead<Warps, T>& head = *shared_.head;
    auto const thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      head.sums_full.arrive_expecting(static_cast<std::uint32_t>(p_.shape.segments * ranks * 4 * tile.rows) *
                                      sizeof(float4));
    }
    constexpr int tile_pairs = 2 * warp_threads;
    static_assert(slab_rank_tiles * tile_pairs <= Warps * warp_threads);
    auto const* const own = reinterpret_cast<float2 const*>(shared_.segments) +
                            thread / tile_pairs * max_segments * tile_pairs + thread % tile_pairs;
    head.sums_full.wait(slabs_ & 1u);
    if (thread < ranks * tile_pairs) {
      float2 total = own[0];
#pragma unroll
      for (int s = 1; s < max_segments; ++s) {
        float2 const segment = own[s * tile_pairs];
        total = make_float2(add_rn(total.x, segment.x), add_rn(total.y, segment.y));
      }
      float2 const kept = make_float2(place.left > 0 ? total.x : 0.0F, place.left > 1 ? total.y : 0.0F);
      store_pair(shared_.xa + place.at, kept);
      if (place.half) store_pair(shared_.xa + place.at + tile_ranks, make_float2(0.0F, 0.0F));
    }
    __syncthreads();
    if (!last && thread < 1 << stream_.team().log2) head.sums_empty.arrive_at(block_of_team(thread));
    ++slabs_;
  }
  /// Rounds two values and stores them side by side.
  __device__ static void store_pair(T* to, float2 values) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<std::uint32_t*>(to) = pair_bits_rn<T>(values.x, values.y);
    } else {
      *reinterpret_cast<float2*>(to) = values;
    }
  }

  /// Where block `block` of the team is in the cluster.
  [[nodiscard]] __device__ std::uint32_t block_of_team(int block) const {
    if constexpr (!Splits) return static_cast<std::uint32_t>(block);
    int const cluster = (1 << p_.shape.team[0].log2) - 1;
    int const within = (1 << stream_.team().log2) - 1;
    return static_cast<std::uint32_t>((static_cast<int>(blockIdx.x) & cluster & ~within) + block);
  }

  // --- Expand --------------------------------------------------------------------------------------------

  /// A warp's output tiles of one projection.
  struct Outputs {
    std::int32_t at;    ///< the next output tile
    std::int32_t last;  ///< one past the last
    std::int32_t rank;
    std::int32_t n_out;
    std::int32_t xa;  ///< elements of `shared_.xa` before this lane's first pack
    Y* y;             ///< its pack of output tile `at`; null where its row does not exist
  };
  __device__ Outputs outputs_of(RowTile<T> const& tile, int projection) const {
    DeltaProjection<T, Y> const& target = p_.projections[projection];
    int2 const own = stream_.own_outputs(tile, projection);
    std::int32_t const row = tile.row[group()];
    Outputs outputs;
    outputs.at = own.x + warp_;
    outputs.last = own.y;
    outputs.rank = rank_of<Source>(tile, projection);
    outputs.n_out = static_cast<std::int32_t>(target.table.n_out);
    outputs.xa =
        xa_ + group() * p_.xa_shared_stride + p_.shape.xa_offset[projection] + quad() * pack_elements;
    outputs.y =
        row < 0 ? nullptr
                : target.y + row * target.y_row_stride + outputs.at * tile_outputs + quad() * pack_elements;
    return outputs;
  }

  /// Expands output tiles and folds them into y. A lane has batch row `group()` and eight neighbouring
  /// outputs.
  __device__ void expand(Outputs& outputs, RouteCell<T> const& cell) {
#pragma unroll 1
    for (; outputs.at < outputs.last; outputs.at += Warps) {
      RowAccumulator<T> sums[4];
      Pack<Y> before;
#pragma unroll 1
      for (std::int32_t j = 0; j < outputs.rank; j += block_elements) {
        std::uint32_t const stage = stream_.next();
        Pack<T> const x = load_vectors(shared_.xa + outputs.xa + j);
        Pack<T> b[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) b[m] = Stream::pack(stage, m);
        before = Stream::y(stage);
        if (outputs.rank % pack_elements != 0) {
#pragma unroll
          for (int m = 0; m < 4; ++m) keep(b[m], outputs.rank - j - quad() * pack_elements);
        }
        RowAccumulator<T>::add(sums, b, x);
        stream_.refill();
      }
      fold_outputs(outputs, cell, sums, before);
      if (outputs.y != nullptr) outputs.y += Warps * tile_outputs;
    }
  }

  /// Finishes an output tile and folds it into y, which was `before`.
  __device__ void fold_outputs(Outputs const& outputs, RouteCell<T> const& cell,
                               RowAccumulator<T> const (&sums)[4], Pack<Y> const& before) const {
    std::int32_t const first = outputs.at * tile_outputs + quad() * pack_elements;
    std::int32_t const left = outputs.n_out - first;
    float2 value[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) value[m] = sums[m].finish();
    if (outputs.y == nullptr || left <= 0) return;
    if (cell.bias != nullptr) add_bias(value, cell.bias + first, left);
    Pack<T> delta;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if constexpr (sizeof(T) == 2) {
        delta.word[m] = pair_bits_rn<T>(value[m].x, value[m].y);
      } else {
        delta.word[2 * m] = __float_as_uint(value[m].x);
        delta.word[2 * m + 1] = __float_as_uint(value[m].y);
      }
    }
    Pack<Y> const after = folded(before, delta, cell.scale);
    if (p_.wide && left >= pack_elements) {
      store_vectors(outputs.y, after);
    } else {
      store_narrow(outputs.y, after, left);
    }
  }
  /// Adds the bias of the outputs that are left.
  __device__ static void add_bias(float2 (&value)[4], T const* bias, std::int32_t left) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (2 * m < left) value[m].x = add_rn(value[m].x, widen(bias[2 * m]));
      if (2 * m + 1 < left) value[m].y = add_rn(value[m].y, widen(bias[2 * m + 1]));
    }
  }

  Operands<T, Y> const& p_;
  DeltaShared<Warps, T> const& shared_;
  Stream stream_;
  int warp_;
  bool entered_ = false;     ///< the launch's dependencies are complete
  bool settled_ = false;     ///< x and y of the first stages since `begin` were asked for
  std::int32_t xa_ = 0;      ///< elements from `shared_.xa` to the row tile's
  std::uint32_t slabs_ = 0;  ///< folded
};

}  // namespace atlas::lora::inline v0::detail
