//! `larder run --memory-budget`: guests with budgets below their memory use.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use super::guest::{Guest, Place, qemu, signal};
use super::support;

/// Guest script that writes and verifies its memory in rounds until a line is typed, both old and new data.
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
    let said = support::run_tool(env!("CARGO_BIN_EXE_larder"), &["memory", "status", control, "--output", "json"]);
    serde_json::from_str(&said).expect("JSON")
}

#[test]
fn guest_within_budget_survives_pager_kills() {
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
        support::run_command({
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
        guest.line("larder: memory: its pager died (signal: 9 (SIGKILL)) and is restarted");
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
    assert!(place.leftovers().is_empty() && !swap.exists(), "{:?}", place.leftovers());
}

/// Guest script that does the same with a disk, with and without the guest's page cache.
const DISK_ROUNDS: &str = r#"
    (read line; touch /tmp/enough) </dev/console &
    mkdir /w
    mount -t tmpfs -o size=90% w /w
    for part in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=/w/old$part bs=1M count=10 2>/dev/null; done
    sha256sum /w/old* >/tmp/sums
    on="--minimal --name=disk --filename=/dev/vda --bs=64k --size=24m --refill_buffers --verify=crc32c --verify_fatal=1"
    while [ ! -e /tmp/enough ]; do
      fio $on --rw=randwrite --direct=1 --ioengine=libaio --iodepth=16 >/tmp/fio 2>&1 || { cat /tmp/fio; exit 1; }
      fio $on --rw=write --do_verify=0 --end_fsync=1 >/tmp/fio 2>&1 || { cat /tmp/fio; exit 2; }
      echo 1 >/proc/sys/vm/drop_caches
      fio $on --rw=read >/tmp/fio 2>&1 || { cat /tmp/fio; exit 3; }
      sha256sum -c /tmp/sums >/tmp/fio || { cat /tmp/fio; exit 4; }
      echo VERIFIED
    done
    dmesg | grep -i 'I/O error' && exit 5
    exit 0"#;

/// A guest with a budget and a served disk survives kills of the pager, of the server, and of both.
#[test]
fn served_guest_survives_both_kinds_killed() {
    let place = Place::new("both");
    let (image, swap) = (place.image("disk.raw", 32), place.path("swap"));
    let options = [
        "--memory-budget",
        "96MiB",
        "--memory-swap-cache",
        swap.to_str().expect("UTF-8"),
        "--memory-swap-size",
        "512MiB",
    ];
    let drives = ["-drive", &super::drive(&image, "")];
    let mut guest = Guest::boot(&place, qemu(), &options, &drives, DISK_ROUNDS);
    let told = guest.line("larder: memory: kept within 96 MiB; larder memory status ");
    let control = told.rsplit(' ').next().expect("a path").to_owned();
    guest.line("VERIFIED");
    for killed in ["disk serve", "memory attach", "disk serve"] {
        let child = guest.child_when(killed, |_| true);
        signal(child, Signal::KILL);
        guest.wait_until_gone(&[child]);
        guest.line("VERIFIED");
        guest.line("VERIFIED");
    }
    // Kills both at once: neither may wait for the other for ever.
    let both = ["memory attach", "disk serve"].map(|word| guest.child_when(word, |_| true));
    both.iter().for_each(|child| signal(*child, Signal::KILL));
    guest.wait_until_gone(&both);
    guest.line("VERIFIED");
    guest.line("VERIFIED");
    let managed = state(&control);
    assert!(managed["evicted_pages"].as_u64() > Some(0), "{managed}");
    guest.type_line("enough");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0");
    assert_eq!(guest.end().0, 0);
    assert!(place.leftovers().is_empty() && !swap.exists(), "{:?}", place.leftovers());
}

#[test]
fn detached_guest_runs_on() {
    let place = Place::new("letgo");
    let mut guest = Guest::boot(&place, qemu(), &["--memory-budget", "300MiB"], &[], ROUNDS);
    let told = guest.line("larder: memory: kept within 300 MiB; larder memory status ");
    let control = told.rsplit(' ').next().expect("a path").to_owned();
    guest.line("VERIFIED");
    let pager = guest.child_when("memory attach", |_| true);
    assert_eq!(state(&control)["budget"], 300 << 20);
    support::run_tool(env!("CARGO_BIN_EXE_larder"), &["memory", "detach", &control]);
    guest.wait_until_gone(&[pager]);
    guest.line("VERIFIED");
    assert!(guest.children("memory attach").is_empty());
    guest.type_line("enough");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0");
    assert_eq!(guest.end().0, 0);
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}
