// SPDX-License-Identifier: AGPL-3.0-only
//
// The feed-forward part of a Qwen3-MoE: a router, experts as separate matrices, and where the library's
// deltas go among them. Rows of the experts' outputs lie token by token, one for each of its chosen experts.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <atlas/lora.hpp>

#include "memory.hpp"
#include "ops.hpp"

namespace tiny_model {

/// ids and weights of the `top_k` experts of a row, largest first; weights are the softmax over all experts,
/// made to sum to 1 if `normalize`. One item per row.
template <Element T>
struct ChooseExperts {
  T const* logits;    // [rows, num_experts]
  std::int32_t* ids;  // [rows, top_k]
  float* weights;     // [rows, top_k]
  std::int32_t num_experts, top_k;
  bool normalize;

  ATLAS_HD void operator()(std::int64_t row) const {
    T const* const own = logits + row * num_experts;
    std::int32_t* const chosen = ids + row * top_k;
    float largest = -INFINITY, total = 0.0F, kept = 0.0F;
    for (std::int32_t e = 0; e < num_experts; ++e) largest = fmaxf(largest, to_f32(own[e]));
    for (std::int32_t e = 0; e < num_experts; ++e) total += expf(to_f32(own[e]) - largest);
    for (std::int32_t k = 0; k < top_k; ++k) {
      chosen[k] = -1;
      for (std::int32_t e = 0; e < num_experts; ++e) {
        bool taken = false;
        for (std::int32_t before = 0; before < k; ++before) taken = taken || chosen[before] == e;
        if (!taken && (chosen[k] < 0 || to_f32(own[e]) > to_f32(own[chosen[k]]))) chosen[k] = e;
      }
      float const weight = expf(to_f32(own[chosen[k]]) - largest) / total;
      weights[row * top_k + k] = weight;
      kept += weight;
    }
    for (std::int32_t k = 0; normalize && k < top_k; ++k) weights[row * top_k + k] /= kept;
  }
};

/// y[pair] = x[pair / divisor] @ W^T, W of the pair's expert; one item per element of y `[pairs, n_out]`.
template <Element T>
struct ExpertProduct {
  T const* x;
  T const* w;  // [num_experts, n_out, k_in]
  T* y;
  std::int32_t const* ids;
  std::int32_t divisor;
  std::int64_t y_row_stride, n_out, k_in;

  ATLAS_HD void operator()(std::int64_t item) const {
    std::int64_t const pair = item / n_out, n = item % n_out;
    T const* const from = x + pair / divisor * k_in;
    T const* const weight = w + (ids[pair] * n_out + n) * k_in;
    float sum = 0.0F;
    for (std::int64_t k = 0; k < k_in; ++k) sum += to_f32(from[k]) * to_f32(weight[k]);
    y[pair * y_row_stride + n] = from_f32<T>(sum);
  }
};

/// out[row] = the weighted sum over the row's pairs; one item per element of out `[rows, width]`.
template <Element T>
struct WeightedSum {
  T const* y;  // [rows * top_k, width]
  float const* weights;
  T* out;
  std::int32_t top_k;
  std::int64_t width;

  ATLAS_HD void operator()(std::int64_t item) const {
    std::int64_t const row = item / width, i = item % width;
    float sum = 0.0F;
    for (std::int64_t k = 0; k < top_k; ++k) {
      sum += weights[row * top_k + k] * to_f32(y[(row * top_k + k) * width + i]);
    }
    out[item] = from_f32<T>(sum);
  }
};

/// What the layers of a model share while they run.
template <class Device>
struct MoeBuffers {
  using T = typename Device::element;
  template <class V>
  using Buffer = Array<V, typename Device::Backend>;

  MoeBuffers() = default;
  MoeBuffers(Device& device, LlamaConfig const& config, std::int32_t rows, std::int32_t slots)
      : logits(device.template allocate<T>(std::int64_t{rows} * config.num_experts)),
        weights(device.template allocate<float>(std::int64_t{rows} * config.top_k)),
        gate_up(device.template allocate<T>(std::int64_t{rows} * config.top_k * 2 * config.moe_intermediate)),
        inner(device.template allocate<T>(std::int64_t{rows} * config.top_k * config.moe_intermediate)),
        down(device.template allocate<T>(std::int64_t{rows} * config.top_k * config.hidden)) {
    atlas::lora::ExpertPlanLayout const layout{rows * config.top_k, slots, config.num_experts};
    plan_memory = device.template allocate<std::byte>(static_cast<std::int64_t>(layout.bytes()));
    plan = layout.at(plan_memory.data());
  }

  Buffer<T> logits;
  Buffer<float> weights;
  Buffer<T> gate_up, inner, down;
  Buffer<std::byte> plan_memory;
  atlas::lora::ExpertPlan plan;
};

/// One layer's router and experts.
template <class Device>
class MoeLayer {
 public:
  using T = typename Device::element;
  template <class V>
  using Buffer = Array<V, typename Device::Backend>;
  using Projections = std::vector<atlas::lora::ExpertProjection<T>>;

  MoeLayer() = default;
  /// `gate`, `up` and `down` hold the experts' matrices one after the other.
  MoeLayer(Device& device, LlamaConfig const& config, std::int32_t max_rows, Buffer<T> router, Buffer<T> gate,
           Buffer<T> up, Buffer<T> down)
      : config_(config),
        router_(std::move(router)),
        gate_(std::move(gate)),
        up_(std::move(up)),
        down_(std::move(down)),
        ids_(device.template allocate<std::int32_t>(std::int64_t{max_rows} * config.top_k)) {}

  [[nodiscard]] std::int32_t const* ids() const { return ids_.data(); }

  /// Takes the tables of a pool and makes sure that the device's scratch suffices.
  template <class Pool>
  void attach(Device& device, Pool const& pool, std::int32_t layer, atlas::lora::RowPlan const& rows,
              MoeBuffers<Device> const& buffers) {
    using atlas::lora::ExpertLinear;
    router_table_ = expect(pool.router(layer));
    gate_table_ = expect(pool.expert(layer, ExpertLinear::gate));
    up_table_ = expect(pool.expert(layer, ExpertLinear::up));
    down_table_ = expect(pool.expert(layer, ExpertLinear::down));
    device.reserve(rows, rows.capacity_rows, router_delta(buffers));
    device.reserve_experts(buffers.plan, gate_up_deltas(buffers));
    device.reserve_experts(buffers.plan, down_deltas(buffers));
  }

  /// out = experts(x), `[rows, hidden]` each. Deltas go right behind the products that they belong to: the
  /// router's before the choice, gate's and up's before the activation, down's before the weighted sum.
  void forward(Device& device, T const* x, T* out, std::int32_t rows, bool adapted,
               atlas::lora::RowPlan const& row_plan, MoeBuffers<Device> const& b) {
    auto const& c = config_;
    std::int64_t const pairs = std::int64_t{rows} * c.top_k;
    device.multiply(x, router_.data(), b.logits.data(), c.num_experts, rows, c.num_experts, c.hidden);
    if (adapted) device.add_deltas(row_plan, rows, x, router_delta(b));
    device.run(
        ChooseExperts<T>{b.logits.data(), ids_.data(), b.weights.data(), c.num_experts, c.top_k, c.norm_topk},
        rows);
    auto const chosen = atlas::lora::ExpertRows::slot_major(row_plan.row_slots, rows, c.top_k, ids_.data());
    if (adapted) device.plan_experts(b.plan, chosen);

    std::int64_t const width = c.moe_intermediate;
    device.run(
        ExpertProduct<T>{x, gate_.data(), b.gate_up.data(), ids_.data(), c.top_k, 2 * width, width, c.hidden},
        pairs * width);
    device.run(ExpertProduct<T>{x, up_.data(), b.gate_up.data() + width, ids_.data(), c.top_k, 2 * width,
                                width, c.hidden},
               pairs * width);
    if (adapted) {
      device.add_expert_deltas(b.plan, chosen, atlas::lora::ExpertInput::of_tokens(c.top_k, rows), x,
                               gate_up_deltas(b));
    }
    device.run(SiluMultiply<T>{b.gate_up.data(), b.inner.data(), width}, pairs * width);
    device.run(ExpertProduct<T>{b.inner.data(), down_.data(), b.down.data(), ids_.data(), 1, c.hidden,
                                c.hidden, width},
               pairs * c.hidden);
    if (adapted) {
      device.add_expert_deltas(b.plan, chosen, atlas::lora::ExpertInput::own_rows(rows * c.top_k),
                               b.inner.data(), down_deltas(b));
    }
    device.run(WeightedSum<T>{b.down.data(), b.weights.data(), out, c.top_k, c.hidden}, rows * c.hidden);
  }

 private:
  [[nodiscard]] std::vector<atlas::lora::DeltaProjection<T>> router_delta(MoeBuffers<Device> const& b) const {
    return {{router_table_, b.logits.data(), config_.num_experts}};
  }
  [[nodiscard]] Projections gate_up_deltas(MoeBuffers<Device> const& b) const {
    std::int64_t const width = config_.moe_intermediate;
    return {{gate_table_, b.gate_up.data(), 2 * width}, {up_table_, b.gate_up.data() + width, 2 * width}};
  }
  [[nodiscard]] Projections down_deltas(MoeBuffers<Device> const& b) const {
    return {{down_table_, b.down.data(), config_.hidden}};
  }

  LlamaConfig config_;
  Buffer<T> router_, gate_, up_, down_;
  Buffer<std::int32_t> ids_;  // [rows, top_k]: what the last pass chose
  atlas::lora::RouteTable<T> router_table_{};
  atlas::lora::ExpertTable<T> gate_table_{}, up_table_{}, down_table_{};
};

}  // namespace tiny_model
