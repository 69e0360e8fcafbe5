// SPDX-License-Identifier: AGPL-3.0-only
//
// Does a row of a batch see the token rows that its own adapter has retrained, and no other's? A model whose
// head is its embedding serves a PEFT adapter with three retrained tokens and a second one with other rows
// for the same tokens. One batch looks up retrained and other tokens for both and for the base model, and
// computes logits from what it looked up; one captured graph does both, while rows change places. Every
// element is compared with what PEFT's file holds. Not tuned for speed.
//
// Compiled by g++ it computes on the CPU; token_overlay.cu is the same program compiled by nvcc, with both.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <atlas/lora.hpp>
#include <atlas/peft.hpp>

#include "tiny_model/ops.hpp"
#include "tiny_model/program.hpp"

namespace {

using namespace tiny_model;

/// A row of the batch: which adapter, and the token that it looks up.
struct Row {
  std::string adapter;
  std::int32_t token = 0;
};

/// The table of a model whose head is its embedding, and what its adapters have in place of some rows; as
/// elements of the device's type.
template <class T>
struct Expected {
  std::int64_t vocab = 0, hidden = 0;
  std::vector<T> table;                                                             // [vocab, hidden]
  std::map<std::string, std::map<std::int32_t, std::vector<T>>> own{{"base", {}}};  // [adapter][token]

  [[nodiscard]] std::span<T const> row(std::string const& adapter, std::int32_t token) const {
    auto const found = own.at(adapter).find(token);
    if (found != own.at(adapter).end()) return found->second;
    return std::span(table).subspan(static_cast<std::size_t>(token * hidden),
                                    static_cast<std::size_t>(hidden));
  }
};

/// What one pass got wrong.
struct Outcome {
  std::int64_t rows = 0, retrained = 0;       // looked up; of those, how many are an adapter's own
  std::int64_t wrong_rows = 0;                // that are not the expected ones, bit for bit
  std::int64_t logits = 0, wrong_logits = 0;  // recomputed; of those, how many are off
  std::int64_t touched_logits = 0;            // that no adapter has rows for, and that changed all the same
};

template <class T>
std::vector<T> read(atlas::lora::SafetensorsFile const& file, std::string const& name) {
  auto const tensor = expect(file.read(name));
  std::vector<T> out(tensor.bytes.size() / atlas::lora::element_bytes(tensor.type));
  expect(atlas::lora::convert<T>(tensor, std::span<T>(out)));
  return out;
}

/// The same adapter with every retrained row negated: other content for the same tokens.
atlas::lora::Adapter negated(atlas::lora::Adapter adapter) {
  atlas::lora::HostTensor& rows = *adapter.raw_overlay.embedding.rows;
  for (std::size_t i = 3; i < rows.bytes.size(); i += 4)
    rows.bytes[i] ^= std::byte{0x80};  // F32, little-endian
  adapter.digest.low ^= 1;
  return adapter;
}

template <class T>
void note_rows(Expected<T>& expected, std::string const& name, atlas::lora::Adapter const& adapter) {
  atlas::lora::RawTokenTable const& raw = adapter.raw_overlay.embedding;
  std::vector<T> rows(raw.ids.size() * static_cast<std::size_t>(expected.hidden));
  expect(atlas::lora::convert<T>(*raw.rows, std::span<T>(rows)));
  for (std::size_t i = 0; i < raw.ids.size(); ++i) {
    auto const begin = rows.begin() + static_cast<std::ptrdiff_t>(i) * expected.hidden;
    expected.own[name][static_cast<std::int32_t>(raw.ids[i])] =
        std::vector<T>(begin, begin + expected.hidden);
  }
}

/// The engine: a table, a pool, and a step that looks rows up and computes their logits.
template <class Device>
class Engine {
 public:
  using T = typename Device::element;
  using Pool = atlas::lora::AdapterPool<T, typename Device::Backend>;

  Engine(Device& device, Expected<T> const& expected, atlas::lora::ModelShape const& shape,
         std::int32_t max_rows)
      : device_(device), expected_(expected), shape_(shape) {
    table_ = device.template allocate<T>(expected.vocab * expected.hidden);
    device.upload(std::span<T const>(expected.table), table_.data());
    tokens_ = device.template allocate<std::int32_t>(max_rows);
    h_ = device.template allocate<T>(max_rows * expected.hidden);
    logits_ = device.template allocate<float>(max_rows * expected.vocab);
    atlas::lora::PoolOptions options;
    options.max_slots = 2;
    options.max_rank = 8;
    options.overlay_bytes = 1 << 16;
    pool_.emplace(expect(Pool::create(shape, options, device.backend())));
    atlas::lora::RowPlanLayout const layout{max_rows, options.max_slots};
    plan_memory_ = device.template allocate<std::byte>(static_cast<std::int64_t>(layout.bytes()));
    plan_ = layout.at(plan_memory_.data());
    overlay_ = expect(pool_->overlay());
  }

  /// Builds an adapter's token rows against the table that is in memory, loads and leases it.
  void load(std::string const& name, atlas::lora::Adapter adapter) {
    auto served = device_.served(table_.data(), expected_.hidden);
    atlas::lora::ServedTables<decltype(served)> const tables{&served, &served};
    expect(pool_->load(name, expect(atlas::lora::build_overlay(std::move(adapter), shape_, tables))));
    expect(pool_->begin_step(device_.stream()));
    expect(pool_->end_step(device_.stream()));
    leases_.emplace(name, expect(pool_->acquire(name)));
  }

  /// Puts a batch where the step, or a graph of it, reads it.
  void set_rows(std::vector<Row> const& rows) {
    std::vector<std::int32_t> tokens, slots;
    for (Row const& row : rows) {
      tokens.push_back(row.token);
      slots.push_back(row.adapter == "base" ? atlas::lora::base_slot : leases_.at(row.adapter).slot());
    }
    device_.upload(std::span<std::int32_t const>(tokens), tokens_.data());
    device_.upload(std::span<std::int32_t const>(slots), plan_.row_slots);
    device_.synchronize();
  }

  /// Enqueues a step of `rows` rows; capture-safe. Rows see their adapter's own tokens where `adapted`.
  void step(std::int32_t rows, bool adapted) {
    if (adapted) device_.plan_rows(plan_, rows);
    device_.run(Embed<T>{table_.data(), tokens_.data(), h_.data(), expected_.hidden},
                rows * expected_.hidden);
    if (adapted) device_.replace_rows(overlay_, plan_, rows, tokens_.data(), h_.data());
    device_.multiply(h_.data(), table_.data(), logits_.data(), expected_.vocab, rows, expected_.vocab,
                     expected_.hidden);
    if (adapted) device_.recompute_logits(overlay_, plan_, rows, h_.data(), logits_.data());
  }

  [[nodiscard]] std::vector<T> h(std::size_t rows) {
    std::vector<T> host(rows * static_cast<std::size_t>(expected_.hidden));
    device_.download(h_.data(), std::span<T>(host));
    return host;
  }
  [[nodiscard]] std::vector<float> logits(std::size_t rows) {
    std::vector<float> host(rows * static_cast<std::size_t>(expected_.vocab));
    device_.download(logits_.data(), std::span<float>(host));
    return host;
  }
  /// The logits of rows `h` as the base model's head alone computes them.
  [[nodiscard]] std::vector<float> base_logits(std::vector<T> const& h) {
    device_.upload(std::span<T const>(h), h_.data());
    auto const rows = static_cast<std::int64_t>(h.size()) / expected_.hidden;
    device_.multiply(h_.data(), table_.data(), logits_.data(), expected_.vocab, rows, expected_.vocab,
                     expected_.hidden);
    return logits(static_cast<std::size_t>(rows));
  }

 private:
  template <class V>
  using Buffer = Array<V, typename Device::Backend>;

  Device& device_;
  Expected<T> const& expected_;
  atlas::lora::ModelShape const& shape_;
  Buffer<T> table_, h_;
  Buffer<std::int32_t> tokens_;
  Buffer<float> logits_;
  std::optional<Pool> pool_;
  Buffer<std::byte> plan_memory_;
  atlas::lora::RowPlan plan_;
  atlas::lora::OverlayTable<T> overlay_;
  std::map<std::string, atlas::lora::Lease> leases_;
};

/// Judges what a step left for `rows`.
template <class Device, class T = typename Device::element>
void judge(Engine<Device>& engine, Expected<T> const& expected, std::vector<Row> const& rows,
           Outcome& outcome) {
  std::vector<T> const h = engine.h(rows.size());
  std::vector<float> const logits = engine.logits(rows.size());
  std::vector<float> const base = engine.base_logits(h);
  auto const hidden = static_cast<std::size_t>(expected.hidden);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    auto const& own = expected.own.at(rows[r].adapter);
    ++outcome.rows;
    outcome.retrained += own.contains(rows[r].token) ? 1 : 0;
    std::span<T const> const got(h.data() + r * hidden, hidden);
    if (std::memcmp(got.data(), expected.row(rows[r].adapter, rows[r].token).data(), got.size_bytes()) != 0) {
      ++outcome.wrong_rows;
    }
    for (std::int32_t token = 0; token < expected.vocab; ++token) {
      std::size_t const at = r * static_cast<std::size_t>(expected.vocab) + static_cast<std::size_t>(token);
      if (!own.contains(token)) {
        if (logits[at] != base[at]) ++outcome.touched_logits;
        continue;
      }
      double want = 0.0;
      for (std::size_t k = 0; k < hidden; ++k) {
        want += double{atlas::lora::to_f32(got[k])} * double{atlas::lora::to_f32(own.at(token)[k])};
      }
      ++outcome.logits;
      if (!(std::abs(double{logits[at]} - want) <= 1e-5 * std::max(1.0, std::abs(want))))
        ++outcome.wrong_logits;
    }
  }
}

void print(char const* device, std::string const& device_name, std::string const& element,
           std::vector<std::pair<char const*, Outcome>> const& passes, bool ok) {
  std::cout << "Token rows of two adapters and the base model in one batch on " << device << " ("
            << device_name << "), element type " << element
            << "\n\npass                   rows  retrained  wrong  "
            << "own logits  wrong  others changed\n";
  for (auto const& [name, outcome] : passes) {
    std::cout << std::left << std::setw(23) << name << std::setw(6) << outcome.rows << std::setw(11)
              << outcome.retrained << std::setw(7) << outcome.wrong_rows << std::setw(12) << outcome.logits
              << std::setw(7) << outcome.wrong_logits << outcome.touched_logits << '\n';
  }
  std::cout << (ok ? "ok" : "WRONG") << '\n';
}

template <class Device>
bool check(Options const& options) {
  using T = typename Device::element;
  auto const config = expect(atlas::lora::read_model_config(options.model + "/config.json"));
  auto const shape = expect(atlas::lora::model_shape(config));
  auto const base = expect(atlas::lora::SafetensorsFile::open(options.model + "/base_subset.safetensors"));
  Expected<T> expected;
  expected.vocab = shape.vocab();
  expected.hidden = shape.hidden();
  expected.table = read<T>(base, "model.embed_tokens.token_adapter.weight");
  auto const a = expect(atlas::lora::load_adapter(options.model, shape));
  auto const b = negated(a);
  note_rows(expected, "a", a);
  note_rows(expected, "b", b);

  Device device;
  Engine<Device> engine(device, expected, shape, 16);
  engine.load("a", a);
  engine.load("b", b);

  // Retrained tokens 3, 7 and 319, and others, for everyone; one token in three rows of three adapters.
  std::vector<Row> const prefill{{"a", 7},    {"base", 7}, {"b", 7}, {"a", 3},   {"a", 8},   {"b", 319},
                                 {"base", 3}, {"b", 0},    {"b", 3}, {"a", 319}, {"base", 0}};
  std::vector<std::pair<char const*, Outcome>> passes{{"prefill", {}}, {"decode, from a graph", {}}};
  engine.set_rows(prefill);
  engine.step(static_cast<std::int32_t>(prefill.size()), true);
  judge(engine, expected, prefill, passes[0].second);

  std::vector<Row> decode{{"a", 7}, {"base", 7}, {"b", 7}};
  auto graph = device.capture([&engine] { engine.step(3, true); });
  for (std::int32_t const token : {7, 3, 319, 8}) {
    for (Row& row : decode) row.token = token;
    for (int turn = 0; turn < 3; ++turn) {
      std::rotate(decode.begin(), decode.begin() + 1, decode.end());
      engine.set_rows(decode);
      graph();
      judge(engine, expected, decode, passes[1].second);
    }
  }
  bool ok = true;
  for (auto const& [name, outcome] : passes) {
    ok = ok && outcome.retrained > 0 && outcome.logits > 0 && outcome.wrong_rows == 0 &&
         outcome.wrong_logits == 0 && outcome.touched_logits == 0;
  }
  print(Device::kind, Device::name(), options.element, passes, ok);
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, "token_overlay", "Embedding and head rows of two adapters in one batch",
                     "peft/qwen3_trainable_tokens_tied",
                     [&]<class Device>(Options const& options) { return check<Device>(options); });
}
