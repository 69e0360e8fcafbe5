#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""What is written by hand agrees with the folders: the lists of headers, tests and examples, the version, the
first line of every source.

    tree_test.py SOURCE_ROOT VERSION
"""
import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])
VERSION = sys.argv[2]
faults = []


def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


def files(folder, *patterns):
    found = {p for pattern in patterns for p in (ROOT / folder).rglob(pattern)}
    return sorted(p.relative_to(ROOT / folder).as_posix() for p in found)


def check_listed(folder, meson, *patterns, only=lambda name: True):
    """Every matching file below `folder` is named, quoted, in the build file `meson`."""
    listed = set(re.findall(r"'([\w./-]+)'", text(meson)))
    for name in filter(only, files(folder, *patterns)):
        if name not in listed:
            faults.append(f"{folder}/{name} is not listed in {meson}")


def check_first_lines():
    kinds = {".hpp", ".cuh", ".cpp", ".cu", ".py", ".build", ".options", ".in"}
    folders = ["include", "tests", "examples", "tools"]
    sources = [p for folder in folders for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("meson.*"))
    for path in sources:
        script = path.parent.name == "tools" and not path.suffix
        if not path.is_file() or not (script or path.suffix in kinds):
            continue
        head = path.read_text(encoding="utf-8").splitlines()[:2]
        if not any("SPDX-License-Identifier: AGPL-3.0-only" in line for line in head):
            faults.append(f"{path.relative_to(ROOT)}: no SPDX line at the top")


def check_version():
    found = re.search(r'ATLAS_LORA_VERSION_STRING "([^"]+)"', text("include/atlas/lora/config.hpp"))
    if found is None or found.group(1) != VERSION:
        faults.append(f"config.hpp says version {found and found.group(1)}, meson.build says {VERSION}")
    if f"## {VERSION}" not in text("CHANGELOG.md"):
        faults.append(f"CHANGELOG.md has no section for {VERSION}")


def check_readme():
    readme = text("README.md")
    for name in files("examples", "*.cpp", "*.cu"):
        if "/" not in name and f"examples/{name}" not in readme:
            faults.append(f"README.md does not list examples/{name}")


def top_level(name):
    return "/" not in name


check_listed("include", "include/meson.build", "*.hpp", "*.cuh")
check_listed("tests", "tests/meson.build", "*_test.cpp", "*_test.cu")
check_listed("tests/compile_fail", "tests/compile_fail/meson.build", "*.cpp", "*.cu")
check_listed("examples", "examples/meson.build", "*.cpp", "*.cu", only=top_level)
check_listed("tools", "tools/meson.build", "*.cpp", "*.cu")
check_first_lines()
check_version()
check_readme()

print("\n".join(faults) if faults else "the lists agree with the folders")
sys.exit(bool(faults))
