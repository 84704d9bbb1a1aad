//! `larder run --memory-budget`: guests with less memory than they use.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use super::guest::{Guest, Place, qemu, signal};
use super::support;

/// Writes and verifies its memory, round after round, until a line is typed: what was written once, and what is written anew.
const ROUNDS: &str = r#"
    (read line; touch /tmp/enough) </dev/console &
    mkdir /w
    mount -t tmpfs -o size=90% w /w
    dd if=/dev/urandom of=/w/seed bs=1M count=8 2>/dev/null
    for part in 1 2 3 4 5 6 7 8 9 10 11 12; do cp /w/seed /w/old$part; done
    sha256sum /w/old* >/tmp/sums
    echo READY
    while [ ! -e /tmp/enough ]; do
      fio --minimal --name=new --directory=/w --rw=randwrite --bs=16k --size=32m --ioengine=psync \
        --buffer_compress_percentage=50 --refill_buffers --verify=crc32c --verify_fatal=1 >/tmp/fio 2>&1 || { cat /tmp/fio; exit 1; }
      sha256sum -c /tmp/sums >/tmp/fio || { cat /tmp/fio; exit 2; }
      echo VERIFIED
    done
    exit 0"#;

fn state(control: &str) -> Value {
    let said = support::tool(
        env!("CARGO_BIN_EXE_larder"),
        &["memory", "status", control, "--output", "json"],
    );
    serde_json::from_str(&said).expect("JSON")
}

#[test]
fn a_guest_works_within_its_budget_and_does_not_notice_that_its_pager_is_killed() {
    let place = Place::new("pager");
    let swap = place.path("swap");
    let options = [
        "--memory-budget",
        "96MiB",
        "--memory-swap-cache",
        swap.to_str().expect("UTF-8"),
        "--memory-swap-size",
        "512MiB",
    ];
    let mut guest = Guest::boot(&place, qemu(), &options, &[], ROUNDS);
    let told = guest.line("larder: memory: kept within 96 MiB; larder memory status ");
    let control = told.rsplit(' ').next().expect("a path").to_owned();
    guest.line("READY");
    guest.line("VERIFIED");
    let pager = guest.child_when("memory attach", |_| {
        support::run({
            let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
            command.args(["memory", "status", &control]);
            command
        })
        .0 == Some(0)
    });
    let managed = state(&control);
    assert_eq!(managed["budget"], 96 << 20, "{managed}");
    assert_eq!(managed["size"], 512 << 20, "{managed}");
    assert!(managed["evicted_pages"].as_u64() > Some(0), "{managed}");
    assert!(managed["used"].as_u64() < Some(110 << 20), "{managed}");
    for _ in 0..3 {
        let pager = guest.child_when("memory attach", |_| true);
        signal(pager, Signal::KILL);
        guest.wait_until_gone(&[pager]);
        guest.line("larder: memory: its pager died (signal: 9 (SIGKILL)) and is started again");
        guest.line("VERIFIED");
        guest.line("VERIFIED");
    }
    assert_ne!(guest.child_when("memory attach", |_| true), pager);
    assert!(state(&control)["faults"]["disk"]["count"].as_u64() > Some(0));
    guest.type_line("enough");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0");
    let pager = guest.children("memory attach");
    let (code, output) = guest.end();
    assert_eq!(code, 0, "{output}");
    assert!(!output.contains("ERROR"), "{output}");
    assert!(!pager.into_iter().any(super::is_alive), "its pager is left");
    assert!(
        place.leftovers().is_empty() && !swap.exists(),
        "{:?}",
        place.leftovers()
    );
}

#[test]
fn who_is_let_go_of_runs_on_alone() {
    let place = Place::new("letgo");
    let mut guest = Guest::boot(&place, qemu(), &["--memory-budget", "300MiB"], &[], ROUNDS);
    let told = guest.line("larder: memory: kept within 300 MiB; larder memory status ");
    let control = told.rsplit(' ').next().expect("a path").to_owned();
    guest.line("VERIFIED");
    let pager = guest.child_when("memory attach", |_| true);
    assert_eq!(state(&control)["budget"], 300 << 20);
    support::tool(env!("CARGO_BIN_EXE_larder"), &["memory", "detach", &control]);
    guest.wait_until_gone(&[pager]);
    guest.line("VERIFIED");
    assert!(guest.children("memory attach").is_empty());
    guest.type_line("enough");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0");
    assert_eq!(guest.end().0, 0);
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}
