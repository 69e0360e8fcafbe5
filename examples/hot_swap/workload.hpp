// SPDX-License-Identifier: AGPL-3.0-only
//
// What is decoded while adapters come and go: the linears of a model, and adapters of random weights.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <atlas/lora.hpp>

#include "../tiny_model/memory.hpp"

namespace hot_swap {

using namespace atlas::lora;
using tiny_model::expect;

/// A linear of every layer; those of one group share their input and go in one launch.
struct Linear {
  char const* name;
  std::int64_t n_out;
  std::int64_t k_in;
  int group;
};

struct Workload {
  std::vector<Linear> linears;
  std::int32_t layers;
  std::int32_t rows;
  std::int32_t smallest_rank, largest_rank;
  std::size_t names;
  std::size_t versions;                    ///< contents of each name
  std::int32_t slots;                      ///< of the pool, fewer than there are names
  std::size_t kept;                        ///< contents that the host tier has room for
  std::size_t block_bytes;                 ///< of the host tier
  std::chrono::microseconds change_every;  ///< between files that are replaced

  [[nodiscard]] std::size_t contents() const { return names * versions; }
  [[nodiscard]] std::string name(std::size_t index) const { return "tenant " + std::to_string(index); }
};

/// Small enough for a CPU and for many steps.
[[nodiscard]] inline Workload small_workload() {
  return {.linears = {{"self_attn.q_proj", 48, 64, 0}, {"mlp.up_proj", 96, 64, 1}},
          .layers = 2,
          .rows = 8,
          .smallest_rank = 3,
          .largest_rank = 8,
          .names = 6,
          .versions = 3,
          .slots = 4,
          .kept = 4,
          .block_bytes = 1024,
          .change_every = std::chrono::microseconds(500)};
}

/// The decoder layers of Llama-8B, every adapter of rank 16: for a GPU.
[[nodiscard]] inline Workload llama_8b_workload() {
  return {.linears = {{"self_attn.q_proj", 4096, 4096, 0},
                      {"self_attn.k_proj", 1024, 4096, 0},
                      {"self_attn.v_proj", 1024, 4096, 0},
                      {"self_attn.o_proj", 4096, 4096, 1},
                      {"mlp.gate_proj", 14336, 4096, 2},
                      {"mlp.up_proj", 14336, 4096, 2},
                      {"mlp.down_proj", 4096, 14336, 3}},
          .layers = 32,
          .rows = 64,
          .smallest_rank = 16,
          .largest_rank = 16,
          .names = 6,
          .versions = 2,
          .slots = 5,
          .kept = 6,
          .block_bytes = PinnedArena::usual_block_bytes,
          .change_every = std::chrono::milliseconds(250)};
}

[[nodiscard]] inline ModelShape make_shape(Workload const& workload) {
  ModelDescription model;
  model.num_layers = workload.layers;
  std::vector<std::int32_t> layers;
  for (std::int32_t i = 0; i < workload.layers; ++i) layers.push_back(i);
  for (Linear const& linear : workload.linears) {
    model.modules.push_back({linear.name, linear.n_out, linear.k_in, layers});
  }
  return expect(ModelShape::create(model));
}

/// Values in [-1, 1).
[[nodiscard]] inline std::vector<float> random_values(std::uint32_t seed, std::size_t count) {
  std::uint32_t state = seed * 2654435761U + 1;
  std::vector<float> values(count);
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
  }
  return values;
}

[[nodiscard]] inline HostTensor random_tensor(std::uint32_t seed, std::int64_t height, std::int64_t width) {
  std::vector<float> const values = random_values(seed, static_cast<std::size_t>(height * width));
  HostTensor tensor;
  tensor.name = "random";
  tensor.shape = {height, width};
  tensor.bytes.resize(values.size() * sizeof(float));
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// What a file would hold. Every other content of unlike ranks leaves the first site out.
[[nodiscard]] inline Adapter make_adapter(Workload const& workload, ModelShape const& shape,
                                          std::size_t content) {
  Adapter adapter;
  bool const uneven = workload.smallest_rank < workload.largest_rank;
  auto const ranks = static_cast<std::size_t>(workload.largest_rank - workload.smallest_rank + 1);
  adapter.max_rank = workload.smallest_rank + static_cast<std::int32_t>(content % ranks);
  for (std::size_t i = uneven ? content % 2 : 0; i < shape.sites().size(); ++i) {
    Site const site = shape.sites()[i];
    Module const& linear = shape.module(site);
    auto const seed = static_cast<std::uint32_t>(content * 1000 + i * 2);
    adapter.pairs.push_back({site, adapter.max_rank, 0.5F, random_tensor(seed, adapter.max_rank, linear.k_in),
                             random_tensor(seed + 1, linear.n_out, adapter.max_rank), std::nullopt});
  }
  adapter.modules_present = adapter.modules_applied = static_cast<std::int64_t>(adapter.pairs.size());
  adapter.digest = Digest{content, 1};
  adapter.model = shape.fingerprint();
  return adapter;
}

}  // namespace hot_swap
