// SPDX-License-Identifier: AGPL-3.0-only
//
// Refusals in a build that takes every float for finite, as a user's -ffast-math has the compiler do.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fast-math")
#endif
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "adapter_files.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "loading.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

constexpr std::uint32_t nan_bits = 0x7fc00000;
constexpr std::uint32_t negative_infinity_bits = 0xff800000;
constexpr std::uint32_t seventy_thousand_bits = 0x4788b800;  // 70000 = 1.06811523 * 2^16
constexpr std::uint32_t tiny_bits = 0x00000001;              // 2^-149

HostTensor of_bits(std::vector<std::uint32_t> const& bits) {
  HostTensor tensor{"t", ElementType::f32, {std::ssize(bits)}, std::vector<std::byte>(bits.size() * 4)};
  std::memcpy(tensor.bytes.data(), bits.data(), tensor.bytes.size());
  return tensor;
}

template <Element T>
Result<ConversionCounts> converted(std::uint32_t bits, ConversionPolicy policy = {}) {
  std::vector<T> out(1);
  return convert<T>(of_bits({bits}), std::span<T>(out), policy);
}

}  // namespace

TEST_CASE("a conversion refuses NaN, infinity and overflow however the compiler treats floats") {
  for (std::uint32_t const bits : {nan_bits, negative_infinity_bits}) {
    CHECK_FALSE(converted<__half>(bits).has_value());
    CHECK_FALSE(converted<__nv_bfloat16>(bits).has_value());
    CHECK_FALSE(converted<float>(bits).has_value());
  }
  CHECK_FALSE(converted<__half>(seventy_thousand_bits).has_value());
  CHECK(converted<__nv_bfloat16>(seventy_thousand_bits).has_value());
  CHECK(*converted<__half>(nan_bits, {.keep_non_finite = true}) == ConversionCounts{.nan = 1});
  CHECK(*converted<__half>(negative_infinity_bits, {.keep_non_finite = true}) ==
        ConversionCounts{.infinity = 1});
  CHECK(*converted<__half>(seventy_thousand_bits, {.saturate_overflow = true}) ==
        ConversionCounts{.overflow = 1});
  CHECK(*converted<__half>(tiny_bits) == ConversionCounts{.underflow = 1});
}

TEST_CASE("a load refuses NaN, infinity and a scale beyond f32 however the compiler treats floats") {
  auto const refusal = [](std::uint32_t bits) {
    auto tensors = q_pair(0);
    tensors[0].bytes = std::string(2 * 8 * 4, '\0');
    std::memcpy(tensors[0].bytes.data() + 3 * 4, &bits, 4);
    return bad(q_only, tensors, tiny_model(1)).message;
  };
  CHECK(says(refusal(nan_bits), "element 3 is NaN"));
  CHECK(says(refusal(negative_infinity_bits), "element 3 is infinite"));
  Error const error =
      bad(R"({"r":2,"lora_alpha":1e300,"target_modules":["q_proj"]})", q_pair(0), tiny_model(1));
  CHECK(says(error.message,
             "field 'lora_alpha': the scale of 'model.layers.0.self_attn.q_proj' is beyond f32"));
}
