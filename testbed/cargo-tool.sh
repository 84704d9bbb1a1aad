#!/usr/bin/env bash
# Prints the folder of a cargo subcommand, which is built into target/testbed/NAME
# for that, once, in the version that is named here.
#
#   cargo-tool.sh cargo-deb         makes the Debian package
#   cargo-tool.sh cargo-cyclonedx   lists the crates of the program (SBOM)
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

name=${1:?usage: cargo-tool.sh NAME}
case $name in
  cargo-deb) version=3.8.0 ;;
  cargo-cyclonedx) version=0.5.9 ;;
  *) die "there is no $name here" ;;
esac
mkdir -p "$out_dir"
# One at a time; a second one waits, then finds all done.
exec 9>"$out_dir/$name.lock"
flock 9

tool=$out_dir/$name
if ! is_fresh "$tool/stamp" "$version" "$tool/bin/$name"; then
  say "building $name"
  rm -rf -- "$tool"
  # Outside the workspace, whose lock file and profiles are none of its business.
  (cd / && CARGO_TARGET_DIR=$tool/build cargo install --quiet --locked --no-track \
    --version "$version" --root "$tool" "$name") >&2
  rm -rf -- "$tool/build"
  echo "$version" >"$tool/stamp"
fi
echo "$tool/bin"
