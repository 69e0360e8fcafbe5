// SPDX-License-Identifier: AGPL-3.0-only
//
// The device's expert plan against the host builder's, group by group.
#include "device.cuh"

#include <cstdint>
#include <limits>
#include <vector>

#include "atlas/lora/kernels/expert_plan.cuh"
#include "atlas/lora/route/expert_plan.hpp"

namespace atlas_test {
namespace {

using Ints = std::vector<std::int32_t>;

Machine const& planner() {
  static Machine const made = ready_machine<ExpertPlanning>();
  return made;
}

/// Rows in host memory and the same in device memory.
struct TestRows {
  ExpertRows host;
  ExpertRows device;
};

/// Compares the two builders over a window of rows.
void check_plan(TestRows rows, ExpertPlanLayout layout, std::int32_t first, std::int32_t last) {
  rows.host = rows.host.window(first, last);
  rows.device = rows.device.window(first, last);
  std::vector<std::byte> host(layout.bytes());
  ExpertPlan const want = layout.at(host.data());
  Ints scratch(static_cast<std::size_t>(2 * layout.keys()));
  REQUIRE(build_expert_plan(rows.host, want, scratch) == Errc::ok);
  DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
  CUDA_OK(launch_expert_plan(layout.at(buffer.data()), rows.device, planner(), nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  std::vector<std::byte> bytes = buffer.download();
  ExpertPlan const got = layout.at(bytes.data());
  REQUIRE(*got.header == *want.header);
  for (std::int32_t g = 0; g < want.header->num_groups; ++g) REQUIRE(got.groups[g] == want.groups[g]);
}

/// Both orders of a random routing.
void check_random(std::int32_t tokens, std::int32_t top_k, std::int32_t slots, std::int32_t experts,
                  std::uint64_t seed) {
  INFO("tokens " << tokens << ", top_k " << top_k << ", slots " << slots << ", experts " << experts);
  Random random(seed);
  Ints token_slots, ids, sorted_tokens, offsets{0};
  for (std::int32_t t = 0; t < tokens; ++t) token_slots.push_back(random.below(slots + 2) - 1);
  std::int32_t const rows = tokens * top_k;
  for (std::int32_t r = 0; r < rows; ++r) ids.push_back(random.below(experts + 1) - (r % 7 == 0 ? 1 : 0));
  for (std::int32_t r = 0; r < rows; ++r) sorted_tokens.push_back(random.below(tokens + 2) - 1);
  for (std::int32_t e = 0; e < experts; ++e) offsets.push_back(random.below(rows + 1));
  std::sort(offsets.begin(), offsets.end());
  DeviceArray<std::int32_t> const d_slots(token_slots), d_ids(ids), d_tokens(sorted_tokens),
      d_offsets(offsets);
  ExpertPlanLayout const layout{rows, slots, experts};
  TestRows const major{ExpertRows::slot_major(token_slots.data(), tokens, top_k, ids.data()),
                       ExpertRows::slot_major(d_slots.data(), tokens, top_k, d_ids.data())};
  TestRows const sorted{
      ExpertRows::sorted(token_slots.data(), tokens, rows, sorted_tokens.data(), offsets.data()),
      ExpertRows::sorted(d_slots.data(), tokens, rows, d_tokens.data(), d_offsets.data())};
  for (TestRows const& test : {major, sorted}) {
    check_plan(test, layout, 0, rows);
    check_plan(test, layout, rows / 3, rows - rows / 4);
  }
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("the device groups rows as the host does, sorted and not") {
    for (std::int32_t const experts : {1, 4, 128}) {
      for (std::int32_t const slots : {1, 4, 16}) {
        for (std::int32_t const tokens : {1, 2, 3, 16, 31, 64, 130, 1000}) {
          check_random(tokens, experts == 1 ? 1 : 8, slots, experts, static_cast<std::uint64_t>(tokens));
          if (small_shapes() && tokens >= 3) break;
        }
      }
    }
  }
  TEST_CASE("4,096 tokens of 8 choices, and more rows than 16 bits count, are grouped") {
    if (small_shapes()) return;
    check_random(4096, 8, 4, 128, 1);
    check_random(4096, 8, 16, 128, 2);
    check_random(4096, 8, 64, 256, 3);  // counters for one warp alone
    check_random(40'000, 2, 3, 8, 4);
  }
  TEST_CASE("all rows of one pair, and none of any, are grouped") {
    Ints const slots(600, 2), ids(1200, 5), base(600, -1);
    DeviceArray<std::int32_t> const d_slots(slots), d_ids(ids), d_base(base);
    ExpertPlanLayout const layout{1200, 3, 6};
    check_plan({ExpertRows::slot_major(slots.data(), 600, 2, ids.data()),
                ExpertRows::slot_major(d_slots.data(), 600, 2, d_ids.data())},
               layout, 0, 1200);
    check_plan({ExpertRows::slot_major(base.data(), 600, 2, ids.data()),
                ExpertRows::slot_major(d_base.data(), 600, 2, d_ids.data())},
               layout, 0, 1200);
    check_plan({ExpertRows::slot_major(slots.data(), 600, 2, ids.data()),
                ExpertRows::slot_major(d_slots.data(), 600, 2, d_ids.data())},
               layout, 7, 7);
    check_plan({ExpertRows{}, ExpertRows{}}, layout, 0, 0);
  }
  TEST_CASE("any offsets, slots, tokens and experts whatever are read within bounds") {
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
    Ints const slots{0, most, least, 1}, tokens{0, most, least, 4, -1, 1, 2, 3},
        ids{0, most, least, 2, -1, 1, 0, 1};
    DeviceArray<std::int32_t> const d_slots(slots), d_tokens(tokens), d_ids(ids);
    for (Ints const& offsets :
         {Ints{0, 8, 4}, Ints{-5, most, 3}, Ints{least, least, least}, Ints{most, 0, 9}}) {
      DeviceArray<std::int32_t> const d_offsets(offsets);
      check_plan({ExpertRows::sorted(slots.data(), 4, 8, tokens.data(), offsets.data()),
                  ExpertRows::sorted(d_slots.data(), 4, 8, d_tokens.data(), d_offsets.data())},
                 {8, 2, 2}, 0, 8);
    }
    check_plan({ExpertRows::slot_major(slots.data(), 4, 2, ids.data()),
                ExpertRows::slot_major(d_slots.data(), 4, 2, d_ids.data())},
               {8, 2, 2}, 0, 8);
  }
}

}  // namespace atlas_test
