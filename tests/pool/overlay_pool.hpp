// SPDX-License-Identifier: AGPL-3.0-only
//
// A model with a vocabulary, adapters with token rows, and what a slot's overlay cell must hold.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/pool/overlay_layout.hpp"
#include "tiny_pool.hpp"

namespace atlas_test {

inline constexpr std::int64_t vocab = 12;
inline constexpr std::int64_t hidden = 5;
using Ids = std::vector<std::int32_t>;

/// One linear and a small vocabulary.
inline ModelShape vocabulary_shape() {
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"q", 6, 10, {0}, {}}};
  d.vocab = vocab;
  d.hidden = hidden;
  return *ModelShape::create(d);
}

/// Bytes of an overlay of so many rows of the embedding and so many of the head, in float.
inline std::size_t bytes_of(std::size_t embedding, std::size_t head, bool tied = false) {
  return detail::overlay_layout(embedding, head, tied, vocab, hidden, 4).bytes;
}

/// Rows of part `part` of content `content`: 0 the embedding, 1 the head.
inline OverrideRows own_rows(std::uint32_t content, std::size_t part, Ids ids) {
  OverrideRows own;
  if (!ids.empty()) own.rows = tensor(content, 0, part, {std::ssize(ids), hidden});
  own.ids = std::move(ids);
  return own;
}

/// Content `content` for q, and these rows.
inline Adapter overlaid(std::uint32_t content, Ids embedding, Ids head, bool tied = false) {
  Adapter adapter = tiny_adapter(vocabulary_shape(), content, 2, {0});
  adapter.overlay = {own_rows(content, 0, std::move(embedding)), own_rows(content, 1, std::move(head)), tied,
                     vocab, hidden};
  return adapter;
}

/// Checks that rows in a pool are those of the content.
template <Element T>
void check_rows(T const* rows, OverrideRows const& own, std::uint32_t content, std::size_t part) {
  for (std::size_t i = 0; i < own.ids.size() * hidden; ++i) {
    CHECK(to_f32(rows[i]) == atlas_test::element(content, 0, part, i));
  }
}

/// Checks that a slot's cell speaks of exactly this adapter's rows.
template <class P>
void check_cell(P const& pool, std::int32_t slot, Adapter const& adapter, std::uint32_t content) {
  auto const table = pool.overlay();
  REQUIRE(table.has_value());
  auto const& cell = *table->cell(slot);
  OverrideRows const& embedding = adapter.overlay.embedding;
  REQUIRE(cell.embed_count == std::ssize(embedding.ids));
  if (!embedding.empty()) {
    for (std::int32_t token = 0; token < vocab; ++token) {
      auto const at = std::find(embedding.ids.begin(), embedding.ids.end(), token);
      CHECK(cell.slot_map[token] == (at == embedding.ids.end() ? -1 : at - embedding.ids.begin()));
    }
    check_rows(cell.embed_rows, embedding, content, 0);
  }
  bool const shares = adapter.overlay.head_is_embedding && adapter.overlay.head.empty();
  OverrideRows const& head = shares ? embedding : adapter.overlay.head;
  REQUIRE(cell.head_count == std::ssize(head.ids));
  if (head.empty()) return;
  CHECK(Ids(cell.head_ids, cell.head_ids + cell.head_count) == head.ids);
  check_rows(cell.head_rows, head, content, shares ? 0 : 1);
  CHECK((cell.head_rows == cell.embed_rows) == shares);
}

}  // namespace atlas_test
