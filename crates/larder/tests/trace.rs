//! `larder status --trace`: the last events of each disk.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::process::Process;
use serde_json::Value;
use support::{
    TEST_TIMEOUT, assert_io_works, create_image, disk_serve_command, larder_path, run_command, run_tool,
    temp_dir_on_disk, temp_dir_on_tmpfs, wait_until, wait_until_listening,
};

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Runs `larder status` with `--trace`; returns the exit status and the output.
fn run_status(control: &Path, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.arg("status").arg(control).arg("--trace").args(options);
    run_command(command)
}

/// Returns the trace of the only disk, as JSON.
fn fetch_trace(control: &Path) -> Value {
    let (code, output) = run_status(control, &["--output", "json"]);
    assert_eq!(code, Some(0), "{output}");
    let trace: Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!(trace["disks"].as_array().map(Vec::len), Some(1), "{output}");
    trace["disks"][0].clone()
}

/// Returns the kinds and texts of the events in a trace.
fn events(trace: &Value) -> Vec<(&str, &str)> {
    let mut events = Vec::new();
    for event in trace["events"].as_array().expect("a list") {
        let word = |name: &str| event[name].as_str().expect("a text");
        events.push((word("kind"), word("text")));
    }
    events
}

fn has_event(control: &Path, kind: &str) -> bool {
    events(&fetch_trace(control)).iter().any(|(found, _)| *found == kind)
}

/// Checks that events of these kinds are in the trace in this order, perhaps with others in between.
fn assert_in_order(trace: &Value, kinds: &[&str]) {
    let events = events(trace);
    let mut all = events.iter().map(|(kind, _)| *kind);
    for kind in kinds {
        assert!(all.any(|found| found == *kind), "no {kind}, or too early: {events:?}");
    }
}

/// Serves an image over NBD, with qemu-nbd.
fn export(image: &Path, socket: &Path) -> Process {
    let mut command = Command::new("qemu-nbd");
    command.args(["-f", "raw", "--persistent", "--shared=0", "-k"]);
    command.arg(socket).arg(image);
    let export = Process::start(command).expect("qemu-nbd starts");
    wait_until_listening(socket);
    export
}

/// The trace of a disk shows that its NBD server was killed and has returned, and the guest's session, in order.
#[test]
fn trace_shows_outage_of_upstream_server() {
    let (disk, directory) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = create_image(disk.path(), 8 << 20);
    let path = |name: &str| directory.path().join(name);
    let (upstream, control) = (path("upstream"), path("control"));
    let mut first = export(&image, &upstream);
    let file = format!(
        "control = \"control\"\n\n[[disk]]\nname = \"far\"\nimage = \"nbd+unix:///?socket={}\"\nformat = \"raw\"\nsocket = \"far\"\n",
        text(&upstream)
    );
    std::fs::write(path("web.toml"), file).expect("writes the file");
    let mut command = Command::new(larder_path());
    command.arg("vm").arg(path("web.toml"));
    command.env("STATE_DIRECTORY", path("state"));
    let server = Process::start(command).expect("larder starts");
    server.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    let mut guest = FrontEnd::connect(&path("far"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    first.kill();
    wait_until("the loss of the NBD server is known", || has_event(&control, "upstream-lost"));
    let _second = export(&image, &upstream);
    wait_until("the disk is reconnected", || has_event(&control, "upstream-reconnected"));
    assert_io_works(&mut guest, 2);
    drop(guest);
    wait_until("the session has ended", || has_event(&control, "guest-disconnected"));

    let trace = fetch_trace(&control);
    assert_eq!((&trace["name"], &trace["dropped"]), (&"far".into(), &0.into()));
    assert_in_order(
        &trace,
        &[
            "opening",
            "upstream-connected",
            "opened",
            "serving",
            "guest-connected",
            "queues-started",
            "upstream-lost",
            "upstream-reconnected",
            "queues-stopped",
            "guest-disconnected",
        ],
    );
    let times = trace["events"].as_array().expect("a list").iter();
    let times: Vec<u64> = times.map(|event| event["time_ms"].as_u64().expect("a time")).collect();
    assert!(times.is_sorted(), "{times:?}");

    // The text has one line for each event: time, disk, kind, text.
    let (code, output) = run_status(&control, &[]);
    assert_eq!(code, Some(0), "{output}");
    for (line, (kind, event)) in output.lines().skip(1).zip(events(&trace)) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words[0].ends_with('Z') && words[1..3] == ["far", kind], "{line}");
        assert!(line.contains(event), "{line}: {event}");
    }
    assert!(output.lines().count() > events(&trace).len(), "{output}");
}

/// Changes of settings and of the cache, and clients, are in the trace of a disk.
#[test]
fn trace_shows_changes_and_clients() {
    let (disk, directory) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = create_image(disk.path(), 8 << 20);
    let (control, cache) = (directory.path().join("c"), disk.path().join("cache"));
    let uri = format!("nbd+unix:///?socket={}", text(&directory.path().join("n")));
    let mut command = disk_serve_command(&["--nbd", &uri, "--cache", text(&cache), "--cache-size", "8M"]);
    command.arg(&image).arg("--control").arg(&control);
    command.env("STATE_DIRECTORY", directory.path().join("state"));
    let server = Process::start(command).expect("larder starts");
    server.wait_for("serving", TEST_TIMEOUT).expect("it serves");
    let curl = |arguments: &[&str]| {
        let all = ["-sS", "--fail-with-body", "--unix-socket", text(&control)];
        run_tool("curl", &[&all, arguments].concat())
    };
    let set = |body: &str| {
        curl(&["http://x/v1/disks/0", "-X", "PATCH", "--data-binary", body]);
    };
    set("{\"limits\":{\"iops-total\":1000}}");
    set("{\"cache\":{\"mode\":\"wb\"}}");
    run_tool("qemu-io", &["-f", "raw", "-c", "write -P 7 0 64k", &uri]);
    curl(&["http://x/v1/disks/0/cache/flush", "-X", "POST"]);
    wait_until("the client is disconnected", || has_event(&control, "nbd-disconnected"));

    let trace = fetch_trace(&control);
    assert_eq!(trace["name"], Value::Null);
    assert_in_order(&trace, &["cache-opened", "serving", "limits", "cache-mode", "nbd-connected", "cache-flush"]);
    let all = events(&trace);
    assert!(all.contains(&("limits", "limits set: iops-total=1000")), "{all:?}");
    // The control socket has the same answer for other clients.
    let of_curl: Value = serde_json::from_str(&curl(&["http://x/v1/trace"])).expect("JSON");
    assert_eq!(of_curl["disks"][0], trace);
    // The log has the same messages as without a trace.
    let log = server.output();
    assert!(log.contains("limits set: iops-total=1000 disk="), "{log}");
    assert!(!log.contains("event=") && !log.contains("disk{"), "{log}");
}

/// A server that does not know the request for traces gets an explanation, and so does an interval.
#[test]
fn missing_trace_is_explained() {
    let directory = temp_dir_on_tmpfs();
    let path: PathBuf = directory.path().join("c");
    let listener = UnixListener::bind(&path).expect("binds");
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (mut client, _) = listener.accept().expect("a client");
            let _ = client.read(&mut [0; 1024]).expect("a request");
            let none = r#"{"error":"there is no /v1/trace; there is /v1/disks, and what /v1/openapi.json describes"}"#;
            let answer = format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{none}", none.len());
            client.write_all(answer.as_bytes()).expect("takes it");
        });
        let (code, output) = run_status(&path, &[]);
        assert_eq!(code, Some(2), "{output}");
        for part in ["older version of Larder", "restart it", text(&path)] {
            assert!(output.contains(part), "{output}");
        }
        server.join().expect("ends");
    });
    let (code, output) = run_status(&path, &["5"]);
    assert!(code == Some(2) && output.contains("give no interval"), "{output}");
}
