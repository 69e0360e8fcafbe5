// SPDX-License-Identifier: AGPL-3.0-only
//
// Do adapters that come, go and are replaced change anybody's output, or hold anybody up? Rows decode in a
// replayed graph, each with an adapter of its own for a while, as other threads load, promote, replace and
// unload adapters at random. Every element of every step is compared, bit for bit, with that of the same
// adapter alone in a quiet pool. Then a step is timed with and without loads in flight.
//
// Compiled by g++ it computes on the CPU; hot_swap.cu is the same program compiled by nvcc, with both. The
// shape llama8b (32 decoder layers, 64 rows, rank 16) is for a GPU; on the CPU it takes very long.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iomanip>
#include <iostream>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <atlas/lora.hpp>

#include "hot_swap/decoder.hpp"
#include "hot_swap/server.hpp"
#include "hot_swap/workload.hpp"
#include "tiny_model/host_device.hpp"
#if defined(__CUDACC__)
#include "tiny_model/gpu_device.cuh"
#endif

namespace {

using namespace hot_swap;

constexpr int skipped = 77;           // the exit status that test runners read as "not run here"
constexpr std::size_t in_flight = 4;  // steps between two waits for the device
constexpr double most_ratio = 1.05;   // of a GPU's step with loads in flight, to one without

struct Options {
  std::string element = "float";
  std::string device = "auto";
  std::string shape = "small";
  std::uint64_t steps = 10'000;
  int timed = 1'000;
};

/// One row's request.
template <class Device>
struct Request {
  Lease lease;
  std::size_t name = 0;
  std::size_t content = 0;
  int steps_left = 0;
};

struct Served {
  std::vector<std::uint64_t> outputs;  // row steps with each adapter
  std::uint64_t adapted = 0;           // the sum of them
  std::uint64_t base = 0;
  std::uint64_t steps = 0;
  std::uint64_t wrong = 0;  // elements
};

/// Medians in microseconds; the host's clock on a CPU, the device's on a GPU.
struct Timing {
  double quiet_us = 0.0;
  double loading_us = 0.0;
  std::uint64_t loads = 0;  // that were published while steps were timed

  [[nodiscard]] double ratio() const { return loading_us / quiet_us; }
};

/// Times what was enqueued between `start` and `stop`, for which it waits.
template <class Device>
class Timer {
 public:
  explicit Timer(Device& device) : device_(device) {}
  void start() { begin_ = std::chrono::steady_clock::now(); }
  double stop_us() {
    device_.synchronize();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  Device& device_;
  std::chrono::steady_clock::time_point begin_;
};

#if defined(__CUDACC__)
template <Element T>
class Timer<tiny_model::GpuDevice<T>> {
 public:
  explicit Timer(tiny_model::GpuDevice<T>& device) : stream_(device.stream()) {
    tiny_model::check(cudaEventCreate(&begin_), "cudaEventCreate");
    tiny_model::check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(Timer const&) = delete;
  Timer& operator=(Timer const&) = delete;
  void start() { tiny_model::check(cudaEventRecord(begin_, stream_), "cudaEventRecord"); }
  double stop_us() {
    float ms = 0.0F;
    tiny_model::check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    tiny_model::check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    tiny_model::check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return 1000.0 * ms;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};
#endif

/// Decodes while everything else goes on. Up to `in_flight` steps are enqueued before the host waits, so
/// adapters are replaced and requests end while steps that use them still run.
template <class Device>
Served decode(Device& device, Workload const& workload, Server<Device>& server, QuietRun<Device>& quiet,
              std::uint64_t steps) {
  auto& pool = server.pool();
  Decoder<Device> decoder(device, workload, pool);
  auto const rows = static_cast<std::size_t>(workload.rows);
  auto const contents_on_device = device.template allocate<std::int32_t>(workload.rows);
  std::array<std::vector<std::int32_t>, in_flight> slots, contents;  // stay until the device has read them
  std::vector<Request<Device>> requests(rows);
  std::minstd_rand random(7);
  Served served;
  served.outputs.resize(workload.names);
  auto const enough = [&] {
    return served.steps >= steps && served.adapted >= steps && pool.snapshot().counters.evictions > 0;
  };
  while (!enough() && served.steps < 20 * steps) {
    std::size_t const turn = served.steps++ % in_flight;
    slots[turn].resize(rows);
    contents[turn].resize(rows);
    expect(pool.begin_step(device.stream()));
    for (std::size_t row = 0; row < rows; ++row) {
      Request<Device>& request = requests[row];
      if (request.steps_left-- <= 0) {  // the next request; base, when its adapter is not there
        request.name = random() % workload.names;
        request.steps_left = static_cast<int>(random() % 20);
        auto lease = pool.acquire(workload.name(request.name));
        request.lease = lease ? *std::move(lease) : Lease();
        request.content = request.lease ? server.content_of(request.lease.id()) : workload.contents();
      }
      slots[turn][row] = request.lease.slot();
      contents[turn][row] = static_cast<std::int32_t>(request.content);
      ++(request.lease ? served.outputs[request.name] : served.base);
      served.adapted += request.lease ? 1U : 0U;
    }
    decoder.set_slots(slots[turn]);
    device.upload(std::span<std::int32_t const>(contents[turn]), contents_on_device.data());
    decoder.reset();
    decoder.replay();
    expect(pool.end_step(device.stream()));
    quiet.compare(decoder.y(), contents_on_device.data());
    if (turn == in_flight - 1) device.synchronize();
  }
  served.wrong = quiet.wrong();
  return served;
}

/// Times the replay of a step whose rows have the first half of the adapters, in turn.
template <class Device>
Timing time_steps(Device& device, Workload const& workload, Server<Device>& server, int count) {
  auto& pool = server.pool();
  std::size_t const resident = workload.names / 2;
  std::vector<Lease> leases;
  server.prefetch();
  for (std::size_t name = 0; name < resident; ++name) {
    server.load(name);
    expect(pool.begin_step(device.stream()));
    expect(pool.end_step(device.stream()));
    leases.push_back(expect(pool.acquire(workload.name(name))));
  }
  std::vector<std::int32_t> slots;
  for (std::int32_t row = 0; row < workload.rows; ++row) {
    slots.push_back(leases[static_cast<std::size_t>(row) % resident].slot());
  }
  Decoder<Device> decoder(device, workload, pool);
  decoder.set_slots(slots);
  decoder.reset();
  device.synchronize();
  Timer<Device> timer(device);
  auto const median_us = [&] {
    std::vector<double> us;
    for (int i = 0; i < count; ++i) {
      expect(pool.begin_step(device.stream()));
      timer.start();
      decoder.replay();
      us.push_back(timer.stop_us());
      expect(pool.end_step(device.stream()));
    }
    std::nth_element(us.begin(), us.begin() + count / 2, us.end());
    return us[static_cast<std::size_t>(count / 2)];
  };
  median_us();  // warms up
  Timing timing;
  timing.quiet_us = median_us();
  std::uint64_t const before = pool.snapshot().counters.publications;
  server.start(false);
  timing.loading_us = median_us();
  server.stop();
  timing.loads = pool.snapshot().counters.publications - before;
  return timing;
}

template <class Device>
void print(Workload const& workload, Server<Device>& server, Served const& served) {
  std::cout << "slot  name      generation  rank      bytes  leases\n";
  PoolSnapshot const pool = server.pool().snapshot();
  for (std::size_t i = 0; i < pool.slots.size(); ++i) {
    SlotStatus const& slot = pool.slots[i];
    std::cout << std::setw(4) << i << "  " << std::left << std::setw(8)
              << (slot.name.empty() ? "-" : slot.name) << std::right << std::setw(12) << slot.generation
              << std::setw(6) << slot.rank << std::setw(11) << slot.bytes << std::setw(8) << slot.leases
              << '\n';
  }
  std::cout << "\nadapter    outputs\n";
  for (std::size_t name = 0; name < workload.names; ++name) {
    std::cout << std::left << std::setw(9) << workload.name(name) << std::right << std::setw(9)
              << served.outputs[name] << '\n';
  }
  std::cout << std::left << std::setw(9) << "base" << std::right << std::setw(9) << served.base << "\n\n";
  PoolCounters const& counters = pool.counters;
  HostTierCounters const host = server.tier_snapshot().counters;
  std::cout << "pool: " << counters.loads << " loads, " << counters.hits << " hits, " << counters.publications
            << " publications, " << counters.evictions << " evictions, " << counters.unloads << " unloads, "
            << counters.leases << " leases; refused: " << counters.refused(Errc::pool_full) << " pool_full, "
            << counters.refused(Errc::spare_busy) << " spare_busy, " << counters.refused(Errc::slot_busy)
            << " slot_busy\n"
            << "host: " << host.reads << " reads, " << host.hits << " hits, " << host.evictions
            << " evictions\n";
}

template <class Device>
int serve(Options const& options) {
  // 1. What each adapter gives alone.
  Workload const workload = options.shape == "llama8b" ? llama_8b_workload() : small_workload();
  ModelShape const shape = make_shape(workload);
  Device device;
  QuietRun<Device> quiet(device, workload, shape);

  // 2. Decode while three threads change what is in the pool.
  Served served;
  bool is_right = false;
  {
    Server<Device> server(device, workload, shape);
    server.start(true);
    served = decode(device, workload, server, quiet, options.steps);
    server.stop();
    print(workload, server, served);
    std::cout << served.steps << " steps of " << workload.rows << " rows on " << Device::kind << " ("
              << Device::name() << "), " << served.adapted << " outputs with adapters: " << served.wrong
              << " elements wrong, " << server.refused_for_no_reason() << " refusals without a reason\n";
    is_right = served.wrong == 0 && server.refused_for_no_reason() == 0 && served.adapted >= options.steps;
  }

  // 3. Whether loads hold a step up.
  Server<Device> server(device, workload, shape);
  Timing const timing = time_steps(device, workload, server, options.timed);
  std::cout << std::fixed << std::setprecision(1) << "a step: " << timing.quiet_us << " us, "
            << timing.loading_us << " us while " << timing.loads << " loads came in: " << std::setprecision(3)
            << timing.ratio() << " of it\n";
  bool const judged = options.shape == "llama8b" && std::string(Device::kind) == "gpu";
  bool const is_fast = !judged || (timing.ratio() <= most_ratio && timing.loads > 0);
  return is_right && is_fast ? EXIT_SUCCESS : EXIT_FAILURE;
}

/// Calls `body` with the element type that `name` names as its template argument.
template <class Body>
int with_element(std::string const& name, Body const& body) {
  if (name == "bf16") return body.template operator()<__nv_bfloat16>();
  if (name == "fp16") return body.template operator()<__half>();
  return body.template operator()<float>();
}

int run(Options const& options) {
#if defined(__CUDACC__)
  bool const gpu = options.device != "cpu" && tiny_model::gpu_available();
  if (gpu) {
    return with_element(options.element, [&]<class T>() { return serve<tiny_model::GpuDevice<T>>(options); });
  }
#endif
  if (options.device == "gpu") {
    std::cerr << "hot_swap: there is no GPU that this program can use\n";
    return skipped;
  }
  return with_element(options.element, [&]<class T>() { return serve<tiny_model::HostDevice<T>>(options); });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Adapters come and go while rows decode; every output is compared with a quiet run"};
  app.add_option("--element", options.element, "element type of weights and activations")
      ->check(CLI::IsMember({"float", "bf16", "fp16"}))
      ->capture_default_str();
  app.add_option("--device", options.device, "auto is the GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "gpu"}))
      ->capture_default_str();
  app.add_option("--shape", options.shape,
                 "llama8b is for a GPU: its median step must not take more than 1.05 "
                 "times as long while adapters are loaded")
      ->check(CLI::IsMember({"small", "llama8b"}))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "steps to decode, at least")->capture_default_str();
  app.add_option("--timed", options.timed, "steps to time")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    return run(options);
  } catch (std::exception const& error) {
    std::cerr << "hot_swap: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
