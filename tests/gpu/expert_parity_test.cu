// SPDX-License-Identifier: AGPL-3.0-only
//
// The reference system's own parity checks of experts and router, for one adapter and for many at once; and
// the experts' delta as part of captured steps.
#include "expert_batch.cuh"

#include <cmath>
#include <span>
#include <utility>

#include "atlas/lora/kernels/pair_delta.cuh"

namespace atlas_test {
namespace {

using T = __nv_bfloat16;
using Batch16 = ExpertBatch<T>;

constexpr std::int32_t hidden = 32, inner = 16, num_experts = 4, rank = 4, top_k = 2, tokens = 6;

ExpertShape parity_shape(std::int64_t k_in, std::int64_t n_out, bool own_rows, std::int32_t slots) {
  return {.experts = num_experts,
          .top_k = top_k,
          .k_in = k_in,
          .n_out = {n_out},
          .ranks = std::vector<std::int32_t>(static_cast<std::size_t>(slots), rank),
          .own_rows = own_rows,
          .seed = 0x10AAD31703350001u};
}

/// Token t chose experts t mod 4 and (t + 1) mod 4.
Routing parity_routing(std::vector<std::int32_t> token_slots) {
  Routing routing{std::move(token_slots), {}};
  for (std::int32_t t = 0; t < tokens; ++t) {
    routing.expert_ids.push_back(t % num_experts);
    routing.expert_ids.push_back((t + 1) % num_experts);
  }
  return routing;
}

/// Sums one after the other in f32, with the three rounding points.
void plain_fold(RouteCell<T> const& cell, T const* x, std::int64_t k_in, std::span<T> y) {
  std::vector<float> xa;
  for (std::int32_t j = 0; j < cell.rank; ++j) {
    float sum = 0.0F;
    for (std::int64_t k = 0; k < k_in; ++k) sum += to_f32(cell.a[j * k_in + k]) * to_f32(x[k]);
    xa.push_back(to_f32(from_f32<T>(sum)));
  }
  for (std::size_t n = 0; n < y.size(); ++n) {
    float sum = 0.0F;
    for (std::size_t j = 0; j < xa.size(); ++j) {
      sum += xa[j] *
             to_f32(cell.b[static_cast<std::int64_t>(n) * cell.b_row_stride + static_cast<std::int64_t>(j)]);
    }
    float const scaled = cell.scale * to_f32(from_f32<T>(sum));
    y[n] = from_f32<T>(to_f32(y[n]) + scaled);
  }
}

/// How many representable numbers lie between two of bf16.
int ulps(T a, T b) {
  auto const place = [](T value) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    int const magnitude = bits & 0x7fff;
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  };
  return std::abs(place(a) - place(b));
}

int worst_ulps(std::vector<T> const& a, std::vector<T> const& b) {
  int worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, ulps(a[i], b[i]));
  return worst;
}

/// The largest distance of any row from the plain sums, rows without a pair included.
int worst_of(Batch16 const& batch, ExpertWeights<T> const& weights, ExpertShape const& shape,
             typename Batch16::Rows const& got) {
  int worst = 0;
  for (std::int32_t row = 0; row < batch.rows(); ++row) {
    std::vector<T> want = batch.y_row(batch.y(), 0, row);
    std::int32_t const slot = batch.routing().token_slots[static_cast<std::size_t>(row / top_k)];
    std::int32_t const expert = batch.routing().expert_ids[static_cast<std::size_t>(row)];
    TestPair<T> const* const pair = slot >= 0 ? weights.pair(slot, expert, 0) : nullptr;
    if (pair != nullptr)
      plain_fold(pair->host_cell(), batch.x(shape.own_rows ? row : row / top_k), shape.k_in, want);
    worst = std::max(worst, worst_ulps(batch.y_row(got, 0, row), want));
  }
  return worst;
}

/// Mixes of adapters over the six tokens.
std::vector<std::vector<std::int32_t>> mixes() {
  return {
      {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, -1}, {-1, 0, 0, 0, 0, 0}, {0, 1, 2, 3, 0, 1}, {3, -1, 0, 2, -1, 1}};
}

cudaGraphExec_t captured(cudaStream_t stream, auto const& enqueue) {
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  CUDA_OK(cudaGraphDestroy(graph));
  return executable;
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("down, sorted: within one unit of plain sums, windows bit-equal, base rows untouched") {
    ExpertShape const shape = parity_shape(inner, hidden, true, 4);
    ExpertWeights<T> const weights(shape);
    Batch16 const whole(shape, weights, parity_routing(mixes()[0]));
    auto const want = whole.run(Form::automatic, Order::sorted);
    for (auto const& mix : mixes()) {
      Batch16 const batch(shape, weights, parity_routing(mix));
      auto const got = batch.run(Form::automatic, Order::sorted);
      CHECK(worst_of(batch, weights, shape, got) <= 1);
      CHECK(same_bytes(batch.run(Form::automatic, Order::sorted, false, 7)[0], got[0]));  // [0, 7), [7, 12)
      for (std::int32_t row = 0; row < batch.rows(); ++row) {
        std::int32_t const slot = mix[static_cast<std::size_t>(row / top_k)];
        if (slot < 0) CHECK(same_bytes(batch.y_row(got, 0, row), batch.y_row(batch.y(), 0, row)));
        if (slot == 0) CHECK(same_bytes(batch.y_row(got, 0, row), whole.y_row(want, 0, row)));
      }
    }
  }

  TEST_CASE("gate, sorted and gathered by token: within one unit of plain sums, and the same bits") {
    ExpertShape const shape = parity_shape(hidden, inner, false, 4);
    ExpertWeights<T> const weights(shape);
    for (auto const& mix : mixes()) {
      Batch16 const batch(shape, weights, parity_routing(mix));
      auto const sorted = batch.run(Form::automatic, Order::sorted);
      auto const gathered = batch.run(Form::automatic, Order::slot_major);
      CHECK(worst_of(batch, weights, shape, sorted) <= 1);
      CHECK(same_bytes(sorted[0], gathered[0]));
    }
  }

  TEST_CASE("one launch over all experts has the bits of a launch for each expert's rows") {
    ExpertShape const shape = parity_shape(inner, hidden, true, 1);
    ExpertWeights<T> const weights(shape);
    Batch16 const batch(shape, weights, parity_routing(mixes()[0]));
    auto const want = batch.run(Form::automatic, Order::sorted);
    Machine const pairs = ready_machine<PairDelta<T>>();
    std::vector<T> x(static_cast<std::size_t>(batch.rows()) * inner);
    for (std::int32_t row = 0; row < batch.rows(); ++row) {
      std::memcpy(x.data() + batch.device().place[static_cast<std::size_t>(row)] * inner, batch.x(row),
                  inner * sizeof(T));
    }
    DeviceArray<T> const device_x(x), y(batch.ordered(batch.y()[0], hidden, Order::sorted, false));
    std::vector<std::int32_t> const offsets = batch.device().offsets.download();
    for (std::int32_t e = 0; e < num_experts; ++e) {
      TestPair<T> const* const pair = weights.pair(0, e, 0);
      std::int32_t const first = offsets[static_cast<std::size_t>(e)];
      if (pair == nullptr) continue;
      RouteCell<T> const cell = pair->device_cell();
      LoraPair<T> lora{cell.a, cell.b, nullptr, cell.scale, cell.b_row_stride, inner, hidden, {cell.rank}};
      PairDeltaParams<T> params;
      params.x = device_x.data() + first * inner;
      params.x_row_stride = inner;
      params.y = y.data() + first * hidden;
      params.y_row_stride = hidden;
      params.rows = offsets[static_cast<std::size_t>(e) + 1] - first;
      DeviceArray<std::byte> const scratch(delta_scratch_bytes(lora, params.rows, pairs));
      params.scratch = scratch.data();
      params.scratch_bytes = scratch.bytes();
      CUDA_OK(launch_delta(lora, params, pairs, nullptr));
      CUDA_OK(cudaDeviceSynchronize());
    }
    CHECK(same_bytes(batch.ordered(y.download(), hidden, Order::sorted, true), want[0]));
  }

  TEST_CASE_TEMPLATE("a router on logits of either type: within its rounding of plain sums", Y, T, float) {
    // A router is the dense delta with its own table: six tokens, 32 -> 4 logits.
    Shape const shape{.k_in = hidden,
                      .n_out = {num_experts},
                      .ranks = {rank, rank, rank, rank},
                      .seed = 0x10AAD31703350001u};
    for (auto const& mix : mixes()) {
      Batch<T, Y> const batch(shape, mix);
      auto const got = batch.run(Form::automatic);
      for (std::int32_t row = 0; row < tokens; ++row) {
        std::int32_t const slot = mix[static_cast<std::size_t>(row)];
        for (std::int64_t n = 0; n < num_experts; ++n) {
          auto const i = static_cast<std::size_t>(row * batch.y_stride(0) + n);
          if (slot < 0) {
            CHECK(to_f32(got[0][i]) == to_f32(batch.y()[0][i]));
            continue;
          }
          // The delta in T is added to a logit of either type.
          std::vector<T> delta(num_experts, from_f32<T>(0.0F));
          RouteCell<T> cell = batch.host_cell(0, slot);
          float const scale = std::exchange(cell.scale, 1.0F);
          plain_fold(cell, batch.x(row), hidden, delta);
          float const want = to_f32(batch.y()[0][i]) + scale * to_f32(delta[static_cast<std::size_t>(n)]);
          float const unit = std::ldexp(std::fabs(want) + 0.01F, -7);
          CHECK(std::fabs(to_f32(got[0][i]) - want) <= unit);
        }
      }
    }
  }

  TEST_CASE("a graph captured with one mix is right for every later routing and mix") {
    ExpertShape const gate_up{.experts = 8, .top_k = 2, .k_in = 64, .n_out = {48, 48}, .ranks = {8, 16, 4}};
    ExpertWeights<T> const weights(gate_up);
    std::int32_t const count = small_shapes() ? 5 : 24;
    Routing const first = random_routing(count, gate_up, 1);
    Batch16 const batch(gate_up, weights, first);
    for (Order const order : both_orders) {
      DeviceRouting routing(first, gate_up.top_k, gate_up.experts);
      ExpertPlanLayout const layout{batch.rows(), 3, gate_up.experts};
      DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
      std::vector<T> host_x(static_cast<std::size_t>(count) * 64);
      for (std::int32_t t = 0; t < count; ++t)
        std::memcpy(host_x.data() + t * 64, batch.x(t), 64 * sizeof(T));
      DeviceArray<T> const x(host_x);
      std::vector<DeviceArray<T>> y;
      for (auto const& values : batch.y()) y.emplace_back(values);
      ExpertDeltaParams<T> params = batch.parameters(order, x.data(), layout.at(buffer.data()));
      params.input = routing.token_input(order);
      for (std::size_t p = 0; p < 2; ++p) params.projections[p] = {weights.table(p), y[p].data(), 48};
      DeviceArray<std::byte> const scratch(two_launch_scratch_bytes(params));
      params.scratch = scratch.data();
      params.scratch_bytes = scratch.bytes();
      for (Form const form : {Form::automatic, Form::two_launches}) {
        cudaStream_t stream = nullptr;
        CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        cudaGraphExec_t const graph = captured(stream, [&] {
          CUDA_OK(launch_expert_plan(params.plan, routing.as_rows(order), expert_machine<T, T>(), stream));
          enqueue_experts(form, params, stream);
        });
        for (std::uint64_t const seed : {1u, 2u, 3u, 4u}) {
          Routing now = random_routing(count, gate_up, seed);
          if (seed == 3) std::fill(now.token_slots.begin(), now.token_slots.end(), -1);
          if (seed == 4) std::fill(now.expert_ids.begin(), now.expert_ids.end(), 5);
          Batch16 const fresh(gate_up, weights, now);
          auto const want = fresh.dense();
          routing.set(now);
          for (std::size_t p = 0; p < 2; ++p) {
            y[p].upload(fresh.ordered(fresh.y()[p], 48, order, false));
          }
          CUDA_OK(cudaDeviceSynchronize());
          CUDA_OK(cudaGraphLaunch(graph, stream));
          CUDA_OK(cudaStreamSynchronize(stream));
          INFO(name(form) << ", seed " << seed << (order == Order::sorted ? ", sorted" : ""));
          for (std::size_t p = 0; p < 2; ++p) {
            CHECK(same_bytes(fresh.ordered(y[p].download(), 48, order, true), want[p]));
          }
        }
        CUDA_OK(cudaGraphExecDestroy(graph));
        CUDA_OK(cudaStreamDestroy(stream));
      }
    }
  }

  TEST_CASE("base rows beside an adapted one on one expert keep their bytes, with graphs replayed in turn") {
    // Base, slot 0, base and a pad, top 2, all on expert 1; slot 1 has rank 0 and so is base too.
    ExpertShape const shape{.k_in = 64, .n_out = {48}, .ranks = {8, 0}, .every_expert = true};
    ExpertWeights<T> const weights(shape);
    Routing const routing{{-1, 0, -1, 1}, std::vector<std::int32_t>(8, 1)};
    Batch16 const batch(shape, weights, routing);
    DeviceRouting const device(routing, 2, shape.experts);
    ExpertPlanLayout const layout{8, 2, shape.experts};
    DeviceArray<std::byte> const buffer(std::vector<std::byte>(layout.bytes(), std::byte{0x5a}));
    std::vector<T> host_x(std::size_t{4} * 64);
    for (std::int32_t t = 0; t < 4; ++t) std::memcpy(host_x.data() + t * 64, batch.x(t), 64 * sizeof(T));
    DeviceArray<T> const x(host_x), base(batch.y()[0]), y(batch.y()[0].size());
    ExpertDeltaParams<T> params = batch.parameters(Order::slot_major, x.data(), layout.at(buffer.data()));
    params.projections[0] = {weights.table(0), y.data(), 48};
    DeviceArray<std::byte> const scratch(two_launch_scratch_bytes(params));
    params.scratch = scratch.data();
    params.scratch_bytes = scratch.bytes();
    cudaStream_t stream = nullptr;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // The layer: what the base model computes, and then the delta, in one of the two graphs.
    auto const layer = [&](bool adapted) {
      CUDA_OK(cudaMemcpyAsync(y.data(), base.data(), base.bytes(), cudaMemcpyDeviceToDevice, stream));
      if (!adapted) return;
      CUDA_OK(
          launch_expert_plan(params.plan, device.as_rows(Order::slot_major), expert_machine<T, T>(), stream));
      CUDA_OK(launch_expert_delta(params, expert_machine<T, T>(), stream));
    };
    cudaGraphExec_t const with = captured(stream, [&] { layer(true); });
    cudaGraphExec_t const without = captured(stream, [&] { layer(false); });
    auto const want = batch.dense()[0];
    for (int turn = 0; turn < 3; ++turn) {
      for (bool const adapted : {true, false}) {
        CUDA_OK(cudaMemsetAsync(y.data(), 0xff, y.bytes(), stream));  // poison
        CUDA_OK(cudaGraphLaunch(adapted ? with : without, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        std::vector<T> const got = y.download();
        CHECK(same_bytes(got, adapted ? want : batch.y()[0]));
        for (std::int32_t const row : {0, 1, 4, 5, 6, 7}) {
          CHECK(same_bytes(batch.y_row({got}, 0, row), batch.y_row(batch.y(), 0, row)));
        }
      }
    }
    CUDA_OK(cudaGraphExecDestroy(with));
    CUDA_OK(cudaGraphExecDestroy(without));
    CUDA_OK(cudaStreamDestroy(stream));
  }
}

}  // namespace atlas_test
