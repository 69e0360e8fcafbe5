// SPDX-License-Identifier: AGPL-3.0-only
//
// The pool on a device: publication between replays of a graph, loads while a graph is captured or a step
// runs, promotion from pinned memory, and the levers of a step.
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "../pool/tiny_pool.hpp"
#include "atlas/lora.hpp"
#include "device.cuh"

namespace atlas_test {
namespace {

constexpr std::int32_t num_rows = 5;

/// `tiny_shape`, of which the lever knows which linears are of the feed-forward part.
ModelShape device_shape() {
  ModelDescription d;
  d.num_layers = 2;
  d.modules = {
      {"q", 6, 10, {0, 1}, {}}, {"up", 9, 10, {0, 1}, {}, true}, {"lm_head", 7, 3, {model_wide}, {}}};
  return *ModelShape::create(d);
}

template <class V>
V ok(Result<V> result) {
  if (!result) MESSAGE(result.error().message);
  REQUIRE(result.has_value());
  if constexpr (!std::is_void_v<V>) return *std::move(result);
}

class EngineStream {
 public:
  EngineStream() { CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~EngineStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  EngineStream(EngineStream const&) = delete;
  EngineStream& operator=(EngineStream const&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

template <Element T>
Machine const& machine_of() {
  static Machine const made = ready_machine<Delta<T>, RowPlanning>();
  return made;
}

/// One step over all sites of a pool, captured once; linears of the feed-forward part have a plan of their
/// own.
template <Element T>
class CapturedStep {
 public:
  using DevicePool = AdapterPool<T, CudaBackend>;
  using Outputs = std::vector<std::vector<T>>;  // [site][rows * n_out]
  using Slots = std::vector<std::int32_t>;      // [rows]

  CapturedStep(DevicePool const& pool, cudaStream_t stream)
      : stream_(stream), layout_{num_rows, pool.max_slots()}, main_(layout_.bytes()), ffn_(layout_.bytes()) {
    for (Site const site : pool.shape().sites()) {
      RouteTable<T> const table = ok(pool.route(site));
      std::vector<T> x;
      for (std::int64_t i = 0; i < num_rows * table.k_in; ++i) {
        x.push_back(from_f32<T>(static_cast<float>(i % 7) / 8.0F));
      }
      Launch launch{table, pool.shape().module(site).ffn, DeviceArray<T>(x),
                    DeviceArray<T>(static_cast<std::size_t>(num_rows * table.n_out))};
      launches_.push_back(std::move(launch));
    }
    capture([] {});
  }
  ~CapturedStep() { static_cast<void>(cudaGraphExecDestroy(graph_)); }
  CapturedStep(CapturedStep const&) = delete;
  CapturedStep& operator=(CapturedStep const&) = delete;

  /// Captures the step, again, and calls `meanwhile` in the middle of it.
  void capture(std::function<void()> const& meanwhile) {
    CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    CUDA_OK(launch_row_plan(plan(main_), num_rows, machine_of<T>(), stream_));
    CUDA_OK(launch_row_plan(plan(ffn_), num_rows, machine_of<T>(), stream_));
    meanwhile();
    for (Launch& launch : launches_) {
      DeltaParams<T> params;
      params.x = launch.x.data();
      params.x_row_stride = launch.table.k_in;
      params.rows = num_rows;
      params.plan = plan(launch.ffn ? ffn_ : main_);
      params.num_projections = 1;
      params.projections[0] = {launch.table, launch.y.data(), launch.table.n_out};
      REQUIRE(delta_scratch_bytes(params, machine_of<T>()) <= scratch_.bytes());
      params.scratch = scratch_.data();
      params.scratch_bytes = scratch_.bytes();
      CUDA_OK(launch_delta(params, machine_of<T>(), stream_));
    }
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream_, &graph));
    if (graph_ != nullptr) CUDA_OK(cudaGraphExecDestroy(graph_));
    CUDA_OK(cudaGraphInstantiate(&graph_, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
  }

  /// Enqueues the step: y begins as zeros.
  void enqueue(Slots const& slots, Slots const& ffn_slots) {
    upload(main_, slots);
    upload(ffn_, ffn_slots);
    for (Launch& launch : launches_) {
      CUDA_OK(cudaMemsetAsync(launch.y.data(), 0, launch.y.bytes(), stream_));
    }
    CUDA_OK(cudaGraphLaunch(graph_, stream_));
  }
  void enqueue(Slots const& slots) { enqueue(slots, slots); }

  Outputs wait() {
    CUDA_OK(cudaStreamSynchronize(stream_));
    Outputs outputs;
    for (Launch const& launch : launches_) outputs.push_back(launch.y.download());
    return outputs;
  }

 private:
  struct Launch {
    RouteTable<T> table;
    bool ffn;
    DeviceArray<T> x, y;
  };

  [[nodiscard]] RowPlan plan(DeviceArray<std::byte> const& memory) const { return layout_.at(memory.data()); }
  void upload(DeviceArray<std::byte> const& memory, Slots const& slots) {
    CUDA_OK(cudaMemcpyAsync(plan(memory).row_slots, slots.data(), slots.size() * sizeof(std::int32_t),
                            cudaMemcpyHostToDevice, stream_));
  }

  cudaStream_t stream_;
  RowPlanLayout layout_;
  DeviceArray<std::byte> main_, ffn_;
  DeviceArray<std::byte> scratch_{std::size_t{1} << 20};
  std::vector<Launch> launches_;
  cudaGraphExec_t graph_ = nullptr;
};

/// Row `row` of every site of a step.
template <Element T>
std::vector<T> row_of(typename CapturedStep<T>::Outputs const& outputs, std::int32_t row) {
  std::vector<T> all;
  for (std::vector<T> const& y : outputs) {
    auto const width = static_cast<std::ptrdiff_t>(y.size()) / num_rows;
    all.insert(all.end(), y.begin() + row * width, y.begin() + (row + 1) * width);
  }
  return all;
}

/// Content `content` at every site, at a rank of its own.
Adapter content_of(std::uint32_t content) {
  return tiny_adapter(device_shape(), content, 1 + static_cast<std::int32_t>(content % 8), every_site);
}

/// What contents 1 to `count` give alone in a pool of one slot; [0] is base.
template <Element T>
std::vector<typename CapturedStep<T>::Outputs> alone(std::uint32_t count, cudaStream_t stream) {
  auto pool = ok(AdapterPool<T, CudaBackend>::create(device_shape(), {.max_slots = 1, .max_rank = 8}));
  CapturedStep<T> captured(pool, stream);
  std::vector<typename CapturedStep<T>::Outputs> outputs;
  for (std::uint32_t content = 0; content <= count; ++content) {
    if (content > 0) static_cast<void>(ok(pool.load("alone", content_of(content))));
    ok(pool.begin_step(stream));
    captured.enqueue(std::vector<std::int32_t>(num_rows, content == 0 ? base_slot : 0));
    ok(pool.end_step(stream));
    outputs.push_back(captured.wait());
  }
  return outputs;
}

/// Spins until `*release` is set, or two seconds have gone.
__global__ void hold(int const volatile* release, int* released) {
  long long begin = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  for (long long now = begin; now - begin < 2'000'000'000LL && *release == 0;) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  }
  *released = *release;
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE(
      "adapters that two threads load and unload during replays leave every row its own, bit for bit", T,
      float, __nv_bfloat16) {
    constexpr std::uint32_t num_contents = 8;
    std::vector<std::string> const names{"a", "b", "c", "d"};  // each has two of the contents
    EngineStream const stream;
    auto const expected = alone<T>(num_contents, stream);
    auto pool =
        ok(AdapterPool<T, CudaBackend>::create(device_shape(), {.max_slots = 3, .spare = 2, .max_rank = 8}));
    CapturedStep<T> captured(pool, stream);
    std::atomic<bool> stop = false;
    std::atomic<int> refused = 0;
    std::mutex mutex;
    std::map<std::uint64_t, std::uint32_t> content_by_id;
    auto const loader = [&](std::uint32_t seed) {
      Random random(seed);
      while (!stop) {
        auto const name = static_cast<std::uint32_t>(random.below(4));
        std::uint32_t const content = 1 + name * 2 + static_cast<std::uint32_t>(random.below(2));
        auto const staged = pool.load(names[name], content_of(content));
        if (!staged && !retryable(staged.error().code)) ++refused;
        if (staged) {
          std::lock_guard<std::mutex> const lock(mutex);
          content_by_id[staged->id] = content;
        }
        if (random.below(8) == 0) static_cast<void>(pool.unload(names[name]));
      }
    };
    auto const content_of_id = [&](std::uint64_t id) {
      for (;;) {  // its load may be about to say
        std::lock_guard<std::mutex> const lock(mutex);
        if (auto const known = content_by_id.find(id); known != content_by_id.end()) return known->second;
      }
    };
    std::thread first([&] { loader(1); });
    std::thread second([&] { loader(2); });

    int const steps = small_shapes() ? 60 : 3000;
    int wrong = 0;
    int adapted = 0;
    std::vector<Lease> leases(num_rows);
    std::vector<std::uint32_t> contents(num_rows, 0);
    for (int i = 0; i < steps || (adapted < steps && i < 100 * steps); ++i) {
      ok(pool.begin_step(stream));
      auto const row = static_cast<std::size_t>(i) % num_rows;  // one row's request ends, and another begins
      auto lease = pool.acquire(names[static_cast<std::size_t>(i / num_rows) % names.size()]);
      leases[row] = lease ? *std::move(lease) : Lease();
      contents[row] = leases[row] ? content_of_id(leases[row].id()) : 0;
      std::vector<std::int32_t> slots;
      for (Lease const& held : leases) slots.push_back(held.slot());
      captured.enqueue(slots);
      ok(pool.end_step(stream));
      auto const outputs = captured.wait();
      for (std::int32_t r = 0; r < num_rows; ++r) {
        std::uint32_t const content = contents[static_cast<std::size_t>(r)];
        if (!same_bytes(row_of<T>(outputs, r), row_of<T>(expected[content], r))) ++wrong;
        adapted += content == 0 ? 0 : 1;
      }
    }
    stop = true;
    first.join();
    second.join();
    CHECK(wrong == 0);
    CHECK(refused == 0);
    CHECK(adapted >= steps);
    leases.clear();
    for (SlotStatus const& slot : pool.snapshot().slots) CHECK(slot.leases == 0);
  }

  TEST_CASE("a load goes on while a stream is captured, and the captured step is right for what it brought") {
    using T = __nv_bfloat16;
    EngineStream const stream;
    auto const expected = alone<T>(2, stream);
    auto pool =
        ok(AdapterPool<T, CudaBackend>::create(device_shape(), {.max_slots = 2, .spare = 1, .max_rank = 8}));
    CapturedStep<T> captured(pool, stream);
    static_cast<void>(ok(pool.load("here", content_of(1))));
    captured.capture([&] {
      CHECK(code(pool.begin_step(stream)) == Errc::capturing);
      std::thread([&] { CHECK(pool.load("there", content_of(2)).has_value()); }).join();
      CHECK(code(pool.load("here", content_of(1))) == Errc::ok);  // and on the capturing thread itself
    });
    ok(pool.begin_step(stream));
    Lease const one = ok(pool.acquire("here"));
    Lease const two = ok(pool.acquire("there"));
    captured.enqueue({one.slot(), two.slot(), base_slot, two.slot(), one.slot()});
    ok(pool.end_step(stream));
    auto const outputs = captured.wait();
    std::vector<std::size_t> const contents{1, 2, 0, 2, 1};
    for (std::int32_t r = 0; r < num_rows; ++r) {
      CHECK(same_bytes(row_of<T>(outputs, r), row_of<T>(expected[contents[static_cast<std::size_t>(r)]], r)));
    }
  }

  TEST_CASE("a load, a promotion and a step of another stream wait for no kernel that runs") {
    if (small_shapes()) return;  // a sanitizer may run kernels one after another
    using T = float;
    EngineStream const busy;
    EngineStream const other;
    auto pool =
        ok(AdapterPool<T, CudaBackend>::create(device_shape(), {.max_slots = 3, .spare = 2, .max_rank = 8}));
    auto const read = [](std::string_view, std::stop_token const&) noexcept {
      return Result<Adapter>(content_of(2));
    };
    HostTier<T, decltype(read)> tier(device_shape(), ok(PinnedArena::create(CudaBackend(), 1 << 16, 1 << 12)),
                                     read);
    ok(pool.begin_step(other));  // what is taken once is taken before
    ok(pool.end_step(other));
    CUDA_OK(cudaStreamSynchronize(other));
    int* release = nullptr;
    CUDA_OK(cudaHostAlloc(&release, sizeof(int), cudaHostAllocMapped));
    *release = 0;
    DeviceArray<int> const released(1);
    ok(pool.begin_step(busy));
    hold<<<1, 1, 0, busy>>>(release, released.data());
    CUDA_OK(cudaGetLastError());
    CHECK(pool.load("a", content_of(1)).has_value());
    CHECK(promote(pool, tier, "b").has_value());
    ok(pool.begin_step(other));
    CHECK(pool.acquire("a").has_value());
    CHECK(pool.acquire("b").has_value());
    ok(pool.end_step(other));
    CUDA_OK(cudaStreamSynchronize(other));
    CHECK(cudaStreamQuery(busy) == cudaErrorNotReady);
    *static_cast<int volatile*>(release) = 1;
    ok(pool.end_step(busy));
    CUDA_OK(cudaStreamSynchronize(busy));
    CHECK(released.download()[0] == 1);
    CUDA_OK(cudaFreeHost(release));
  }

  TEST_CASE_TEMPLATE("an adapter that is promoted from pinned memory gives the bits of one that is loaded", T,
                     float, __half) {
    EngineStream const stream;
    auto const expected = alone<T>(3, stream);
    auto pool =
        ok(AdapterPool<T, CudaBackend>::create(device_shape(), {.max_slots = 1, .spare = 1, .max_rank = 8}));
    auto const read = [](std::string_view name, std::stop_token const&) noexcept {
      return Result<Adapter>(content_of(static_cast<std::uint32_t>(name[0] - '0')));
    };
    // Blocks so small that pairs lie across their borders.
    HostTier<T, decltype(read)> tier(device_shape(), ok(PinnedArena::create(CudaBackend(), 1 << 16, 96)),
                                     read);
    CapturedStep<T> captured(pool, stream);
    for (char const* const name : {"1", "2", "3", "1"}) {
      static_cast<void>(ok(promote(pool, tier, name)));
      ok(pool.begin_step(stream));
      captured.enqueue(std::vector<std::int32_t>(num_rows, 0));
      ok(pool.end_step(stream));
      auto const outputs = captured.wait();
      auto const content = static_cast<std::size_t>(name[0] - '0');
      for (std::size_t site = 0; site < outputs.size(); ++site) {
        CHECK(same_bytes(outputs[site], expected[content][site]));
      }
    }
    CHECK(tier.snapshot().counters.reads == 3);
  }

  TEST_CASE("a captured graph obeys the levers of every step, and applies again when they are gone") {
    using T = float;
    EngineStream const stream;
    auto const expected = alone<T>(1, stream);
    auto pool =
        ok(AdapterPool<T, CudaBackend>::create(device_shape(), {.max_slots = 1, .spare = 1, .max_rank = 8}));
    CapturedStep<T> captured(pool, stream);
    static_cast<void>(ok(pool.load("a", content_of(1))));
    std::vector<StepLevers> const turns{{}, {.apply = false}, {}, {.apply_ffn = false}, {false, false}, {}};
    for (StepLevers const levers : turns) {
      ok(pool.begin_step(stream));
      Lease const lease = ok(pool.acquire("a"));
      std::vector<Selector> const selectors(num_rows, Selector::slot(lease.slot()));
      auto const slots = [&](bool ffn) {
        RouteContext context{.max_slots = pool.max_slots()};
        context.apply = levers.applies(Module{"any", 1, 1, {0}, {}, ffn});
        std::vector<std::int32_t> resolved(num_rows);
        CHECK(resolve_slots(PerRequest{}, selectors, context, resolved) == RouteVerdict::fold);
        return resolved;
      };
      captured.enqueue(slots(false), slots(true));
      ok(pool.end_step(stream));
      auto const outputs = captured.wait();
      for (std::size_t site = 0; site < outputs.size(); ++site) {
        bool const applied = levers.applies(pool.shape().module(pool.shape().sites()[site]));
        CHECK(same_bytes(outputs[site], expected[applied ? 1 : 0][site]));
      }
    }
  }
}

}  // namespace atlas_test
