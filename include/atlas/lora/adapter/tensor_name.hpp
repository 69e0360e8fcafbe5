// SPDX-License-Identifier: AGPL-3.0-only
//
// The names of an adapter's tensors: what each one is, and which place of the model it belongs to.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/module_names.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"

namespace atlas::lora::inline v0 {

/// What a tensor of an adapter is.
enum class TensorKind : std::uint8_t {
  a,             ///< `lora_A`
  b,             ///< `lora_B`
  bias,          ///< the bias of `lora_B`
  embedding_a,   ///< `lora_embedding_A`
  embedding_b,   ///< `lora_embedding_B`
  magnitude,     ///< DoRA's `lora_magnitude_vector`
  token_rows,    ///< `trainable_tokens_delta`: rows that replace the base's, whatever the name says
  token_base,    ///< the table that such rows came from
  saved_module,  ///< a whole embedding or head by `modules_to_save`
  base_copy,     ///< a copy of the base's embedding or head
  unknown,
};

/// What part of a model a tensor belongs to.
enum class ModelPart : std::uint8_t { none, linear, expert, fused_experts, router, embedding, head };

/// A tensor's key, understood.
struct TensorName {
  TensorKind kind = TensorKind::unknown;  ///< what the tensor is to its module
  ModelPart part = ModelPart::none;       ///< what the module is to the model
  std::string path{};  ///< the module's path in the base model as the file has it: what PEFT's patterns match
  std::string wrapper{};  ///< what stands before the layer number; before the name of a model-wide linear
  std::int32_t layer = model_wide;                  ///< global layer index, or `model_wide`
  std::size_t site = 0;                             ///< of a linear: index into `ModelShape::sites()`
  std::int32_t expert = -1;                         ///< of an expert: its index; else -1
  ExpertLinear expert_linear = ExpertLinear::gate;  ///< of an expert: which of its linears
  /// Why the tensor belongs to no place of the model; empty when it belongs to one. A tensor of unknown kind
  /// always has a reason.
  std::string reason{};
};

namespace detail {

/// Bytes of a key. Resolving one takes time by the square of its length, and no module lies this deep.
inline constexpr std::size_t longest_key = 1024;

/// Segments `[first, last)` with their dots.
[[nodiscard]] inline std::string join(std::span<std::string_view const> segments) {
  std::string out;
  for (std::string_view const segment : segments) {
    if (!out.empty()) out += '.';
    out += segment;
  }
  return out;
}

/// A key cut where PEFT's own words begin: the module's path, and what the tensor is of that module.
struct KeyParts {
  std::string path;
  TensorKind kind = TensorKind::unknown;
};

/// Reads `[marker, adapter name perhaps, last]`.
[[nodiscard]] inline bool is_tail(std::span<std::string_view const> tail, std::string_view last) noexcept {
  return (tail.size() == 2 || tail.size() == 3) && tail.back() == last;
}

[[nodiscard]] inline TensorKind kind_of_tail(std::span<std::string_view const> tail) noexcept {
  std::string_view const marker = tail.front();
  if (marker == "lora_A") return is_tail(tail, "weight") ? TensorKind::a : TensorKind::unknown;
  if (marker == "lora_B" && is_tail(tail, "weight")) return TensorKind::b;
  if (marker == "lora_B") return is_tail(tail, "bias") ? TensorKind::bias : TensorKind::unknown;
  if (marker == "lora_magnitude_vector") return TensorKind::magnitude;
  if (marker == "lora_embedding_A") return tail.size() <= 2 ? TensorKind::embedding_a : TensorKind::unknown;
  if (marker == "lora_embedding_B") return tail.size() <= 2 ? TensorKind::embedding_b : TensorKind::unknown;
  if (tail.size() >= 2 && tail.size() <= 3 && tail[1] == "trainable_tokens_delta")
    return TensorKind::token_rows;
  bool const base = tail.size() == 3 && tail[1] == "base_layer" && tail[2] == "weight";
  return base ? TensorKind::token_base : TensorKind::unknown;
}

[[nodiscard]] inline KeyParts cut_key(std::string_view below_model) {
  auto const segments = segments_of(below_model);
  std::span<std::string_view const> const all(segments);
  constexpr std::array<std::string_view, 6> markers = {
      "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "token_adapter"};
  for (std::size_t i = segments.size(); i-- > 1;) {
    if (std::find(markers.begin(), markers.end(), segments[i]) == markers.end()) continue;
    return {join(all.first(i)), kind_of_tail(all.subspan(i))};
  }
  std::size_t const count = segments.size();
  if (count >= 3 && segments[count - 1] == "weight" && segments[count - 2] == "base_layer") {
    return {join(all.first(count - 2)), TensorKind::base_copy};
  }
  if (count >= 2 && segments[count - 1] == "weight")
    return {join(all.first(count - 1)), TensorKind::saved_module};
  return {std::string(below_model), TensorKind::unknown};
}

/// The path after the first rename that fits.
[[nodiscard]] inline std::string renamed(std::string const& path, std::vector<PrefixRename> const& renames) {
  for (PrefixRename const& rename : renames) {
    if (rename.from.empty()) return rename.to.empty() ? path : rename.to + "." + path;
    if (!begins_with_name(path, rename.from)) continue;
    std::string_view rest = std::string_view(path).substr(rename.from.size());
    if (rename.to.empty() && !rest.empty()) rest.remove_prefix(1);
    return rename.to + std::string(rest);
  }
  return path;
}

/// Whether a configuration's name of a module ends in `word`, as the file or the model spells it.
[[nodiscard]] inline bool names_word(std::string const& name, std::string_view word,
                                     std::vector<PrefixRename> const& renames) {
  return ends_in_name(name, word) || ends_in_name(renamed(name, renames), word);
}

/// Finds the place of a module's path in a model.
class PathResolver {
 public:
  PathResolver(ModelShape const& shape, std::string const& model_prefix)
      : shape_(shape), prefix_(model_prefix) {}

  /// Fills part, layer, site and so on of `name`, or its reason, from a path that has been renamed.
  void resolve(std::string_view path, TensorName& name) const {
    auto const segments = segments_of(path);
    std::span<std::string_view const> const all(segments);
    for (std::size_t i = 0; i + 1 < segments.size(); ++i) {
      if (auto const layer = index_of(segments[i])) {
        if (in_layer(*layer, join(all.first(i)), join(all.subspan(i + 1)), name)) return;
      }
    }
    if (model_wide_linear(path, name)) return;
    if (ends_in_name(path, "embed_tokens") || ends_in_name(path, "lm_head")) {
      name.part = ends_in_name(path, "lm_head") ? ModelPart::head : ModelPart::embedding;
      if (!names_layer(path)) return;
    }
    if (name.reason.empty()) name.reason = "names no linear of the model";
  }

 private:
  [[nodiscard]] static bool names_layer(std::string_view path) {
    auto const segments = segments_of(path);
    return std::any_of(segments.begin(), segments.end(),
                       [](std::string_view segment) { return index_of(segment).has_value(); });
  }

  // Whether `below` is something that layers have; if so, `name` is filled in or says why it does not fit.
  bool in_layer(std::int32_t layer, std::string wrapper, std::string const& below, TensorName& name) const {
    bool const linear =
        std::any_of(shape_.modules().begin(), shape_.modules().end(),
                    [&below](Module const& m) { return m.name == below && m.layers.front() != model_wide; });
    if (linear) {
      name.part = ModelPart::linear;
      if (auto const site = shape_.find(layer, below)) {
        name.site = *site;
      } else {
        name.reason = "layer " + std::to_string(layer) + " of the model has no " + below;
      }
    } else if (!expert_or_router(layer, below, name)) {
      return false;
    }
    if (name.reason.empty()) check_wrapper(wrapper, name);
    name.layer = layer;
    name.wrapper = std::move(wrapper);
    return true;
  }

  bool expert_or_router(std::int32_t layer, std::string_view below, TensorName& name) const {
    bool known = false;
    for (std::string_view const block : {"mlp.", "block_sparse_moe."}) {
      if (!known && below.starts_with(block)) known = part_of_block(below.substr(block.size()), name);
    }
    if (!known) return false;
    MoeShape const& moe = shape_.moe();
    bool const moe_layer = std::binary_search(moe.layers.begin(), moe.layers.end(), layer);
    if (!moe_layer) {
      name.reason = "layer " + std::to_string(layer) + " of the model has no experts";
    } else if (name.expert >= moe.num_experts) {
      name.reason = "the model has no expert " + std::to_string(name.expert);
    }
    return true;
  }

  // `gate`, `experts`, `experts.base_layer`, `experts.N.LINEAR`.
  static bool part_of_block(std::string_view below, TensorName& name) {
    if (below == "gate") {
      name.part = ModelPart::router;
      return true;
    }
    if (below == "experts" || below == "experts.base_layer") {
      name.part = ModelPart::fused_experts;
      return true;
    }
    auto const segments = segments_of(below);
    if (segments.size() != 3 || segments[0] != "experts" || !index_of(segments[1])) return false;
    constexpr std::pair<std::string_view, ExpertLinear> linears[] = {
        {"gate_proj", ExpertLinear::gate}, {"up_proj", ExpertLinear::up}, {"down_proj", ExpertLinear::down},
        {"w1", ExpertLinear::gate},        {"w3", ExpertLinear::up},      {"w2", ExpertLinear::down}};
    for (auto const& [text, linear] : linears) {
      if (segments[2] != text) continue;
      name.part = ModelPart::expert;
      name.expert = *index_of(segments[1]);
      name.expert_linear = linear;
      return true;
    }
    return false;
  }

  bool model_wide_linear(std::string_view path, TensorName& name) const {
    Module const* longest = nullptr;  // of `draft.lm_head` and `lm_head`, what the path says more of
    for (Module const& module : shape_.modules()) {
      if (module.layers.front() != model_wide || !ends_in_name(path, module.name)) continue;
      if (longest == nullptr || module.name.size() > longest->name.size()) longest = &module;
    }
    if (longest == nullptr) return false;
    bool const bare = path.size() == longest->name.size();
    std::string_view const wrapper = path.substr(0, bare ? 0 : path.size() - longest->name.size() - 1);
    if (names_layer(wrapper)) return false;  // a layer's own linear of that name, not the model's
    name.part = ModelPart::linear;
    name.site = *shape_.find(model_wide, longest->name);
    name.wrapper = wrapper;
    // A head stands beside the part that holds the layers, or in it.
    if (!prefix_.empty() && !bare && !begins_with_name(prefix_, wrapper)) name.reason = elsewhere(wrapper);
    return true;
  }

  void check_wrapper(std::string_view wrapper, TensorName& name) const {
    if (prefix_.empty()) return;
    bool const inside = begins_with_name(wrapper, prefix_) && wrapper.size() > prefix_.size() &&
                        wrapper.find('.', prefix_.size() + 1) == std::string_view::npos;
    if (!inside) name.reason = elsewhere(wrapper);
  }

  [[nodiscard]] std::string elsewhere(std::string_view wrapper) const {
    return "lies under '" + printable(wrapper) + "', the model's layers under '" + prefix_ +
           "' (a prefix_map can rename it)";
  }

  ModelShape const& shape_;
  std::string const& prefix_;
};

}  // namespace detail

/// Understands one key. Keys are PEFT's: `base_model.model.`, the module's path, and `lora_A.weight` or
/// another of `TensorKind`, with the adapter's name in between in older files. The path is matched with the
/// names of `shape`: anything, a layer number, and a linear's name below a layer; or the name of a model-wide
/// linear.
[[nodiscard]] inline TensorName understand_tensor(std::string_view key, ModelShape const& shape,
                                                  LoadOptions const& options = {}) {
  constexpr std::string_view peft_prefix = "base_model.model.";
  TensorName name;
  if (key.size() > detail::longest_key) {
    name.reason = "name too long, at most " + std::to_string(detail::longest_key) + " bytes expected";
    return name;
  }
  if (!key.starts_with(peft_prefix)) {
    name.reason = "does not begin with base_model.model.";
    return name;
  }
  auto [path, kind] = detail::cut_key(key.substr(peft_prefix.size()));
  name.path = std::move(path);
  name.kind = kind;
  if (kind == TensorKind::unknown) {
    name.reason = "is nothing that a LoRA adapter has";
    return name;
  }
  std::string const path_in_model = detail::renamed(name.path, options.prefix_map);
  detail::PathResolver(shape, options.model_prefix).resolve(path_in_model, name);
  bool const table = kind == TensorKind::saved_module || kind == TensorKind::base_copy ||
                     kind == TensorKind::token_rows || kind == TensorKind::token_base;
  bool const embedding = detail::ends_in_name(path_in_model, "embed_tokens");
  bool const head = detail::ends_in_name(path_in_model, "lm_head");
  if (table && (embedding || head)) {
    name.part = embedding ? ModelPart::embedding : ModelPart::head;
    name.reason.clear();
  } else if (table) {
    name.kind = TensorKind::unknown;
    name.reason = "is a weight of the base model, which an adapter may not change";
  } else if (name.reason.empty() && name.part == ModelPart::embedding && kind != TensorKind::embedding_a &&
             kind != TensorKind::embedding_b) {
    name.reason = "names no linear of the model";
  } else if (name.reason.empty() && name.part == ModelPart::head) {
    name.reason = "the model's list has no lm_head";
  }
  return name;
}

}  // namespace atlas::lora::inline v0
