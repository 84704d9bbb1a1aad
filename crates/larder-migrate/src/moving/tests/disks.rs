//! Disks that move along with their VM: which host has them open, whatever fails.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::fake::Qemu;
use super::moves::TestBed;
use crate::moving::disks::{DiskServers, HandoverAction, ServedDisk};
use crate::moving::source::{self, MoveError};

/// Server of one disk, on one of the two hosts.
struct TestServer {
    /// Hosts that have the disk open, shared by both servers.
    open: Arc<Mutex<Vec<&'static str>>>,
    host: &'static str,
    awaits_incoming: bool,
    state: Mutex<State>,
    /// QEMU of this host, to check that its guest does not run.
    qemu: Mutex<Option<Arc<Qemu>>>,
}

#[derive(Default)]
struct State {
    done: Vec<String>,
    refused: Vec<HandoverAction>,
}

impl TestServer {
    fn pair() -> (Arc<Self>, Arc<Self>) {
        let open = Arc::new(Mutex::new(vec!["source"]));
        let new = |host, awaits_incoming| {
            Arc::new(Self {
                open: Arc::clone(&open),
                host,
                awaits_incoming,
                state: Mutex::default(),
                qemu: Mutex::default(),
            })
        };
        (new("source", false), new("destination", true))
    }

    fn refuse(&self, actions: &[HandoverAction]) {
        self.state.lock().expect("no panic").refused = actions.to_vec();
    }

    fn done(&self) -> Vec<String> {
        self.state.lock().expect("no panic").done.clone()
    }
}

impl DiskServers for TestServer {
    fn list(&self, sockets: &[PathBuf]) -> Result<Vec<(PathBuf, ServedDisk)>, String> {
        assert_eq!(sockets, [Path::new("/sockets/vda")]);
        let disk = ServedDisk {
            image: "/srv/web.qcow2".to_owned(),
            size: 1 << 30,
            block_size: 512,
            serial: String::new(),
            format: "qcow2".to_owned(),
            read_only: false,
            shared: false,
            away: self.awaits_incoming,
            inode: None,
        };
        Ok(vec![("/sockets/vda".into(), disk)])
    }

    fn flush_caches(&self, _: &[PathBuf]) -> Result<bool, String> {
        let mut state = self.state.lock().expect("no panic");
        state.done.push("flush".to_owned());
        Ok(state.done.len() > 1)
    }

    fn hot_ranges(&self, sockets: &[PathBuf]) -> Vec<(PathBuf, String)> {
        vec![(sockets[0].clone(), "17+3,4+1".to_owned())]
    }

    fn warm_cache(&self, socket: &Path, ranges: &str) {
        assert_eq!((socket, ranges), (Path::new("/sockets/vda"), "17+3,4+1"));
        self.state.lock().expect("no panic").done.push("warm".to_owned());
    }

    fn apply(&self, sockets: &[PathBuf], action: HandoverAction) -> Result<(), String> {
        assert_eq!(sockets, [Path::new("/sockets/vda")]);
        let mut state = self.state.lock().expect("no panic");
        state.done.push(format!("{action:?}").to_lowercase());
        if state.refused.contains(&action) {
            return Err("it cannot".to_owned());
        }
        let mut open = self.open.lock().expect("no panic");
        match action {
            HandoverAction::Inactivate | HandoverAction::AwaitIncoming | HandoverAction::RollBack => {
                if let Some(qemu) = &*self.qemu.lock().expect("no panic") {
                    assert_ne!(qemu.state().run, "running", "its guest has the disk");
                }
                open.retain(|host| *host != self.host);
            }
            HandoverAction::Activate | HandoverAction::Commit => {
                assert!(open.iter().all(|host| *host == self.host), "open on both hosts");
                if open.is_empty() {
                    open.push(self.host);
                }
            }
            HandoverAction::RestoreCaches => {}
        }
        Ok(())
    }
}

fn bed() -> (TestBed, Arc<TestServer>, Arc<TestServer>) {
    let (here, there) = TestServer::pair();
    let bed = TestBed::with(Arc::clone(&here) as _, Arc::clone(&there) as _);
    *here.qemu.lock().expect("no panic") = Some(Arc::clone(&bed.source));
    (bed, here, there)
}

fn open(server: &TestServer) -> Vec<&'static str> {
    server.open.lock().expect("no panic").clone()
}

/// Disks are closed at the source, then opened and kept at the destination, before the VM runs there.
#[test]
fn disks_switch_hosts_before_vm_runs() {
    let (bed, here, there) = bed();
    let server = Arc::clone(&there);
    // Permanently: writes of the guest must be found even after any restart.
    let before_it_runs = move || assert_eq!(server.done(), ["warm", "activate", "commit"]);
    bed.destination.hook("cont", before_it_runs);
    bed.run().expect("moves");
    assert_eq!(open(&here), ["destination"]);
    assert_eq!(here.done(), ["flush", "flush", "inactivate"]);
    assert_eq!(there.done(), ["warm", "activate", "commit"]);
}

/// Disks that the destination cannot open are open at the source again before the VM resumes there.
#[test]
fn disks_return_when_destination_cannot_open() {
    let (bed, here, there) = bed();
    there.refuse(&[HandoverAction::Activate]);
    let server = Arc::clone(&here);
    bed.source.hook("cont", move || assert_eq!(open(&server), ["source"]));
    let result = bed.run();
    let text = format!("{result:?}");
    assert!(matches!(result, Err(MoveError::NotMoved { .. })), "{text}");
    assert!(text.contains("its disks cannot be opened at the destination: it cannot"), "{text}");
    assert_eq!((bed.source.state().run, open(&here)), ("running", vec!["source"]));
    assert_eq!(here.done(), ["flush", "flush", "inactivate", "commit", "restorecaches", "warm"]);
    assert_eq!(bed.destination.command_count("cont"), 0);
}

/// A VM whose disks cannot be closed at the source continues there, with its disks open.
#[test]
fn vm_continues_when_disks_cannot_close() {
    let (bed, here, there) = bed();
    here.refuse(&[HandoverAction::Inactivate]);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::NotMoved { .. })), "{result:?}");
    assert_eq!((bed.source.state().run, open(&here)), ("running", vec!["source"]));
    assert!(!there.done().contains(&"activate".to_owned()));
}

/// A VM whose disks cannot be opened on either host stays stopped until take-back can open them.
#[test]
fn vm_without_disks_stays_stopped() {
    let (bed, here, there) = bed();
    there.refuse(&[HandoverAction::Activate]);
    here.refuse(&[HandoverAction::Commit]);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::Unresolved(_))), "{result:?}");
    assert_eq!(bed.source.state().run, "postmigrate");
    let take_back = || source::take_back(&bed.options.qmp, &bed.options.records, &*here);
    take_back().expect_err("its disks cannot be opened");
    assert_eq!(bed.source.state().run, "postmigrate");
    here.refuse(&[]);
    take_back().expect("it is here");
    assert_eq!((bed.source.state().run, open(&here)), ("running", vec!["source"]));
}

/// The destination closes the disks that it has opened if its QEMU refuses to run the VM.
#[test]
fn destination_closes_disks_of_refused_vm() {
    let (bed, here, there) = bed();
    bed.destination.state().refuses.insert("cont");
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::NotMoved { .. })), "{result:?}");
    assert_eq!(there.done(), ["warm", "activate", "commit", "awaitincoming", "rollback"]);
    assert_eq!((bed.source.state().run, open(&here)), ("running", vec!["source"]));
}

/// The VM runs on neither host until the destination can keep the disks.
#[test]
fn vm_waits_until_destination_commits_disks() {
    let (bed, here, there) = bed();
    there.refuse(&[HandoverAction::Commit]);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::OutcomeUnknown { .. })), "{result:?}");
    assert_eq!(bed.destination.command_count("cont"), 0);
    assert_eq!(bed.source.state().run, "postmigrate");
    there.refuse(&[]);
    bed.run().expect("moves");
    assert_eq!(bed.destination.command_count("cont"), 1);
    assert_eq!(open(&here), ["destination"]);
}

/// The source does not reopen disks while the destination may have them open.
#[test]
fn source_does_not_reopen_possibly_open_disks() {
    let (bed, here, there) = bed();
    there.refuse(&[HandoverAction::Activate, HandoverAction::RollBack]);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::OutcomeUnknown { .. })), "{result:?}");
    let text = format!("{result:?}");
    assert!(text.contains("may still be open at the destination: it cannot"), "{text}");
    assert_eq!(bed.source.state().run, "postmigrate");
    assert!(!here.done().contains(&"commit".to_owned()));
    // The move continues once they are closed there.
    there.refuse(&[HandoverAction::Activate]);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::NotMoved { .. })), "{result:?}");
    assert_eq!((bed.source.state().run, open(&here)), ("running", vec!["source"]));
}

/// A later mover reopens disks that a killed mover had closed, before it resumes the VM.
#[test]
fn later_mover_reopens_closed_disks() {
    let (bed, here, there) = bed();
    // The first mover gives up with the disks open on neither host.
    there.refuse(&[HandoverAction::Activate]);
    here.refuse(&[HandoverAction::Commit]);
    bed.run().expect_err("the VM stays paused");
    assert!(bed.record().expect("is there").disks_left);
    here.refuse(&[]);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::NotMoved { .. })), "{result:?}");
    assert_eq!((bed.source.state().run, open(&here)), ("running", vec!["source"]));
}

#[test]
fn disks_without_waiting_server_are_untouched() {
    let (here, _) = TestServer::pair();
    let (_, there) = TestServer::pair();
    let there = Arc::new(TestServer {
        awaits_incoming: false,
        open: Arc::clone(&there.open),
        host: "destination",
        state: Mutex::default(),
        qemu: Mutex::default(),
    });
    let bed = TestBed::with(Arc::clone(&here) as _, Arc::clone(&there) as _);
    let result = bed.run();
    assert!(matches!(result, Err(MoveError::Preflight(_))), "{result:?}");
    assert!(here.done().is_empty() && there.done().is_empty());
    assert_eq!(bed.source.state().run, "running");
}
