// SPDX-License-Identifier: AGPL-3.0-only
//
// Which rows of a saved table differ from a served one, found on the device, and a served table in device
// memory for `build_overlay`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/kernels/fragment.cuh"
#include "atlas/lora/kernels/launch.cuh"
#include "atlas/lora/kernels/machine.hpp"
#include "atlas/lora/overlay/select.hpp"
#include "atlas/lora/pool/cuda_backend.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// `changed[row] = whether some element of the row differs`, by `element_changed`.
template <Element T>
struct RowDiffParams {
  T const* saved = nullptr;   ///< `[rows, hidden]`, contiguous, device, element-aligned
  T const* served = nullptr;  ///< likewise
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  float threshold = 0.0F;           ///< not negative
  std::uint8_t* changed = nullptr;  ///< `[rows]`, device: 1 or 0
};

namespace detail {

inline constexpr int diff_threads = 256;

/// A warp a row.
template <Element T, int Threads>
__global__ void __launch_bounds__(Threads) row_diff_kernel(__grid_constant__ RowDiffParams<T> const p) {
  enter();
  constexpr int warps = Threads / warp_threads;
  auto const addresses =
      reinterpret_cast<std::uintptr_t>(p.saved) | reinterpret_cast<std::uintptr_t>(p.served);
  bool const wide = addresses % 16 == 0 && p.hidden % pack_elements == 0;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / warp_threads;
       row < p.rows; row += static_cast<std::int64_t>(gridDim.x) * warps) {
    T const* const saved = p.saved + row * p.hidden;
    T const* const served = p.served + row * p.hidden;
    bool changed = false;
    for (std::int64_t k = lane_index() * pack_elements; k < p.hidden; k += warp_threads * pack_elements) {
      Pack<T> const a = wide ? load_vectors(saved + k) : load_elements(saved + k, p.hidden - k);
      Pack<T> const b = wide ? load_vectors(served + k) : load_elements(served + k, p.hidden - k);
#pragma unroll
      for (int e = 0; e < pack_elements; ++e) {
        changed = changed || element_changed(__float_as_uint(element(a, e)), __float_as_uint(element(b, e)),
                                             p.threshold);
      }
    }
    changed = __any_sync(0xffffffffu, changed) != 0;
    if (lane_index() == 0) p.changed[row] = changed ? 1 : 0;
  }
}

}  // namespace detail

/// The operation that `prepare` takes for `launch_row_diff`.
template <Element T>
struct RowDiff {
  template <class Visit>
  static void for_each_kernel(Visit const& visit) {
    visit(reinterpret_cast<void const*>(&detail::row_diff_kernel<T, detail::diff_threads>), 1,
          detail::diff_threads, 8);
  }
};

/// Compares rows. Enqueues only; safe in graph capture. Returns `cudaErrorInvalidValue`, before anything is
/// enqueued, for bad parameters or an operation that was not prepared; else what the launch returned.
template <Element T>
[[nodiscard]] ATLAS_HIDDEN cudaError_t launch_row_diff(RowDiffParams<T> const& params, Machine const& machine,
                                                       cudaStream_t stream) noexcept {
  bool const good = machine.prepared(operation_id<RowDiff<T>>()) && params.saved != nullptr &&
                    params.served != nullptr && params.changed != nullptr && params.rows >= 0 &&
                    params.hidden >= 1 && params.threshold >= 0.0F;
  if (!good) return cudaErrorInvalidValue;
  if (params.rows == 0) return cudaSuccess;
  std::int64_t const wanted = (params.rows + 7) / 8;
  auto const blocks =
      static_cast<std::int32_t>(std::min<std::int64_t>(wanted, std::int64_t{8} * machine.multiprocessors));
  return detail::launch(detail::row_diff_kernel<T, detail::diff_threads>,
                        detail::LaunchShape{blocks, detail::diff_threads, 1, 0}, machine, stream, params);
}

/// A served table in device memory, a `ServedTable`. Its own stream and memory for the rows under way are
/// freed with it. Not during capture of a stream of the same thread.
template <Element T>
class DeviceServedTable {
 public:
  using value_type = T;

  /// `table` is `[vocab, hidden]`, contiguous, on `backend`'s device; it must be complete, and outlive this.
  /// `machine` must have `RowDiff<T>` prepared. Errors: `invalid_argument`; the backend's.
  [[nodiscard]] static Result<DeviceServedTable> create(T const* table, std::int64_t hidden,
                                                        Machine const& machine, CudaBackend backend) {
    if (table == nullptr || hidden < 1 || !machine.prepared(operation_id<RowDiff<T>>())) {
      return fail(Errc::invalid_argument, "served table: null, without width, or RowDiff was not prepared");
    }
    DeviceServedTable made(table, hidden, machine, std::move(backend));
    auto const stream = made.backend_.create_stream();
    if (!stream) return cuda::std::unexpected<Error>(stream.error());
    made.stream_ = *stream;
    auto const event = made.backend_.create_event();
    if (!event) return cuda::std::unexpected<Error>(event.error());
    made.event_ = *event;
    return made;
  }
  DeviceServedTable(DeviceServedTable&& other) noexcept
      : table_(other.table_),
        hidden_(other.hidden_),
        machine_(other.machine_),
        backend_(other.backend_),
        stream_(std::exchange(other.stream_, std::nullopt)),
        event_(std::exchange(other.event_, std::nullopt)),
        scratch_(std::exchange(other.scratch_, nullptr)),
        scratch_bytes_(std::exchange(other.scratch_bytes_, 0)) {}
  DeviceServedTable& operator=(DeviceServedTable&&) = delete;
  ~DeviceServedTable() {
    if (scratch_ != nullptr) backend_.free_device(scratch_);
    if (event_) backend_.destroy_event(*event_);
    if (stream_) backend_.destroy_stream(*stream_);
  }

  /// As `ServedTable` says; waits for the device. Scratch grows with the largest call. Errors: the backend's.
  [[nodiscard]] Result<void> compare(std::int64_t first, std::span<T const> rows, float threshold,
                                     std::span<std::uint8_t> changed) {
    std::size_t const row_bytes = (rows.size_bytes() + 255) / 256 * 256;
    if (auto grown = reserve(row_bytes + changed.size()); !grown) return grown;
    auto sent = backend_.copy(scratch_, rows.data(), rows.size_bytes(), *stream_);
    if (!sent) return sent;
    auto* const flags = static_cast<std::uint8_t*>(scratch_) + row_bytes;
    RowDiffParams<T> const params{static_cast<T const*>(scratch_),
                                  table_ + first * hidden_,
                                  static_cast<std::int64_t>(changed.size()),
                                  hidden_,
                                  threshold,
                                  flags};
    if (cudaError_t const error = launch_row_diff(params, machine_, *stream_); error != cudaSuccess) {
      return cuda::std::unexpected<Error>(detail::device_error("launch_row_diff", error));
    }
    return fetch(changed.data(), flags, changed.size());
  }
  /// As `ServedTable` says; waits for the device. Errors: the backend's.
  [[nodiscard]] Result<void> read(std::int64_t first, std::span<T> out) {
    return fetch(out.data(), table_ + first * hidden_, out.size_bytes());
  }

 private:
  DeviceServedTable(T const* table, std::int64_t hidden, Machine const& machine, CudaBackend backend)
      : table_(table), hidden_(hidden), machine_(machine), backend_(std::move(backend)) {}

  Result<void> reserve(std::size_t bytes) {
    if (bytes <= scratch_bytes_) return {};
    auto const memory = backend_.allocate_device(bytes);
    if (!memory) return cuda::std::unexpected<Error>(memory.error());
    if (scratch_ != nullptr) backend_.free_device(scratch_);
    scratch_ = *memory;
    scratch_bytes_ = bytes;
    return {};
  }

  Result<void> fetch(void* to, void const* from, std::size_t bytes) {
    auto done = backend_.copy(to, from, bytes, *stream_);
    if (done) done = backend_.record(*event_, *stream_);
    return done ? backend_.synchronize(*event_) : done;
  }

  T const* table_;
  std::int64_t hidden_;
  Machine machine_;
  CudaBackend backend_;
  std::optional<CudaBackend::Stream> stream_;
  std::optional<CudaBackend::Event> event_;
  void* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace atlas::lora::inline v0
