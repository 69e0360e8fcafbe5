// SPDX-License-Identifier: AGPL-3.0-only
//
// Which linears a model has, in which layers and how wide: the single authority for pool sizes, the walk of
// packing, tables and the audit of adapters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

namespace detail {
/// Far beyond any model; they bound what a bad description can ask for.
inline constexpr std::int32_t most_layers = 65536;
inline constexpr std::int32_t most_experts = 65536;
}  // namespace detail

/// What a model has beside dense linears: routed experts. `num_experts` 0 means a dense model.
struct MoeShape {
  std::int32_t num_experts = 0;
  std::vector<std::int32_t> layers{};  ///< layers whose feed-forward part is a mixture, ascending
  std::int64_t hidden = 0;             ///< k_in of an expert's gate and up, and of the router
  std::int64_t intermediate = 0;       ///< n_out of an expert's gate and up
  /// The same for each of `layers`, in models whose layers differ; empty otherwise.
  std::vector<std::int64_t> layer_intermediate{};

  /// The index into `layers` of global layer `layer`; none when it has no experts.
  [[nodiscard]] std::optional<std::size_t> find(std::int32_t layer) const noexcept {
    auto const at = std::lower_bound(layers.begin(), layers.end(), layer);
    if (at == layers.end() || *at != layer) return std::nullopt;
    return static_cast<std::size_t>(at - layers.begin());
  }
  /// One expert's linear in `layers[index]` as a module: its widths, and its place for messages. The expert
  /// of a module is not part of its name.
  [[nodiscard]] Module linear(std::size_t index, ExpertLinear which) const {
    std::int64_t const inner = layer_intermediate.empty() ? intermediate : layer_intermediate[index];
    constexpr char const* names[] = {"gate_proj", "up_proj", "down_proj"};
    bool const down = which == ExpertLinear::down;
    return Module{names[static_cast<std::size_t>(which)],
                  down ? hidden : inner,
                  down ? inner : hidden,
                  {layers[index]},
                  {},
                  true};
  }
  /// The router of `layers[index]` as a module.
  [[nodiscard]] Module router(std::size_t index) const {
    return Module{"mlp.gate", num_experts, hidden, {layers[index]}, {}};
  }

  friend bool operator==(MoeShape const&, MoeShape const&) = default;
};

/// What a `ModelShape` is made from. An engine may write its own: any names, any widths, fused or not.
struct ModelDescription {
  std::int32_t num_layers = 0;
  std::vector<Module> modules{};  ///< their order is the order inside a layer of a packed slot
  MoeShape moe{};
  std::int64_t hidden = 0;  ///< width of an embedding row; 0 when token rows are of no interest
  std::int64_t vocab = 0;   ///< rows of the embedding; 0 likewise
  bool tied_head = false;   ///< whether `lm_head` is the embedding
};

/// A checked `ModelDescription`. Immutable; copies are cheap enough to pass around at start-up.
class ModelShape {
 public:
  /// An empty model: no layers, no modules.
  ModelShape() = default;

  /// Checks and takes a description. Errors (`invalid_argument`, naming the module): no layers, an empty
  /// name, a width below 1 or whose products overflow 63 bits, a layer out of range, unsorted or twice, two
  /// modules of one name in one layer, `parts` that do not sum to `n_out`; the same of experts.
  [[nodiscard]] static Result<ModelShape> create(ModelDescription description) {
    if (auto const fault = check(description); !fault.empty()) return fail(Errc::invalid_argument, fault);
    ModelShape shape;
    shape.description_ = std::move(description);
    shape.index_sites();
    shape.fingerprint_ = hash(shape.description_);
    return shape;
  }

  /// Layers, at least 1 unless the model is empty.
  [[nodiscard]] std::int32_t num_layers() const noexcept { return description_.num_layers; }
  /// The linears, in the description's order.
  [[nodiscard]] std::span<Module const> modules() const noexcept { return description_.modules; }
  /// The linear of a site of this model.
  [[nodiscard]] Module const& module(Site site) const noexcept {
    return description_.modules[static_cast<std::size_t>(site.module)];
  }
  /// The routed experts; `num_experts` 0 where there are none.
  [[nodiscard]] MoeShape const& moe() const noexcept { return description_.moe; }
  /// Elements of an embedding row, or 0.
  [[nodiscard]] std::int64_t hidden() const noexcept { return description_.hidden; }
  /// Rows of the embedding, or 0.
  [[nodiscard]] std::int64_t vocab() const noexcept { return description_.vocab; }
  /// Whether `lm_head` is the embedding.
  [[nodiscard]] bool tied_head() const noexcept { return description_.tied_head; }

  /// A hash of the names, widths and layers of all linears and experts, and of the embedding's: shapes that
  /// differ in it are different models, and an adapter that was audited against one is not for the other.
  /// Never 0.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  /// Every place that may have a pair, in packing order: layers ascending, modules in list order within a
  /// layer, model-wide modules last.
  [[nodiscard]] std::span<Site const> sites() const noexcept { return sites_; }

  /// The index into `sites()` of a module in a layer (or of a model-wide one, with `model_wide`); none when
  /// that layer does not have it.
  [[nodiscard]] std::optional<std::size_t> find(std::int32_t layer, std::string_view name) const noexcept {
    if (layer < model_wide || layer >= num_layers()) return std::nullopt;
    auto const row = static_cast<std::size_t>(layer == model_wide ? num_layers() : layer);
    for (std::size_t i = layer_begin_[row]; i < layer_begin_[row + 1]; ++i) {
      if (module(sites_[i]).name == name) return i;
    }
    return std::nullopt;
  }

  /// The index into `sites()` of `site`; none when the model does not have it.
  [[nodiscard]] std::optional<std::size_t> find(Site site) const noexcept {
    if (site.layer < model_wide || site.layer >= num_layers()) return std::nullopt;
    auto const row = static_cast<std::size_t>(site.layer == model_wide ? num_layers() : site.layer);
    for (std::size_t i = layer_begin_[row]; i < layer_begin_[row + 1]; ++i) {
      if (sites_[i] == site) return i;
    }
    return std::nullopt;
  }

 private:
  static std::string check(ModelDescription const& d) {
    if (d.num_layers < 1 || d.num_layers > detail::most_layers) {
      return "model: num_layers is " + std::to_string(d.num_layers) + ", must be in [1, " +
             std::to_string(detail::most_layers) + "]";
    }
    if (d.hidden < 0 || d.vocab < 0) return "model: hidden and vocab must not be negative";
    for (std::size_t i = 0; i < d.modules.size(); ++i) {
      Module const& m = d.modules[i];
      std::string const name = "module '" + m.name + "'";
      if (m.name.empty()) return "module " + std::to_string(i) + ": empty name";
      constexpr std::int64_t widest = std::numeric_limits<std::int32_t>::max();
      if (m.n_out < 1 || m.k_in < 1 || m.n_out > widest || m.k_in > widest) {
        return name + ": n_out " + std::to_string(m.n_out) + " and k_in " + std::to_string(m.k_in) +
               " must be in [1, 2^31)";
      }
      if (!m.parts.empty()) {
        std::int64_t sum = 0;
        for (std::int64_t const part : m.parts) {
          if (part < 1 || part > m.n_out - sum) return name + ": parts do not sum to n_out";
          sum += part;
        }
        if (sum != m.n_out) return name + ": parts do not sum to n_out";
      }
      if (auto const fault = check_layers(d, m); !fault.empty()) return name + ": " + fault;
      for (std::size_t j = 0; j < i; ++j) {
        Module const& other = d.modules[j];
        if (other.name != m.name) continue;
        for (std::int32_t const layer : m.layers) {
          if (std::find(other.layers.begin(), other.layers.end(), layer) != other.layers.end()) {
            return name + ": twice in layer " + std::to_string(layer);
          }
        }
      }
    }
    return check_experts(d);
  }

  static std::string check_experts(ModelDescription const& d) {
    MoeShape const& moe = d.moe;
    if (moe.num_experts > detail::most_experts) {
      return "model: num_experts is " + std::to_string(moe.num_experts) + ", at most " +
             std::to_string(detail::most_experts) + " allowed";
    }
    if (moe.num_experts == 0 && moe.layers.empty()) return {};
    if (moe.num_experts < 1) return "experts: num_experts is " + std::to_string(moe.num_experts);
    constexpr std::int64_t widest = std::numeric_limits<std::int32_t>::max();
    auto const bad = [](std::int64_t width) { return width < 1 || width > widest; };
    if (bad(moe.hidden) || bad(moe.intermediate))
      return "experts: hidden and intermediate must be in [1, 2^31)";
    if (!moe.layer_intermediate.empty() && moe.layer_intermediate.size() != moe.layers.size()) {
      return "experts: layer_intermediate must be empty or have one width a layer";
    }
    for (std::int64_t const width : moe.layer_intermediate) {
      if (bad(width)) return "experts: layer_intermediate must be in [1, 2^31)";
    }
    if (moe.layers.empty()) return "experts: no layer has them";
    auto const fault = check_ascending(d, moe.layers);
    return fault.empty() ? fault : "experts: " + fault;
  }

  static std::string check_layers(ModelDescription const& d, Module const& m) {
    if (m.layers.empty()) return "no layer has it";
    if (m.layers.size() == 1 && m.layers[0] == model_wide) return {};
    return check_ascending(d, m.layers);
  }

  static std::string check_ascending(ModelDescription const& d, std::vector<std::int32_t> const& layers) {
    std::int32_t previous = -1;
    for (std::int32_t const layer : layers) {
      if (layer < 0 || layer >= d.num_layers) {
        return "layer " + std::to_string(layer) + " is not in [0, " + std::to_string(d.num_layers) + ")";
      }
      if (layer <= previous) return "layers are not ascending at " + std::to_string(layer);
      previous = layer;
    }
    return {};
  }

  static std::uint64_t hash(ModelDescription const& d) noexcept {
    std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a over 64-bit numbers
    auto const add = [&](auto number) {
      hash = (hash ^ static_cast<std::uint64_t>(number)) * 0x100000001b3U;
    };
    auto const add_all = [&](auto const& numbers) {
      add(numbers.size());
      for (auto const number : numbers) add(number);
    };
    for (auto const number : {std::int64_t{d.num_layers}, d.hidden, d.vocab, std::int64_t{d.tied_head},
                              std::int64_t{d.moe.num_experts}, d.moe.hidden, d.moe.intermediate}) {
      add(number);
    }
    add_all(d.moe.layers);
    add_all(d.moe.layer_intermediate);
    for (Module const& module : d.modules) {
      add_all(module.name);
      add(module.n_out);
      add(module.k_in);
      add_all(module.layers);
      add_all(module.parts);
    }
    return hash == 0 ? 1 : hash;
  }

  void index_sites() {
    std::vector<std::vector<std::int32_t>> by_layer(static_cast<std::size_t>(num_layers()) + 1);
    for (std::size_t m = 0; m < description_.modules.size(); ++m) {
      for (std::int32_t const layer : description_.modules[m].layers) {
        by_layer[static_cast<std::size_t>(layer == model_wide ? num_layers() : layer)].push_back(
            static_cast<std::int32_t>(m));
      }
    }
    layer_begin_.assign(1, 0);
    for (std::size_t row = 0; row < by_layer.size(); ++row) {
      std::int32_t const layer = row + 1 == by_layer.size() ? model_wide : static_cast<std::int32_t>(row);
      for (std::int32_t const m : by_layer[row]) sites_.push_back(Site{layer, m});
      layer_begin_.push_back(sites_.size());
    }
  }

  ModelDescription description_;
  std::uint64_t fingerprint_ = hash(description_);
  std::vector<Site> sites_;
  std::vector<std::size_t> layer_begin_{0, 0};  // [num_layers + 2]: where each layer's sites begin in sites_
};

}  // namespace atlas::lora::inline v0
