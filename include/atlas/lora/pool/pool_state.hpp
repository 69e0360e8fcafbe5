// SPDX-License-Identifier: AGPL-3.0-only
//
// What a pool owns, and how bytes get into it: packing beside running work, and publication in stream order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/expert_arena.hpp"
#include "atlas/lora/pool/expert_pack.hpp"
#include "atlas/lora/pool/load_lanes.hpp"
#include "atlas/lora/pool/memory.hpp"
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/pool/overlay_layout.hpp"
#include "atlas/lora/pool/overlay_memory.hpp"
#include "atlas/lora/pool/overlay_pack.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/packed_adapter.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/steps.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/expert_table.hpp"
#include "atlas/lora/tables/overlay_table.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

/// Where a load writes.
struct LoadRoom {
  std::int32_t place = 0;           ///< physical slot
  std::vector<std::size_t> blocks;  ///< of the memory for experts
  std::size_t overlay_offset = 0;   ///< bytes into the memory for token rows
};

/// The memory, streams and book-keeping of one pool. The ledger stays until leases have gone,
/// which may outlive the pool.
template <Element T, Backend B>
class PoolState {
 public:
  using Stream = typename B::Stream;
  using Lane = typename LoadLanes<B>::Lane;

  PoolState(ModelShape model_shape, PoolOptions const& pool_options, PoolMemory pool_memory, B pool_backend)
      : shape(std::move(model_shape)),
        options(pool_options),
        memory(std::move(pool_memory)),
        backend(std::move(pool_backend)),
        ledger(SlotLedger::create(options.max_slots, options.pinned, options.max_slots + options.spare)) {
    if (serves_experts()) ledger->experts = ExpertArena(options.expert_bytes, memory.largest_expert_block);
    ledger->overlays =
        OverlayMemory(options.overlay_bytes, static_cast<std::size_t>(options.max_slots + options.spare));
  }

  /// Whether experts and routers are served, and token overlays.
  [[nodiscard]] bool serves_experts() const noexcept { return options.expert_bytes > 0; }
  [[nodiscard]] bool serves_overlays() const noexcept { return options.overlay_bytes > 0; }
  /// What adapters may be.
  [[nodiscard]] PoolRoom room() const noexcept {
    return {memory.layout.max_rank(), options.biases, serves_experts(), options.overlay_bytes};
  }

  PoolState(PoolState const&) = delete;
  PoolState& operator=(PoolState const&) = delete;

  ~PoolState() {
    lanes.destroy(backend);
    steps.destroy(backend);
    if (device_ != nullptr) backend.free_device(device_);
    if (pinned_ != nullptr) backend.free_pinned(pinned_);
  }

  /// Takes everything that the pool will ever have, and zeroes the device's part.
  [[nodiscard]] Result<void> allocate() {
    if (auto outcome = lanes.create(backend); !outcome) return outcome;
    if (auto outcome = steps.create(backend); !outcome) return outcome;
    auto const device = backend.allocate_device(memory.needed.device_bytes);
    if (!device) return cuda::std::unexpected<Error>(device.error());
    device_ = static_cast<std::byte*>(*device);
    auto const pinned = backend.allocate_pinned(memory.needed.pinned_bytes);
    if (!pinned) return cuda::std::unexpected<Error>(pinned.error());
    pinned_ = static_cast<std::byte*>(*pinned);
    auto filled = backend.fill(device_, std::byte{0}, memory.needed.device_bytes, *lanes.first().stream);
    return filled ? drain(lanes.first()) : filled;
  }

  /// The cells of `slot` in device memory, `[sites]`.
  [[nodiscard]] RouteCell<T>* record(std::size_t slot) const noexcept {
    return reinterpret_cast<RouteCell<T>*>(record_bytes_at(slot));
  }

  /// Slot 0's cell of the router of the `layer`-th layer with experts, and its index of that layer; null in a
  /// pool that does not serve experts.
  [[nodiscard]] RouteCell<T>* router(std::size_t layer) const noexcept {
    if (!serves_experts()) return nullptr;
    return reinterpret_cast<RouteCell<T>*>(record_bytes_at(0) + memory.routers_in_record) + layer;
  }
  [[nodiscard]] ExpertIndex<T>* expert_index(std::size_t layer) const noexcept {
    if (!serves_experts()) return nullptr;
    return reinterpret_cast<ExpertIndex<T>*>(record_bytes_at(0) + memory.indexes_in_record +
                                             layer * memory.expert_index_stride);
  }

  /// The table of the slots' overlay cells, in a pool with token overlays.
  [[nodiscard]] OverlayTable<T> overlay_table() const noexcept {
    std::size_t const row = static_cast<std::size_t>(shape.hidden()) * sizeof(T);
    auto const rows = std::min(static_cast<std::size_t>(shape.vocab()), options.overlay_bytes / row);
    return OverlayTable<T>{overlay_cell_of(record_bytes_at(0)),
                           static_cast<std::int64_t>(memory.record_bytes),
                           options.max_slots,
                           static_cast<std::int32_t>(rows),
                           shape.vocab(),
                           shape.hidden()};
  }

  /// Writes the whole of a physical slot, which nothing reads: the adapter's pairs, and zeroes; and its
  /// blocks of the memory for experts and for token rows. Returns when the device has them. On failure the
  /// content of all is arbitrary, and copies may still go there.
  [[nodiscard]] Result<ConversionCounts> pack(Lane const& lane, LoadRoom const& room, Adapter const& adapter,
                                              PackedOutline const& outline, StageOptions const& how) {
    ConversionCounts counts;
    auto const from = reinterpret_cast<std::byte const*>(staging(lane).data());
    auto const written = write_place(
        lane, room.place, room.blocks, outline, how.stop, [&](auto const& pair, auto const& send) {
          if (auto ready = drain(lane); !ready) return ready;
          auto const converted = pack_pair<T>(source_of(adapter, pair), linear_of(pair, shape), staging(lane),
                                              how.packing.conversion);
          if (!converted) return Result<void>(cuda::std::unexpected<Error>(converted.error()));
          add_counts(counts, *converted);
          return send([&](std::size_t offset, std::size_t bytes, auto const& body) {
            return body(from + offset, bytes);
          });
        });
    if (!written) return cuda::std::unexpected<Error>(written.error());
    if (outline.overlay.bytes == 0) return counts;
    auto const bytes = std::as_writable_bytes(staging(lane));
    std::byte* const to = overlay_at(room.overlay_offset);
    auto const rows = OverlayPacker<T>{bytes, how.packing.conversion}.pack(
        adapter.overlay, [&] { return how.stop.stop_requested() ? rows_cancelled() : drain(lane); },
        [&](std::size_t offset, std::size_t count) {
          return backend.copy(to + offset, bytes.data(), count, *lane.stream);
        });
    if (!rows) return rows;
    add_counts(counts, *rows);
    if (auto const sent = drain(lane); !sent) return cuda::std::unexpected<Error>(sent.error());
    return counts;
  }

  /// The same from an adapter that is packed already: copies by the device alone.
  [[nodiscard]] Result<ConversionCounts> pack(Lane const& lane, LoadRoom const& room,
                                              PackedAdapter<T> const& adapter, PackedOutline const& outline,
                                              StageOptions const& how) {
    auto const written = write_place(
        lane, room.place, room.blocks, outline, how.stop, [&](auto const& pair, auto const& send) {
          return send([&](std::size_t offset, std::size_t bytes, auto const& body) {
            return adapter.blocks().for_each_piece(pair.offset + offset, bytes, body);
          });
        });
    if (!written) return cuda::std::unexpected<Error>(written.error());
    if (outline.overlay.bytes == 0) return adapter.counts();
    if (how.stop.stop_requested()) return cuda::std::unexpected<Error>(rows_cancelled().error());
    std::byte* to = overlay_at(room.overlay_offset);
    auto const copied = adapter.blocks().for_each_piece(
        outline.overlay.offset, outline.overlay.bytes, [&](std::byte const* from, std::size_t piece) {
          return backend.copy(std::exchange(to, to + piece), from, piece, *lane.stream);
        });
    auto const sent = copied ? drain(lane) : copied;
    if (!sent) return cuda::std::unexpected<Error>(sent.error());
    return adapter.counts();
  }

  /// Waits until the device has done all that loads have enqueued on the lane.
  [[nodiscard]] Result<void> drain(Lane const& lane) { return LoadLanes<B>::drain(backend, lane); }

  /// Makes the place spare that an earlier load of the lane left behind when the device failed.
  [[nodiscard]] Result<void> settle(Lane& lane) {
    if (!lane.unsettled) return {};
    if (auto const quiet = drain(lane); !quiet) return quiet;
    std::lock_guard<std::mutex> const lock(ledger->mutex);
    ledger->give_back_place(*lane.unsettled);
    lane.unsettled.reset();
    return {};
  }

  /// Writes the image of `slot`'s record: a cell for every site and router, null where the adapter has no
  /// pair, the indexes of its experts and its overlay's cell. Nothing may be reading the image. The ledger's
  /// mutex is held.
  void write_image(std::int32_t slot, std::int32_t place, PackedOutline const& outline) {
    std::byte* const whole = pinned_ + static_cast<std::size_t>(slot) * memory.record_bytes;
    std::fill_n(whole, memory.record_bytes, std::byte{0});
    auto* const cells = image(static_cast<std::size_t>(slot));
    for (PackedPair const& pair : outline.pairs) cells[*shape.find(pair.site)] = cell(place, pair);
    if (outline.overlay.bytes > 0) {
      *overlay_cell_of(whole) =
          overlay_cell_at<T>(outline.overlay, overlay_at(ledger->overlays.offset(place)));
    }
    std::vector<std::size_t> const& blocks = ledger->expert_blocks(place);
    if (blocks.empty()) return;
    PlacedExperts<T>(outline, shape, device_ + memory.experts_offset, blocks)
        .write_image(reinterpret_cast<RouteCell<T>*>(whole + memory.routers_in_record),
                     whole + memory.indexes_in_record, memory.expert_index_stride);
  }

  /// Publishes everything staged, and blanks the records of slots whose tenant has gone, on stream `index`,
  /// as part of step `number` that it is about to open. On failure nothing is published: what is staged stays
  /// staged, and cannot be leased. The ledger's mutex is held.
  [[nodiscard]] Result<void> publish(std::size_t index, std::uint64_t number, Stream stream) {
    bool any = false;
    for (std::size_t i = 0; i < ledger->slots.size(); ++i) {
      Slot& slot = ledger->slots[i];
      if (!slot.staged && !slot.blank_due) continue;
      any = true;
      ledger->overwrite(slot, index, number);
      auto const enqueued = slot.staged ? backend.copy(record(i), image(i), memory.record_bytes, stream)
                                        : backend.fill(record(i), std::byte{0}, memory.record_bytes, stream);
      if (!enqueued) return enqueued;
    }
    if (!any) return {};
    if (auto const announced = steps.announce(backend, index); !announced) return announced;
    for (Slot& slot : ledger->slots) {
      if (slot.staged) ledger->publish(slot);
      slot.blank_due = false;
    }
    return {};
  }

  ModelShape const shape;
  PoolOptions const options;
  PoolMemory const memory;
  B backend;
  StreamSteps<B> steps;
  SlotLedger::Owner const ledger;
  LoadLanes<B> lanes;

 private:
  [[nodiscard]] std::byte* record_bytes_at(std::size_t slot) const noexcept {
    return device_ + memory.records_offset + slot * memory.record_bytes;
  }
  [[nodiscard]] std::span<T> staging(Lane const& lane) const noexcept {
    return {reinterpret_cast<T*>(pinned_ + memory.staging_offset + lane.index * memory.staging_stride),
            memory.staging_stride / sizeof(T)};
  }

  [[nodiscard]] RouteCell<T>* image(std::size_t slot) const noexcept {
    return reinterpret_cast<RouteCell<T>*>(pinned_ + slot * memory.record_bytes);
  }
  [[nodiscard]] OverlayCell<T>* overlay_cell_of(std::byte* record) const noexcept {
    return reinterpret_cast<OverlayCell<T>*>(record + memory.overlay_cell_offset);
  }
  [[nodiscard]] std::byte* overlay_at(std::size_t offset) const noexcept {
    return device_ + memory.overlays_offset + offset;
  }
  static Result<void> rows_cancelled() {
    return fail(Errc::cancelled, "token rows: cancelled before they were packed");
  }
  [[nodiscard]] std::byte* place_at(std::int32_t place) const noexcept {
    return device_ + static_cast<std::size_t>(place) * memory.layout.slot_bytes();
  }
  [[nodiscard]] std::byte* biases_at(std::int32_t place) const noexcept {
    return device_ + memory.biases_offset + static_cast<std::size_t>(place) * memory.bias_stride;
  }
  [[nodiscard]] T* a_at(std::int32_t place, std::size_t site) const noexcept {
    return reinterpret_cast<T*>(place_at(place) + memory.layout.a_offset(site));
  }
  [[nodiscard]] T* b_at(std::int32_t place, std::size_t site) const noexcept {
    return reinterpret_cast<T*>(place_at(place) + memory.layout.b_offset(site));
  }
  [[nodiscard]] T* bias_at(std::int32_t place, std::size_t site) const noexcept {
    return reinterpret_cast<T*>(biases_at(place) + memory.layout.bias_offset(site));
  }

  Result<void> zero(Lane const& lane, std::int32_t place) {
    auto const filled = backend.fill(place_at(place), std::byte{0}, memory.layout.slot_bytes(), *lane.stream);
    if (!filled || memory.bias_stride == 0) return filled;
    return backend.fill(biases_at(place), std::byte{0}, memory.bias_stride, *lane.stream);
  }

  // Where A, B and bias of a pair lie in a place.
  [[nodiscard]] RouteCell<T> cell(std::int32_t place, PackedPair const& pair) const noexcept {
    std::size_t const site = *shape.find(pair.site);
    return {a_at(place, site),
            b_at(place, site),
            pair.extent.bias > 0 ? bias_at(place, site) : nullptr,
            pair.scale,
            pair.rank,
            padded_rank(pair.rank),
            0};
  }

  // Fills a place and its blocks, and waits for the device. `put(pair, send)` calls `send(source)` with what
  // shows a pair's bytes piece by piece: `source(offset, bytes, body)`.
  template <class Put>
  Result<void> write_place(Lane const& lane, std::int32_t place, std::span<std::size_t const> blocks,
                           PackedOutline const& outline, std::stop_token const& stop, Put const& put) {
    if (auto zeroed = zero(lane, place); !zeroed) return zeroed;
    PlacedExperts<T> const placed(outline, shape, device_ + memory.experts_offset, blocks);
    auto const put_one = [&](auto const& pair) -> Result<void> {
      if (stop.stop_requested()) {
        return fail(Errc::cancelled, place_of(pair, shape) + "cancelled before it was packed");
      }
      return put(pair, [&](auto const& source) { return send_pair(lane, place, placed, pair, source); });
    };
    if (auto put_all = for_each_pair(outline, put_one); !put_all) return put_all;
    auto sent = placed.send_cells(
        reinterpret_cast<std::byte*>(staging(lane).data()), [&] { return drain(lane); },
        [&](void* to, void const* from, std::size_t bytes) {
          return backend.copy(to, from, bytes, *lane.stream);
        });
    return sent ? drain(lane) : sent;
  }

  // Enqueues what makes a pair's part of a place or of its block the pair's.
  template <class Source>
  Result<void> send_pair(Lane const& lane, std::int32_t place, PlacedExperts<T> const&,
                         PackedPair const& pair, Source const& source) {
    return send(lane, cell(place, pair), pair.extent, source);  // the place is zero
  }
  template <class Packed, class Source>
  Result<void> send_pair(Lane const& lane, std::int32_t, PlacedExperts<T> const& placed, Packed const& pair,
                         Source const& source) {
    RouteCell<T> const target = placed.cell(pair);
    auto sent = send(lane, target, pair.extent, source);
    std::size_t const tail = placed.tail_bytes(pair);
    if (!sent || tail == 0) return sent;
    return backend.fill(const_cast<T*>(target.a) + pair.extent.a, std::byte{0}, tail, *lane.stream);
  }

  // Enqueues the copies of a pair to where its cell says; parts that are neighbours there go together, as
  // they are neighbours in the source.
  template <class Source>
  Result<void> send(Lane const& lane, RouteCell<T> const& cell, PackedExtent const& extent,
                    Source const& source) {
    std::array<std::pair<T const*, std::size_t>, 3> const parts{
        {{cell.a, extent.a}, {cell.b, extent.b}, {cell.bias, extent.bias}}};
    std::size_t offset = 0;
    for (std::size_t i = 0; i < parts.size();) {
      auto [to, elements] = parts[i++];
      if (elements == 0) continue;
      while (i < parts.size() && parts[i].first == to + elements) elements += parts[i++].second;
      auto* target = reinterpret_cast<std::byte*>(const_cast<T*>(to));
      std::size_t const bytes = elements * sizeof(T);
      auto sent = source(offset, bytes, [&](std::byte const* from, std::size_t piece) {
        return backend.copy(std::exchange(target, target + piece), from, piece, *lane.stream);
      });
      if (!sent) return sent;
      offset += bytes;
    }
    return {};
  }

  std::byte* device_ = nullptr;
  std::byte* pinned_ = nullptr;
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
