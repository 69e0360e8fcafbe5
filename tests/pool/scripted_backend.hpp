// SPDX-License-Identifier: AGPL-3.0-only
//
// A backend for tests: a device in host memory whose streams do their work when the test says so, whose n-th
// call fails when the test says so, and whose streams are captured when the test says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/status.hpp"

namespace atlas_test {

using atlas::lora::Errc;
using atlas::lora::fail;
using atlas::lora::HostBackend;
using atlas::lora::Result;

class ScriptedBackend {
 public:
  using Stream = std::int32_t;
  using Event = std::int32_t;

  struct Script {
    HostBackend memory;
    std::int64_t calls = 0;     ///< fallible calls so far
    std::int64_t fail_at = -1;  ///< the call, counted from 0, that fails; negative for none
    bool fail_always = false;   ///< and all later ones too
    bool deferred = false;      ///< streams wait for `run`, unless an event is synchronised with
    std::set<Stream> capturing{};
    std::size_t waits = 0;  ///< calls of `wait`
  };

  Script& script() noexcept { return *script_; }
  Script const& script() const noexcept { return *script_; }

  /// Enqueues something that a test does in stream order, as a kernel would be.
  void launch(Stream stream, std::function<void()> body) { enqueue(stream, {std::move(body), -1, 0}); }

  /// Does up to `count` pieces of a stream's work, which stops before a wait that is not over. Returns
  /// whether it did any.
  bool run(Stream stream, std::size_t count = ~std::size_t{0}) {
    bool any = false;
    auto& queue = (*queues_)[stream];
    for (; count > 0 && !queue.empty() && is_ready(queue.front()); --count, any = true) {
      Work const work = std::move(queue.front());
      queue.pop_front();
      if (work.body) work.body();
    }
    return any;
  }
  /// Does all work of all streams.
  void run_all() {
    for (bool any = true; any;) {
      any = false;
      for (auto& entry : *queues_) any = run(entry.first) || any;
    }
  }

  [[nodiscard]] Result<void*> allocate_device(std::size_t bytes) noexcept {
    return fails() ? failed() : script_->memory.allocate_device(bytes);
  }
  void free_device(void* memory) noexcept { script_->memory.free_device(memory); }
  [[nodiscard]] Result<void*> allocate_pinned(std::size_t bytes) noexcept {
    return fails() ? failed() : script_->memory.allocate_pinned(bytes);
  }
  void free_pinned(void* memory) noexcept { script_->memory.free_pinned(memory); }

  [[nodiscard]] Result<void> copy(void* to, void const* from, std::size_t bytes, Stream stream) noexcept {
    if (fails()) return failed();
    HostBackend memory = script_->memory;
    launch(stream, [=]() mutable { static_cast<void>(memory.copy(to, from, bytes, 0)); });
    return {};
  }
  [[nodiscard]] Result<void> fill(void* to, std::byte byte, std::size_t bytes, Stream stream) noexcept {
    if (fails()) return failed();
    HostBackend memory = script_->memory;
    launch(stream, [=]() mutable { static_cast<void>(memory.fill(to, byte, bytes, 0)); });
    return {};
  }

  [[nodiscard]] Result<Stream> create_stream() noexcept {
    return fails() ? failed() : script_->memory.create_stream();
  }
  void destroy_stream(Stream stream) noexcept { script_->memory.destroy_stream(stream); }
  [[nodiscard]] Result<Event> create_event() noexcept {
    return fails() ? failed() : script_->memory.create_event();
  }
  void destroy_event(Event event) noexcept { script_->memory.destroy_event(event); }

  [[nodiscard]] Result<void> record(Event event, Stream stream) noexcept {
    if (fails()) return failed();
    Marks& marks = (*events_)[event];
    marks.stream = stream;
    std::uint64_t const version = ++marks.recorded;
    launch(stream, [events = events_, event, version] { (*events)[event].done = version; });
    return {};
  }
  [[nodiscard]] Result<void> wait(Stream stream, Event event) noexcept {
    if (fails()) return failed();
    ++script_->waits;
    enqueue(stream, {{}, event, (*events_)[event].recorded});
    return {};
  }
  [[nodiscard]] Result<bool> query(Event event) noexcept {
    if (fails()) return failed();
    return is_done(event, (*events_)[event].recorded);
  }
  [[nodiscard]] Result<void> synchronize(Event event) noexcept {
    if (fails()) return failed();
    finish(event, (*events_)[event].recorded);
    return {};
  }
  [[nodiscard]] Result<bool> is_capturing(Stream stream) noexcept {
    if (fails()) return failed();
    return script_->capturing.count(stream) != 0;
  }

 private:
  struct Work {
    std::function<void()> body;
    Event awaited;  // negative for none
    std::uint64_t version;
  };
  struct Marks {
    Stream stream = 0;
    std::uint64_t recorded = 0;
    std::uint64_t done = 0;
  };

  bool fails() noexcept {
    std::int64_t const call = script_->calls++;
    return call == script_->fail_at ||
           (script_->fail_always && script_->fail_at >= 0 && call > script_->fail_at);
  }
  static cuda::std::unexpected<atlas::lora::Error> failed() { return fail(Errc::device, "scripted failure"); }

  bool is_done(Event event, std::uint64_t version) const { return (*events_)[event].done >= version; }
  bool is_ready(Work const& work) const { return work.version == 0 || is_done(work.awaited, work.version); }

  void enqueue(Stream stream, Work work) {
    (*queues_)[stream].push_back(std::move(work));
    if (!script_->deferred) run_all();
  }

  // Does what the host waits for and no more: the event's stream, and those that it waits for.
  void finish(Event event, std::uint64_t version) {
    while (!is_done(event, version)) {
      Stream const stream = (*events_)[event].stream;
      if (run(stream, 1)) continue;
      Work const& front = (*queues_)[stream].front();
      finish(front.awaited, front.version);
    }
  }

  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  std::shared_ptr<std::map<Stream, std::deque<Work>>> queues_ =
      std::make_shared<std::map<Stream, std::deque<Work>>>();
  std::shared_ptr<std::map<Event, Marks>> events_ = std::make_shared<std::map<Event, Marks>>();
};
static_assert(atlas::lora::Backend<ScriptedBackend>);

/// Fails the call `n` from now on.
inline void arm(ScriptedBackend& backend, std::int64_t n) {
  backend.script().fail_at = backend.script().calls + n;
}
/// Stops failing; whether the armed call came.
inline bool disarm(ScriptedBackend& backend) {
  bool const came = backend.script().calls > backend.script().fail_at;
  backend.script().fail_at = -1;
  return came;
}

}  // namespace atlas_test
