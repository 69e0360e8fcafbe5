// SPDX-License-Identifier: AGPL-3.0-only
//
// The token rows of real adapters, built against the tables of their base models: the rows that PEFT puts
// there, and no others.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../adapter/adapter_files.hpp"
#include "atlas/lora/overlay/build.hpp"
#include "atlas/peft.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

using Ids = std::vector<std::int32_t>;

std::vector<float> read(std::string const& file, std::string const& name) {
  return f32_of(good(good(SafetensorsFile::open(file)).read(name)));
}

// A real adapter, built against the base's tables of 320 tokens of 64 elements.
struct Built {
  std::string folder;
  std::vector<float> embedding, head;
  Adapter adapter;

  Built(std::string const& name, std::string const& suffix, std::string const& head_suffix)
      : folder(test_data() + "/peft/" + name),
        embedding(read(folder + "/base_subset.safetensors", "model.embed_tokens" + suffix)),
        head(read(folder + "/base_subset.safetensors", "lm_head" + head_suffix)) {
    ModelShape const shape = good(model_shape(good(read_model_config(folder + "/config.json"))));
    HostServedTable<float> embedding_table(embedding.data(), 64), head_table(head.data(), 64);
    adapter = good(build_overlay(good(load_adapter(folder, shape)), shape,
                                 ServedTables<HostServedTable<float>>{&embedding_table, &head_table}));
  }

  [[nodiscard]] std::vector<float> from_file(std::string const& name) const {
    return read(folder + "/adapter_model.safetensors", "base_model.model." + name);
  }
};

// Which rows of two tables differ.
Ids differing(std::vector<float> const& a, std::vector<float> const& b) {
  Ids ids;
  for (std::size_t row = 0; row < 320; ++row) {
    auto const at = static_cast<std::ptrdiff_t>(row * 64);
    if (!std::equal(a.begin() + at, a.begin() + at + 64, b.begin() + at)) {
      ids.push_back(static_cast<std::int32_t>(row));
    }
  }
  return ids;
}

// `table` with an adapter's own rows in place.
std::vector<float> replaced(std::vector<float> table, OverrideRows const& own) {
  std::vector<float> const rows = f32_of(own.rows);
  for (std::size_t i = 0; i < own.ids.size(); ++i) {
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(i * 64), 64,
                table.begin() + static_cast<std::ptrdiff_t>(own.ids[i]) * 64);
  }
  return table;
}

}  // namespace

TEST_CASE("qwen3_trainable_tokens_tied: three absolute rows, which the head that is the embedding shares") {
  Built const built("qwen3_trainable_tokens_tied", ".token_adapter.weight", ".token_adapter.weight");
  TokenOverlay const& overlay = built.adapter.overlay;
  CHECK(overlay.embedding.ids == Ids{3, 7, 319});
  CHECK(f32_of(overlay.embedding.rows) ==
        built.from_file("model.embed_tokens.token_adapter.trainable_tokens_delta"));
  CHECK(overlay.head.empty());
  CHECK(overlay.head_is_embedding);
}

TEST_CASE("llama_trainable_tokens_untied: other rows in the embedding than in the head") {
  Built const built("llama_trainable_tokens_untied", ".token_adapter.weight", ".token_adapter.weight");
  TokenOverlay const& overlay = built.adapter.overlay;
  CHECK(overlay.embedding.ids == Ids{0, 5});
  CHECK(overlay.head.ids == Ids{9});
  CHECK(f32_of(overlay.embedding.rows) ==
        built.from_file("model.embed_tokens.token_adapter.trainable_tokens_delta"));
  CHECK(f32_of(overlay.head.rows) == built.from_file("lm_head.token_adapter.trainable_tokens_delta"));
  CHECK_FALSE(overlay.head_is_embedding);
}

TEST_CASE("llama_save_head: whole tables become the rows that differ from the base's") {
  Built const built("llama_save_head", ".original_module.weight", ".original_module.weight");
  TokenOverlay const& overlay = built.adapter.overlay;
  std::vector<float> const embedding = built.from_file("model.embed_tokens.weight");
  std::vector<float> const head = built.from_file("lm_head.weight");
  CHECK(overlay.embedding.ids == differing(embedding, built.embedding));
  CHECK(overlay.head.ids == differing(head, built.head));
  CHECK_FALSE(overlay.head.empty());
  CHECK(replaced(built.embedding, overlay.embedding) == embedding);
  CHECK(replaced(built.head, overlay.head) == head);
}

TEST_CASE("llama_embed_lora: LoRA on the embedding becomes the rows that PEFT looks up") {
  Built const built("llama_embed_lora", ".weight", ".weight");
  TokenOverlay const& overlay = built.adapter.overlay;
  std::vector<float> const a = built.from_file("model.embed_tokens.lora_embedding_A");  // [8, 320]
  std::vector<float> const b = built.from_file("model.embed_tokens.lora_embedding_B");  // [64, 8]
  std::vector<float> const ours = replaced(built.embedding, overlay.embedding);
  double worst = 0.0, largest = 0.0;
  for (std::size_t token = 0; token < 320; ++token) {
    for (std::size_t i = 0; i < 64; ++i) {
      double delta = 0.0;
      for (std::size_t j = 0; j < 8; ++j) {
        delta += static_cast<double>(a[j * 320 + token]) * static_cast<double>(b[i * 8 + j]);
      }
      delta *= 2.0;  // lora_alpha 16 / r 8
      double const base = static_cast<double>(built.embedding[token * 64 + i]);
      worst = std::max(worst, std::abs(static_cast<double>(ours[token * 64 + i]) - base - delta));
      largest = std::max(largest, std::abs(delta));
    }
  }
  CHECK(largest > 0.0);
  CHECK(worst <= 1e-6);
  CHECK(overlay.embedding.ids.size() == 320);  // every token's row moves
  CHECK(overlay.head.empty());
  CHECK_FALSE(overlay.head_is_embedding);
}
