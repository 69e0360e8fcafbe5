// SPDX-License-Identifier: AGPL-3.0-only
//
// What the tests of loading share: adapters of rank 2 on tiny models, written, loaded and gone.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "adapter_files.hpp"
#include "atlas/lora/adapter/load.hpp"

namespace atlas::lora::testing {

/// A configuration of rank 2 and alpha 4 with these targets, quoted, and more fields.
inline std::string config_of(std::string const& targets, std::string const& more = "") {
  return R"({"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":[)" + targets + "]" + more + "}";
}
inline std::string const q_only = config_of("\"q_proj\"");

/// Writes an adapter and loads it.
inline Result<Adapter> load(std::string const& config, std::vector<TestTensor> const& tensors,
                            ModelShape const& shape, LoadOptions const& options = {}) {
  TemporaryFolder const folder;
  write_adapter(folder, config, tensors);
  return load_adapter(folder.path(), shape, options);
}

inline Adapter good(std::string const& config, std::vector<TestTensor> const& tensors,
                    ModelShape const& shape, LoadOptions const& options = {}) {
  return good(load(config, tensors, shape, options));
}

inline Error bad(std::string const& config, std::vector<TestTensor> const& tensors, ModelShape const& shape,
                 LoadOptions const& options = {}) {
  return bad(load(config, tensors, shape, options));
}

/// The pair of a layer's q of a tiny model.
inline std::vector<TestTensor> q_pair(std::int32_t layer, std::string const& before = "model.layers.") {
  return pair_of(before + std::to_string(layer) + ".self_attn.q_proj", 8, 8, 2);
}
inline std::string const q0 = "base_model.model.model.layers.0.self_attn.q_proj";

}  // namespace atlas::lora::testing
