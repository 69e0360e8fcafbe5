// SPDX-License-Identifier: AGPL-3.0-only
//
// One linear projection of a model, as data: nothing in the library knows a model by its code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

/// The layer of a module that belongs to the model and to no layer, such as `lm_head`.
inline constexpr std::int32_t model_wide = -1;

/// A linear `y = x @ W^T` that adapters may change; `W` is `[n_out, k_in]`.
struct Module {
  /// Its path below a layer (`"self_attn.q_proj"`), or below the model when it is model-wide (`"lm_head"`).
  std::string name;
  std::int64_t n_out = 0;  ///< elements of one output row
  std::int64_t k_in = 0;   ///< elements of one input row
  /// The layers that have it, ascending; `{model_wide}` alone for a model-wide one. Two modules may share
  /// a name when their layers differ (a model whose layers have unlike widths).
  std::vector<std::int32_t> layers{};
  /// Rows of each fused part in order (`{q, k, v}`), summing to `n_out`; empty when nothing is fused. Kept
  /// for slicing over devices, which must cut each part by itself.
  std::vector<std::int64_t> parts{};
  /// Whether the measurement lever `StepLevers::apply_ffn` leaves it out: the feed-forward part's linears
  /// (gate, up and down, a shared expert's too), and the output of a hybrid's linear attention.
  bool ffn = false;

  friend bool operator==(Module const&, Module const&) = default;
};

/// One place of a model where an adapter may have a pair: a module in a layer. `module` indexes
/// `ModelShape::modules()`.
struct Site {
  std::int32_t layer = 0;   ///< global layer index, or `model_wide`
  std::int32_t module = 0;  ///< index into `ModelShape::modules()`

  friend constexpr bool operator==(Site const&, Site const&) = default;
};

/// The linears of one expert.
enum class ExpertLinear : std::uint8_t { gate, up, down };
/// How many of them there are.
inline constexpr std::size_t expert_linears = 3;

}  // namespace atlas::lora::inline v0
