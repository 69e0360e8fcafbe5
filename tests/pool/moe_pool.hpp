// SPDX-License-Identifier: AGPL-3.0-only
//
// A model with experts, adapters whose every element says which content it is of, and what a slot must hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "atlas/lora/tables/route_table.hpp"
#include "scripted_backend.hpp"
#include "tiny_pool.hpp"

namespace atlas_test {

/// Two layers with a linear q; layer 1 has four experts, hidden 10, intermediate 6.
inline ModelShape moe_shape() {
  ModelDescription d;
  d.num_layers = 2;
  d.modules = {{"q", 6, 10, {0, 1}, {}}};
  d.moe = {4, {1}, 10, 6, {}};
  auto shape = ModelShape::create(d);
  REQUIRE(shape.has_value());
  return *shape;
}

/// Content `content` for q of layer 0, the router, and the given linears of experts, of rank `rank`.
inline Adapter moe_adapter(std::uint32_t content, std::int32_t rank,
                           std::vector<std::pair<std::int32_t, ExpertLinear>> const& experts,
                           bool router = true, bool bias = false) {
  ModelShape const shape = moe_shape();
  Adapter adapter = tiny_adapter(shape, content, rank, {0});
  Module const gate = shape.moe().router(0);
  if (router) {
    adapter.routers.push_back({1, rank, static_cast<float>(content), tensor(content, 7, 0, {rank, gate.k_in}),
                               tensor(content, 7, 1, {gate.n_out, rank}), std::nullopt});
  }
  for (auto const& [expert, linear] : experts) {
    Module const module = shape.moe().linear(0, linear);
    auto const site = static_cast<std::size_t>(8 + expert * 3) + static_cast<std::size_t>(linear);
    ExpertPair pair{1,
                    expert,
                    linear,
                    rank,
                    static_cast<float>(content),
                    tensor(content, site, 0, {rank, module.k_in}),
                    tensor(content, site, 1, {module.n_out, rank}),
                    {}};
    if (bias) pair.bias = tensor(content, site, 2, {module.n_out});
    adapter.experts.push_back(std::move(pair));
  }
  return adapter;
}

inline std::vector<std::pair<std::int32_t, ExpertLinear>> every_linear() {
  std::vector<std::pair<std::int32_t, ExpertLinear>> all;
  for (std::int32_t expert = 0; expert < 4; ++expert) {
    for (ExpertLinear const linear : {ExpertLinear::gate, ExpertLinear::up, ExpertLinear::down}) {
      all.emplace_back(expert, linear);
    }
  }
  return all;
}

/// Whether a pair stands for the same content as an adapter's linear.
template <Element T, class Pair>
bool holds_pair(RouteCell<T> const& cell, Pair const* pair, Module const& module) {
  if (pair == nullptr) return holds<T>(cell, nullptr, module);
  AdapterPair const linear{{}, pair->rank, pair->scale, pair->a, pair->b, pair->bias};
  return holds<T>(cell, &linear, module);
}

/// Whether a slot holds exactly the experts and routers of an adapter (null: none).
template <class P>
bool holds_experts(P const& pool, std::int32_t slot, Adapter const* adapter) {
  MoeShape const& moe = pool.shape().moe();
  RouterPair const* const router =
      adapter != nullptr && !adapter->routers.empty() ? &adapter->routers[0] : nullptr;
  if (!holds_pair(*pool.router(1)->cell(slot), router, moe.router(0))) return false;
  for (auto const& [expert, linear] : every_linear()) {
    ExpertPair const* pair = nullptr;
    for (std::size_t i = 0; adapter != nullptr && i < adapter->experts.size(); ++i) {
      ExpertPair const& own = adapter->experts[i];
      if (own.expert == expert && own.linear == linear) pair = &own;
    }
    auto const table = pool.expert(1, linear);
    REQUIRE(table.has_value());
    if (!holds_pair(table->find(slot, expert), pair, moe.linear(0, linear))) return false;
  }
  return true;
}

using MoePool = AdapterPool<float, ScriptedBackend>;

inline MoePool make_moe_pool(std::int32_t slots, std::size_t expert_bytes,
                             ScriptedBackend const& backend = {}) {
  return pool_of<float>(
      moe_shape(), {.max_slots = slots, .spare = 2, .max_rank = 8, .expert_bytes = expert_bytes}, backend);
}

inline std::size_t needed(Adapter const& adapter) { return expert_bytes_needed(adapter, moe_shape(), 8, 4); }

/// Lets gate and up of each expert of `adapter` have one A.
inline Adapter fused(Adapter adapter) {
  for (std::size_t i = 0; i < adapter.experts.size(); ++i) {
    if (adapter.experts[i].linear != ExpertLinear::up) continue;
    adapter.experts[i].a = adapter.experts[i - 1].a;
    adapter.experts[i].shares_a = true;
  }
  return adapter;
}

}  // namespace atlas_test
