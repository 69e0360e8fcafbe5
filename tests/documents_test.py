#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""The C++ that the documents show compiles: every ```cpp block of README.md and docs/ is a source of its own.

    documents_test.py SOURCE_ROOT COMPILER [ARGUMENT ...]
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

root, command = Path(sys.argv[1]), sys.argv[2:]
blocks = [(document.name, code)
          for document in [root / "README.md", *sorted((root / "docs").glob("*.md"))]
          for code in re.findall(r"^```cpp\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)]
if not blocks:
    sys.exit("no document shows any C++")

failed = False
with tempfile.TemporaryDirectory() as folder:
    for number, (document, code) in enumerate(blocks):
        source = Path(folder) / f"{number}.cu"
        source.write_text(code, encoding="utf-8")
        outcome = subprocess.run([*command, "-c", "-o", os.devnull, str(source)], stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{document}: {'compiles' if outcome.returncode == 0 else outcome.stdout[:4000]}")
        failed |= outcome.returncode != 0
sys.exit(failed)
