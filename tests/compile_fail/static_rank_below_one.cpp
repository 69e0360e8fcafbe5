// SPDX-License-Identifier: AGPL-3.0-only
//
// A rank in the type is a rank: base is no pair at all.
// EXPECT: a static rank is at least 1
#include "atlas/lora/pool/pair.hpp"

atlas::lora::LoraPair<float, 0> pair;
