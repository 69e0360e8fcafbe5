// SPDX-License-Identifier: AGPL-3.0-only
//
// A whole small Llama, or Qwen3-MoE, whose linears take deltas: weights, a cache of keys and values, and one
// forward pass that serves prefill and decode alike, since every row says its own token, position and
// sequence.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <atlas/lora.hpp>
#include <atlas/peft.hpp>

#include "memory.hpp"
#include "moe.hpp"
#include "ops.hpp"

namespace tiny_model {

/// One row of a step.
struct Row {
  std::int32_t token = 0;
  std::int32_t position = 0;
  std::int32_t sequence = 0;
  std::int32_t slot = atlas::lora::base_slot;
};

/// What the cache and the buffers of a model are sized for.
struct Capacity {
  std::int32_t rows = 0;
  std::int32_t sequences = 0;
  std::int32_t positions = 0;
  std::int32_t slots = 0;
};

/// Reads `directory`/config.json; throws when it describes something that this forward pass does not do.
inline LlamaConfig read_llama_config(std::string const& directory) {
  std::string const path = directory + "/config.json";
  auto const model = expect(atlas::lora::read_model_config(path));
  auto const json = nlohmann::json::parse(std::ifstream(path));
  auto const& rope = json.at("rope_parameters");
  bool const moe = model.model_type == "qwen3_moe";
  if ((model.model_type != "llama" && !moe) || model.heads < 1 || json.value("attention_bias", false) ||
      json.value("mlp_bias", false) || model.tied_head || json.value("hidden_act", "") != "silu" ||
      rope.value("rope_type", "") != "default") {
    throw std::runtime_error(path + ": not a plain Llama or Qwen3-MoE with a head of its own");
  }
  LlamaConfig config;
  config.vocab = model.vocab;
  config.hidden = model.hidden;
  config.intermediate = model.intermediate;
  config.head_dim = model.head_dim > 0 ? model.head_dim : model.hidden / model.heads;
  config.num_layers = model.layers;
  config.num_heads = static_cast<std::int32_t>(model.heads);
  config.num_kv_heads = static_cast<std::int32_t>(model.kv_heads > 0 ? model.kv_heads : model.heads);
  config.rms_norm_eps = json.at("rms_norm_eps").get<float>();
  config.rope_theta = rope.at("rope_theta").get<double>();
  if (moe) {
    config.norms_heads = true;
    config.num_experts = model.num_experts;
    config.top_k = json.at("num_experts_per_tok").get<std::int32_t>();
    config.moe_intermediate = model.moe_intermediate;
    config.norm_topk = json.value("norm_topk_prob", false);
    if (config.num_experts < 1 || config.top_k < 1 || config.top_k > config.num_experts ||
        model.decoder_sparse_step != 1 || !model.mlp_only_layers.empty()) {
      throw std::runtime_error(path + ": layers without experts, or fewer experts than a token chooses");
    }
  }
  if (config.head_dim % 2 != 0 || config.num_heads % config.num_kv_heads != 0) {
    throw std::runtime_error(path + ": heads that do not divide");
  }
  return config;
}

template <class Device>
class Llama {
 public:
  using T = typename Device::element;

  /// Loads `directory`/model.safetensors into the device's memory, rounded to T.
  Llama(Device& device, std::string const& directory, Capacity capacity)
      : device_(device),
        config_(read_llama_config(directory)),
        capacity_(capacity),
        file_(expect(atlas::lora::SafetensorsFile::open(directory + "/model.safetensors"))),
        embedding_(weight("model.embed_tokens", {config_.vocab, config_.hidden})),
        final_norm_(weight("model.norm", {config_.hidden})),
        head_(weight("lm_head", {config_.vocab, config_.hidden})) {
    for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) layers_.push_back(load_layer(layer));
    allocate_buffers();
  }

  [[nodiscard]] LlamaConfig const& config() const { return config_; }

  /// Takes the tables of a pool, which stay where they are for the pool's life.
  template <class Pool>
  void attach(Pool const& pool) {
    for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
      for (auto* const group : layers_[static_cast<std::size_t>(layer)].groups()) {
        for (Linear& linear : *group) linear.table = expect(pool.route(layer, linear.name));
        device_.reserve(plan_, capacity_.rows, deltas(*group, wide_.data()));
      }
      if (is_moe())
        layers_[static_cast<std::size_t>(layer)].moe.attach(device_, pool, layer, plan_, moe_buffers_);
    }
    overlay_ = expect(pool.overlay());
  }

  /// An adapter whose token rows are built against this model's embedding and head.
  [[nodiscard]] atlas::lora::Adapter build(atlas::lora::Adapter adapter,
                                           atlas::lora::ModelShape const& shape) {
    auto embedding = device_.served(embedding_.data(), config_.hidden);
    auto head = device_.served(head_.data(), config_.hidden);
    atlas::lora::ServedTables<decltype(head)> const served{&embedding, &head};
    return expect(atlas::lora::build_overlay(std::move(adapter), shape, served));
  }

  /// Puts what the next forward pass works on where it, or a graph of it, reads it.
  void set_rows(std::span<Row const> rows) {
    for (Row const& row : rows) {
      bool const good = row.token >= 0 && row.token < config_.vocab && row.position >= 0 &&
                        row.position < capacity_.positions && row.sequence >= 0 &&
                        row.sequence < capacity_.sequences;
      if (!good) throw std::runtime_error("a row's token, position or sequence is out of range");
    }
    if (rows.size() > static_cast<std::size_t>(capacity_.rows)) throw std::runtime_error("too many rows");
    set_column(rows, &Row::token, rows_.tokens);
    set_column(rows, &Row::position, rows_.positions);
    set_column(rows, &Row::sequence, rows_.sequences);
    set_column(rows, &Row::slot, plan_.row_slots);
  }

  /// Enqueues one pass over the first `rows` rows; capture-safe. With `adapted` unset not one delta is
  /// launched: the base model as it is without the library.
  void forward(std::int32_t rows, bool adapted) {
    T* const h = hidden_.data();
    T* const x = normed_.data();
    device_.run(Embed<T>{embedding_.data(), rows_.tokens, h, config_.hidden}, rows * config_.hidden);
    if (adapted) device_.plan_rows(plan_, rows);
    if (adapted) device_.replace_rows(overlay_, plan_, rows, rows_.tokens, h);
    for (Layer& layer : layers_) {
      normalize(h, layer.input_norm, x, rows);
      project(x, layer.qkv, wide_.data(), rows, adapted);
      if (config_.norms_heads) {
        device_.run(NormHeads<T>{wide_.data(), layer.query_norm.data(), layer.key_norm.data(), config_},
                    rows * (config_.num_heads + config_.num_kv_heads));
      }
      device_.run(RotateAndCache<T>{wide_.data(), frequencies_.data(), rows_, cache(layer.keys),
                                    cache(layer.values), config_},
                  rows * config_.qkv_width() / 2);
      device_.run(
          Attention<T>{wide_.data(), inner_.data(), rows_, cache(layer.keys), cache(layer.values), config_},
          rows * config_.q_width());
      project(inner_.data(), layer.o, x, rows, adapted);
      device_.run(Add<T>{h, x}, rows * config_.hidden);

      normalize(h, layer.post_attention_norm, x, rows);
      if (is_moe()) {
        layer.moe.forward(device_, x, inner_.data(), rows, adapted, plan_, moe_buffers_);
        device_.run(Add<T>{h, inner_.data()}, rows * config_.hidden);
        continue;
      }
      project(x, layer.gate_up, wide_.data(), rows, adapted);
      device_.run(SiluMultiply<T>{wide_.data(), inner_.data(), config_.intermediate},
                  rows * config_.intermediate);
      project(inner_.data(), layer.down, x, rows, adapted);
      device_.run(Add<T>{h, x}, rows * config_.hidden);
    }
    normalize(h, final_norm_, x, rows);
    device_.multiply(x, head_.data(), logits_.data(), config_.vocab, rows, config_.vocab, config_.hidden);
    if (adapted) device_.recompute_logits(overlay_, plan_, rows, x, logits_.data());
  }

  /// The logits of the last pass, `[rows, vocab]`, after waiting for it.
  [[nodiscard]] std::vector<float> logits(std::int32_t rows) {
    std::vector<float> host(static_cast<std::size_t>(rows * config_.vocab));
    device_.download(logits_.data(), std::span<float>(host));
    return host;
  }

  /// What the last pass chose, after waiting for it: `[rows][layers * top_k]` experts, empty for a dense
  /// model.
  [[nodiscard]] std::vector<std::vector<std::int32_t>> choices(std::int32_t rows) {
    std::vector<std::vector<std::int32_t>> all(static_cast<std::size_t>(rows));
    if (!is_moe()) return all;
    for (Layer const& layer : layers_) {
      std::vector<std::int32_t> host(static_cast<std::size_t>(rows * config_.top_k));
      device_.download(layer.moe.ids(), std::span<std::int32_t>(host));
      for (std::size_t row = 0; row < all.size(); ++row) {
        auto const first = host.begin() + static_cast<std::ptrdiff_t>(row) * config_.top_k;
        std::sort(first, first + config_.top_k);  // which of two comes first does not matter
        all[row].insert(all[row].end(), first, first + config_.top_k);
      }
    }
    return all;
  }

 private:
  template <class V>
  using Buffer = Array<V, typename Device::Backend>;

  struct Linear {
    std::string name;  // below its layer
    Buffer<T> weight;  // [n_out, k_in]
    std::int64_t n_out = 0;
    std::int64_t k_in = 0;
    atlas::lora::RouteTable<T> table{};
  };
  using Linears = std::vector<Linear>;  // that share their input

  struct Layer {
    Buffer<T> input_norm, post_attention_norm;
    Buffer<T> query_norm, key_norm;  // where heads are normed
    Linears qkv, o, gate_up, down;
    MoeLayer<Device> moe;  // instead of gate_up and down
    Buffer<T> keys, values;

    [[nodiscard]] std::vector<Linears*> groups() {
      if (gate_up.empty()) return {&qkv, &o};
      return {&qkv, &o, &gate_up, &down};
    }
  };

  [[nodiscard]] bool is_moe() const { return config_.num_experts > 0; }

  /// The deltas of linears whose outputs lie side by side in y `[rows, width]`.
  static std::vector<atlas::lora::DeltaProjection<T>> deltas(Linears const& linears, T* y) {
    std::int64_t width = 0;
    for (Linear const& linear : linears) width += linear.n_out;
    std::vector<atlas::lora::DeltaProjection<T>> deltas;
    for (Linear const& linear : linears) {
      deltas.push_back({linear.table, y, width});
      y += linear.n_out;
    }
    return deltas;
  }

  /// y = x @ W^T of linears that share x, side by side in y; then the deltas of all of them at once.
  void project(T const* x, Linears const& linears, T* y, std::int32_t rows, bool adapted) {
    auto const outputs = deltas(linears, y);
    for (std::size_t i = 0; i < linears.size(); ++i) {
      device_.multiply(x, linears[i].weight.data(), outputs[i].y, outputs[i].y_row_stride, rows,
                       linears[i].n_out, linears[i].k_in);
    }
    if (adapted) device_.add_deltas(plan_, rows, x, outputs);
  }

  void normalize(T const* h, Buffer<T> const& weight, T* x, std::int32_t rows) {
    device_.run(RmsNorm<T>{h, weight.data(), x, config_.hidden, config_.rms_norm_eps}, rows);
  }

  [[nodiscard]] Cache<T> cache(Buffer<T> const& memory) const {
    return {memory.data(), capacity_.positions, config_.kv_width()};
  }

  void set_column(std::span<Row const> rows, std::int32_t Row::*member, std::int32_t* to) {
    std::vector<std::int32_t> column;
    for (Row const& row : rows) column.push_back(row.*member);
    device_.upload(std::span<std::int32_t const>(column), to);
    device_.synchronize();
  }

  Buffer<T> weight(std::string const& name, std::vector<std::int64_t> const& shape) {
    return stacked({name}, shape);
  }

  /// One linear of all experts of a layer, one after the other.
  Buffer<T> experts(std::string const& prefix, std::string const& name, std::int64_t n_out,
                    std::int64_t k_in) {
    std::vector<std::string> names;
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      names.push_back(prefix + "mlp.experts." + std::to_string(e) + "." + name);
    }
    return stacked(names, {n_out, k_in});
  }

  /// Weights of one shape, one after the other in the device's memory.
  Buffer<T> stacked(std::vector<std::string> const& names, std::vector<std::int64_t> const& shape) {
    std::int64_t count = 1;
    for (std::int64_t const extent : shape) count *= extent;
    auto memory = device_.template allocate<T>(count * std::ssize(names));
    T* to = memory.data();
    for (std::string const& name : names) {
      auto const tensor = expect(file_.read(name + ".weight"));
      if (tensor.shape != shape)
        throw std::runtime_error(file_.path() + ": " + tensor.name + " has another shape");
      std::vector<T> rounded(static_cast<std::size_t>(count));
      expect(atlas::lora::convert<T>(tensor, std::span<T>(rounded)));
      device_.upload(std::span<T const>(rounded), to);
      device_.synchronize();
      to += count;
    }
    return memory;
  }

  Linear linear(std::int32_t layer, std::string const& name, std::int64_t n_out, std::int64_t k_in) {
    return {name, weight("model.layers." + std::to_string(layer) + "." + name, {n_out, k_in}), n_out, k_in};
  }

  Layer load_layer(std::int32_t i) {
    auto const& c = config_;
    std::string const prefix = "model.layers." + std::to_string(i) + ".";
    Layer layer;
    layer.input_norm = weight(prefix + "input_layernorm", {c.hidden});
    layer.post_attention_norm = weight(prefix + "post_attention_layernorm", {c.hidden});
    layer.qkv.push_back(linear(i, "self_attn.q_proj", c.q_width(), c.hidden));
    layer.qkv.push_back(linear(i, "self_attn.k_proj", c.kv_width(), c.hidden));
    layer.qkv.push_back(linear(i, "self_attn.v_proj", c.kv_width(), c.hidden));
    layer.o.push_back(linear(i, "self_attn.o_proj", c.hidden, c.q_width()));
    if (c.norms_heads) {
      layer.query_norm = weight(prefix + "self_attn.q_norm", {c.head_dim});
      layer.key_norm = weight(prefix + "self_attn.k_norm", {c.head_dim});
    }
    if (is_moe()) {
      layer.moe =
          MoeLayer<Device>(device_, c, capacity_.rows, weight(prefix + "mlp.gate", {c.num_experts, c.hidden}),
                           experts(prefix, "gate_proj", c.moe_intermediate, c.hidden),
                           experts(prefix, "up_proj", c.moe_intermediate, c.hidden),
                           experts(prefix, "down_proj", c.hidden, c.moe_intermediate));
    } else {
      layer.gate_up.push_back(linear(i, "mlp.gate_proj", c.intermediate, c.hidden));
      layer.gate_up.push_back(linear(i, "mlp.up_proj", c.intermediate, c.hidden));
      layer.down.push_back(linear(i, "mlp.down_proj", c.hidden, c.intermediate));
    }
    std::int64_t const cached = std::int64_t{capacity_.sequences} * capacity_.positions * c.kv_width();
    layer.keys = device_.template allocate<T>(cached);
    layer.values = device_.template allocate<T>(cached);
    return layer;
  }

  void allocate_buffers() {
    std::int64_t const rows = capacity_.rows;
    row_memory_ = device_.template allocate<std::int32_t>(3 * rows);
    rows_ = {row_memory_.data(), row_memory_.data() + rows, row_memory_.data() + 2 * rows};
    atlas::lora::RowPlanLayout const layout{capacity_.rows, capacity_.slots};
    plan_memory_ = device_.template allocate<std::byte>(static_cast<std::int64_t>(layout.bytes()));
    plan_ = layout.at(plan_memory_.data());
    hidden_ = device_.template allocate<T>(rows * config_.hidden);
    normed_ = device_.template allocate<T>(rows * config_.hidden);
    wide_ = device_.template allocate<T>(rows * std::max(config_.qkv_width(), 2 * config_.intermediate));
    inner_ = device_.template allocate<T>(
        rows * std::max({config_.q_width(), config_.intermediate, config_.hidden}));
    if (is_moe()) moe_buffers_ = MoeBuffers<Device>(device_, config_, capacity_.rows, capacity_.slots);
    logits_ = device_.template allocate<float>(rows * config_.vocab);

    std::vector<float> frequencies;
    for (std::int64_t i = 0; i < config_.head_dim / 2; ++i) {
      double const exponent = static_cast<double>(2 * i) / static_cast<double>(config_.head_dim);
      frequencies.push_back(static_cast<float>(1.0 / std::pow(config_.rope_theta, exponent)));
    }
    frequencies_ = device_.template allocate<float>(config_.head_dim / 2);
    device_.upload(std::span<float const>(frequencies), frequencies_.data());
    device_.synchronize();
  }

  Device& device_;
  LlamaConfig config_;
  Capacity capacity_;
  atlas::lora::SafetensorsFile file_;
  Buffer<T> embedding_, final_norm_, head_;
  std::vector<Layer> layers_;
  Buffer<std::int32_t> row_memory_;
  Rows rows_;
  Buffer<std::byte> plan_memory_;
  atlas::lora::RowPlan plan_;
  atlas::lora::OverlayTable<T> overlay_;
  Buffer<T> hidden_, normed_;  // [rows, hidden]: the residual stream; what a norm or the last linear gives
  Buffer<T> wide_, inner_;     // q, k, v or gate and up side by side; what attention or silu makes of them
  Buffer<float> logits_, frequencies_;
  MoeBuffers<Device> moe_buffers_;
};

}  // namespace tiny_model
