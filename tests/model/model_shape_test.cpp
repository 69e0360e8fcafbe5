// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/model/model_shape.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../outcome.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

ModelDescription two_layers() {
  return {.num_layers = 2,
          .modules = {{"attn.q", 4, 8, {0, 1}}, {"attn.out", 8, 4, {1}}, {"lm_head", 16, 8, {model_wide}}},
          .hidden = 8,
          .vocab = 16};
}

std::string fault_of(ModelDescription description) {
  Error const error = bad(ModelShape::create(std::move(description)));
  CHECK(error.code == Errc::invalid_argument);
  return error.message;
}

}  // namespace

TEST_CASE("sites go by layer, then by the list, model-wide ones last") {
  auto const shape = ModelShape::create(two_layers());
  REQUIRE(shape);
  REQUIRE(shape->sites().size() == 4);
  CHECK(shape->sites()[0] == Site{0, 0});
  CHECK(shape->sites()[1] == Site{1, 0});
  CHECK(shape->sites()[2] == Site{1, 1});
  CHECK(shape->sites()[3] == Site{model_wide, 2});
  CHECK(shape->module(shape->sites()[3]).name == "lm_head");
}

TEST_CASE("shapes have one fingerprint exactly when names, layers, widths, experts and embedding agree") {
  auto const fingerprint = [](ModelDescription description) {
    return testing::good(ModelShape::create(std::move(description))).fingerprint();
  };
  std::uint64_t const same = fingerprint(two_layers());
  CHECK(same == fingerprint(two_layers()));
  CHECK(same != ModelShape().fingerprint());
  std::vector<std::function<void(ModelDescription&)>> const changes{
      [](ModelDescription& d) { d.num_layers = 3; },
      [](ModelDescription& d) { d.hidden = 9; },
      [](ModelDescription& d) { d.vocab = 17; },
      [](ModelDescription& d) { d.tied_head = true; },
      [](ModelDescription& d) { d.modules[0].name = "attn.k"; },
      [](ModelDescription& d) { d.modules[0].n_out = 5; },
      [](ModelDescription& d) { d.modules[0].k_in = 9; },
      [](ModelDescription& d) { d.modules[0].layers = {0}; },
      [](ModelDescription& d) {
        d.modules[0].parts = {2, 2};
      },
      [](ModelDescription& d) { d.modules.pop_back(); },
      [](ModelDescription& d) { std::swap(d.modules[0], d.modules[1]); },
      [](ModelDescription& d) {
        d.moe = {2, {0}, 8, 4, {}};
      },
  };
  std::set<std::uint64_t> seen{same};
  for (auto const& change : changes) {
    ModelDescription description = two_layers();
    change(description);
    CHECK(seen.insert(fingerprint(description)).second);
  }
  ModelDescription marked = two_layers();
  marked.modules[0].ffn = true;  // a lever makes no other model
  CHECK(fingerprint(marked) == same);
}

TEST_CASE("a module is found in the layers that have it and in no other") {
  auto const shape = ModelShape::create(two_layers());
  REQUIRE(shape);
  CHECK(shape->find(1, "attn.out") == 2U);
  CHECK_FALSE(shape->find(0, "attn.out"));
  CHECK_FALSE(shape->find(2, "attn.q"));
  CHECK_FALSE(shape->find(-2, "attn.q"));
  CHECK(shape->find(model_wide, "lm_head") == 3U);
  CHECK_FALSE(shape->find(0, "lm_head"));
  CHECK(shape->find(Site{1, 1}) == 2U);
  CHECK_FALSE(shape->find(Site{0, 1}));
  CHECK_FALSE(shape->find(Site{5, 0}));
}

TEST_CASE("two modules may share a name in different layers and not in one") {
  ModelDescription d = two_layers();
  d.modules[1] = {"attn.q", 6, 8, {1}};
  CHECK(says(fault_of(d), "module 'attn.q': twice in layer 1"));
  d.modules[0].layers = {0};
  auto const shape = ModelShape::create(d);
  REQUIRE(shape);
  CHECK(shape->module(shape->sites()[*shape->find(0, "attn.q")]).n_out == 4);
  CHECK(shape->module(shape->sites()[*shape->find(1, "attn.q")]).n_out == 6);
}

TEST_CASE("a description that makes no sense is refused by the module's name") {
  SUBCASE("no layers") { CHECK(says(fault_of({}), "num_layers is 0")); }
  SUBCASE("more layers than any model has") {
    CHECK(says(fault_of({.num_layers = 2147483647}), "num_layers is 2147483647"));
  }
  SUBCASE("sizes below zero") {
    CHECK(says(fault_of({.num_layers = 1, .hidden = -3}), "must not be negative"));
    CHECK(says(fault_of({.num_layers = 1, .vocab = -4}), "must not be negative"));
  }
  SUBCASE("more experts than any model has") {
    ModelDescription many{.num_layers = 1};
    many.moe.num_experts = 2147483647;
    CHECK(says(fault_of(many), "num_experts is 2147483647"));
  }
  SUBCASE("a width of zero") {
    ModelDescription d = two_layers();
    d.modules[1].k_in = 0;
    CHECK(says(fault_of(d), "module 'attn.out'"));
  }
  SUBCASE("a width whose products overflow") {
    ModelDescription d = two_layers();
    d.modules[0].n_out = std::int64_t{1} << 40;
    CHECK(says(fault_of(d), "module 'attn.q'"));
  }
  SUBCASE("an empty name") {
    ModelDescription d = two_layers();
    d.modules[2].name.clear();
    CHECK(says(fault_of(d), "module 2: empty name"));
  }
  SUBCASE("a layer that the model does not have, or twice, or none") {
    ModelDescription d = two_layers();
    d.modules[1].layers = {2};
    CHECK(says(fault_of(d), "'attn.out': layer 2"));
    d.modules[1].layers = {1, 1};
    CHECK(says(fault_of(d), "not ascending at 1"));
    d.modules[1].layers = {};
    CHECK(says(fault_of(d), "no layer has it"));
  }
  SUBCASE("parts that are not the whole") {
    ModelDescription d = two_layers();
    d.modules[0].parts = {2, 1};
    CHECK(says(fault_of(d), "parts do not sum"));
    d.modules[0].parts = {5, -1};
    CHECK(says(fault_of(d), "parts do not sum"));
    d.modules[0].parts = {2, 2};
    CHECK(ModelShape::create(d).has_value());
  }
}

TEST_CASE("experts that make no sense are refused") {
  ModelDescription d = two_layers();
  d.moe = {.num_experts = 4, .layers = {1}, .hidden = 8, .intermediate = 6};
  CHECK(ModelShape::create(d).has_value());
  SUBCASE("no experts in a layer of experts") {
    d.moe.num_experts = 0;
    CHECK(says(fault_of(d), "num_experts is 0"));
  }
  SUBCASE("a layer beyond the model") {
    d.moe.layers = {0, 2};
    CHECK(says(fault_of(d), "experts: layer 2"));
  }
  SUBCASE("widths for some of the layers") {
    d.moe.layer_intermediate = {6, 6};
    CHECK(says(fault_of(d), "one width a layer"));
    d.moe.layer_intermediate = {0};
    CHECK(says(fault_of(d), "layer_intermediate must be in"));
  }
  SUBCASE("a width of zero") {
    d.moe.intermediate = 0;
    CHECK(says(fault_of(d), "hidden and intermediate"));
  }
  SUBCASE("no layers") {
    d.moe.layers = {};
    CHECK(says(fault_of(d), "no layer has them"));
  }
}
