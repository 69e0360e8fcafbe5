// SPDX-License-Identifier: AGPL-3.0-only
//
// Loading: tables of the embedding and the head, and what the digest covers.
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "adapter_files.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

std::string with(std::string const& more) {
  return R"({"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":["q_proj"])" +
         (more.empty() ? "" : "," + more) + "}";
}

ModelShape model(bool tied) {
  ModelConfig config = tiny_config(1);
  config.tied_head = tied;
  return *model_shape(config);
}

std::vector<TestTensor> const q = pair_of("model.layers.0.self_attn.q_proj", 8, 8, 2);
std::string const rows_key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta";

Result<Adapter> load(std::string const& config, std::vector<TestTensor> const& more, bool tied = false,
                     LoadOptions const& options = {}) {
  TemporaryFolder const folder;
  write_adapter(folder, config, q + more);
  return load_adapter(folder.path(), model(tied), options);
}
std::string fault(std::string const& config, std::vector<TestTensor> const& more, bool tied = false) {
  auto const adapter = load(config, more, tied);
  REQUIRE_FALSE(adapter);
  return adapter.error().message;
}
Digest digest(std::string const& config, std::vector<TestTensor> const& more = {},
              LoadOptions const& options = {}) {
  auto const adapter = load(config, more, false, options);
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  return adapter->digest;
}

}  // namespace

TEST_CASE("token rows are kept when they fit their ids and the model") {
  std::string const ids = with(R"("trainable_token_indices":{"embed_tokens":[9,2]})");
  auto const adapter = load(ids, {{rows_key, {2, 8}}});
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  REQUIRE(adapter->overlay.size() == 1);
  CHECK(adapter->overlay[0].name == rows_key);
  CHECK(says(fault(ids, {{rows_key, {3, 8}}}), "has 3 rows, trainable_token_indices has 2 ids"));
  CHECK(says(fault(ids, {{rows_key, {2, 7}}}), "is [2, 7], the model needs [any, 8] ([ids, hidden])"));
  CHECK(says(fault(ids, {}), "field 'trainable_token_indices': 'embed_tokens' has no tensor in the file"));
  CHECK(says(fault(with(""), {{rows_key, {2, 8}}}), "has no ids in trainable_token_indices"));
}

TEST_CASE("token ids beyond the vocabulary, said twice or negative are refused") {
  for (auto const& [ids, words] :
       {std::pair("[15,16]", "token 16 is beyond the vocabulary of 16"),
        std::pair("[5,5]", "5 is said twice"), std::pair("[-1,3]", "-1 is not an integer")}) {
    CHECK(says(fault(with(std::string("\"trainable_token_indices\":") + ids), {{rows_key, {2, 8}}}), words));
  }
}

TEST_CASE("a tied head may go with the embedding's rows, an untied one may not") {
  std::string const both = with(R"("trainable_token_indices":{"embed_tokens":[9,2],"lm_head":[9,2]})");
  CHECK(load(both, {{rows_key, {2, 8}}}, true).has_value());
  CHECK(says(fault(both, {{rows_key, {2, 8}}}, false), "'lm_head' has no tensor in the file"));
}

TEST_CASE("whole tables are kept when they have the vocabulary's rows") {
  std::string const saved = with(R"("modules_to_save":["embed_tokens"])");
  std::string const key = "base_model.model.model.embed_tokens.weight";
  auto const adapter = load(saved, {{key, {16, 8}}});
  REQUIRE(adapter);
  CHECK(adapter->overlay.size() == 1);
  CHECK(says(fault(saved, {{key, {20, 8}}}), "is [20, 8], the model needs [16, 8] ([vocab, hidden])"));
  CHECK(says(fault(saved, {}), "field 'modules_to_save': 'embed_tokens' has no tensor in the file"));
}

TEST_CASE("tables that a rename makes the embedding's are what the configuration calls the embedding's") {
  LoadOptions const options{.prefix_map = {{"transformer.wte", "model.embed_tokens"}}};
  std::string const key = "base_model.model.transformer.wte.";
  auto const rows = load(with(R"("trainable_token_indices":[9,2])"),
                         {{key + "token_adapter.trainable_tokens_delta", {2, 8}}}, false, options);
  REQUIRE_MESSAGE(rows, (rows ? "" : rows.error().message));
  CHECK(rows->overlay.size() == 1);
  auto const table =
      load(with(R"("modules_to_save":["embed_tokens"])"), {{key + "weight", {16, 8}}}, false, options);
  REQUIRE_MESSAGE(table, (table ? "" : table.error().message));
  CHECK(table->overlay.size() == 1);
  for (char const* const field : {R"("modules_to_save":["transformer.wte"])",
                                  R"("trainable_token_indices":{"transformer.wte":[9,2]})"}) {
    bool const whole = field[1] == 'm';
    auto const own = load(with(field),
                          {whole ? TestTensor{key + "weight", {16, 8}}
                                 : TestTensor{key + "token_adapter.trainable_tokens_delta", {2, 8}}},
                          false, options);
    REQUIRE_MESSAGE(own, (own ? "" : own.error().message));
    CHECK(own->overlay.size() == 1);
  }
  // Both spellings of one name in one file: what the configuration renames finds what the model's name is.
  auto const mixed = load(with(R"("modules_to_save":["transformer.wte"])"),
                          {{"base_model.model.model.embed_tokens.weight", {16, 8}}}, false, options);
  REQUIRE_MESSAGE(mixed, (mixed ? "" : mixed.error().message));
  LoadOptions const nested{.prefix_map = {{"model", "model.language_model"}}};
  CHECK(load(with(R"("modules_to_save":["model.embed_tokens"])"),
             {{"base_model.model.model.embed_tokens.weight", {16, 8}}}, false, nested)
            .has_value());
}

TEST_CASE("LoRA on the embedding is refused by its tensors, and a copy of the base's table is left out") {
  std::string const key = "base_model.model.model.embed_tokens.";
  std::string const message = fault(R"({"r":2,"lora_alpha":4,"target_modules":["q_proj","embed_tokens"]})",
                                    {{key + "base_layer.weight", {16, 8}},
                                     {key + "lora_embedding_A", {2, 16}},
                                     {key + "lora_embedding_B", {8, 2}}});
  CHECK(lines(message) == 2);
  CHECK(says(message, key + "lora_embedding_A': LoRA on an embedding is not served"));
  auto const copy = load(with(""), {{key + "base_layer.weight", {16, 8}}});
  REQUIRE(copy);
  CHECK(copy->overlay.empty());
  REQUIRE(copy->warnings.size() == 1);
  CHECK(says(copy->warnings[0], "embed_tokens.base_layer.weight' is a copy"));
}

TEST_CASE("the digest is of what is applied: equal for equal adapters, another for any change") {
  Digest const plain = digest(with(""));
  CHECK(digest(with("")) == plain);
  CHECK(digest(with(R"("lora_dropout":0.5,"revision":"x")")) == plain);
  CHECK_FALSE(digest(with(R"("use_rslora":true)")) == plain);
  CHECK_FALSE(digest(with(R"("alpha_pattern":{"q_proj":5})")) == plain);
  CHECK_FALSE(digest(with(""), {}, {.lenient = true}) == plain);
  CHECK_FALSE(digest(with(""), {}, {.prefix_map = {{"a", "b"}}}) == plain);
  std::vector<TestTensor> const rows = {{rows_key, {2, 8}}};
  Digest const nine_two = digest(with(R"("trainable_token_indices":[9,2])"), rows);
  CHECK_FALSE(nine_two == plain);
  CHECK_FALSE(digest(with(R"("trainable_token_indices":[2,9])"), rows) == nine_two);

  TemporaryFolder const folder;
  auto changed = q;
  changed[1] = with_values(q[1].name, {8, 2}, std::vector<float>(16, 0.25F));
  write_adapter(folder, with(""), changed);
  auto const other = load_adapter(folder.path(), model(false));
  REQUIRE(other);
  CHECK_FALSE(other->digest == plain);
}

TEST_CASE("the digest does not depend on where the file keeps a tensor or what stands before the layers") {
  auto const load_here = [](std::vector<TestTensor> const& tensors) {
    TemporaryFolder const folder;
    write_adapter(folder, with(""), tensors);
    auto const adapter = load_adapter(folder.path(), model(false));
    REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
    return adapter->digest;
  };
  Digest const plain = load_here(q);
  CHECK(load_here({q[1], q[0]}) == plain);
  CHECK(load_here(pair_of("model.language_model.layers.0.self_attn.q_proj", 8, 8, 2)) == plain);
}
