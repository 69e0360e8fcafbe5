// SPDX-License-Identifier: AGPL-3.0-only
//
// What an adapter computes beside what PEFT computed with it: deltas of its linears, and changes of the
// parameters that its experts and routers are. Only inspect_adapter.cpp includes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/reference/delta.hpp"
#include "atlas/peft.hpp"

namespace inspect_adapter {

using namespace atlas::lora;

/// One module's delta beside PEFT's.
struct Comparison {
  std::string module;
  double largest = 0.0;  // PEFT's largest |delta|
  double error = 0.0;    // the largest |ours - PEFT's| by that
  std::string fault{};   // why they could not be compared
  [[nodiscard]] bool held() const { return fault.empty() && error <= 1e-5; }
};

inline Result<std::vector<float>> in_f32(Result<HostTensor> const& tensor) {
  if (!tensor) return cuda::std::unexpected<Error>(tensor.error());
  std::vector<float> out(tensor->bytes.size() / element_bytes(tensor->type));
  auto const counts = convert<float>(*tensor, std::span<float>(out));
  if (!counts) return cuda::std::unexpected<Error>(counts.error());
  return out;
}

/// The path in the base model: a pair's name without what PEFT puts around it.
template <class Pair>
std::string module_of(Pair const& pair) {
  std::string_view name = pair.a.name;
  name.remove_prefix(std::string_view("base_model.model.").size());
  return std::string(name.substr(0, name.rfind(".lora_A.")));
}

/// Our float32 delta for `rows` rows of `x`, by the library's reference on the CPU.
template <class Pair>
Result<std::vector<float>> delta_of(Pair const& pair, std::vector<float> const& x, std::int64_t rows) {
  auto const a = in_f32(pair.a);
  auto const b = in_f32(pair.b);
  auto const bias = pair.bias ? in_f32(*pair.bias) : Result<std::vector<float>>(std::vector<float>{});
  for (auto const* const weights : {&a, &b, &bias}) {
    if (!*weights) return cuda::std::unexpected<Error>(weights->error());
  }
  std::int64_t const k_in = pair.a.shape[1];
  std::int64_t const n_out = pair.b.shape[0];
  RouteCell<float> const cell{
      a->data(), b->data(), bias->empty() ? nullptr : bias->data(), pair.scale, pair.rank, pair.rank, 0};
  RouteTable<float> const table{&cell, sizeof cell, 1, pair.rank, k_in, n_out};
  std::vector<float> y(static_cast<std::size_t>(rows * n_out));
  std::vector<float> xa(static_cast<std::size_t>(pair.rank));
  std::vector<std::int32_t> const slots(static_cast<std::size_t>(rows), 0);
  reference_delta<float, float>(table, slots, x.data(), k_in, y.data(), n_out, xa);
  return y;
}

/// The change of a weight `[n_out, k_in]`: our deltas of the unit rows, transposed.
template <class Pair>
Result<std::vector<float>> change_of(Pair const& pair) {
  auto const k_in = static_cast<std::size_t>(pair.a.shape[1]),
             n_out = static_cast<std::size_t>(pair.b.shape[0]);
  std::vector<float> unit_rows(k_in * k_in);
  for (std::size_t k = 0; k < k_in; ++k) unit_rows[k * k_in + k] = 1.0F;
  auto const rows = delta_of(pair, unit_rows, pair.a.shape[1]);
  if (!rows) return rows;
  std::vector<float> change(n_out * k_in);
  for (std::size_t n = 0; n < n_out; ++n) {
    for (std::size_t k = 0; k < k_in; ++k) change[n * k_in + k] = (*rows)[k * n_out + n];
  }
  return change;
}

/// Takes up how far `ours` are from `theirs`, by PEFT's largest.
inline void compare_values(Result<std::vector<float>> const& ours, Result<std::vector<float>> const& theirs,
                           Comparison& out) {
  if (!ours || !theirs) {
    out.fault = ours ? theirs.error().message : ours.error().message;
    return;
  }
  if (ours->size() != theirs->size()) {
    out.fault = "PEFT's have another shape";
    return;
  }
  if (ours->empty() || !std::all_of(ours->begin(), ours->end(), [](float y) { return std::isfinite(y); })) {
    out.fault = ours->empty() ? "there are no rows" : "our delta is not finite";
    return;
  }
  for (std::size_t i = 0; i < ours->size(); ++i) {
    out.largest = std::max(out.largest, std::abs(static_cast<double>((*theirs)[i])));
    out.error =
        std::max(out.error, std::abs(static_cast<double>((*ours)[i]) - static_cast<double>((*theirs)[i])));
  }
  if (out.largest > 0.0) out.error /= out.largest;
}

/// Fills in the comparison of one pair with `MODULE|x` and `MODULE|delta` of a file.
template <class Pair>
void compare_pair(Pair const& pair, SafetensorsFile const& expected, Comparison& out) {
  TensorInfo const* const x_info = expected.find(out.module + "|x");
  TensorInfo const* const delta_info = expected.find(out.module + "|delta");
  std::vector<std::int64_t> const inputs{x_info->shape.empty() ? 0 : x_info->shape[0], pair.a.shape[1]};
  if (delta_info == nullptr || x_info->shape != inputs ||
      delta_info->shape != std::vector<std::int64_t>{inputs[0], pair.b.shape[0]}) {
    out.fault = "x and delta do not fit the pair";
    return;
  }
  auto const x = in_f32(expected.read(x_info->name));
  compare_values(x ? delta_of(pair, *x, inputs[0]) : x, in_f32(expected.read(delta_info->name)), out);
}

/// The pair of a linear, a router or an expert's linear, by its path in the base model.
struct Place {
  AdapterPair const* linear = nullptr;
  RouterPair const* router = nullptr;
  ExpertPair const* expert = nullptr;
};

/// Our change of a parameter `MODULE|NAME`: a router's weight, or fused experts one after the other. Linears
/// that the adapter leaves alone change by nothing.
inline Result<std::vector<float>> parameter_change(Adapter const& adapter,
                                                   std::map<std::string, Place> const& places,
                                                   std::string const& module, std::string const& name,
                                                   std::vector<std::int64_t> const& shape) {
  auto const found = places.find(module);
  if (found == places.end()) return fail(Errc::not_found, "the adapter has no pair there");
  if (found->second.router != nullptr) return change_of(*found->second.router);
  if (found->second.expert == nullptr || shape.size() != 3) {
    return fail(Errc::unsupported, "is not a parameter of experts or a router");
  }
  bool const down = name == "down_proj";
  auto const rows = static_cast<std::size_t>(down ? shape[1] : shape[1] / 2);
  std::size_t const one = rows * static_cast<std::size_t>(shape[2]);
  std::vector<float> all(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]));
  for (ExpertPair const& pair : adapter.experts) {
    if (pair.layer != found->second.expert->layer || (pair.linear == ExpertLinear::down) != down) continue;
    auto const change = change_of(pair);
    if (!change) return change;
    std::size_t const part = pair.linear == ExpertLinear::up ? 1 : 0;
    std::size_t const first = (static_cast<std::size_t>(pair.expert) * (down ? 1 : 2) + part) * one;
    if (change->size() != one || first + one > all.size()) {
      return fail(Errc::shape_mismatch, "PEFT's have another shape");
    }
    std::copy(change->begin(), change->end(), all.begin() + static_cast<std::ptrdiff_t>(first));
  }
  return all;
}

/// Compares every module that a file has an input for, and every parameter that it has a change of.
inline std::vector<Comparison> compare_all(Adapter const& adapter, SafetensorsFile const& expected) {
  std::map<std::string, Place> places;
  for (AdapterPair const& pair : adapter.pairs) places[module_of(pair)].linear = &pair;
  for (RouterPair const& pair : adapter.routers) places[module_of(pair)].router = &pair;
  for (ExpertPair const& pair : adapter.experts) places[module_of(pair)].expert = &pair;
  constexpr std::string_view change = "|delta_weight";
  std::vector<Comparison> out;
  for (TensorInfo const& tensor : expected.tensors()) {
    if (tensor.name.ends_with(change)) {
      Comparison comparison{tensor.name.substr(0, tensor.name.size() - change.size())};
      std::size_t const bar = comparison.module.find('|');
      std::string const module = comparison.module.substr(0, bar);
      std::string const name = bar == std::string::npos ? "" : comparison.module.substr(bar + 1);
      compare_values(parameter_change(adapter, places, module, name, tensor.shape),
                     in_f32(expected.read(tensor.name)), comparison);
      out.push_back(std::move(comparison));
      continue;
    }
    if (!tensor.name.ends_with("|x")) continue;
    Comparison comparison{tensor.name.substr(0, tensor.name.size() - 2)};
    auto const found = places.find(comparison.module);
    if (found == places.end()) {
      comparison.fault = "the adapter has no pair there";
    } else if (found->second.linear != nullptr) {
      compare_pair(*found->second.linear, expected, comparison);
    } else if (found->second.router != nullptr) {
      compare_pair(*found->second.router, expected, comparison);
    } else {
      compare_pair(*found->second.expert, expected, comparison);
    }
    out.push_back(std::move(comparison));
  }
  return out;
}

}  // namespace inspect_adapter
