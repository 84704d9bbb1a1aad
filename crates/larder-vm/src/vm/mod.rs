//! A VM's server process: its disks, each with a thread of its own, and its control socket, assembled from the file
//! that describes the VM.
//!
//! Invariants:
//! - A start either serves everything in the file, or serves nothing and leaves nothing behind. A reload applies each
//!   change that is possible while a disk is in use, and reports all others.
//! - No disk delays another one: they share only the control socket's thread.

pub mod config;
mod confine_needs;
mod file_conflicts;
pub mod find;
pub mod inactive_marker;
mod moving;
pub(crate) mod peer_domain;
mod private_memory;
pub mod problems;
mod reload;

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvError, Sender};

use config::VmConfig;
use find::Registration;
use inactive_marker::InactiveMarker;
use larder_block::event_loop::SocketAddress;
use larder_export::vhost_user::StopMode;
pub use moving::{MoveStep, MoveStepResult};

use crate::confine::{ConfineError, confine};
use crate::control::{ControlError, ControlServer, ControlSocket, MoveReply, ReloadReply, Subject};
use crate::disk::{Disk, DiskError, DiskHandle, Mobility, PreparedDisk};
use crate::exports::ExportAddresses;
use crate::inherited::Inherited;
use crate::latch::Latch;
use crate::listen::find_same_path;
use crate::runtime_directory::runtime_directory;
use crate::{data_limit, opener, private_directory};

/// Reason why a VM cannot be served, or is served no longer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum VmError {
    #[error("disk {disk}: {source}")]
    Disk { disk: String, source: DiskError },
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("the server cannot be confined: {0}")]
    Confine(#[from] ConfineError),
    #[error("{one} and {other} are the same path; give each its own")]
    SamePath { one: String, other: String },
    #[error("{0}")]
    SameFile(String),
    #[error(
        "{}: there is no disk; add one: a line [[disk]], and below it image = \"/path/of/the/image\" and its format. `larder memory attach --vm` manages memory without disks",
        file.display()
    )]
    NoDisk { file: PathBuf },
    #[error(
        "{}: this service has a private {} (PrivateTmp=), in which no other process finds a socket; give it a path in {}, as by default",
        path.display(), directory.display(), runtime_directory().display()
    )]
    PrivateTmp { path: PathBuf, directory: &'static Path },
    #[error("cannot determine whether its disks belong to this host: {0}")]
    Marker(io::Error),
    #[error("cannot create the private directory of this VM's server: {0}")]
    PrivateDirectory(io::Error),
    #[error(
        "an inherited socket listens on {}, and this VM has no socket there; its sockets are {}",
        path.display(), known.join(", ")
    )]
    UnknownSocket { path: PathBuf, known: Vec<String> },
}

impl VmError {
    /// Returns the error for a file without disks.
    pub fn no_disk(file: &Path) -> Self {
        Self::NoDisk { file: file.to_owned() }
    }
}

/// A VM that is being served.
pub struct Vm {
    /// Path of the VM's file, and the configuration in effect.
    file: PathBuf,
    config: VmConfig,
    inherited: Inherited,
    /// The process is confined, and has the opener open files for it.
    is_confined: bool,
    /// The VM is on another host: no image is open.
    is_inactive: bool,
    /// Marker that records this for the next process.
    marker: InactiveMarker,
    disks: Vec<ServedDisk>,
    subject: Arc<Subject>,
    /// Dropped after the disks.
    _control: ControlServer,
    _name: NameRegistration,
    commands: Receiver<VmCommand>,
    command_sender: VmHandle,
}

/// A running disk, whose end another thread waits for.
struct ServedDisk {
    name: String,
    inquiry: DiskHandle,
    addresses: ExportAddresses,
    stop: Latch<StopMode>,
    /// The disk has been removed from the configuration, and is ending.
    is_removed: bool,
}

/// A command for the VM's main thread.
enum VmCommand {
    Stop,
    /// Reload the file.
    Reload(Option<ReloadReply>),
    /// Perform a step of a move to or from another host.
    Move(MoveStep, MoveReply),
    /// A disk has ended.
    Ended(String, Result<(), DiskError>),
}

/// Handle for commands to a VM, usable from any thread.
#[derive(Clone)]
pub struct VmHandle(Sender<VmCommand>);

impl VmHandle {
    /// Stops the VM's server.
    pub fn stop(&self) {
        // Sending fails only if the VM has ended.
        let _ = self.0.send(VmCommand::Stop);
    }

    /// Reloads the file, and applies all changes that are possible now.
    pub fn reload(&self) {
        let _ = self.0.send(VmCommand::Reload(None));
    }
}

/// Progress of a VM's server, reported to the process that started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmProgress {
    /// This number of disks is served.
    Ready(usize),
    /// The file is being reloaded; [`VmProgress::Ready`] follows.
    Reloading,
    /// The server is stopping.
    Stopping,
}

impl Vm {
    /// Serves everything in `file`, which has been parsed to `config`. When this returns, clients can connect. If the
    /// process is to be confined, it must have an opener already ([`crate::opener`]). It then permanently gives up
    /// all rights that it needs no more ([`crate::confine`]), before it reads any image.
    ///
    /// If the VM is marked as being on another host, or if it is `incoming`, which sets the marker, no image is
    /// opened and no guest served until the VM arrives ([`MoveStep::Take`]).
    ///
    /// Setting `cancel` aborts the start while images are being opened.
    ///
    /// # Errors
    /// See [`VmError`]; nothing is served then.
    pub fn start(
        file: &Path,
        config: VmConfig,
        inherited: Inherited,
        is_confined: bool,
        incoming: bool,
        cancel: &Latch<()>,
    ) -> Result<Self, VmError> {
        if config.disks.is_empty() {
            return Err(VmError::no_disk(file));
        }
        // A confined process cannot find out its working directory.
        let file = &std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        check_socket_paths(&config, &inherited)?;
        private_directory::create(&inactive_marker::vm_state_name(file)).map_err(VmError::PrivateDirectory)?;
        // The control socket comes first, so that a second process for the same VM fails here. Clients wait until the
        // server answers.
        let control = control_socket(&config, &inherited)?;
        let note = InactiveMarker::for_vm(file);
        if incoming {
            note.create("the VM is incoming from another host").map_err(VmError::Marker)?;
        }
        let is_away = incoming || note.exists().map_err(VmError::Marker)?;
        // The first disk's cache would overwrite the second disk's image before that one is locked.
        if let Some(clash) = file_conflicts::cache_conflict(&config, || cancel.get().is_some()) {
            return Err(VmError::SameFile(clash));
        }
        if cancel.get().is_some() {
            let disk = config.disks[0].name.clone();
            let source = DiskError::Cancelled;
            return Err(VmError::Disk { disk, source });
        }
        // No client is served before all disks are open.
        let gate = Latch::default();
        let mut prepared: Vec<(&str, PreparedDisk)> = Vec::with_capacity(config.disks.len());
        for vm_disk in &config.disks {
            let mut disk = vm_disk.config(&inherited);
            disk.exports.active_queues_file = Some(active_queues_path(&vm_disk.name));
            disk.exports.gate = Some(gate.clone());
            disk.exports.domain.clone_from(&config.uuid);
            disk.cancel = cancel.clone();
            if is_away {
                disk.mobility = Mobility::Remote;
            }
            let disk = Disk::prepare(disk).map_err(|source| VmError::Disk { disk: vm_disk.name.clone(), source })?;
            prepared.push((&vm_disk.name, disk));
        }
        if is_confined {
            if let Err(error) = data_limit::enforce(private_memory::limit_bytes(&config)) {
                tracing::warn!("this server's private memory cannot be limited: {error}");
            }
            // From here on nothing that guests or authors of images have written can exploit rights that this process
            // had.
            confine(&confine_needs::for_config(&config))?;
        }
        let mut started: Vec<(&str, Disk)> = Vec::with_capacity(config.disks.len());
        for (name, disk) in prepared {
            match disk.open() {
                Ok(disk) => started.push((name, disk)),
                Err(source) => {
                    stop_all(started);
                    let disk = name.to_owned();
                    return Err(VmError::Disk { disk, source });
                }
            }
        }
        let (sender, orders) = mpsc::channel();
        let orderer = VmHandle(sender);
        let reload_sender = orderer.clone();
        let reload = Box::new(move |reply| reload_sender.0.send(VmCommand::Reload(Some(reply))).is_ok());
        // The directory must exist when the VM moves away. A failure is reported then.
        let _ = note.prepare();
        let move_sender = orderer.clone();
        let moves = Box::new(move |step, reply| move_sender.0.send(VmCommand::Move(step, reply)).is_ok());
        let inquiries = started.iter().map(|(_, disk)| disk.handle()).collect();
        let subject = Arc::new(Subject::vm(&config, file, inquiries, (reload, moves), is_confined));
        let control = match ControlServer::start_with_socket(control, Arc::clone(&subject)) {
            Ok(control) => control,
            Err(error) => {
                stop_all(started);
                return Err(error.into());
            }
        };
        inherited.close_unclaimed();
        let name = NameRegistration::register(&config);
        gate.set(());
        let disks = started.into_iter().map(|(disk_name, disk)| run_disk(disk_name, disk, &orderer));
        Ok(Self {
            _name: name,
            file: file.to_owned(),
            disks: disks.collect(),
            config,
            inherited,
            is_confined,
            is_inactive: is_away,
            marker: note,
            subject,
            _control: control,
            commands: orders,
            command_sender: orderer,
        })
    }

    /// Returns names and addresses of the disks.
    pub fn disk_addresses(&self) -> impl Iterator<Item = (&str, &ExportAddresses)> {
        self.disks.iter().map(|it| (it.name.as_str(), &it.addresses))
    }

    /// Returns whether the VM is on another host, and its images are not open.
    pub fn is_inactive(&self) -> bool {
        self.is_inactive
    }

    /// Returns a handle for commands to this VM.
    pub fn handle(&self) -> VmHandle {
        self.command_sender.clone()
    }

    /// Executes commands until all disks have ended. If one ends by itself, the others are stopped: a VM without one
    /// of its disks is useless.
    ///
    /// # Errors
    /// The reason why the first disk failed.
    pub fn run(mut self, report: impl Fn(VmProgress)) -> Result<(), VmError> {
        report(VmProgress::Ready(self.disks.len()));
        let mut result = Ok(());
        let mut is_stopping = false;
        // Commands that arrived while something else was awaited.
        let mut deferred = VecDeque::new();
        while !self.disks.is_empty() {
            let next = deferred.pop_front().map_or_else(|| self.commands.recv(), Ok);
            let must_stop = match next {
                Ok(VmCommand::Reload(reply)) if !is_stopping => {
                    report(VmProgress::Reloading);
                    self.reload_and_report(reply, &mut deferred);
                    report(VmProgress::Ready(self.disks.len()));
                    false
                }
                Ok(VmCommand::Move(step, reply)) if !is_stopping => {
                    let moved = self.apply_step(step).map(|()| MoveStepResult { done: true });
                    if let Err(why) = &moved {
                        tracing::warn!("a step of the move of the VM's disks failed: {why}");
                    }
                    // The client may have stopped waiting.
                    let _ = reply.send(moved);
                    false
                }
                // Dropping the reply informs the client that there is no answer.
                Ok(VmCommand::Reload(..) | VmCommand::Move(..)) => false,
                Ok(VmCommand::Ended(name, how)) => self.on_disk_ended(&name, how, &mut result),
                // `self` has a sender, so receiving cannot fail while it exists.
                Ok(VmCommand::Stop) | Err(RecvError) => true,
            };
            if must_stop && !is_stopping {
                is_stopping = true;
                report(VmProgress::Stopping);
                self.disks.iter().for_each(|disk| disk.stop.set(StopMode::HandOver));
            }
        }
        result
    }

    /// Handles the end of a disk; returns whether the other disks must stop too.
    fn on_disk_ended(&mut self, name: &str, outcome: Result<(), DiskError>, result: &mut Result<(), VmError>) -> bool {
        let was_removed = match self.disks.iter().position(|disk| disk.name == name) {
            Some(place) => self.disks.remove(place).is_removed,
            None => false,
        };
        match outcome {
            Ok(()) if was_removed => tracing::info!(disk = name, "is not served any more"),
            Ok(()) => {}
            Err(source) => {
                let disk = name.to_owned();
                let error = VmError::Disk { disk, source };
                match result {
                    Ok(()) if !was_removed => *result = Err(error),
                    _ => tracing::error!("{error}"),
                }
            }
        }
        !was_removed
    }
}

/// Returns a started disk, whose end is reported as a command.
fn run_disk(name: &str, disk: Disk, orders: &VmHandle) -> ServedDisk {
    let at_work = ServedDisk {
        name: name.to_owned(),
        inquiry: disk.handle(),
        addresses: disk.addresses().clone(),
        stop: disk.stop_signal(),
        is_removed: false,
    };
    let (orders, name) = (orders.clone(), name.to_owned());
    std::thread::spawn(move || {
        let ended = disk.wait();
        // The VM does not end before all disks have reported their end.
        let _ = orders.0.send(VmCommand::Ended(name, ended));
    });
    at_work
}

/// Returns the path of the file that records until the next reboot the queues of a disk that were not taken back.
fn active_queues_path(disk: &str) -> PathBuf {
    let runtime = private_directory::runtime().map_or_else(runtime_directory, Path::to_owned);
    runtime.join("queues").join(disk)
}

/// Registration of the VM's name; dropping it removes the registration.
enum NameRegistration {
    Local { _noted: Option<Registration> },
    Opener,
}

impl NameRegistration {
    /// Registers the control socket, so that clients find it by the VM's name.
    fn register(config: &VmConfig) -> Self {
        let Some(helper) = opener::opener_client() else {
            let noted = Registration::new(&config.name, &config.control);
            return Self::Local { _noted: noted };
        };
        if let Err(error) = helper.register_name() {
            tracing::warn!("this VM cannot be found by its name: {error}");
        }
        Self::Opener
    }
}

impl Drop for NameRegistration {
    fn drop(&mut self) {
        if let (Self::Opener, Some(helper)) = (self, opener::opener_client()) {
            // The opener removes the registration at its own end in any case.
            let _ = helper.unregister_name();
        }
    }
}

fn stop_all(disks: Vec<(&str, Disk)>) {
    disks.iter().for_each(|(_, disk)| disk.stop_signal().set(StopMode::HandOver));
    for (name, disk) in disks {
        if let Err(error) = disk.wait() {
            tracing::error!("disk {name}: {error}");
        }
    }
}

fn control_socket(config: &VmConfig, inherited: &Inherited) -> Result<ControlSocket, ControlError> {
    match inherited.socket_on(&config.control)? {
        Some(socket) => Ok(ControlSocket::from_inherited(socket, &config.control, config.control_access)),
        None => Ok(ControlSocket::bind(&config.control, config.control_access)?),
    }
}

/// Returns the sockets of a VM that are files, each with its purpose.
fn socket_paths(config: &VmConfig) -> Vec<(String, &Path)> {
    let mut places = vec![("the control socket".to_owned(), config.control.as_path())];
    for disk in &config.disks {
        if let Some(path) = &disk.socket {
            places.push((format!("the socket of disk {}", disk.name), path));
        }
        if let Some(SocketAddress::Unix(path)) = disk.nbd.as_ref().map(|at| &at.uri.address) {
            places.push((format!("the NBD socket of disk {}", disk.name), path));
        }
    }
    places
}

fn sockets(config: &VmConfig) -> impl Iterator<Item = &Path> {
    socket_paths(config).into_iter().map(|(_, path)| path)
}

fn parent_directory(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.parent().unwrap_or(Path::new("/")).to_owned()
}

/// Returns the directory for temporary files that contains `path`, if systemd has given this process a private one.
fn private_tmp(path: &Path) -> Option<&'static Path> {
    let path = std::path::absolute(path).ok()?;
    let directories = ["/tmp", "/var/tmp"].map(Path::new);
    let directory = directories.into_iter().find(|directory| path.starts_with(directory))?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let is_private = mounts.lines().any(|line| {
        // These fields are the root of the mount within its file system, and the mount point (proc(5)).
        let mut words = line.split(' ').skip(3);
        let (root, place) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        Path::new(place) == directory && root.contains("/systemd-private-")
    });
    is_private.then_some(directory)
}

/// Checks that all sockets have different paths, and that each inherited socket has one of these paths.
///
/// # Errors
/// See [`VmError`].
pub fn check_socket_paths(config: &VmConfig, inherited: &Inherited) -> Result<(), VmError> {
    let places = socket_paths(config);
    if let Some((one, other)) = find_same_path(&places) {
        let (one, other) = (one.clone(), other.clone());
        return Err(VmError::SamePath { one, other });
    }
    for (_, path) in places.iter().filter(|(_, path)| !inherited.has_socket_on(path)) {
        if let Some(directory) = private_tmp(path) {
            let path = path.to_path_buf();
            return Err(VmError::PrivateTmp { path, directory });
        }
    }
    let is_known = |path: &Path| places.iter().any(|(_, ours)| find_same_path(&[((), *ours), ((), path)]).is_some());
    match inherited.paths().find(|path| !is_known(path)) {
        Some(path) => Err(VmError::UnknownSocket {
            path: path.to_owned(),
            known: places.iter().map(|(_, path)| path.display().to_string()).collect(),
        }),
        None => Ok(()),
    }
}
