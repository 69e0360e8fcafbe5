// SPDX-License-Identifier: AGPL-3.0-only
//
// From token rows as a file has them to compact sets of overrides. Rows are known when an adapter is loaded;
// the tables that a server has in memory are known later: so the two are brought together here.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/overlay/select.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// A table that a server has in memory, `[vocab, hidden]` elements of `value_type`, host or device.
///
/// - `compare(first, rows, threshold, changed)`: `changed[i]` becomes 1 where row `first + i` differs from
///   the given one by `element_changed`, else 0. `rows` is host memory, `[changed.size(), hidden]`.
/// - `read(first, out)`: copies rows from `first` on to host memory.
template <class S>
concept ServedTable = Element<typename S::value_type> &&
    requires(S& served, std::int64_t first, std::span<typename S::value_type const> rows, float threshold,
             std::span<std::uint8_t> changed, std::span<typename S::value_type> out) {
  { served.compare(first, rows, threshold, changed) } -> std::same_as<Result<void>>;
  { served.read(first, out) } -> std::same_as<Result<void>>;
};

/// A served table in host memory.
template <Element T>
class HostServedTable {
 public:
  using value_type = T;

  /// `table` is `[vocab, hidden]`, contiguous; it must outlive this.
  HostServedTable(T const* table, std::int64_t hidden) noexcept : table_(table), hidden_(hidden) {}

  /// As `ServedTable` says; never fails.
  [[nodiscard]] Result<void> compare(std::int64_t first, std::span<T const> rows, float threshold,
                                     std::span<std::uint8_t> changed) noexcept {
    auto const width = static_cast<std::size_t>(hidden_);
    T const* const served = table_ + first * hidden_;
    for (std::size_t row = 0; row < changed.size(); ++row) {
      changed[row] = 0;
      for (std::size_t i = row * width; i < (row + 1) * width && changed[row] == 0; ++i) {
        changed[row] = element_changed(detail::bit_cast<std::uint32_t>(to_f32(rows[i])),
                                       detail::bit_cast<std::uint32_t>(to_f32(served[i])), threshold);
      }
    }
    return {};
  }
  /// As `ServedTable` says; never fails.
  [[nodiscard]] Result<void> read(std::int64_t first, std::span<T> out) noexcept {
    std::copy_n(table_ + first * hidden_, out.size(), out.begin());
    return {};
  }

 private:
  T const* table_;
  std::int64_t hidden_;
};

/// The served tables; null for one that is not at hand (one that is quantised, say).
template <ServedTable S>
struct ServedTables {
  S* embedding = nullptr;  ///< `[vocab, hidden]`; not owned
  S* head = nullptr;       ///< likewise; null too where the head is the embedding
};

/// How token rows are built.
struct OverlayOptions {
  /// How much an element of a whole saved table must differ from the served one for its row to be the
  /// adapter's own. 0 finds every change.
  float threshold = 0.0F;
  ConversionPolicy conversion{};  ///< of saved tables to the served type, for the comparison
};

namespace detail {

/// Builds the overlay of one adapter.
template <ServedTable S>
class OverlayBuilder {
 public:
  using T = typename S::value_type;

  OverlayBuilder(std::int64_t vocab, std::int64_t hidden, OverlayOptions const& options)
      : vocab_(vocab), hidden_(hidden), options_(options) {}

  /// The overrides of one table. `raw` is used up.
  [[nodiscard]] Result<OverrideRows> build(RawTokenTable raw, S* served) {
    if (auto checked = check(raw); !checked) return unexpected(checked);
    if (raw.lora_a) {
      if (served == nullptr) {
        return fail(Errc::unsupported, "tensor '" + raw.lora_a->name +
                                           "': LoRA on an embedding needs the served table, which is absent");
      }
      auto table = apply_lora(raw, *served);
      if (!table) return unexpected(table);
      raw.table = *std::move(table);
    }
    auto const changed = find_changed(raw, served);
    if (!changed) return unexpected(changed);
    // Selected before raw is given away: arguments have no order among themselves.
    std::vector<RowSource> const sources = select_rows(*changed, raw.ids);
    return compact(std::move(raw), sources);
  }

 private:
  template <class R>
  static cuda::std::unexpected<Error> unexpected(R const& result) {
    return cuda::std::unexpected<Error>(result.error());
  }

  // Rows that are looked at together: about a MiB.
  [[nodiscard]] std::int64_t chunk_rows() const noexcept {
    return std::max<std::int64_t>(1, (std::int64_t{1} << 18) / hidden_);
  }

  static bool shaped(HostTensor const& tensor, std::int64_t rows, std::int64_t width) {
    return tensor.shape == std::vector<std::int64_t>{rows, width} &&
           tensor.bytes.size() ==
               static_cast<std::size_t>(rows) * static_cast<std::size_t>(width) * element_bytes(tensor.type);
  }

  [[nodiscard]] Result<void> check(RawTokenTable const& raw) const {
    auto const misshapen = [](HostTensor const& tensor) {
      return fail(Errc::shape_mismatch, "tensor '" + tensor.name + "' does not fit the model's table");
    };
    if (raw.table && !shaped(*raw.table, vocab_, hidden_)) return misshapen(*raw.table);
    if (raw.rows && !shaped(*raw.rows, std::ssize(raw.ids), hidden_)) return misshapen(*raw.rows);
    if (!raw.rows && !raw.ids.empty()) return fail(Errc::unmatched, "token ids without rows");
    std::vector<std::int64_t> ids = raw.ids;
    std::sort(ids.begin(), ids.end());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0 && ids[i] < vocab_ && (i == 0 || ids[i] != ids[i - 1])) continue;
      bool const twice = i > 0 && ids[i] == ids[i - 1];
      return fail(Errc::out_of_range,
                  "tensor '" + raw.rows->name + "': token " + std::to_string(ids[i]) +
                      (twice ? " is said twice" : " is not in the vocabulary of " + std::to_string(vocab_)));
    }
    if (raw.lora_a.has_value() != raw.lora_b.has_value()) {
      return fail(Errc::unmatched, "LoRA on an embedding with one tensor of two");
    }
    if (!raw.lora_a) return {};
    std::int64_t const rank = raw.lora_b->shape.size() == 2 ? raw.lora_b->shape[1] : 0;
    if (rank < 1 || !shaped(*raw.lora_b, hidden_, rank)) return misshapen(*raw.lora_b);
    std::int64_t const width = raw.lora_a->shape.size() == 2 ? raw.lora_a->shape[1] : 0;
    if (width < vocab_ || !shaped(*raw.lora_a, rank, width)) return misshapen(*raw.lora_a);
    if (raw.table || raw.rows) {
      return fail(Errc::unsupported,
                  "tensor '" + raw.lora_a->name + "': LoRA on a table whose rows the adapter also replaces");
    }
    return {};
  }

  // The whole embedding with its LoRA applied, in f32: served + scale * (A[:, token]^T @ B^T).
  [[nodiscard]] Result<HostTensor> apply_lora(RawTokenTable const& raw, S& served) {
    auto const hidden = static_cast<std::size_t>(hidden_);
    auto const rank = static_cast<std::size_t>(raw.lora_a->shape[0]);
    auto const width = static_cast<std::size_t>(raw.lora_a->shape[1]);
    auto const a = widened(*raw.lora_a);
    auto const b = widened(*raw.lora_b);
    HostTensor out{raw.lora_a->name, ElementType::f32, {vocab_, hidden_}, {}};
    out.bytes.resize(static_cast<std::size_t>(vocab_) * hidden * sizeof(float));
    std::vector<T> row(hidden);
    for (std::int64_t token = 0; token < vocab_; ++token) {
      if (auto const got = served.read(token, std::span<T>(row)); !got) return unexpected(got);
      for (std::size_t i = 0; i < hidden; ++i) {
        float sum = 0.0F;
        for (std::size_t j = 0; j < rank; ++j) {
          sum += a[j * width + static_cast<std::size_t>(token)] * b[i * rank + j];
        }
        float const value = to_f32(row[i]) + raw.lora_scale * sum;
        std::memcpy(out.bytes.data() + (static_cast<std::size_t>(token) * hidden + i) * sizeof value, &value,
                    sizeof value);
      }
    }
    return out;
  }

  static std::vector<float> widened(HostTensor const& tensor) {
    std::vector<float> out(tensor.bytes.size() / element_bytes(tensor.type));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = detail::bit_cast<float>(f32_bits_at(tensor, i));
    return out;
  }

  // Which rows of the adapter's own table differ from the served one; all of them when that is not at hand.
  [[nodiscard]] Result<std::vector<std::uint8_t>> find_changed(RawTokenTable const& raw, S* served) {
    std::vector<std::uint8_t> changed;
    if (!raw.table) return changed;
    changed.resize(static_cast<std::size_t>(vocab_), 1);
    if (served == nullptr) return changed;
    std::size_t const row_bytes = static_cast<std::size_t>(hidden_) * element_bytes(raw.table->type);
    std::vector<T> rows;
    for (std::int64_t first = 0; first < vocab_; first += chunk_rows()) {
      auto const count = static_cast<std::size_t>(std::min(chunk_rows(), vocab_ - first));
      auto const begin =
          raw.table->bytes.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(first) * row_bytes);
      HostTensor const part{
          raw.table->name,
          raw.table->type,
          {},
          std::vector<std::byte>(begin, begin + static_cast<std::ptrdiff_t>(count * row_bytes))};
      rows.resize(count * static_cast<std::size_t>(hidden_));
      if (auto const converted = convert<T>(part, std::span<T>(rows), options_.conversion); !converted) {
        return unexpected(converted);
      }
      auto const compared =
          served->compare(first, rows, options_.threshold,
                          std::span(changed).subspan(static_cast<std::size_t>(first), count));
      if (!compared) return unexpected(compared);
    }
    return changed;
  }

  // Gathers the selected rows. A whole table is compacted where it lies: a row moves to a place that is never
  // behind its own, so that nothing is overwritten before it has moved.
  [[nodiscard]] static OverrideRows compact(RawTokenTable raw, std::vector<RowSource> const& sources) {
    OverrideRows out;
    if (sources.empty()) return out;
    bool const in_place = raw.table && (!raw.rows || raw.rows->type == raw.table->type);
    ElementType const type = in_place ? raw.table->type : !raw.table ? raw.rows->type : ElementType::f32;
    std::int64_t const hidden = raw.table ? raw.table->shape[1] : raw.rows->shape[1];
    std::size_t const row_bytes = static_cast<std::size_t>(hidden) * element_bytes(type);
    if (in_place) {
      out.rows = *std::move(raw.table);
    } else {
      out.rows = HostTensor{raw.rows->name, type, {}, {}};
      out.rows.bytes.resize(sources.size() * row_bytes);
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
      auto const [id, retrained] = sources[i];
      out.ids.push_back(id);
      std::byte* const to = out.rows.bytes.data() + i * row_bytes;
      if (retrained < 0 && in_place) {
        std::memmove(to, out.rows.bytes.data() + static_cast<std::size_t>(id) * row_bytes, row_bytes);
      } else {
        HostTensor const& from = retrained < 0 ? *raw.table : *raw.rows;
        copy_row(from, static_cast<std::size_t>(retrained < 0 ? id : retrained), type, to);
      }
    }
    out.rows.bytes.resize(sources.size() * row_bytes);
    out.rows.shape = {std::ssize(sources), hidden};
    return out;
  }

  // Row `row` of a table, in its own type or in f32.
  static void copy_row(HostTensor const& from, std::size_t row, ElementType type, std::byte* to) {
    auto const width = static_cast<std::size_t>(from.shape[1]);
    if (from.type == type) {
      std::size_t const bytes = width * element_bytes(type);
      std::memcpy(to, from.bytes.data() + row * bytes, bytes);
      return;
    }
    for (std::size_t i = 0; i < width; ++i) {
      std::uint32_t const bits = f32_bits_at(from, row * width + i);
      std::memcpy(to + i * sizeof bits, &bits, sizeof bits);
    }
  }

  std::int64_t vocab_;
  std::int64_t hidden_;
  OverlayOptions const& options_;
};

}  // namespace detail

/// Builds `adapter.overlay` from `adapter.raw_overlay`, which is empty afterwards. Rows of a whole saved
/// table are kept where they differ from the served one, all of them where that is not at hand; retrained
/// rows always, in place of the saved table's; LoRA on the embedding becomes the rows that it changes. A head
/// that is the embedding takes the embedding's rows, unless the adapter has rows of the head; LoRA on the
/// embedding leaves the head what it was, as PEFT does. The digest covers how the rows were built.
///
/// Errors: `invalid_argument` for a model of no known vocabulary and hidden size, or a threshold that is
/// negative or NaN; `shape_mismatch`; `unmatched` for ids without rows, or LoRA of one tensor;
/// `out_of_range` for a token id beyond the vocabulary or said twice, or a value that the served type cannot
/// hold; `unsupported` for LoRA on an embedding that is not at hand; the served tables' own.
template <ServedTable S>
[[nodiscard]] Result<Adapter> build_overlay(Adapter adapter, ModelShape const& shape,
                                            ServedTables<S> const& served,
                                            OverlayOptions const& options = {}) {
  RawOverlay& raw = adapter.raw_overlay;
  if (raw.empty()) return adapter;
  constexpr std::int64_t most_tokens = std::int64_t{1} << 31;
  if (shape.vocab() < 1 || shape.vocab() >= most_tokens || shape.hidden() < 1) {
    return fail(Errc::invalid_argument, "token rows: the model's vocabulary and hidden size are not known");
  }
  if (!(options.threshold >= 0.0F)) {
    return fail(Errc::invalid_argument, "token rows: the threshold is negative or NaN");
  }
  bool const by_lora = raw.embedding.lora_a.has_value();
  S* const served_head = served.head == nullptr && shape.tied_head() ? served.embedding : served.head;
  detail::OverlayBuilder<S> builder(shape.vocab(), shape.hidden(), options);
  auto embedding = builder.build(std::exchange(raw.embedding, {}), served.embedding);
  if (!embedding) return cuda::std::unexpected<Error>(embedding.error());
  bool const own_head = !raw.head.empty();
  auto head = builder.build(std::exchange(raw.head, {}), served_head);
  if (!head) return cuda::std::unexpected<Error>(head.error());
  std::uint64_t const told = (std::uint64_t{detail::bit_cast<std::uint32_t>(options.threshold)} << 2) |
                             (served.embedding != nullptr ? 1u : 0u) | (served_head != nullptr ? 2u : 0u);
  adapter.digest.low ^= (told + 1) * 0xd6e8feb86659fd93u;
  adapter.overlay =
      TokenOverlay{*std::move(embedding), *std::move(head), false, shape.vocab(), shape.hidden()};
  adapter.overlay.head_is_embedding = shape.tied_head() && !own_head && !by_lora;
  return adapter;
}

/// The same for a model whose tables are not at hand, which are of element type `T`. Errors: likewise.
template <Element T>
[[nodiscard]] Result<Adapter> build_overlay(Adapter adapter, ModelShape const& shape,
                                            OverlayOptions const& options = {}) {
  return build_overlay(std::move(adapter), shape, ServedTables<HostServedTable<T>>{}, options);
}

}  // namespace atlas::lora::inline v0
