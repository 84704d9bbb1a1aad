#!/usr/bin/env python3
"""Checks the links of all Markdown files: the files and headings that they lead to exist. Links to other hosts are
not followed."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\))?)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$")
ANCHOR = re.compile(r'<a (?:id|name)="([^"]+)">')


def prose(path):
    """Yields the numbered lines of a file outside of code blocks."""
    fence = None
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        mark = re.match(r"^\s*(```+|~~~+)", line)
        if mark and fence is None:
            fence = mark.group(1)
        elif mark and mark.group(1).startswith(fence):
            fence = None
        elif fence is None:
            yield number, line


def anchors(path):
    """Returns the names by which the headings of a file can be linked to."""
    names, uses = set(), {}
    for _, line in prose(path):
        names.update(ANCHOR.findall(line))
        heading = HEADING.match(line)
        if not heading:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1))
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        uses[name] = uses.get(name, -1) + 1
        names.add(f"{name}-{uses[name]}" if uses[name] else name)
    return names


def main():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )
    wrong = []
    for path in (ROOT / name for name in listed.stdout.split("\n") if name):
        for number, line in prose(path):
            for target in LINK.findall(re.sub(r"`[^`]*`", "``", line)):
                if re.match(r"[a-z]+:", target):
                    continue
                file, _, anchor = target.partition("#")
                to = (path.parent / file).resolve() if file else path
                if not to.exists():
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {target}: there is no such file")
                elif anchor and to.suffix == ".md" and anchor not in anchors(to):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {target}: there is no such heading")
    if wrong:
        sys.exit("\n".join(wrong))


main()
