// SPDX-License-Identifier: AGPL-3.0-only
//
// A second file of the consumer that uses the file readers; both umbrellas in one program.
#include "atlas/lora.hpp"
#include "atlas/peft.hpp"
