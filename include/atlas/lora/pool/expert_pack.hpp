// SPDX-License-Identifier: AGPL-3.0-only
//
// From an adapter's routers and experts to bytes in their blocks, cells, and their part of a slot's record.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0::detail {

/// The cell of a pair whose A and B are packed at `a` and `b` in device memory.
template <Element T, class Pair>
[[nodiscard]] RouteCell<T> expert_cell(std::byte* a, std::byte* b, Pair const& pair,
                                       Module const& module) noexcept {
  std::int32_t const padded = padded_rank(pair.rank);
  auto* const outputs = reinterpret_cast<T*>(b);
  return {reinterpret_cast<T*>(a),
          outputs,
          pair.bias ? outputs + padded * module.n_out : nullptr,
          pair.scale,
          pair.rank,
          padded,
          0};
}

/// Bytes of A's rows at the padded rank.
template <Element T, class Pair>
[[nodiscard]] std::size_t expert_a_bytes(Pair const& pair, Module const& module) noexcept {
  return static_cast<std::size_t>(padded_rank(pair.rank) * module.k_in) * sizeof(T);
}

/// The experts of one layer of an adapter: pairs `[first, last)` of `Adapter::experts`.
struct ExpertRun {
  std::size_t first = 0;
  std::size_t last = 0;
};

/// The runs of an adapter, in order.
[[nodiscard]] inline std::vector<ExpertRun> expert_runs(Adapter const& adapter) {
  std::vector<ExpertRun> runs;
  for (std::size_t i = 0; i < adapter.experts.size(); ++i) {
    if (i == 0 || adapter.experts[i].layer != adapter.experts[i - 1].layer) runs.push_back({i, i});
    runs.back().last = i + 1;
  }
  return runs;
}

/// Where a checked adapter's routers and experts are: `blocks` are offsets from `memory`, in the order of
/// `expert_block_sizes`. It writes no device memory by itself.
template <Element T>
class PlacedExperts {
 public:
  PlacedExperts(Adapter const& adapter, MoeShape const& moe, std::byte* memory,
                std::span<std::size_t const> blocks)
      : adapter_(adapter), moe_(moe), memory_(memory), blocks_(blocks), runs_(expert_runs(adapter)) {}

  /// Packs every pair and then every layer's cells, each into `staging` and from there to the device:
  /// `ready()` waits until staging may be written, `copy(to, from, bytes)` enqueues a copy out of it,
  /// `clear(to, bytes)` enqueues zeroes; all give a `Result<void>`. Returns what conversions counted.
  template <class Ready, class Copy, class Clear>
  [[nodiscard]] Result<ConversionCounts> pack(std::span<T> staging, ConversionPolicy policy,
                                              std::stop_token const& stop, Ready const& ready,
                                              Copy const& copy, Clear const& clear) const {
    ConversionCounts counts;
    auto const one = [&](auto const& pair, Module const& linear, RouteCell<T> const& cell,
                         bool with_a) -> Result<void> {
      if (stop.stop_requested()) {
        return fail(Errc::cancelled, "layer " + std::to_string(pair.layer) + " " + linear.name +
                                         ": cancelled before it was packed");
      }
      if (auto waited = ready(); !waited) return waited;
      auto const packed = pack_pair<T>(pair, linear, staging, policy);
      if (!packed) return cuda::std::unexpected<Error>(packed.error());
      add_counts(counts, *packed);
      PackedExtent const extent = packed_extent(pair, linear);
      if (with_a) {
        T* const a = const_cast<T*>(cell.a);
        if (auto sent = copy(a, staging.data(), extent.a * sizeof(T)); !sent) return sent;
        std::size_t const tail = expert_a_bytes<T>(pair, linear) - extent.a * sizeof(T);
        if (tail > 0) {
          if (auto cleared = clear(a + extent.a, tail); !cleared) return cleared;
        }
      }
      // B and the bias are neighbours in staging and in the block.
      return copy(const_cast<T*>(cell.b), staging.data() + extent.a, (extent.b + extent.bias) * sizeof(T));
    };
    for (std::size_t i = 0; i < adapter_.routers.size(); ++i) {
      RouterPair const& pair = adapter_.routers[i];
      auto const sent = one(pair, moe_.router(*moe_.find(pair.layer)), router_cell(i), true);
      if (!sent) return cuda::std::unexpected<Error>(sent.error());
    }
    for (std::size_t i = 0; i < adapter_.experts.size(); ++i) {
      ExpertPair const& pair = adapter_.experts[i];
      auto const sent = one(pair, linear_of(pair), expert_cell_of(i), !pair.shares_a);
      if (!sent) return cuda::std::unexpected<Error>(sent.error());
    }
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      if (auto const waited = ready(); !waited) return cuda::std::unexpected<Error>(waited.error());
      std::vector<RouteCell<T>> const cells = cells_of(runs_[run]);
      std::memcpy(static_cast<void*>(staging.data()), cells.data(), cells.size() * sizeof(cells[0]));
      auto const sent = copy(memory_ + cells_block(run), staging.data(), cells.size() * sizeof(cells[0]));
      if (!sent) return cuda::std::unexpected<Error>(sent.error());
    }
    return counts;
  }

  /// Fills the image of a record's parts, which is zero before: `routers` `[layers]` cells and the indexes
  /// of all layers, `index_stride` bytes apart.
  void write_image(RouteCell<T>* routers, std::byte* indexes, std::size_t index_stride) const {
    for (std::size_t i = 0; i < adapter_.routers.size(); ++i) {
      RouterPair const& pair = adapter_.routers[i];
      std::size_t const layer = *moe_.find(pair.layer);
      routers[layer] = router_cell(i);
    }
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      std::size_t const layer = *moe_.find(adapter_.experts[runs_[run].first].layer);
      auto* const index = reinterpret_cast<ExpertIndex<T>*>(indexes + layer * index_stride);
      index->cells = reinterpret_cast<RouteCell<T> const*>(memory_ + cells_block(run));
      index->num_groups = 0;
      for (std::size_t i = runs_[run].first; i < runs_[run].last; ++i) {
        std::int32_t& place = index->places()[adapter_.experts[i].expert];
        if (place == 0) place = ++index->num_groups;
      }
    }
  }

 private:
  [[nodiscard]] Module linear_of(ExpertPair const& pair) const {
    return moe_.linear(*moe_.find(pair.layer), pair.linear);
  }
  [[nodiscard]] std::byte* expert_block(std::size_t i) const {
    return memory_ + blocks_[adapter_.routers.size() + i];
  }
  [[nodiscard]] RouteCell<T> router_cell(std::size_t i) const {
    RouterPair const& pair = adapter_.routers[i];
    Module const router = moe_.router(*moe_.find(pair.layer));
    std::byte* const block = memory_ + blocks_[i];
    return expert_cell<T>(block, block + expert_a_bytes<T>(pair, router), pair, router);
  }
  [[nodiscard]] RouteCell<T> expert_cell_of(std::size_t i) const {
    ExpertPair const& pair = adapter_.experts[i];
    Module const linear = linear_of(pair);
    std::byte* const block = expert_block(i);
    if (pair.shares_a) return expert_cell<T>(expert_block(i - 1), block, pair, linear);
    return expert_cell<T>(block, block + expert_a_bytes<T>(pair, linear), pair, linear);
  }
  [[nodiscard]] std::size_t cells_block(std::size_t run) const {
    return blocks_[adapter_.routers.size() + adapter_.experts.size() + run];
  }

  // The cells of one layer: for each adapted expert, in order, its three linears, empty where not adapted.
  [[nodiscard]] std::vector<RouteCell<T>> cells_of(ExpertRun run) const {
    std::vector<RouteCell<T>> cells;
    for (std::size_t i = run.first; i < run.last; ++i) {
      ExpertPair const& pair = adapter_.experts[i];
      if (i == run.first || pair.expert != adapter_.experts[i - 1].expert) {
        cells.resize(cells.size() + expert_linears);
      }
      cells[cells.size() - expert_linears + static_cast<std::size_t>(pair.linear)] = expert_cell_of(i);
    }
    return cells;
  }

  Adapter const& adapter_;
  MoeShape const& moe_;
  std::byte* memory_;
  std::span<std::size_t const> blocks_;
  std::vector<ExpertRun> runs_;
};

}  // namespace atlas::lora::inline v0::detail
