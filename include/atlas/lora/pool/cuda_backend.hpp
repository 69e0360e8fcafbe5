// SPDX-License-Identifier: AGPL-3.0-only
//
// The pool's backend on the CUDA runtime. Compiled by any C++20 compiler; only a program that uses it links
// the runtime.
#pragma once

#include <cstddef>
#include <string>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// One CUDA device. Each call selects the device and relaxes the calling thread's capture mode for its own
/// duration, so that loading threads neither break nor join a capture that goes on elsewhere, and leaves the
/// thread's current device, capture mode and last error as they were. Streams of the engine may be any; those
/// created here do not synchronise with the default stream. Errors carry the call's name, and the error's
/// name and number.
class CudaBackend {
 public:
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;

  /// The backend of device `device`, which is not touched before the first call.
  explicit CudaBackend(int device = 0) noexcept : device_(device) {}

  /// The device's ordinal.
  [[nodiscard]] int device() const noexcept { return device_; }

  /// Device memory, aligned to 256 bytes. Errors: `out_of_memory`; `device`.
  [[nodiscard]] Result<void*> allocate_device(std::size_t bytes) noexcept {
    void* memory = nullptr;
    return make(memory, "cudaMalloc", [&] { return cudaMalloc(&memory, bytes); });
  }
  /// Gives it back; may wait for the device.
  void free_device(void* memory) noexcept {
    static_cast<void>(call("cudaFree", [&] { return cudaFree(memory); }));
  }
  /// Page-locked host memory. Errors: `out_of_memory`; `device`.
  [[nodiscard]] Result<void*> allocate_pinned(std::size_t bytes) noexcept {
    void* memory = nullptr;
    return make(memory, "cudaHostAlloc", [&] { return cudaHostAlloc(&memory, bytes, cudaHostAllocDefault); });
  }
  /// Gives it back; may wait for the device.
  void free_pinned(void* memory) noexcept {
    static_cast<void>(call("cudaFreeHost", [&] { return cudaFreeHost(memory); }));
  }

  /// Enqueues `cudaMemcpyAsync`, its direction told by the pointers. Error: `device`, as of all that follow.
  [[nodiscard]] Result<void> copy(void* to, void const* from, std::size_t bytes, Stream stream) noexcept {
    return call("cudaMemcpyAsync",
                [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream); });
  }
  /// Enqueues `cudaMemsetAsync`.
  [[nodiscard]] Result<void> fill(void* to, std::byte byte, std::size_t bytes, Stream stream) noexcept {
    return call("cudaMemsetAsync",
                [&] { return cudaMemsetAsync(to, std::to_integer<int>(byte), bytes, stream); });
  }

  /// A stream that does not synchronise with the default one.
  [[nodiscard]] Result<Stream> create_stream() noexcept {
    Stream stream = nullptr;
    return make(stream, "cudaStreamCreateWithFlags",
                [&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); });
  }
  /// Gives it back; work that is enqueued is still done.
  void destroy_stream(Stream stream) noexcept {
    static_cast<void>(call("cudaStreamDestroy", [&] { return cudaStreamDestroy(stream); }));
  }
  /// An event without timing.
  [[nodiscard]] Result<Event> create_event() noexcept {
    Event event = nullptr;
    return make(event, "cudaEventCreateWithFlags",
                [&] { return cudaEventCreateWithFlags(&event, cudaEventDisableTiming); });
  }
  /// Gives it back; who waits for it still does.
  void destroy_event(Event event) noexcept {
    static_cast<void>(call("cudaEventDestroy", [&] { return cudaEventDestroy(event); }));
  }

  /// Enqueues the event behind all work of the stream so far.
  [[nodiscard]] Result<void> record(Event event, Stream stream) noexcept {
    return call("cudaEventRecord", [&] { return cudaEventRecord(event, stream); });
  }
  /// Later work of the stream comes after the event; the host does not wait.
  [[nodiscard]] Result<void> wait(Stream stream, Event event) noexcept {
    return call("cudaStreamWaitEvent", [&] { return cudaStreamWaitEvent(stream, event, 0); });
  }
  /// Whether the event's work is done. A fault of earlier asynchronous work may surface here.
  [[nodiscard]] Result<bool> query(Event event) noexcept {
    bool is_done = true;
    return make(is_done, "cudaEventQuery", [&] {
      cudaError_t const error = cudaEventQuery(event);
      is_done = error != cudaErrorNotReady;
      return is_done ? error : cudaSuccess;
    });
  }
  /// The host waits for the event.
  [[nodiscard]] Result<void> synchronize(Event event) noexcept {
    return call("cudaEventSynchronize", [&] { return cudaEventSynchronize(event); });
  }
  /// Whether the stream is being captured; true of the default stream also while another one is.
  [[nodiscard]] Result<bool> is_capturing(Stream stream) noexcept {
    bool capturing = false;
    return make(capturing, "cudaStreamIsCapturing", [&] {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      cudaError_t const error = cudaStreamIsCapturing(stream, &status);
      bool const implicitly =
          error == cudaErrorStreamCaptureImplicit;  // the default stream, while another captures
      capturing = implicitly || status != cudaStreamCaptureStatusNone;
      return implicitly ? cudaSuccess : error;
    });
  }

 private:
  // The calling thread's device, capture mode and last error, set for one call and put back after it.
  class Scope {
   public:
    explicit Scope(int device) noexcept : earlier_error_(cudaPeekAtLastError()) {
      relaxed_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
      selected_ = cudaGetDevice(&previous_);
      if (selected_ != cudaSuccess || previous_ == device) return;
      selected_ = cudaSetDevice(device);
      changed_ = true;
    }
    Scope(Scope const&) = delete;
    Scope& operator=(Scope const&) = delete;
    ~Scope() {
      if (changed_) static_cast<void>(cudaSetDevice(previous_));
      if (relaxed_) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
      // What fails here is returned from here; an error that was there before stays where it was.
      if (earlier_error_ == cudaSuccess) static_cast<void>(cudaGetLastError());
    }

    // Whether the device is the one asked for.
    [[nodiscard]] cudaError_t selected() const noexcept { return selected_; }

   private:
    cudaError_t earlier_error_;
    cudaError_t selected_ = cudaSuccess;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    int previous_ = 0;
    bool relaxed_ = false;
    bool changed_ = false;
  };

  static Result<void> failed(cudaError_t error, char const* name) {
    return fail(error == cudaErrorMemoryAllocation ? Errc::out_of_memory : Errc::device,
                std::string(name) + ": " + cudaGetErrorName(error) + " (" +
                    std::to_string(static_cast<int>(error)) + "), " + cudaGetErrorString(error));
  }

  template <class Call>
  Result<void> call(char const* name, Call const& body) noexcept {
    Scope const scope(device_);
    if (scope.selected() != cudaSuccess) return failed(scope.selected(), "cudaSetDevice");
    cudaError_t const error = body();
    if (error != cudaSuccess) return failed(error, name);
    return {};
  }

  // The value that `body` makes, or why it does not.
  template <class V, class Call>
  Result<V> make(V& value, char const* name, Call const& body) noexcept {
    if (auto outcome = call(name, body); !outcome) return cuda::std::unexpected<Error>(outcome.error());
    return value;
  }

  int device_;
};
static_assert(Backend<CudaBackend>);

}  // namespace atlas::lora::inline v0
