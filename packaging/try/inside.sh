#!/usr/bin/env bash
# What packaging/try.sh runs in the booted Debian 12, as root: the life of the
# package, from its installation to its purge, with a guest at work.
# /try has old.deb, new.deb, vmlinuz and guest.cpio.
set -Eeuo pipefail

exec 4>&1
images=/srv/images
qemu=

step() { printf '\n== %s\n' "$*"; }
ok() { printf 'ok: %s\n' "$*"; }
fail() {
  {
    printf 'FAILED: %s\n' "$*"
    systemctl --no-pager --lines 20 status larder@web || true
    tail -n 20 /tmp/guest.log /tmp/qemu.log || true
  } >&4 2>&4
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

# run COMMAND...: says it, and does it.
run() {
  printf '$ %s\n' "$*"
  "$@"
}

# apt COMMAND...: apt-get's, without its progress.
apt() { run apt-get -qq --no-install-recommends "$@" 2>&1 | sed 's/\r$//; /^debconf:/d; /^(Reading database/d'; }

# The files that a package could leave; caches of apt and man, logs and the users' list aside.
files() {
  { find /etc /usr /var /run/larder /opt -xdev 2>/dev/null || true; } |
    grep -Ev '^/var/(cache|log|lib/(apt|dpkg|systemd)|tmp)(/|$)|^/etc/(passwd|shadow|group|gshadow)-?$' | sort
}

rounds() { grep -c 'vdb verified' /tmp/guest.log || true; }

# further_rounds N: waits until the guest has done N more.
further_rounds() {
  local want=$(($(rounds) + $1)) tries=0
  while [ "$(rounds)" -lt "$want" ]; do
    kill -0 "$qemu" 2>/dev/null || fail "the guest has ended"
    [ $((tries += 1)) -lt 900 ] || fail "the guest does nothing"
    sleep 0.1
  done
}

main_pid() { systemctl show --property MainPID --value "$1"; }

hashes() { (cd "$images" && sha256sum vda.raw && qemu-img convert -O raw data.qcow2 /tmp/data.raw && sha256sum </tmp/data.raw); }

step "systemd is up"
systemctl is-system-running --wait || systemctl --no-pager --failed
run ps -o pid,args -p 1
files >/tmp/before

step "install"
apt install /try/new.deb
run larder --version
[ -z "$(systemctl --no-legend list-units 'larder*.service')" ] || fail "something was started"
ok "nothing was started"
run systemd-analyze verify larder@web.service larder-open.socket larder-memory@web.service larder-host.service
# exposed UNIT MOST: checks what systemd says of a unit, in tenths.
exposed() {
  systemd-analyze --no-pager security --threshold="$2" "$1.service" >/tmp/security || fail "$(tail -n 1 /tmp/security)"
  tail -n 1 /tmp/security
}
exposed larder@web 14
exposed larder-host 9
# It has rights over other processes, which count for more than all else.
exposed larder-memory@web 30
# What it is made of: crates of the project and others, each with a version.
perl -MJSON::PP -0777 -ne '
  my $bom = decode_json($_);
  my %versions = map { ($_->{name} => $_->{version}) } $bom->{metadata}{component}, @{$bom->{components}};
  $bom->{bomFormat} eq "CycloneDX" or die "it is no CycloneDX document\n";
  $versions{$_} or die "$_ is missing\n" for qw(larder larder-block larder-vm larder-migrate rustls);
  printf "%d crates are listed\n", scalar keys %versions;
' /usr/share/doc/larder/larder.cdx.json
for page in larder larder-vm larder-disk-serve; do man -w "$page" >/dev/null || fail "$page has no man page"; done
run bash -c '. /usr/share/bash-completion/bash_completion; __load_completion larder; complete -p larder'
run /usr/libexec/larder/vhost-user-blk --print-capabilities

! larder status | grep example || fail "the sample is taken for a VM"
run lintian --allow-root --fail-on error,warning --tag-display-limit 0 /try/new.deb

step "install an earlier version"
apt purge larder
files >/tmp/after
diff /tmp/before /tmp/after || fail "files are left behind, or gone"
apt install /try/old.deb
run larder --version

step "a VM's file"
run install -d "$images"
run truncate -s 64M "$images/vda.raw"
run qemu-img create -q -f qcow2 "$images/data.qcow2" 64M
chmod 600 "$images"/*
cat >/etc/larder/vms/web.toml <<END
[[disk]]
image = "$images/vda.raw"
format = "raw"

[[disk]]
name = "data"
image = "$images/data.qcow2"
format = "qcow2"
cache = "$images/data.cache"
cache-size = "32MiB"
cache-mode = "wb"
END
cat /etc/larder/vms/web.toml
sed "s|$images/data.cache|/nowhere|" /etc/larder/vms/web.toml >/etc/larder/vms/idle.toml

step "start"
run larder vm web --check
run systemctl enable --now larder@web
run systemctl is-active larder@web
run larder status

step "a guest, whose QEMU cannot connect again"
mkfifo /tmp/keys
exec 3<>/tmp/keys
qemu-system-x86_64 -accel tcg -m 512 -nodefaults -display none -serial stdio -no-reboot \
  -kernel /try/vmlinuz -initrd /try/guest.cpio -append 'console=ttyS0 quiet panic=-1 no_timer_check' \
  -object memory-backend-memfd,id=ram,size=512M,share=on -machine memory-backend=ram \
  -chardev socket,id=vda,path=/run/larder/web-vda.sock -device vhost-user-blk-pci,chardev=vda \
  -chardev socket,id=data,path=/run/larder/web-data.sock -device vhost-user-blk-pci,chardev=data \
  <&3 >/tmp/guest.log 2>/tmp/qemu.log &
qemu=$!
further_rounds 2
ok "it writes and verifies"
run larder status web
run sed -i '0,/^format/s//iops-read = 1000000\n&/' /etc/larder/vms/web.toml
run systemctl reload larder@web
larder status web | grep -q 'iops-read=1000000' || fail "the file was not read again"
ok "its file was read again"
run journalctl --no-pager --output=cat --unit=larder@web
! journalctl --output=cat --unit=larder@web | grep -q INFO || fail "what the journal has is not told by level"

step "upgrade, while the guest works"
before=$(main_pid larder@web)
run systemctl start larder-host
host_before=$(main_pid larder-host)
# Another VM, whose file becomes wrong while it is served.
run truncate -s 64M "$images/wrong.raw"
printf '[[disk]]\nimage = "%s/wrong.raw"\nformat = "raw"\n' "$images" >/etc/larder/vms/wrong.toml
run systemctl start larder@wrong
wrong_before=$(main_pid larder@wrong)
echo 'no-such-key = 1' >>/etc/larder/vms/wrong.toml
# As an earlier version's file may be.
sed -i '/^format/d' /etc/larder/vms/web.toml
apt install /try/new.deb 2>&1 | tee /tmp/upgrade.log
[ "$(grep -c '^format' /etc/larder/vms/web.toml)" = 2 ] || fail "formats were not added to a VM's file"
grep -q 'web.toml: web: disk data: format = "qcow2"$' /tmp/upgrade.log || fail "apt does not tell what was added"
[ "$(main_pid larder@web)" != "$before" ] || fail "larder@web still runs the old program"
[ "$(main_pid larder-host)" != "$host_before" ] || fail "larder-host still runs the old program"
run systemctl is-active larder@web larder-host
for service in larder@web larder-host; do
  nsenter --target "$(main_pid "$service")" --mount test ! -e /run/systemd/journal/socket \
    || fail "$service sees the journal's sockets"
done
ok "the journal's sockets are hidden from them"
[ "$(systemctl is-active larder@idle || true)" = inactive ] || fail "a VM that was not served is served"
ok "larder@web was started anew: process $before, now $(main_pid larder@web)"
further_rounds 2
ok "the guest goes on"
token=/var/lib/larder-host/host-token
until [ -e "$token" ]; do sleep 0.1; done
[ "$(stat -c '%U %a' "$token")" = 'larder-host 600' ] || fail "the token is not larder-host's alone"
status_of() { curl -sS -o /tmp/metrics -w '%{http_code}' "$@" http://localhost:9178/metrics; }
[ "$(status_of)" = 401 ] || fail "larder-host asks for no token"
[ "$(status_of --oauth2-bearer "$(cat "$token")")" = 200 ] || fail "larder-host does not take its token"
grep -q '^larder_vm_up{domain="web"} 1$' /tmp/metrics || fail "larder-host does not see the VM"
as_reader() { setpriv --reuid larder-host --regid larder-read --clear-groups curl -sS -o /tmp/answer -w '%{http_code}' --unix-socket /run/larder/web.sock "$@"; }
[ "$(as_reader http://localhost/v1/disks)" = 200 ] || fail "larder-host may not read"
[ "$(as_reader -X PATCH -d '{"limits":{"iops-total":1}}' http://localhost/v1/disks/data)" = 403 ] || fail "larder-host may change a VM"
ok "larder-host asks for its token, sees the VM and may not change it"
[ "$(main_pid larder@wrong)" = "$wrong_before" ] || fail "a VM with a wrong file has lost its server"
grep -q '^larder: VM wrong: .*no-such-key.*systemctl restart larder@wrong$' /tmp/upgrade.log || fail "apt does not tell of a VM with a wrong file"
[ "$(grep -c '^larder: VM' /tmp/upgrade.log)" = 1 ] || fail "apt tells of a VM that was started anew"
sed -i '$d' /etc/larder/vms/wrong.toml
run systemctl restart larder@wrong
[ "$(main_pid larder@wrong)" != "$wrong_before" ] || fail "larder@wrong still runs the old program"
run systemctl stop larder@wrong
rm /etc/larder/vms/wrong.toml "$images/wrong.raw"
ok "a VM with a wrong file went on with the old program until it was mended, and apt has named it"
run larder status

step "restarts and kills, while the guest works"
run systemctl stop larder-host
for restart in {1..5}; do
  run systemctl restart larder@web
  sleep "0.$((restart * 7 % 10))"
  before=$(main_pid larder@web)
  run systemctl kill --signal=KILL larder@web
  until [ "$(systemctl is-active larder@web)" = active ] && [ "$(main_pid larder@web)" != "$before" ]; do sleep 0.1; done
done
further_rounds 2
run systemctl show --property NRestarts,NFileDescriptorStore larder@web

step "end of the guest"
echo >&3
wait "$qemu" || fail "QEMU ended with $?"
cat /tmp/guest.log
sed 's/^/QEMU: /' /tmp/qemu.log
grep -q '^LARDER-GUEST-EXIT 0' /tmp/guest.log || fail "the guest has seen an error"
run systemctl stop larder@web
hashes | awk '{ print $1 }' >/tmp/on-host
awk '/ \/dev\/vd[ab]/ { print $1 }' /tmp/guest.log >/tmp/in-guest
cmp /tmp/on-host /tmp/in-guest || fail "the images are not what the guest has written"
ok "the images are what the guest has written"

step "Proxmox VE's hookscript, called as Proxmox VE does"
hook=/usr/share/larder/proxmox/larder
mv /etc/larder/vms/idle.toml /etc/larder/vms/100.toml
sed -i 's|/nowhere|/srv/images/data.cache|' /etc/larder/vms/100.toml
run "$hook" 100 pre-start
run systemctl is-active larder@100
run "$hook" 100 post-start
run timeout 5 larder status 100
run "$hook" 100 pre-stop
run systemctl is-active larder@100
run "$hook" 100 post-stop
systemctl stop larder@100
run "$hook" 101 pre-start
mv "$images/vda.raw" "$images/away"
! run "$hook" 100 pre-start || fail "a VM without its disk is started"
case $(systemctl is-active larder@100 || true) in
  failed | inactive) ;;
  *) fail "Larder goes on trying for a VM that does not start" ;;
esac
mv "$images/away" "$images/vda.raw"
systemctl reset-failed
ok "it starts and stops Larder, keeps a VM without its disks from starting, and leaves others alone"

step "remove, while the disks are served"
run systemctl start larder@web
apt remove larder
! systemctl is-active larder@web || fail "larder@web still runs"
[ ! -e /usr/bin/larder ] || fail "the program is there"
[ -e /etc/larder/vms/web.toml ] || fail "the VM's file is gone"
ok "the program is gone, the VM's file is there"

step "purge"
apt purge larder
[ "$(hashes | awk '{ print $1 }')" = "$(cat /tmp/on-host)" ] || fail "an image was changed"
ok "the images are as they were"
files >/tmp/after
diff /tmp/before /tmp/after || fail "files are left behind, or gone"
[ -z "$(systemctl --no-legend --all list-units 'larder*')" ] || fail "units are left behind"
ok "nothing is left behind"
step "purge, with a note that is still needed"
apt install /try/new.deb
install -d /var/lib/larder-libvirt
echo '<domain/>' >/var/lib/larder-libvirt/domain.xml
apt purge larder
[ -e /var/lib/larder-libvirt/domain.xml ] || fail "the note is gone"
ok "it is left"

step "all is well"
