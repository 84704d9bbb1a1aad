//! Whole moves: both movers, with a connection between them that is cut.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tempfile::TempDir;

use super::fake::Qemu;
use crate::moving::Description;
use crate::moving::destination::{DestinationMover, IncomingState};
use crate::moving::disks::{DiskServers, NoDiskServers};
use crate::moving::messages::{MoverRequest, ToDestination, ToSource, VERSION};
use crate::moving::postcopy::NoFaultHandlers;
use crate::moving::record::{MoveId, OutgoingRecord, RecordFile};
use crate::moving::settings::{PreviousSettings, QemuMigrationSettings};
use crate::moving::source::{self, CompletedMove, MoveError, Options};
use crate::progress::SenderProgress;
use crate::qmp::Qmp;
use crate::{receive, send};

pub(super) struct TestBed {
    dir: TempDir,
    pub(super) source: Arc<Qemu>,
    pub(super) destination: Arc<Qemu>,
    mover: Arc<DestinationMover>,
    pub(super) options: Options,
    cancel: AtomicBool,
    /// Ends the receiver's session; another one begins.
    cut: Arc<AtomicBool>,
    finished: Arc<AtomicBool>,
    receiver: Option<JoinHandle<()>>,
}

impl TestBed {
    fn new() -> Self {
        Self::with(Arc::new(NoDiskServers), Arc::new(NoDiskServers))
    }

    /// Creates a bed whose disks are served by `here` at the source and `there` at the destination.
    pub(super) fn with(here: Arc<dyn DiskServers>, there: Arc<dyn DiskServers>) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let records = dir.path().join("records");
        std::fs::create_dir(&records).expect("a folder");
        let source = Arc::new(Qemu::source(dir.path()));
        let destination = Arc::new(Qemu::destination(dir.path()));
        let mover = Arc::new(
            DestinationMover::new(&destination.qmp, &records, there, Arc::new(NoFaultHandlers)).expect("it waits"),
        );
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = receive::Port::new(listener).expect("a port");
        let to = port.local_addr().expect("has one").to_string();
        let (cut, finished) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let receiver = thread::spawn({
            let (mover, cut, finished) = (Arc::clone(&mover), Arc::clone(&cut), Arc::clone(&finished));
            move || {
                while !finished.load(Ordering::Relaxed) {
                    let options = receive::Options {
                        connect: mover.incoming(),
                        user: Some(mover.user()),
                        tls: None,
                        delta_memory: 1 << 20,
                        window: 1 << 20,
                        channels: 4,
                        lanes: 2,
                        progress: Arc::default(),
                    };
                    let _ = receive::receive(&port, &options, &cut, Some(&|notes| mover.answer_notes(&notes)));
                    cut.store(false, Ordering::Relaxed);
                }
            }
        });
        Self {
            options: Options {
                qmp: source.qmp.clone(),
                records,
                servers: here,
                send: send::Options {
                    to,
                    tls: None,
                    lanes: 1,
                    delta_memory: 1 << 20,
                    patience: Duration::from_secs(30),
                    limits: Arc::default(),
                    accelerators: send::Accelerators::None,
                },
                multifd_channels: 0,
                postcopy: false,
                throttle: false,
                keep_qemu: false,
            },
            dir,
            source,
            destination,
            mover,
            cancel: AtomicBool::new(false),
            cut,
            finished,
            receiver: Some(receiver),
        }
    }

    pub(super) fn run(&self) -> Result<CompletedMove, MoveError> {
        let progress = Arc::new(SenderProgress::new());
        source::run(&self.options, &progress, &self.cancel, &mut |_| {})
    }

    fn record_file(&self) -> RecordFile {
        let qmp = Qmp::connect(&self.source.qmp).expect("lives");
        RecordFile::new(&self.options.records, "from", &qmp)
    }

    pub(super) fn record(&self) -> Option<OutgoingRecord> {
        self.record_file().load().expect("can be read")
    }

    /// Leaves the state of a mover that was killed once everything had arrived.
    fn simulate_killed_mover(&self, run: bool) {
        let vm = Description::query(&mut Qmp::connect(&self.source.qmp).expect("lives")).expect("answers");
        let id = MoveId::new().expect("random numbers");
        let prepare = ToDestination {
            version: VERSION,
            id: id.clone(),
            tell: MoverRequest::Prepare {
                vm: Box::new(vm),
                settings: QemuMigrationSettings { multifd_channels: 0, postcopy: false },
                disks: Vec::new(),
            },
        };
        let note = serde_json::to_vec(&prepare).expect("plain data");
        assert!(matches!(self.mover.handle_note(&note), ToSource::Prepared { .. }));
        let to = self.options.send.to.clone();
        let record = OutgoingRecord {
            id,
            run,
            to,
            stopped: false,
            disks: Vec::new(),
            disks_left: false,
            told: false,
            before: PreviousSettings::default(),
        };
        self.record_file().save(&record).expect("writes");
        (self.source.state().run, self.source.state().migration) = ("postmigrate", "completed");
        (self.destination.state().run, self.destination.state().migration) = ("paused", "completed");
    }

    /// Asserts that the VM is at the source, unchanged, and that the destination did not start it.
    fn assert_at_source(&self) {
        assert_eq!(self.source.state().run, "running");
        assert_eq!(self.destination.command_count("cont"), 0);
        assert_eq!(self.source.command_count("quit"), 0);
        assert_eq!(self.source.state().parameters["tls-creds"], "tls0");
        assert_eq!(self.source.state().parameters["downtime-limit"], 20);
        assert!(self.source.state().capabilities["xbzrle"]);
        assert_eq!(self.record(), None);
    }

    /// Asserts that the VM is at the destination alone.
    fn assert_at_destination(&self) {
        assert_eq!(self.destination.state().run, "running");
        assert_eq!((self.source.command_count("cont"), self.source.command_count("quit")), (0, 1));
        assert_eq!(self.destination.command_count("quit"), 0);
        assert_eq!(count_files(&self.options.records, "from"), 0);
    }

    /// Ends the session during a command to the destination's QEMU.
    fn cut_at(&self, command: &'static str, also: impl Fn() + Send + 'static) {
        let cut = Arc::clone(&self.cut);
        self.destination.hook(command, move || {
            also();
            cut.store(true, Ordering::Relaxed);
            // Waits until the session has ended, so that the answer is lost.
            thread::sleep(Duration::from_millis(500));
        });
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        self.finished.store(true, Ordering::Relaxed);
        while !self.receiver.as_ref().is_none_or(JoinHandle::is_finished) {
            self.cut.store(true, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn count_files(dir: &PathBuf, begin: &str) -> usize {
    let entries = std::fs::read_dir(dir).expect("lists");
    entries.filter(|entry| entry.as_ref().expect("lists").file_name().to_string_lossy().starts_with(begin)).count()
}

#[test]
fn running_vm_moves_to_destination() {
    let bed = TestBed::new();
    let done = bed.run().expect("moves");
    assert!(!done.postcopy && !done.resumed);
    bed.assert_at_destination();
    assert_eq!(bed.destination.command_count("cont"), 1);
    assert_eq!(bed.mover.state(), IncomingState::Running { has_all_memory: true });
}

#[test]
fn paused_vm_moves_and_stays_paused() {
    let bed = TestBed::new();
    bed.source.state().run = "paused";
    bed.run().expect("moves");
    assert_eq!(bed.destination.command_count("cont"), 0);
    assert_eq!(bed.source.command_count("quit"), 1);
}

/// The VM resumes at the source if the destination's QEMU refuses to run it.
#[test]
fn vm_refused_by_destination_resumes_at_source() {
    let bed = TestBed::new();
    bed.destination.state().refuses.insert("cont");
    match bed.run() {
        Err(MoveError::NotMoved { reason }) => assert!(reason.contains("it does not want to"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(bed.source.state().run, "running");
    assert_eq!(bed.source.command_count("quit"), 0);
    assert_eq!(bed.destination.command_count("quit"), 1);
    assert_eq!(bed.record(), None);
    assert!(bed.source.state().capabilities["xbzrle"]);
}

#[test]
fn vm_that_fails_to_load_resumes_at_source() {
    let bed = TestBed::new();
    bed.destination.state().final_state = ("inmigrate", "failed");
    assert!(matches!(bed.run(), Err(MoveError::NotMoved { .. })));
    bed.assert_at_source();
}

/// A source QEMU that refuses a command of the move gets its settings back and runs on.
#[test]
fn refused_migration_restores_source() {
    for command in ["migrate", "migrate-set-parameters", "migrate-set-capabilities"] {
        let bed = TestBed::new();
        bed.source.state().refuses.insert(command);
        match bed.run() {
            Err(MoveError::NotMoved { reason }) => assert!(reason.contains(command), "{reason}"),
            other => panic!("{other:?}"),
        }
        bed.source.state().refuses.clear();
        bed.source.state().parameters.entry("tls-creds".to_owned()).and_modify(|was| {
            if command == "migrate-set-parameters" {
                assert_eq!(*was, "tls0");
            }
        });
        assert_eq!(bed.source.state().run, "running");
        assert!(bed.source.state().capabilities["xbzrle"], "{command}");
        // The move can be repeated with the same QEMU at the destination.
        bed.run().expect("moves");
        bed.assert_at_destination();
    }
}

#[test]
fn move_is_aborted_after_timeout() {
    let bed = TestBed::new();
    bed.destination.state().final_state = ("inmigrate", "active");
    let limits = &bed.options.send.limits;
    limits.update(|limits| limits.timeout = Some(Duration::from_millis(300)));
    match bed.run() {
        Err(MoveError::NotMoved { reason }) => assert!(reason.contains("did not end"), "{reason}"),
        other => panic!("{other:?}"),
    }
    bed.assert_at_source();
}

#[test]
fn move_is_aborted_when_cancelled() {
    let bed = TestBed::new();
    bed.destination.state().final_state = ("inmigrate", "active");
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.source.wait_until(|fake| fake.migration == "active");
            bed.cancel.store(true, Ordering::Relaxed);
        });
        assert!(matches!(bed.run(), Err(MoveError::Cancelled)));
    });
    bed.assert_at_source();
}

/// A connection that is lost before everything has arrived leaves the VM at the source.
#[test]
fn vm_resumes_at_source_after_lost_connection() {
    let bed = TestBed::new();
    bed.destination.state().final_state = ("inmigrate", "active");
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.migration == "active");
            bed.cut.store(true, Ordering::Relaxed);
        });
        assert!(matches!(bed.run(), Err(MoveError::NotMoved { .. })));
    });
    bed.assert_at_source();
}

#[test]
fn lost_answer_is_asked_for_again() {
    let bed = TestBed::new();
    bed.cut_at("cont", || {});
    bed.run().expect("moves");
    bed.assert_at_destination();
    assert_eq!(bed.destination.command_count("cont"), 1);
}

/// A refusal of the destination is final, even if its first answer was lost.
#[test]
fn lost_refusal_is_repeated() {
    let bed = TestBed::new();
    bed.destination.state().refuses.insert("cont");
    bed.cut_at("cont", || {});
    assert!(matches!(bed.run(), Err(MoveError::NotMoved { .. })));
    assert_eq!(bed.source.state().run, "running");
    assert_eq!(bed.destination.command_count("cont"), 1);
}

/// If the destination's QEMU exits during `cont`, only the user can decide where the VM is.
#[test]
fn crash_at_start_needs_take_back() {
    let bed = TestBed::new();
    bed.destination.state().exits_at = Some("cont");
    let text = match bed.run() {
        Err(error @ MoveError::OutcomeUnknown { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(text.contains("--take-back"), "{text}");
    assert_eq!(bed.source.state().run, "postmigrate");
    assert_eq!(bed.source.command_count("cont"), 0);
    source::take_back(&bed.options.qmp, &bed.options.records, &NoDiskServers).expect("it is here");
    assert_eq!(bed.source.state().run, "running");
    // Only once.
    let again = source::take_back(&bed.options.qmp, &bed.options.records, &NoDiskServers);
    assert!(matches!(again, Err(MoveError::Preflight(_))));
}

/// A mover hands over a VM whose first mover was killed before the hand-over, paused or not.
#[test]
fn mover_resumes_after_killed_mover() {
    for run in [true, false] {
        let bed = TestBed::new();
        bed.simulate_killed_mover(run);
        let done = bed.run().expect("moves");
        assert!(done.resumed && !done.postcopy);
        assert_eq!(bed.destination.command_count("cont"), usize::from(run));
        assert_eq!(bed.source.command_count("quit"), 1);
    }
}

/// A migration without a record of this QEMU process is neither continued nor taken back.
#[test]
fn foreign_migration_is_refused() {
    let bed = TestBed::new();
    (bed.source.state().run, bed.source.state().migration) = ("postmigrate", "completed");
    assert!(matches!(bed.run(), Err(MoveError::OwnerUnknown(_))));
    let result = source::take_back(&bed.options.qmp, &bed.options.records, &NoDiskServers);
    assert!(matches!(result, Err(MoveError::Preflight(_))));
    for command in ["cont", "quit", "migrate"] {
        assert_eq!(bed.source.command_count(command), 0, "{command}");
    }
    let other = TestBed::new();
    other.simulate_killed_mover(true);
    let record = other.record().expect("is there");
    // The record belongs to another process.
    std::fs::write(
        std::fs::read_dir(&other.options.records)
            .expect("lists")
            .map(|it| it.expect("lists").path())
            .find(|path| path.to_string_lossy().contains("from"))
            .expect("is there"),
        serde_json::json!({"qemu": {"pid": 1, "started": 1}, "record": record}).to_string(),
    )
    .expect("writes");
    assert!(matches!(other.run(), Err(MoveError::OwnerUnknown(_))));
    assert_eq!(other.destination.command_count("cont"), 0);
    let _ = &other.dir;
}

fn post_copy() -> TestBed {
    let mut bed = TestBed::new();
    bed.options.postcopy = true;
    bed.source.state().final_state = ("finish-migrate", "postcopy-active");
    bed.destination.state().final_state = ("paused", "postcopy-active");
    bed
}

/// Returns a hook that makes both QEMUs lose their connection in post-copy, and complete over the next one.
fn break_hook(bed: &TestBed) -> impl Fn() + Send + use<> {
    let (source, destination) = (Arc::clone(&bed.source), Arc::clone(&bed.destination));
    move || {
        source.state().migration = "postcopy-paused";
        source.state().final_state = ("postmigrate", "completed");
        destination.state().migration = "postcopy-paused";
        destination.state().final_state = ("running", "completed");
    }
}

#[test]
fn postcopy_resumes_over_new_connection() {
    let bed = post_copy();
    let done = thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.run == "running");
            break_hook(&bed)();
            bed.cut.store(true, Ordering::Relaxed);
        });
        bed.run()
    });
    let done = done.expect("moves");
    assert!(done.postcopy);
    bed.assert_at_destination();
    assert_eq!(bed.destination.command_count("migrate-recover"), 1);
    assert_eq!(bed.destination.command_count("cont"), 1);
}

/// Post-copy resumes over another connection if the first one is lost while the destination starts the VM.
#[test]
fn postcopy_resumes_when_cut_at_start() {
    let bed = post_copy();
    bed.cut_at("cont", break_hook(&bed));
    assert!(bed.run().expect("moves").postcopy);
    bed.assert_at_destination();
    assert_eq!(bed.destination.command_count("cont"), 1);
}

/// A later mover has the destination run a VM whose mover was killed in post-copy, and carries the rest.
#[test]
fn postcopy_resumes_after_killed_mover() {
    let bed = post_copy();
    bed.simulate_killed_mover(true);
    break_hook(&bed)();
    (bed.source.state().run, bed.destination.state().run) = ("finish-migrate", "paused");
    let done = bed.run().expect("moves");
    assert!(done.postcopy && done.resumed);
    bed.assert_at_destination();
    assert_eq!(bed.destination.command_count("cont"), 1);
}

/// In post-copy, a destination that cannot run the VM yet is asked again, and neither QEMU is ended.
#[test]
fn postcopy_retries_refused_start() {
    let bed = post_copy();
    bed.destination.state().refuses.insert("cont");
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.commands.iter().any(|it| it == "cont"));
            bed.destination.state().refuses.clear();
            bed.destination.wait_until(|fake| fake.run == "running");
            bed.source.state().migration = "completed";
        });
        assert!(bed.run().expect("moves").postcopy);
    });
    bed.assert_at_destination();
    assert_eq!(bed.destination.command_count("cont"), 2);
}

/// The source's QEMU is stopped if it resumes by itself, and the destination decides whether it has everything.
#[test]
fn source_failing_after_hand_over_is_stopped() {
    for has_all_memory in [true, false] {
        let bed = post_copy();
        thread::scope(|scope| {
            scope.spawn(|| {
                bed.destination.wait_until(|fake| fake.run == "running");
                if has_all_memory {
                    bed.destination.state().migration = "completed";
                }
                (bed.source.state().run, bed.source.state().migration) = ("running", "failed");
            });
            match bed.run() {
                Ok(done) => assert!(has_all_memory && done.postcopy),
                Err(MoveError::PostcopyBroken { .. }) => assert!(!has_all_memory),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!((bed.source.command_count("stop"), bed.source.command_count("cont")), (1, 0));
        assert_eq!(bed.source.command_count("quit"), usize::from(has_all_memory));
        assert_eq!(bed.destination.command_count("quit"), 0);
    }
}

#[test]
fn vm_stops_before_postcopy_begins() {
    let mut bed = TestBed::new();
    bed.options.postcopy = true;
    // The migration does not converge.
    bed.destination.state().final_state = ("inmigrate", "active");
    bed.source.state().rounds = Some(0);
    let source = Arc::clone(&bed.source);
    let destination = Arc::clone(&bed.destination);
    bed.source.hook("migrate-start-postcopy", move || {
        assert_eq!(source.state().run, "paused");
        (source.state().run, source.state().migration) = ("finish-migrate", "postcopy-active");
        (destination.state().run, destination.state().migration) = ("paused", "postcopy-active");
    });
    let done = thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.run == "running");
            (bed.destination.state().migration, bed.source.state().migration) = ("completed", "completed");
        });
        bed.run()
    });
    assert!(done.expect("moves").postcopy);
    assert_eq!(bed.destination.state().run, "running");
    assert_eq!(bed.source.command_count("stop"), 1);
}

/// Leaves the state of a mover that was killed during a move.
fn killed_mover_record(bed: &TestBed, stopped: bool, start_sent: bool) -> OutgoingRecord {
    bed.simulate_killed_mover(true);
    let record = OutgoingRecord {
        stopped,
        told: start_sent,
        before: PreviousSettings::default(),
        ..bed.record().expect("is there")
    };
    bed.record_file().save(&record).expect("writes");
    record
}

/// A VM that was stopped for post-copy that did not begin is resumed by the next mover.
#[test]
fn vm_stopped_for_unbegun_postcopy_resumes() {
    let bed = TestBed::new();
    killed_mover_record(&bed, true, false);
    (bed.source.state().run, bed.source.state().migration) = ("paused", "failed");
    // The destination has failed too.
    bed.destination.state().migration = "failed";
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::Preflight(_))), "{result:?}");
    assert_eq!(bed.source.state().run, "running");
    assert_eq!(bed.record(), None);
}

/// A VM that was handed over and still runs at the source is stopped, and the destination is asked to run it.
#[test]
fn vm_running_after_hand_over_is_stopped() {
    let bed = TestBed::new();
    killed_mover_record(&bed, false, true);
    (bed.source.state().run, bed.source.state().migration) = ("running", "failed");
    bed.run().expect("moves");
    assert_eq!(bed.source.command_count("stop"), 1);
    bed.assert_at_destination();
}

/// A VM that its user has resumed at the source is not handed over again.
#[test]
fn resumed_vm_is_not_handed_over() {
    let bed = TestBed::new();
    killed_mover_record(&bed, false, true);
    bed.source.state().run = "running";
    match bed.run() {
        Err(MoveError::OwnerUnknown(text)) => assert!(text.contains("--take-back"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(bed.destination.command_count("cont"), 0);
    source::take_back(&bed.options.qmp, &bed.options.records, &NoDiskServers).expect("it is here");
    assert_eq!((bed.source.command_count("cont"), bed.record()), (0, None));
}

/// The VM is started at the destination unless it was last paused at the source.
#[test]
fn run_state_changes_during_move_count() {
    for (before, after) in [("running", "paused"), ("paused", "running"), ("suspended", "suspended")] {
        let bed = TestBed::new();
        bed.source.state().run = before;
        bed.destination.state().final_state = ("inmigrate", "active");
        thread::scope(|scope| {
            scope.spawn(|| {
                bed.destination.wait_until(|fake| fake.migration == "active");
                bed.source.state().run = after;
                // Waits until the mover has seen the change.
                let queries = bed.source.command_count("query-status");
                bed.source.wait_until(|fake| {
                    fake.commands.iter().filter(|command| *command == "query-status").count() > queries + 1
                });
                (bed.destination.state().run, bed.destination.state().migration) = ("paused", "completed");
                (bed.source.state().run, bed.source.state().migration) = ("postmigrate", "completed");
            });
            bed.run().expect("moves");
        });
        assert_eq!(bed.destination.command_count("cont"), usize::from(after != "paused"), "{before}, {after}");
    }
}

/// A migration that another client starts in the middle of the move is neither cancelled nor resumed.
#[test]
fn concurrent_foreign_migration_is_not_cancelled() {
    let bed = TestBed::new();
    bed.source.state().refuses.insert("migrate");
    let source = Arc::clone(&bed.source);
    bed.source.hook("migrate", move || (source.state().run, source.state().migration) = ("postmigrate", "completed"));
    assert!(matches!(bed.run(), Err(MoveError::NotMoved { .. })));
    assert_eq!(bed.source.command_count("cont") + bed.source.command_count("migrate_cancel"), 0);
}

#[test]
fn quit_reports_whether_qemu_exited() {
    let bed = TestBed::new();
    let mut qmp = Qmp::connect(&bed.source.qmp).expect("connects");
    bed.source.state().refuses.insert("quit");
    assert!(!qmp.quit(Duration::from_millis(200)));
    bed.source.state().refuses.clear();
    assert!(qmp.quit(Duration::from_secs(30)));
}
