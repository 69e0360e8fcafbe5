// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/digest.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string_view>

using namespace atlas::lora;
using detail::DigestStream;

namespace {

Digest of(std::initializer_list<std::string_view> pieces) {
  DigestStream stream;
  for (std::string_view const piece : pieces) stream.add(piece);
  return stream.digest();
}

}  // namespace

TEST_CASE("an empty stream has XXH3-128's own value for no input") {
  CHECK(DigestStream().digest() == Digest{0x6001c324468d497fULL, 0x99aa06d3014798d8ULL});
}

TEST_CASE("the same pieces give the same digest, and where one ends matters") {
  CHECK(of({"ab", "c"}) == of({"ab", "c"}));
  CHECK_FALSE(of({"ab", "c"}) == of({"a", "bc"}));
  CHECK_FALSE(of({"abc"}) == of({"abc", ""}));
  CHECK_FALSE(of({"a", "b"}) == of({"b", "a"}));
}

TEST_CASE("a tensor's type, shape and bytes each count, its file's name for it does not") {
  auto const of_tensor = [](HostTensor const& tensor) {
    DigestStream stream;
    stream.add(tensor);
    return stream.digest();
  };
  HostTensor const tensor{"name", ElementType::f16, {2, 3}, std::vector<std::byte>(12)};
  HostTensor other = tensor;
  other.name = "other";
  CHECK(of_tensor(other) == of_tensor(tensor));
  other.type = ElementType::bf16;
  CHECK_FALSE(of_tensor(other) == of_tensor(tensor));
  other = tensor;
  other.shape = {3, 2};
  CHECK_FALSE(of_tensor(other) == of_tensor(tensor));
  other = tensor;
  other.bytes[11] = std::byte{1};
  CHECK_FALSE(of_tensor(other) == of_tensor(tensor));
}
