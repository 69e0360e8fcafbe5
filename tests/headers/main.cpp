// SPDX-License-Identifier: AGPL-3.0-only
//
// Links every header's own translation unit with two users of the umbrella.
#include <cstdio>
#include <cstring>

#include "atlas/lora.hpp"

char const* version_of_second_user();

int main() {
  std::printf("atlas-lora %s\n", ATLAS_LORA_VERSION_STRING);
  return std::strcmp(version_of_second_user(), ATLAS_LORA_VERSION_STRING);
}
