#!/usr/bin/env bash
# Makes a Debian 12 or 13 machine able to run Larder's tests, benchmarks and demo.
#
# Installs the Debian packages they use, and builds these into target/testbed/:
#
#   vmlinuz         Debian 12's cloud kernel; never installed on the host
#   guest.cpio.gz   a guest that runs /test.sh from RAM, for tests
#   debian12.ext4   a Debian 12 system disk, and boot.cpio.gz which boots it
#   debian13/       a Debian 13 chroot for its QEMU 10 tools: testbed/debian13.sh
#   accel           "kvm" or "tcg": which accelerator boots that guest here
#
# How each is used is said on top of build-guest.sh and debian13.sh. Idempotent,
# and quick when all is there; a part is made again when the script that makes
# it changes. Uses sudo when not root.
#
#   setup.sh                  all of it
#   setup.sh --demo           only what the demo needs
#   setup.sh --demo-packages  of that, only the Debian packages
#   setup.sh --packages       only the Debian packages
#   setup.sh --remove         removes target/testbed/ (parts of it belong to root)
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

packages=(
  build-essential pkg-config ca-certificates               # what Rust needs to link
  qemu-system-x86 qemu-utils nbdkit fio e2fsprogs          # what the demo starts
  python3 iproute2                                         # its steps, and its network
  mmdebstrap debian-archive-keyring busybox-static         # what the guests are made of
  cpio zstd kmod util-linux mount xz-utils procps
)
test_packages=(
  qemu-block-extra libnbd-bin curl                         # servers and clients to compare with
  libvirt-daemon-system libvirt-clients                    # a libvirtd of the tests' own
  gnutls-bin openssl                                       # certificates for TLS tests
  prometheus chromium chromium-driver                      # what looks at larder host
  valgrind strace python3-venv                             # instruction counts, system calls; lint tools
  libisal2                                                 # deflate for migration
  shellcheck socat tmux
)

parts=(guest debian13)
case ${1:-} in
  '' | --packages) packages+=("${test_packages[@]}") ;;
  --demo | --demo-packages) parts=(guest) ;;
  --remove)
    as_root rm -rf --one-file-system -- "$out_dir"
    exit
    ;;
  *)
    echo "usage: $0 [--demo | --demo-packages | --packages | --remove]" >&2
    exit 2
    ;;
esac

case $host_system in
  'debian bookworm' | 'debian trixie') ;;
  *) die "this sets up Debian 12 (bookworm) and Debian 13 (trixie), and this system is '$host_system'. On another one install these, or what they are called there, and run the tests in a Debian (mmdebstrap): ${packages[*]}" ;;
esac
[ "$(uname -m)" = x86_64 ] || die "the tests run on x86_64; this is $(uname -m)"

mkdir -p "$out_dir/log"
# One set-up at a time; a second one waits, then finds all done.
exec 9>"$out_dir/lock"
flock 9

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$out_dir/log/apt" 2>&1 ||
    { tail -n 20 "$out_dir/log/apt" >&2; die "apt-get could not install them"; }
fi

case ${1:-} in --*packages) exit ;; esac

stale=()
for part in "${parts[@]}"; do
  "$testbed_dir/build-$part.sh" --check || stale+=("$part")
done
if [ ${#stale[@]} -gt 0 ] && ! apt-cache show linux-image-cloud-amd64 >/dev/null 2>&1; then
  as_root apt-get update -qq
fi

# Rust is this user's, as a rule: root finds the compiler by its path only.
rustc=
if [ ${#stale[@]} -gt 0 ]; then
  rustc=$(rustc --print sysroot)/bin/rustc || die "there is no rustc: install a Rust toolchain"
fi

# The builds share nothing and mostly unpack: side by side.
declare -A builds=()
for part in "${stale[@]}"; do
  say "building $part (target/testbed/log/$part)"
  as_root env RUSTC="$rustc" "$testbed_dir/build-$part.sh" >"$out_dir/log/$part" 2>&1 9>&- &
  builds[$part]=$!
done
failed=()
for part in "${!builds[@]}"; do
  wait "${builds[$part]}" || failed+=("$part")
done
for part in "${failed[@]}"; do
  tail -n 20 "$out_dir/log/$part" >&2
done
[ ${#failed[@]} -eq 0 ] || die "could not build: ${failed[*]}"

"$testbed_dir/accel.sh" >/dev/null
say "ready"
