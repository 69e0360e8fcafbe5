// SPDX-License-Identifier: AGPL-3.0-only
//
// A second user of everything: a function that is not inline is a duplicate symbol when this is linked.
#include "atlas/lora.hpp"

char const* version_of_second_user() { return ATLAS_LORA_VERSION_STRING; }
