// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/json.hpp"

#include <doctest/doctest.h>

#include <string>

#include "../outcome.hpp"

using namespace atlas::lora;
using namespace atlas::lora::detail;
using namespace atlas::lora::testing;

namespace {

std::string fault_of(std::string const& text) {
  Error const error = bad(parse_json(text, "some.json"));
  CHECK(error.code == Errc::bad_file);
  return error.message;
}

}  // namespace

TEST_CASE("values keep their kinds, and members their order") {
  auto const json =
      parse_json(R"({"z": 16, "a": 16.0, "t": true, "n": null, "s": "\u00e9", "l": [1, [2]], "o": {}})", "f");
  REQUIRE(json);
  CHECK(*json->find("z")->integer() == 16);
  CHECK(json->find("a")->integer() == nullptr);
  CHECK(*json->find("a")->real() == 16.0);
  CHECK(*json->find("t")->boolean());
  CHECK(json->find("n")->is_null());
  CHECK(*json->find("s")->string() == "\xc3\xa9");
  CHECK(json->find("l")->array()->size() == 2);
  CHECK(json->find("o")->object()->empty());
  CHECK(json->find("absent") == nullptr);
  CHECK(json->object()->front().name == "z");
}

TEST_CASE("integers beyond 63 bits are no integers") {
  auto const json = parse_json("[9223372036854775807, 9223372036854775808, -9223372036854775808]", "f");
  REQUIRE(json);
  CHECK((*json->array())[0].integer() != nullptr);
  CHECK((*json->array())[1].integer() == nullptr);
  CHECK((*json->array())[2].integer() != nullptr);
}

TEST_CASE("what Python writes and JSON does not know is named with its field") {
  CHECK(fault_of(R"({"lora_alpha": NaN})") == "some.json: field 'lora_alpha': NaN is not a number");
  CHECK(fault_of(R"({"a": {"b": [1, -Infinity]}})") == "some.json: field 'a.b': -Infinity is not a number");
  CHECK(fault_of(R"({"a":Infinity})") == "some.json: field 'a': Infinity is not a number");
  CHECK(says(fault_of(R"({"lora_alpha": 1e400, "b": 1})"), "field 'lora_alpha': the number 1e400"));
  CHECK(says(fault_of("[-1e400]"), "-1e400"));
}

TEST_CASE("a key said twice is named, at any depth") {
  CHECK(fault_of(R"({"r": 8, "r": 16})") == "some.json: field 'r': said twice");
  CHECK(fault_of(R"({"a": [{"b": 1, "c": 2, "b": 3}]})") == "some.json: field 'a.b': said twice");
  CHECK(parse_json(R"({"a": {"b": 1}, "c": {"b": 1}})", "f").has_value());
}

TEST_CASE("text that is not JSON is refused with its place") {
  for (char const* text :
       {"", "{", "[1,", "nul", "{} x", "{\"a\" 1}", "{1: 2}", "[01]", "'a'", "[1]]", "\x01"}) {
    CAPTURE(text);
    CHECK(says(fault_of(text), "some.json: "));
  }
  CHECK(says(fault_of("{\"a\": \"\xff\"}"), "field 'a': not JSON at byte 8"));
  CHECK(says(fault_of(R"({"a": 1} trailing)"), "not JSON at byte 12"));
}

TEST_CASE("nesting is bounded") {
  CHECK(parse_json(std::string(64, '[') + std::string(64, ']'), "f").has_value());
  CHECK(says(fault_of(std::string(65, '[') + std::string(65, ']')), "nested deeper than 64"));
  CHECK(says(fault_of(std::string(1000000, '[')), "nested deeper than 64"));
}

TEST_CASE("a message is one short line whatever the file holds") {
  std::string const text = R"({")" + std::string(100000, 'k') + R"(\n": NaN})";
  std::string const message = fault_of(text);
  CHECK(message.size() < 400);
  CHECK(fault_of("{\"a\\nb\": NaN}") == "some.json: field 'a?b': NaN is not a number");
  CHECK(fault_of("[\"" + std::string(100000, 'x')).size() < 400);
}

TEST_CASE("a value is described as its field's fault needs it") {
  auto const json = parse_json(R"([null, true, 16.5, 7, "8", [], {}])", "f");
  REQUIRE(json);
  std::string all;
  for (JsonValue const& value : *json->array()) all += describe(value) + "; ";
  CHECK(all == "null; true; 16.5; 7; the string \"8\"; a list; an object; ");
}
