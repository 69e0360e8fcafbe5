// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/lease_gate.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

// The gate's own code under every order of its threads' atomic operations, one at a time. A thread is a
// function of what its operations returned so far, so it needs no stack of its own: it is run again from its
// beginning with those results, and left, by longjmp, at its next operation. States that were seen are not
// continued.
namespace {

using namespace atlas::lora;
using detail::Entry;
using Words = std::array<std::uint64_t, 2>;  // the atomics of a gate, in order

struct Outcome {
  std::uint64_t value = 0;
  bool exchanged = false;
  auto operator<=>(Outcome const&) const = default;
};
using History = std::vector<Outcome>;

// The one thread that runs now.
struct Replay {
  void const* first_atomic = nullptr;
  History const* history = nullptr;
  std::size_t done = 0;
  Words* words = nullptr;  // null: leave at the next operation, which has not been done yet
  Outcome outcome;
  std::jmp_buf leave;
};
Replay replay;

template <class T>
class PlayedAtomic {
 public:
  explicit PlayedAtomic(T) noexcept {}

  T load(std::memory_order) const noexcept {
    return play([](T& word) { return Outcome{word, false}; }).value;
  }
  void store(T value, std::memory_order) noexcept {
    play([&](T& word) { return Outcome{std::exchange(word, value), false}; });
  }
  T fetch_sub(T value, std::memory_order) noexcept {
    return play([&](T& word) { return Outcome{std::exchange(word, word - value), false}; }).value;
  }
  T fetch_and(T value, std::memory_order) noexcept {
    return play([&](T& word) { return Outcome{std::exchange(word, word & value), false}; }).value;
  }
  T fetch_or(T value, std::memory_order) noexcept {
    return play([&](T& word) { return Outcome{std::exchange(word, word | value), false}; }).value;
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order, std::memory_order) noexcept {
    Outcome const outcome = play([&](T& word) {
      bool const same = word == expected;
      return Outcome{same ? std::exchange(word, value) : word, same};
    });
    expected = outcome.value;
    return outcome.exchanged;
  }

 private:
  template <class Effect>
  Outcome play(Effect const& effect) const noexcept {
    if (replay.done < replay.history->size()) return (*replay.history)[replay.done++];
    if (replay.words != nullptr) {
      auto const index = this - static_cast<PlayedAtomic const*>(replay.first_atomic);
      replay.outcome = effect((*replay.words)[static_cast<std::size_t>(index)]);
    }
    std::longjmp(replay.leave, 1);
  }
};
using Gate = detail::BasicLeaseGate<PlayedAtomic>;

// What a thread has come to.
struct Ghost {
  std::array<int, 3> inside{};    // leases that it has, by tenancy
  std::uint64_t left_in = 0;      // the last step that it named when it left
  std::uint64_t taken_after = 0;  // it has taken the slot from tenancy 1, seeing this as the last step
  bool taken = false;
  bool last = false;           // it was told that nobody else is left in an abandoned gate
  bool refused_again = false;  // it was inside, and could not enter again
};
using Body = std::function<void(Gate&, Ghost&)>;

// Runs a thread up to its next operation, which is done on `words` if there are any. False at its end.
bool run(Body const& body, History const& history, Words* words, Ghost& ghost) {
  ghost = Ghost{};
  Gate gate;
  replay.first_atomic = &gate;
  replay.history = &history;
  replay.done = 0;
  replay.words = words;
  if (setjmp(replay.leave) != 0) return true;
  body(gate, ghost);
  return false;
}

struct State {
  Words words{};
  std::vector<History> histories;
  auto operator<=>(State const&) const = default;
};

// The words of a gate that has tenancy 1, open, and the number of states that the threads can reach from
// there, each of which is shown to `check`.
std::size_t explore(std::vector<Body> const& bodies,
                    std::function<void(std::vector<Ghost> const&, bool at_end)> const& check) {
  State start{{}, std::vector<History>(bodies.size())};
  Ghost ignored;
  History none;
  static_cast<void>(run([](Gate& gate, Ghost&) { gate.admit(1); }, none, &start.words, ignored));
  std::set<State> seen{start};
  std::vector<State> frontier{start};
  while (!frontier.empty()) {
    State const state = std::move(frontier.back());
    frontier.pop_back();
    std::vector<Ghost> ghosts(bodies.size());
    bool at_end = true;
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      if (!run(bodies[i], state.histories[i], nullptr, ghosts[i])) continue;
      at_end = false;
      State next = state;
      Ghost later;
      static_cast<void>(run(bodies[i], state.histories[i], &next.words, later));
      next.histories[i].push_back(replay.outcome);
      if (seen.insert(next).second) frontier.push_back(std::move(next));
    }
    check(ghosts, at_end);
  }
  return seen.size();
}

constexpr std::uint64_t passed = 6;  // the last step that is done

// A request of tenancy `tenancy` that leases `leases` times, the second time while it is inside, and was used
// in step `step`.
Body request(std::uint64_t tenancy, int leases, std::uint64_t step) {
  return [=](Gate& gate, Ghost& ghost) {
    if (gate.enter(tenancy) != Entry::entered) return;
    ++ghost.inside[tenancy];
    if (leases == 2) {
      if (gate.enter(tenancy) == Entry::entered) {
        ++ghost.inside[tenancy];
      } else {
        ghost.refused_again = true;
      }
    }
    while (ghost.inside[tenancy] > 0) {
      ghost.last = gate.leave(step);  // until its last operation is done the lease is not known to have gone
      --ghost.inside[tenancy];
      ghost.left_in = step;
    }
  };
}

// What the ledger does to take a slot that it believes idle for tenancy 2: `SlotLedger::claim`, then
// publication.
void take_if_idle(Gate& gate, Ghost& ghost) {
  if (gate.close() != 0) return;
  ghost.taken_after = gate.last_step();
  if (ghost.taken_after > passed) return gate.reopen();
  ghost.taken = true;
  gate.admit(2);
}

// What a pool does to its slots when it goes: nobody in means that it goes last itself.
void abandon(Gate& gate, Ghost& ghost) {
  static_cast<void>(gate.close());
  gate.cut();  // nobody acquires from a pool that has gone
  ghost.last = !gate.abandon();
}

// What it does with a slot whose name has moved away: it drains, and is taken when nobody is in it any more.
void drain_and_take(Gate& gate, Ghost& ghost) {
  gate.cut();
  if (gate.leases() != 0) return;
  ghost.taken_after = gate.last_step();
  if (ghost.taken_after > passed) return;
  ghost.taken = true;
  gate.admit(2);
}

// The promises, and how often the slot was taken.
struct Promises {
  std::size_t takers = 0;
  std::size_t refused = 0;

  void operator()(std::vector<Ghost> const& threads, bool) {
    int inside = 0;
    std::uint64_t left_in = 0;
    bool taken = false;
    for (Ghost const& thread : threads) {
      inside += thread.inside[1];
      left_in = std::max(left_in, thread.left_in);
      taken = taken || thread.taken;
      if (thread.refused_again) ++refused;
    }
    if (!taken) return;
    ++takers;
    if (inside > 0) FAIL_CHECK("the slot was taken while somebody was in it");
    if (left_in > passed) FAIL_CHECK("the slot was taken before the work of a lease was done");
  }
};

TEST_CASE("whatever the order, a slot is taken only when nobody is in it and their work is done") {
  for (std::uint64_t const step : {5U, 7U}) {  // done, and not done
    for (auto* const taker : {&take_if_idle, &drain_and_take}) {
      Promises promises;
      std::size_t const states =
          explore({request(1, 2, step), request(1, 1, 5), request(2, 1, 5), taker},
                  [&](std::vector<Ghost> const& threads, bool at_end) { promises(threads, at_end); });
      MESSAGE(states << " states");
      CHECK(states > 1000);
      CHECK(promises.takers > 0);    // when it comes first at the latest
      CHECK(promises.refused == 0);  // whoever is inside may enter again
    }
  }
}

TEST_CASE("when all have left, no lease is counted, and the last step is the largest") {
  std::size_t ends = 0;
  explore({request(1, 2, 4), request(1, 1, 9), [](Gate& gate, Ghost&) { gate.cut(); }},
          [&](std::vector<Ghost> const& threads, bool at_end) {
            if (!at_end) return;
            ++ends;
            for (Ghost const& thread : threads) CHECK(thread.inside[1] == 0);
          });
  CHECK(ends > 0);
  detail::LeaseGate gate;
  gate.admit(1);
  CHECK(gate.enter(1) == Entry::entered);
  CHECK(gate.enter(1) == Entry::entered);
  CHECK_FALSE(gate.leave(9));
  CHECK_FALSE(gate.leave(4));
  CHECK(gate.leases() == 0);
  CHECK(gate.last_step() == 9);
}

TEST_CASE("of an abandoned gate exactly one is told that it was the last to leave") {
  std::set<std::size_t> told;
  explore({request(1, 2, 4), request(1, 1, 4), abandon}, [&](std::vector<Ghost> const& threads, bool at_end) {
    if (!at_end) return;
    std::size_t last = 0;
    for (Ghost const& thread : threads) last += thread.last ? 1U : 0U;
    if (last != 1) FAIL_CHECK(last << " were told");
    for (std::size_t i = 0; i < threads.size(); ++i) {
      if (threads[i].last) told.insert(i);
    }
  });
  CHECK(told == std::set<std::size_t>{0, 1, 2});
}

TEST_CASE("a word holds the largest tenancy and the most leases, and refuses one more") {
  detail::LeaseGate gate;
  gate.admit(detail::LeaseGate::last_tenancy);
  for (std::uint64_t i = 0; i < detail::LeaseGate::most_leases; ++i) {
    if (gate.enter(detail::LeaseGate::last_tenancy) != Entry::entered) FAIL("refused at " << i);
  }
  CHECK(gate.enter(detail::LeaseGate::last_tenancy) == Entry::full);
  CHECK(gate.leases() == detail::LeaseGate::most_leases);
  CHECK(gate.open());
  CHECK(gate.close() == detail::LeaseGate::most_leases);
  CHECK_FALSE(gate.leave(1));
  CHECK(gate.enter(detail::LeaseGate::last_tenancy) == Entry::entered);
  CHECK(gate.enter(1) == Entry::closed);
}

TEST_CASE("threads that enter and leave as the gate is closed and opened keep its count") {
  detail::LeaseGate gate;
  gate.admit(1);
  int guarded =
      0;  // read inside and written by whoever has closed the gate: a race unless the gate keeps them apart
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> entered = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      int sum = 0;
      while (!stop) {
        if (gate.enter(1) != Entry::entered) continue;
        sum += guarded;
        if (gate.leave(1)) break;
        ++entered;
      }
      CHECK(sum >= 0);
    });
  }
  int closed = 0;
  while (closed < 1000 || entered < 1000) {
    if (gate.close() != 0) continue;
    guarded = ++closed % 2;
    gate.reopen();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(gate.leases() == 0);
}

}  // namespace
