//! `larder advise --would-fit`: whether one more VM fits, as reported by the exit status. Each test measures its own
//! PID namespace, so that no other VMs are seen.

use std::process::Command;

use crate::support::{larder_path, require_root, run_command};
use crate::{FAKE, STARTED};

/// Runs `larder advise --for 200ms` with `words`, while one VM with the command line `vm` runs, or none. Returns the
/// exit status and the output.
fn ask(vm: Option<&str>, words: &str) -> (Option<i32>, String) {
    require_root("to see no other processes in a PID namespace");
    let script = r#"
        if [ -n "$VM" ]; then
          exec 3< <(exec -a qemu-system-x86_64 "$TEST" fake_qemu --ignored --exact --nocapture -- $VM)
          while read -r line <&3 && [[ $line != *"$STARTED"* ]]; do :; done
        fi
        "$LARDER" advise --for 200ms $WORDS"#;
    let mut command = Command::new("unshare");
    command
        .args(["--fork", "--pid", "--mount-proc", "--kill-child", "bash", "-c", script])
        .env("VM", vm.unwrap_or_default())
        .env("WORDS", words)
        .env("STARTED", STARTED)
        .env("TEST", std::env::current_exe().expect("this program"))
        .env("LARDER", larder_path())
        .env(FAKE, "idle");
    run_command(command)
}

/// Returns the command line of a VM with twice the memory of the host.
fn twice_the_host() -> String {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("procfs");
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let kib: u64 = total.and_then(|kib| kib.parse().ok()).expect("a size");
    format!("-name web,debug-threads=on -m {}k", kib * 2)
}

/// The exit status distinguishes a VM that fits, one that does not, one that fits with over-commit, and an unknown
/// answer.
#[test]
fn exit_status_reports_whether_vm_fits() {
    let small = Some("-name web,debug-threads=on -m 64M");
    let twice = twice_the_host();
    let large = Some(twice.as_str());
    let untold = Some("-name web,debug-threads=on -readconfig vm.cfg");
    // The host may be under load, so any stall is accepted.
    let cases = [
        (None, "1MiB", 0, "a VM of 1 MiB: fits: "),
        (small, "1MiB", 0, "a VM of 1 MiB: fits: "),
        (None, "8000000TiB", 1, "a VM of 7812 PiB: does not fit: "),
        (small, "8000000TiB", 1, " does not fit: "),
        (untold, "8000000TiB", 1, " does not fit: "),
        (large, "1MiB", 3, "a VM of 1 MiB: fits only with over-commit: "),
        (untold, "1MiB", 4, "a VM of 1 MiB: cannot be determined: "),
    ];
    for (vm, size, code, text) in cases {
        let (ended, said) = ask(vm, &format!("--would-fit {size} --stall 100% --overcommit 1000%"));
        assert!(ended == Some(code) && said.contains(text), "{vm:?} {size}: {ended:?} {said}");
        assert_eq!(said.trim().lines().count(), 1, "{said}");
    }
}

/// A VM does not fit if all VMs together would exceed `--overcommit`.
#[test]
fn fit_respects_overcommit_limit() {
    let (code, said) = ask(Some(&twice_the_host()), "--would-fit 1MiB --stall 100%");
    assert!(
        code == Some(1) && said.contains("all VMs together may be given at most ") && said.contains(" (150 %)"),
        "{code:?} {said}"
    );
}

/// The memory of `--reserve` is not given to VMs.
#[test]
fn fit_excludes_reserve() {
    let (code, said) = ask(None, "--would-fit 1MiB --reserve 8000000TiB");
    assert!(code == Some(1) && said.contains("without a reserve of "), "{code:?} {said}");
}

/// A VM does not fit if more of the host's memory would be active than `--active-share` allows.
#[test]
fn fit_respects_active_share() {
    let (code, said) =
        ask(Some(&twice_the_host()), "--would-fit 1MiB --stall 100% --active-share 0% --overcommit 1000%");
    assert!(code == Some(1) && said.contains("of 0 KiB that are allowed"), "{code:?} {said}");
}

#[test]
fn json_output_matches_exit_status() {
    let (code, said) = ask(Some(&twice_the_host()), "--would-fit 1MiB --stall 100% --overcommit 1000% --output json");
    let told: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &told["would_fit"]["answer"]), (Some(3), &"only-overcommitted".into()));
    assert_eq!((&told["version"], &told["would_fit"]["size"]), (&1.into(), &(1 << 20).into()));
    let (code, said) = ask(None, "--output json");
    let told: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &told["would_fit"]), (Some(0), &serde_json::Value::Null));
    let (code, said) = ask(None, "");
    assert!(code == Some(0) && said.contains("no VM runs here"), "{said}");
}
