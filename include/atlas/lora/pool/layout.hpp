// SPDX-License-Identifier: AGPL-3.0-only
//
// Where each site's A, B and bias lie in a physical slot. A pair is packed at its own rank, but starts where
// a pair of max_rank would, so that a slot fits any adapter and offsets never depend on the tenant.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/model/model_shape.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// The largest rank that a pool can be made for.
inline constexpr std::int32_t largest_pool_rank = 1 << 16;

/// `rank` rounded up to a multiple of 8: the row stride at which B is packed, so that its rows are 16-byte
/// aligned for 2-byte elements. `rank` in `[0, largest_pool_rank]`.
[[nodiscard]] constexpr std::int32_t padded_rank(std::int32_t rank) noexcept { return (rank + 7) / 8 * 8; }

namespace detail {
/// `a * b + c`; none when it does not fit 63 bits, so that offsets are `std::int64_t` too.
[[nodiscard]] constexpr std::optional<std::size_t> multiply_add(std::size_t a, std::size_t b,
                                                                std::size_t c) noexcept {
  constexpr auto most = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
  if (c > most || (b != 0 && a > (most - c) / b)) return std::nullopt;
  return a * b + c;
}

/// `n` rounded up to a multiple of `step`; `n` at most 2^63.
[[nodiscard]] constexpr std::size_t aligned_up(std::size_t n, std::size_t step) noexcept {
  return (n + step - 1) / step * step;
}
}  // namespace detail

/// The layout of one physical slot: for each site of `ModelShape::sites()`, in order, A `[max_rank, k_in]`
/// and then B `[n_out, max_rank]`, with nothing between. Biases have a region of their own per slot, each
/// `[n_out]`. All offsets are bytes from the start of the slot (of its bias region) and multiples of 16.
class SlotLayout {
 public:
  /// A layout without sites.
  SlotLayout() = default;

  /// The layout for a model. `max_rank` is rounded up to a multiple of 8; `element_bytes` is 2 or 4.
  /// Errors: `invalid_argument` for a rank outside `[1, largest_pool_rank]` or a model without linears,
  /// `out_of_range` for a slot of 2^63 bytes or more.
  [[nodiscard]] static Result<SlotLayout> create(ModelShape const& shape, std::int32_t max_rank,
                                                 std::size_t element_bytes) {
    if (max_rank < 1 || max_rank > largest_pool_rank) {
      return fail(Errc::invalid_argument, "pool: max_rank is " + std::to_string(max_rank) + ", not in [1, " +
                                              std::to_string(largest_pool_rank) + "]");
    }
    if (shape.sites().empty()) return fail(Errc::invalid_argument, "pool: the model has no linears");
    SlotLayout layout;
    layout.max_rank_ = padded_rank(max_rank);
    for (Site const site : shape.sites()) {
      if (!layout.append(shape.module(site), element_bytes)) {
        return fail(Errc::out_of_range, "pool: a slot of max_rank " + std::to_string(max_rank) +
                                            " needs 2^63 bytes or more, reached at layer " +
                                            std::to_string(site.layer) + " '" + shape.module(site).name +
                                            "'");
      }
    }
    return layout;
  }

  /// The capacity in ranks: a multiple of 8.
  [[nodiscard]] std::int32_t max_rank() const noexcept { return max_rank_; }
  /// Sites, as many as the model's.
  [[nodiscard]] std::size_t sites() const noexcept { return offsets_.size(); }
  /// Bytes of all A and B; slot `k` begins at `k * slot_bytes()`.
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  /// Bytes of a slot's bias region.
  [[nodiscard]] std::size_t bias_bytes() const noexcept { return bias_bytes_; }
  /// The largest site's A, B and bias together, as they lie behind one another in staging.
  [[nodiscard]] std::size_t largest_site_bytes() const noexcept { return largest_site_bytes_; }

  /// Where site `index`'s A begins, in bytes from the slot's first; `index` below `sites()`.
  [[nodiscard]] std::size_t a_offset(std::size_t index) const noexcept { return offsets_[index].a; }
  /// Where its B begins, likewise.
  [[nodiscard]] std::size_t b_offset(std::size_t index) const noexcept { return offsets_[index].b; }
  /// Where its bias begins, in bytes from the first of the slot's bias region.
  [[nodiscard]] std::size_t bias_offset(std::size_t index) const noexcept { return offsets_[index].bias; }

 private:
  struct Offsets {
    std::size_t a = 0;
    std::size_t b = 0;
    std::size_t bias = 0;
  };

  bool append(Module const& module, std::size_t element_bytes) {
    auto const k_in = static_cast<std::size_t>(module.k_in);
    auto const n_out = static_cast<std::size_t>(module.n_out);
    std::size_t const rank_bytes = static_cast<std::size_t>(max_rank_) * element_bytes;
    Offsets next{slot_bytes_, 0, bias_bytes_};
    auto const b = detail::multiply_add(k_in, rank_bytes, next.a);
    if (!b) return false;
    auto const end = detail::multiply_add(n_out, rank_bytes, *b);
    if (!end) return false;
    std::size_t const bias = detail::aligned_up(n_out * element_bytes, 16);  // n_out fits 31 bits
    auto const bias_end = detail::multiply_add(1, bias, bias_bytes_);
    auto const site = detail::multiply_add(1, bias, *end - next.a);
    if (!bias_end || !site) return false;
    next.b = *b;
    offsets_.push_back(next);
    slot_bytes_ = *end;
    bias_bytes_ = *bias_end;
    largest_site_bytes_ = std::max(largest_site_bytes_, *site);
    return true;
  }

  std::int32_t max_rank_ = 0;
  std::size_t slot_bytes_ = 0;
  std::size_t bias_bytes_ = 0;
  std::size_t largest_site_bytes_ = 0;
  std::vector<Offsets> offsets_;
};

}  // namespace atlas::lora::inline v0
