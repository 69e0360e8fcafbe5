// SPDX-License-Identifier: AGPL-3.0-only
//
// mixed_batch.cpp compiled by nvcc: the same program with GPU and CPU. Not tuned for speed.
#include "mixed_batch.cpp"
