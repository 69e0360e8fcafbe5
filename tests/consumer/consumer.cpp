// SPDX-License-Identifier: AGPL-3.0-only
//
// What an engine's first file looks like; each of the three consumer projects builds it and runs it.
#include <cstdio>

#include "atlas/lora.hpp"

int main() {
  auto const shape = atlas::lora::ModelShape::create({.num_layers = 0});
  bool const refused = !shape && shape.error().code == atlas::lora::Errc::invalid_argument;
  std::printf("atlas-lora %s\n", ATLAS_LORA_VERSION_STRING);
  return refused ? 0 : 1;
}
