//! The control socket and `larder status`, with curl as the independent client.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::process::Process;
use serde_json::{Value, json};
use support::{
    TEST_TIMEOUT, create_image, disk_serve_command, larder_path, run_command, run_tool, temp_dir_on_disk,
    temp_dir_on_tmpfs,
};
use tempfile::TempDir;

/// A server with its sockets in its own directory.
struct Served {
    folder: TempDir,
    process: Process,
}

impl Served {
    /// Serves `image`.
    fn start(folder: TempDir, image: &Path, options: &[&str]) -> Self {
        let mut command = disk_serve_command(&["--nbd", &nbd(folder.path())]);
        command.arg(image).arg("--control").arg(control(folder.path())).args(options);
        let process = Process::start(command).expect("larder starts");
        process.wait_for("serving", TEST_TIMEOUT).expect("it serves");
        Self { folder, process }
    }

    /// Serves a qcow2 image of 64 MiB full of data in `folder`, which is on a disk: data in the host's memory is not
    /// prefetched.
    fn of_data(folder: &TempDir) -> Self {
        let image = folder.path().join("disk.qcow2");
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "64M"]);
        run_tool("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 64M", text(&image)]);
        Self::start(temp_dir_on_tmpfs(), &image, &[])
    }

    fn control(&self) -> PathBuf {
        control(self.folder.path())
    }

    /// Returns the state of the only disk from `larder status`.
    fn disk(&self) -> Value {
        let (code, said) = status(&self.control(), &["--output", "json"]);
        assert_eq!(code, Some(0), "{said}");
        let all: Value = serde_json::from_str(&said).expect("it is JSON");
        assert_eq!(all["disks"].as_array().map(Vec::len), Some(1), "{said}");
        all["disks"][0].clone()
    }

    /// Returns the read-ahead statistics, once the fetches in flight have ended.
    fn prefetch(&self) -> Prefetch {
        let now = || self.disk()["prefetch"].clone();
        let mut told = now();
        loop {
            let again = now();
            if again == told {
                return Prefetch(again);
            }
            told = again;
        }
    }

    /// Reads from the disk's beginning, 4 KiB at a time.
    fn read_in_order(&self, count: u32) {
        let count = count.to_string();
        let of_bench = ["bench", "-f", "raw", "-s", "4096", "-S", "4096", "-d", "1", "-c", &count];
        let uri = nbd(self.folder.path());
        run_tool("qemu-img", &[of_bench.as_slice(), &[&uri]].concat());
    }

    /// Runs commands of qemu-io.
    fn io(&self, commands: &[&str]) {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let all: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).collect();
        let uri = nbd(self.folder.path());
        run_tool("qemu-io", &[all.as_slice(), &[&uri]].concat());
    }

    /// Sends an invalid request, and returns the answer.
    fn send(&self, bytes: &[u8]) -> String {
        let mut client = UnixStream::connect(self.control()).expect("connects");
        // The server may close the connection before it has read everything.
        let _ = client.write_all(bytes);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        String::from_utf8(answer).expect("text")
    }

    /// Returns curl's result: the headers, and the body.
    fn curl(&self, arguments: &[&str]) -> (String, String) {
        let control = self.control();
        let all = ["--silent", "--include", "--unix-socket", text(&control)];
        let said = run_tool("curl", &[&all, arguments].concat());
        let (head, body) = said.split_once("\r\n\r\n").unwrap_or((&said, ""));
        (head.to_owned(), body.to_owned())
    }
}

/// Read-ahead statistics of a disk.
struct Prefetch(Value);

impl Prefetch {
    fn get(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    /// Returns the number of reads of about 4 KiB that read-ahead has handled.
    fn reads(&self) -> u64 {
        ["hits", "partial_hits", "waits", "misses"].map(|name| self.get(name)).iter().sum()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn nbd(folder: &Path) -> String {
    format!("nbd+unix:///?socket={}", folder.join("n").display())
}

fn control(folder: &Path) -> PathBuf {
    folder.join("c")
}

/// Runs `larder status`; returns the exit status and the output.
fn status(control: &Path, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.arg("status").arg(control).args(options);
    run_command(command)
}

#[test]
fn prefetch_statistics_match_client_reads() {
    let disk = temp_dir_on_disk();
    let served = Served::of_data(&disk);
    let at_first = served.prefetch();
    assert_eq!((at_first.reads(), at_first.get("fetched")), (0, 0));
    assert!(at_first.get("memory") <= at_first.get("memory_limit"));
    assert_eq!(at_first.get("memory_limit"), 4 << 20);
    served.read_in_order(1000);
    let in_order = served.prefetch();
    assert_eq!(in_order.reads(), 1000, "{}", in_order.0);
    assert_eq!(in_order.get("used") + 4096 * in_order.get("misses"), 1000 * 4096);
    assert!(in_order.get("misses") < 100, "{}", in_order.0);
    assert_eq!((in_order.get("wasted"), in_order.get("errors")), (0, 0));
    assert_eq!(in_order.get("fetched"), in_order.get("used") + in_order.get("unread"));
    assert_eq!(in_order.0["streams"], serde_json::json!({"now": 1, "forward": 1, "backward": 0, "strided": 0}));

    // Random reads, and one that is too long.
    served.io(&["read 40M 4k", "read 20M 4k", "read 50M 4k", "read 10M 256k"]);
    let without = served.prefetch();
    assert_eq!(without.get("misses"), in_order.get("misses") + 3);
    assert_eq!(without.get("bypassed"), in_order.get("bypassed") + 1);
    assert_eq!(without.get("fetched"), in_order.get("fetched"));

    // A write over data that was prefetched for the reader.
    served.io(&["write -P 8 4096000 4k"]);
    let written = served.prefetch();
    assert_eq!(written.get("wasted"), 4096);
    assert_eq!(written.get("unread"), without.get("unread") - 4096);
}

/// Prefetched data is dropped between clients, so that other programs' writes to an export are seen.
#[test]
fn next_client_sees_foreign_writes() {
    let (disk, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let image = disk.path().join("disk.raw");
    run_tool("qemu-img", &["create", "-q", "-f", "raw", text(&image), "64M"]);
    run_tool("qemu-io", &["-f", "raw", "-c", "write -P 7 0 64M", text(&image)]);
    let socket = sockets.path().join("export");
    let mut command = Command::new("qemu-nbd");
    command.args(["-f", "raw", "--persistent", "--shared=0", "-k", text(&socket), text(&image)]);
    let _export = Process::start(command).expect("qemu-nbd starts");
    let give_up = Instant::now() + TEST_TIMEOUT;
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < give_up, "qemu-nbd does not listen");
        std::thread::yield_now();
    }
    let export = format!("nbd+unix:///?socket={}", text(&socket));
    let served = Served::start(temp_dir_on_tmpfs(), Path::new(&export), &[]);
    served.read_in_order(256);
    let after = served.prefetch();
    assert!(after.get("fetched") > after.get("used"), "{}", after.0);
    assert_eq!(after.get("unread"), 0, "{}", after.0);
    // The write is after the data that was read, within the prefetched range.
    run_tool("qemu-io", &["-f", "raw", "-c", "write -P 9 1M 64k", &export]);
    served.io(&["read -P 9 1M 4k", "read -P 9 1028k 4k", "read -P 9 1032k 4k"]);
}

#[test]
fn text_output_matches_json() {
    let disk = temp_dir_on_disk();
    let mut served = Served::of_data(&disk);
    served.read_in_order(256);
    served.prefetch();
    let (head, body) = served.curl(&["http://localhost/v1/disks"]);
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains("content-type: application/json"), "{head}");
    let of_curl: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(of_curl["disks"][0]["prefetch"], served.prefetch().0);
    let (code, said) = status(&served.control(), &[]);
    assert_eq!(code, Some(0));
    let line = |name: &str| {
        let found = said.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'));
        found.unwrap_or_else(|| panic!("no {name} in {said}")).trim().to_owned()
    };
    assert_eq!(line("image"), text(&disk.path().join("disk.qcow2")));
    assert_eq!(line("disk"), "qcow2, 64 MiB (67108864 bytes), sectors of 512 B");
    assert_eq!(line("read-ahead"), "on, with up to 4 MiB of memory");
    assert_eq!(line("reads"), "256");
    let hits = served.prefetch().get("hits");
    assert!(line("hits").starts_with(&format!("{hits} (")), "{said}");
    assert!(line("wasted").starts_with("0 B ("), "{said}");
    assert_eq!(line("streams so far"), "1 forward, 0 backward, 0 strided");
    served.process.signal(libc::SIGTERM);
    served.process.wait(TEST_TIMEOUT).expect("it ends");
    assert!(served.process.output().contains(": read ahead "));
}

#[test]
fn status_reports_disk_options() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let served = Served::start(folder, &disk, &["--prefetch", "off", "--block-size", "4096"]);
    let told = served.disk();
    assert_eq!(told["image"], text(&disk));
    assert_eq!((&told["format"], &told["size"]), (&"raw".into(), &(1 << 20).into()));
    assert_eq!((&told["block_size"], &told["read_only"]), (&4096.into(), &false.into()));
    assert_eq!(told["prefetch"]["memory_limit"], 0);
    let (_, said) = status(&served.control(), &[]);
    assert!(said.contains("read-ahead:       off"), "{said}");
    drop(served);

    for (options, read_only, memory) in [
        (["--share", "--read-only"].as_slice(), true, None),
        (&["--prefetch", "8MiB", "--read-only"], true, Some(8 << 20)),
    ] {
        let folder = temp_dir_on_tmpfs();
        let disk = create_image(folder.path(), 1 << 20);
        let told = Served::start(folder, &disk, options).disk();
        assert_eq!(told["read_only"], read_only, "{options:?}");
        assert_eq!(told["prefetch"]["memory_limit"].as_u64(), memory, "{options:?}");
    }
}

#[test]
fn invalid_request_gets_explanation() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let served = Served::start(folder, &disk, &[]);
    for (arguments, status, part) in [
        (["http://localhost/", "--get"].as_slice(), "404 ", "there is /v1/disks"),
        (&["http://localhost/v1/disk"], "404 ", "there is no /v1/disk;"),
        (&["http://localhost/v1/disks", "--data", "x=1"], "405 ", "GET and HEAD"),
        (&["http://localhost/v1/disks", "-X", "DELETE"], "405 ", "GET and HEAD"),
        (&["http://localhost/v1/disks", "-H", "Host:"], "400 ", "Host"),
    ] {
        let (head, body) = served.curl(arguments);
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{arguments:?}: {head}");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let error = body["error"].as_str().expect("an error");
        assert!(error.contains(part), "{arguments:?}: {error}");
        let allow = head.lines().find(|line| line.starts_with("allow: "));
        assert_eq!(allow, (status == "405 ").then_some("allow: GET, HEAD"), "{head}");
    }
    let (head, body) = served.curl(&["--head", "http://localhost/v1/disks"]);
    assert!(head.starts_with("HTTP/1.1 200 ") && body.is_empty(), "{head} {body}");
    // A client may shut down its write side after the request; HTTP/1.0 clients send no host.
    let mut client = UnixStream::connect(served.control()).expect("connects");
    client.write_all(b"GET /v1/disks HTTP/1.0\r\n\r\n").expect("takes it");
    client.shutdown(std::net::Shutdown::Write).expect("can be closed");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("answers");
    assert!(answer.contains("{\"disks\":["), "{answer}");
    for (request, status) in [
        ("no such thing\r\n\r\n".to_owned(), "400 "),
        (format!("GET /v1/disks HTTP/1.1\r\nhost: x\r\n{}\r\n", "x: y\r\n".repeat(5000)), "431 "),
        (format!("GET /v1/disks HTTP/1.1\r\nhost: {}", "y".repeat(1 << 20)), "431 "),
        (format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "y".repeat(1 << 20)), "431 "),
    ] {
        let answer = served.send(request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
    served.disk();
}

#[test]
fn impossible_patch_is_refused_with_reason() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let served = Served::start(folder, &disk, &[]);
    let patch = |path: &str, body: &str| {
        let url = format!("http://localhost{path}");
        served.curl(&[&url, "-X", "PATCH", "--data-binary", body])
    };
    let long = format!("{{\"cache\":{{\"mode\":\"{}\"}}}}", "x".repeat(5000));
    let disk = "/v1/disks/0";
    for (path, body, status, part) in [
        (disk, "{\"cache\":{\"mode\":\"wa\"}}", "409 ", "has no cache"),
        (disk, "{\"cache\":{\"endurance\":1073741824}}", "409 ", "has no cache"),
        (disk, "{\"cache\":{\"mode\":\"x\"}}", "400 ", "wt (write-through)"),
        (disk, "{\"cache\":{\"made\":\"wa\"}}", "400 ", "unknown field `made`"),
        (disk, "{\"cache\":{\"endurance\":1}}", "400 ", "endurance: "),
        (disk, "{\"limits\":{\"iops-totl\":1}}", "400 ", "limits: 'iops-totl' is not a limit"),
        (disk, "{\"limits\":{\"iops-total\":1,\"iops-read\":1}}", "409 ", "not both"),
        (disk, "{\"limits\":{\"iops-total\":\"1\"}}", "400 ", "invalid type"),
        (disk, "{\"prefetch\":{\"memory\":1}}", "400 ", "prefetch: memory: give at least 512 KiB"),
        (disk, "{\"prefetch\":{\"ahead\":0}}", "400 ", "prefetch: ahead: give 4 KiB"),
        (disk, "[]", "400 ", "the body must be JSON like {\"limits\":"),
        (disk, "{\"cache\":[\"wt\"]}", "400 ", "the body must be JSON like {\"limits\":"),
        (disk, "", "400 ", "the body must be JSON like {\"limits\":"),
        (disk, &long, "400 ", "length limit"),
        ("/v1/disks/1", "{}", "404 ", "there is no disk '1'; the disks are: 0"),
        ("/v1/disks/0/", "{}", "404 ", "there is no /v1/disks/0/;"),
    ] {
        let (head, answer) = patch(path, body);
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{path} {body}: {head}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        let error = answer["error"].as_str().expect("an error");
        assert!(error.contains(part), "{path} {body}: {error}");
    }
    let (head, _) = served.curl(&["http://localhost/v1/disks/0", "-X", "PUT"]);
    assert!(head.starts_with("HTTP/1.1 405 ") && head.contains("\r\nallow: GET, HEAD, PATCH"), "{head}");
    let (head, answer) = served.curl(&["http://localhost/v1/reload", "-X", "POST"]);
    assert!(head.starts_with("HTTP/1.1 409 ") && answer.contains("command line"), "{head}: {answer}");
    let told = served.disk();
    assert_eq!((&told["cache"], &told["limits"]), (&Value::Null, &json!({})));
    assert_eq!(told["prefetch"]["memory_limit"], 4 << 20);
}

#[test]
fn guest_requests_are_counted_exactly() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 16 << 20);
    let served = Served::start(folder, &disk, &[]);
    served.io(&["read 0 4k", "read 4k 8k", "write -P 1 1M 64k", "write -z 2M 1M", "discard 4M 2M", "flush"]);
    let requests = served.disk()["requests"].clone();
    let of = |kind: &str| {
        let of = &requests[kind];
        assert_eq!(of["errors"], 0, "{kind}: {requests}");
        (of["count"].as_u64().expect("a number"), of["bytes"].as_u64().expect("a number"))
    };
    assert_eq!(of("read"), (2, 12 << 10));
    assert_eq!(of("write"), (1, 64 << 10));
    assert_eq!(of("write_zeroes"), (1, 1 << 20));
    assert_eq!(of("discard"), (1, 2 << 20));
    // qemu-io also flushes when it exits.
    assert!(of("flush").0 >= 1, "{requests}");
    assert_eq!(requests["under_way"], 0);
    // Only requests that waited for the disk are timed.
    let (write, busy) = (&requests["write"]["latency"], &requests["busy_ns"]);
    assert!(write["sum_ns"].as_u64() <= busy.as_u64(), "{requests}");
}

#[test]
fn limits_and_prefetch_change_at_runtime() {
    let disk = temp_dir_on_disk();
    let served = Served::of_data(&disk);
    let patch = |body: Value| {
        let (head, answer) =
            served.curl(&["http://localhost/v1/disks/0", "-X", "PATCH", "--data-binary", &body.to_string()]);
        assert!(head.starts_with("HTTP/1.1 200 "), "{body}: {head} {answer}");
        serde_json::from_str::<Value>(&answer).expect("JSON")
    };
    let limits = json!({"iops-total": 20, "bps-read": 1 << 20});
    assert_eq!(patch(json!({"limits": limits}))["limits"], limits);
    let begun = Instant::now();
    served.io(&["read 0 4k"; 60]);
    assert!(begun.elapsed() > Duration::from_secs(1), "60 reads at 20 a second");
    assert_eq!(patch(json!({"limits": {}}))["limits"], json!({}));
    served.read_in_order(256);
    let before = served.prefetch();
    assert!(before.get("fetched") > 0, "{}", before.0);
    let off = patch(json!({"prefetch": {"memory": 0}}));
    assert_eq!(off["prefetch"]["memory_limit"], 0);
    served.read_in_order(256);
    let after = served.prefetch();
    assert_eq!(after.get("fetched"), before.get("fetched"), "{}", after.0);
    patch(json!({"prefetch": {"memory": 8 << 20, "ahead": 64 << 10}}));
    served.read_in_order(256);
    let again = served.prefetch();
    assert!(again.get("fetched") > before.get("fetched"), "{}", again.0);
    assert_eq!((again.get("memory_limit"), again.get("ahead")), (8 << 20, 64 << 10));
}

/// Events are streamed as they happen; a client that reconnects gets the ones it missed, without duplicates.
#[test]
fn events_are_streamed_and_resumed() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let mut served = Served::start(folder, &disk, &[]);
    let listen = |last: &str| {
        let mut client = UnixStream::connect(served.control()).expect("connects");
        let request = format!("GET /v1/events HTTP/1.1\r\nhost: x\r\nlast-event-id: {last}\r\n\r\n");
        client.write_all(request.as_bytes()).expect("takes it");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("can be set");
        BufReader::new(client)
    };
    let mut id = String::new();
    let mut until = |listener: &mut BufReader<UnixStream>, part: &str| loop {
        let mut line = String::new();
        assert!(listener.read_line(&mut line).expect("told") > 0, "the end comes before {part}");
        if let Some(new) = line.strip_prefix("id: ") {
            id = new.trim().to_owned();
        }
        if let Some(event) = line.strip_prefix("data: ")
            && line.contains(part)
        {
            let event: Value = serde_json::from_str(event).expect("JSON");
            return (event, id.clone());
        }
    };
    let mut first = listen("");
    let (event, _) = until(&mut first, "serving");
    assert_eq!(event["level"], "info");
    let set = |limits: &str| {
        let body = format!("{{\"limits\":{{\"iops-total\":{limits}}}}}");
        served.curl(&["http://localhost/v1/disks/0", "-X", "PATCH", "--data-binary", &body]);
    };
    set("1000");
    let (event, last) = until(&mut first, "iops-total=1000");
    assert_eq!(event["about"]["disk"], text(&disk));
    set("2000");
    // A client that reconnects gets the events in between, and none twice.
    let mut again = listen(&last);
    let (_, next) = until(&mut again, "iops-total=");
    let number = |id: &str| id.rsplit_once('-').and_then(|(_, number)| number.parse::<u64>().ok());
    assert_eq!(number(&next), number(&last).map(|number| number + 1));
    // Subscribers that do not read, and too many of them, do no harm.
    let crowd: Vec<_> = (0..40).map(|_| listen("")).collect();
    set("3000");
    until(&mut first, "iops-total=3000");
    drop(crowd);
    let crowd: Vec<_> = (0..40).map(|_| listen("")).collect();
    served.process.signal(libc::SIGTERM);
    let ended = served.process.wait(TEST_TIMEOUT).expect("it ends");
    assert!(ended.success(), "{}", served.process.output());
    drop(crowd);
}

/// Hostile clients of the control socket block neither queries of the disk nor the server's exit.
#[test]
fn hostile_clients_block_nothing() {
    let disk = temp_dir_on_disk();
    let mut served = Served::of_data(&disk);
    let connect = || UnixStream::connect(served.control()).expect("connects");
    let mut crowd: Vec<UnixStream> = (0..300).map(|_| connect()).collect();
    // The last 64 connections are kept.
    for client in &mut crowd[..236] {
        assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "it is still there");
    }
    served.disk();
    for (number, client) in crowd.iter_mut().enumerate() {
        let rubbish: &[u8] = match number % 4 {
            0 => b"GET /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n",
            1 => b"\x16\x03\x01\x02\x00",
            2 => b"GET ",
            _ => b"",
        };
        // The connection may have been closed by the server.
        let _ = client.write_all(rubbish);
    }
    served.io(&["read -P 7 0 1M", "write -P 9 32M 1M", "read -P 9 32M 1M"]);
    served.disk();
    drop(crowd);
    served.disk();
    // These clients are connected when the server exits.
    let mut crowd: Vec<UnixStream> =
        (0..10).map(|_| UnixStream::connect(served.control()).expect("connects")).collect();
    served.disk();
    served.process.signal(libc::SIGTERM);
    let ended = served.process.wait(TEST_TIMEOUT).expect("it ends");
    assert!(ended.success(), "{}", served.process.output());
    assert!(matches!(crowd[0].read(&mut [0]), Ok(0) | Err(_)));
    assert!(!served.control().exists());
}

/// Idle clients do not keep others from an answer: they are disconnected for newer ones, or after a timeout.
#[test]
fn idle_clients_are_disconnected() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let served = Served::start(folder, &disk, &[]);
    let connect = || UnixStream::connect(served.control()).expect("connects");
    let idle: Vec<UnixStream> = (0..64).map(|_| connect()).collect();
    for _ in 0..20 {
        served.disk();
    }
    // Twenty of them were disconnected for newer clients, the others by the timeout.
    for mut client in idle {
        let mut said = String::new();
        let _ = client.read_to_string(&mut said);
        assert_eq!(said, "");
    }
}

/// `larder status` retries when the server closes the connection without an answer, and in the end reports that.
#[test]
fn status_retries_closed_connection() {
    let folder = temp_dir_on_tmpfs();
    let path = control(folder.path());
    let listener = UnixListener::bind(&path).expect("binds");
    let hangs_up = |times: usize| {
        for number in 0..times {
            let (mut client, _) = listener.accept().expect("a client");
            if number % 2 == 0 {
                // The connection is closed alternately after the request and before it.
                let _ = client.read(&mut [0; 1024]);
            }
        }
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            hangs_up(3);
            let (mut client, _) = listener.accept().expect("a client");
            let _ = client.read(&mut [0; 1024]).expect("a request");
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{\"disks\":[]}";
            client.write_all(answer.as_bytes()).expect("takes it");
            // The client also queries the memory.
            let (mut client, _) = listener.accept().expect("a client");
            let _ = client.read(&mut [0; 1024]).expect("a request");
            let none = r#"{"error":"there is no /v1/memory"}"#;
            let answer = format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{none}", none.len());
            client.write_all(answer.as_bytes()).expect("takes it");
        });
        let (code, said) = status(&path, &["--output", "json"]);
        assert!(code == Some(0) && said.contains("disks"), "{said}");
        server.join().expect("ends");
        let server = scope.spawn(|| hangs_up(20));
        let (code, said) = status(&path, &[]);
        assert!(code == Some(2) && said.contains("it has too many clients"), "{said}");
        server.join().expect("ends");
    });
}

#[test]
fn socket_is_private_whatever_the_umask() {
    for umask in ["0", "022", "077"] {
        let folder = temp_dir_on_tmpfs();
        let disk = create_image(folder.path(), 1 << 20);
        let mut command = Command::new("sh");
        command
            .args(["-c", "umask $0; exec \"$@\"", umask])
            .arg(larder_path())
            .args(["disk", "serve", "--nbd", &nbd(folder.path())])
            .arg(&disk)
            .arg("--control")
            .arg(control(folder.path()));
        let process = Process::start(command).expect("starts");
        process.wait_for("serving", TEST_TIMEOUT).expect("it serves");
        let mode = control(folder.path()).metadata().expect("is there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "umask {umask}");
    }
}

/// A file at the socket's path is left alone, unless it is the socket of a server that has exited.
#[test]
fn only_dead_servers_socket_is_replaced() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let path = control(folder.path());
    let refused = |part: &str| {
        let mut command = disk_serve_command(&["--nbd", &nbd(folder.path())]);
        command.arg(&disk).arg("--control").arg(&path);
        let (code, said) = run_command(command);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(part), "{said}");
        assert!(!said.contains("INFO serving"), "{said}");
        assert!(!folder.path().join("n").exists(), "the disk's own socket is left behind");
    };
    std::fs::write(&path, "mine").expect("writes");
    refused("exists and is not a socket");
    assert_eq!(std::fs::read(&path).expect("is there"), b"mine");
    std::fs::remove_file(&path).expect("is there");
    let other = UnixListener::bind(&path).expect("binds");
    refused("another process listens on it");
    drop(other);
    let mut served = Served::start(folder, &disk, &[]);
    served.disk();
    served.process.kill();
    assert!(path.exists());
    let served = Served::start(served.folder, &disk, &[]);
    served.disk();
}

#[test]
fn wrong_socket_error_names_right_one() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let dead = folder.path().join("dead");
    drop(UnixListener::bind(&dead).expect("binds"));
    let missing = folder.path().join("missing");
    let served = Served::start(folder, &disk, &[]);
    for (path, part) in [
        (missing.as_path(), "give the path that the server was given with --control"),
        (&dead, "no process listens"),
        (&disk, "is not a socket"),
        (&served.folder.path().join("n"), "not a control socket of Larder"),
        (Path::new("/dev/null"), "is not a socket"),
    ] {
        let (code, said) = status(path, &[]);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(part) && said.contains(text(path)), "{said}");
    }
}
