// SPDX-License-Identifier: AGPL-3.0-only
//
// An adapter in pinned host memory exactly as a pool's slots hold it: bringing it in is copies by the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/pinned_arena.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// An audited adapter converted to element type T and packed for one model. Immutable and move-only; may be
/// read by several threads.
template <Element T>
class PackedAdapter {
 public:
  /// Packs `adapter`, which fits `shape`, into `blocks`, which hold at least `outline.bytes`; `outline` is
  /// the adapter's own. Errors: those of `convert`.
  [[nodiscard]] static Result<PackedAdapter> pack(Adapter const& adapter, PackedOutline outline,
                                                  ModelShape const& shape, ConversionPolicy policy,
                                                  PinnedBlocks blocks) {
    PackedAdapter packed;
    packed.outline_ = std::move(outline);
    packed.blocks_ = std::move(blocks);
    packed.model_ = shape.fingerprint();
    std::vector<T> staging;
    auto place = packed.outline_.pairs.begin();
    for (AdapterPair const& pair : adapter.pairs) {
      if (pair.rank == 0) continue;
      staging.resize(std::max(staging.size(), place->extent.elements()));
      auto const counts = detail::pack_pair<T>(pair, shape.module(pair.site), std::span<T>(staging), policy);
      if (!counts) return cuda::std::unexpected<Error>(counts.error());
      detail::add_counts(packed.counts_, *counts);
      packed.blocks_.write(place->offset, staging.data(), place->extent.elements() * sizeof(T));
      ++place;
    }
    return packed;
  }

  /// Its pairs, their scales and ranks, and where their bytes lie in `blocks()`.
  [[nodiscard]] PackedOutline const& outline() const noexcept { return outline_; }
  /// Its bytes.
  [[nodiscard]] PinnedBlocks const& blocks() const noexcept { return blocks_; }
  /// `ModelShape::fingerprint` of the model that it is packed for.
  [[nodiscard]] std::uint64_t model() const noexcept { return model_; }
  /// What the conversion to T changed.
  [[nodiscard]] ConversionCounts const& counts() const noexcept { return counts_; }

 private:
  PackedAdapter() = default;

  PackedOutline outline_;
  PinnedBlocks blocks_;
  std::uint64_t model_ = 0;
  ConversionCounts counts_;
};

namespace detail {

/// What an adapter is once packed, if a pool for `shape` can hold it. Errors: those of `check_adapter`.
template <Element T>
[[nodiscard]] Result<PackedOutline> checked_outline(std::string_view name, Adapter const& adapter,
                                                    ModelShape const& shape, std::int32_t max_rank,
                                                    bool biases, PackOptions const& options) {
  auto const checked = check_adapter(name, adapter, shape, max_rank, biases, options.leave_out_unserved);
  if (!checked) return cuda::std::unexpected<Error>(checked.error());
  return outline_of(adapter, shape, sizeof(T), options);
}

/// The same of one that is packed. Errors: `shape_mismatch` when it is packed for another model;
/// `rank_exceeds_pool`; `unsupported` for a bias that the pool has no room for.
template <Element T>
[[nodiscard]] Result<PackedOutline> checked_outline(std::string_view name, PackedAdapter<T> const& adapter,
                                                    ModelShape const& shape, std::int32_t max_rank,
                                                    bool biases, PackOptions const&) {
  if (adapter.model() != shape.fingerprint()) return cuda::std::unexpected<Error>(other_model(name));
  PackFaults faults(name);
  for (PackedPair const& pair : adapter.outline().pairs) {
    Module const& module = shape.module(pair.site);
    check_room(pair.site, module, pair.rank, max_rank, faults);
    if (pair.extent.bias > 0 && !biases) {
      faults.add(Errc::unsupported, place_of(pair.site, module) + "the pool was made without biases");
    }
  }
  if (auto const fits = faults.outcome(); !fits) return cuda::std::unexpected<Error>(fits.error());
  return adapter.outline();
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
