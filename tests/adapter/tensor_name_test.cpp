// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/tensor_name.hpp"

#include <doctest/doctest.h>

#include <string>

#include "adapter_files.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

// 48 layers, full attention in 3, 7, ..., 47, 512 experts in each.
ModelShape const& factory() {
  static ModelShape const shape = *model_shape({.model_type = "qwen3_next",
                                                .layers = 48,
                                                .hidden = 2048,
                                                .heads = 16,
                                                .kv_heads = 2,
                                                .head_dim = 256,
                                                .vocab = 151936,
                                                .num_experts = 512,
                                                .moe_intermediate = 512,
                                                .shared_expert_intermediate = 512,
                                                .full_attention_interval = 4,
                                                .linear_value_heads = 32,
                                                .linear_value_head_dim = 128});
  return shape;
}

TensorName of(std::string const& below, ModelShape const& shape = factory(),
              LoadOptions const& options = {}) {
  return understand_tensor("base_model.model." + below, shape, options);
}
TensorName in_layers(std::string const& below) { return of("model.layers." + below); }

// A linear's place and half in one line: "3 self_attn.k_proj", or the reason.
std::string place(TensorName const& name, ModelShape const& shape = factory()) {
  if (!name.reason.empty()) return name.reason;
  if (name.part != ModelPart::linear) return "no linear";
  Site const site = shape.sites()[name.site];
  CHECK(site.layer == name.layer);
  return std::to_string(site.layer) + " " + shape.module(site).name;
}

}  // namespace

TEST_CASE("a linear's A, B and bias are found in the layers that have it") {
  TensorName const k = in_layers("3.self_attn.k_proj.lora_A.weight");
  CHECK(k.kind == TensorKind::a);
  CHECK(k.part == ModelPart::linear);
  CHECK(k.path == "model.layers.3.self_attn.k_proj");
  CHECK(k.wrapper == "model.layers");
  CHECK(place(k) == "3 self_attn.k_proj");
  CHECK(in_layers("3.self_attn.v_proj.lora_B.weight").kind == TensorKind::b);
  CHECK(in_layers("3.self_attn.v_proj.lora_B.bias").kind == TensorKind::bias);
  CHECK(place(in_layers("7.self_attn.o_proj.lora_A.weight")) == "7 self_attn.o_proj");
  CHECK(place(in_layers("0.linear_attn.out_proj.lora_B.weight")) == "0 linear_attn.out_proj");
  CHECK(place(in_layers("11.mlp.shared_expert.up_proj.lora_A.weight")) == "11 mlp.shared_expert.up_proj");
}

TEST_CASE("a linear that the layer or the model does not have says so") {
  CHECK(place(in_layers("0.self_attn.q_proj.lora_A.weight")) ==
        "layer 0 of the model has no self_attn.q_proj");
  CHECK(place(in_layers("3.linear_attn.out_proj.lora_A.weight")) ==
        "layer 3 of the model has no linear_attn.out_proj");
  CHECK(place(in_layers("48.self_attn.q_proj.lora_A.weight")) ==
        "layer 48 of the model has no self_attn.q_proj");
  // On a layer of experts a dense feed-forward linear has no place, whatever the layer's attention is.
  CHECK(place(in_layers("11.mlp.gate_proj.lora_A.weight")) == "names no linear of the model");
  CHECK(place(in_layers("3.linear_attn.in_proj_qkv.lora_A.weight")) == "names no linear of the model");
  CHECK(place(in_layers("x.self_attn.q_proj.lora_A.weight")) == "names no linear of the model");
  CHECK(place(in_layers("99999999999.self_attn.q_proj.lora_A.weight")) == "names no linear of the model");
  CHECK(place(in_layers("03.self_attn.q_proj.lora_A.weight")) == "names no linear of the model");
  ModelConfig mixed = tiny_config(2);
  mixed.model_type = "qwen3_moe";
  mixed.num_experts = 4;
  mixed.moe_intermediate = 6;
  mixed.mlp_only_layers = {0};
  ModelShape const shape = *model_shape(mixed);
  CHECK(place(of("model.layers.0.mlp.gate_proj.lora_A.weight", shape), shape) == "0 mlp.gate_proj");
  CHECK(place(of("model.layers.1.mlp.gate_proj.lora_A.weight", shape)) ==
        "layer 1 of the model has no mlp.gate_proj");
}

TEST_CASE("experts and routers are found on layers of experts and nowhere else") {
  TensorName const expert = in_layers("7.mlp.experts.42.gate_proj.lora_A.weight");
  CHECK(expert.part == ModelPart::expert);
  CHECK(expert.layer == 7);
  CHECK(expert.expert == 42);
  CHECK(expert.expert_linear == ExpertLinear::gate);
  CHECK(expert.reason.empty());
  CHECK(in_layers("11.mlp.experts.0.down_proj.lora_B.weight").expert_linear == ExpertLinear::down);
  CHECK(in_layers("0.mlp.experts.5.up_proj.lora_B.weight").expert_linear == ExpertLinear::up);
  CHECK(in_layers("0.block_sparse_moe.experts.5.w3.lora_B.weight").expert_linear == ExpertLinear::up);
  CHECK(in_layers("0.block_sparse_moe.experts.5.w2.lora_B.weight").expert_linear == ExpertLinear::down);
  CHECK(in_layers("3.mlp.gate.lora_A.weight").part == ModelPart::router);
  CHECK(in_layers("0.mlp.gate.lora_B.weight").part == ModelPart::router);
  CHECK(in_layers("3.mlp.experts.lora_A.weight").part == ModelPart::fused_experts);
  CHECK(in_layers("3.mlp.experts.base_layer.lora_B.weight").part == ModelPart::fused_experts);
  CHECK(in_layers("3.mlp.experts.base_layer.lora_B.weight").path == "model.layers.3.mlp.experts.base_layer");

  CHECK(in_layers("3.mlp.experts.999.gate_proj.lora_A.weight").reason == "the model has no expert 999");
  CHECK(in_layers("3.mlp.experts.5.wat_proj.lora_A.weight").reason == "names no linear of the model");
  CHECK(in_layers("3.mlp.experts.x.up_proj.lora_A.weight").reason == "names no linear of the model");
  CHECK(in_layers("3.mlp.experts.gate_up_proj.lora_A.weight").reason == "names no linear of the model");
  CHECK(in_layers("48.mlp.gate.lora_A.weight").reason == "layer 48 of the model has no experts");
  CHECK(of("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", tiny_model(1)).reason ==
        "layer 0 of the model has no experts");
  CHECK(of("model.layers.0.mlp.gate.lora_A.weight", tiny_model(1)).reason ==
        "layer 0 of the model has no experts");
}

TEST_CASE("older keys with the adapter's name in them are the same keys") {
  CHECK(place(in_layers("3.self_attn.q_proj.lora_A.default.weight")) == "3 self_attn.q_proj");
  CHECK(in_layers("3.self_attn.q_proj.lora_B.my-adapter.bias").kind == TensorKind::bias);
  CHECK(of("model.embed_tokens.lora_embedding_A.default").kind == TensorKind::embedding_a);
  CHECK(in_layers("3.self_attn.q_proj.lora_A.a.b.weight").kind == TensorKind::unknown);
  CHECK(in_layers("3.self_attn.q_proj.lora_A.default").kind == TensorKind::unknown);
}

TEST_CASE("tables of the embedding and the head are told apart by what is said of them") {
  TensorName const rows = of("model.embed_tokens.token_adapter.trainable_tokens_delta");
  CHECK(rows.kind == TensorKind::token_rows);
  CHECK(rows.part == ModelPart::embedding);
  CHECK(rows.reason.empty());
  CHECK(of("model.language_model.embed_tokens.token_adapter.base_layer.weight").kind ==
        TensorKind::token_base);
  CHECK(of("lm_head.token_adapter.trainable_tokens_delta").part == ModelPart::head);
  CHECK(of("model.embed_tokens.weight").kind == TensorKind::saved_module);
  CHECK(of("lm_head.weight").kind == TensorKind::saved_module);
  CHECK(of("lm_head.weight").part == ModelPart::head);
  CHECK(of("model.embed_tokens.base_layer.weight").kind == TensorKind::base_copy);
  CHECK(of("lm_head.base_layer.weight").kind == TensorKind::base_copy);
  CHECK(of("model.embed_tokens.lora_embedding_B").kind == TensorKind::embedding_b);
  CHECK(of("model.embed_tokens.lora_embedding_B").reason.empty());
}

TEST_CASE("LoRA on the head is a linear's, when the model's list has a head") {
  CHECK(place(of("lm_head.lora_A.weight")) == "-1 lm_head");
  CHECK(place(of("language_model.lm_head.lora_B.weight")) == "-1 lm_head");
  ModelShape const headless = *model_shape(tiny_config(1), {.lm_head = false});
  CHECK(of("lm_head.lora_A.weight", headless).reason == "the model's list has no lm_head");
}

TEST_CASE("of two model-wide linears of one ending the longer name is the one") {
  ModelShape const shape = *ModelShape::create({.num_layers = 1,
                                                .modules = {{"attn", 8, 8, {0}},
                                                            {"lm_head", 16, 8, {model_wide}},
                                                            {"draft.lm_head", 12, 8, {model_wide}},
                                                            {"heads.0", 12, 8, {model_wide}}}});
  CHECK(place(of("draft.lm_head.lora_A.weight", shape), shape) == "-1 draft.lm_head");
  CHECK(place(of("model.draft.lm_head.lora_A.weight", shape), shape) == "-1 draft.lm_head");
  CHECK(place(of("lm_head.lora_A.weight", shape), shape) == "-1 lm_head");
  CHECK(place(of("my.lm_head.lora_A.weight", shape), shape) == "-1 lm_head");
  CHECK(place(of("model.heads.0.lora_A.weight", shape), shape) == "-1 heads.0");  // a number of its own name
}

TEST_CASE("a layer's own head is not the model's") {
  for (char const* below :
       {"model.layers.0.mtp.lm_head", "model.layers.0.lm_head", "model.layers.48.lm_head"}) {
    CHECK(of(std::string(below) + ".lora_A.weight").reason == "names no linear of the model");
    CHECK(
        of(std::string(below) + ".lora_A.weight", *model_shape(tiny_config(1), {.lm_head = false})).reason ==
        "names no linear of the model");
  }
}

TEST_CASE("weights of the base and other tensors are nothing an adapter has") {
  CHECK(in_layers("3.self_attn.q_proj.lora_magnitude_vector").kind == TensorKind::magnitude);
  CHECK(in_layers("3.self_attn.q_proj.lora_magnitude_vector.default.weight").kind == TensorKind::magnitude);
  for (char const* below : {"3.self_attn.q_proj.weight", "3.self_attn.q_proj.base_layer.weight"}) {
    CHECK(in_layers(below).kind == TensorKind::unknown);
    CHECK(in_layers(below).reason == "is a weight of the base model, which an adapter may not change");
  }
  for (char const* below : {"3.self_attn.q_proj.bias", "3.self_attn.q_proj.lora_A.bias", "3.self_attn.q_proj",
                            "3.self_attn.q_proj.lora_C.weight", "", "3.self_attn.q_proj.lora_E"}) {
    CAPTURE(below);
    CHECK(in_layers(below).kind == TensorKind::unknown);
    CHECK_FALSE(in_layers(below).reason.empty());
  }
  TensorName const bare = understand_tensor("model.layers.3.self_attn.k_proj.lora_A.weight", factory());
  CHECK(bare.kind == TensorKind::unknown);
  CHECK(bare.reason == "does not begin with base_model.model.");
}

TEST_CASE("a name that is too long is refused before it is looked at") {
  std::string const end = "layers.0.self_attn.q_proj.lora_A.weight";
  std::string const longest(1024 - 17 - 1 - end.size(), 'm');  // 17: base_model.model.
  CHECK(place(of(longest + "." + end, tiny_model(1)), tiny_model(1)) == "0 self_attn.q_proj");
  TensorName const longer = of("m" + longest + "." + end, tiny_model(1));
  CHECK(longer.kind == TensorKind::unknown);
  CHECK(longer.reason == "name too long, at most 1024 bytes expected");
  std::string deep;
  for (int i = 0; i < 200000; ++i) deep += "0.";
  CHECK(of(deep + end, tiny_model(1)).reason == "name too long, at most 1024 bytes expected");
}

TEST_CASE("a model's declared path refuses other paths, and a rename mends them") {
  LoadOptions options{.model_prefix = "model.language_model"};
  std::string const key = "model.layers.0.self_attn.q_proj.lora_A.weight";
  ModelShape const shape = tiny_model(1);
  CHECK(of(key, shape, options).reason ==
        "lies under 'model.layers', the model's layers under 'model.language_model' (a prefix_map can rename "
        "it)");
  CHECK(of("lm_head.lora_A.weight", shape, options).reason.empty());
  CHECK(of("model.lm_head.lora_A.weight", shape, options).reason.empty());
  CHECK_FALSE(of("visual.lm_head.lora_A.weight", shape, options).reason.empty());
  options.prefix_map = {{"model", "model.language_model"}};
  TensorName const mended = of(key, shape, options);
  CHECK(place(mended, shape) == "0 self_attn.q_proj");
  CHECK(mended.wrapper == "model.language_model.layers");
  CHECK(mended.path == "model.layers.0.self_attn.q_proj");  // patterns still see the file's path
  options.prefix_map = {{"mod", "model.language_model"}};
  CHECK_FALSE(of(key, shape, options).reason.empty());  // whole segments only
}

TEST_CASE("a rename makes a table of another name the embedding's or the head's") {
  LoadOptions const options{
      .prefix_map = {{"transformer.wte", "model.embed_tokens"}, {"output", "lm_head"}, {"old", "new"}}};
  ModelShape const shape = tiny_model(1);
  TensorName const table = of("transformer.wte.weight", shape, options);
  CHECK(table.kind == TensorKind::saved_module);
  CHECK(table.part == ModelPart::embedding);
  CHECK(table.path == "transformer.wte");
  CHECK(table.reason.empty());
  CHECK(of("transformer.wte.token_adapter.trainable_tokens_delta", shape, options).kind ==
        TensorKind::token_rows);
  CHECK(of("output.base_layer.weight", shape, options).part == ModelPart::head);
  CHECK(of("transformer.wte.weight", shape).kind == TensorKind::unknown);
  LoadOptions const away{.prefix_map = {{"model.embed_tokens", "model.wte"}}};
  CHECK(of("model.embed_tokens.weight", shape, away).kind == TensorKind::unknown);
}

TEST_CASE("a reason is one line whatever the key holds") {
  LoadOptions const options{.model_prefix = "model"};
  CHECK(of("a\nb\x1b.layers.0.self_attn.q_proj.lora_A.weight", tiny_model(1), options).reason ==
        "lies under 'a?b?.layers', the model's layers under 'model' (a prefix_map can rename it)");
  CHECK(of("a\nb.lm_head.lora_A.weight", tiny_model(1), options).reason ==
        "lies under 'a?b', the model's layers under 'model' (a prefix_map can rename it)");
}

TEST_CASE("renames may add and take away a beginning, and the first that fits is the one") {
  using detail::renamed;
  CHECK(renamed("a.b", {{"a", "x"}, {"x", "y"}}) == "x.b");
  CHECK(renamed("a.b", {{"c", "x"}, {"a.b", "y"}}) == "y");
  CHECK(renamed("a.b", {{"a", ""}}) == "b");
  CHECK(renamed("a.b", {{"", "m"}}) == "m.a.b");
  CHECK(renamed("ab.c", {{"a", "x"}}) == "ab.c");
}

TEST_CASE("a model described by the engine is served by its own names") {
  ModelShape const shape = *ModelShape::create({.num_layers = 2,
                                                .modules = {{"attn.c_attn", 24, 8, {0, 1}, {8, 8, 8}},
                                                            {"mlp.gate", 12, 8, {0, 1}},
                                                            {"experts.1.w", 12, 8, {1}}}});
  CHECK(place(of("transformer.h.1.attn.c_attn.lora_A.weight", shape), shape) == "1 attn.c_attn");
  CHECK(place(of("h.0.mlp.gate.lora_A.weight", shape), shape) == "0 mlp.gate");  // no router here
  CHECK(place(of("h.1.experts.1.w.lora_A.weight", shape), shape) == "1 experts.1.w");
  CHECK(place(of("0.attn.c_attn.lora_A.weight", shape), shape) == "0 attn.c_attn");
}
