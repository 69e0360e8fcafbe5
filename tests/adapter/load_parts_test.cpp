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

TEST_CASE("fused experts are two pairs beside the dense ones, and one of them may be alone") {
  auto const experts = [](std::string const& inner) {
    return pair_of("model.layers.0.mlp.experts" + inner, inner.empty() ? 8 : 12, inner.empty() ? 6 : 8,
                   8);  // 4 of 2
  };
  std::string const both =
      config_of("\"q_proj\"", R"(,"target_parameters":["mlp.experts.gate_up_proj","mlp.experts.down_proj"])");
  Adapter const adapter = good(both, experts(".base_layer") + experts("") + q_pair(0), tiny_moe(1));
  CHECK(adapter.pairs.size() == 1);
  CHECK(adapter.experts.size() == 4);
  CHECK(adapter.modules_present == 1);
  Adapter const alone = good(config_of("\"q_proj\"", R"(,"target_parameters":["mlp.experts.gate_up_proj"])"),
                             experts(".base_layer") + q_pair(0), tiny_moe(1));
  CHECK(alone.experts.size() == 2);
  Error const wrong = bad(both, pair_of("model.layers.0.mlp.experts", 8, 6, 6) + q_pair(0), tiny_moe(1));
  CHECK(says(wrong.message, "experts.lora_A.weight': is of rank 6, the configuration gives 8"));
}

TEST_CASE("experts as linears and routers are checked like any pair") {
  std::string const config = config_of("\"up_proj\",\"gate\"");
  auto const up = pair_of("model.layers.0.mlp.experts.3.up_proj", 6, 8, 2);
  Adapter const adapter = good(config, up + pair_of("model.layers.0.mlp.gate", 4, 8, 2), tiny_moe(1));
  CHECK(adapter.experts.size() == 2);
  CHECK(adapter.router.size() == 2);
  CHECK(adapter.pairs.empty());
  CHECK(says(bad(config, up + pair_of("model.layers.0.mlp.gate", 5, 8, 2), tiny_moe(1)).message,
             "gate.lora_B.weight': is [5, 2], the model needs [4, any]"));
  CHECK(says(bad(config, pair_of("model.layers.0.mlp.experts.3.up_proj", 8, 6, 2), tiny_moe(1)).message,
             "up_proj.lora_A.weight': is [2, 6], the model needs [any, 8]"));
  CHECK(says(bad(config, pair_of("model.layers.0.mlp.experts.4.up_proj", 6, 8, 2), tiny_moe(1)).message,
             "the model has no expert 4"));
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
