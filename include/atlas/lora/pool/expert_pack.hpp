// SPDX-License-Identifier: AGPL-3.0-only
//
// Where an adapter's routers and experts lie in their blocks, their cells, and their part of a slot's record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

/// The cell of a pair whose A and B are packed at `a` and `b` in device memory.
template <Element T>
[[nodiscard]] RouteCell<T> expert_cell(std::byte* a, std::byte* b, PackedLinear const& pair) noexcept {
  auto* const outputs = reinterpret_cast<T*>(b);
  return {reinterpret_cast<T*>(a),
          outputs,
          pair.extent.bias > 0 ? outputs + pair.extent.b : nullptr,
          pair.scale,
          pair.rank,
          padded_rank(pair.rank),
          0};
}

/// Bytes of A's rows at the padded rank.
template <Element T>
[[nodiscard]] std::size_t expert_a_bytes(PackedLinear const& pair, Module const& module) noexcept {
  return static_cast<std::size_t>(padded_rank(pair.rank) * module.k_in) * sizeof(T);
}

/// The experts of one layer of an adapter: `[first, last)` of `PackedOutline::experts`.
struct ExpertRun {
  std::size_t first = 0;
  std::size_t last = 0;
};

/// The runs of an adapter, in order.
[[nodiscard]] inline std::vector<ExpertRun> expert_runs(PackedOutline const& outline) {
  std::vector<ExpertRun> runs;
  for (std::size_t i = 0; i < outline.experts.size(); ++i) {
    if (i == 0 || outline.experts[i].layer != outline.experts[i - 1].layer) runs.push_back({i, i});
    runs.back().last = i + 1;
  }
  return runs;
}

/// Where an adapter's routers and experts are: `blocks` are offsets from `memory`, in the order of
/// `expert_block_sizes`. It writes no device memory by itself. `memory` and the referred to outlive it.
template <Element T>
class PlacedExperts {
 public:
  PlacedExperts(PackedOutline const& outline, ModelShape const& shape, std::byte* memory,
                std::span<std::size_t const> blocks)
      : outline_(outline), shape_(shape), memory_(memory), blocks_(blocks), runs_(expert_runs(outline)) {}

  /// Where A, B and bias of a pair of the outline go.
  [[nodiscard]] RouteCell<T> cell(PackedRouter const& pair) const {
    std::byte* const block = memory_ + blocks_[pair.index];
    return expert_cell<T>(block, block + expert_a_bytes<T>(pair, linear_of(pair, shape_)), pair);
  }
  [[nodiscard]] RouteCell<T> cell(PackedExpert const& pair) const {
    std::byte* const block = expert_block(pair.index);
    if (pair.shares_a) return expert_cell<T>(expert_block(pair.index - 1), block, pair);
    return expert_cell<T>(block, block + expert_a_bytes<T>(pair, linear_of(pair, shape_)), pair);
  }

  /// Bytes behind A up to A's rows at the padded rank, which are zero; 0 for a pair without an A of its own.
  template <class Packed>
  [[nodiscard]] std::size_t tail_bytes(Packed const& pair) const {
    if (pair.extent.a == 0) return 0;
    return expert_a_bytes<T>(pair, linear_of(pair, shape_)) - pair.extent.a * sizeof(T);
  }

  /// Writes the cells of every layer into `staging` and from there to the device: `ready()` waits until
  /// staging may be written, `copy(to, from, bytes)` enqueues a copy out of it; both give a `Result<void>`.
  template <class Ready, class Copy>
  [[nodiscard]] Result<void> send_cells(std::byte* staging, Ready const& ready, Copy const& copy) const {
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      if (auto waited = ready(); !waited) return waited;
      std::vector<RouteCell<T>> const cells = cells_of(runs_[run]);
      std::size_t const bytes = cells.size() * sizeof(RouteCell<T>);
      std::memcpy(staging, cells.data(), bytes);
      if (auto sent = copy(memory_ + cells_block(run), staging, bytes); !sent) return sent;
    }
    return {};
  }

  /// Fills the image of a record's parts, which is zero before: `routers` `[layers]` cells and the indexes
  /// of all layers, `index_stride` bytes apart.
  void write_image(RouteCell<T>* routers, std::byte* indexes, std::size_t index_stride) const {
    MoeShape const& moe = shape_.moe();
    for (PackedRouter const& pair : outline_.routers) routers[*moe.find(pair.layer)] = cell(pair);
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      std::size_t const layer = *moe.find(outline_.experts[runs_[run].first].layer);
      auto* const index = reinterpret_cast<ExpertIndex<T>*>(indexes + layer * index_stride);
      index->cells = reinterpret_cast<RouteCell<T> const*>(memory_ + cells_block(run));
      index->num_groups = 0;
      for (std::size_t i = runs_[run].first; i < runs_[run].last; ++i) {
        std::int32_t& place = index->places()[outline_.experts[i].expert];
        if (place == 0) place = ++index->num_groups;
      }
    }
  }

 private:
  [[nodiscard]] std::byte* expert_block(std::size_t i) const {
    return memory_ + blocks_[outline_.routers.size() + i];
  }
  [[nodiscard]] std::size_t cells_block(std::size_t run) const {
    return blocks_[outline_.routers.size() + outline_.experts.size() + run];
  }

  // The cells of one layer: for each adapted expert, in order, its three linears, empty where not adapted.
  [[nodiscard]] std::vector<RouteCell<T>> cells_of(ExpertRun run) const {
    std::vector<RouteCell<T>> cells;
    for (std::size_t i = run.first; i < run.last; ++i) {
      PackedExpert const& pair = outline_.experts[i];
      if (i == run.first || pair.expert != outline_.experts[i - 1].expert) {
        cells.resize(cells.size() + expert_linears);
      }
      cells[cells.size() - expert_linears + static_cast<std::size_t>(pair.linear)] = cell(pair);
    }
    return cells;
  }

  PackedOutline const& outline_;
  ModelShape const& shape_;
  std::byte* memory_;
  std::span<std::size_t const> blocks_;
  std::vector<ExpertRun> runs_;
};

}  // namespace atlas::lora::inline v0::detail
