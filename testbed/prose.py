#!/usr/bin/env python3
"""Counts wording that hides its meaning in comments, long test names, files and functions.

usage: prose.py [--update] [--list NAME]

The counts of each crate are compared with those in testbed/prose.json, which may only fall: a higher one is an
error, with the lines that it comes from. --update writes the counts where they have fallen. --list prints all
lines that count for NAME, such as "relative".

The expressions find typical signs, not all of them. A comment that avoids them and is still unclear is not better.
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "testbed" / "prose.json"

SIGNS = {
    # A clause where a noun belongs: "what is hot" for "hot pages".
    "relative": r"\b[Ww]hat (?:is|are|was|were|has|have|had|it|they|he|we|you|the|a|an|its|of|must|may|can|could|would"
    r"|will|does|do|did|comes?|goes|went|came|nobody|others?|no|else)\b",
    # Programs that hear and tell.
    "told": r"\b(?:(?:is|are|was|were|be|been|not) told|tells?|says? so|said so|hears?|heard)\b",
    # Programs as persons.
    "person": r"\b(?:Whoever|whoever|[Ss]omebody|[Nn]obody|[Hh]e|[Hh]im|[Hh]is|who)\b",
    # Belief for trust, and leaving for eviction.
    "belief": r"(?i)\b(?:believe[sd]?|belief|doubt(?:s|ed)?|settle[sd]?|settling|forsaken|homeless|berth|lent)\b",
    # "Goes on" for "continues".
    "going": r"\b(?:(?:goes|go|went) on|(?:has|have|is|are) gone|comes? (?:back|in|of|to|again)"
    r"|stays? (?:as|so|there|where))\b",
    # A sentence that begins with what its subject is part of.
    "fronted": r"(?:^|[.;:] )(?:Of|That of|Those of|Likewise|Which|Also if|As it|So that it)\b",
}
SIGNS = {name: re.compile(expression) for name, expression in SIGNS.items()}
# A documentation comment that does not begin with its subject.
OPENER = re.compile(
    r"^(?:What|Who|Whoever|Whether|Those|Where|Which|Of|That of|Likewise|So|Why|How|How many)\b"
)
COMMENT = re.compile(r"^\s*//[/!]?\s?(.*)$")
FUNCTION = re.compile(r'^(\s*)(?:pub(?:\([^)]*\))? )?(?:const )?(?:async )?(?:unsafe )?(?:extern "C" )?fn (\w+)')
TEST = re.compile(r"^\s*#\[(?:\w+::)?test\b")

NAME_CHARACTERS = 60
FILE_LINES = 600
FUNCTION_LINES = 80


def findings(path):
    """Yields a name, line number and text for each finding in a Rust file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if len(lines) > FILE_LINES:
        yield "long files", 1, f"{len(lines)} lines"
    follows_documentation = is_test = False
    open_function = None
    for number, line in enumerate(lines, 1):
        comment = COMMENT.match(line)
        if comment:
            text = comment.group(1)
            for name, expression in SIGNS.items():
                for _ in expression.finditer(text):
                    yield name, number, text
            is_documentation = line.lstrip().startswith("///")
            if is_documentation and not follows_documentation and OPENER.match(text):
                yield "openers", number, text
            follows_documentation = is_documentation
            continue
        follows_documentation = False
        is_test = is_test or bool(TEST.match(line))
        function = FUNCTION.match(line)
        if function:
            if is_test and len(function.group(2)) > NAME_CHARACTERS:
                yield "long test names", number, function.group(2)
            is_test = False
            is_whole = line.rstrip().endswith((";", "}"))
            open_function = None if is_whole else (function.group(1) + "}", number, function.group(2))
        elif open_function and line == open_function[0]:
            length = number - open_function[1]
            if length > FUNCTION_LINES:
                yield "long functions", open_function[1], f"{open_function[2]}: {length} lines"
            open_function = None


def main():
    listed = sys.argv[2] if sys.argv[1:2] == ["--list"] and len(sys.argv) == 3 else None
    is_update = sys.argv[1:] == ["--update"]
    if sys.argv[1:] and not listed and not is_update:
        sys.exit(__doc__)
    counts, places = {}, {}
    for crate in sorted((ROOT / "crates").iterdir()):
        for path in sorted(crate.rglob("*.rs")):
            for name, number, text in findings(path):
                of_crate = counts.setdefault(crate.name, {})
                of_crate[name] = of_crate.get(name, 0) + 1
                place = f"{path.relative_to(ROOT)}:{number}: {text}"
                places.setdefault((crate.name, name), []).append(place)
                if name == listed:
                    print(place)
    if listed:
        return
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else None
    risen = []
    for crate, of_crate in counts.items():
        for name, count in of_crate.items():
            most = count if committed is None else committed.get(crate, {}).get(name, 0)
            if count > most:
                risen.append((crate, name, count, most))
    for crate, name, count, most in risen:
        print(f"{crate}: {name}: {count}, at most {most} (testbed/prose.json):", file=sys.stderr)
        for place in places[crate, name]:
            print(f"  {place}", file=sys.stderr)
    if risen:
        sys.exit("say these in plain words, or cut what is long; the figures may only fall")
    if is_update:
        COMMITTED.write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")
    elif counts != committed:
        print("fewer than testbed/prose.json allows: testbed/prose.py --update lowers its figures")


main()
