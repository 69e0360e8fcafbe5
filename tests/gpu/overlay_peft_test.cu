// SPDX-License-Identifier: AGPL-3.0-only
//
// Real PEFT adapters with token rows through build, pool and kernels: every token's embedding is PEFT's row,
// and every overridden logit is the product with PEFT's row.
#include "overlay_support.cuh"

#include <cmath>
#include <string>

#include "atlas/lora.hpp"
#include "atlas/peft.hpp"

namespace atlas_test {
namespace {

struct Fixture {
  char const* name;
  char const* suffix;  ///< of the base's tables in base_subset.safetensors
};
constexpr Fixture fixtures[] = {{"qwen3_trainable_tokens_tied", ".token_adapter.weight"},
                                {"llama_trainable_tokens_untied", ".token_adapter.weight"},
                                {"llama_save_head", ".original_module.weight"},
                                {"llama_embed_lora", ".weight"}};

template <Element T>
std::vector<T> in_type(HostTensor const& tensor) {
  std::vector<T> out(tensor.bytes.size() / element_bytes(tensor.type));
  static_cast<void>(need(convert<T>(tensor, std::span<T>(out))));
  return out;
}

/// A table with an adapter's own rows in place.
template <Element T>
std::vector<T> replaced(std::vector<T> table, OverrideRows const& own, std::int64_t hidden) {
  if (own.empty()) return table;
  std::vector<T> const rows = in_type<T>(own.rows);
  for (std::size_t i = 0; i < own.ids.size(); ++i) {
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(i) * hidden, hidden,
                table.begin() + own.ids[i] * hidden);
  }
  return table;
}

template <Element T>
void run_fixture(Fixture const& fixture) {
  INFO(fixture.name);
  char const* const set = std::getenv("ATLAS_TEST_DATA");
  std::string const folder = (set != nullptr ? std::string(set) : "tests/data") + "/peft/" + fixture.name;
  ModelShape const shape = need(model_shape(need(read_model_config(folder + "/config.json"))));
  auto const base = need(SafetensorsFile::open(folder + "/base_subset.safetensors"));
  std::string const suffix = fixture.suffix;
  std::vector<T> const embedding = in_type<T>(need(base.read("model.embed_tokens" + suffix)));
  std::vector<T> const head = in_type<T>(need(base.read("lm_head" + suffix)));
  std::int64_t const hidden = shape.hidden(), vocab = shape.vocab();
  DeviceArray<T> const embedding_device(embedding), head_device(head);
  Machine const& machine = overlay_machine<T, float>();
  auto served = need(DeviceServedTable<T>::create(embedding_device.data(), hidden, machine, CudaBackend(0)));
  auto served_head = need(DeviceServedTable<T>::create(head_device.data(), hidden, machine, CudaBackend(0)));
  Adapter const raw = need(load_adapter(folder, shape));
  Adapter const adapter =
      need(build_overlay(raw, shape, ServedTables<DeviceServedTable<T>>{&served, &served_head}));
  HostServedTable<T> on_host(embedding.data(), hidden), head_on_host(head.data(), hidden);
  Adapter const twin =
      need(build_overlay(raw, shape, ServedTables<HostServedTable<T>>{&on_host, &head_on_host}));
  CHECK(adapter.overlay.embedding.ids == twin.overlay.embedding.ids);
  CHECK(adapter.overlay.embedding.rows == twin.overlay.embedding.rows);
  CHECK(adapter.overlay.head.ids == twin.overlay.head.ids);
  CHECK(adapter.digest == twin.digest);

  PoolOptions options;
  options.max_slots = 3;
  options.max_rank = 8;
  options.overlay_bytes = std::size_t{1} << 20;
  CudaBackend backend(0);
  auto pool = need(AdapterPool<T, CudaBackend>::create(shape, options, backend));
  auto const stream = need(backend.create_stream());
  static_cast<void>(need(pool.load("first", adapter)));  // so that slot 0 is not the one under test
  static_cast<void>(need(pool.load("tested", adapter)));
  need(pool.begin_step(stream));
  Lease const lease = need(pool.acquire("tested"));
  CHECK(lease.slot() == 1);

  // Every token once for the adapter; the first of them once more for base.
  auto const rows = static_cast<std::int32_t>(vocab) + 1;
  std::vector<std::int32_t> slots(static_cast<std::size_t>(rows), lease.slot()), tokens;
  for (std::int32_t r = 0; r < rows; ++r) tokens.push_back(r % static_cast<std::int32_t>(vocab));
  slots.back() = base_slot;
  std::vector<T> gathered = embedding;
  gathered.insert(gathered.end(), embedding.begin(), embedding.begin() + hidden);
  RowPlanLayout const layout{rows, options.max_slots};
  DeviceArray<std::byte> const plan_bytes(layout.bytes());
  RowPlan const plan = layout.at(plan_bytes.data());
  CUDA_OK(
      cudaMemcpy(plan.row_slots, slots.data(), slots.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice));
  DeviceArray<std::int32_t> const device_tokens(tokens);
  DeviceArray<T> const h(gathered);
  DeviceArray<float> const logits(
      std::vector<float>(static_cast<std::size_t>(rows * vocab), poison<float>()));
  OverlayTable<T> const table = need(pool.overlay());
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(launch_row_plan(plan, rows, machine, stream));
  CUDA_OK(launch_overlay_embed(
      OverlayEmbedParams<T>{h.data(), hidden, rows, device_tokens.data(), plan.row_slots, table}, machine,
      stream));
  OverlayHeadParams<T, float> head_params;
  head_params.x = h.data();
  head_params.x_row_stride = hidden;
  head_params.logits = logits.data();
  head_params.logits_row_stride = vocab;
  head_params.rows = rows;
  head_params.plan = plan;
  head_params.table = table;
  CUDA_OK(launch_overlay_head(head_params, machine, stream));
  need(pool.end_step(stream));
  CUDA_OK(cudaStreamSynchronize(stream));

  std::vector<T> want = replaced(embedding, adapter.overlay.embedding, hidden);
  want.insert(want.end(), embedding.begin(), embedding.begin() + hidden);
  std::vector<T> const got = h.download();
  CHECK(same_bytes(got, want));

  TokenOverlay const& overlay = adapter.overlay;
  OverrideRows const& own = overlay.head_is_embedding ? overlay.embedding : overlay.head;
  std::vector<T> const own_head = replaced(head, own, hidden);
  std::vector<float> const values = logits.download();
  std::int64_t compared = 0;
  bool right = true;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t token = 0; token < vocab; ++token) {
      float const value = values[static_cast<std::size_t>(r * vocab + token)];
      bool const overridden = r + 1 < rows && std::binary_search(own.ids.begin(), own.ids.end(),
                                                                 static_cast<std::int32_t>(token));
      if (!overridden) {
        right = right && std::isnan(value);
        continue;
      }
      ++compared;
      double product = 0.0;
      for (std::int64_t k = 0; k < hidden; ++k) {
        product += double{to_f32(got[static_cast<std::size_t>(r * hidden + k)])} *
                   double{to_f32(own_head[static_cast<std::size_t>(token * hidden + k)])};
      }
      right = right && std::fabs(value - product) <= 1e-5 * std::max(1.0, std::fabs(product));
    }
  }
  CHECK(right);
  CHECK(compared == (rows - 1) * std::ssize(own.ids));
  backend.destroy_stream(stream);
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("PEFT's token rows reach embedding and head, and only their own adapter's rows", T,
                     float, __half, __nv_bfloat16) {
    for (Fixture const& fixture : fixtures) run_fixture<T>(fixture);
  }
}

}  // namespace atlas_test
