// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/module_names.hpp"

#include <doctest/doctest.h>

#include <string_view>
#include <vector>

using namespace atlas::lora;
using namespace atlas::lora::detail;

TEST_CASE("a name is the end or the beginning of a path at a dot only") {
  CHECK(ends_in_name("a.b.c", "c"));
  CHECK(ends_in_name("a.b.c", "b.c"));
  CHECK(ends_in_name("c", "c"));
  CHECK_FALSE(ends_in_name("a.bc", "c"));
  CHECK_FALSE(ends_in_name("c", "b.c"));
  CHECK(begins_with_name("a.b.c", "a.b"));
  CHECK(begins_with_name("a", "a"));
  CHECK_FALSE(begins_with_name("ab.c", "a"));
}

TEST_CASE("a path is cut at its dots, empty segments too") {
  CHECK(segments_of("a.b") == std::vector<std::string_view>{"a", "b"});
  CHECK(segments_of("a..b.") == std::vector<std::string_view>{"a", "", "b", ""});
  CHECK(segments_of("") == std::vector<std::string_view>{""});
}

TEST_CASE("an index is a number as one writes it, and fits") {
  CHECK(index_of("0") == 0);
  CHECK(index_of("47") == 47);
  CHECK(index_of("2147483647") == 2147483647);
  for (char const* text : {"", "-1", "+1", "01", "1a", "a", " 1", "2147483648", "99999999999999999999"}) {
    CAPTURE(text);
    CHECK_FALSE(index_of(text));
  }
}

TEST_CASE("a layer is the first number after two segments, or after a named one") {
  CHECK(layer_by_pattern("model.layers.3.mlp.experts.7.up_proj", {}) == 3);
  CHECK_FALSE(layer_by_pattern("layers.3.up_proj", {}));
  CHECK_FALSE(layer_by_pattern("model.layers.3", {}));
  CHECK(layer_by_pattern("model.layers.3.mlp.experts.7.up_proj", {"experts"}) == 7);
  CHECK(layer_by_pattern("h.3.attn", {"blocks", "h"}) == 3);
  CHECK_FALSE(layer_by_pattern("model.layers.3.up_proj", {"h"}));
}
