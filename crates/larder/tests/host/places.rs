//! VMs that start and end, hang and are killed, and sockets that are no VM's.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::support::TEST_TIMEOUT;
use super::{Process, User, until};

/// Returns the state of a socket that belongs to no VM.
fn other(frame: &Value, socket: &str) -> Option<Value> {
    let others = frame["others"].as_array().expect("a list").iter();
    let is_it = |it: &&Value| it["socket"].as_str().is_some_and(|path| path.ends_with(&format!("/{socket}")));
    others.into_iter().find(is_it).cloned()
}

#[test]
fn vms_are_detected_as_they_change() {
    let user = User::new();
    let host = user.host(&[]);
    let mut frames = host.follow("/api/fleet");
    assert_eq!(frames.next("fleet")["vms"], serde_json::json!([]));
    let mut web = user.vm("web");
    let told = host.vm_when("web", |vm| vm["health"] == "up" && vm["totals"].is_object());
    assert_eq!((&told["disks"], &told["size"]), (&1.into(), &(64 << 20).into()));
    assert_eq!(told["pid"], web.id());
    user.write("db", "");
    host.vm_when("db", |vm| vm["health"] == "stopped");
    let _db = user.start("db");
    host.vm_when("db", |vm| vm["health"] == "up");
    web.signal(libc::SIGTERM);
    web.wait(TEST_TIMEOUT).expect("ends");
    host.vm_when("web", |vm| vm["health"] == "stopped");
    let metrics = host.metrics();
    assert!(metrics.contains(r#"larder_vm_up{domain="db"} 1"#), "{metrics}");
    assert!(!metrics.contains(r#"domain="web""#), "who is switched off is not down");
    let web = user.start("web");
    host.vm_when("web", |vm| vm["health"] == "up" && vm["pid"] == web.id());
}

/// A VM that hangs is reported as stuck, and delays no other VM.
#[test]
fn stuck_vm_is_reported_without_delay() {
    let user = User::new();
    let (web, _db) = (user.vm("web"), user.vm("db"));
    let host = user.host(&[]);
    host.vm_when("web", |vm| vm["health"] == "up");
    web.signal(libc::SIGSTOP);
    let stuck = host.vm_when("web", |vm| vm["health"] == "stuck");
    assert!(stuck["why"].as_str().is_some_and(|why| why.contains("no answer")), "{stuck}");
    assert!(stuck["totals"].is_null(), "what is not known is not told");
    let metrics = host.metrics();
    for line in [
        r#"larder_vm_up{domain="web"} 0"#,
        r#"larder_vm_stuck{domain="web"} 1"#,
        r#"larder_vm_up{domain="db"} 1"#,
        r#"larder_host_sockets{state="stuck"} 1"#,
    ] {
        assert!(metrics.lines().any(|it| it == line), "no {line} in {metrics}");
    }
    let of_web = |line: &&str| line.starts_with("larder_disk") && line.contains(r#"domain="web""#);
    assert_eq!(metrics.lines().find(of_web), None);
    // The other VM is reported each second, with a new state each time.
    let mut frames = host.follow("/api/vm/db");
    let mut times: Vec<u64> = (0..3).map(|_| frames.next("vm")["vm"]["time_ms"].as_u64().expect("a time")).collect();
    times.dedup();
    assert!(times.len() >= 2, "{times:?}");
    web.signal(libc::SIGCONT);
    host.vm_when("web", |vm| vm["health"] == "up");
    assert_eq!(host.value(r#"larder_vm_stuck{domain="web"}"#), Some(0.0));
}

/// A killed VM is reported as such, and its counters begin at 0 when it is back.
#[test]
fn killed_vm_counts_from_0_again() {
    let user = User::new();
    let mut web = user.vm("web");
    let io = |command: &str| super::run_tool("qemu-io", &["-f", "raw", "-c", command, &user.nbd("web")]);
    io("write 0 4M");
    let host = user.host(&[]);
    let written = r#"larder_disk_write_bytes_total{domain="web",target_device="vda"}"#;
    assert_eq!(host.value(written), Some((4 << 20) as f64));
    web.kill();
    let killed = host.vm_when("web", |vm| vm["health"] == "killed");
    assert!(killed["why"].as_str().is_some_and(|why| why.contains("was killed")), "{killed}");
    let metrics = host.metrics();
    assert!(metrics.contains(r#"larder_vm_up{domain="web"} 0"#) && !metrics.contains(written), "{metrics}");
    let web = user.start("web");
    io("write 0 1M");
    until("the new server", || host.value(written).filter(|bytes| *bytes == (1 << 20) as f64));
    let info = format!("pid=\"{}\"", web.id());
    assert!(host.metrics().contains(&info), "it is the new process");
}

/// Sockets that are no VM's are reported as such, and are not queried again.
#[test]
fn foreign_sockets_are_queried_once() {
    let user = User::new();
    let listen = |name: &str| {
        let listener = UnixListener::bind(user.socket(name)).expect("binds");
        std::fs::set_permissions(user.socket(name), PermissionsExt::from_mode(0o777)).expect("ours");
        listener
    };
    let asked = Arc::new(AtomicUsize::new(0));
    let serve = |name: &str, answer: &'static str| {
        let (listener, asked) = (listen(name), Arc::clone(&asked));
        std::thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                asked.fetch_add(1, Ordering::Relaxed);
                let _ = client.read(&mut [0; 1024]);
                let _ = client.write_all(answer.as_bytes());
            }
        });
    };
    serve("ssh.sock", "SSH-2.0-none\r\n");
    serve("web.sock", "HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{\"this\": \"is other\"}");
    let silent = listen("silent.sock");
    std::fs::write(user.socket("file.sock"), "").expect("writes");
    let _vm = user.vm("db");
    let host = user.host(&[]);
    let mut frames = host.follow("/api/fleet");
    let health = |frame: &Value, name: &str| other(frame, name).map(|it| it["health"].clone());
    until("all of them", || {
        let frame = frames.next("fleet");
        let all = [("ssh.sock", "foreign"), ("web.sock", "foreign"), ("silent.sock", "stuck")];
        all.iter().all(|(name, wanted)| health(&frame, name) == Some((*wanted).into())).then_some(())
    });
    for _ in 0..3 {
        let frame = frames.next("fleet");
        assert_eq!(other(&frame, "file.sock"), None);
        let names: Vec<&Value> = frame["vms"].as_array().expect("a list").iter().map(|vm| &vm["name"]).collect();
        assert_eq!(names, ["db"]);
    }
    assert_eq!(asked.load(Ordering::Relaxed), 2, "each was asked once");
    silent.set_nonblocking(true).expect("can be set");
    assert_eq!(silent.incoming().take_while(Result::is_ok).count(), 1, "one connection stays");
    let metrics = host.metrics();
    assert!(metrics.contains("larder_host_sockets{state=\"foreign\"} 2"), "{metrics}");
    assert!(!metrics.contains(r#"domain="silent""#), "it may be no VM's");
}

#[test]
fn sockets_of_disks_are_left_alone() {
    let user = User::new();
    // The disk's socket has a name that a VM's could have.
    user.write("web", &format!("socket = \"{}\"", super::text(&user.socket("other.sock"))));
    let web = user.start("web");
    // This socket is known only from its own server.
    user.write("db", &format!("socket = \"{}\"", super::text(&user.socket("db-vda.sock"))));
    let db = user.start("db");
    std::fs::remove_file(user.file("db")).expect("was there");
    let host = user.host(&[]);
    let mut frames = host.follow("/api/fleet");
    let frame = (0..3).map(|_| frames.next("fleet")).last().expect("there are three");
    assert_eq!(frame["others"], serde_json::json!([]), "{frame}");
    assert!(user.socket("other.sock").exists() && user.socket("db-vda.sock").exists());
    for process in [&web, &db] {
        let said = process.output();
        assert!(!said.contains("front-end") && !said.contains("WARN"), "{said}");
    }
}

#[test]
fn unreadable_sockets_are_reported() {
    super::support::require_root("to have a socket that its test's user may not use");
    let user = User::new();
    let _others = UnixListener::bind(user.socket("theirs.sock")).expect("binds");
    std::fs::set_permissions(user.socket("theirs.sock"), PermissionsExt::from_mode(0o600)).expect("ours");
    let host = user.host(&[]);
    let mut frames = host.follow("/api/fleet");
    let told = until("the socket", || other(&frames.next("fleet"), "theirs.sock"));
    assert_eq!(told["health"], "denied", "{told}");
    assert!(told["why"].as_str().is_some_and(|why| why.contains("you may not connect")), "{told}");
}

#[test]
fn vms_are_queried_only_on_demand() {
    let user = User::new();
    let listener = UnixListener::bind(user.socket("web.sock")).expect("binds");
    std::fs::set_permissions(user.socket("web.sock"), PermissionsExt::from_mode(0o777)).expect("ours");
    let host = user.host(&[]);
    // Static pages work without queries.
    let (head, _) = host.get("/", &[]);
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    listener.set_nonblocking(true).expect("can be set");
    assert!(listener.accept().is_err(), "nobody has come");
    drop(host.metrics());
    assert!(listener.accept().is_ok(), "now he has");
}

#[test]
fn host_exit_harms_no_vm() {
    let user = User::new();
    let _web = user.vm("web");
    let mut host = user.host(&[]);
    let mut frames = host.follow("/api/vm/web");
    frames.next("vm");
    host.process.kill();
    super::run_tool("qemu-io", &["-f", "raw", "-c", "write 0 1M", &user.nbd("web")]);
    let mut host = user.host(&[]);
    host.follow("/api/vm/web").next("vm");
    host.process.signal(libc::SIGTERM);
    assert!(host.process.wait(TEST_TIMEOUT).expect("ends").success());
}

#[test]
fn vm_page_streams_events() {
    let user = User::new();
    let _web = user.vm("web");
    let host = user.host(&[]);
    let mut frames = host.follow("/api/vm/web");
    let event = until("the event", || {
        let event = frames.next("log");
        (event["text"] == "ready").then_some(event)
    });
    assert_eq!(event["level"], "info", "{event}");
    let none = host.follow("/api/vm/nobody").next("vm");
    assert!(none["vm"].is_null(), "{none}");
}

/// Creates a FIFO without a writer, an endless file and a very long one among the VMs' files.
fn add_odd_files(user: &User) {
    let made = std::process::Command::new("mkfifo").arg(user.file("fifo")).status();
    assert!(made.expect("mkfifo is there").success());
    std::os::unix::fs::symlink("/dev/zero", user.file("zeros")).expect("links");
    let long = std::fs::File::create(user.file("long")).expect("a file");
    long.set_len(1 << 40).expect("tmpfs has no blocks for it");
}

/// A running VM is watched even if there are more VMs than can be watched; the page and the metrics count the others.
#[test]
fn running_vm_is_watched_among_many() {
    let user = User::new();
    add_odd_files(&user);
    for number in 0..1100 {
        std::fs::write(user.file(&format!("a{number}")), "[[disk]]\nimage = \"/dev/null\"\nformat = \"raw\"\n")
            .expect("writes");
    }
    let _running = user.vm("zz");
    let host = user.host(&[]);
    host.vm_when("zz", |vm| vm["health"] == "up");
    let frame = host.follow("/api/fleet").next("fleet");
    // The files of 1100 VMs that do not run, and of one that does.
    assert_eq!(frame["left_out"], serde_json::json!({ "sockets": 0, "stopped": 77 }));
    let metrics = host.metrics();
    for line in [
        r#"larder_host_left_out{state="socket"} 0"#,
        r#"larder_host_left_out{state="stopped"} 77"#,
        r#"larder_vm_up{domain="zz"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

/// Commands that read the files of all VMs do not block on unusual files.
#[test]
fn odd_files_block_no_command() {
    let user = User::new();
    add_odd_files(&user);
    let _vm = user.vm("web");
    for (arguments, words) in [
        (&["status"][..], "it is a FIFO, not a regular file"),
        (&["status"], "it is a device, not a regular file"),
        (&["status"], "it is longer than the limit of 4194304 bytes"),
        (&["top", "--batch", "-n", "1"], "web"),
        (&["advise", "--for", "500ms"], ""),
        (&["vm", "web", "--check"], "web: 1 disk can be served, and served already"),
        (&["vm", "fifo", "--check"], "fifo.toml: it is a FIFO, not a regular file"),
        (&["vm", "zeros"], "zeros.toml: it is a device, not a regular file"),
    ] {
        let mut process = Process::start(user.larder(arguments)).expect("starts");
        process.wait_for(words, TEST_TIMEOUT).expect("says so");
        process.wait(TEST_TIMEOUT).expect("ends");
    }
}
