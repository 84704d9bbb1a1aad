#!/usr/bin/env python3
"""Checks a software bill of materials: that it is CycloneDX, and names all crates of the program with their versions.

    check-sbom.py FILE
"""
import json
import sys

sys.dont_write_bytecode = True
from licences import crates_of_program  # noqa: E402

path = sys.argv[1]
with open(path, encoding="utf-8") as file:
    bom = json.load(file)
problems = []
if bom.get("bomFormat") != "CycloneDX":
    problems.append("it is no CycloneDX document")
found = {(it["name"], it["version"]) for it in [bom["metadata"]["component"], *bom["components"]]}
for package in crates_of_program():
    if (package["name"], package["version"]) not in found:
        problems.append(f"{package['name']} {package['version']} is missing")
for component in bom["components"]:
    # A crate of the workspace is in no registry, and has no checksum there.
    if component["purl"].startswith("pkg:cargo/") and "download_url=" not in component["purl"] and not component.get("hashes"):
        problems.append(f"{component['name']} {component['version']} has no checksum")
for problem in problems:
    print(f"{path}: {problem}", file=sys.stderr)
sys.exit(1 if problems else 0)
