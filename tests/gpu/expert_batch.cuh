// SPDX-License-Identifier: AGPL-3.0-only
//
// A batch of a mixture-of-experts layer for the GPU tests: adapters in slots that adapt some experts, and
// every form of the experts' delta run on a routing, with rows as they are chosen or sorted by expert.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include "expert_routing.cuh"
#include "support.cuh"

#include "atlas/lora/kernels/expert_delta.cuh"
#include "atlas/lora/kernels/expert_plan.cuh"
#include "atlas/lora/reference/moe.hpp"

namespace atlas_test {

/// The forms that the experts' delta has.
inline constexpr Form expert_forms[] = {Form::automatic, Form::cluster_16, Form::cluster_8,
                                        Form::cluster_4, Form::cluster_2,  Form::two_launches};

template <Element T, Element Y>
Machine const& expert_machine() {
  static Machine const made =
      ready_machine<ExpertDelta<T, Y>, TunedExpertDelta<Clustered<16>, T, Y>,
                    TunedExpertDelta<Clustered<8>, T, Y>, TunedExpertDelta<Clustered<4>, T, Y>,
                    TunedExpertDelta<Clustered<2>, T, Y>, ExpertPlanning, Delta<T, Y>, RowPlanning>();
  return made;
}

template <Element T, Element Y>
bool runs_experts(Form form) {
  if (form == Form::automatic || form == Form::two_launches) return true;
  if (!has_clusters(expert_machine<T, Y>().compute)) return false;
  return form != Form::cluster_16 || expert_machine<T, Y>().max_cluster >= 16;
}

/// Adapters' experts as tables, in host and device memory.
template <Element T>
class ExpertWeights {
 public:
  explicit ExpertWeights(ExpertShape const& shape)
      : shape_(shape), stride_(expert_index_bytes(shape.experts)), index_(shape.ranks.size() * stride_) {
    Random random(shape.seed);
    std::size_t const linears = shape.n_out.size();
    std::vector<RouteCell<T>> cells;
    std::vector<std::int32_t> first(shape.ranks.size());
    std::vector<std::byte> index(index_.size());
    for (std::size_t s = 0; s < shape.ranks.size(); ++s) {
      first[s] = static_cast<std::int32_t>(cells.size());
      auto* const places = reinterpret_cast<ExpertIndex<T>*>(index.data() + s * stride_)->places();
      std::int32_t groups = 0;
      for (std::int32_t e = 0; e < shape.experts; ++e) {
        bool const adapted =
            shape.ranks[s] > 0 && (shape.every_expert || (e + static_cast<std::int32_t>(s)) % 3 != 2);
        for (std::size_t p = 0; p < linears; ++p) {
          std::int32_t const rank = shape.ranks[s];
          pairs_.push_back(adapted ? std::make_unique<TestPair<T>>(
                                         TestPair<T>::make(random, shape.k_in, shape.n_out[p], rank,
                                                           (rank + 7) / 8 * 8, shape.bias, shape.offset))
                                   : nullptr);
          if (!adapted) continue;
          cells.push_back(pairs_.back()->device_cell());
          host_cells_.push_back(pairs_.back()->host_cell());
        }
        if (adapted) places[e] = ++groups;
      }
      reinterpret_cast<ExpertIndex<T>*>(index.data() + s * stride_)->num_groups = groups;
    }
    cells_ = std::make_unique<DeviceArray<RouteCell<T>>>(cells);
    host_index_ = index;
    for (std::size_t s = 0; s < first.size(); ++s) {
      auto* const on_device = reinterpret_cast<ExpertIndex<T>*>(index.data() + s * stride_);
      if (on_device->num_groups == 0) continue;  // an index of zeroes
      on_device->cells = cells_->data() + first[s];
      reinterpret_cast<ExpertIndex<T>*>(host_index_.data() + s * stride_)->cells =
          host_cells_.data() + first[s];
    }
    index_.upload(index);
    max_rank_ = std::max(shape.max_rank, *std::max_element(shape.ranks.begin(), shape.ranks.end()));
  }

  [[nodiscard]] ExpertTable<T> table(std::size_t p) const { return table_at(index_.data(), p); }
  [[nodiscard]] ExpertTable<T> host_table(std::size_t p) const {
    return table_at(const_cast<std::byte*>(host_index_.data()), p);
  }
  /// The pair of an expert's linear; null where the slot does not adapt it.
  [[nodiscard]] TestPair<T> const* pair(std::int32_t slot, std::int32_t expert, std::size_t p) const {
    return pairs_[(static_cast<std::size_t>(slot) * static_cast<std::size_t>(shape_.experts) +
                   static_cast<std::size_t>(expert)) *
                      shape_.n_out.size() +
                  p]
        .get();
  }
  [[nodiscard]] std::int32_t max_rank() const { return max_rank_; }

 private:
  [[nodiscard]] ExpertTable<T> table_at(std::byte* index, std::size_t p) const {
    return {reinterpret_cast<ExpertIndex<T> const*>(index),
            static_cast<std::int64_t>(stride_),
            static_cast<std::int32_t>(shape_.ranks.size()),
            shape_.experts,
            static_cast<std::int32_t>(shape_.n_out.size()),
            static_cast<std::int32_t>(p),
            max_rank_,
            shape_.k_in,
            shape_.n_out[p]};
  }

  ExpertShape shape_;
  std::size_t stride_;
  DeviceArray<std::byte> index_;
  std::vector<std::byte> host_index_;
  std::vector<std::unique_ptr<TestPair<T>>> pairs_;
  std::unique_ptr<DeviceArray<RouteCell<T>>> cells_;
  std::vector<RouteCell<T>> host_cells_;
  std::int32_t max_rank_ = 0;
};

/// Enqueues the experts' delta in a form.
template <Element T, Element Y>
void enqueue_experts(Form form, ExpertDeltaParams<T, Y> const& params, cudaStream_t stream) {
  Machine const& m = expert_machine<T, Y>();
  switch (form) {
    case Form::cluster_16: CUDA_OK((launch_expert_delta_tuned<Clustered<16>>(params, m, stream))); break;
    case Form::cluster_8: CUDA_OK((launch_expert_delta_tuned<Clustered<8>>(params, m, stream))); break;
    case Form::cluster_4: CUDA_OK((launch_expert_delta_tuned<Clustered<4>>(params, m, stream))); break;
    case Form::cluster_2: CUDA_OK((launch_expert_delta_tuned<Clustered<2>>(params, m, stream))); break;
    case Form::two_launches: CUDA_OK(launch_expert_delta_in_two_launches(params, m, stream)); break;
    default: CUDA_OK(launch_expert_delta(params, m, stream));
  }
}

/// A layer's batch. x and y are kept slot-major; the sorted order is made from them and undone again.
template <Element T, Element Y = T>
class ExpertBatch {
 public:
  using Rows = std::vector<std::vector<Y>>;  ///< by projection: `[rows, y stride]` from `offset` on

  ExpertBatch(ExpertShape const& shape, ExpertWeights<T> const& weights, Routing routing)
      : shape_(shape),
        weights_(weights),
        routing_(std::move(routing)),
        device_(routing_, shape.top_k, shape.experts) {
    Random random(shape.seed + 1000);
    x_ = filled<T>(random, x_rows(), shape.k_in, x_stride());
    for (std::size_t p = 0; p < shape.n_out.size(); ++p) {
      y_.push_back(filled<Y>(random, rows(), shape.n_out[p], y_stride(p)));
    }
  }

  [[nodiscard]] std::int32_t rows() const { return device_.rows(); }
  [[nodiscard]] std::int32_t x_rows() const { return shape_.own_rows ? device_.rows() : device_.tokens; }
  [[nodiscard]] std::int64_t x_stride() const { return shape_.k_in + shape_.x_pad; }
  [[nodiscard]] std::int64_t y_stride(std::size_t p) const { return shape_.n_out[p] + shape_.y_pad; }
  [[nodiscard]] Rows const& y() const { return y_; }
  [[nodiscard]] Routing const& routing() const { return routing_; }
  [[nodiscard]] DeviceRouting const& device() const { return device_; }
  [[nodiscard]] T const* x(std::int32_t row) const { return x_.data() + shape_.offset + row * x_stride(); }
  [[nodiscard]] std::vector<Y> y_row(Rows const& y, std::size_t p, std::int32_t row) const {
    auto const first = y[p].begin() + shape_.offset + row * y_stride(p);
    return {first, first + shape_.n_out[p]};
  }

  /// Gives the token of a row of another batch, and a row, the values that they have there.
  void copy_pair(std::int32_t token, std::int32_t choice, ExpertBatch const& other, std::int32_t from_token,
                 std::int32_t from_choice) {
    std::int32_t const to = token * shape_.top_k + choice;
    std::int32_t const from = from_token * other.shape_.top_k + from_choice;
    std::memmove(x_.data() + shape_.offset + (shape_.own_rows ? to : token) * x_stride(),
                 other.x(shape_.own_rows ? from : from_token),
                 static_cast<std::size_t>(shape_.k_in) * sizeof(T));
    for (std::size_t p = 0; p < y_.size(); ++p) {
      std::memmove(y_[p].data() + shape_.offset + to * y_stride(p),
                   other.y_[p].data() + other.shape_.offset + from * other.y_stride(p),
                   static_cast<std::size_t>(shape_.n_out[p]) * sizeof(Y));
    }
  }

  /// What a form gives, slot-major, pads included. `window` rows at a time; 0: all at once.
  [[nodiscard]] Rows run(Form form, Order order, bool settled = false, std::int32_t window = 0) const {
    DeviceArray<T> const x(ordered(x_, x_stride(), shape_.own_rows ? order : Order::slot_major, false));
    std::vector<DeviceArray<Y>> y;
    for (std::size_t p = 0; p < y_.size(); ++p) y.emplace_back(ordered(y_[p], y_stride(p), order, false));
    std::int32_t const each = window == 0 ? std::max(rows(), 1) : window;
    ExpertPlanLayout const layout{each, static_cast<std::int32_t>(shape_.ranks.size()), shape_.experts};
    DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
    ExpertDeltaParams<T, Y> params = parameters(order, x.data() + shape_.offset, layout.at(buffer.data()));
    for (std::size_t p = 0; p < y.size(); ++p) {
      params.projections[p] = {weights_.table(p), y[p].data() + shape_.offset, y_stride(p)};
    }
    DeviceArray<std::byte> const scratch(
        std::vector<std::byte>(two_launch_scratch_bytes(params), std::byte{0xff}));
    params.scratch = scratch.data();
    params.scratch_bytes = scratch.bytes();
    params.inputs_settled = settled;
    for (std::int32_t first = 0; first < rows(); first += each) {
      ExpertRows const part = device_.as_rows(order).window(first, std::min(first + each, rows()));
      CUDA_OK(launch_expert_plan(params.plan, part, expert_machine<T, Y>(), nullptr));
      if (settled) CUDA_OK(cudaDeviceSynchronize());  // the full edge that is promised
      enqueue_experts(form, params, nullptr);
    }
    CUDA_OK(cudaDeviceSynchronize());
    Rows out;
    for (std::size_t p = 0; p < y.size(); ++p)
      out.push_back(ordered(y[p].download(), y_stride(p), order, true));
    return out;
  }

  /// Everything but projections and scratch.
  [[nodiscard]] ExpertDeltaParams<T, Y> parameters(Order order, T const* x, ExpertPlan const& plan) const {
    ExpertDeltaParams<T, Y> params;
    params.x = x;
    params.x_row_stride = x_stride();
    params.input = shape_.own_rows ? ExpertInput::own_rows(rows()) : device_.token_input(order);
    params.rows = rows();
    params.plan = plan;
    params.num_projections = static_cast<std::int32_t>(y_.size());
    return params;
  }

  /// What the CPU reference gives.
  [[nodiscard]] Rows reference() const {
    Rows out = y_;
    std::vector<T> xa(static_cast<std::size_t>(std::max(weights_.max_rank(), 1)));
    ExpertRows const rows = ExpertRows::slot_major(routing_.token_slots.data(), device_.tokens, shape_.top_k,
                                                   routing_.expert_ids.data());
    ExpertInput const input =
        shape_.own_rows ? ExpertInput::own_rows(x_rows()) : ExpertInput::of_tokens(shape_.top_k, x_rows());
    for (std::size_t p = 0; p < out.size(); ++p) {
      reference_expert_delta<T, Y>(weights_.host_table(p), rows, input, x(0), x_stride(),
                                   out[p].data() + shape_.offset, y_stride(p), std::span<T>(xa));
    }
    return out;
  }

  /// What the dense delta gives when every (slot, expert) is a slot of its own and x is written out.
  [[nodiscard]] Rows dense() const {
    std::int32_t const slots = static_cast<std::int32_t>(shape_.ranks.size()) * shape_.experts;
    std::vector<T> x(static_cast<std::size_t>(rows()) * static_cast<std::size_t>(shape_.k_in));
    std::vector<std::int32_t> keys;
    for (std::int32_t row = 0; row < rows(); ++row) {
      std::memcpy(x.data() + row * shape_.k_in, this->x(shape_.own_rows ? row : row / shape_.top_k),
                  static_cast<std::size_t>(shape_.k_in) * sizeof(T));
      keys.push_back(detail::expert_key(routing_.token_slots[static_cast<std::size_t>(row / shape_.top_k)],
                                        routing_.expert_ids[static_cast<std::size_t>(row)],
                                        static_cast<std::int32_t>(shape_.ranks.size()), shape_.experts));
    }
    RowPlanLayout const layout{std::max(rows(), 1), slots};
    DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
    DeviceArray<T> const device_x(x);
    DeltaParams<T, Y> params;
    params.plan = layout.at(buffer.data());
    params.x = device_x.data();
    params.x_row_stride = shape_.k_in;
    params.rows = rows();
    CUDA_OK(cudaMemcpy(params.plan.row_slots, keys.data(), keys.size() * sizeof(keys[0]),
                       cudaMemcpyHostToDevice));
    CUDA_OK(launch_row_plan(params.plan, rows(), expert_machine<T, Y>(), nullptr));
    Rows out;
    for (std::size_t p = 0; p < y_.size(); ++p) {
      std::vector<RouteCell<T>> cells;
      for (std::int32_t key = 0; key < slots; ++key) {
        TestPair<T> const* const pair = weights_.pair(key / shape_.experts, key % shape_.experts, p);
        cells.push_back(pair == nullptr ? RouteCell<T>{} : pair->device_cell());
      }
      DeviceArray<RouteCell<T>> const device_cells(cells);
      DeviceArray<Y> const y(y_[p]);
      params.projections[0] = {{device_cells.data(), sizeof(RouteCell<T>), slots, weights_.max_rank(),
                                shape_.k_in, shape_.n_out[p]},
                               y.data() + shape_.offset,
                               y_stride(p)};
      DeviceArray<std::byte> const scratch(two_launch_scratch_bytes(params));
      params.scratch = scratch.data();
      params.scratch_bytes = scratch.bytes();
      CUDA_OK(launch_delta(params, expert_machine<T, Y>(), nullptr));
      CUDA_OK(cudaDeviceSynchronize());
      out.push_back(y.download());
    }
    return out;
  }

  /// Rows `[rows, stride]` behind `offset` in another order, or back.
  template <class V>
  [[nodiscard]] std::vector<V> ordered(std::vector<V> const& from, std::int64_t stride, Order order,
                                       bool back) const {
    if (order == Order::slot_major) return from;
    std::vector<V> to = from;
    for (std::size_t row = 0; row < device_.place.size(); ++row) {
      std::int64_t const major = shape_.offset + static_cast<std::int64_t>(row) * stride;
      std::int64_t const sorted = shape_.offset + device_.place[row] * stride;
      std::memcpy(to.data() + (back ? major : sorted), from.data() + (back ? sorted : major),
                  static_cast<std::size_t>(stride) * sizeof(V));
    }
    return to;
  }

 private:
  template <Element V>
  [[nodiscard]] std::vector<V> filled(Random& random, std::int32_t rows, std::int64_t width,
                                      std::int64_t stride) const {
    std::vector<V> values(static_cast<std::size_t>(shape_.offset + rows * stride), poison<V>());
    for (std::int32_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < width; ++i) {
        values[static_cast<std::size_t>(shape_.offset + row * stride + i)] = from_f32<V>(random.uniform());
      }
    }
    return values;
  }

  ExpertShape shape_;
  ExpertWeights<T> const& weights_;
  Routing routing_;
  DeviceRouting device_;
  std::vector<T> x_;
  Rows y_;
};

}  // namespace atlas_test
