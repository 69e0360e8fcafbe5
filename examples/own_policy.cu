// SPDX-License-Identifier: AGPL-3.0-only
//
// own_policy.cpp compiled by nvcc: the same program, and what is the user's own on the GPU. Not tuned for
// speed.
#include "own_policy.cpp"
