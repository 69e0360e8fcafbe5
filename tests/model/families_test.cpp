// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/model/families.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../outcome.hpp"

using namespace atlas::lora;
using atlas::lora::testing::says;

namespace {

constexpr ModuleChoice layers_only{.lm_head = false, .shared_expert = false};

ModelConfig dense(char const* type) {
  return {.model_type = type,
          .layers = 3,
          .hidden = 64,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .intermediate = 160,
          .vocab = 320};
}

// Every fourth layer is full attention; query heads are gated.
ModelConfig hybrid(std::int32_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t kv_heads,
                   std::int64_t intermediate, std::int32_t experts, std::int64_t value_heads) {
  return {.model_type = experts == 0 ? "qwen3_5" : "qwen3_next",
          .layers = layers,
          .hidden = hidden,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_dim = 256,
          .intermediate = intermediate,
          .vocab = 248320,
          .num_experts = experts,
          .moe_intermediate = experts == 0 ? 0 : 512,
          .shared_expert_intermediate = experts == 0 ? 0 : 512,
          .full_attention_interval = 4,
          .linear_value_heads = value_heads,
          .linear_value_head_dim = 128};
}

ModelShape shape_of(ModelConfig const& config, ModuleChoice choice = {}) {
  return testing::good(model_shape(config, choice));
}

// Bytes of a packed slot at rank `rank` in 2-byte elements: A and B of every site in order.
std::int64_t slot_bytes(ModelShape const& shape, std::int64_t rank) {
  std::int64_t bytes = 0;
  for (Site const site : shape.sites())
    bytes += 2 * rank * (shape.module(site).n_out + shape.module(site).k_in);
  return bytes;
}

// Where A of a module lies in that slot.
std::int64_t offset_of_a(ModelShape const& shape, std::int64_t rank, std::int32_t layer, char const* name) {
  std::int64_t bytes = 0;
  for (Site const site : shape.sites()) {
    if (site.layer == layer && shape.module(site).name == name) return bytes;
    bytes += 2 * rank * (shape.module(site).n_out + shape.module(site).k_in);
  }
  return -1;
}

Module const* find(ModelShape const& shape, std::int32_t layer, char const* name) {
  auto const site = shape.find(layer, name);
  return site ? &shape.module(shape.sites()[*site]) : nullptr;
}

void check_widths(ModelShape const& shape, std::int32_t layer, char const* name, std::int64_t n_out,
                  std::int64_t k_in) {
  CAPTURE(layer);
  CAPTURE(name);
  Module const* const module = find(shape, layer, name);
  REQUIRE(module != nullptr);
  CHECK(module->n_out == n_out);
  CHECK(module->k_in == k_in);
}

}  // namespace

TEST_CASE("dense families have q, k, v, o, gate, up, down in this order, and the head at last") {
  for (char const* type : {"llama", "mistral", "qwen2", "qwen3"}) {
    CAPTURE(type);
    ModelShape const shape = shape_of(dense(type));
    std::vector<std::string> names;
    for (Module const& module : shape.modules()) names.push_back(module.name);
    CHECK(names == std::vector<std::string>{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                            "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                                            "mlp.down_proj", "lm_head"});
    CHECK(shape.sites().size() == 3 * 7 + 1);
    check_widths(shape, 2, "self_attn.q_proj", 64, 64);
    check_widths(shape, 2, "self_attn.k_proj", 32, 64);
    check_widths(shape, 2, "mlp.up_proj", 160, 64);
    check_widths(shape, 2, "mlp.down_proj", 64, 160);
    check_widths(shape, model_wide, "lm_head", 320, 64);
    CHECK(shape.moe() == MoeShape{});
  }
}

TEST_CASE("heads wider than the hidden size give wide q and o") {
  ModelConfig c = dense("qwen3");
  c.head_dim = 32;
  ModelShape const shape = shape_of(c);
  check_widths(shape, 0, "self_attn.q_proj", 128, 64);  // 4 heads of 32
  check_widths(shape, 0, "self_attn.v_proj", 64, 64);
  check_widths(shape, 0, "self_attn.o_proj", 64, 128);
}

TEST_CASE("absent head sizes follow the family's rule or are refused where it has none") {
  ModelConfig c = dense("llama");
  c.kv_heads = 0;
  c.head_dim = 0;
  check_widths(shape_of(c), 0, "self_attn.k_proj", 64, 64);  // as many as query heads, of 64 / 4
  for (char const* type : {"qwen3", "qwen3_next"}) {
    c.model_type = type;
    auto const shape = model_shape(c);
    REQUIRE_FALSE(shape);
    CHECK(shape.error().code == Errc::bad_config);
    CHECK(says(shape.error().message, "head_dim is 0"));
  }
}

TEST_CASE("Phi-3 fuses q, k, v and gate, up, and says where the parts are") {
  ModelShape const shape = shape_of(dense("phi3"));
  check_widths(shape, 1, "self_attn.qkv_proj", 128, 64);  // 64 + 32 + 32
  CHECK(find(shape, 1, "self_attn.qkv_proj")->parts == std::vector<std::int64_t>{64, 32, 32});
  check_widths(shape, 1, "mlp.gate_up_proj", 320, 64);
  CHECK(find(shape, 1, "mlp.gate_up_proj")->parts == std::vector<std::int64_t>{160, 160});
  check_widths(shape, 1, "mlp.down_proj", 64, 160);
  CHECK(find(shape, 1, "self_attn.q_proj") == nullptr);
}

TEST_CASE("a layer of experts has no dense feed-forward linears") {
  ModelConfig c = dense("qwen2_moe");
  c.layers = 4;
  c.num_experts = 8;
  c.moe_intermediate = 48;
  c.shared_expert_intermediate = 24;
  SUBCASE("every layer has experts") {
    ModelShape const shape = shape_of(c);
    CHECK(find(shape, 0, "mlp.gate_proj") == nullptr);
    CHECK(shape.moe() == MoeShape{8, {0, 1, 2, 3}, 64, 48, {}});
    check_widths(shape, 3, "mlp.shared_expert.down_proj", 64, 24);
    check_widths(shape, 3, "mlp.shared_expert_gate", 1, 64);
    CHECK(find(shape_of(c, layers_only), 3, "mlp.shared_expert.down_proj") == nullptr);
    CHECK(find(shape_of(c, layers_only), model_wide, "lm_head") == nullptr);
  }
  SUBCASE("every second layer, and one of those dense all the same") {
    c.decoder_sparse_step = 2;
    c.mlp_only_layers = {3};
    ModelShape const shape = shape_of(c);
    CHECK(shape.moe().layers == std::vector<std::int32_t>{1});
    for (std::int32_t const layer : {0, 2, 3}) check_widths(shape, layer, "mlp.gate_proj", 160, 64);
    CHECK(find(shape, 1, "mlp.gate_proj") == nullptr);
    CHECK(find(shape, 0, "mlp.shared_expert.up_proj") == nullptr);
  }
  SUBCASE("a width of a layer's own, where zero means none") {
    c.layer_moe_intermediate = {0, 40};
    CHECK(shape_of(c).moe().layer_intermediate == std::vector<std::int64_t>{48, 40, 48, 48});
  }
  SUBCASE("Mixtral's experts have the dense width") {
    c.model_type = "mixtral";
    c.moe_intermediate = 0;
    c.shared_expert_intermediate = 0;
    CHECK(shape_of(c).moe().intermediate == 160);
  }
}

TEST_CASE("the packed slots of known models have their known sizes") {
  ModelShape const factory = shape_of(hybrid(48, 2048, 16, 2, 5120, 512, 32), layers_only);
  CHECK(slot_bytes(factory, 16) == 15335424);
  ModelShape const b27 = shape_of(hybrid(64, 5120, 24, 4, 17408, 0, 48), layers_only);
  CHECK(slot_bytes(b27, 8) == 88342528);
  CHECK(slot_bytes(b27, 64) == 706740224);
  CHECK(slot_bytes(shape_of(hybrid(24, 1024, 8, 2, 3584, 0, 16), layers_only), 64) == 58195968);
  CHECK(slot_bytes(shape_of(hybrid(40, 2048, 16, 2, 0, 256, 32), layers_only), 16) == 12779520);
  CHECK(slot_bytes(shape_of(hybrid(32, 2560, 16, 4, 9216, 0, 32), layers_only), 16) == 47579136);
}

TEST_CASE("the packed offsets of known models are their known offsets") {
  ModelShape const factory = shape_of(hybrid(48, 2048, 16, 2, 5120, 512, 32), layers_only);
  CHECK(offset_of_a(factory, 16, 0, "linear_attn.out_proj") == 0);
  CHECK(offset_of_a(factory, 16, 3, "self_attn.q_proj") == 589824);
  CHECK(offset_of_a(factory, 16, 3, "self_attn.k_proj") == 917504);
  CHECK(offset_of_a(factory, 16, 47, "self_attn.o_proj") == 15138816);
  CHECK(offset_of_a(factory, 16, 0, "self_attn.k_proj") == -1);
  ModelShape const small = shape_of(hybrid(24, 1024, 8, 2, 3584, 0, 16), layers_only);
  CHECK(offset_of_a(small, 16, 0, "mlp.gate_proj") == 0);
  CHECK(offset_of_a(small, 16, 0, "mlp.up_proj") == 147456);
  CHECK(offset_of_a(small, 16, 0, "mlp.down_proj") == 294912);
  CHECK(offset_of_a(small, 16, 0, "linear_attn.out_proj") == 442368);
  CHECK(offset_of_a(small, 16, 3, "self_attn.q_proj") == 1622016);
  CHECK(offset_of_a(small, 16, 3, "mlp.down_proj") == 2277376);
}

TEST_CASE("the gated query of a hybrid is twice as wide and its output linear is on linear layers only") {
  ModelShape const shape = shape_of(hybrid(24, 1024, 8, 2, 3584, 0, 16));
  check_widths(shape, 3, "self_attn.q_proj", 4096, 1024);  // 2 * 8 * 256
  check_widths(shape, 3, "self_attn.v_proj", 512, 1024);
  check_widths(shape, 3, "self_attn.o_proj", 1024, 2048);
  check_widths(shape, 3, "mlp.gate_proj", 3584, 1024);
  check_widths(shape, 2, "linear_attn.out_proj", 1024, 2048);  // 16 * 128
  CHECK(find(shape, 3, "linear_attn.out_proj") == nullptr);
  CHECK(find(shape, 2, "self_attn.q_proj") == nullptr);
}

TEST_CASE("a list of layer types goes before the interval, and layers past its end are full attention") {
  ModelConfig c = hybrid(4, 64, 4, 2, 96, 0, 4);
  c.layer_types = {LayerType::full_attention, LayerType::linear_attention};
  ModelShape const shape = shape_of(c);
  for (std::int32_t const layer : {0, 2, 3}) CHECK(find(shape, layer, "self_attn.q_proj") != nullptr);
  CHECK(find(shape, 1, "linear_attn.out_proj") != nullptr);
}

TEST_CASE("what is wrong with a configuration is said by the field's name") {
  auto const fault = [](ModelConfig const& c) { return testing::bad(model_shape(c)); };
  ModelConfig c = dense("llama");
  SUBCASE("an unknown family") {
    c.model_type = "gpt2";
    CHECK(fault(c).code == Errc::unsupported);
    CHECK(says(fault(c).message, "'gpt2'"));
    CHECK(says(fault(c).message, "ModelDescription"));
  }
  SUBCASE("sizes that are absent, negative or absurd") {
    struct Row {
      std::int64_t ModelConfig::*field;
      std::int64_t value;
      char const* name;
    };
    for (Row const& row :
         {Row{&ModelConfig::hidden, 0, "hidden_size"}, Row{&ModelConfig::heads, -4, "num_attention"},
          Row{&ModelConfig::vocab, 0, "vocab_size"}, Row{&ModelConfig::intermediate, 0, "intermed"},
          Row{&ModelConfig::kv_heads, std::int64_t{1} << 40, "num_key_value"}}) {
      ModelConfig broken = c;
      broken.*row.field = row.value;
      CHECK(fault(broken).code == Errc::bad_config);
      CHECK(says(fault(broken).message, row.name));
    }
  }
  SUBCASE("a number of layers that only a broken file has asks for no memory") {
    c.layers = 2147483647;
    CHECK(says(fault(c).message, "num_hidden_layers is 2147483647"));
  }
  SUBCASE("experts in a family without them") {
    c.num_experts = 8;
    CHECK(says(fault(c).message, "'llama' has no experts"));
  }
  SUBCASE("widths whose product no kernel can index") {
    c.heads = 1 << 20;
    c.head_dim = 1 << 20;
    CHECK(fault(c).message ==
          "model config: num_attention_heads is 1048576 of head_dim 1048576, too wide together");
    c.heads = 1;
    c.kv_heads = 2049;  // 2049 * 2^20 > 2^31
    CHECK(fault(c).message ==
          "model config: num_key_value_heads is 2049 of head_dim 1048576, too wide together");
    c.kv_heads = 2047;  // 2047 * 2^20 fits
    CHECK(model_shape(c).has_value());
  }
  SUBCASE("widths whose sum no integer holds") {
    c.model_type = "phi3";
    c.heads = c.kv_heads = c.head_dim = 2147483647;
    CHECK(fault(c).code == Errc::bad_config);
    CHECK(says(fault(c).message, "num_attention_heads is 2147483647 of head_dim"));
  }
  SUBCASE("widths of layers that the model does not have, however wide") {
    c.linear_value_heads = c.linear_value_head_dim = std::int64_t{1} << 40;
    CHECK(model_shape(c).has_value());
  }
}

TEST_CASE("a model type from a file is shown on one line and not endlessly") {
  ModelConfig config = dense("ll\x1b[31m\nama");
  Error const error = testing::bad(model_shape(config));
  CHECK(error.code == Errc::unsupported);
  CHECK(says(error.message, "model_type 'll?[31m?ama' is not a known family"));
  config.model_type = std::string(100'000, 'x');
  CHECK(testing::bad(model_shape(config)).message.size() < 400);
}
