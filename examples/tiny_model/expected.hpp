// SPDX-License-Identifier: AGPL-3.0-only
//
// What PEFT computed with a tiny model, and how logits are compared with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <atlas/lora.hpp>
#include <atlas/peft.hpp>

#include "memory.hpp"

namespace tiny_model {

using Logits = std::vector<std::vector<float>>;  // [position][vocab]

/// expected.safetensors of a model: one row a request, the first of the base model, then one an adapter.
struct Expected {
  std::vector<std::vector<std::int32_t>> tokens;  ///< [row][position]
  std::vector<Logits> logits;                     ///< [row]: of the row's adapter
  std::vector<Logits> base_logits;                ///< [row]: of the base model
};

/// Reads `directory`/expected.safetensors; throws when a tensor is missing or has another shape or type.
inline Expected read_expected(std::string const& directory) {
  auto const file = expect(atlas::lora::SafetensorsFile::open(directory + "/expected.safetensors"));
  auto const ids = expect(file.read_raw("input_ids"));
  if (ids.dtype != "I32" || ids.shape.size() != 2) {
    throw std::runtime_error(file.path() + ": input_ids is not I32 [rows, positions]");
  }
  if (ids.shape[0] < 4 || ids.shape[1] < 8) {
    throw std::runtime_error(file.path() + ": input_ids has fewer than 4 rows or 8 positions");
  }
  auto const rows = static_cast<std::size_t>(ids.shape[0]),
             positions = static_cast<std::size_t>(ids.shape[1]);

  Expected expected;
  for (std::size_t row = 0; row < rows; ++row) {
    std::size_t const bytes = positions * sizeof(std::int32_t);
    std::memcpy(expected.tokens.emplace_back(positions).data(), ids.bytes.data() + row * bytes, bytes);
  }
  auto const read_logits = [&](char const* name) {
    auto const tensor = expect(file.read(name));
    if (tensor.type != atlas::lora::ElementType::f32 || tensor.shape.size() != 3 ||
        tensor.shape[0] != ids.shape[0] || tensor.shape[1] != ids.shape[1] || tensor.shape[2] < 2) {
      throw std::runtime_error(file.path() + ": " + name + " is not F32 [rows, positions, vocab]");
    }
    auto const vocab = static_cast<std::size_t>(tensor.shape[2]);
    std::vector<Logits> logits(rows, Logits(positions, std::vector<float>(vocab)));
    std::byte const* from = tensor.bytes.data();
    for (Logits& row : logits) {
      for (std::vector<float>& position : row) {
        std::memcpy(position.data(), from, vocab * sizeof(float));
        from += vocab * sizeof(float);
      }
    }
    return logits;
  };
  expected.logits = read_logits("logits");
  expected.base_logits = read_logits("base_logits");
  return expected;
}

/// The largest |a - b|; infinite when anything is not a number.
inline float largest_difference(std::vector<float> const& a, std::vector<float> const& b) {
  float largest = a.size() == b.size() ? 0.0F : std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    float const difference = std::abs(a[i] - b[i]);
    if (difference <= largest) continue;
    largest = std::isnan(difference) ? std::numeric_limits<float>::infinity() : difference;
  }
  return largest;
}

/// The same over the first `positions` positions, without those that `skipped` says (empty: none).
inline float largest_difference(Logits const& a, Logits const& b, std::size_t positions,
                                std::vector<bool> const& skipped = {}) {
  float largest = 0.0F;
  for (std::size_t i = 0; i < positions; ++i) {
    if (i < skipped.size() && skipped[i]) continue;
    largest = std::max(largest, largest_difference(a.at(i), b.at(i)));
  }
  return largest;
}

using Choices = std::vector<std::vector<std::int32_t>>;  // [position]: the experts of all layers

/// The positions at which two runs chose different experts, where rounding came between two that are near
/// each other: what follows cannot be compared. As many as `a` has.
inline std::vector<bool> differing(Choices const& a, Choices const& b) {
  std::vector<bool> differ(a.size());
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) differ[i] = a[i] != b[i];
  return differ;
}

/// How far the largest logit is above the second largest.
inline float lead(std::vector<float> logits) {
  std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
  return logits[0] - logits[1];
}

}  // namespace tiny_model
