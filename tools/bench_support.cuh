// SPDX-License-Identifier: AGPL-3.0-only
//
// What the benchmarks share: device memory with random values, the median time of a call in a captured graph
// of many layers, and the loop over cells.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include <atlas/lora.hpp>

namespace atlas_bench {

using namespace atlas::lora;
using T = __nv_bfloat16;

/// Bytes a microsecond of a copy within device memory, measured on an H200.
inline constexpr double copy_rate = 4.3e6;
/// Operations a microsecond of a bf16 matrix product (m16n8k16), measured on an H200.
inline constexpr double matrix_rate = 770e6;
/// Relative error that bf16 weights and roundings explain.
inline constexpr double most_error = 1e-2;

inline void stop(std::string const& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}
/// Stops at a failed call of CUDA or cuBLAS; both say success with 0.
template <class Status>
void check(Status status, char const* what) {
  if (status != Status{}) stop(std::string(what) + ": status " + std::to_string(static_cast<int>(status)));
}
#define CHECKED(call) ::atlas_bench::check((call), #call)

/// Fills with values in [-spread, spread).
template <int Threads>
__global__ void __launch_bounds__(Threads)
    fill_kernel(T* to, std::int64_t count, std::uint64_t seed, float spread) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    std::uint64_t z = (static_cast<std::uint64_t>(i) + seed) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    to[i] = __float2bfloat16((static_cast<float>((z ^ (z >> 31)) >> 40) / 8388608.0F - 1.0F) * spread);
  }
}

/// Device memory and a stream, given back at the end.
class DeviceMemory {
 public:
  DeviceMemory() { CHECKED(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~DeviceMemory() {
    for (void* const pointer : owned_) static_cast<void>(cudaFree(pointer));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  DeviceMemory(DeviceMemory const&) = delete;
  DeviceMemory& operator=(DeviceMemory const&) = delete;

  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  void* allocate(std::size_t bytes) {
    void* pointer = nullptr;
    CHECKED(cudaMalloc(&pointer, std::max<std::size_t>(bytes, 16)));
    owned_.push_back(pointer);
    return pointer;
  }
  T* filled(std::int64_t count, std::uint64_t seed, float spread) {
    auto* const pointer = static_cast<T*>(allocate(static_cast<std::size_t>(count) * sizeof(T)));
    fill_kernel<256><<<1024, 256, 0, stream_>>>(pointer, count, seed << 40, spread);
    CHECKED(cudaGetLastError());
    return pointer;
  }
  template <class V>
  V* uploaded(std::vector<V> const& values) {
    auto* const pointer = static_cast<V*>(allocate(values.size() * sizeof(V)));
    CHECKED(cudaMemcpy(pointer, values.data(), values.size() * sizeof(V), cudaMemcpyHostToDevice));
    return pointer;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> owned_;
};

inline std::vector<T> download(T const* from, std::int64_t count) {
  std::vector<T> out(static_cast<std::size_t>(count));
  CHECKED(cudaMemcpy(out.data(), from, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

/// How many replays a figure is the median of: enough, or enough to choose among shapes.
enum class Replays { thorough = 11, quick = 3 };
/// Above this a replay is long enough that half of them tell as much.
inline constexpr float long_replay_ms = 4.0F;

/// Median microseconds of one call of `enqueue(layer)`, all layers in one graph. `before()` enqueues what
/// comes before each replay and is not timed.
template <class Enqueue, class Before>
double median_us(cudaStream_t stream, int layers, Enqueue const& enqueue, Before const& before,
                 Replays replays = Replays::thorough) {
  CHECKED(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int l = 0; l < layers; ++l) enqueue(l);
  cudaGraph_t graph = nullptr;
  CHECKED(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  CHECKED(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CHECKED(cudaEventCreate(&begin));
  CHECKED(cudaEventCreate(&end));
  std::vector<float> times;
  int left = 2 + static_cast<int>(replays);
  for (int replay = -2; left > 0; ++replay, --left) {
    before();
    CHECKED(cudaEventRecord(begin, stream));
    CHECKED(cudaGraphLaunch(executable, stream));
    CHECKED(cudaEventRecord(end, stream));
    CHECKED(cudaEventSynchronize(end));
    float milliseconds = 0.0F;
    CHECKED(cudaEventElapsedTime(&milliseconds, begin, end));
    if (replay >= 0) times.push_back(milliseconds);
    if (replay == -1 && milliseconds > long_replay_ms) left = 1 + (static_cast<int>(replays) + 1) / 2;
  }
  CHECKED(cudaEventDestroy(begin));
  CHECKED(cudaEventDestroy(end));
  CHECKED(cudaGraphExecDestroy(executable));
  CHECKED(cudaGraphDestroy(graph));
  auto const middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return static_cast<double>(*middle) * 1000.0 / layers;
}
template <class Enqueue>
double median_us(cudaStream_t stream, int layers, Enqueue const& enqueue,
                 Replays replays = Replays::thorough) {
  return median_us(
      stream, layers, enqueue, [] {}, replays);
}

/// A launch that only reads weights: how many loads a thread has under way, and how many blocks there are.
struct TouchShape {
  int loads = 1;
  int blocks = 0;
};

/// The head of a benchmark's JSON, up to the list of cells.
inline void write_header(std::FILE* json, Machine const& machine) {
  cudaDeviceProp properties{};
  int driver = 0;
  int runtime = 0;
  CHECKED(cudaGetDeviceProperties(&properties, machine.device));
  CHECKED(cudaDriverGetVersion(&driver));
  CHECKED(cudaRuntimeGetVersion(&runtime));
  char const* const sources = std::getenv("ATLAS_DEVICE_HASH");
  std::fprintf(
      json, "{\"header\": {\"card\": \"%s\", \"driver\": %d, \"toolkit\": %d, \"device_sources\": \"%s\"},\n",
      properties.name, driver, runtime, sources == nullptr ? "" : sources);
  std::fprintf(json, " \"cells\": [");
}

/// What a benchmark is told: where its JSON goes, and which cells it runs.
struct Arguments {
  std::FILE* json = nullptr;  ///< null for none
  std::string only;           ///< part of a cell's name
  bool all = false;           ///< whether the wide sweep runs too, which takes long

  Arguments(int count, char** arguments) {
    std::string path;
    for (int i = 1; i < count; ++i) {
      std::string const name = arguments[i];
      if (name == "--all") {
        all = true;
        continue;
      }
      if (i + 1 == count || (name != "--json" && name != "--only")) {
        stop(std::string(arguments[0]) + " [--json FILE] [--only TEXT] [--all]");
      }
      (name == "--json" ? path : only) = arguments[++i];
    }
    if (path.empty()) return;
    json = std::fopen(path.c_str(), "w");
    if (json == nullptr) stop("cannot write " + path);
  }
};

/// Times those of `cells` that the arguments ask for: `time(cell, machine)`, whose result `print(cell,
/// timing)` shows on a line of its own and `write(json, cell, timing)` writes as an object. The JSON is whole
/// after every cell, so also where the program is ended before its last.
template <class Cell, class Time, class Print, class Write>
void run_cells(Arguments const& told, Machine const& machine, std::vector<Cell> const& cells,
               Time const& time, Print const& print, Write const& write) {
  std::FILE* const json = told.json;
  char const* separator = "";
  long end = 0;
  auto const close_list = [&] {
    end = std::ftell(json);
    std::fprintf(json, "\n ]}\n");
    std::fflush(json);
  };
  if (json != nullptr) {
    write_header(json, machine);
    close_list();
  }
  for (Cell const& cell : cells) {
    if (cell.name().find(told.only) == std::string::npos) continue;
    auto const timing = time(cell, machine);
    print(cell, timing);
    std::fflush(stdout);
    if (json == nullptr) continue;
    CHECKED(std::fseek(json, end, SEEK_SET));
    std::fprintf(json, "%s\n  ", separator);
    write(json, cell, timing);
    separator = ",";
    close_list();
  }
  if (json != nullptr) std::fclose(json);
}

}  // namespace atlas_bench
