// SPDX-License-Identifier: AGPL-3.0-only
//
// What launchers know of the device, found once by `prepare` and passed by value ever after.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

/// A device as launchers see it, and which operations were prepared on it. Made by `prepare`; copies are
/// cheap.
class Machine {
 public:
  /// Most operations that one `prepare` takes.
  static constexpr std::int32_t max_operations = 16;

  std::int32_t device = 0;  ///< its ordinal
  /// 10 * major + minor: the smaller of the device's compute capability and the one the code was compiled
  /// for.
  std::int32_t compute = 0;
  std::int32_t multiprocessors = 0;  ///< of the device
  std::int32_t max_cluster = 1;      ///< blocks of the largest cluster that the prepared kernels may use
  std::size_t shared_bytes_per_block = 0;           ///< most dynamic shared memory of a block, opted into
  std::size_t shared_bytes_per_multiprocessor = 0;  ///< of all blocks that share one

  /// Clusters of 2, 4, 8 and 16 blocks that run at once, with one and with two blocks a multiprocessor:
  /// graphics processing clusters do not divide evenly, and a grid that asks for one more waits for a whole
  /// wave.
  std::int32_t resident_clusters[4][2] = {};

  /// Teams of `cluster` blocks, `blocks` a multiprocessor, that run at once; at least 1.
  [[nodiscard]] constexpr std::int32_t resident_teams(std::int32_t cluster,
                                                      std::int32_t blocks) const noexcept {
    if (cluster == 1) return multiprocessors * blocks;
    std::int32_t row = 0;
    while (cluster > 2 << row) ++row;
    std::int32_t const clusters = resident_clusters[row][blocks >= 2 ? 1 : 0];
    return clusters < 1 ? 1 : clusters;
  }

  /// Whether `operation`, a value of `operation_id`, was prepared.
  [[nodiscard]] constexpr bool prepared(void const* operation) const noexcept {
    for (std::int32_t i = 0; i < num_operations_; ++i) {
      if (operations_[i] == operation) return true;
    }
    return false;
  }
  /// Notes an operation as prepared; false when `max_operations` are.
  constexpr bool add(void const* operation) noexcept {
    if (num_operations_ == max_operations) return false;
    operations_[num_operations_++] = operation;
    return true;
  }

 private:
  void const* operations_[max_operations] = {};
  std::int32_t num_operations_ = 0;
};

/// Dynamic shared memory of each of `blocks` blocks that share a multiprocessor; the runtime keeps 1 KB a
/// block.
[[nodiscard]] constexpr std::size_t shared_budget(Machine const& machine, std::int32_t blocks) noexcept {
  std::size_t const share = machine.shared_bytes_per_multiprocessor / static_cast<std::size_t>(blocks);
  return share < 1024 ? 0 : (share - 1024) / 128 * 128;
}

namespace detail {
template <class Operation>
inline constexpr char operation_tag = 0;
}  // namespace detail

/// What names an operation, a type such as `Delta<T, Y>`, in a `Machine`.
template <class Operation>
[[nodiscard]] constexpr void const* operation_id() noexcept {
  return &detail::operation_tag<Operation>;
}

}  // namespace atlas::lora::inline v0
