// SPDX-License-Identifier: AGPL-3.0-only
//
// Links every device header's own translation unit with one more user of the umbrella. Needs no device.
#include <cstdio>

#include "atlas/lora.hpp"

int main() {
  std::printf("atlas-lora %s\n", ATLAS_LORA_VERSION_STRING);
  return 0;
}
