// SPDX-License-Identifier: AGPL-3.0-only
//
// What the experts and routers of an adapter take of the memory for experts, and where things lie in it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/expert_arena.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// Bytes of one pair of an expert or a router: A `[padded_rank(rank), k_in]`, then B `[n_out,
/// padded_rank(rank)]`, then the bias if there is one, rounded up to 16 bytes.
[[nodiscard]] constexpr std::size_t expert_pair_bytes(std::int32_t rank, std::int64_t k_in,
                                                      std::int64_t n_out, std::size_t element_bytes,
                                                      bool bias = false) noexcept {
  auto const out = static_cast<std::size_t>(n_out);
  std::size_t const width = static_cast<std::size_t>(k_in) + out;
  std::size_t const weights = static_cast<std::size_t>(padded_rank(rank)) * width * element_bytes;
  return weights + (bias ? detail::aligned_up(out * element_bytes, 16) : 0);
}

namespace detail {

/// Bytes of the cells of one layer's experts. There is room for every expert, so that all layers' cells are
/// of one size.
[[nodiscard]] constexpr std::size_t expert_cells_bytes(MoeShape const& moe) noexcept {
  return static_cast<std::size_t>(moe.num_experts) * expert_linears * sizeof(RouteCell<float>);
}

/// The largest block that an adapter of a pool may ask for: a pair of `max_rank` with a bias, or cells.
[[nodiscard]] inline std::size_t largest_expert_block(MoeShape const& moe, std::int32_t max_rank,
                                                      std::size_t element_bytes) {
  std::size_t largest = expert_cells_bytes(moe);
  for (std::size_t i = 0; i < moe.layers.size(); ++i) {
    Module const linear = moe.linear(i, ExpertLinear::gate);  // up and down have the same widths together
    std::int64_t const wide = std::max(linear.n_out, linear.k_in);
    std::int64_t const narrow = std::min(linear.n_out, linear.k_in);
    largest = std::max(largest, expert_pair_bytes(max_rank, narrow, wide, element_bytes, true));
    largest =
        std::max(largest, expert_pair_bytes(max_rank, moe.hidden, moe.num_experts, element_bytes, true));
  }
  return largest;
}

/// Bytes of the block of a pair: without A where its gate's serves.
template <class Packed>
[[nodiscard]] std::size_t expert_block_bytes(Packed const& pair, Module const& module,
                                             std::size_t element_bytes) noexcept {
  std::size_t const all =
      expert_pair_bytes(pair.rank, module.k_in, module.n_out, element_bytes, pair.extent.bias > 0);
  if (pair.extent.a > 0) return all;
  return all - static_cast<std::size_t>(padded_rank(pair.rank)) * static_cast<std::size_t>(module.k_in) *
                   element_bytes;
}

/// How many layers an adapter has experts in.
[[nodiscard]] inline std::size_t expert_layers(PackedOutline const& outline) noexcept {
  std::size_t layers = 0;
  for (std::size_t i = 0; i < outline.experts.size(); ++i) {
    if (i == 0 || outline.experts[i].layer != outline.experts[i - 1].layer) ++layers;
  }
  return layers;
}

/// The bytes of the blocks of an adapter: its routers, its experts, and the cells of each layer that has
/// experts, each in order.
[[nodiscard]] inline std::vector<std::size_t> expert_block_sizes(PackedOutline const& outline,
                                                                 ModelShape const& shape,
                                                                 std::size_t element_bytes) {
  std::vector<std::size_t> sizes;
  sizes.reserve(outline.routers.size() + outline.experts.size());
  auto const add = [&](auto const& pairs) {
    for (auto const& pair : pairs) {
      sizes.push_back(expert_block_bytes(pair, linear_of(pair, shape), element_bytes));
    }
  };
  add(outline.routers);
  add(outline.experts);
  sizes.insert(sizes.end(), expert_layers(outline), expert_cells_bytes(shape.moe()));
  return sizes;
}

}  // namespace detail

/// Bytes of `PoolOptions::expert_bytes` that one adapter takes of a pool of `max_rank` when it is alone in
/// it; no set of adapters takes more than the sum. 0 for an adapter without experts and routers. `adapter`
/// must have been loaded for `shape`, and its ranks must not exceed `max_rank`.
[[nodiscard]] inline std::size_t expert_bytes_needed(Adapter const& adapter, ModelShape const& shape,
                                                     std::int32_t max_rank, std::size_t element_bytes) {
  std::vector<std::size_t> sizes = detail::expert_block_sizes(
      detail::outline_of(adapter, shape, element_bytes, {}, true), shape, element_bytes);
  std::sort(sizes.begin(), sizes.end());
  std::size_t const slab =
      8 * detail::aligned_up(detail::largest_expert_block(shape.moe(), padded_rank(max_rank), element_bytes),
                             detail::ExpertArena::alignment);
  std::size_t slabs = 0;
  for (auto first = sizes.begin(); first != sizes.end();) {
    // Sizes that round up to the same block share slabs.
    std::size_t const block = detail::aligned_up(*first, detail::ExpertArena::alignment);
    auto const last = std::upper_bound(first, sizes.end(), block);
    auto const count = static_cast<std::size_t>(last - first);
    std::size_t const per_slab = slab / block;
    slabs += (count + per_slab - 1) / per_slab;
    first = last;
  }
  return slabs * slab;
}

}  // namespace atlas::lora::inline v0
