// SPDX-License-Identifier: AGPL-3.0-only
//
// What the audit of an adapter sorts tensors into, and how it reports what is wrong with one.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/fused_experts.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
#include "atlas/lora/adapter/tensor_name.hpp"
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

/// An extent that the model leaves open.
inline constexpr std::int64_t any_extent = -1;

/// What one file is audited against, and where its faults go.
struct AuditScope {
  std::string const& file;
  ModelShape const& shape;
  LoadOptions const& options;
  PeftConfig const* config;  ///< null for a configuration that has faults of its own
  Faults& faults;

  void fault(Errc code, std::string const& what) const { faults.add(code, file + ": " + what); }
  void fault(Errc code, TensorInfo const& tensor, std::string const& what) const {
    fault(code, "tensor '" + printable(tensor.name) + "': " + what);
  }

  /// Whether the tensor has these extents; a fault where not. `words` says what they are.
  bool check_shape(TensorInfo const& tensor, std::vector<std::int64_t> const& expected,
                   std::string const& words) const {
    bool fits = tensor.shape.size() == expected.size();
    for (std::size_t i = 0; fits && i < expected.size(); ++i) {
      fits = expected[i] == any_extent ? tensor.shape[i] >= 1 : tensor.shape[i] == expected[i];
    }
    if (fits) return true;
    std::string wanted;
    for (std::int64_t const extent : expected) {
      wanted +=
          (wanted.empty() ? "" : ", ") + (extent == any_extent ? std::string("any") : std::to_string(extent));
    }
    fault(Errc::shape_mismatch, tensor,
          "is " + shape_text(tensor.shape) + ", the model needs [" + wanted + "] ([" + words + "])");
    return false;
  }
};

}  // namespace atlas::lora::inline v0::detail
