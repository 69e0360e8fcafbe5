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
#include <stop_token>
#include <string>
#include <utility>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/load_lanes.hpp"
#include "atlas/lora/pool/memory.hpp"
#include "atlas/lora/pool/pack.hpp"
#include "atlas/lora/pool/packed_adapter.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/pool/snapshot.hpp"
#include "atlas/lora/pool/steps.hpp"
#include "atlas/lora/status.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

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
        ledger(SlotLedger::create(options.max_slots, options.pinned, options.max_slots + options.spare)) {}

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

  /// Writes the whole of physical slot `place`, which nothing reads: the adapter's pairs, and zeroes. Returns
  /// when the device has them. On failure the place's content is arbitrary, and copies may still go there.
  [[nodiscard]] Result<ConversionCounts> pack(Lane const& lane, std::int32_t place, Adapter const& adapter,
                                              PackedOutline const& outline, StageOptions const& how) {
    ConversionCounts counts;
    if (auto const zeroed = zero(lane, place); !zeroed) return cuda::std::unexpected<Error>(zeroed.error());
    std::span<std::byte> const staging(pinned_ + memory.staging_offset + lane.index * memory.staging_stride,
                                       memory.layout.largest_site_bytes());
    auto packed = outline.pairs.begin();
    for (AdapterPair const& pair : adapter.pairs) {
      if (pair.rank == 0) continue;
      if (auto const on = go_on(pair.site, how.stop); !on) return cuda::std::unexpected<Error>(on.error());
      if (auto const ready = drain(lane); !ready) return cuda::std::unexpected<Error>(ready.error());
      auto const converted =
          pack_pair<T>(pair, shape.module(pair.site),
                       std::span<T>(reinterpret_cast<T*>(staging.data()), staging.size() / sizeof(T)),
                       how.packing.conversion);
      if (!converted) return converted;
      add_counts(counts, *converted);
      auto const sent =
          send(lane, place, *packed++, [&](std::size_t offset, std::size_t bytes, auto const& body) {
            return body(staging.data() + offset, bytes);
          });
      if (!sent) return cuda::std::unexpected<Error>(sent.error());
    }
    if (auto const sent = drain(lane); !sent) return cuda::std::unexpected<Error>(sent.error());
    return counts;
  }

  /// The same from an adapter that is packed already: copies by the device alone.
  [[nodiscard]] Result<ConversionCounts> pack(Lane const& lane, std::int32_t place,
                                              PackedAdapter<T> const& adapter, PackedOutline const& outline,
                                              StageOptions const& how) {
    if (auto const zeroed = zero(lane, place); !zeroed) return cuda::std::unexpected<Error>(zeroed.error());
    for (PackedPair const& pair : outline.pairs) {
      if (auto const on = go_on(pair.site, how.stop); !on) return cuda::std::unexpected<Error>(on.error());
      auto const sent = send(lane, place, pair, [&](std::size_t offset, std::size_t bytes, auto const& body) {
        return adapter.blocks().for_each_piece(pair.offset + offset, bytes, body);
      });
      if (!sent) return cuda::std::unexpected<Error>(sent.error());
    }
    if (auto const sent = drain(lane); !sent) return cuda::std::unexpected<Error>(sent.error());
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

  /// Writes the image of `slot`'s record: a cell for every site, null where the adapter has no pair. Nothing
  /// may be reading the image. The ledger's mutex is held.
  void write_image(std::int32_t slot, std::int32_t place, PackedOutline const& outline) noexcept {
    std::span<RouteCell<T>> const cells(image(static_cast<std::size_t>(slot)), memory.layout.sites());
    std::fill(cells.begin(), cells.end(), RouteCell<T>{});
    for (PackedPair const& pair : outline.pairs) {
      std::size_t const site = *shape.find(pair.site);
      cells[site] = RouteCell<T>{a_at(place, site),
                                 b_at(place, site),
                                 pair.extent.bias > 0 ? bias_at(place, site) : nullptr,
                                 pair.scale,
                                 pair.rank,
                                 padded_rank(pair.rank),
                                 0};
    }
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

  /// What an operator sees. The ledger's mutex is held.
  [[nodiscard]] PoolSnapshot snapshot() const {
    PoolSnapshot all;
    all.memory = memory.needed;
    all.loading = ledger->loading;
    all.spare = static_cast<std::int32_t>(ledger->free_places());
    all.counters = ledger->counters;
    all.counters.leases = ledger->leases_taken();
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
  SlotLedger::Owner const ledger;
  LoadLanes<B> lanes;

 private:
  [[nodiscard]] RouteCell<T>* image(std::size_t slot) const noexcept {
    return reinterpret_cast<RouteCell<T>*>(pinned_ + slot * memory.record_bytes);
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

  // Whether a load may go on to a pair.
  Result<void> go_on(Site site, std::stop_token const& stop) const {
    if (!stop.stop_requested()) return {};
    return fail(Errc::cancelled, "layer " + std::to_string(site.layer) + " '" + shape.module(site).name +
                                     "': cancelled before it was packed");
  }

  // Enqueues the copies of a pair, whose bytes `source(offset, bytes, body)` shows to `body` piece by piece.
  template <class Source>
  Result<void> send(Lane const& lane, std::int32_t place, PackedPair const& pair, Source const& source) {
    std::size_t const site = *shape.find(pair.site);
    std::size_t offset = 0;
    auto const copy = [&](T* to, std::size_t elements) {
      auto* target = reinterpret_cast<std::byte*>(to);
      std::size_t const begin = std::exchange(offset, offset + elements * sizeof(T));
      return source(begin, elements * sizeof(T), [&](std::byte const* from, std::size_t bytes) {
        return backend.copy(std::exchange(target, target + bytes), from, bytes, *lane.stream);
      });
    };
    auto sent = copy(a_at(place, site), pair.extent.a);
    if (sent) sent = copy(b_at(place, site), pair.extent.b);
    if (sent && pair.extent.bias > 0) sent = copy(bias_at(place, site), pair.extent.bias);
    return sent;
  }

  std::byte* device_ = nullptr;
  std::byte* pinned_ = nullptr;
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
