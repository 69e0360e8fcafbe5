// SPDX-License-Identifier: AGPL-3.0-only
//
// The regular expressions that PEFT configurations hold, with the meaning Python gives them and without
// backtracking: a match takes time in proportion to the pattern times the text, whatever they are.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atlas/lora/config.hpp"
#include "atlas/lora/status.hpp"

namespace atlas::lora::inline v0::detail {

/// Characters by their byte.
using ByteSet = std::bitset<256>;

/// One step of a compiled pattern; jumps are relative, so that a piece of a program can be repeated by
/// copying.
struct PatternStep {
  enum class Kind : std::uint8_t { bytes, split, jump, at_begin, at_end, at_word_edge };
  Kind kind = Kind::jump;
  std::int32_t first = 1;   // split, jump: where to go on, counted from here
  std::int32_t second = 1;  // split: the other way
  ByteSet bytes{};
};

[[nodiscard]] inline bool is_word(char c) noexcept {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

/// Turns the text of a pattern into steps. The first thing it does not understand ends it.
class PatternCompiler {
 public:
  using Steps = std::vector<PatternStep>;

  explicit PatternCompiler(std::string_view text) : text_(text) {}

  [[nodiscard]] Result<Steps> run() {
    Steps steps = alternatives(0);
    if (fault_.empty() && at_ < text_.size()) refuse("')' without '('");
    if (!fault_.empty()) return fail(Errc::unsupported, fault_ + " at character " + std::to_string(at_));
    return steps;
  }

 private:
  using Kind = PatternStep::Kind;
  static constexpr std::size_t most_steps = 4096;
  static constexpr int deepest = 32;
  static constexpr std::int32_t unbounded = -1;

  void refuse(char const* what) {
    if (fault_.empty()) fault_ = what;
  }
  [[nodiscard]] bool more() const noexcept { return fault_.empty() && at_ < text_.size(); }
  [[nodiscard]] bool next_is(char c) const noexcept { return at_ < text_.size() && text_[at_] == c; }
  bool take(char c) {
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }
  static void append(Steps& steps, Steps const& more_steps) {
    steps.insert(steps.end(), more_steps.begin(), more_steps.end());
  }
  static Steps one(Kind kind) { return {PatternStep{.kind = kind}}; }
  static Steps one(ByteSet const& bytes) { return {PatternStep{.kind = Kind::bytes, .bytes = bytes}}; }
  static PatternStep split(std::size_t first, std::size_t second) {
    return {.kind = Kind::split,
            .first = static_cast<std::int32_t>(first),
            .second = static_cast<std::int32_t>(second)};
  }

  Steps alternatives(int depth) {
    if (depth > deepest) refuse("groups nested too deep");
    Steps steps = sequence(depth);
    while (more() && take('|')) {
      Steps const other = sequence(depth);
      steps.insert(steps.begin(), split(1, steps.size() + 2));
      steps.push_back({.first = static_cast<std::int32_t>(other.size()) + 1});
      append(steps, other);
      if (steps.size() > most_steps) refuse("a pattern too large");
    }
    return steps;
  }

  Steps sequence(int depth) {
    Steps steps;
    while (more() && !next_is('|') && !next_is(')')) {
      Steps const piece = atom(depth);
      append(steps, more() ? quantified(piece) : piece);
      if (steps.size() > most_steps) refuse("a pattern too large");
    }
    return steps;
  }

  Steps atom(int depth) {
    char const c = text_[at_++];
    switch (c) {
      case '(': return group(depth);
      case '[': return one(byte_class());
      case '\\': return escape();
      case '^': return one(Kind::at_begin);
      case '$': return one(Kind::at_end);
      case '.': return one(~set_of('\n'));
      case '*':
      case '+':
      case '?': refuse("nothing to repeat"); return {};
      default: break;
    }
    if (static_cast<unsigned char>(c) >= 0x80) refuse("a character beyond ASCII");
    return one(set_of(c));
  }

  Steps group(int depth) {
    if (take('?')) {
      if (take('P')) {
        if (!take('<')) refuse("a group that is not understood");
        while (more() && is_word(text_[at_])) ++at_;
        if (!take('>')) refuse("a group that is not understood");
      } else if (!take(':')) {
        refuse("a look-around, flag or comment, which is not understood");
      }
    }
    Steps steps;
    if (fault_.empty()) steps = alternatives(depth + 1);
    if (!take(')')) refuse("'(' without ')'");
    return steps;
  }

  Steps quantified(Steps const& piece) {
    std::int32_t least = 1;
    std::int32_t most = 1;
    if (take('*')) {
      least = 0, most = unbounded;
    } else if (take('+')) {
      most = unbounded;
    } else if (take('?')) {
      least = 0;
    } else if (!counts(least, most)) {
      return piece;
    }
    take('?');  // whether it is lazy does not change what matches
    std::int32_t again = 0;
    if (next_is('+') || next_is('*') || next_is('?') || counts(again, again)) refuse("a repeat of a repeat");
    return repeat(piece, least, most);
  }

  // `{m}`, `{m,}`, `{,n}` or `{m,n}`; anything else in braces is text, as in Python.
  bool counts(std::int32_t& least, std::int32_t& most) {
    std::size_t const start = at_;
    if (!take('{') || next_is('}')) {
      at_ = start;
      return false;
    }
    std::int32_t low = number();
    std::int32_t high = take(',') ? number() : low;
    bool const one_number = text_[at_ - 1] != ',' && high == low;
    if (!take('}') || (low == unbounded && one_number)) {
      at_ = start;
      return false;
    }
    if (low == unbounded) low = 0;
    if (high != unbounded && high < low) refuse("a repeat whose counts go backwards");
    least = low, most = high;
    return true;
  }

  // The digits here as a number; `unbounded` when there are none.
  std::int32_t number() {
    std::int32_t value = unbounded;
    while (more() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = (value == unbounded ? 0 : value) * 10 + (text_[at_++] - '0');
      if (value > static_cast<std::int32_t>(most_steps)) refuse("a repeat too large");
    }
    return value;
  }

  Steps repeat(Steps const& piece, std::int32_t least, std::int32_t most) {
    std::size_t const copies = static_cast<std::size_t>(most == unbounded ? least + 1 : most);
    if (copies * (piece.size() + 2) > most_steps) refuse("a pattern too large");
    Steps steps;
    if (!fault_.empty()) return steps;
    for (std::int32_t i = 0; i < least; ++i) append(steps, piece);
    if (most == unbounded) {
      steps.push_back(split(1, piece.size() + 2));
      append(steps, piece);
      steps.push_back({.first = -static_cast<std::int32_t>(piece.size()) - 1});
      return steps;
    }
    for (std::int32_t i = least; i < most; ++i) {
      steps.push_back(split(1, piece.size() + 1));
      append(steps, piece);
    }
    return steps;
  }

  Steps escape() {
    if (at_ == text_.size()) {
      refuse("an escape without a character");
      return {};
    }
    char const c = text_[at_];
    switch (c) {
      case 'b': ++at_; return one(Kind::at_word_edge);
      case 'A': ++at_; return one(Kind::at_begin);
      case 'Z': ++at_; return one(Kind::at_end);
      default: return one(escaped_bytes());
    }
  }

  // What an escape stands for, in a class or outside.
  ByteSet escaped_bytes() {
    char const c = text_[at_++];
    ByteSet digits, words, spaces;
    for (int i = 0; i < 128; ++i) {
      auto const at = static_cast<std::size_t>(i);
      char const byte = static_cast<char>(i);
      digits[at] = byte >= '0' && byte <= '9';
      words[at] = is_word(byte);
      spaces[at] = byte == ' ' || (byte >= '\t' && byte <= '\r') || (byte >= 0x1c && byte <= 0x1f);
    }
    switch (c) {
      case 'd': return digits;
      case 'D': return ~digits;
      case 'w': return words;
      case 'W': return ~words;
      case 's': return spaces;
      case 'S': return ~spaces;
      case 'n': return set_of('\n');
      case 't': return set_of('\t');
      default: break;
    }
    if ((is_word(c) && c != '_') || static_cast<unsigned char>(c) >= 0x80)
      refuse("an escape that is not understood");
    return set_of(c);
  }

  ByteSet byte_class() {
    ByteSet bytes;
    bool const inverted = take('^');
    bool first = true;
    while (fault_.empty() && (first || !next_is(']'))) {
      if (at_ == text_.size()) refuse("'[' without ']'");
      if (!fault_.empty()) break;
      first = false;
      bytes |= class_item();
    }
    take(']');
    return inverted ? ~bytes : bytes;
  }

  ByteSet class_item() {
    char const low = text_[at_++];
    if (static_cast<unsigned char>(low) >= 0x80) refuse("a character beyond ASCII");
    ByteSet item = low == '\\' && at_ < text_.size() ? escaped_bytes() : set_of(low);
    if (at_ + 1 >= text_.size() || text_[at_] != '-' || text_[at_ + 1] == ']') return item;
    ++at_;
    char const high = text_[at_++];
    if (low == '\\' || high == '\\' || high < low) refuse("a range that is not understood");
    for (int byte = low; byte <= high; ++byte) item.set(static_cast<std::size_t>(byte));
    return item;
  }

  static ByteSet set_of(char c) { return ByteSet{}.set(static_cast<unsigned char>(c)); }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string fault_;
};

/// A compiled pattern. What it understands: text, `.`, classes, groups, `|`, `* + ? {m,n}` greedy or lazy, `^
/// $ \b` and the classes `\d \w \s`. Python's other inventions (look-arounds, back references, flags) are
/// refused.
class Pattern {
 public:
  /// Errors: `unsupported`, saying what is not understood and where.
  [[nodiscard]] static Result<Pattern> compile(std::string_view text) {
    auto steps = PatternCompiler(text).run();
    if (!steps) return cuda::std::unexpected<Error>(std::move(steps).error());
    Pattern pattern;
    pattern.steps_ = std::move(*steps);
    return pattern;
  }

  /// Python's `re.match`: whether some beginning of `text` matches.
  [[nodiscard]] bool match(std::string_view text) const { return run(text, false); }

  /// Python's `re.fullmatch`: whether the whole of `text` matches.
  [[nodiscard]] bool full_match(std::string_view text) const { return run(text, true); }

  /// How many steps it was compiled to: what bounds its memory, and the time of a match by the text's length.
  [[nodiscard]] std::size_t steps() const noexcept { return steps_.size(); }

 private:
  using Kind = PatternStep::Kind;

  [[nodiscard]] bool run(std::string_view text, bool whole) const {
    std::vector<std::size_t> now, next;
    std::vector<std::size_t> seen_at(steps_.size() + 1,
                                     ~std::size_t{0});  // the last position that reached a step
    reach(0, text, 0, now, seen_at);
    for (std::size_t i = 0;; ++i) {
      bool const matched = seen_at[steps_.size()] == i;
      if (matched && (!whole || i == text.size())) return true;
      if (i == text.size() || now.empty()) return false;
      next.clear();
      for (std::size_t const at : now) {
        if (steps_[at].bytes[static_cast<unsigned char>(text[i])]) reach(at + 1, text, i + 1, next, seen_at);
      }
      std::swap(now, next);
    }
  }

  // Adds the byte steps that `start` leads to at position `i` without reading anything.
  void reach(std::size_t start, std::string_view text, std::size_t i, std::vector<std::size_t>& list,
             std::vector<std::size_t>& seen_at) const {
    std::vector<std::size_t> open{start};
    while (!open.empty()) {
      std::size_t const at = open.back();
      open.pop_back();
      if (seen_at[at] == i) continue;
      seen_at[at] = i;
      if (at == steps_.size()) continue;
      PatternStep const& step = steps_[at];
      bool const word_edge = (i > 0 && is_word(text[i - 1])) != (i < text.size() && is_word(text[i]));
      switch (step.kind) {
        case Kind::bytes: list.push_back(at); break;
        case Kind::split: open.push_back(at + static_cast<std::size_t>(step.second)); [[fallthrough]];
        case Kind::jump: open.push_back(at + static_cast<std::size_t>(step.first)); break;
        case Kind::at_begin:
          if (i == 0) open.push_back(at + 1);
          break;
        case Kind::at_end:
          if (i == text.size()) open.push_back(at + 1);
          break;
        case Kind::at_word_edge:
          if (word_edge) open.push_back(at + 1);
          break;
      }
    }
  }

  std::vector<PatternStep> steps_;
};

}  // namespace atlas::lora::inline v0::detail
