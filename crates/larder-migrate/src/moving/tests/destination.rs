//! Tests of the mover at the destination.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tempfile::TempDir;

use super::fake::Qemu;
use crate::moving::Description;
use crate::moving::destination::{DestinationMover, IncomingStage, IncomingState};
use crate::moving::disks::NoDiskServers;
use crate::moving::messages::{MoverRequest, ToDestination, ToSource, VERSION};
use crate::moving::postcopy::{FaultClaim, FaultHandlers, NoFaultHandlers};
use crate::moving::record::MoveId;
use crate::moving::settings::QemuMigrationSettings;
use crate::qmp::{ProcessIdentity, Qmp};

const SETTINGS: QemuMigrationSettings = QemuMigrationSettings { multifd_channels: 2, postcopy: false };

struct TestBed {
    dir: TempDir,
    qemu: Arc<Qemu>,
    destination: DestinationMover,
    id: MoveId,
}

impl TestBed {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let qemu = Arc::new(Qemu::destination(dir.path()));
        let destination =
            DestinationMover::new(&qemu.qmp, dir.path(), Arc::new(NoDiskServers), Arc::new(NoFaultHandlers))
                .expect("it waits");
        assert_eq!(destination.try_state(), Some(IncomingState::Waiting));
        Self { id: MoveId::new().expect("random numbers"), dir, qemu, destination }
    }

    /// Creates a bed prepared for a move, with everything arrived.
    fn loaded() -> Self {
        let bed = Self::new();
        assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
        assert_eq!(bed.destination.try_state(), Some(IncomingState::Incoming));
        (bed.qemu.state().run, bed.qemu.state().migration) = ("paused", "completed");
        bed
    }

    /// Replaces the mover by a later one.
    fn restart(&mut self) {
        self.destination =
            DestinationMover::new(&self.qemu.qmp, self.dir.path(), Arc::new(NoDiskServers), Arc::new(NoFaultHandlers))
                .expect("it knows of the move");
    }

    fn request(&self, id: &MoveId, request: MoverRequest) -> ToSource {
        let message = ToDestination { version: VERSION, id: id.clone(), tell: request };
        let note = serde_json::to_vec(&message).expect("plain data");
        self.destination.handle_note(&note)
    }

    fn prepare(&self, id: &MoveId) -> ToSource {
        self.prepare_with(id, SETTINGS)
    }

    fn prepare_with(&self, id: &MoveId, settings: QemuMigrationSettings) -> ToSource {
        let vm = Description::query(&mut Qmp::connect(&self.qemu.qmp).expect("lives")).expect("answers");
        self.request(id, MoverRequest::Prepare { vm: Box::new(vm), settings, disks: Vec::new() })
    }

    fn start(&self) -> ToSource {
        self.request(&self.id, MoverRequest::Go { run: true, postcopy: false })
    }

    fn start_postcopy(&self) -> ToSource {
        self.request(&self.id, MoverRequest::Go { run: true, postcopy: true })
    }
}

fn reason(answer: ToSource) -> String {
    match answer {
        ToSource::Refused { reasons } => reasons.join("; "),
        other => panic!("{other:?}"),
    }
}

/// The VM is started once, and every repetition of `Go` is answered `Running`, also by a later mover.
#[test]
fn vm_starts_once_for_repeated_request() {
    let mut bed = TestBed::loaded();
    assert_eq!(bed.qemu.state().parameters["tls-creds"], "");
    assert_eq!(bed.qemu.state().parameters["multifd-channels"], 2);
    assert!(bed.qemu.state().capabilities["late-block-activate"]);
    assert!(!bed.qemu.state().capabilities["xbzrle"]);
    for _ in 0..2 {
        assert_eq!(bed.start(), ToSource::Running { whole: true });
        bed.restart();
    }
    // A later state of the VM is no concern of the mover.
    bed.qemu.state().run = "io-error";
    assert_eq!(bed.start(), ToSource::Running { whole: true });
    assert_eq!((bed.qemu.command_count("cont"), bed.qemu.command_count("quit")), (1, 0));
    assert_eq!(bed.destination.try_state(), Some(IncomingState::Running { has_all_memory: true }));
}

#[test]
fn paused_vm_is_not_started() {
    let bed = TestBed::loaded();
    let answer = bed.request(&bed.id, MoverRequest::Go { run: false, postcopy: false });
    assert_eq!(answer, ToSource::Running { whole: true });
    assert_eq!(bed.qemu.command_count("cont"), 0);
}

/// A request with the number of another move is refused, and the prepared move stays possible.
#[test]
fn other_move_id_changes_nothing() {
    let mut bed = TestBed::loaded();
    let other = MoveId::new().expect("random numbers");
    for _ in 0..2 {
        for request in [MoverRequest::Go { run: true, postcopy: false }, MoverRequest::Recover] {
            assert!(reason(bed.request(&other, request)).contains("right host"));
        }
        assert!(reason(bed.prepare(&other)).contains("does not wait"));
        bed.restart();
    }
    for command in ["cont", "quit", "migrate-recover"] {
        assert_eq!(bed.qemu.command_count(command), 0, "{command}");
    }
    assert_eq!(bed.start(), ToSource::Running { whole: true });
}

/// A VM that QEMU refused to run is never run there, also by a later mover.
#[test]
fn refused_start_is_final() {
    let mut bed = TestBed::loaded();
    bed.qemu.state().refuses.extend(["cont", "quit"]);
    let ToSource::NotRunning { reason } = bed.start() else {
        panic!("it runs");
    };
    assert!(reason.contains("it does not want to"), "{reason}");
    // QEMU would run it now.
    bed.qemu.state().refuses.clear();
    for _ in 0..2 {
        assert!(matches!(bed.start(), ToSource::NotRunning { .. }));
        assert!(matches!(bed.destination.try_state(), Some(IncomingState::NeverRan { .. })));
        bed.restart();
    }
    assert_eq!((bed.qemu.command_count("cont"), bed.qemu.command_count("quit")), (1, 1));
}

/// If QEMU exits during `cont`, the answer is `Unknown`.
#[test]
fn crash_at_start_answers_unknown() {
    let bed = TestBed::loaded();
    bed.qemu.state().exits_at = Some("cont");
    for _ in 0..2 {
        assert!(matches!(bed.start(), ToSource::Unknown { .. }));
    }
    assert_eq!(bed.destination.try_state(), Some(IncomingState::Exited));
}

/// If QEMU exits or fails to load before `cont`, the answer is `NotRunning`.
#[test]
fn exit_before_start_answers_not_running() {
    let bed = TestBed::loaded();
    bed.qemu.state().exits_at = Some("query-migrate");
    assert!(matches!(bed.start(), ToSource::NotRunning { .. }));
    let bed = TestBed::loaded();
    (bed.qemu.state().run, bed.qemu.state().migration) = ("inmigrate", "failed");
    assert!(matches!(bed.start(), ToSource::NotRunning { .. }));
    assert_eq!(bed.qemu.command_count("cont"), 0);
}

#[test]
fn start_waits_until_vm_is_loaded() {
    let bed = TestBed::loaded();
    (bed.qemu.state().run, bed.qemu.state().migration) = ("inmigrate", "active");
    let qemu = Arc::clone(&bed.qemu);
    let later = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(qemu.command_count("cont"), 0);
        (qemu.state().run, qemu.state().migration) = ("paused", "completed");
    });
    assert_eq!(bed.start(), ToSource::Running { whole: true });
    later.join().expect("no panic");
}

/// The VM is not started while the record that it may run cannot be saved.
#[test]
fn vm_is_not_started_without_record() {
    let bed = TestBed::loaded();
    std::fs::remove_dir_all(bed.dir.path()).expect("removes it");
    assert!(reason(bed.start()).contains("record"));
    assert_eq!((bed.qemu.command_count("cont"), bed.qemu.command_count("quit")), (0, 0));
}

/// In post-copy the destination's QEMU, which has half of the VM, is never ended.
#[test]
fn postcopy_destination_is_never_ended() {
    let mut bed = TestBed::loaded();
    (bed.qemu.state().run, bed.qemu.state().migration) = ("paused", "postcopy-paused");
    bed.qemu.state().refuses.insert("cont");
    let ToSource::NotYet { reason } = bed.start_postcopy() else { panic!("it runs") };
    assert!(reason.contains("it does not want to"), "{reason}");
    bed.qemu.state().refuses.clear();
    bed.restart();
    assert_eq!(bed.start_postcopy(), ToSource::Running { whole: false });
    assert_eq!(bed.destination.stage(), IncomingStage::PostCopy);
    assert_eq!(bed.request(&bed.id, MoverRequest::Recover), ToSource::Prepared { warnings: Vec::new(), disks: false });
    assert_eq!(bed.qemu.command_count("migrate-recover"), 1);
    assert_eq!(bed.destination.try_state(), Some(IncomingState::Running { has_all_memory: false }));
    // All has arrived, and only the source does not know it.
    bed.qemu.state().migration = "completed";
    bed.qemu.state().refuses.insert("migrate-recover");
    assert_eq!(bed.request(&bed.id, MoverRequest::Recover), ToSource::Running { whole: true });
    assert_eq!(bed.start_postcopy(), ToSource::Running { whole: true });
    assert_eq!(bed.destination.stage(), IncomingStage::HandingOver);
    assert_eq!(bed.qemu.command_count("quit"), 0);
}

/// A VM stays whole when a later migration away from this host is cancelled.
#[test]
fn cancelled_outgoing_move_keeps_vm_complete() {
    let mut bed = TestBed::loaded();
    assert_eq!(bed.start(), ToSource::Running { whole: true });
    for status in ["cancelling", "cancelled"] {
        bed.qemu.state().migration = status;
        bed.restart();
        assert_eq!(bed.destination.try_state(), Some(IncomingState::Running { has_all_memory: true }));
    }
}

/// A QEMU that waits for a move can be prepared for another one until the VM begins to arrive.
#[test]
fn waiting_qemu_accepts_another_move() {
    let bed = TestBed::new();
    assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
    let other = MoveId::new().expect("random numbers");
    assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
    bed.qemu.state().migration = "listens";
    assert!(matches!(bed.prepare(&other), ToSource::Prepared { .. }));
    assert_eq!(bed.qemu.command_count("migrate-incoming"), 1);
    assert!(reason(bed.start()).contains("right host"));
    bed.qemu.state().migration = "active";
    assert!(reason(bed.prepare(&bed.id)).contains("start a new one"));
}

/// A later mover cannot reuse a QEMU that already waits for an earlier mover.
#[test]
fn qemu_of_earlier_mover_is_refused() {
    let mut bed = TestBed::new();
    assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
    bed.qemu.state().migration = "listens";
    bed.restart();
    assert!(reason(bed.prepare(&bed.id)).contains("start a new one"));
}

#[test]
fn vm_with_other_uuid_is_refused() {
    let bed = TestBed::new();
    let mut vm = Description::query(&mut Qmp::connect(&bed.qemu.qmp).expect("lives")).expect("answers");
    vm.uuid = "00000000-0000-0000-0000-000000000000".to_owned();
    let settings = SETTINGS;
    let answer = bed.request(&bed.id, MoverRequest::Prepare { vm: Box::new(vm), settings, disks: Vec::new() });
    assert!(reason(answer).contains("UUID"));
    assert_eq!(bed.qemu.command_count("migrate-incoming"), 0);
}

/// A QEMU that has a VM, and of which no record exists, is refused.
#[test]
fn unknown_qemu_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let qemu = Qemu::destination(dir.path());
    (qemu.state().run, qemu.state().migration) = ("running", "completed");
    let error_of = |path: &Path| {
        DestinationMover::new(path, dir.path(), Arc::new(NoDiskServers), Arc::new(NoFaultHandlers))
            .err()
            .expect("it has a VM")
            .to_string()
    };
    assert!(error_of(&qemu.qmp).contains("-incoming defer"));
    assert!(error_of(&dir.path().join("nobody")).contains("nobody"));
}

#[test]
fn invalid_notes_change_nothing() {
    let bed = TestBed::loaded();
    let id = serde_json::to_value(&bed.id).expect("plain data");
    for (note, word) in [
        (b"\xff".to_vec(), "no JSON"),
        (json!({"version": 1, "tell": "go"}).to_string().into_bytes(), "version 1"),
        (json!({"version": VERSION, "id": id, "tell": "explode"}).to_string().into_bytes(), "explode"),
        (json!({"version": VERSION, "id": [], "tell": "recover"}).to_string().into_bytes(), "does not understand"),
    ] {
        assert!(reason(bed.destination.handle_note(&note)).contains(word));
    }
    assert_eq!(bed.start(), ToSource::Running { whole: true });
}

/// A later mover starts a VM that may run and whose QEMU has not received `cont`.
#[test]
fn restarted_mover_starts_allowed_vm() {
    let mut bed = TestBed::loaded();
    bed.qemu.state().refuses.insert("cont");
    bed.start_postcopy();
    bed.qemu.state().refuses.clear();
    assert_eq!(bed.start(), ToSource::Running { whole: true });
    // Pretends that the first `cont` was never executed.
    bed.qemu.state().run = "paused";
    bed.restart();
    assert_eq!(bed.qemu.state().run, "running");
    assert_eq!(bed.destination.try_state(), Some(IncomingState::Running { has_all_memory: true }));
}

/// A QEMU that another client has used since is refused without changing its settings.
#[test]
fn qemu_changed_by_others_is_refused() {
    let bed = TestBed::new();
    (bed.qemu.state().run, bed.qemu.state().migration) = ("running", "completed");
    assert!(reason(bed.prepare(&bed.id)).contains("any more"));
    assert_eq!(bed.qemu.command_count("stop") + bed.qemu.command_count("migrate-set-capabilities"), 0);
}

/// Pager that owns the page faults, so that claims fail, while the flag is set.
struct Pager(Arc<AtomicBool>);

impl FaultHandlers for Pager {
    fn claim(&self, _: ProcessIdentity) -> Result<FaultClaim, String> {
        match self.0.load(Ordering::Relaxed) {
            true => Err("a pager has it".to_owned()),
            false => Ok(Box::new(())),
        }
    }
}

/// Handler whose claims to page faults can be counted.
struct Claims(Arc<()>);

impl FaultHandlers for Claims {
    fn claim(&self, _: ProcessIdentity) -> Result<FaultClaim, String> {
        Ok(Box::new(Arc::clone(&self.0)))
    }
}

/// A pager may attach to a QEMU that no move waits for.
#[test]
fn refused_move_releases_page_faults() {
    let mut bed = TestBed::new();
    let claims = Arc::new(());
    let handlers = Arc::new(Claims(Arc::clone(&claims)));
    bed.destination =
        DestinationMover::new(&bed.qemu.qmp, bed.dir.path(), Arc::new(NoDiskServers), handlers).expect("it waits");
    (bed.qemu.state().run, bed.qemu.state().migration) = ("running", "completed");
    let postcopy = QemuMigrationSettings { multifd_channels: 0, postcopy: true };
    assert!(reason(bed.prepare_with(&bed.id, postcopy)).contains("any more"));
    assert_eq!(Arc::strong_count(&claims), 2);
}

/// Post-copy is refused before anything is changed, and again just before the source switches over.
#[test]
fn postcopy_is_refused_where_pager_attached() {
    let dir = tempfile::tempdir().expect("a folder");
    let qemu = Arc::new(Qemu::destination(dir.path()));
    let is_attached = Arc::new(AtomicBool::new(true));
    let start = || {
        let pager = Arc::new(Pager(Arc::clone(&is_attached)));
        DestinationMover::new(&qemu.qmp, dir.path(), Arc::new(NoDiskServers), pager).expect("it waits")
    };
    let mut bed = TestBed {
        destination: start(),
        id: MoveId::new().expect("random numbers"),
        dir: tempfile::tempdir().expect("a folder"),
        qemu: Arc::clone(&qemu),
    };
    let postcopy = QemuMigrationSettings { multifd_channels: 0, postcopy: true };
    assert!(reason(bed.prepare_with(&bed.id, postcopy)).contains("a pager has it"));
    assert_eq!(qemu.command_count("migrate-set-capabilities") + qemu.command_count("migrate-incoming"), 0);
    is_attached.store(false, Ordering::Relaxed);
    assert!(matches!(bed.prepare_with(&bed.id, postcopy), ToSource::Prepared { .. }));
    assert_eq!(bed.request(&bed.id, MoverRequest::CheckPostcopy), ToSource::Noted);
    // The claim has ended with its receiver, and QEMU has begun to load the VM.
    is_attached.store(true, Ordering::Relaxed);
    qemu.state().migration = "active";
    bed.destination = start();
    assert!(reason(bed.request(&bed.id, MoverRequest::CheckPostcopy)).contains("a pager has it"));
    let other = MoveId::new().expect("random numbers");
    assert!(reason(bed.request(&other, MoverRequest::CheckPostcopy)).contains("right host"));
}
