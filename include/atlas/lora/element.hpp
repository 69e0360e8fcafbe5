// SPDX-License-Identifier: AGPL-3.0-only
//
// The element types of weights and activations, and rounding between them on bits, the same on host
// and device and usable in constant expressions.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// The object of type `To` that has the bits of `from`. Not CCCL's, whose header brings those of fp8, fp6 and
/// fp4 into every unit.
template <class To, class From>
[[nodiscard]] ATLAS_HD constexpr To bit_cast(From const& from) noexcept {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<To> &&
                std::is_trivially_copyable_v<From>);
  return __builtin_bit_cast(To, from);
}

}  // namespace detail

/// An element type by value, for code that learns the type at run time.
enum class ElementType : std::uint8_t { f32, f16, bf16 };

/// Bytes of one element.
[[nodiscard]] ATLAS_HD constexpr std::size_t element_bytes(ElementType type) noexcept {
  return type == ElementType::f32 ? 4 : 2;
}

/// The type's name as safetensors spells it: `"F32"`, `"F16"`, `"BF16"`.
[[nodiscard]] constexpr char const* to_string(ElementType type) noexcept {
  switch (type) {
    case ElementType::f32: return "F32";
    case ElementType::f16: return "F16";
    case ElementType::bf16: return "BF16";
  }
  return "unknown";
}

/// The types that operands may have.
template <class T>
concept Element = std::same_as<T, float> || std::same_as<T, __half> || std::same_as<T, __nv_bfloat16>;

/// The `ElementType` of `T`.
template <Element T>
inline constexpr ElementType element_type = std::same_as<T, float>    ? ElementType::f32
                                            : std::same_as<T, __half> ? ElementType::f16
                                                                      : ElementType::bf16;

/// f32 bits to bfloat16 bits, to nearest, ties to even. NaN stays NaN (its top mantissa bits, made
/// quiet); values beyond the largest finite one become infinity.
[[nodiscard]] ATLAS_HD constexpr std::uint16_t bf16_bits(std::uint32_t f32) noexcept {
  if ((f32 & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((f32 >> 16) | 0x40u);
  std::uint32_t const bias = 0x7fffu + ((f32 >> 16) & 1u);
  return static_cast<std::uint16_t>((f32 + bias) >> 16);
}

/// f32 bits to IEEE half bits, to nearest, ties to even, with subnormals. NaN stays NaN; values that
/// round beyond 65504 become infinity.
[[nodiscard]] ATLAS_HD constexpr std::uint16_t f16_bits(std::uint32_t f32) noexcept {
  std::uint32_t const sign = (f32 >> 16) & 0x8000u;
  std::uint32_t const magnitude = f32 & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and up
  if (magnitude >= 0x38800000u) {  // normal halves: rebias the exponent, round the 13 low bits
    std::uint32_t const rebased = magnitude - 0x38000000u;
    return static_cast<std::uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  }
  std::uint32_t const exponent = magnitude >> 23;
  if (exponent < 102u) return static_cast<std::uint16_t>(sign);  // below half the smallest subnormal
  std::uint32_t const mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  std::uint32_t const shift = 126u - exponent;  // 14 .. 24: units of 2^-24
  std::uint32_t const kept = mantissa >> shift;
  std::uint32_t const rest = mantissa & ((1u << shift) - 1u);
  std::uint32_t const half = 1u << (shift - 1u);
  std::uint32_t const up = (rest > half || (rest == half && (kept & 1u) != 0u)) ? 1u : 0u;
  return static_cast<std::uint16_t>(sign | (kept + up));
}

/// bfloat16 bits to the f32 bits of the same value.
[[nodiscard]] ATLAS_HD constexpr std::uint32_t f32_bits_of_bf16(std::uint16_t bits) noexcept {
  return static_cast<std::uint32_t>(bits) << 16;
}

/// IEEE half bits to the f32 bits of the same value.
[[nodiscard]] ATLAS_HD constexpr std::uint32_t f32_bits_of_f16(std::uint16_t bits) noexcept {
  std::uint32_t const sign = (bits & 0x8000u) << 16;
  std::uint32_t const exponent = (bits >> 10) & 0x1fu;
  std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return sign | 0x7f800000u | (mantissa << 13);
  if (exponent != 0u) return sign | ((exponent + 112u) << 23) | (mantissa << 13);
  if (mantissa == 0u) return sign;
  std::uint32_t shifted_exponent = 113u;  // a subnormal half is a normal f32
  while ((mantissa & 0x400u) == 0u) {
    mantissa <<= 1;
    --shifted_exponent;
  }
  return sign | (shifted_exponent << 23) | ((mantissa & 0x3ffu) << 13);
}

/// The value of `x` in f32; exact.
template <Element T>
[[nodiscard]] ATLAS_HD constexpr float to_f32(T x) noexcept {
  if constexpr (std::same_as<T, float>) {
    return x;
  } else if constexpr (std::same_as<T, __half>) {
    return detail::bit_cast<float>(f32_bits_of_f16(detail::bit_cast<std::uint16_t>(x)));
  } else {
    return detail::bit_cast<float>(f32_bits_of_bf16(detail::bit_cast<std::uint16_t>(x)));
  }
}

/// `x` rounded to `T`, to nearest, ties to even.
template <Element T>
[[nodiscard]] ATLAS_HD constexpr T from_f32(float x) noexcept {
  if constexpr (std::same_as<T, float>) {
    return x;
  } else if constexpr (std::same_as<T, __half>) {
    return detail::bit_cast<__half>(f16_bits(detail::bit_cast<std::uint32_t>(x)));
  } else {
    return detail::bit_cast<__nv_bfloat16>(bf16_bits(detail::bit_cast<std::uint32_t>(x)));
  }
}

}  // namespace atlas::lora::inline v0
