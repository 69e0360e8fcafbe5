// SPDX-License-Identifier: AGPL-3.0-only
//
// The tiny model on the CPU: plain loops, and the library's reference for the deltas.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <atlas/lora.hpp>

#include "memory.hpp"

namespace tiny_model {

template <atlas::lora::Element T>
class HostDevice : public Memory<atlas::lora::HostBackend> {
 public:
  using element = T;
  using Backend = atlas::lora::HostBackend;
  /// What a captured graph is on this device: the step itself, to be called again.
  using Graph = std::function<void()>;

  static constexpr char const* kind = "cpu";
  /// How far float32 logits may be from PEFT's.
  static constexpr float float_limit = 2e-5F;

  [[nodiscard]] static std::string name() { return "plain loops"; }

  /// Runs items 0 .. count - 1 of an operation of ops.hpp.
  template <class Operation>
  void run(Operation const& operation, std::int64_t count) {
    for (std::int64_t item = 0; item < count; ++item) operation(item);
  }

  /// y = x @ w^T; x `[rows, k_in]`, w `[n_out, k_in]`, y `[rows, n_out]` with a row stride of its own.
  template <class Y>
  void multiply(T const* x, T const* w, Y* y, std::int64_t y_row_stride, std::int64_t rows,
                std::int64_t n_out, std::int64_t k_in) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t n = 0; n < n_out; ++n) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < k_in; ++k) {
          sum +=
              double{atlas::lora::to_f32(x[row * k_in + k])} * double{atlas::lora::to_f32(w[n * k_in + k])};
        }
        y[row * y_row_stride + n] = atlas::lora::from_f32<Y>(static_cast<float>(sum));
      }
    }
  }

  /// Nothing to prepare: the reference needs no scratch of the device's and reads the row slots themselves.
  void reserve(atlas::lora::RowPlan const&, std::int32_t, std::span<atlas::lora::DeltaProjection<T> const>) {}
  void plan_rows(atlas::lora::RowPlan const&, std::int32_t) {}

  /// Adds the deltas of projections that share x `[rows, k_in]`.
  void add_deltas(atlas::lora::RowPlan const& plan, std::int32_t rows, T const* x,
                  std::span<atlas::lora::DeltaProjection<T> const> projections) {
    for (auto const& projection : projections) {
      std::vector<T> scratch(static_cast<std::size_t>(projection.table.max_rank));
      atlas::lora::reference_delta<T, T>(
          projection.table, std::span(plan.row_slots, static_cast<std::size_t>(rows)), x,
          projection.table.k_in, projection.y, projection.y_row_stride, std::span<T>(scratch));
    }
  }

  /// Puts the embedding rows that are a row's own adapter's over what the gather left in h `[rows, hidden]`.
  void replace_rows(atlas::lora::OverlayTable<T> const& table, atlas::lora::RowPlan const& plan,
                    std::int32_t rows, std::int32_t const* tokens, T* h) {
    auto const count = static_cast<std::size_t>(rows);
    atlas::lora::reference_embed_overlay<T>(table, std::span(plan.row_slots, count), std::span(tokens, count),
                                            h, table.hidden);
  }

  /// Recomputes the logits `[rows, vocab]` whose head rows are a row's own adapter's.
  void recompute_logits(atlas::lora::OverlayTable<T> const& table, atlas::lora::RowPlan const& plan,
                        std::int32_t rows, T const* x, float* logits) {
    atlas::lora::reference_head_overlay<T, float>(table,
                                                  std::span(plan.row_slots, static_cast<std::size_t>(rows)),
                                                  x, table.hidden, logits, table.vocab);
  }

  /// A table of the base model's, `[vocab, hidden]`, for adapters to be compared with.
  [[nodiscard]] static atlas::lora::HostServedTable<T> served(T const* table, std::int64_t hidden) {
    return {table, hidden};
  }

  /// The same for experts, whose reference reads the rows themselves.
  void reserve_experts(atlas::lora::ExpertPlan const&, std::span<atlas::lora::ExpertProjection<T> const>) {}
  void plan_experts(atlas::lora::ExpertPlan const&, atlas::lora::ExpertRows const&) {}

  /// Adds the deltas of experts' linears that read the same x.
  void add_expert_deltas(atlas::lora::ExpertPlan const&, atlas::lora::ExpertRows const& rows,
                         atlas::lora::ExpertInput const& input, T const* x,
                         std::span<atlas::lora::ExpertProjection<T> const> projections) {
    for (auto const& projection : projections) {
      std::vector<T> scratch(static_cast<std::size_t>(projection.table.max_rank));
      atlas::lora::reference_expert_delta<T, T>(projection.table, rows, input, x, projection.table.k_in,
                                                projection.y, projection.y_row_stride, std::span<T>(scratch));
    }
  }

  [[nodiscard]] Graph capture(Graph step) { return step; }
};

}  // namespace tiny_model
