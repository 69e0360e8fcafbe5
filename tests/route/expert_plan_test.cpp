// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/route/expert_plan.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/route/expert_rows.hpp"

using namespace atlas::lora;

namespace {

using Ints = std::vector<std::int32_t>;

// The input row of slot-major rows: row / top_k.
static_assert(ExpertInput::of_tokens(8, 10).x_row(7) == 0);
static_assert(ExpertInput::of_tokens(8, 10).x_row(8) == 1);
static_assert(ExpertInput::of_tokens(8, 10).x_row(23) == 2);
static_assert(ExpertInput::of_tokens(8, 10).x_row(80) == -1, "there are ten rows of x");
static_assert(ExpertInput::own_rows(3).x_row(2) == 2);
static_assert(ExpertInput::own_rows(3).x_row(3) == -1);

constexpr std::array<std::int32_t, 4> sorted_tokens{5, 1, -1, 6};
static_assert(ExpertInput::of_sorted(sorted_tokens.data(), 6).x_row(0) == 5);
static_assert(ExpertInput::of_sorted(sorted_tokens.data(), 6).x_row(2) == -1);
static_assert(ExpertInput::of_sorted(sorted_tokens.data(), 6).x_row(3) == -1);

// Experts of sorted rows: 0 has rows 0 to 2, 1 none, 2 rows 3 to 9, 3 rows 10 and 11.
constexpr std::array<std::int32_t, 5> offsets{0, 3, 3, 10, 12};
constexpr std::int32_t expert_at(std::int32_t row) {
  ExpertRows rows;
  rows.expert_offsets = offsets.data();
  return rows.expert(row, 4);
}
static_assert(expert_at(0) == 0 && expert_at(2) == 0 && expert_at(3) == 2 && expert_at(9) == 2);
static_assert(expert_at(10) == 3 && expert_at(11) == 3);
static_assert(expert_at(12) == -1, "beyond the last offset a row is of no expert");

// Most groups: of one pair, of as many pairs as rows, of fewer pairs.
static_assert(ExpertPlanLayout{8, 1, 1}.max_groups() == 1);
static_assert(ExpertPlanLayout{9, 1, 1}.max_groups() == 2);
static_assert(ExpertPlanLayout{16, 4, 128}.max_groups() == 16);
static_assert(ExpertPlanLayout{32768, 4, 128}.max_groups() == 512 + (32768 - 512) / 8);
static_assert(ExpertPlanLayout{5, 0, 8}.max_groups() == 0);
static_assert(ExpertPlanLayout{16, 4, 128}.bytes() == 16 + 16 * 48);

constexpr bool one_batch_is_planned_at_compile_time() {
  // Two tokens, top 2: token 0 (slot 1) chose experts 2 and 0, token 1 (base) experts 1 and 0.
  std::array<std::int32_t, 2> const slots{1, -1};
  std::array<std::int32_t, 4> const experts{2, 0, 1, 0};
  ExpertPlanLayout const layout{4, 2, 3};
  ExpertPlanHeader header;
  std::array<ExpertGroup, 4> groups{};
  std::array<std::int32_t, 12> scratch{};
  Errc const code = build_expert_plan(ExpertRows::slot_major(slots.data(), 2, 2, experts.data()), layout,
                                      header, groups, scratch);
  return code == Errc::ok && header == ExpertPlanHeader{2, 2, {0, 0}} &&
         groups[0] == ExpertGroup{1, 0, 1, 0, {1, -1, -1, -1, -1, -1, -1, -1}} &&
         groups[1] == ExpertGroup{1, 2, 1, 0, {0, -1, -1, -1, -1, -1, -1, -1}};
}
static_assert(one_batch_is_planned_at_compile_time());

struct Plan {
  ExpertPlanHeader header;
  std::vector<ExpertGroup> groups;
};

Plan plan_of(ExpertRows const& rows, ExpertPlanLayout layout) {
  Plan plan;
  plan.groups.resize(static_cast<std::size_t>(layout.max_groups()));
  Ints scratch(static_cast<std::size_t>(2 * layout.keys()));
  REQUIRE(build_expert_plan(rows, layout, plan.header, plan.groups, scratch) == Errc::ok);
  plan.groups.resize(static_cast<std::size_t>(plan.header.num_groups));
  return plan;
}

Ints rows_of(Plan const& plan, std::int32_t slot, std::int32_t expert) {
  Ints rows;
  for (ExpertGroup const& group : plan.groups) {
    if (group.slot != slot || group.expert != expert) continue;
    for (std::int32_t i = 0; i < group.count; ++i) rows.push_back(group.row[i]);
  }
  return rows;
}

}  // namespace

TEST_CASE("sorted and slot-major rows of one routing are in the same pairs") {
  // Tokens 0, 1, 2 in slots 0, 1, 0; choices (0, 2), (2, 0), (0, 1).
  Ints const slots{0, 1, 0}, ids{0, 2, 2, 0, 0, 1};
  Plan const gathered = plan_of(ExpertRows::slot_major(slots.data(), 3, 2, ids.data()), {6, 2, 3});
  CHECK(gathered.header.num_rows == 6);
  CHECK(rows_of(gathered, 0, 0) == Ints{0, 4});
  CHECK(rows_of(gathered, 0, 1) == Ints{5});
  CHECK(rows_of(gathered, 0, 2) == Ints{1});
  CHECK(rows_of(gathered, 1, 0) == Ints{3});
  CHECK(rows_of(gathered, 1, 2) == Ints{2});
  // Sorted: expert 0 has tokens 0, 1, 2, expert 1 token 2, expert 2 tokens 0, 1.
  Ints const tokens{0, 1, 2, 2, 0, 1}, expert_offsets{0, 3, 4, 6};
  Plan const grouped =
      plan_of(ExpertRows::sorted(slots.data(), 3, 6, tokens.data(), expert_offsets.data()), {6, 2, 3});
  CHECK(rows_of(grouped, 0, 0) == Ints{0, 2});
  CHECK(rows_of(grouped, 0, 1) == Ints{3});
  CHECK(rows_of(grouped, 0, 2) == Ints{4});
  CHECK(rows_of(grouped, 1, 0) == Ints{1});
  CHECK(rows_of(grouped, 1, 2) == Ints{5});
}

TEST_CASE("base rows, and slots, tokens and experts out of range, are in no group") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
  Ints const slots{-1, 2, most, least, 0, 0}, ids{0, 0, 0, 0, 3, -1};
  CHECK(plan_of(ExpertRows::slot_major(slots.data(), 6, 1, ids.data()), {6, 2, 3}).groups.empty());
  Ints const tokens{-1, 6, most, least}, expert_offsets{0, 4, 4, 4};
  CHECK(plan_of(ExpertRows::sorted(slots.data(), 6, 4, tokens.data(), expert_offsets.data()), {6, 2, 3})
            .groups.empty());
}

TEST_CASE("a pair that occurs twice has two rows") {
  Ints const slots{0}, ids{1, 1};
  Plan const plan = plan_of(ExpertRows::slot_major(slots.data(), 1, 2, ids.data()), {2, 1, 2});
  REQUIRE(plan.groups.size() == 1);
  CHECK(rows_of(plan, 0, 1) == Ints{0, 1});
}

TEST_CASE("long pairs fill their groups, and every row is in exactly one") {
  for (std::int32_t const tokens : {1, 7, 8, 9, 100, 1000}) {
    Ints slots(static_cast<std::size_t>(tokens)), ids(static_cast<std::size_t>(tokens * 2));
    for (std::size_t t = 0; t < slots.size(); ++t) slots[t] = static_cast<std::int32_t>(t * 7 % 5) - 1;
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * i % 3);
    ExpertPlanLayout const layout{tokens * 2, 4, 3};
    Plan const plan = plan_of(ExpertRows::slot_major(slots.data(), tokens, 2, ids.data()), layout);
    std::vector<int> seen(ids.size());
    std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> last;
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      ExpertGroup const& group = plan.groups[g];
      REQUIRE(group.count >= 1);
      bool const same = g + 1 < plan.groups.size() && plan.groups[g + 1].slot == group.slot &&
                        plan.groups[g + 1].expert == group.expert;
      CHECK((!same || group.count == 8));
      for (std::int32_t i = 0; i < 8; ++i) {
        if (i >= group.count) {
          CHECK(group.row[i] == -1);
          continue;
        }
        auto const row = static_cast<std::size_t>(group.row[i]);
        CHECK(slots[row / 2] == group.slot);
        CHECK(ids[row] == group.expert);
        ++seen[row];
        auto const before = last.find({group.slot, group.expert});
        CHECK((before == last.end() || before->second < group.row[i]));
        last[{group.slot, group.expert}] = group.row[i];
      }
    }
    std::int32_t adapted = 0;
    for (std::size_t row = 0; row < seen.size(); ++row) {
      CHECK(seen[row] == (slots[row / 2] >= 0 ? 1 : 0));
      adapted += seen[row];
    }
    CHECK(plan.header.num_rows == adapted);
  }
}

TEST_CASE("windows of the rows plan just their own") {
  Ints const slots{0, 0, 0}, ids{0, 1, 0, 1, 0, 1};
  ExpertRows const rows = ExpertRows::slot_major(slots.data(), 3, 2, ids.data());
  Plan const first = plan_of(rows.window(0, 3), {3, 1, 2}), second = plan_of(rows.window(3, 6), {3, 1, 2});
  CHECK(rows_of(first, 0, 0) == Ints{0, 2});
  CHECK(rows_of(first, 0, 1) == Ints{1});
  CHECK(rows_of(second, 0, 0) == Ints{4});
  CHECK(rows_of(second, 0, 1) == Ints{3, 5});
}

TEST_CASE("what cannot be planned is refused and writes nothing") {
  Ints const slots{0}, ids{0, 1};
  ExpertPlanHeader header{7, 7, {0, 0}};
  std::vector<ExpertGroup> groups(8);
  Ints scratch(64);
  ExpertRows const good = ExpertRows::slot_major(slots.data(), 1, 2, ids.data());
  auto const refused = [&](ExpertRows const& rows, ExpertPlanLayout layout) {
    return build_expert_plan(rows, layout, header, groups, scratch) == Errc::invalid_argument;
  };
  CHECK(refused(good, {1, 1, 2}));  // two rows
  CHECK(refused(good, {2, -1, 2}));
  CHECK(refused(good, {2, 1 << 16, 1 << 16}));
  ExpertRows bad = good;
  bad.top_k = 0;
  CHECK(refused(bad, {2, 1, 2}));
  bad = good;
  bad.first_row = -1;
  CHECK(refused(bad, {2, 1, 2}));
  bad = good;
  bad.token_slots = nullptr;
  CHECK(refused(bad, {2, 1, 2}));
  bad = good;
  bad.expert_ids = nullptr;
  CHECK(refused(bad, {2, 1, 2}));
  std::span<ExpertGroup> const few(groups.data(), 1);
  CHECK(build_expert_plan(good, {2, 1, 2}, header, few, scratch) == Errc::invalid_argument);
  CHECK(build_expert_plan(good, {2, 1, 2}, header, groups, std::span(scratch).first(3)) ==
        Errc::invalid_argument);
  CHECK(header == ExpertPlanHeader{7, 7, {0, 0}});
}
