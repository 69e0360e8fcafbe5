// SPDX-License-Identifier: AGPL-3.0-only
//
// Who an adapter is to a prefix cache: an id that lives as long as a name means the same content.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/pool/by_name.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0 {

/// The id that means base; no adapter ever has it.
inline constexpr std::uint64_t base_id = 0;

/// The longest adapter name, in bytes.
inline constexpr std::size_t longest_name = 256;

/// FNV-1a over the bytes of `name` and then, unless it is 0, over the 8 little-endian bytes of `generation`.
/// Never `base_id`.
[[nodiscard]] constexpr std::uint64_t adapter_id(std::string_view name,
                                                 std::uint64_t generation = 0) noexcept {
  constexpr std::uint64_t prime = 0x100000001b3U;
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (char const c : name) hash = (hash ^ static_cast<unsigned char>(c)) * prime;
  if (generation != 0) {
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((generation >> shift) & 0xffU)) * prime;
  }
  return hash == base_id ? 1 : hash;
}

/// Whether an adapter may be called `name`: 1 to `longest_name` bytes, none of them a control byte (below
/// 0x20, or 0x7f), so that no name can spell another's generation. Bytes from 0x80 are not interpreted.
[[nodiscard]] constexpr bool valid_name(std::string_view name) noexcept {
  if (name.empty() || name.size() > longest_name) return false;
  for (char const c : name) {
    auto const byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) return false;
  }
  return true;
}

/// Gives each content under a name its id, for as long as the registry lives. A name's generation moves when
/// content with another digest comes under it, and not when the same comes back; so a name that returns to
/// earlier content gets a new id. An id is never given to two contents: where the hash collides, the
/// generation moves on. Not thread-safe. Grows with the number of names and contents seen.
class NameRegistry {
 public:
  /// The id of `digest` under `name`. Error: `invalid_argument` for a name that is not `valid_name`.
  [[nodiscard]] Result<std::uint64_t> identify(std::string_view name, Digest const& digest) {
    if (!valid_name(name)) {
      return fail(Errc::invalid_argument, "adapter name: must have 1 to " + std::to_string(longest_name) +
                                              " bytes and no control bytes");
    }
    Content* const before = names_.find(name);
    if (before != nullptr && before->digest == digest) return before->id;
    std::uint64_t generation = before == nullptr ? 0 : before->generation + 1;
    while (!issue(adapter_id(name, generation))) ++generation;
    Content const content{digest, generation, adapter_id(name, generation)};
    if (before == nullptr) {
      names_.put(name, content);
    } else {
      *before = content;
    }
    return content.id;
  }

  /// The generation of the content that `name` had last; 0 for a name without any.
  [[nodiscard]] std::uint64_t generation(std::string_view name) const {
    Content const* const content = names_.find(name);
    return content == nullptr ? 0 : content->generation;
  }

 private:
  struct Content {
    Digest digest;
    std::uint64_t generation = 0;
    std::uint64_t id = base_id;
  };

  // Whether `id` was not given out before; from now on it is.
  bool issue(std::uint64_t id) {
    std::size_t at = issued_.size();
    issued_.push_back(id);
    for (; at > 0 && issued_[at - 1] > id; --at) issued_[at] = issued_[at - 1];
    issued_[at] = id;
    bool const is_new = at == 0 || issued_[at - 1] != id;
    if (!is_new) issued_.erase(issued_.begin() + static_cast<std::ptrdiff_t>(at));
    return is_new;
  }

  detail::ByName<Content> names_;
  std::vector<std::uint64_t> issued_;  // ascending
};

}  // namespace atlas::lora::inline v0
