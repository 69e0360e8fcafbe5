// SPDX-License-Identifier: AGPL-3.0-only
//
// What can go wrong, and how it is said. Nothing in the library throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <cuda/std/expected>

#include "atlas/lora/config.hpp"

namespace atlas::lora::inline v0 {

/// What kind of thing went wrong. `Error::message` says which file, tensor, field or slot.
enum class Errc : std::uint8_t {
  ok = 0,
  invalid_argument,  ///< a caller's value that no state of the library could accept
  not_found,         ///< a file, name, layer or module that is not there
  io,                ///< the operating system refused a read
  bad_file,          ///< a file that breaks its format (truncated, malformed header, bad JSON)
  bad_config,      ///< an adapter_config.json or config.json field that is absent, ill-typed or out of range
  unsupported,     ///< well-formed, and refused by name: DoRA, aLoRA, an unknown tensor, ...
  shape_mismatch,  ///< a tensor whose shape does not fit the model or its partner
  unmatched,       ///< a key without a module, a target without a tensor, an A without a B
  out_of_range,    ///< a number that does not fit: NaN or infinity, overflow on conversion, an id beyond its
                   ///< count
  rank_exceeds_pool,    ///< an adapter's rank is larger than the pool's max_rank
  pool_full,            ///< retryable: every slot that could be taken is leased
  spare_busy,           ///< retryable: no spare physical slot is free until earlier work is done
  expert_memory_busy,   ///< retryable: expert memory is held by leased slots
  overlay_memory_busy,  ///< retryable: memory of token overlays is held by leased slots
  slot_busy,            ///< retryable: the slot has leases
  stale,                ///< a key {slot, tenancy} whose tenant has gone
  out_of_memory,        ///< host or device memory could not be had, or can never suffice
  device,               ///< a device call failed; the message carries its name and code
  capturing,            ///< not allowed while the stream is being captured
  cancelled,            ///< the caller's own stop token said so
};

/// The code's own spelling, for logs: `"bad_config"`. Never null.
[[nodiscard]] constexpr char const* to_string(Errc code) noexcept {
  switch (code) {
    case Errc::ok: return "ok";
    case Errc::invalid_argument: return "invalid_argument";
    case Errc::not_found: return "not_found";
    case Errc::io: return "io";
    case Errc::bad_file: return "bad_file";
    case Errc::bad_config: return "bad_config";
    case Errc::unsupported: return "unsupported";
    case Errc::shape_mismatch: return "shape_mismatch";
    case Errc::unmatched: return "unmatched";
    case Errc::out_of_range: return "out_of_range";
    case Errc::rank_exceeds_pool: return "rank_exceeds_pool";
    case Errc::pool_full: return "pool_full";
    case Errc::spare_busy: return "spare_busy";
    case Errc::expert_memory_busy: return "expert_memory_busy";
    case Errc::overlay_memory_busy: return "overlay_memory_busy";
    case Errc::slot_busy: return "slot_busy";
    case Errc::stale: return "stale";
    case Errc::out_of_memory: return "out_of_memory";
    case Errc::device: return "device";
    case Errc::capturing: return "capturing";
    case Errc::cancelled: return "cancelled";
  }
  return "unknown";
}

/// Whether the same call may succeed later without any change by the caller.
[[nodiscard]] constexpr bool retryable(Errc code) noexcept {
  return code == Errc::pool_full || code == Errc::spare_busy || code == Errc::expert_memory_busy ||
         code == Errc::overlay_memory_busy || code == Errc::slot_busy;
}

/// An error with its words. `message` names the file, tensor, field or slot at fault; several faults of
/// one adapter are joined, one a line.
struct Error {
  Errc code = Errc::ok;  ///< what kind of thing
  std::string message;   ///< one fault a line, without a newline at the end

  // The special members are defaulted outside the class, so that nvcc takes them for host functions and not
  // for host and device ones, which may not call std::string's.
  Error() noexcept;
  Error(Errc the_code, std::string the_message) noexcept : code(the_code), message(std::move(the_message)) {}
  Error(Error const&);
  Error(Error&&) noexcept;
  Error& operator=(Error const&);
  Error& operator=(Error&&) noexcept;
  ~Error();

  friend bool operator==(Error const&, Error const&) = default;
};

inline Error::Error() noexcept = default;
inline Error::Error(Error const&) = default;
inline Error::Error(Error&&) noexcept = default;
inline Error& Error::operator=(Error const&) = default;
inline Error& Error::operator=(Error&&) noexcept = default;
inline Error::~Error() = default;

/// The outcome of a fallible host function: its value, or what went wrong. The part of `std::expected` that
/// the library needs, with its meanings: `*`, `->` and `error()` are for the outcome that there is, which the
/// caller has asked for (`ATLAS_ASSERT`). Not CCCL's, whose members are for host and device, so that nvcc
/// warns about every value that owns memory.
template <class T>
class Result {
 public:
  using value_type = T;
  using error_type = Error;

  /// A value of its own default.
  Result() requires std::is_default_constructible_v<T> : has_value_(true), value_() {}
  /// The outcome that is a value.
  template <class U = T>
  requires std::is_convertible_v<U, T> &&(!std::is_same_v<std::remove_cvref_t<U>, Result>)&&(
      !std::is_same_v<std::remove_cvref_t<U>, cuda::std::unexpected<Error>>)Result(U&& value)
      : has_value_(true), value_(std::forward<U>(value)) {}
  /// The outcome that is an error: what `fail` makes.
  Result(cuda::std::unexpected<Error> error) : has_value_(false), error_(std::move(error).error()) {}
  Result(Result const& other) requires std::is_copy_constructible_v<T> { take(other); }
  Result(Result&& other) noexcept(std::is_nothrow_move_constructible_v<T>) { take(std::move(other)); }
  Result& operator=(Result const& other) requires std::is_copy_constructible_v<T> {
    return *this = Result(other);
  }
  Result& operator=(Result&& other) noexcept(std::is_nothrow_move_constructible_v<T>) {
    if (this == &other) return *this;
    drop();
    take(std::move(other));
    return *this;
  }
  ~Result() { drop(); }

  /// Whether there is a value, and no error.
  [[nodiscard]] bool has_value() const noexcept { return has_value_; }
  /// The same, for `if`.
  [[nodiscard]] explicit operator bool() const noexcept { return has_value_; }
  /// The value; there must be one.
  [[nodiscard]] T& operator*() & noexcept { return value(); }
  /// The value; there must be one.
  [[nodiscard]] T const& operator*() const& noexcept { return value(); }
  /// The value; there must be one.
  [[nodiscard]] T&& operator*() && noexcept { return std::move(value()); }
  /// A member of the value; there must be one.
  [[nodiscard]] T* operator->() noexcept { return std::addressof(value()); }
  /// A member of the value; there must be one.
  [[nodiscard]] T const* operator->() const noexcept { return std::addressof(value()); }
  /// The error; there must be one.
  [[nodiscard]] Error& error() & noexcept { return fault(); }
  /// The error; there must be one.
  [[nodiscard]] Error const& error() const& noexcept { return fault(); }
  /// The error; there must be one.
  [[nodiscard]] Error&& error() && noexcept { return std::move(fault()); }

 private:
  [[nodiscard]] T& value() noexcept {
    ATLAS_ASSERT(has_value_, "the value of a Result that failed");
    return value_;
  }
  [[nodiscard]] T const& value() const noexcept { return const_cast<Result&>(*this).value(); }
  [[nodiscard]] Error& fault() noexcept {
    ATLAS_ASSERT(!has_value_, "the error of a Result that succeeded");
    return error_;
  }
  [[nodiscard]] Error const& fault() const noexcept { return const_cast<Result&>(*this).fault(); }

  // Of which there is none yet, or no longer, `other`'s.
  template <class Other>
  void take(Other&& other) {
    has_value_ = other.has_value_;
    if (has_value_) {
      std::construct_at(std::addressof(value_), std::forward<Other>(other).value_);
    } else {
      std::construct_at(std::addressof(error_), std::forward<Other>(other).error_);
    }
  }
  void drop() noexcept {
    if (has_value_) {
      std::destroy_at(std::addressof(value_));
    } else {
      std::destroy_at(std::addressof(error_));
    }
  }

  // By hand: std::variant would instantiate its machinery anew for every T, in every unit.
  bool has_value_;
  union {
    T value_;
    Error error_;
  };
};

/// Success has no value of its own.
template <>
class Result<void> {
 public:
  using value_type = void;
  using error_type = Error;

  /// Success.
  Result() = default;
  /// The outcome that is an error: what `fail` makes.
  Result(cuda::std::unexpected<Error> error) : error_(std::move(error).error()) {}

  /// Whether there is no error.
  [[nodiscard]] bool has_value() const noexcept { return !error_.has_value(); }
  /// The same, for `if`.
  [[nodiscard]] explicit operator bool() const noexcept { return has_value(); }
  /// The error; there must be one.
  [[nodiscard]] Error& error() & noexcept { return *error_; }
  /// The error; there must be one.
  [[nodiscard]] Error const& error() const& noexcept { return *error_; }
  /// The error; there must be one.
  [[nodiscard]] Error&& error() && noexcept { return std::move(*error_); }

 private:
  std::optional<Error> error_;
};

/// Makes the failing outcome of any `Result<T>`.
[[nodiscard]] inline cuda::std::unexpected<Error> fail(Errc code, std::string message) {
  return cuda::std::unexpected<Error>(Error{code, std::move(message)});
}

namespace detail {

/// A name from a file as a message may show it: on one line, and not endless.
[[nodiscard]] inline std::string printable(std::string_view text) {
  constexpr std::size_t longest = 240;
  std::string out(text.substr(0, longest));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text.size() > longest ? out + "..." : out;
}

}  // namespace detail

}  // namespace atlas::lora::inline v0
