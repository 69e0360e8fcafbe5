// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/convert.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../outcome.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

static_assert(bf16_bits(std::bit_cast<std::uint32_t>(largest_finite<__nv_bfloat16>)) == 0x7f7f);
static_assert(f32_bits_of_bf16(0x7f7f) == std::bit_cast<std::uint32_t>(largest_finite<__nv_bfloat16>));
static_assert(f16_bits(std::bit_cast<std::uint32_t>(largest_finite<__half>)) == 0x7bff);

namespace {

template <class Bits>
HostTensor tensor_of(ElementType type, std::vector<Bits> const& elements) {
  HostTensor tensor{
      "t", type, {std::ssize(elements)}, std::vector<std::byte>(elements.size() * sizeof(Bits))};
  if (!elements.empty()) std::memcpy(tensor.bytes.data(), elements.data(), tensor.bytes.size());
  return tensor;
}
HostTensor f32(std::vector<float> const& values) { return tensor_of(ElementType::f32, values); }

template <Element T>
std::vector<float> converted(HostTensor const& source, ConversionCounts expected,
                             ConversionPolicy policy = {}) {
  std::vector<T> out(source.bytes.size() / element_bytes(source.type));
  CHECK(good(convert<T>(source, std::span<T>(out), policy)) == expected);
  std::vector<float> values;
  for (T const x : out) values.push_back(to_f32(x));
  return values;
}

template <Element T>
std::string refusal(HostTensor const& source, ConversionPolicy policy = {}) {
  std::vector<T> out(source.bytes.size() / element_bytes(source.type));
  Error const error = bad(convert<T>(source, std::span<T>(out), policy));
  CHECK(error.code == Errc::out_of_range);
  return error.message;
}

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

}  // namespace

TEST_CASE("bf16 rounds to nearest, ties to even") {
  CHECK(converted<__nv_bfloat16>(f32({1.00390625F, 257.0F, 1.01171875F, -2.5F}), {}) ==
        std::vector<float>{1.0F, 256.0F, 1.015625F, -2.5F});
}

TEST_CASE("a value beyond the target is refused by tensor, place and value, or saturated on request") {
  HostTensor const source = f32({1.0F, 70000.0F, 1e-8F, -65520.0F});
  CHECK(refusal<__half>(source) ==
        "tensor 't': element 1 is 70000, which F16 cannot hold (2 beyond its range, 0 NaN, 0 infinite)");
  auto const values = converted<__half>(source, {.overflow = 2, .underflow = 1}, {.saturate_overflow = true});
  CHECK(values == std::vector<float>{1.0F, 65504.0F, 0.0F, -65504.0F});
  CHECK(converted<__half>(f32({65519.0F}), {}) == std::vector<float>{65504.0F});  // rounds down, so it fits
  CHECK(says(refusal<__nv_bfloat16>(f32({3.4e38F})), "BF16 cannot hold (1 beyond"));
}

TEST_CASE("a refusal is one line whatever the tensor is called") {
  HostTensor source = f32({70000.0F});
  source.name = "a\nb\x7f";
  CHECK(refusal<__half>(source) ==
        "tensor 'a?b?': element 0 is 70000, which F16 cannot hold (1 beyond its range, 0 NaN, 0 infinite)");
  auto const counts = convert<float>(source, std::span<float>());
  REQUIRE_FALSE(counts);
  CHECK(counts.error().message == "tensor 'a?b?': 4 bytes do not fill 0 elements");
}

TEST_CASE("a small value that becomes zero is counted and one that becomes subnormal is not") {
  CHECK(converted<__half>(f32({6e-8F, 2e-8F, -2e-8F, 0.0F, -0.0F}), {.underflow = 2})[0] > 0.0F);
}

TEST_CASE("NaN and infinity are refused, saturating or not, and kept and counted on request") {
  HostTensor const source = f32({not_a_number, infinity, -infinity, 2.0F});
  CHECK(refusal<__half>(source).find(
            "element 0 is nan, which F16 cannot hold (0 beyond its range, 1 NaN, 2 inf") !=
        std::string::npos);
  CHECK_FALSE(refusal<__nv_bfloat16>(source, {.saturate_overflow = true}).empty());
  CHECK_FALSE(refusal<float>(source).empty());
  auto const values = converted<__half>(source, {.nan = 1, .infinity = 2}, {.keep_non_finite = true});
  CHECK(std::isnan(values[0]));
  CHECK(values[1] == infinity);
  CHECK(values[2] == -infinity);
  CHECK_FALSE(refusal<__half>(f32({70000.0F}), {.keep_non_finite = true}).empty());
}

TEST_CASE("a narrow source is widened exactly and narrowed to the other narrow type like any value") {
  HostTensor const halves = tensor_of<std::uint16_t>(ElementType::f16, {0x3c00, 0x0001, 0x7bff, 0x3c01});
  CHECK(converted<float>(halves, {}) == std::vector<float>{1.0F, 0x1p-24F, 65504.0F, 1.0F + 0x1p-10F});
  CHECK(converted<__nv_bfloat16>(halves, {}) == std::vector<float>{1.0F, 0x1p-24F, 65536.0F, 1.0F});
  HostTensor const brain =
      tensor_of<std::uint16_t>(ElementType::bf16, {0x3f80, 0x4780, 0x3080});  // 1, 65536, 2^-30
  CHECK(converted<float>(brain, {}) == std::vector<float>{1.0F, 65536.0F, 0x1p-30F});
  CHECK(converted<__half>(brain, {.overflow = 1, .underflow = 1}, {.saturate_overflow = true}) ==
        std::vector<float>{1.0F, 65504.0F, 0.0F});
}

TEST_CASE("sizes that differ are refused and nothing is written") {
  std::vector<float> out(3, 7.0F);
  auto const counts = convert<float>(f32({1.0F, 2.0F}), std::span<float>(out));
  REQUIRE_FALSE(counts);
  CHECK(counts.error().code == Errc::invalid_argument);
  CHECK(out == std::vector<float>(3, 7.0F));
  HostTensor odd = f32({1.0F});
  odd.bytes.resize(3);
  CHECK_FALSE(convert<float>(odd, std::span<float>(out.data(), 0)));
  CHECK(convert<float>(f32({}), std::span<float>()).has_value());
}

TEST_CASE("every value of 16 bits converts as the CUDA headers' own host functions do") {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  ConversionPolicy const anything{.saturate_overflow = false, .keep_non_finite = true};
  std::vector<float> wide(all.size());
  std::vector<__nv_bfloat16> brain(all.size());
  std::vector<__half> halves(all.size());
  REQUIRE(convert<float>(tensor_of(ElementType::f16, all), std::span<float>(wide), anything));
  REQUIRE(
      convert<__nv_bfloat16>(tensor_of(ElementType::f16, all), std::span<__nv_bfloat16>(brain), anything));
  auto const counts = convert<__half>(tensor_of(ElementType::bf16, all), std::span<__half>(halves),
                                      {.saturate_overflow = true, .keep_non_finite = true});
  REQUIRE(counts);
  std::size_t wrong = 0;
  std::int64_t overflow = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    float const value = __half2float(std::bit_cast<__half>(all[i]));
    bool const number = !std::isnan(value);
    wrong += number ? std::bit_cast<std::uint32_t>(wide[i]) != std::bit_cast<std::uint32_t>(value)
                    : !std::isnan(wide[i]);
    wrong += number ? std::bit_cast<std::uint16_t>(brain[i]) !=
                          std::bit_cast<std::uint16_t>(__float2bfloat16_rn(value))
                    : !std::isnan(to_f32(brain[i]));
    float const from_brain = __bfloat162float(std::bit_cast<__nv_bfloat16>(all[i]));
    __half const expected = __float2half_rn(from_brain);
    bool const over = std::isinf(to_f32(expected)) && !std::isinf(from_brain);
    overflow += over;
    if (std::isnan(from_brain)) {
      wrong += !std::isnan(to_f32(halves[i]));
    } else if (over) {
      wrong += to_f32(halves[i]) != std::copysign(65504.0F, from_brain);
    } else {
      wrong += std::bit_cast<std::uint16_t>(halves[i]) != std::bit_cast<std::uint16_t>(expected);
    }
  }
  CHECK(wrong == 0);
  CHECK(counts->overflow == overflow);
  CHECK(counts->nan == 2 * 127);  // 7 mantissa bits that are not all zero, two signs
}

TEST_CASE("f32 narrows as the CUDA headers' own host functions do, at and beside every rounding boundary") {
  // Every upper half, with the lower halves at which a bf16 or, shifted, a half can change its rounding.
  std::vector<std::uint32_t> low = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  for (std::uint32_t bit = 0; bit < 16; ++bit) {
    for (int offset : {-1, 0, 1}) low.push_back(((1U << bit) + static_cast<std::uint32_t>(offset)) & 0xffffU);
  }
  std::vector<std::uint32_t> bits(65536);
  std::vector<__half> halves(bits.size());
  std::vector<__nv_bfloat16> brain(bits.size());
  std::size_t wrong = 0;
  for (std::uint32_t const lower : low) {
    for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint32_t>(i << 16) | lower;
    HostTensor const source = tensor_of(ElementType::f32, bits);
    ConversionPolicy const policy{.saturate_overflow = true, .keep_non_finite = true};
    REQUIRE(convert<__half>(source, std::span<__half>(halves), policy));
    REQUIRE(convert<__nv_bfloat16>(source, std::span<__nv_bfloat16>(brain), policy));
    for (std::size_t i = 0; i < bits.size(); ++i) {
      float const value = std::bit_cast<float>(bits[i]);
      auto const check = [&](auto result, auto expected, float largest) {
        if (std::isnan(value)) return std::isnan(to_f32(result));
        if (std::isinf(to_f32(expected)) && !std::isinf(value))
          return to_f32(result) == std::copysign(largest, value);
        return std::bit_cast<std::uint16_t>(result) == std::bit_cast<std::uint16_t>(expected);
      };
      wrong += !check(halves[i], __float2half_rn(value), 65504.0F);
      wrong += !check(brain[i], __float2bfloat16_rn(value), largest_finite<__nv_bfloat16>);
    }
  }
  CHECK(wrong == 0);
}
