// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/backend.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "atlas/lora/pool/cuda_backend.hpp"

namespace {

using namespace atlas::lora;

static_assert(Backend<HostBackend>);
static_assert(Backend<CudaBackend>, "compiled here, and linked only where it is used");
static_assert(!Backend<int>);

struct Throwing : HostBackend {
  Result<bool> query(Event) { return true; }  // not noexcept
};
static_assert(!Backend<Throwing>);

TEST_CASE("host memory is aligned, counted while it lives and counted by all copies together") {
  HostBackend backend;
  HostBackend copy = backend;
  auto const one = backend.allocate_device(1000);
  auto const other = copy.allocate_pinned(0);
  REQUIRE(one.has_value());
  REQUIRE(other.has_value());
  CHECK(reinterpret_cast<std::uintptr_t>(*one) % 256 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(*other) % 256 == 0);
  CHECK(backend.live_bytes() == 1000);
  CHECK(copy.live_bytes() == 1000);
  copy.free_device(*one);
  backend.free_pinned(*other);
  backend.free_pinned(nullptr);
  CHECK(backend.live_bytes() == 0);
  CHECK(HostBackend().live_bytes() == 0);
}

TEST_CASE("memory that cannot be had is an error with its size") {
  HostBackend backend;
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (std::size_t const bytes : {most, most - 511, most / 2 + 1}) {
    auto const memory = backend.allocate_device(bytes);
    REQUIRE_FALSE(memory.has_value());
    CHECK(memory.error().code == Errc::out_of_memory);
    CHECK(memory.error().message.find(std::to_string(bytes)) != std::string::npos);
  }
  CHECK(backend.live_bytes() == 0);
}

TEST_CASE("copies and fills are done at once, so every event is") {
  HostBackend backend;
  std::array<char, 4> from{'a', 'b', 'c', 'd'};
  std::array<char, 4> to{};
  REQUIRE(backend.copy(to.data(), from.data(), 4, 1).has_value());
  CHECK(to == from);
  REQUIRE(backend.fill(to.data() + 1, std::byte{'x'}, 2, 1).has_value());
  CHECK(to == std::array<char, 4>{'a', 'x', 'x', 'd'});
  auto const event = backend.create_event();
  auto const stream = backend.create_stream();
  REQUIRE(event.has_value());
  REQUIRE(stream.has_value());
  CHECK(backend.live_handles() == 2);
  CHECK(backend.record(*event, *stream).has_value());
  CHECK(*backend.query(*event));
  CHECK(backend.wait(*stream, *event).has_value());
  CHECK(backend.synchronize(*event).has_value());
  CHECK_FALSE(*backend.is_capturing(*stream));
  backend.destroy_event(*event);
  backend.destroy_stream(*stream);
  CHECK(backend.live_handles() == 0);
}

}  // namespace
