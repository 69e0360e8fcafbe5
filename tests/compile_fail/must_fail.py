#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""Demands that a file does not compile, and that the compiler says why: each `// EXPECT: text` line of the
file must be found in what it prints.

    must_fail.py FILE COMPILER [ARGUMENT ...]
"""
import os
import re
import subprocess
import sys

source, command = sys.argv[1], sys.argv[2:]
with open(source, encoding="utf-8") as file:
    expected = re.findall(r"// EXPECT: (.+)", file.read())
if not expected:
    sys.exit(f"{source} has no '// EXPECT: text' line")

outcome = subprocess.run(
    [*command, "-c", "-o", os.devnull, source],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
if outcome.returncode == 0:
    sys.exit(f"{source} compiles")
missing = [words for words in expected if words not in outcome.stdout]
if missing:
    sys.exit(f"{source} fails without saying {missing}:\n{outcome.stdout}")
