#!/usr/bin/env bash
# test.sh COMMAND...: runs a `cargo test --no-fail-fast`, and prints the names of all
# tests that failed last, after cargo's own closing lines, with the first lines that each
# printed. Ends as cargo does.
set -euo pipefail

log=$(mktemp)
trap 'rm -f -- "$log"' EXIT
code=0
"$@" 2>&1 | tee -- "$log" || code=${PIPESTATUS[0]}
[ "$code" -ne 0 ] || exit 0

# A test program lists what failed after a line "failures:", four blanks before each
# name, after the output of these tests. One that was killed lists nothing.
awk '
  { gsub(/\033\[[0-9;]*m/, "") }
  /^ +Running .*\(.*\)$/ {
    name = $0; sub(/^.*\//, "", name); sub(/-[0-9a-f]+\)$/, "", name)
    program = $0; sub(/^ +Running /, "", program); sub(/ \([^(]*\)$/, "", program)
    program = name " (" program ")"
  }
  /^ +Doc-tests / { program = $2 " (documentation)" }
  /^---- .* stdout ----$/ { said_by = $2; lines = 0; next }
  /^failures:$/ { lists = 1; count = 0; said_by = ""; next }
  /^stack backtrace:$/ { said_by = "" }
  said_by && !/^$/ && lines < 6 { said[said_by] = said[said_by] "\n        " substr($0, 1, 300); lines++ }
  lists && /^    [^ ]/ { names[count++] = substr($0, 5); next }
  lists && /^test result: FAILED/ {
    for (at = 0; at < count; at++) {
      failed[total++] = program ": " names[at] said[names[at]]
      delete said[names[at]]
    }
  }
  lists && !/^$/ { lists = 0 }
  /process didn.t exit successfully: .*\(signal: / {
    why = $0; sub(/^.*\(signal: /, "signal ", why); sub(/\).*$/, "", why)
    failed[total++] = program ": ended by " why
  }
  END {
    if (total == 0) { print "\nNo test failed: the cause is above."; exit }
    printf "\n%d failed:\n", total
    for (at = 0; at < total; at++) print "    " failed[at]
  }
' "$log"
exit "$code"
