// SPDX-License-Identifier: AGPL-3.0-only
//
// The device table that says, for one linear of one layer's experts, where each slot's A and B of each expert
// lie. It is compact: only experts that a slot adapts have cells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atlas/lora/config.hpp"
#include "atlas/lora/element.hpp"
#include "atlas/lora/tables/route_table.hpp"

namespace atlas::lora::inline v0 {

/// What one slot does to the experts of one layer: where their cells lie, in groups of neighbours, one group
/// for each expert that the slot adapts. Directly behind it come `num_experts` 32-bit places: that of expert
/// `e` is 0 where the slot does not adapt `e`, else 1 + the index of its group. All zero means that the slot
/// adapts no expert of the layer.
template <Element T>
struct alignas(16) ExpertIndex {
  RouteCell<T> const* cells = nullptr;  ///< device, `[num_groups * ExpertTable::group_cells]`, or null
  std::int32_t num_groups = 0;          ///< experts that the slot adapts; places beyond it find nothing
  std::int32_t reserved = 0;            ///< zero

  /// The places, `[num_experts]`.
  [[nodiscard]] ATLAS_HD std::int32_t const* places() const noexcept {
    return reinterpret_cast<std::int32_t const*>(this + 1);
  }
  /// Likewise, to be written.
  [[nodiscard]] ATLAS_HD std::int32_t* places() noexcept { return reinterpret_cast<std::int32_t*>(this + 1); }
};
static_assert(std::is_trivially_copyable_v<ExpertIndex<float>> && sizeof(ExpertIndex<float>) == 16);

/// Bytes of an index and its places, rounded up to a multiple of 16.
[[nodiscard]] ATLAS_HD constexpr std::size_t expert_index_bytes(std::int32_t num_experts) noexcept {
  return sizeof(ExpertIndex<float>) + (static_cast<std::size_t>(num_experts) * 4 + 15) / 16 * 16;
}

/// One linear of the experts of one layer. Trivially copyable; passed to kernels by value. What it points at
/// may change between launches; the addresses of the indexes stay for the table's life, so captured graphs
/// stay right.
template <Element T>
struct ExpertTable {
  ExpertIndex<T> const* index = nullptr;  ///< slot 0's; device; null means that no slot adapts the linear
  std::int64_t index_stride_bytes = 0;    ///< between the indexes of neighbouring slots; a multiple of 16
  std::int32_t max_slots = 0;             ///< slots `>= max_slots` are base and are never read through
  std::int32_t num_experts = 0;  ///< experts `>= num_experts` are not adapted and are never read through
  std::int32_t group_cells = 1;  ///< cells of one expert; the linears of an expert are neighbours
  std::int32_t cell = 0;         ///< which of them is this linear's, below `group_cells`
  std::int32_t max_rank = 0;     ///< no cell's rank exceeds it; sizes scratch and shared memory, not work
  std::int64_t k_in = 0;         ///< elements of a row of x
  std::int64_t n_out = 0;        ///< elements of a row of y

  /// The index of `slot`, which must be in `[0, max_slots)`.
  [[nodiscard]] ATLAS_HD ExpertIndex<T> const* of_slot(std::int32_t slot) const noexcept {
    return reinterpret_cast<ExpertIndex<T> const*>(reinterpret_cast<std::byte const*>(index) +
                                                   slot * index_stride_bytes);
  }

  /// The cell of `expert` in `slot`; an empty one when either is out of range or the slot does not adapt it.
  [[nodiscard]] ATLAS_HD RouteCell<T> find(std::int32_t slot, std::int32_t expert) const noexcept {
    bool const inside =
        index != nullptr && slot >= 0 && slot < max_slots && expert >= 0 && expert < num_experts;
    if (!inside) return {};
    ExpertIndex<T> const* const own = of_slot(slot);
    // Both are read at once; neither waits for the other.
    ExpertIndex<T> const head = *own;
    std::int32_t const place = own->places()[expert];
    if (head.cells == nullptr || place < 1 || place > head.num_groups) return {};
    return head.cells[static_cast<std::int64_t>(place - 1) * group_cells + cell];
  }
};
static_assert(std::is_trivially_copyable_v<ExpertTable<float>>);

}  // namespace atlas::lora::inline v0
