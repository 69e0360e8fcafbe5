// SPDX-License-Identifier: AGPL-3.0-only
//
// The delta's values, in every form, against the CPU reference and against double precision.
#include "support.cuh"

#include <cmath>

namespace atlas_test {
namespace {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  // Widths that break vectors and tiles, ranks that break blocks, several projections, pads, lost alignment,
  // biases.
  all.push_back({.k_in = 1, .n_out = {1}, .ranks = {1, 3}});
  all.push_back({.k_in = 7, .n_out = {7, 33}, .ranks = {2, 0, 8}, .tight = true});
  all.push_back({.k_in = 98, .n_out = {100}, .ranks = {12, 5}, .x_pad = 3, .y_pad = 5});
  all.push_back({.k_in = 100, .n_out = {64, 32, 32}, .ranks = {4, 16, 0}, .x_pad = 4, .bias = true});
  all.push_back({.k_in = 256, .n_out = {96}, .ranks = {16, 8, 12, 1}, .max_rank = 64});
  all.push_back({.k_in = 512, .n_out = {128, 40, 40}, .ranks = {64, 20}, .offset = 1});
  if (few_shapes()) return {all[3], all[5]};
  if (small_shapes()) return all;
  all.push_back({.k_in = 768, .n_out = {2048}, .ranks = {16, 100, 200}, .bias = true});
  all.push_back(
      {.k_in = 4096, .n_out = {4096, 1024, 1024}, .ranks = {16, 64, 8, 32}, .x_pad = 8, .y_pad = 16});
  all.push_back({.k_in = 14336, .n_out = {512}, .ranks = {16, 64}});
  all.push_back({.k_in = 3584, .n_out = {49159}, .ranks = {24}, .y_pad = 57});
  all.push_back({.k_in = 17408, .n_out = {264}, .ranks = {40, 256}});
  return all;
}

std::string describe(Shape const& shape, std::int32_t rows, Form form) {
  std::string text = std::string(name(form)) + ", rows " + std::to_string(rows) + ", k_in " +
                     std::to_string(shape.k_in) + ", n_out";
  for (std::int64_t const n : shape.n_out) text += " " + std::to_string(n);
  text += ", ranks";
  for (std::int32_t const rank : shape.ranks) text += " " + std::to_string(rank);
  return text;
}

std::vector<std::int32_t> row_counts() {
  if (few_shapes()) return {11};
  return small_shapes() ? std::vector<std::int32_t>{1, 11} : std::vector<std::int32_t>{1, 2, 9, 40};
}

/// A unit in the last place of `value` in `T`.
template <Element T>
double ulp(double value) {
  int const mantissa = std::is_same_v<T, float> ? 23 : std::is_same_v<T, __half> ? 10 : 7;
  double const smallest = std::is_same_v<T, __half> ? std::ldexp(1.0, -24) : std::ldexp(1.0, -126 - mantissa);
  if (value == 0.0) return smallest;
  return std::max(smallest, std::ldexp(1.0, std::ilogb(std::fabs(value)) - mantissa));
}

/// Compares a 16-bit result with the reference when both expand the same xa.
template <Element T, Element Y>
double worst_excess(Batch<T, Y> const& batch, std::vector<T> const& xa,
                    std::vector<std::vector<Y>> const& y) {
  double worst = 0.0;
  std::int64_t offset = 0;
  for (std::size_t p = 0; p < y.size(); ++p) {
    for (std::int32_t r = 0; r < batch.rows(); ++r) {
      std::int32_t const slot = batch.row_slots()[static_cast<std::size_t>(r)];
      if (!batch.adapted(slot)) continue;
      RouteCell<T> const cell = batch.host_cell(p, slot);
      auto const first = static_cast<std::size_t>(batch.shape().offset + r * batch.y_stride(p));
      std::vector<Y> want(batch.y()[p].begin() + static_cast<std::ptrdiff_t>(first),
                          batch.y()[p].begin() + static_cast<std::ptrdiff_t>(first) + batch.shape().n_out[p]);
      std::vector<Y> const before = want;
      reference_expand<T, Y>(
          cell,
          std::span<T const>(xa.data() + r * batch.xa_stride() + offset, static_cast<std::size_t>(cell.rank)),
          batch.shape().n_out[p], want.data());
      for (std::size_t n = 0; n < want.size(); ++n) {
        double const got = to_f32(y[p][first + n]);
        double const delta = (to_f32(want[n]) - to_f32(before[n])) / cell.scale;
        double const limit = std::fabs(cell.scale) * ulp<T>(delta) * 2 + ulp<Y>(to_f32(want[n]));
        worst = std::max(worst, std::fabs(got - to_f32(want[n])) / limit);
        if (std::isnan(got)) worst = 1e9;
      }
    }
    offset += xa_projection_width(batch.table(p).max_rank);
  }
  return worst;
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("float gives the CPU reference's bits in every form") {
    for (Shape const& shape : shapes()) {
      for (std::int32_t const rows : row_counts()) {
        Batch<float> const batch(shape, mixed_slots(rows, static_cast<std::int32_t>(shape.ranks.size()), 7));
        auto const want = batch.reference();
        for (Form const form : all_forms) {
          if (!runs<float, float>(form)) continue;
          INFO(describe(shape, rows, form));
          auto const got = batch.run(form);
          for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("16-bit types round as the CPU reference does, but for the tensor cores' own sums", T,
                     __half, __nv_bfloat16) {
    std::int64_t values = 0;
    std::int64_t flips = 0;
    for (Shape const& shape : shapes()) {
      for (std::int32_t const rows : row_counts()) {
        Batch<T> const batch(shape, mixed_slots(rows, static_cast<std::int32_t>(shape.ranks.size()), 11));
        std::vector<T> xa;
        auto const y = batch.run(Form::split, false, &xa);
        INFO(describe(shape, rows, Form::split));
        CHECK(worst_excess(batch, xa, y) <= 1.0);
        std::int64_t offset = 0;
        for (std::size_t p = 0; p < y.size(); ++p) {
          for (std::int32_t r = 0; r < rows; ++r) {
            std::int32_t const slot = batch.row_slots()[static_cast<std::size_t>(r)];
            if (!batch.adapted(slot)) continue;
            RouteCell<T> const cell = batch.host_cell(p, slot);
            std::vector<T> want(static_cast<std::size_t>(cell.rank));
            reference_shrink(cell, batch.x(r), shape.k_in, std::span<T>(want));
            for (std::int32_t j = 0; j < cell.rank; ++j) {
              float const got = to_f32(xa[static_cast<std::size_t>(r * batch.xa_stride() + offset + j)]);
              float const expected = to_f32(want[static_cast<std::size_t>(j)]);
              // Longer sums differ by more of the tensor cores' own roundings.
              if (shape.k_in <= 4096) ++values;
              if (shape.k_in <= 4096 && got != expected) ++flips;
              // A sum near zero may lose more than its own last place to the roundings on the way.
              double const scale = std::sqrt(static_cast<double>(shape.k_in)) / 16.0;
              CHECK(std::fabs(got - expected) <= 2 * ulp<T>(expected) + scale * 1e-5);
            }
          }
          offset += xa_projection_width(batch.table(p).max_rank);
        }
      }
    }
    MESSAGE("xa values " << values << ", rounded the other way " << flips);
    CHECK(flips * 1000 <= values);
  }

  TEST_CASE_TEMPLATE("every form gives the same bits", T, float, __half, __nv_bfloat16) {
    for (Shape const& shape : shapes()) {
      for (std::int32_t const rows : row_counts()) {
        Batch<T> const batch(shape, mixed_slots(rows, static_cast<std::int32_t>(shape.ranks.size()), 13));
        auto const want = batch.run(Form::split);
        for (Form const form : all_forms) {
          if (!runs<T, T>(form)) continue;
          for (bool const settled : {false, true}) {
            INFO(describe(shape, rows, form) << ", settled " << settled);
            auto const got = batch.run(form, settled);
            for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("y may be float while weights are 16-bit", T, __half, __nv_bfloat16) {
    Shape const shape{.k_in = 256, .n_out = {96, 33}, .ranks = {16, 8}, .y_pad = 3};
    Batch<T, float> const batch(shape, mixed_slots(19, 2, 17));
    std::vector<T> xa;
    auto const want = batch.run(Form::split, false, &xa);
    CHECK(worst_excess(batch, xa, want) <= 1.0);
    for (Form const form : all_forms) {
      if (!runs<T, float>(form)) continue;
      auto const got = batch.run(form);
      for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
    }
  }

  TEST_CASE_TEMPLATE("the delta is near what double precision gives", T, float, __half, __nv_bfloat16) {
    Shape const shape{.k_in = small_shapes() ? 320 : 4096, .n_out = {256}, .ranks = {16, 64}};
    Batch<T> const batch(shape, {0, 1, 0, 1, 1});
    auto const got = batch.run(Form::automatic);
    double error = 0.0;
    double size = 0.0;
    for (std::int32_t r = 0; r < batch.rows(); ++r) {
      RouteCell<T> const cell = batch.host_cell(0, batch.row_slots()[static_cast<std::size_t>(r)]);
      std::vector<double> xa(static_cast<std::size_t>(cell.rank), 0.0);
      for (std::int32_t j = 0; j < cell.rank; ++j) {
        for (std::int64_t k = 0; k < shape.k_in; ++k) {
          xa[static_cast<std::size_t>(j)] +=
              static_cast<double>(to_f32(batch.x(r)[k])) * to_f32(cell.a[j * shape.k_in + k]);
        }
      }
      for (std::int64_t n = 0; n < 256; ++n) {
        double delta = 0.0;
        for (std::int32_t j = 0; j < cell.rank; ++j) {
          delta += xa[static_cast<std::size_t>(j)] * to_f32(cell.b[n * cell.b_row_stride + j]);
        }
        auto const i = static_cast<std::size_t>(r * batch.y_stride(0) + n);
        double const want = to_f32(batch.y()[0][i]) + static_cast<double>(cell.scale) * delta;
        error += (to_f32(got[0][i]) - want) * (to_f32(got[0][i]) - want);
        size += want * want;
      }
    }
    double const limit = std::is_same_v<T, float> ? 1e-6 : std::is_same_v<T, __half> ? 1e-3 : 6e-3;
    CHECK(std::sqrt(error / size) < limit);
  }

  TEST_CASE_TEMPLATE("rows without an adapter keep their bytes", T, float, __half, __nv_bfloat16) {
    Shape const shape{.k_in = 128, .n_out = {40}, .ranks = {8, 0}, .y_pad = 3};
    // Base in three spellings, slots out of range, and a slot that adapts nothing.
    Batch<T> const batch(shape, {-1, -7, std::numeric_limits<std::int32_t>::min(), 2, 2147483647, 1, 1});
    for (Form const form : all_forms) {
      if (!runs<T, T>(form)) continue;
      INFO(name(form));
      CHECK(same_bytes(batch.run(form)[0], batch.y()[0]));
    }
  }
}

}  // namespace atlas_test
