// SPDX-License-Identifier: AGPL-3.0-only
//
// The linears of the model families that are known by name. This is the only place that knows a family; all
// else reads the `ModelShape` that comes out, which an engine may as well describe by itself.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What mixes the tokens of a layer. Any softmax attention with q, k, v and o is `full_attention`, a sliding
/// window too.
enum class LayerType : std::uint8_t { full_attention, linear_attention };

/// What a model's `config.json` says about its linears. Sizes are in elements; 0 means absent.
struct ModelConfig {
  std::string model_type;         ///< the family: `"llama"`, `"qwen3_moe"`, ...
  std::int32_t layers = 0;        ///< decoder layers
  std::int64_t hidden = 0;        ///< of the state between layers
  std::int64_t heads = 0;         ///< query heads
  std::int64_t kv_heads = 0;      ///< absent: `heads`
  std::int64_t head_dim = 0;      ///< absent: `hidden / heads`, in families where that is the rule
  std::int64_t intermediate = 0;  ///< of dense feed-forward layers; in Mixtral, of its experts
  std::int64_t vocab = 0;         ///< tokens
  bool tied_head = false;         ///< whether `lm_head` is the embedding

  std::int32_t num_experts = 0;       ///< 0: a dense model
  std::int64_t moe_intermediate = 0;  ///< of each expert, but in Mixtral
  /// Per-layer override of `moe_intermediate`, by global layer; 0, or a layer past its end, means no
  /// override.
  std::vector<std::int64_t> layer_moe_intermediate{};
  std::int32_t decoder_sparse_step = 1;         ///< layer i has experts only if this divides i + 1
  std::vector<std::int32_t> mlp_only_layers{};  ///< layers that are dense all the same
  std::int64_t shared_expert_intermediate = 0;  ///< absent: no shared expert

  /// Hybrid families: the type of each layer, layers past its end being full attention. Empty: layer i is
  /// full attention only if `full_attention_interval` divides i + 1.
  std::vector<LayerType> layer_types{};
  std::int32_t full_attention_interval = 0;  ///< read where `layer_types` is empty
  std::int64_t linear_value_heads = 0;       ///< value heads of linear attention
  std::int64_t linear_value_head_dim = 0;    ///< elements of each
};

/// Which linears beyond attention, feed-forward and linear-attention output a model's list has. An engine
/// that applies no delta to one of these leaves it out, and adapters that need it are refused.
struct ModuleChoice {
  bool lm_head = true;        ///< the head
  bool shared_expert = true;  ///< gate, up and down of shared experts
};

namespace detail {

enum class Family : std::uint8_t { unknown, dense, fused, moe, mixtral, hybrid };

struct FamilyTraits {
  Family family = Family::unknown;
  bool head_dim_needed = false;  // its default is a number of the family's own, not hidden / heads
};

/// What is known about a model type by its name.
[[nodiscard]] constexpr FamilyTraits family_of(std::string_view type) noexcept {
  if (type == "llama" || type == "mistral" || type == "qwen2") return {Family::dense, false};
  if (type == "qwen3") return {Family::dense, true};
  if (type == "phi3") return {Family::fused, false};
  if (type == "qwen2_moe" || type == "qwen3_moe") return {Family::moe, false};
  if (type == "mixtral") return {Family::mixtral, false};
  for (std::string_view const hybrid : {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
                                        "qwen3_5_moe_text", "qwen3_6_moe", "holo3_1_moe"}) {
    if (type == hybrid) return {Family::hybrid, true};
  }
  return {};
}

/// Whether layer `layer` of a hybrid mixes tokens with softmax attention.
[[nodiscard]] inline bool is_full_attention(ModelConfig const& c, std::int32_t layer) noexcept {
  if (!c.layer_types.empty()) {
    auto const i = static_cast<std::size_t>(layer);
    return i >= c.layer_types.size() || c.layer_types[i] == LayerType::full_attention;
  }
  return c.full_attention_interval > 0 && (layer + 1) % c.full_attention_interval == 0;
}

/// Whether the feed-forward part of layer `layer` is a mixture of experts.
[[nodiscard]] inline bool is_moe_layer(ModelConfig const& c, std::int32_t layer) noexcept {
  return c.num_experts > 0 && (layer + 1) % c.decoder_sparse_step == 0 &&
         std::find(c.mlp_only_layers.begin(), c.mlp_only_layers.end(), layer) == c.mlp_only_layers.end();
}

/// Fills in what is absent and has a rule; the words of what is wrong, or nothing.
[[nodiscard]] inline std::string complete(ModelConfig& c, FamilyTraits traits) {
  if (traits.family == Family::unknown) {
    return "model_type '" + printable(c.model_type) +
           "' is not a known family; an engine may describe a model of its own "
           "with ModelDescription";
  }
  auto const outside = [](std::int64_t value, std::int64_t most) { return value < 1 || value > most; };
  constexpr std::int64_t widest = std::numeric_limits<std::int32_t>::max();
  auto const bad = [](char const* field, std::int64_t value) {
    return std::string("model config: ") + field + " is " + std::to_string(value);
  };
  if (outside(c.layers, most_layers)) return bad("num_hidden_layers", c.layers) + ", must be in [1, 65536]";
  if (outside(c.hidden, widest)) return bad("hidden_size", c.hidden);
  if (outside(c.heads, widest)) return bad("num_attention_heads", c.heads);
  if (c.kv_heads == 0) c.kv_heads = c.heads;
  if (outside(c.kv_heads, widest)) return bad("num_key_value_heads", c.kv_heads);
  if (c.head_dim == 0 && !traits.head_dim_needed && c.hidden % c.heads == 0) c.head_dim = c.hidden / c.heads;
  if (outside(c.head_dim, widest)) return bad("head_dim", c.head_dim);
  for (auto const& [field, heads] :
       {std::pair("num_attention_heads", c.heads), std::pair("num_key_value_heads", c.kv_heads)}) {
    if (heads > widest / c.head_dim)
      return bad(field, heads) + " of head_dim " + std::to_string(c.head_dim) + ", too wide together";
  }
  if (outside(c.vocab, widest)) return bad("vocab_size", c.vocab);
  if (c.num_experts < 0 || c.num_experts > most_experts) return bad("num_experts", c.num_experts);
  if (c.num_experts > 0 && (traits.family == Family::dense || traits.family == Family::fused)) {
    return bad("num_experts", c.num_experts) + ", but model_type '" + printable(c.model_type) +
           "' has no experts";
  }
  if (c.decoder_sparse_step < 1) return bad("decoder_sparse_step", c.decoder_sparse_step);
  if (traits.family == Family::mixtral && c.moe_intermediate == 0) c.moe_intermediate = c.intermediate;
  return {};
}

/// The words of a width that some layer needs and that is absent or too large, or nothing.
[[nodiscard]] inline std::string check_width(char const* field, std::int64_t value, bool needed) {
  constexpr std::int64_t widest = std::numeric_limits<std::int32_t>::max();
  if (!needed || (value >= 1 && value <= widest)) return {};
  return std::string("model config: ") + field + " is " + std::to_string(value) + " and a layer needs it";
}

/// The layers of each kind.
struct LayerKinds {
  std::vector<std::int32_t> full, linear, dense, moe;
};

[[nodiscard]] inline LayerKinds sort_layers(ModelConfig const& c, Family family) {
  LayerKinds kinds;
  for (std::int32_t layer = 0; layer < c.layers; ++layer) {
    bool const full = family != Family::hybrid || is_full_attention(c, layer);
    (full ? kinds.full : kinds.linear).push_back(layer);
    (is_moe_layer(c, layer) ? kinds.moe : kinds.dense).push_back(layer);
  }
  return kinds;
}

/// The experts; the widths of layers are listed only when they differ.
[[nodiscard]] inline MoeShape moe_of(ModelConfig const& c, std::vector<std::int32_t> const& layers) {
  MoeShape moe;
  if (layers.empty()) return moe;
  moe.num_experts = c.num_experts;
  moe.layers = layers;
  moe.hidden = c.hidden;
  moe.intermediate = c.moe_intermediate;
  bool differ = false;
  for (std::int32_t const layer : layers) {
    auto const i = static_cast<std::size_t>(layer);
    std::int64_t const own = i < c.layer_moe_intermediate.size() ? c.layer_moe_intermediate[i] : 0;
    moe.layer_intermediate.push_back(own != 0 ? own : c.moe_intermediate);
    differ = differ || moe.layer_intermediate.back() != c.moe_intermediate;
  }
  if (!differ) moe.layer_intermediate.clear();
  return moe;
}

}  // namespace detail

/// The linears of a known family's model, ready for changes by the caller. Within a layer their order is q,
/// k, v, o, gate, up, down, out (the order of a packed slot), then the shared expert's; `lm_head` is last.
/// The query projection of hybrid families is gated and twice as wide: query and gate interleaved, as the raw
/// product has them. Errors: `unsupported` for an unknown `model_type`, else `bad_config` naming the field.
[[nodiscard]] inline Result<ModelDescription> describe_model(ModelConfig config, ModuleChoice choice = {}) {
  detail::FamilyTraits const traits = detail::family_of(config.model_type);
  if (auto const fault = detail::complete(config, traits); !fault.empty()) {
    return fail(traits.family == detail::Family::unknown ? Errc::unsupported : Errc::bad_config, fault);
  }
  ModelConfig const& c = config;
  detail::LayerKinds const kinds = detail::sort_layers(c, traits.family);
  bool const dense = !kinds.dense.empty();
  bool const linear = !kinds.linear.empty();
  bool const shared = choice.shared_expert && !kinds.moe.empty() && c.shared_expert_intermediate != 0;
  for (auto const& fault :
       {detail::check_width("intermediate_size", c.intermediate, dense),
        detail::check_width("moe_intermediate_size", c.moe_intermediate, !kinds.moe.empty()),
        detail::check_width("linear_num_value_heads", c.linear_value_heads, linear),
        detail::check_width("linear_value_head_dim", c.linear_value_head_dim, linear),
        detail::check_width("shared_expert_intermediate_size", c.shared_expert_intermediate, shared)}) {
    if (!fault.empty()) return fail(Errc::bad_config, fault);
  }

  ModelDescription d{.num_layers = c.layers, .hidden = c.hidden, .vocab = c.vocab, .tied_head = c.tied_head};
  auto const add = [&d](std::string name, std::int64_t n_out, std::int64_t k_in,
                        std::vector<std::int32_t> const& layers, std::vector<std::int64_t> parts = {}) {
    bool const ffn = name.starts_with("mlp.") || name == "linear_attn.out_proj";
    if (!layers.empty()) d.modules.push_back({std::move(name), n_out, k_in, layers, std::move(parts), ffn});
  };
  std::int64_t const q = (traits.family == detail::Family::hybrid ? 2 : 1) * c.heads * c.head_dim;
  std::int64_t const kv = c.kv_heads * c.head_dim;
  if (traits.family == detail::Family::fused) {
    add("self_attn.qkv_proj", q + 2 * kv, c.hidden, kinds.full, {q, kv, kv});
    add("self_attn.o_proj", c.hidden, c.heads * c.head_dim, kinds.full);
    add("mlp.gate_up_proj", 2 * c.intermediate, c.hidden, kinds.dense, {c.intermediate, c.intermediate});
    add("mlp.down_proj", c.hidden, c.intermediate, kinds.dense);
  } else {
    add("self_attn.q_proj", q, c.hidden, kinds.full);
    add("self_attn.k_proj", kv, c.hidden, kinds.full);
    add("self_attn.v_proj", kv, c.hidden, kinds.full);
    add("self_attn.o_proj", c.hidden, c.heads * c.head_dim, kinds.full);
    add("mlp.gate_proj", c.intermediate, c.hidden, kinds.dense);
    add("mlp.up_proj", c.intermediate, c.hidden, kinds.dense);
    add("mlp.down_proj", c.hidden, c.intermediate, kinds.dense);
    if (linear)
      add("linear_attn.out_proj", c.hidden, c.linear_value_heads * c.linear_value_head_dim, kinds.linear);
  }
  if (shared) {
    add("mlp.shared_expert.gate_proj", c.shared_expert_intermediate, c.hidden, kinds.moe);
    add("mlp.shared_expert.up_proj", c.shared_expert_intermediate, c.hidden, kinds.moe);
    add("mlp.shared_expert.down_proj", c.hidden, c.shared_expert_intermediate, kinds.moe);
    add("mlp.shared_expert_gate", 1, c.hidden, kinds.moe);
  }
  if (choice.lm_head) add("lm_head", c.vocab, c.hidden, {model_wide});
  d.moe = detail::moe_of(c, kinds.moe);
  return d;
}

/// The checked shape of a known family's model: `describe_model`, then `ModelShape::create`.
/// Errors: theirs.
[[nodiscard]] inline Result<ModelShape> model_shape(ModelConfig const& config, ModuleChoice choice = {}) {
  auto description = describe_model(config, choice);
  if (!description) return cuda::std::unexpected<Error>(std::move(description).error());
  return ModelShape::create(std::move(*description));
}

}  // namespace atlas::lora::inline v0
