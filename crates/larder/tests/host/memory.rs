//! VMs with managed memory: `larder host` reports the memory with the disks, as the control sockets report it.

use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::memory::{Attach, Pager, Verifier};
use larder_bench::campaign::verifier;
use larder_vm::control::memory::MemoryState;
use serde_json::Value;

use super::support::{larder_path, require_root, run_command};
use super::{TEST_TIMEOUT, User, text, until, value_in};

/// Variable that makes this test program act as the managed program.
const VERIFIER: &str = "LARDER_TEST_VERIFIER";

/// Program whose memory is managed. It is no test: other tests start it.
#[test]
#[ignore = "started by other tests"]
fn verified() {
    if std::env::var_os(VERIFIER).is_none() {
        return;
    }
    let arguments = verifier::Arguments {
        mib: MEMORY_MIB as usize,
        threads: 2,
        hot: 25,
        compressible: true,
        incompressible: false,
        seed: u64::from(std::process::id()),
    };
    verifier::main(&arguments).expect("all is as it was written");
}

/// The program's memory, in MiB.
pub(super) const MEMORY_MIB: u64 = 64;

/// A process that uses its memory, and its pager.
pub(super) struct Managed {
    pub(super) verifier: Verifier,
    pub(super) pager: Pager,
}

impl User {
    /// Starts a process whose memory is managed for the VM `name`, with a socket that this user may use.
    pub(super) fn memory(&self, name: &str, words: &[&str]) -> Managed {
        require_root("to manage the memory of a process");
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--ignored", "--exact", "memory::verified", "--nocapture"]);
        command.env(VERIFIER, "yes");
        let verifier = Verifier::start(command).expect("a program to manage");
        let socket = self.socket(&format!("{name}-memory.sock"));
        let attach = Attach::new(larder_path(), self.folder.path(), verifier.pid(), words).at(&socket);
        let pager = attach.start().expect("it attaches");
        self.own(&socket);
        Managed { verifier, pager }
    }

    /// Starts a process whose memory is managed with all tiers, each of which holds pages.
    pub(super) fn memory_with_all(&self, name: &str) -> Managed {
        let swap = self.images.path().join(format!("{name}.swap"));
        let words = ["--budget", "24MiB", "--compressed", "2MiB", "--budget-min", "20MiB", "--budget-max", "24MiB"];
        let swap = ["--swap-cache", text(&swap), "--swap-size", "256MiB"];
        let managed = self.memory(name, &[&words[..], &swap].concat());
        let has_all = |state: &MemoryState| {
            let faults = [&state.faults.compressed, &state.faults.disk];
            state.compressed.pages > 0
                && state.disks[0].written_bytes > 0
                && state.disks[0].read_bytes > 0
                && faults.iter().all(|faults| faults.count > 0)
                && state.refaults > 0
        };
        managed.pager.wait_until(has_all).expect("something is in all tiers");
        managed
    }
}

impl Managed {
    /// Stops the process, after which its memory's state soon stays constant.
    pub(super) fn stop(&self) {
        self.verifier.process.signal(libc::SIGSTOP);
    }
}

/// Returns the VMs of that name in an event about the fleet.
fn of_fleet(frame: &Value, name: &str) -> Vec<Value> {
    let vms = frame["vms"].as_array().expect("a list").iter();
    vms.filter(|vm| vm["name"] == name).cloned().collect()
}

/// Managed memory is shown with the VM's disks, also after its pager was killed, and alone for a VM without disks.
#[test]
fn memory_is_shown_with_its_vm() {
    let user = User::new();
    let _web = user.vm("web");
    let mut memory = user.memory("web", &["--budget", "40MiB"]);
    let _alone = user.memory("db", &["--budget", "40MiB"]);
    let host = user.host(&[]);
    host.vm_when("web", |vm| vm["memory"].is_object() && vm["totals"].is_object());
    host.vm_when("db", |vm| vm["memory"].is_object() && vm["disks"] == 0);
    let frame = host.follow("/api/fleet").next("fleet");
    for name in ["web", "db"] {
        let rows = of_fleet(&frame, name);
        assert_eq!(rows.len(), 1, "{name}: {frame}");
        assert_eq!(rows[0]["health"], "up");
    }
    assert_eq!(frame["vms"].as_array().map(Vec::len), Some(2), "{frame}");
    let page = host.follow("/api/vm/web").next("vm");
    let state = memory.pager.state().expect("answers");
    assert_eq!(page["disks"].as_array().map(Vec::len), Some(1), "{page}");
    assert_eq!(page["memory"]["budget"], state.budget, "{page}");
    assert_eq!(page["memory"]["pid"], state.pid, "{page}");
    assert!(page["vm"]["memory_socket"].as_str().is_some_and(|path| path.ends_with("web-memory.sock")), "{page}");

    // From now on the guest waits for its memory.
    memory.pager.process.kill();
    let killed = host.vm_when("web", |vm| vm["health"] == "killed");
    assert!(killed["why"].as_str().is_some_and(|why| why.starts_with("its memory: ")), "{killed}");
    assert!(killed["totals"].is_object() && killed["memory"].is_null(), "{killed}");
    let metrics = host.metrics();
    assert_eq!(value_in(&metrics, r#"larder_vm_up{domain="web"}"#), Some(0.0));
    assert_eq!(value_in(&metrics, r#"larder_memory_used_bytes{domain="web"}"#), None);
    assert!(value_in(&metrics, r#"larder_disk_size_bytes{domain="web",target_device="vda"}"#).is_some());
    let page = host.follow("/api/vm/web").next("vm");
    assert!(page["disks_up"] == true && page["memory"].is_null(), "{page}");
}

/// Returns the differences between the metrics of "web" and its own control socket.
fn differences(state: &MemoryState, metrics: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |name: &str, more: &str, told: f64| {
        let comma = if more.is_empty() { "" } else { "," };
        let sample = format!("larder_memory_{name}{{domain=\"web\"{comma}{more}}}");
        let value = value_in(metrics, &sample);
        // The last digits of a sum of seconds are rounded.
        if value.is_none_or(|value| (value - told).abs() > 1e-9) {
            found.push(format!("{sample} is {value:?}, and {told} is told"));
        }
    };
    let disk = &state.disks[0];
    let of_disk = r#"tier="swap-cache""#;
    for (name, more, told) in [
        ("size_bytes", "", state.size),
        ("resident_bytes", "", state.resident),
        ("budget_bytes", "", 24 << 20),
        ("budget_bound_bytes", r#"bound="min""#, 20 << 20),
        ("budget_bound_bytes", r#"bound="high""#, 24 << 20),
        ("used_bytes", "", state.used),
        ("compressed_pages", "", state.compressed.pages),
        ("compressed_bytes", "", state.compressed.used),
        // The minimum with a disk.
        ("compressed_limit_bytes", "", 6 << 20),
        ("disk_pages", of_disk, disk.pages),
        ("disk_live_bytes", of_disk, disk.live),
        ("disk_used_bytes", of_disk, disk.used),
        ("disk_limit_bytes", of_disk, disk.limit),
        ("disk_written_bytes_total", of_disk, disk.written_bytes),
        ("disk_read_bytes_total", of_disk, disk.read_bytes),
        ("fault_duration_seconds_count", r#"source="compressed""#, state.faults.compressed.count),
        ("fault_duration_seconds_count", r#"source="disk""#, state.faults.disk.count),
        ("refaults_total", "", state.refaults),
        ("evicted_pages_total", "", state.evicted_pages),
        ("evicted_bytes_total", "", state.evicted_bytes),
    ] {
        assert!(told > 0, "{name} is 0");
        compare(name, more, told as f64);
    }
    for (name, more, told) in [
        ("lost_pages", "", 0.0),
        ("disk_working", of_disk, 1.0),
        ("detaching", "", 0.0),
        ("problem", r#"reason="tiers-full""#, 0.0),
        ("budget_moves_total", r#"direction="up""#, 0.0),
        ("compression_ratio", "", state.compression_ratio().expect("there are some")),
        ("fault_duration_seconds_sum", r#"source="disk""#, state.faults.disk.sum_ns as f64 / 1e9),
    ] {
        compare(name, more, told);
    }
    found
}

#[test]
fn memory_metrics_match_control_socket() {
    let user = User::new();
    let memory = user.memory_with_all("web");
    let host = user.host(&[]);
    // Once the process is stopped, its memory's state soon stays constant. Metrics lag a second behind, so that they
    // match only after that.
    memory.stop();
    let give_up = Instant::now() + TEST_TIMEOUT;
    let (state, metrics) = loop {
        let metrics = host.metrics();
        let state = memory.pager.state().expect("answers");
        let found = differences(&state, &metrics);
        if found.is_empty() {
            break (state, metrics);
        }
        assert!(Instant::now() < give_up, "{found:#?}");
        std::thread::sleep(Duration::from_millis(200));
    };
    // A stopped process waits for nothing, or constantly for one page.
    let stall = r#"larder_memory_stall_seconds_total{domain="web",kind="some"}"#;
    let some = value_in(&metrics, stall).expect("is told");
    assert!(some > 0.0 && some <= state.time_ns as f64 / 1e9, "{some}");
}

#[test]
fn status_shows_memory() {
    let user = User::new();
    let _web = user.vm("web");
    let memory = user.memory_with_all("web");
    let mut alone = user.memory("db", &["--budget", "40MiB", "--budget-low", "20MiB"]);
    let (code, said) = run_command(user.larder(&["status"]));
    let line = |said: &str, words: &[&str]| {
        let is_it = |line: &&str| words.iter().all(|word| line.split_whitespace().any(|it| it == *word));
        said.lines().any(|line| is_it(&line))
    };
    assert_eq!(code, Some(0), "{said}");
    for words in [
        &["vm", "memory", "budget", "compressed"][..],
        &["web", "vda", "64", "no", "client"],
        &["web", "64", "24", "works"],
        &["db", "64", "40", "works"],
    ] {
        assert!(line(&said, words), "no {words:?} in {said}");
    }
    let (_, said) = run_command(user.larder(&["status", "web"]));
    for part in ["web.raw", "guest reads", "budget:           24 MiB, used ", "swap cache:", "  written:", " a day"] {
        assert!(said.contains(part), "no {part} in {said}");
    }
    let (_, said) = run_command(user.larder(&["status", "db"]));
    assert!(said.contains("bounds:") && said.contains("low 20 MiB") && !said.contains("image"), "{said}");
    let (_, said) = run_command(user.larder(&["status", "web", "--output", "json"]));
    let told: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(told["memory"]["budget"], 24 << 20, "{told}");
    assert_eq!(told["disks"].as_array().map(Vec::len), Some(1));
    let (_, said) = run_command(user.larder(&["status", "--output", "json"]));
    let told: Value = serde_json::from_str(&said).expect("JSON");
    let names: Vec<&Value> = told["vms"].as_array().expect("a list").iter().map(|vm| &vm["name"]).collect();
    assert_eq!(names, ["web", "db"], "{told}");
    assert_eq!(told["vms"][1]["memory"]["budget"], 40 << 20, "{told}");
    let (code, said) = run_command(user.larder(&["status", "0.1", "2"]));
    assert!(code == Some(0) && said.matches("%some").count() == 2, "{said}");
    let (_, said) = run_command(user.larder(&["status", "web", "0.1", "1", "--output", "json"]));
    let told: Value = serde_json::from_str(&said).expect("JSON");
    assert!(told["memories"][0]["evicted"].as_f64().is_some_and(|rate| rate > 0.0), "{told}");
    // After its pager was killed, a guest is kept waiting.
    alone.pager.process.kill();
    let (code, said) = run_command(user.larder(&["status"]));
    assert!(code == Some(1) && said.contains("db: its memory: no process listens"), "{said}");
    drop(memory);
}

/// `larder top` of that user in a terminal, which is tmux.
pub(super) struct Top(String);

impl Top {
    pub(super) fn start(user: &User) -> Self {
        let command = user.larder(&["top"]);
        let words = |text: &std::ffi::OsStr| format!("'{}' ", text.to_str().expect("UTF-8"));
        let envs = command.get_envs().filter_map(|(name, value)| {
            let (name, value) = (name.to_str()?, value?.to_str()?);
            Some(format!("'{name}={value}' "))
        });
        let mut line = String::from("env ");
        line.extend(envs);
        line.push_str(&words(command.get_program()));
        line.extend(command.get_args().map(words));
        let of_user = user.folder.path().file_name().unwrap_or_default().to_string_lossy();
        let top = Self(format!("larder-top{of_user}"));
        top.tmux(&["new-session", "-d", "-x", "160", "-y", "40", &line]);
        top
    }

    pub(super) fn tmux(&self, arguments: &[&str]) -> String {
        let mut tmux = Command::new("tmux");
        tmux.env("LC_ALL", "C.UTF-8").args(["-L", &self.0]).args(arguments);
        run_command(tmux).1
    }

    pub(super) fn shows(&self, parts: &[&str]) {
        until(&format!("{parts:?}"), || {
            let screen = self.tmux(&["capture-pane", "-p"]);
            parts.iter().all(|part| screen.contains(part)).then_some(())
        });
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
fn top_shows_memory() {
    let user = User::new();
    let _web = user.vm("web");
    let _memory = user.memory_with_all("web");
    let _alone = user.memory("db", &["--budget", "40MiB"]);
    let top = Top::start(&user);
    top.shows(&["larder top: 2 VMs", "web", "db", "memory", "%lost", "MiB"]);
    top.tmux(&["send-keys", "4"]);
    top.shows(&["comp/s", "refault/s", "%some", "24 MiB", "40 MiB"]);
    // The first row by name.
    top.tmux(&["send-keys", "Enter"]);
    top.shows(&["memory of db", "budget:           40 MiB, used "]);
    top.tmux(&["send-keys", "Escape"]);
    // Waits for the page: a key sent right after Escape would be read as a different key.
    top.shows(&["comp/s", "refault/s"]);
    top.tmux(&["send-keys", "Down"]);
    top.tmux(&["send-keys", "Enter"]);
    top.shows(&["memory of web", "swap cache:", "pressure, some:", "web.swap"]);
    top.tmux(&["send-keys", "q"]);
}
