// SPDX-License-Identifier: AGPL-3.0-only
//
// How token overlays behave in a stream: capture and replay, late writers, contents and arguments that are
// out of range, offsets beyond 32 bits.
#include "overlay_support.cuh"

namespace atlas_test {

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE(
      "one token in slot 0, base and slot 1: each row its own, prefilled, decoded and replayed", T, float,
      __half, __nv_bfloat16) {
    OverlayShape const shape{
        .hidden = 72, .vocab = 12, .embed_counts = {12, 12}, .head_counts = {12, 12}, .logits_pad = 5};
    std::vector<std::int32_t> const slots{0, -1, 1};
    std::vector<std::int32_t> const tokens(3, 9);
    OverlayBatch<T> batch(shape, slots);
    // Prefill: all three in one pass; decode: a pass each. The head sees the same rows.
    std::vector<T> const prefilled = batch.run_embed(tokens);
    CHECK(same_bytes(prefilled, batch.reference_embed(tokens)));
    for (std::int32_t r = 0; r < 3; ++r) {
      OverlayBatch<T> const one(shape, {slots[static_cast<std::size_t>(r)]});
      std::vector<T> const decoded = one.run_embed({9});
      bool const own = slots[static_cast<std::size_t>(r)] >= 0;
      bool const equal = std::memcmp(&decoded[one.at(0, 0)], &prefilled[batch.at(r, 0)],
                                     static_cast<std::size_t>(shape.hidden) * sizeof(T)) == 0;
      bool const kept = std::memcmp(&prefilled[batch.at(r, 0)], &batch.h()[batch.at(r, 0)],
                                    static_cast<std::size_t>(shape.hidden) * sizeof(T)) == 0;
      CHECK(equal == own);
      CHECK(kept != own);
    }
    CHECK(std::memcmp(&prefilled[batch.at(0, 0)], &prefilled[batch.at(2, 0)],
                      static_cast<std::size_t>(shape.hidden) * sizeof(T)) != 0);

    // One graph of plan, embedding and head, replayed for other rows, slots and cells.
    Stream const stream;
    DeviceArray<T> const h(batch.h());
    DeviceArray<T> const logits(batch.logits());
    DeviceArray<std::int32_t> const device_tokens(tokens);
    OverlayEmbedParams<T> embed{
        h.data(), batch.row_stride(), 3, device_tokens.data(), batch.plan().row_slots, batch.device_table()};
    OverlayHeadParams<T> head = batch.head_params(h, logits);
    embed.inputs_settled = head.inputs_settled = false;
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CUDA_OK(launch_row_plan(batch.plan(), 3, overlay_machine<T, T>(), stream));
    CUDA_OK(launch_overlay_embed(embed, overlay_machine<T, T>(), stream));
    CUDA_OK(launch_overlay_head(head, overlay_machine<T, T>(), stream));
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    for (std::vector<std::int32_t> const& mix :
         {slots, std::vector<std::int32_t>{1, 0, -1}, std::vector<std::int32_t>{-1, -1, -1},
          std::vector<std::int32_t>{0, 0, 2}, slots}) {
      batch.set_row_slots(mix);
      CUDA_OK(cudaMemcpy(h.data(), batch.h().data(), h.bytes(), cudaMemcpyHostToDevice));
      CUDA_OK(cudaMemcpy(logits.data(), batch.logits().data(), logits.bytes(), cudaMemcpyHostToDevice));
      CUDA_OK(cudaDeviceSynchronize());
      CUDA_OK(cudaGraphLaunch(executable, stream));
      CUDA_OK(cudaStreamSynchronize(stream));
      std::vector<T> const want_h = batch.reference_embed(tokens);
      CHECK(same_bytes(h.download(), want_h));
      // The head read what the embedding wrote: a batch whose x is that h gives the same bits eagerly.
      DeviceArray<T> const x(want_h);
      DeviceArray<T> const eager(batch.logits());
      CUDA_OK(launch_overlay_head(batch.head_params(x, eager), overlay_machine<T, T>(), nullptr));
      CUDA_OK(cudaDeviceSynchronize());
      CHECK(same_bytes(logits.download(), eager.download()));
      for (std::int32_t r = 0; r < 3; ++r) {
        std::int32_t const slot = mix[static_cast<std::size_t>(r)];
        bool const own = slot >= 0 && slot < 2;
        CHECK(same_bytes(batch.row_of(logits.download(), r), batch.row_of(batch.logits(), r)) != own);
      }
    }
    CUDA_OK(cudaGraphExecDestroy(executable));
  }

  TEST_CASE("pads of the logits keep their bytes, and ids and counts out of range are skipped") {
    using T = __nv_bfloat16;
    OverlayShape const shape{
        .hidden = 64, .vocab = 49159, .embed_counts = {4, 4}, .head_counts = {49, 49}, .logits_pad = 57};
    OverlayBatch<T> const batch(shape, {0, 1, 0});
    DeviceArray<T> const x(std::vector<T>(3 * 64, from_f32<T>(1.0F)));
    // Slot 0 says ids beyond the vocabulary; slot 1 has more rows than the table allows.
    std::vector<std::int32_t> const bad_ids{49158, 49159, 49215, far_out, -1, -5};
    DeviceArray<std::int32_t> const ids(bad_ids);
    OverlayCell<T> cells[2] = {batch.slots()[0].device_cell(), batch.slots()[1].device_cell()};
    cells[0].head_ids = ids.data();
    cells[0].head_count = 6;
    cells[1].head_count = 50;
    DeviceArray<OverlayCell<T>> const device_cells(std::vector<OverlayCell<T>>(cells, cells + 2));
    DeviceArray<T> const logits(batch.logits());
    OverlayHeadParams<T> params = batch.head_params(x, logits);
    params.table.cells = device_cells.data();
    for (bool const clusters : {true, false}) {
      CUDA_OK(clusters ? launch_overlay_head(params, overlay_machine<T, T>(), nullptr)
                       : launch_overlay_head_without_clusters(params, overlay_machine<T, T>(), nullptr));
      CUDA_OK(cudaDeviceSynchronize());
      std::vector<T> const got = logits.download();
      for (std::size_t i = 0; i < got.size(); ++i) {
        bool const written = i == 49158 || i == 2 * 49216 + 49158;
        if (!written && std::memcmp(&got[i], &batch.logits()[i], sizeof(T)) != 0) FAIL("logit " << i);
      }
    }
    // A map that points beyond a slot's rows, and one whose rows are gone.
    std::vector<std::int32_t> map(49159, 4);
    DeviceArray<std::int32_t> const bad_map(map);
    cells[0].slot_map = bad_map.data();
    cells[1].embed_rows = nullptr;
    DeviceArray<OverlayCell<T>> const bad_cells(std::vector<OverlayCell<T>>(cells, cells + 2));
    DeviceArray<T> const h(batch.h());
    DeviceArray<std::int32_t> const tokens(std::vector<std::int32_t>{1, 0, 49158});
    OverlayEmbedParams<T> embed{h.data(), 64, 3, tokens.data(), batch.plan().row_slots, batch.device_table()};
    embed.table.cells = bad_cells.data();
    CUDA_OK(launch_overlay_embed(embed, overlay_machine<T, T>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    CHECK(same_bytes(h.download(), batch.h()));
  }

  TEST_CASE("with inputs settled behind a full edge, h, x and logits may still be written late") {
    using T = __nv_bfloat16;
    bool const programmatic = has_clusters(overlay_machine<T, T>().compute);
    OverlayShape const shape{
        .hidden = 512, .vocab = 5000, .embed_counts = {40, 5}, .head_counts = {300, 4200}};
    OverlayBatch<T> const batch(shape, {1, 0, -1, 0, 1, 1});
    std::vector<std::int32_t> const tokens{0, 0, 0, 125, 0, 1};
    std::vector<T> const want_h = batch.run_embed(tokens);
    DeviceArray<T> const good_h(batch.h()), good_logits(batch.logits()), want_x(want_h);
    DeviceArray<T> const want_logits(batch.logits());
    DeviceArray<std::int32_t> const device_tokens(tokens);
    DeviceArray<int> const sink(1);
    Machine const& machine = overlay_machine<T, T>();
    CUDA_OK(launch_overlay_head(batch.head_params(want_x, want_logits), machine, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<T> const want = want_logits.download();
    Stream const stream;
    for (int repeat = 0; repeat < (small_shapes() ? 2 : 50); ++repeat) {
      for (bool const clusters : {true, false}) {
        DeviceArray<T> const h(std::vector<T>(batch.h().size(), poison<T>()));
        DeviceArray<T> const logits(std::vector<T>(batch.logits().size(), poison<T>()));
        CUDA_OK(cudaDeviceSynchronize());
        launch_programmatic(copy_kernel<T>, 256, stream, programmatic, h.data(),
                            static_cast<T const*>(good_h.data()), static_cast<int>(h.size()));
        launch_programmatic(early_trigger_kernel<int>, 32, stream, programmatic, sink.data());
        OverlayEmbedParams<T> const embed{h.data(),
                                          batch.row_stride(),
                                          6,
                                          device_tokens.data(),
                                          batch.plan().row_slots,
                                          batch.device_table(),
                                          true};
        CUDA_OK(launch_overlay_embed(embed, machine, stream));
        launch_programmatic(copy_kernel<T>, 256, stream, programmatic, logits.data(),
                            static_cast<T const*>(good_logits.data()), static_cast<int>(logits.size()));
        launch_programmatic(early_trigger_kernel<int>, 32, stream, programmatic, sink.data());
        OverlayHeadParams<T> head = batch.head_params(h, logits);
        head.inputs_settled = true;
        CUDA_OK(clusters ? launch_overlay_head(head, machine, stream)
                         : launch_overlay_head_without_clusters(head, machine, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        INFO("repeat " << repeat << (clusters ? "" : ", without clusters"));
        CHECK(same_bytes(h.download(), want_h));
        CHECK(same_bytes(logits.download(), want));
      }
    }
  }

  TEST_CASE("a plan that says nonsense touches nothing out of bounds") {
    using T = __nv_bfloat16;
    OverlayBatch<T> const batch({.vocab = 5000, .embed_counts = {0, 0}, .head_counts = {40, 4200}},
                                {0, 1, 0, 1});
    auto const untouched = [&] {
      return same_bytes(batch.run_head(), batch.logits()) &&
             same_bytes(batch.run_head(false), batch.logits());
    };
    std::vector<RowGroup> const nonsense{{-3, 0, 2, 0}, {77, 0, 2, 0}};
    CUDA_OK(cudaMemcpy(batch.plan().groups, nonsense.data(), nonsense.size() * sizeof(RowGroup),
                       cudaMemcpyHostToDevice));
    CHECK(untouched());
    std::vector<RowGroup> const outside{{0, 3, 1 << 30, 0}, {1, -5, -6, 0}};
    std::vector<std::int32_t> const rows{900, -4, 4, 4};
    CUDA_OK(cudaMemcpy(batch.plan().groups, outside.data(), outside.size() * sizeof(RowGroup),
                       cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemcpy(batch.plan().rows, rows.data(), rows.size() * sizeof(std::int32_t),
                       cudaMemcpyHostToDevice));
    CHECK(untouched());
    RowPlanHeader const many{1 << 30, 4, 1 << 30, 0};
    CUDA_OK(cudaMemcpy(batch.plan().header, &many, sizeof many, cudaMemcpyHostToDevice));
    CHECK(untouched());
  }

  TEST_CASE("bad arguments and operations that were not prepared are refused before anything is enqueued") {
    using T = __nv_bfloat16;
    OverlayBatch<T> const batch({.embed_counts = {3}, .head_counts = {3}}, {0, 0});
    DeviceArray<T> const x(batch.h());
    DeviceArray<T> const logits(batch.logits());
    Machine const& machine = overlay_machine<T, T>();
    OverlayHeadParams<T> const good = batch.head_params(x, logits);
    auto const refused = [&](auto const& change) {
      OverlayHeadParams<T> bad = good;
      change(bad);
      CHECK(launch_overlay_head(bad, machine, nullptr) == cudaErrorInvalidValue);
      CHECK(launch_overlay_head_without_clusters(bad, machine, nullptr) == cudaErrorInvalidValue);
    };
    using P = OverlayHeadParams<T>;
    refused([](P& p) { p.x = nullptr; });
    refused([](P& p) { p.logits = nullptr; });
    refused([](P& p) { p.x_row_stride = 63; });
    refused([](P& p) { p.logits_row_stride = 499; });
    refused([](P& p) { p.rows = 3; });
    refused([](P& p) { p.rows = -1; });
    refused([](P& p) { p.plan = RowPlan{}; });
    refused([](P& p) { p.table.hidden = 0; });
    refused([](P& p) { p.table.vocab = -1; });
    refused([](P& p) { p.table.cell_stride_bytes = 40; });
    CHECK(launch_overlay_head(good, Machine{}, nullptr) == cudaErrorInvalidValue);
    DeviceArray<std::int32_t> const tokens(std::vector<std::int32_t>{1, 2});
    OverlayEmbedParams<T> const embed{
        x.data(), 64, 2, tokens.data(), batch.plan().row_slots, batch.device_table()};
    CHECK(launch_overlay_embed(embed, Machine{}, nullptr) == cudaErrorInvalidValue);
    OverlayEmbedParams<T> bad = embed;
    bad.h_row_stride = 63;
    CHECK(launch_overlay_embed(bad, machine, nullptr) == cudaErrorInvalidValue);
    bad = embed;
    bad.tokens = nullptr;
    CHECK(launch_overlay_embed(bad, machine, nullptr) == cudaErrorInvalidValue);
    OverlayHeadParams<T> none = good;
    none.table.cells = nullptr;
    CHECK(launch_overlay_head(none, machine, nullptr) == cudaSuccess);
    none = good;
    none.rows = 0;
    CHECK(launch_overlay_head(none, machine, nullptr) == cudaSuccess);
    CUDA_OK(cudaDeviceSynchronize());
    CHECK(same_bytes(logits.download(), batch.logits()));
  }

  TEST_CASE("offsets beyond 32 bits are right") {
    if (small_shapes()) return;
    using T = __nv_bfloat16;
    OverlayBatch<T> const batch({.hidden = 128, .vocab = 64, .embed_counts = {64}, .head_counts = {64}},
                                {0, 0});
    std::vector<T> const want_logits = batch.run_head();
    std::vector<std::int32_t> const tokens{9, 40};
    std::vector<T> const want_h = batch.run_embed(tokens);
    std::int64_t const stride = (std::int64_t{1} << 31) + 8;
    DeviceArray<T> const x(batch.h());
    DeviceArray<T> const far(static_cast<std::size_t>(stride + 128));
    OverlayHeadParams<T> params = batch.head_params(x, far);
    DeviceArray<T> const near_logits(batch.logits());
    params.logits = near_logits.data();
    CUDA_OK(launch_overlay_head(params, overlay_machine<T, T>(), nullptr));
    params.logits = far.data();
    params.logits_row_stride = stride;
    CUDA_OK(launch_overlay_head(params, overlay_machine<T, T>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<T> const near_values = near_logits.download();
    for (std::int64_t r = 0; r < 2; ++r) {
      std::vector<T> got(64);
      CUDA_OK(cudaMemcpy(got.data(), far.data() + r * stride, 64 * sizeof(T), cudaMemcpyDeviceToHost));
      CHECK(
          same_bytes(got, std::vector<T>(near_values.begin() + r * 64, near_values.begin() + (r + 1) * 64)));
    }
    DeviceArray<std::int32_t> const device_tokens(tokens);
    OverlayEmbedParams<T> const embed{
        far.data(), stride, 2, device_tokens.data(), batch.plan().row_slots, batch.device_table()};
    CUDA_OK(launch_overlay_embed(embed, overlay_machine<T, T>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    for (std::int64_t r = 0; r < 2; ++r) {
      std::vector<T> got(128);
      CUDA_OK(cudaMemcpy(got.data(), far.data() + r * stride, 128 * sizeof(T), cudaMemcpyDeviceToHost));
      CHECK(same_bytes(got, std::vector<T>(want_h.begin() + r * 128, want_h.begin() + (r + 1) * 128)));
    }
    CHECK_FALSE(same_bytes(want_logits, batch.logits()));
  }
}

}  // namespace atlas_test
