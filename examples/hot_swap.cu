// SPDX-License-Identifier: AGPL-3.0-only
//
// hot_swap.cpp compiled by nvcc: the same program with GPU and CPU. Not tuned for speed.
#include "hot_swap.cpp"
