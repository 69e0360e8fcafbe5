// SPDX-License-Identifier: AGPL-3.0-only
//
// What an adapter is once it is packed, apart from its elements: which linears, how large, in what order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/overlay_layout.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What an adapter is turned into.
struct PackOptions {
  /// Take an adapter that also has parts which are not served without them: token rows that are not built or
  /// that a pool has no memory for, and experts and routers likewise.
  bool leave_out_unserved = false;
  ConversionPolicy conversion{};  ///< of elements that the pool's type cannot hold
};

/// Elements of one pair as packed: A `[rank, k_in]`, or nothing where it has its gate's (`shares_a`), B
/// `[n_out, padded_rank(rank)]`, bias `[n_out]` or nothing.
struct PackedExtent {
  std::size_t a = 0;     ///< of A
  std::size_t b = 0;     ///< of B, its padding too
  std::size_t bias = 0;  ///< of the bias

  /// All of them.
  [[nodiscard]] constexpr std::size_t elements() const noexcept { return a + b + bias; }
};

/// What pairs of all kinds are as packed.
struct PackedLinear {
  std::int32_t rank = 0;   ///< true rank
  float scale = 0.0F;      ///< as `AdapterPair::scale`
  PackedExtent extent;     ///< what it takes
  std::size_t offset = 0;  ///< bytes before its A, when all pairs lie behind one another
  std::size_t index = 0;   ///< which it is of the adapter's pairs of its kind
};
/// The pair of one site.
struct PackedPair : PackedLinear {
  Site site;  ///< of the model's list
};
/// The pair of the router of one layer, by its global index.
struct PackedRouter : PackedLinear {
  std::int32_t layer = 0;  ///< global layer index
};
/// The pair of one linear of one expert.
struct PackedExpert : PackedLinear {
  std::int32_t layer = 0;                    ///< global layer index
  std::int32_t expert = 0;                   ///< in `[0, num_experts)`
  ExpertLinear linear = ExpertLinear::gate;  ///< which of the expert's linears
  bool shares_a = false;                     ///< has the A of the gate before it
};

/// All that a packed adapter is apart from its elements, which lie behind one another in this order.
struct PackedOutline {
  std::vector<PackedPair> pairs;      ///< in site order, none of rank 0
  std::vector<PackedRouter> routers;  ///< all of the adapter's or, where none are served, nothing
  std::vector<PackedExpert> experts;  ///< likewise
  PackedOverlay overlay;              ///< likewise
  std::size_t bytes = 0;              ///< of all pairs and the overlay
  std::int32_t max_rank = 0;          ///< of the pairs; 0 when there are none
  Digest digest;        ///< of the adapter as it is applied: its own, and what it was told on packing
  Digest source;        ///< the adapter's own
  PackOptions packing;  ///< what it was told on packing
};

namespace detail {

/// The digest of an adapter as a pool applies it: what it was told to leave out or to mend on conversion is
/// another content than the same file taken strictly.
[[nodiscard]] constexpr Digest applied_digest(Digest const& source, PackOptions const& options) noexcept {
  std::uint64_t const told = (options.leave_out_unserved ? 1u : 0u) |
                             (options.conversion.saturate_overflow ? 2u : 0u) |
                             (options.conversion.keep_non_finite ? 4u : 0u);
  return {source.low, source.high ^ (told * 0x9e3779b97f4a7c15u)};
}

/// The linear of a pair that the model has; `Pair` is an adapter's or a packed one, of any kind.
template <class Pair>
[[nodiscard]] Module linear_of(Pair const& pair, ModelShape const& shape) {
  if constexpr (requires { pair.site; }) {
    return shape.module(pair.site);
  } else if constexpr (requires { pair.expert; }) {
    return shape.moe().linear(*shape.moe().find(pair.layer), pair.linear);
  } else {
    return shape.moe().router(*shape.moe().find(pair.layer));
  }
}

/// Where a pair is, for messages. The model must have its site, but not its expert's or router's layer.
template <class Pair>
[[nodiscard]] std::string place_of(Pair const& pair, ModelShape const& shape) {
  if constexpr (requires { pair.site; }) {
    return "layer " + std::to_string(pair.site.layer) + " '" + shape.module(pair.site).name + "': ";
  } else if constexpr (requires { pair.expert; }) {
    return "layer " + std::to_string(pair.layer) + " expert " + std::to_string(pair.expert) + ": ";
  } else {
    return "layer " + std::to_string(pair.layer) + " router: ";
  }
}

/// `Pair` is `AdapterPair`, `RouterPair` or `ExpertPair`.
template <class Pair>
[[nodiscard]] PackedExtent packed_extent(Pair const& pair, Module const& module) noexcept {
  auto const n_out = static_cast<std::size_t>(module.n_out);
  PackedExtent extent{static_cast<std::size_t>(pair.rank) * static_cast<std::size_t>(module.k_in),
                      n_out * static_cast<std::size_t>(padded_rank(pair.rank)), pair.bias ? n_out : 0};
  if constexpr (requires { pair.shares_a; }) extent.a = pair.shares_a ? 0 : extent.a;
  return extent;
}

/// The outline of a checked adapter, with its experts and routers, and its token rows, where those are
/// served.
[[nodiscard]] inline PackedOutline outline_of(Adapter const& adapter, ModelShape const& shape,
                                              std::size_t element_bytes, PackOptions const& options,
                                              bool experts, bool overlays = false) {
  PackedOutline outline;
  outline.source = adapter.digest;
  outline.packing = options;
  outline.digest = applied_digest(adapter.digest, options);
  auto const add = [&](auto const& pairs, auto& list, auto const& packed) {
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      if (pairs[i].rank == 0) continue;
      PackedExtent const extent = packed_extent(pairs[i], linear_of(pairs[i], shape));
      list.push_back(packed(pairs[i], PackedLinear{pairs[i].rank, pairs[i].scale, extent, outline.bytes, i}));
      outline.bytes += extent.elements() * element_bytes;
      outline.max_rank = std::max(outline.max_rank, pairs[i].rank);
    }
  };
  add(adapter.pairs, outline.pairs, [](AdapterPair const& pair, PackedLinear const& packed) {
    return PackedPair{packed, pair.site};
  });
  if (experts) {
    add(adapter.routers, outline.routers, [](RouterPair const& pair, PackedLinear const& packed) {
      return PackedRouter{packed, pair.layer};
    });
    add(adapter.experts, outline.experts, [](ExpertPair const& pair, PackedLinear const& packed) {
      return PackedExpert{packed, pair.layer, pair.expert, pair.linear, pair.shares_a};
    });
  }
  outline.overlay = packed_overlay(overlays ? adapter.overlay : TokenOverlay(), element_bytes, outline.bytes);
  outline.bytes += outline.overlay.bytes;
  return outline;
}

/// Calls `body(packed)`, which gives a `Result<void>`, for each pair in order until one does not succeed;
/// returns the last outcome.
template <class Body>
[[nodiscard]] Result<void> for_each_pair(PackedOutline const& outline, Body const& body) {
  Result<void> outcome;
  auto const all = [&](auto const& list) {
    for (auto packed = list.begin(); outcome && packed != list.end(); ++packed) outcome = body(*packed);
  };
  all(outline.pairs);
  all(outline.routers);
  all(outline.experts);
  return outcome;
}

/// The outline of the same content with its experts and routers, and its token rows, only where those are
/// served, as it would have been packed.
[[nodiscard]] inline PackedOutline served_part(PackedOutline const& whole, bool experts, bool overlays) {
  PackedOutline part;
  part.pairs = whole.pairs;
  part.source = whole.source;
  part.packing = whole.packing;
  part.packing.leave_out_unserved = true;
  part.digest = applied_digest(part.source, part.packing);
  part.bytes = whole.overlay.offset;
  if (experts) {
    part.routers = whole.routers;
    part.experts = whole.experts;
  } else {
    if (!whole.experts.empty()) part.bytes = whole.experts.front().offset;
    if (!whole.routers.empty()) part.bytes = whole.routers.front().offset;
  }
  if (overlays) {
    part.overlay = whole.overlay;
    part.bytes += whole.overlay.bytes;
  }
  static_cast<void>(for_each_pair(part, [&](PackedLinear const& pair) {
    part.max_rank = std::max(part.max_rank, pair.rank);
    return Result<void>();
  }));
  return part;
}

/// The pair of the adapter that a packed one comes from.
[[nodiscard]] inline AdapterPair const& source_of(Adapter const& adapter, PackedPair const& packed) noexcept {
  return adapter.pairs[packed.index];
}
[[nodiscard]] inline RouterPair const& source_of(Adapter const& adapter,
                                                 PackedRouter const& packed) noexcept {
  return adapter.routers[packed.index];
}
[[nodiscard]] inline ExpertPair const& source_of(Adapter const& adapter,
                                                 PackedExpert const& packed) noexcept {
  return adapter.experts[packed.index];
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
