// SPDX-License-Identifier: AGPL-3.0-only
//
// The audit of one adapter before any of its weights are read: every tensor has its place in the model and
// its partner, every target has its tensors, and the configuration and the file say the same.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "atlas/lora/adapter/audit_parts.hpp"
#include "atlas/lora/adapter/audit_tables.hpp"
#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/fused_experts.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/module_names.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
#include "atlas/lora/adapter/tensor_name.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Audits the tensors of one file against a model and a configuration; null for a configuration that has
/// faults of its own, which leaves out what depends on it.
class Audit {
 public:
  Audit(std::string const& file, ModelShape const& shape, LoadOptions const& options,
        PeftConfig const* config, Faults& faults)
      : scope_{file, shape, options, config, faults}, shape_(shape), options_(options), config_(config) {}

  [[nodiscard]] AuditedParts run(std::span<TensorInfo const> tensors) {
    for (TensorInfo const& tensor : tensors) sort(tensor);
    parts_.modules_present = std::ssize(parts_.pairs);
    for (auto& [place, pair] : parts_.pairs) check_pair(place, pair);
    settle_axes();
    tables().check();
    if (!unmatched_.empty() && !options_.lenient) {
      scope_.fault(Errc::unmatched, std::to_string(parts_.modules_present) + " of " +
                                        std::to_string(parts_.modules_present + std::ssize(unmatched_)) +
                                        " modules of the adapter are in the model");
    }
    parts_.modules_present += std::ssize(unmatched_);
    if (parts_.pairs.empty() && parts_.embedding.empty() && parts_.head.empty() && scope_.faults.empty()) {
      scope_.fault(Errc::unmatched, "no tensor of the adapter belongs to the model");
    }
    return std::move(parts_);
  }

 private:
  [[nodiscard]] TableAudit tables() noexcept { return {scope_, parts_}; }

  void sort(TensorInfo const& tensor) {
    TensorName const name = understand_tensor(tensor.name, shape_, options_);
    if (!SafetensorsFile::element_type_of(tensor.dtype)) {
      scope_.fault(Errc::unsupported, tensor, "is " + tensor.dtype + "; F32, F16 or BF16 expected");
    }
    switch (name.kind) {
      case TensorKind::unknown: scope_.fault(Errc::unmatched, tensor, name.reason); return;
      case TensorKind::magnitude: scope_.fault(Errc::unsupported, tensor, "DoRA is not served"); return;
      case TensorKind::embedding_a:
      case TensorKind::embedding_b:
        parts_.pair_paths.push_back(name.path);
        if (name.part == ModelPart::embedding && name.reason.empty()) {
          tables().sort_embedding_pair(tensor, name);
        } else {
          scope_.fault(Errc::unmatched, tensor,
                       name.reason.empty() ? "names no embedding of the model" : name.reason);
        }
        return;
      case TensorKind::token_rows:
      case TensorKind::token_base:
      case TensorKind::saved_module:
      case TensorKind::base_copy: tables().sort_table(tensor, name); return;
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
      scope_.fault(Errc::unmatched, tensor, name.reason);
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
      scope_.fault(Errc::unmatched, tensor, "is the same tensor as '" + printable(member->name) + "'");
    } else {
      member = &tensor;
    }
  }

  // Layers under two paths are two models in one file (a language and a vision model, say): only the caller
  // knows which of them `shape` is.
  bool check_wrapper(TensorInfo const& tensor, TensorName const& name) {
    if (!wrapper_) wrapper_ = name.wrapper;
    if (*wrapper_ == name.wrapper) return true;
    scope_.fault(Errc::unmatched, tensor,
                 "lies under '" + printable(name.wrapper) + "', other tensors under '" +
                     printable(*wrapper_) + "'; model_prefix must say which is the model's");
    return false;
  }

  void check_pair(PairPlace const& place, PairTensors& pair) {
    if (pair.a == nullptr || pair.b == nullptr) {
      for (TensorInfo const* const member : {pair.a, pair.b, pair.bias}) {
        if (member != nullptr)
          scope_.fault(Errc::unmatched, *member, pair.a == nullptr ? "has no lora_A" : "has no lora_B");
      }
      return;
    }
    auto const [n_out, k_in] = widths(place);
    bool const shaped = scope_.check_shape(*pair.a, {any_extent, k_in}, "rank, k_in") &&
                        scope_.check_shape(*pair.b, {n_out, any_extent}, "n_out, rank");
    if (pair.bias != nullptr) scope_.check_shape(*pair.bias, {n_out}, "n_out");
    if (shaped && check_rank(place, pair) && place.part == ModelPart::fused_experts) note_axes(place, pair);
    if (config_ == nullptr || config_->lora_bias == (pair.bias != nullptr)) return;
    if (pair.bias != nullptr) {
      scope_.fault(Errc::unmatched, *pair.bias, "is there although the configuration says lora_bias false");
    } else {
      scope_.fault(Errc::unmatched, *pair.b, "has no bias although the configuration says lora_bias true");
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
    if (place.part == ModelPart::fused_experts) return {any_extent, any_extent};
    Module const linear = moe.linear(*moe.find(place.layer), place.expert_linear);
    return {linear.n_out, linear.k_in};
  }

  // Which parameter a fused pair changes, and which way round it can be.
  void note_axes(PairPlace const& place, PairTensors& pair) {
    if (config_ == nullptr) return;
    std::string const key = config_->key_of(pair.path);
    bool const gate_up = ends_in_name(key, "gate_up_proj");
    if (!gate_up && !ends_in_name(key, "down_proj")) {
      scope_.fault(
          Errc::unmatched, *pair.a,
          "changes a parameter of the experts that the configuration's target_parameters do not name");
      return;
    }
    if (pair.bias != nullptr)
      scope_.fault(Errc::unmatched, *pair.bias, "is a bias, which parameters do not have");
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
      scope_.fault(Errc::shape_mismatch, *pair.a,
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
      scope_.fault(Errc::shape_mismatch, *older_,
                   "has in and out swapped, '" + printable(current_->name) + "' does not");
    } else if (current_ == nullptr && older_ == nullptr && silent_ != nullptr &&
               options_.fused_expert_axes == FusedExpertAxes::by_shape) {
      scope_.fault(Errc::unsupported, *silent_,
                   "fits with in and out either way round; LoadOptions::fused_expert_axes must say which");
    }
    parts_.older_axes = older_ != nullptr || options_.fused_expert_axes == FusedExpertAxes::older;
  }

  bool check_rank(PairPlace const& place, PairTensors const& pair) {
    std::int64_t const rank = pair.a->shape[0];
    if (pair.b->shape[1] != rank) {
      scope_.fault(
          Errc::shape_mismatch, *pair.b,
          "is of rank " + std::to_string(pair.b->shape[1]) + ", its lora_A of rank " + std::to_string(rank));
      return false;
    }
    if (config_ == nullptr) return true;
    std::int64_t const experts = place.part == ModelPart::fused_experts ? shape_.moe().num_experts : 1;
    std::int64_t const expected = std::int64_t{config_->rank_of(pair.path)} * experts;
    if (rank == expected) return true;
    scope_.fault(
        Errc::shape_mismatch, *pair.a,
        "is of rank " + std::to_string(rank) + ", the configuration gives " + std::to_string(expected));
    return false;
  }

  AuditScope const scope_;
  ModelShape const& shape_;
  LoadOptions const& options_;
  PeftConfig const* config_;
  AuditedParts parts_;
  std::set<std::string> unmatched_;  // paths of modules that the model does not have
  // The first fused pair whose shapes fit this way round alone, the other alone, or both.
  TensorInfo const* current_ = nullptr;
  TensorInfo const* older_ = nullptr;
  TensorInfo const* silent_ = nullptr;
  std::optional<std::string> wrapper_;  // what stands before the layer number in every matched key
};

}  // namespace atlas::lora::inline v0::detail
