// SPDX-License-Identifier: AGPL-3.0-only
//
// A serving engine at its smallest: a model, a pool of adapters beside it, an eager pass for prefills and a
// captured one for decoding. The order of calls around a step is the one that any engine follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <atlas/lora.hpp>
#include <atlas/peft.hpp>

#include "llama.hpp"

namespace tiny_model {

template <class Device>
class Engine {
 public:
  using T = typename Device::element;
  using Pool = atlas::lora::AdapterPool<T, typename Device::Backend>;

  /// A model without the library: until `open_pool`, nothing is launched but its own operations.
  Engine(std::string const& directory, Capacity capacity)
      : capacity_(capacity), model_(device_, directory, capacity) {}

  [[nodiscard]] Device& device() { return device_; }
  [[nodiscard]] LlamaConfig const& config() const { return model_.config(); }
  /// Whose cache entries pad rows may spoil.
  [[nodiscard]] std::int32_t pad_sequence() const { return capacity_.sequences - 1; }

  /// Makes room for adapters of up to `max_rank`, `expert_bytes` of it for experts and routers, and points
  /// the model's linears at the pool's tables.
  void open_pool(atlas::lora::ModelShape const& shape, std::int32_t max_rank, std::size_t expert_bytes) {
    atlas::lora::PoolOptions options;
    options.max_slots = capacity_.slots;
    options.max_rank = max_rank;
    options.expert_bytes = expert_bytes;
    options.overlay_bytes = overlay_bytes;
    pool_.emplace(expect(Pool::create(shape, options, device_.backend())));
    model_.attach(*pool_);
  }

  /// An adapter whose token rows are built against the model's own tables.
  [[nodiscard]] atlas::lora::Adapter build(atlas::lora::Adapter adapter,
                                           atlas::lora::ModelShape const& shape) {
    return model_.build(std::move(adapter), shape);
  }

  /// Loads a built adapter into a free slot and leases it. Done again under the same name, it moves the
  /// adapter to another slot: the old one is given up.
  void place(std::string const& name, atlas::lora::Adapter const& adapter) {
    std::string const tenant = name + "." + std::to_string(++loads_);
    expect(pool_->load(tenant, adapter));
    expect(pool_->begin_step(device_.stream()));
    expect(pool_->end_step(device_.stream()));
    Placed placed{tenant, expect(pool_->acquire(tenant))};
    std::swap(adapters_[name], placed);
    if (placed.tenant.empty()) return;
    placed.lease.release();
    device_.synchronize();
    expect(pool_->unload(placed.tenant));
  }

  /// The slot of an adapter now; `base_slot` for the name "base".
  [[nodiscard]] std::int32_t slot(std::string const& name) const {
    return name == "base" ? atlas::lora::base_slot : adapters_.at(name).lease.slot();
  }

  /// Captures the step that `decode` replays, for `rows` rows, once and for all adapters.
  void capture(std::int32_t rows) {
    bool const adapted = pool_.has_value();
    prefill(
        std::vector<Row>(static_cast<std::size_t>(rows), Row{0, 0, pad_sequence()}));  // warms everything up
    graph_.emplace(device_.capture([this, rows, adapted] { model_.forward(rows, adapted); }));
  }

  /// What the last pass's rows chose of the experts of all layers.
  [[nodiscard]] std::vector<std::vector<std::int32_t>> choices(std::int32_t rows) {
    return model_.choices(rows);
  }

  /// The logits of `rows`, `[rows, vocab]`, by an eager pass.
  std::vector<float> prefill(std::span<Row const> rows) {
    return step(rows, [&] { model_.forward(static_cast<std::int32_t>(rows.size()), pool_.has_value()); });
  }

  /// The same by replaying the graph; as many rows as it was captured for.
  std::vector<float> decode(std::span<Row const> rows) {
    return step(rows, [&] { (*graph_)(); });
  }

 private:
  static constexpr std::size_t overlay_bytes = std::size_t{1} << 20;  // for the token rows of all adapters

  struct Placed {
    std::string tenant;
    atlas::lora::Lease lease;
  };

  template <class Enqueue>
  std::vector<float> step(std::span<Row const> rows, Enqueue enqueue) {
    if (pool_) expect(pool_->begin_step(device_.stream()));
    model_.set_rows(rows);
    enqueue();
    if (pool_) expect(pool_->end_step(device_.stream()));
    return model_.logits(static_cast<std::int32_t>(rows.size()));
  }

  Capacity capacity_;
  Device device_;
  Llama<Device> model_;
  std::optional<Pool> pool_;
  std::map<std::string, Placed> adapters_;
  std::int64_t loads_ = 0;
  std::optional<typename Device::Graph> graph_;
};

}  // namespace tiny_model
