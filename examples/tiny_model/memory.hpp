// SPDX-License-Identifier: AGPL-3.0-only
//
// What every device of the tiny model has: memory, copies to and from it, and one stream. Errors are
// exceptions here, as examples may; the library itself never throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <atlas/lora.hpp>

namespace tiny_model {

/// The value of `result`, or an exception with the library's own words.
template <class V>
V expect(atlas::lora::Result<V> result) {
  if (!result)
    throw std::runtime_error(std::string(to_string(result.error().code)) + ": " + result.error().message);
  if constexpr (!std::is_void_v<V>) return std::move(*result);
}

/// `count` elements of a device's memory, zero at first.
template <class V, atlas::lora::Backend B>
class Array {
 public:
  Array() = default;
  Array(B backend, typename B::Stream stream, std::size_t count)
      : backend_(std::move(backend)), count_(count) {
    data_ = static_cast<V*>(expect(backend_.allocate_device(count * sizeof(V))));
    expect(backend_.fill(data_, std::byte{0}, count * sizeof(V), stream));
  }
  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Array() {
    if (data_ != nullptr) backend_.free_device(data_);
  }

  [[nodiscard]] V* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }

 private:
  B backend_{};
  V* data_ = nullptr;
  std::size_t count_ = 0;
};

/// A stream and the copies that go through it. `HostDevice` and `GpuDevice` are made from it.
template <atlas::lora::Backend B>
class Memory {
 public:
  using Stream = typename B::Stream;

  Memory() : stream_(expect(backend_.create_stream())) {}
  Memory(Memory const&) = delete;
  Memory& operator=(Memory const&) = delete;
  ~Memory() { backend_.destroy_stream(stream_); }

  [[nodiscard]] B& backend() { return backend_; }
  [[nodiscard]] Stream stream() const { return stream_; }

  template <class V>
  [[nodiscard]] Array<V, B> allocate(std::int64_t count) {
    return Array<V, B>(backend_, stream_, static_cast<std::size_t>(count));
  }

  /// Enqueues a copy of `from`, which must stay until `synchronize`.
  template <class V>
  void upload(std::span<V const> from, V* to) {
    expect(backend_.copy(to, from.data(), from.size_bytes(), stream_));
  }

  /// Copies to `to` and waits for everything enqueued so far.
  template <class V>
  void download(V const* from, std::span<V> to) {
    expect(backend_.copy(to.data(), from, to.size_bytes(), stream_));
    synchronize();
  }

  void synchronize() {
    auto const event = expect(backend_.create_event());
    expect(backend_.record(event, stream_));
    expect(backend_.synchronize(event));
    backend_.destroy_event(event);
  }

 private:
  B backend_;
  Stream stream_;
};

}  // namespace tiny_model
