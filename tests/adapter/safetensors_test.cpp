// SPDX-License-Identifier: AGPL-3.0-only
#include "atlas/lora/adapter/safetensors.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "adapter_files.hpp"

using namespace atlas::lora;
using namespace atlas::lora::testing;

static_assert(!std::is_copy_constructible_v<SafetensorsFile> &&
              std::is_nothrow_move_constructible_v<SafetensorsFile>);
static_assert(detail::dtype_bits("BF16") == 16 && detail::dtype_bits("F4") == 4 &&
              detail::dtype_bits("f32") == 0);

namespace {

// The fault of a file with this header and so many bytes of data.
std::string fault_of(std::string const& header, std::size_t data_bytes) {
  TemporaryFolder const folder;
  auto const file =
      SafetensorsFile::open(folder.write("t.safetensors", with_header(header, std::string(data_bytes, 'x'))));
  REQUIRE_FALSE(file);
  CHECK(file.error().code == Errc::bad_file);
  CHECK(says(file.error().message, folder.path() + "/t.safetensors: "));
  return file.error().message;
}

std::string entry(std::string const& name, std::string const& dtype, std::string const& shape,
                  std::string const& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         offsets + "]}";
}

}  // namespace

TEST_CASE("tensors are listed by name and read in their own type") {
  TemporaryFolder const folder;
  auto const path = folder.write("t", safetensors({with_values("b", {2}, {1.5F, -2.0F}),
                                                   {"a", {2}, "BF16", std::string("\x80\x3f\x00\xc0", 4)},
                                                   {"ids", {1}, "I32", std::string("\x07\x00\x00\x00", 4)},
                                                   {"empty", {0, 3}, "F16", ""}}));
  auto const file = SafetensorsFile::open(path);
  REQUIRE_MESSAGE(file, (file ? "" : file.error().message));
  CHECK(file->path() == path);
  REQUIRE(file->tensors().size() == 4);
  CHECK(file->tensors()[0].name == "a");
  CHECK(file->tensors()[3].name == "ids");

  auto const b = file->read("b");
  REQUIRE(b);
  CHECK(b->type == ElementType::f32);
  CHECK(b->shape == std::vector<std::int64_t>{2});
  float values[2];
  REQUIRE(b->bytes.size() == sizeof values);
  std::memcpy(values, b->bytes.data(), sizeof values);
  CHECK(values[0] == 1.5F);
  CHECK(values[1] == -2.0F);

  auto const a = file->read("a");
  REQUIRE(a);
  CHECK(a->type == ElementType::bf16);
  CHECK(a->bytes[1] == std::byte{0x3f});
  CHECK(file->read("empty")->bytes.empty());
}

TEST_CASE("a type that operands never have is read raw and refused by name else") {
  TemporaryFolder const folder;
  auto const file = SafetensorsFile::open(
      folder.write("t", safetensors({{"ids", {1}, "I32", std::string("\x07\0\0\0", 4)}})));
  REQUIRE(file);
  auto const raw = file->read_raw("ids");
  REQUIRE(raw);
  CHECK(raw->dtype == "I32");
  CHECK(raw->bytes[0] == std::byte{7});
  auto const tensor = file->read("ids");
  REQUIRE_FALSE(tensor);
  CHECK(tensor.error().code == Errc::unsupported);
  CHECK(says(tensor.error().message, "tensor 'ids' is I32; F32, F16 or BF16 expected"));
  CHECK(file->read("nothing").error().code == Errc::not_found);
  CHECK(says(file->read_raw("nothing").error().message, "no tensor 'nothing'"));
}

TEST_CASE("a file that is not there, no file or too short is refused") {
  TemporaryFolder const folder;
  CHECK(SafetensorsFile::open(folder.path() + "/nothing").error().code == Errc::not_found);
  CHECK(SafetensorsFile::open(folder.path()).error().code == Errc::io);
  CHECK(SafetensorsFile::open("/dev/null").error().code == Errc::io);
  CHECK(says(SafetensorsFile::open(folder.write("e", "")).error().message, "shorter than the 8 bytes"));
  CHECK(
      says(SafetensorsFile::open(folder.write("s", "1234567")).error().message, "shorter than the 8 bytes"));
}

TEST_CASE("a header longer than its file asks for no memory") {
  TemporaryFolder const folder;
  std::string const huge(8, '\xff');
  CHECK(says(SafetensorsFile::open(folder.write("h", huge + "{}")).error().message,
             "header of 18446744073709551615 bytes is larger than the file"));
  std::string const one_more("\x03\0\0\0\0\0\0\0{}", 10);
  CHECK(says(SafetensorsFile::open(folder.write("o", one_more)).error().message,
             "header of 3 bytes is larger"));
}

TEST_CASE("tensors must fill the file without holes and overlaps") {
  std::string const a = entry("a", "F32", "1", "0,4");
  CHECK(says(fault_of("{" + a + "," + entry("b", "F32", "1", "8,12") + "}", 12),
             "tensor 'b': a hole of 4 bytes"));
  CHECK(says(fault_of("{" + a + "," + entry("b", "F32", "1", "2,6") + "}", 6), "tensor 'b': overlaps"));
  CHECK(says(fault_of("{" + a + "," + entry("b", "F32", "1", "0,4") + "}", 4), "tensor 'b': overlaps"));
  CHECK(says(fault_of("{" + a + "}", 5), "1 bytes after the last tensor"));
  CHECK(says(fault_of("{" + a + "}", 3), "tensor 'a': lies beyond the end of the file"));
  CHECK(says(fault_of("{" + entry("a", "F32", "1", "4,0") + "}", 4), "data_offsets go backwards"));
  CHECK(says(fault_of("{" + entry("a", "U8", "1", "18446744073709551614,18446744073709551615") + "}", 4),
             "lies beyond the end"));
  CHECK(says(fault_of("{}", 4), "4 bytes after the last tensor"));
}

TEST_CASE("types and shapes must give the size") {
  CHECK(says(fault_of("{" + entry("a", "F32", "3", "0,4") + "}", 4), "need 12 bytes, data_offsets give 4"));
  CHECK(says(fault_of("{" + entry("a", "F99", "1", "0,4") + "}", 4), "unknown dtype 'F99'"));
  CHECK(says(fault_of("{" + entry("a", "F32", "-1", "0,4") + "}", 4), "field 'a.shape': -1 is negative"));
  CHECK(says(fault_of("{" + entry("a", "F32", "1.0", "0,4") + "}", 4),
             "field 'a.shape': 1.0 is not an integer"));
  CHECK(says(fault_of("{" + entry("a", "F32", "9223372036854775808", "0,4") + "}", 4), "beyond 63 bits"));
  CHECK(says(fault_of("{" + entry("a", "F32", "4294967296,4294967296", "0,4") + "}", 4),
             "shape overflows 64 bits"));
  CHECK(says(fault_of("{" + entry("a", "F4", "3", "0,1") + "}", 1), "need 1 bytes"));  // 12 bits are no bytes
}

TEST_CASE("a header of any other structure is refused with the place") {
  std::string const good = entry("a", "F32", "1", "0,4");
  CHECK(says(fault_of("{" + good + "," + good + "}", 4), "tensor 'a': "));
  CHECK(says(fault_of("[]", 0), "a list is not expected here"));
  CHECK(says(fault_of("{\"a\":1}", 0), "field 'a': a number is not expected here"));
  CHECK(says(fault_of("{\"a\":{}}", 0), "dtype, shape and data_offsets are needed"));
  CHECK(says(fault_of("{\"a\":null}", 0), "null is not expected"));
  CHECK(says(fault_of("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0), "field 'a.dtype': said twice"));
  CHECK(says(fault_of("{\"a\":{\"extra\":1}}", 0), "field 'a.extra': not a part of a tensor"));
  CHECK(says(fault_of("{" + entry("a", "F32", "1", "0,4,8") + "}", 4), "more than two offsets"));
  CHECK(says(fault_of("{" + entry("a", "F32", "1", "0") + "}", 4), "two offsets expected"));
  CHECK(says(fault_of("{\"a\":{\"shape\":[[1]]}}", 4), "a list is not expected here"));
  CHECK(says(fault_of("{\"__metadata__\":{\"a\":1}}", 0), "a number is not expected here"));
  CHECK(says(fault_of("{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}", 0),
             "field '__metadata__.a': said twice"));
  CHECK(says(fault_of("{" + good + "} trailing", 4), "not JSON"));
  CHECK(says(fault_of("", 0), "not JSON"));
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  CHECK(says(fault_of("{" + entry("a", "F32", ones, "0,4") + "}", 4), "too many dimensions"));
}

TEST_CASE("a header padded with spaces is good, as the format's writers make them") {
  TemporaryFolder const folder;
  auto const file = SafetensorsFile::open(
      folder.write("t", with_header("{" + entry("a", "F32", "1", "0,4") + "}      ", "abcd")));
  REQUIRE(file);
  CHECK(file->read_raw("a")->bytes[0] == std::byte{'a'});
}

TEST_CASE("a file cut while it is open gives an error and no signal") {
  TemporaryFolder const folder;
  std::string const path = folder.write("t", safetensors({{"a", {4096}}}));
  auto const file = SafetensorsFile::open(path);
  REQUIRE(file);
  std::error_code none;
  std::filesystem::resize_file(path, 100, none);
  auto const tensor = file->read("a");
  REQUIRE_FALSE(tensor);
  CHECK(tensor.error().code == Errc::io);
  CHECK(says(tensor.error().message, "became shorter"));
}

TEST_CASE("a moved file still reads") {
  TemporaryFolder const folder;
  auto opened = SafetensorsFile::open(folder.write("t", safetensors({{"a", {2}}})));
  REQUIRE(opened);
  SafetensorsFile const moved = std::move(*opened);
  CHECK(moved.read("a").has_value());
}
