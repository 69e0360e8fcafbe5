// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/route/row_map.hpp"

#include <array>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace atlas::lora;
using Rows = std::vector<std::int32_t>;

constexpr bool speculative_rows_and_head_rows_follow_their_sequences() {
  std::array<std::int32_t, 2> const slots{2, -1};
  std::array<std::int32_t, 6> rows{};
  if (speculative_row_slots(slots, 3, rows) != Errc::ok) return false;
  if (rows != std::array<std::int32_t, 6>{2, 2, 2, -1, -1, -1}) return false;
  std::array<std::int32_t, 2> const head_rows{2, 5};
  std::array<std::int32_t, 2> head{};
  return head_row_slots(rows, head_rows, head) == Errc::ok && head == std::array<std::int32_t, 2>{2, -1};
}
static_assert(speculative_rows_and_head_rows_follow_their_sequences());

constexpr bool an_empty_sequence_has_no_row() {
  std::array<std::int32_t, 4> const cu_seqlens{0, 5, 5, 12};
  std::array<std::int32_t, 3> const slots{0, 1, 2};
  std::array<std::int32_t, 12> rows{};
  return prefill_row_slots(cu_seqlens, slots, rows) == Errc::ok &&
         rows == std::array<std::int32_t, 12>{0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2};
}
static_assert(an_empty_sequence_has_no_row());

Rows prefill(Rows const& cu_seqlens, Rows const& slots) {
  Rows rows(cu_seqlens.empty() ? 0 : static_cast<std::size_t>(cu_seqlens.back()), 77);
  CHECK(prefill_row_slots(cu_seqlens, slots, rows) == Errc::ok);
  return rows;
}

// A refused prefill must leave what it was given.
bool prefill_refused(Rows const& cu_seqlens, Rows const& slots) {
  Rows rows(16, 77);
  return prefill_row_slots(cu_seqlens, slots, rows) == Errc::invalid_argument && rows == Rows(16, 77);
}

TEST_CASE("each stream's slot is spread over its rows of a packed prefill") {
  CHECK(prefill({0, 4}, {2}) == Rows{2, 2, 2, 2});
  CHECK(prefill({0, 2, 5, 6}, {-1, 1, 0}) == Rows{-1, -1, 1, 1, 1, 0});
  CHECK(prefill({0, 2, 2, 5}, {7, 9, -1}) == Rows{7, 7, -1, -1, -1});
  CHECK(prefill({0, 3}, {-1}) == Rows{-1, -1, -1});
  CHECK(prefill({0, 0}, {4}) == Rows{});
}

TEST_CASE("prefix sums that are no prefix sums are refused and nothing is written") {
  CHECK(prefill_refused({}, {}));
  CHECK(prefill_refused({0}, {}));
  CHECK(prefill_refused({0, 2, 4}, {0}));
  CHECK(prefill_refused({0, 2}, {0, 1}));
  CHECK(prefill_refused({1, 3}, {0}));
  CHECK(prefill_refused({0, 4, 2}, {0, 1}));
  CHECK(prefill_refused({0, -1}, {0}));
  CHECK(prefill_refused({0, 4, -4, 8}, {0, 1, 2}));
  CHECK(prefill_refused(
      {0, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}, {0, 1}));
  CHECK(prefill_refused({0, 17}, {0}));
}

TEST_CASE("rows beyond a prefill's tokens are padding") {
  Rows rows(6, 77);
  CHECK(prefill_row_slots(Rows{0, 2, 3}, Rows{1, 0}, rows) == Errc::ok);
  CHECK(rows == Rows{1, 1, 0, -1, -1, -1});
}

TEST_CASE("pad rows of a smaller step hold base where the step before held an adapter") {
  Rows rows(8, 77);
  CHECK(decode_row_slots(Rows(8, 1), rows) == Errc::ok);
  CHECK(rows == Rows(8, 1));
  CHECK(decode_row_slots(Rows(3, 1), rows) == Errc::ok);
  CHECK(rows == Rows{1, 1, 1, -1, -1, -1, -1, -1});
  CHECK(decode_row_slots(Rows{}, rows) == Errc::ok);
  CHECK(rows == Rows(8, -1));
}

TEST_CASE("every negative slot is written as base") {
  Rows rows(3, 77);
  CHECK(decode_row_slots(Rows{-5, std::numeric_limits<std::int32_t>::min(), 0}, rows) == Errc::ok);
  CHECK(rows == Rows{-1, -1, 0});
}

TEST_CASE("more sequences than rows are refused and nothing is written") {
  Rows rows(2, 77);
  CHECK(decode_row_slots(Rows{0, 1, 2}, rows) == Errc::invalid_argument);
  CHECK(speculative_row_slots(Rows{0, 1}, 2, rows) == Errc::invalid_argument);
  CHECK(speculative_row_slots(Rows{0}, 0, rows) == Errc::invalid_argument);
  CHECK(speculative_row_slots(Rows{0}, -1, rows) == Errc::invalid_argument);
  CHECK(speculative_row_slots(Rows{0, 1}, std::numeric_limits<std::int32_t>::max(), rows) ==
        Errc::invalid_argument);
  CHECK(head_row_slots(Rows{0, 1, 2}, Rows{0, 1, 2}, rows) == Errc::invalid_argument);
  CHECK(rows == Rows{77, 77});
}

TEST_CASE("a head row outside the step is refused and nothing is written") {
  Rows rows(2, 77);
  CHECK(head_row_slots(Rows{0, 1, 2}, Rows{0, 3}, rows) == Errc::invalid_argument);
  CHECK(head_row_slots(Rows{0, 1, 2}, Rows{0, -1}, rows) == Errc::invalid_argument);
  CHECK(rows == Rows{77, 77});
}

TEST_CASE("head rows may repeat, come in any order and be padded") {
  Rows rows(5, 77);
  CHECK(head_row_slots(Rows{0, 1, 2}, Rows{2, 0, 2}, rows) == Errc::ok);
  CHECK(rows == Rows{2, 0, 2, -1, -1});
}

}  // namespace
