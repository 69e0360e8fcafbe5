#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""What is written by hand agrees with the folders: the lists of headers, tests and examples, the version, the
first line of every source; and every public name of a header says what it is.

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


# A compiler looks for `<format>` beside the program's own source too.
STANDARD_HEADERS = set("""algorithm any array atomic barrier bit bitset charconv chrono codecvt compare complex concepts
    condition_variable coroutine deque exception execution expected filesystem flat_map flat_set format forward_list
    fstream functional future generator initializer_list iomanip ios iosfwd iostream istream iterator latch limits list
    locale map mdspan memory memory_resource mutex new numbers numeric optional ostream print queue random ranges ratio
    regex scoped_allocator semaphore set shared_mutex source_location span spanstream sstream stack stacktrace stdexcept
    stdfloat stop_token streambuf string string_view strstream syncstream system_error thread tuple type_traits typeindex
    typeinfo unordered_map unordered_set utility valarray variant vector version""".split())


def check_names():
    for folder in ("include", "tests", "examples", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.name in STANDARD_HEADERS:
                faults.append(f"{path.relative_to(ROOT)} has the name of a standard header")


def without_template(head):
    """A declaration behind its `template <...>`."""
    while head.startswith("template"):
        depth = 0
        for at, character in enumerate(head):
            depth += (character == "<") - (character == ">")
            if character == ">" and depth == 0:
                break
        head = head[at + 1:].strip()
    return head


def public_declarations(source):
    """Yields (line, head, end) of what a header declares outside of `detail`, of bodies and of what is not
    public; lines count from 0, `end` is `;` or `{`. Comments, strings and the preprocessor's lines are blank."""
    hidden = r"//[^\n]*|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'"
    code = re.sub(hidden, lambda found: re.sub(r"[^\n]", " ", found[0]), source, flags=re.MULTILINE)
    code = re.sub(r"^([ \t]*(?:public|private|protected)):", r"\1@", code, flags=re.MULTILINE)
    scopes = []  # of each open brace: whether a user may name what is declared there
    start, parentheses = None, 0
    for at, character in enumerate(code):
        if start is None and not character.isspace() and character not in ";}":
            start = at
        parentheses += (character == "(") - (character == ")")
        if character == "@":
            scopes[-1] = code[start:at].strip() == "public"
            start = None
        elif character in ";{}" and parentheses == 0:
            head = code[start:at].strip() if start is not None else ""
            if head and all(scopes):
                yield code.count("\n", 0, start), without_template(head), character
            if character == "{":
                scope = re.match(r"(?:inline )?(namespace|struct|union)\b", without_template(head))
                scopes.append(scope is not None and "detail" not in head)
            elif character == "}" and scopes:
                scopes.pop()
            start = None


def check_comments():
    """Every public type, concept, and function whose result matters has a `///` comment before it; of a type, its
    definition."""
    for name in files("include", "*.hpp", "*.cuh"):
        source = text(f"include/{name}")
        lines = source.splitlines()
        for line, head, end in public_declarations(source):
            named = head.startswith(("[[nodiscard]]", "concept ")) or (
                end == "{" and re.match(r"(struct|class|enum|union)\b", head))
            if named and not lines[line - 1].strip().startswith("///"):
                faults.append(f"include/{name}:{line + 1}: no /// comment: {' '.join(head.split())[:80]}")


def top_level(name):
    return "/" not in name


check_listed("include", "include/meson.build", "*.hpp", "*.cuh")
check_listed("tests", "tests/meson.build", "*_test.cpp", "*_test.cu")
check_listed("tests/compile_fail", "tests/compile_fail/meson.build", "*.cpp", "*.cu")
check_listed("examples", "examples/meson.build", "*.cpp", "*.cu", only=top_level)
check_listed("tools", "tools/meson.build", "*.cpp", "*.cu")
check_first_lines()
check_names()
check_version()
check_readme()
check_comments()

print("\n".join(faults) if faults else "the lists agree with the folders")
sys.exit(bool(faults))
