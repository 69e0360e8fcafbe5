// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/tuning.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <iterator>
#include <limits>

#include "atlas/lora/kernels/machine.hpp"

namespace {

using namespace atlas::lora;

constexpr bool all_valid() {
  for (DeltaTuning const& tuning : delta_tunings) {
    if (!valid(tuning)) return false;
  }
  return true;
}
static_assert(all_valid(), "a tuning of the library cannot be built");
static_assert(!valid(DeltaTuning{128, 8, 2, 2}) && !valid(DeltaTuning{256, 3, 2, 2}) &&
              !valid(DeltaTuning{256, 1, 2, 2}) && !valid(DeltaTuning{256, 32, 1, 1}));
static_assert(!valid(DeltaTuning{768, 8, 1, 1}) && !valid(DeltaTuning{512, 8, 5, 1}));  // 2,560 threads
static_assert(delta_form(80) == DeltaForm::two_launches && delta_form(89) == DeltaForm::two_launches);
static_assert(delta_form(90) == DeltaForm::one_launch && delta_form(121) == DeltaForm::one_launch);
static_assert(largest_cluster(80) == 1 && largest_cluster(90) == 16 && largest_cluster(103) == 16);
static_assert(largest_cluster(120) == 8 && largest_cluster(121) == 8);

// Decode keeps 256 rows of one slot, 512 of any, float all of them, and so do rows of which an expert has
// fewer than 32.
static_assert(expected_row_tiles(64, 0) == 64 && expected_row_tiles(64, 1) == 8);
static_assert(expected_row_tiles(64, 8) == 8 && expected_row_tiles(65, 8) == 16);
static_assert(expected_row_tiles(3, 8) == 3 && expected_row_tiles(0, 0) == 0);
static_assert(!uses_prefill(90, 256, 2, 1) && uses_prefill(90, 257, 2, 1));
static_assert(!uses_prefill(90, 512, 2, 0) && uses_prefill(90, 513, 2, 0));
static_assert(uses_prefill(120, 1 << 30, 2, 0));
static_assert(!uses_prefill(89, 2048, 2, 1) && !uses_prefill(90, 2048, 4, 1));
// Rows a slot, or a slot and an expert, decide, however many those are.
static_assert(uses_prefill(90, 1024, 2, 8) && !uses_prefill(90, 1023, 2, 8));
static_assert(uses_prefill(90, 16384, 2, 128) && !uses_prefill(90, 16383, 2, 128));
static_assert(!uses_prefill(90, (std::numeric_limits<std::int32_t>::max)(), 2, std::int64_t{1} << 31));
// Of 132 multiprocessors 66 clusters of two have up to eight row tiles; beyond, every block has some of its
// own.
static_assert(prefill_cluster(1, false, 132) == 8 && prefill_cluster(131, false, 132) == 8);
static_assert(prefill_cluster(132, false, 132) == 2 && prefill_cluster(65, true, 132) == 2);
static_assert(prefill_cluster(528, false, 132) == 2 && prefill_cluster(528, true, 132) == 2);
static_assert(prefill_cluster(529, true, 132) == 1 && prefill_cluster(1 << 30, false, 132) == 1);

TEST_CASE("the choice is total and never a cluster that the machine does not have") {
  for (std::int32_t const compute : {90, 100, 103, 120, 121}) {
    for (std::int32_t const rows : {1, 2, 3, 8, 9, 64, 128, 129, 512, 513, 8192, 1 << 30}) {
      for (std::int64_t const row_elements : {std::int64_t{2}, std::int64_t{8192}, std::int64_t{1} << 33}) {
        DeltaChoice const choice = delta_choice(largest_cluster(compute), rows, 0, row_elements);
        REQUIRE(choice.tuning < std::size(delta_tunings));
        CHECK(delta_tunings[choice.tuning].cluster <= largest_cluster(compute));
        CHECK((!choice.splits || (choice.tuning == 1 && largest_cluster(compute) >= 16)));
      }
    }
  }
}

TEST_CASE("few rows have clusters of 16, many of 4, and those between of 8, which may be two teams") {
  CHECK(delta_choice(16, 1, 0, 4096 + 4096) == DeltaChoice{0, false});
  CHECK(delta_choice(16, 8, 0, 4096 + 4096) == DeltaChoice{0, false});
  CHECK(delta_choice(8, 1, 0, 4096 + 4096) == DeltaChoice{1, false});
  CHECK(delta_choice(16, 9, 0, 4096 + 4096) == DeltaChoice{1, false});
  CHECK(delta_choice(16, 32, 1, 4096 + 4096) == DeltaChoice{0, false});  // four row tiles
  CHECK(delta_choice(16, 33, 1, 4096 + 4096) == DeltaChoice{1, true});
  CHECK(delta_choice(16, 32, 5, 4096 + 4096) == DeltaChoice{1, true});
  CHECK(delta_choice(16, 64, 0, 4096 + 4096) == DeltaChoice{1, true});
  CHECK(delta_choice(16, 64, 0, 14336 + 4096) == DeltaChoice{1, false});
  CHECK(delta_choice(16, 129, 0, 14336 + 4096) == DeltaChoice{2, false});
}

TEST_CASE("a machine knows what was prepared, and refuses more than it can note") {
  Machine machine;
  int names[Machine::max_operations + 1] = {};
  CHECK_FALSE(machine.prepared(&names[0]));
  for (int i = 0; i < Machine::max_operations; ++i) REQUIRE(machine.add(&names[i]));
  CHECK_FALSE(machine.add(&names[Machine::max_operations]));
  CHECK(machine.prepared(&names[0]));
  CHECK_FALSE(machine.prepared(&names[Machine::max_operations]));
}

TEST_CASE("resident teams come from the counts of their cluster size, and are at least one") {
  Machine machine;
  machine.multiprocessors = 132;
  machine.resident_clusters[0][0] = 66;
  machine.resident_clusters[2][1] = 30;
  CHECK(machine.resident_teams(1, 2) == 264);
  CHECK(machine.resident_teams(2, 1) == 66);
  CHECK(machine.resident_teams(8, 2) == 30);
  CHECK(machine.resident_teams(16, 1) == 1);
}

}  // namespace
