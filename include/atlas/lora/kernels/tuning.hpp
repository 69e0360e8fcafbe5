// SPDX-License-Identifier: AGPL-3.0-only
//
// How a launch is shaped, as data: a constexpr choice by compute capability, element size and rows. It
// decides speed and never bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"

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
/// 4096: {16} 1 row 3.0 and 3.7 ({8}: 3.2 and 5.3), 8 rows of one adapter 3.0 and 4.5 ({8}: 3.4 and 6.2), of
/// 8 adapters 4.3 and 6.3 ({8}: 3.8 and 6.7); {8/4} 64 rows of one adapter 4.1 and 7.6 ({4}: 4.4 and 8.5), of
/// 32 adapters, skewed, 5.5 and 10.9 ({4}: 5.2 and 12.6), of 64 adapters 9.8 and 31.8 ({8}: 12.3 and 29.3,
/// {4}: 10.1 and 30.6); {4} 256 rows of 32 adapters 7.4 and 18.7 ({8}: 9.8 and 21.8). Long rows, 14336 ->
/// 4096: {8} 64 rows of 32 adapters 7.3 and 22.0 ({4}: 10.1 and 32.3).
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

/// Elements of x and y of a row, all projections together, beyond which every row tile is much work.
inline constexpr std::int64_t long_row_elements = 12288;

/// The choice for `rows` rows of `row_elements` elements (k_in and every n_out) on a machine whose largest
/// cluster is `max_cluster`. It goes by what the host knows, and by the plan's row tiles where they differ
/// much from what rows say; never by a pool's largest rank, since adapters may have less.
[[nodiscard]] constexpr DeltaChoice delta_choice(std::int32_t max_cluster, std::int32_t rows,
                                                 std::int64_t row_elements) noexcept {
  if (max_cluster >= 16 && rows <= 8) return {0, false};
  if (rows <= 16) return {1, false};
  if (rows <= 128) return {1, max_cluster >= 16 && row_elements <= long_row_elements};
  return {2, false};
}

/// Most rows that the one-launch kernel of few rows serves of one slot, where there is one for many. Measured
/// on one H200, bf16, 512 rows, 4096 -> 4096, rank 16 and 64, microseconds in the kernel for many and for
/// few: of one adapter 9.9 and 13.8, 10.5 and 24.0; of 8 adapters 16.7 and 23.1, 10.6 and 24.9; of 32,
/// skewed, 45.1 and 63.1, 12.5 and 31.1.
inline constexpr std::int32_t most_decode_rows = 256;
/// Likewise of rows that may be of several slots or experts.
inline constexpr std::int32_t most_mixed_decode_rows = 512;
/// Blocks of the clusters that the prefill kernel can have; 1 is none.
inline constexpr std::int32_t prefill_clusters[] = {8, 4, 2, 1};

/// Whether the prefill kernel serves `rows` rows, `mixed` if they may be of several slots or experts, of
/// which slots, or slots and experts, are expected to be `pairs`. Float has none: its sums live in the
/// registers of many lanes.
[[nodiscard]] constexpr bool uses_prefill(std::int32_t compute, std::int32_t rows, std::size_t element_bytes,
                                          bool mixed, std::int32_t pairs = 1) noexcept {
  bool const shared = rows / 32 >= pairs;  // four row tiles a pair
  bool const many = rows > (mixed ? most_mixed_decode_rows : most_decode_rows);
  return has_clusters(compute) && element_bytes == 2 && many && shared;
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
