// SPDX-License-Identifier: AGPL-3.0-only
//
// The audit of the tensors that replace or adapt rows of a model's embedding and head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "atlas/lora/adapter/audit_parts.hpp"
#include "atlas/lora/adapter/module_names.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
#include "atlas/lora/adapter/tensor_name.hpp"
#include "atlas/lora/adapter/token_table.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Sorts the tensors of tables into `parts`, one by one, and checks what has come together.
class TableAudit {
 public:
  TableAudit(AuditScope const& scope, AuditedParts& parts) noexcept
      : scope_(scope), shape_(scope.shape), config_(scope.config), parts_(parts) {}

  /// One of a table, token rows, or a copy of the base model's.
  void sort_table(TensorInfo const& tensor, TensorName const& name) {
    parts_.table_paths.push_back(name.path);
    parts_.table_paths.push_back(renamed(name.path, scope_.options.prefix_map));
    std::int64_t const hidden = shape_.hidden() > 0 ? shape_.hidden() : any_extent;
    bool const rows_only = name.kind == TensorKind::token_rows;
    bool const fits = scope_.check_shape(tensor, {rows_only ? any_extent : vocab_of(tensor, 0), hidden},
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

  /// One of the LoRA pair on the embedding.
  void sort_embedding_pair(TensorInfo const& tensor, TensorName const& name) {
    bool const is_a = name.kind == TensorKind::embedding_a;
    TableTensors& table = parts_.embedding;
    put(is_a ? table.lora_a : table.lora_b, tensor, name, table);
    std::int64_t const hidden = shape_.hidden() > 0 ? shape_.hidden() : any_extent;
    if (is_a) {
      scope_.check_shape(tensor, {any_extent, vocab_of(tensor, 1)}, "rank, vocab");
    } else {
      scope_.check_shape(tensor, {hidden, any_extent}, "hidden, rank");
    }
  }

  /// After the last tensor.
  void check() const {
    for (TableTensors const* const table : {&parts_.embedding, &parts_.head}) check_table(*table);
  }

 private:
  // How many tokens extent `dimension` of a tensor must have: the model's, or more where the rest is left
  // out.
  [[nodiscard]] std::int64_t vocab_of(TensorInfo const& tensor, std::size_t dimension) const {
    std::int64_t const vocab = shape_.vocab();
    if (vocab == 0) return any_extent;
    bool const larger = tensor.shape.size() > dimension && tensor.shape[dimension] > vocab;
    return larger && scope_.options.clip_vocabulary ? any_extent : vocab;
  }

  // A table under two paths, or saved in two ways, is two tables, of which a model has one.
  void put(TensorInfo const*& member, TensorInfo const& tensor, TensorName const& name,
           TableTensors& table) const {
    if (table.path.empty()) table.path = name.path;
    if (member != nullptr) {
      scope_.fault(Errc::unmatched, tensor, "is the same table as '" + printable(member->name) + "'");
    } else if (table.path != name.path) {
      scope_.fault(Errc::unmatched, tensor,
                   "is of '" + printable(name.path) + "', other tensors of the table are of '" +
                       printable(table.path) + "'");
    } else {
      member = &tensor;
    }
  }

  void check_token_rows(TensorInfo const& tensor, TensorName const& name, TableTensors& table) const {
    for (TokenRows const& rows : config_->trainable_tokens) {
      std::string const in_model = renamed(name.path, scope_.options.prefix_map);
      if (!ends_in_name(name.path, rows.module) && !ends_in_name(in_model, rows.module) &&
          !ends_in_name(in_model, renamed(rows.module, scope_.options.prefix_map))) {
        continue;
      }
      if (std::ssize(rows.ids) != tensor.shape[0]) {
        scope_.fault(Errc::shape_mismatch, tensor,
                     "has " + std::to_string(tensor.shape[0]) + " rows, trainable_token_indices has " +
                         std::to_string(rows.ids.size()) + " ids");
      }
      table.ids = rows.ids;
      return;
    }
    scope_.fault(Errc::unmatched, tensor, "has no ids in trainable_token_indices");
  }

  void check_table(TableTensors const& table) const {
    if (table.table != nullptr && table.table->shape.size() == 2) {
      auto const bad = known_ids(table.ids, table.table->shape[0], shape_.vocab()).bad;
      if (bad) {
        scope_.fault(Errc::out_of_range, *table.table,
                     "has no row " + std::to_string(*bad) + ", which trainable_token_indices names");
      }
    }
    if ((table.lora_a == nullptr) != (table.lora_b == nullptr)) {
      bool const lacks_a = table.lora_a == nullptr;
      scope_.fault(Errc::unmatched, lacks_a ? *table.lora_b : *table.lora_a,
                   lacks_a ? "has no lora_embedding_A" : "has no lora_embedding_B");
    }
    if (table.lora_a == nullptr || table.lora_b == nullptr) return;
    if (table.table != nullptr || table.rows != nullptr) {
      scope_.fault(Errc::unsupported, *table.lora_a, "LoRA on a table whose rows the adapter also replaces");
    }
    if (table.lora_a->shape.size() != 2 || table.lora_b->shape.size() != 2) return;
    std::int64_t const rank = table.lora_a->shape[0];
    if (table.lora_b->shape[1] != rank) {
      scope_.fault(Errc::shape_mismatch, *table.lora_b,
                   "is of rank " + std::to_string(table.lora_b->shape[1]) +
                       ", its lora_embedding_A of rank " + std::to_string(rank));
    } else if (config_ != nullptr && config_->rank_of(table.path) != rank) {
      scope_.fault(Errc::shape_mismatch, *table.lora_a,
                   "is of rank " + std::to_string(rank) + ", the configuration gives " +
                       std::to_string(config_->rank_of(table.path)));
    }
  }

  AuditScope const& scope_;
  ModelShape const& shape_;
  PeftConfig const* config_;
  AuditedParts& parts_;
};

}  // namespace atlas::lora::inline v0::detail
