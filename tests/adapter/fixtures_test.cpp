// SPDX-License-Identifier: AGPL-3.0-only
//
// The real adapters that PEFT wrote: each loads or is refused by name, and each adapted linear's delta is
// PEFT's.
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adapter_files.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/adapter/model_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
#include "atlas/lora/reference/delta.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

ModelShape shape_of(std::string const& folder) {
  return good(model_shape(good(read_model_config(folder + "/config.json"))));
}

// Our float32 delta of one pair for `rows` rows of x.
template <class Pair>
std::vector<float> delta_of(Pair const& pair, std::vector<float> const& x, std::size_t rows) {
  std::vector<float> const a = f32_of(pair.a);
  std::vector<float> const b = f32_of(pair.b);
  std::vector<float> const bias = pair.bias ? f32_of(*pair.bias) : std::vector<float>{};
  RouteCell<float> const cell{
      a.data(), b.data(), bias.empty() ? nullptr : bias.data(), pair.scale, pair.rank, pair.rank, 0};
  std::int64_t const k_in = pair.a.shape[1];
  std::int64_t const n_out = pair.b.shape[0];
  RouteTable<float> const table{&cell, sizeof cell, 1, pair.rank, k_in, n_out};
  std::vector<float> y(rows * static_cast<std::size_t>(n_out));
  std::vector<float> xa(static_cast<std::size_t>(pair.rank));
  std::vector<std::int32_t> const slots(rows, 0);
  reference_delta<float, float>(table, slots, x.data(), k_in, y.data(), n_out, xa);
  return y;
}

// Compares every dense delta in an adapter's expected.safetensors; how many there were.
std::size_t compare_with_peft(std::string const& folder, Adapter const& adapter) {
  auto const expected = SafetensorsFile::open(folder + "/expected.safetensors");
  REQUIRE_MESSAGE(expected, (expected ? "" : expected.error().message));
  std::size_t compared = 0;
  for (AdapterPair const& pair : adapter.pairs) {
    constexpr std::string_view before = "base_model.model.", after = ".lora_A.weight";
    std::string const module =
        pair.a.name.substr(before.size(), pair.a.name.size() - before.size() - after.size());
    CAPTURE(module);
    std::vector<float> const x = f32_of(good(expected->read(module + "|x")));
    std::vector<float> const theirs = f32_of(good(expected->read(module + "|delta")));
    std::vector<float> const ours = delta_of(pair, x, 3);
    REQUIRE(ours.size() == theirs.size());
    float largest = 0.0F;
    float worst = 0.0F;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      REQUIRE(std::isfinite(ours[i]));
      largest = std::max(largest, std::abs(theirs[i]));
      worst = std::max(worst, std::abs(ours[i] - theirs[i]));
    }
    CHECK(largest > 0.0F);
    CHECK(worst <= 1e-5F * largest);
    ++compared;
  }
  return compared;
}

// The change of a weight `[n_out, k_in]`: our delta of every unit row.
template <class Pair>
std::vector<float> change_of(Pair const& pair) {
  std::vector<float> const a = f32_of(pair.a);
  std::vector<float> const b = f32_of(pair.b);
  RouteCell<float> const cell{a.data(), b.data(), nullptr, pair.scale, pair.rank, pair.rank, 0};
  auto const k_in = static_cast<std::size_t>(pair.a.shape[1]),
             n_out = static_cast<std::size_t>(pair.b.shape[0]);
  RouteTable<float> const table{&cell, sizeof cell, 1, pair.rank, pair.a.shape[1], pair.b.shape[0]};
  std::vector<float> x(k_in), y(n_out), xa(static_cast<std::size_t>(pair.rank)), change(n_out * k_in);
  for (std::size_t k = 0; k < k_in; ++k) {
    std::fill(x.begin(), x.end(), 0.0F);
    std::fill(y.begin(), y.end(), 0.0F);
    x[k] = 1.0F;
    std::int32_t const slot = 0;
    reference_delta<float, float>(table, {&slot, 1}, x.data(), 0, y.data(), 0, xa);
    for (std::size_t n = 0; n < n_out; ++n) change[n * k_in + k] = y[n];
  }
  return change;
}

bool agrees(std::span<float const> ours, std::span<float const> theirs) {
  REQUIRE(ours.size() == theirs.size());
  float largest = 0.0F;
  float worst = 0.0F;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    REQUIRE(std::isfinite(ours[i]));
    largest = std::max(largest, std::abs(theirs[i]));
    worst = std::max(worst, std::abs(ours[i] - theirs[i]));
  }
  return largest > 0.0F && worst <= 1e-5F * largest;
}

// Compares every router's and expert's change of weight with PEFT's; how many there were.
std::size_t compare_weights(std::string const& folder, Adapter const& adapter) {
  auto const expected = SafetensorsFile::open(folder + "/expected.safetensors");
  REQUIRE(expected);
  std::size_t compared = 0;
  auto const module_of = [](HostTensor const& tensor) {
    constexpr std::string_view before = "base_model.model.", after = ".lora_A.weight";
    return tensor.name.substr(before.size(), tensor.name.size() - before.size() - after.size());
  };
  for (RouterPair const& pair : adapter.routers) {
    std::string const module = module_of(pair.a);
    CAPTURE(module);
    if (expected->find(module + "|x") != nullptr) {
      CHECK(agrees(delta_of(pair, f32_of(good(expected->read(module + "|x"))), 3),
                   f32_of(good(expected->read(module + "|delta")))));
    } else {
      CHECK(agrees(change_of(pair), f32_of(good(expected->read(module + "|weight|delta_weight")))));
    }
    ++compared;
  }
  for (ExpertPair const& pair : adapter.experts) {
    std::string const prefix = "model.layers." + std::to_string(pair.layer) + ".mlp.experts";
    bool const down = pair.linear == ExpertLinear::down;
    constexpr char const* names[] = {"gate_proj", "up_proj", "down_proj"};
    std::string const module =
        prefix + "." + std::to_string(pair.expert) + "." + names[static_cast<int>(pair.linear)];
    CAPTURE(module);
    ++compared;
    if (expected->find(module + "|x") != nullptr) {
      CHECK(agrees(delta_of(pair, f32_of(good(expected->read(module + "|x"))), 3),
                   f32_of(good(expected->read(module + "|delta")))));
      continue;
    }
    std::vector<float> const theirs = f32_of(good(expected->read(
        prefix + (down ? "|down_proj|delta_weight" : ".base_layer|gate_up_proj|delta_weight"))));
    std::vector<float> const ours = change_of(pair);
    std::size_t const part = pair.linear == ExpertLinear::up ? 1 : 0;
    std::size_t const parts = down ? 1 : 2;
    std::size_t const first = (static_cast<std::size_t>(pair.expert) * parts + part) * ours.size();
    CHECK(agrees(ours, std::span(theirs).subspan(first, ours.size())));
  }
  return compared;
}

struct Real {
  char const* name;
  std::size_t pairs;
  std::size_t experts, routers, overlay;
  std::int32_t max_rank;
  std::int64_t modules = 0;  // of the file; 0: as many as pairs
  std::size_t warnings = 0;
};

}  // namespace

TEST_CASE("every real adapter that is served loads whole and computes what PEFT computes") {
  for (Real const& real : {Real{"llama_r8_all", 21, 0, 0, 0, 8},
                           Real{"llama_r16_bf16", 21, 0, 0, 0, 16},
                           Real{"llama_r16_f16_qv", 6, 0, 0, 0, 16},
                           Real{"llama_r12_rslora", 21, 0, 0, 0, 12},
                           Real{"llama_r1", 6, 0, 0, 0, 1},
                           Real{"llama_r64", 21, 0, 0, 0, 64},
                           Real{"llama_patterns", 21, 0, 0, 0, 16},
                           Real{"llama_layers", 8, 0, 0, 0, 8},
                           Real{"llama_all_linear", 21, 0, 0, 0, 8},
                           Real{"llama_lora_bias", 6, 0, 0, 0, 8},
                           Real{"llama_bias_all", 3, 0, 0, 0, 8},
                           Real{"llama_save_head", 3, 0, 0, 2, 8},
                           Real{"qwen3_trainable_tokens_tied", 8, 0, 0, 1, 8},
                           Real{"llama_trainable_tokens_untied", 3, 0, 0, 2, 8},
                           Real{"llama_embed_lora", 3, 0, 0, 2, 8, 0, 1},  // a copy of the base's embedding
                           Real{"qwen3moe_attn", 8, 0, 0, 0, 8},
                           Real{"qwen3moe_fused_experts", 2, 24, 0, 0, 4, 6},
                           Real{"qwen3moe_router", 2, 0, 2, 0, 4, 4},
                           Real{"qwen3next_hybrid", 7, 0, 0, 0, 8},
                           Real{"per_expert_linears", 6, 24, 2, 0, 4, 32},
                           Real{"phi3_fused_qkv", 8, 0, 0, 0, 8},
                           Real{"llama_expressions", 8, 0, 0, 0, 8},
                           Real{"qwen3moe_all_linear", 8, 24, 2, 0, 8, 14}}) {
    CAPTURE(real.name);
    std::string const folder = test_data() + "/peft/" + real.name;
    auto const adapter = load_adapter(folder, shape_of(folder));
    REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
    CHECK(adapter->pairs.size() == real.pairs);
    CHECK(adapter->experts.size() == real.experts);
    CHECK(adapter->routers.size() == real.routers);
    std::size_t tables = 0;
    adapter->raw_overlay.for_each([&](HostTensor const&) { ++tables; });
    CHECK(tables == real.overlay);
    CHECK(adapter->max_rank == real.max_rank);
    CHECK(adapter->modules_applied ==
          (real.modules == 0 ? static_cast<std::int64_t>(real.pairs) : real.modules));
    CHECK(adapter->modules_present == adapter->modules_applied);
    CHECK(adapter->warnings.size() == real.warnings);
    CHECK(compare_with_peft(folder, *adapter) == real.pairs);
    CHECK(compare_weights(folder, *adapter) == real.experts + real.routers);
  }
}

TEST_CASE(
    "LoRA on the head computes what PEFT computes, and the base's table that comes with it is left out") {
  std::string const folder = test_data() + "/peft/llama_lm_head";
  auto const adapter = load_adapter(folder, shape_of(folder));
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  CHECK(adapter->pairs.back().site.layer == model_wide);
  REQUIRE(adapter->warnings.size() == 1);
  CHECK(says(adapter->warnings[0], "lm_head.base_layer.weight' is a copy"));
  CHECK(compare_with_peft(folder, *adapter) == 4);
}

TEST_CASE(
    "a model of no known family is served as its engine describes it, whichever way it stores its weights") {
  std::string const folder = test_data() + "/peft/gpt2_fan_in_fan_out";
  auto const config = read_model_config(folder + "/config.json");
  REQUIRE(config);
  CHECK(model_shape(*config).error().code == Errc::unsupported);
  auto const shape = ModelShape::create({.num_layers = 2,
                                         .modules = {{"attn.c_attn", 192, 64, {0, 1}, {64, 64, 64}},
                                                     {"attn.c_proj", 64, 64, {0, 1}},
                                                     {"mlp.c_fc", 256, 64, {0, 1}},
                                                     {"mlp.c_proj", 64, 256, {0, 1}}}});
  REQUIRE(shape);
  auto const adapter = load_adapter(folder, *shape);
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  CHECK(adapter->warnings.empty());
  CHECK(compare_with_peft(folder, *adapter) == 8);
}

TEST_CASE("an adapter that was initialised from its base is served on the changed base alone") {
  std::string const folder = test_data() + "/peft/llama_olora";
  auto const refused = load_adapter(folder, shape_of(folder));
  REQUIRE_FALSE(refused);
  CHECK(says(refused.error().message,
             "field 'init_lora_weights': the string \"olora\" changes the base model"));
  auto const adapter = load_adapter(folder, shape_of(folder), {.base_is_converted = true});
  REQUIRE_MESSAGE(adapter, (adapter ? "" : adapter.error().message));
  CHECK(compare_with_peft(folder, *adapter) == 3);
}

TEST_CASE("the real adapters that are not served are refused by each tensor and field") {
  std::string const dora = test_data() + "/peft/llama_dora";
  auto const with_magnitudes = load_adapter(dora, shape_of(dora));
  REQUIRE_FALSE(with_magnitudes);
  CHECK(with_magnitudes.error().code == Errc::unsupported);
  CHECK(lines(with_magnitudes.error().message) == 7);  // use_dora and six magnitudes
  CHECK(says(with_magnitudes.error().message, "field 'use_dora'"));
  CHECK(says(with_magnitudes.error().message, "layers.2.self_attn.v_proj.lora_magnitude_vector'"));
}

TEST_CASE("the adapters of the whole tiny models load with their scales") {
  ModelShape const llama = shape_of(test_data() + "/e2e/llama");
  auto const a = load_adapter(test_data() + "/e2e/llama/adapters/a", llama);
  auto const b = load_adapter(test_data() + "/e2e/llama/adapters/b", llama);
  auto const c = load_adapter(test_data() + "/e2e/llama/adapters/c", llama);
  REQUIRE(a);
  REQUIRE(b);
  REQUIRE(c);
  CHECK(a->pairs.size() == 21);
  CHECK(b->pairs[0].scale == 8.0F);  // 32 / sqrt(16)
  CHECK(c->max_rank == 12);
  CHECK(c->raw_overlay.embedding.ids == std::vector<std::int64_t>{3, 5, 319});
  CHECK(c->raw_overlay.head.ids == std::vector<std::int64_t>{9, 11});
  for (AdapterPair const& pair : c->pairs) CHECK(pair.scale == (pair.rank == 12 ? 0.5F : 2.0F));  // 6/12, 8/4
  CHECK_FALSE(a->digest == b->digest);

  ModelShape const moe = shape_of(test_data() + "/e2e/qwen3moe");
  auto const experts = load_adapter(test_data() + "/e2e/qwen3moe/adapters/a", moe);
  auto const router = load_adapter(test_data() + "/e2e/qwen3moe/adapters/b", moe);
  REQUIRE_MESSAGE(experts, (experts ? "" : experts.error().message));
  REQUIRE_MESSAGE(router, (router ? "" : router.error().message));
  CHECK(experts->experts.size() == 2 * 8 * 3);
  CHECK(experts->experts[0].scale == 2.0F);  // 8 / 4
  CHECK(router->routers.size() == 2);
  CHECK(router->routers[0].scale == 1.0F);  // 8 / 8
}
