// SPDX-License-Identifier: AGPL-3.0-only
//
// Real PEFT adapters through the pool and the kernels: float has the CPU twin's bits and PEFT's values,
// 16-bit types round as the twin does but for the tensor cores' own sums.
#include "support.cuh"

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "atlas/lora.hpp"
#include "atlas/peft.hpp"

namespace atlas_test {
namespace {

std::string data() {
  char const* const set = std::getenv("ATLAS_TEST_DATA");
  return (set != nullptr ? std::string(set) : std::string("tests/data")) + "/peft/";
}

/// The adapters whose every linear the library serves.
std::vector<std::string> served() {
  return {"llama_r8_all",   "llama_r16_bf16", "llama_r16_f16_qv", "llama_r12_rslora", "llama_r1",
          "llama_r64",      "llama_patterns", "llama_layers",     "llama_all_linear", "llama_lora_bias",
          "llama_bias_all", "qwen3moe_attn",  "qwen3next_hybrid", "phi3_fused_qkv"};
}

template <Element T>
std::vector<T> read(SafetensorsFile const& file, std::string const& name) {
  HostTensor const tensor = need(file.read(name));
  std::vector<T> out(tensor.bytes.size() / element_bytes(tensor.type));
  static_cast<void>(need(convert<T>(tensor, std::span<T>(out))));
  return out;
}

/// One adapter in a pool of one backend, published and leased.
template <Element T, class B>
struct Loaded {
  AdapterPool<T, B> pool;
  typename B::Stream stream;
  Lease lease;

  static Loaded make(ModelShape const& shape, Adapter const& adapter, B backend) {
    PoolOptions options;
    options.max_slots = 6;
    options.max_rank = 64;
    options.biases = true;
    auto pool = need(AdapterPool<T, B>::create(shape, options, backend));
    auto const stream = need(backend.create_stream());
    // The slot before it holds the same adapter under another name, so that slot 0 is not the one under test.
    static_cast<void>(need(pool.load("first", adapter)));
    static_cast<void>(need(pool.load("tested", adapter)));
    need(pool.begin_step(stream));
    Lease lease = need(pool.acquire("tested"));
    return {std::move(pool), stream, std::move(lease)};
  }
};

struct Counts {
  std::int64_t modules = 0;
  std::int64_t values = 0;
  std::int64_t flips = 0;
};

/// Runs one module of an adapter on three rows of PEFT's input and compares.
template <Element T>
void compare(std::string const& path, SafetensorsFile const& expected, Loaded<T, CudaBackend> const& device,
             Loaded<T, HostBackend> const& host, Site site, Counts& counts) {
  INFO(path);
  RouteTable<T> const on_device = need(device.pool.route(site));
  RouteTable<T> const on_host = need(host.pool.route(site));
  std::vector<T> const x = read<T>(expected, path + "|x");
  std::vector<T> const base = read<T>(expected, path + "|base");
  std::int64_t const k_in = on_host.k_in;
  std::int64_t const n_out = on_host.n_out;
  REQUIRE(static_cast<std::int64_t>(x.size()) == 3 * k_in);
  RowPlanLayout const layout{3, on_device.max_slots};
  DeviceArray<std::byte> const plan_bytes(layout.bytes());
  RowPlan const plan = layout.at(plan_bytes.data());
  std::vector<std::int32_t> const slots(3, device.lease.slot());
  CUDA_OK(cudaMemcpy(plan.row_slots, slots.data(), sizeof(std::int32_t) * 3, cudaMemcpyHostToDevice));
  CUDA_OK(launch_row_plan(plan, 3, machine<T, T>(), nullptr));
  DeviceArray<T> const x_device(x);
  DeviceArray<T> const y_device(base);
  DeviceArray<T> const y_split(base);
  DeltaParams<T> params;
  params.x = x_device.data();
  params.x_row_stride = k_in;
  params.rows = 3;
  params.plan = plan;
  params.projections[0] = {on_device, y_device.data(), n_out};
  DeviceArray<std::byte> const scratch(two_launch_scratch_bytes(params));
  params.scratch = scratch.data();
  params.scratch_bytes = scratch.bytes();
  CUDA_OK(launch_delta(params, machine<T, T>(), nullptr));
  ShrinkParams<T> shrink{params.x, k_in, 3, plan, {on_device}, 1};
  shrink.xa_row_stride = xa_width(shrink.tables, 1);
  DeviceArray<T> const xa_device(
      std::vector<T>(static_cast<std::size_t>(3 * shrink.xa_row_stride), poison<T>()));
  shrink.xa = xa_device.data();
  CUDA_OK((launch_shrink<T, T>(shrink, machine<T, T>(), nullptr)));
  ExpandParams<T> expand{
      xa_device.data(), shrink.xa_row_stride, 3, plan, {{on_device, y_split.data(), n_out}}, 1};
  CUDA_OK(launch_expand(expand, machine<T, T>(), nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  std::vector<T> const y = y_device.download();
  std::vector<T> const xa = xa_device.download();
  CHECK(same_bytes(y, y_split.download()));
  ++counts.modules;

  RouteCell<T> const& cell = *on_host.cell(host.lease.slot());
  REQUIRE(cell.adapted());
  std::vector<T> want = base;
  for (std::int64_t r = 0; r < 3; ++r) {
    std::vector<T> twin(static_cast<std::size_t>(cell.rank));
    reference_shrink(cell, x.data() + r * k_in, k_in, std::span<T>(twin));
    std::span<T const> const given(xa.data() + r * shrink.xa_row_stride, static_cast<std::size_t>(cell.rank));
    for (std::size_t j = 0; j < twin.size(); ++j) {
      ++counts.values;
      if (std::memcmp(&twin[j], &given[j], sizeof(T)) != 0) ++counts.flips;
    }
    reference_expand<T, T>(cell, given, n_out, want.data() + r * n_out);
  }
  if constexpr (std::is_same_v<T, float>) {
    CHECK(same_bytes(y, want));
    std::vector<float> const delta = read<float>(expected, path + "|delta");
    double largest = 0.0;
    double error = 0.0;
    for (std::size_t i = 0; i < delta.size(); ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(delta[i])));
      error = std::max(error, std::fabs(static_cast<double>(y[i]) - base[i] - delta[i]));
    }
    // y - base rounds at y's size, which the base output sets.
    CHECK(error <= 1e-5 * largest + 1e-6);
  } else {
    for (std::size_t i = 0; i < y.size(); ++i) {
      double const delta = (to_f32(want[i]) - to_f32(base[i])) / static_cast<double>(cell.scale);
      int const mantissa = std::is_same_v<T, __half> ? 10 : 7;
      auto const ulp = [&](double value) {
        return std::ldexp(1.0, (value == 0.0 ? -20 : std::ilogb(value)) - mantissa);
      };
      double const limit = std::fabs(cell.scale) * ulp(delta) * 2 + ulp(to_f32(want[i]));
      CHECK(std::fabs(to_f32(y[i]) - to_f32(want[i])) <= limit);
    }
  }
}

template <Element T>
Counts run_adapter(std::string const& name) {
  std::string const directory = data() + name;
  ModelShape const shape = need(model_shape(need(read_model_config(directory + "/config.json"))));
  Adapter const adapter = need(load_adapter(directory, shape));
  SafetensorsFile const expected = need(SafetensorsFile::open(directory + "/expected.safetensors"));
  auto const device = Loaded<T, CudaBackend>::make(shape, adapter, CudaBackend(0));
  auto const host = Loaded<T, HostBackend>::make(shape, adapter, HostBackend());
  CHECK(device.lease.slot() == 1);
  Counts counts;
  for (AdapterPair const& pair : adapter.pairs) {
    // PEFT names modules by their whole path: the pair's own tensor says it.
    std::string of_pair = pair.a.name.substr(std::string("base_model.model.").size());
    of_pair = of_pair.substr(0, of_pair.find(".lora_A."));
    if (expected.find(of_pair + "|x") == nullptr) continue;
    compare<T>(of_pair, expected, device, host, pair.site, counts);
  }
  return counts;
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("PEFT's adapters give the CPU twin's values, and PEFT's", T, float, __half,
                     __nv_bfloat16) {
    std::int64_t values = 0;
    std::int64_t flips = 0;
    for (std::string const& name : served()) {
      if (small_shapes() && name != "llama_patterns" && name != "llama_lora_bias") continue;
      INFO(name);
      Counts const counts = run_adapter<T>(name);
      CHECK(counts.modules > 0);
      values += counts.values;
      flips += counts.flips;
    }
    MESSAGE("xa values " << values << ", rounded the other way " << flips);
    CHECK(flips * 1000 <= (std::is_same_v<T, float> ? 0 : values));
  }
}

}  // namespace atlas_test
