// SPDX-License-Identifier: AGPL-3.0-only
//
// PEFT's pairs on fused experts (3-D parameters) taken apart into one pair for each expert's linear. Of the
// two indices that share an axis, the expert is the slowest in lora_A and the fastest in lora_B.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/load_options.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"

namespace atlas::lora::inline v0::detail {

/// The fused parameters that a layer's experts may have.
enum class FusedParameter : std::uint8_t {
  gate_up,  ///< `[experts, 2 * intermediate, hidden]`, gate's rows before up's
  down,     ///< `[experts, hidden, intermediate]`
};

/// Whether shapes fit one way round, the other, both or neither.
struct FusedFit {
  bool current = false;
  bool older = false;
};

/// How lora_A `[experts * rank, a_width]` and lora_B `[b_width, experts * rank]` fit a parameter.
[[nodiscard]] constexpr FusedFit fused_fit(std::int64_t a_width, std::int64_t b_width, std::int64_t n_out,
                                           std::int64_t k_in) noexcept {
  return {a_width == k_in && b_width == n_out, a_width == n_out && b_width == k_in};
}

/// A tensor `[rows, columns]` whose element (row, column) is element `row * row_step + column * column_step`
/// from `first` of `source`.
[[nodiscard]] inline HostTensor gathered(HostTensor const& source, std::int64_t rows, std::int64_t columns,
                                         std::int64_t first, std::int64_t row_step,
                                         std::int64_t column_step) {
  std::size_t const size = element_bytes(source.type);
  HostTensor out{source.name, source.type, {rows, columns}, {}};
  out.bytes.resize(static_cast<std::size_t>(rows * columns) * size);
  std::byte* to = out.bytes.data();
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t from = first + row * row_step;
    for (std::int64_t column = 0; column < columns; ++column, from += column_step, to += size) {
      std::memcpy(to, source.bytes.data() + static_cast<std::size_t>(from) * size, size);
    }
  }
  return out;
}

/// Takes one audited fused pair apart. `a` is `[experts * rank, any]` and `b` `[any, experts * rank]`;
/// `older` says which way round. Of `gate_up`, n_out of either linear is half the parameter's.
inline void append_experts(HostTensor const& a, HostTensor const& b, std::int32_t layer, float scale,
                           FusedParameter parameter, bool older, std::int32_t experts,
                           std::vector<ExpertPair>& out) {
  std::int64_t const all = a.shape[0];
  std::int64_t const rank = all / experts;
  std::int64_t const k_in = older ? b.shape[0] : a.shape[1];
  bool const split = parameter == FusedParameter::gate_up;
  std::int64_t const n_out = (older ? a.shape[1] : b.shape[0]) / (split ? 2 : 1);
  for (std::int32_t expert = 0; expert < experts; ++expert) {
    for (std::int64_t part = 0; part < (split ? 2 : 1); ++part) {
      ExpertPair pair;
      pair.layer = layer;
      pair.expert = expert;
      pair.linear = !split ? ExpertLinear::down : part == 0 ? ExpertLinear::gate : ExpertLinear::up;
      pair.rank = static_cast<std::int32_t>(rank);
      pair.scale = scale;
      pair.shares_a = part == 1;
      std::int64_t const row = part * n_out;
      if (older) {
        pair.a = gathered(b, rank, k_in, expert, experts, all);
        pair.b = gathered(a, n_out, rank, expert * rank * a.shape[1] + row, 1, a.shape[1]);
      } else {
        pair.a = gathered(a, rank, k_in, expert * rank * k_in, k_in, 1);
        pair.b = gathered(b, n_out, rank, row * all + expert, all, experts);
      }
      out.push_back(std::move(pair));
    }
  }
}

}  // namespace atlas::lora::inline v0::detail
