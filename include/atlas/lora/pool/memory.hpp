// SPDX-License-Identifier: AGPL-3.0-only
//
// How much memory a pool takes, and where in it everything lies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/expert_layout.hpp"
#include "atlas/lora/pool/layout.hpp"
#include "atlas/lora/pool/load_lanes.hpp"
#include "atlas/lora/pool/overlay_layout.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/overlay_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// The most slots, and the most spare ones, that a pool can have.
inline constexpr std::int32_t most_pool_slots = 1 << 16;

/// What a pool is made with; nothing of it changes afterwards.
struct PoolOptions {
  std::int32_t max_slots = 8;  ///< adapters that rows can name at one time; 1 to `most_pool_slots`
  std::int32_t spare =
      1;  ///< physical slots beyond `max_slots`, for loads while all others are read; at least 1
  std::int32_t max_rank = 64;  ///< largest rank of any adapter; rounded up to a multiple of 8
  std::int32_t pinned = 0;     ///< slots `[0, pinned)` are never evicted, the others are a cache
  bool biases = false;         ///< whether room is kept for a bias of every linear
  /// For the experts and routers of all adapters together (see `expert_bytes_needed`); 0: none are served.
  std::size_t expert_bytes = 0;
  /// Device memory for the token overlays of all adapters that are in the pool at one time; 0 for a pool that
  /// serves none. An adapter with rows of the embedding takes 4 bytes a token of the vocabulary and
  /// `hidden` elements a row.
  std::size_t overlay_bytes = 0;

  friend bool operator==(PoolOptions const&, PoolOptions const&) = default;
};

/// What a pool takes when it is created, and nothing more ever after.
struct MemoryNeeded {
  std::size_t device_bytes = 0;
  std::size_t pinned_bytes = 0;  ///< host memory that the device reads

  friend bool operator==(MemoryNeeded const&, MemoryNeeded const&) = default;
};

namespace detail {

/// The parts of a pool's two allocations. Device: physical slots, their bias regions, records `[max_slots]`,
/// memory for experts, memory for overlays. A record is `[sites]` cells, `[layers with experts]` routers'
/// cells and as many expert indexes, and an overlay cell. Pinned: a record image for each slot, and for each
/// load lane staging of one site, expert's linear, layer's cells or part of an overlay.
struct PoolMemory {
  SlotLayout layout;
  std::size_t bias_stride = 0;  ///< bytes between bias regions; 0 without biases
  std::size_t record_bytes = 0;
  std::size_t routers_in_record = 0;     ///< bytes; without experts there are neither routers nor indexes
  std::size_t indexes_in_record = 0;     ///< bytes
  std::size_t expert_index_stride = 0;   ///< bytes between the indexes of two layers
  std::size_t largest_expert_block = 0;  ///< bytes
  std::size_t biases_offset = 0;
  std::size_t records_offset = 0;
  std::size_t experts_offset = 0;
  std::size_t overlay_cell_offset = 0;  ///< within a record; a multiple of 16
  std::size_t overlays_offset = 0;
  std::size_t staging_offset = 0;
  std::size_t staging_stride = 0;  ///< bytes between the stagings of two lanes
  MemoryNeeded needed;

  /// Errors: those of `SlotLayout::create`; `invalid_argument` for an option out of range; `out_of_range`
  /// when the whole needs 2^63 bytes or more.
  [[nodiscard]] static Result<PoolMemory> plan(ModelShape const& shape, PoolOptions const& options,
                                               std::size_t element_bytes) {
    if (auto const fault = check(options, shape); !fault.empty()) {
      return fail(Errc::invalid_argument, "pool: " + fault);
    }
    auto layout = SlotLayout::create(shape, options.max_rank, element_bytes);
    if (!layout) return cuda::std::unexpected<Error>(layout.error());
    PoolMemory memory;
    memory.layout = *std::move(layout);
    auto const slots = static_cast<std::size_t>(options.max_slots);
    std::size_t const places = slots + static_cast<std::size_t>(options.spare);
    memory.bias_stride = options.biases ? memory.layout.bias_bytes() : 0;
    memory.record_bytes = memory.layout.sites() * sizeof(RouteCell<float>);
    if (options.expert_bytes > 0) memory.add_experts(shape.moe(), element_bytes);
    std::size_t staged = std::max(memory.layout.largest_site_bytes(), memory.largest_expert_block);
    if (options.overlay_bytes > 0) {
      memory.add_overlay_cell();
      auto const row = multiply_add(static_cast<std::size_t>(shape.hidden()), element_bytes, 0);
      if (!row) return fail(Errc::out_of_range, "pool: needs 2^63 bytes or more");
      staged = std::max({staged, *row, std::min(options.overlay_bytes, most_overlay_staging)});
    }
    auto const biases = after(0, places, memory.layout.slot_bytes());
    auto const records = biases ? after(*biases, places, memory.bias_stride) : biases;
    auto const experts = records ? after(*records, slots, memory.record_bytes) : records;
    auto const overlays = experts ? after(*experts, 1, options.expert_bytes) : experts;
    auto const device = overlays ? after(*overlays, 1, options.overlay_bytes) : overlays;
    auto const staging = after(0, slots, memory.record_bytes);
    auto const stride = after(0, 1, staged);
    auto const pinned = staging && stride ? after(*staging, loads_at_once, *stride) : std::nullopt;
    if (!device || !pinned) return fail(Errc::out_of_range, "pool: needs 2^63 bytes or more");
    memory.biases_offset = *biases;
    memory.records_offset = *records;
    memory.experts_offset = *experts;
    memory.overlays_offset = *overlays;
    memory.staging_offset = *staging;
    memory.staging_stride = *stride;
    memory.needed = MemoryNeeded{*device, *pinned};
    return memory;
  }

 private:
  void add_experts(MoeShape const& moe, std::size_t element_bytes) {
    largest_expert_block = detail::largest_expert_block(moe, layout.max_rank(), element_bytes);
    routers_in_record = record_bytes;
    indexes_in_record = routers_in_record + moe.layers.size() * sizeof(RouteCell<float>);
    expert_index_stride = expert_index_bytes(moe.num_experts);
    record_bytes = indexes_in_record + moe.layers.size() * expert_index_stride;
  }

  void add_overlay_cell() {
    overlay_cell_offset = aligned_up(record_bytes, alignof(OverlayCell<float>));
    record_bytes = overlay_cell_offset + sizeof(OverlayCell<float>);
  }

  // Where the next part begins: behind `count` times `bytes`, aligned as allocations are.
  static std::optional<std::size_t> after(std::size_t begin, std::size_t count, std::size_t bytes) {
    auto const end = multiply_add(count, bytes, begin);
    return end ? multiply_add(1, aligned_up(*end, 256), 0) : end;
  }

  static std::string check(PoolOptions const& options, ModelShape const& shape) {
    std::string const most = std::to_string(most_pool_slots);
    if (options.max_slots < 1 || options.max_slots > most_pool_slots) {
      return "max_slots is " + std::to_string(options.max_slots) + ", not in [1, " + most + "]";
    }
    if (options.spare < 1 || options.spare > most_pool_slots) {
      return "spare is " + std::to_string(options.spare) + ", not in [1, " + most + "]";
    }
    if (options.pinned < 0 || options.pinned > options.max_slots) {
      return "pinned is " + std::to_string(options.pinned) + ", not in [0, max_slots]";
    }
    if (options.expert_bytes > 0 && shape.moe().num_experts == 0) {
      return "expert_bytes is " + std::to_string(options.expert_bytes) + ", but the model has no experts";
    }
    if (options.overlay_bytes > 0 && (shape.vocab() < 1 || shape.hidden() < 1)) {
      return "overlay_bytes for a model of no known vocabulary";
    }
    return {};
  }
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
