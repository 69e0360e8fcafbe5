// SPDX-License-Identifier: AGPL-3.0-only
//
// The warp of a block of the one-launch delta that fetches weights into the ring of stages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/delta_shared.cuh"
#include "atlas/lora/kernels/delta_stages.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/ptx.cuh"
#include "atlas/lora/kernels/ring.cuh"
#include "atlas/lora/kernels/row_tile.cuh"
#include "atlas/lora/kernels/work.hpp"

namespace atlas::lora::inline v0::detail {

/// The fetching warp. It and the multiplying warps walk the same sequence of stages: for every slab of rank
/// tiles, every group of the block's segments, every rank tile and part; then, for every projection, the
/// block's outputs.
template <class Source, Element T, Element Y>
class Fetch {
 public:
  __device__ Fetch(Operands<T, Y> const& p, DeltaShared<T, Y> const& shared) : p_(p), shared_(shared) {}

  /// Fetches all that the block needs of one row tile.
  __device__ void tile(RowTile<T> const& tile, BlockShare const& share) {
    std::int32_t const all = tile.first_rank_tile[max_projections];
    for (std::int32_t slab = 0; slab < all; slab += slab_rank_tiles) {
      for (std::int32_t s = share.segments.first; s < share.segments.last; s += p_.shape.group) {
        for (std::int32_t r = slab; r < min(slab + slab_rank_tiles, all); ++r) {
          for (std::int32_t part = 0; part < p_.shape.parts; ++part) {
            ranks(tile, r, part_blocks(s, part, share.segments.last));
          }
        }
      }
    }
    for (int i = 0; i < p_.num_projections; ++i) {
      Share const own = own_outputs(p_.shape, share.outputs, i);
      std::int32_t const rank = rank_of<Source>(tile, i);
      if (rank == 0) continue;
      std::int32_t const padded = (rank + pack_elements - 1) / pack_elements * pack_elements;
      std::int32_t const step = outputs_of_stage<T>(p_.shape, padded);
      for (std::int32_t t = own.first; t < own.last; t += step) {
        std::int64_t const n_last = min(p_.projections[i].table.n_out,
                                        static_cast<std::int64_t>(min(t + step, own.last)) * tile_outputs);
        outputs(tile.cell[i], rank, padded, static_cast<std::int64_t>(t) * tile_outputs, n_last,
                tile.wide != 0);
      }
    }
  }

 private:
  /// The blocks of part `part` of the group that begins with `segment`.
  __device__ BlockRange part_blocks(std::int32_t segment, std::int32_t part,
                                    std::int32_t last_segment) const {
    DeltaShape const& shape = p_.shape;
    std::int32_t const end =
        min(min(segment + shape.group, last_segment) * shape.segment_blocks, shape.blocks);
    std::int32_t const first = min(slot_block(shape, segment, part * shape.stages.chunks), end);
    std::int32_t const next = (part + 1) * shape.stages.chunks;
    if (next >= shape.group * shape.segment_chunks) return {first, end};
    return {first, min(slot_block(shape, segment, next), end)};
  }

  /// Waits until the next stage is free.
  __device__ T* acquire() {
    shared_.head->stage_empty[place_.stage].wait(place_.pass ^ 1u);
    return shared_.stage(p_, place_);
  }
  __device__ Barrier& full() { return shared_.head->stage_full[place_.stage]; }

  /// Sixteen ranks of A over some blocks of k.
  __device__ void ranks(RowTile<T> const& tile, std::int32_t rank_tile, BlockRange blocks) {
    T* const stage = acquire();
    int const projection = projection_of(tile, rank_tile);
    std::int32_t const first = (rank_tile - tile.first_rank_tile[projection]) * tile_ranks;
    std::int32_t const rows = min(rank_of<Source>(tile, projection) - first, tile_ranks);
    std::int64_t const k = k_of(blocks.first, 0, 0);
    auto const width = static_cast<std::int32_t>(min(k_of(blocks.last, 0, 0), p_.k_in) - k);
    T const* const a = tile.cell[projection].a + first * p_.k_in + k;
    rectangle(stage, p_.shape.stage_stride, a, p_.k_in, rows, width, blocks.size() * block_elements,
              tile.wide != 0);
  }

  /// The rows `[n, n_last)` of B.
  __device__ void outputs(RouteCell<T> const& cell, std::int32_t rank, std::int32_t padded, std::int64_t n,
                          std::int64_t n_last, bool wide) {
    T* const stage = acquire();
    auto const rows = static_cast<std::int32_t>(n_last - n);
    T const* const b = cell.b + n * cell.b_row_stride;
    if (wide && cell.b_row_stride == padded) {
      rectangle(stage, 0, b, 0, 1, rows * padded, rows * padded, true);
    } else {
      rectangle(stage, padded, b, cell.b_row_stride, rows, wide ? padded : rank, padded, wide);
    }
  }

  /// Copies `rows` rows of `width` elements into the acquired stage and moves on. Rows too little aligned for
  /// bulk copies go element by element, zero from `width` to `padded`.
  __device__ void rectangle(T* to, std::int32_t to_stride, T const* from, std::int64_t from_stride,
                            std::int32_t rows, std::int32_t width, std::int32_t padded, bool wide) {
    int const lane = lane_index();
    if (wide) {
      auto const bytes = static_cast<std::uint32_t>(width) * static_cast<std::uint32_t>(sizeof(T));
      if (lane == 0) full().arrive_expecting(bytes * static_cast<std::uint32_t>(rows));
      __syncwarp();
      for (std::int32_t r = lane; r < rows && bytes > 0; r += warp_threads) {
        copy_bulk(to + r * to_stride, from + r * from_stride, bytes, full());
      }
    } else {
      for (std::int32_t r = 0; r < rows; ++r) {
        for (std::int32_t i = lane; i < padded; i += warp_threads) {
          to[r * to_stride + i] = i < width ? from[r * from_stride + i] : round_to<T>(0.0F);
        }
      }
      order_before_copies();
      __syncwarp();
      if (lane == 0) full().arrive();
    }
    place_.advance(static_cast<std::uint32_t>(p_.shape.stages.count));
  }

  Operands<T, Y> const& p_;
  DeltaShared<T, Y> const& shared_;
  RingPlace place_{};
};

}  // namespace atlas::lora::inline v0::detail
