// SPDX-License-Identifier: AGPL-3.0-only
//
// A LoRA adapter's adapter_config.json, as PEFT writes it: what is served, and by name what is refused.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/file.hpp"
#include "atlas/lora/adapter/json.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/module_names.hpp"
#include "atlas/lora/adapter/pattern.hpp"
#include "atlas/lora/adapter/peft_fields.hpp"
#include "atlas/lora/adapter/tensor_name.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// An entry of `rank_pattern` or `alpha_pattern`: the modules its key matches have a value of their own.
template <class Value>
struct PatternValue {
  std::string key;  ///< as the file has it
  Value value{};    ///< the rank, or alpha
  detail::Pattern
      pattern;  ///< PEFT's reading of the key: a regular expression for the end of a module's path
};

/// Token rows that `trainable_token_indices` names: the ids in the order of the tensor's rows.
struct TokenRows {
  std::string module;             ///< `"embed_tokens"` or `"lm_head"`, perhaps with a path before it
  std::vector<std::int64_t> ids;  ///< in `[0, vocab)`
};

/// What an `adapter_config.json` says about serving. Fields that only training reads are not kept.
struct PeftConfig {
  std::int32_t r = 0;                ///< the rank of modules that `rank_pattern` does not match; at least 1
  double lora_alpha = 0.0;           ///< the scale's numerator where `alpha_pattern` does not match
  bool use_rslora = false;           ///< the scale is alpha by the root of the rank
  bool lora_bias = false;            ///< every pair has a bias
  bool ensure_weight_tying = false;  ///< PEFT trained tied tables as one, which the tensors say too
  ModuleNames target_modules{};      ///< which modules have pairs
  ModuleNames exclude_modules{};     ///< which of those have none all the same
  std::vector<std::string> target_parameters{};     ///< ends of parameters' names that have pairs
  std::vector<std::string> modules_to_save{};       ///< modules of which the file has the whole weight
  std::vector<std::int64_t> layers_to_transform{};  ///< the only layers that have pairs; empty: all
  std::vector<std::string> layers_pattern{};  ///< what the path says before a layer's number; empty: anything
  std::vector<PatternValue<std::int32_t>> rank_pattern{};  ///< in the file's order
  std::vector<PatternValue<double>> alpha_pattern{};       ///< in the file's order
  std::vector<TokenRows> trainable_tokens{};               ///< retrained rows, by table

  /// What PEFT's patterns are matched with for the pair at `path` (its path in the base model as the file has
  /// it,
  /// `"model.layers.0.self_attn.q_proj"`): the path itself, or the parameter's name where `target_parameters`
  /// names one (`"model.layers.0.mlp.experts.down_proj"`, `"model.layers.0.mlp.gate.weight"`).
  [[nodiscard]] std::string key_of(std::string_view path) const {
    // A module's second parameter is wrapped around its first, which PEFT then calls the base layer.
    constexpr std::string_view wrapped = ".base_layer";
    bool const inner = path.ends_with(wrapped);
    std::string const module(inner ? path.substr(0, path.size() - wrapped.size()) : path);
    bool const experts = detail::ends_in_name(module, "experts");
    std::string first, second;
    for (std::string const& parameter : target_parameters) {
      std::string const leaf = parameter.substr(parameter.rfind('.') + 1);
      std::string key = module + "." + leaf;
      if (experts == (leaf == "weight") || !detail::ends_in_name(key, parameter)) continue;
      bool const comes_first = first.empty() || (leaf == "gate_up_proj" && key != first);
      if (comes_first) std::swap(first, second);
      (comes_first ? first : second) = std::move(key);
    }
    if (first.empty()) return module;
    return inner || second.empty() ? first : second;
  }

  /// The rank of the pair at `path`: that of the first pattern that matches, else `r`. Of fused experts it is
  /// one expert's.
  [[nodiscard]] std::int32_t rank_of(std::string_view path) const {
    return value_of(rank_pattern, key_of(path), r);
  }

  /// The same for alpha.
  [[nodiscard]] double alpha_of(std::string_view path) const {
    return value_of(alpha_pattern, key_of(path), lora_alpha);
  }

  /// What multiplies the delta of the pair at `path`, whatever it is of (a linear, an expert, a router):
  /// alpha / rank, or alpha / sqrt(rank) with rsLoRA, computed in f64 and rounded once to f32. May be
  /// infinite when alpha is beyond f32.
  [[nodiscard]] float scale_of(std::string_view path) const {
    auto const rank = static_cast<double>(rank_of(path));
    return static_cast<float>(alpha_of(path) / (use_rslora ? std::sqrt(rank) : rank));
  }

  /// Whether PEFT would adapt the module at `path` by `target_modules` and the fields that narrow it.
  /// Meaningful only if both module fields are `understood()`.
  [[nodiscard]] bool targets(std::string_view path) const {
    if (exclude_modules.contains(path)) return false;
    for (std::string const& saved : modules_to_save) {
      if (("." + std::string(path) + ".").find("." + saved + ".") != std::string::npos) return false;
    }
    if (!target_modules.contains(path)) return false;
    bool const whole_path = std::find(target_modules.names.begin(), target_modules.names.end(), path) !=
                            target_modules.names.end();
    if (layers_to_transform.empty() || target_modules.expression || whole_path) return true;
    auto const layer = detail::layer_by_pattern(path, layers_pattern);
    return layer && std::find(layers_to_transform.begin(), layers_to_transform.end(), *layer) !=
                        layers_to_transform.end();
  }

 private:
  template <class Value>
  static Value value_of(std::vector<PatternValue<Value>> const& patterns, std::string_view path,
                        Value other) {
    for (auto const& entry : patterns) {
      if (entry.pattern.match(path)) return entry.value;
    }
    return other;
  }
};

namespace detail {

/// Fields that make an adapter something else than `scale * B A`, and what they are called.
struct Feature {
  char const* field;
  char const* name;
};
inline constexpr Feature refused_features[] = {
    {"use_dora", "DoRA"},
    {"alora_invocation_tokens", "aLoRA"},
    {"layer_replication", "layer replication"},
    {"use_qalora", "QALoRA"},
    {"use_bdlora", "BD-LoRA"},
    {"kasa_config", "KaSA"},
    {"velora_config", "VeLoRA"},
    {"monteclora_config", "MonteCLoRA"},
    {"arrow_config", "Arrow"},
    {"megatron_config", "Megatron's parallel linears"},
};

/// Fields that say where an adapter comes from or how it was trained, and change nothing in serving it.
inline constexpr std::string_view idle_fields[] = {
    "auto_mapping",      "base_model_name_or_path",
    "corda_config",      "eva_config",
    "inference_mode",    "loftq_config",
    "lora_dropout",      "lora_ga_config",
    "megatron_core",     "peft_version",
    "qalora_group_size", "revision",
    "runtime_config",    "task_type",
};

/// Reads every field of `json`, adding a fault for each that is wrong or refused; what could be read is
/// returned.
class PeftConfigReader {
 public:
  PeftConfigReader(JsonValue const& json, std::string const& file, LoadOptions const& options, Faults& faults)
      : fields_(json, file, faults), options_(options) {}

  [[nodiscard]] PeftConfig run() {
    PeftConfig config;
    if (!fields_.is_object()) return config;
    kind();
    config.r = fields_.rank("r");
    config.lora_alpha = fields_.number("lora_alpha");
    config.use_rslora = fields_.flag("use_rslora");
    config.lora_bias = fields_.flag("lora_bias");
    config.ensure_weight_tying = fields_.flag("ensure_weight_tying");
    fields_.flag("fan_in_fan_out");  // whichever way the base stores its weights, the files look the same
    bias();
    initialisation();
    config.target_modules = modules("target_modules");
    config.exclude_modules = modules("exclude_modules");
    config.target_parameters = fields_.strings("target_parameters");
    config.modules_to_save = saved_modules();
    config.layers_to_transform = fields_.indices("layers_to_transform");
    config.layers_pattern = fields_.strings("layers_pattern");
    patterns("rank_pattern", config.rank_pattern,
             [this](std::string const& field, JsonValue const& value) { return fields_.rank(field, value); });
    patterns("alpha_pattern", config.alpha_pattern, [this](std::string const& field, JsonValue const& value) {
      return fields_.number(field, value);
    });
    config.trainable_tokens = tokens();
    for (Feature const& feature : refused_features) fields_.refuse_unless_off(feature.field, feature.name);
    for (std::string_view const field : idle_fields) fields_.take(field);
    fields_.refuse_unknown();
    return config;
  }

 private:
  void kind() {
    JsonValue const* const type = fields_.take("peft_type");
    if (type == nullptr || type->is_null()) return;
    std::string const* const name = type->string();
    if (name == nullptr || lower(*name) != "lora") {
      fields_.fault(Errc::unsupported, "peft_type", describe(*type) + " is not LORA");
    }
  }

  void bias() {
    JsonValue const* const value = fields_.take("bias");
    if (value == nullptr || value->is_null()) return;
    std::string const* const name = value->string();
    if (name == nullptr || (*name != "none" && *name != "all" && *name != "lora_only")) {
      fields_.fault(Errc::bad_config, "bias", describe(*value) + " is none of none, all, lora_only");
    }
  }

  // Some initialisations take out of the base what they put into A and B: such a pair is right only on that
  // base.
  void initialisation() {
    JsonValue const* const value = fields_.take("init_lora_weights");
    if (value == nullptr || value->is_null() || value->boolean() != nullptr) return;
    std::string const name = value->string() != nullptr ? lower(*value->string()) : "";
    for (std::string_view const plain : {"gaussian", "eva", "orthogonal", "mica"}) {
      if (name == plain) return;
    }
    bool const changes_base = name.starts_with("pissa") || name.starts_with("corda") || name == "olora" ||
                              name == "loftq" || name == "lora_ga";
    if (!changes_base) {
      fields_.fault(Errc::unsupported, "init_lora_weights",
                    describe(*value) + " is not a known initialisation");
    } else if (!options_.base_is_converted) {
      fields_.fault(Errc::unsupported, "init_lora_weights",
                    describe(*value) +
                        " changes the base model; only a caller whose base is the changed one can "
                        "say so (base_is_converted)");
    }
  }

  ModuleNames modules(char const* field) {
    ModuleNames out;
    JsonValue const* const value = fields_.peek(field);
    std::string const* const text = value != nullptr ? value->string() : nullptr;
    if (text == nullptr) {
      out.names = fields_.strings(field);
      return out;
    }
    fields_.take(field);
    if (lower(*text) == "all-linear") {
      out.all_linear = true;
      return out;
    }
    out.expression = *text;
    if (auto pattern = Pattern::compile(*text)) out.pattern = std::move(*pattern);
    return out;
  }

  std::vector<std::string> saved_modules() {
    auto names = fields_.strings("modules_to_save");
    for (std::string const& name : names) {
      if (!names_table(name)) {
        fields_.fault(Errc::unsupported, "modules_to_save",
                      "'" + printable(name) + "' is neither embed_tokens nor lm_head");
      }
    }
    return names;
  }

  [[nodiscard]] bool names_table(std::string const& name) const {
    return names_word(name, "embed_tokens", options_.prefix_map) ||
           names_word(name, "lm_head", options_.prefix_map);
  }

  template <class Value, class Read>
  void patterns(char const* field, std::vector<PatternValue<Value>>& out, Read const& read) {
    JsonValue const* const value = fields_.take(field);
    if (value == nullptr || value->is_null()) return;
    if (value->object() == nullptr) {
      fields_.fault(Errc::bad_config, field, describe(*value) + " is not an object");
      return;
    }
    for (JsonMember const& member : *value->object()) {
      std::string const name = std::string(field) + "." + printable(member.name);
      auto pattern = Pattern::compile("(.*\\.)?(" + member.name + ")$");
      if (!pattern) {
        fields_.fault(Errc::unsupported, name,
                      "a pattern that is not understood: " + pattern.error().message);
        continue;
      }
      // One pattern is bounded by its compiler, but nothing else bounds how many there are.
      pattern_steps_ += pattern->steps();
      if (pattern_steps_ > most_pattern_steps) {
        fields_.fault(Errc::unsupported, name, "the patterns up to here are too large together");
        return;
      }
      out.push_back({member.name, read(name, member.value), std::move(*pattern)});
    }
  }

  std::vector<TokenRows> tokens() {
    std::vector<TokenRows> out;
    constexpr char const* field = "trainable_token_indices";
    JsonValue const* const value = fields_.take(field);
    if (value == nullptr || value->is_null()) return out;
    if (value->object() == nullptr) return {{"embed_tokens", fields_.token_ids(field, *value)}};
    for (JsonMember const& member : *value->object()) {
      std::string const name = std::string(field) + "." + printable(member.name);
      if (!names_table(member.name)) {
        fields_.fault(Errc::unsupported, name, "neither embed_tokens nor lm_head");
      } else if (!member.value.is_null()) {
        out.push_back({member.name, fields_.token_ids(name, member.value)});
      }
    }
    return out;
  }

  static std::string lower(std::string text) {
    for (char& c : text) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return text;
  }

  static constexpr std::size_t most_pattern_steps = 1 << 18;  // of rank_pattern and alpha_pattern, 12 MiB

  PeftFields fields_;
  LoadOptions const& options_;
  std::size_t pattern_steps_ = 0;
};

/// Parses and reads a configuration, gathering its faults; what could be read is returned.
[[nodiscard]] inline PeftConfig gather_peft_config(std::string_view text, std::string const& file,
                                                   LoadOptions const& options, Faults& faults) {
  auto const json = parse_json(text, file);
  if (!json) {
    faults.add(json.error());
    return {};
  }
  return PeftConfigReader(*json, file, options, faults).run();
}

}  // namespace detail

/// Reads the text of an `adapter_config.json`; `file` names it in messages. Of `options`, `base_is_converted`
/// and `prefix_map` count. Errors: every fault of the file at once, one line each, naming its field; the code
/// is that of the first.
[[nodiscard]] inline Result<PeftConfig> parse_peft_config(std::string_view text, std::string const& file,
                                                          LoadOptions const& options = {}) {
  detail::Faults faults;
  PeftConfig config = detail::gather_peft_config(text, file, options, faults);
  if (!faults.empty()) return faults.failure();
  return config;
}

/// The same for a file. Errors: those of `parse_peft_config`, `not_found`, `io`.
[[nodiscard]] inline Result<PeftConfig> read_peft_config(std::string const& path,
                                                         LoadOptions const& options = {}) {
  auto const text = detail::read_text(path, detail::most_config_bytes);
  if (!text) return cuda::std::unexpected<Error>(text.error());
  return parse_peft_config(*text, path, options);
}

}  // namespace atlas::lora::inline v0
