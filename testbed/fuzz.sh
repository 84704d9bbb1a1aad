#!/usr/bin/env bash
# fuzz.sh [SECONDS]              every target for that long each (default 60)
# fuzz.sh TARGET|all [SECONDS]   one of them (fuzz/fuzz_targets/), or every one
#
# Builds and runs the fuzz targets with libFuzzer and AddressSanitizer, by
# cargo-fuzz, which is installed into target/testbed/fuzz-tools. Inputs found are
# kept in fuzz/corpus, what breaks in fuzz/artifacts. Needs no nightly compiler:
# the stable one is told to accept the sanitizer's flags.
set -euo pipefail
# shellcheck source=testbed/lib.sh
. "$(dirname -- "$0")/lib.sh"

target=all
if [ $# -gt 0 ] && ! [[ $1 =~ ^[0-9]+$ ]]; then
  target=$1
  shift
fi
seconds=${1:-60}
[[ $seconds =~ ^[0-9]+$ ]] || die "usage: $0 [TARGET|all] [SECONDS]"

tools=$out_dir/fuzz-tools
if ! [ -x "$tools/bin/cargo-fuzz" ]; then
  say "installing cargo-fuzz (target/testbed/log/fuzz-tools)"
  mkdir -p "$out_dir/log"
  cargo install cargo-fuzz --version 0.13.2 --locked --root "$tools" >"$out_dir/log/fuzz-tools" 2>&1 ||
    { tail -n 20 "$out_dir/log/fuzz-tools" >&2; die "cargo-fuzz could not be installed"; }
fi

cd "$repo_dir"
if [ "$target" = all ]; then
  targets=()
  for file in fuzz/fuzz_targets/*.rs; do targets+=("$(basename -- "$file" .rs)"); done
else
  [ -f "fuzz/fuzz_targets/$target.rs" ] || die "there is no target $target in fuzz/fuzz_targets"
  targets=("$target")
fi
export RUSTC_BOOTSTRAP=1
for name in "${targets[@]}"; do
  say "fuzzing $name for $seconds s"
  mkdir -p "fuzz/corpus/$name"
  "$tools/bin/cargo-fuzz" fuzz run "$name" -- \
    -max_total_time="$seconds" -max_len=2048 -timeout=120 -rss_limit_mb=4096 -print_final_stats=1
done
