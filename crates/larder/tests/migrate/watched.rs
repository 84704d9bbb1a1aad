//! A move's state on its control socket, and the commands that it accepts there.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ends::{Between, Waiting, carries_on, main_channel, write};
use crate::support::{TEST_TIMEOUT, larder_path, run_command};

fn migrate(words: &[&str], control: &Path, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.arg("migrate").args(words).arg(control).args(more);
    run_command(command)
}

/// Returns the state from the control socket.
fn state(control: &Path) -> Value {
    let (code, said) = migrate(&["status"], control, &["--output", "json"]);
    assert_eq!(code, Some(0), "{said}");
    serde_json::from_str(&said).expect("JSON")
}

/// Returns the state once it satisfies `is_so`.
fn state_when(control: &Path, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        let state = state(control);
        if is_so(&state) {
            return state;
        }
        assert!(Instant::now() < give_up, "{what}: {state}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Sockets {
    _folder: tempfile::TempDir,
    source: std::path::PathBuf,
    destination: std::path::PathBuf,
}

/// Starts both sides, each with a control socket, and the sender with further arguments.
fn between(words: &[&str]) -> (Between, Sockets) {
    let folder = crate::support::temp_dir_on_tmpfs();
    let path = |name: &str| folder.path().join(name);
    let (source, destination) = (path("source"), path("destination"));
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (at_source, at_destination) = (text(&source), text(&destination));
    let words = [&["--control", &at_source], words].concat();
    let between = Waiting::start(&["--control", &at_destination]).joined(&words);
    let sockets = Sockets { _folder: folder, source, destination };
    (between, sockets)
}

/// A move reports its progress, and a changed limit takes effect at once.
#[test]
fn move_reports_progress_and_obeys_limits() {
    // With this limit the move would take hours.
    let (mut between, sockets) = between(&["--bandwidth", "1KiB"]);
    let before = state(&sockets.source);
    assert_eq!(
        (&before["phase"], &before["direction"], &before["whole"], &before["vm"]),
        (&"preparing".into(), &"leaving".into(), &false.into(), &"sender".into())
    );
    assert_eq!(before["limits"]["bandwidth"], 1024);
    let stream = main_channel(2000);
    let writer = write(between.source(), stream.clone());
    let moving = state_when(&sockets.source, "it is sent", |state| {
        state["phase"] == "moving" && state["sent"]["frames"].as_u64() > Some(0)
    });
    let wire = moving["sent"]["wire_bytes"].as_u64().expect("a number");
    assert!(wire > 0 && wire < stream.len() as u64, "{moving}");
    for refused in [&["--downtime", "500"][..], &["--timeout", "5"]] {
        let (code, said) = migrate(&["limit"], &sockets.source, refused);
        assert!(code == Some(2) && said.contains("set these limits in QEMU"), "{said}");
    }
    let (code, said) = migrate(&["limit"], &sockets.destination, &["--bandwidth", "1GiB"]);
    assert!(code == Some(2) && said.contains("the source enforces the limits"), "{said}");
    let (code, said) = migrate(&["limit"], &sockets.source, &["--cpu", "3.5", "--bandwidth", "1GiB"]);
    assert!(code == Some(0) && said.ends_with("limits: 1 GiB/s on the link, 3.5 CPUs"), "{said}");
    let (code, said) = migrate(&["limit"], &sockets.source, &["--bandwidth", "0"]);
    assert!(code == Some(0) && said.ends_with("limits: 3.5 CPUs"), "{said}");
    carries_on(&mut between, &stream, || {
        let source = writer.join().expect("written");
        let coming =
            state_when(&sockets.destination, "all has come", |state| state["delivered"]["raw_bytes"] == stream.len());
        assert_eq!((&coming["direction"], &coming["phase"]), (&"coming".into(), &"moving".into()));
        assert_eq!((&coming["peer"], &coming["sent"]), (&"127.0.0.1".into(), &Value::Null));
        assert!(coming["rates"]["wire_bytes_per_s"].is_u64(), "{coming}");
        assert!(coming["rates"]["processors"].is_f64() && coming["rates"]["waiting"].is_null(), "{coming}");
        let cpu = |name: &str| coming["delivered"][name].as_f64().expect("a number");
        assert!(cpu("decode_cpu_seconds") > 0.0 && cpu("cpu_seconds") > cpu("decode_cpu_seconds"), "{coming}");
        let (_, text) = migrate(&["status"], &sockets.destination, &[]);
        assert!(text.contains("CPU time:") && text.contains("of which decoding"), "{text}");
        let sent =
            state_when(&sockets.source, "all is there", |state| state["sent"]["delivered_bytes"] == stream.len());
        let pages = |method: &str| {
            let ways = sent["sent"]["methods"].as_array().expect("a list");
            let way = ways.iter().find(|way| way["method"] == method).expect("it is told");
            way["pages"].as_u64().expect("a number")
        };
        // The first page of a section names its block, so two of the 400 zero pages are sent uncompressed. So is a
        // page in which the writer was interrupted for long.
        assert!((380..=398).contains(&pages("zero")), "{sent}");
        assert!((380..=400).contains(&pages("same")), "{sent}");
        assert_eq!(pages("delta"), 0);
        let classes = sent["evidence"]["classes"].as_array().expect("a list");
        assert!(!classes.is_empty(), "{sent}");
        for class in classes {
            let offers = class["offers"].as_array().expect("a list");
            let cost = |offer: &Value| offer["cost_ns"].as_f64().expect("a number");
            let least = offers.iter().min_by(|a, b| cost(a).total_cmp(&cost(b))).expect("some");
            assert_eq!(class["method"], least["method"], "{class}");
        }
        let cpu = sent["sent"]["cpu_seconds"].as_f64().expect("a number");
        let encoding = sent["sent"]["encode_cpu_seconds"].as_f64().expect("a number");
        assert!(encoding > 0.0 && encoding <= cpu, "{sent}");
        let (_, text) = migrate(&["status"], &sockets.source, &[]);
        for part in [
            "move:             sender to 127.0.0.1",
            "limits:           3.5 CPUs",
            "same",
            "a byte on the link is worth",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        source
    });
    for path in [&sockets.source, &sockets.destination] {
        assert!(!path.exists(), "{} is left", path.display());
    }
}

/// A move can be cancelled on its socket, and clients that watch it get the final state.
#[test]
fn cancelled_move_reports_end_to_watchers() {
    let (mut between, sockets) = between(&["--bandwidth", "1KiB"]);
    let mut source = between.source();
    let _destination = between.destination();
    source.write_all(&main_channel(100)).expect("is taken");
    state_when(&sockets.source, "it is sent", |state| state["phase"] == "moving");
    let (code, said) = migrate(&["cancel"], &sockets.source, &[]);
    assert!(code == Some(0) && said.contains("cancelling"), "{said}");
    let last = state_when(&sockets.source, "it ends", |state| state["phase"] == "failed");
    assert_eq!(last["reason"], "stopped");
    let said = between.fail();
    assert!(said[0].contains("cancelled over the control socket"), "{}", said[0]);
    let (code, said) = migrate(&["status"], &sockets.source, &[]);
    assert!(code == Some(2) && said.contains("has removed it"), "{said}");
}

#[test]
fn invalid_limit_requests_change_nothing() {
    let (_between, sockets) = between(&["--bandwidth", "1MiB"]);
    let before = state(&sockets.source)["limits"].clone();
    for (body, status) in [
        ("", 400),
        ("[]", 400),
        ("{\"bandwidth\": -1}", 400),
        ("{\"processors\": -0.5}", 400),
        ("{\"processors\": 1e300}", 400),
        ("{\"processors\": 0.001}", 400),
        ("{\"downtime_ms\": 0}", 400),
        ("{\"downtime_ms\": 2000001}", 400),
        ("{\"band-width\": 1}", 400),
        ("{\"downtime_ms\": 500}", 409),
        ("{\"bandwidth\": 18446744073709551615, \"timeout_s\": 5}", 409),
        ("{}", 200),
    ] {
        let socket = sockets.source.to_str().expect("UTF-8");
        let words =
            ["-sS", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket", socket, "-X", "PATCH", "-d", body];
        let said = crate::support::run_tool("curl", &[&words[..], &["http://x/v1/migration"]].concat());
        assert_eq!(said, status.to_string(), "{body}");
        assert_eq!(state(&sockets.source)["limits"], before, "{body}");
    }
    let (code, said) = migrate(&["limit"], &sockets.source, &[]);
    assert!(code == Some(2) && said.contains("--bandwidth"), "{said}");
}
