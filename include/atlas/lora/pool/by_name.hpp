// SPDX-License-Identifier: AGPL-3.0-only
//
// What is kept under names, in their order. Not std::map, whose header is costly to every unit that includes
// the library, and whose instances are to those that use it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0::detail {

/// A value of each of some names. Finding takes as many steps as the logarithm of their number; coming and
/// going moves a pointer of each name behind. A value keeps its address until its name goes. Not thread-safe.
template <class V>
class ByName {
 public:
  struct Node {
    std::string name;
    V value;
  };

  ByName() noexcept = default;
  ByName(ByName const& other) {
    nodes_.reserve(other.size());
    for (auto const& node : other.nodes_) nodes_.push_back(std::make_unique<Node>(*node));
  }
  ByName(ByName&&) noexcept = default;
  ByName& operator=(ByName const& other) { return *this = ByName(other); }
  ByName& operator=(ByName&&) noexcept = default;
  ~ByName() = default;

  [[nodiscard]] std::size_t size() const noexcept { return nodes_.size(); }
  /// The `index`-th of them, by name.
  [[nodiscard]] Node& operator[](std::size_t index) noexcept { return *nodes_[index]; }
  [[nodiscard]] Node const& operator[](std::size_t index) const noexcept { return *nodes_[index]; }

  /// The value of `name`; null without one.
  [[nodiscard]] V* find(std::string_view name) noexcept {
    std::size_t const at = place_of(name);
    return holds(at, name) ? &nodes_[at]->value : nullptr;
  }
  [[nodiscard]] V const* find(std::string_view name) const noexcept {
    std::size_t const at = place_of(name);
    return holds(at, name) ? &nodes_[at]->value : nullptr;
  }

  /// Gives `name` that value, in place of the one it may have.
  V& put(std::string_view name, V value) {
    std::size_t const at = place_of(name);
    if (holds(at, name)) return nodes_[at]->value = std::move(value);
    auto const where = nodes_.begin() + static_cast<std::ptrdiff_t>(at);
    return (*nodes_.insert(where, std::make_unique<Node>(Node{std::string(name), std::move(value)})))->value;
  }

  /// Takes `name`, if it is there, and its value away; `name` may be the node's own.
  void erase(std::string_view name) {
    std::size_t const at = place_of(name);
    if (holds(at, name)) nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(at));
  }

 private:
  // Where `name` is, or would be.
  [[nodiscard]] std::size_t place_of(std::string_view name) const noexcept {
    std::size_t first = 0;
    std::size_t last = nodes_.size();
    while (first < last) {
      std::size_t const middle = first + (last - first) / 2;
      if (nodes_[middle]->name < name) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }
  [[nodiscard]] bool holds(std::size_t at, std::string_view name) const noexcept {
    return at < nodes_.size() && nodes_[at]->name == name;
  }

  std::vector<std::unique_ptr<Node>> nodes_;
};

}  // namespace atlas::lora::inline v0::detail
