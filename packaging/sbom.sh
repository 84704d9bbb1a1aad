#!/usr/bin/env bash
# Writes what the program is made of, as CycloneDX: the software bill of materials
# of the package.
#
#   sbom.sh OUTPUT
set -euo pipefail
output=$(realpath -m -- "${1:?usage: sbom.sh OUTPUT}")
cd -- "$(dirname -- "$0")/.."

tools=$(testbed/cargo-tool.sh cargo-cyclonedx)
# The tool writes a file of this name beside the Cargo.toml of each crate.
name=larder-sbom-$$
remove() { rm -f -- crates/*/"$name".json; }
trap remove EXIT
# The same source makes the same bytes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
"$tools/cargo-cyclonedx" cyclonedx --quiet --format json --spec-version 1.5 \
  --target x86_64-unknown-linux-gnu --override-filename "$name"
mkdir -p -- "$(dirname -- "$output")"
# Where it was built is nobody's concern.
python3 - "crates/larder/$name.json" "$PWD" "$output" <<'END'
import json, sys
made, here, output = sys.argv[1:]
text = open(made).read().replace("path+file://" + here, "path+file:///larder")
bom = json.loads(text)
open(output, "w").write(json.dumps(bom, indent=1) + "\n")
END
packaging/check-sbom.py "$output"
