// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/token_table.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

using namespace atlas::lora;
using atlas::lora::detail::known_ids;
using Places = std::vector<std::size_t>;

TEST_CASE(
    "ids inside the vocabulary are kept in their order, those beyond it counted, impossible ones named") {
  auto const known = [](std::vector<std::int64_t> const& ids, std::int64_t table_rows, std::int64_t vocab) {
    return known_ids(ids, table_rows, vocab);
  };
  CHECK(known({10, 42, 99}, 200, 200) == detail::KnownIds{{0, 1, 2}, 0, {}});
  CHECK(known({10, 100, 104}, 105, 100) == detail::KnownIds{{0}, 2, {}});
  CHECK(known({500}, 105, 100).bad == 500);
  CHECK(known({-1}, 105, 100).bad == -1);
  CHECK(known({42, 10}, 200, 200) ==
        detail::KnownIds{{0, 1}, 0, {}});  // rows follow the list as it is written
}

static_assert([] {
  std::array<std::int64_t, 4> const ids{17, 9, 16, 2};
  detail::KnownIds const known = known_ids(ids, 18, 16);
  return known.kept == std::vector<std::size_t>{1, 3} && known.left_out == 2 && !known.bad;
}());
