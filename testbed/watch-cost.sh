#!/usr/bin/env bash
# What `larder host` takes while it watches many VMs: processor time over a
# minute and the most memory, with one dashboard open and a scrape every 15 s.
#
#   watch-cost.sh LARDER [VMS] [SECONDS]     LARDER is the program; 112 VMs, 60 s
#
# The VMs are idle, with an image of 16 MiB each on tmpfs. All that it makes is
# in a folder of its own in /dev/shm, and goes with it.
set -euo pipefail

if [ "$(id -u)" = 0 ] && [ -z "${LARDER_WATCH_COST:-}" ]; then
  export LARDER_WATCH_COST=1
  exec unshare --mount --propagation private "$0" "$@"
fi

larder=$(realpath -- "${1:?usage: $0 LARDER [VMS] [SECONDS]}")
vms=${2:-112}
seconds=${3:-60}

folder=$(mktemp -d /dev/shm/larder-watch.XXXXXX)
pids=()
finish() {
  kill "${pids[@]}" 2>/dev/null || true
  wait
  [ "$(id -u)" != 0 ] || umount /run || true
  rm -rf -- "$folder"
}
trap finish EXIT

# An ordinary user's places can be named; root's are fixed, so root gets a /run
# of its own, in a namespace of its own. (Many VMs need root, or a high
# `ulimit -l`: io_uring's rings count as an ordinary user's locked memory.)
export XDG_RUNTIME_DIR=$folder/run XDG_CONFIG_HOME=$folder/config STATE_DIRECTORY=$folder/state
mkdir -p "$folder"/{run/larder,config/larder/vms,state,images}
sockets=$folder/run/larder
if [ "$(id -u)" = 0 ]; then
  mount --bind "$folder/run" /run
  sockets=/run/larder
fi
chmod 700 "$folder"/run "$folder"/run/larder

for number in $(seq "$vms"); do
  name=$(printf 'vm%03d' "$number")
  truncate -s 16M "$folder/images/$name.raw"
  printf '[[disk]]\nimage = "%s"\nformat = "raw"\n' "$folder/images/$name.raw" >"$folder/config/larder/vms/$name.toml"
  "$larder" vm "$folder/config/larder/vms/$name.toml" 2>"$folder/$name.log" &
  pids+=($!)
done
for number in $(seq "$vms"); do
  socket=$(printf '%s/vm%03d.sock' "$sockets" "$number")
  for _ in $(seq 600); do
    [ ! -S "$socket" ] || break
    sleep 0.1
  done
  [ -S "$socket" ] || { echo "$socket does not come:" >&2; cat "$folder/$(basename "$socket" .sock).log" >&2; exit 2; }
done

"$larder" host --listen 127.0.0.1:0 2>"$folder/host.log" &
host=$!
pids+=("$host")
until grep -q ' ready ' "$folder/host.log"; do sleep 0.1; done
url=$(grep -o 'http://[0-9.:]*' "$folder/host.log" | head -n 1)
ask() { curl -sS --oauth2-bearer "$(cat "$STATE_DIRECTORY/host-token")" "$@"; }

ask -N "$url/api/fleet" >"$folder/frames" &
pids+=($!)
# It has found all and been scraped once before it is measured.
sleep 5
ask "$url/metrics" >"$folder/metrics"
up=$(grep -c '^larder_vm_up{.*} 1$' "$folder/metrics" || true)

ticks() { awk '{ print $14 + $15 }' "/proc/$host/stat"; }
all_ticks() {
  local pid sum=0
  for pid in "${pids[@]:0:vms}"; do sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat"))); done
  echo "$sum"
}
before=$(ticks) vms_before=$(all_ticks) started=$(date +%s%N)
for _ in $(seq $((seconds / 15))); do
  sleep 15
  ask "$url/metrics" >"$folder/metrics"
done
after=$(ticks) vms_after=$(all_ticks) ended=$(date +%s%N)
hertz=$(getconf CLK_TCK)
memory=$(awk '/VmHWM/ { print $2 }' "/proc/$host/status")
awk -v vms="$vms" -v up="$up" -v ticks=$((after - before)) -v vm_ticks=$((vms_after - vms_before)) \
  -v hertz="$hertz" -v ns=$((ended - started)) -v kib="$memory" -v bytes="$(stat -c %s "$folder/metrics")" 'BEGIN {
  wall = ns / 1e9
  printf "%d VMs, %d up, %.0f s: larder host %.2f %% of a core, %.1f MiB at most; a scrape of %.2f MiB\n", \
    vms, up, wall, 100 * ticks / hertz / wall, kib / 1024, bytes / 1048576
  printf "all VMs together, to answer: %.2f %% of a core\n", 100 * vm_ticks / hertz / wall
}'
