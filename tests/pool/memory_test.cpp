// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/pool/memory.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tiny_pool.hpp"

namespace {

using namespace atlas_test;

TEST_CASE("a pool takes its slots and spare ones, its records and one site of staging, and nothing else") {
  // One linear of 16 inputs and 32 outputs: a slot of rank 8 has 8 * (16 + 32) elements of 2 bytes.
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"q", 32, 16, {0}, {}}};
  ModelShape const shape = *ModelShape::create(d);
  auto const plain = detail::PoolMemory::plan(shape, {.max_slots = 3, .spare = 2, .max_rank = 7}, 2);
  REQUIRE(plain.has_value());
  CHECK(plain->layout.slot_bytes() == 768);
  CHECK(plain->biases_offset == 5 * 768);
  CHECK(plain->records_offset == 5 * 768);
  CHECK(plain->record_bytes == 48);
  CHECK(plain->needed.device_bytes == 5 * 768 + 256);  // three records of 48 bytes, rounded up
  CHECK(plain->staging_offset == 256);
  CHECK(plain->staging_stride == 1024);                 // a site and a bias of 64 bytes, rounded up
  CHECK(plain->needed.pinned_bytes == 256 + 2 * 1024);  // two loads pack at one time
  auto const biased =
      detail::PoolMemory::plan(shape, {.max_slots = 3, .spare = 2, .max_rank = 7, .biases = true}, 2);
  REQUIRE(biased.has_value());
  CHECK(biased->layout.slot_bytes() == 768);
  CHECK(biased->records_offset == 5 * 768 + 512);  // five biases of 64 bytes, rounded up
  CHECK(biased->needed.device_bytes == 5 * 768 + 512 + 256);
}

TEST_CASE("the preflight says what creation takes") {
  for (bool const biases : {false, true}) {
    PoolOptions const options{.max_slots = 3, .spare = 2, .max_rank = 20, .biases = biases};
    HostBackend backend;
    auto const needed = AdapterPool<__half, HostBackend>::memory_needed(tiny_shape(), options);
    auto const pool = AdapterPool<__half, HostBackend>::create(tiny_shape(), options, backend);
    REQUIRE(needed.has_value());
    REQUIRE(pool.has_value());
    CHECK(backend.live_bytes() == needed->device_bytes + needed->pinned_bytes);
  }
}

TEST_CASE("the reference's slots in a pool: eight of 27B at rank 8 and one spare") {
  std::vector<std::int32_t> all;
  std::vector<std::int32_t> full;
  std::vector<std::int32_t> linear;
  for (std::int32_t layer = 0; layer < 64; ++layer) {
    all.push_back(layer);
    ((layer + 1) % 4 == 0 ? full : linear).push_back(layer);
  }
  ModelDescription d;
  d.num_layers = 64;
  d.modules = {{"q", 12288, 5120, full, {}},   {"k", 1024, 5120, full, {}},    {"v", 1024, 5120, full, {}},
               {"o", 5120, 6144, full, {}},    {"gate", 17408, 5120, all, {}}, {"up", 17408, 5120, all, {}},
               {"down", 5120, 17408, all, {}}, {"out", 5120, 6144, linear, {}}};
  auto const memory = detail::PoolMemory::plan(*ModelShape::create(d), {.max_slots = 8, .max_rank = 8}, 2);
  REQUIRE(memory.has_value());
  CHECK(memory->records_offset == 9 * std::size_t{88342528});
  CHECK(memory->record_bytes == (64 * 3 + 48 + 16 * 4) * 48);
}

TEST_CASE("options out of range are refused by name, and so is a pool beyond 63 bits") {
  auto const refused = [](PoolOptions const& options, std::string const& word) {
    auto const needed = Pool::memory_needed(tiny_shape(), options);
    REQUIRE_FALSE(needed.has_value());
    CHECK(needed.error().code == Errc::invalid_argument);
    CHECK(needed.error().message.find(word) != std::string::npos);
    HostBackend backend;
    CHECK(AdapterPool<float, HostBackend>::create(tiny_shape(), options, backend).error() == needed.error());
    CHECK(backend.live_bytes() == 0);
  };
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  for (std::int32_t const bad : {0, -1, most, most_pool_slots + 1}) {
    refused({.max_slots = bad}, "max_slots");
    refused({.spare = bad}, "spare");
    refused({.max_rank = bad}, "max_rank");
  }
  refused({.max_slots = 4, .pinned = 5}, "pinned");
  refused({.max_slots = 4, .pinned = -1}, "pinned");
  auto const no_linears = Pool::memory_needed(ModelShape(), {});
  REQUIRE_FALSE(no_linears.has_value());
  CHECK(no_linears.error().code == Errc::invalid_argument);

  // 2^17 places of a slot of 2 * (2^31 - 1) * 2^16 * 4 bytes, about 2^50 each.
  constexpr std::int64_t widest = std::numeric_limits<std::int32_t>::max();
  ModelDescription d;
  d.num_layers = 1;
  d.modules = {{"wide", widest, widest, {0}, {}}};
  auto const huge = Pool::memory_needed(
      *ModelShape::create(d),
      {.max_slots = most_pool_slots, .spare = most_pool_slots, .max_rank = largest_pool_rank});
  REQUIRE_FALSE(huge.has_value());
  CHECK(huge.error().code == Errc::out_of_range);
}

}  // namespace
