// SPDX-License-Identifier: AGPL-3.0-only
//
// Token overlays on the device: against the CPU's operation, against themselves in every form, in streams and
// graphs, and the comparison of tables.
#include "overlay_support.cuh"

#include <cmath>
#include <limits>
#include <string>

#include "atlas/lora/overlay/build.hpp"

namespace atlas_test {
namespace {

constexpr std::int32_t far_out = std::numeric_limits<std::int32_t>::max();

/// Row slots that use every slot, base and slots out of range.
std::vector<std::int32_t> mixed(std::int32_t rows, std::int32_t slots, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int32_t> out(static_cast<std::size_t>(rows));
  for (std::int32_t& slot : out) {
    std::int32_t const draw = random.below(slots + 3);
    slot = draw < slots ? draw : draw == slots ? -1 : draw == slots + 1 ? slots : far_out;
  }
  return out;
}

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
    std::int32_t const many = small_shapes() ? 4200 : 20000;
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
    RowPlanHeader const many{1 << 30, 4, {0, 0}};
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
