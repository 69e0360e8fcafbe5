// SPDX-License-Identifier: AGPL-3.0-only
//
// Narrowing an adapter's tensors to the element type of a pool, with every loss counted.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// What a conversion does with values that the target cannot hold. By default they are errors.
struct ConversionPolicy {
  bool saturate_overflow =
      false;                     ///< a finite value too large becomes the largest finite one, never infinity
  bool keep_non_finite = false;  ///< NaN and infinity in the source stay what they are
};

/// How many elements a conversion changed beyond rounding, or found to be no numbers.
struct ConversionCounts {
  std::int64_t overflow = 0;   ///< finite, and rounding to infinity in the target
  std::int64_t underflow = 0;  ///< not zero, and rounding to zero in the target
  std::int64_t nan = 0;        ///< NaN in the source
  std::int64_t infinity = 0;   ///< infinity in the source

  friend constexpr bool operator==(ConversionCounts const&, ConversionCounts const&) = default;
};

/// The largest finite value of `T`.
template <Element T>
inline constexpr float largest_finite = std::same_as<T, float>    ? std::numeric_limits<float>::max()
                                        : std::same_as<T, __half> ? 65504.0F
                                                                  : 3.38953139e38F;  // 255 * 2^120

namespace detail {

/// The bits of element `index` of a tensor in f32, which holds every value of every element type.
[[nodiscard]] inline std::uint32_t f32_bits_at(HostTensor const& tensor, std::size_t index) noexcept {
  if (tensor.type == ElementType::f32) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, tensor.bytes.data() + 4 * index, 4);
    return bits;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, tensor.bytes.data() + 2 * index, 2);
  return tensor.type == ElementType::f16 ? f32_bits_of_f16(bits) : f32_bits_of_bf16(bits);
}

/// An f32's bits without its sign: above `infinite_bits` for NaN. What the bits say holds with -ffast-math
/// too, which takes every float for finite.
[[nodiscard]] constexpr std::uint32_t magnitude_bits(std::uint32_t f32) noexcept { return f32 & 0x7fffffffU; }
inline constexpr std::uint32_t infinite_bits = 0x7f800000U;

/// The bits in f32 of what an f32 is rounded to in `T`.
template <Element T>
[[nodiscard]] constexpr std::uint32_t rounded_bits(std::uint32_t f32) noexcept {
  if constexpr (std::same_as<T, float>) {
    return f32;
  } else if constexpr (std::same_as<T, __half>) {
    return f32_bits_of_f16(f16_bits(f32));
  } else {
    return f32_bits_of_bf16(bf16_bits(f32));
  }
}

/// Rounds the f32 of the given bits and counts what happens to it.
template <Element T>
[[nodiscard]] T narrow(std::uint32_t f32, ConversionCounts& counts) noexcept {
  std::uint32_t const magnitude = magnitude_bits(f32);
  std::uint32_t const rounded = magnitude_bits(rounded_bits<T>(f32));
  float const value = detail::bit_cast<float>(f32);
  if (magnitude > infinite_bits) {
    ++counts.nan;
  } else if (magnitude == infinite_bits) {
    ++counts.infinity;
  } else if (rounded == infinite_bits) {
    ++counts.overflow;
    return from_f32<T>((f32 >> 31) != 0 ? -largest_finite<T> : largest_finite<T>);
  } else if (magnitude != 0 && rounded == 0) {
    ++counts.underflow;
  }
  return from_f32<T>(value);
}

/// The words of a refused conversion: what came first, and how much there is of it.
[[nodiscard]] inline std::string refusal(HostTensor const& source, ElementType target, std::size_t first,
                                         ConversionCounts const& counts) {
  char value[32];
  std::snprintf(value, sizeof value, "%.9g",
                static_cast<double>(detail::bit_cast<float>(f32_bits_at(source, first))));
  return "tensor '" + printable(source.name) + "': element " + std::to_string(first) + " is " + value +
         ", which " + to_string(target) + " cannot hold (" + std::to_string(counts.overflow) +
         " beyond its range, " + std::to_string(counts.nan) + " NaN, " + std::to_string(counts.infinity) +
         " infinite)";
}

}  // namespace detail

/// Writes the elements of `source` to `out` as `T`, to nearest, ties to even, in the same order; `out` has
/// exactly as many. Widening is exact. Errors: `invalid_argument` when the sizes differ; `out_of_range` for a
/// finite value beyond T's range, NaN or infinity that `policy` does not allow, naming the tensor, the first
/// such element and its value; `out` then holds nothing of use.
template <Element T>
[[nodiscard]] Result<ConversionCounts> convert(HostTensor const& source, std::span<T> out,
                                               ConversionPolicy policy = {}) {
  std::size_t const count = source.bytes.size() / element_bytes(source.type);
  if (out.size() != count || source.bytes.size() % element_bytes(source.type) != 0) {
    return fail(Errc::invalid_argument, "tensor '" + detail::printable(source.name) +
                                            "': " + std::to_string(source.bytes.size()) +
                                            " bytes do not fill " + std::to_string(out.size()) + " elements");
  }
  ConversionCounts counts;
  std::size_t first = count;
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = detail::narrow<T>(detail::f32_bits_at(source, i), counts);
    bool const refused = (!policy.saturate_overflow && counts.overflow > 0) ||
                         (!policy.keep_non_finite && counts.nan + counts.infinity > 0);
    if (refused && first == count) first = i;
  }
  if (first != count)
    return fail(Errc::out_of_range, detail::refusal(source, element_type<T>, first, counts));
  return counts;
}

}  // namespace atlas::lora::inline v0
