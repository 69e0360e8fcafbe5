// SPDX-License-Identifier: AGPL-3.0-only
//
// All the macros of the library and its version. Everything else is templates and functions.
#pragma once

#include <cassert>

/// The library's version, compared by a test with meson.project_version().
#define ATLAS_LORA_VERSION_STRING "0.1.0"

/// Marks a function that host and device share. Empty where nvcc is not the compiler.
#if defined(__CUDACC__)
#define ATLAS_HD __host__ __device__
#else
#define ATLAS_HD
#endif

/// Keeps launcher templates out of a shared library's exported symbols, so that two libraries built
/// for different architectures never share one.
#define ATLAS_HIDDEN __attribute__((visibility("hidden")))

/// Checks a programmer's mistake. Define it before the first include to use your own; off under
/// NDEBUG like `assert`. Usable in constexpr and in device code.
#if !defined(ATLAS_ASSERT)
#define ATLAS_ASSERT(condition, sentence) assert((condition) && (sentence))
#endif

/// Every name of the library is in `atlas::lora`; `v0` is its ABI version and is never written by users.
namespace atlas::lora::inline v0 {}
