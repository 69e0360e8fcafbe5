// SPDX-License-Identifier: AGPL-3.0-only
//
// One pair for all rows: the bits of the routed delta of the same pair, with a static and a run-time rank.
#include "support.cuh"

namespace atlas_test {
namespace {

template <std::int32_t Rank, Element T>
LoraPair<T, Rank> pair_of(Batch<T> const& batch) {
  RouteCell<T> const cell = batch.pairs()[0][0].device_cell();
  LoraPair<T, Rank> pair{
      cell.a, cell.b, cell.bias, cell.scale, cell.b_row_stride, batch.shape().k_in, batch.shape().n_out[0]};
  if constexpr (Rank == dynamic_rank) pair.extent.value = cell.rank;
  return pair;
}

template <std::int32_t Rank, Element T>
std::vector<T> run_pair(Batch<T> const& batch) {
  static Machine const machine = ready_machine<PairDelta<T, Rank>>();
  auto const y = batch.upload_y();
  DeltaParams<T> const routed = batch.params(y);
  auto const pair = pair_of<Rank>(batch);
  PairDeltaParams<T> params;
  params.x = routed.x;
  params.x_row_stride = routed.x_row_stride;
  params.y = routed.projections[0].y;
  params.y_row_stride = routed.projections[0].y_row_stride;
  params.rows = batch.rows();
  DeviceArray<std::byte> const scratch(delta_scratch_bytes(pair, batch.rows(), machine));
  params.scratch = scratch.data();
  params.scratch_bytes = scratch.bytes();
  CUDA_OK(launch_delta(pair, params, machine, nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  CHECK(launch_delta(pair, params, Machine{}, nullptr) == cudaErrorInvalidValue);
  return y[0].download();
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("a pair for all rows has the routed delta's bits, static rank or not", T, float, __half,
                     __nv_bfloat16) {
    for (std::int64_t const k_in : {std::int64_t{98}, std::int64_t{512}}) {
      for (std::int32_t const rows : {1, 5, 150}) {
        Shape const shape{.k_in = k_in, .n_out = {136}, .ranks = {16}, .x_pad = 2, .bias = rows == 5};
        Batch<T> const batch(shape, std::vector<std::int32_t>(static_cast<std::size_t>(rows), 0));
        auto const want = batch.run(Form::split);
        INFO("rows " << rows << ", k_in " << k_in);
        CHECK(same_bytes(run_pair<16>(batch), want[0]));
        CHECK(same_bytes(run_pair<dynamic_rank>(batch), want[0]));
      }
    }
  }
}

}  // namespace atlas_test
