#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""Writes one translation unit of several tests, which then parse and instantiate what they share once: first every
header that one of them includes, so that including it again does nothing, then each test, in a namespace of its own
where it names none itself.

    join.py OUTPUT FOLDER TEST ...      the tests relative to FOLDER, which the compiler has as an include folder
"""
import re
import sys
from pathlib import Path

output, folder, tests = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
headers, bodies = {}, []
for test in tests:
    text = (folder / test).read_text(encoding="utf-8")
    for header in re.findall(r"^#include (\S+)", text, re.MULTILINE):
        beside = Path(test).parent / header.strip('"')
        headers[f'"{beside}"' if (folder / beside).is_file() else header] = None
    body = f'#include "{test}"'
    if not re.search(r"^namespace \w", text, re.MULTILINE):
        body = f"namespace {re.sub('[^a-z0-9]', '_', test)} {{\n{body}\n}}"
    bodies.append(body)
output.write_text("\n".join([*(f"#include {header}" for header in headers), *bodies, ""]), encoding="utf-8")
