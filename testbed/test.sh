#!/usr/bin/env bash
# test.sh COMMAND...: runs a `cargo test --no-fail-fast`, and prints the names of all
# tests that failed last, after cargo's own closing lines, with the first lines that each
# printed. Ends as cargo does.
#
# A test program that says nothing for 20 minutes hangs: its processes are listed, it is
# ended, and what it was at is named with the tests that failed.
set -euo pipefail

quiet_seconds=1200
log=$(mktemp)
watching=
trap 'rm -f -- "$log"; [ -z "$watching" ] || kill "$watching" 2>/dev/null || true' EXIT

# Test programs are children of cargo, which is a child of this shell.
end_what_hangs() {
  local cargo program
  # The shell that started this may have ended, and what it is piped into waits for the last one who has the pipe.
  while kill -0 $$ 2>/dev/null && sleep 20 <&- >/dev/null 2>&1; do
    [ $(($(date +%s) - $(stat -c %Y -- "$log"))) -ge "$quiet_seconds" ] || continue
    for cargo in $(pgrep -P $$); do
      for program in $(pgrep -P "$cargo" -f '^[^ ]*/deps/[a-z0-9_]+-[0-9a-f]+'); do
        {
          echo "test.sh: nothing was said for $((quiet_seconds / 60)) minutes; what runs:"
          ps -eo pid,ppid,etime,stat,wchan:20,args --forest | cut -c1-200 | grep -v ' \['
        } | tee -a -- "$log" >&2
        kill -ABRT "$program" || true
      done
    done
  done
}
end_what_hangs &
watching=$!

code=0
"$@" 2>&1 | tee -a -- "$log" || code=${PIPESTATUS[0]}
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
  /^test .* has been running for over / { slow[$2] = 1 }
  /^test .* \.\.\. / { delete slow[$2] }
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
    for (test in slow) failed[total++] = program ": " test " (was running)"
    delete slow
  }
  END {
    if (total == 0) { print "\nNo test failed: the cause is above."; exit }
    printf "\n%d failed:\n", total
    for (at = 0; at < total; at++) print "    " failed[at]
  }
' "$log"
exit "$code"
