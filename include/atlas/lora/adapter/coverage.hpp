// SPDX-License-Identifier: AGPL-3.0-only
//
// The other direction of the audit: whether what a configuration names is in the file. The file is the truth
// about layers, so a configuration that names more or fewer of them only gets a warning.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "atlas/lora/adapter/audit.hpp"
#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/module_names.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Compares the fields of one configuration with the tensors of its file.
class Coverage {
 public:
  Coverage(std::string const& config_file, PeftConfig const& config, ModelShape const& shape,
           LoadOptions const& options, Faults& faults)
      : file_(config_file), config_(config), shape_(shape), options_(options), faults_(faults) {}

  void run(AuditedParts& parts) {
    check_targets(parts);
    check_tables(parts);
    if (config_.target_modules.understood() && config_.exclude_modules.understood()) compare_layers(parts);
  }

 private:
  void missing(AuditedParts& parts, char const* field, std::string const& what) {
    std::string const line = file_ + ": field '" + field + "': " + what + " has no tensor in the file";
    if (options_.lenient) {
      parts.warnings.push_back(line);
    } else {
      faults_.add(Errc::unmatched, line);
    }
  }

  void check_targets(AuditedParts& parts) {
    ModuleNames const& targets = config_.target_modules;
    auto const some_path = [&parts](auto const& test) {
      return std::any_of(parts.pair_paths.begin(), parts.pair_paths.end(), test);
    };
    for (std::string const& name : targets.names) {
      if (!some_path([&](std::string const& path) { return ends_in_name(path, name); })) {
        missing(parts, "target_modules", "'" + printable(name) + "'");
      }
    }
    for (auto const* const modules : {&config_.target_modules, &config_.exclude_modules}) {
      if (modules->understood()) continue;
      parts.warnings.push_back(file_ + ": the expression '" + printable(*modules->expression) +
                               "' is not understood, so the file is not compared with it");
    }
    if ((targets.pattern || targets.all_linear) &&
        !some_path([&](std::string const& path) { return targets.contains(path); })) {
      missing(parts, "target_modules",
              targets.all_linear ? "all-linear" : "'" + printable(*targets.expression) + "'");
    }
    for (std::string const& parameter : config_.target_parameters) {
      if (!some_path([&](std::string const& path) {
            std::string const key = config_.key_of(path);
            return key != path && ends_in_name(key, parameter);
          })) {
        missing(parts, "target_parameters", "'" + printable(parameter) + "'");
      }
    }
  }

  // Embedding and head. A tied head may go with the embedding's tensor.
  void check_tables(AuditedParts const& parts) {
    auto const has = [&parts](std::string_view name) {
      return std::any_of(parts.table_paths.begin(), parts.table_paths.end(),
                         [name](std::string const& path) { return ends_in_name(path, name); });
    };
    auto const served = [&](std::string const& name) {
      bool const tied = shape_.tied_head() && names_word(name, "lm_head", options_.prefix_map);
      return has(name) || has(renamed(name, options_.prefix_map)) || (tied && has("embed_tokens"));
    };
    auto const refuse = [this](Errc code, char const* field, std::string const& what) {
      faults_.add(code, file_ + ": field '" + field + "': " + what);
    };
    for (std::string const& name : config_.modules_to_save) {
      if (!served(name))
        refuse(Errc::unmatched, "modules_to_save", "'" + printable(name) + "' has no tensor in the file");
    }
    for (TokenRows const& rows : config_.trainable_tokens) {
      if (!served(rows.module)) {
        refuse(Errc::unmatched, "trainable_token_indices",
               "'" + printable(rows.module) + "' has no tensor in the file");
      }
      for (std::int64_t const id : rows.ids) {
        if (shape_.vocab() == 0 || id < shape_.vocab() || options_.clip_vocabulary) continue;
        refuse(
            Errc::out_of_range, "trainable_token_indices",
            "token " + std::to_string(id) + " is beyond the vocabulary of " + std::to_string(shape_.vocab()));
      }
    }
  }

  // Whether PEFT would make a pair at `path`.
  [[nodiscard]] bool targeted(std::string_view path) const {
    return config_.targets(path) || config_.key_of(path) != path;
  }

  void compare_layers(AuditedParts& parts) {
    std::vector<bool> adapted(shape_.sites().size());
    std::string before;  // what stands before the layer number in the file's paths
    std::string unnamed;
    std::int64_t unnamed_count = 0;
    for (auto const& [place, pair] : parts.pairs) {
      if (place.part != ModelPart::linear) continue;
      adapted[place.site] = true;
      if (place.layer != model_wide && before.empty()) {
        before = pair.path.substr(0, pair.path.size() - below(shape_.sites()[place.site]).size());
      }
      if (targeted(pair.path)) continue;
      if (unnamed_count++ == 0) unnamed = pair.path;
    }
    if (unnamed_count > 0 && !(config_.target_modules.empty() && config_.target_parameters.empty())) {
      parts.warnings.push_back(
          file_ + ": " + std::to_string(unnamed_count) +
          " modules of the file are not among its targets and are adapted all the same, first '" +
          printable(unnamed) + "'");
    }
    std::string absent;
    std::int64_t absent_count = 0;
    for (std::size_t i = 0; i < adapted.size() && !before.empty(); ++i) {
      Site const site = shape_.sites()[i];
      if (adapted[i] || site.layer == model_wide || !targeted(before + below(site))) continue;
      if (absent_count++ == 0) absent = before + below(site);
    }
    if (absent_count > 0) {
      parts.warnings.push_back(
          file_ + ": " + std::to_string(absent_count) +
          " modules are among its targets and not in the file, so they stay the base's, first '" +
          printable(absent) + "'");
    }
  }

  // "3.self_attn.q_proj"
  [[nodiscard]] std::string below(Site site) const {
    return std::to_string(site.layer) + "." + shape_.module(site).name;
  }

  std::string const& file_;
  PeftConfig const& config_;
  ModelShape const& shape_;
  LoadOptions const& options_;
  Faults& faults_;
};

}  // namespace atlas::lora::inline v0::detail
