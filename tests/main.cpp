// SPDX-License-Identifier: AGPL-3.0-only
//
// The one main of the host suites, compiled once; every suite links it.
#include "suite.hpp"

int main(int argc, char** argv) { return atlas_test::run_suite(argc, argv); }
