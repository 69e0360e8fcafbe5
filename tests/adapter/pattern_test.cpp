// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/pattern.hpp"

#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "../outcome.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;
using detail::Pattern;

namespace {

bool full(std::string_view pattern, std::string_view text) {
  return good(Pattern::compile(pattern)).full_match(text);
}

bool beginning(std::string_view pattern, std::string_view text) {
  return good(Pattern::compile(pattern)).match(text);
}

std::string refusal(std::string_view pattern) {
  Error const error = bad(Pattern::compile(pattern));
  CHECK(error.code == Errc::unsupported);
  return error.message;
}

}  // namespace

TEST_CASE("each construct means what it means in Python") {
  CHECK(full("a.c", "abc"));
  CHECK_FALSE(full("a\\.c", "abc"));
  CHECK(full("ab*", "a"));
  CHECK(full("ab*", "abbb"));
  CHECK_FALSE(full("ab+", "a"));
  CHECK(full("ab?c", "ac"));
  CHECK(full("(ab|cd)+", "abcdab"));
  CHECK_FALSE(full("ab|cd", "abd"));
  CHECK(full("(?:a|b)c", "bc"));
  CHECK(full("(?P<name>a)b", "ab"));
  CHECK(full("[a-cx]+", "abcx"));
  CHECK_FALSE(full("[^a-c]", "b"));
  CHECK(full("[]-]+", "]-"));
  CHECK(full("\\d\\w\\s", "1_ "));
  CHECK_FALSE(full("\\D", "1"));
  CHECK(full("[\\d.]+", "1.2"));
  CHECK(full("a{2}", "aa"));
  CHECK_FALSE(full("a{2}", "aaa"));
  CHECK(full("a{1,2}b", "aab"));
  CHECK_FALSE(full("a{1,2}b", "aaab"));
  CHECK(full("a{,2}", ""));
  CHECK(full("a{2,}", "aaaa"));
  CHECK(full("a{b", "a{b"));
  CHECK(full("a.*?b", "a...b"));
  CHECK(full("\\bab\\b.\\bc", "ab.c"));
  CHECK_FALSE(full("a\\bb", "ab"));
  CHECK(full("^a$", "a"));
  CHECK_FALSE(full("a^b", "ab"));
  CHECK(full("", ""));
  CHECK(full("()*", ""));
  CHECK(full("(a*)*b", "aab"));
}

TEST_CASE("a match begins at the beginning and may end anywhere, a full match ends at the end") {
  CHECK(beginning("ab", "abc"));
  CHECK_FALSE(beginning("bc", "abc"));
  CHECK_FALSE(full("ab", "abc"));
  CHECK(beginning("ab$|abc", "abc"));
  CHECK_FALSE(beginning("ab$", "abc"));
}

TEST_CASE("a pattern's key matches the end of a path from a dot on, as PEFT has it") {
  auto const key = [](std::string const& text) { return "(.*\\.)?(" + text + ")$"; };
  CHECK(beginning(key("q_proj"), "model.layers.0.self_attn.q_proj"));
  CHECK(beginning(key("q_proj"), "q_proj"));
  CHECK_FALSE(beginning(key("q_proj"), "model.layers.0.self_attn.xq_proj"));
  CHECK_FALSE(beginning(key("q_proj"), "model.layers.0.q_proj.inner"));
  CHECK(beginning(key("layers.1.mlp.down_proj"), "model.layers.1.mlp.down_proj"));
  CHECK_FALSE(beginning(key("layers.1.mlp.down_proj"), "model.layers.11.mlp.down_proj"));
  CHECK(beginning(key("layers.1.mlp.down_proj"), "model.layersX1.mlp.down_proj"));  // a dot is any character
  CHECK(beginning(key("layers\\.[0-3]\\..*_proj"), "model.layers.3.mlp.up_proj"));
  CHECK(beginning(key("^model.layers.0.*"), "model.layers.0.mlp"));
  CHECK_FALSE(beginning(key("^layers.0.*"), "model.layers.0.mlp"));
}

TEST_CASE("the long expressions of fine-tuning tools are understood") {
  std::string_view const expression =
      "(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|"
      "q_proj).*?)"
      "|(?:\\bmodel\\.layers\\.[\\d]{1,}\\.(?:self_attn|mlp)\\.(?:(?:k_proj|v_proj|q_proj)))";
  CHECK(full(expression, "model.layers.12.self_attn.q_proj"));
  CHECK(full(expression, "model.language_model.layers.12.self_attn.q_proj"));
  CHECK_FALSE(full(expression, "model.layers.12.self_attn.o_proj"));
  CHECK_FALSE(full(expression, "model.layers.x.self_attn.q_proj"));
}

TEST_CASE("what is not understood is refused with its place") {
  CHECK(says(refusal("a(?!b)"), "look-around"));
  CHECK(says(refusal("(?i)a"), "flag"));
  CHECK(refusal("(a)\\1") == "an escape that is not understood at character 5");
  CHECK(refusal("(a") == "'(' without ')' at character 2");
  CHECK(refusal("a)") == "')' without '(' at character 1");
  for (char const* pattern : {"*a", "a**", "a++", "[a", "[z-a]", "[a-\\d]", "a\\", "\\p", "a{3,2}",
                              "\xc3\xa9", "(?P=n)", "(?P<n", "(?<!a)b"}) {
    CAPTURE(pattern);
    CHECK_FALSE(refusal(pattern).empty());
  }
}

TEST_CASE("no pattern takes long or much memory") {
  std::string const text(2000, 'a');
  CHECK_FALSE(full("(a*)*(a*)*(a*)*b", text));
  CHECK_FALSE(full("(a|aa|aaa)*b", text));
  CHECK(says(refusal("(((a{99}){99}){99}){99}"), "too large"));
  CHECK(says(refusal("a{99999999999}"), "too large"));
  CHECK(says(refusal(std::string(1000, '(')), "too deep"));
  CHECK(says(refusal(std::string(100000, 'a')), "too large"));
  std::string many;
  for (int i = 0; i < 100000; ++i) many += "a|";
  CHECK(says(refusal(many), "too large"));
}
