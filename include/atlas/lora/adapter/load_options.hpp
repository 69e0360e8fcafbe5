// SPDX-License-Identifier: AGPL-3.0-only
//
// What a caller may say about an adapter before it is loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

/// A beginning of module paths in the adapter's file, and what the model calls it: `{"model",
/// "model.language_model"}`. Whole segments only. An empty `from` puts `to` before the path.
struct PrefixRename {
  std::string from;  ///< in the file, without the dot at its end
  std::string to;    ///< in the model, likewise; empty takes `from` away
};

/// Which way round PEFT wrote the pairs of fused experts (3-D parameters named by `target_parameters`).
enum class FusedExpertAxes : std::uint8_t {
  by_shape,  ///< what the shapes of any of the adapter's fused pairs say; when none says, loading fails
  current,   ///< lora_A `[experts * rank, k_in]`, lora_B `[n_out, experts * rank]`
  older,     ///< in and out swapped: lora_A `[experts * rank, n_out]`, lora_B `[k_in, experts * rank]`
};

/// How an adapter is loaded. The digest covers all of it.
struct LoadOptions {
  /// Leave out tensors that belong to no module of the model, each with a warning, where they are errors
  /// otherwise. An adapter of which nothing is left stays an error, and so does everything that is refused
  /// for another reason.
  bool lenient = false;
  /// The base model is the one that the adapter's initialisation (PiSSA, OLoRA, LoftQ, CorDA, LoRA-GA) left
  /// behind.
  bool base_is_converted = false;
  /// Use what an adapter of a larger vocabulary says about the model's own tokens, and leave out its rows
  /// beyond the model's vocabulary, counted in `RawOverlay::rows_left_out`. They are errors otherwise.
  bool clip_vocabulary = false;
  /// Accept NaN and infinity among the weights.
  bool keep_non_finite = false;
  /// The path of the model's part that holds the layers (`"model.language_model"`). Keys under another path
  /// are unmatched. Empty: any one path is good, the same for all keys of the adapter.
  std::string model_prefix{};
  /// Renames of paths, tried in order before anything is matched; the first that fits is applied.
  std::vector<PrefixRename> prefix_map{};
  /// What to believe where a model's widths are such that the shapes of fused experts say nothing.
  FusedExpertAxes fused_expert_axes = FusedExpertAxes::by_shape;
};

}  // namespace atlas::lora::inline v0
