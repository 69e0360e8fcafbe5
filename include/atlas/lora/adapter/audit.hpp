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
  std::int64_t linears_present = 0;
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
    for (auto const& [place, pair] : parts_.pairs) {
      if (place.part == ModelPart::linear) ++parts_.linears_present;
      check_pair(place, pair);
    }
    for (TableTensors const* const table : {&parts_.embedding, &parts_.head}) check_table(*table);
    if (!unmatched_.empty() && !options_.lenient) {
      fault(Errc::unmatched, std::to_string(parts_.linears_present) + " of " +
                                 std::to_string(parts_.linears_present + std::ssize(unmatched_)) +
                                 " modules of the adapter are in the model");
    }
    parts_.linears_present += std::ssize(unmatched_);
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
    bool const linear =
        name.part == ModelPart::none || name.part == ModelPart::linear || name.part == ModelPart::head;
    if (linear) unmatched_.insert(name.path);
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

  void check_pair(PairPlace const& place, PairTensors const& pair) {
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
    if (shaped) check_rank(place, pair);
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
    auto const at = std::lower_bound(moe.layers.begin(), moe.layers.end(), place.layer) - moe.layers.begin();
    std::int64_t const inner = moe.layer_intermediate.empty()
                                   ? moe.intermediate
                                   : moe.layer_intermediate[static_cast<std::size_t>(at)];
    bool const down = place.expert_linear == ExpertLinear::down;
    return down ? std::pair(moe.hidden, inner) : std::pair(inner, moe.hidden);
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

  void check_rank(PairPlace const& place, PairTensors const& pair) {
    std::int64_t const rank = pair.a->shape[0];
    if (pair.b->shape[1] != rank) {
      fault(
          Errc::shape_mismatch, *pair.b,
          "is of rank " + std::to_string(pair.b->shape[1]) + ", its lora_A of rank " + std::to_string(rank));
      return;
    }
    if (config_ == nullptr) return;
    std::int64_t const experts = place.part == ModelPart::fused_experts ? shape_.moe().num_experts : 1;
    std::int64_t const expected = std::int64_t{config_->rank_of(pair.path)} * experts;
    if (rank != expected) {
      fault(Errc::shape_mismatch, *pair.a,
            "is of rank " + std::to_string(rank) + ", the configuration gives " + std::to_string(expected));
    }
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
      if (!ends_in_name(name.path, rows.module) &&
          !ends_in_name(renamed(name.path, options_.prefix_map), rows.module)) {
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
  std::set<std::string> unmatched_;     // paths of linears that the model does not have
  std::optional<std::string> wrapper_;  // what stands before the layer number in every matched key
};

}  // namespace atlas::lora::inline v0::detail
