// SPDX-License-Identifier: AGPL-3.0-only
//
// One decode step as a captured graph: the deltas of all linears for all rows, and their comparison with
// outputs that were kept.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda/std/bit>

#include <atlas/lora.hpp>

#include "workload.hpp"

namespace hot_swap {

/// Counts the elements of y `[rows, width]` whose bits are not those of the output that is kept for the row's
/// content. One item per 8 elements.
template <Element T>
struct Compare {
  T const* y;
  T const* kept;                 // [contents + 1, rows, width]
  std::int32_t const* contents;  // [rows]
  std::int64_t rows, width;
  unsigned long long* wrong;

  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;

  ATLAS_HD void operator()(std::int64_t item) const {
    std::int64_t const row = item * 8 / width;
    T const* const expected = kept + (contents[row] * rows * width + item * 8);
    for (std::int64_t i = 0; i < 8; ++i) {
      if (cuda::std::bit_cast<Bits>(y[item * 8 + i]) != cuda::std::bit_cast<Bits>(expected[i])) count();
    }
  }

  ATLAS_HD void count() const {
#if defined(__CUDA_ARCH__)
    atomicAdd(wrong, 1ULL);
#else
    ++*wrong;
#endif
  }
};

/// The step of one pool. Tables and the graph are taken once, before anything is loaded.
template <class Device>
class Decoder {
 public:
  using T = typename Device::element;
  using Pool = AdapterPool<T, typename Device::Backend>;
  template <class V>
  using Array = tiny_model::Array<V, typename Device::Backend>;

  Decoder(Device& device, Workload const& workload, Pool const& pool)
      : device_(device), rows_(workload.rows) {
    std::int64_t widest = 0;
    for (Site const site : pool.shape().sites()) {
      Module const& linear = pool.shape().module(site);
      width_ += linear.n_out;
      widest = std::max(widest, linear.k_in);
    }
    std::vector<float> const values = random_values(12345, static_cast<std::size_t>(rows_ * widest));
    std::vector<T> x(values.size());
    std::transform(values.begin(), values.end(), x.begin(), [](float value) { return from_f32<T>(value); });
    x_ = device_.template allocate<T>(std::ssize(x));
    device_.upload(std::span<T const>(x), x_.data());
    y_ = device_.template allocate<T>(rows_ * width_);
    RowPlanLayout const layout{rows_, pool.max_slots()};
    plan_memory_ = device_.template allocate<std::byte>(static_cast<std::int64_t>(layout.bytes()));
    plan_ = layout.at(plan_memory_.data());
    device_.synchronize();
    group(workload, pool);
    for (auto const& projections : groups_) device_.reserve(plan_, rows_, projections);
    graph_.emplace(device_.capture([this] {
      device_.plan_rows(plan_, rows_);
      for (auto const& projections : groups_) device_.add_deltas(plan_, rows_, x_.data(), projections);
    }));
  }

  [[nodiscard]] std::int64_t width() const { return width_; }
  [[nodiscard]] T const* y() const { return y_.data(); }

  /// Enqueues what the base model would have written.
  void reset() {
    expect(device_.backend().fill(y_.data(), std::byte{0x3f}, y_.size() * sizeof(T), device_.stream()));
  }
  /// Enqueues the slots of all rows, which stay until the device is synchronised with.
  void set_slots(std::span<std::int32_t const> slots) { device_.upload(slots, plan_.row_slots); }
  /// Enqueues the deltas.
  void replay() { (*graph_)(); }

 private:
  // Linears of a layer that share their input, with their outputs side by side in a row of y.
  void group(Workload const& workload, Pool const& pool) {
    T* y = y_.data();
    for (std::int32_t layer = 0; layer < workload.layers; ++layer) {
      for (std::size_t i = 0; i < workload.linears.size(); ++i) {
        Linear const& linear = workload.linears[i];
        if (i == 0 || linear.group != workload.linears[i - 1].group) groups_.emplace_back();
        groups_.back().push_back({expect(pool.route(layer, linear.name)), y, width_});
        y += linear.n_out;
      }
    }
  }

  Device& device_;
  std::int32_t rows_;
  std::int64_t width_ = 0;
  Array<T> x_, y_;
  Array<std::byte> plan_memory_;
  RowPlan plan_;
  std::vector<std::vector<DeltaProjection<T>>> groups_;
  std::optional<typename Device::Graph> graph_;
};

/// What each content gives alone, for every row, in a pool that nobody changes; and what base gives, which
/// comes last. It stays on the device.
template <class Device>
class QuietRun {
 public:
  using T = typename Device::element;
  using Pool = typename Decoder<Device>::Pool;

  QuietRun(Device& device, Workload const& workload, ModelShape const& shape)
      : device_(device), rows_(workload.rows) {
    PoolOptions const options{.max_slots = 1, .spare = 1, .max_rank = workload.largest_rank};
    Pool pool = expect(Pool::create(shape, options, device.backend()));
    Decoder<Device> decoder(device, workload, pool);
    width_ = decoder.width();
    std::size_t const base = workload.contents();
    kept_ = device.template allocate<T>(static_cast<std::int64_t>(base + 1) * rows_ * width_);
    wrong_ = device.template allocate<unsigned long long>(1);
    for (std::size_t content = 0; content <= base; ++content) {
      std::vector<std::int32_t> const slots(static_cast<std::size_t>(rows_), content == base ? base_slot : 0);
      if (content < base) expect(pool.load("alone", make_adapter(workload, shape, content)));
      expect(pool.begin_step(device.stream()));
      decoder.set_slots(slots);
      decoder.reset();
      decoder.replay();
      std::size_t const bytes = static_cast<std::size_t>(rows_ * width_) * sizeof(T);
      expect(device.backend().copy(kept_.data() + static_cast<std::int64_t>(content) * rows_ * width_,
                                   decoder.y(), bytes, device.stream()));
      expect(pool.end_step(device.stream()));
      device.synchronize();
    }
  }

  /// Enqueues the comparison of a step's y `[rows, width]`, whose rows had these contents, on the device.
  void compare(T const* y, std::int32_t const* contents) {
    device_.run(Compare<T>{y, kept_.data(), contents, rows_, width_, wrong_.data()}, rows_ * width_ / 8);
  }

  /// Elements that were not bit for bit as they were alone, so far.
  [[nodiscard]] std::uint64_t wrong() {
    unsigned long long count = 0;
    device_.download(wrong_.data(), std::span(&count, 1));
    return count;
  }

 private:
  Device& device_;
  std::int64_t rows_;
  std::int64_t width_ = 0;
  tiny_model::Array<T, typename Device::Backend> kept_;
  tiny_model::Array<unsigned long long, typename Device::Backend> wrong_;
};

}  // namespace hot_swap
