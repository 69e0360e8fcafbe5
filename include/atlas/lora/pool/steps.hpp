// SPDX-License-Identifier: AGPL-3.0-only
//
// The streams that read a pool: which of their steps are done, and that all of them see a publication.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/backend.hpp"
#include "atlas/lora/pool/slots.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

/// The streams of one pool, in the order of `SlotLedger::streams`. Every function expects the ledger's mutex
/// to be held. Events belong to the backend, which is passed to each call; `destroy` gives them back.
template <Backend B>
class StreamSteps {
 public:
  using Stream = typename B::Stream;
  using Event = typename B::Event;

  /// Makes the event of publications; before anything else.
  [[nodiscard]] Result<void> create(B& backend) {
    auto event = backend.create_event();
    if (!event) return cuda::std::unexpected<Error>(event.error());
    published_ = *event;
    return {};
  }

  /// Waits for the work of all ended steps, as far as the backend can, and destroys the events.
  void destroy(B& backend) noexcept {
    for (Reader& reader : readers_) {
      if (reader.count > 0) static_cast<void>(backend.synchronize(reader.newest().event));
      for (Mark const& mark : reader.ring) backend.destroy_event(mark.event);
    }
    if (published_) backend.destroy_event(*published_);
  }

  [[nodiscard]] std::optional<std::size_t> find(Stream stream) const noexcept {
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      if (readers_[i].stream == stream) return i;
    }
    return std::nullopt;
  }

  /// The index of `stream`, which is registered if it was not, in the place of a forgotten one if there is
  /// any.
  [[nodiscard]] Result<std::size_t> find_or_add(B& backend, SlotLedger& ledger, Stream stream) {
    if (auto const known = find(stream)) return *known;
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      if (readers_[i].stream) continue;
      readers_[i].stream = stream;
      readers_[i].seen = 0;
      return i;
    }
    Reader reader;
    for (std::size_t made = 0; made < reader.ring.size(); ++made) {
      auto event = backend.create_event();
      if (!event) {
        while (made-- > 0) backend.destroy_event(reader.ring[made].event);
        return cuda::std::unexpected<Error>(event.error());
      }
      reader.ring[made].event = *event;
    }
    reader.stream = stream;
    readers_.push_back(reader);
    ledger.streams.emplace_back();
    return readers_.size() - 1;
  }

  /// Learns which steps are done, and settles what waited for them.
  [[nodiscard]] Result<void> poll(B& backend, SlotLedger& ledger) {
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      Reader& reader = readers_[i];
      while (reader.count > 0) {
        auto const is_done = backend.query(reader.oldest().event);
        if (!is_done) return cuda::std::unexpected<Error>(is_done.error());
        if (!*is_done) break;
        ledger.streams[i].passed = reader.oldest().last;
        reader.first = (reader.first + 1) % reader.ring.size();
        --reader.count;
      }
      std::uint64_t const open = ledger.streams[i].open;
      ledger.streams[i].oldest = reader.count > 0 ? reader.oldest().first : open != 0 ? open : no_step;
    }
    ledger.settle();
    return {};
  }

  /// Ends the open step of stream `index`. When the host is very far ahead, the newest event stands for
  /// several steps, which then pass together.
  [[nodiscard]] Result<void> end(B& backend, SlotLedger& ledger, std::size_t index) {
    Reader& reader = readers_[index];
    bool const full = reader.count == reader.ring.size();
    Mark& mark = full ? reader.newest() : reader.ring[(reader.first + reader.count) % reader.ring.size()];
    if (auto outcome = backend.record(mark.event, *reader.stream); !outcome) return outcome;
    mark.last = std::exchange(ledger.streams[index].open, 0);
    if (full) return {};
    mark.first = mark.last;
    ++reader.count;
    return {};
  }

  /// Orders stream `index` after the last publication, if it is not yet.
  [[nodiscard]] Result<void> follow(B& backend, std::size_t index) {
    Reader& reader = readers_[index];
    if (reader.seen == publications_) return {};
    if (auto outcome = backend.wait(*reader.stream, *published_); !outcome) return outcome;
    reader.seen = publications_;
    return {};
  }

  /// Ends a publication whose copies are all on stream `index`: the other streams go on after it. One that is
  /// being captured follows at its next step, since what it captures runs after that.
  [[nodiscard]] Result<void> announce(B& backend, std::size_t index) {
    if (auto outcome = backend.record(*published_, *readers_[index].stream); !outcome) return outcome;
    readers_[index].seen = ++publications_;
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      if (i == index || !readers_[i].stream) continue;
      auto const capturing = backend.is_capturing(*readers_[i].stream);
      if (!capturing) return cuda::std::unexpected<Error>(capturing.error());
      if (*capturing) continue;
      if (auto outcome = follow(backend, i); !outcome) return outcome;
    }
    return {};
  }

  /// Forgets stream `index`. Error: `slot_busy` unless all of its steps have passed.
  [[nodiscard]] Result<void> forget(SlotLedger& ledger, std::size_t index) {
    StreamProgress& stream = ledger.streams[index];
    if (stream.oldest != no_step) return fail(Errc::slot_busy, "forget_stream: a step is open or not done");
    stream.passed = ledger.number_step();  // what it wrote for a step that could not begin passes with it
    readers_[index].stream.reset();
    return {};
  }

 private:
  // The steps that one event stands for.
  struct Mark {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    Event event{};
  };

  // One stream and its ended steps that are not known to be done, oldest first.
  struct Reader {
    std::optional<Stream> stream;
    std::uint64_t seen = 0;  // the last publication that it comes after
    std::array<Mark, 8> ring{};
    std::size_t first = 0;
    std::size_t count = 0;

    Mark& oldest() noexcept { return ring[first]; }
    Mark& newest() noexcept { return ring[(first + count - 1) % ring.size()]; }
  };

  std::vector<Reader> readers_;
  std::optional<Event> published_;
  std::uint64_t publications_ = 0;
};

}  // namespace detail
}  // namespace atlas::lora::inline v0
