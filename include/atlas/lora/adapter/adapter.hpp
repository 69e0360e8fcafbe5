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
  std::string name;                     ///< as the file spells it, for messages
  ElementType type = ElementType::f32;  ///< of `bytes`
  std::vector<std::int64_t> shape;      ///< extents, the slowest first
  std::vector<std::byte> bytes;         ///< product of `shape` elements, little-endian

  friend bool operator==(HostTensor const&, HostTensor const&) = default;
};

/// The pair of one site: `delta = scale * ((x @ a^T) @ b^T + bias)`.
struct AdapterPair {
  Site site;                       ///< the linear and layer that it adapts
  std::int32_t rank = 0;           ///< true rank, at least 1
  float scale = 0.0F;              ///< alpha / rank, or alpha / sqrt(rank) with rsLoRA; computed in f64
  HostTensor a;                    ///< `[rank, k_in]`
  HostTensor b;                    ///< `[n_out, rank]`
  std::optional<HostTensor> bias;  ///< `[n_out]`, what PEFT's `lora_bias` trains
};

/// The pair of one linear of one expert. Fused parameters come apart into these, gate before up.
struct ExpertPair {
  std::int32_t layer = 0;                    ///< global layer index
  std::int32_t expert = 0;                   ///< in `[0, num_experts)`
  ExpertLinear linear = ExpertLinear::gate;  ///< which of the expert's linears
  std::int32_t rank = 0;                     ///< true rank of this expert's pair, at least 1
  float scale = 0.0F;                        ///< as `AdapterPair::scale`
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

/// What a file says about the rows of one of a model's tables, the embedding or the head. A row replaces the
/// table's; nothing is added to it.
struct RawTokenTable {
  std::optional<HostTensor> table;   ///< a whole table, `[vocab, hidden]`
  std::optional<HostTensor> rows;    ///< `[ids, hidden]`: row i replaces the table's row `ids[i]`
  std::vector<std::int64_t> ids;     ///< in the order of `rows`; in `[0, vocab)`, none twice
  std::optional<HostTensor> lora_a;  ///< LoRA on the embedding: `[rank, vocab]`, or wider, the rest unused
  std::optional<HostTensor> lora_b;  ///< `[hidden, rank]`
  float lora_scale = 0.0F;           ///< as `AdapterPair::scale`

  /// Whether the file says nothing about the table.
  [[nodiscard]] bool empty() const noexcept { return !table && !rows && !lora_a; }
  /// Calls `visit(tensor)` for every tensor.
  template <class Visit>
  void for_each(Visit const& visit) const {
    for (auto const* const tensor : {&table, &rows, &lora_a, &lora_b}) {
      if (*tensor) visit(**tensor);
    }
  }
};

/// Token rows as the file has them, which `build_overlay` turns into a `TokenOverlay`.
struct RawOverlay {
  RawTokenTable embedding;         ///< of the table that token ids are looked up in
  RawTokenTable head;              ///< of the table whose product with the last hidden state is the logits
  std::int64_t rows_left_out = 0;  ///< rows beyond the vocabulary, which `clip_vocabulary` dropped

  /// Whether the file says nothing about either table.
  [[nodiscard]] bool empty() const noexcept { return embedding.empty() && head.empty(); }
  /// Calls `visit(tensor)` for every tensor of both.
  template <class Visit>
  void for_each(Visit const& visit) const {
    embedding.for_each(visit);
    head.for_each(visit);
  }
};

/// Rows of a table that an adapter has of its own.
struct OverrideRows {
  std::vector<std::int32_t> ids;  ///< ascending, none twice
  HostTensor rows;                ///< `[ids, hidden]`: what stands for row `ids[i]`

  /// Whether the adapter has no rows of its own.
  [[nodiscard]] bool empty() const noexcept { return ids.empty(); }
};

/// An adapter's own rows of the embedding and the head of a model of `vocab` tokens.
struct TokenOverlay {
  OverrideRows embedding;  ///< of the embedding; `rows` is `[ids, hidden]`
  OverrideRows head;       ///< of the head, likewise
  bool head_is_embedding =
      false;                ///< the head is the embedding: it takes the embedding's rows, `head` is empty
  std::int64_t vocab = 0;   ///< tokens of the model; every id is below
  std::int64_t hidden = 0;  ///< elements of a row

  /// Whether the adapter has no rows of its own in either table.
  [[nodiscard]] bool empty() const noexcept { return embedding.empty() && head.empty(); }
};

/// A content digest: XXH3-128 over what the adapter does (names, shapes, bytes, scales, load options).
struct Digest {
  std::uint64_t low = 0;   ///< the lower 64 bits
  std::uint64_t high = 0;  ///< the upper 64 bits

  friend constexpr bool operator==(Digest const&, Digest const&) = default;
};

/// One adapter, checked against one `ModelShape`. Pairs are in site order (`ModelShape::sites()`).
struct Adapter {
  std::vector<AdapterPair> pairs;   ///< none of a site twice
  std::vector<RouterPair> routers;  ///< ascending by layer
  std::vector<ExpertPair> experts;  ///< ascending by layer, expert and linear
  RawOverlay raw_overlay;     ///< token rows that are not built yet, which a pool refuses by name unless
                              ///< told to leave them out
  TokenOverlay overlay;       ///< token rows that `build_overlay` has built
  std::int32_t max_rank = 0;  ///< largest rank among all pairs; 0 when there are none
  /// Linears, routers, experts' linears and fused parameters that the files name, each once.
  std::int64_t modules_present = 0;
  std::int64_t modules_applied = 0;   ///< of those, how many are in the adapter
  std::vector<std::string> warnings;  ///< odd and harmless: alpha 0, a config that disagrees with the file
  Digest digest;                      ///< of the content; a pool tells contents under one name apart by it
  /// `ModelShape::fingerprint` of the model that it was audited against: a pool of another one refuses it. 0
  /// when it was not audited; then its widths alone are compared.
  std::uint64_t model = 0;
};

}  // namespace atlas::lora::inline v0
