// SPDX-License-Identifier: AGPL-3.0-only
//
// A model of five sites, adapters whose every element says which content it is of, and what a slot must hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/pool.hpp"
#include "atlas/lora/tables/route_table.hpp"
#include "scripted_backend.hpp"

namespace atlas_test {

using namespace atlas::lora;

/// Sites in order: (0, q), (0, up), (1, q), (1, up), lm_head. Widths are odd. With a vocabulary where one is
/// given.
inline ModelShape tiny_shape(std::int64_t vocab = 0, std::int64_t hidden = 0) {
  ModelDescription d;
  d.num_layers = 2;
  d.modules = {{"q", 6, 10, {0, 1}, {}}, {"up", 9, 10, {0, 1}, {}}, {"lm_head", 7, 3, {model_wide}, {}}};
  d.vocab = vocab;
  d.hidden = hidden;
  auto shape = ModelShape::create(d);
  REQUIRE(shape.has_value());
  return *shape;
}

/// Element `index` of tensor `part` (0 A, 1 B, 2 bias) of the pair at site `site`, of content `content`:
/// whole numbers below 256, which every element type holds.
inline float element(std::uint32_t content, std::size_t site, std::size_t part, std::size_t index) {
  return static_cast<float>((content * 37 + site * 11 + part * 5 + index * 3) % 251 + 1);
}

inline HostTensor tensor(std::uint32_t content, std::size_t site, std::size_t part,
                         std::vector<std::int64_t> shape) {
  HostTensor t;
  t.name = "site " + std::to_string(site) + (part == 0 ? ".lora_A" : part == 1 ? ".lora_B" : ".lora_B.bias");
  t.shape = std::move(shape);
  std::size_t count = 1;
  for (std::int64_t const extent : t.shape) count *= static_cast<std::size_t>(extent);
  t.bytes.resize(count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) {
    float const value = element(content, site, part, i);
    std::memcpy(t.bytes.data() + i * sizeof(float), &value, sizeof(float));
  }
  return t;
}

/// Content `content`: a pair of rank `rank` and scale `content` at each of `sites`.
inline Adapter tiny_adapter(ModelShape const& shape, std::uint32_t content, std::int32_t rank,
                            std::vector<std::size_t> const& sites, bool with_bias = false) {
  Adapter adapter;
  for (std::size_t const site : sites) {
    Module const& module = shape.module(shape.sites()[site]);
    AdapterPair pair;
    pair.site = shape.sites()[site];
    pair.rank = rank;
    pair.scale = static_cast<float>(content);
    pair.a = tensor(content, site, 0, {rank, module.k_in});
    pair.b = tensor(content, site, 1, {module.n_out, rank});
    if (with_bias) pair.bias = tensor(content, site, 2, {module.n_out});
    adapter.pairs.push_back(pair);
  }
  adapter.max_rank = sites.empty() ? 0 : rank;
  adapter.modules_present = adapter.modules_applied = static_cast<std::int64_t>(sites.size());
  adapter.digest = Digest{content, 1};
  return adapter;
}

/// Whether a cell in host memory holds exactly the pair, or nothing where `pair` is null; pads of B are zero.
template <Element T>
bool holds(RouteCell<T> const& cell, AdapterPair const* pair, Module const& module) {
  if (pair == nullptr || pair->rank == 0) return cell == RouteCell<T>{};
  std::int32_t const stride = padded_rank(pair->rank);
  if (cell.rank != pair->rank || cell.b_row_stride != stride || cell.scale != pair->scale ||
      cell.reserved != 0 || !cell.adapted() || (cell.bias != nullptr) != pair->bias.has_value()) {
    return false;
  }
  auto const same = [](T value, HostTensor const& source, std::int64_t index) {
    float expected = 0.0F;
    std::memcpy(&expected, source.bytes.data() + static_cast<std::size_t>(index) * sizeof(float),
                sizeof(float));
    return to_f32(value) == expected;
  };
  for (std::int64_t i = 0; i < pair->rank * module.k_in; ++i) {
    if (!same(cell.a[i], pair->a, i)) return false;
  }
  for (std::int64_t n = 0; n < module.n_out; ++n) {
    for (std::int32_t j = 0; j < stride; ++j) {
      T const value = cell.b[n * stride + j];
      if (j < pair->rank ? !same(value, pair->b, n * pair->rank + j) : to_f32(value) != 0.0F) return false;
    }
    if (pair->bias && !same(cell.bias[n], *pair->bias, n)) return false;
  }
  return true;
}

/// Whether `slot` of a pool in host memory holds exactly `adapter` (null: nothing), at every site.
template <class P>
bool slot_holds(P const& pool, std::int32_t slot, Adapter const* adapter) {
  if (slot < 0 || slot >= pool.max_slots()) return false;
  ModelShape const& shape = pool.shape();
  for (Site const site : shape.sites()) {
    auto const table = pool.route(site);
    REQUIRE(table.has_value());
    AdapterPair const* pair = nullptr;
    for (std::size_t i = 0; adapter != nullptr && i < adapter->pairs.size(); ++i) {
      if (adapter->pairs[i].site == site) pair = &adapter->pairs[i];
    }
    if (!holds(*table->cell(slot), pair, shape.module(site))) return false;
  }
  return true;
}

inline constexpr std::int32_t stream = 1;
inline std::vector<std::size_t> const every_site{0, 1, 2, 3, 4};

using Pool = AdapterPool<float, ScriptedBackend>;

/// A pool that there must be.
template <Element T>
AdapterPool<T, ScriptedBackend> pool_of(ModelShape const& shape, PoolOptions const& options,
                                        ScriptedBackend const& backend = {}) {
  auto pool = AdapterPool<T, ScriptedBackend>::create(shape, options, backend);
  REQUIRE_MESSAGE(pool.has_value(), (pool ? std::string() : pool.error().message));
  return *std::move(pool);
}

template <Element T = float>
AdapterPool<T, ScriptedBackend> make_pool(PoolOptions const& options, ScriptedBackend const& backend = {}) {
  return pool_of<T>(tiny_shape(), options, backend);
}

template <class P>
void step(P& pool, std::int32_t on = stream) {
  REQUIRE(pool.begin_step(on).has_value());
  REQUIRE(pool.end_step(on).has_value());
}

template <class P>
Staged load(P& pool, std::string const& name, Adapter const& adapter, StageOptions const& options = {}) {
  auto staged = pool.load(name, adapter, options);
  INFO((staged ? std::string() : staged.error().message));
  CHECK(staged.has_value());
  return staged ? *staged : Staged{};
}

template <class P>
Lease acquire(P& pool, std::string const& name) {
  auto lease = pool.acquire(name);
  CHECK(lease.has_value());
  return lease ? *std::move(lease) : Lease();
}

template <class R>
Errc code(R const& result) {
  return result ? Errc::ok : result.error().code;
}

}  // namespace atlas_test
