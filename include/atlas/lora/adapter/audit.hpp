// SPDX-License-Identifier: AGPL-3.0-only
//
// The audit of one adapter before any of its weights are read: every tensor has its place in the model and
// its partner, every target has its tensors, and the configuration and the file say the same.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/fused_experts.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/module_names.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
#include "atlas/lora/adapter/tensor_name.hpp"
#include "atlas/lora/adapter/token_table.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// A place of the model that may have a pair. Linears come first, in site order.
struct PairPlace {
  ModelPart part = ModelPart::none;
  std::size_t site = 0;
  std::int32_t layer = model_wide;
  std::int32_t expert = -1;
  ExpertLinear expert_linear = ExpertLinear::gate;
  bool inner = false;  // of the two pairs on a layer's fused experts, the one named base_layer

  friend auto operator<=>(PairPlace const&, PairPlace const&) = default;
};

/// The tensors of one pair; null where the file has none.
struct PairTensors {
  std::string path;  // in the base model, as the file has it
  TensorInfo const* a = nullptr;
  TensorInfo const* b = nullptr;
  TensorInfo const* bias = nullptr;
  FusedParameter parameter = FusedParameter::down;  // of fused experts: which one it changes
};

/// The tensors of one of the model's tables; null where the file has none.
struct TableTensors {
  std::string path;  // in the base model, as the file has it
  TensorInfo const* table = nullptr;
  TensorInfo const* rows = nullptr;
  TensorInfo const* lora_a = nullptr;
  TensorInfo const* lora_b = nullptr;
  std::vector<std::int64_t> ids;  // of `rows`

  [[nodiscard]] bool empty() const noexcept {
    return table == nullptr && rows == nullptr && lora_a == nullptr && lora_b == nullptr;
  }
};

/// What an adapter consists of. Pointers are into the list of tensors that was audited.
struct AuditedParts {
  std::map<PairPlace, PairTensors> pairs;
  TableTensors embedding, head;
  std::vector<std::string> pair_paths;  // of every pair's tensors, also those that the model has no place for
  std::vector<std::string> table_paths;  // of every embedding's and head's tensors, in the file and renamed
  std::int64_t modules_present = 0;
  bool older_axes = false;  // which way round the pairs of fused experts are
  std::vector<std::string> warnings;
};

/// `[8, 64]`
[[nodiscard]] inline std::string shape_text(std::vector<std::int64_t> const& shape) {
  std::string out = "[";
  for (std::int64_t const extent : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(extent);
  return out + "]";
}

/// Audits the tensors of one file against a model and a configuration; null for a configuration that has
/// faults of its own, which leaves out what depends on it.
class Audit {
 public:
  Audit(std::string const& file, ModelShape const& shape, LoadOptions const& options,
        PeftConfig const* config, Faults& faults)
      : file_(file), shape_(shape), options_(options), config_(config), faults_(faults) {}

  [[nodiscard]] AuditedParts run(std::span<TensorInfo const> tensors) {
    for (TensorInfo const& tensor : tensors) sort(tensor);
    parts_.modules_present = std::ssize(parts_.pairs);
    for (auto& [place, pair] : parts_.pairs) check_pair(place, pair);
    settle_axes();
    for (TableTensors const* const table : {&parts_.embedding, &parts_.head}) check_table(*table);
    if (!unmatched_.empty() && !options_.lenient) {
      fault(Errc::unmatched, std::to_string(parts_.modules_present) + " of " +
                                 std::to_string(parts_.modules_present + std::ssize(unmatched_)) +
                                 " modules of the adapter are in the model");
    }
    parts_.modules_present += std::ssize(unmatched_);
    if (parts_.pairs.empty() && parts_.embedding.empty() && parts_.head.empty() && faults_.empty()) {
      fault(Errc::unmatched, "no tensor of the adapter belongs to the model");
    }
    return std::move(parts_);
  }

 private:
  void fault(Errc code, std::string const& what) { faults_.add(code, file_ + ": " + what); }
  void fault(Errc code, TensorInfo const& tensor, std::string const& what) {
    fault(code, "tensor '" + printable(tensor.name) + "': " + what);
  }

  void sort(TensorInfo const& tensor) {
    TensorName const name = understand_tensor(tensor.name, shape_, options_);
    if (!SafetensorsFile::element_type_of(tensor.dtype)) {
      fault(Errc::unsupported, tensor, "is " + tensor.dtype + "; F32, F16 or BF16 expected");
    }
    switch (name.kind) {
      case TensorKind::unknown: fault(Errc::unmatched, tensor, name.reason); return;
      case TensorKind::magnitude: fault(Errc::unsupported, tensor, "DoRA is not served"); return;
      case TensorKind::embedding_a:
      case TensorKind::embedding_b:
        parts_.pair_paths.push_back(name.path);
        if (name.part == ModelPart::embedding && name.reason.empty()) {
          sort_embedding_pair(tensor, name);
        } else {
          fault(Errc::unmatched, tensor,
                name.reason.empty() ? "names no embedding of the model" : name.reason);
        }
        return;
      case TensorKind::token_rows:
      case TensorKind::token_base:
      case TensorKind::saved_module:
      case TensorKind::base_copy: sort_table(tensor, name); return;
      case TensorKind::a:
      case TensorKind::b:
      case TensorKind::bias: break;
    }
    parts_.pair_paths.push_back(name.path);
    if (name.reason.empty()) {
      sort_pair(tensor, name);
      return;
    }
    unmatched_.insert(name.path);
    if (options_.lenient) {
      parts_.warnings.push_back("tensor '" + printable(tensor.name) + "' left out: " + name.reason);
    } else {
      fault(Errc::unmatched, tensor, name.reason);
    }
  }

  void sort_pair(TensorInfo const& tensor, TensorName const& name) {
    if (name.layer != model_wide && !check_wrapper(tensor, name)) return;
    PairPlace const place{name.part,          name.part == ModelPart::linear ? name.site : 0,
                          name.layer,         name.expert,
                          name.expert_linear, ends_in_name(name.path, "base_layer")};
    PairTensors& pair = parts_.pairs[place];
    if (pair.path.empty()) pair.path = name.path;
    TensorInfo const*& member = name.kind == TensorKind::a   ? pair.a
                                : name.kind == TensorKind::b ? pair.b
                                                             : pair.bias;
    if (member != nullptr) {
      fault(Errc::unmatched, tensor, "is the same tensor as '" + printable(member->name) + "'");
    } else {
      member = &tensor;
    }
  }

  // Layers under two paths are two models in one file (a language and a vision model, say): only the caller
  // knows which of them `shape` is.
  bool check_wrapper(TensorInfo const& tensor, TensorName const& name) {
    if (!wrapper_) wrapper_ = name.wrapper;
    if (*wrapper_ == name.wrapper) return true;
    fault(Errc::unmatched, tensor,
          "lies under '" + printable(name.wrapper) + "', other tensors under '" + printable(*wrapper_) +
              "'; model_prefix must say which is the model's");
    return false;
  }

  void check_pair(PairPlace const& place, PairTensors& pair) {
    if (pair.a == nullptr || pair.b == nullptr) {
      for (TensorInfo const* const member : {pair.a, pair.b, pair.bias}) {
        if (member != nullptr)
          fault(Errc::unmatched, *member, pair.a == nullptr ? "has no lora_A" : "has no lora_B");
      }
      return;
    }
    auto const [n_out, k_in] = widths(place);
    bool const shaped =
        check_shape(*pair.a, {any, k_in}, "rank, k_in") && check_shape(*pair.b, {n_out, any}, "n_out, rank");
    if (pair.bias != nullptr) check_shape(*pair.bias, {n_out}, "n_out");
    if (shaped && check_rank(place, pair) && place.part == ModelPart::fused_experts) note_axes(place, pair);
    if (config_ == nullptr || config_->lora_bias == (pair.bias != nullptr)) return;
    if (pair.bias != nullptr) {
      fault(Errc::unmatched, *pair.bias, "is there although the configuration says lora_bias false");
    } else {
      fault(Errc::unmatched, *pair.b, "has no bias although the configuration says lora_bias true");
    }
  }

  // n_out and k_in of a place; `any` where the pair's layout leaves it open.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> widths(PairPlace const& place) const {
    MoeShape const& moe = shape_.moe();
    if (place.part == ModelPart::linear) {
      Module const& module = shape_.module(shape_.sites()[place.site]);
      return {module.n_out, module.k_in};
    }
    if (place.part == ModelPart::router) return {moe.num_experts, moe.hidden};
    if (place.part == ModelPart::fused_experts) return {any, any};
    Module const linear = moe.linear(*moe.find(place.layer), place.expert_linear);
    return {linear.n_out, linear.k_in};
  }

  bool check_shape(TensorInfo const& tensor, std::vector<std::int64_t> const& expected,
                   std::string const& words) {
    bool fits = tensor.shape.size() == expected.size();
    for (std::size_t i = 0; fits && i < expected.size(); ++i) {
      fits = expected[i] == any ? tensor.shape[i] >= 1 : tensor.shape[i] == expected[i];
    }
    if (fits) return true;
    std::string wanted;
    for (std::int64_t const extent : expected) {
      wanted += (wanted.empty() ? "" : ", ") + (extent == any ? std::string("any") : std::to_string(extent));
    }
    fault(Errc::shape_mismatch, tensor,
          "is " + shape_text(tensor.shape) + ", the model needs [" + wanted + "] ([" + words + "])");
    return false;
  }

  // Which parameter a fused pair changes, and which way round it can be.
  void note_axes(PairPlace const& place, PairTensors& pair) {
    if (config_ == nullptr) return;
    std::string const key = config_->key_of(pair.path);
    bool const gate_up = ends_in_name(key, "gate_up_proj");
    if (!gate_up && !ends_in_name(key, "down_proj")) {
      fault(Errc::unmatched, *pair.a,
            "changes a parameter of the experts that the configuration's target_parameters do not name");
      return;
    }
    if (pair.bias != nullptr) fault(Errc::unmatched, *pair.bias, "is a bias, which parameters do not have");
    pair.parameter = gate_up ? FusedParameter::gate_up : FusedParameter::down;
    MoeShape const& moe = shape_.moe();
    Module const linear =
        moe.linear(*moe.find(place.layer), gate_up ? ExpertLinear::gate : ExpertLinear::down);
    std::int64_t const n_out = linear.n_out * (gate_up ? 2 : 1);
    FusedFit const fit = fused_fit(pair.a->shape[1], pair.b->shape[0], n_out, linear.k_in);
    using enum FusedExpertAxes;
    bool const fits = (fit.current && options_.fused_expert_axes != older) ||
                      (fit.older && options_.fused_expert_axes != current);
    if (!fits) {
      std::string const wide = std::to_string(linear.k_in), high = std::to_string(n_out);
      fault(Errc::shape_mismatch, *pair.a,
            "is " + shape_text(pair.a->shape) + " and its lora_B " + shape_text(pair.b->shape) +
                ", the model needs [any, " + wide + "] and [" + high + ", any]" +
                (options_.fused_expert_axes == by_shape ? ", or the two widths swapped" : ""));
      return;
    }
    TensorInfo const*& telling = fit.current ? (fit.older ? silent_ : current_) : older_;
    if (telling == nullptr) telling = pair.a;
  }

  // One PEFT wrote all the pairs of a file, so that those whose shapes say which way round they are speak for
  // those whose shapes do not.
  void settle_axes() {
    if (current_ != nullptr && older_ != nullptr) {
      fault(Errc::shape_mismatch, *older_,
            "has in and out swapped, '" + printable(current_->name) + "' does not");
    } else if (current_ == nullptr && older_ == nullptr && silent_ != nullptr &&
               options_.fused_expert_axes == FusedExpertAxes::by_shape) {
      fault(Errc::unsupported, *silent_,
            "fits with in and out either way round; LoadOptions::fused_expert_axes must say which");
    }
    parts_.older_axes = older_ != nullptr || options_.fused_expert_axes == FusedExpertAxes::older;
  }

  bool check_rank(PairPlace const& place, PairTensors const& pair) {
    std::int64_t const rank = pair.a->shape[0];
    if (pair.b->shape[1] != rank) {
      fault(
          Errc::shape_mismatch, *pair.b,
          "is of rank " + std::to_string(pair.b->shape[1]) + ", its lora_A of rank " + std::to_string(rank));
      return false;
    }
    if (config_ == nullptr) return true;
    std::int64_t const experts = place.part == ModelPart::fused_experts ? shape_.moe().num_experts : 1;
    std::int64_t const expected = std::int64_t{config_->rank_of(pair.path)} * experts;
    if (rank == expected) return true;
    fault(Errc::shape_mismatch, *pair.a,
          "is of rank " + std::to_string(rank) + ", the configuration gives " + std::to_string(expected));
    return false;
  }

  void sort_table(TensorInfo const& tensor, TensorName const& name) {
    parts_.table_paths.push_back(name.path);
    parts_.table_paths.push_back(renamed(name.path, options_.prefix_map));
    std::int64_t const hidden = shape_.hidden() > 0 ? shape_.hidden() : any;
    bool const rows_only = name.kind == TensorKind::token_rows;
    bool const fits = check_shape(tensor, {rows_only ? any : vocab_of(tensor, 0), hidden},
                                  rows_only ? "ids, hidden" : "vocab, hidden");
    if (name.kind == TensorKind::base_copy) {
      parts_.warnings.push_back("tensor '" + printable(tensor.name) +
                                "' is a copy of the base model's table and is left out");
      return;
    }
    TableTensors& table = name.part == ModelPart::head ? parts_.head : parts_.embedding;
    put(rows_only ? table.rows : table.table, tensor, name, table);
    if (rows_only && fits && config_ != nullptr) check_token_rows(tensor, name, table);
  }

  void sort_embedding_pair(TensorInfo const& tensor, TensorName const& name) {
    bool const is_a = name.kind == TensorKind::embedding_a;
    TableTensors& table = parts_.embedding;
    put(is_a ? table.lora_a : table.lora_b, tensor, name, table);
    std::int64_t const hidden = shape_.hidden() > 0 ? shape_.hidden() : any;
    if (is_a) {
      check_shape(tensor, {any, vocab_of(tensor, 1)}, "rank, vocab");
    } else {
      check_shape(tensor, {hidden, any}, "hidden, rank");
    }
  }

  // How many tokens extent `dimension` of a tensor must have: the model's, or more where the rest is left
  // out.
  [[nodiscard]] std::int64_t vocab_of(TensorInfo const& tensor, std::size_t dimension) const {
    std::int64_t const vocab = shape_.vocab();
    if (vocab == 0) return any;
    bool const larger = tensor.shape.size() > dimension && tensor.shape[dimension] > vocab;
    return larger && options_.clip_vocabulary ? any : vocab;
  }

  // A table under two paths, or saved in two ways, is two tables, of which a model has one.
  void put(TensorInfo const*& member, TensorInfo const& tensor, TensorName const& name, TableTensors& table) {
    if (table.path.empty()) table.path = name.path;
    if (member != nullptr) {
      fault(Errc::unmatched, tensor, "is the same table as '" + printable(member->name) + "'");
    } else if (table.path != name.path) {
      fault(Errc::unmatched, tensor,
            "is of '" + printable(name.path) + "', other tensors of the table are of '" +
                printable(table.path) + "'");
    } else {
      member = &tensor;
    }
  }

  void check_token_rows(TensorInfo const& tensor, TensorName const& name, TableTensors& table) {
    for (TokenRows const& rows : config_->trainable_tokens) {
      std::string const in_model = renamed(name.path, options_.prefix_map);
      if (!ends_in_name(name.path, rows.module) && !ends_in_name(in_model, rows.module) &&
          !ends_in_name(in_model, renamed(rows.module, options_.prefix_map))) {
        continue;
      }
      if (std::ssize(rows.ids) != tensor.shape[0]) {
        fault(Errc::shape_mismatch, tensor,
              "has " + std::to_string(tensor.shape[0]) + " rows, trainable_token_indices has " +
                  std::to_string(rows.ids.size()) + " ids");
      }
      table.ids = rows.ids;
      return;
    }
    fault(Errc::unmatched, tensor, "has no ids in trainable_token_indices");
  }

  void check_table(TableTensors const& table) {
    if (table.table != nullptr && table.table->shape.size() == 2) {
      auto const bad = known_ids(table.ids, table.table->shape[0], shape_.vocab()).bad;
      if (bad) {
        fault(Errc::out_of_range, *table.table,
              "has no row " + std::to_string(*bad) + ", which trainable_token_indices names");
      }
    }
    if ((table.lora_a == nullptr) != (table.lora_b == nullptr)) {
      bool const lacks_a = table.lora_a == nullptr;
      fault(Errc::unmatched, lacks_a ? *table.lora_b : *table.lora_a,
            lacks_a ? "has no lora_embedding_A" : "has no lora_embedding_B");
    }
    if (table.lora_a == nullptr || table.lora_b == nullptr) return;
    if (table.table != nullptr || table.rows != nullptr) {
      fault(Errc::unsupported, *table.lora_a, "LoRA on a table whose rows the adapter also replaces");
    }
    if (table.lora_a->shape.size() != 2 || table.lora_b->shape.size() != 2) return;
    std::int64_t const rank = table.lora_a->shape[0];
    if (table.lora_b->shape[1] != rank) {
      fault(Errc::shape_mismatch, *table.lora_b,
            "is of rank " + std::to_string(table.lora_b->shape[1]) + ", its lora_embedding_A of rank " +
                std::to_string(rank));
    } else if (config_ != nullptr && config_->rank_of(table.path) != rank) {
      fault(Errc::shape_mismatch, *table.lora_a,
            "is of rank " + std::to_string(rank) + ", the configuration gives " +
                std::to_string(config_->rank_of(table.path)));
    }
  }

  static constexpr std::int64_t any = -1;

  std::string const& file_;
  ModelShape const& shape_;
  LoadOptions const& options_;
  PeftConfig const* config_;
  Faults& faults_;
  AuditedParts parts_;
  std::set<std::string> unmatched_;  // paths of modules that the model does not have
  // The first fused pair whose shapes fit this way round alone, the other alone, or both.
  TensorInfo const* current_ = nullptr;
  TensorInfo const* older_ = nullptr;
  TensorInfo const* silent_ = nullptr;
  std::optional<std::string> wrapper_;  // what stands before the layer number in every matched key
};

}  // namespace atlas::lora::inline v0::detail
