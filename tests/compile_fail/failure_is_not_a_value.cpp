// SPDX-License-Identifier: AGPL-3.0-only
//
// A failed outcome of one type must not become the value of another.
// EXPECT: could not convert
#include "atlas/lora/status.hpp"

atlas::lora::Result<bool> forwarded(atlas::lora::Result<void> const& outcome) { return outcome; }
