// SPDX-License-Identifier: AGPL-3.0-only
//
// What the tests of the readers share: small files written on the spot, and where the real ones are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "../outcome.hpp"
#include "atlas/lora/adapter/adapter.hpp"
#include "atlas/lora/adapter/convert.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/model/families.hpp"
#include "atlas/lora/model/model_shape.hpp"

namespace atlas::lora::testing {

/// The folder of the real adapters and models.
inline std::string test_data() {
  char const* const folder = std::getenv("ATLAS_TEST_DATA");
  return folder != nullptr ? folder : "tests/data";
}

/// A tensor's elements in float, which hold any of them.
inline std::vector<float> f32_of(HostTensor const& tensor) {
  std::vector<float> out(tensor.bytes.size() / element_bytes(tensor.type));
  REQUIRE(convert<float>(tensor, std::span<float>(out)).has_value());
  return out;
}

/// Bytes of a file; empty when it cannot be read.
inline std::string file_text(std::string const& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A folder of its own that is gone at the end of the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::error_code none;
    std::string name = std::filesystem::temp_directory_path(none).string() + "/atlas-XXXXXX";
    if (::mkdtemp(name.data()) != nullptr) path_ = name;
  }
  TemporaryFolder(TemporaryFolder const&) = delete;
  TemporaryFolder& operator=(TemporaryFolder const&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

  std::string const& path() const { return path_; }

  /// Writes a file and returns its path.
  std::string write(std::string const& name, std::string_view content) const {
    std::string const file = path_ + "/" + name;
    std::error_code ignored;
    std::filesystem::remove(file, ignored);  // writing over a file makes some file systems wait for the disk
    std::ofstream(file, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
    return file;
  }

 private:
  std::string path_;
};

/// A tensor to be written.
struct TestTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::string dtype = "F32";
  std::string bytes{};  // filled with small numbers when empty
};

/// The same with given F32 values.
inline TestTensor with_values(std::string name, std::vector<std::int64_t> shape,
                              std::vector<float> const& values) {
  TestTensor tensor{std::move(name), std::move(shape), "F32", std::string(values.size() * 4, '\0')};
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// The text of a safetensors file with any header.
inline std::string with_header(std::string const& header, std::string_view data) {
  std::uint64_t const length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + std::string(data);
}

/// The text of a well-formed safetensors file.
inline std::string safetensors(std::vector<TestTensor> const& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::string data;
  for (TestTensor const& tensor : tensors) {
    std::string shape;
    std::int64_t elements = 1;
    for (std::int64_t const extent : tensor.shape) {
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
      elements *= extent;
    }
    std::string bytes = tensor.bytes;
    for (std::int64_t i = 0; bytes.empty() && tensor.dtype == "F32" && i < elements; ++i) {
      float const value = 0.125F * static_cast<float>(i % 7 - 3);
      data.append(reinterpret_cast<char const*>(&value), 4);
    }
    std::size_t const size = bytes.empty() ? static_cast<std::size_t>(elements) * 4 : bytes.size();
    data += bytes;
    header += ",\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(data.size() - size) + "," +
              std::to_string(data.size()) + "]}";
  }
  return with_header(header + "}", data);
}

/// A and B of one module: `[rank, k_in]` and `[n_out, rank]`.
inline std::vector<TestTensor> pair_of(std::string const& path, std::int64_t n_out, std::int64_t k_in,
                                       std::int64_t rank) {
  return {{"base_model.model." + path + ".lora_A.weight", {rank, k_in}},
          {"base_model.model." + path + ".lora_B.weight", {n_out, rank}}};
}

inline std::vector<TestTensor> operator+(std::vector<TestTensor> a, std::vector<TestTensor> const& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Writes an adapter's two files.
inline void write_adapter(TemporaryFolder const& folder, std::string const& config,
                          std::vector<TestTensor> const& tensors) {
  folder.write("adapter_config.json", config);
  folder.write("adapter_model.safetensors", safetensors(tensors));
}

/// A dense model of hidden size 8: q, k, v, o `[8, 8]`, gate, up `[12, 8]`, down `[8, 12]`, head `[16, 8]`.
inline ModelConfig tiny_config(std::int32_t layers) {
  return {.model_type = "llama",
          .layers = layers,
          .hidden = 8,
          .heads = 2,
          .kv_heads = 2,
          .head_dim = 4,
          .intermediate = 12,
          .vocab = 16};
}
inline ModelShape tiny_model(std::int32_t layers) { return *model_shape(tiny_config(layers)); }

/// The same with four experts of width 6 in every layer.
inline ModelShape tiny_moe(std::int32_t layers) {
  ModelConfig config = tiny_config(layers);
  config.model_type = "qwen2_moe";
  config.num_experts = 4;
  config.moe_intermediate = 6;
  config.shared_expert_intermediate = 6;
  return *model_shape(config);
}

inline std::ptrdiff_t lines(std::string const& message) {
  std::ptrdiff_t count = message.empty() ? 0 : 1;
  for (char const c : message) count += c == '\n';
  return count;
}

}  // namespace atlas::lora::testing
