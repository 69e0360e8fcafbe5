// SPDX-License-Identifier: AGPL-3.0-only
//
// The file readers: PEFT adapters, safetensors, config.json. They need nlohmann_json and xxhash; nothing else
// of the library does.
#pragma once

#include "atlas/lora/adapter/load.hpp"
#include "atlas/lora/adapter/model_config.hpp"
#include "atlas/lora/adapter/peft_config.hpp"
#include "atlas/lora/adapter/safetensors.hpp"
