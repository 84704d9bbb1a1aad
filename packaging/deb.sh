#!/usr/bin/env bash
# Builds the Debian package.
#
#   deb.sh [--profile PROFILE] [--version VERSION] [OUTPUT]
#
# PROFILE is a profile of cargo's (release); OUTPUT the file that is made
# (target/larder_VERSION_amd64.deb), whose path is printed.
set -euo pipefail
cd -- "$(dirname -- "$0")/.."

profile=release version='' output=''
while [ $# -gt 0 ]; do
  case $1 in
    --profile) profile=${2:?} && shift 2 ;;
    --version) version=${2:?} && shift 2 ;;
    -*) echo "usage: $0 [--profile PROFILE] [--version VERSION] [OUTPUT]" >&2 && exit 2 ;;
    *) output=$1 && shift ;;
  esac
done
tools=$(testbed/cargo-tool.sh cargo-deb)
version=${version:-$(cargo metadata --format-version 1 --no-deps |
  python3 -c 'import json, sys; print(next(p["version"] for p in json.load(sys.stdin)["packages"] if p["name"] == "larder"))')}
output=${output:-target/larder_${version}_amd64.deb}
# What Cargo.toml's [package.metadata.deb] takes besides what git has.
made=target/deb

cargo build --quiet -p larder --profile "$profile"
rm -rf -- "$made"
cargo run --quiet -p larder --profile "$profile" --example manual -- "$made"
packaging/sbom.sh "$made/larder.cdx.json"
packaging/licences.py | gzip -9n >"$made/licences-of-crates.gz"
date=$(date -R --date="@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}")
gzip -9n >"$made/changelog.gz" <<END
larder ($version) unstable; urgency=medium

  * /usr/share/doc/larder/CHANGELOG.md has the changes.

 -- $(sed -n 's/^maintainer = "\(.*\)"$/\1/p' crates/larder/Cargo.toml)  $date
END
# cargo-deb empties target/debian, where it works.
mkdir -p -- "$(dirname -- "$output")"
"$tools/cargo-deb" deb --quiet -p larder --no-build --profile "$profile" --strip --deb-version "$version" --output "$output" >/dev/null
printf '%s\n' "$output"
