// SPDX-License-Identifier: AGPL-3.0-only
//
// The experts' delta in every form and order: its values, its bits, and its behaviour under capture.
#include "expert_batch.cuh"

#include <limits>

namespace atlas_test {
namespace {

std::vector<ExpertShape> shapes() {
  std::vector<ExpertShape> all;
  // Gate and up, down, widths and ranks that break vectors and tiles, lost alignment, biases, one expert.
  all.push_back({.k_in = 64, .n_out = {48, 48}, .ranks = {8, 0, 4}});
  if (few_shapes()) return all;
  all.push_back({.k_in = 48, .n_out = {64}, .ranks = {4, 8}, .own_rows = true, .y_pad = 8});
  all.push_back({.experts = 3, .top_k = 3, .k_in = 7, .n_out = {33, 5}, .ranks = {3, 12}, .bias = true});
  all.push_back(
      {.experts = 5, .k_in = 100, .n_out = {40}, .ranks = {16, 1}, .x_pad = 3, .y_pad = 5, .offset = 1});
  all.push_back({.experts = 1, .top_k = 1, .k_in = 32, .n_out = {16}, .ranks = {4}, .max_rank = 64});
  if (small_shapes()) return all;
  all.push_back({.experts = 16, .top_k = 4, .k_in = 2048, .n_out = {768, 768}, .ranks = {16, 64, 8, 32}});
  all.push_back(
      {.experts = 16, .top_k = 4, .k_in = 768, .n_out = {2048}, .ranks = {16, 64, 8}, .own_rows = true});
  return all;
}

std::vector<std::int32_t> token_counts() {
  if (few_shapes()) return {9};
  return small_shapes() ? std::vector<std::int32_t>{1, 9} : std::vector<std::int32_t>{1, 2, 13, 60};
}

std::string describe(ExpertShape const& shape, std::int32_t tokens, Form form, Order order) {
  return std::string(name(form)) + (order == Order::sorted ? ", sorted" : ", slot-major") + ", tokens " +
         std::to_string(tokens) + ", experts " + std::to_string(shape.experts) + ", k_in " +
         std::to_string(shape.k_in);
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("float gives the CPU reference's bits in every form, sorted and not") {
    for (ExpertShape const& shape : shapes()) {
      ExpertWeights<float> const weights(shape);
      for (std::int32_t const tokens : token_counts()) {
        ExpertBatch<float> const batch(shape, weights, random_routing(tokens, shape, 7));
        auto const want = batch.reference();
        for (Form const form : expert_forms) {
          if (!runs_experts<float, float>(form)) continue;
          for (Order const order : both_orders) {
            INFO(describe(shape, tokens, form, order));
            auto const got = batch.run(form, order);
            for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("a row has the bits of the dense delta of its pair, in every form, sorted and not", T,
                     float, __half, __nv_bfloat16) {
    for (ExpertShape const& shape : shapes()) {
      ExpertWeights<T> const weights(shape);
      for (std::int32_t const tokens : token_counts()) {
        ExpertBatch<T> const batch(shape, weights, random_routing(tokens, shape, 11));
        auto const want = batch.dense();
        for (Form const form : expert_forms) {
          if (!runs_experts<T, T>(form)) continue;
          for (Order const order : both_orders) {
            for (bool const settled : {false, true}) {
              INFO(describe(shape, tokens, form, order) << ", settled " << settled);
              auto const got = batch.run(form, order, settled);
              for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
            }
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE(
      "many rows of few experts, which the prefill kernel serves, have the bits of two launches", T, __half,
      __nv_bfloat16) {
    for (bool const own_rows : {false, true}) {
      ExpertShape shape{.experts = 3, .k_in = 416, .n_out = {72, 96}, .ranks = {24, 8, 72}, .bias = true};
      shape.own_rows = own_rows;
      ExpertWeights<T> const weights(shape);
      for (std::int32_t const tokens : {130, 300, 700}) {
        if (small_shapes() && tokens > 130) break;
        ExpertBatch<T> const batch(shape, weights, random_routing(tokens, shape, 13));
        for (Order const order : both_orders) {
          auto const want = batch.run(Form::two_launches, order);
          for (bool const settled : {false, true}) {
            INFO(describe(shape, tokens, Form::automatic, order) << ", settled " << settled);
            auto const got = batch.run(Form::automatic, order, settled);
            for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("any windows have the bits of one", T, float, __nv_bfloat16) {
    ExpertShape const shape{.experts = 6, .k_in = 96, .n_out = {40, 40}, .ranks = {8, 16}};
    ExpertWeights<T> const weights(shape);
    ExpertBatch<T> const batch(shape, weights, random_routing(small_shapes() ? 11 : 50, shape, 3));
    auto const want = batch.run(Form::automatic, Order::sorted);
    for (std::int32_t const window : {1, 7, 8, 33}) {
      if (few_shapes() && window != 7) continue;
      for (Order const order : both_orders) {
        for (Form const form : {Form::automatic, Form::two_launches}) {
          INFO(describe(shape, batch.device().tokens, form, order) << ", window " << window);
          auto const got = batch.run(form, order, false, window);
          for (std::size_t p = 0; p < got.size(); ++p) CHECK(same_bytes(got[p], want[p]));
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("a pair alone and among any others has the same bits", T, float, __half, __nv_bfloat16) {
    ExpertShape shape{.experts = 5, .top_k = 2, .k_in = 416, .n_out = {72}, .ranks = {24, 8, 16}};
    shape.every_expert = true;
    for (bool const own_rows : {false, true}) {
      shape.own_rows = own_rows;
      ExpertWeights<T> const weights(shape);
      ExpertBatch<T> const alone(shape, weights, {{0}, {3, 1}});
      auto const want = alone.y_row(alone.run(Form::automatic, Order::slot_major), 0, 0);
      for (std::int32_t const tokens : {3, 20, 100}) {
        if (small_shapes() && tokens > 3) break;
        for (std::int32_t const token : {0, tokens / 2, tokens - 1}) {
          Routing routing = random_routing(tokens, shape, static_cast<std::uint64_t>(tokens));
          routing.token_slots[static_cast<std::size_t>(token)] = 0;
          routing.expert_ids[static_cast<std::size_t>(2 * token + 1)] = 3;
          ExpertBatch<T> batch(shape, weights, routing);
          batch.copy_pair(token, 1, alone, 0, 0);
          for (Form const form : expert_forms) {
            if (!runs_experts<T, T>(form)) continue;
            for (Order const order : both_orders) {
              INFO(describe(shape, tokens, form, order) << ", token " << token);
              CHECK(same_bytes(batch.y_row(batch.run(form, order), 0, 2 * token + 1), want));
            }
          }
        }
      }
    }
  }

  TEST_CASE_TEMPLATE("a token that chose one expert twice has two rows, and each gets its delta once", T,
                     float, __nv_bfloat16) {
    ExpertShape const shape{.k_in = 64, .n_out = {48}, .ranks = {8}, .every_expert = true};
    ExpertWeights<T> const weights(shape);
    ExpertBatch<T> batch(shape, weights, {{0}, {2, 2}});
    batch.copy_pair(0, 1, batch, 0, 0);
    auto const want = batch.dense();
    for (Order const order : both_orders) {
      auto const got = batch.run(Form::automatic, order);
      CHECK(same_bytes(got[0], want[0]));
      CHECK(same_bytes(batch.y_row(got, 0, 0), batch.y_row(got, 0, 1)));
      CHECK_FALSE(same_bytes(batch.y_row(got, 0, 0), batch.y_row(batch.y(), 0, 0)));
    }
  }

  TEST_CASE_TEMPLATE("base rows, slots that adapt nothing, and ids out of range keep every byte", T, float,
                     __half, __nv_bfloat16) {
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
    ExpertShape const shape{.k_in = 64, .n_out = {48, 40}, .ranks = {8, 0}, .every_expert = true, .y_pad = 3};
    ExpertWeights<T> const weights(shape);
    // Base in three spellings, slots out of range, a slot that adapts nothing, experts out of range.
    ExpertBatch<T> const batch(
        shape, weights,
        {{-1, -7, least, 2, most, 1, 0, 0}, {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, -1, 4, most, least}});
    for (Form const form : expert_forms) {
      if (!runs_experts<T, T>(form)) continue;
      for (Order const order : both_orders) {
        INFO(describe(shape, 8, form, order));
        auto const got = batch.run(form, order);
        for (std::size_t p = 0; p < 2; ++p) CHECK(same_bytes(got[p], batch.y()[p]));
      }
    }
  }

  TEST_CASE_TEMPLATE("y may be float while weights are 16-bit, in every form", T, __half, __nv_bfloat16) {
    ExpertShape const shape{.k_in = 64, .n_out = {48}, .ranks = {8, 4}, .y_pad = 3};
    ExpertWeights<T> const weights(shape);
    ExpertBatch<T, float> const batch(shape, weights, random_routing(9, shape, 5));
    auto const want = batch.dense();
    for (Form const form : expert_forms) {
      if (!runs_experts<T, float>(form)) continue;
      for (Order const order : both_orders) CHECK(same_bytes(batch.run(form, order)[0], want[0]));
    }
  }

  TEST_CASE("bad parameters are refused before anything is enqueued") {
    ExpertShape const shape{.k_in = 64, .n_out = {48}, .ranks = {8}};
    ExpertWeights<float> const weights(shape);
    ExpertBatch<float> const batch(shape, weights, {{0, 0}, {0, 1, 1, 3}});
    ExpertPlanLayout const layout{4, 1, 4};
    DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
    DeviceArray<float> const x(std::vector<float>(128, 1.0F)),
        y(std::vector<float>(192, 1.0F));  // [2, 64], [4, 48]
    Machine const& m = expert_machine<float, float>();
    ExpertDeltaParams<float> good = batch.parameters(Order::slot_major, x.data(), layout.at(buffer.data()));
    good.projections[0] = {weights.table(0), y.data(), 48};
    DeviceArray<std::byte> const scratch(two_launch_scratch_bytes(good));
    good.scratch = scratch.data();
    good.scratch_bytes = scratch.bytes();
    CUDA_OK(launch_expert_plan(good.plan, batch.device().as_rows(Order::slot_major), m, nullptr));
    CUDA_OK(launch_expert_delta(good, m, nullptr));
    auto const refused = [&](auto const& change) {
      ExpertDeltaParams<float> bad = good;
      change(bad);
      return launch_expert_delta(bad, m, nullptr) == cudaErrorInvalidValue &&
             launch_expert_delta_in_two_launches(bad, m, nullptr) == cudaErrorInvalidValue;
    };
    CHECK(refused([](auto& p) { p.x = nullptr; }));
    CHECK(refused([](auto& p) { p.x_row_stride = 63; }));
    CHECK(refused([](auto& p) { p.rows = -1; }));
    CHECK(refused([](auto& p) { p.input.divisor = 0; }));
    CHECK(refused([](auto& p) { p.input.x_rows = -1; }));
    CHECK(refused([](auto& p) { p.plan = ExpertPlan{}; }));
    CHECK(refused([](auto& p) { p.num_projections = 0; }));
    CHECK(refused([](auto& p) { p.num_projections = max_projections + 1; }));
    CHECK(refused([](auto& p) { p.projections[0].y = nullptr; }));
    CHECK(refused([](auto& p) { p.projections[0].y_row_stride = 47; }));
    CHECK(refused([](auto& p) { p.projections[0].table.cell = 1; }));
    CHECK(refused([](auto& p) { p.projections[0].table.index_stride_bytes = 8; }));
    CHECK(launch_expert_delta(good, Machine{}, nullptr) == cudaErrorInvalidValue);
    ExpertDeltaParams<float> small = good;
    small.scratch_bytes = 1;
    CHECK(launch_expert_delta_in_two_launches(small, m, nullptr) == cudaErrorInvalidValue);
    ExpertRows const rows = batch.device().as_rows(Order::slot_major);
    ExpertPlan huge = good.plan;
    huge.max_slots = 1 << 20;
    CHECK(launch_expert_plan(huge, rows, m, nullptr) == cudaErrorInvalidValue);
    CHECK(launch_expert_plan(good.plan, rows.window(0, 5), m, nullptr) == cudaErrorInvalidValue);
    CHECK(launch_expert_plan(good.plan, ExpertRows{.rows = 1}, m, nullptr) == cudaErrorInvalidValue);
    CHECK(launch_expert_plan(good.plan, rows, Machine{}, nullptr) == cudaErrorInvalidValue);
    CUDA_OK(cudaDeviceSynchronize());
  }
}

}  // namespace atlas_test
