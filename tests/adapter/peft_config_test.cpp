// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/peft_config.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "adapter_files.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

// A good configuration with more fields.
std::string with(std::string const& fields) {
  return R"({"peft_type":"LORA","r":16,"lora_alpha":32,"target_modules":["q_proj"])" +
         (fields.empty() ? "" : "," + fields) + "}";
}

PeftConfig good(std::string const& text, LoadOptions const& options = {}) {
  return testing::good(parse_peft_config(text, "c.json", options));
}

Error bad(std::string const& text) {
  CAPTURE(text);
  return testing::bad(parse_peft_config(text, "c.json"));
}

constexpr char const* path = "model.layers.3.self_attn.q_proj";

}  // namespace

TEST_CASE("the scale is alpha by r, or by the root of r with rsLoRA, for every kind of module") {
  CHECK(good(with("")).scale_of(path) == 2.0F);
  PeftConfig const rs = good(R"({"r":16,"lora_alpha":16,"use_rslora":true,"target_modules":["q_proj"]})");
  CHECK(rs.scale_of(path) == 4.0F);
  CHECK(rs.scale_of("model.layers.3.mlp.experts.5.down_proj") == 4.0F);
  CHECK(rs.scale_of("model.layers.3.mlp.gate") == 4.0F);
  CHECK(good(with(R"("use_rslora":false)")).scale_of(path) == 2.0F);
  CHECK(good(with(R"("use_rslora":null)")).scale_of(path) == 2.0F);
  CHECK(good(R"({"r":12,"lora_alpha":24,"use_rslora":true})").scale_of(path) ==
        static_cast<float>(24.0 / std::sqrt(12.0)));
}

TEST_CASE("an alpha that is absent or no number is refused by name, and never 0 or a default") {
  CHECK(bad(R"({"r":16,"target_modules":["q_proj"]})").message == "c.json: field 'lora_alpha': absent");
  auto const alpha = [](std::string const& text) {
    return R"({"r":16,"lora_alpha":)" + text + R"(,"target_modules":["q_proj"]})";
  };
  CHECK(bad(alpha("null")).message == "c.json: field 'lora_alpha': null is not a number");
  CHECK(bad(alpha("\"16\"")).message == "c.json: field 'lora_alpha': the string \"16\" is not a number");
  CHECK(bad(alpha("true")).code == Errc::bad_config);
  CHECK(bad(alpha("NaN")).message == "c.json: field 'lora_alpha': NaN is not a number");
  CHECK(says(bad(alpha("1e400")).message, "field 'lora_alpha': the number 1e400"));
  CHECK(good(alpha("0")).scale_of(path) == 0.0F);
  CHECK(good(alpha("-8")).scale_of(path) == -0.5F);
  CHECK(good(alpha("16.5")).scale_of(path) == 1.03125F);
  CHECK(good(alpha("16")).scale_of(path) == 1.0F);
}

TEST_CASE("a rank that is absent or no positive integer is refused by name") {
  CHECK(bad(R"({"lora_alpha":16})").message == "c.json: field 'r': absent");
  for (char const* r : {"0", "-1", "1.5", "8.0", "\"8\"", "null", "true", "[8]", "2147483648", "1e3"}) {
    CAPTURE(r);
    Error const error = bad(std::string(R"({"lora_alpha":16,"r":)") + r + "}");
    CHECK(error.code == Errc::bad_config);
    CHECK(says(error.message, "c.json: field 'r': "));
  }
}

TEST_CASE("a rank beyond any adapter's is refused by name, also that of a pattern") {
  auto const rank = [](std::string const& r) { return R"({"lora_alpha":16,"r":)" + r + "}"; };
  CHECK(good(rank("65536")).r == 65536);
  Error const error = bad(rank("65537"));
  CHECK(error.code == Errc::bad_config);
  CHECK(error.message == "c.json: field 'r': 65537 is beyond the largest rank, 65536");
  CHECK(bad(with(R"("rank_pattern":{"q_proj":16777216})")).message ==
        "c.json: field 'rank_pattern.q_proj': 16777216 is beyond the largest rank, 65536");
}

TEST_CASE(
    "patterns give modules a rank and an alpha of their own, the first that matches in the file's order") {
  PeftConfig const config =
      good(with(R"("rank_pattern":{"q_proj":4,"layers.1.mlp.down_proj":8,"down_proj":2},)"
                R"("alpha_pattern":{"layers\\.[01]\\..*":8,"q_proj":64.5})"));
  CHECK(config.rank_of("model.layers.1.self_attn.q_proj") == 4);
  CHECK(config.rank_of("model.layers.1.mlp.down_proj") == 8);
  CHECK(config.rank_of("model.layers.0.mlp.down_proj") == 2);
  CHECK(config.rank_of("model.layers.0.self_attn.k_proj") == 16);
  CHECK(config.rank_of("model.layers.0.self_attn.xq_proj") == 16);
  CHECK(config.alpha_of("model.layers.1.self_attn.q_proj") == 8.0);
  CHECK(config.alpha_of("model.layers.2.self_attn.q_proj") == 64.5);
  CHECK(config.alpha_of("model.layers.2.self_attn.k_proj") == 32.0);
  CHECK(config.scale_of("model.layers.1.self_attn.q_proj") == 2.0F);     // 8 / 4
  CHECK(config.scale_of("model.layers.2.self_attn.q_proj") == 16.125F);  // 64.5 / 4
}

TEST_CASE("a parameter that target_parameters names has its own name in the patterns") {
  PeftConfig const config =
      good(with(R"("target_parameters":["down_proj","mlp.experts.gate_up_proj","gate.weight"],)"
                R"("rank_pattern":{".*\\.gate_up_proj":32,"mlp.gate.weight":4},)"
                R"("alpha_pattern":{"experts.down_proj":8})"));
  CHECK(config.key_of("model.layers.0.mlp.experts.base_layer") == "model.layers.0.mlp.experts.gate_up_proj");
  CHECK(config.key_of("model.layers.0.mlp.experts") == "model.layers.0.mlp.experts.down_proj");
  CHECK(config.key_of("model.layers.0.mlp.gate") == "model.layers.0.mlp.gate.weight");
  CHECK(config.key_of("model.layers.0.self_attn.q_proj") == "model.layers.0.self_attn.q_proj");
  CHECK(config.rank_of("model.layers.0.mlp.experts.base_layer") == 32);
  CHECK(config.rank_of("model.layers.0.mlp.experts") == 16);
  CHECK(config.rank_of("model.layers.0.mlp.gate") == 4);
  CHECK(config.scale_of("model.layers.0.mlp.experts") == 0.5F);  // 8 / 16
  // Alone, a parameter is not wrapped around another, whichever it is.
  PeftConfig const alone = good(with(R"("target_parameters":["mlp.experts.gate_up_proj"])"));
  CHECK(alone.key_of("model.layers.0.mlp.experts") == "model.layers.0.mlp.experts.gate_up_proj");
}

TEST_CASE("patterns that are no patterns or have no values are refused by their key") {
  CHECK(says(bad(with(R"~("rank_pattern":{"q_(?!x)":4})~")).message,
             "field 'rank_pattern.q_(?!x)': a pattern that is not"));
  CHECK(bad(with(R"~("rank_pattern":{"q_(?!x)":4})~")).code == Errc::unsupported);
  CHECK(says(bad(with(R"("rank_pattern":{"q_proj":0})")).message,
             "field 'rank_pattern.q_proj': 0 is not an integer"));
  CHECK(says(bad(with(R"("rank_pattern":{"q_proj":"8"})")).message, "field 'rank_pattern.q_proj'"));
  CHECK(says(bad(with(R"("alpha_pattern":{"q_proj":null})")).message, "field 'alpha_pattern.q_proj': null"));
  CHECK(says(bad(with(R"("alpha_pattern":["q_proj"])")).message,
             "field 'alpha_pattern': a list is not an object"));
  CHECK(says(bad(with(R"("rank_pattern":{"q_proj":4,"q_proj":8})")).message,
             "'rank_pattern.q_proj': said twice"));
}

TEST_CASE("patterns that are too large together are refused by the key that goes too far") {
  // More than 1000 steps a key, so the 263rd at the latest goes beyond 2^18 = 262144.
  auto const entries = [](int first, int last) {
    std::string out;
    for (int i = first; i < last; ++i)
      out += (out.empty() ? "\"" : ",\"") + std::to_string(i) + "a{1000}\":4";
    return out;
  };
  CHECK(good(with("\"rank_pattern\":{" + entries(0, 250) + "}")).rank_pattern.size() == 250);
  Error const error = bad(with("\"rank_pattern\":{" + entries(0, 3000) + "}"));
  CHECK(error.code == Errc::unsupported);
  CHECK(lines(error.message) == 1);
  CHECK(says(error.message, "a{1000}': the patterns up to here are too large together"));
  CHECK(
      says(bad(with("\"rank_pattern\":{" + entries(0, 200) + "},\"alpha_pattern\":{" + entries(0, 200) + "}"))
               .message,
           "field 'alpha_pattern."));
}

TEST_CASE("every technique that is more than B A is refused by its field") {
  struct Row {
    char const* field;
    char const* value;
    char const* name;
  };
  for (Row const& row :
       {Row{"use_dora", "true", "DoRA"}, Row{"alora_invocation_tokens", "[1,2]", "aLoRA"},
        Row{"layer_replication", "[[0,2],[1,3]]", "layer replication"}, Row{"use_qalora", "true", "QALoRA"},
        Row{"use_bdlora", "{\"nblocks\":2}", "BD-LoRA"}, Row{"kasa_config", "{}", "KaSA"},
        Row{"velora_config", "{}", "VeLoRA"}, Row{"monteclora_config", "{}", "MonteCLoRA"},
        Row{"arrow_config", "{\"top_k\":3}", "Arrow"}, Row{"megatron_config", "{}", "Megatron"}}) {
    Error const error = bad(with(std::string("\"") + row.field + "\":" + row.value));
    CHECK(error.code == Errc::unsupported);
    CHECK(says(error.message, std::string("field '") + row.field + "': " + row.name));
    good(with(std::string("\"") + row.field + "\":null"));
  }
  CHECK(good(with(R"("use_dora":false,"use_qalora":false,"qalora_group_size":16)")).r == 16);
}

TEST_CASE("an initialisation that changed the base is refused unless the base is the changed one") {
  for (char const* name : {"pissa", "pissa_niter_16", "PISSA", "olora", "loftq", "corda", "lora_ga"}) {
    std::string const text = with(std::string(R"("init_lora_weights":")") + name + "\"");
    Error const error = bad(text);
    CHECK(error.code == Errc::unsupported);
    CHECK(says(error.message, "field 'init_lora_weights': the string"));
    CHECK(says(error.message, "changes the base model"));
    CHECK(good(text, {.base_is_converted = true}).r == 16);
  }
  for (char const* value :
       {"true", "false", "null", "\"gaussian\"", "\"eva\"", "\"orthogonal\"", "\"mica\""}) {
    good(with(std::string("\"init_lora_weights\":") + value));
  }
  CHECK(says(bad(with(R"("init_lora_weights":"newest")")).message, "not a known initialisation"));
  CHECK(says(bad(with(R"("init_lora_weights":3)")).message, "not a known initialisation"));
  CHECK_FALSE(
      parse_peft_config(with(R"("init_lora_weights":"newest")"), "c.json", {.base_is_converted = true}));
}

TEST_CASE("another kind of adapter is refused, LORA in any case or no kind is not") {
  CHECK(bad(R"({"peft_type":"IA3","r":8,"lora_alpha":8})").message ==
        "c.json: field 'peft_type': the string \"IA3\" is not LORA");
  CHECK(bad(R"({"peft_type":7,"r":8,"lora_alpha":8})").code == Errc::unsupported);
  good(R"({"peft_type":"lora","r":8,"lora_alpha":8})");
  good(R"({"r":8,"lora_alpha":8})");
  CHECK(bad("[]").code == Errc::bad_config);
  CHECK(says(bad("[]").message, "an object expected"));
}

TEST_CASE("a field nobody knows is refused unless it is switched off") {
  for (char const* value : {"true", "1", "0", "0.0", "\"on\"", "[1]", "{\"a\":1}"}) {
    Error const error = bad(with(std::string("\"use_newest\":") + value));
    CHECK(error.code == Errc::unsupported);
    CHECK(says(error.message, "field 'use_newest': not a known field"));
  }
  for (char const* value : {"false", "null", "\"\"", "[]", "{}"})
    good(with(std::string("\"use_newest\":") + value));
}

TEST_CASE("whole modules may be saved for the embedding and the head alone") {
  CHECK(good(with(R"("modules_to_save":["lm_head","model.embed_tokens"])")).modules_to_save.size() == 2);
  CHECK(bad(with(R"("modules_to_save":["embed_tokens","score"])")).message ==
        "c.json: field 'modules_to_save': 'score' is neither embed_tokens nor lm_head");
  CHECK(bad(with(R"("modules_to_save":["my_lm_head"])")).code == Errc::unsupported);
  LoadOptions const renames{.prefix_map = {{"transformer.wte", "model.embed_tokens"}, {"score", "lm_head"}}};
  CHECK(good(with(R"("modules_to_save":["transformer.wte","score"],"trainable_token_indices":{"score":[3]})"),
             renames)
            .trainable_tokens.size() == 1);
}

TEST_CASE(
    "token ids are kept in the order given; negative ones, ones said twice and other types are refused") {
  PeftConfig const list = good(with(R"("trainable_token_indices":[9,2])"));
  REQUIRE(list.trainable_tokens.size() == 1);
  CHECK(list.trainable_tokens[0].module == "embed_tokens");
  CHECK(list.trainable_tokens[0].ids == std::vector<std::int64_t>{9, 2});
  PeftConfig const object =
      good(with(R"("trainable_token_indices":{"embed_tokens":[0,5],"lm_head":[9],"model.lm_head":null})"));
  REQUIRE(object.trainable_tokens.size() == 2);
  CHECK(object.trainable_tokens[1].module == "lm_head");
  for (char const* ids :
       {"[5,5]", "[-1]", "[1.0]", "[\"1\"]", "7", "{\"embed_tokens\":[3,2,3]}", "{\"lm_head\":4}"}) {
    Error const error = bad(with(std::string("\"trainable_token_indices\":") + ids));
    CHECK(error.code == Errc::bad_config);
    CHECK(says(error.message, "field 'trainable_token_indices"));
  }
  CHECK(says(bad(with(R"("trainable_token_indices":[5,5])")).message, "5 is said twice"));
  CHECK(bad(with(R"("trainable_token_indices":{"score":[1]})")).code == Errc::unsupported);
}

TEST_CASE("targets are ends of paths in a list, or whole paths by an expression") {
  PeftConfig const names = good(with(""));
  CHECK(names.targets(path));
  CHECK(names.targets("q_proj"));
  CHECK_FALSE(names.targets("model.layers.3.self_attn.xq_proj"));
  CHECK_FALSE(names.targets("model.layers.3.self_attn.k_proj"));
  PeftConfig const expression = good(R"({"r":8,"lora_alpha":8,"target_modules":".*\\.(q|k)_proj"})");
  CHECK(expression.targets(path));
  CHECK_FALSE(expression.targets("model.layers.3.self_attn.v_proj"));
  CHECK_FALSE(expression.targets("model.layers.3.self_attn.q_proj.inner"));
  PeftConfig const linear = good(R"({"r":8,"lora_alpha":8,"target_modules":"all-linear"})");
  CHECK(linear.targets(path));
  CHECK_FALSE(linear.targets("lm_head"));
  PeftConfig const excluded = good(with(R"("exclude_modules":["layers.3.self_attn.q_proj"])"));
  CHECK_FALSE(excluded.targets(path));
  CHECK(excluded.targets("model.layers.13.self_attn.q_proj"));
  CHECK_FALSE(good(with(R"("exclude_modules":".*layers\\.3.*")")).targets(path));
  PeftConfig const unknown = good(R"({"r":8,"lora_alpha":8,"target_modules":"(?!x).*"})");
  CHECK_FALSE(unknown.target_modules.understood());
  CHECK(says(bad(with(R"("exclude_modules":5)")).message, "field 'exclude_modules'"));
}

TEST_CASE("layers_to_transform is one layer or a list, and counts by layers_pattern where there is one") {
  PeftConfig const one = good(with(R"("layers_to_transform":3)"));
  CHECK(one.targets(path));
  CHECK_FALSE(one.targets("model.layers.2.self_attn.q_proj"));
  CHECK_FALSE(one.targets("q_proj.q_proj"));  // no layer at all
  PeftConfig const list = good(with(R"("layers_to_transform":[0,2])"));
  CHECK(list.targets("model.layers.2.self_attn.q_proj"));
  CHECK_FALSE(list.targets(path));
  PeftConfig const patterned = good(with(R"("layers_to_transform":[1],"layers_pattern":"blocks")"));
  CHECK(patterned.targets("model.layers.0.blocks.1.q_proj"));
  CHECK_FALSE(patterned.targets("model.layers.1.blocks.0.q_proj"));
  for (char const* layers : {"-1", "1.5", "\"1\"", "[0,-2]", "{}"}) {
    CHECK(says(bad(with(std::string("\"layers_to_transform\":") + layers)).message,
               "field 'layers_to_transform'"));
  }
}

TEST_CASE("fields of the wrong type are refused by name") {
  for (char const* field :
       {R"("use_rslora":"yes")", R"("lora_bias":1)", R"("fan_in_fan_out":"no")", R"("bias":"some")",
        R"("bias":true)", R"("target_parameters":{"a":1})", R"("modules_to_save":[3])",
        R"("layers_pattern":4)", R"("ensure_weight_tying":[])"}) {
    Error const error = bad(with(field));
    CHECK(error.code == Errc::bad_config);
    std::string const text = field;
    CHECK(says(error.message, "field '" + text.substr(1, text.find('"', 1) - 1) + "': "));
  }
  good(with(
      R"("fan_in_fan_out":true,"bias":"all","lora_dropout":0.1,"task_type":"CAUSAL_LM","revision":"main")"));
}

TEST_CASE("every fault of a configuration is said at once, under the code of the first") {
  Error const error = bad(R"~({"r":0,"lora_alpha":"x","use_dora":true,"new":1,"modules_to_save":["score"],
                              "rank_pattern":{"(?=a)":1}})~");
  CHECK(lines(error.message) == 6);
  CHECK(error.code == Errc::bad_config);
  for (char const* field :
       {"'r'", "'lora_alpha'", "'use_dora'", "'new'", "'modules_to_save'", "'rank_pattern."}) {
    CHECK(says(error.message, field));
  }
}

TEST_CASE("of very many faults a thousand are said and the rest is counted") {
  auto const unknown = [](int count) {
    std::string out;
    for (int i = 0; i < count; ++i) out += (out.empty() ? "\"u" : ",\"u") + std::to_string(i) + "\":1";
    return out;
  };
  CHECK(lines(bad(with(unknown(1000))).message) == 1000);
  CHECK_FALSE(says(bad(with(unknown(1000))).message, " more"));
  std::string const message = bad(with(unknown(1007))).message;
  CHECK(lines(message) == 1001);
  CHECK(says(message, "field 'u999': "));
  CHECK_FALSE(says(message, "field 'u1000': "));
  CHECK(message.ends_with("\nand 7 more"));
}

TEST_CASE("a file is read with its size bounded") {
  TemporaryFolder const folder;
  CHECK(read_peft_config(folder.write("c.json", with(""))).has_value());
  CHECK(read_peft_config(folder.path() + "/nothing").error().code == Errc::not_found);
  Error const error = read_peft_config(folder.write("l.json", std::string((4U << 20) + 1, ' '))).error();
  CHECK(error.code == Errc::bad_file);
  CHECK(says(error.message, "4194305 bytes, at most 4194304 expected"));
}
