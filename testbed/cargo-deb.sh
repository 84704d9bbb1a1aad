#!/usr/bin/env bash
# Prints the folder of cargo-deb, which is built into target/testbed/cargo-deb
# for that, once.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

version=3.8.0
mkdir -p "$out_dir"
# One at a time; a second one waits, then finds all done.
exec 9>"$out_dir/cargo-deb.lock"
flock 9

tool=$out_dir/cargo-deb
want=$(stamp "$0")
if ! is_fresh "$tool/stamp" "$want" "$tool/bin/cargo-deb"; then
  say "building cargo-deb"
  rm -rf -- "$tool"
  # Outside the workspace, whose lock file and profiles are none of its business.
  (cd / && CARGO_TARGET_DIR=$tool/build cargo install --quiet --locked --no-track \
    --version "$version" --root "$tool" cargo-deb) >&2
  rm -rf -- "$tool/build"
  echo "$want" >"$tool/stamp"
fi
echo "$tool/bin"
