// SPDX-License-Identifier: AGPL-3.0-only
//
// token_overlay.cpp compiled by nvcc: the same program with GPU and CPU. Not tuned for speed.
#include "token_overlay.cpp"
