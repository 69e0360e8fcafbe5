// SPDX-License-Identifier: AGPL-3.0-only
//
// Loading: experts, routers, biases and the head.
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "adapter_files.hpp"
#include "loading.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

std::string const fused_both =
    config_of("\"q_proj\"", R"(,"target_parameters":["mlp.experts.gate_up_proj","mlp.experts.down_proj"])");

// Fused pairs of four experts of rank 2 in layer 0 of `tiny_moe`: hidden 8, intermediate 6.
std::vector<TestTensor> fused_gate_up(std::string const& inner = ".base_layer") {
  return pair_of("model.layers.0.mlp.experts" + inner, 12, 8, 8);
}
std::vector<TestTensor> fused_down() { return pair_of("model.layers.0.mlp.experts", 8, 6, 8); }

/// A model of one layer and one linear, whose experts have the given widths.
ModelShape moe_of(std::int32_t experts, std::int64_t hidden, std::int64_t intermediate) {
  auto shape = ModelShape::create({.num_layers = 1,
                                   .modules = {{"self_attn.q_proj", 8, 8, {0}}},
                                   .moe = {experts, {0}, hidden, intermediate, {}}});
  REQUIRE(shape);
  return *shape;
}

}  // namespace

TEST_CASE("fused experts are a pair for each expert's linear, and one parameter may be alone") {
  Adapter const adapter = good(fused_both, fused_gate_up() + fused_down() + q_pair(0), tiny_moe(1));
  CHECK(adapter.pairs.size() == 1);
  REQUIRE(adapter.experts.size() == 12);
  CHECK(adapter.modules_present == 3);
  CHECK(adapter.modules_applied == 3);
  for (std::size_t i = 0; i < 12; ++i) {
    ExpertPair const& pair = adapter.experts[i];
    CHECK(pair.layer == 0);
    CHECK(pair.expert == static_cast<std::int32_t>(i / 3));
    CHECK(pair.linear == static_cast<ExpertLinear>(i % 3));
    CHECK(pair.rank == 2);
    CHECK(pair.scale == 2.0F);  // 4 / 2
    CHECK(pair.shares_a == (pair.linear == ExpertLinear::up));
    bool const down = pair.linear == ExpertLinear::down;
    CHECK(pair.a.shape == std::vector<std::int64_t>{2, down ? 6 : 8});
    CHECK(pair.b.shape == std::vector<std::int64_t>{down ? 8 : 6, 2});
  }
  Adapter const alone = good(config_of("\"q_proj\"", R"(,"target_parameters":["mlp.experts.gate_up_proj"])"),
                             fused_gate_up("") + q_pair(0), tiny_moe(1));
  CHECK(alone.experts.size() == 8);
  Adapter const inner = good(config_of("\"q_proj\"", R"(,"target_parameters":["mlp.experts.gate_up_proj"])"),
                             fused_gate_up() + q_pair(0), tiny_moe(1));
  CHECK(inner.experts.size() == 8);
  Error const wrong =
      bad(fused_both, pair_of("model.layers.0.mlp.experts", 8, 6, 6) + q_pair(0), tiny_moe(1));
  CHECK(says(wrong.message, "experts.lora_A.weight': is of rank 6, the configuration gives 8"));
}

TEST_CASE("the expert is slowest in lora_A and fastest in lora_B") {
  // E = 2, r = 2, in = out = 1: expert 0 has A 1, 2 and B 10, 30; expert 1 has A 3, 4 and B 20, 40.
  std::string const config = R"({"peft_type":"LORA","r":2,"lora_alpha":2,"target_modules":["q_proj"],)"
                             R"("target_parameters":["mlp.experts.down_proj"]})";
  std::string const name = "base_model.model.model.layers.0.mlp.experts";
  Adapter const adapter =
      good(config,
           std::vector<TestTensor>{with_values(name + ".lora_A.weight", {4, 1}, {1, 2, 3, 4}),
                                   with_values(name + ".lora_B.weight", {1, 4}, {10, 20, 30, 40})} +
               q_pair(0),
           moe_of(2, 1, 1), {.fused_expert_axes = FusedExpertAxes::current});
  REQUIRE(adapter.experts.size() == 2);
  CHECK(f32_of(adapter.experts[0].a) == std::vector<float>{1, 2});
  CHECK(f32_of(adapter.experts[0].b) == std::vector<float>{10, 30});  // 1 * 10 + 2 * 30 = 70
  CHECK(f32_of(adapter.experts[1].a) == std::vector<float>{3, 4});
  CHECK(f32_of(adapter.experts[1].b) == std::vector<float>{20, 40});  // 3 * 20 + 4 * 40 = 220
  for (std::size_t i = 0; i < 2; ++i) {
    auto const a = f32_of(adapter.experts[i].a), b = f32_of(adapter.experts[i].b);
    CHECK(adapter.experts[i].scale * (a[0] * b[0] + a[1] * b[1]) == (i == 0 ? 70.0F : 220.0F));
  }
}

TEST_CASE("the older way round, with in and out swapped, is told by shape and gives the same pairs") {
  // Two experts of rank 1, hidden 3, intermediate 1: gate_up is [2, 2, 3].
  std::string const config = R"({"peft_type":"LORA","r":1,"lora_alpha":1,"target_modules":["q_proj"],)"
                             R"("target_parameters":["mlp.experts.gate_up_proj"]})";
  std::string const name = "base_model.model.model.layers.0.mlp.experts";
  auto const now = std::vector<TestTensor>{
      with_values(name + ".lora_A.weight", {2, 3}, {1, 2, 3, 4, 5, 6}),  // [expert][in]
      with_values(name + ".lora_B.weight", {2, 2}, {10, 30, 20, 40})};   // [out][expert]
  auto const before = std::vector<TestTensor>{
      with_values(name + ".lora_A.weight", {2, 2}, {10, 20, 30, 40}),     // [expert][out]
      with_values(name + ".lora_B.weight", {3, 2}, {1, 4, 2, 5, 3, 6})};  // [in][expert]
  ModelShape const shape = moe_of(2, 3, 1);
  auto const q = pair_of("model.layers.0.self_attn.q_proj", 8, 8, 1);
  Adapter const a = good(config, now + q, shape);
  Adapter const b = good(config, before + q, shape);
  REQUIRE(a.experts.size() == 4);
  REQUIRE(b.experts.size() == 4);
  CHECK(f32_of(a.experts[0].a) == std::vector<float>{1, 2, 3});
  CHECK(f32_of(a.experts[1].b) == std::vector<float>{20});  // up of expert 0
  CHECK(f32_of(a.experts[2].b) == std::vector<float>{30});  // gate of expert 1
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(f32_of(a.experts[i].a) == f32_of(b.experts[i].a));
    CHECK(f32_of(a.experts[i].b) == f32_of(b.experts[i].b));
  }
  CHECK(says(bad(config, before + q, shape, {.fused_expert_axes = FusedExpertAxes::current}).message,
             "is [2, 2] and its lora_B [3, 2], the model needs [any, 3] and [2, any]"));
}

TEST_CASE("which way round is never a guess: another parameter of the file or the caller must say") {
  // Hidden 4, intermediate 2: gate_up is 4 wide both ways, down is 2 and 4.
  ModelShape const shape = moe_of(4, 4, 2);
  std::vector<float> rising(32);
  for (std::size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<float>(i);
  std::string const name = "base_model.model.model.layers.0.mlp.experts.base_layer";
  std::vector<TestTensor> const gate_up = {with_values(name + ".lora_A.weight", {8, 4}, rising),
                                           with_values(name + ".lora_B.weight", {4, 8}, rising)};
  auto const down = pair_of("model.layers.0.mlp.experts", 4, 2, 8);
  auto const down_before = pair_of("model.layers.0.mlp.experts", 2, 4, 8);
  std::string const one = config_of("\"q_proj\"", R"(,"target_parameters":["mlp.experts.gate_up_proj"])");
  Error const unclear = bad(one, gate_up + q_pair(0), shape);
  CHECK(unclear.code == Errc::unsupported);
  CHECK(says(unclear.message, "LoadOptions::fused_expert_axes must say"));
  auto const current = good(one, gate_up + q_pair(0), shape, {.fused_expert_axes = FusedExpertAxes::current});
  auto const older = good(one, gate_up + q_pair(0), shape, {.fused_expert_axes = FusedExpertAxes::older});
  CHECK(f32_of(current.experts[0].a) != f32_of(older.experts[0].a));
  CHECK_FALSE(current.digest == older.digest);
  auto const told = good(fused_both, gate_up + down + q_pair(0), shape);
  CHECK(f32_of(told.experts[0].a) == f32_of(current.experts[0].a));
  auto const told_older = good(fused_both, gate_up + down_before + q_pair(0), shape);
  CHECK(f32_of(told_older.experts[0].a) == f32_of(older.experts[0].a));
  // Two ways in one file.
  ModelShape const clear = tiny_moe(1);
  Error const both = bad(fused_both, fused_gate_up() + pair_of("model.layers.0.mlp.experts", 6, 8, 8), clear);
  CHECK(
      says(both.message, "has in and out swapped, 'base_model.model.model.layers.0.mlp.experts.base_layer"));
}

TEST_CASE("a parameter that no target names, and a linear that is adapted twice, are refused") {
  CHECK(says(bad(q_only, fused_down() + q_pair(0), tiny_moe(1)).message,
             "changes a parameter of the experts that the configuration's target_parameters do not name"));
  auto const twice = fused_down() + pair_of("model.layers.0.mlp.experts.1.down_proj", 8, 6, 2);
  std::string const config = config_of("\"down_proj\"", R"(,"target_parameters":["mlp.experts.down_proj"])");
  CHECK(says(bad(config, twice, tiny_moe(1)).message, "is of a linear that"));
}

TEST_CASE("experts as linears and routers are checked like any pair") {
  std::string const config = config_of("\"up_proj\",\"gate\"");
  auto const up = pair_of("model.layers.0.mlp.experts.3.up_proj", 6, 8, 2);
  Adapter const adapter = good(config, up + pair_of("model.layers.0.mlp.gate", 4, 8, 2), tiny_moe(1));
  REQUIRE(adapter.experts.size() == 1);
  CHECK(adapter.experts[0].expert == 3);
  CHECK(adapter.experts[0].linear == ExpertLinear::up);
  REQUIRE(adapter.routers.size() == 1);
  CHECK(adapter.routers[0].b.shape == std::vector<std::int64_t>{4, 2});
  CHECK(adapter.pairs.empty());
  CHECK(adapter.max_rank == 2);
  CHECK(adapter.modules_applied == 2);
  CHECK(says(bad(config, up + pair_of("model.layers.0.mlp.gate", 5, 8, 2), tiny_moe(1)).message,
             "gate.lora_B.weight': is [5, 2], the model needs [4, any]"));
  CHECK(says(bad(config, pair_of("model.layers.0.mlp.experts.3.up_proj", 8, 6, 2), tiny_moe(1)).message,
             "up_proj.lora_A.weight': is [2, 6], the model needs [any, 8]"));
  CHECK(says(bad(config, pair_of("model.layers.0.mlp.experts.4.up_proj", 6, 8, 2), tiny_moe(1)).message,
             "the model has no expert 4"));
}

TEST_CASE("rsLoRA scales an expert as it scales a linear") {
  // 16 / sqrt(16) = 4 for both.
  std::string const config =
      R"({"peft_type":"LORA","r":16,"lora_alpha":16,"use_rslora":true,"target_modules":["q_proj","up_proj"]})";
  Adapter const adapter = good(config,
                               pair_of("model.layers.0.self_attn.q_proj", 8, 8, 16) +
                                   pair_of("model.layers.0.mlp.experts.3.up_proj", 6, 8, 16),
                               tiny_moe(1));
  CHECK(adapter.pairs[0].scale == 4.0F);
  CHECK(adapter.experts[0].scale == 4.0F);
}

TEST_CASE("Mixtral's names are experts and routers too") {
  std::string const block = "model.layers.0.block_sparse_moe.";
  Adapter const adapter =
      good(config_of("\"w1\",\"w2\",\"w3\",\"gate\""),
           pair_of(block + "experts.2.w1", 6, 8, 2) + pair_of(block + "experts.2.w2", 8, 6, 2) +
               pair_of(block + "experts.2.w3", 6, 8, 2) + pair_of(block + "gate", 4, 8, 2),
           tiny_moe(1));
  REQUIRE(adapter.experts.size() == 3);
  CHECK(adapter.experts[0].linear == ExpertLinear::gate);
  CHECK(adapter.experts[1].linear == ExpertLinear::up);
  CHECK(adapter.experts[2].linear == ExpertLinear::down);
  CHECK(adapter.routers.size() == 1);
}

TEST_CASE("the bias of lora_B is there exactly when the configuration says so") {
  std::vector<TestTensor> const bias = {{q0 + ".lora_B.bias", {8}}};
  std::string const says_so = config_of("\"q_proj\"", R"(,"lora_bias":true)");
  Adapter const adapter = good(says_so, q_pair(0) + bias, tiny_model(1));
  REQUIRE(adapter.pairs[0].bias);
  CHECK(adapter.pairs[0].bias->shape == std::vector<std::int64_t>{8});
  CHECK(says(bad(q_only, q_pair(0) + bias, tiny_model(1)).message, "lora_B.bias': is there although"));
  CHECK(says(bad(says_so, q_pair(0), tiny_model(1)).message, "lora_B.weight': has no bias although"));
  CHECK(says(
      bad(says_so, q_pair(0) + std::vector<TestTensor>{{q0 + ".lora_B.bias", {7}}}, tiny_model(1)).message,
      "is [7], the model needs [8]"));
}

TEST_CASE("a bias of the base is refused by its tensor, and bias=all without one is served") {
  std::string const all = config_of("\"q_proj\"", R"(,"bias":"all")");
  CHECK(good(all, q_pair(0), tiny_model(1)).pairs.size() == 1);
  Error const error = bad(all, q_pair(0) + std::vector<TestTensor>{{q0 + ".base_layer.bias", {8}}},
                          tiny_model(1), {.lenient = true});
  CHECK(says(error.message, q0 + ".base_layer.bias': is nothing that a LoRA adapter has"));
}

TEST_CASE("LoRA on the head is a pair, and the base's tables that come with it are left out with a warning") {
  auto const head = pair_of("lm_head", 16, 8, 2) +
                    std::vector<TestTensor>{{"base_model.model.lm_head.base_layer.weight", {16, 8}}};
  Adapter const adapter = good(config_of("\"lm_head\""), head, tiny_model(2));
  REQUIRE(adapter.pairs.size() == 1);
  CHECK(adapter.pairs[0].site.layer == model_wide);
  REQUIRE(adapter.warnings.size() == 1);
  CHECK(says(adapter.warnings[0], "lm_head.base_layer.weight' is a copy of the base model's table"));
  auto const resized = pair_of("lm_head", 16, 8, 2) +
                       std::vector<TestTensor>{{"base_model.model.lm_head.base_layer.weight", {17, 8}}};
  CHECK(bad(config_of("\"lm_head\""), resized, tiny_model(2)).code == Errc::shape_mismatch);
}
