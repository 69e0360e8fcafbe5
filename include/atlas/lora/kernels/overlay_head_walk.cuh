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

/// Blocks of k whose weights a warp has under way together: 64 registers.
template <bool Wide, Element T>
inline constexpr int blocks_ahead = !Wide            ? 1
                                    : sizeof(T) == 2 ? 8
                                                     : 4;

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
/// Likewise bytes that a kernel before this one may have written while this one began. They stay where they
/// are written behind the wait for it.
__device__ inline void read_late(std::uint32_t (&word)[4], void const* p, bool valid) {
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.s32 valid, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@valid ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(word[0]), "=&r"(word[1]), "=&r"(word[2]), "=&r"(word[3])
      : "l"(p), "r"(static_cast<int>(valid))
      : "memory");
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

/// One chain of blocks of a tile: 16 override rows by `head_tile_rows<T>` batch rows. The order of sums is
/// contraction.hpp's; which operand of the product is which makes no difference to it.
template <Element T>
class TileSum {
 public:
  /// Adds a block: weight rows `group()` and `group() + 8`, and this lane's packs of x as they lie.
  __device__ void add(Pack<T> const& low, Pack<T> const& high, Pack<T> const (&x)[tile_vectors<T>]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t const(&a)[4] = x[i].word;
      mma_m16n8k16<T>(low_, a[0], a[1], a[2], a[3], low.word[2 * i], low.word[2 * i + 1]);
      mma_m16n8k16<T>(high_, a[0], a[1], a[2], a[3], high.word[2 * i], high.word[2 * i + 1]);
    }
  }
  /// The chain's values; nothing may be added after.
  __device__ void finish(float4 (&sum)[tile_vectors<T>]) const {
    sum[0] = make_float4(low_[0], low_[1], low_[2], low_[3]);
    sum[1] = make_float4(high_[0], high_[1], high_[2], high_[3]);
  }

 private:
  float low_[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  float high_[4] = {0.0F, 0.0F, 0.0F, 0.0F};
};
template <>
class TileSum<float> {
 public:
  __device__ void add(Pack<float> const& low, Pack<float> const& high, Pack<float> const (&x)[1]) {
    chain_.add(low, high, x[0]);
  }
  __device__ void finish(float4 (&sum)[1]) const { sum[0] = chain_.finish(); }

 private:
  Accumulator<float> chain_;
};

/// Packs of x of one block of k of a row tile, `tile_vectors` a lane.
template <Element T>
inline constexpr int tile_packs = tile_vectors<T>* warp_threads;

/// Copies x of one block of k of `Tiles` row tiles to shared memory. `row_of(i)` is this lane's row of the
/// tiles' `i`-th eight; row 0 stands for one that does not exist, since batch rows do not mix and nobody
/// writes its sums. `AtOnce` of them are worked out together. One warp calls it, whole. Nothing branches:
/// all that happens between what the launch depends on and the first product is latency.
template <int Tiles, int AtOnce, class RowOf, Element T, Element Y>
__device__ inline void copy_x_block(Pack<T>* to, HeadOperands<T, Y> const& p, RowOf const& row_of,
                                    std::int32_t block) {
  std::int64_t const k = k_of(block, quad(), 0);
  std::int64_t const left = p.params.table.hidden - k;
  T const* const from = p.params.x + (left > 0 ? k : 0);
#pragma unroll AtOnce
  for (int i = 0; i < Tiles * tile_vectors<T>; ++i) {
    copy_pack<true>(to + i * warp_threads + lane_index(), from + row_of(i) * p.params.x_row_stride,
                    left > 0 ? left : 0);
  }
}
/// Likewise from rows in shared memory, -1 for those that do not exist; in the place of such a row stands
/// what stood there. For walks that are bound by memory, to which rows that do not exist must cost none.
template <bool Wide, int Tiles, Element T, Element Y>
__device__ inline void copy_present_rows(Pack<T>* to, HeadOperands<T, Y> const& p, std::int32_t const* rows,
                                         std::int32_t block) {
  std::int64_t const k = k_of(block, quad(), 0);
  std::int64_t const left = p.params.table.hidden - k;
#pragma unroll(Wide ? Tiles* tile_vectors <T> : 1)
  for (int i = 0; i < Tiles * tile_vectors<T>; ++i) {
    std::int32_t const row = rows[i * tile_batch_rows + group()];
    if (row < 0) continue;
    copy_pack<Wide>(to + i * warp_threads + lane_index(),
                    left > 0 ? p.params.x + row * p.params.x_row_stride + k : p.params.x,
                    left > 0 ? left : 0);
  }
}
/// Stores the operands that rows `group()` and `group() + 8` of a tile make in 16 bits, whose words take
/// turns.
template <Element T>
__device__ inline void store_operands(Pack<T>* x, Pack<T> const& low, Pack<T> const& high) {
  auto* const to = reinterpret_cast<uint4*>(x);
  to[0] = make_uint4(low.word[0], high.word[0], low.word[1], high.word[1]);
  to[warp_threads] = make_uint4(low.word[2], high.word[2], low.word[3], high.word[3]);
}
/// Makes operands of what this lane's `copy_x_block` brought, after it was waited for.
template <int Tiles, Element T>
__device__ inline void order_x_block(Pack<T>* x) {
  if constexpr (sizeof(T) == 2) {
    x += lane_index();
#pragma unroll
    for (int t = 0; t < Tiles; ++t, x += tile_packs<T>) {
      store_operands(x, read_pack(x), read_pack(x + warp_threads));
    }
  }
}

/// x of `Blocks` blocks of k of `Tiles` row tiles on its way through registers, in 16 bits: it is written to
/// shared memory once, as operands, where a copy would be written, read and written again. The blocks are one
/// of each `head_warps`, so that a block's warps take turns.
template <int Blocks, int Tiles, Element T>
class HeldX {
 public:
  /// Asks for it, from block `block` on; zeroes from `end` on. `row_of` is `copy_x_block`'s.
  template <class RowOf, Element Y>
  __device__ void ask(HeadOperands<T, Y> const& p, RowOf const& row_of, std::int32_t block,
                      std::int32_t end) {
    std::int64_t const k = k_of(block, quad(), 0);
    T const* const from = p.params.x + k;
#pragma unroll
    for (int i = 0; i < Tiles * tile_vectors<T>; ++i) {
      T const* const row = from + row_of(i) * p.params.x_row_stride;
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
        bool const exists = block + b * head_warps < end && k + b * stride < p.params.table.hidden;
        read_late(pack_[b][i].word, row + b * stride, exists);
      }
    }
  }
  /// Stores the operands of the first block at `x` and those of the others `head_warps` blocks behind it.
  __device__ void store(Pack<T>* x) const {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b) {
        store_operands(x + (b * head_warps * Tiles + t) * tile_packs<T> + lane_index(), pack_[b][2 * t],
                       pack_[b][2 * t + 1]);
      }
    }
  }

 private:
  /// Elements from one of the blocks to the next.
  static constexpr std::int32_t stride = head_warps * block_elements;
  Pack<T> pack_[Blocks][Tiles * tile_vectors<T>];
};

/// Folds the values of the chains `chunk` into the segment's sums, `[chain][vector]`.
template <int Chains, Element T>
__device__ inline void fold_chunks(float4 (&segment)[Chains * tile_vectors<T>],
                                   TileSum<T> const (&chunk)[Chains]) {
#pragma unroll
  for (int c = 0; c < Chains; ++c) {
    float4 sum[tile_vectors<T>];
    chunk[c].finish(sum);
#pragma unroll
    for (int v = 0; v < tile_vectors<T>; ++v) {
      segment[c * tile_vectors<T> + v] = add_rn(segment[c * tile_vectors<T> + v], sum[v]);
    }
  }
}

/// A fold for a walk over one segment, whose sums the walk keeps.
struct KeepSegment {};

/// A warp's walk over blocks of k: a tile of override rows by `Tiles` row tiles.
template <bool Wide, int Tiles, Element T>
class HeadWalk {
 public:
  static constexpr int ahead = blocks_ahead<Wide, T>;
  /// Float4 values of its sums: `[row tile][vector]`.
  static constexpr int sums = Tiles * tile_vectors<T>;
  /// Whether a step of a walk over one segment may be multiplied by whole chunks. Float has no registers for
  /// several chains.
  static constexpr bool static_chunks = sizeof(T) == 2 && ahead % (4 * min_chunk_blocks) == 0;

  /// Asks for the first weights of `blocks`, which begin a segment; of no more when they are none. Override
  /// rows from `first_override` on; those that do not exist are zero.
  __device__ HeadWalk(HeadGroup<T> const& group_of, std::int64_t const& hidden, std::int32_t first_override,
                      Contraction const& cut, BlockRange blocks)
      : hidden_(hidden),
        left_(min(static_cast<std::int32_t>(hidden), blocks.last * block_elements) -
              blocks.first * block_elements - quad() * pack_elements),
        next_(blocks.first),
        last_(blocks.last),
        cut_(cut) {
    std::int32_t const j = first_override + group();
    rows_ = group_of.overrides - j;
    from_ = group_of.weights + (rows_ > 0 ? j : 0) * hidden + k_of(blocks.first, quad(), 0);
#pragma unroll
    for (int i = 0; i < ahead; ++i) ask(i);
    advance();
    segment_end_ = min(blocks.first + cut.segment_blocks(), blocks.last);
    chunk_end_ = min(blocks.first + cut.chunk_blocks(), segment_end_);
#pragma unroll
    for (int c = 0; c < sums; ++c) segment_[c] = fold_start();
  }

  /// Walks on to block `last` or to the end. `x` is ordered shared memory, `[block][row tile]` from the next
  /// block on, and readable for a multiple of `ahead` blocks; `last` is so many from where the walk began.
  /// `fold(c, sum)` is told every segment's sums, unless it is `KeepSegment`.
  template <class Fold>
  __device__ void to(std::int32_t last, Pack<T> const* x, Fold const& fold) {
#pragma unroll 1
    while (next_ < last && next_ < last_) {
      // A walk over several segments is bound by memory: there every block that was multiplied has the next
      // asked for at once, which keeps most under way.
      if constexpr (static_chunks && std::is_same_v<Fold, KeepSegment>) {
        if (cut_.chunk_blocks() == min_chunk_blocks && last_ - next_ >= ahead) {
          multiply_chunks(x);
          step(x);
          chunk_end_ = min(next_ + min_chunk_blocks, last_);
          continue;
        }
      }
      // Blocks behind the last weigh nothing and come after the last chunk's end.
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        multiply(chunk_, i, x + i * Tiles * tile_packs<T>);
        ask(i);
        if (next_ + i + 1 == chunk_end_) end_chunk(fold);
      }
      step(x);
    }
  }

  /// What has come of a walk over one segment.
  [[nodiscard]] __device__ float4 const& segment(int c) const { return segment_[c]; }

 private:
  /// Asks for the `i`-th block of the step that `from_` is at.
  __device__ void ask(int i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::int32_t const valid = r * tile_batch_rows < rows_ ? left_ - i * block_elements : 0;
      weights_[i][r] = read_weights<Wide>(from_ + r * tile_batch_rows * hidden_ + i * block_elements, valid);
    }
  }
  __device__ void advance() {
    left_ -= ahead * block_elements;
    from_ += ahead * block_elements;
  }
  /// Goes on behind the step that was multiplied, `x` with it.
  __device__ void step(Pack<T> const*& x) {
    next_ += ahead;
    advance();
    x += ahead * Tiles * tile_packs<T>;
  }
  /// Adds the `i`-th block of the step to the chains `chunk`.
  __device__ void multiply(TileSum<T> (&chunk)[Tiles], int i, Pack<T> const* x) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      Pack<T> pack[tile_vectors<T>];
#pragma unroll
      for (int v = 0; v < tile_vectors<T>; ++v) {
        pack[v] = read_pack(x + t * tile_packs<T> + v * warp_threads + lane_index());
      }
      chunk[t].add(weights_[i][0], weights_[i][1], pack);
    }
  }
  /// Multiplies a step of one segment that is chunks of the fewest blocks throughout, and asks for the
  /// weights of the one after. The chunks' ends are known to the compiler then, so the chains of several
  /// chunks are under way at once: one alone waits for every product before the next.
  __device__ void multiply_chunks(Pack<T> const* x) {
    constexpr int together = Tiles == 1 ? 4 : 2;
    constexpr int blocks = together * min_chunk_blocks;
    static_assert(ahead % blocks == 0);
#pragma unroll
    for (int first = 0; first < ahead; first += blocks) {
      TileSum<T> chunk[together][Tiles];
#pragma unroll
      for (int i = 0; i < blocks; ++i) {
        multiply(chunk[i / min_chunk_blocks], first + i, x + (first + i) * Tiles * tile_packs<T>);
      }
#pragma unroll
      for (int c = 0; c < together; ++c) fold_chunks(segment_, chunk[c]);
    }
    // One segment is seldom more than a step.
    if (last_ - next_ > ahead) {
#pragma unroll
      for (int i = 0; i < ahead; ++i) ask(i);
    }
    // Empty as it was, which the compiler does not see: it takes no registers over the step.
#pragma unroll
    for (int c = 0; c < Tiles; ++c) chunk_[c] = TileSum<T>();
  }
  template <class Fold>
  __device__ void end_chunk(Fold const& fold) {
    fold_chunks(segment_, chunk_);
#pragma unroll
    for (int c = 0; c < Tiles; ++c) chunk_[c] = TileSum<T>();
    if constexpr (std::is_same_v<Fold, KeepSegment>) {
      chunk_end_ = min(chunk_end_ + cut_.chunk_blocks(), last_);
    } else {
      if (chunk_end_ == segment_end_) end_segment(fold);
      chunk_end_ = min(chunk_end_ + cut_.chunk_blocks(), segment_end_);
    }
  }
  template <class Fold>
  __device__ void end_segment(Fold const& fold) {
#pragma unroll
    for (int c = 0; c < sums; ++c) {
      fold(c, segment_[c]);
      segment_[c] = fold_start();
    }
    segment_end_ = min(segment_end_ + cut_.segment_blocks(), last_);
  }

  T const* from_;  ///< of the first override row, where it is asked for next
  std::int64_t const& hidden_;
  std::int32_t rows_;  ///< override rows from this lane's first on
  std::int32_t left_;  ///< elements of the walk from this lane's first there on
  Pack<T> weights_[ahead][2];
  TileSum<T> chunk_[Tiles];
  float4 segment_[sums];
  std::int32_t next_;
  std::int32_t chunk_end_;
  std::int32_t segment_end_;
  std::int32_t last_;
  Contraction const& cut_;
};

}  // namespace atlas::lora::inline v0::detail
