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

/// The pair of one linear of one expert. Fused parameters come apart into these, gate before up.
struct ExpertPair {
  std::int32_t layer = 0;  ///< global layer index
  std::int32_t expert = 0;
  ExpertLinear linear = ExpertLinear::gate;
  std::int32_t rank = 0;           ///< true rank of this expert's pair, at least 1
  float scale = 0.0F;              ///< as `AdapterPair::scale`
  HostTensor a;                    ///< `[rank, k_in]`; its name is the file's, which several pairs may share
  HostTensor b;                    ///< `[n_out, rank]`
  std::optional<HostTensor> bias;  ///< `[n_out]`
  /// Of an up: `a` is that of the gate before it, as a fused parameter has one A for both. A pool keeps it
  /// once.
  bool shares_a = false;
};

/// The pair of one layer's router, whose outputs are the experts' logits.
struct RouterPair {
  std::int32_t layer = 0;          ///< global layer index
  std::int32_t rank = 0;           ///< true rank, at least 1
  float scale = 0.0F;              ///< as `AdapterPair::scale`
  HostTensor a;                    ///< `[rank, hidden]`
  HostTensor b;                    ///< `[num_experts, rank]`
  std::optional<HostTensor> bias;  ///< `[num_experts]`
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
  std::vector<RouterPair> routers;  ///< ascending by layer
  std::vector<ExpertPair> experts;  ///< ascending by layer, expert and linear
  /// Tensors of token rows, which are recognised and which `AdapterPool` does not serve. A pool refuses an
  /// adapter that has any, by name, unless told to leave them out.
  std::vector<HostTensor> overlay;
  std::int32_t max_rank = 0;  ///< largest rank among all pairs; 0 when there are none
  /// Linears, routers, experts' linears and fused parameters that the files name, each once.
  std::int64_t modules_present = 0;
  std::int64_t modules_applied = 0;   ///< of those, how many are in the adapter
  std::vector<std::string> warnings;  ///< odd and harmless: alpha 0, a config that disagrees with the file
  Digest digest;
  /// `ModelShape::fingerprint` of the model that it was audited against: a pool of another one refuses it. 0
  /// when it was not audited; then its widths alone are compared.
  std::uint64_t model = 0;
};

}  // namespace atlas::lora::inline v0
