#!/usr/bin/env bash
# fuzz-disks.sh [IMAGES] [SEED]   random requests to random images (default 20000, seed 1), a tenth as many with data
#                                 files only, and a tenth with kills: docs/fuzzing.md
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

images=${1:-20000}
seed=${2:-1}
[[ $images =~ ^[0-9]+$ && $seed =~ ^[0-9]+$ ]] || die "usage: $0 [IMAGES] [SEED]"
part=$(((images + 9) / 10))

cd "$repo_dir"
cargo build --release -p larder -p larder-bench
for options in "--images $images" "--images $part --data-files-only" "--images $part --kills"; do
  say "fuzzing disks: $options"
  # shellcheck disable=SC2086  # words
  target/release/larder-bench fuzz-disks --seed "$seed" $options
done
