// SPDX-License-Identifier: AGPL-3.0-only
//
// Tables of an adapter whose vocabulary is larger than the model's, brought inside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"

namespace atlas::lora::inline v0::detail {

/// What `known_ids` finds.
struct KnownIds {
  std::vector<std::size_t> kept;      ///< places in the list, in its order
  std::int64_t left_out = 0;          ///< ids in `[vocab, table_rows)`
  std::optional<std::int64_t> bad{};  ///< the first id that the adapter's own table does not have; none

  friend constexpr bool operator==(KnownIds const&, KnownIds const&) = default;
};

/// Which ids of a list are tokens of a model of `vocab` tokens, for an adapter whose own table has
/// `table_rows` rows.
[[nodiscard]] constexpr KnownIds known_ids(std::span<std::int64_t const> ids, std::int64_t table_rows,
                                           std::int64_t vocab) {
  KnownIds out;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= table_rows) {
      if (!out.bad) out.bad = ids[i];
    } else if (ids[i] >= vocab) {
      ++out.left_out;
    } else {
      out.kept.push_back(i);
    }
  }
  return out;
}

/// Keeps the listed rows of a `[rows, width]` tensor, in place; `kept` ascends.
inline void keep_rows(HostTensor& tensor, std::span<std::size_t const> kept) {
  std::size_t const bytes = static_cast<std::size_t>(tensor.shape[1]) * element_bytes(tensor.type);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] != i)
      std::memmove(tensor.bytes.data() + i * bytes, tensor.bytes.data() + kept[i] * bytes, bytes);
  }
  tensor.bytes.resize(kept.size() * bytes);
  tensor.shape[0] = static_cast<std::int64_t>(kept.size());
}

/// Drops what a table says about tokens from `vocab` on. Returns how many rows of it, and of the list, that
/// were.
[[nodiscard]] inline std::int64_t clip_table(RawTokenTable& raw, std::int64_t vocab) {
  std::int64_t left_out = 0;
  if (raw.table && raw.table->shape[0] > vocab) {
    left_out += raw.table->shape[0] - vocab;
    std::size_t const row = static_cast<std::size_t>(raw.table->shape[1]) * element_bytes(raw.table->type);
    raw.table->bytes.resize(static_cast<std::size_t>(vocab) * row);
    raw.table->shape[0] = vocab;
  }
  if (raw.lora_a && raw.lora_a->shape[1] > vocab) left_out += raw.lora_a->shape[1] - vocab;
  if (!raw.rows) return left_out;
  std::int64_t const largest = raw.ids.empty() ? 0 : *std::max_element(raw.ids.begin(), raw.ids.end());
  KnownIds const known = known_ids(raw.ids, largest + 1, vocab);
  if (known.left_out == 0) return left_out;
  keep_rows(*raw.rows, known.kept);
  std::vector<std::int64_t> ids;
  for (std::size_t const place : known.kept) ids.push_back(raw.ids[place]);
  raw.ids = std::move(ids);
  if (raw.ids.empty()) raw.rows.reset();
  return left_out + known.left_out;
}

}  // namespace atlas::lora::inline v0::detail
