// SPDX-License-Identifier: AGPL-3.0-only
//
// The content digest of an adapter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#if !defined(XXH_INLINE_ALL)
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0::detail {

/// XXH3-128 of a sequence of values. Each piece of variable length goes in behind its length, so that two
/// different sequences never feed the same bytes.
class DigestStream {
 public:
  DigestStream() noexcept { XXH3_128bits_reset(&state_); }

  void add(std::span<std::byte const> bytes) noexcept {
    add(static_cast<std::uint64_t>(bytes.size()));
    feed(bytes.data(), bytes.size());
  }
  void add(std::string_view text) noexcept {
    add(static_cast<std::uint64_t>(text.size()));
    feed(text.data(), text.size());
  }
  template <class T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void add(T value) noexcept { feed(&value, sizeof value); }
  void add(HostTensor const& tensor) noexcept {
    add(tensor.type);
    add(static_cast<std::uint64_t>(tensor.shape.size()));
    for (std::int64_t const extent : tensor.shape) add(extent);
    add(std::span<std::byte const>(tensor.bytes));
  }

  [[nodiscard]] Digest digest() const noexcept {
    XXH128_hash_t const hash = XXH3_128bits_digest(&state_);
    return {hash.low64, hash.high64};
  }

 private:
  void feed(void const* bytes, std::size_t count) noexcept {
    if (count != 0) XXH3_128bits_update(&state_, bytes, count);
  }

  XXH3_state_t state_;
};

}  // namespace atlas::lora::inline v0::detail
