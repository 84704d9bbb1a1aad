//! Tests of the mover at the destination.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tempfile::TempDir;

use super::fake::Qemu;
use crate::moving::Description;
use crate::moving::destination::{Destination, Stage, State};
use crate::moving::disks::NoServers;
use crate::moving::messages::{Tell, ToDestination, ToSource, VERSION};
use crate::moving::postcopy::{FaultClaim, FaultHandlers, NoFaultHandlers};
use crate::moving::record::MoveId;
use crate::moving::settings::Settings;
use crate::qmp::{Process, Qmp};

const SETTINGS: Settings = Settings {
    multifd_channels: 2,
    postcopy: false,
};

struct Bed {
    folder: TempDir,
    qemu: Arc<Qemu>,
    destination: Destination,
    id: MoveId,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let qemu = Arc::new(Qemu::destination(folder.path()));
        let destination = Destination::new(&qemu.qmp, folder.path(), Arc::new(NoServers), Arc::new(NoFaultHandlers))
            .expect("it waits");
        assert_eq!(destination.look(), Some(State::Waiting));
        Self {
            id: MoveId::new().expect("random numbers"),
            folder,
            qemu,
            destination,
        }
    }

    /// Creates a bed prepared for a move, with everything arrived.
    fn loaded() -> Self {
        let bed = Self::new();
        assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
        assert_eq!(bed.destination.look(), Some(State::Coming));
        (bed.qemu.is().run, bed.qemu.is().migration) = ("paused", "completed");
        bed
    }

    /// Replaces the mover by a later one.
    fn restart(&mut self) {
        self.destination = Destination::new(
            &self.qemu.qmp,
            self.folder.path(),
            Arc::new(NoServers),
            Arc::new(NoFaultHandlers),
        )
        .expect("it knows of the move");
    }

    fn tell(&self, id: &MoveId, tell: Tell) -> ToSource {
        let told = ToDestination {
            version: VERSION,
            id: id.clone(),
            tell,
        };
        let note = serde_json::to_vec(&told).expect("plain data");
        self.destination.heard(&note)
    }

    fn prepare(&self, id: &MoveId) -> ToSource {
        self.prepare_with(id, SETTINGS)
    }

    fn prepare_with(&self, id: &MoveId, settings: Settings) -> ToSource {
        let vm = Description::of(&mut Qmp::connect(&self.qemu.qmp).expect("lives")).expect("answers");
        self.tell(
            id,
            Tell::Prepare {
                vm: Box::new(vm),
                settings,
                disks: Vec::new(),
            },
        )
    }

    fn go(&self) -> ToSource {
        self.tell(
            &self.id,
            Tell::Go {
                run: true,
                postcopy: false,
            },
        )
    }

    fn go_postcopy(&self) -> ToSource {
        self.tell(
            &self.id,
            Tell::Go {
                run: true,
                postcopy: true,
            },
        )
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
fn vm_starts_once_for_repeated_go() {
    let mut bed = Bed::loaded();
    assert_eq!(bed.qemu.is().parameters["tls-creds"], "");
    assert_eq!(bed.qemu.is().parameters["multifd-channels"], 2);
    assert!(bed.qemu.is().capabilities["late-block-activate"]);
    assert!(!bed.qemu.is().capabilities["xbzrle"]);
    for _ in 0..2 {
        assert_eq!(bed.go(), ToSource::Running { whole: true });
        bed.restart();
    }
    // A later state of the VM is no concern of the mover.
    bed.qemu.is().run = "io-error";
    assert_eq!(bed.go(), ToSource::Running { whole: true });
    assert_eq!((bed.qemu.has_heard("cont"), bed.qemu.has_heard("quit")), (1, 0));
    assert_eq!(bed.destination.look(), Some(State::Running { whole: true }));
}

#[test]
fn paused_vm_is_not_started() {
    let bed = Bed::loaded();
    let told = bed.tell(
        &bed.id,
        Tell::Go {
            run: false,
            postcopy: false,
        },
    );
    assert_eq!(told, ToSource::Running { whole: true });
    assert_eq!(bed.qemu.has_heard("cont"), 0);
}

/// A request with the number of another move is refused, and the prepared move stays possible.
#[test]
fn other_move_id_changes_nothing() {
    let mut bed = Bed::loaded();
    let other = MoveId::new().expect("random numbers");
    for _ in 0..2 {
        for tell in [
            Tell::Go {
                run: true,
                postcopy: false,
            },
            Tell::Recover,
        ] {
            assert!(reason(bed.tell(&other, tell)).contains("right host"));
        }
        assert!(reason(bed.prepare(&other)).contains("does not wait"));
        bed.restart();
    }
    for command in ["cont", "quit", "migrate-recover"] {
        assert_eq!(bed.qemu.has_heard(command), 0, "{command}");
    }
    assert_eq!(bed.go(), ToSource::Running { whole: true });
}

/// A VM that QEMU refused to run is never run there, also by a later mover.
#[test]
fn refused_start_is_final() {
    let mut bed = Bed::loaded();
    bed.qemu.is().refuses.extend(["cont", "quit"]);
    let ToSource::NotRunning { reason } = bed.go() else {
        panic!("it runs");
    };
    assert!(reason.contains("it does not want to"), "{reason}");
    // QEMU would run it now.
    bed.qemu.is().refuses.clear();
    for _ in 0..2 {
        assert!(matches!(bed.go(), ToSource::NotRunning { .. }));
        assert!(matches!(bed.destination.look(), Some(State::Never { .. })));
        bed.restart();
    }
    assert_eq!((bed.qemu.has_heard("cont"), bed.qemu.has_heard("quit")), (1, 1));
}

/// If QEMU exits during `cont`, the answer is `Unknown`.
#[test]
fn crash_at_start_answers_unknown() {
    let bed = Bed::loaded();
    bed.qemu.is().dies_at = Some("cont");
    for _ in 0..2 {
        assert!(matches!(bed.go(), ToSource::Unknown { .. }));
    }
    assert_eq!(bed.destination.look(), Some(State::Ended));
}

/// If QEMU exits or fails to load before `cont`, the answer is `NotRunning`.
#[test]
fn exit_before_start_answers_not_running() {
    let bed = Bed::loaded();
    bed.qemu.is().dies_at = Some("query-migrate");
    assert!(matches!(bed.go(), ToSource::NotRunning { .. }));
    let bed = Bed::loaded();
    (bed.qemu.is().run, bed.qemu.is().migration) = ("inmigrate", "failed");
    assert!(matches!(bed.go(), ToSource::NotRunning { .. }));
    assert_eq!(bed.qemu.has_heard("cont"), 0);
}

#[test]
fn start_waits_until_vm_is_loaded() {
    let bed = Bed::loaded();
    (bed.qemu.is().run, bed.qemu.is().migration) = ("inmigrate", "active");
    let qemu = Arc::clone(&bed.qemu);
    let later = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(qemu.has_heard("cont"), 0);
        (qemu.is().run, qemu.is().migration) = ("paused", "completed");
    });
    assert_eq!(bed.go(), ToSource::Running { whole: true });
    later.join().expect("no panic");
}

/// The VM is not started while the record that it may run cannot be saved.
#[test]
fn vm_is_not_started_without_record() {
    let bed = Bed::loaded();
    std::fs::remove_dir_all(bed.folder.path()).expect("removes it");
    assert!(reason(bed.go()).contains("record"));
    assert_eq!((bed.qemu.has_heard("cont"), bed.qemu.has_heard("quit")), (0, 0));
}

/// In post-copy the destination's QEMU, which has half of the VM, is never ended.
#[test]
fn postcopy_destination_is_never_ended() {
    let mut bed = Bed::loaded();
    (bed.qemu.is().run, bed.qemu.is().migration) = ("paused", "postcopy-paused");
    bed.qemu.is().refuses.insert("cont");
    let ToSource::NotYet { reason } = bed.go_postcopy() else {
        panic!("it runs")
    };
    assert!(reason.contains("it does not want to"), "{reason}");
    bed.qemu.is().refuses.clear();
    bed.restart();
    assert_eq!(bed.go_postcopy(), ToSource::Running { whole: false });
    assert_eq!(bed.destination.stage(), Stage::PostCopy);
    assert_eq!(
        bed.tell(&bed.id, Tell::Recover),
        ToSource::Prepared {
            warnings: Vec::new(),
            disks: false,
        }
    );
    assert_eq!(bed.qemu.has_heard("migrate-recover"), 1);
    assert_eq!(bed.destination.look(), Some(State::Running { whole: false }));
    // All has arrived, and only the source does not know it.
    bed.qemu.is().migration = "completed";
    bed.qemu.is().refuses.insert("migrate-recover");
    assert_eq!(bed.tell(&bed.id, Tell::Recover), ToSource::Running { whole: true });
    assert_eq!(bed.go_postcopy(), ToSource::Running { whole: true });
    assert_eq!(bed.destination.stage(), Stage::HandingOver);
    assert_eq!(bed.qemu.has_heard("quit"), 0);
}

/// A VM stays whole when a later migration away from this host is cancelled.
#[test]
fn cancelled_outgoing_move_leaves_vm_whole() {
    let mut bed = Bed::loaded();
    assert_eq!(bed.go(), ToSource::Running { whole: true });
    for status in ["cancelling", "cancelled"] {
        bed.qemu.is().migration = status;
        bed.restart();
        assert_eq!(bed.destination.look(), Some(State::Running { whole: true }));
    }
}

/// A QEMU that waits for a move can be prepared for another one until the VM begins to arrive.
#[test]
fn waiting_qemu_accepts_another_move() {
    let bed = Bed::new();
    assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
    let other = MoveId::new().expect("random numbers");
    assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
    bed.qemu.is().migration = "listens";
    assert!(matches!(bed.prepare(&other), ToSource::Prepared { .. }));
    assert_eq!(bed.qemu.has_heard("migrate-incoming"), 1);
    assert!(reason(bed.go()).contains("right host"));
    bed.qemu.is().migration = "active";
    assert!(reason(bed.prepare(&bed.id)).contains("start a new one"));
}

/// A later mover cannot reuse a QEMU that already waits for an earlier mover.
#[test]
fn qemu_of_earlier_mover_is_refused() {
    let mut bed = Bed::new();
    assert!(matches!(bed.prepare(&bed.id), ToSource::Prepared { .. }));
    bed.qemu.is().migration = "listens";
    bed.restart();
    assert!(reason(bed.prepare(&bed.id)).contains("start a new one"));
}

#[test]
fn vm_with_other_uuid_is_refused() {
    let bed = Bed::new();
    let mut vm = Description::of(&mut Qmp::connect(&bed.qemu.qmp).expect("lives")).expect("answers");
    vm.uuid = "00000000-0000-0000-0000-000000000000".to_owned();
    let settings = SETTINGS;
    let answer = bed.tell(
        &bed.id,
        Tell::Prepare {
            vm: Box::new(vm),
            settings,
            disks: Vec::new(),
        },
    );
    assert!(reason(answer).contains("UUID"));
    assert_eq!(bed.qemu.has_heard("migrate-incoming"), 0);
}

/// A QEMU that has a VM, and of which no record exists, is refused.
#[test]
fn unknown_qemu_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = Qemu::destination(folder.path());
    (qemu.is().run, qemu.is().migration) = ("running", "completed");
    let said = |path: &Path| {
        Destination::new(path, folder.path(), Arc::new(NoServers), Arc::new(NoFaultHandlers))
            .err()
            .expect("it has a VM")
            .to_string()
    };
    assert!(said(&qemu.qmp).contains("-incoming defer"));
    assert!(said(&folder.path().join("nobody")).contains("nobody"));
}

#[test]
fn invalid_notes_change_nothing() {
    let bed = Bed::loaded();
    let id = serde_json::to_value(&bed.id).expect("plain data");
    for (note, word) in [
        (b"\xff".to_vec(), "no JSON"),
        (
            json!({"version": 1, "tell": "go"}).to_string().into_bytes(),
            "version 1",
        ),
        (
            json!({"version": VERSION, "id": id, "tell": "explode"})
                .to_string()
                .into_bytes(),
            "explode",
        ),
        (
            json!({"version": VERSION, "id": [], "tell": "recover"})
                .to_string()
                .into_bytes(),
            "does not understand",
        ),
    ] {
        assert!(reason(bed.destination.heard(&note)).contains(word));
    }
    assert_eq!(bed.go(), ToSource::Running { whole: true });
}

/// A later mover starts a VM that may run and whose QEMU has not received `cont`.
#[test]
fn restarted_mover_starts_allowed_vm() {
    let mut bed = Bed::loaded();
    bed.qemu.is().refuses.insert("cont");
    bed.go_postcopy();
    bed.qemu.is().refuses.clear();
    assert_eq!(bed.go(), ToSource::Running { whole: true });
    // Pretends that the first `cont` was never executed.
    bed.qemu.is().run = "paused";
    bed.restart();
    assert_eq!(bed.qemu.is().run, "running");
    assert_eq!(bed.destination.look(), Some(State::Running { whole: true }));
}

/// A QEMU that another client has used since is refused without changing its settings.
#[test]
fn qemu_changed_by_others_is_refused() {
    let bed = Bed::new();
    (bed.qemu.is().run, bed.qemu.is().migration) = ("running", "completed");
    assert!(reason(bed.prepare(&bed.id)).contains("any more"));
    assert_eq!(
        bed.qemu.has_heard("stop") + bed.qemu.has_heard("migrate-set-capabilities"),
        0
    );
}

/// Pager that owns the page faults, so that claims fail, while the flag is set.
struct Pager(Arc<AtomicBool>);

impl FaultHandlers for Pager {
    fn claim(&self, _: Process) -> Result<FaultClaim, String> {
        match self.0.load(Ordering::Relaxed) {
            true => Err("a pager has it".to_owned()),
            false => Ok(Box::new(())),
        }
    }
}

/// Handler whose claims to page faults can be counted.
struct Claims(Arc<()>);

impl FaultHandlers for Claims {
    fn claim(&self, _: Process) -> Result<FaultClaim, String> {
        Ok(Box::new(Arc::clone(&self.0)))
    }
}

/// A pager may attach to a QEMU that no move waits for.
#[test]
fn refused_move_releases_page_faults() {
    let mut bed = Bed::new();
    let claims = Arc::new(());
    let handlers = Arc::new(Claims(Arc::clone(&claims)));
    bed.destination =
        Destination::new(&bed.qemu.qmp, bed.folder.path(), Arc::new(NoServers), handlers).expect("it waits");
    (bed.qemu.is().run, bed.qemu.is().migration) = ("running", "completed");
    let postcopy = Settings {
        multifd_channels: 0,
        postcopy: true,
    };
    assert!(reason(bed.prepare_with(&bed.id, postcopy)).contains("any more"));
    assert_eq!(Arc::strong_count(&claims), 2);
}

/// Post-copy is refused before anything is changed, and again just before the source switches over.
#[test]
fn postcopy_is_refused_where_pager_attached() {
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = Arc::new(Qemu::destination(folder.path()));
    let is_attached = Arc::new(AtomicBool::new(true));
    let start = || {
        let pager = Arc::new(Pager(Arc::clone(&is_attached)));
        Destination::new(&qemu.qmp, folder.path(), Arc::new(NoServers), pager).expect("it waits")
    };
    let mut bed = Bed {
        destination: start(),
        id: MoveId::new().expect("random numbers"),
        folder: tempfile::tempdir().expect("a folder"),
        qemu: Arc::clone(&qemu),
    };
    let postcopy = Settings {
        multifd_channels: 0,
        postcopy: true,
    };
    assert!(reason(bed.prepare_with(&bed.id, postcopy)).contains("a pager has it"));
    assert_eq!(
        qemu.has_heard("migrate-set-capabilities") + qemu.has_heard("migrate-incoming"),
        0
    );
    is_attached.store(false, Ordering::Relaxed);
    assert!(matches!(bed.prepare_with(&bed.id, postcopy), ToSource::Prepared { .. }));
    assert_eq!(bed.tell(&bed.id, Tell::CheckPostcopy), ToSource::Noted);
    // The claim has ended with its receiver, and QEMU has begun to load the VM.
    is_attached.store(true, Ordering::Relaxed);
    qemu.is().migration = "active";
    bed.destination = start();
    assert!(reason(bed.tell(&bed.id, Tell::CheckPostcopy)).contains("a pager has it"));
    let other = MoveId::new().expect("random numbers");
    assert!(reason(bed.tell(&other, Tell::CheckPostcopy)).contains("right host"));
}
