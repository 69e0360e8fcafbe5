// SPDX-License-Identifier: AGPL-3.0-only
//
// How a launch is shaped, as data: a constexpr choice by compute capability, element size and rows. It
// decides speed and never bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"
#include "atlas/lora/route/row_plan.hpp"

namespace atlas::lora::inline v0 {

/// A value carried by a type: kernels take policy types.
template <class Value, Value V>
struct Constant {
  static constexpr Value value = V;
};

/// The form of a delta: one launch whose blocks exchange within a cluster, or two launches with a scratch
/// between.
enum class DeltaForm : std::uint8_t { one_launch, two_launches };

/// The shape of a delta's launch.
struct DeltaTuning {
  std::int32_t threads = 256;                  ///< of a block: 256 or 512
  std::int32_t cluster = 8;                    ///< blocks that share a row tile: 2, 4, 8 or 16
  std::int32_t blocks_per_multiprocessor = 2;  ///< that registers and shared memory must allow
  std::int32_t grid_per_multiprocessor = 2;    ///< that a full grid has; fewer leave room for the next launch

  friend constexpr bool operator==(DeltaTuning const&, DeltaTuning const&) = default;
};

/// Whether a kernel can be built from `t`.
[[nodiscard]] constexpr bool valid(DeltaTuning const& t) noexcept {
  bool const threads = t.threads == 256 || t.threads == 512;
  bool const cluster = t.cluster == 2 || t.cluster == 4 || t.cluster == 8 || t.cluster == 16;
  return threads && cluster && t.blocks_per_multiprocessor >= 1 &&
         t.blocks_per_multiprocessor * t.threads <= 2048;
}

/// Blocks of a multiprocessor that a kernel's registers allow. Float sums live in registers of many lanes, so
/// that its kernels have a multiprocessor to themselves.
[[nodiscard]] constexpr std::int32_t blocks_of(DeltaTuning const& t, std::size_t element_bytes) noexcept {
  return element_bytes == 4 ? 1 : t.blocks_per_multiprocessor;
}

/// The tunings that the library compiles; `delta_choice` picks among them. Kernels depend on the threads and
/// blocks alone, so all of these are one kernel, and one more whose clusters may be two teams. Measured on
/// one H200, bf16, rank 16 and 64, microseconds, {8/4} being a cluster of 8 that may be two teams. 4096 ->
/// 4096: {16} 1 row 2.6 and 4.2 ({8}: 3.1 and 6.0), 8 rows of one adapter 2.9 and 5.5 ({8}: 3.4 and 6.6), of
/// 8 adapters 4.2 and 6.3 ({8}: 3.7 and 7.1), 32 rows of one adapter 3.3 and 6.4 ({8}: 3.8 and 7.8); {8/4}
/// 64 rows of one adapter 4.1 and 8.2 ({4}: 4.5 and 10.2), of 32 adapters, skewed, 6.0 and 9.5 ({4}: 6.1 and
/// 12.7), of 64 adapters 10.8 and 25.2 ({8}: 13.1 and 23.2, {4}: 10.7 and 25.5); {4} 256 rows of 32 adapters
/// 8.0 and 14.5 ({8}: 10.2 and 17.5). Long rows, 14336 -> 4096: {8} 64 rows of 32 adapters 7.9 and 17.6
/// ({4}: 9.3 and 23.9).
inline constexpr DeltaTuning delta_tunings[] = {
    {256, 16, 2, 2}, {256, 8, 2, 2}, {256, 4, 2, 2}, {256, 2, 2, 2}};

/// A tuning as it suits an element type: float's kernels need the registers of a block of 256 threads alone.
[[nodiscard]] constexpr DeltaTuning tuned_for(DeltaTuning t, std::size_t element_bytes) noexcept {
  return element_bytes == 4 ? DeltaTuning{256, t.cluster, 1, 1} : t;
}

/// Whether `compute` (10 * major + minor) has clusters and programmatic dependent launch.
[[nodiscard]] constexpr bool has_clusters(std::int32_t compute) noexcept { return compute >= 90; }

/// Blocks of the largest cluster of a compute capability: 16 (beyond the portable 8, opted into) where the
/// data-centre parts allow it, 8 on sm_12x, none before sm_90.
[[nodiscard]] constexpr std::int32_t largest_cluster(std::int32_t compute) noexcept {
  if (!has_clusters(compute)) return 1;
  return compute >= 120 ? 8 : 16;
}

/// The form for a compute capability.
[[nodiscard]] constexpr DeltaForm delta_form(std::int32_t compute) noexcept {
  return has_clusters(compute) ? DeltaForm::one_launch : DeltaForm::two_launches;
}

/// How the library launches a delta in one launch.
struct DeltaChoice {
  std::size_t tuning = 0;  ///< index into `delta_tunings`
  /// Where there are more row tiles than clusters, a cluster is two teams; only where clusters of 16 are.
  bool splits = false;

  friend constexpr bool operator==(DeltaChoice const&, DeltaChoice const&) = default;
};

/// Row tiles up to which each has a whole cluster of the `clusters` that run at once, where a cluster may be
/// two teams. Measured on one H200, bf16, 4096 -> 4096, rank 16 and 64, microseconds in whole clusters of 8
/// and in halves: 32 adapters in 32 rows, of 33 clusters, 7.3 and 14.0, 6.0 and 14.0; 24 row tiles of 32
/// adapters, skewed, 6.0 and 9.5, 6.1 and 12.7. Halves leave room for the next launch.
[[nodiscard]] constexpr std::int32_t most_whole_tiles(std::int32_t clusters) noexcept {
  return clusters - clusters / 8;
}

/// Elements of x and y of a row, all projections together, beyond which every row tile is much work.
inline constexpr std::int64_t long_row_elements = 12288;

/// Row tiles that `rows` rows are expected to fill where they are of `slots` slots, alike; 0 where that is
/// not known: then each may be of its own.
[[nodiscard]] constexpr std::int64_t expected_row_tiles(std::int32_t rows, std::int32_t slots) noexcept {
  if (slots < 1 || slots > rows) return rows;
  std::int64_t const of_slot = (std::int64_t{rows} + slots - 1) / slots;
  return slots * ((of_slot + tile_rows - 1) / tile_rows);
}

/// The choice for `rows` rows, of `slots` slots as `expected_row_tiles` has them, of `row_elements` elements
/// (k_in and every n_out) on a machine whose largest cluster is `max_cluster`. It goes by what the host
/// knows, and by the plan's row tiles where they differ much from what rows say; never by a pool's largest
/// rank, since adapters may have less.
[[nodiscard]] constexpr DeltaChoice delta_choice(std::int32_t max_cluster, std::int32_t rows,
                                                 std::int32_t slots, std::int64_t row_elements) noexcept {
  if (max_cluster >= 16 && (rows <= 8 || expected_row_tiles(rows, slots) <= 4)) return {0, false};
  if (rows <= 16) return {1, false};
  if (rows <= 128) return {1, max_cluster >= 16 && row_elements <= long_row_elements};
  return {2, false};
}

/// Most rows that the one-launch kernel of few rows serves whatever they are of, where there is one for many.
inline constexpr std::int32_t most_decode_rows = 256;
/// Likewise of rows of which it is not known how many slots they are of.
inline constexpr std::int32_t most_mixed_decode_rows = 512;
/// Rows a pair, of a slot or of a slot and an expert, from which the kernel for many serves. Measured on one
/// H200, bf16, rank 16 and 64, microseconds in the kernel for many and for few. 4096 -> 4096: 512 rows of one
/// adapter 9.9 and 13.6, 10.9 and 21.5; of 8 adapters 16.4 and 22.8, 10.9 and 21.6; 2048 rows of 8 adapters
/// 18.5 and 27.7, 30.9 and 58.0. 16,384 rows of 128 experts, 2048 -> 768 twice: of one adapter 82 and 201,
/// 131 and 338; of 4 adapters 150 and 321, 146 and 375; of 16 adapters 424 and 898, 184 and 475.
inline constexpr std::int32_t fewest_prefill_rows = 128;
/// Blocks of the clusters that the prefill kernel can have; 1 is none.
inline constexpr std::int32_t prefill_clusters[] = {8, 4, 2, 1};

/// Whether the prefill kernel serves `rows` rows that are expected to be of `pairs` slots, or slots and
/// experts; 0 where that is not known. Float has none: its sums live in the registers of many lanes.
[[nodiscard]] constexpr bool uses_prefill(std::int32_t compute, std::int32_t rows, std::size_t element_bytes,
                                          std::int64_t pairs) noexcept {
  if (!has_clusters(compute) || element_bytes != 2 || rows <= most_decode_rows) return false;
  return pairs == 0 ? rows > most_mixed_decode_rows : rows >= pairs * fewest_prefill_rows;
}

/// Blocks of a cluster of the prefill kernel for `tiles` row tiles, `mixed` as above, on a machine of
/// `multiprocessors`, of which a block takes one. Measured on one H200, bf16, 4096 -> 4096, rank 16 and 64,
/// microseconds in clusters of 8, of 4, of 2 and without: 512 rows of one adapter 10.9 and 14.5, 11.4
/// and 16.0, 14.6 and 23.7, 25 and 34; 2048 rows 31.3 and 42.1, 24.9 and 38.6, 18.9 and 30.4, 29.1 and 44.6;
/// 8192 rows 107 and 137 in clusters of 8, 65 and 89 without; 1024 rows of 32 adapters, skewed, 42.7
/// and 62.9, 32.0 and 47.7, 31.0 and 49.0, 50.9 and 82.5. Clusters of 4 and 8 leave a tenth of the
/// multiprocessors without one, since graphics processing clusters do not divide evenly.
[[nodiscard]] constexpr std::int32_t prefill_cluster(std::int32_t tiles, bool mixed,
                                                     std::int32_t multiprocessors) noexcept {
  if (tiles > 4 * multiprocessors) return 1;
  return mixed || tiles >= multiprocessors ? 2 : 8;
}

}  // namespace atlas::lora::inline v0
