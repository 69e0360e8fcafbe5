// SPDX-License-Identifier: AGPL-3.0-only
//
// What loads that pack at one time have each for itself: a stream, an event and staging memory.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

/// How many loads of one pool can pack at one time; more wait for one another.
inline constexpr std::size_t loads_at_once = 2;

/// The lanes of one pool. `take` may be called from any thread; a lane that was taken is its taker's alone.
/// Streams and events belong to the backend, which is passed to each call; `destroy` gives them back.
template <Backend B>
class LoadLanes {
 public:
  struct Lane {
    std::size_t index = 0;
    std::optional<typename B::Stream> stream;
    std::optional<typename B::Event> event;
    std::optional<std::int32_t> unsettled;  ///< a physical slot to which copies of a failed load may still go
    bool taken = false;
  };

  /// A lane until the end of its scope.
  class Use {
   public:
    Use(LoadLanes& lanes, Lane& lane) noexcept : lanes_(&lanes), lane_(&lane) {}
    Use(Use&& other) noexcept : lanes_(std::exchange(other.lanes_, nullptr)), lane_(other.lane_) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (lanes_ != nullptr) lanes_->give_back(*lane_);
    }
    [[nodiscard]] Lane& operator*() const noexcept { return *lane_; }

   private:
    LoadLanes* lanes_;
    Lane* lane_;
  };

  [[nodiscard]] Result<void> create(B& backend) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      lanes_[i].index = i;
      auto const stream = backend.create_stream();
      if (!stream) return cuda::std::unexpected<Error>(stream.error());
      lanes_[i].stream = *stream;
      auto const event = backend.create_event();
      if (!event) return cuda::std::unexpected<Error>(event.error());
      lanes_[i].event = *event;
    }
    return {};
  }

  /// Waits for what loads have enqueued, as far as the backend can, and destroys streams and events.
  void destroy(B& backend) noexcept {
    for (Lane const& lane : lanes_) {
      if (lane.stream && lane.event) static_cast<void>(drain(backend, lane));
      if (lane.event) backend.destroy_event(*lane.event);
      if (lane.stream) backend.destroy_stream(*lane.stream);
    }
  }

  /// The first lane, while no load has begun yet.
  [[nodiscard]] Lane const& first() const noexcept { return lanes_[0]; }

  /// Waits for a lane; one whose failed load left something unsettled comes first. None when `stop` is
  /// requested before there is one.
  [[nodiscard]] std::optional<Use> take(std::stop_token const& stop) {
    if (stop.stop_requested()) return std::nullopt;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!given_back_.wait(lock, stop, [&] { return free_lane() != nullptr; })) return std::nullopt;
    Lane& lane = *free_lane();
    lane.taken = true;
    return std::optional<Use>(std::in_place, *this, lane);
  }

  /// Waits until the device has done all that was enqueued on the lane, after which its staging is free.
  [[nodiscard]] static Result<void> drain(B& backend, Lane const& lane) {
    if (auto const recorded = backend.record(*lane.event, *lane.stream); !recorded) return recorded;
    return backend.synchronize(*lane.event);
  }

 private:
  Lane* free_lane() noexcept {
    Lane* free = nullptr;
    for (Lane& lane : lanes_) {
      if (!lane.taken && (free == nullptr || (lane.unsettled && !free->unsettled))) free = &lane;
    }
    return free;
  }

  void give_back(Lane& lane) {
    {
      std::lock_guard<std::mutex> const lock(mutex_);
      lane.taken = false;
    }
    given_back_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable_any given_back_;
  std::array<Lane, loads_at_once> lanes_;
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
