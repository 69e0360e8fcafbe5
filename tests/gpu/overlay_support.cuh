// SPDX-License-Identifier: AGPL-3.0-only
//
// What the GPU tests of token overlays share: slots with rows of their own, on host and device, inside
// poison.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "device.cuh"
#include "streams.cuh"

#include "atlas/lora/kernels/overlay_embed.cuh"
#include "atlas/lora/kernels/overlay_head.cuh"
#include "atlas/lora/kernels/row_diff.cuh"
#include "atlas/lora/kernels/row_plan.cuh"
#include "atlas/lora/reference/overlay.hpp"

namespace atlas_test {

/// The machine with everything of overlays prepared.
template <Element T, Element Y>
Machine const& overlay_machine() {
  static Machine const made = ready_machine<OverlayEmbed<T>, OverlayHead<T, Y>, RowDiff<T>, RowPlanning>();
  return made;
}

inline constexpr std::int32_t far_out = std::numeric_limits<std::int32_t>::max();

/// Row slots that use every slot, base and slots out of range.
inline std::vector<std::int32_t> mixed(std::int32_t rows, std::int32_t slots, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int32_t> out(static_cast<std::size_t>(rows));
  for (std::int32_t& slot : out) {
    std::int32_t const draw = random.below(slots + 3);
    slot = draw < slots ? draw : draw == slots ? -1 : draw == slots + 1 ? slots : far_out;
  }
  return out;
}

/// How many rows of its own each slot has, and of what shape everything is.
struct OverlayShape {
  std::int64_t hidden = 64;
  std::int64_t vocab = 500;
  std::vector<std::int32_t> embed_counts = {3};
  std::vector<std::int32_t> head_counts = {3};
  std::int64_t offset = 0;          ///< elements by which every pointer is off alignment
  std::int64_t x_pad = 0;           ///< elements between rows of x and of h beyond the width
  std::int64_t logits_pad = 0;      ///< likewise of logits, beyond the vocabulary
  std::int32_t max_head_count = 0;  ///< 0: the largest of the slots
  std::uint64_t seed = 1;
};

/// `count` of `[0, vocab)`, ascending, at even distances from a beginning that depends on the slot.
inline std::vector<std::int32_t> spaced_ids(std::int32_t count, std::int64_t vocab, std::size_t slot) {
  std::vector<std::int32_t> ids;
  std::int64_t const shift = count < vocab ? static_cast<std::int64_t>(slot) % (vocab - count + 1) : 0;
  for (std::int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<std::int32_t>(shift + i * (vocab - shift) / count));
  }
  return ids;
}

/// Values of `count` elements behind `offset` of poison.
template <Element T>
std::vector<T> random_values(Random& random, std::int64_t count, std::int64_t offset) {
  std::vector<T> out(static_cast<std::size_t>(offset + count + 8), poison<T>());
  for (std::int64_t i = 0; i < count; ++i) {
    out[static_cast<std::size_t>(offset + i)] = from_f32<T>(random.uniform());
  }
  return out;
}

/// One slot's own rows.
template <Element T>
struct SlotRows {
  std::vector<std::int32_t> map, ids;
  std::vector<T> embed, head;
  std::int32_t embed_count, head_count;
  std::int64_t offset;
  DeviceArray<std::int32_t> device_map, device_ids;
  DeviceArray<T> device_embed, device_head;

  static SlotRows make(Random& random, OverlayShape const& shape, std::size_t slot) {
    std::int32_t const embeds = shape.embed_counts[slot];
    std::int32_t const heads = shape.head_counts[slot];
    std::vector<std::int32_t> map(static_cast<std::size_t>(shape.vocab), -1);
    fill_slot_map(spaced_ids(embeds, shape.vocab, slot), map);
    std::vector<std::int32_t> const ids = spaced_ids(heads, shape.vocab, slot + 1);
    std::vector<T> const embed = random_values<T>(random, embeds * shape.hidden, shape.offset);
    std::vector<T> const head = random_values<T>(random, heads * shape.hidden, shape.offset);
    return {map,
            ids,
            embed,
            head,
            embeds,
            heads,
            shape.offset,
            DeviceArray<std::int32_t>(map),
            DeviceArray<std::int32_t>(ids),
            DeviceArray<T>(embed),
            DeviceArray<T>(head)};
  }

  [[nodiscard]] OverlayCell<T> host_cell() const {
    return {map.data(), embed.data() + offset, head.data() + offset, ids.data(), embed_count, head_count};
  }
  [[nodiscard]] OverlayCell<T> device_cell() const {
    return {device_map.data(),
            device_embed.data() + offset,
            device_head.data() + offset,
            device_ids.data(),
            embed_count,
            head_count};
  }
};

/// Slots with overlays, and x, h and logits of a batch.
template <Element T, Element Y = T>
class OverlayBatch {
 public:
  OverlayBatch(OverlayShape const& shape, std::vector<std::int32_t> row_slots)
      : shape_(shape),
        rows_(static_cast<std::int32_t>(row_slots.size())),
        layout_{std::max(rows_, 1), static_cast<std::int32_t>(shape.head_counts.size())},
        plan_bytes_(std::vector<std::byte>(layout_.bytes())),
        cells_(make_slots()) {
    Random random(shape.seed + 1000);
    x_ = random_values<T>(random, rows_ * row_stride(), shape.offset);
    h_ = random_values<T>(random, rows_ * row_stride(), shape.offset);
    logits_ = random_values<Y>(random, rows_ * logits_stride(), shape.offset);
    for (std::int32_t r = 0; r < rows_; ++r) {
      for (std::int64_t k = shape.hidden; k < row_stride(); ++k) x_[at(r, k)] = poison<T>();
    }
    set_row_slots(std::move(row_slots));
  }

  [[nodiscard]] std::int64_t row_stride() const { return shape_.hidden + shape_.x_pad; }
  [[nodiscard]] std::int64_t logits_stride() const { return shape_.vocab + shape_.logits_pad; }
  [[nodiscard]] std::int32_t rows() const { return rows_; }
  [[nodiscard]] OverlayShape const& shape() const { return shape_; }
  [[nodiscard]] RowPlan plan() const { return layout_.at(plan_bytes_.data()); }
  [[nodiscard]] std::vector<std::int32_t> const& row_slots() const { return row_slots_; }
  [[nodiscard]] std::vector<SlotRows<T>> const& slots() const { return slots_; }
  [[nodiscard]] std::vector<Y> const& logits() const { return logits_; }
  [[nodiscard]] std::vector<T> const& h() const { return h_; }

  void set_row_slots(std::vector<std::int32_t> row_slots) {
    row_slots_ = std::move(row_slots);
    if (rows_ == 0) return;
    CUDA_OK(cudaMemcpy(plan().row_slots, row_slots_.data(), row_slots_.size() * sizeof(std::int32_t),
                       cudaMemcpyHostToDevice));
    CUDA_OK(launch_row_plan(plan(), rows_, overlay_machine<T, Y>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
  }

  /// Gives row `to` the x of a row of another batch of the same width.
  void copy_x(std::int32_t to, OverlayBatch const& other, std::int32_t from) {
    for (std::int64_t k = 0; k < shape_.hidden; ++k) x_[at(to, k)] = other.x_[other.at(from, k)];
  }
  /// Gives slot `to` the rows of a slot of another batch, which must outlive this one.
  void use_rows(std::int32_t to, OverlayBatch const& other, std::int32_t from) {
    OverlayCell<T> const cell = other.slots_[static_cast<std::size_t>(from)].device_cell();
    CUDA_OK(cudaMemcpy(cells_.data() + to, &cell, sizeof cell, cudaMemcpyHostToDevice));
  }

  [[nodiscard]] OverlayTable<T> table(OverlayCell<T> const* cells) const {
    OverlayTable<T> table;
    table.cells = cells;
    table.max_slots = static_cast<std::int32_t>(shape_.head_counts.size());
    for (std::int32_t const count : shape_.head_counts) {
      table.max_head_count = std::max(table.max_head_count, count);
    }
    table.max_head_count = std::max(table.max_head_count, shape_.max_head_count);
    table.vocab = shape_.vocab;
    table.hidden = shape_.hidden;
    return table;
  }
  [[nodiscard]] OverlayTable<T> device_table() const { return table(cells_.data()); }

  [[nodiscard]] OverlayHeadParams<T, Y> head_params(DeviceArray<T> const& x,
                                                    DeviceArray<Y> const& logits) const {
    OverlayHeadParams<T, Y> params;
    params.x = x.data() + shape_.offset;
    params.x_row_stride = row_stride();
    params.logits = logits.data() + shape_.offset;
    params.logits_row_stride = logits_stride();
    params.rows = rows_;
    params.plan = plan();
    params.table = device_table();
    return params;
  }

  /// The logits after the recompute, pads and all.
  [[nodiscard]] std::vector<Y> run_head(bool clusters = true, bool inputs_settled = false) const {
    DeviceArray<T> const x(x_);
    DeviceArray<Y> const logits(logits_);
    OverlayHeadParams<T, Y> params = head_params(x, logits);
    params.inputs_settled = inputs_settled;
    Machine const& machine = overlay_machine<T, Y>();
    CUDA_OK(clusters ? launch_overlay_head(params, machine, nullptr)
                     : launch_overlay_head_without_clusters(params, machine, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    return logits.download();
  }
  [[nodiscard]] std::vector<Y> reference_head() const { return reference_head(logits_); }
  /// The same over other logits.
  [[nodiscard]] std::vector<Y> reference_head(std::vector<Y> out) const {
    std::vector<OverlayCell<T>> const cells = host_cells();
    reference_head_overlay<T, Y>(table(cells.data()), row_slots_, x_.data() + shape_.offset, row_stride(),
                                 out.data() + shape_.offset, logits_stride());
    return out;
  }

  [[nodiscard]] std::vector<T> run_embed(std::vector<std::int32_t> const& tokens,
                                         bool inputs_settled = false) const {
    DeviceArray<T> const h(h_);
    DeviceArray<std::int32_t> const device_tokens(tokens);
    OverlayEmbedParams<T> params;
    params.h = h.data() + shape_.offset;
    params.h_row_stride = row_stride();
    params.rows = rows_;
    params.tokens = device_tokens.data();
    params.row_slots = plan().row_slots;
    params.table = device_table();
    params.inputs_settled = inputs_settled;
    CUDA_OK(launch_overlay_embed(params, overlay_machine<T, Y>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    return h.download();
  }
  [[nodiscard]] std::vector<T> reference_embed(std::vector<std::int32_t> const& tokens) const {
    std::vector<T> out = h_;
    std::vector<OverlayCell<T>> const cells = host_cells();
    reference_embed_overlay<T>(table(cells.data()), row_slots_, tokens, out.data() + shape_.offset,
                               row_stride());
    return out;
  }

  /// One row's logits, without pads.
  [[nodiscard]] std::vector<Y> row_of(std::vector<Y> const& logits, std::int32_t row) const {
    auto const first = logits.begin() + shape_.offset + row * logits_stride();
    return std::vector<Y>(first, first + shape_.vocab);
  }

  [[nodiscard]] std::size_t at(std::int32_t row, std::int64_t k) const {
    return static_cast<std::size_t>(shape_.offset + row * row_stride() + k);
  }

 private:
  DeviceArray<OverlayCell<T>> make_slots() {
    Random random(shape_.seed);
    std::vector<OverlayCell<T>> cells;
    for (std::size_t slot = 0; slot < shape_.head_counts.size(); ++slot) {
      slots_.push_back(SlotRows<T>::make(random, shape_, slot));
    }
    for (SlotRows<T> const& rows : slots_) cells.push_back(rows.device_cell());
    return DeviceArray<OverlayCell<T>>(cells);
  }
  [[nodiscard]] std::vector<OverlayCell<T>> host_cells() const {
    std::vector<OverlayCell<T>> cells;
    for (SlotRows<T> const& rows : slots_) cells.push_back(rows.host_cell());
    return cells;
  }

  OverlayShape shape_;
  std::int32_t rows_;
  RowPlanLayout layout_;
  DeviceArray<std::byte> plan_bytes_;
  std::vector<SlotRows<T>> slots_;
  DeviceArray<OverlayCell<T>> cells_;
  std::vector<std::int32_t> row_slots_;
  std::vector<T> x_, h_;
  std::vector<Y> logits_;
};

}  // namespace atlas_test
