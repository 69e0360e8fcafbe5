// SPDX-License-Identifier: AGPL-3.0-only
//
// The routed delta's launchers: y[row] += scale * (x[row] @ A_s^T) @ B_s^T for the rows of a plan. In a
// forward pass a delta goes right after its base projection, before anything reads that output.
// split_delta.cuh has its two halves, pair_delta.cuh one pair for all rows.
//
// Every launcher only enqueues: no allocation, no synchronisation, nothing read back. All are safe in graph
// capture, and a captured launch is right for every later content of row slots, plan and tables. Errors:
// `cudaErrorInvalidValue` for bad parameters or an operation that was not prepared, before anything is
// enqueued; else what the launch returned.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/delta_kernel.cuh"
#include "atlas/lora/kernels/delta_params.hpp"
#include "atlas/lora/kernels/expand.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/kernels/operands.cuh"
#include "atlas/lora/kernels/prefill_kernel.cuh"
#include "atlas/lora/kernels/prefill_shape.hpp"
#include "atlas/lora/kernels/prefill_shared.cuh"
#include "atlas/lora/kernels/split_kernels.cuh"
#include "atlas/lora/kernels/tuning.hpp"
#include "atlas/lora/kernels/work.hpp"
#include "atlas/lora/pool/pair.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

template <std::size_t Index, Element T>
using BuiltTuning = Constant<DeltaTuning, tuned_for(delta_tunings[Index], sizeof(T))>;
/// The tuning of kernels whose blocks do not form clusters.
using LoneTuning = Constant<DeltaTuning, DeltaTuning{256, 1, 2}>;

/// Teams of a tuning's kernel that run at once, where registers allow `blocks` blocks a multiprocessor.
inline std::int32_t teams_at_once(DeltaTuning const& tuning, std::int32_t blocks, std::size_t shared,
                                  Machine const& machine) noexcept {
  bool const two = shared <= shared_budget(machine, 2) && blocks >= 2 && tuning.grid_per_multiprocessor >= 2;
  return machine.resident_teams(tuning.cluster, two ? 2 : 1);
}

/// The launch of a kernel whose teams are clusters.
inline LaunchShape team_shape(DeltaTuning const& tuning, std::int32_t blocks, std::int64_t teams,
                              std::size_t shared, Machine const& machine) noexcept {
  std::int32_t const resident = teams_at_once(tuning, blocks, shared, machine);
  auto const clusters = static_cast<std::int32_t>(std::clamp<std::int64_t>(teams, 1, resident));
  return {clusters * tuning.cluster, tuning.threads, tuning.cluster, shared};
}

/// Fills what the blocks of the one-launch kernel share; clusters are two teams beyond `most_whole_tiles` row
/// tiles, unless it is 0.
template <Element T, Element Y>
void set_shape(Operands<T, Y>& p, DeltaTuning const& tuning, std::int32_t most_whole_tiles = 0) noexcept {
  for (int i = 0; i < p.num_projections; ++i) {
    p.shape.first_output[i + 1] = p.shape.first_output[i] + output_tiles(p.projections[i].table.n_out);
    p.shape.xa_offset[i] = xa_shared_offset(p, i);
  }
  p.shape.set(Contraction(p.k_in), tuning.cluster, most_whole_tiles, tuning.threads / warp_threads,
              p.segment_rank_tiles, p.num_projections);
}

/// The one-launch kernel of a tuning; its cluster is an argument.
template <class Tuning, bool Splits, Element T, Element Y, class Source>
inline constexpr auto delta_kernel_of =
    &delta_kernel<Tuning::value.threads / warp_threads, blocks_of(Tuning::value, sizeof(T)), Splits, T, Y,
                  Source>;

/// Whether there is a kernel whose clusters may be two teams: sums or outputs in float leave no registers for
/// it.
template <Element T, Element Y>
inline constexpr bool splits_clusters = sizeof(T) == 2 && sizeof(Y) == 2;

/// Sets the stages of a warp, and fewer rank tiles of a slab where there is little room, and gives the bytes
/// of shared memory: as many stages as let `blocks` blocks share a multiprocessor, two at least; else as many
/// as a block has room for.
template <int Warps, Element T, Element Y>
std::size_t fit_stages(Operands<T, Y>& p, std::int32_t blocks, Machine const& machine) noexcept {
  auto const bytes = [&] { return delta_shared_bytes<Warps, T>(p.shape, p.xa_shared_stride); };
  auto const fits = [&](std::int32_t fewest, std::size_t budget) {
    for (p.shape.stages = most_delta_stages; p.shape.stages > fewest; --p.shape.stages) {
      if (bytes() <= budget) return true;
    }
    return bytes() <= budget;
  };
  if (blocks >= 2 && fits(2, shared_budget(machine, blocks))) return bytes();
  while (!fits(1, machine.shared_bytes_per_block) && p.shape.slab > 1) {
    p.shape.slab /= 2;
    p.shape.set_chunk_sums();
  }
  return bytes();
}

/// The one-launch form of a tuning, whose clusters may be two teams where it `Splits`: beyond
/// `most_whole_tiles` row tiles.
template <class Tuning, bool Splits = false, Element T, Element Y, class Source>
cudaError_t launch_whole(Operands<T, Y> p, Source const& source, std::int32_t tiles, Machine const& machine,
                         cudaStream_t stream, std::int32_t most_whole_tiles = 0) noexcept {
  constexpr DeltaTuning tuning = Tuning::value;
  set_shape(p, tuning, most_whole_tiles);
  std::int64_t const teams = tiles * std::int64_t{p.shape.team[0].max_parts};
  // Where this launch and the next one leave room, a block may have a multiprocessor to itself.
  bool const few = 2 * teams * tuning.cluster <= machine.multiprocessors;
  std::int32_t const blocks = blocks_of(tuning, sizeof(T));
  std::size_t const shared = fit_stages<tuning.threads / warp_threads>(p, few ? 1 : blocks, machine);
  if (shared > machine.shared_bytes_per_block || tuning.cluster > machine.max_cluster)
    return cudaErrorInvalidValue;
  LaunchShape const shape = team_shape(tuning, blocks, teams, shared, machine);
  // A plan may have been made for more rows than the launch has, and then for more row tiles than that.
  if (tiles >= 1 && tiles >= source.most_tiles(p)) p.shape.most_tiles = tiles;
  p.shape.team[0].lone_teams = std::max(teams_at_once(tuning, blocks, shared, machine) / 2, 1);
  p.shape.team[1].lone_teams = p.shape.team[0].lone_teams << (p.shape.team[0].log2 - p.shape.team[1].log2);
  return launch(delta_kernel_of<Tuning, Splits, T, Y, Source>, shape, machine, stream, p, source);
}

/// The same in clusters that are two teams where there are more row tiles than clusters at once.
template <class Tuning, Element T, Element Y, class Source>
cudaError_t launch_splitting(Operands<T, Y> const& p, Source const& source, std::int32_t tiles,
                             Machine const& machine, cudaStream_t stream) noexcept {
  constexpr DeltaTuning tuning = Tuning::value;
  bool const two = blocks_of(tuning, sizeof(T)) >= 2 && tuning.grid_per_multiprocessor >= 2;
  return launch_whole<Tuning, true>(p, source, tiles, machine, stream,
                                    most_whole_tiles(machine.resident_teams(tuning.cluster, two ? 2 : 1)));
}

/// The prefill form in clusters of `cluster` blocks; false, and nothing enqueued, where the machine cannot.
/// Else `error` is what the launch returned.
template <Element T, Element Y, class Source>
bool launch_prefill(Operands<T, Y> p, Source const& source, std::int32_t tiles, std::int32_t cluster,
                    Machine const& machine, cudaStream_t stream, cudaError_t& error) noexcept {
  DeltaTuning const tuning{prefill_warps * warp_threads, cluster, 1, 1};
  set_shape(p, tuning);
  // A piece has no more row tiles than a cluster where all that run at once share them.
  std::int64_t const share = divide_up(tiles, machine.resident_teams(cluster, 1));
  auto const most = static_cast<std::int32_t>(std::min<std::int64_t>(share, piece_tiles));
  std::size_t shared = 0;
  for (std::int32_t stages = most_stages; stages >= fewest_stages; --stages) {
    p.prefill = PrefillShape(p.segment_rank_tiles, most, p.shape.team[0].log2, stages, machine.compute);
    shared = sizeof(PrefillHead<T>) + p.prefill.bytes(xa_shared_offset(p, p.num_projections));
    if (shared <= machine.shared_bytes_per_block) break;
  }
  if (shared > machine.shared_bytes_per_block || cluster > machine.max_cluster) return false;
  error = launch(prefill_kernel<T, Y, Source>, team_shape(tuning, 1, tiles, shared, machine), machine, stream,
                 p, source);
  return true;
}

/// The prefill form where the library picks it, for rows that are expected to be of `pairs` slots, or slots
/// and experts, or of an unknown number, 0; false, and nothing enqueued, elsewhere.
template <Element T, Element Y, class Source>
bool launch_many(Operands<T, Y> const& p, Source const& source, std::int32_t tiles, std::int64_t pairs,
                 Machine const& machine, cudaStream_t stream, cudaError_t& error) noexcept {
  if constexpr (sizeof(T) == 2) {
    if (!uses_prefill(machine.compute, p.rows, sizeof(T), pairs)) return false;
    // A block of four keeps fewer sums than one of two; where neither has room, the kernel of few rows has.
    for (std::int32_t const cluster : {prefill_cluster(tiles, pairs != 1, machine.multiprocessors), 4}) {
      if (launch_prefill(p, source, tiles, cluster, machine, stream, error)) return true;
    }
  }
  return false;
}

/// Elements of x and of every y of a row.
template <Element T, Element Y>
std::int64_t row_elements(Operands<T, Y> const& p) noexcept {
  std::int64_t elements = p.k_in;
  for (int i = 0; i < p.num_projections; ++i) elements += p.projections[i].table.n_out;
  return elements;
}

/// The one-launch form in the kernel and the tuning that the library picks.
template <Element T, Element Y, class Source>
cudaError_t launch_built(Operands<T, Y> const& p, Source const& source, std::int32_t tiles,
                         Machine const& machine, cudaStream_t stream) noexcept {
  cudaError_t error = cudaSuccess;
  std::int32_t const slots = p.plan.max_groups <= 1 ? 1 : p.expected_slots;
  if (launch_many(p, source, tiles, slots, machine, stream, error)) return error;
  DeltaChoice const choice = delta_choice(machine.max_cluster, p.rows, slots, row_elements(p));
  if constexpr (splits_clusters<T, Y>) {
    if (choice.splits) return launch_splitting<BuiltTuning<1, T>>(p, source, tiles, machine, stream);
  }
  switch (choice.tuning) {
    case 0: return launch_whole<BuiltTuning<0, T>>(p, source, tiles, machine, stream);
    case 1: return launch_whole<BuiltTuning<1, T>>(p, source, tiles, machine, stream);
    default: return launch_whole<BuiltTuning<2, T>>(p, source, tiles, machine, stream);
  }
}

/// The launch of a kernel whose row tiles are shared by `parts` independent blocks.
inline LaunchShape part_shape(std::int32_t tiles, std::int32_t parts, std::size_t shared,
                              Machine const& machine) noexcept {
  DeltaTuning const& tuning = LoneTuning::value;
  std::int64_t const items = static_cast<std::int64_t>(tiles) * parts;
  std::int64_t const resident =
      static_cast<std::int64_t>(machine.multiprocessors) * tuning.blocks_per_multiprocessor;
  return {static_cast<std::int32_t>(std::max<std::int64_t>(1, std::min(items, resident))), tuning.threads, 1,
          shared};
}

template <bool FromSegments, Element T, Element Y, class Source>
cudaError_t launch_second(Operands<T, Y> p, Source const& source, std::int32_t tiles, Machine const& machine,
                          cudaStream_t stream) noexcept {
  std::size_t const shared = xa_bytes(p.xa_shared_stride, sizeof(T));
  if (shared > machine.shared_bytes_per_block) return cudaErrorInvalidValue;
  p.parts = expand_parts(tiles, total_output_tiles(p), machine.multiprocessors);
  return launch(expand_kernel<FromSegments, T, Y, Source, LoneTuning>,
                part_shape(tiles, p.parts, shared, machine), machine, stream, p, source);
}

template <Element T, Element Y, class Source>
cudaError_t launch_in_two(Operands<T, Y> p, Source const& source, std::int32_t tiles, Machine const& machine,
                          cudaStream_t stream) noexcept {
  p.parts = Contraction(p.k_in).segments();
  cudaError_t const error =
      launch(segment_kernel<T, Y, Source, LoneTuning>, part_shape(tiles, p.parts, chunk_bytes, machine),
             machine, stream, p, source);
  if (error != cudaSuccess) return error;
  // The scratch was written by the launch before: whatever the engine promised, it is not settled, but plan
  // and tables are what they were.
  return launch_second<true>(p, source, tiles, machine, stream);
}

}  // namespace detail

namespace detail {

/// Visits the one-launch kernel of a tuning.
template <Element T, Element Y, class Source, class Tuning, bool Splits, class Visit>
void visit_whole(Visit const& visit) {
  visit(reinterpret_cast<void const*>(delta_kernel_of<Tuning, Splits, T, Y, Source>), Tuning::value.cluster,
        Tuning::value.threads, blocks_of(Tuning::value, sizeof(T)));
}

/// Visits the prefill kernel in every cluster that the library picks; float has none.
template <Element T, Element Y, class Source, class Visit>
void visit_prefill(Visit const& visit) {
  if constexpr (sizeof(T) == 2) {
    for (std::int32_t const cluster : prefill_clusters)
      visit(reinterpret_cast<void const*>(&prefill_kernel<T, Y, Source>), cluster,
            prefill_warps * warp_threads, 1);
  }
}

/// Visits the one-launch kernels of every tuning that the library picks.
template <Element T, Element Y, class Source, class Visit>
void visit_built(Visit const& visit) {
  visit_prefill<T, Y, Source>(visit);
  visit_whole<T, Y, Source, BuiltTuning<0, T>, false>(visit);
  visit_whole<T, Y, Source, BuiltTuning<1, T>, false>(visit);
  visit_whole<T, Y, Source, BuiltTuning<2, T>, false>(visit);
  visit_whole<T, Y, Source, BuiltTuning<3, T>, false>(visit);
  if constexpr (splits_clusters<T, Y>) visit_whole<T, Y, Source, BuiltTuning<1, T>, true>(visit);
}

}  // namespace detail

/// The operation of `launch_delta` with a plan: whole, in either form.
template <Element T, Element Y = T>
struct Delta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    using Source = detail::PlanSource;
    detail::visit_built<T, Y, Source>(visit);
    visit(reinterpret_cast<void const*>(&detail::segment_kernel<T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
    visit(reinterpret_cast<void const*>(&detail::expand_kernel<true, T, Y, Source, detail::LoneTuning>), 1,
          detail::LoneTuning::value.threads, 1);
  }
};

/// Bytes of `DeltaParams::scratch` that `launch_delta_in_two_launches` needs, whatever the plan holds. It
/// goes by the plan's capacity: the plan may have been made for more rows than the launch has.
template <Element T, Element Y>
[[nodiscard]] constexpr std::size_t two_launch_scratch_bytes(DeltaParams<T, Y> const& params) noexcept {
  std::size_t ranks = 0;
  for (std::int32_t i = 0; i < params.num_projections && i < max_projections; ++i) {
    ranks += static_cast<std::size_t>(rank_tiles(params.projections[i].table.max_rank));
  }
  auto const tiles = static_cast<std::size_t>(params.plan.max_tiles < 0 ? 0 : params.plan.max_tiles);
  return tiles * max_segments * ranks * detail::warp_threads * sizeof(float4);
}

/// Bytes of `DeltaParams::scratch` that `launch_delta` needs on `machine`: none where the delta is one
/// launch.
template <Element T, Element Y>
[[nodiscard]] constexpr std::size_t delta_scratch_bytes(DeltaParams<T, Y> const& params,
                                                        Machine const& machine) noexcept {
  return delta_form(machine.compute) == DeltaForm::one_launch ? 0 : two_launch_scratch_bytes(params);
}

/// The delta in two launches, segment sums crossing by `params.scratch`: the form of architectures without
/// clusters, right everywhere. Same bits as every other form.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_delta_in_two_launches(DeltaParams<T, Y> const& params,
                                                                    Machine const& machine,
                                                                    cudaStream_t stream) noexcept {
  detail::Operands<T, Y> p;
  if (!machine.prepared(operation_id<Delta<T, Y>>()) || !detail::complete(p, params))
    return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  bool const scratch = params.scratch != nullptr &&
                       params.scratch_bytes >= two_launch_scratch_bytes(params) &&
                       reinterpret_cast<std::uintptr_t>(params.scratch) % 16 == 0;
  if (!scratch) return cudaErrorInvalidValue;
  p.segments = static_cast<float4*>(params.scratch);
  return detail::launch_in_two(p, detail::PlanSource{}, max_row_tiles(p.rows, p.plan.max_groups), machine,
                               stream);
}

/// The delta in one launch of a tuning of the caller's, a type such as `Constant<DeltaTuning,
/// DeltaTuning{256, 4}>`; its kernel must have been prepared as `TunedDelta<Tuning, T, Y>`. Same bits as
/// every other form.
template <class Tuning, Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_delta_tuned(DeltaParams<T, Y> const& params,
                                                          Machine const& machine,
                                                          cudaStream_t stream) noexcept;

/// The operation of `launch_delta_tuned`.
template <class Tuning, Element T, Element Y = T>
struct TunedDelta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    detail::visit_whole<T, Y, detail::PlanSource, Tuning, false>(visit);
  }
};

template <class Tuning, Element T, Element Y>
cudaError_t launch_delta_tuned(DeltaParams<T, Y> const& params, Machine const& machine,
                               cudaStream_t stream) noexcept {
  static_assert(valid(Tuning::value), "threads, cluster or blocks_per_multiprocessor cannot be built");
  detail::Operands<T, Y> p;
  bool const prepared = machine.prepared(operation_id<TunedDelta<Tuning, T, Y>>());
  if (!prepared || !has_clusters(machine.compute) || !detail::complete(p, params))
    return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  return detail::launch_whole<Tuning>(p, detail::PlanSource{}, max_row_tiles(p.rows, p.plan.max_groups),
                                      machine, stream);
}

/// The operation of `launch_delta_prefill`.
template <Element T, Element Y = T>
struct PrefillDelta {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    detail::visit_prefill<T, Y, detail::PlanSource>(visit);
  }
};

/// The delta in the prefill kernel, however many rows there are, in clusters of `cluster` blocks, 1, 2, 4 or
/// 8; prepared as `PrefillDelta<T, Y>`. 16-bit types only. Same bits as every other form.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_delta_prefill(DeltaParams<T, Y> const& params,
                                                            std::int32_t cluster, Machine const& machine,
                                                            cudaStream_t stream) noexcept {
  static_assert(sizeof(T) == 2, "float has no prefill kernel");
  detail::Operands<T, Y> p;
  bool const prepared = machine.prepared(operation_id<PrefillDelta<T, Y>>());
  bool const possible = has_clusters(machine.compute) &&
                        std::find(std::begin(prefill_clusters), std::end(prefill_clusters), cluster) !=
                            std::end(prefill_clusters);
  if (!prepared || !possible || !detail::complete(p, params)) return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  detail::launch_prefill(p, detail::PlanSource{}, max_row_tiles(p.rows, p.plan.max_groups), cluster, machine,
                         stream, error);
  return error;
}

/// The routed delta of up to `max_projections` projections of one x. The form and its shape come from
/// `machine` and from capacities. Where `delta_scratch_bytes` is not 0, `params.scratch` must hold that much.
template <Element T, Element Y>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_delta(DeltaParams<T, Y> const& params, Machine const& machine,
                                                    cudaStream_t stream) noexcept {
  if (delta_form(machine.compute) == DeltaForm::two_launches) {
    return launch_delta_in_two_launches(params, machine, stream);
  }
  detail::Operands<T, Y> p;
  if (!machine.prepared(operation_id<Delta<T, Y>>()) || !detail::complete(p, params))
    return cudaErrorInvalidValue;
  if (detail::idle(p)) return cudaSuccess;
  std::int32_t const tiles = max_row_tiles(p.rows, p.plan.max_groups);
  detail::PlanSource const source;
  return detail::launch_built(p, source, tiles, machine, stream);
}

}  // namespace atlas::lora::inline v0
