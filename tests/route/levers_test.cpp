// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/route/levers.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/model/families.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/reference/delta.hpp"
#include "atlas/lora/route/policy.hpp"

namespace {

using namespace atlas::lora;

constexpr StepLevers nothing_applied{.apply = false};
constexpr StepLevers without_ffn{.apply_ffn = false};

// One pair of rank 1 that adds 2 * 3 * x to the row's only element.
struct OneTable {
  float a = 2.0F;
  float b = 3.0F;
  RouteCell<float> cell{&a, &b, nullptr, 1.0F, 1, 1, 0};
  [[nodiscard]] RouteTable<float> table() const { return {&cell, sizeof(cell), 1, 1, 1, 1}; }
};

TEST_CASE(
    "a step without deltas leaves y as it is everywhere, and one without the feed-forward part's only "
    "there") {
  Module const q{"q", 1, 1, {0}, {}, false};
  Module const up{"up", 1, 1, {0}, {}, true};
  std::array<Selector, 2> const selectors{Selector::slot(0), Selector::base()};
  OneTable const weights;
  auto const y_of = [&](Module const& module, StepLevers levers) {
    std::array<std::int32_t, 2> slots{};
    RouteContext const context{.max_slots = 1, .apply = levers.applies(module)};
    CHECK(resolve_slots(PerRequest{}, selectors, context, slots) ==
          RouteVerdict::fold);  // whatever is applied
    std::array<float, 2> const x{10.0F, 10.0F};
    std::array<float, 2> y{1.0F, 1.0F};
    std::array<float, 1> scratch{};
    reference_delta<float, float>(weights.table(), slots, x.data(), 1, y.data(), 1,
                                  std::span<float>(scratch));
    return y;
  };
  CHECK(y_of(q, {}) == std::array{61.0F, 1.0F});
  CHECK(y_of(up, {}) == std::array{61.0F, 1.0F});
  CHECK(y_of(q, without_ffn) == std::array{61.0F, 1.0F});
  CHECK(y_of(up, without_ffn) == std::array{1.0F, 1.0F});
  CHECK(y_of(q, nothing_applied) == std::array{1.0F, 1.0F});
  CHECK(y_of(up, nothing_applied) == std::array{1.0F, 1.0F});
}

TEST_CASE("a request that is refused is refused under every lever") {
  std::array<Selector, 1> const selectors{Selector::slot(9)};
  std::array<std::int32_t, 1> slots{};
  for (bool const apply : {true, false}) {
    RouteContext const context{.max_slots = 1, .apply = apply};
    CHECK(resolve_slots(PerRequest{}, selectors, context, slots) == RouteVerdict::refuse);
  }
}

TEST_CASE(
    "the lever of the feed-forward part is that of gate, up, down and a hybrid's out, and of nothing else") {
  ModelConfig config;
  config.model_type = "qwen3_next";
  config.layers = 4;
  config.hidden = 64;
  config.heads = 4;
  config.head_dim = 16;
  config.intermediate = 96;
  config.vocab = 100;
  config.full_attention_interval = 4;
  config.linear_value_heads = 2;
  config.linear_value_head_dim = 16;
  std::set<std::string> left_out;
  auto const shape = model_shape(config);
  REQUIRE(shape.has_value());
  for (Module const& module : shape->modules()) {
    if (!without_ffn.applies(module)) left_out.insert(module.name);
    CHECK_FALSE(nothing_applied.applies(module));
    CHECK(StepLevers{}.applies(module));
  }
  CHECK(left_out ==
        std::set<std::string>{"linear_attn.out_proj", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"});
  for (ExpertLinear const linear : {ExpertLinear::gate, ExpertLinear::up, ExpertLinear::down}) {
    MoeShape const moe{1, {0}, 8, 4, {}};
    CHECK_FALSE(without_ffn.applies(moe.linear(0, linear)));
    CHECK(without_ffn.applies(moe.router(0)));
  }
  config.model_type = "phi3";
  left_out.clear();
  auto const fused = model_shape(config);
  REQUIRE(fused.has_value());
  for (Module const& module : fused->modules()) {
    if (!without_ffn.applies(module)) left_out.insert(module.name);
  }
  CHECK(left_out == std::set<std::string>{"mlp.down_proj", "mlp.gate_up_proj"});
}

TEST_CASE("a step under a lever has ids of its own, base's is base, and no lever leaves the id as it is") {
  static_assert(levered_id(base_id, nothing_applied) == base_id &&
                levered_id(base_id, without_ffn) == base_id);
  std::set<std::uint64_t> ids{base_id};
  for (char const* const name : {"a", "b"}) {
    for (std::uint64_t generation = 0; generation < 3; ++generation) {
      std::uint64_t const id = adapter_id(name, generation);
      CHECK(levered_id(id, {}) == id);
      for (std::uint64_t const own : {id, levered_id(id, nothing_applied), levered_id(id, without_ffn)}) {
        CHECK(ids.insert(own).second);
      }
      CHECK(levered_id(id, {false, false}) == levered_id(id, nothing_applied));
    }
  }
}

}  // namespace
