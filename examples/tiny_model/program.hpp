// SPDX-License-Identifier: AGPL-3.0-only
//
// What programs on the tiny models share: their options, and a device and an element type picked by them.
// Compiled by g++ they compute on the CPU, compiled by nvcc on either.
#pragma once

#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>

#include <atlas/lora.hpp>

#include "host_device.hpp"
#if defined(__CUDACC__)
#include "gpu_device.cuh"
#endif

namespace tiny_model {

inline constexpr int skipped = 77;  // the exit status that test runners read as "not run here"

struct Options {
  std::string model;
  std::string element = "float";
  std::string device = "auto";
  bool json = false;
};

/// Calls `body` with the element type that `name` names as its template argument.
template <class Body>
bool with_element(std::string const& name, Body const& body) {
  if (name == "bf16") return body.template operator()<__nv_bfloat16>();
  if (name == "fp16") return body.template operator()<__half>();
  return body.template operator()<float>();
}

/// The exit status of `body<Device>(options)`, which says whether all was right. Exceptions are printed.
template <class Body>
int run_on_device(Options const& options, char const* program, Body const& body) {
#if defined(__CUDACC__)
  bool const gpu = options.device != "cpu" && gpu_available();
  auto const on_gpu = [&]<class T>() { return body.template operator()<GpuDevice<T>>(options); };
#else
  bool const gpu = false;
#endif
  auto const on_cpu = [&]<class T>() { return body.template operator()<HostDevice<T>>(options); };
  if (options.device == "gpu" && !gpu) {
    std::cerr << program << ": there is no GPU that this program can use\n";
    return skipped;
  }
  try {
#if defined(__CUDACC__)
    bool const ok = gpu ? with_element(options.element, on_gpu) : with_element(options.element, on_cpu);
#else
    bool const ok = with_element(options.element, on_cpu);
#endif
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (std::exception const& error) {
    std::cerr << program << ": " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}

/// A program: reads its options, `folder` being the model's below the test data, and runs `body`.
template <class Body>
int run_program(int argc, char** argv, char const* program, char const* title, std::string const& folder,
                Body const& body) {
  Options options;
  char const* const data = std::getenv("ATLAS_TEST_DATA");
  options.model = std::string(data != nullptr ? data : "tests/data") + "/" + folder;
  CLI::App app{title};
  app.add_option("--model", options.model, "folder of the model and its adapters")->capture_default_str();
  app.add_option("--element", options.element, "element type of weights and activations")
      ->check(CLI::IsMember({"float", "bf16", "fp16"}))
      ->capture_default_str();
  app.add_option("--device", options.device, "auto is the GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "gpu"}))
      ->capture_default_str();
  app.add_flag("--json", options.json, "print JSON instead of text");
  CLI11_PARSE(app, argc, argv);
  return run_on_device(options, program, body);
}

}  // namespace tiny_model
