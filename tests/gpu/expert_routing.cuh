// SPDX-License-Identifier: AGPL-3.0-only
//
// Which token of a mixture-of-experts layer is whose and what it chose, for the GPU tests: on the host, and
// in device memory with rows as they are chosen or sorted by expert.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "support.cuh"

#include "atlas/lora/route/expert_rows.hpp"

namespace atlas_test {

/// The shape of a layer and its adapters.
struct ExpertShape {
  std::int32_t experts = 4;
  std::int32_t top_k = 2;
  std::int64_t k_in = 64;
  std::vector<std::int64_t> n_out = {48, 48};  ///< of the projections of one x
  std::vector<std::int32_t> ranks = {8};       ///< of each slot; 0 means that it adapts nothing
  std::int32_t max_rank = 0;                   ///< 0: the largest rank
  bool every_expert = false;                   ///< else each slot leaves about a third of them out
  bool own_rows = false;                       ///< x has a row for each row of y (down), else for each token
  std::int64_t x_pad = 0, y_pad = 0;           ///< elements between rows beyond the width
  std::int64_t offset = 0;                     ///< elements by which every pointer is off alignment
  bool bias = false;
  std::uint64_t seed = 1;
};

/// Which token is whose, and what it chose; any value may be out of range.
struct Routing {
  std::vector<std::int32_t> token_slots;
  std::vector<std::int32_t> expert_ids;  ///< `[tokens * top_k]`
};

/// A routing that uses every slot and expert; one token in ten of its values is base or out of range.
inline Routing random_routing(std::int32_t tokens, ExpertShape const& shape, std::uint64_t seed) {
  Random random(seed);
  Routing routing;
  auto const slots = static_cast<std::int32_t>(shape.ranks.size());
  for (std::int32_t t = 0; t < tokens; ++t) {
    std::int32_t const draw = random.below(slots * 5 + 2);
    routing.token_slots.push_back(draw == slots * 5 ? -1 : draw == slots * 5 + 1 ? slots + 3 : draw % slots);
    for (std::int32_t c = 0; c < shape.top_k; ++c) {
      std::int32_t const choice = random.below(shape.experts * 10 + 1);
      routing.expert_ids.push_back(choice == shape.experts * 10 ? shape.experts + 5 : choice % shape.experts);
    }
  }
  return routing;
}

/// How rows lie.
enum class Order { slot_major, sorted };
inline constexpr Order both_orders[] = {Order::slot_major, Order::sorted};

/// A routing in device memory at fixed addresses, in both orders.
struct DeviceRouting {
  std::int32_t tokens, top_k, experts;
  DeviceArray<std::int32_t> token_slots, expert_ids, sorted_tokens, offsets;
  std::vector<std::int32_t> place;  ///< of each slot-major row among the sorted ones

  DeviceRouting(Routing const& routing, std::int32_t of_each, std::int32_t num_experts)
      : tokens(static_cast<std::int32_t>(routing.token_slots.size())),
        top_k(of_each),
        experts(num_experts),
        token_slots(routing.token_slots.size()),
        expert_ids(routing.expert_ids.size()),
        sorted_tokens(routing.expert_ids.size()),
        offsets(static_cast<std::size_t>(num_experts) + 1) {
    set(routing);
  }

  /// Sorts and uploads; rows of no expert come last.
  void set(Routing const& routing) {
    std::vector<std::int32_t> order(routing.expert_ids.size());
    std::iota(order.begin(), order.end(), 0);
    auto const rank = [&](std::int32_t row) {
      std::int32_t const expert = routing.expert_ids[static_cast<std::size_t>(row)];
      return expert >= 0 && expert < experts ? expert : experts;
    };
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return rank(a) < rank(b); });
    std::vector<std::int32_t> host_tokens(order.size());
    std::vector<std::int32_t> host_offsets(static_cast<std::size_t>(experts) + 1);
    place.resize(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      host_tokens[i] = order[i] / top_k;
      place[static_cast<std::size_t>(order[i])] = static_cast<std::int32_t>(i);
      for (std::int32_t e = rank(order[i]) + 1; e <= experts; ++e)
        ++host_offsets[static_cast<std::size_t>(e)];
    }
    token_slots.upload(routing.token_slots);
    expert_ids.upload(routing.expert_ids);
    sorted_tokens.upload(host_tokens);
    offsets.upload(host_offsets);
  }

  [[nodiscard]] std::int32_t rows() const { return tokens * top_k; }
  [[nodiscard]] ExpertRows as_rows(Order order) const {
    return order == Order::slot_major
               ? ExpertRows::slot_major(token_slots.data(), tokens, top_k, expert_ids.data())
               : ExpertRows::sorted(token_slots.data(), tokens, rows(), sorted_tokens.data(), offsets.data());
  }
  /// Of gate and up, which read their token's row.
  [[nodiscard]] ExpertInput token_input(Order order) const {
    return order == Order::slot_major ? ExpertInput::of_tokens(top_k, tokens)
                                      : ExpertInput::of_sorted(sorted_tokens.data(), tokens);
  }
};

}  // namespace atlas_test
