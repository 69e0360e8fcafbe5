// SPDX-License-Identifier: AGPL-3.0-only
//
// A PEFT adapter from its directory: read, audited against a model, and digested.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/audit.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/adapter/coverage.hpp"
#include "atlas/lora/adapter/digest.hpp"
#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/file.hpp"
#include "atlas/lora/adapter/fused_experts.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
#include "atlas/lora/adapter/tensor_name.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// One load, from a directory to an adapter or to all that is wrong with it.
class AdapterLoader {
 public:
  AdapterLoader(std::string const& directory, ModelShape const& shape, LoadOptions const& options)
      : shape_(shape),
        options_(options),
        config_path_(in(directory, "adapter_config.json")),
        tensors_path_(in(directory, "adapter_model.safetensors")),
        pickle_path_(in(directory, "adapter_model.bin")) {}

  [[nodiscard]] Result<Adapter> run() {
    bool const configured = read_config();
    auto const file = SafetensorsFile::open(tensors_path_);
    if (!file) {
      bool const pickle = file.error().code == Errc::not_found && exists(pickle_path_);
      faults_.add(pickle ? Error{Errc::unsupported, pickle_path_ + ": a pickle runs code when it is read; "
                                                                   "adapter_model.safetensors is needed"}
                         : file.error());
      return faults_.failure();
    }
    AuditedParts parts =
        Audit(tensors_path_, shape_, options_, configured ? &config_ : nullptr, faults_).run(file->tensors());
    if (configured) Coverage(config_path_, config_, shape_, options_, faults_).run(parts);
    if (!faults_.empty()) return faults_.failure();

    adapter_.warnings = std::move(parts.warnings);
    adapter_.modules_present = parts.modules_present;
    for (auto const& [place, pair] : parts.pairs) read_pair(*file, place, pair, parts.older_axes);
    sort_experts();
    read_table(*file, parts.embedding, adapter_.raw_overlay.embedding);
    read_table(*file, parts.head, adapter_.raw_overlay.head);
    if (!faults_.empty()) return faults_.failure();
    adapter_.modules_applied = std::ssize(parts.pairs);
    clip_vocabulary();
    warn_of_zero_scales();
    adapter_.digest = digest();
    adapter_.model = shape_.fingerprint();
    return std::move(adapter_);
  }

 private:
  static std::string in(std::string const& directory, char const* file) {
    return directory + (directory.ends_with('/') ? "" : "/") + file;
  }

  // Whether the configuration is without fault.
  bool read_config() {
    auto const text = read_text(config_path_, most_config_bytes);
    if (text) {
      config_ = gather_peft_config(*text, config_path_, options_, faults_);
    } else {
      faults_.add(text.error());
    }
    return faults_.empty();
  }

  // A tensor whose values were looked at; none after a fault.
  std::optional<HostTensor> read(SafetensorsFile const& file, TensorInfo const& info) {
    auto tensor = file.read(info.name);
    if (!tensor) {
      faults_.add(tensor.error());
      return std::nullopt;
    }
    std::size_t const count = tensor->bytes.size() / element_bytes(tensor->type);
    for (std::size_t i = 0; i < count && !options_.keep_non_finite; ++i) {
      std::uint32_t const magnitude = magnitude_bits(f32_bits_at(*tensor, i));
      if (magnitude < infinite_bits) continue;
      faults_.add(Errc::out_of_range, tensors_path_ + ": tensor '" + printable(info.name) + "': element " +
                                          std::to_string(i) + " is " +
                                          (magnitude > infinite_bits ? "NaN" : "infinite"));
      return std::nullopt;
    }
    return std::move(*tensor);
  }

  void read_pair(SafetensorsFile const& file, PairPlace const& place, PairTensors const& pair,
                 bool older_axes) {
    float const scale = config_.scale_of(pair.path);
    if (magnitude_bits(detail::bit_cast<std::uint32_t>(scale)) >= infinite_bits) {
      faults_.add(Errc::out_of_range, config_path_ + ": field 'lora_alpha': the scale of '" +
                                          printable(pair.path) + "' is beyond f32");
    }
    auto a = read(file, *pair.a);
    auto b = read(file, *pair.b);
    std::optional<HostTensor> bias;
    if (pair.bias != nullptr) bias = read(file, *pair.bias);
    if (!a || !b) return;
    auto const rank = static_cast<std::int32_t>(pair.a->shape[0]);
    std::int32_t one_rank = rank;
    switch (place.part) {
      case ModelPart::router:
        adapter_.routers.push_back({place.layer, rank, scale, *std::move(a), *std::move(b), std::move(bias)});
        break;
      case ModelPart::expert:
        adapter_.experts.push_back({place.layer, place.expert, place.expert_linear, rank, scale,
                                    *std::move(a), *std::move(b), std::move(bias)});
        break;
      case ModelPart::fused_experts:
        one_rank = rank / shape_.moe().num_experts;
        append_experts(*a, *b, place.layer, scale, pair.parameter, older_axes, shape_.moe().num_experts,
                       adapter_.experts);
        break;
      default:
        adapter_.pairs.push_back(
            {shape_.sites()[place.site], rank, scale, *std::move(a), *std::move(b), std::move(bias)});
    }
    adapter_.max_rank = std::max(adapter_.max_rank, one_rank);
  }

  // Into their order; two pairs of one linear are a fault.
  void sort_experts() {
    auto const place = [](ExpertPair const& pair) {
      return std::tuple(pair.layer, pair.expert, pair.linear);
    };
    auto& experts = adapter_.experts;
    std::stable_sort(experts.begin(), experts.end(),
                     [&](ExpertPair const& a, ExpertPair const& b) { return place(a) < place(b); });
    for (std::size_t i = 1; i < experts.size(); ++i) {
      if (place(experts[i - 1]) != place(experts[i])) continue;
      faults_.add(Errc::unmatched, tensors_path_ + ": tensor '" + printable(experts[i].a.name) +
                                       "': is of a linear that '" + printable(experts[i - 1].a.name) +
                                       "' changes too");
      return;
    }
  }

  void read_table(SafetensorsFile const& file, TableTensors const& tensors, RawTokenTable& raw) {
    if (tensors.empty()) return;
    for (auto const& [info, member] :
         {std::pair(tensors.table, &raw.table), std::pair(tensors.rows, &raw.rows),
          std::pair(tensors.lora_a, &raw.lora_a), std::pair(tensors.lora_b, &raw.lora_b)}) {
      if (info != nullptr) *member = read(file, *info);
    }
    raw.ids = tensors.ids;
    if (tensors.lora_a != nullptr) raw.lora_scale = config_.scale_of(tensors.path);
  }

  void clip_vocabulary() {
    RawOverlay& raw = adapter_.raw_overlay;
    if (!options_.clip_vocabulary || shape_.vocab() == 0) return;
    raw.rows_left_out = clip_table(raw.embedding, shape_.vocab()) + clip_table(raw.head, shape_.vocab());
    if (raw.rows_left_out == 0) return;
    adapter_.warnings.push_back(tensors_path_ + ": " + std::to_string(raw.rows_left_out) +
                                " token rows beyond the vocabulary of " + std::to_string(shape_.vocab()) +
                                " are left out");
  }

  void warn_of_zero_scales() {
    auto const zeros_of = [](auto const& pairs) {
      return std::count_if(pairs.begin(), pairs.end(), [](auto const& pair) { return pair.scale == 0.0F; });
    };
    auto const zeros = zeros_of(adapter_.pairs) + zeros_of(adapter_.routers) + zeros_of(adapter_.experts);
    if (zeros == 0) return;
    std::size_t const all = adapter_.pairs.size() + adapter_.routers.size() + adapter_.experts.size();
    adapter_.warnings.push_back(config_path_ + ": the scale of " + std::to_string(zeros) + " of " +
                                std::to_string(all) + " modules is 0, so they stay the base's");
  }

  template <class Pair>
  static void add_weights(DigestStream& stream, Pair const& pair) {
    stream.add(pair.scale);
    stream.add(pair.a);
    stream.add(pair.b);
    stream.add(pair.bias.has_value());
    if (pair.bias) stream.add(*pair.bias);
  }

  // Of the adapter as it is applied: places, scales, weights, token ids and options.
  [[nodiscard]] Digest digest() const {
    DigestStream stream;
    stream.add(options_.lenient);
    stream.add(options_.base_is_converted);
    stream.add(options_.clip_vocabulary);
    stream.add(options_.keep_non_finite);
    stream.add(std::string_view(options_.model_prefix));
    stream.add(static_cast<std::uint64_t>(options_.prefix_map.size()));
    for (PrefixRename const& rename : options_.prefix_map) {
      stream.add(std::string_view(rename.from));
      stream.add(std::string_view(rename.to));
    }
    stream.add(options_.fused_expert_axes);
    stream.add(static_cast<std::uint64_t>(adapter_.pairs.size()));
    for (AdapterPair const& pair : adapter_.pairs) {
      stream.add(pair.site.layer);
      stream.add(std::string_view(shape_.module(pair.site).name));
      add_weights(stream, pair);
    }
    stream.add(static_cast<std::uint64_t>(adapter_.routers.size()));
    for (RouterPair const& pair : adapter_.routers) {
      stream.add(pair.layer);
      add_weights(stream, pair);
    }
    stream.add(static_cast<std::uint64_t>(adapter_.experts.size()));
    for (ExpertPair const& pair : adapter_.experts) {
      stream.add(pair.layer);
      stream.add(pair.expert);
      stream.add(pair.linear);
      add_weights(stream, pair);
    }
    for (RawTokenTable const* const table : {&adapter_.raw_overlay.embedding, &adapter_.raw_overlay.head}) {
      for (auto const* const tensor : {&table->table, &table->rows, &table->lora_a, &table->lora_b}) {
        stream.add(tensor->has_value());
        if (*tensor) stream.add(**tensor);
      }
      stream.add(table->lora_scale);
      stream.add(static_cast<std::uint64_t>(table->ids.size()));
      for (std::int64_t const id : table->ids) stream.add(id);
    }
    return stream.digest();
  }

  ModelShape const& shape_;
  LoadOptions const& options_;
  std::string config_path_;
  std::string tensors_path_;
  std::string pickle_path_;
  PeftConfig config_;
  Faults faults_;
  Adapter adapter_;
};

}  // namespace detail

/// Reads the adapter in `directory` (`adapter_config.json` and `adapter_model.safetensors`, as PEFT writes
/// them) and audits it against `shape`: every tensor is consumed or refused, every target has its tensors, A
/// and B are paired and shaped. Token rows are recognised and kept apart (see `Adapter`).
/// Errors: everything that is wrong at once, one line each, naming the tensor or field; the code is that of
/// the first line. Weights are read only after the audit, into memory that the model's widths bound.
[[nodiscard]] inline Result<Adapter> load_adapter(std::string const& directory, ModelShape const& shape,
                                                  LoadOptions const& options = {}) {
  return detail::AdapterLoader(directory, shape, options).run();
}

}  // namespace atlas::lora::inline v0
