// SPDX-License-Identifier: AGPL-3.0-only
//
// How a warp of the head's kernel multiplies: it walks blocks of k of its override rows, whose weights come
// from memory straight to registers some blocks ahead, against batch rows whose x lies in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/async_copy.cuh"
#include "atlas/lora/kernels/contraction.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/overlay_head_groups.cuh"
#include "atlas/lora/kernels/overlay_params.hpp"
#include "atlas/lora/kernels/ptx.cuh"

namespace atlas::lora::inline v0::detail {

/// Blocks of k whose weights a warp of `Up` override tiles has under way together: 64 registers.
template <bool Wide, int Up, Element T>
inline constexpr int blocks_ahead = !Wide ? 1 : (sizeof(T) == 2 ? 8 : 4) / Up;

__device__ inline float4 add_rn(float4 const& a, float4 const& b) {
  return make_float4(add_rn(a.x, b.x), add_rn(a.y, b.y), add_rn(a.z, b.z), add_rn(a.w, b.w));
}
/// What leaves everything that is added to it as it is, so that a fold may start from it.
__device__ inline float4 fold_start() { return make_float4(-0.0F, -0.0F, -0.0F, -0.0F); }

/// Sixteen aligned bytes that are read once, or zeroes where `valid` is false; nothing is read then. The
/// order among loads stays as it is written.
__device__ inline void read_once(std::uint32_t (&word)[4], void const* p, bool valid) {
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.s32 valid, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@valid ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(word[0]), "=&r"(word[1]), "=&r"(word[2]), "=&r"(word[3])
      : "l"(p), "r"(static_cast<int>(valid)));
}
/// The first `valid` of eight weights at `p`, the others zero. `Wide` promises 16-byte alignment and that all
/// are valid or none.
template <bool Wide, Element T>
__device__ inline Pack<T> read_weights(T const* p, std::int32_t valid) {
  if constexpr (Wide) {
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < Pack<T>::words / 4; ++i) {
      std::uint32_t word[4];
      read_once(word, reinterpret_cast<uint4 const*>(p) + i, valid > 0);
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[4 * i + w] = word[w];
    }
    return pack;
  } else {
    return load_elements(p, valid);
  }
}

/// Copies x of one block of k of `Tiles` row tiles to shared memory as `HeadWalk` reads it. `rows` are the
/// tiles' rows, -1 for none, which is zero. One warp calls it, whole.
template <bool Wide, int Tiles, Element T, Element Y>
__device__ inline void copy_x_block(Pack<T>* to, HeadOperands<T, Y> const& p, std::int32_t const* rows,
                                    std::int32_t block) {
  std::int64_t const k = k_of(block, quad(), 0);
  std::int64_t const left = p.params.table.hidden - k;
#pragma unroll(Wide ? Tiles : 1)
  for (int t = 0; t < Tiles; ++t) {
    std::int32_t const row = rows[t * tile_batch_rows + group()];
    bool const there = row >= 0 && left > 0;
    copy_pack<Wide>(to + t * warp_threads + lane_index(),
                    there ? p.params.x + row * p.params.x_row_stride + k : p.params.x, there ? left : 0);
  }
}

/// A fold for a walk over one segment, whose sums the walk keeps.
struct KeepSegment {};

/// A warp's walk over blocks of k: 16 `Up` override rows by 8 `Tiles` batch rows.
template <bool Wide, int Up, int Tiles, Element T>
class HeadWalk {
 public:
  static constexpr int ahead = blocks_ahead<Wide, Up, T>;
  static constexpr int sums = Up * Tiles;

  /// Asks for the first weights of `blocks`, which begin a segment; of no more when they are none. Override
  /// rows from `first_override` on; in the place of those that do not exist stands one that does.
  __device__ HeadWalk(HeadGroup<T> const& group_of, std::int64_t hidden, std::int32_t first_override,
                      Contraction const& cut, BlockRange blocks)
      : left_(static_cast<std::int32_t>(hidden) - quad() * pack_elements),
        next_(blocks.first),
        cut_(cut),
        blocks_(blocks) {
#pragma unroll
    for (int r = 0; r < 2 * Up; ++r) {
      std::int32_t const j = min(first_override + r * tile_batch_rows + group(), group_of.overrides - 1);
      from_[r] = group_of.weights + j * hidden + quad() * pack_elements;
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) ask(i, blocks.first + i);
    segment_end_ = min(blocks.first + cut.segment_blocks(), blocks.last);
    chunk_end_ = min(blocks.first + cut.chunk_blocks(), segment_end_);
#pragma unroll
    for (int c = 0; c < sums; ++c) segment_[c] = fold_start();
  }

  /// Walks on to block `last` or to the end. `x` is shared memory, `[block][row tile][lane]` from the next
  /// block on, and readable for a multiple of `ahead` blocks; `last` is so many from where the walk began.
  /// `fold(c, sum)` is told every segment's sums, unless it is `KeepSegment`.
  template <class Fold>
  __device__ void to(std::int32_t last, Pack<T> const* x, Fold const& fold) {
    last = min(last, blocks_.last);
#pragma unroll 1
    while (next_ < last) {
      // Blocks behind the last weigh nothing and come after the last chunk's end.
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        multiply(i, x + i * Tiles * warp_threads);
        ask(i, next_ + ahead);
        ++next_;
        if (next_ == chunk_end_) end_chunk(fold);
      }
      x += ahead * Tiles * warp_threads;
    }
  }

  /// What has come of a walk over one segment.
  [[nodiscard]] __device__ float4 const& segment(int c) const { return segment_[c]; }

 private:
  __device__ void ask(int i, std::int32_t block) {
    std::int32_t const k = block * block_elements;  // a width is at most 2^30
    std::int32_t const valid = block < blocks_.last ? left_ - k : 0;
#pragma unroll
    for (int r = 0; r < 2 * Up; ++r) weights_[i][r] = read_weights<Wide>(from_[r] + k, valid);
  }
  __device__ void multiply(int i, Pack<T> const* x) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      Pack<T> const pack = read_pack(x + t * warp_threads + lane_index());
#pragma unroll
      for (int u = 0; u < Up; ++u)
        chunk_[u * Tiles + t].add(weights_[i][2 * u], weights_[i][2 * u + 1], pack);
    }
  }
  template <class Fold>
  __device__ void end_chunk(Fold const& fold) {
#pragma unroll
    for (int c = 0; c < sums; ++c) {
      segment_[c] = add_rn(segment_[c], chunk_[c].finish());
      chunk_[c] = Accumulator<T>();
    }
    if constexpr (!std::is_same_v<Fold, KeepSegment>) {
      if (chunk_end_ == segment_end_) {
#pragma unroll
        for (int c = 0; c < sums; ++c) {
          fold(c, segment_[c]);
          segment_[c] = fold_start();
        }
        segment_end_ = min(segment_end_ + cut_.segment_blocks(), blocks_.last);
      }
    }
    chunk_end_ = min(chunk_end_ + cut_.chunk_blocks(), segment_end_);
  }

  T const* from_[2 * Up];
  std::int32_t left_;  ///< elements of a row from this lane's first on
  Pack<T> weights_[ahead][2 * Up];
  Accumulator<T> chunk_[sums];
  float4 segment_[sums];
  std::int32_t next_;
  std::int32_t chunk_end_;
  std::int32_t segment_end_;
  Contraction cut_;
  BlockRange blocks_;
};

}  // namespace atlas::lora::inline v0::detail
