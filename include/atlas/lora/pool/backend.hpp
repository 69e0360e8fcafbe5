// SPDX-License-Identifier: AGPL-3.0-only
//
// What a pool needs of a device, as a concept, and its model in host memory.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// Memory, streams and events of one device. A backend is a handle that is cheap to copy; copies are the same
/// device. Its functions may be called from any thread, never throw, and leave nothing behind when they fail.
///
/// - `allocate_device`, `allocate_pinned` (host memory that copies may read while the host goes on): aligned
///   to 256 bytes, contents arbitrary; freed by `free_device`, `free_pinned`.
/// - `copy(to, from, bytes, stream)`, `fill(to, byte, bytes, stream)`: enqueued, either direction.
/// - `record(event, stream)`: the event stands for all work enqueued on the stream so far, until it is
///   recorded again. `wait(stream, event)`: later work of the stream comes after it, without the host
///   waiting.
/// - `query(event)`: whether that work is done (true for an event that was never recorded).
///   `synchronize(event)`: the host waits for it. Nothing here waits for the whole device.
/// - `is_capturing(stream)`: whether the stream's work goes into a graph instead of to the device.
template <class B>
concept Backend = std::copyable<B> && std::equality_comparable<typename B::Stream> &&
    std::copyable<typename B::Stream> && std::copyable<typename B::Event> &&
    requires(B b, typename B::Stream stream, typename B::Event event, void* to, void const* from,
             std::byte byte, std::size_t bytes) {
  { b.allocate_device(bytes) }
  noexcept->std::same_as<Result<void*>>;
  { b.free_device(to) }
  noexcept;
  { b.allocate_pinned(bytes) }
  noexcept->std::same_as<Result<void*>>;
  { b.free_pinned(to) }
  noexcept;
  { b.copy(to, from, bytes, stream) }
  noexcept->std::same_as<Result<void>>;
  { b.fill(to, byte, bytes, stream) }
  noexcept->std::same_as<Result<void>>;
  { b.create_stream() }
  noexcept->std::same_as<Result<typename B::Stream>>;
  { b.destroy_stream(stream) }
  noexcept;
  { b.create_event() }
  noexcept->std::same_as<Result<typename B::Event>>;
  { b.destroy_event(event) }
  noexcept;
  { b.record(event, stream) }
  noexcept->std::same_as<Result<void>>;
  { b.wait(stream, event) }
  noexcept->std::same_as<Result<void>>;
  { b.query(event) }
  noexcept->std::same_as<Result<bool>>;
  { b.synchronize(event) }
  noexcept->std::same_as<Result<void>>;
  { b.is_capturing(stream) }
  noexcept->std::same_as<Result<bool>>;
};

/// The host as a device: memory is heap memory, work is done at once, and so every event is done. A stream is
/// any number. Copies of one backend count together what they have not given back.
class HostBackend {
 public:
  using Stream = std::int32_t;
  using Event = std::int32_t;

  /// Bytes allocated and not freed, as they were asked for.
  [[nodiscard]] std::size_t live_bytes() const noexcept { return counts_->bytes; }
  /// Streams and events created and not destroyed.
  [[nodiscard]] std::size_t live_handles() const noexcept { return counts_->handles; }

  /// Heap memory, aligned to 256 bytes. Error: `out_of_memory`.
  [[nodiscard]] Result<void*> allocate_device(std::size_t bytes) noexcept { return allocate(bytes); }
  /// Gives it back; null is nothing.
  void free_device(void* memory) noexcept { deallocate(memory); }
  /// The same as `allocate_device`.
  [[nodiscard]] Result<void*> allocate_pinned(std::size_t bytes) noexcept { return allocate(bytes); }
  /// The same as `free_device`.
  void free_pinned(void* memory) noexcept { deallocate(memory); }

  /// Copies now; `to` and `from` must not overlap. Never fails, like all that follow.
  [[nodiscard]] Result<void> copy(void* to, void const* from, std::size_t bytes, Stream) noexcept {
    std::memcpy(to, from, bytes);
    return {};
  }
  /// Fills now.
  [[nodiscard]] Result<void> fill(void* to, std::byte byte, std::size_t bytes, Stream) noexcept {
    std::memset(to, std::to_integer<int>(byte), bytes);
    return {};
  }

  /// A number that no stream or event of this backend had before.
  [[nodiscard]] Result<Stream> create_stream() noexcept { return create_handle(); }
  /// Counts the stream as given back.
  void destroy_stream(Stream) noexcept { --counts_->handles; }
  /// Likewise.
  [[nodiscard]] Result<Event> create_event() noexcept { return create_handle(); }
  /// Counts the event as given back.
  void destroy_event(Event) noexcept { --counts_->handles; }
  /// Nothing to do: work is done when it is enqueued.
  [[nodiscard]] Result<void> record(Event, Stream) noexcept { return {}; }
  /// Nothing to wait for.
  [[nodiscard]] Result<void> wait(Stream, Event) noexcept { return {}; }
  /// True.
  [[nodiscard]] Result<bool> query(Event) noexcept { return true; }
  /// Nothing to wait for.
  [[nodiscard]] Result<void> synchronize(Event) noexcept { return {}; }
  /// False: there are no graphs.
  [[nodiscard]] Result<bool> is_capturing(Stream) noexcept { return false; }

 private:
  struct Counts {
    std::atomic<std::size_t> bytes = 0;
    std::atomic<std::size_t> handles = 0;
    std::atomic<std::int32_t> next_handle =
        std::numeric_limits<std::int32_t>::min();  // away from an engine's
  };
  static constexpr std::size_t alignment = 256;

  // A block begins with its size, in a header of one alignment, so that freeing can count.
  Result<void*> allocate(std::size_t bytes) noexcept {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max() / 2;
    void* const block =
        bytes > most ? nullptr
                     : std::aligned_alloc(alignment, (bytes + 2 * alignment - 1) / alignment * alignment);
    if (block == nullptr) return fail(Errc::out_of_memory, "host: " + std::to_string(bytes) + " bytes");
    std::memcpy(block, &bytes, sizeof(bytes));
    counts_->bytes += bytes;
    return static_cast<std::byte*>(block) + alignment;
  }

  void deallocate(void* memory) noexcept {
    if (memory == nullptr) return;
    void* const block = static_cast<std::byte*>(memory) - alignment;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof(bytes));
    counts_->bytes -= bytes;
    std::free(block);
  }

  Result<std::int32_t> create_handle() noexcept {
    ++counts_->handles;
    return counts_->next_handle++;
  }

  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};
static_assert(Backend<HostBackend>);

}  // namespace atlas::lora::inline v0
