// SPDX-License-Identifier: AGPL-3.0-only
//
// The audited adapter: what a reader hands to the pool. It owns its bytes, in the file's own types, and
// knows no file format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/module.hpp"

namespace atlas::lora::inline v0 {

/// A tensor in host memory, row-major and contiguous, in the type its file holds.
struct HostTensor {
  std::string name;  ///< as the file spells it, for messages
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;  ///< product of `shape` elements, little-endian

  friend bool operator==(HostTensor const&, HostTensor const&) = default;
};

/// The pair of one site: `delta = scale * ((x @ a^T) @ b^T + bias)`.
struct AdapterPair {
  Site site;
  std::int32_t rank = 0;           ///< true rank, at least 1
  float scale = 0.0F;              ///< alpha / rank, or alpha / sqrt(rank) with rsLoRA; computed in f64
  HostTensor a;                    ///< `[rank, k_in]`
  HostTensor b;                    ///< `[n_out, rank]`
  std::optional<HostTensor> bias;  ///< `[n_out]`, what PEFT's `lora_bias` trains
};

/// A content digest: XXH3-128 over what the adapter does (names, shapes, bytes, scales, load options).
struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  friend constexpr bool operator==(Digest const&, Digest const&) = default;
};

/// One adapter, checked against one `ModelShape`. Pairs are in site order (`ModelShape::sites()`).
struct Adapter {
  std::vector<AdapterPair> pairs;
  /// Tensors of parts that are recognised and that `AdapterPool` does not serve: experts, router and token
  /// rows. A pool refuses an adapter that has any, by name, unless told to leave them out.
  std::vector<HostTensor> experts;
  std::vector<HostTensor> router;
  std::vector<HostTensor> overlay;
  std::int32_t max_rank = 0;          ///< largest rank among `pairs`; 0 when there are none
  std::int64_t modules_present = 0;   ///< sites the files name, linears only
  std::int64_t modules_applied = 0;   ///< of those, how many are in `pairs`
  std::vector<std::string> warnings;  ///< odd and harmless: alpha 0, a config that disagrees with the file
  Digest digest;
  /// `ModelShape::fingerprint` of the model that it was audited against: a pool of another one refuses it. 0
  /// when it was not audited; then its widths alone are compared.
  std::uint64_t model = 0;
};

}  // namespace atlas::lora::inline v0
