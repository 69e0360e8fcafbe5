// SPDX-License-Identifier: AGPL-3.0-only
//
// A row's bits depend on its x, its y and its pair, and on nothing else of the batch, the memory or the
// launch.
#include "support.cuh"

namespace atlas_test {
namespace {

/// The bytes of one row of projection p.
template <Element T>
std::vector<T> row_of(Batch<T> const& batch, std::vector<std::vector<T>> const& y, std::size_t p,
                      std::int32_t row) {
  auto const first = y[p].begin() + batch.shape().offset + row * batch.y_stride(p);
  return std::vector<T>(first, first + batch.shape().n_out[p]);
}

std::int64_t width() { return small_shapes() ? 416 : 8192; }

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("a row alone, first, last, and among other adapters has the same bits", T, float, __half,
                     __nv_bfloat16) {
    Shape const shape{.k_in = width(), .n_out = {320}, .ranks = {32, 16, 8, 64, 4}, .seed = 3};
    Batch<T> const alone(shape, {0});
    auto const want = row_of(alone, alone.run(Form::split), 0, 0);
    for (std::int32_t const rows : {2, 8, 9, 64, 200}) {
      for (std::int32_t const place : {0, rows / 2, rows - 1}) {
        for (bool const same : {true, false}) {
          std::vector<std::int32_t> slots = mixed_slots(rows, 5, static_cast<std::uint64_t>(rows));
          if (same) std::fill(slots.begin(), slots.end(), 0);
          slots[static_cast<std::size_t>(place)] = 0;
          Batch<T> batch(shape, slots);
          batch.copy_row(place, alone, 0);
          for (Form const form : all_forms) {
            if (!runs<T, T>(form)) continue;
            INFO(name(form) << ", row " << place << " of " << rows);
            CHECK(same_bytes(row_of(batch, batch.run(form), 0, place), want));
          }
        }
      }
      if (small_shapes() && rows >= 9) break;
    }
  }

  TEST_CASE_TEMPLATE("two hundred runs give the same bits", T, float, __half, __nv_bfloat16) {
    Shape const shape{.k_in = width(), .n_out = {512}, .ranks = {32, 16}};
    Batch<T> const batch(shape, mixed_slots(24, 2, 5));
    auto const want = batch.run(Form::automatic);
    int const repeats = small_shapes() ? 3 : 200;
    for (int i = 0; i < repeats; ++i) REQUIRE(same_bytes(batch.run(Form::automatic)[0], want[0]));
  }

  TEST_CASE_TEMPLATE("alignment, strides, slot and the pool's rank do not change bits", T, float, __half,
                     __nv_bfloat16) {
    // The values come from the seed alone, and the pair under test is drawn first.
    std::vector<std::int32_t> const slots(11, 0);
    Shape const plain{.k_in = 416, .n_out = {200}, .ranks = {24}, .seed = 9};
    Batch<T> const first(plain, slots);
    auto const want = first.run(Form::split);
    std::vector<Shape> others;
    others.push_back({.k_in = 416, .n_out = {200}, .ranks = {24}, .offset = 1, .seed = 9});
    others.push_back({.k_in = 416, .n_out = {200}, .ranks = {24}, .x_pad = 3, .y_pad = 1, .seed = 9});
    others.push_back({.k_in = 416, .n_out = {200}, .ranks = {24}, .x_pad = 8, .y_pad = 24, .seed = 9});
    others.push_back({.k_in = 416, .n_out = {200}, .ranks = {24}, .max_rank = 64, .seed = 9});
    others.push_back({.k_in = 416, .n_out = {200}, .ranks = {24}, .max_rank = 256, .tight = true, .seed = 9});
    for (Shape const& shape : others) {
      Batch<T> batch(shape, slots);
      for (std::int32_t r = 0; r < batch.rows(); ++r) batch.copy_row(r, first, r);
      for (Form const form : all_forms) {
        if (!runs<T, T>(form)) continue;
        auto const got = batch.run(form);
        for (std::int32_t r = 0; r < batch.rows(); ++r) {
          INFO(name(form) << ", row " << r << ", offset " << shape.offset << ", pads " << shape.x_pad << " "
                          << shape.y_pad << ", max_rank " << shape.max_rank);
          CHECK(same_bytes(row_of(batch, got, 0, r), row_of(first, want, 0, r)));
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("a pair in slot 0 and in slot 5 gives the same bits", T, float, __half, __nv_bfloat16) {
    Shape const alone{.k_in = 416, .n_out = {200}, .ranks = {24}, .seed = 9};
    Shape const sixth{.k_in = 416, .n_out = {200}, .ranks = {0, 0, 0, 0, 0, 24}, .seed = 9};
    Batch<T> const first(alone, std::vector<std::int32_t>(11, 0));
    Batch<T> other(sixth, std::vector<std::int32_t>(11, 5));
    other.use_pair(5, first, 0);
    for (std::int32_t r = 0; r < other.rows(); ++r) other.copy_row(r, first, r);
    auto const want = first.run(Form::split);
    for (Form const form : all_forms) {
      if (!runs<T, T>(form)) continue;
      INFO(name(form));
      CHECK(same_bytes(other.run(form)[0], want[0]));
    }
  }

  TEST_CASE_TEMPLATE("one projection or three in a launch, the same bits", T, float, __half, __nv_bfloat16) {
    Shape const three{.k_in = 512, .n_out = {96, 64, 40}, .ranks = {16, 40}};
    Batch<T> const batch(three, mixed_slots(21, 2, 23));
    auto const want = batch.run(Form::automatic);
    for (std::size_t p = 0; p < 3; ++p) {
      std::vector<DeviceArray<T>> y = batch.upload_y();
      DeviceArray<T> const xa = batch.make_xa();
      DeviceArray<std::byte> const scratch = batch.make_scratch();
      for (Form const form : {Form::automatic, Form::two_launches, Form::split}) {
        y[p].upload(batch.y()[p]);
        DeltaParams<T> params = batch.params(y);
        params.projections[0] = params.projections[p];
        params.num_projections = 1;
        batch.enqueue(form, params, xa, scratch, nullptr);
        CUDA_OK(cudaDeviceSynchronize());
        INFO(name(form) << ", projection " << p);
        CHECK(same_bytes(y[p].download(), want[p]));
      }
    }
  }

  TEST_CASE_TEMPLATE("more adapters than teams of blocks, the same bits", T, float, __half, __nv_bfloat16) {
    // Teams have one round of row tiles, or one and a part of another that they divide, in halves of
    // clusters.
    constexpr std::int32_t slots = 64;
    std::vector<std::int32_t> ranks(slots);
    for (std::int32_t i = 0; i < slots; ++i)
      ranks[static_cast<std::size_t>(i)] = i % 7 == 3 ? 0 : 16 + i % 3 * 12;
    Shape const shape{.k_in = 512, .n_out = {544, 72}, .ranks = ranks, .y_pad = 8};
    for (std::int32_t const rows : {13, 30, 40, 57, 64, 100, 128}) {
      if (small_shapes() && rows > 30) break;
      std::vector<std::int32_t> row_slots(static_cast<std::size_t>(rows));
      for (std::int32_t r = 0; r < rows; ++r) row_slots[static_cast<std::size_t>(r)] = r * 5 % slots;
      Batch<T> const batch(shape, row_slots);
      auto const want = batch.run(Form::split);
      for (Form const form : all_forms) {
        if (!runs<T, T>(form)) continue;
        for (bool const settled : {false, true}) {
          INFO(name(form) << ", rows " << rows << ", settled " << settled);
          auto const got = batch.run(form, settled);
          for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("adapters of few ranks between adapters of many, the same bits", T, float, __half,
                     __nv_bfloat16) {
    // 14 and 15 segments of four and six chunks: warps share the sums of few ranks alone, whose chunks then
    // lie where nothing may change what counts for the segments that there are not.
    constexpr std::int32_t slots = 48;
    std::vector<std::int32_t> ranks(slots);
    for (std::int32_t i = 0; i < slots; ++i) ranks[static_cast<std::size_t>(i)] = i % 3 == 0 ? 64 : 8 + i % 5;
    for (std::int64_t const k_in : {3136, 5760}) {
      Shape const shape{.k_in = k_in, .n_out = {96}, .ranks = ranks, .y_pad = 8};
      std::int32_t const rows = small_shapes() ? 24 : 1152;  // two row tiles a team and more
      std::vector<std::int32_t> row_slots(static_cast<std::size_t>(rows));
      for (std::int32_t r = 0; r < rows; ++r) row_slots[static_cast<std::size_t>(r)] = r * 7 % slots;
      Batch<T> const batch(shape, row_slots);
      auto const want = batch.run(Form::split);
      for (Form const form : all_forms) {
        if (!runs<T, T>(form)) continue;
        INFO(name(form) << ", k_in " << k_in);
        CHECK(same_bytes(batch.run(form, true)[0], want[0]));
      }
    }
  }

  TEST_CASE_TEMPLATE("few rows of several projections, which teams share, have the same bits", T, float,
                     __half, __nv_bfloat16) {
    // Every team has a projection of a row tile, or outputs of all; slot 2 has no rank.
    for (std::vector<std::int64_t> const& n_out :
         {std::vector<std::int64_t>{1024, 96}, {544, 72, 96}, {64, 8, 8, 520}}) {
      Shape const shape{.k_in = 1024, .n_out = n_out, .ranks = {64, 24, 0, 9}, .y_pad = 8};
      for (std::int32_t const rows : {1, 2, 5, 8, 11}) {
        for (bool const mixed : {false, true}) {
          std::vector<std::int32_t> row_slots(static_cast<std::size_t>(rows), 1);
          if (mixed) row_slots = mixed_slots(rows, 4, static_cast<std::uint64_t>(rows));
          Batch<T> const batch(shape, row_slots);
          auto const want = batch.run(Form::split);
          for (Form const form : all_forms) {
            if (!runs<T, T>(form)) continue;
            INFO(name(form) << ", rows " << rows << ", projections " << n_out.size());
            auto const got = batch.run(form, true);
            for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("however many slots the host expects, the same bits", T, float, __half, __nv_bfloat16) {
    Shape const shape{.k_in = 512, .n_out = {128}, .ranks = {16, 40, 64}, .y_pad = 8};
    for (std::int32_t const rows : {4, 40, 300, 700}) {
      if (small_shapes() && rows > 40) break;
      Batch<T> const batch(shape, mixed_slots(rows, 3, 5));
      auto const want = batch.run(Form::split);
      DeviceArray<T> const xa = batch.make_xa();
      DeviceArray<std::byte> const scratch = batch.make_scratch();
      for (std::int32_t const expected : {-1, 0, 1, 3, rows, (std::numeric_limits<std::int32_t>::max)()}) {
        std::vector<DeviceArray<T>> const y = batch.upload_y();
        DeltaParams<T> params = batch.params(y);
        params.expected_slots = expected;
        batch.enqueue(Form::automatic, params, xa, scratch, nullptr);
        CUDA_OK(cudaDeviceSynchronize());
        INFO(rows << " rows, " << expected << " slots expected");
        CHECK(same_bytes(y[0].download(), want[0]));
      }
    }
  }

  TEST_CASE_TEMPLATE("the prefill kernel gives the bits of the split form", T, __half, __nv_bfloat16) {
    std::vector<Shape> shapes;
    shapes.push_back({.k_in = 4096, .n_out = {256, 64, 96}, .ranks = {16, 64, 8}, .y_pad = 8});
    shapes.push_back({.k_in = 416, .n_out = {200}, .ranks = {1, 20, 33, 72, 200, 0}, .bias = true});
    shapes.push_back({.k_in = 1000, .n_out = {1024, 40}, .ranks = {48, 12}, .max_rank = 128});
    shapes.push_back({.k_in = 333, .n_out = {77, 131}, .ranks = {5, 40}, .tight = true});
    shapes.push_back({.k_in = 512, .n_out = {136}, .ranks = {24, 16}, .x_pad = 3, .y_pad = 1, .offset = 1});
    shapes.push_back({.k_in = 32, .n_out = {8}, .ranks = {16}});
    for (Shape const& shape : shapes) {
      auto const slots = static_cast<std::int32_t>(shape.ranks.size());
      for (std::int32_t const rows : {1, 7, 9, 63, 64, 65, 130, 257, 600}) {
        if (small_shapes() && rows > 65) break;
        for (bool const mixed : {false, true}) {
          std::vector<std::int32_t> row_slots(static_cast<std::size_t>(rows), 0);
          if (mixed) row_slots = mixed_slots(rows, slots, static_cast<std::uint64_t>(rows));
          Batch<T> const batch(shape, row_slots);
          auto const want = batch.run(Form::split);
          for (Form const form :
               {Form::automatic, Form::prefill_8, Form::prefill_4, Form::prefill_2, Form::prefill_1}) {
            if (!runs<T, T>(form)) continue;
            for (bool const settled : {false, true}) {
              INFO(name(form) << ", rows " << rows << ", k_in " << shape.k_in << ", settled " << settled);
              auto const got = batch.run(form, settled);
              for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
            }
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("a prefill cut into windows has the bits of one window, and of decode", T, float, __half,
                     __nv_bfloat16) {
    std::int32_t const rows = small_shapes() ? 40 : 700;
    std::vector<std::int32_t> slots(static_cast<std::size_t>(rows));
    for (std::int32_t r = 0; r < rows; ++r)
      slots[static_cast<std::size_t>(r)] = r < rows / 3 ? 1 : r < rows / 2 ? -1 : 0;
    Shape const shape{.k_in = 512, .n_out = {128}, .ranks = {16, 64}, .y_pad = 8};
    Batch<T> const whole(shape, slots);
    auto const want = whole.run(Form::automatic);
    for (std::int32_t const window : {1, 7, 64, 333}) {
      for (std::int32_t first = 0; first < rows; first += window * (window == 1 ? 97 : 1)) {
        std::int32_t const here = std::min(window, rows - first);
        Batch<T> part(shape, {slots.begin() + first, slots.begin() + first + here});
        for (std::int32_t r = 0; r < here; ++r) part.copy_row(r, whole, first + r);
        auto const got = part.run(Form::automatic);
        bool same = true;
        for (std::int32_t r = 0; r < here; ++r) {
          same = same && same_bytes(row_of(part, got, 0, r), row_of(whole, want, 0, first + r));
        }
        INFO("window of " << here << " rows at " << first);
        CHECK(same);
        if (small_shapes() && first > 0) break;
      }
    }
  }
}

}  // namespace atlas_test
