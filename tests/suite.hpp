// SPDX-License-Identifier: AGPL-3.0-only
//
// What the mains of the suites share. Only they include it: it holds doctest's implementation.
#pragma once

#define DOCTEST_CONFIG_IMPLEMENT
#include <cstdio>

#include <doctest/doctest.h>

namespace atlas_test {

/// Counts the cases that a run's filters let through.
struct CaseCounter : doctest::IReporter {
  static inline unsigned cases = 0;

  explicit CaseCounter(doctest::ContextOptions const&) {}
  void test_run_end(doctest::TestRunStats const& stats) override { cases = stats.numTestCasesPassingFilters; }

  void report_query(doctest::QueryData const&) override {}
  void test_run_start() override {}
  void test_case_start(doctest::TestCaseData const&) override {}
  void test_case_reenter(doctest::TestCaseData const&) override {}
  void test_case_end(doctest::CurrentTestCaseStats const&) override {}
  void test_case_exception(doctest::TestCaseException const&) override {}
  void subcase_start(doctest::SubcaseSignature const&) override {}
  void subcase_end() override {}
  void log_assert(doctest::AssertData const&) override {}
  void log_message(doctest::MessageData const&) override {}
  void test_case_skipped(doctest::TestCaseData const&) override {}
};
REGISTER_LISTENER("cases", 1, CaseCounter);

/// Runs the suite as its arguments say; its exit status, 1 also when they leave no case to run.
inline int run_suite(int argc, char** argv) {
  int const status = doctest::Context(argc, argv).run();
  if (CaseCounter::cases != 0) return status;
  std::printf("no test case matches\n");
  return 1;
}

}  // namespace atlas_test
