// SPDX-License-Identifier: AGPL-3.0-only
//
// Damaged files: thousands of small damages, the same in every run. None may crash, and none may ask for
// memory that its file does not account for.
#include "atlas/lora/adapter/load.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

#include "adapter_files.hpp"
#include "atlas/lora/adapter/model_config.hpp"

namespace {
std::size_t largest_allocation = 0;

void* allocate(std::size_t bytes) {
  largest_allocation = std::max(largest_allocation, bytes);
  return std::malloc(std::max<std::size_t>(bytes, 1));
}
}  // namespace

// Never inlined: g++ takes the halves of an inlined pair for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const memory = allocate(bytes);
  if (memory == nullptr) std::abort();
  return memory;
}
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
  return allocate(bytes);
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::nothrow_t const&) noexcept {
  return allocate(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

using namespace atlas::lora;
using namespace atlas::lora::testing;

namespace {

// SplitMix64: small and the same everywhere.
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() % count); }
};

// One to four damages between `begin` and `end`.
void damage(std::string& text, std::size_t begin, std::size_t end, Random& random) {
  constexpr std::string_view likely = "0123456789,:[]{}\"-.eE\\ nullNaF";
  for (std::size_t n = 1 + random.below(4); n > 0 && begin < std::min(end, text.size()); --n) {
    std::size_t const at = begin + random.below(std::min(end, text.size()) - begin);
    switch (random.below(6)) {
      case 0: text[at] = static_cast<char>(text[at] ^ (1 << random.below(8))); break;
      case 1: text[at] = likely[random.below(likely.size())]; break;
      case 2: text.erase(at, 1 + random.below(3)); break;
      case 3: text.insert(at, text.substr(at, 1 + random.below(40))); break;
      case 4: text.insert(at, 1, likely[random.below(likely.size())]); break;
      default:
        if (random.below(4) == 0) text.resize(at);
    }
  }
}

// A header's length that fits what became of it.
void mend_length(std::string& text, std::size_t data_bytes) {
  if (text.size() < 8 + data_bytes) return;
  std::uint64_t const length = text.size() - 8 - data_bytes;
  std::memcpy(text.data(), &length, 8);
}

}  // namespace

TEST_CASE("a damaged safetensors file is read or refused, and never costs more memory than it accounts for") {
  std::string const source = test_data() + "/peft/llama_r1";
  std::string const whole = file_text(source + "/adapter_model.safetensors");
  REQUIRE(whole.size() == 5720);
  std::uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  std::size_t const data_bytes = whole.size() - 8 - static_cast<std::size_t>(header);
  ModelShape const shape = *model_shape(*read_model_config(source + "/config.json"));
  TemporaryFolder const folder;
  folder.write("adapter_config.json", file_text(source + "/adapter_config.json"));
  Random random{20260101};
  int refused = 0;
  constexpr int rounds = 6000;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    std::string text = whole;
    bool const anywhere = round % 4 == 0;
    damage(text, anywhere ? 0 : 8, anywhere ? text.size() : 8 + static_cast<std::size_t>(header), random);
    if (!anywhere) mend_length(text, data_bytes);
    folder.write("adapter_model.safetensors", text);
    largest_allocation = 0;
    auto const adapter = load_adapter(folder.path(), shape);
    CHECK(largest_allocation < 64 * 1024);  // the file is 6 KB; lists of its tensors are some times that
    if (adapter) continue;
    ++refused;
    CHECK(adapter.error().code != Errc::ok);
    CHECK(says(adapter.error().message, folder.path()));
  }
  CHECK(refused > rounds / 2);
  CHECK(refused < rounds);  // some damage hits only the weights
}

TEST_CASE("a safetensors file cut at any byte is refused") {
  std::string const whole = safetensors({{"a", {2, 3}}, {"b", {4}}});
  TemporaryFolder const folder;
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    CHECK_FALSE(SafetensorsFile::open(folder.write("t", whole.substr(0, size))));
  }
  CHECK(SafetensorsFile::open(folder.write("t", whole)).has_value());
}

TEST_CASE("a damaged configuration is read or refused with a message") {
  std::string const adapter = file_text(test_data() + "/peft/llama_patterns/adapter_config.json");
  std::string const model = file_text(test_data() + "/peft/qwen3next_hybrid/config.json");
  REQUIRE_FALSE(adapter.empty());
  REQUIRE_FALSE(model.empty());
  Random random{20260102};
  int refused = 0;
  constexpr int rounds = 10000;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    std::string text = round % 2 == 0 ? adapter : model;
    damage(text, 0, text.size(), random);
    largest_allocation = 0;
    Error error;
    if (round % 2 == 0) {
      auto const config = parse_peft_config(text, "c.json");
      if (!config) error = config.error();
    } else {
      auto const config = parse_model_config(text, "c.json");
      auto const shape =
          config ? model_shape(*config) : Result<ModelShape>(cuda::std::unexpected<Error>(config.error()));
      if (!shape) error = shape.error();
    }
    CHECK(largest_allocation < 1024 * 1024);
    CHECK((error.code == Errc::ok) == error.message.empty());
    refused += error.code != Errc::ok;
  }
  CHECK(refused > rounds / 4);
  CHECK(refused < rounds);
}
