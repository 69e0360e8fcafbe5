// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/overlay/build.hpp"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../outcome.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

constexpr std::int64_t vocab = 8;
constexpr std::int64_t hidden = 4;
using Ids = std::vector<std::int32_t>;

ModelShape model(bool tied) {
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"q", 4, 4, {0}, {}}};
  d.hidden = hidden;
  d.vocab = vocab;
  d.tied_head = tied;
  return *ModelShape::create(d);
}

HostTensor matrix(std::string const& name, std::int64_t rows, std::vector<float> const& values,
                  std::int64_t columns = hidden) {
  HostTensor tensor{name, ElementType::f32, {rows, columns}, std::vector<std::byte>(values.size() * 4)};
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

// Row r of a served table is r, r + 0.25, r + 0.5, r + 0.75: exact in every type.
std::vector<float> table_values() {
  std::vector<float> values;
  for (int row = 0; row < vocab; ++row) {
    for (int i = 0; i < hidden; ++i)
      values.push_back(static_cast<float>(row) + 0.25F * static_cast<float>(i));
  }
  return values;
}

template <Element T>
std::vector<T> served_values() {
  std::vector<T> out;
  for (float const value : table_values()) out.push_back(from_f32<T>(value));
  return out;
}

std::vector<float> values_of(OverrideRows const& own) {
  std::vector<float> out(own.rows.bytes.size() / element_bytes(own.rows.type));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = std::bit_cast<float>(detail::f32_bits_at(own.rows, i));
  }
  return out;
}

Adapter of(RawTokenTable embedding, RawTokenTable head = {}) {
  Adapter adapter;
  adapter.digest = Digest{1, 2};
  adapter.raw_overlay.embedding = std::move(embedding);
  adapter.raw_overlay.head = std::move(head);
  return adapter;
}

RawTokenTable retrained(std::vector<std::int64_t> ids, std::vector<float> const& values) {
  RawTokenTable raw;
  raw.rows = matrix("rows", std::ssize(ids), values);
  raw.ids = std::move(ids);
  return raw;
}

template <Element T = float>
Result<Adapter> build(Adapter adapter, bool tied, OverlayOptions const& options = {}) {
  std::vector<T> const embedding = served_values<T>();
  std::vector<T> head = served_values<T>();
  for (T& value : head) value = from_f32<T>(-to_f32(value));
  HostServedTable<T> served(embedding.data(), hidden);
  HostServedTable<T> served_head(head.data(), hidden);
  return build_overlay(std::move(adapter), model(tied),
                       ServedTables<HostServedTable<T>>{&served, tied ? nullptr : &served_head}, options);
}

}  // namespace

TEST_CASE("retrained rows are the overrides, ascending, each the row that its place in the list says") {
  Adapter const adapter = good(build(of(retrained({7, 5}, {1, 2, 3, 4, 10, 20, 30, 40})), false));
  CHECK(adapter.raw_overlay.empty());
  CHECK(adapter.overlay.embedding.ids == Ids{5, 7});
  CHECK(values_of(adapter.overlay.embedding) == std::vector<float>{10, 20, 30, 40, 1, 2, 3, 4});
  CHECK(adapter.overlay.head.empty());
  CHECK_FALSE(adapter.overlay.head_is_embedding);
  CHECK(adapter.overlay.vocab == vocab);
  CHECK(adapter.overlay.hidden == hidden);
}

TEST_CASE("of a whole table the changed rows are kept, and retrained ones win over them") {
  std::vector<float> values = table_values();
  values[2 * 4 + 1] += 0.5F;
  values[6 * 4] = 99.0F;
  RawTokenTable raw = retrained({6, 1}, {60, 61, 62, 63, 10, 11, 12, 13});
  raw.table = matrix("table", vocab, values);
  Adapter const adapter = good(build(of(raw), false));
  CHECK(adapter.overlay.embedding.ids == Ids{1, 2, 6});
  CHECK(values_of(adapter.overlay.embedding) ==
        std::vector<float>{10, 11, 12, 13, 2.0F, 2.75F, 2.5F, 2.75F, 60, 61, 62, 63});
  // In another type than the table's, rows and table meet in f32.
  for (std::byte& byte : raw.rows->bytes) byte = std::byte{0};
  raw.rows->type = ElementType::bf16;
  raw.rows->bytes.resize(2 * 4 * 2);
  raw.rows->bytes[1] = std::byte{0x40};  // bf16 2.0, the first value of the row for token 6
  Adapter const mixed = good(build(of(raw), false));
  CHECK(mixed.overlay.embedding.rows.type == ElementType::f32);
  CHECK(values_of(mixed.overlay.embedding) ==
        std::vector<float>{0, 0, 0, 0, 2.0F, 2.75F, 2.5F, 2.75F, 2, 0, 0, 0});
}

TEST_CASE_TEMPLATE("tables are compared as the served type holds them, exactly or by a threshold", T, float,
                   __half, __nv_bfloat16) {
  RawTokenTable raw;
  std::vector<float> values = table_values();
  values[3 * 4] = 3.001F;  // 3 in bf16; another number in the others
  values[4 * 4 + 2] += 0.25F;
  values[5 * 4 + 3] += 1.0F;
  raw.table = matrix("table", vocab, values);
  bool const coarse = std::is_same_v<T, __nv_bfloat16>;
  CHECK(good(build<T>(of(raw), false)).overlay.embedding.ids == (coarse ? Ids{4, 5} : Ids{3, 4, 5}));
  CHECK(good(build<T>(of(raw), false, {.threshold = 0.1F})).overlay.embedding.ids == Ids{4, 5});
  CHECK(good(build<T>(of(raw), false, {.threshold = 0.25F})).overlay.embedding.ids == Ids{5});
  CHECK(good(build<T>(of(raw), false, {.threshold = 1.0F})).overlay.empty());
}

TEST_CASE("a row with NaN is a change where NaN is allowed at all, and an error else") {
  RawTokenTable raw;
  std::vector<float> values = table_values();
  values[3 * 4] = std::numeric_limits<float>::quiet_NaN();
  raw.table = matrix("table", vocab, values);
  OverlayOptions options{.threshold = 100.0F};
  CHECK(bad(build(of(raw), false, options)).code == Errc::out_of_range);
  options.conversion.keep_non_finite = true;
  CHECK(good(build(of(raw), false, options)).overlay.embedding.ids == Ids{3});
}

TEST_CASE("without the served table every row of a whole one is the adapter's own") {
  RawTokenTable raw;
  raw.table = matrix("table", vocab, table_values());
  CHECK(good(build(of(raw), false)).overlay.empty());
  Adapter const adapter = good(build_overlay<float>(of(raw), model(false)));
  CHECK(adapter.overlay.embedding.ids == Ids{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(values_of(adapter.overlay.embedding) == table_values());
}

TEST_CASE("the head's rows are its own, alone or beside the embedding's, and compared with the served head") {
  RawTokenTable head;
  head.table = matrix("head", vocab, table_values());  // the served head is its negative: only 0 agrees
  Adapter const alone = good(build(of({}, head), false));
  CHECK(alone.overlay.embedding.empty());
  CHECK(alone.overlay.head.ids == Ids{0, 1, 2, 3, 4, 5, 6, 7});  // row 0 is 0, 0.25, ...
  CHECK_FALSE(alone.overlay.head_is_embedding);
  Adapter const both = good(build(of(retrained({5}, {1, 2, 3, 4}), retrained({2}, {5, 6, 7, 8})), true));
  CHECK(both.overlay.embedding.ids == Ids{5});
  CHECK(both.overlay.head.ids == Ids{2});
  CHECK_FALSE(both.overlay.head_is_embedding);  // its own rows are honoured although it is tied
  Adapter const tied = good(build(of(retrained({5}, {1, 2, 3, 4})), true));
  CHECK(tied.overlay.head_is_embedding);
  CHECK(tied.overlay.head.empty());
  CHECK(good(build(of({}, head), true)).overlay.empty());  // a tied head is compared with the embedding
}

TEST_CASE("LoRA on the embedding is the rows that it changes, needs the served table and leaves the head") {
  RawTokenTable raw;  // rank 1: token t moves by 2 * a[t] * b
  raw.lora_a = matrix("lora_embedding_A", 1, {0, 1, 0, 0, 0, 0, 0, -1}, vocab);
  raw.lora_b = matrix("lora_embedding_B", hidden, {1, 0, 0, 0.5F}, 1);
  raw.lora_scale = 2.0F;
  for (bool const tied : {false, true}) {
    Adapter const adapter = good(build(of(raw), tied));
    CHECK(adapter.overlay.embedding.ids == Ids{1, 7});
    CHECK(values_of(adapter.overlay.embedding) ==
          std::vector<float>{3.0F, 1.25F, 1.5F, 2.75F, 5.0F, 7.25F, 7.5F, 6.75F});
    CHECK_FALSE(adapter.overlay.head_is_embedding);
  }
  Error const refused = bad(build_overlay<float>(of(raw), model(false)));
  CHECK(refused.code == Errc::unsupported);
  CHECK(says(refused.message, "'lora_embedding_A': LoRA on an embedding needs the served table"));
  raw.ids = {1};
  raw.rows = matrix("rows", 1, {1, 2, 3, 4});
  CHECK(bad(build(of(raw), false)).code == Errc::unsupported);
}

TEST_CASE("what does not fit the model is refused by name and id") {
  auto const refused = [](Result<Adapter> const& result, Errc code, char const* words) {
    Error const error = bad(result);
    CHECK(error.code == code);
    CHECK_MESSAGE(says(error.message, words), error.message);
  };
  std::vector<float> const two(8);
  refused(build(of(retrained({1, 8}, two)), false), Errc::out_of_range,
          "token 8 is not in the vocabulary of 8");
  refused(build(of(retrained({-1, 2}, two)), false), Errc::out_of_range, "token -1 is not in the vocabulary");
  refused(build(of(retrained({5, 5}, two)), false), Errc::out_of_range, "token 5 is said twice");
  refused(build(of(retrained({5}, two)), false), Errc::shape_mismatch, "'rows'");
  RawTokenTable shorter;
  shorter.table = matrix("table", 7, std::vector<float>(28));
  refused(build(of(shorter), false), Errc::shape_mismatch, "'table'");
  RawTokenTable unpaired;
  unpaired.lora_a = matrix("a", 1, std::vector<float>(8), vocab);
  refused(build(of(unpaired), false), Errc::unmatched, "one tensor of two");
  refused(build(of(retrained({1}, {1, 2, 3, 4})), false, {.threshold = -1.0F}), Errc::invalid_argument,
          "threshold");
  ModelDescription unknown;
  unknown.num_layers = 1;
  unknown.modules = {{"q", 4, 4, {0}, {}}};
  refused(build_overlay<float>(of(retrained({1}, {1, 2, 3, 4})), *ModelShape::create(unknown)),
          Errc::invalid_argument, "not known");
  RawTokenTable large;
  large.table = matrix("table", vocab, std::vector<float>(32, 70000.0F));
  refused(build<__half>(of(large), false), Errc::out_of_range, "'table'");
}

TEST_CASE("an adapter without token rows stays what it is, and how rows were built is part of the digest") {
  CHECK(good(build(of({}), false)).digest == Digest{1, 2});
  RawTokenTable raw;
  raw.table = matrix("table", vocab, table_values());
  Digest const exact = good(build(of(raw), false)).digest;
  CHECK(exact == good(build(of(raw), false)).digest);
  CHECK_FALSE(exact == good(build(of(raw), false, {.threshold = 0.5F})).digest);
  CHECK_FALSE(exact == good(build_overlay<float>(of(raw), model(false))).digest);
}
