// SPDX-License-Identifier: AGPL-3.0-only
//
// What the GPU tests share: device memory, random operands with poison where nothing may be read, and every
// form of the delta run on one batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include "device.cuh"

#include "atlas/lora/kernels/delta.cuh"
#include "atlas/lora/kernels/pair_delta.cuh"
#include "atlas/lora/kernels/row_plan.cuh"
#include "atlas/lora/kernels/split_delta.cuh"
#include "atlas/lora/reference/delta.hpp"

namespace atlas_test {

/// One slot's pair of one projection, on host and device, inside poison.
template <Element T>
struct TestPair {
  std::int32_t rank;
  std::int32_t b_row_stride;
  float scale;
  std::int64_t offset;  ///< elements before a and b, to spoil their alignment
  std::vector<T> a, b, bias;
  DeviceArray<T> device_a, device_b, device_bias;

  static TestPair make(Random& random, std::int64_t k_in, std::int64_t n_out, std::int32_t rank,
                       std::int32_t b_row_stride, bool with_bias, std::int64_t offset) {
    float const scale = 0.5F + 1.5F * random.uniform();
    std::vector<T> a(static_cast<std::size_t>(offset + rank * k_in + 8), poison<T>());
    std::vector<T> b(static_cast<std::size_t>(offset + n_out * b_row_stride + 8), poison<T>());
    std::vector<T> bias(with_bias ? static_cast<std::size_t>(n_out) : 0);
    float const spread = 1.0F / 16.0F;
    for (std::int64_t i = 0; i < rank * k_in; ++i) {
      a[static_cast<std::size_t>(offset + i)] = from_f32<T>(random.uniform() * spread);
    }
    for (std::int64_t n = 0; n < n_out; ++n) {
      for (std::int32_t j = 0; j < rank; ++j) {
        b[static_cast<std::size_t>(offset + n * b_row_stride + j)] = from_f32<T>(random.uniform());
      }
    }
    for (T& value : bias) value = from_f32<T>(random.uniform());
    return {rank,
            b_row_stride,
            scale,
            offset,
            a,
            b,
            bias,
            DeviceArray<T>(a),
            DeviceArray<T>(b),
            DeviceArray<T>(bias)};
  }

  [[nodiscard]] RouteCell<T> device_cell() const {
    return {device_a.data() + offset,
            device_b.data() + offset,
            bias.empty() ? nullptr : device_bias.data(),
            scale,
            rank,
            b_row_stride,
            0};
  }
  [[nodiscard]] RouteCell<T> host_cell() const {
    return {a.data() + offset,
            b.data() + offset,
            bias.empty() ? nullptr : bias.data(),
            scale,
            rank,
            b_row_stride,
            0};
  }
};

/// The shape of a test batch.
struct Shape {
  std::int64_t k_in = 256;
  std::vector<std::int64_t> n_out = {256};
  std::vector<std::int32_t> ranks = {16};  ///< of each slot; 0 means that the slot adapts nothing
  std::int32_t max_rank = 0;               ///< 0: the largest rank
  std::int64_t x_pad = 0, y_pad = 0;       ///< elements between rows beyond the width
  std::int64_t offset = 0;                 ///< elements by which every pointer is off alignment
  bool tight = false;                      ///< B rows at the true rank, not rounded up to 8
  bool bias = false;
  std::uint64_t seed = 1;
};

/// How a delta is launched.
enum class Form {
  automatic,
  cluster_16,
  cluster_8,
  cluster_4,
  cluster_2,
  two_launches,
  split,
  prefill_8,
  prefill_4,
  prefill_2,
  prefill_1
};
inline constexpr Form all_forms[] = {Form::automatic, Form::cluster_16,   Form::cluster_8, Form::cluster_4,
                                     Form::cluster_2, Form::two_launches, Form::split,     Form::prefill_8,
                                     Form::prefill_4, Form::prefill_2,    Form::prefill_1};
inline char const* name(Form form) {
  constexpr char const* names[] = {"automatic", "cluster 16",   "cluster 8", "cluster 4",
                                   "cluster 2", "two launches", "split",     "prefill 8",
                                   "prefill 4", "prefill 2",    "prefill 1"};
  return names[static_cast<int>(form)];
}

template <int Cluster>
using Clustered = Constant<DeltaTuning, DeltaTuning{256, Cluster, 2}>;

template <Element T, Element Y>
Machine const& machine() {
  static Machine const made =
      ready_machine<Delta<T, Y>, SplitDelta<T, Y>, TunedDelta<Clustered<16>, T, Y>,
                    TunedDelta<Clustered<8>, T, Y>, TunedDelta<Clustered<4>, T, Y>,
                    TunedDelta<Clustered<2>, T, Y>, PrefillDelta<T, Y>, RowPlanning>();
  return made;
}

/// Whether this device and code can run a form.
template <Element T, Element Y>
bool runs(Form form) {
  if (form == Form::automatic || form == Form::two_launches || form == Form::split) return true;
  if (!has_clusters(machine<T, Y>().compute)) return false;
  if (form == Form::prefill_8 || form == Form::prefill_4 || form == Form::prefill_2 ||
      form == Form::prefill_1)
    return sizeof(T) == 2;
  return form != Form::cluster_16 || machine<T, Y>().max_cluster >= 16;
}

/// A batch: adapters in slots, x, y and row slots, on host and device.
template <Element T, Element Y = T>
class Batch {
 public:
  Batch(Shape const& shape, std::vector<std::int32_t> row_slots)
      : shape_(shape),
        row_slots_(std::move(row_slots)),
        rows_(static_cast<std::int32_t>(row_slots_.size())),
        layout_{std::max(rows_, 1), static_cast<std::int32_t>(shape.ranks.size())},
        plan_bytes_(std::vector<std::byte>(layout_.bytes())),
        x_device_(0) {
    Random random(shape.seed);
    max_rank_ = shape.max_rank;
    for (std::int32_t const rank : shape.ranks) max_rank_ = std::max(max_rank_, rank);
    for (std::int64_t const n : shape.n_out) {
      std::vector<TestPair<T>> pairs;
      std::vector<RouteCell<T>> cells;
      for (std::int32_t const rank : shape.ranks) {
        std::int32_t const stride =
            shape.tight ? std::max(rank, 1) : (rank + 7) / 8 * 8 + (rank == 0 ? 8 : 0);
        pairs.push_back(TestPair<T>::make(random, shape.k_in, n, rank, stride, shape.bias, shape.offset));
        cells.push_back(rank == 0 ? RouteCell<T>{} : pairs.back().device_cell());
      }
      pairs_.push_back(std::move(pairs));
      cells_.emplace_back(cells);
    }
    x_ = std::vector<T>(static_cast<std::size_t>(shape.offset + rows_ * x_stride()), poison<T>());
    for (std::int32_t r = 0; r < rows_; ++r) fill_row(random, r);
    x_device_.~DeviceArray<T>();
    new (&x_device_) DeviceArray<T>(x_);
    for (std::size_t p = 0; p < shape.n_out.size(); ++p) {
      std::vector<Y> y(static_cast<std::size_t>(shape.offset + rows_ * y_stride(p)), poison<Y>());
      for (std::int32_t r = 0; r < rows_; ++r) {
        for (std::int64_t n = 0; n < shape.n_out[p]; ++n) {
          y[static_cast<std::size_t>(shape.offset + r * y_stride(p) + n)] = from_f32<Y>(random.uniform());
        }
      }
      y_.push_back(std::move(y));
    }
    set_row_slots(row_slots_);
  }

  [[nodiscard]] std::int64_t x_stride() const { return shape_.k_in + shape_.x_pad; }
  [[nodiscard]] std::int64_t y_stride(std::size_t p) const { return shape_.n_out[p] + shape_.y_pad; }
  [[nodiscard]] std::int32_t rows() const { return rows_; }
  [[nodiscard]] Shape const& shape() const { return shape_; }
  [[nodiscard]] RowPlan plan() const { return layout_.at(plan_bytes_.data()); }
  [[nodiscard]] std::vector<std::vector<Y>> const& y() const { return y_; }
  [[nodiscard]] std::vector<std::int32_t> const& row_slots() const { return row_slots_; }
  [[nodiscard]] std::vector<std::vector<TestPair<T>>> const& pairs() const { return pairs_; }
  [[nodiscard]] T const* x(std::int32_t row) const { return x_.data() + shape_.offset + row * x_stride(); }

  /// Uploads row slots and plans them on the device.
  void set_row_slots(std::vector<std::int32_t> row_slots) {
    row_slots_ = std::move(row_slots);
    CUDA_OK(cudaMemcpy(plan().row_slots, row_slots_.data(), row_slots_.size() * sizeof(std::int32_t),
                       cudaMemcpyHostToDevice));
    CUDA_OK(launch_row_plan(plan(), rows_, machine<T, Y>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
  }

  /// Gives a row of x and y the values of a row of another batch.
  void copy_row(std::int32_t to, Batch const& other, std::int32_t from) {
    std::memcpy(x_.data() + shape_.offset + to * x_stride(), other.x(from),
                static_cast<std::size_t>(shape_.k_in) * sizeof(T));
    x_device_.upload(x_);
    for (std::size_t p = 0; p < y_.size(); ++p) {
      std::memcpy(y_[p].data() + shape_.offset + to * y_stride(p),
                  other.y_[p].data() + other.shape_.offset + from * other.y_stride(p),
                  static_cast<std::size_t>(shape_.n_out[p]) * sizeof(Y));
    }
  }

  /// Gives a slot of every projection the weights of a slot of another batch, which must outlive this one.
  void use_pair(std::int32_t slot, Batch const& other, std::int32_t from) {
    for (std::size_t p = 0; p < cells_.size(); ++p) {
      RouteCell<T> const cell = other.pairs_[p][static_cast<std::size_t>(from)].device_cell();
      CUDA_OK(cudaMemcpy(cells_[p].data() + slot, &cell, sizeof cell, cudaMemcpyHostToDevice));
    }
  }

  [[nodiscard]] RouteTable<T> table(std::size_t p) const {
    return {cells_[p].data(), sizeof(RouteCell<T>), static_cast<std::int32_t>(shape_.ranks.size()),
            max_rank_,        shape_.k_in,          shape_.n_out[p]};
  }

  [[nodiscard]] DeltaParams<T, Y> params(std::vector<DeviceArray<Y>> const& y) const {
    DeltaParams<T, Y> params;
    params.x = x_device_.data() + shape_.offset;
    params.x_row_stride = x_stride();
    params.rows = rows_;
    params.plan = plan();
    params.num_projections = static_cast<std::int32_t>(y_.size());
    for (std::size_t p = 0; p < y_.size(); ++p) {
      params.projections[p] = {table(p), y[p].data() + shape_.offset, y_stride(p)};
    }
    return params;
  }

  [[nodiscard]] std::vector<DeviceArray<Y>> upload_y() const {
    std::vector<DeviceArray<Y>> arrays;
    for (auto const& y : y_) arrays.emplace_back(y);
    return arrays;
  }

  /// Enqueues the delta on `stream`. `xa` and `scratch` are the split's and two-launch form's.
  void enqueue(Form form, DeltaParams<T, Y> params, DeviceArray<T> const& xa,
               DeviceArray<std::byte> const& scratch, cudaStream_t stream) const {
    Machine const& m = machine<T, Y>();
    params.scratch = scratch.data();
    params.scratch_bytes = scratch.bytes();
    switch (form) {
      case Form::automatic: CUDA_OK(launch_delta(params, m, stream)); break;
      case Form::cluster_16: CUDA_OK((launch_delta_tuned<Clustered<16>>(params, m, stream))); break;
      case Form::cluster_8: CUDA_OK((launch_delta_tuned<Clustered<8>>(params, m, stream))); break;
      case Form::cluster_4: CUDA_OK((launch_delta_tuned<Clustered<4>>(params, m, stream))); break;
      case Form::cluster_2: CUDA_OK((launch_delta_tuned<Clustered<2>>(params, m, stream))); break;
      case Form::prefill_8: enqueue_prefill(params, 8, stream); break;
      case Form::prefill_4: enqueue_prefill(params, 4, stream); break;
      case Form::prefill_2: enqueue_prefill(params, 2, stream); break;
      case Form::prefill_1: enqueue_prefill(params, 1, stream); break;
      case Form::two_launches: CUDA_OK(launch_delta_in_two_launches(params, m, stream)); break;
      case Form::split: {
        ShrinkParams<T> shrink;
        shrink.x = params.x;
        shrink.x_row_stride = params.x_row_stride;
        shrink.rows = params.rows;
        shrink.plan = params.plan;
        shrink.num_projections = params.num_projections;
        shrink.inputs_settled = params.inputs_settled;
        for (int p = 0; p < params.num_projections; ++p) shrink.tables[p] = params.projections[p].table;
        shrink.xa = xa.data();
        shrink.xa_row_stride = xa_stride();
        CUDA_OK((launch_shrink<T, Y>(shrink, m, stream)));
        ExpandParams<T, Y> expand;
        expand.xa = xa.data();
        expand.xa_row_stride = xa_stride();
        expand.rows = params.rows;
        expand.plan = params.plan;
        expand.num_projections = params.num_projections;
        expand.inputs_settled = params.inputs_settled;
        std::copy(params.projections, params.projections + max_projections, expand.projections);
        CUDA_OK(launch_expand(expand, m, stream));
        break;
      }
    }
  }

  [[nodiscard]] std::int64_t xa_stride() const {
    std::vector<RouteTable<T>> tables;
    for (std::size_t p = 0; p < y_.size(); ++p) tables.push_back(table(p));
    return xa_width(tables.data(), static_cast<std::int32_t>(tables.size()));
  }
  [[nodiscard]] DeviceArray<T> make_xa() const {
    return DeviceArray<T>(std::vector<T>(static_cast<std::size_t>(rows_ * xa_stride()), poison<T>()));
  }
  [[nodiscard]] DeviceArray<std::byte> make_scratch() const {
    std::vector<DeviceArray<Y>> const none = upload_y();
    return DeviceArray<std::byte>(
        std::vector<std::byte>(two_launch_scratch_bytes(params(none)), std::byte{0xff}));
  }

  /// Runs one form and gives back every y, pads included; `xa_out` takes the split form's xa.
  [[nodiscard]] std::vector<std::vector<Y>> run(Form form, bool inputs_settled = false,
                                                std::vector<T>* xa_out = nullptr) const {
    std::vector<DeviceArray<Y>> const y = upload_y();
    DeviceArray<T> const xa = make_xa();
    DeviceArray<std::byte> const scratch = make_scratch();
    DeltaParams<T, Y> p = params(y);
    p.inputs_settled = inputs_settled;
    enqueue(form, p, xa, scratch, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<std::vector<Y>> out;
    for (auto const& array : y) out.push_back(array.download());
    if (xa_out != nullptr) *xa_out = xa.download();
    return out;
  }

  /// Whether a slot adapts projection p, and its cell in host memory.
  [[nodiscard]] bool adapted(std::int32_t slot) const {
    return slot >= 0 && slot < static_cast<std::int32_t>(shape_.ranks.size()) &&
           shape_.ranks[static_cast<std::size_t>(slot)] > 0;
  }
  [[nodiscard]] RouteCell<T> host_cell(std::size_t p, std::int32_t slot) const {
    return pairs_[p][static_cast<std::size_t>(slot)].host_cell();
  }

  /// What the CPU reference gives.
  [[nodiscard]] std::vector<std::vector<Y>> reference() const {
    std::vector<std::vector<Y>> out = y_;
    std::vector<T> xa(static_cast<std::size_t>(std::max(max_rank_, 1)));
    for (std::size_t p = 0; p < out.size(); ++p) {
      for (std::int32_t r = 0; r < rows_; ++r) {
        std::int32_t const slot = row_slots_[static_cast<std::size_t>(r)];
        if (!adapted(slot)) continue;
        RouteCell<T> const cell = host_cell(p, slot);
        reference_shrink(cell, x(r), shape_.k_in, std::span<T>(xa));
        reference_expand<T, Y>(cell, xa, shape_.n_out[p], out[p].data() + shape_.offset + r * y_stride(p));
      }
    }
    return out;
  }

 private:
  static void enqueue_prefill(DeltaParams<T, Y> const& params, std::int32_t cluster, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
      CUDA_OK(launch_delta_prefill(params, cluster, machine<T, Y>(), stream));
    } else {
      FAIL("float has no prefill kernel");
    }
  }
  void fill_row(Random& random, std::int32_t row) {
    for (std::int64_t k = 0; k < shape_.k_in; ++k) {
      x_[static_cast<std::size_t>(shape_.offset + row * x_stride() + k)] = from_f32<T>(random.uniform());
    }
  }

  Shape shape_;
  std::vector<std::int32_t> row_slots_;
  std::int32_t rows_;
  std::int32_t max_rank_ = 0;
  RowPlanLayout layout_;
  DeviceArray<std::byte> plan_bytes_;
  std::vector<std::vector<TestPair<T>>> pairs_;
  std::vector<DeviceArray<RouteCell<T>>> cells_;
  std::vector<T> x_;
  DeviceArray<T> x_device_;
  std::vector<std::vector<Y>> y_;
};

/// Row slots that use every slot, and base and out-of-range ones too.
inline std::vector<std::int32_t> mixed_slots(std::int32_t rows, std::int32_t slots, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int32_t> out(static_cast<std::size_t>(rows));
  for (std::int32_t& slot : out) {
    std::int32_t const draw = random.below(slots + 2);
    slot = draw == slots ? -1 : draw == slots + 1 ? slots + 7 : draw;
  }
  return out;
}

}  // namespace atlas_test
