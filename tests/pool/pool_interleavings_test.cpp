// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/pool.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "pool_world.hpp"

// A pool of three slots, five contents of four names, two requests, one engine, one operator and one loader.
// Every sequence of their operations up to a length is played, with other actors' operations in the middle of
// a load too; a sequence that ends where a shorter one did is not continued. After each, `World::fault` says
// which promise of the pool is broken.
namespace {

using namespace atlas_test;

std::vector<Operation> short_operations() {
  std::vector<Operation> all{
      {Kind::begin}, {Kind::end}, {Kind::rotate, 0, 0}, {Kind::rotate, 0, names.size()}};
  for (std::size_t name = 0; name < names.size(); ++name) {
    all.push_back({Kind::acquire, 0, name});
    all.push_back({Kind::unload, 0, name});
  }
  all.push_back({Kind::acquire, 1, 0});
  for (std::size_t who = 0; who < 2; ++who) {
    all.push_back({Kind::fork, who});
    all.push_back({Kind::release, who});
  }
  return all;
}

std::vector<Operation> operations() {
  std::vector<Operation> all = short_operations();
  all.push_back({Kind::fail_begin});
  for (std::size_t content = 0; content < name_of.size(); ++content) all.push_back({Kind::load, 0, content});
  for (std::size_t content : {3U, 4U}) {
    all.push_back({Kind::fail_load, 0, content});
    std::vector<Operation> in_load = short_operations();
    in_load.push_back({Kind::load, 0, 3});  // two loads at one time, of the same and of other content
    in_load.push_back({Kind::load, 0, 0});
    for (Operation const& inner : in_load) {
      all.push_back({Kind::load, 0, content, std::make_shared<Operation const>(inner)});
    }
  }
  return all;
}

std::string spelled(std::vector<Operation> const& sequence) {
  constexpr std::array<char const*, 10> kinds{"acquire", "fork",       "release", "load",   "fail_load",
                                              "begin",   "fail_begin", "end",     "rotate", "unload"};
  std::string text;
  for (Operation const& operation : sequence) {
    text += std::string(kinds[static_cast<std::size_t>(operation.kind)]) + "(" +
            std::to_string(operation.who) + "," + std::to_string(operation.what) + ")";
    if (operation.in_load) text += "[" + spelled({*operation.in_load}) + "]";
    text += " ";
  }
  return text;
}

// Plays every sequence of up to `longest` operations behind `start`.
void play_all(std::vector<Operation> const& start, std::size_t longest, std::size_t least_states) {
  std::vector<Operation> const all = operations();
  std::vector<std::vector<Operation>> frontier{start};
  std::set<std::string> seen;
  std::size_t played = 0;
  std::size_t faults = 0;
  for (std::size_t length = 1; length <= longest; ++length) {
    std::vector<std::vector<Operation>> next;
    for (std::vector<Operation> const& prefix : frontier) {
      for (Operation const& operation : all) {
        World world;
        for (Operation const& earlier : prefix) world.play(earlier);
        if (!world.allowed(operation)) continue;
        world.play(operation);
        ++played;
        std::vector<Operation> sequence = prefix;
        sequence.push_back(operation);
        std::string const key = world.key();
        std::string const fault = world.fault();
        if (!fault.empty() && ++faults <= 5) FAIL_CHECK(fault << ": " << spelled(sequence));
        if (seen.insert(key).second) next.push_back(std::move(sequence));
      }
    }
    frontier = std::move(next);
  }
  CHECK(faults == 0);
  MESSAGE(played << " sequences, " << seen.size() << " states");
  CHECK(seen.size() >= least_states);
}

TEST_CASE("every sequence of operations on an empty pool keeps every promise") { play_all({}, 5, 2000); }

TEST_CASE("every sequence of operations on a full pool keeps every promise") {
  play_all({{Kind::load, 0, 0}, {Kind::load, 0, 1}, {Kind::load, 0, 2}, {Kind::begin}, {Kind::end}}, 3, 1000);
}

TEST_CASE("every sequence of operations on a pool whose replaced adapter drains keeps every promise") {
  play_all({{Kind::load, 0, 0},
            {Kind::begin},
            {Kind::acquire, 0, 0},
            {Kind::load, 0, 4},
            {Kind::end},
            {Kind::begin},
            {Kind::rotate, 0, 0}},
           4, 500);
}

}  // namespace
