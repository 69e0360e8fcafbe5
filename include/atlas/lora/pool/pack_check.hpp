// SPDX-License-Identifier: AGPL-3.0-only
//
// Whether a pool can hold an adapter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/model/module.hpp"
#include "atlas/lora/pool/outline.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {
namespace detail {

/// Collects what is wrong with an adapter, one fault a line; its code is the first fault's.
class PackFaults {
 public:
  explicit PackFaults(std::string_view name) : name_(name) {}

  void add(Errc code, std::string const& what) {
    if (error_.code == Errc::ok) error_.code = code;
    error_.message += (error_.message.empty() ? "" : "\n") + ("adapter '" + name_ + "': ") + what;
  }
  [[nodiscard]] Result<void> outcome() const {
    if (error_.code == Errc::ok) return {};
    return cuda::std::unexpected<Error>(error_);
  }

 private:
  std::string name_;
  Error error_;
};

inline void check_tensor(HostTensor const& tensor, std::initializer_list<std::int64_t> shape,
                         PackFaults& faults) {
  std::size_t bytes = element_bytes(tensor.type);
  std::string words;
  for (std::int64_t const extent : shape) {
    bytes *= static_cast<std::size_t>(extent);  // below 2^31 each, one of them a rank
    words += (words.empty() ? "" : ", ") + std::to_string(extent);
  }
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    faults.add(Errc::shape_mismatch, "tensor '" + tensor.name + "' is not [" + words + "]");
  } else if (tensor.bytes.size() != bytes) {
    faults.add(Errc::shape_mismatch, "tensor '" + tensor.name + "' holds " +
                                         std::to_string(tensor.bytes.size()) + " bytes, not " +
                                         std::to_string(bytes));
  }
}

inline void check_room(std::string const& place, std::int32_t rank, std::int32_t max_rank,
                       PackFaults& faults) {
  if (rank <= max_rank) return;
  faults.add(Errc::rank_exceeds_pool,
             place + "rank " + std::to_string(rank) + " exceeds the pool's " + std::to_string(max_rank));
}

template <class Pair>
void check_pair(Pair const& pair, Module const& module, std::string const& place, std::int32_t max_rank,
                bool biases, PackFaults& faults) {
  if (pair.rank < 0) faults.add(Errc::invalid_argument, place + "rank is " + std::to_string(pair.rank));
  check_room(place, pair.rank, max_rank, faults);
  if (magnitude_bits(detail::bit_cast<std::uint32_t>(pair.scale)) >= infinite_bits) {
    faults.add(Errc::out_of_range, place + "scale is not finite");
  }
  if (pair.rank < 1 || pair.rank > max_rank) return;
  check_tensor(pair.a, {pair.rank, module.k_in}, faults);
  check_tensor(pair.b, {module.n_out, pair.rank}, faults);
  if (!pair.bias) return;
  if (!biases) {
    faults.add(Errc::unsupported, "tensor '" + pair.bias->name + "': the pool was made without biases");
  }
  check_tensor(*pair.bias, {module.n_out}, faults);
}

/// What is said of an adapter of another model, whose sites mean other linears.
[[nodiscard]] inline Error other_model(std::string_view name) {
  return Error(Errc::shape_mismatch, "adapter '" + std::string(name) +
                                         "': was audited for another model than the pool's (ModelShape)");
}

/// Whether `up` has the A of `gate`, which may be null.
[[nodiscard]] inline bool may_share_a(ExpertPair const* gate, ExpertPair const& up) {
  return gate != nullptr && gate->linear == ExpertLinear::gate && up.linear == ExpertLinear::up &&
         gate->layer == up.layer && gate->expert == up.expert && gate->rank == up.rank &&
         gate->a.type == up.a.type && gate->a.shape == up.a.shape && gate->a.bytes == up.a.bytes;
}

/// Checks routers and experts of a pool that serves them.
inline void check_experts(Adapter const& adapter, ModelShape const& shape, std::int32_t max_rank,
                          PackFaults& faults) {
  MoeShape const& moe = shape.moe();
  auto const check = [&](auto const& pair, std::string const& place, Module const& module) {
    if (pair.rank == 0) faults.add(Errc::invalid_argument, place + "rank is 0");
    check_pair(pair, module, place, max_rank, true, faults);
  };
  std::int32_t router_before = -1;
  for (RouterPair const& pair : adapter.routers) {
    std::string const place = place_of(pair, shape);
    auto const index = moe.find(pair.layer);
    if (!index) {
      faults.add(Errc::not_found, place + "the layer has no experts");
      continue;
    }
    if (pair.layer <= router_before) faults.add(Errc::invalid_argument, place + "twice, or out of order");
    router_before = pair.layer;
    check(pair, place, moe.router(*index));
  }
  std::optional<std::tuple<std::int32_t, std::int32_t, ExpertLinear>> before;
  ExpertPair const* previous = nullptr;
  for (ExpertPair const& pair : adapter.experts) {
    std::string const place = place_of(pair, shape);
    auto const index = moe.find(pair.layer);
    bool const known = pair.linear <= ExpertLinear::down;
    if (!index || pair.expert < 0 || pair.expert >= moe.num_experts || !known) {
      faults.add(Errc::not_found, place + "the model does not have it");
      continue;
    }
    std::tuple const here(pair.layer, pair.expert, pair.linear);
    if (before && here <= *before) faults.add(Errc::invalid_argument, place + "twice, or out of order");
    if (pair.shares_a && !may_share_a(previous, pair)) {
      faults.add(Errc::invalid_argument, place + "shares_a, but its a is not that of a gate before it");
    }
    before = here;
    previous = &pair;
    check(pair, place, moe.linear(*index, pair.linear));
  }
}

/// Whether a pool for `shape` can hold the adapter, its token rows aside; every fault is named. `experts`:
/// the pool has memory for experts and routers. Errors: `invalid_argument` for no digest, a negative rank, a
/// place twice or out of order; `not_found` for a place that the model does not have; `rank_exceeds_pool`;
/// `shape_mismatch`, for an adapter of another model too; `out_of_range` for a scale that is not finite;
/// `unsupported` for tensors that the pool does not serve.
[[nodiscard]] inline Result<void> check_adapter(std::string_view name, Adapter const& adapter,
                                                ModelShape const& shape, std::int32_t max_rank, bool biases,
                                                bool leave_out_unserved, bool experts = false) {
  PackFaults faults(name);
  if (adapter.model != 0 && adapter.model != shape.fingerprint())
    return cuda::std::unexpected<Error>(other_model(name));
  if (adapter.digest == Digest{}) {
    faults.add(Errc::invalid_argument, "no content digest, without which a prefix cache could mix contents");
  }
  std::optional<std::size_t> previous;
  for (AdapterPair const& pair : adapter.pairs) {
    std::optional<std::size_t> const index = shape.find(pair.site);
    if (!index) {
      faults.add(Errc::not_found, "the model has no module " + std::to_string(pair.site.module) +
                                      " in layer " + std::to_string(pair.site.layer));
      continue;
    }
    if (previous && *index <= *previous) {
      faults.add(Errc::invalid_argument, "layer " + std::to_string(pair.site.layer) + " '" +
                                             shape.module(pair.site).name + "': twice, or not in site order");
    }
    previous = index;
    Module const& module = shape.module(pair.site);
    check_pair(pair, module, place_of(pair, shape), max_rank, biases, faults);
  }
  if (experts) check_experts(adapter, shape, max_rank, faults);
  if (!experts && !leave_out_unserved) {
    auto const refuse = [&faults](auto const& pairs) {  // the first speaks for what may be thousands
      if (pairs.empty()) return;
      faults.add(Errc::unsupported, "tensor '" + pairs.front().a.name + "' and " +
                                        std::to_string(2 * pairs.size() - 1) +
                                        " more: the pool was made without memory for experts");
    };
    refuse(adapter.routers);
    refuse(adapter.experts);
  }
  return faults.outcome();
}

}  // namespace detail
}  // namespace atlas::lora::inline v0
