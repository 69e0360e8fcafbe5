// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <string>
#include <vector>

#include "adapter_files.hpp"
#include "loading.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

TEST_CASE("an adapter knows the model that it was audited against") {
  ModelShape const model = tiny_model(2);
  CHECK(good(q_only, q_pair(0), model).model == model.fingerprint());
  CHECK(good(q_only, q_pair(0), tiny_model(3)).model != model.fingerprint());
}

TEST_CASE("an adapter that fits is whole: site, rank, scale and weights of each pair") {
  auto const tensors = pair_of("model.layers.1.mlp.down_proj", 8, 12, 2) + q_pair(0);
  Adapter const adapter = good(config_of("\"q_proj\",\"down_proj\""), tensors, tiny_model(2));
  ModelShape const shape = tiny_model(2);
  REQUIRE(adapter.pairs.size() == 2);
  CHECK(adapter.pairs[0].site == shape.sites()[*shape.find(0, "self_attn.q_proj")]);
  CHECK(adapter.pairs[1].site == shape.sites()[*shape.find(1, "mlp.down_proj")]);
  CHECK(adapter.pairs[1].rank == 2);
  CHECK(adapter.pairs[1].scale == 2.0F);
  CHECK(adapter.pairs[1].a.shape == std::vector<std::int64_t>{2, 12});
  CHECK(adapter.pairs[1].b.bytes.size() == 8 * 2 * 4);
  CHECK(adapter.pairs[1].a.name == "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight");
  CHECK(adapter.max_rank == 2);
  CHECK(adapter.modules_present == 2);
  CHECK(adapter.modules_applied == 2);
}

TEST_CASE("keys under another path than the model's are all listed and counted, and a rename mends them") {
  LoadOptions options{.model_prefix = "model.language_model"};
  Error const error = bad(q_only, q_pair(0) + q_pair(1), tiny_model(2), options);
  CHECK(error.code == Errc::unmatched);
  CHECK(lines(error.message) == 5);  // four keys and the count
  for (char const* key : {"layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.q_proj.lora_B",
                          "layers.1.self_attn.q_proj.lora_A", "layers.1.self_attn.q_proj.lora_B"}) {
    CHECK(says(error.message, std::string("base_model.model.model.") + key));
  }
  CHECK(says(error.message, "0 of 2 modules of the adapter are in the model"));
  options.prefix_map = {{"model", "model.language_model"}};
  CHECK(good(q_only, q_pair(0) + q_pair(1), tiny_model(2), options).modules_applied == 2);
}

TEST_CASE("an adapter of which the model has nothing, or not all, is refused with the count") {
  ModelShape const only_q =
      *ModelShape::create({.num_layers = 1, .modules = {{"self_attn.q_proj", 8, 8, {0}}}});
  auto const down = pair_of("model.layers.0.mlp.down_proj", 8, 12, 2);
  Error const none = bad(config_of("\"down_proj\""), down, only_q);
  CHECK(none.code == Errc::unmatched);
  CHECK(says(none.message, "0 of 1 modules"));
  Error const part = bad(config_of("\"q_proj\",\"down_proj\""), q_pair(0) + down, only_q);
  CHECK(says(part.message, "1 of 2 modules"));
  CHECK(says(part.message, "model.layers.0.mlp.down_proj.lora_A.weight': names no linear of the model"));

  LoadOptions const lenient{.lenient = true};
  Adapter const adapter = good(config_of("\"q_proj\",\"down_proj\""), q_pair(0) + down, only_q, lenient);
  CHECK(adapter.modules_present == 2);
  CHECK(adapter.modules_applied == 1);
  CHECK(adapter.warnings.size() == 2);
  CHECK(says(adapter.warnings[0], "down_proj.lora_A.weight' left out"));
  CHECK(says(bad(config_of("\"down_proj\""), down, only_q, lenient).message,
             "no tensor of the adapter belongs"));
}

TEST_CASE("a dense feed-forward pair has no place on a layer of experts") {
  Error const error =
      bad(config_of("\"up_proj\""), pair_of("model.layers.0.mlp.up_proj", 12, 8, 2), tiny_moe(1));
  CHECK(error.code == Errc::unmatched);
  CHECK(says(error.message, "mlp.up_proj.lora_A.weight': names no linear"));
}

TEST_CASE("halves without partners, shapes that do not fit and doubles are named all at once") {
  std::vector<TestTensor> tensors = {
      {q0 + ".lora_A.weight", {2, 8}},                                             // no B
      {"base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight", {8, 2}},  // no A
      {"base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight", {2, 8}},
      {"base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight", {8, 4}},  // rank 4 beside rank 2
      {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", {8, 2}},     // A and B swapped
      {"base_model.model.model.layers.0.mlp.down_proj.lora_B.weight", {2, 12}},
      {"base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight", {2, 8}},
      {"base_model.model.model.layers.0.self_attn.o_proj.lora_A.default.weight",
       {2, 8}},  // the same one again
      {"base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight", {8, 2}},
      {"base_model.model.model.layers.0.self_attn.o_proj.lora_magnitude_vector", {8}},
      {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", {2, 8, 1}},
      {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight", {12, 2}}};
  Error const error = bad(config_of("\"q_proj\""), tensors, tiny_model(1));
  CHECK(says(error.message, q0 + ".lora_A.weight': has no lora_B"));
  CHECK(says(error.message, "k_proj.lora_B.weight': has no lora_A"));
  CHECK(says(error.message, "v_proj.lora_B.weight': is of rank 4, its lora_A of rank 2"));
  CHECK(says(error.message, "down_proj.lora_A.weight': is [8, 2], the model needs [any, 12] ([rank, k_in])"));
  CHECK(says(error.message, "o_proj.lora_A.weight': is the same tensor as"));
  CHECK(says(error.message, "o_proj.lora_magnitude_vector': DoRA is not served"));
  CHECK(says(error.message, "up_proj.lora_A.weight': is [2, 8, 1]"));
  CHECK(lines(error.message) == 7);
}

TEST_CASE("faults of the configuration and of the file come together") {
  Error const error = bad(config_of("\"q_proj\"", R"(,"use_dora":true,"newest":3)"),
                          {{q0 + ".lora_A.weight", {2, 8}}}, tiny_model(1));
  CHECK(error.code == Errc::unsupported);
  CHECK(lines(error.message) == 3);
  CHECK(says(error.message, "adapter_config.json: field 'use_dora'"));
  CHECK(says(error.message, "adapter_config.json: field 'newest'"));
  CHECK(says(error.message, "adapter_model.safetensors: tensor '" + q0 + ".lora_A.weight'"));
  CHECK(lines(bad("{", q_pair(0) + pair_of("x", 1, 1, 1), tiny_model(1)).message) == 4);
}

TEST_CASE("the rank of the file and that of the configuration must be one") {
  Error const error = bad(config_of("\"q_proj\"", R"(,"rank_pattern":{"layers.1.self_attn.q_proj":4})"),
                          q_pair(0) + q_pair(1), tiny_model(2));
  CHECK(error.code == Errc::shape_mismatch);
  CHECK(lines(error.message) == 1);
  CHECK(says(error.message,
             "layers.1.self_attn.q_proj.lora_A.weight': is of rank 2, the configuration gives 4"));
  Adapter const adapter =
      good(config_of("\"q_proj\"",
                     R"(,"rank_pattern":{"layers.1.self_attn.q_proj":4},"alpha_pattern":{"layers.1.*":6})"),
           q_pair(0) + pair_of("model.layers.1.self_attn.q_proj", 8, 8, 4), tiny_model(2));
  CHECK(adapter.max_rank == 4);
  CHECK(adapter.pairs[0].scale == 2.0F);
  CHECK(adapter.pairs[1].scale == 1.5F);
}

TEST_CASE("alpha 0 and a negative alpha are served, the former with a warning") {
  std::string const zero = R"({"r":2,"lora_alpha":0,"target_modules":["q_proj"]})";
  Adapter const adapter = good(zero, q_pair(0), tiny_model(1));
  CHECK(adapter.pairs[0].scale == 0.0F);
  REQUIRE(adapter.warnings.size() == 1);
  CHECK(says(adapter.warnings[0], "the scale of 1 of 1 modules is 0"));
  CHECK(good(R"({"r":2,"lora_alpha":-1,"target_modules":["q_proj"]})", q_pair(0), tiny_model(1))
            .pairs[0]
            .scale == -0.5F);
  Error const huge =
      bad(R"({"r":2,"lora_alpha":1e300,"target_modules":["q_proj"]})", q_pair(0), tiny_model(1));
  CHECK(huge.code == Errc::out_of_range);
  CHECK(
      says(huge.message, "field 'lora_alpha': the scale of 'model.layers.0.self_attn.q_proj' is beyond f32"));
}

TEST_CASE("the file is the truth about layers, and a configuration that says otherwise gets a warning") {
  std::string const layer_2 = config_of("\"q_proj\"", R"(,"layers_to_transform":2)");
  Adapter const adapter = good(layer_2, q_pair(1) + q_pair(3), tiny_model(4));
  REQUIRE(adapter.pairs.size() == 2);
  CHECK(adapter.pairs[0].site.layer == 1);
  CHECK(adapter.pairs[1].site.layer == 3);
  REQUIRE(adapter.warnings.size() == 2);
  CHECK(says(adapter.warnings[0],
             "2 modules of the file are not among its targets and are adapted all the same, first "
             "'model.layers.1.self_attn.q_proj'"));
  CHECK(says(adapter.warnings[1],
             "1 modules are among its targets and not in the file, so they stay the base's, first "
             "'model.layers.2.self_attn.q_proj'"));
  CHECK(good(config_of("\"q_proj\"", R"(,"layers_to_transform":[1,3])"), q_pair(1) + q_pair(3), tiny_model(4))
            .warnings.empty());
  Error const replicated =
      bad(config_of("\"q_proj\"", R"(,"layer_replication":[[0,2],[1,3]])"), q_pair(1), tiny_model(4));
  CHECK(says(replicated.message, "field 'layer_replication'"));
}

TEST_CASE("a target without a tensor is refused by name") {
  Error const error =
      bad(config_of("\"q_proj\",\"wat_proj\"", R"(,"target_parameters":["mlp.experts.up_proj"])"), q_pair(0),
          tiny_model(1));
  CHECK(error.code == Errc::unmatched);
  CHECK(lines(error.message) == 2);
  CHECK(says(error.message, "field 'target_modules': 'wat_proj' has no tensor in the file"));
  CHECK(says(error.message, "field 'target_parameters': 'mlp.experts.up_proj' has no tensor"));
  auto const by_expression = [](char const* text) {
    return R"~({"r":2,"lora_alpha":4,"target_modules":")~" + std::string(text) + "\"}";
  };
  CHECK(says(bad(by_expression(".*\\\\.k_proj"), q_pair(0), tiny_model(1)).message,
             "has no tensor in the file"));
  CHECK(good(by_expression(".*\\\\.q_proj"), q_pair(0), tiny_model(1)).warnings.empty());
  Adapter const unknown = good(by_expression("(?!x).*"), q_pair(0), tiny_model(1));
  REQUIRE(unknown.warnings.size() == 1);
  CHECK(says(unknown.warnings[0], "the expression '(?!x).*' is not understood"));
  CHECK(good(by_expression("all-linear"), q_pair(0), tiny_model(1)).warnings.size() ==
        1);  // six linears are missing
  CHECK(good(config_of("\"q_proj\",\"wat_proj\""), q_pair(0), tiny_model(1), {.lenient = true})
            .warnings.size() == 1);
}

TEST_CASE("NaN and infinity are refused by tensor and element, unless the caller keeps them") {
  std::vector<float> values(16, 0.5F);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  auto tensors = q_pair(0);
  tensors[0] = with_values(q0 + ".lora_A.weight", {2, 8}, values);
  values[3] = std::numeric_limits<float>::infinity();
  tensors[1] = with_values(q0 + ".lora_B.weight", {8, 2}, values);
  Error const error = bad(q_only, tensors, tiny_model(1));
  CHECK(error.code == Errc::out_of_range);
  CHECK(lines(error.message) == 2);
  CHECK(says(error.message, q0 + ".lora_A.weight': element 3 is NaN"));
  CHECK(says(error.message, q0 + ".lora_B.weight': element 3 is infinite"));
  CHECK(good(q_only, tensors, tiny_model(1), {.keep_non_finite = true}).pairs.size() == 1);
}

TEST_CASE("weights of other types are refused by tensor and type") {
  std::vector<TestTensor> tensors = q_pair(0);
  tensors[1].dtype = "F64";
  tensors[1].bytes = std::string(8 * 2 * 8, '\0');
  Error const error = bad(q_only, tensors, tiny_model(1));
  CHECK(error.code == Errc::unsupported);
  CHECK(says(error.message, q0 + ".lora_B.weight': is F64; F32, F16 or BF16 expected"));
}

TEST_CASE("layers under two paths are two models, and only the caller knows which is meant") {
  auto const two = q_pair(0, "model.layers.") + q_pair(0, "vision.layers.");
  Error const error = bad(q_only, two, tiny_model(1), {.lenient = true});
  CHECK(says(error.message,
             "lies under 'vision.layers', other tensors under 'model.layers'; model_prefix must say"));
  Adapter const adapter = good(q_only, two, tiny_model(1), {.lenient = true, .model_prefix = "model"});
  CHECK(adapter.modules_applied == 1);
  CHECK(adapter.modules_present == 2);
}

TEST_CASE("a directory without the files, or with a pickle alone, says what is missing") {
  TemporaryFolder const folder;
  auto const empty = load_adapter(folder.path(), tiny_model(1));
  REQUIRE_FALSE(empty);
  CHECK(empty.error().code == Errc::not_found);
  CHECK(says(empty.error().message, "adapter_config.json: "));
  CHECK(says(empty.error().message, "adapter_model.safetensors: "));
  folder.write("adapter_config.json", q_only);
  folder.write("adapter_model.bin", "\x80\x02");
  auto const pickle = load_adapter(folder.path() + "/", tiny_model(1));
  REQUIRE_FALSE(pickle);
  CHECK(pickle.error().code == Errc::unsupported);
  CHECK(says(pickle.error().message, folder.path() + "/adapter_model.bin: a pickle runs code"));
  CHECK(says(bad(q_only, {}, tiny_model(1)).message, "no tensor of the adapter belongs to the model"));
}
