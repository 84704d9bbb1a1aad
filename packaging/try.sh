#!/usr/bin/env bash
# Tries the package: installs it in a Debian 12 with a systemd of its own
# (systemd-nspawn), serves a guest's disks, upgrades it while the guest writes
# and verifies, removes it, and looks for what is left behind.
#
#   try.sh [--profile PROFILE] [--old PACKAGE]
#
# PROFILE is of the program: dev, unless it is given. PACKAGE is upgraded, such
# as that of the last release; without it one of this version.
#
# The log is target/package-try/log. Needs root, or sudo, and what
# testbed/setup.sh makes.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/../testbed/lib.sh"

profile=dev old=
while [ $# -gt 0 ]; do
  case $1 in
    --profile) profile=${2:?} && shift 2 ;;
    --old) old=$(realpath -- "${2:?}") && shift 2 ;;
    *) die "usage: $0 [--profile PROFILE] [--old PACKAGE]" ;;
  esac
done
limit_s=300
try=$repo_dir/target/package-try
root=$try/root

[ -f "$out_dir/guest.stamp" ] || die "target/testbed has no guest: run testbed/setup.sh"
as_root "$testbed_dir/build-debian12.sh"
if ! command -v systemd-nspawn >/dev/null; then
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd-container >&2
fi
as_root rm -rf --one-file-system -- "$try"
mkdir -p "$try/share"

"$repo_dir/packaging/deb.sh" --profile "$profile" --version 0.2.0+try1 "$try/share/new.deb" >&2
if [ -n "$old" ]; then
  cp -- "$old" "$try/share/old.deb"
else
  # The same program once more, as an earlier version.
  dpkg-deb --raw-extract "$try/share/new.deb" "$try/old"
  sed -i 's/^Version: .*/Version: 0.1.9/' "$try/old/DEBIAN/control"
  dpkg-deb --root-owner-group -Znone --build "$try/old" "$try/share/old.deb" >/dev/null
fi
"$testbed_dir/with-script.sh" "$out_dir/guest.cpio.gz" "$repo_dir/packaging/try/guest.sh" "$try/share/guest.cpio"
cp -- "$out_dir/vmlinuz" "$repo_dir/packaging/try/inside.sh" "$try/share/"
: >"$try/share/log"
ln -s share/log "$try/log"

as_root cp -a --reflink=auto -- "$out_dir/debian12" "$root"
# Run by systemd, whose exit code is its own.
as_root tee "$root/etc/systemd/system/try.service" >/dev/null <<'END'
[Unit]
After=multi-user.target
[Service]
Type=exec
ExecStart=/bin/bash -c 'exec /bin/bash /try/inside.sh >/try/log 2>&1'
ExecStopPost=/bin/bash -c 'systemctl exit "$EXIT_STATUS"'
END
wants=$root/etc/systemd/system/graphical.target.wants
as_root mkdir -p "$wants"
as_root ln -s ../try.service "$wants/"

options=(--quiet --boot --register=no --private-network --resolv-conf=off --timezone=off --link-journal=no
  --console=pipe --machine=larder-try "--bind=$try/share:/try")
# There is no systemd to ask for a place of its own.
[ -d /run/systemd/system ] || options+=(--keep-unit)

as_root timeout --kill-after=20 "$limit_s" systemd-nspawn "${options[@]}" --directory="$root" \
  </dev/null >"$try/console" 2>&1 &
system=$!
tail --lines=+1 --follow --pid="$system" "$try/log"
code=0
wait "$system" || code=$?
as_root rm -rf --one-file-system -- "$root"
[ "$code" -eq 0 ] || { tail -n 20 "$try/console" >&2; die "the package has failed its trial ($code); target/package-try/log says more"; }
