//! A VM's server process: its disks, each with a thread of its own, and its control socket, assembled from the file
//! that describes the VM.
//!
//! Invariants:
//! - A start either serves everything in the file, or serves nothing and leaves nothing behind. A reload applies each
//!   change that is possible while a disk is in use, and reports all others.
//! - No disk delays another one: they share only the control socket's thread.

pub mod away;
pub mod config;
mod files;
pub mod find;
pub(crate) mod front_end;
pub mod look;
mod moving;
mod needs;
mod private_memory;
mod reload;

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvError, Sender};

use away::AwayNote;
use config::VmConfig;
use find::Noted;
use larder_block::event_loop::SocketAddress;
use larder_export::vhost_user::Stop;
pub use moving::{Moved, VmMove};

use crate::confine::{ConfineError, confine};
use crate::control::{ControlError, ControlServer, ControlSocket, MoveReply, ReloadReply, Subject};
use crate::disk::{Disk, DiskError, DiskInquiry, Moves, PreparedDisk};
use crate::exports::Places;
use crate::inherited::Inherited;
use crate::latch::Latch;
use crate::listen::same_place;
use crate::runtime_folder::runtime_folder;
use crate::{data_limit, opener, private_folder};

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
    SamePlace { one: String, other: String },
    #[error("{0}")]
    SameFile(String),
    #[error(
        "{}: there is no disk; add one: a line [[disk]], and below it image = \"/path/of/the/image\" and its format. `larder memory attach --vm` manages memory without disks",
        file.display()
    )]
    NoDisk { file: PathBuf },
    #[error(
        "{}: this service has a private {} (PrivateTmp=), in which no other process finds a socket; give it a path in {}, as by default",
        path.display(), folder.display(), runtime_folder().display()
    )]
    PrivateFolder { path: PathBuf, folder: &'static Path },
    #[error("cannot determine whether its disks belong to this host: {0}")]
    Note(io::Error),
    #[error("cannot create the private directory of this VM's server: {0}")]
    OwnFolder(io::Error),
    #[error(
        "an inherited socket listens on {}, and this VM has no socket there; its sockets are {}",
        path.display(), known.join(", ")
    )]
    NotOurs { path: PathBuf, known: Vec<String> },
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
    is_away: bool,
    /// Marker that records this for the next process.
    note: AwayNote,
    disks: Vec<DiskAtWork>,
    subject: Arc<Subject>,
    /// Dropped after the disks.
    _control: ControlServer,
    _name: Name,
    orders: Receiver<Order>,
    orderer: VmOrders,
}

/// A running disk, whose end another thread waits for.
struct DiskAtWork {
    name: String,
    inquiry: DiskInquiry,
    places: Places,
    stop: Latch<Stop>,
    /// The disk has been removed from the configuration, and is ending.
    leaves: bool,
}

/// A command for the VM's main thread.
enum Order {
    Stop,
    /// Reload the file.
    Reload(Option<ReloadReply>),
    /// Perform a step of a move to or from another host.
    Move(VmMove, MoveReply),
    /// A disk has ended.
    Ended(String, Result<(), DiskError>),
}

/// Handle for commands to a VM, usable from any thread.
#[derive(Clone)]
pub struct VmOrders(Sender<Order>);

impl VmOrders {
    /// Stops the VM's server.
    pub fn stop(&self) {
        // Sending fails only if the VM has ended.
        let _ = self.0.send(Order::Stop);
    }

    /// Reloads the file, and applies all changes that are possible now.
    pub fn reload(&self) {
        let _ = self.0.send(Order::Reload(None));
    }
}

/// Progress of a VM's server, reported to the process that started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// This number of disks is served.
    Ready(usize),
    /// The file is being reloaded; [`Progress::Ready`] follows.
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
    /// opened and no guest served until the VM arrives ([`VmMove::Take`]).
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
        check_places(&config, &inherited)?;
        private_folder::have(&away::mark_of(file)).map_err(VmError::OwnFolder)?;
        // The control socket comes first, so that a second process for the same VM fails here. Clients wait until the
        // server answers.
        let control = control_socket(&config, &inherited)?;
        let note = AwayNote::of(file);
        if incoming {
            note.make("the VM is incoming from another host")
                .map_err(VmError::Note)?;
        }
        let is_away = incoming || note.is_there().map_err(VmError::Note)?;
        // The first disk's cache would overwrite the second disk's image before that one is locked.
        if let Some(clash) = files::cache_clash(&config, || cancel.get().is_some()) {
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
        for wish in &config.disks {
            let mut disk = wish.config(&inherited);
            disk.exports.lent = Some(lent_of(&wish.name));
            disk.exports.gate = Some(gate.clone());
            disk.exports.domain.clone_from(&config.uuid);
            disk.cancel = cancel.clone();
            if is_away {
                disk.moves = Moves::Away;
            }
            let disk = Disk::prepare(disk).map_err(|source| VmError::Disk {
                disk: wish.name.clone(),
                source,
            })?;
            prepared.push((&wish.name, disk));
        }
        if is_confined {
            if let Err(error) = data_limit::enforce(private_memory::of(&config)) {
                tracing::warn!("this server's private memory cannot be limited: {error}");
            }
            // From here on nothing that guests or authors of images have written can exploit rights that this process
            // had.
            confine(&needs::of(&config))?;
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
        let orderer = VmOrders(sender);
        let to_reload = orderer.clone();
        let reload = Box::new(move |reply| to_reload.0.send(Order::Reload(Some(reply))).is_ok());
        // The directory must exist when the VM moves away. A failure is reported then.
        let _ = note.prepare();
        let to_move = orderer.clone();
        let moves = Box::new(move |step, reply| to_move.0.send(Order::Move(step, reply)).is_ok());
        let inquiries = started.iter().map(|(_, disk)| disk.inquiry()).collect();
        let subject = Arc::new(Subject::vm(&config, file, inquiries, (reload, moves), is_confined));
        let control = match ControlServer::start_on(control, Arc::clone(&subject)) {
            Ok(control) => control,
            Err(error) => {
                stop_all(started);
                return Err(error.into());
            }
        };
        inherited.forget_rest();
        let name = Name::note(&config);
        gate.set(());
        let disks = started
            .into_iter()
            .map(|(disk_name, disk)| at_work(disk_name, disk, &orderer));
        Ok(Self {
            _name: name,
            file: file.to_owned(),
            disks: disks.collect(),
            config,
            inherited,
            is_confined,
            is_away,
            note,
            subject,
            _control: control,
            orders,
            orderer,
        })
    }

    /// Returns names and addresses of the disks.
    pub fn places(&self) -> impl Iterator<Item = (&str, &Places)> {
        self.disks.iter().map(|it| (it.name.as_str(), &it.places))
    }

    /// Returns whether the VM is on another host, and its images are not open.
    pub fn is_away(&self) -> bool {
        self.is_away
    }

    /// Returns a handle for commands to this VM.
    pub fn orders(&self) -> VmOrders {
        self.orderer.clone()
    }

    /// Executes commands until all disks have ended. If one ends by itself, the others are stopped: a VM without one
    /// of its disks is useless.
    ///
    /// # Errors
    /// The reason why the first disk failed.
    pub fn run(mut self, tell: impl Fn(Progress)) -> Result<(), VmError> {
        tell(Progress::Ready(self.disks.len()));
        let mut result = Ok(());
        let mut is_stopping = false;
        // Commands that arrived while something else was awaited.
        let mut before = VecDeque::new();
        while !self.disks.is_empty() {
            let next = before.pop_front().map_or_else(|| self.orders.recv(), Ok);
            let stops = match next {
                Ok(Order::Reload(reply)) if !is_stopping => {
                    tell(Progress::Reloading);
                    self.reload_and_tell(reply, &mut before);
                    tell(Progress::Ready(self.disks.len()));
                    false
                }
                Ok(Order::Move(step, reply)) if !is_stopping => {
                    let moved = self.move_on(step).map(|()| Moved { done: true });
                    if let Err(why) = &moved {
                        tracing::warn!("a step of the move of the VM's disks failed: {why}");
                    }
                    // The client may have stopped waiting.
                    let _ = reply.send(moved);
                    false
                }
                // Dropping the reply informs the client that there is no answer.
                Ok(Order::Reload(..) | Order::Move(..)) => false,
                Ok(Order::Ended(name, how)) => self.has_ended(&name, how, &mut result),
                // `self` has a sender, so receiving cannot fail while it exists.
                Ok(Order::Stop) | Err(RecvError) => true,
            };
            if stops && !is_stopping {
                is_stopping = true;
                tell(Progress::Stopping);
                self.disks.iter().for_each(|disk| disk.stop.set(Stop::Leave));
            }
        }
        result
    }

    /// Handles the end of a disk; returns whether the other disks must stop too.
    fn has_ended(&mut self, name: &str, how: Result<(), DiskError>, result: &mut Result<(), VmError>) -> bool {
        let was_to = match self.disks.iter().position(|disk| disk.name == name) {
            Some(place) => self.disks.remove(place).leaves,
            None => false,
        };
        match how {
            Ok(()) if was_to => tracing::info!(disk = name, "is not served any more"),
            Ok(()) => {}
            Err(source) => {
                let disk = name.to_owned();
                let error = VmError::Disk { disk, source };
                match result {
                    Ok(()) if !was_to => *result = Err(error),
                    _ => tracing::error!("{error}"),
                }
            }
        }
        !was_to
    }
}

/// Returns a started disk, whose end is reported as a command.
fn at_work(name: &str, disk: Disk, orders: &VmOrders) -> DiskAtWork {
    let at_work = DiskAtWork {
        name: name.to_owned(),
        inquiry: disk.inquiry(),
        places: disk.places().clone(),
        stop: disk.stop_signal(),
        leaves: false,
    };
    let (orders, name) = (orders.clone(), name.to_owned());
    std::thread::spawn(move || {
        let ended = disk.wait();
        // The VM does not end before all disks have reported their end.
        let _ = orders.0.send(Order::Ended(name, ended));
    });
    at_work
}

/// Returns the path of the file that records until the next reboot the queues of a disk that were not taken back.
fn lent_of(disk: &str) -> PathBuf {
    let own = private_folder::runtime().map_or_else(runtime_folder, Path::to_owned);
    own.join("queues").join(disk)
}

/// Registration of the VM's name; dropping it removes the registration.
enum Name {
    Own { _noted: Option<Noted> },
    Openers,
}

impl Name {
    /// Registers the control socket, so that clients find it by the VM's name.
    fn note(config: &VmConfig) -> Self {
        let Some(helper) = opener::helper() else {
            let noted = Noted::new(&config.name, &config.control);
            return Self::Own { _noted: noted };
        };
        if let Err(error) = helper.note_name() {
            tracing::warn!("this VM cannot be found by its name: {error}");
        }
        Self::Openers
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if let (Self::Openers, Some(helper)) = (self, opener::helper()) {
            // The opener removes the registration at its own end in any case.
            let _ = helper.forget_name();
        }
    }
}

fn stop_all(disks: Vec<(&str, Disk)>) {
    disks.iter().for_each(|(_, disk)| disk.stop_signal().set(Stop::Leave));
    for (name, disk) in disks {
        if let Err(error) = disk.wait() {
            tracing::error!("disk {name}: {error}");
        }
    }
}

fn control_socket(config: &VmConfig, inherited: &Inherited) -> Result<ControlSocket, ControlError> {
    match inherited.at(&config.control)? {
        Some(socket) => Ok(ControlSocket::inherited(socket, &config.control, config.control_access)),
        None => Ok(ControlSocket::bind(&config.control, config.control_access)?),
    }
}

/// Returns the sockets of a VM that are files, each with its purpose.
fn places(config: &VmConfig) -> Vec<(String, &Path)> {
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
    places(config).into_iter().map(|(_, path)| path)
}

fn folder_of(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.parent().unwrap_or(Path::new("/")).to_owned()
}

/// Returns the directory for temporary files that contains `path`, if systemd has given this process a private one.
fn private_folder(path: &Path) -> Option<&'static Path> {
    let path = std::path::absolute(path).ok()?;
    let folders = ["/tmp", "/var/tmp"].map(Path::new);
    let folder = folders.into_iter().find(|folder| path.starts_with(folder))?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let is_private = mounts.lines().any(|line| {
        // These fields are the root of the mount within its file system, and the mount point (proc(5)).
        let mut words = line.split(' ').skip(3);
        let (root, place) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        Path::new(place) == folder && root.contains("/systemd-private-")
    });
    is_private.then_some(folder)
}

/// Checks that all sockets have different paths, and that each inherited socket has one of these paths.
///
/// # Errors
/// See [`VmError`].
pub fn check_places(config: &VmConfig, inherited: &Inherited) -> Result<(), VmError> {
    let places = places(config);
    if let Some((one, other)) = same_place(&places) {
        let (one, other) = (one.clone(), other.clone());
        return Err(VmError::SamePlace { one, other });
    }
    for (_, path) in places.iter().filter(|(_, path)| !inherited.has(path)) {
        if let Some(folder) = private_folder(path) {
            let path = path.to_path_buf();
            return Err(VmError::PrivateFolder { path, folder });
        }
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
