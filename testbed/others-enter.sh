#!/usr/bin/env bash
# others-enter.sh: fails, saying what to do, if other users cannot enter the
# project's folder. Tests that run programs as another user need that.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

[ "$(id -u)" -eq 0 ] || exit 0
cd /
setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all -- /usr/bin/test -x "$repo_dir" ||
  die "some tests run programs as another user, who cannot enter $repo_dir: move the project, to /srv for instance, or let others pass through the folders above it (chmod o+x)"
