// SPDX-License-Identifier: AGPL-3.0-only
//
// What can fail must be looked at.
// EXPECT: ignoring return value
// EXPECT: ModelShape::create
#include "atlas/lora/model/model_shape.hpp"

void ignore() { atlas::lora::ModelShape::create({}); }
