#!/usr/bin/env bash
# Builds the two guests that the tests and the demo boot, and their kernel.
#
#   vmlinuz        Debian 12's cloud kernel, taken out of its package.
#   guest.cpio.gz  An initramfs that is a whole guest: busybox, fio, blkdiscard,
#                  lsblk, mkfs.ext4, e2fsck, guest-load, memcached, memcached-load.
#                  Virtio disks are /dev/vda, vdb, ...
#   debian12.ext4  A Debian 12 root file system with systemd, fio, the loads and
#                  memcached, not started (2 GiB, sparse).
#   boot.cpio.gz   An initramfs that boots it: mounts root= (default /dev/vda)
#                  and starts systemd up to multi-user.target.
#
# guest-load changes its memory and checks it: guest/load.rs. memcached-load does so
# with a memcached that runs beside it: guest/memcached-load.rs.
#
# Both initramfs run a script handed to them: append an uncompressed newc cpio
# that holds the file /test.sh (concatenated archives are one initramfs; both
# files are padded so that it may follow directly). testbed/with-script.sh does
# so. The script's output goes to the serial console, newlines as they are;
# then comes a line `LARDER-GUEST-EXIT n` with its exit code, and the guest
# powers off, which ends QEMU. The Debian guest prints `LARDER-GUEST-BOOTED`
# before the script runs.
#
#   testbed/with-script.sh target/testbed/guest.cpio.gz my-test.sh my.cpio
#   qemu-system-x86_64 -accel tcg -m 512 -nodefaults -display none -serial stdio \
#     -no-reboot -kernel target/testbed/vmlinuz -initrd my.cpio \
#     -append 'console=ttyS0 quiet panic=-1' -drive file=disk.raw,if=virtio,format=raw
#
# --check only tells, by exit code, whether they are there and up to date.
# Needs root, and rustc: $RUSTC, if root does not find it. The root file system is
# mmdebstrap's, which makes what debootstrap would, four times faster.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

want=$(stamp "$testbed_dir/lib.sh" "$0" "$testbed_dir"/guest/*)
artefacts=(vmlinuz guest.cpio.gz boot.cpio.gz debian12.ext4)
if is_fresh "$out_dir/guest.stamp" "$want" "${artefacts[@]/#/$out_dir/}"; then exit 0; fi
[ "${1:-}" != --check ] || exit 1
[ "$(id -u)" -eq 0 ] || die "making a root file system needs root"
command -v "${RUSTC:-rustc}" >/dev/null || die "there is no rustc: it compiles guest/*.rs"

# Virtio as a module each, and what they need; ext4 is built in.
modules=(virtio_pci virtio_blk virtio_scsi virtio_balloon virtio_mem virtio_console virtio_rng qemu_fw_cfg)
programs=(dash fio lsblk blkdiscard blockdev fallocate mkfs.ext4 e2fsck guest-load memcached memcached-load)

# What an interrupted build left; setup.sh lets only one run at a time.
rm -rf --one-file-system -- "$out_dir"/guest.??????
work=$(mktemp -d "$out_dir/guest.XXXXXX")
trap 'rm -rf --one-file-system -- "$work"' EXIT
chmod 755 "$work"
root=$work/root

# download PACKAGE DIR: as Debian has it today.
download() {
  cd "$2"
  if ! apt-get -o APT::Sandbox::User=root download "$1"; then
    # The lists are older than the mirror.
    apt-get update -qq
    apt-get -o APT::Sandbox::User=root download "$1"
  fi
  cd - >/dev/null
}

unpack_kernel() {
  local package
  mkdir -p "$out_dir/download"
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" && !n++ { print $2 }')
  [ -n "$package" ] || die "apt knows no linux-image-cloud-amd64"
  if ! compgen -G "$out_dir/download/${package}_*.deb" >/dev/null; then
    download "$package" "$work"
    rm -f -- "$out_dir"/download/linux-image-*.deb
    mv -- "$work/${package}"_*.deb "$out_dir/download/"
  fi
  dpkg-deb -x "$out_dir/download/${package}"_*.deb "$work/kernel"
  # Since Debian 13 a kernel's modules are in /usr/lib/modules, and not every depmod looks there.
  [ -e "$work/kernel/lib" ] || ln -s usr/lib "$work/kernel/lib"
  cp -- "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
  release=$(basename -- "$work"/kernel/lib/modules/*)
  depmod -b "$work/kernel" "$release"
}

# add_memcached: the program alone. Its package wants Perl, and would start it at boot.
add_memcached() {
  download memcached "$work"
  dpkg-deb --fsys-tarfile "$work"/memcached_*.deb | tar -x -C "$root" ./usr/bin/memcached
}

# compile LOAD PROGRAM: of guest/LOAD.rs, for the C library of this machine, which is the guest's: setup.sh wants the same release.
compile() {
  "${RUSTC:-rustc}" --edition 2024 -O -C strip=symbols -C panic=abort -o "$root/usr/bin/$2" "$testbed_dir/guest/$1.rs"
}

# base_initramfs DIR: devices, modules and busybox; DIR/modules lists the modules in loading order.
base_initramfs() {
  local dir=$1 module path
  mkdir -p "$dir"/{bin,dev,proc,sys,tmp,run,root,mnt,newroot,lib/modules}
  install -m 755 /bin/busybox "$dir/bin/busybox"
  while read -r applet; do
    ln -s busybox "$dir/bin/$applet"
  done < <("$dir/bin/busybox" --list | grep -vx busybox)
  ln -s bin "$dir/sbin"
  mknod -m 600 "$dir/dev/console" c 5 1
  for module in "${modules[@]}"; do
    modprobe -d "$work/kernel" -S "$release" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
  done | awk '!seen[$0]++' >"$work/order"
  while read -r path; do
    cp -- "$path" "$dir/lib/modules/"
    printf '/lib/modules/%s\n' "$(basename -- "$path")"
  done <"$work/order" >"$dir/modules"
}

# add_programs DIR: programs of the Debian root with the libraries they load.
add_programs() {
  local dir=$1 program path
  mkdir -p "$dir/usr/sbin" "$dir/etc"
  for program in "${programs[@]}"; do
    path=$(chroot "$root" sh -c "command -v $program")
    chroot "$root" readlink -f "$path" >>"$work/files"
    # Over busybox's own, where that has one: these can do more.
    rm -f -- "$dir/bin/$program"
    ln -s "$(chroot "$root" readlink -f "$path")" "$dir/bin/$program"
  done
  while read -r path; do
    chroot "$root" ldd "$path" | awk '$2 == "=>" { print $3; next } $1 ~ /^\// { print $1 }'
  done <"$work/files" | sort -u >"$work/libraries"
  while read -r path; do
    mkdir -p "$dir$(dirname -- "$path")"
    cp -L --preserve=mode -- "$root$path" "$dir$path"
  done < <(cat "$work/files" "$work/libraries")
  cp -- "$root/etc/ld.so.conf" "$dir/etc/"
  cp -r -- "$root/etc/ld.so.conf.d" "$dir/etc/"
  cp -- "$root/etc/mke2fs.conf" "$dir/etc/"
  # Not busybox's shell: that one prefers its own applets to what lies in PATH.
  ln -sf dash "$dir/bin/sh"
}

# pack DIR FILE: padded, since the kernel takes up an uncompressed archive only on a 4-byte boundary.
pack() {
  (cd "$1" && find . -print0 | sort -z | cpio --null --quiet -o -H newc) | gzip -9n >"$2"
  truncate -s %512 "$2"
}

unpack_kernel
# The last three are what memcached loads.
debian_root "$guest_suite" "$root" systemd,systemd-sysv,udev,kmod,fio,e2fsprogs,procps,util-linux,libevent-2.1-7,libsasl2-2,libssl3
add_memcached
compile load guest-load
compile memcached-load memcached-load

base_initramfs "$work/boot"
install -m 755 "$testbed_dir/guest/init-boot" "$work/boot/init"
pack "$work/boot" "$work/boot.cpio.gz"

base_initramfs "$work/guest"
add_programs "$work/guest"
install -m 755 "$testbed_dir/guest/init-test" "$work/guest/init"
pack "$work/guest" "$work/guest.cpio.gz"

install -m 755 "$testbed_dir/guest/larder-script" "$root/usr/local/sbin/"
install -m 644 "$testbed_dir/guest/larder-script.service" "$root/etc/systemd/system/"
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../larder-script.service "$root/etc/systemd/system/multi-user.target.wants/"
# A serial console, no network, no housekeeping that would disturb a measurement.
for unit in getty@.service serial-getty@.service getty-static.service proc-sys-fs-binfmt_misc.automount apt-daily.timer apt-daily-upgrade.timer \
  dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer systemd-networkd.service \
  systemd-timesyncd.service systemd-resolved.service systemd-pstore.service systemd-update-utmp.service; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
echo larder-guest >"$root/etc/hostname"
echo '/dev/vda / ext4 defaults 0 0' >"$root/etc/fstab"
: >"$root/etc/machine-id"
truncate -s 2G "$work/debian12.ext4"
mkfs.ext4 -q -F -L larder-guest -d "$root" "$work/debian12.ext4"

rm -f -- "$out_dir/guest.stamp"
for artefact in "${artefacts[@]}"; do
  mv -f -- "$work/$artefact" "$out_dir/$artefact"
  chown "${SUDO_UID:-0}:${SUDO_GID:-0}" "$out_dir/$artefact"
  chmod 644 "$out_dir/$artefact"
done
echo "$want" >"$out_dir/guest.stamp"
