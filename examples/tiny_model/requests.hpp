// SPDX-License-Identifier: AGPL-3.0-only
//
// Requests and how they share a batch: their prefixes packed into one prefill, then a row each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "engine.hpp"

namespace tiny_model {

struct Request {
  std::string adapter;                               ///< `"base"`, or a name given to `Engine::place`
  std::vector<std::int32_t> tokens;                  ///< the given ones; `serve` adds those it decodes
  std::int32_t prefix = 1;                           ///< how many of them are prefilled
  std::vector<std::vector<float>> logits{};          ///< of each position, once served
  std::vector<std::vector<std::int32_t>> choices{};  ///< of each position: the experts of all layers
  std::set<std::int32_t> rows{}, slots{};            ///< where it has been in decoding steps
};

[[nodiscard]] inline std::int32_t most_likely(std::vector<float> const& logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Serves `requests` in one batch until each has logits of `positions` positions. Given tokens are fed as
/// they are, and greedily decoded ones when they run out. Request `order[r]` has row r; before each decoding
/// step `between(order)` may change that, and move adapters to other slots.
template <class Device, class Between>
void serve(Engine<Device>& engine, std::vector<Request>& requests, std::size_t positions,
           std::vector<std::size_t> order, Between between) {
  std::vector<Row> rows;
  std::vector<Request*> owners;  // of each row; null for a pad
  auto const add_row = [&](std::size_t index, std::size_t position) {
    Request& request = requests[index];
    rows.push_back({request.tokens[position], static_cast<std::int32_t>(position),
                    static_cast<std::int32_t>(index), engine.slot(request.adapter)});
    owners.push_back(&request);
  };
  auto const take = [&](std::vector<float> const& logits) {
    auto const vocab = static_cast<std::ptrdiff_t>(engine.config().vocab);
    auto from = logits.begin();
    auto const choices = engine.choices(static_cast<std::int32_t>(owners.size()));
    for (std::size_t row = 0; row < owners.size(); ++row) {
      Request* const request = owners[row];
      if (request != nullptr) {
        request->choices.push_back(choices[row]);
        request->logits.emplace_back(from, from + vocab);
        if (request->logits.size() == request->tokens.size()) {
          request->tokens.push_back(most_likely(request->logits.back()));
        }
      }
      from += vocab;
    }
    rows.clear();
    owners.clear();
  };

  for (std::size_t const index : order) {
    for (std::int32_t i = 0; i < requests[index].prefix; ++i) add_row(index, static_cast<std::size_t>(i));
  }
  take(engine.prefill(rows));

  auto const done = [&](Request const& request) { return request.logits.size() >= positions; };
  while (!std::all_of(requests.begin(), requests.end(), done)) {
    between(order);
    for (std::size_t const index : order) {
      if (!done(requests[index])) {
        requests[index].rows.insert(static_cast<std::int32_t>(rows.size()));
        requests[index].slots.insert(engine.slot(requests[index].adapter));
        add_row(index, requests[index].logits.size());
      } else {  // a pad: base, and what it writes goes where nobody reads
        rows.push_back({0, 0, engine.pad_sequence()});
        owners.push_back(nullptr);
      }
    }
    take(engine.decode(rows));
  }
}

}  // namespace tiny_model
