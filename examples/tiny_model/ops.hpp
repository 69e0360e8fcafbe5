// SPDX-License-Identifier: AGPL-3.0-only
//
// What a Llama does between its matrix products, one small function object per operation. Each handles one
// item of its output by itself, so a device is a way to run items 0 .. count - 1: a loop on the CPU, one
// thread an item on the GPU. Everything is summed in f32 and rounded to T once. Not tuned for speed.
#pragma once

#include <cmath>
#include <cstdint>

#include <atlas/lora.hpp>

namespace tiny_model {

using atlas::lora::Element;
using atlas::lora::from_f32;
using atlas::lora::to_f32;

/// Widths of a Llama, or of a Qwen3-MoE, which is one with normed heads and experts; as config.json gives
/// them.
struct LlamaConfig {
  std::int64_t vocab = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t head_dim = 0;
  std::int32_t num_layers = 0;
  std::int32_t num_heads = 0;
  std::int32_t num_kv_heads = 0;
  float rms_norm_eps = 0.0F;
  double rope_theta = 0.0;
  bool norms_heads = false;           ///< whether queries and keys are normed head by head
  std::int32_t num_experts = 0;       ///< 0: a dense feed-forward part
  std::int32_t top_k = 0;             ///< experts that a token chooses
  std::int64_t moe_intermediate = 0;  ///< of one expert
  bool norm_topk = false;             ///< whether the chosen experts' weights are made to sum to 1

  [[nodiscard]] ATLAS_HD std::int64_t q_width() const { return num_heads * head_dim; }
  [[nodiscard]] ATLAS_HD std::int64_t kv_width() const { return num_kv_heads * head_dim; }
  [[nodiscard]] ATLAS_HD std::int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

/// What every row of a step is, `int32[rows]` each, in the device's memory at fixed addresses.
struct Rows {
  std::int32_t* tokens = nullptr;
  std::int32_t* positions = nullptr;
  std::int32_t* sequences = nullptr;  ///< whose keys and values the row sees
};

/// One layer's keys or values: `[sequence, position, kv_width]`.
template <Element T>
struct Cache {
  T* data = nullptr;
  std::int64_t max_positions = 0;
  std::int64_t width = 0;

  [[nodiscard]] ATLAS_HD T* at(std::int64_t sequence, std::int64_t position) const {
    return data + (sequence * max_positions + position) * width;
  }
};

/// h[row, :] = table[token of row, :]; one item per element of h.
template <Element T>
struct Embed {
  T const* table;
  std::int32_t const* tokens;
  T* h;
  std::int64_t hidden;

  ATLAS_HD void operator()(std::int64_t item) const {
    h[item] = table[tokens[item / hidden] * hidden + item % hidden];
  }
};

/// y = weight * x / sqrt(mean(x^2) + eps); one item per row.
template <Element T>
struct RmsNorm {
  T const* x;
  T const* weight;
  T* y;
  std::int64_t width;
  float eps;

  ATLAS_HD void operator()(std::int64_t row) const {
    float sum = 0.0F;
    for (std::int64_t i = 0; i < width; ++i) {
      float const value = to_f32(x[row * width + i]);
      sum += value * value;
    }
    float const factor = 1.0F / sqrtf(sum / static_cast<float>(width) + eps);
    for (std::int64_t i = 0; i < width; ++i) {
      y[row * width + i] = from_f32<T>(to_f32(weight[i]) * (to_f32(x[row * width + i]) * factor));
    }
  }
};

/// Norms every query and key head of qkv `[rows, qkv_width]` in place, as RmsNorm does a row; one item per
/// head.
template <Element T>
struct NormHeads {
  T* qkv;
  T const* query_weight;  // [head_dim]
  T const* key_weight;
  LlamaConfig config;

  ATLAS_HD void operator()(std::int64_t item) const {
    std::int64_t const heads = config.num_heads + config.num_kv_heads;  // keys lie behind queries
    std::int64_t const row = item / heads, head = item % heads;
    T* const own = qkv + row * config.qkv_width() + head * config.head_dim;
    RmsNorm<T>{own, head < config.num_heads ? query_weight : key_weight, own, config.head_dim,
               config.rms_norm_eps}(0);
  }
};

/// Rotates the halves of each query and key head by the row's position, queries in place and keys into the
/// cache, and puts values there as they are. One item per pair (i, i + head_dim / 2) of every head of qkv.
template <Element T>
struct RotateAndCache {
  T* qkv;                    // [rows, qkv_width]
  float const* frequencies;  // [head_dim / 2]
  Rows rows;
  Cache<T> keys, values;
  LlamaConfig config;

  ATLAS_HD void operator()(std::int64_t item) const {
    std::int64_t const half = config.head_dim / 2;
    std::int64_t const row = item / (config.qkv_width() / 2);
    std::int64_t const column = item % (config.qkv_width() / 2) / half * config.head_dim;
    std::int64_t const i = item % half;
    std::int64_t const key = column - config.q_width(), value = key - config.kv_width();

    T* const from = qkv + row * config.qkv_width() + column;
    T* const to = value >= 0 ? values.at(rows.sequences[row], rows.positions[row]) + value
                  : key >= 0 ? keys.at(rows.sequences[row], rows.positions[row]) + key
                             : from;
    float const angle = value >= 0 ? 0.0F : static_cast<float>(rows.positions[row]) * frequencies[i];
    float const cosine = cosf(angle), sine = sinf(angle);
    float const low = to_f32(from[i]), high = to_f32(from[i + half]);
    to[i] = from_f32<T>(low * cosine - high * sine);
    to[i + half] = from_f32<T>(high * cosine + low * sine);
  }
};

/// Causal attention over the row's own sequence, its position included; one item per element of
/// out `[rows, q_width]`. The softmax runs along: whenever a larger score comes, what was summed is scaled
/// down.
template <Element T>
struct Attention {
  T const* qkv;
  T* out;
  Rows rows;
  Cache<T> keys, values;
  LlamaConfig config;

  ATLAS_HD void operator()(std::int64_t item) const {
    std::int64_t const row = item / config.q_width(), column = item % config.q_width();
    std::int64_t const head = column / config.head_dim, i = column % config.head_dim;
    std::int64_t const kv = head / (config.num_heads / config.num_kv_heads) * config.head_dim;
    T const* const query = qkv + row * config.qkv_width() + head * config.head_dim;
    float const scale = 1.0F / sqrtf(static_cast<float>(config.head_dim));

    float largest = -INFINITY, total = 0.0F, sum = 0.0F;
    for (std::int32_t position = 0; position <= rows.positions[row]; ++position) {
      T const* const key = keys.at(rows.sequences[row], position) + kv;
      float score = 0.0F;
      for (std::int64_t k = 0; k < config.head_dim; ++k) score += to_f32(query[k]) * to_f32(key[k]);
      score *= scale;
      float const raised = fmaxf(largest, score);
      float const shrink = expf(largest - raised), weight = expf(score - raised);
      total = total * shrink + weight;
      sum = sum * shrink + weight * to_f32(values.at(rows.sequences[row], position)[kv + i]);
      largest = raised;
    }
    out[item] = from_f32<T>(sum / total);
  }
};

/// out = silu(gate) * up, gate and up side by side in `[rows, 2 * width]`; one item per element of out.
template <Element T>
struct SiluMultiply {
  T const* gate_up;
  T* out;
  std::int64_t width;

  ATLAS_HD void operator()(std::int64_t item) const {
    T const* const row = gate_up + item / width * 2 * width;
    float const gate = to_f32(row[item % width]), up = to_f32(row[width + item % width]);
    out[item] = from_f32<T>(gate / (1.0F + expf(-gate)) * up);
  }
};

/// h += y; one item per element.
template <Element T>
struct Add {
  T* h;
  T const* y;

  ATLAS_HD void operator()(std::int64_t item) const {
    h[item] = from_f32<T>(to_f32(h[item]) + to_f32(y[item]));
  }
};

}  // namespace tiny_model
