//! Moves of VMs, as `larder host` reports them to Prometheus and browsers, and the other commands to terminals.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use larder_vm::control::migration::{
    DeliveredState, Direction, MethodChoiceState, MethodCostState, MethodState, MigrationControl, MigrationLimits,
    MigrationPatch, MigrationPhase, MigrationProgressState, MigrationState, MoveRates, PageClassState, SentState,
};
use larder_vm::control::{ControlServer, Subject};
use serde_json::Value;

use super::browser::pictures;
use super::memory::Top;
use super::support::run_command;
use super::web_driver::Browser;
use super::{Host, User, until, value_in};

/// Bytes of QEMU's stream per second.
const RAW: f64 = 200e6;
/// Bytes on the link per second.
const WIRE: f64 = 80e6;

/// A simulated move at a constant pace.
struct Steady {
    begun: Instant,
    state: Mutex<MigrationState>,
}

impl MigrationControl for Steady {
    fn state(&self) -> MigrationState {
        let mut state = self.state.lock().expect("whole");
        if !state.phase.has_ended() {
            let time = self.begun.elapsed();
            state.time_ns = time.as_nanos() as u64;
            let done = |rate: f64| (rate * time.as_secs_f64()) as u64;
            if let Some(sent) = &mut state.sent {
                (sent.raw_bytes, sent.wire_bytes) = (done(RAW), done(WIRE));
                sent.delivered_bytes = done(RAW / 2.0);
                for way in &mut sent.methods {
                    (way.pages, way.bytes) = (done(1e4), done(1e7));
                }
            }
            if let Some(delivered) = &mut state.delivered {
                (delivered.raw_bytes, delivered.wire_bytes) = (done(RAW), done(WIRE));
            }
        }
        state.clone()
    }

    fn limit(&self, _: &MigrationPatch) -> Result<(), String> {
        Ok(())
    }

    fn cancel(&self) {}
}

/// The process of a simulated move.
pub(super) struct Moving {
    it: Arc<Steady>,
    path: PathBuf,
    control: Option<ControlServer>,
}

impl Moving {
    /// Changes the reported state.
    fn change(&self, change: impl FnOnce(&mut MigrationState)) {
        change(&mut self.it.state.lock().expect("whole"));
    }

    /// Ends the process, which removes its socket.
    fn end(&mut self) {
        drop(self.control.take());
        assert!(!self.path.exists());
    }
}

/// Returns the state of an outgoing move with every field set.
fn leaving(vm: &str) -> MigrationState {
    let way = |method: &str| MethodState { method: method.to_owned(), pages: 0, bytes: 0 };
    let offer =
        |method: &str, cost_ns: f64| MethodCostState { method: method.to_owned(), ratio: 2.5, ns: 1500.0, cost_ns };
    MigrationState {
        vm: vm.to_owned(),
        direction: Direction::Leaving,
        qemu: "/run/web.qmp".to_owned(),
        whole: true,
        peer: Some("host2.example:4446".to_owned()),
        phase: MigrationPhase::Moving,
        started_ms: 1_700_000_000_000,
        course: Some(MigrationProgressState {
            seconds: 12.0,
            round: 3,
            total_bytes: 4 << 30,
            remaining_bytes: 1 << 30,
            dirty_bytes_per_s: 300_000_000,
            expected_seconds: Some(17.0),
            expected_downtime_ms: Some(900),
            verdict: None,
        }),
        rates: Some(MoveRates {
            stream_bytes_per_s: RAW as u64,
            wire_bytes_per_s: WIRE as u64,
            processors: 1.25,
            encoding: 0.75,
            waiting: Some(2.0),
        }),
        sent: Some(SentState {
            cpu_seconds: 9.0,
            encode_cpu_seconds: 6.0,
            methods: ["zero", "delta", "lz4", "plain"].map(way).into(),
            ..SentState::default()
        }),
        limits: Some(MigrationLimits {
            bandwidth: Some(100_000_000),
            processors: Some(1.5),
            downtime_ms: Some(300),
            timeout_s: Some(600),
        }),
        evidence: Some(MethodChoiceState {
            ns_per_byte: 1.5,
            classes: vec![PageClassState {
                class: "3 to 4 bits per byte".to_owned(),
                batches: 77,
                method: "lz4".to_owned(),
                offers: vec![offer("plain", 9000.0), offer("lz4", 4000.0), offer("zstd", 6000.0)],
            }],
        }),
        downtime_ms: Some(250),
        ..MigrationState::default()
    }
}

impl User {
    /// Starts a process that looks like a mover to its clients.
    fn moving(&self, state: MigrationState) -> Moving {
        let folder = self.socket("moves");
        if !folder.exists() {
            std::fs::create_dir(&folder).expect("a folder");
            std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).expect("ours");
            self.own(&folder);
        }
        let path = folder.join(format!("{}.{}.sock", state.vm, state.direction.name()));
        let vm = state.vm.clone();
        let it = Arc::new(Steady { begun: Instant::now(), state: Mutex::new(state) });
        let inquiry: Arc<dyn MigrationControl> = Arc::<Steady>::clone(&it);
        let control = ControlServer::start(&path, Arc::new(Subject::migration(&vm, inquiry)));
        self.own(&path);
        Moving { it, path, control: Some(control.expect("it listens")) }
    }

    /// Starts an outgoing move of the VM `web` with every field set.
    pub(super) fn leaving(&self) -> Moving {
        self.moving(leaving("web"))
    }

    /// Starts an incoming move of the VM `db`.
    fn coming(&self) -> Moving {
        self.moving(MigrationState {
            vm: "db".to_owned(),
            direction: Direction::Coming,
            qemu: "/run/db.qmp".to_owned(),
            whole: true,
            peer: Some("192.0.2.7".to_owned()),
            phase: MigrationPhase::Moving,
            delivered: Some(DeliveredState { cpu_seconds: 5.0, decode_cpu_seconds: 4.0, ..DeliveredState::default() }),
            ..MigrationState::default()
        })
    }
}

fn of(name: &str, more: &str) -> String {
    format!("larder_migration_{name}{{domain=\"web\",direction=\"leaving\"{more}}}")
}

/// Waits until a sample has this value.
fn is(host: &Host, sample: &str, wanted: f64) {
    until(&format!("{sample} {wanted}"), || (host.value(sample)? == wanted).then_some(()));
}

/// The metrics of a move match its process, and the final ones stay after its end.
#[test]
fn move_metrics_match_mover_and_stay() {
    let user = User::new();
    let mut moving = user.leaving();
    let _coming = user.coming();
    let host = user.host(&[]);
    is(&host, &of("phase", ",phase=\"moving\""), 1.0);
    let metrics = host.metrics();
    for (sample, wanted) in [
        (of("up", ""), 1.0),
        (of("phase", ",phase=\"failed\""), 0.0),
        (of("in_doubt", ""), 0.0),
        (of("converges", ""), 1.0),
        (of("start_time_seconds", ""), 1_700_000_000.0),
        (of("round", ""), 3.0),
        (of("memory_bytes", ""), 4_294_967_296.0),
        (of("remaining_bytes", ""), 1_073_741_824.0),
        (of("dirty_bytes_per_second", ""), 300e6),
        (of("expected_seconds", ""), 17.0),
        (of("expected_downtime_seconds", ""), 0.9),
        (of("downtime_seconds", ""), 0.25),
        (of("cpu_seconds_total", ",work=\"encoding\""), 6.0),
        (of("cpu_seconds_total", ",work=\"other\""), 3.0),
        (of("limit", ",limit=\"bandwidth\""), 100e6),
        (of("limit", ",limit=\"processors\""), 1.5),
        (of("limit", ",limit=\"downtime-ms\""), 300.0),
        (of("limit", ",limit=\"timeout-s\""), 600.0),
    ] {
        assert_eq!(value_in(&metrics, &sample), Some(wanted), "{sample}");
    }
    let value = |sample: &str| value_in(&metrics, sample).unwrap_or_else(|| panic!("no {sample}: {metrics}"));
    let (stream, wire) = (value(&of("stream_bytes_total", "")), value(&of("wire_bytes_total", "")));
    assert!(stream > 0.0 && (stream / wire - 2.5).abs() < 0.001, "{stream} {wire}");
    assert!((stream / value(&of("delivered_bytes_total", "")) - 2.0).abs() < 0.001);
    assert!(
        value(&of("pages_total", ",method=\"lz4\"")) > 0.0 && value(&of("page_bytes_total", ",method=\"lz4\"")) > 0.0
    );
    let coming =
        |name: &str, more: &str| format!("larder_migration_{name}{{domain=\"db\",direction=\"coming\"{more}}}");
    assert!(value(&coming("stream_bytes_total", "")) > 0.0);
    let cpu = |work: &str| value(&coming("cpu_seconds_total", &format!(",work=\"{work}\"")));
    assert_eq!((cpu("decoding"), cpu("other")), (4.0, 1.0));

    moving.change(|state| state.course.as_mut().expect("has one").verdict = Some("it will not end".to_owned()));
    is(&host, &of("converges", ""), 0.0);
    moving.change(|state| {
        state.phase = MigrationPhase::Failed;
        state.place = Some("in doubt".to_owned());
    });
    is(&host, &of("in_doubt", ""), 1.0);
    moving.end();
    // Metrics that hold only during a move are removed.
    is(&host, &of("phase", ",phase=\"failed\""), 1.0);
    let metrics = until("the end", || {
        let sockets = host.value("larder_host_sockets{state=\"stopped\"}");
        (sockets == Some(1.0)).then(|| host.metrics())
    });
    assert_eq!(value_in(&metrics, &of("up", "")), Some(1.0));
    assert_eq!(value_in(&metrics, &of("in_doubt", "")), Some(1.0));
    assert_eq!(value_in(&metrics, &of("remaining_bytes", "")), None);
}

#[test]
fn killed_mover_keeps_last_state() {
    let user = User::new();
    let mut moving = user.leaving();
    let host = user.host(&[]);
    is(&host, &of("up", ""), 1.0);
    // The socket that a killed process leaves.
    moving.end();
    drop(std::os::unix::net::UnixListener::bind(&moving.path).expect("binds"));
    user.own(&moving.path);
    is(&host, &of("up", ""), 0.0);
    assert_eq!(host.value(&of("phase", ",phase=\"moving\"")), Some(1.0));
    let (code, said) = run_command(user.larder(&["status"]));
    assert!(code == Some(1) && said.contains("web: its move: no process listens"), "{said}");
}

#[test]
fn status_shows_moves() {
    let user = User::new();
    let _web = user.vm("web");
    let moving = user.leaving();
    let _coming = user.coming();
    let (code, said) = run_command(user.larder(&["status"]));
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "web moves to host2.example:4446: moving, round 3, 1 GiB of 4 GiB remaining, dirty rate 286 MiB/s, ",
        "17 s left",
        "db moves from 192.0.2.7: moving",
    ] {
        assert!(said.contains(part), "no {part} in {said}");
    }
    let (_, said) = run_command(user.larder(&["status", "web"]));
    for part in
        ["web.raw", "web to host2.example:4446", "900 ms expected", "3 to 4 bits per byte, 77 batches: lz4 2.5x"]
    {
        assert!(said.contains(part), "no {part} in {said}");
    }
    let (code, said) = run_command(user.larder(&["status", "db"]));
    assert!(code == Some(0) && said.contains("db from 192.0.2.7"), "{said}");
    let (_, said) = run_command(user.larder(&["status", "web", "--output", "json"]));
    let told: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(told["migrations"][0]["course"]["round"], 3, "{told}");
    let (_, said) = run_command(user.larder(&["status", "--output", "json"]));
    let told: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(told["moves"][0]["name"], "db", "{told}");
    assert_eq!(told["moves"][1]["migration"]["limits"]["processors"], 1.5, "{told}");
    let (code, said) = run_command(user.larder(&["migrate", "status", "web"]));
    assert!(code == Some(0) && said.contains("state:            moving, round 3"), "{said}");
    let (code, said) = run_command(user.larder(&["migrate", "cancel", "mail"]));
    assert!(code == Some(2) && said.contains("mail is not being moved by this user"), "{said}");
    moving.change(|state| state.course.as_mut().expect("has one").verdict = Some("it will not".to_owned()));
    let (_, said) = run_command(user.larder(&["status", "0.1", "1"]));
    assert!(said.contains("will not end at this rate"), "{said}");
}

#[test]
fn top_shows_moves() {
    let user = User::new();
    let _web = user.vm("web");
    let mut moving = user.leaving();
    let top = Top::start(&user);
    top.shows(&["larder top: 1 VMs", "web moves to host2.example:4446: moving, round 3, 1 GiB of 4 GiB remaining"]);
    moving.change(|state| state.course.as_mut().expect("has one").round = 4);
    top.shows(&["moving, round 4"]);
    moving.end();
    until("the line goes", || (!top.tmux(&["capture-pane", "-p"]).contains("moves to")).then_some(()));
    top.tmux(&["send-keys", "q"]);
}

/// Returns a plot's values, once it has `count` of them.
fn values(browser: &Browser, title: &str, place: usize, count: usize) -> Vec<f64> {
    let plot = format!("document.querySelector('figure[data-title=\"{title}\"]')?.larder()[{place}]");
    let all = format!(
        "const it = ({plot} || []).filter((value) => value !== null); return it.length >= {count} ? it : null;"
    );
    let told = browser.wait(title, &all);
    let told = told.as_array().expect("a list").iter();
    told.map(|value| value.as_f64().expect("a number")).collect()
}

#[test]
fn page_shows_move_and_its_end() {
    let user = User::new();
    let _web = user.vm("web");
    let mut moving = user.leaving();
    let coming = user.coming();
    let host = user.host(&[]);
    let browser = Browser::start();
    host.log_in(&browser);
    browser.look(1280, false);
    browser.open(&host.url("/"));
    let words =
        browser.wait("it moves", "return document.querySelector('#moves li[data-move=\"web.leaving\"]')?.textContent;");
    let words = words.as_str().expect("text");
    for part in ["web to host2.example:4446", "moving, round 3", "75 % over", "17.0 s to go"] {
        assert!(words.contains(part), "no {part} in {words}");
    }
    browser.wait(
        "its row says so",
        "return document.querySelector('.fleet .why')?.textContent.includes('moving, round 3 to host2.example');",
    );
    browser.run("document.querySelector('.fleet tbody th a').click();");
    browser.wait("its page links there", "return document.querySelector('article #moves li a') !== null;");
    browser.run("document.querySelector('article #moves li a').click();");
    browser.wait("the move's page", "return document.querySelector('#migration') !== null;");
    for (title, place, wanted) in [
        ("Memory left", 1, f64::from(1 << 30)),
        ("Bytes per second", 1, 300e6),
        ("Bytes per second", 2, RAW),
        ("Bytes per second", 3, WIRE),
        ("Bytes per second", 4, 100e6),
        ("Processors", 1, 1.25),
        ("Processors", 2, 0.75),
        ("Processors", 3, 1.5),
        ("Downtime", 1, 0.9),
        ("Downtime", 2, 0.3),
    ] {
        let all = values(&browser, title, place, 3);
        assert!(all.iter().all(|value| *value == wanted), "{title} {place}: {all:?}");
    }
    // Values that are computed between two samples.
    for (title, place, wanted) in [
        ("Ratio", 1, 2.5),
        ("Ratio", 2, 2.5),
        ("How pages go", 1, 0.25),
        ("How pages go", 2, 0.25),
        ("How pages go", 3, 0.25),
        ("How pages go", 4, 0.25),
    ] {
        let all = values(&browser, title, place, 3);
        assert!(all.iter().all(|value| (value - wanted).abs() < 0.01), "{title} {place}: {all:?}");
    }
    let page = || browser.run("return document.querySelector('#migration').textContent;");
    let text = page();
    for part in [
        "95.4 MiB/s on the link",
        "1.5 CPUs",
        "a downtime of 300 ms",
        "250 ms",
        "3 to 4 bits per byte",
        "lz4 4.00 µs (2.50x, 1.50 µs)",
    ] {
        assert!(text.as_str().is_some_and(|text| text.contains(part)), "no {part} in {text}");
    }
    for (width, is_dark) in [(1280, false), (1280, true), (390, false)] {
        browser.look(width, is_dark);
        let theme = if is_dark { "dark" } else { "light" };
        browser.picture(&pictures().join(format!("migration-{width}-{theme}.png")));
        let wider = "return document.documentElement.scrollWidth - document.documentElement.clientWidth;";
        assert_eq!(browser.run(wider), 0, "at {width}");
    }
    moving.change(|state| {
        state.phase = MigrationPhase::Failed;
        state.reason = Some("the link <b>broke</b>".to_owned());
        state.place = Some("here".to_owned());
    });
    browser.wait(
        "how it ended",
        "return document.querySelector('#migration .alert')?.textContent === 'It has failed: the link <b>broke</b>. The VM: it goes on here.';",
    );
    moving.end();
    let mut frames = host.follow("/api/migration/web.leaving");
    until("its process has ended", || (frames.next("migration")["migration"]["health"] == "stopped").then_some(()));
    browser.open(&host.url("/#/migration/web.leaving"));
    browser.run("location.reload();");
    browser.wait("it is still told", "return document.querySelector('#migration .badge')?.textContent === 'failed';");

    // For an incoming move the delivered bytes are all that is known.
    browser.open(&host.url("/#/migration/db.coming"));
    browser.run("location.reload();");
    let all = values(&browser, "Bytes per second", 2, 3);
    assert!(all.iter().all(|value| (value / RAW - 1.0).abs() < 0.01), "{all:?}");
    drop(coming);
    assert_eq!(browser.complaints(), Vec::<Value>::new());
}
