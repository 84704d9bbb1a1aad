#!/usr/bin/env python3
"""Prints the licences of the crates that the program is made of: each text once, below the crates that have it.

Part of the package: most of these licences want their notice in whatever is made of the crate.
"""
import json
import pathlib
import subprocess


def crates_of_program():
    """The packages of cargo metadata that are linked into the program, by name and version."""
    metadata = json.loads(subprocess.check_output(
        ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]))
    packages = {package["id"]: package for package in metadata["packages"]}
    needs = {
        node["id"]: [it["pkg"] for it in node["deps"] if any(kind["kind"] is None for kind in it["dep_kinds"])]
        for node in metadata["resolve"]["nodes"]
    }
    found, to_do = set(), [id for id, package in packages.items() if package["name"] == "larder"]
    while to_do:
        id = to_do.pop()
        if id not in found:
            found.add(id)
            to_do += needs[id]
    return sorted((packages[id] for id in found), key=lambda it: (it["name"], it["version"]))


def main():
    texts = {}
    for package in crates_of_program():
        # One of the workspace has no source.
        if package["source"] is None:
            continue
        title = f"{package['name']} {package['version']}, {package['license']}"
        folder = pathlib.Path(package["manifest_path"]).parent
        files = sorted(
            file for word in ("LICEN[CS]E*", "COPYING*", "COPYRIGHT*", "NOTICE*") for file in folder.glob(word))
        files = [file for file in files if file.is_file()]
        for text in sorted({file.read_text(errors="replace").strip() for file in files}) or [""]:
            texts.setdefault(text, []).append(title)
    for text, titles in sorted(texts.items(), key=lambda it: it[1]):
        print("\n".join(titles), text or "(no text comes with them)", "-" * 72, sep="\n\n")


if __name__ == "__main__":
    main()
