// SPDX-License-Identifier: AGPL-3.0-only
//
// The typed reading of one JSON object's fields, each of which must be asked for: what nobody asked for is
// refused unless it is switched off.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "atlas/lora/adapter/faults.hpp"
#include "atlas/lora/adapter/json.hpp"
#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Far beyond any adapter; bounds the memory that a sparse file can ask for.
inline constexpr std::int32_t most_rank = 65536;

/// Reads fields and adds a fault, naming the field, for each that is not what it should be. An absent field
/// and a null are the same where a field has a default.
class PeftFields {
 public:
  PeftFields(JsonValue const& json, std::string const& file, Faults& faults)
      : json_(json), file_(file), faults_(faults) {}

  void fault(Errc code, std::string const& field, std::string const& what) {
    faults_.add(code, file_ + ": field '" + field + "': " + what);
  }

  [[nodiscard]] bool is_object() {
    if (json_.object() == nullptr) faults_.add(Errc::bad_config, file_ + ": an object expected");
    return json_.object() != nullptr;
  }

  /// The field, or null when it is absent; it now counts as known.
  JsonValue const* take(std::string_view field) {
    known_.push_back(field);
    return json_.find(field);
  }
  [[nodiscard]] JsonValue const* peek(std::string_view field) const { return json_.find(field); }

  /// A needed rank, in [1, most_rank].
  std::int32_t rank(char const* field) {
    JsonValue const* const value = take(field);
    if (value == nullptr) {
      fault(Errc::bad_config, field, "absent");
      return 0;
    }
    return rank(field, *value);
  }
  std::int32_t rank(std::string const& field, JsonValue const& value) {
    std::int64_t const* const integer = value.integer();
    if (integer == nullptr || *integer < 1) {
      fault(Errc::bad_config, field, describe(value) + " is not an integer of at least 1");
      return 0;
    }
    if (*integer > most_rank) {
      fault(Errc::bad_config, field,
            describe(value) + " is beyond the largest rank, " + std::to_string(most_rank));
      return 0;
    }
    return static_cast<std::int32_t>(*integer);
  }

  /// A needed number; JSON has none that is not finite.
  double number(char const* field) {
    JsonValue const* const value = take(field);
    if (value == nullptr) {
      fault(Errc::bad_config, field, "absent");
      return 0.0;
    }
    return number(field, *value);
  }
  double number(std::string const& field, JsonValue const& value) {
    if (std::int64_t const* const integer = value.integer()) return static_cast<double>(*integer);
    if (double const* const real = value.real()) return *real;
    fault(Errc::bad_config, field, describe(value) + " is not a number");
    return 0.0;
  }

  /// A boolean; false when absent.
  bool flag(char const* field) {
    JsonValue const* const value = take(field);
    if (value == nullptr || value->is_null()) return false;
    if (bool const* const boolean = value->boolean()) return *boolean;
    fault(Errc::bad_config, field, describe(*value) + " is neither true nor false");
    return false;
  }

  /// A list of strings, or one; empty when absent.
  std::vector<std::string> strings(char const* field) {
    std::vector<std::string> out;
    JsonValue const* const value = take(field);
    if (value == nullptr || value->is_null()) return out;
    if (std::string const* const one = value->string()) return {*one};
    if (value->array() == nullptr) {
      fault(Errc::bad_config, field, describe(*value) + " is not a list of names");
      return out;
    }
    for (JsonValue const& item : *value->array()) {
      if (std::string const* const name = item.string()) {
        out.push_back(*name);
      } else {
        fault(Errc::bad_config, field, describe(item) + " is not a name");
      }
    }
    return out;
  }

  /// A list of integers of at least 0, or one; empty when absent.
  std::vector<std::int64_t> indices(char const* field) {
    JsonValue const* const value = take(field);
    if (value == nullptr || value->is_null()) return {};
    if (value->integer() != nullptr) return integers(field, JsonArray{*value});
    return integers(field, *value);
  }

  /// Token ids in the order given; negative ones and ones said twice are faults.
  std::vector<std::int64_t> token_ids(std::string const& field, JsonValue const& value) {
    auto out = integers(field, value);
    auto sorted = out;
    std::sort(sorted.begin(), sorted.end());
    auto const twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) fault(Errc::bad_config, field, std::to_string(*twice) + " is said twice");
    return out;
  }

  /// A fault unless the field is absent, null or false.
  void refuse_unless_off(char const* field, char const* feature) {
    JsonValue const* const value = take(field);
    if (value == nullptr || value->is_null()) return;
    bool const* const boolean = value->boolean();
    if (boolean != nullptr && !*boolean) return;
    fault(Errc::unsupported, field, std::string(feature) + " is not served");
  }

  /// A fault for every field that nobody asked for, unless it is null, false or empty.
  void refuse_unknown() {
    for (JsonMember const& member : *json_.object()) {
      if (std::find(known_.begin(), known_.end(), member.name) != known_.end()) continue;
      JsonValue const& value = member.value;
      bool const* const boolean = value.boolean();
      bool const off = value.is_null() || (boolean != nullptr && !*boolean) ||
                       (value.string() != nullptr && value.string()->empty()) ||
                       (value.array() != nullptr && value.array()->empty()) ||
                       (value.object() != nullptr && value.object()->empty());
      if (!off) {
        fault(Errc::unsupported, printable(member.name),
              "not a known field, and " + describe(value) + " may change the output");
      }
    }
  }

 private:
  std::vector<std::int64_t> integers(std::string const& field, JsonValue const& value) {
    if (value.array() != nullptr) return integers(field, *value.array());
    fault(Errc::bad_config, field, describe(value) + " is not a list of integers");
    return {};
  }
  std::vector<std::int64_t> integers(std::string const& field, JsonArray const& items) {
    std::vector<std::int64_t> out;
    for (JsonValue const& item : items) {
      std::int64_t const* const integer = item.integer();
      if (integer == nullptr || *integer < 0) {
        fault(Errc::bad_config, field, describe(item) + " is not an integer of at least 0");
      } else {
        out.push_back(*integer);
      }
    }
    return out;
  }

  JsonValue const& json_;
  std::string const& file_;
  Faults& faults_;
  std::vector<std::string_view> known_;
};

}  // namespace atlas::lora::inline v0::detail
