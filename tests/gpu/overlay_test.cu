// SPDX-License-Identifier: AGPL-3.0-only
//
// Token overlays on the device: against the CPU's operation, against themselves in every form, and the
// comparison of tables.
#include "overlay_support.cuh"

#include <cmath>
#include <limits>
#include <string>

#include "atlas/lora/overlay/build.hpp"

namespace atlas_test {
namespace {

/// Whether logits are the reference's: bit for bit in float, and within what tensor cores may round otherwise
/// in 16 bits; logits that nothing overrides and pads bit for bit.
template <Element T, Element Y>
void check_logits(OverlayBatch<T, Y> const& batch, std::vector<Y> const& got) {
  std::vector<Y> const want = batch.reference_head();
  if constexpr (std::is_same_v<T, float>) {
    CHECK(same_bytes(got, want));
    return;
  }
  REQUIRE(got.size() == want.size());
  std::vector<Y> const written = batch.reference_head(std::vector<Y>(want.size(), poison<Y>()));
  bool right = true;
  for (std::size_t i = 0; i < got.size() && right; ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(Y)) == 0) continue;
    bool const overridden = !std::isnan(to_f32(written[i]));
    int const mantissa = std::is_same_v<Y, float> ? 14 : std::is_same_v<Y, __half> ? 10 : 7;
    double const limit = std::ldexp(std::max(1.0, std::fabs(double{to_f32(want[i])})), -mantissa);
    right = overridden && std::fabs(double{to_f32(got[i])} - double{to_f32(want[i])}) <= limit;
    INFO("element " << i << ": " << to_f32(got[i]) << ", not " << to_f32(want[i]));
    CHECK(right);
  }
}

template <Element T, Element Y>
void check_head(OverlayShape const& shape, std::vector<std::int32_t> const& slots) {
  OverlayBatch<T, Y> const batch(shape, slots);
  INFO("hidden " << shape.hidden << ", overrides " << shape.head_counts[0] << ", rows " << slots.size()
                 << ", offset " << shape.offset << ", pads " << shape.x_pad << " " << shape.logits_pad);
  std::vector<Y> const got = batch.run_head();
  check_logits(batch, got);
  CHECK(same_bytes(got, batch.run_head(false)));
  CHECK(same_bytes(got, batch.run_head(true, true)));
  CHECK(same_bytes(got, batch.run_head(false, true)));
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("rows take their own slot's embedding, at any width and alignment", T, float, __half,
                     __nv_bfloat16) {
    for (std::int64_t const hidden : {1, 7, 64, 100, 1032, 4096}) {
      if (small_shapes() && hidden > 100) continue;
      for (std::int64_t const offset : {0, 1}) {
        for (std::int64_t const pad : {0, 3, 8}) {
          OverlayShape const shape{.hidden = hidden,
                                   .vocab = 61,
                                   .embed_counts = {3, 0, 61, 1},
                                   .head_counts = {0, 0, 0, 0},
                                   .offset = offset,
                                   .x_pad = pad};
          OverlayBatch<T> const batch(shape, mixed(37, 4, 3));
          std::vector<std::int32_t> tokens;
          Random random(5);
          for (std::int32_t r = 0; r < batch.rows(); ++r) tokens.push_back(random.below(61));
          tokens[3] = -1;
          tokens[4] = 61;
          tokens[5] = far_out;
          tokens[6] = std::numeric_limits<std::int32_t>::min();
          INFO("hidden " << hidden << ", offset " << offset << ", pad " << pad);
          std::vector<T> const want = batch.reference_embed(tokens);
          CHECK_FALSE(same_bytes(want, batch.h()));
          CHECK(same_bytes(batch.run_embed(tokens), want));
          CHECK(same_bytes(batch.run_embed(tokens, true), want));
        }
      }
    }
  }

  TEST_CASE("more rows than blocks take their own embedding") {
    using T = __nv_bfloat16;
    std::int32_t const rows = small_shapes() ? 300 : 5000;
    OverlayShape const shape{.hidden = 64, .vocab = 61, .embed_counts = {30, 5}, .head_counts = {0, 0}};
    OverlayBatch<T> const batch(shape, mixed(rows, 2, 8));
    std::vector<std::int32_t> tokens;
    for (std::int32_t r = 0; r < rows; ++r) tokens.push_back(r % 61);
    CHECK(same_bytes(batch.run_embed(tokens), batch.reference_embed(tokens)));
  }

  TEST_CASE_TEMPLATE("logits are recomputed where slots say so, and nowhere else", T, float, __half,
                     __nv_bfloat16) {
    std::vector<std::int32_t> const counts = {3, 0, 300, 17, 1};
    for (std::int64_t const hidden : {64, 4096, 1, 98, 100, 1416, 14336}) {
      if (small_shapes() && hidden > 100) continue;
      for (std::int32_t const rows : {1, 5, 16, 40}) {
        check_head<T, T>({.hidden = hidden, .embed_counts = {0, 0, 0, 0, 0}, .head_counts = counts},
                         mixed(rows, 5, static_cast<std::uint64_t>(rows)));
        check_head<T, float>({.hidden = hidden, .embed_counts = {0, 0, 0, 0, 0}, .head_counts = counts},
                             std::vector<std::int32_t>(static_cast<std::size_t>(rows), 2));
        if (hidden > 4096) break;
      }
    }
    OverlayShape odd{.hidden = 136, .embed_counts = {0, 0}, .head_counts = {40, 300}};
    for (std::int64_t const offset : {0, 1, 8}) {
      odd.offset = offset;
      odd.x_pad = offset == 8 ? 8 : 3;
      odd.logits_pad = 57;
      check_head<T, T>(odd, mixed(19, 2, 4));
    }
  }

  TEST_CASE_TEMPLATE("whole tables stream with the same results, aligned or not", T, float, __half,
                     __nv_bfloat16) {
    std::int32_t const many = small_shapes() ? 9000 : 20000;  // enough for large items
    OverlayShape shape{.hidden = small_shapes() ? 72 : 520,
                       .vocab = many + 100,
                       .embed_counts = {0, 0, 0},
                       .head_counts = {many, 5, 4100}};
    for (std::int64_t const offset : {0, 1}) {
      shape.offset = offset;
      std::vector<std::int32_t> slots(83, 0);  // 64 rows in one item, 8 and 1 in the next
      for (std::size_t r = 73; r < slots.size(); ++r) slots[r] = static_cast<std::int32_t>(r % 4) - 1;
      check_head<T, T>(shape, slots);
      check_head<T, float>(shape, {0});
      check_head<T, T>(shape, std::vector<std::int32_t>(20, 2));
    }
  }

  TEST_CASE("more groups than a warp has lanes all have their items") {
    using T = __nv_bfloat16;
    OverlayShape shape;
    shape.vocab = 6000;
    shape.embed_counts.assign(70, 0);
    for (std::int32_t slot = 0; slot < 70; ++slot) shape.head_counts.push_back(slot % 7 == 0 ? 4100 : slot);
    shape.head_counts.erase(shape.head_counts.begin());  // the default's one
    std::vector<std::int32_t> slots;
    for (std::int32_t r = 0; r < 70; ++r) slots.push_back(69 - r);
    for (std::int32_t r = 0; r < 20; ++r) slots.push_back(35);  // one that streams
    check_head<T, T>(shape, slots);
  }

  TEST_CASE_TEMPLATE("a row's logits have the same bits alone, first, last, spread or streamed", T, float,
                     __half, __nv_bfloat16) {
    std::int32_t const many = small_shapes() ? 4100 : 6000;
    // With up to 16 rows 6,000 overrides are spread over teams, with more they stream.
    OverlayShape const shape{.hidden = small_shapes() ? 104 : 1536,
                             .vocab = many,
                             .embed_counts = {0, 0, 0},
                             .head_counts = {many, 40, 300}};
    OverlayBatch<T> const alone(shape, {0});
    std::vector<T> const want = alone.row_of(alone.run_head(), 0);
    for (std::int32_t const rows : {2, 8, 9, 16, 17, 64, 200}) {
      for (std::int32_t const place : {0, rows / 2, rows - 1}) {
        for (bool const same : {true, false}) {
          std::vector<std::int32_t> slots = mixed(rows, 3, static_cast<std::uint64_t>(rows + place));
          if (same) std::fill(slots.begin(), slots.end(), 0);
          slots[static_cast<std::size_t>(place)] = 0;
          OverlayBatch<T> batch(shape, slots);
          batch.copy_x(place, alone, 0);
          for (bool const clusters : {true, false}) {
            INFO("row " << place << " of " << rows << (same ? ", one slot" : ", mixed")
                        << (clusters ? "" : ", without clusters"));
            CHECK(same_bytes(batch.row_of(batch.run_head(clusters), place), want));
          }
        }
      }
      if (small_shapes() && rows > 17) break;
    }
  }

  TEST_CASE_TEMPLATE("alignment, strides, the slot and the table's largest count do not change bits", T,
                     float, __half, __nv_bfloat16) {
    OverlayShape const plain{.hidden = 416, .embed_counts = {0}, .head_counts = {300}, .seed = 9};
    OverlayBatch<T> const first(plain, std::vector<std::int32_t>(11, 0));
    std::vector<T> const want = first.run_head();
    std::vector<OverlayShape> others(4, plain);
    others[0].offset = 1;
    others[1].x_pad = 3;
    others[1].logits_pad = 1;
    others[2].x_pad = 8;
    others[3].max_head_count = 100000;  // a table whose kernel may stream
    for (OverlayShape const& shape : others) {
      OverlayBatch<T> batch(shape, std::vector<std::int32_t>(11, 0));
      for (std::int32_t r = 0; r < 11; ++r) batch.copy_x(r, first, r);
      for (bool const clusters : {true, false}) {
        std::vector<T> const got = batch.run_head(clusters);
        for (std::int32_t r = 0; r < 11; ++r) {
          for (std::int32_t const id : first.slots()[0].ids) {
            auto const i = static_cast<std::size_t>(id);
            T const a = batch.row_of(got, r)[i], b = first.row_of(want, r)[i];
            if (std::memcmp(&a, &b, sizeof a) != 0) FAIL("row " << r << ", token " << id);
          }
        }
      }
    }
    OverlayShape sixth = plain;
    sixth.embed_counts.assign(6, 0);
    sixth.head_counts.assign(6, 300);
    OverlayBatch<T> other(sixth, std::vector<std::int32_t>(11, 5));
    other.use_rows(5, first, 0);
    for (std::int32_t r = 0; r < 11; ++r) other.copy_x(r, first, r);
    std::vector<T> const got = other.run_head();
    for (std::int32_t const id : first.slots()[0].ids) {
      T const a = other.row_of(got, 4)[static_cast<std::size_t>(id)];
      T const b = first.row_of(want, 4)[static_cast<std::size_t>(id)];
      CHECK(std::memcmp(&a, &b, sizeof a) == 0);
    }
  }

  TEST_CASE("two hundred runs give the same bits") {
    using T = __nv_bfloat16;
    OverlayBatch<T> const batch(
        {.hidden = 1024, .vocab = 5000, .embed_counts = {0, 0}, .head_counts = {4200, 300}}, mixed(30, 2, 6));
    std::vector<T> const want = batch.run_head();
    for (int i = 0; i < (small_shapes() ? 3 : 200); ++i) REQUIRE(same_bytes(batch.run_head(), want));
  }

  TEST_CASE_TEMPLATE("the device finds the rows that the host finds, NaN, widths and thresholds too", T,
                     float, __half, __nv_bfloat16) {
    for (std::int64_t const hidden : {1, 8, 100, 4096}) {
      if (small_shapes() && hidden > 100) continue;
      std::int64_t const rows = 77;
      Random random(3);
      std::vector<T> const served = random_values<T>(random, rows * hidden, 0);
      std::vector<T> saved = served;
      for (std::int64_t row = 0; row < rows; row += 5) {
        auto const i =
            static_cast<std::size_t>(row * hidden + random.below(static_cast<std::int32_t>(hidden)));
        saved[i] = row % 2 == 0 ? from_f32<T>(to_f32(saved[i]) + 0.5F) : poison<T>();
      }
      auto const zero = static_cast<std::size_t>(1 * hidden);
      saved[zero] = from_f32<T>(-0.0F);
      std::vector<T> served_too = served;
      served_too[zero] = from_f32<T>(0.0F);
      DeviceArray<T> const device(served_too);
      Machine const& machine = overlay_machine<T, T>();
      auto on_device = DeviceServedTable<T>::create(device.data(), hidden, machine, CudaBackend(0));
      REQUIRE(on_device.has_value());
      HostServedTable<T> on_host(served_too.data(), hidden);
      for (float const threshold : {0.0F, 0.25F, 1.0F}) {
        std::int64_t const first = threshold == 0.0F ? 0 : 3;
        std::span<T const> const part(saved.data() + first * hidden,
                                      static_cast<std::size_t>((rows - first) * hidden));
        std::vector<std::uint8_t> a(static_cast<std::size_t>(rows - first), 9), b = a;
        REQUIRE(on_device->compare(first, part, threshold, a).has_value());
        REQUIRE(on_host.compare(first, part, threshold, b).has_value());
        CHECK(a == b);
        CHECK(std::count(a.begin(), a.end(), 1) >= 7);
      }
      std::vector<T> got(static_cast<std::size_t>(2 * hidden));
      REQUIRE(on_device->read(5, got).has_value());
      CHECK(
          same_bytes(got, std::vector<T>(served_too.begin() + 5 * hidden, served_too.begin() + 7 * hidden)));
    }
    Machine const unprepared;
    CHECK_FALSE(DeviceServedTable<T>::create(nullptr, 1, unprepared, CudaBackend(0)).has_value());
  }
}

}  // namespace atlas_test
