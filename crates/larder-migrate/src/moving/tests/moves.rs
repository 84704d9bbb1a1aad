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
use crate::moving::destination::{Destination, State};
use crate::moving::disks::{DiskServers, NoServers};
use crate::moving::messages::{Tell, ToDestination, ToSource, VERSION};
use crate::moving::postcopy::NoFaultHandlers;
use crate::moving::record::{Leaving, MoveId, Place};
use crate::moving::settings::{Before, Settings};
use crate::moving::source::{self, Done, MoveError, Options};
use crate::progress::Progress;
use crate::qmp::Qmp;
use crate::{receive, send};

pub(super) struct Bed {
    folder: TempDir,
    pub(super) source: Arc<Qemu>,
    pub(super) destination: Arc<Qemu>,
    mover: Arc<Destination>,
    pub(super) options: Options,
    cancel: AtomicBool,
    /// Ends the receiver's session; another one begins.
    cut: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    receiver: Option<JoinHandle<()>>,
}

impl Bed {
    fn new() -> Self {
        Self::with(Arc::new(NoServers), Arc::new(NoServers))
    }

    /// Creates a bed whose disks are served by `here` at the source and `there` at the destination.
    pub(super) fn with(here: Arc<dyn DiskServers>, there: Arc<dyn DiskServers>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let records = folder.path().join("records");
        std::fs::create_dir(&records).expect("a folder");
        let source = Arc::new(Qemu::source(folder.path()));
        let destination = Arc::new(Qemu::destination(folder.path()));
        let mover =
            Arc::new(Destination::new(&destination.qmp, &records, there, Arc::new(NoFaultHandlers)).expect("it waits"));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = receive::Port::new(listener).expect("a port");
        let to = port.local_addr().expect("has one").to_string();
        let (cut, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let receiver = thread::spawn({
            let (mover, cut, over) = (Arc::clone(&mover), Arc::clone(&cut), Arc::clone(&over));
            move || {
                while !over.load(Ordering::Relaxed) {
                    let options = receive::Options {
                        connect: mover.incoming(),
                        user: Some(mover.user()),
                        tls: None,
                        delta_memory: 1 << 20,
                        window: 1 << 20,
                        channels: 4,
                        lanes: 2,
                        watched: Arc::default(),
                    };
                    let _ = receive::receive(&port, &options, &cut, Some(&|notes| mover.answer(&notes)));
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
                keep: false,
            },
            folder,
            source,
            destination,
            mover,
            cancel: AtomicBool::new(false),
            cut,
            over,
            receiver: Some(receiver),
        }
    }

    pub(super) fn run(&self) -> Result<Done, MoveError> {
        let progress = Arc::new(Progress::new());
        source::run(&self.options, &progress, &self.cancel, &mut |_| {})
    }

    fn place(&self) -> Place {
        let qmp = Qmp::connect(&self.source.qmp).expect("lives");
        Place::new(&self.options.records, "from", &qmp)
    }

    pub(super) fn record(&self) -> Option<Leaving> {
        self.place().load().expect("can be read")
    }

    /// Leaves the state of a mover that was killed once everything had arrived.
    fn mover_has_died(&self, run: bool) {
        let vm = Description::of(&mut Qmp::connect(&self.source.qmp).expect("lives")).expect("answers");
        let id = MoveId::new().expect("random numbers");
        let prepare = ToDestination {
            version: VERSION,
            id: id.clone(),
            tell: Tell::Prepare {
                vm: Box::new(vm),
                settings: Settings {
                    multifd_channels: 0,
                    postcopy: false,
                },
                disks: Vec::new(),
            },
        };
        let note = serde_json::to_vec(&prepare).expect("plain data");
        assert!(matches!(self.mover.heard(&note), ToSource::Prepared { .. }));
        let to = self.options.send.to.clone();
        let leaving = Leaving {
            id,
            run,
            to,
            stopped: false,
            disks: Vec::new(),
            disks_left: false,
            told: false,
            before: Before::default(),
        };
        self.place().save(&leaving).expect("writes");
        (self.source.is().run, self.source.is().migration) = ("postmigrate", "completed");
        (self.destination.is().run, self.destination.is().migration) = ("paused", "completed");
    }

    /// Asserts that the VM is at the source, unchanged, and that the destination did not start it.
    fn is_here(&self) {
        assert_eq!(self.source.is().run, "running");
        assert_eq!(self.destination.has_heard("cont"), 0);
        assert_eq!(self.source.has_heard("quit"), 0);
        assert_eq!(self.source.is().parameters["tls-creds"], "tls0");
        assert_eq!(self.source.is().parameters["downtime-limit"], 20);
        assert!(self.source.is().capabilities["xbzrle"]);
        assert_eq!(self.record(), None);
    }

    /// Asserts that the VM is at the destination alone.
    fn is_there(&self) {
        assert_eq!(self.destination.is().run, "running");
        assert_eq!((self.source.has_heard("cont"), self.source.has_heard("quit")), (0, 1));
        assert_eq!(self.destination.has_heard("quit"), 0);
        assert_eq!(files(&self.options.records, "from"), 0);
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

impl Drop for Bed {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        while !self.receiver.as_ref().is_none_or(JoinHandle::is_finished) {
            self.cut.store(true, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn files(folder: &PathBuf, begin: &str) -> usize {
    let entries = std::fs::read_dir(folder).expect("lists");
    entries
        .filter(|entry| {
            entry
                .as_ref()
                .expect("lists")
                .file_name()
                .to_string_lossy()
                .starts_with(begin)
        })
        .count()
}

#[test]
fn running_vm_moves_to_destination() {
    let bed = Bed::new();
    let done = bed.run().expect("moves");
    assert!(!done.postcopy && !done.resumed);
    bed.is_there();
    assert_eq!(bed.destination.has_heard("cont"), 1);
    assert_eq!(bed.mover.look_now(), State::Running { whole: true });
}

#[test]
fn paused_vm_moves_and_stays_paused() {
    let bed = Bed::new();
    bed.source.is().run = "paused";
    bed.run().expect("moves");
    assert_eq!(bed.destination.has_heard("cont"), 0);
    assert_eq!(bed.source.has_heard("quit"), 1);
}

/// The VM resumes at the source if the destination's QEMU refuses to run it.
#[test]
fn vm_refused_by_destination_stays_here() {
    let bed = Bed::new();
    bed.destination.is().refuses.insert("cont");
    match bed.run() {
        Err(MoveError::Here { reason }) => assert!(reason.contains("it does not want to"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(bed.source.is().run, "running");
    assert_eq!(bed.source.has_heard("quit"), 0);
    assert_eq!(bed.destination.has_heard("quit"), 1);
    assert_eq!(bed.record(), None);
    assert!(bed.source.is().capabilities["xbzrle"]);
}

#[test]
fn vm_that_fails_to_load_stays() {
    let bed = Bed::new();
    bed.destination.is().comes_to = ("inmigrate", "failed");
    assert!(matches!(bed.run(), Err(MoveError::Here { .. })));
    bed.is_here();
}

/// A source QEMU that refuses a command of the move gets its settings back and runs on.
#[test]
fn refused_migration_restores_source() {
    for command in ["migrate", "migrate-set-parameters", "migrate-set-capabilities"] {
        let bed = Bed::new();
        bed.source.is().refuses.insert(command);
        match bed.run() {
            Err(MoveError::Here { reason }) => assert!(reason.contains(command), "{reason}"),
            other => panic!("{other:?}"),
        }
        bed.source.is().refuses.clear();
        bed.source
            .is()
            .parameters
            .entry("tls-creds".to_owned())
            .and_modify(|was| {
                if command == "migrate-set-parameters" {
                    assert_eq!(*was, "tls0");
                }
            });
        assert_eq!(bed.source.is().run, "running");
        assert!(bed.source.is().capabilities["xbzrle"], "{command}");
        // The move can be repeated with the same QEMU at the destination.
        bed.run().expect("moves");
        bed.is_there();
    }
}

#[test]
fn move_is_aborted_after_timeout() {
    let bed = Bed::new();
    bed.destination.is().comes_to = ("inmigrate", "active");
    let limits = &bed.options.send.limits;
    limits.change(|limits| limits.timeout = Some(Duration::from_millis(300)));
    match bed.run() {
        Err(MoveError::Here { reason }) => assert!(reason.contains("did not end"), "{reason}"),
        other => panic!("{other:?}"),
    }
    bed.is_here();
}

#[test]
fn move_is_aborted_when_cancelled() {
    let bed = Bed::new();
    bed.destination.is().comes_to = ("inmigrate", "active");
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.source.wait_until(|fake| fake.migration == "active");
            bed.cancel.store(true, Ordering::Relaxed);
        });
        assert!(matches!(bed.run(), Err(MoveError::Cancelled)));
    });
    bed.is_here();
}

/// A connection that is lost before everything has arrived leaves the VM at the source.
#[test]
fn vm_stays_when_connection_is_lost() {
    let bed = Bed::new();
    bed.destination.is().comes_to = ("inmigrate", "active");
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.migration == "active");
            bed.cut.store(true, Ordering::Relaxed);
        });
        assert!(matches!(bed.run(), Err(MoveError::Here { .. })));
    });
    bed.is_here();
}

#[test]
fn lost_answer_is_asked_for_again() {
    let bed = Bed::new();
    bed.cut_at("cont", || {});
    bed.run().expect("moves");
    bed.is_there();
    assert_eq!(bed.destination.has_heard("cont"), 1);
}

/// A refusal of the destination is final, even if its first answer was lost.
#[test]
fn lost_refusal_is_repeated() {
    let bed = Bed::new();
    bed.destination.is().refuses.insert("cont");
    bed.cut_at("cont", || {});
    assert!(matches!(bed.run(), Err(MoveError::Here { .. })));
    assert_eq!(bed.source.is().run, "running");
    assert_eq!(bed.destination.has_heard("cont"), 1);
}

/// If the destination's QEMU exits during `cont`, only the user can decide where the VM is.
#[test]
fn crash_at_start_needs_take_back() {
    let bed = Bed::new();
    bed.destination.is().dies_at = Some("cont");
    let text = match bed.run() {
        Err(error @ MoveError::InDoubt { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(text.contains("--take-back"), "{text}");
    assert_eq!(bed.source.is().run, "postmigrate");
    assert_eq!(bed.source.has_heard("cont"), 0);
    source::take_back(&bed.options.qmp, &bed.options.records, &NoServers).expect("it is here");
    assert_eq!(bed.source.is().run, "running");
    // Only once.
    let again = source::take_back(&bed.options.qmp, &bed.options.records, &NoServers);
    assert!(matches!(again, Err(MoveError::Preflight(_))));
}

/// A mover hands over a VM whose first mover was killed before the hand-over, paused or not.
#[test]
fn mover_resumes_after_killed_mover() {
    for run in [true, false] {
        let bed = Bed::new();
        bed.mover_has_died(run);
        let done = bed.run().expect("moves");
        assert!(done.resumed && !done.postcopy);
        assert_eq!(bed.destination.has_heard("cont"), usize::from(run));
        assert_eq!(bed.source.has_heard("quit"), 1);
    }
}

/// A migration without a record of this QEMU process is neither continued nor taken back.
#[test]
fn foreign_migration_is_left_alone() {
    let bed = Bed::new();
    (bed.source.is().run, bed.source.is().migration) = ("postmigrate", "completed");
    assert!(matches!(bed.run(), Err(MoveError::Unclear(_))));
    let back = source::take_back(&bed.options.qmp, &bed.options.records, &NoServers);
    assert!(matches!(back, Err(MoveError::Preflight(_))));
    for command in ["cont", "quit", "migrate"] {
        assert_eq!(bed.source.has_heard(command), 0, "{command}");
    }
    let other = Bed::new();
    other.mover_has_died(true);
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
    assert!(matches!(other.run(), Err(MoveError::Unclear(_))));
    assert_eq!(other.destination.has_heard("cont"), 0);
    let _ = &other.folder;
}

fn post_copy() -> Bed {
    let mut bed = Bed::new();
    bed.options.postcopy = true;
    bed.source.is().comes_to = ("finish-migrate", "postcopy-active");
    bed.destination.is().comes_to = ("paused", "postcopy-active");
    bed
}

/// Returns a hook that makes both QEMUs lose their connection in post-copy, and complete over the next one.
fn breaks(bed: &Bed) -> impl Fn() + Send + use<> {
    let (source, destination) = (Arc::clone(&bed.source), Arc::clone(&bed.destination));
    move || {
        source.is().migration = "postcopy-paused";
        source.is().comes_to = ("postmigrate", "completed");
        destination.is().migration = "postcopy-paused";
        destination.is().comes_to = ("running", "completed");
    }
}

#[test]
fn postcopy_resumes_over_new_connection() {
    let bed = post_copy();
    let done = thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.run == "running");
            breaks(&bed)();
            bed.cut.store(true, Ordering::Relaxed);
        });
        bed.run()
    });
    let done = done.expect("moves");
    assert!(done.postcopy);
    bed.is_there();
    assert_eq!(bed.destination.has_heard("migrate-recover"), 1);
    assert_eq!(bed.destination.has_heard("cont"), 1);
}

/// Post-copy resumes over another connection if the first one is lost while the destination starts the VM.
#[test]
fn postcopy_resumes_when_cut_at_start() {
    let bed = post_copy();
    bed.cut_at("cont", breaks(&bed));
    assert!(bed.run().expect("moves").postcopy);
    bed.is_there();
    assert_eq!(bed.destination.has_heard("cont"), 1);
}

/// A later mover has the destination run a VM whose mover was killed in post-copy, and carries the rest.
#[test]
fn postcopy_resumes_after_killed_mover() {
    let bed = post_copy();
    bed.mover_has_died(true);
    breaks(&bed)();
    (bed.source.is().run, bed.destination.is().run) = ("finish-migrate", "paused");
    let done = bed.run().expect("moves");
    assert!(done.postcopy && done.resumed);
    bed.is_there();
    assert_eq!(bed.destination.has_heard("cont"), 1);
}

/// In post-copy, a destination that cannot run the VM yet is asked again, and neither QEMU is ended.
#[test]
fn postcopy_retries_refused_start() {
    let bed = post_copy();
    bed.destination.is().refuses.insert("cont");
    thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination
                .wait_until(|fake| fake.heard.iter().any(|it| it == "cont"));
            bed.destination.is().refuses.clear();
            bed.destination.wait_until(|fake| fake.run == "running");
            bed.source.is().migration = "completed";
        });
        assert!(bed.run().expect("moves").postcopy);
    });
    bed.is_there();
    assert_eq!(bed.destination.has_heard("cont"), 2);
}

/// The source's QEMU is stopped if it resumes by itself, and the destination decides whether it has everything.
#[test]
fn source_failing_after_go_is_stopped() {
    for whole in [true, false] {
        let bed = post_copy();
        thread::scope(|scope| {
            scope.spawn(|| {
                bed.destination.wait_until(|fake| fake.run == "running");
                if whole {
                    bed.destination.is().migration = "completed";
                }
                (bed.source.is().run, bed.source.is().migration) = ("running", "failed");
            });
            match bed.run() {
                Ok(done) => assert!(whole && done.postcopy),
                Err(MoveError::Broken { .. }) => assert!(!whole),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!((bed.source.has_heard("stop"), bed.source.has_heard("cont")), (1, 0));
        assert_eq!(bed.source.has_heard("quit"), usize::from(whole));
        assert_eq!(bed.destination.has_heard("quit"), 0);
    }
}

#[test]
fn vm_stops_before_postcopy_begins() {
    let mut bed = Bed::new();
    bed.options.postcopy = true;
    // The migration does not converge.
    bed.destination.is().comes_to = ("inmigrate", "active");
    bed.source.is().rounds = Some(0);
    let source = Arc::clone(&bed.source);
    let destination = Arc::clone(&bed.destination);
    bed.source.hook("migrate-start-postcopy", move || {
        assert_eq!(source.is().run, "paused");
        (source.is().run, source.is().migration) = ("finish-migrate", "postcopy-active");
        (destination.is().run, destination.is().migration) = ("paused", "postcopy-active");
    });
    let done = thread::scope(|scope| {
        scope.spawn(|| {
            bed.destination.wait_until(|fake| fake.run == "running");
            (bed.destination.is().migration, bed.source.is().migration) = ("completed", "completed");
        });
        bed.run()
    });
    assert!(done.expect("moves").postcopy);
    assert_eq!(bed.destination.is().run, "running");
    assert_eq!(bed.source.has_heard("stop"), 1);
}

/// Leaves the state of a mover that was killed during a move.
fn left(bed: &Bed, stopped: bool, told: bool) -> Leaving {
    bed.mover_has_died(true);
    let leaving = Leaving {
        stopped,
        told,
        before: Before::default(),
        ..bed.record().expect("is there")
    };
    bed.place().save(&leaving).expect("writes");
    leaving
}

/// A VM that was stopped for post-copy that did not begin is resumed by the next mover.
#[test]
fn vm_stopped_for_unbegun_postcopy_resumes() {
    let bed = Bed::new();
    left(&bed, true, false);
    (bed.source.is().run, bed.source.is().migration) = ("paused", "failed");
    // The destination has failed too.
    bed.destination.is().migration = "failed";
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::Preflight(_))), "{result:?}");
    assert_eq!(bed.source.is().run, "running");
    assert_eq!(bed.record(), None);
}

/// A VM that was handed over and still runs at the source is stopped, and the destination is asked to run it.
#[test]
fn vm_running_despite_go_is_stopped() {
    let bed = Bed::new();
    left(&bed, false, true);
    (bed.source.is().run, bed.source.is().migration) = ("running", "failed");
    bed.run().expect("moves");
    assert_eq!(bed.source.has_heard("stop"), 1);
    bed.is_there();
}

/// A VM that its user has resumed at the source is not handed over again.
#[test]
fn resumed_vm_is_not_handed_over() {
    let bed = Bed::new();
    left(&bed, false, true);
    bed.source.is().run = "running";
    match bed.run() {
        Err(MoveError::Unclear(text)) => assert!(text.contains("--take-back"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(bed.destination.has_heard("cont"), 0);
    source::take_back(&bed.options.qmp, &bed.options.records, &NoServers).expect("it is here");
    assert_eq!((bed.source.has_heard("cont"), bed.record()), (0, None));
}

/// The VM is started at the destination unless it was last paused at the source.
#[test]
fn run_state_changes_during_move_count() {
    for (before, after) in [("running", "paused"), ("paused", "running"), ("suspended", "suspended")] {
        let bed = Bed::new();
        bed.source.is().run = before;
        bed.destination.is().comes_to = ("inmigrate", "active");
        thread::scope(|scope| {
            scope.spawn(|| {
                bed.destination.wait_until(|fake| fake.migration == "active");
                bed.source.is().run = after;
                // Waits until the mover has seen the change.
                let seen = bed.source.has_heard("query-status");
                bed.source
                    .wait_until(|fake| fake.heard.iter().filter(|heard| *heard == "query-status").count() > seen + 1);
                (bed.destination.is().run, bed.destination.is().migration) = ("paused", "completed");
                (bed.source.is().run, bed.source.is().migration) = ("postmigrate", "completed");
            });
            bed.run().expect("moves");
        });
        assert_eq!(
            bed.destination.has_heard("cont"),
            usize::from(after != "paused"),
            "{before}, {after}"
        );
    }
}

/// A migration that another client starts in the middle of the move is neither cancelled nor resumed.
#[test]
fn concurrent_foreign_migration_is_left_alone() {
    let bed = Bed::new();
    bed.source.is().refuses.insert("migrate");
    let source = Arc::clone(&bed.source);
    bed.source.hook("migrate", move || {
        (source.is().run, source.is().migration) = ("postmigrate", "completed")
    });
    assert!(matches!(bed.run(), Err(MoveError::Here { .. })));
    assert_eq!(bed.source.has_heard("cont") + bed.source.has_heard("migrate_cancel"), 0);
}

#[test]
fn quit_reports_whether_qemu_exited() {
    let bed = Bed::new();
    let mut qmp = Qmp::connect(&bed.source.qmp).expect("connects");
    bed.source.is().refuses.insert("quit");
    assert!(!qmp.quit(Duration::from_millis(200)));
    bed.source.is().refuses.clear();
    assert!(qmp.quit(Duration::from_secs(30)));
}
