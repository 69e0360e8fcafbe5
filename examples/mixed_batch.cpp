// SPDX-License-Identifier: AGPL-3.0-only
//
// Does a batch whose requests use different adapters give each request what PEFT gives it alone? Four
// requests (the base model and adapters a, b, c) go through a whole tiny Llama, or Qwen3-MoE, in one batch: a
// prefill, then one captured graph replayed for every token. Every logit is compared with PEFT's. Not tuned
// for speed.
//
// Compiled by g++ it computes on the CPU; mixed_batch.cu is the same program compiled by nvcc, with both.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <atlas/lora.hpp>
#include <atlas/peft.hpp>

#include "tiny_model/engine.hpp"
#include "tiny_model/expected.hpp"
#include "tiny_model/program.hpp"
#include "tiny_model/requests.hpp"

namespace {

using namespace tiny_model;

constexpr std::size_t num_decoded = 16;

struct NamedAdapter {
  std::string name;
  atlas::lora::Adapter adapter;
};

/// The same requests served in four ways; [request] each.
struct Runs {
  std::vector<Request> base;     // the base model alone on all four, without the library
  std::vector<Request> mixed;    // each with its adapter
  std::vector<Request> swapped;  // the tokens of `mixed`, rows and slots changing at every step
  std::vector<Request> fresh;    // the tokens of `mixed` in one prefill
};

/// What float32 chooses of the experts at every given token: [request], nothing for a dense model.
struct FloatChoices {
  std::vector<Choices> base, mixed;
};

/// What one request gave; differences are the largest |a - b| over logits.
struct Outcome {
  std::string adapter;
  std::set<std::int32_t> ranks;
  std::int32_t prefilled = 0;
  std::size_t positions = 0, columns = 0;         // compared with PEFT's: all columns, and all positions but
  std::size_t rerouted = 0;                       // those where other experts were chosen than in float32
  std::size_t embedding_rows = 0, head_rows = 0;  // of the adapter's own
  float difference = 0.0F;                        // from PEFT's
  std::size_t decoded = 0, tokens_compared = 0;
  float decoded_difference = 0.0F;     // from a fresh prefill of the same tokens
  std::set<std::int32_t> rows, slots;  // where it has been in the swapped run
  float swapped_difference = 0.0F;     // from the run in which nothing moves
  bool ok = false;
};

struct Report {
  std::string device, device_name, element;
  float limit = 0.0F;
  float base_difference = 0.0F;  // of the base model alone on all four, from PEFT's base model
  bool base_bit_equal = false;   // the base request's logits, with and without adapters beside it
  std::vector<Outcome> requests;
  bool ok = false;
};

std::vector<NamedAdapter> load_adapters(std::string const& directory, atlas::lora::ModelShape const& shape) {
  std::vector<NamedAdapter> adapters;
  for (std::string const name : {"a", "b", "c"}) {
    std::string const path = directory + "/adapters/" + name;
    adapters.push_back({name, expect(atlas::lora::load_adapter(path, shape))});
  }
  return adapters;
}

/// Prefixes differ, so that the prefill is ragged and requests end at different steps.
std::vector<Request> make_requests(Expected const& expected, std::vector<NamedAdapter> const& adapters) {
  std::int32_t const prefixes[] = {6, 5, 4, 3};
  std::vector<Request> requests;
  for (std::size_t i = 0; i < std::size(prefixes); ++i) {
    requests.push_back({i == 0 ? "base" : adapters[i - 1].name, expected.tokens.at(i), prefixes[i]});
  }
  return requests;
}

/// The same requests again, with the tokens that they have by now.
std::vector<Request> again(std::vector<Request> const& served) {
  std::vector<Request> requests;
  for (Request const& request : served) requests.push_back({request.adapter, request.tokens, request.prefix});
  return requests;
}

std::int32_t max_rank(std::vector<NamedAdapter> const& adapters) {
  std::int32_t largest = 1;
  for (auto const& [name, adapter] : adapters) largest = std::max(largest, adapter.max_rank);
  return largest;
}

/// Enough for all adapters' experts, and for one to move while it is where it was.
std::size_t expert_bytes(atlas::lora::ModelShape const& shape, std::vector<NamedAdapter> const& adapters,
                         std::size_t element_bytes) {
  std::size_t all = 0, largest = 0;
  for (auto const& [name, adapter] : adapters) {
    std::size_t const one =
        atlas::lora::expert_bytes_needed(adapter, shape, max_rank(adapters), element_bytes);
    all += one;
    largest = std::max(largest, one);
  }
  return all + largest;
}

template <class Device>
Runs serve_four_ways(std::string const& directory, Expected const& expected,
                     atlas::lora::ModelShape const& shape, std::vector<NamedAdapter>& adapters) {
  std::size_t const positions =
      expected.tokens[0].size() + num_decoded - 1;  // the last token is not fed again
  auto const rows = static_cast<std::int32_t>(4 * positions);
  // One more sequence than requests, for pad rows; one more slot than adapters, so that there is room to
  // move.
  Capacity const capacity{rows, 5, static_cast<std::int32_t>(positions), 4};
  auto const stay = [](std::vector<std::size_t>&) {};
  Runs runs;

  // 1. The base model alone: no pool, not one delta.
  runs.base = make_requests(expected, adapters);
  for (Request& request : runs.base) request.adapter = "base";
  Engine<Device> plain(directory, capacity);
  plain.capture(4);
  serve(plain, runs.base, positions, {0, 1, 2, 3}, stay);

  // 2. The mixed batch. Token rows are compared with the tables that the model has in memory. The graph is
  // captured before there is any adapter, and is right for all that come.
  Engine<Device> engine(directory, capacity);
  for (auto& [name, adapter] : adapters) adapter = engine.build(std::move(adapter), shape);
  engine.open_pool(shape, max_rank(adapters),
                   expert_bytes(shape, adapters, sizeof(typename Device::element)));
  engine.capture(4);
  for (auto const& [name, adapter] : adapters) engine.place(name, adapter);
  runs.mixed = make_requests(expected, adapters);
  serve(engine, runs.mixed, positions, {0, 1, 2, 3}, stay);

  // 3. The same graph, while at every step each request goes to another row and an adapter to another slot.
  runs.swapped = again(runs.mixed);
  std::size_t steps = 0;
  serve(engine, runs.swapped, positions, {3, 2, 1, 0}, [&](std::vector<std::size_t>& order) {
    std::rotate(order.begin(), order.begin() + 1, order.end());
    auto const& [name, adapter] = adapters[steps++ % adapters.size()];
    engine.place(name, adapter);
  });

  // 4. All the tokens at once.
  runs.fresh = again(runs.mixed);
  for (Request& request : runs.fresh) request.prefix = static_cast<std::int32_t>(positions);
  serve(engine, runs.fresh, positions, {0, 1, 2, 3}, stay);
  return runs;
}

/// What every request's given tokens choose in float32, on the CPU.
FloatChoices choose_in_float(std::string const& directory, Expected const& expected,
                             atlas::lora::ModelShape const& shape,
                             std::vector<NamedAdapter> const& adapters) {
  std::size_t const positions = expected.tokens[0].size();
  FloatChoices choices;
  for (bool const adapted : {false, true}) {
    auto requests = make_requests(expected, adapters);
    for (Request& request : requests) {
      request.prefix = static_cast<std::int32_t>(positions);
      if (!adapted) request.adapter = "base";
    }
    Engine<HostDevice<float>> engine(
        directory, {static_cast<std::int32_t>(4 * positions), 5, static_cast<std::int32_t>(positions), 4});
    if (adapted) {
      engine.open_pool(shape, max_rank(adapters), expert_bytes(shape, adapters, sizeof(float)));
      for (auto const& [name, adapter] : adapters) engine.place(name, engine.build(adapter, shape));
    }
    serve(engine, requests, positions, {0, 1, 2, 3}, [](std::vector<std::size_t>&) {});
    for (Request const& request : requests) {
      (adapted ? choices.mixed : choices.base).push_back(request.choices);
    }
  }
  return choices;
}

/// Judges request `i`, which used `adapter`, or the base model when that is null.
Outcome judge_request(Runs const& runs, Expected const& expected, FloatChoices const& in_float, std::size_t i,
                      NamedAdapter const* adapter, float limit) {
  Request const& mixed = runs.mixed[i];
  std::vector<std::int32_t> const& given = expected.tokens[i];
  Outcome outcome;
  outcome.adapter = mixed.adapter;
  outcome.prefilled = mixed.prefix;
  if (adapter != nullptr) {
    for (auto const& pair : adapter->adapter.pairs) outcome.ranks.insert(pair.rank);
    for (auto const& pair : adapter->adapter.routers) outcome.ranks.insert(pair.rank);
    for (auto const& pair : adapter->adapter.experts) outcome.ranks.insert(pair.rank);
    outcome.embedding_rows = adapter->adapter.overlay.embedding.ids.size();
    outcome.head_rows = adapter->adapter.overlay.head.ids.size();
  }

  // PEFT's logits: every column, and every position where the experts are those of float32.
  Logits const& peft = expected.logits[i];
  outcome.positions = given.size();
  outcome.columns = peft[0].size();
  std::vector<bool> rerouted, rerouted_swapped;  // none where this run is float32 itself
  if (!in_float.mixed.empty()) {
    rerouted = differing(in_float.mixed[i], mixed.choices);
    rerouted_swapped = differing(in_float.mixed[i], runs.swapped[i].choices);
    auto const last = rerouted.begin() + static_cast<std::ptrdiff_t>(outcome.positions);
    outcome.rerouted = static_cast<std::size_t>(std::count(rerouted.begin(), last, true));
  }
  outcome.difference =
      std::max(largest_difference(mixed.logits, peft, outcome.positions, rerouted),
               largest_difference(runs.swapped[i].logits, peft, outcome.positions, rerouted_swapped));

  // What was decoded. A token says something only where its logit leads by more than the limit.
  Logits const& fresh = runs.fresh[i].logits;
  outcome.decoded = mixed.tokens.size() - given.size();
  std::vector<bool> const rerouted_fresh = differing(mixed.choices, runs.fresh[i].choices);
  outcome.decoded_difference = largest_difference(mixed.logits, fresh, fresh.size(), rerouted_fresh);
  bool tokens_equal = true;
  for (std::size_t position = given.size() - 1; position < fresh.size(); ++position) {
    if (lead(fresh[position]) <= limit || rerouted_fresh[position]) continue;
    ++outcome.tokens_compared;
    auto const token = static_cast<std::size_t>(mixed.tokens[position + 1]);
    tokens_equal = tokens_equal && fresh[position][token] ==
                                       *std::max_element(fresh[position].begin(), fresh[position].end());
  }

  // What moved: every request over every row, every adapter over every slot.
  outcome.rows = runs.swapped[i].rows;
  outcome.slots = runs.swapped[i].slots;
  outcome.swapped_difference = largest_difference(mixed.logits, runs.swapped[i].logits, fresh.size(),
                                                  differing(mixed.choices, runs.swapped[i].choices));
  bool const moved = outcome.rows.size() == 4 && outcome.slots.size() == (adapter == nullptr ? 1 : 4);

  outcome.ok = outcome.positions > outcome.rerouted && outcome.difference <= limit &&
               outcome.decoded_difference <= limit && outcome.swapped_difference <= limit &&
               outcome.decoded == num_decoded && tokens_equal && moved;
  return outcome;
}

template <class Device>
Report check(std::string const& directory) {
  using T = typename Device::element;
  auto const config = expect(atlas::lora::read_model_config(directory + "/config.json"));
  auto const shape = expect(atlas::lora::model_shape(config));
  Expected const expected = read_expected(directory);
  auto adapters = load_adapters(directory, shape);
  Runs const runs = serve_four_ways<Device>(directory, expected, shape, adapters);
  FloatChoices in_float;
  if (!std::is_same_v<T, float>) in_float = choose_in_float(directory, expected, shape, adapters);

  Report report;
  report.device = Device::kind;
  report.device_name = Device::name();
  report.element = std::is_same_v<T, float> ? "float" : std::is_same_v<T, __half> ? "fp16" : "bf16";
  for (std::size_t i = 0; i < runs.base.size(); ++i) {
    std::vector<bool> rerouted;
    if (!in_float.base.empty()) rerouted = differing(in_float.base[i], runs.base[i].choices);
    float const difference =
        largest_difference(runs.base[i].logits, expected.base_logits[i], expected.tokens[i].size(), rerouted);
    report.base_difference = std::max(report.base_difference, difference);
  }
  // In 16 bits an adapter may cost a few times what rounding already costs the base model; but a base model
  // that is more wrong than rounding makes it is no measure.
  float const base_limit = std::is_same_v<T, float>    ? Device::float_limit
                           : std::is_same_v<T, __half> ? 0.01F
                                                       : 0.08F;
  report.limit = std::is_same_v<T, float> ? Device::float_limit : 3.0F * report.base_difference;
  report.base_bit_equal = runs.base[0].logits == runs.mixed[0].logits;
  report.ok = report.base_bit_equal && report.base_difference <= base_limit;
  for (std::size_t i = 0; i < runs.mixed.size(); ++i) {
    report.requests.push_back(
        judge_request(runs, expected, in_float, i, i == 0 ? nullptr : &adapters[i - 1], report.limit));
    report.ok = report.ok && report.requests.back().ok;
  }
  return report;
}

nlohmann::ordered_json to_json(Report const& report) {
  nlohmann::ordered_json json{{"device", report.device},
                              {"device_name", report.device_name},
                              {"element", report.element},
                              {"limit", report.limit},
                              {"base_difference", report.base_difference},
                              {"base_bit_equal", report.base_bit_equal},
                              {"requests", nlohmann::ordered_json::array()},
                              {"ok", report.ok}};
  for (Outcome const& request : report.requests) {
    json["requests"].push_back({{"adapter", request.adapter},
                                {"ranks", request.ranks},
                                {"prefilled", request.prefilled},
                                {"positions", request.positions},
                                {"columns", request.columns},
                                {"rerouted", request.rerouted},
                                {"difference", request.difference},
                                {"limit", report.limit},
                                {"decoded", request.decoded},
                                {"tokens_compared", request.tokens_compared},
                                {"decoded_difference", request.decoded_difference},
                                {"rows", request.rows},
                                {"slots", request.slots},
                                {"swapped_difference", request.swapped_difference},
                                {"embedding_rows", request.embedding_rows},
                                {"head_rows", request.head_rows},
                                {"ok", request.ok}});
  }
  return json;
}

std::string join(std::set<std::int32_t> const& numbers) {
  std::string text;
  for (std::int32_t const number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text.empty() ? "-" : text;
}

void print(Report const& report) {
  auto const words = [](bool ok) { return ok ? "ok" : "WRONG"; };
  auto const cell = [](int width, auto const& value) { std::cout << std::left << std::setw(width) << value; };
  std::cout << std::scientific << std::setprecision(1) << "One batch of four requests on " << report.device
            << " (" << report.device_name << "), element type " << report.element
            << "\n\n                           against PEFT                    decoded, as prefilled  moved, "
               "as unmoved\n"
               "adapter  ranks  prefilled  logits    difference  limit    tokens  difference     "
               "rows     slots    difference\n";
  for (Outcome const& request : report.requests) {
    cell(9, request.adapter);
    cell(7, join(request.ranks));
    cell(11, request.prefilled);
    cell(10, std::to_string(request.positions) + " x " + std::to_string(request.columns));
    cell(12, request.difference);
    cell(9, report.limit);
    cell(8, std::to_string(request.tokens_compared) + "/" + std::to_string(request.decoded));
    cell(15, request.decoded_difference);
    cell(9, join(request.rows));
    cell(9, join(request.slots));
    cell(12, request.swapped_difference);
    std::cout << words(request.ok) << '\n';
  }
  std::cout << "\nThe base model alone: difference " << report.base_difference
            << "; the base request has the same bits beside adapters: " << words(report.base_bit_equal)
            << '\n';
  for (Outcome const& request : report.requests) {
    if (request.rerouted > 0) {
      std::cout << request.adapter << ": " << request.rerouted << " of " << request.positions
                << " positions chose other experts than in float32 and are left out\n";
    }
    if (request.embedding_rows + request.head_rows > 0) {
      std::cout << request.adapter << " has rows of its own: " << request.embedding_rows
                << " of the embedding, " << request.head_rows << " of the head\n";
    }
  }
  std::cout << words(report.ok) << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(
      argc, argv, "mixed_batch",
      "Four requests, three of them with PEFT adapters, in one batch through a whole tiny model", "e2e/llama",
      [&]<class Device>(Options const& options) {
        Report const report = check<Device>(options.model);
        if (options.json) {
          std::cout << to_json(report).dump(2) << '\n';
        } else {
          print(report);
        }
        return report.ok;
      });
}
