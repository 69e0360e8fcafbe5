// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/model_config.hpp"

#include <doctest/doctest.h>

#include <string>

#include "adapter_files.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

ModelConfig good(std::string const& text) { return testing::good(parse_model_config(text, "c.json")); }
Error bad(std::string const& text) {
  CAPTURE(text);
  return testing::bad(parse_model_config(text, "c.json"));
}

ModelShape real_shape(std::string const& folder) {
  return testing::good(
      model_shape(testing::good(read_model_config(test_data() + "/" + folder + "/config.json"))));
}

}  // namespace

TEST_CASE("the configurations that transformers writes give their models' shapes") {
  ModelShape const llama = real_shape("peft/llama_r8_all");
  CHECK(llama.sites().size() == 3 * 7 + 1);
  CHECK(llama.vocab() == 320);
  CHECK_FALSE(llama.tied_head());
  ModelShape const qwen3 = real_shape("peft/qwen3_trainable_tokens_tied");
  CHECK(qwen3.module(qwen3.sites()[*qwen3.find(1, "self_attn.q_proj")]).n_out == 128);  // 4 heads of 32
  CHECK(qwen3.tied_head());
  ModelShape const moe = real_shape("peft/qwen3moe_attn");
  CHECK(moe.moe() == MoeShape{4, {0, 1}, 64, 48, {}});                                    // num_local_experts
  CHECK(real_shape("peft/per_expert_linears").moe() == MoeShape{4, {0, 1}, 64, 48, {}});  // num_experts
  ModelShape const phi3 = real_shape("peft/phi3_fused_qkv");
  CHECK(phi3.module(phi3.sites()[0]) == Module{"self_attn.qkv_proj", 128, 64, {0, 1}, {64, 32, 32}});
  ModelShape const hybrid = real_shape("peft/qwen3next_hybrid");
  CHECK(hybrid.module(hybrid.sites()[*hybrid.find(3, "self_attn.q_proj")]).n_out == 256);  // 2 * 4 * 32
  CHECK_FALSE(hybrid.find(0, "self_attn.q_proj"));
  CHECK(hybrid.find(0, "linear_attn.out_proj"));
}

TEST_CASE("a nested text model goes before what stands beside it") {
  ModelConfig const c = good(R"({"model_type":"vlm","hidden_size":1,"tie_word_embeddings":true,
      "text_config":{"model_type":"llama","num_hidden_layers":2,"hidden_size":64,"num_attention_heads":4,
                     "intermediate_size":96,"vocab_size":320,"head_dim":null}})");
  CHECK(c.model_type == "llama");
  CHECK(c.hidden == 64);
  CHECK(c.head_dim == 0);
  CHECK(c.tied_head);
  CHECK(model_shape(c).has_value());
}

TEST_CASE("widths of experts are one number or one a layer") {
  CHECK(good(R"({"model_type":"m","moe_intermediate_size":48})").moe_intermediate == 48);
  ModelConfig const c = good(R"({"model_type":"m","moe_intermediate_size":[0,40,48]})");
  CHECK(c.moe_intermediate == 40);
  CHECK(c.layer_moe_intermediate == std::vector<std::int64_t>{0, 40, 48});
}

TEST_CASE("layer types are full or linear, and every fourth layer is full where nothing is said") {
  ModelConfig const c =
      good(R"({"model_type":"m","layer_types":["linear_attention","full_attention","sliding_attention"]})");
  CHECK(c.layer_types == std::vector<LayerType>{LayerType::linear_attention, LayerType::full_attention,
                                                LayerType::full_attention});
  CHECK(c.full_attention_interval == 4);
  CHECK(good(R"({"model_type":"m","full_attention_interval":2})").full_attention_interval == 2);
  CHECK(says(bad(R"({"model_type":"m","layer_types":["mamba"]})").message,
             "field 'layer_types': the string \"mamba\""));
}

TEST_CASE("ill-typed fields are refused by name, all at once") {
  Error const error =
      bad(R"({"hidden_size":"64","num_hidden_layers":-1,"vocab_size":1.5,"tie_word_embeddings":1,
      "num_attention_heads":2147483648,"mlp_only_layers":[1,"2"],"layer_types":7,"num_local_experts":[8]})");
  CHECK(error.code == Errc::bad_config);
  CHECK(lines(error.message) == 9);
  for (char const* field :
       {"model_type", "hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings",
        "num_attention_heads", "mlp_only_layers", "layer_types", "num_experts"}) {
    CHECK(says(error.message, std::string("c.json: field '") + field + "': "));
  }
  CHECK(bad("[]").code == Errc::bad_config);
  CHECK(bad("{").code == Errc::bad_file);
  CHECK(says(bad(R"({"model_type":"llama","hidden_size":NaN})").message, "field 'hidden_size': NaN"));
  CHECK(read_model_config("/nowhere/config.json").error().code == Errc::not_found);
}
