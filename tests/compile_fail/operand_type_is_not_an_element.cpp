// SPDX-License-Identifier: AGPL-3.0-only
//
// An operand has one of the three element types.
// EXPECT: constraints not satisfied
// EXPECT: Element
#include "atlas/lora/pool/pair.hpp"

atlas::lora::LoraPair<int> pair;
