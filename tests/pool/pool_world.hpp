// SPDX-License-Identifier: AGPL-3.0-only
//
// A small pool under operations of two requests, an engine, an operator and a loader, and what it promises.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "atlas/lora/pool/pool.hpp"
#include "tiny_pool.hpp"

namespace atlas_test {

// The host, with a moment in the middle of a load and a call that fails.
class PlayedBackend : public HostBackend {
 public:
  struct Script {
    std::function<void()> in_load;
    std::int32_t fail_in = -1;  // of the next fills and copies, counted from 0; negative for none
  };
  Script& script() noexcept { return *script_; }

  Result<void> copy(void* to, void const* from, std::size_t bytes, Stream on) noexcept {
    return fails() ? Result<void>(fail(Errc::device, "played")) : HostBackend::copy(to, from, bytes, on);
  }
  Result<void> fill(void* to, std::byte byte, std::size_t bytes, Stream on) noexcept {
    if (auto const play = std::exchange(script_->in_load, nullptr)) play();
    return fails() ? Result<void>(fail(Errc::device, "played")) : HostBackend::fill(to, byte, bytes, on);
  }

 private:
  bool fails() noexcept { return script_->fail_in >= 0 && script_->fail_in-- == 0; }

  std::shared_ptr<Script> script_ = std::make_shared<Script>();
};
using PlayedPool = AdapterPool<float, PlayedBackend>;

inline constexpr std::int32_t num_places = 4;
inline constexpr std::array<char const*, 4> names{"a", "b", "c", "d"};
inline constexpr std::array<std::size_t, 5> name_of{0, 1, 2, 3, 0};  // content 4 is other content of name a

// All of the same size, q's of layer 0 or 1, so that bytes count contents.
inline std::vector<Adapter> const& contents() {
  static std::vector<Adapter> const all = [] {
    std::vector<Adapter> adapters;
    for (std::uint32_t i = 0; i < name_of.size(); ++i) {
      adapters.push_back(tiny_adapter(tiny_shape(), i + 1, 8, {i % 2 == 0 ? 0U : 2U}));
    }
    return adapters;
  }();
  return all;
}
inline constexpr std::size_t content_bytes = (8 * 10 + 6 * 8) * sizeof(float);

enum class Kind : std::uint8_t {
  acquire,
  fork,
  release,
  load,
  fail_load,
  begin,
  fail_begin,
  end,
  rotate,
  unload
};
struct Operation {
  Kind kind;
  std::size_t who = 0;   // request
  std::size_t what = 0;  // name, or content of a load; names.size() for none
  std::shared_ptr<Operation const> in_load{};
};

// What the promises are told against: who is where by what was asked, not by what the pool says.
class World {
 public:
  World() : pool_(*PlayedPool::create(shape(), {.max_slots = 3, .spare = 1, .max_rank = 8})) {}

  static ModelShape const& shape() {
    static ModelShape const tiny = tiny_shape();
    return tiny;
  }

  [[nodiscard]] bool allowed(Operation const& operation) const {
    auto const& request = requests_[operation.who];
    switch (operation.kind) {
      case Kind::acquire: return !request;
      case Kind::fork: return !request && requests_[1 - operation.who].has_value();
      case Kind::release: return request.has_value();
      case Kind::begin:
      case Kind::fail_begin: return !open_;
      case Kind::end: return open_;
      default: return true;
    }
  }

  void play(Operation const& operation) {
    if (!allowed(operation)) return;  // an operation in the middle of a load may have made it so
    std::string const before = promised();
    Errc outcome = Errc::ok;
    switch (operation.kind) {
      case Kind::acquire: outcome = acquire_name(operation.who, operation.what); break;
      case Kind::fork: outcome = fork(operation.who); break;
      case Kind::release: requests_[operation.who].reset(); break;
      case Kind::load:
      case Kind::fail_load: outcome = load_content(operation); break;
      case Kind::begin:
      case Kind::fail_begin: outcome = begin(operation.kind == Kind::fail_begin); break;
      case Kind::end:
        outcome = code(pool_.end_step(stream));
        open_ = false;
        read_.clear();
        break;
      case Kind::rotate: outcome = rotate(operation.what); break;
      case Kind::unload: outcome = unload(operation.what); break;
    }
    bool const may_change = operation.kind == Kind::fail_begin || operation.in_load != nullptr;
    if (outcome != Errc::ok && !may_change && promised() != before) broke("a refused call changed something");
  }

  // The first broken promise; empty for none. What comes last ends the world.
  std::string fault() {
    check_readers();
    check_names();
    check_places();
    check_keys();
    check_end();
    return fault_;
  }

  // What later operations depend on, as far as it can be seen.
  [[nodiscard]] std::string key() const {
    PoolSnapshot const now = pool_.snapshot();
    std::string key = promised() + (failed_begin_ ? "!" : ".");
    for (std::size_t i = 0; i < now.slots.size(); ++i) {
      SlotStatus const& slot = now.slots[i];
      auto const older = std::count_if(now.slots.begin(), now.slots.end(), [&](SlotStatus const& other) {
        return other.last_use < slot.last_use;
      });
      key += static_cast<char>('0' + static_cast<int>(slot.state));
      key += static_cast<char>('0' + older);
      key += pool_.view(static_cast<std::int32_t>(i)).idle ? 'i' : 'u';
      key += static_cast<char>('0' + recorded(i));
    }
    for (auto const& [slot, content] : read_)
      key += static_cast<char>('0' + slot * 8 + static_cast<int>(content));
    return key + static_cast<char>('0' + now.spare);
  }

 private:
  struct Request {
    Lease lease;
    std::size_t content;
    std::uint64_t publication;  // of that content, which a name can have again later in another slot
  };
  using Names = std::array<std::optional<std::size_t>, names.size()>;  // content by name

  void broke(std::string const& promise) {
    if (fault_.empty()) fault_ = promise;
  }

  // 1 + the content that a slot's record speaks of; 0 for none.
  [[nodiscard]] int recorded(std::size_t slot) const {
    auto const index = static_cast<std::int32_t>(slot);
    float const scale =
        std::max(pool_.route(0, "q")->cell(index)->scale, pool_.route(1, "q")->cell(index)->scale);
    return static_cast<int>(scale);
  }
  [[nodiscard]] bool holds_content(std::int32_t slot, std::size_t content) const {
    return slot_holds(pool_, slot, &contents()[content]);
  }
  [[nodiscard]] bool leased(std::size_t name) const {
    return std::any_of(requests_.begin(), requests_.end(), [&](auto const& request) {
      return request && published_[name] && request->publication == publication_of_[name];
    });
  }
  [[nodiscard]] bool idle_or_empty() const {
    for (std::int32_t slot = 0; slot < pool_.max_slots(); ++slot) {
      if (pool_.view(slot).idle || pool_.view(slot).state == SlotState::empty) return true;
    }
    return false;
  }

  // Names, leases, the active adapter and whether a step is open.
  [[nodiscard]] std::string promised() const {
    std::string all = open_ ? "open:" : "shut:";
    all += active_ + ":";
    for (std::size_t name = 0; name < names.size(); ++name) {
      auto const found = pool_.find(names[name]);
      all += found ? static_cast<char>('0' + found->slot) : '-';
      all += published_[name] ? static_cast<char>('0' + *published_[name]) : '-';
      all += staged_[name] ? static_cast<char>('0' + *staged_[name]) : '-';
    }
    for (auto const& request : requests_) {
      all +=
          request ? std::to_string(request->lease.slot()) + static_cast<char>('0' + request->content) : "-";
    }
    return all;
  }

  void hold(std::size_t who, Result<Lease> lease, std::size_t content, std::uint64_t publication) {
    keys_.emplace_back(lease->key(), content);
    if (open_) read_.emplace(lease->slot(), content);
    requests_[who] = Request{*std::move(lease), content, publication};
  }

  Errc acquire_name(std::size_t who, std::size_t name) {
    auto lease = pool_.acquire(names[name]);
    if (lease) {
      if (!published_[name]) broke("a name that is not published was leased");
      if (published_[name]) hold(who, std::move(lease), *published_[name], publication_of_[name]);
      return Errc::ok;
    }
    Errc const expected = staged_[name] ? Errc::slot_busy : Errc::not_found;
    if (lease.error().code != expected) broke("a lease was refused for another reason than there is");
    return lease.error().code;
  }

  Errc fork(std::size_t who) {
    Request const& other = *requests_[1 - who];
    auto lease = pool_.acquire(other.lease.key());
    if (!lease) {
      broke("a tenancy that is leased cannot be leased again");
      return lease.error().code;
    }
    hold(who, std::move(lease), other.content, other.publication);
    return Errc::ok;
  }

  Errc load_content(Operation const& operation) {
    std::size_t const name = name_of[operation.what];
    if (operation.in_load) pool_.backend().script().in_load = [&] { play(*operation.in_load); };
    if (operation.kind == Kind::fail_load) pool_.backend().script().fail_in = 1;
    auto const outcome = pool_.load(names[name], contents()[operation.what]);
    pool_.backend().script() = {};
    if (!outcome) {
      if (outcome.error().code == Errc::pool_full && idle_or_empty()) broke("a slot could be taken");
      if (outcome.error().code == Errc::spare_busy && pool_.snapshot().spare > 0) broke("a place was spare");
      return outcome.error().code;
    }
    keys_.emplace_back(outcome->key, operation.what);
    bool const hit = !staged_[name] && published_[name] == operation.what;
    if (!hit) staged_[name] = operation.what;
    std::size_t evicted = 0;
    for (std::size_t other = 0; other < names.size(); ++other) {
      if (!published_[other] || other == name || pool_.find(names[other])) continue;
      if (names[other] == active_) broke("the active adapter was evicted");
      if (leased(other)) broke("a leased adapter was evicted");
      if (read_.count({outcome->key.slot, *published_[other]}) != 0) broke("an adapter in use was evicted");
      published_[other].reset();
      ++evicted;
    }
    if (evicted > 1) broke("a load evicted two adapters");
    return Errc::ok;
  }

  Errc begin(bool failing) {
    pool_.backend().script().fail_in = failing ? 0 : -1;
    Errc const outcome = code(pool_.begin_step(stream));
    pool_.backend().script() = {};
    if (outcome != Errc::ok) {
      failed_begin_ = true;
      for (std::size_t name = 0; name < names.size(); ++name) {
        if (!published_[name] || pool_.find(names[name])) continue;
        if (!staged_[name]) broke("a failed publication took a name away that it was not for");
        published_[name].reset();
      }
      return outcome;
    }
    failed_begin_ = false;
    open_ = true;
    for (std::size_t name = 0; name < names.size(); ++name) {
      if (!staged_[name]) continue;
      published_[name] = std::exchange(staged_[name], std::nullopt);
      publication_of_[name] = ++publications_;
    }
    for (auto const& request : requests_) {
      if (request) read_.emplace(request->lease.slot(), request->content);
    }
    return Errc::ok;
  }

  Errc rotate(std::size_t name) {
    std::string const to = name < names.size() ? names[name] : "";
    Errc const outcome = code(pool_.set_active(to));
    bool const possible = to.empty() || published_[name].has_value();
    if ((outcome == Errc::ok) != possible) broke("a rotation finds what is published and nothing else");
    if (outcome == Errc::ok) active_ = to;
    return outcome;
  }

  Errc unload(std::size_t name) {
    Errc const outcome = code(pool_.unload(names[name]));
    Errc const expected = !published_[name] && !staged_[name] ? Errc::not_found
                          : leased(name)                      ? Errc::slot_busy
                          : names[name] == active_            ? Errc::invalid_argument
                                                              : Errc::ok;
    if (outcome != expected) broke("an unload was answered otherwise than it should be");
    if (outcome == Errc::ok) published_[name] = staged_[name] = std::nullopt;
    return outcome;
  }

  // Every lease, and everything that the open step may read, finds the content that it was given, whole.
  void check_readers() {
    std::array<std::int32_t, 3> leases{};
    for (auto const& request : requests_) {
      if (!request) continue;
      ++leases[static_cast<std::size_t>(request->lease.slot())];
      if (!holds_content(request->lease.slot(), request->content)) broke("a lease found other content");
    }
    for (auto const& [slot, content] : read_) {
      if (!holds_content(slot, content)) broke("content changed under an open step");
    }
    for (std::size_t slot = 0; slot < leases.size(); ++slot) {
      if (pool_.view(static_cast<std::int32_t>(slot)).leases != leases[slot]) broke("a lease was miscounted");
    }
  }

  // A published name finds one slot, with its content; names that are not published find none.
  void check_names() {
    std::set<std::int32_t> slots;
    for (std::size_t name = 0; name < names.size(); ++name) {
      auto const found = pool_.find(names[name]);
      if (found.has_value() != published_[name].has_value()) broke("a name was lost, or came from nowhere");
      if (!found || !published_[name]) continue;
      if (!slots.insert(found->slot).second) broke("two names find one slot");
      if (!holds_content(found->slot, *published_[name])) broke("a name found other content");
      if (code(pool_.acquire(*found)) == Errc::stale) broke("a name found a key that has ended");
    }
    if (slots.size() != pool_.names().size()) broke("a slot has a name that was never loaded");
    bool active_is_there = active_.empty();
    for (std::size_t name = 0; name < names.size(); ++name) {
      active_is_there = active_is_there || (names[name] == active_ && (published_[name] || staged_[name]));
    }
    if (!active_is_there) broke("the active adapter has gone");
  }

  // A physical slot is spare or holds one content.
  void check_places() {
    PoolSnapshot const now = pool_.snapshot();
    auto const held = static_cast<std::int32_t>(now.content_bytes / content_bytes);
    if (now.spare + held != num_places) broke("a physical slot leaked, or was given twice");
  }

  // A key finds its own content or nobody, however old it is.
  void check_keys() {
    for (auto const& [slot_key, content] : keys_) {
      auto const lease = pool_.acquire(slot_key);
      if (lease && !holds_content(lease->slot(), content)) broke("a stale key found another tenant");
    }
  }

  // When everybody is done, everything is given back, and any load succeeds.
  void check_end() {
    for (auto& request : requests_) request.reset();
    if (open_) static_cast<void>(pool_.end_step(stream));
    static_cast<void>(pool_.set_active(""));
    for (int i = 0; i < 2; ++i) {
      if (!pool_.begin_step(stream) || !pool_.end_step(stream)) broke("a step failed without a reason");
    }
    for (std::int32_t slot = 0; slot < pool_.max_slots(); ++slot) {
      if (pool_.view(slot).leases != 0) broke("a lease leaked");
    }
    if (!pool_.load("e", contents()[0])) broke("a load failed in an idle pool");
    for (std::string const& name : pool_.names()) {
      if (!pool_.unload(name)) broke("an idle adapter cannot be unloaded");
    }
    if (!pool_.unload("e")) broke("staged content cannot be unloaded");
    static_cast<void>(pool_.begin_step(stream));
    if (pool_.snapshot().spare != num_places) broke("a physical slot leaked");
    for (std::int32_t slot = 0; slot < pool_.max_slots(); ++slot) {
      if (!slot_holds(pool_, slot, nullptr)) broke("an unloaded adapter is still applied");
    }
  }

  PlayedPool pool_;
  std::array<std::optional<Request>, 2> requests_;
  Names published_{};
  Names staged_{};
  std::array<std::uint64_t, names.size()> publication_of_{};
  std::uint64_t publications_ = 0;
  std::string active_;
  bool open_ = false;
  bool failed_begin_ = false;
  std::set<std::pair<std::int32_t, std::size_t>> read_;  // (slot, content) of the open step
  std::vector<std::pair<SlotKey, std::size_t>> keys_;
  std::string fault_;
};

}  // namespace atlas_test
