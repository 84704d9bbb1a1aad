# shellcheck shell=bash
# shellcheck disable=SC2034 # used by those that source it
# What the scripts of the test bed share: where things lie, how a step is
# skipped when its result is still good, and how to be root. Sourced, not run.

testbed_dir=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
repo_dir=$(dirname -- "$testbed_dir")
# Beside the build, never inside a redirected CARGO_TARGET_DIR: the tests look here.
out_dir=$repo_dir/target/testbed
# Such as "debian bookworm" (os-release(5)).
# shellcheck source=/dev/null
host_system=$(. /etc/os-release 2>/dev/null; printf '%s %s' "${ID:-unknown}" "${VERSION_CODENAME:-}")
# The guests' Debian is the host's, whose apt has it.
guest_suite=${host_system#debian }
client_suite=trixie

say() { printf 'testbed: %s\n' "$*" >&2; }
die() {
  printf 'testbed: error: %s\n' "$*" >&2
  exit 1
}

# as_root COMMAND...: runs it as root, by sudo where needed.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo -- "$@"
  else
    die "this needs root: run it as root, or install sudo ($*)"
  fi
}

# stamp FILE...: a digest of the files that an artefact is made from.
stamp() { cat -- "$@" | sha256sum | cut -d' ' -f1; }

# is_fresh STAMP_FILE STAMP ARTEFACT...: true when all of them exist and were made from STAMP.
is_fresh() {
  local file=$1 want=$2 artefact
  shift 2
  [ -f "$file" ] && [ "$(cat -- "$file")" = "$want" ] || return 1
  for artefact; do
    [ -e "$artefact" ] || return 1
  done
}

# debian_mirror: the mirror that this host's apt takes its own release from, so
# that a machine with a private mirror needs no other one.
debian_mirror() {
  local uri
  # shellcheck disable=SC2016 # apt's own variables
  uri=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Identifier: Packages' |
    awk -v suite="$guest_suite" '$1 == suite && $2 ~ /^https?:/ && !n++ { print $2 }')
  printf '%s\n' "${uri:-http://deb.debian.org/debian}"
}

# debian_root SUITE DIR PACKAGE,...: a minimal Debian in DIR, from the host's mirror. Needs root.
debian_root() {
  local suite=$1 dir=$2 packages=$3 proxy
  local -a options=()
  for scheme in http https; do
    eval "$(apt-config shell proxy "Acquire::$scheme::Proxy")"
    [ -z "${proxy:-}" ] || options+=("--aptopt=Acquire::$scheme::Proxy \"$proxy\"")
    unset proxy
  done
  # No documentation, no translations: a third of the bytes to unpack.
  mmdebstrap --mode=root --variant=minbase --components=main --format=directory \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt=force-unsafe-io \
    "${options[@]}" --include="$packages" "$suite" "$dir" "$(debian_mirror)"
}
