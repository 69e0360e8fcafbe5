// SPDX-License-Identifier: AGPL-3.0-only
//
// Loading: tables of the embedding and the head, and what the digest covers.
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "loading.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

std::string with(std::string const& more) { return config_of("\"q_proj\"", more.empty() ? "" : "," + more); }

ModelShape model(bool tied) {
  ModelConfig config = tiny_config(1);
  config.tied_head = tied;
  return *model_shape(config);
}

std::vector<TestTensor> const q = q_pair(0);
std::string const rows_key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta";

Result<Adapter> load(std::string const& config, std::vector<TestTensor> const& more, bool tied = false,
                     LoadOptions const& options = {}) {
  return testing::load(config, q + more, model(tied), options);
}
std::string fault(std::string const& config, std::vector<TestTensor> const& more, bool tied = false) {
  return testing::bad(load(config, more, tied)).message;
}
Digest digest(std::string const& config, std::vector<TestTensor> const& more = {},
              LoadOptions const& options = {}) {
  return testing::good(load(config, more, false, options)).digest;
}

}  // namespace

TEST_CASE("token rows are kept when they fit their ids and the model") {
  std::string const ids = with(R"("trainable_token_indices":{"embed_tokens":[9,2]})");
  auto const adapter = load(ids, {{rows_key, {2, 8}}});
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  RawTokenTable const& raw = adapter->raw_overlay.embedding;
  REQUIRE(raw.rows.has_value());
  CHECK(raw.rows->name == rows_key);
  CHECK(raw.ids == std::vector<std::int64_t>{9, 2});
  CHECK_FALSE(raw.table.has_value());
  CHECK(adapter->raw_overlay.head.empty());
  CHECK(adapter->overlay.empty());
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
  CHECK(adapter->raw_overlay.embedding.table.has_value());
  CHECK(says(fault(saved, {{key, {20, 8}}}), "is [20, 8], the model needs [16, 8] ([vocab, hidden])"));
  CHECK(says(fault(saved, {}), "field 'modules_to_save': 'embed_tokens' has no tensor in the file"));
}

TEST_CASE("a table is said once, under one path") {
  std::string const saved = with(R"("modules_to_save":["embed_tokens"])");
  std::string const key = "base_model.model.model.embed_tokens.";
  CHECK(says(fault(saved, {{key + "weight", {16, 8}}, {key + "token_adapter.base_layer.weight", {16, 8}}}),
             key + "weight': is the same table as '" + key + "token_adapter.base_layer.weight'"));
  CHECK(
      says(fault(saved, {{key + "weight", {16, 8}}, {"base_model.model.draft.embed_tokens.weight", {16, 8}}}),
           "is the same table as"));
  CHECK(says(fault(with(R"("trainable_token_indices":[3])"),
                   {{rows_key, {1, 8}},
                    {"base_model.model.draft.embed_tokens.token_adapter.base_layer.weight", {16, 8}}}),
             "is of 'model.embed_tokens', other tensors of the table are of 'draft.embed_tokens'"));
}

TEST_CASE("embedding and head are found under any wrapper") {
  std::string const config = with(R"("trainable_token_indices":{"embed_tokens":[9,2],"lm_head":[4]})");
  for (std::string const wrapper : {"", "model.", "model.language_model.", "a.b.c."}) {
    CAPTURE(wrapper);
    std::string const before = "base_model.model." + wrapper;
    auto const adapter = load(config, {{before + "embed_tokens.token_adapter.trainable_tokens_delta", {2, 8}},
                                       {before + "embed_tokens.token_adapter.base_layer.weight", {16, 8}},
                                       {before + "lm_head.token_adapter.trainable_tokens_delta", {1, 8}}});
    REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
    CHECK(adapter->raw_overlay.embedding.table.has_value());
    CHECK(adapter->raw_overlay.embedding.ids == std::vector<std::int64_t>{9, 2});
    CHECK(adapter->raw_overlay.head.ids == std::vector<std::int64_t>{4});
  }
}

TEST_CASE("rows beyond the vocabulary are left out and counted where the caller says so, and refused else") {
  LoadOptions const clip{.clip_vocabulary = true};
  std::string const key = "base_model.model.model.embed_tokens.weight";
  std::string const saved = with(R"("modules_to_save":["embed_tokens"])");
  auto const table = load(saved, {{key, {20, 8}}}, false, clip);
  REQUIRE_MESSAGE(table, (table ? "" : table.error().message));
  CHECK(table->raw_overlay.embedding.table->shape == std::vector<std::int64_t>{16, 8});
  CHECK(table->raw_overlay.embedding.table->bytes.size() == 16 * 8 * 4);
  CHECK(table->raw_overlay.rows_left_out == 4);
  REQUIRE(table->warnings.size() == 1);
  CHECK(says(table->warnings[0], "4 token rows beyond the vocabulary of 16 are left out"));
  CHECK_FALSE(load(saved, {{key, {12, 8}}}, false, clip).has_value());  // a smaller one is another model's

  std::vector<float> values(4 * 8);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / 8);
  std::string const config = with(R"("trainable_token_indices":[17,9,16,2])");
  auto const rows = load(config, {with_values(rows_key, {4, 8}, values)}, false, clip);
  REQUIRE_MESSAGE(rows, (rows ? "" : rows.error().message));
  CHECK(rows->raw_overlay.rows_left_out == 2);
  CHECK(rows->raw_overlay.embedding.ids == std::vector<std::int64_t>{9, 2});
  CHECK(*rows->raw_overlay.embedding.rows ==
        load(with(R"("trainable_token_indices":[9,2])"),
             {with_values(rows_key, {2, 8}, {1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3})})
            ->raw_overlay.embedding.rows);
  CHECK(says(fault(config, {{rows_key, {4, 8}}}), "token 17 is beyond the vocabulary of 16"));
  // An id that the adapter's own table does not have is wrong whatever the model's vocabulary is.
  std::string const base = "base_model.model.model.embed_tokens.token_adapter.base_layer.weight";
  auto const outside = load(config, {{rows_key, {4, 8}}, {base, {17, 8}}}, false, clip);
  REQUIRE_FALSE(outside);
  CHECK(says(outside.error().message, "has no row 17, which trainable_token_indices names"));
}

TEST_CASE("tables that a rename makes the embedding's are what the configuration calls the embedding's") {
  LoadOptions const options{.prefix_map = {{"transformer.wte", "model.embed_tokens"}}};
  std::string const key = "base_model.model.transformer.wte.";
  auto const rows = load(with(R"("trainable_token_indices":[9,2])"),
                         {{key + "token_adapter.trainable_tokens_delta", {2, 8}}}, false, options);
  REQUIRE_MESSAGE(rows, (rows ? "" : rows.error().message));
  CHECK(rows->raw_overlay.embedding.ids == std::vector<std::int64_t>{9, 2});
  auto const table =
      load(with(R"("modules_to_save":["embed_tokens"])"), {{key + "weight", {16, 8}}}, false, options);
  REQUIRE_MESSAGE(table, (table ? "" : table.error().message));
  CHECK(table->raw_overlay.embedding.table.has_value());
  for (char const* const field : {R"("modules_to_save":["transformer.wte"])",
                                  R"("trainable_token_indices":{"transformer.wte":[9,2]})"}) {
    bool const whole = field[1] == 'm';
    auto const own = load(with(field),
                          {whole ? TestTensor{key + "weight", {16, 8}}
                                 : TestTensor{key + "token_adapter.trainable_tokens_delta", {2, 8}}},
                          false, options);
    REQUIRE_MESSAGE(own, (own ? "" : own.error().message));
    RawTokenTable const& raw = own->raw_overlay.embedding;
    CHECK((whole ? raw.table : raw.rows).has_value());
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

TEST_CASE("LoRA on the embedding is kept with its scale, and a copy of the base's table is left out") {
  std::string const key = "base_model.model.model.embed_tokens.";
  std::string const targets = R"({"r":2,"lora_alpha":4,"target_modules":["q_proj","embed_tokens"]})";
  std::vector<TestTensor> const a = {{key + "lora_embedding_A", {2, 16}}};
  std::vector<TestTensor> const b = {{key + "lora_embedding_B", {8, 2}}};
  auto const adapter = load(targets, a + b);
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  RawTokenTable const& raw = adapter->raw_overlay.embedding;
  CHECK(raw.lora_a.has_value());
  CHECK(raw.lora_b.has_value());
  CHECK(raw.lora_scale == 2.0F);  // 4 / 2
  CHECK(says(fault(targets, a), "lora_embedding_A': has no lora_embedding_B"));
  CHECK(says(fault(targets, b), "lora_embedding_B': has no lora_embedding_A"));
  CHECK(says(fault(targets, a + std::vector<TestTensor>{{key + "lora_embedding_B", {8, 3}}}),
             "is of rank 3, its lora_embedding_A of rank 2"));
  CHECK(says(fault(targets, std::vector<TestTensor>{{key + "lora_embedding_A", {3, 16}},
                                                    {key + "lora_embedding_B", {8, 3}}}),
             "is of rank 3, the configuration gives 2"));
  CHECK(says(fault(targets, std::vector<TestTensor>{{key + "lora_embedding_A", {2, 17}}} + b),
             "is [2, 17], the model needs [any, 16] ([rank, vocab])"));
  CHECK(says(fault(R"({"r":2,"lora_alpha":4,"target_modules":["q_proj","embed_tokens"],)"
                   R"("trainable_token_indices":[3]})",
                   a + b + std::vector<TestTensor>{{rows_key, {1, 8}}}),
             "LoRA on a table whose rows the adapter also replaces"));
  auto const copy = load(with(""), {{key + "base_layer.weight", {16, 8}}});
  REQUIRE(copy);
  CHECK(copy->raw_overlay.empty());
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
  CHECK_FALSE(digest(with(""), {}, {.clip_vocabulary = true}) == plain);
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
