// SPDX-License-Identifier: AGPL-3.0-only
//
// What a pool owns, and how bytes get into it: packing beside running work, and publication in stream order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/load_lanes.hpp"
#include "atlas/lora/pool/memory.hpp"
#include "atlas/lora/pool/overlay_memory.hpp"
#include "atlas/lora/pool/overlay_pack.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/steps.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

/// The memory, streams and book-keeping of one pool. The ledger is shared with leases, which may outlive it.
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
        ledger(std::make_shared<SlotLedger>(options.max_slots, options.pinned,
                                            options.max_slots + options.spare)),
        overlays(options.overlay_bytes, static_cast<std::size_t>(options.max_slots + options.spare)) {}

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
    return reinterpret_cast<RouteCell<T>*>(device_ + memory.records_offset + slot * memory.record_bytes);
  }

  /// The table of the slots' overlay cells, in a pool with token overlays.
  [[nodiscard]] OverlayTable<T> overlay_table() const noexcept {
    std::size_t const row = static_cast<std::size_t>(shape.hidden()) * sizeof(T);
    auto const rows = std::min(static_cast<std::size_t>(shape.vocab()), options.overlay_bytes / row);
    return OverlayTable<T>{overlay_cell_of(device_ + memory.records_offset),
                           static_cast<std::int64_t>(memory.record_bytes),
                           options.max_slots,
                           static_cast<std::int32_t>(rows),
                           shape.vocab(),
                           shape.hidden()};
  }

  /// Whether the pool can hold an adapter: what `check_adapter` and `check_overlay` say, all at once.
  [[nodiscard]] Result<void> check(std::string_view name, Adapter const& adapter,
                                   StageOptions const& how) const {
    auto const pairs =
        check_adapter(name, adapter, shape, memory.layout.max_rank(), options.biases, how.leave_out_unserved);
    auto const rows =
        check_overlay(name, adapter, shape, options.overlay_bytes, sizeof(T), how.leave_out_unserved);
    if (pairs || rows) return pairs ? rows : pairs;
    return fail(pairs.error().code, pairs.error().message + '\n' + rows.error().message);
  }

  /// Gives `place`, which was taken for `name`, room for its token rows, after evicting adapters that nobody
  /// reads until they fit, but not what the name has now: that stays should the load fail. Errors: retryable
  /// `overlay_memory_busy`, and the place is spare again. The ledger's mutex is held.
  [[nodiscard]] Result<void> make_room(std::string_view name, std::int32_t place, std::size_t bytes) {
    auto const is_spare = [&](std::int32_t other) { return ledger->is_spare(other); };
    for (;;) {
      if (overlays.take(place, bytes, is_spare)) return {};
      std::vector<bool> idle(static_cast<std::size_t>(options.max_slots + options.spare));
      std::int32_t oldest = base_slot;
      for (std::int32_t i = options.pinned; ledger->contains(i); ++i) {
        Slot const& slot = ledger->at(i);
        if (slot.staged || !ledger->view(i).idle || slot.tenant->name == name) continue;
        idle[static_cast<std::size_t>(slot.tenant->place)] = true;
        if (oldest == base_slot || slot.last_use < ledger->at(oldest).last_use) oldest = i;
      }
      bool const helps = overlays.fits(bytes, [&](std::int32_t other) {
        return is_spare(other) || idle[static_cast<std::size_t>(other)];
      });
      if (!helps) {
        ledger->give_back_place(place);
        return fail(Errc::overlay_memory_busy, SlotLedger::quoted(name) + ": token rows of " +
                                                   std::to_string(bytes) +
                                                   " bytes do not fit beside those in use");
      }
      ledger->evict(oldest);
    }
  }

  /// Writes the whole of physical slot `place`, which nothing reads: the adapter's pairs, and zeroes; and its
  /// token rows, `overlay_offset` bytes into their region. Returns
  /// when the device has them. On failure the place's content is arbitrary, and copies may still go there.
  [[nodiscard]] Result<ConversionCounts> pack(Lane const& lane, std::int32_t place,
                                              std::size_t overlay_offset, Adapter const& adapter,
                                              StageOptions const& how) {
    ConversionCounts counts;
    if (auto const zeroed = zero(lane, place); !zeroed) return cuda::std::unexpected<Error>(zeroed.error());
    for (AdapterPair const& pair : adapter.pairs) {
      if (how.stop.stop_requested()) {
        return fail(Errc::cancelled, "layer " + std::to_string(pair.site.layer) + " '" +
                                         shape.module(pair.site).name + "': cancelled before it was packed");
      }
      if (pair.rank == 0) continue;
      if (auto const ready = drain(lane); !ready) return cuda::std::unexpected<Error>(ready.error());
      std::span<T> const staging(reinterpret_cast<T*>(staging_of(lane).data()),
                                 memory.layout.largest_site_bytes() / sizeof(T));
      auto const packed = pack_pair<T>(pair, shape.module(pair.site), staging, how.conversion);
      if (!packed) return packed;
      add_counts(counts, *packed);
      if (auto const sent = send(lane, place, pair, staging.data()); !sent) {
        return cuda::std::unexpected<Error>(sent.error());
      }
    }
    if (options.overlay_bytes == 0) return drained(lane, counts);
    auto const rows = OverlayPacker<T, B>{backend, lane, staging_of(lane), how}.pack(
        adapter.overlay, device_ + memory.overlays_offset + overlay_offset);
    if (!rows) return rows;
    add_counts(counts, *rows);
    return drained(lane, counts);
  }

  /// Bytes of an adapter's token rows in the pool.
  [[nodiscard]] std::size_t overlay_bytes(Adapter const& adapter) const noexcept {
    return options.overlay_bytes == 0 ? 0 : overlay_layout(adapter.overlay, sizeof(T)).bytes;
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

  /// Writes the image of `slot`'s record: a cell for every site, null where the adapter has no pair. Nothing
  /// may be reading the image. The ledger's mutex is held.
  void write_image(std::int32_t slot, std::int32_t place, Adapter const& adapter) noexcept {
    std::span<RouteCell<T>> const cells(image(static_cast<std::size_t>(slot)), memory.layout.sites());
    std::fill(cells.begin(), cells.end(), RouteCell<T>{});
    for (AdapterPair const& pair : adapter.pairs) {
      if (pair.rank == 0) continue;
      std::size_t const site = *shape.find(pair.site);
      cells[site] = RouteCell<T>{a_at(place, site),
                                 b_at(place, site),
                                 pair.bias ? bias_at(place, site) : nullptr,
                                 pair.scale,
                                 pair.rank,
                                 padded_rank(pair.rank),
                                 0};
    }
    if (options.overlay_bytes == 0) return;
    *overlay_cell_of(reinterpret_cast<std::byte*>(image(static_cast<std::size_t>(slot)))) =
        overlay_cell_at<T>(adapter.overlay, device_ + memory.overlays_offset + overlays.offset(place));
  }

  /// Publishes everything staged, and blanks the records of slots whose tenant has gone, on stream `index`,
  /// as part of the step that it is about to open. On failure nothing is published: what is staged stays
  /// staged, and cannot be leased. The ledger's mutex is held.
  [[nodiscard]] Result<void> publish(std::size_t index, Stream stream) {
    bool any = false;
    for (std::size_t i = 0; i < ledger->slots.size(); ++i) {
      Slot& slot = ledger->slots[i];
      if (!slot.staged && !slot.blank_due) continue;
      any = true;
      ledger->overwrite(slot, index);
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

  /// What an operator sees. The ledger's mutex is held.
  [[nodiscard]] PoolSnapshot snapshot() const {
    PoolSnapshot all;
    all.memory = memory.needed;
    all.loading = ledger->loading;
    all.spare = static_cast<std::int32_t>(ledger->free_places());
    all.counters = ledger->counters;
    all.slots.reserve(ledger->slots.size());
    for (std::int32_t i = 0; ledger->contains(i); ++i) {
      Slot const& slot = ledger->at(i);
      SlotView const view = ledger->view(i);
      SlotStatus& status = all.slots.emplace_back();
      status.state = view.state;
      status.bytes = view.bytes;
      status.leases = view.leases;
      status.last_use = view.last_use;
      status.uses = view.uses;
      status.pinned = i < options.pinned;
      for (auto const* const content : {&slot.staged, &slot.tenant}) {
        if (*content) all.content_bytes += (*content)->bytes;
      }
      auto const& shown = slot.staged ? slot.staged : slot.tenant;
      if (!shown) continue;
      status.name = shown->name;
      status.id = shown->id;
      status.generation = shown->generation;
      status.tenancy = shown->tenancy;
      status.rank = shown->rank;
      status.active = slot.named && slot.tenant->name == ledger->active;
    }
    return all;
  }

  ModelShape const shape;
  PoolOptions const options;
  PoolMemory const memory;
  B backend;
  StreamSteps<B> steps;
  std::shared_ptr<SlotLedger> const ledger;
  OverlayMemory overlays;  ///< under the ledger's mutex
  LoadLanes<B> lanes;

 private:
  // What a finished load counted, when the device has its bytes.
  [[nodiscard]] Result<ConversionCounts> drained(Lane const& lane, ConversionCounts const& counts) {
    if (auto const sent = drain(lane); !sent) return cuda::std::unexpected<Error>(sent.error());
    return counts;
  }
  [[nodiscard]] RouteCell<T>* image(std::size_t slot) const noexcept {
    return reinterpret_cast<RouteCell<T>*>(pinned_ + slot * memory.record_bytes);
  }
  [[nodiscard]] OverlayCell<T>* overlay_cell_of(std::byte* record) const noexcept {
    return reinterpret_cast<OverlayCell<T>*>(record + memory.overlay_cell_offset);
  }
  [[nodiscard]] std::span<std::byte> staging_of(Lane const& lane) const noexcept {
    return {pinned_ + memory.staging_offset + lane.index * memory.staging_stride, memory.staging_stride};
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

  Result<void> send(Lane const& lane, std::int32_t place, AdapterPair const& pair, T const* staging) {
    std::size_t const site = *shape.find(pair.site);
    PackedExtent const extent = packed_extent(pair, shape.module(pair.site));
    auto sent = backend.copy(a_at(place, site), staging, extent.a * sizeof(T), *lane.stream);
    if (!sent) return sent;
    sent = backend.copy(b_at(place, site), staging + extent.a, extent.b * sizeof(T), *lane.stream);
    if (!sent || extent.bias == 0) return sent;
    return backend.copy(bias_at(place, site), staging + extent.a + extent.b, extent.bias * sizeof(T),
                        *lane.stream);
  }

  std::byte* device_ = nullptr;
  std::byte* pinned_ = nullptr;
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
