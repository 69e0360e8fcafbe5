// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/route/policy.hpp"

#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include "../outcome.hpp"
#include "atlas/lora/route/row_map.hpp"

namespace {

using namespace atlas::lora;
using testing::says;

// What the reference writes as one integer with two meanings. On its attention path a negative one defers to
// the active adapter, which `DeferToActive` makes of base too; on its expert path it is base.
constexpr Selector selector(std::int32_t slot) { return slot < 0 ? Selector::base() : Selector::slot(slot); }

constexpr RouteDecision fold(std::int32_t slot) { return {RouteVerdict::fold, slot}; }
constexpr RouteDecision skip{RouteVerdict::skip, base_slot};
constexpr RouteDecision refuse{RouteVerdict::refuse, base_slot};

// Three different things, and the default is the harmless one.
static_assert(Selector{} == Selector::base());
static_assert(Selector::base() != Selector::active());
static_assert(Selector::active() != Selector::slot(base_slot));
static_assert(Selector::active().index() == base_slot && Selector::slot(3).index() == 3);
static_assert(!std::is_convertible_v<std::int32_t, Selector>);

struct NotNoexcept {
  RouteDecision operator()(Selector, RouteContext const&) const { return {}; }
};
static_assert(!RoutePolicy<NotNoexcept>);
static_assert(!RoutePolicy<int>);

// PerRequest: each kind means itself.
static_assert(PerRequest{}(Selector::base(), {1, 4, true}) == skip);
static_assert(PerRequest{}(Selector::active(), {1, 4, true}) == fold(1));
static_assert(PerRequest{}(Selector::active(), {base_slot, 4, true}) == skip);
static_assert(PerRequest{}(Selector::active(), {4, 4, true}) == skip);
static_assert(PerRequest{}(Selector::slot(3), {1, 4, true}) == fold(3));
static_assert(PerRequest{}(Selector::slot(4), {1, 4, true}) == refuse);
static_assert(PerRequest{}(Selector::slot(-1), {1, 4, true}) == refuse);

// SingleActive: {slot, active, has a delta} -> decision.
static_assert(SingleActive{}(selector(-1), {-1, 8, false}).verdict == RouteVerdict::fold);
static_assert(SingleActive{}(selector(3), {0, 8, false}).verdict == RouteVerdict::fold);
static_assert(SingleActive{}(selector(-1), {0, 8, true}) == skip);
static_assert(SingleActive{}(selector(-5), {2, 8, true}) == skip);
static_assert(SingleActive{}(selector(0), {0, 8, true}) == fold(0));
static_assert(SingleActive{}(selector(2), {2, 8, true}) == fold(2));
static_assert(SingleActive{}(selector(4), {4, 8, true}) == fold(4));
static_assert(SingleActive{}(selector(1), {0, 8, true}) == refuse);
static_assert(SingleActive{}(selector(0), {3, 8, true}) == refuse);
static_assert(SingleActive{}(Selector::active(), {3, 8, true}) == fold(3));
static_assert(SingleActive{}(Selector::active(), {-1, 8, true}) == skip);
static_assert(SingleActive{}(selector(9), {9, 8, true}) == refuse,
              "an active slot out of range folds nothing");

// Which sequences of a uniform step differ from the active adapter and so need a pair of their own.
constexpr std::int32_t routed(std::int32_t slot, std::int32_t active, std::int32_t max_slots) {
  RouteDecision const decision = DeferToActive{}(selector(slot), {active, max_slots, true});
  return decision.verdict == RouteVerdict::fold && decision.slot != active ? decision.slot : base_slot;
}
static_assert(routed(-1, 0, 2) == base_slot);
static_assert(routed(0, 0, 2) == base_slot);
static_assert(routed(1, 0, 2) == 1);
static_assert(routed(5, 0, 2) == base_slot);
static_assert(routed(0, 1, 2) == 0);
static_assert(routed(1, 1, 2) == base_slot);
static_assert(routed(-1, 1, 2) == base_slot);

template <RoutePolicy P>
std::vector<std::int32_t> padded_rows(P const& policy, std::vector<std::int32_t> const& slots,
                                      std::size_t padded, RouteContext const& context) {
  std::vector<Selector> selectors;
  for (std::int32_t const slot : slots) selectors.push_back(selector(slot));
  std::vector<std::int32_t> resolved(slots.size(), 77);
  CHECK(resolve_slots(policy, selectors, context, resolved).has_value());
  std::vector<std::int32_t> rows(padded, 77);
  CHECK(decode_row_slots(resolved, rows) == Errc::ok);
  return rows;
}

template <RoutePolicy P>
RouteVerdict verdict(P const& policy, std::vector<std::int32_t> const& slots, RouteContext const& context) {
  std::vector<Selector> selectors;
  for (std::int32_t const slot : slots) selectors.push_back(selector(slot));
  std::vector<std::int32_t> resolved(slots.size());
  return resolve_slots(policy, selectors, context, resolved).value();
}

using Rows = std::vector<std::int32_t>;

TEST_CASE("under DeferToActive a row without a slot gets the active adapter and a pad row gets base") {
  CHECK(padded_rows(DeferToActive{}, {1, -1, 0}, 4, {2, 8, true}) == Rows{1, 2, 0, -1});
  CHECK(padded_rows(DeferToActive{}, {-1, -1, -1, -1}, 4, {0, 8, true}) == Rows{0, 0, 0, 0});
  CHECK(padded_rows(DeferToActive{}, {3, 1}, 2, {0, 8, true}) == Rows{3, 1});
  for (std::size_t const count : {1U, 4U, 32U}) {
    CHECK(padded_rows(DeferToActive{}, Rows(count, 3), count, {7, 8, true}) == Rows(count, 3));
    CHECK(padded_rows(DeferToActive{}, Rows(count, -1), count, {5, 8, true}) == Rows(count, 5));
    CHECK(padded_rows(DeferToActive{}, Rows(count, 0), count, {2, 8, true}) == Rows(count, 0));
  }
  CHECK(padded_rows(DeferToActive{}, {-1, 0}, 2, {-1, 8, true}) == Rows{-1, 0});
  CHECK(padded_rows(DeferToActive{}, {8, 0}, 2, {1, 8, true}) == Rows{-1, 0});
}

TEST_CASE(
    "under SingleActive a row folds the active adapter or nothing, and a leaked refusal folds nothing") {
  CHECK(padded_rows(SingleActive{}, {-1, 0, 2}, 4, {-1, 8, false}) == Rows{-1, -1, -1, -1});
  CHECK(padded_rows(SingleActive{}, {-1, -1}, 4, {0, 8, true}) == Rows{-1, -1, -1, -1});
  CHECK(padded_rows(SingleActive{}, {3, -1, 3}, 4, {3, 8, true}) == Rows{3, -1, 3, -1});
  CHECK(padded_rows(SingleActive{}, {0, 1}, 2, {0, 8, true}) == Rows{0, -1});
  CHECK(padded_rows(SingleActive{}, {0}, 2, {0, 8, true}) == Rows{0, -1});
  CHECK(padded_rows(SingleActive{}, {0}, 4, {0, 8, true}) == Rows{0, -1, -1, -1});
  CHECK(padded_rows(SingleActive{}, {0}, 8, {0, 8, true}) == Rows{0, -1, -1, -1, -1, -1, -1, -1});
  CHECK(padded_rows(SingleActive{}, {2, -1, 2, 2, -1, -1, 2, -1, 2, 2, -1, 2, -1}, 16, {2, 8, true}) ==
        Rows{2, -1, 2, 2, -1, -1, 2, -1, 2, 2, -1, 2, -1, -1, -1, -1});
  CHECK(padded_rows(SingleActive{}, Rows(32, 0), 32, {0, 8, true}) == Rows(32, 0));
}

TEST_CASE("a batch is refused if any request is, folds if any folds, and else skips") {
  CHECK(verdict(SingleActive{}, {0, -1, 1}, {0, 8, true}) == RouteVerdict::refuse);
  CHECK(verdict(SingleActive{}, {1, 0}, {0, 8, true}) == RouteVerdict::refuse);
  CHECK(verdict(SingleActive{}, {-1, 0, -1}, {0, 8, true}) == RouteVerdict::fold);
  CHECK(verdict(SingleActive{}, {-1, -1}, {0, 8, true}) == RouteVerdict::skip);
  CHECK(verdict(SingleActive{}, {}, {0, 8, true}) == RouteVerdict::skip);
  CHECK(verdict(PerRequest{}, {0, 7, -1}, {0, 8, true}) == RouteVerdict::fold);
  CHECK(verdict(PerRequest{}, {0, 8, -1}, {0, 8, true}) == RouteVerdict::refuse);
}

TEST_CASE("base, active and two adapters share a batch under PerRequest") {
  std::array<Selector, 4> const selectors{Selector::base(), Selector::slot(0), Selector::active(),
                                          Selector::slot(2)};
  std::array<std::int32_t, 4> slots{};
  CHECK(resolve_slots(PerRequest{}, selectors, {1, 3, true}, slots) == RouteVerdict::fold);
  CHECK(slots == std::array<std::int32_t, 4>{-1, 0, 1, 2});
}

TEST_CASE("slots of another size than the selectors are refused and nothing is written") {
  std::array<Selector, 2> const selectors{Selector::slot(0), Selector::slot(1)};
  std::array<std::int32_t, 3> slots{77, 77, 77};
  auto const outcome = resolve_slots(PerRequest{}, selectors, {0, 2, true}, slots);
  REQUIRE(!outcome.has_value());
  CHECK(outcome.error() == Errc::invalid_argument);
  CHECK(slots == std::array<std::int32_t, 3>{77, 77, 77});
}

TEST_CASE("the guard passes skip and fold, and names the path and the reason of a refusal") {
  CHECK(require_served(RouteVerdict::skip, "decode").has_value());
  CHECK(require_served(RouteVerdict::fold, "decode").has_value());
  auto const refused = require_served(RouteVerdict::refuse, "mixed decode and prefill");
  REQUIRE(!refused.has_value());
  CHECK(refused.error().code == Errc::unsupported);
  CHECK(says(refused.error().message, "mixed decode and prefill"));
  CHECK(says(refused.error().message, "non-active adapter"));
}

}  // namespace
