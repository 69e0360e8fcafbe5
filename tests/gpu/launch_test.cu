// SPDX-License-Identifier: AGPL-3.0-only
//
// How the delta behaves in a stream: capture and replay, stale plans, programmatic dependent launch, bad
// arguments, offsets beyond 32 bits.
#include "streams.cuh"
#include "support.cuh"

#include <algorithm>

namespace atlas_test {
namespace {

/// The captured step: plan from row slots, then the delta.
template <Element T>
cudaGraphExec_t capture(Batch<T> const& batch, Form form, std::vector<DeviceArray<T>> const& y,
                        DeviceArray<T> const& xa, DeviceArray<std::byte> const& scratch,
                        cudaStream_t stream) {
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(launch_row_plan(batch.plan(), batch.rows(), machine<T, T>(), stream));
  batch.enqueue(form, batch.params(y), xa, scratch, stream);
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  CUDA_OK(cudaGraphDestroy(graph));
  return executable;
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("a graph captured with one adapter is right with five, with none, and with stale tails",
                     T, float, __nv_bfloat16) {
    Shape const shape{.k_in = 512, .n_out = {128, 64}, .ranks = {16, 8, 64, 4, 32}};
    std::int32_t const rows = 24;
    std::vector<std::vector<std::int32_t>> mixes;
    mixes.push_back(std::vector<std::int32_t>(rows, 2));
    mixes.push_back(mixed_slots(rows, 5, 1));
    mixes.push_back(std::vector<std::int32_t>(rows, -1));
    std::vector<std::int32_t> tail(rows, -1);  // three live rows, pads that were slot 2 before
    tail[0] = 4;
    tail[1] = 1;
    tail[2] = 4;
    mixes.push_back(tail);
    mixes.push_back(mixes[0]);
    for (Form const form : {Form::automatic, Form::two_launches, Form::split}) {
      Batch<T> batch(shape, mixes[0]);
      Stream const stream;
      auto const y = batch.upload_y();
      auto const xa = batch.make_xa();
      auto const scratch = batch.make_scratch();
      cudaGraphExec_t const graph = capture(batch, form, y, xa, scratch, stream);
      for (std::vector<std::int32_t> const& mix : mixes) {
        batch.set_row_slots(mix);
        auto const want = batch.run(Form::automatic);
        for (std::size_t p = 0; p < y.size(); ++p) {
          CUDA_OK(cudaMemcpy(y[p].data(), batch.y()[p].data(), y[p].bytes(), cudaMemcpyHostToDevice));
        }
        CUDA_OK(cudaGraphLaunch(graph, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        INFO(name(form));
        for (std::size_t p = 0; p < y.size(); ++p) CHECK(same_bytes(y[p].download(), want[p]));
      }
      CUDA_OK(cudaGraphExecDestroy(graph));
    }
  }

  TEST_CASE_TEMPLATE("two graphs over the same rows, with and without adapters, do not disturb each other", T,
                     __nv_bfloat16) {
    Shape const shape{.k_in = 256, .n_out = {64}, .ranks = {16, 8}};
    Batch<T> batch(shape, {-1, 0, -1, 1});
    Stream const stream;
    auto const y = batch.upload_y();
    auto const xa = batch.make_xa();
    auto const scratch = batch.make_scratch();
    cudaGraphExec_t const with = capture(batch, Form::automatic, y, xa, scratch, stream);
    for (int turn = 0; turn < 4; ++turn) {
      bool const adapted = turn % 2 == 0;
      batch.set_row_slots(adapted ? std::vector<std::int32_t>{-1, 0, -1, 1}
                                  : std::vector<std::int32_t>(4, -1));
      auto const want = batch.run(Form::automatic);
      CUDA_OK(cudaMemcpy(y[0].data(), batch.y()[0].data(), y[0].bytes(), cudaMemcpyHostToDevice));
      CUDA_OK(cudaGraphLaunch(with, stream));
      CUDA_OK(cudaStreamSynchronize(stream));
      CHECK(same_bytes(y[0].download(), want[0]));
      if (!adapted) CHECK(same_bytes(y[0].download(), batch.y()[0]));
    }
    CUDA_OK(cudaGraphExecDestroy(with));
  }

  TEST_CASE("behind a kernel that triggers early, a launch without a promise still reads what was written") {
    // writer of x and of the row slots -> plan and an early trigger -> delta, all programmatic. Without
    // `inputs_settled` the delta reads nothing before its wait, so it is right whatever its neighbours do.
    using T = __nv_bfloat16;
    bool const programmatic = has_clusters(machine<T, T>().compute);
    Shape const shape{.k_in = 256, .n_out = {64}, .ranks = {16, 8, 4}};
    std::vector<std::int32_t> const old_slots(8, 0);
    std::vector<std::int32_t> const new_slots{1, 2, -1, 0, 1, 1, 2, 0};
    Batch<T> batch(shape, new_slots);
    auto const want = batch.run(Form::automatic);
    std::vector<std::byte> plan_of_new(RowPlanLayout{8, 3}.bytes());
    CUDA_OK(cudaMemcpy(plan_of_new.data(), batch.plan().header, plan_of_new.size(), cudaMemcpyDeviceToHost));
    DeviceArray<std::byte> const source(plan_of_new);
    DeviceArray<int> const sink(1);
    Stream const stream;
    auto const xa = batch.make_xa();
    auto const scratch = batch.make_scratch();
    for (int repeat = 0; repeat < (small_shapes() ? 2 : 50); ++repeat) {
      for (Form const form : {Form::automatic, Form::two_launches, Form::split}) {
        batch.set_row_slots(old_slots);
        auto const y = batch.upload_y();
        CUDA_OK(cudaDeviceSynchronize());
        launch_programmatic(copy_kernel<std::byte>, 256, stream, programmatic,
                            reinterpret_cast<std::byte*>(batch.plan().header),
                            static_cast<std::byte const*>(source.data()), static_cast<int>(source.size()));
        launch_programmatic(early_trigger_kernel<int>, 32, stream, programmatic, sink.data());
        batch.enqueue(form, batch.params(y), xa, scratch, stream);
        CUDA_OK(cudaStreamSynchronize(stream));
        INFO(name(form) << ", repeat " << repeat);
        CHECK(same_bytes(y[0].download(), want[0]));
      }
    }
  }

  TEST_CASE("with inputs settled behind a full edge, x and y may still be written late") {
    // The promise is about plan and tables; x comes from a slow programmatic writer just before.
    using T = __nv_bfloat16;
    bool const programmatic = has_clusters(machine<T, T>().compute);
    Shape const shape{.k_in = 256, .n_out = {64}, .ranks = {16, 8, 4}};
    Batch<T> const batch(shape, {1, 2, -1, 0, 1, 1, 2, 0});
    auto const want = batch.run(Form::automatic);
    Stream const stream;
    auto const xa = batch.make_xa();
    auto const scratch = batch.make_scratch();
    DeviceArray<int> const sink(1);
    auto const good_y = batch.upload_y();
    for (int repeat = 0; repeat < (small_shapes() ? 2 : 50); ++repeat) {
      for (Form const form : {Form::automatic, Form::two_launches, Form::split}) {
        std::vector<DeviceArray<T>> y;
        y.emplace_back(std::vector<T>(batch.y()[0].size(), poison<T>()));
        CUDA_OK(cudaDeviceSynchronize());
        launch_programmatic(copy_kernel<T>, 256, stream, programmatic, y[0].data(),
                            static_cast<T const*>(good_y[0].data()), static_cast<int>(y[0].size()));
        launch_programmatic(early_trigger_kernel<int>, 32, stream, programmatic, sink.data());
        DeltaParams<T> params = batch.params(y);
        params.inputs_settled = true;
        batch.enqueue(form, params, xa, scratch, stream);
        CUDA_OK(cudaStreamSynchronize(stream));
        INFO(name(form) << ", repeat " << repeat);
        CHECK(same_bytes(y[0].download(), want[0]));
      }
    }
  }

  TEST_CASE("deltas with inputs settled, one behind the other, read what those before wrote") {
    // Each may start while several before it run, and its x is what the last one wrote to.
    using T = __nv_bfloat16;
    constexpr int launches = 12;
    Shape const shape{.k_in = 256, .n_out = {256}, .ranks = {16, 8, 40}};
    for (std::int32_t const rows : {1, 8, 70}) {
      Batch<T> const batch(shape, mixed_slots(rows, 3, 7));
      auto const xa = batch.make_xa();
      auto const scratch = batch.make_scratch();
      std::vector<std::vector<T>> results;
      for (bool const settled : {false, true}) {
        std::vector<DeviceArray<T>> y = batch.upload_y();
        DeviceArray<T> const other(batch.y()[0]);
        CUDA_OK(cudaDeviceSynchronize());
        DeltaParams<T> params = batch.params(y);
        params.x_row_stride = params.projections[0].y_row_stride;
        params.inputs_settled = settled;
        for (int i = 0; i < launches; ++i) {
          params.x = i % 2 == 0 ? other.data() : y[0].data();
          params.projections[0].y = i % 2 == 0 ? y[0].data() : other.data();
          batch.enqueue(Form::automatic, params, xa, scratch, nullptr);
          if (!settled) CUDA_OK(cudaDeviceSynchronize());
        }
        CUDA_OK(cudaDeviceSynchronize());
        results.push_back(y[0].download());
        results.push_back(other.download());
      }
      INFO(rows << " rows");
      CHECK(same_bytes(results[0], results[2]));
      CHECK(same_bytes(results[1], results[3]));
      CHECK(!same_bytes(results[0], batch.y()[0]));
    }
  }

  TEST_CASE("a plan that says nonsense touches nothing out of bounds") {
    using T = __nv_bfloat16;
    Shape const shape{.k_in = 64, .n_out = {32}, .ranks = {8, 8}};
    Batch<T> batch(shape, {0, 1, 0, 1});
    std::vector<RowGroup> const nonsense{{-3, 0, 2, 0}, {77, 0, 2, 0}};
    CUDA_OK(cudaMemcpy(batch.plan().tiles, nonsense.data(), nonsense.size() * sizeof(RowGroup),
                       cudaMemcpyHostToDevice));
    CHECK(same_bytes(batch.run(Form::automatic)[0], batch.y()[0]));
    std::vector<RowGroup> const outside{{0, 3, 1 << 30, 0}, {1, -5, -6, 0}};
    std::vector<std::int32_t> const rows{900, -4, 4, 4};
    CUDA_OK(cudaMemcpy(batch.plan().tiles, outside.data(), outside.size() * sizeof(RowGroup),
                       cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemcpy(batch.plan().rows, rows.data(), rows.size() * sizeof(std::int32_t),
                       cudaMemcpyHostToDevice));
    CHECK(same_bytes(batch.run(Form::two_launches)[0], batch.y()[0]));
    CHECK(same_bytes(batch.run(Form::automatic)[0], batch.y()[0]));
  }

  TEST_CASE("a plan for more rows than a launch has leaves out the others in every form") {
    using T = __nv_bfloat16;
    Shape const shape{.k_in = 64, .n_out = {64}, .ranks = {8, 8, 8}};
    std::vector<std::int32_t> const slots{2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1};
    Batch<T> const batch(shape, slots);
    std::vector<T> const whole = batch.run(Form::automatic)[0];
    constexpr std::int32_t rows = 3;
    std::vector<T> want = batch.y()[0];
    std::copy(whole.begin(), whole.begin() + rows * 64, want.begin());
    for (Form const form : all_forms) {
      if (!runs<T, T>(form)) continue;
      INFO(name(form));
      auto const y = batch.upload_y();
      DeltaParams<T> params = batch.params(y);
      params.rows = rows;
      // What lies behind the scratch that the launch asks for must not be written.
      std::size_t const bytes = two_launch_scratch_bytes(params);
      DeviceArray<std::byte> const scratch(std::vector<std::byte>(bytes + 4096, std::byte{0x5a}));
      batch.enqueue(form, params, batch.make_xa(), scratch, nullptr);
      CUDA_OK(cudaDeviceSynchronize());
      CHECK(same_bytes(y[0].download(), want));
      std::vector<std::byte> const after = scratch.download();
      CHECK(std::count(after.begin() + static_cast<std::ptrdiff_t>(bytes), after.end(), std::byte{0x5a}) ==
            4096);
    }
  }

  TEST_CASE("a plan of more row tiles than a launch's rows can fill gives every team its own") {
    // Few rows of many or of long outputs, which teams share, of a plan with several row tiles a team.
    using T = __nv_bfloat16;
    std::vector<std::int32_t> const ranks(40, 8);
    for (std::vector<std::int64_t> const& n_out :
         {std::vector<std::int64_t>{8192}, {1024, 64, 64}, {4096, 4096}}) {
      Shape const shape{.k_in = 512, .n_out = n_out, .ranks = ranks};
      std::vector<std::int32_t> slots(120);
      for (std::size_t r = 0; r < slots.size(); ++r) slots[r] = static_cast<std::int32_t>((r + 3) * 7 % 40);
      Batch<T> const batch(shape, slots);
      auto const whole = batch.run(Form::split);
      for (std::int32_t const rows : {1, 3, 9}) {
        for (Form const form : all_forms) {
          if (!runs<T, T>(form)) continue;
          auto const y = batch.upload_y();
          DeltaParams<T> params = batch.params(y);
          params.rows = rows;
          params.inputs_settled = true;
          batch.enqueue(form, params, batch.make_xa(), batch.make_scratch(), nullptr);
          CUDA_OK(cudaDeviceSynchronize());
          INFO(name(form) << ", rows " << rows << ", projections " << n_out.size());
          for (std::size_t p = 0; p < n_out.size(); ++p) {
            std::vector<T> want = batch.y()[p];
            std::copy(whole[p].begin(), whole[p].begin() + rows * n_out[p], want.begin());
            CHECK(same_bytes(y[p].download(), want));
          }
        }
      }
    }
  }

  TEST_CASE("bad arguments are refused before anything is enqueued") {
    using T = __nv_bfloat16;
    Batch<T> const batch({.k_in = 64, .n_out = {32}, .ranks = {8}}, {0, 0});
    auto const y = batch.upload_y();
    DeltaParams<T> const good = batch.params(y);
    auto const refused = [](DeltaParams<T> const& params) {
      return launch_delta(params, machine<T, T>(), nullptr) == cudaErrorInvalidValue;
    };
    DeltaParams<T> bad = good;
    bad.x = nullptr;
    CHECK(refused(bad));
    bad = good;
    bad.x_row_stride = 63;
    CHECK(refused(bad));
    bad = good;
    bad.rows = 3;  // beyond the plan's capacity
    CHECK(refused(bad));
    bad = good;
    bad.rows = -1;
    CHECK(refused(bad));
    bad = good;
    bad.num_projections = 0;
    CHECK(refused(bad));
    bad = good;
    bad.num_projections = max_projections + 1;
    CHECK(refused(bad));
    bad = good;
    bad.plan = RowPlan{};
    CHECK(refused(bad));
    bad = good;
    bad.projections[0].y = nullptr;
    CHECK(refused(bad));
    bad = good;
    bad.projections[0].y_row_stride = 31;
    CHECK(refused(bad));
    bad = good;
    bad.projections[0].table.cell_stride_bytes = 40;
    CHECK(refused(bad));
    bad = good;
    bad.projections[1] = bad.projections[0];
    bad.projections[1].table.k_in = 65;
    bad.num_projections = 2;
    CHECK(refused(bad));
    CHECK(launch_delta(good, Machine{}, nullptr) == cudaErrorInvalidValue);
    CHECK(launch_delta_in_two_launches(good, machine<T, T>(), nullptr) ==
          cudaErrorInvalidValue);  // no scratch
    DeltaParams<T> none = good;
    none.rows = 0;
    CHECK(launch_delta(none, machine<T, T>(), nullptr) == cudaSuccess);
    CUDA_OK(cudaDeviceSynchronize());
    CHECK(same_bytes(y[0].download(), batch.y()[0]));
  }

  TEST_CASE("offsets beyond 32 bits are right") {
    if (small_shapes()) return;
    // Rows of x and y more than 2^31 elements apart; only the two rows are written.
    using T = __nv_bfloat16;
    Batch<T> const batch({.k_in = 128, .n_out = {64}, .ranks = {8}}, {0, 0});
    auto const want = batch.run(Form::automatic);
    std::int64_t const stride = (std::int64_t{1} << 31) + 8;
    DeviceArray<T> const x(static_cast<std::size_t>(stride + 128));
    DeviceArray<T> const y(static_cast<std::size_t>(stride + 64));
    for (std::int32_t r = 0; r < 2; ++r) {
      CUDA_OK(cudaMemcpy(x.data() + r * stride, batch.x(r), 128 * sizeof(T), cudaMemcpyHostToDevice));
      CUDA_OK(cudaMemcpy(y.data() + r * stride, batch.y()[0].data() + r * 64, 64 * sizeof(T),
                         cudaMemcpyHostToDevice));
    }
    auto const y_small = batch.upload_y();
    for (Form const form : {Form::automatic, Form::two_launches, Form::split}) {
      DeltaParams<T> params = batch.params(y_small);
      params.x = x.data();
      params.x_row_stride = stride;
      params.projections[0].y = y.data();
      params.projections[0].y_row_stride = stride;
      auto const xa = batch.make_xa();
      auto const scratch = batch.make_scratch();
      batch.enqueue(form, params, xa, scratch, nullptr);
      CUDA_OK(cudaDeviceSynchronize());
      for (std::int32_t r = 0; r < 2; ++r) {
        std::vector<T> got(64);
        CUDA_OK(cudaMemcpy(got.data(), y.data() + r * stride, 64 * sizeof(T), cudaMemcpyDeviceToHost));
        INFO(name(form) << ", row " << r);
        CHECK(same_bytes(got, std::vector<T>(want[0].begin() + r * 64, want[0].begin() + (r + 1) * 64)));
        CUDA_OK(cudaMemcpy(y.data() + r * stride, batch.y()[0].data() + r * 64, 64 * sizeof(T),
                           cudaMemcpyHostToDevice));
      }
    }
  }

  TEST_CASE("more rows than 16 bits count are all adapted") {
    if (small_shapes()) return;
    using T = __nv_bfloat16;
    std::int32_t const rows = 70'001;
    Batch<T> const batch({.k_in = 64, .n_out = {32}, .ranks = {8, 16}}, mixed_slots(rows, 2, 4));
    auto const automatic = batch.run(Form::automatic);
    auto const split = batch.run(Form::split);
    CHECK(same_bytes(automatic[0], split[0]));
    std::int64_t changed = 0;
    std::int64_t routed = 0;
    for (std::int32_t r = 0; r < rows; ++r) {
      if (batch.adapted(batch.row_slots()[static_cast<std::size_t>(r)])) ++routed;
      if (std::memcmp(&automatic[0][static_cast<std::size_t>(r) * 32],
                      &batch.y()[0][static_cast<std::size_t>(r) * 32], 64) != 0) {
        ++changed;
      }
    }
    CHECK(changed == routed);
  }
}

}  // namespace atlas_test
