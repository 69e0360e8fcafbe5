// SPDX-License-Identifier: AGPL-3.0-only
//
// From an audited adapter to the bytes and cells of a slot.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// How an adapter is loaded into a pool.
struct StageOptions {
  bool pinned = false;  ///< into a slot that is never evicted
  bool leave_out_unserved =
      false;  ///< load the linears of an adapter that also has parts a pool does not serve
  ConversionPolicy conversion{};
  /// Ends the load with `cancelled`, while it waits for other loads or packs. What is staged is staged.
  std::stop_token stop{};
};

namespace detail {

/// The digest of `adapter` as a pool applies it: what it was told to leave out or to mend on conversion is
/// another content than the same file taken strictly.
[[nodiscard]] constexpr Digest applied_digest(Adapter const& adapter, StageOptions const& options) noexcept {
  std::uint64_t const told = (options.leave_out_unserved ? 1u : 0u) |
                             (options.conversion.saturate_overflow ? 2u : 0u) |
                             (options.conversion.keep_non_finite ? 4u : 0u);
  return {adapter.digest.low, adapter.digest.high ^ (told * 0x9e3779b97f4a7c15u)};
}

/// Elements of one pair as packed: A `[rank, k_in]`, B `[n_out, padded_rank(rank)]`, bias `[n_out]` or
/// nothing.
struct PackedExtent {
  std::size_t a = 0;
  std::size_t b = 0;
  std::size_t bias = 0;
};

[[nodiscard]] inline PackedExtent packed_extent(AdapterPair const& pair, Module const& module) noexcept {
  auto const n_out = static_cast<std::size_t>(module.n_out);
  return PackedExtent{static_cast<std::size_t>(pair.rank) * static_cast<std::size_t>(module.k_in),
                      n_out * static_cast<std::size_t>(padded_rank(pair.rank)), pair.bias ? n_out : 0};
}

/// Bytes of all pairs as packed, for an adapter that fits the pool.
[[nodiscard]] inline std::size_t packed_bytes(Adapter const& adapter, ModelShape const& shape,
                                              std::size_t element_bytes) noexcept {
  std::size_t elements = 0;
  for (AdapterPair const& pair : adapter.pairs) {
    if (pair.rank == 0) continue;
    PackedExtent const extent = packed_extent(pair, shape.module(pair.site));
    elements += extent.a + extent.b + extent.bias;
  }
  return elements * element_bytes;
}

/// Collects what is wrong with an adapter, one fault a line; its code is the first fault's.
class PackFaults {
 public:
  explicit PackFaults(std::string_view name) : name_(name) {}

  void add(Errc code, std::string const& what) {
    if (error_.code == Errc::ok) error_.code = code;
    error_.message += (error_.message.empty() ? "" : "\n") + ("adapter '" + name_ + "': ") + what;
  }
  [[nodiscard]] Result<void> outcome() const {
    if (error_.code == Errc::ok) return {};
    return cuda::std::unexpected<Error>(error_);
  }

 private:
  std::string name_;
  Error error_;
};

inline void check_tensor(HostTensor const& tensor, std::initializer_list<std::int64_t> shape,
                         PackFaults& faults) {
  std::size_t bytes = element_bytes(tensor.type);
  std::string words;
  for (std::int64_t const extent : shape) {
    bytes *= static_cast<std::size_t>(extent);  // below 2^31 each, one of them a rank
    words += (words.empty() ? "" : ", ") + std::to_string(extent);
  }
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    faults.add(Errc::shape_mismatch, "tensor '" + tensor.name + "' is not [" + words + "]");
  } else if (tensor.bytes.size() != bytes) {
    faults.add(Errc::shape_mismatch, "tensor '" + tensor.name + "' holds " +
                                         std::to_string(tensor.bytes.size()) + " bytes, not " +
                                         std::to_string(bytes));
  }
}

inline void check_pair(AdapterPair const& pair, Module const& module, std::int32_t max_rank, bool biases,
                       PackFaults& faults) {
  std::string const place = "layer " + std::to_string(pair.site.layer) + " '" + module.name + "': ";
  if (pair.rank < 0) faults.add(Errc::invalid_argument, place + "rank is " + std::to_string(pair.rank));
  if (pair.rank > max_rank) {
    faults.add(Errc::rank_exceeds_pool, place + "rank " + std::to_string(pair.rank) + " exceeds the pool's " +
                                            std::to_string(max_rank));
  }
  if (!std::isfinite(pair.scale)) faults.add(Errc::out_of_range, place + "scale is not finite");
  if (pair.rank < 1 || pair.rank > max_rank) return;
  check_tensor(pair.a, {pair.rank, module.k_in}, faults);
  check_tensor(pair.b, {module.n_out, pair.rank}, faults);
  if (!pair.bias) return;
  if (!biases) {
    faults.add(Errc::unsupported, "tensor '" + pair.bias->name + "': the pool was made without biases");
  }
  check_tensor(*pair.bias, {module.n_out}, faults);
}

/// Whether a pool for `shape` can hold the adapter; every fault is named. Errors: `invalid_argument` for no
/// digest, a negative rank, a site twice or out of order; `not_found` for a site that the model does not
/// have; `rank_exceeds_pool`; `shape_mismatch`; `out_of_range` for a scale that is not finite; `unsupported`
/// for tensors that a pool does not serve.
[[nodiscard]] inline Result<void> check_adapter(std::string_view name, Adapter const& adapter,
                                                ModelShape const& shape, std::int32_t max_rank, bool biases,
                                                bool leave_out_unserved) {
  PackFaults faults(name);
  if (adapter.digest == Digest{}) {
    faults.add(Errc::invalid_argument, "no content digest, without which a prefix cache could mix contents");
  }
  std::optional<std::size_t> previous;
  for (AdapterPair const& pair : adapter.pairs) {
    std::optional<std::size_t> const index = shape.find(pair.site);
    if (!index) {
      faults.add(Errc::not_found, "the model has no module " + std::to_string(pair.site.module) +
                                      " in layer " + std::to_string(pair.site.layer));
      continue;
    }
    if (previous && *index <= *previous) {
      faults.add(Errc::invalid_argument, "layer " + std::to_string(pair.site.layer) + " '" +
                                             shape.module(pair.site).name + "': twice, or not in site order");
    }
    previous = index;
    check_pair(pair, shape.module(pair.site), max_rank, biases, faults);
  }
  if (!leave_out_unserved) {
    for (auto const* const part : {&adapter.experts, &adapter.router}) {
      for (HostTensor const& tensor : *part) {
        faults.add(Errc::unsupported, "tensor '" + tensor.name + "': a pool does not serve it");
      }
    }
  }
  return faults.outcome();
}

/// Spreads `rows` rows of `width` elements, which lie at the head of `data` without gaps, to `stride`
/// elements each; the new columns are zero. `data` `[rows * stride]`.
template <Element T>
constexpr void spread_rows(std::span<T> data, std::size_t rows, std::size_t width,
                           std::size_t stride) noexcept {
  if (width == stride) return;
  for (std::size_t row = rows; row-- > 0;) {  // from the last, so that no row is overwritten before it moves
    auto const from = data.begin() + static_cast<std::ptrdiff_t>(row * width);
    auto const to = data.begin() + static_cast<std::ptrdiff_t>(row * stride);
    if (row > 0) {
      std::copy_backward(from, from + static_cast<std::ptrdiff_t>(width),
                         to + static_cast<std::ptrdiff_t>(width));
    }
    std::fill_n(to + static_cast<std::ptrdiff_t>(width), stride - width, T{});
  }
}

inline void add_counts(ConversionCounts& sum, ConversionCounts const& more) noexcept {
  sum.overflow += more.overflow;
  sum.underflow += more.underflow;
  sum.nan += more.nan;
  sum.infinity += more.infinity;
}

/// Writes a checked pair as packed: A, B and bias behind one another at the head of `out`. Returns what the
/// conversion counted. Errors: those of `convert`.
template <Element T>
[[nodiscard]] Result<ConversionCounts> pack_pair(AdapterPair const& pair, Module const& module,
                                                 std::span<T> out, ConversionPolicy policy) {
  PackedExtent const extent = packed_extent(pair, module);
  auto const n_out = static_cast<std::size_t>(module.n_out);
  auto const rank = static_cast<std::size_t>(pair.rank);
  std::span<T> const b = out.subspan(extent.a, extent.b);
  auto const a_counts = convert<T>(pair.a, out.first(extent.a), policy);
  if (!a_counts) return a_counts;
  auto const b_counts = convert<T>(pair.b, b.first(n_out * rank), policy);
  if (!b_counts) return b_counts;
  spread_rows<T>(b, n_out, rank, static_cast<std::size_t>(padded_rank(pair.rank)));
  ConversionCounts counts = *a_counts;
  add_counts(counts, *b_counts);
  if (!pair.bias) return counts;
  auto const bias_counts = convert<T>(*pair.bias, out.subspan(extent.a + extent.b, extent.bias), policy);
  if (!bias_counts) return bias_counts;
  add_counts(counts, *bias_counts);
  return counts;
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
