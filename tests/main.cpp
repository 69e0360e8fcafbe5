// SPDX-License-Identifier: AGPL-3.0-only
//
// The one main of the doctest suites, compiled once; every suite links it.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
