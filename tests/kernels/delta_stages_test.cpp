// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/kernels/delta_stages.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace atlas::lora;

// 512 elements are 1,024 bytes; rows 64 bytes apart modulo 128 need 64 more, 32 elements.
static_assert(shared_stride(512, 2) == 544 && shared_stride(32, 2) == 32 && shared_stride(64, 2) == 96);
static_assert(shared_stride(16, 4) == 16 && shared_stride(32, 4) == 48);
// 4,096 bf16: 2 segments of 4 chunks of 64 in a group, 16 ranks of 544 elements: 17,408 bytes.
static_assert(delta_stages(Contraction(4096), 16, 2, 60'000) == DeltaStages{17'408, 8, 3});

TEST_CASE("rows of a stage are 64 bytes apart modulo 128") {
  for (std::int32_t width = 8; width < 2000; width += 8) {
    CHECK(shared_stride(width, 2) >= width);
    CHECK(shared_stride(width, 2) * 2 % 128 == 64);
    CHECK(shared_stride(width, 4) * 4 % 128 == 64);
  }
}

TEST_CASE("a stage holds its chunks of A and at least one output tile of B") {
  for (std::int64_t const k_in : {1, 100, 768, 2048, 4096, 8192, 14336, 17408, 28672}) {
    for (std::int32_t const rank : {1, 8, 16, 64, 100, 256}) {
      for (std::size_t const bytes : {std::size_t{2}, std::size_t{4}}) {
        Contraction const cut(k_in);
        DeltaStages const stages = delta_stages(cut, rank, bytes, 170'000);
        INFO("k_in " << k_in << ", rank " << rank << ", bytes " << bytes);
        REQUIRE(stages.count >= 2);
        CHECK(stages.bytes % 128 == 0);
        CHECK(stages.chunks >= 1);
        CHECK(static_cast<std::size_t>(stages.bytes) >=
              std::size_t{16} *
                  static_cast<std::size_t>(shared_stride(stage_width(cut, stages.chunks), bytes)) * bytes);
        CHECK(stage_output_tiles(stages.bytes, (rank + 7) / 8 * 8, bytes) >= 1);
        CHECK(static_cast<std::size_t>(stages.bytes) * static_cast<std::size_t>(stages.count) <= 170'000);
      }
    }
  }
}

TEST_CASE("the parts of a group's stages hold every chunk slot once") {
  for (std::int64_t const k_in : {1, 33, 100, 768, 1000, 2048, 4096, 8192, 14336, 17408, 28672}) {
    Contraction const cut(k_in);
    for (std::size_t const shared : {std::size_t{40'000}, std::size_t{170'000}}) {
      DeltaShape shape;
      shape.set(cut, delta_stages(cut, 64, 2, shared), 2);
      REQUIRE(shape.group * shape.segment_chunks <= max_chunks);
      CHECK(shape.parts * shape.stages.chunks >= shape.group * shape.segment_chunks);
      CHECK((shape.parts - 1) * shape.stages.chunks < shape.group * shape.segment_chunks);
      // A slot's first block is its chunk's, wherever the slot exists.
      for (std::int32_t s = 0; s < cut.segments(); ++s) {
        for (std::int32_t c = 0; c < cut.chunks(s); ++c) {
          CHECK(slot_block(shape, s, c) == cut.chunk(s, c).first);
          CHECK(slot_block(shape, 0, s * shape.segment_chunks + c) == cut.chunk(s, c).first);
        }
      }
    }
  }
}

}  // namespace
