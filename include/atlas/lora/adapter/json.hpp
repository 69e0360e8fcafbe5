// SPDX-License-Identifier: AGPL-3.0-only
//
// Strict JSON without exceptions: NaN, numbers beyond a double, keys said twice, text after the end, bad
// UTF-8 and deep nesting are errors that name the field and the place.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// What every handler of JSON events shares: where in the document it is, and the first error.
class JsonPlace {
 public:
  JsonPlace(std::string_view text, std::string file) : text_(text), file_(std::move(file)) {}

  [[nodiscard]] Error const& error() const noexcept { return error_; }

  /// Keeps the first error; returns false, which ends the parse.
  bool refuse(std::string const& what) {
    if (error_.code == Errc::ok) error_ = Error{Errc::bad_file, file_ + ": " + field() + what};
    return false;
  }

  /// The parser's own report, in words that name what Python writes and JSON does not know.
  bool parse_error(std::size_t position, std::string const&, nlohmann::detail::exception const& cause) {
    std::string const token = token_at(position);
    if (token == "NaN" || token == "Infinity" || token == "-Infinity")
      return refuse(token + " is not a number");
    std::string const at = " at byte " + std::to_string(position);
    if (cause.id == 406) return refuse("the number " + token + at + " is beyond a double");
    std::string_view reason = cause.what();
    if (auto const tag = reason.find("] "); tag != std::string_view::npos) reason.remove_prefix(tag + 2);
    reason = reason.substr(0, reason.find("; last read"));  // which may be the whole text
    return refuse("not JSON" + at + ": " + std::string(reason));
  }

 protected:
  static constexpr std::size_t deepest = 64;

  void enter() { path_.emplace_back(); }
  void leave() { path_.pop_back(); }
  void name(std::string key) { path_.back() = std::move(key); }
  [[nodiscard]] std::size_t depth() const noexcept { return path_.size(); }

 private:
  // "field 'rank_pattern.q_proj': ", or nothing at the top.
  [[nodiscard]] std::string field() const {
    std::string path;
    for (std::string const& key : path_) {
      if (!path.empty() && !key.empty()) path += '.';
      path += printable(key);
    }
    return path.empty() ? path : "field '" + path + "': ";
  }

  [[nodiscard]] std::string token_at(std::size_t position) const {
    auto const in_token = [this](std::size_t i) {
      char const c = text_[i];
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '+' || c == '.';
    };
    std::size_t begin = std::min(position, text_.size());
    if (begin > 0 && !(begin < text_.size() && in_token(begin))) --begin;
    std::size_t end = begin;
    while (begin > 0 && in_token(begin - 1)) --begin;
    while (end < text_.size() && in_token(end)) ++end;
    return std::string(text_.substr(begin, std::min<std::size_t>(end - begin, 40)));
  }

  std::string_view text_;
  std::string file_;
  std::vector<std::string> path_;  // one key per open object or list; empty in a list
  Error error_;
};

/// Runs `handler` over `text`; the first error, if any.
template <class Handler>
[[nodiscard]] Error run_json(std::string_view text, Handler& handler) {
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &handler) && handler.error().code == Errc::ok) {
    handler.refuse("not JSON");
  }
  return handler.error();
}

/// A template, so that it is completed when first used and not while `JsonValue` is being defined (nvcc
/// insists).
template <class Value>
struct NamedValue {
  std::string name;
  Value value;
};
using JsonMember = NamedValue<class JsonValue>;
using JsonArray = std::vector<JsonValue>;
using JsonObject = std::vector<JsonMember>;  ///< in the file's order; no name twice

/// One parsed value. Integers that fit in 64 bits are kept apart from other numbers: 16 and 16.0 differ.
class JsonValue {
 public:
  JsonValue() = default;
  template <class T>
  explicit JsonValue(T value) : value_(std::move(value)) {}

  [[nodiscard]] bool is_null() const noexcept { return std::holds_alternative<std::nullptr_t>(value_); }
  [[nodiscard]] bool const* boolean() const noexcept { return std::get_if<bool>(&value_); }
  [[nodiscard]] std::int64_t const* integer() const noexcept { return std::get_if<std::int64_t>(&value_); }
  [[nodiscard]] double const* real() const noexcept { return std::get_if<double>(&value_); }
  [[nodiscard]] std::string const* string() const noexcept { return std::get_if<std::string>(&value_); }
  [[nodiscard]] JsonArray const* array() const noexcept { return std::get_if<JsonArray>(&value_); }
  [[nodiscard]] JsonObject const* object() const noexcept { return std::get_if<JsonObject>(&value_); }
  [[nodiscard]] JsonArray* array() noexcept { return std::get_if<JsonArray>(&value_); }
  [[nodiscard]] JsonObject* object() noexcept { return std::get_if<JsonObject>(&value_); }

  /// The member `name` of an object; null when this is none or has no such member.
  [[nodiscard]] inline JsonValue const* find(std::string_view name) const noexcept;

 private:
  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, JsonArray, JsonObject> value_;
};

inline JsonValue const* JsonValue::find(std::string_view name) const noexcept {
  JsonObject const* const members = object();
  if (members == nullptr) return nullptr;
  for (JsonMember const& member : *members) {
    if (member.name == name) return &member.value;
  }
  return nullptr;
}

/// A number in a message, with the digits of an f32.
[[nodiscard]] inline std::string shortest(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

/// A value in a message: `16.5`, `the string "16"`, `a list`.
[[nodiscard]] inline std::string describe(JsonValue const& value) {
  if (bool const* const b = value.boolean()) return *b ? "true" : "false";
  if (auto const* const i = value.integer()) return std::to_string(*i);
  if (double const* const d = value.real()) return shortest(*d);
  if (auto const* const s = value.string()) return "the string \"" + printable(*s) + "\"";
  if (value.array() != nullptr) return "a list";
  return value.object() != nullptr ? "an object" : "null";
}

/// Builds a `JsonValue` from events.
class JsonBuilder : public JsonPlace {
 public:
  using JsonPlace::JsonPlace;

  [[nodiscard]] JsonValue take() { return std::move(root_); }

  bool null() { return put(JsonValue{}); }
  bool boolean(bool value) { return put(JsonValue{value}); }
  bool number_integer(std::int64_t value) { return put(JsonValue{value}); }
  bool number_unsigned(std::uint64_t value) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return value <= most ? put(JsonValue{static_cast<std::int64_t>(value)})
                         : put(JsonValue{static_cast<double>(value)});
  }
  bool number_float(double value, std::string const&) { return put(JsonValue{value}); }
  bool string(std::string& value) { return put(JsonValue{std::move(value)}); }
  bool binary(nlohmann::json::binary_t&) { return refuse("binary values are not JSON"); }

  bool start_array(std::size_t) { return open(JsonValue{JsonArray{}}); }
  bool start_object(std::size_t) { return open(JsonValue{JsonObject{}}); }
  bool key(std::string& key) {
    name(key);
    key_ = std::move(key);
    return true;
  }
  bool end_array() { return close(); }
  bool end_object() {
    std::vector<std::string_view> names;
    for (JsonMember const& member : *open_.back()->object()) names.push_back(member.name);
    std::sort(names.begin(), names.end());
    auto const twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) {
      name(std::string(*twice));
      return refuse("said twice");
    }
    return close();
  }

 private:
  JsonValue* insert(JsonValue value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (JsonArray* const array = open_.back()->array()) {
      array->push_back(std::move(value));
      return &array->back();
    }
    JsonObject* const object = open_.back()->object();
    object->push_back(JsonMember{std::move(key_), std::move(value)});
    return &object->back().value;
  }
  bool put(JsonValue value) {
    insert(std::move(value));
    return true;
  }
  bool open(JsonValue value) {
    if (depth() == deepest) return refuse("nested deeper than " + std::to_string(deepest));
    // Only the innermost container grows, so pointers to the open ones stay good.
    open_.push_back(insert(std::move(value)));
    enter();
    return true;
  }
  bool close() {
    open_.pop_back();
    leave();
    return true;
  }

  JsonValue root_;
  std::vector<JsonValue*> open_;
  std::string key_;
};

/// Parses one document. Errors: `bad_file`, naming `file`, the field and the place.
[[nodiscard]] inline Result<JsonValue> parse_json(std::string_view text, std::string const& file) {
  JsonBuilder builder(text, file);
  if (Error error = run_json(text, builder); error.code != Errc::ok) {
    return cuda::std::unexpected<Error>(std::move(error));
  }
  return builder.take();
}

/// The most bytes that a configuration file may have.
inline constexpr std::uint64_t most_config_bytes = std::uint64_t{4} << 20;

}  // namespace atlas::lora::inline v0::detail
