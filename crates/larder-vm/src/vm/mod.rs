//! A VM's process: its disks, each with a thread of its own, and its control socket, put together from the file that
//! describes the VM.
//!
//! Invariants:
//! - Either all is served that the file says, or nothing, and nothing is left behind.
//! - What one disk does holds up no other one: they share the control socket's thread and nothing else.

pub mod config;

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use config::VmConfig;
use larder_block::event_loop::SocketAddress;

use crate::control::{ControlError, ControlServer, ControlSocket};
use crate::disk::{Disk, DiskError, StopSignal};
use crate::exports::Places;
use crate::listen::{Inherited, SocketFile, same_place};
use crate::runtime_folder::{self, runtime_folder};

/// Why a VM cannot be served, or is not any more.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum VmError {
    #[error("disk {disk}: {source}")]
    Disk { disk: String, source: DiskError },
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("{one} and {other} are the same path; give each its own")]
    SamePlace { one: String, other: String },
    #[error(
        "a socket was handed over that listens on {}, and this VM has none there; its sockets are {}",
        path.display(), known.join(", ")
    )]
    NotOurs { path: PathBuf, known: Vec<String> },
}

/// A VM that is served.
pub struct Vm {
    disks: Vec<VmDiskAtWork>,
    _control: ControlServer,
}

struct VmDiskAtWork {
    name: String,
    disk: Disk,
}

impl Vm {
    /// Serves all that the description says. When this returns, clients can connect.
    ///
    /// # Errors
    /// See [`VmError`]; nothing is served then.
    pub fn start(config: &VmConfig, inherited: &Inherited) -> Result<Self, VmError> {
        check_places(config, inherited)?;
        // Where sockets are of which nothing is said. If it cannot be made, those cannot be either, and say so.
        let _ = runtime_folder::make(&runtime_folder(), 0o755);
        // First, so that a second process for the same VM is told so. Who asks waits until there is something to tell.
        let control = control_socket(config, inherited)?;
        let mut disks: Vec<VmDiskAtWork> = Vec::with_capacity(config.disks.len());
        for wish in &config.disks {
            let name = wish.name.clone();
            match Disk::start(wish.config(inherited)) {
                Ok(disk) => disks.push(VmDiskAtWork { name, disk }),
                Err(source) => {
                    stop_all(disks);
                    return Err(VmError::Disk { disk: name, source });
                }
            }
        }
        let inquiries = disks.iter().map(|it| it.disk.inquiry()).collect();
        match ControlServer::start_on(control, inquiries) {
            Ok(control) => Ok(Self {
                disks,
                _control: control,
            }),
            Err(error) => {
                stop_all(disks);
                Err(error.into())
            }
        }
    }

    /// The disks: what each is called, and where it is served.
    pub fn places(&self) -> impl Iterator<Item = (&str, &Places)> {
        self.disks.iter().map(|it| (it.name.as_str(), it.disk.places()))
    }

    /// What stops each of them.
    pub fn stop_signals(&self) -> Vec<StopSignal> {
        self.disks.iter().map(|it| it.disk.stop_signal()).collect()
    }

    /// Waits until all disks have ended. Where one ends by itself, the others are stopped: a VM without one of its disks is
    /// of no use.
    ///
    /// # Errors
    /// Why the first one that did not end as it should did so.
    pub fn wait(self) -> Result<(), VmError> {
        let stops = self.stop_signals();
        let (tell, ended) = std::sync::mpsc::channel();
        let threads: Vec<_> = self.disks.into_iter().map(|it| wait_for(it, tell.clone())).collect();
        drop(tell);
        let mut result = Ok(());
        for how in ended {
            stops.iter().for_each(StopSignal::raise);
            if let Err(error) = how {
                match &result {
                    Ok(()) => result = Err(error),
                    Err(_) => tracing::error!("{error}"),
                }
            }
        }
        for thread in threads {
            // It has told how its disk has ended.
            let _ = thread.join();
        }
        result
    }
}

fn wait_for(it: VmDiskAtWork, tell: Sender<Result<(), VmError>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let name = it.name;
        let ended = it.disk.wait().map_err(|source| VmError::Disk { disk: name, source });
        // Whoever waits does so until all have told.
        let _ = tell.send(ended);
    })
}

fn stop_all(disks: Vec<VmDiskAtWork>) {
    disks.iter().for_each(|it| it.disk.stop_signal().raise());
    for it in disks {
        if let Err(error) = it.disk.wait() {
            tracing::error!("disk {}: {error}", it.name);
        }
    }
}

fn control_socket(config: &VmConfig, inherited: &Inherited) -> Result<ControlSocket, ControlError> {
    match inherited.at(&config.control)? {
        Some(socket) => Ok(ControlSocket::Inherited(socket)),
        None => Ok(ControlSocket::Own(SocketFile::bind_for(
            &config.control,
            config.control_access,
        )?)),
    }
}

/// Whether what is made in the file system has a path of its own each, and what is handed over is one of those.
///
/// # Errors
/// It is not.
pub fn check_places(config: &VmConfig, inherited: &Inherited) -> Result<(), VmError> {
    let of_disks = config.disks.iter().flat_map(|disk| {
        let socket = disk
            .socket
            .as_deref()
            .map(|path| (format!("the socket of disk {}", disk.name), path));
        let nbd = disk.nbd.as_ref().and_then(|at| match &at.uri.address {
            SocketAddress::Unix(path) => Some((format!("the NBD socket of disk {}", disk.name), path.as_path())),
            SocketAddress::Tcp { .. } => None,
        });
        socket.into_iter().chain(nbd)
    });
    let control = ("the control socket".to_owned(), config.control.as_path());
    let places: Vec<(String, &Path)> = std::iter::once(control).chain(of_disks).collect();
    if let Some((one, other)) = same_place(&places) {
        let (one, other) = (one.clone(), other.clone());
        return Err(VmError::SamePlace { one, other });
    }
    let is_ours = |path: &Path| {
        places
            .iter()
            .any(|(_, ours)| same_place(&[((), *ours), ((), path)]).is_some())
    };
    match inherited.paths().find(|path| !is_ours(path)) {
        Some(path) => Err(VmError::NotOurs {
            path: path.to_owned(),
            known: places.iter().map(|(_, path)| path.display().to_string()).collect(),
        }),
        None => Ok(()),
    }
}
