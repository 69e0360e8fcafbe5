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
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/pool/overlay_memory.hpp"
#include "atlas/lora/pool/overlay_pack.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/pack_check.hpp"
#include "atlas/lora/pool/pinned_arena.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// An audited adapter, its experts, routers and token rows too, converted to element type T and packed for
/// one model. Immutable and move-only; may be read by several threads.
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
    auto const done = detail::for_each_pair(packed.outline_, [&](auto const& pair) -> Result<void> {
      std::size_t const elements = pair.extent.elements();
      staging.resize(std::max(staging.size(), elements));
      auto const counts = detail::pack_pair<T>(detail::source_of(adapter, pair),
                                               detail::linear_of(pair, shape), std::span<T>(staging), policy);
      if (!counts) return cuda::std::unexpected<Error>(counts.error());
      detail::add_counts(packed.counts_, *counts);
      packed.blocks_.write(pair.offset, staging.data(), elements * sizeof(T));
      return {};
    });
    if (!done) return cuda::std::unexpected<Error>(done.error());
    if (packed.outline_.overlay.bytes == 0) return packed;
    auto const counts = packed.pack_overlay(adapter.overlay, policy);
    if (!counts) return cuda::std::unexpected<Error>(counts.error());
    detail::add_counts(packed.counts_, *counts);
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

  Result<ConversionCounts> pack_overlay(TokenOverlay const& overlay, ConversionPolicy policy) {
    std::vector<std::byte> staging(detail::overlay_staging_bytes(outline_.overlay, sizeof(T)));
    detail::OverlayPacker<T> const packer{staging, policy};
    return packer.pack(
        overlay, [] { return Result<void>(); },
        [&](std::size_t offset, std::size_t bytes) {
          blocks_.write(outline_.overlay.offset + offset, staging.data(), bytes);
          return Result<void>();
        });
  }

  PackedOutline outline_;
  PinnedBlocks blocks_;
  std::uint64_t model_ = 0;
  ConversionCounts counts_;
};

namespace detail {

/// What a pool has room for, or what one could have.
struct PoolRoom {
  std::int32_t max_rank = 0;
  bool biases = false;
  bool experts = false;           ///< memory for experts and routers
  std::size_t overlay_bytes = 0;  ///< for the token rows of all adapters
};

/// What an adapter is once packed, if a pool for `shape` can hold it. Errors: those of `check_adapter` and
/// `check_overlay`, all at once.
template <Element T>
[[nodiscard]] Result<PackedOutline> checked_outline(std::string_view name, Adapter const& adapter,
                                                    ModelShape const& shape, PoolRoom const& room,
                                                    PackOptions const& options) {
  auto const pairs = check_adapter(name, adapter, shape, room.max_rank, room.biases,
                                   options.leave_out_unserved, room.experts);
  auto const rows =
      check_overlay(name, adapter, shape, room.overlay_bytes, sizeof(T), options.leave_out_unserved);
  if (!pairs && !rows) return fail(pairs.error().code, pairs.error().message + '\n' + rows.error().message);
  if (!pairs || !rows) return cuda::std::unexpected<Error>(pairs ? rows.error() : pairs.error());
  return outline_of(adapter, shape, sizeof(T), options, room.experts, room.overlay_bytes > 0);
}

/// The same of one that is packed. Errors: `shape_mismatch` when it is packed for another model;
/// `rank_exceeds_pool`; `unsupported` for a bias, experts and routers, or token rows, that the pool has no
/// room for; `out_of_memory` for token rows that can never fit.
template <Element T>
[[nodiscard]] Result<PackedOutline> checked_outline(std::string_view name, PackedAdapter<T> const& adapter,
                                                    ModelShape const& shape, PoolRoom const& room,
                                                    PackOptions const& options) {
  if (adapter.model() != shape.fingerprint()) return cuda::std::unexpected<Error>(other_model(name));
  PackFaults faults(name);
  PackedOutline const& whole = adapter.outline();
  for (PackedPair const& pair : whole.pairs) {
    check_room(place_of(pair, shape), pair.rank, room.max_rank, faults);
    if (pair.extent.bias > 0 && !room.biases) {
      faults.add(Errc::unsupported, place_of(pair, shape) + "the pool was made without biases");
    }
  }
  bool const may_leave_out = options.leave_out_unserved || whole.packing.leave_out_unserved;
  std::size_t const others = whole.routers.size() + whole.experts.size();
  bool const overlays = room.overlay_bytes > 0;
  if (room.experts) {
    for (PackedRouter const& pair : whole.routers) {
      check_room(place_of(pair, shape), pair.rank, room.max_rank, faults);
    }
    for (PackedExpert const& pair : whole.experts) {
      check_room(place_of(pair, shape), pair.rank, room.max_rank, faults);
    }
  } else if (others > 0 && !may_leave_out) {
    faults.add(Errc::unsupported, std::to_string(others) +
                                      " pairs of experts and routers: the pool was made without memory for "
                                      "experts");
  }
  if (overlays) {
    check_overlay_room(whole.overlay.bytes, room.overlay_bytes, faults);
  } else if (whole.overlay.bytes > 0 && !may_leave_out) {
    faults.add(Errc::unsupported, "token rows: the pool was made without token overlays");
  }
  if (auto const fits = faults.outcome(); !fits) return cuda::std::unexpected<Error>(fits.error());
  bool const is_served = (room.experts || others == 0) && (overlays || whole.overlay.bytes == 0);
  return is_served ? whole : served_part(whole, room.experts, overlays);
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
