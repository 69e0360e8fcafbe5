// SPDX-License-Identifier: AGPL-3.0-only
//
// Which modules a field of a PEFT configuration names, by PEFT's own rules.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "atlas/lora/adapter/pattern.hpp"
#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

namespace detail {

/// Whether `path` is `name`, or ends in it after a dot.
[[nodiscard]] inline bool ends_in_name(std::string_view path, std::string_view name) noexcept {
  if (!path.ends_with(name)) return false;
  return path.size() == name.size() || path[path.size() - name.size() - 1] == '.';
}

/// Whether `path` is `name`, or begins with it before a dot.
[[nodiscard]] inline bool begins_with_name(std::string_view path, std::string_view name) noexcept {
  return path.starts_with(name) && (path.size() == name.size() || path[name.size()] == '.');
}

/// The segments of a path: what lies between its dots.
[[nodiscard]] inline std::vector<std::string_view> segments_of(std::string_view path) {
  std::vector<std::string_view> segments;
  while (true) {
    auto const dot = path.find('.');
    segments.push_back(path.substr(0, dot));
    if (dot == std::string_view::npos) return segments;
    path.remove_prefix(dot + 1);
  }
}

/// The number that a segment is when it is one, written as numbers are: no sign, no leading zero, below 2^31.
[[nodiscard]] inline std::optional<std::int32_t> index_of(std::string_view segment) noexcept {
  if (segment.empty() || segment[0] < '0' || segment[0] > '9' || (segment.size() > 1 && segment[0] == '0')) {
    return std::nullopt;
  }
  std::int32_t value = 0;
  auto const [end, error] = std::from_chars(segment.data(), segment.data() + segment.size(), value);
  if (error != std::errc{} || end != segment.data() + segment.size()) return std::nullopt;
  return value;
}

}  // namespace detail

/// The modules that `target_modules` or `exclude_modules` names: the ends of paths in a list, or whole paths
/// by one regular expression.
struct ModuleNames {
  std::vector<std::string> names{};         ///< ends of paths, whole segments
  std::optional<std::string> expression{};  ///< a regular expression for whole paths, as PEFT reads it
  bool all_linear = false;                  ///< the word `all-linear`: every linear but the head
  /// The compiled expression; none when there is no expression, or one that is not understood.
  std::optional<detail::Pattern> pattern{};

  /// Whether it names nothing, as an absent field does.
  [[nodiscard]] bool empty() const noexcept { return names.empty() && !expression && !all_linear; }

  /// Whether it can be said which modules these are: not when an expression is not understood.
  [[nodiscard]] bool understood() const noexcept { return !expression || pattern.has_value(); }

  /// Whether the module at `path` (its path in the base model) is one of them.
  [[nodiscard]] bool contains(std::string_view path) const {
    if (all_linear) return !detail::ends_in_name(path, "lm_head");
    if (pattern) return pattern->full_match(path);
    return std::any_of(names.begin(), names.end(),
                       [path](std::string const& name) { return detail::ends_in_name(path, name); });
  }
};

namespace detail {

/// The layer of `path` as `layers_to_transform` counts: the first number that stands in `path` after a
/// segment named in `patterns`, or after any two segments when there are no patterns.
[[nodiscard]] inline std::optional<std::int32_t> layer_by_pattern(std::string_view path,
                                                                  std::vector<std::string> const& patterns) {
  auto const segments = segments_of(path);
  auto const layer_at = [&segments](std::size_t i) {
    return i + 1 < segments.size() ? index_of(segments[i]) : std::nullopt;
  };
  if (patterns.empty()) {
    for (std::size_t i = 2; i < segments.size(); ++i) {
      if (auto const layer = layer_at(i)) return layer;
    }
  }
  for (std::string const& pattern : patterns) {
    for (std::size_t i = 1; i < segments.size(); ++i) {
      if (auto const layer = layer_at(i); layer && segments[i - 1] == pattern) return layer;
    }
  }
  return std::nullopt;
}

}  // namespace detail

}  // namespace atlas::lora::inline v0
