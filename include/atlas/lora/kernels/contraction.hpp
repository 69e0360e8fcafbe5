// SPDX-License-Identifier: AGPL-3.0-only
//
// The order of every sum: which k is added where. All kernels and the CPU reference follow this one
// description, whatever they divide among threads; it depends on the length of the sum alone, so a row's
// bits depend on nothing else.
//
// Over k_in, blocks of 32 consecutive k chain into chunks, chunks fold in order into segments, segments fold
// in order into the sum. A fold starts from its first member. Over the rank, one chain of blocks runs over
// the true rank.
//
// Within a block, four lanes hold eight consecutive k each. For 16-bit types a block is two m16n8k16 products
// chained on one f32 accumulator, which is zero at the start of a chain: the first product takes each lane's
// elements 0 to 3, the second its elements 4 to 7 (lane t's elements 2i and 2i + 1 sit at the instruction's
// k = 2t and 2t + 1, plus 8 for odd i). For float each lane chains fused multiply-adds over its own elements
// from zero, over all blocks of the chain; the chain's value is (lane 0 + lane 1) + (lane 2 + lane 3).
#pragma once

#include <cstdint>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

/// Elements that one lane holds of a block: one 16-byte load of a 16-bit type.
inline constexpr std::int32_t pack_elements = 8;
/// Elements of a block: four lanes' packs.
inline constexpr std::int32_t block_elements = 32;
/// Most segments of a contraction: their sums are what the blocks of a cluster exchange.
inline constexpr std::int32_t max_segments = 16;
/// Most chunks of a segment: what the warps of a thread block fold.
inline constexpr std::int32_t max_chunks = 8;
/// Fewest blocks of a chunk, so that folding stays cheap beside multiplying.
inline constexpr std::int32_t min_chunk_blocks = 2;

/// A half-open range of blocks: `[first, last)`.
struct BlockRange {
  std::int32_t first = 0;
  std::int32_t last = 0;

  /// Blocks in it.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t size() const noexcept { return last - first; }
  friend constexpr bool operator==(BlockRange const&, BlockRange const&) = default;
};

/// How a sum over `k_in` elements is cut. Every member is arithmetic on `k_in`; `k_in >= 1`.
class Contraction {
 public:
  ATLAS_HD constexpr explicit Contraction(std::int64_t k_in) noexcept
      : blocks_(static_cast<std::int32_t>((k_in + block_elements - 1) / block_elements)) {
    segment_blocks_ = divide_up(blocks_, max_segments);
    if (segment_blocks_ < min_chunk_blocks) segment_blocks_ = min_chunk_blocks;
    chunk_blocks_ = divide_up(segment_blocks_, max_chunks);
    if (chunk_blocks_ < min_chunk_blocks) chunk_blocks_ = min_chunk_blocks;
  }

  /// Blocks in all; the last may hold fewer than 32 elements.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t blocks() const noexcept { return blocks_; }
  /// Segments, at most `max_segments`; the last may be short.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t segments() const noexcept {
    return divide_up(blocks_, segment_blocks_);
  }
  /// Chunks of every segment but the last, which may have fewer; at most `max_chunks`.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t segment_chunks() const noexcept {
    return divide_up(segment_blocks_, chunk_blocks_);
  }
  /// Chunks of `segment`.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t chunks(std::int32_t segment) const noexcept {
    return divide_up(this->segment(segment).size(), chunk_blocks_);
  }
  /// Blocks of every chunk but a segment's last.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t chunk_blocks() const noexcept { return chunk_blocks_; }
  /// Blocks of every segment but the last.
  [[nodiscard]] ATLAS_HD constexpr std::int32_t segment_blocks() const noexcept { return segment_blocks_; }

  /// The blocks of `segment`.
  [[nodiscard]] ATLAS_HD constexpr BlockRange segment(std::int32_t segment) const noexcept {
    std::int32_t const first = segment * segment_blocks_;
    return {first, least(first + segment_blocks_, blocks_)};
  }
  /// The blocks of `chunk` of `segment`; empty when the segment has fewer chunks.
  [[nodiscard]] ATLAS_HD constexpr BlockRange chunk(std::int32_t segment, std::int32_t chunk) const noexcept {
    BlockRange const all = this->segment(segment);
    std::int32_t const first = least(all.first + chunk * chunk_blocks_, all.last);
    return {first, least(first + chunk_blocks_, all.last)};
  }

 private:
  [[nodiscard]] ATLAS_HD static constexpr std::int32_t divide_up(std::int32_t a, std::int32_t b) noexcept {
    return (a + b - 1) / b;
  }
  [[nodiscard]] ATLAS_HD static constexpr std::int32_t least(std::int32_t a, std::int32_t b) noexcept {
    return a < b ? a : b;
  }

  std::int32_t blocks_;
  std::int32_t segment_blocks_ = 0;
  std::int32_t chunk_blocks_ = 0;
};

/// The k of element `element` (0 to 7) of lane `lane` (0 to 3) in `block`.
[[nodiscard]] ATLAS_HD constexpr std::int64_t k_of(std::int32_t block, std::int32_t lane,
                                                   std::int32_t element) noexcept {
  return static_cast<std::int64_t>(block) * block_elements + lane * pack_elements + element;
}

/// Blocks of the one chain over a rank.
[[nodiscard]] ATLAS_HD constexpr std::int32_t rank_blocks(std::int32_t rank) noexcept {
  return (rank + block_elements - 1) / block_elements;
}

}  // namespace atlas::lora::inline v0
