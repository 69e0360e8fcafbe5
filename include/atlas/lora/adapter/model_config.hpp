// SPDX-License-Identifier: AGPL-3.0-only
//
// A model's config.json, as transformers writes it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/file.hpp"
#include "atlas/lora/adapter/json.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/families.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Reads the fields that say which linears a model has; the rest of the file is of no interest.
class ModelConfigReader {
 public:
  ModelConfigReader(JsonValue const& json, std::string const& file) : outer_(json), file_(file) {
    // Models of several modalities keep the language model's fields in an object of their own.
    JsonValue const* const text = json.find("text_config");
    inner_ = text != nullptr && text->object() != nullptr ? text : &json;
  }

  [[nodiscard]] Result<ModelConfig> run() {
    ModelConfig c;
    if (outer_.object() == nullptr) return fail(Errc::bad_config, file_ + ": an object expected");
    JsonValue const* const type = find({"model_type"});
    if (type != nullptr && type->string() != nullptr) {
      c.model_type = *type->string();
    } else {
      faults_.add(Errc::bad_config,
                  file_ + ": field 'model_type': " + (type == nullptr ? "absent" : "not a name"));
    }
    c.layers = integer32({"num_hidden_layers"});
    c.hidden = integer({"hidden_size"});
    c.heads = integer({"num_attention_heads"});
    c.kv_heads = integer({"num_key_value_heads"});
    c.head_dim = integer({"head_dim"});
    c.intermediate = integer({"intermediate_size"});
    c.vocab = integer({"vocab_size"});
    c.tied_head = flag("tie_word_embeddings");
    c.num_experts = integer32({"num_experts", "num_local_experts"});
    moe_widths(c);
    c.decoder_sparse_step = integer32({"decoder_sparse_step"}, 1);
    for (std::int64_t const layer : integers("mlp_only_layers")) {
      c.mlp_only_layers.push_back(static_cast<std::int32_t>(layer));
    }
    c.shared_expert_intermediate = integer({"shared_expert_intermediate_size"});
    layer_types(c);
    // Where neither field is written, hybrid families put full attention into every fourth layer.
    c.full_attention_interval = integer32({"full_attention_interval"}, 4);
    c.linear_value_heads = integer({"linear_num_value_heads"});
    c.linear_value_head_dim = integer({"linear_value_head_dim"});
    if (!faults_.empty()) return faults_.failure();
    return c;
  }

 private:
  // The first of several spellings that is there and not null.
  [[nodiscard]] JsonValue const* find(std::initializer_list<char const*> names) const {
    for (JsonValue const* const object : {inner_, &outer_}) {
      for (char const* const name : names) {
        JsonValue const* const value = object->find(name);
        if (value != nullptr && !value->is_null()) return value;
      }
    }
    return nullptr;
  }

  void refuse(char const* field, JsonValue const& value, char const* what) {
    faults_.add(Errc::bad_config, file_ + ": field '" + field + "': " + describe(value) + what);
  }

  std::int64_t integer(std::initializer_list<char const*> names, std::int64_t otherwise = 0) {
    JsonValue const* const value = find(names);
    if (value == nullptr) return otherwise;
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    std::int64_t const* const number = value->integer();
    if (number != nullptr && *number >= 0 && *number <= most) return *number;
    refuse(*names.begin(), *value, " is not an integer in [0, 2^31)");
    return otherwise;
  }
  std::int32_t integer32(std::initializer_list<char const*> names, std::int32_t otherwise = 0) {
    return static_cast<std::int32_t>(integer(names, otherwise));
  }

  bool flag(char const* field) {
    JsonValue const* const value = find({field});
    if (value == nullptr) return false;
    if (value->boolean() != nullptr) return *value->boolean();
    refuse(field, *value, " is neither true nor false");
    return false;
  }

  std::vector<std::int64_t> integers(char const* field) {
    std::vector<std::int64_t> out;
    JsonValue const* const value = find({field});
    if (value == nullptr) return out;
    if (value->array() == nullptr) {
      refuse(field, *value, " is not a list");
      return out;
    }
    for (JsonValue const& item : *value->array()) {
      std::int64_t const* const number = item.integer();
      if (number != nullptr && *number >= 0 && *number <= std::numeric_limits<std::int32_t>::max()) {
        out.push_back(*number);
      } else {
        refuse(field, item, " is not an integer in [0, 2^31)");
      }
    }
    return out;
  }

  // One width, or a list with one a layer.
  void moe_widths(ModelConfig& c) {
    JsonValue const* const value = find({"moe_intermediate_size"});
    if (value == nullptr || value->array() == nullptr) {
      c.moe_intermediate = integer({"moe_intermediate_size"});
      return;
    }
    c.layer_moe_intermediate = integers("moe_intermediate_size");
    for (std::int64_t const width : c.layer_moe_intermediate) {
      if (c.moe_intermediate == 0) c.moe_intermediate = width;
    }
  }

  void layer_types(ModelConfig& c) {
    JsonValue const* const value = find({"layer_types"});
    if (value == nullptr) return;
    if (value->array() == nullptr) {
      refuse("layer_types", *value, " is not a list");
      return;
    }
    for (JsonValue const& item : *value->array()) {
      std::string const* const type = item.string();
      if (type != nullptr && *type == "linear_attention") {
        c.layer_types.push_back(LayerType::linear_attention);
      } else if (type != nullptr &&
                 type->ends_with("attention")) {  // full, sliding, chunked: all have q, k, v, o
        c.layer_types.push_back(LayerType::full_attention);
      } else {
        refuse("layer_types", item, " is not a known type of layer");
      }
    }
  }

  JsonValue const& outer_;
  JsonValue const* inner_;
  std::string const& file_;
  Faults faults_;
};

}  // namespace detail

/// Reads the text of a `config.json`; `file` names it in messages. The fields of a nested `text_config` come
/// first, then those beside it; `num_local_experts` is another spelling of `num_experts`. Whether the sizes
/// make a model is for `describe_model` to say. Errors: `bad_file` for what is not JSON, `bad_config` naming
/// each ill-typed field.
[[nodiscard]] inline Result<ModelConfig> parse_model_config(std::string_view text, std::string const& file) {
  auto const json = detail::parse_json(text, file);
  if (!json) return cuda::std::unexpected<Error>(json.error());
  return detail::ModelConfigReader(*json, file).run();
}

/// The same for a file. Errors: those of `parse_model_config`, `not_found`, `io`.
[[nodiscard]] inline Result<ModelConfig> read_model_config(std::string const& path) {
  auto const text = detail::read_text(path, detail::most_config_bytes);
  if (!text) return cuda::std::unexpected<Error>(text.error());
  return parse_model_config(*text, path);
}

}  // namespace atlas::lora::inline v0
