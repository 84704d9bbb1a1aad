//! A process that manages a VM's memory whenever there is any: it waits for QEMU, attaches, and when that ends waits for
//! the next one. Or for one process only, which may have only just been started.
//!
//! Invariants:
//! - A process that waits for a pager, since that was killed, is attached to at once, whatever the file says by now.
//! - A wish to end is granted once all memory is back, or the process has ended, and is tried again until then: a guest
//!   that has pages elsewhere and no pager stands still.
//! - A process that was let go of by request is left alone until the service is told otherwise.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use larder_block::ByteLen;
use larder_memory::service::{DetachError, End};

use super::approach::{Approach, Process, QemuFinder, Step};
use super::wish::MemoryWish;
use super::{ManagedMemory, MemoryConfig, MemoryError, MemoryInquiry, tell_end};
use crate::control::{ControlServer, Subject};
use crate::vm::config::{ConfigError, QemuAt, VmConfig, VmMemory};
use crate::vm::find::make_memory_control;

/// How often it is looked for QEMU, at first and after a while.
const LOOK: Duration = Duration::from_millis(250);
const LOOK_MAX: Duration = Duration::from_secs(2);

/// The time after which it is tried again to let go of memory for which the host had no room.
const DETACH_AGAIN: Duration = Duration::from_secs(2);
/// The longest pause: it doubles with each try, since pages that were paged in have to be evicted again.
const DETACH_AGAIN_MAX: Duration = Duration::from_secs(30);

/// How far it has got; for whoever has started it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It waits for QEMU, here.
    Waiting(String),
    /// The memory of this process is about to be managed.
    Approaching(i32),
    /// It is, within this budget.
    Managing(i32, ByteLen),
    /// The process was let go of by request, and the next one is waited for.
    LetGo(i32),
    /// The VM's file is being read again; one of the others follows.
    Reloading,
    /// Everything is being brought back.
    Stopping,
}

/// Why it cannot begin.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ServiceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{}: it says nothing of memory: add [memory], with a budget and qmp or pid-file (docs/vm-file.md)", .0.display())]
    NoMemory(PathBuf),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Whose memory it is.
enum Whose {
    /// That of this process, and no other.
    Process(Process),
    /// That of the QEMU that is found there, and no other.
    Once(QemuAt),
    /// That of a VM, one QEMU after the other, as its file says.
    Vm(Box<VmConfig>, PathBuf, QemuAt),
}

/// It.
pub struct MemoryService {
    whose: Whose,
    /// What is wished now.
    wish: MemoryWish,
    /// How memory is managed at the moment, or was last.
    in_use: MemoryWish,
    poll_max: Duration,
    /// Where it listens while memory is managed.
    control: Option<PathBuf>,
    orders: Receiver<Order>,
    orderer: MemoryOrders,
    finder: QemuFinder,
    /// By request.
    let_go: Option<Process>,
    progress: Progress,
    /// The number of the last detach that was begun.
    detaches: u64,
}

enum Order {
    Stop,
    Reload,
    /// The detach of this number is over, without success.
    Refused(u64, DetachError),
    /// The memory is not managed any more.
    Ended(Result<End, MemoryError>),
}

/// Tells it what to do, from any thread.
#[derive(Clone)]
pub struct MemoryOrders(Sender<Order>);

impl MemoryOrders {
    /// Bring everything back, and end.
    pub fn stop(&self) {
        // One that has ended needs no telling.
        let _ = self.0.send(Order::Stop);
    }

    /// Read the VM's file again.
    pub fn reload(&self) {
        let _ = self.0.send(Order::Reload);
    }
}

/// A wish to end, which is granted by a detach.
struct Stop {
    /// The number of its last detach.
    detach: u64,
    /// The time after which it is tried again, once it was refused.
    again: Option<Duration>,
    /// The next such time.
    pause: Duration,
    /// The log has why it was refused.
    is_logged: bool,
}

impl Stop {
    /// Its detach was refused, and is tried again later.
    fn refused(&mut self, error: &DetachError) {
        self.again = Some(self.pause);
        if matches!(error, DetachError::UnderWay) {
            tracing::debug!("not detached: {error}; it is tried again");
            return;
        }
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::error!("not detached, and goes on: {error}; it is tried again");
        }
        self.pause = (self.pause * 2).min(DETACH_AGAIN_MAX);
    }
}

/// What becomes of a process.
enum After {
    Next,
    Stop,
}

impl MemoryService {
    /// For the VM that `file` describes.
    ///
    /// # Errors
    /// The file is wrong, or has nothing of memory in it.
    pub fn of_vm(file: &Path, poll_max: Duration) -> Result<Self, ServiceError> {
        let config = VmConfig::read(file)?;
        let Some(VmMemory { wish, qemu }) = config.memory.clone() else {
            return Err(ServiceError::NoMemory(file.to_owned()));
        };
        let control = make_memory_control(&config.name);
        let control = control.inspect_err(|error| {
            tracing::warn!("no control socket: its folder cannot be made: {error}");
        });
        let whose = Whose::Vm(Box::new(config), file.to_owned(), qemu);
        Ok(Self::new(whose, wish, poll_max, control.ok()))
    }

    /// For one process, which may not have all of its memory yet; or that may have ended: then this does, too.
    pub fn of_process(process: Process, wish: MemoryWish, poll_max: Duration, control: Option<PathBuf>) -> Self {
        Self::new(Whose::Process(process), wish, poll_max, control)
    }

    /// For one QEMU, which may not have been started yet.
    pub fn of_qemu(qemu: QemuAt, wish: MemoryWish, poll_max: Duration, control: Option<PathBuf>) -> Self {
        Self::new(Whose::Once(qemu), wish, poll_max, control)
    }

    fn new(whose: Whose, wish: MemoryWish, poll_max: Duration, control: Option<PathBuf>) -> Self {
        let (sender, orders) = mpsc::channel();
        Self {
            whose,
            in_use: wish.clone(),
            wish,
            poll_max,
            control,
            orders,
            orderer: MemoryOrders(sender),
            finder: QemuFinder::default(),
            let_go: None,
            progress: Progress::Stopping,
            detaches: 0,
        }
    }

    /// What tells it what to do.
    pub fn orders(&self) -> MemoryOrders {
        self.orderer.clone()
    }

    /// Does it until it is told to end, or its only process has ended.
    ///
    /// # Errors
    /// The thread that manages the memory has died.
    pub fn run(mut self, tell: impl Fn(Progress)) -> Result<(), ServiceError> {
        loop {
            let Some(process) = self.wait_for_process(&tell) else {
                tell(Progress::Stopping);
                return Ok(());
            };
            self.tell(&tell, Progress::Approaching(process.pid.as_raw_pid()));
            let managed = match self.attach(process, &tell) {
                Ok(managed) => managed,
                Err(After::Next) if matches!(self.whose, Whose::Vm(..)) => continue,
                Err(After::Next | After::Stop) => return Ok(()),
            };
            let after = self.manage(process, managed, &tell)?;
            if matches!(after, After::Stop) || !matches!(self.whose, Whose::Vm(..)) {
                return Ok(());
            }
        }
    }

    fn tell(&mut self, tell: &impl Fn(Progress), progress: Progress) {
        if self.progress != progress {
            self.progress = progress;
            tell(self.progress.clone());
        }
    }

    /// The file is read again, and it is told how that goes.
    fn reload_and_tell(&mut self, managed: Option<&MemoryInquiry>, tell: &impl Fn(Progress)) {
        tell(Progress::Reloading);
        if let Err(why) = self.reload(managed) {
            tracing::error!("nothing has changed: {why}");
        }
        if let (Progress::Managing(pid, _), Some(_)) = (&self.progress, managed) {
            self.progress = Progress::Managing(*pid, self.wish.budget);
        }
        tell(self.progress.clone());
    }

    /// A process to manage; `None` to end.
    fn wait_for_process(&mut self, tell: &impl Fn(Progress)) -> Option<Process> {
        let mut pause = LOOK;
        let mut told = None;
        loop {
            let (qemu, uuid) = match &self.whose {
                Whose::Process(process) => return Some(*process),
                Whose::Once(qemu) => (qemu.clone(), None),
                Whose::Vm(config, _, qemu) => (qemu.clone(), config.uuid.clone()),
            };
            match self.finder.find(&qemu, uuid.as_deref()) {
                Ok(Some(process)) if self.let_go != Some(process) => return Some(process),
                Ok(Some(process)) => self.tell(tell, Progress::LetGo(process.pid.as_raw_pid())),
                Ok(None) => {
                    self.tell(tell, Progress::Waiting(qemu.to_string()));
                    told = None;
                }
                Err(error) => {
                    let why = error.to_string();
                    if told.as_ref() != Some(&why) {
                        tracing::error!("{why}");
                        told = Some(why);
                    }
                    self.tell(tell, Progress::Waiting(qemu.to_string()));
                }
            }
            match self.orders.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(LOOK_MAX),
                Ok(Order::Reload) => {
                    // Whoever says so wants it managed again.
                    self.let_go = None;
                    self.reload_and_tell(None, tell);
                    pause = LOOK;
                }
                // There is one who gives orders as long as this is.
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => return None,
                // Of earlier ones.
                Ok(Order::Refused(..) | Order::Ended(_)) => {}
            }
        }
    }

    fn attach(&mut self, process: Process, tell: &impl Fn(Progress)) -> Result<ManagedMemory, After> {
        let mut approach = Approach::new(process);
        loop {
            let config = MemoryConfig {
                poll_max: self.poll_max,
                ..self.wish.config(process.pid)
            };
            let pause = match approach.step(&config) {
                Step::Attached(managed) => {
                    self.in_use = self.wish.clone();
                    return Ok(managed);
                }
                Step::Gone => return Err(After::Next),
                Step::Later(pause) => pause,
            };
            match self.orders.recv_timeout(pause) {
                Ok(Order::Reload) => {
                    self.reload_and_tell(None, tell);
                    approach.hurry();
                }
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    if process.is_waiting() && !approach.is_of_another() {
                        tracing::error!(
                            "process {} is left waiting for its memory, until it is managed again",
                            process.pid.as_raw_pid()
                        );
                    }
                    return Err(After::Stop);
                }
                Ok(Order::Refused(..) | Order::Ended(_)) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Manages the memory to the end.
    fn manage(
        &mut self,
        process: Process,
        managed: ManagedMemory,
        tell: &impl Fn(Progress),
    ) -> Result<After, ServiceError> {
        let inquiry = managed.inquiry();
        // Whoever reads in the log that it is attached can ask for it.
        let control = self.listen(inquiry.clone());
        managed.began().tell(process.pid, self.wish.budget);
        self.tell(tell, Progress::Managing(process.pid.as_raw_pid(), self.wish.budget));
        let orderer = self.orderer.clone();
        std::thread::spawn(move || {
            let ended = managed.wait();
            // This ends only after it was told.
            let _ = orderer.0.send(Order::Ended(ended));
        });
        let mut stop: Option<Stop> = None;
        let end = loop {
            let order = match stop.as_ref().and_then(|stop| stop.again) {
                None => self.orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(pause) => self.orders.recv_timeout(pause),
            };
            match (order, &mut stop) {
                (Ok(Order::Ended(end)), _) => break end?,
                // Who wants it managed again.
                (Ok(Order::Reload), Some(_)) => {
                    inquiry.cancel_detach_blocking();
                    stop = None;
                    self.reload_and_tell(Some(&inquiry), tell);
                    self.tell(tell, Progress::Managing(process.pid.as_raw_pid(), self.wish.budget));
                }
                (Ok(Order::Reload), None) => self.reload_and_tell(Some(&inquiry), tell),
                (Ok(Order::Stop), Some(_)) => {
                    tracing::warn!(
                        "it is being detached already (SIGHUP stops that); a kill leaves the guest waiting until it is managed again"
                    );
                }
                (Ok(Order::Stop), None) => {
                    self.tell(tell, Progress::Stopping);
                    tracing::info!("detaching: everything is brought back into memory");
                    stop = Some(Stop {
                        detach: self.detach(&inquiry),
                        again: None,
                        pause: DETACH_AGAIN,
                        is_logged: false,
                    });
                }
                (Ok(Order::Refused(detach, error)), Some(now)) if detach == now.detach => match error {
                    DetachError::Cancelled => {
                        tracing::warn!("not detached: {error}");
                        stop = None;
                        self.tell(tell, Progress::Managing(process.pid.as_raw_pid(), self.wish.budget));
                    }
                    error => now.refused(&error),
                },
                // The answer to a detach that was cancelled meanwhile.
                (Ok(Order::Refused(..)), _) => {}
                (Err(_), Some(now)) => {
                    now.again = None;
                    now.detach = self.detach(&inquiry);
                }
                // Impossible: this has a sender itself.
                (Err(_), None) => {}
            }
        };
        let is_stopping = stop.is_some();
        if let Some(control) = control {
            control.end_after_answers();
        }
        tell_end(end);
        if end == End::Detached && !is_stopping {
            self.let_go = Some(process);
        }
        Ok(match is_stopping {
            true => After::Stop,
            false => After::Next,
        })
    }

    /// Brings everything back, without anybody waiting for it here. Returns the number of the detach.
    fn detach(&mut self, inquiry: &MemoryInquiry) -> u64 {
        self.detaches += 1;
        let (number, orderer) = (self.detaches, self.orderer.clone());
        // Asked for here, so that no later request overtakes it.
        let wait = inquiry.begin_detach_blocking();
        std::thread::spawn(move || match wait() {
            // The memory is not managed any more, which is said by itself.
            Some(Ok(()) | Err(DetachError::Over)) | None => {}
            // Another one that is under way may fail: this one is tried again then.
            Some(Err(error)) => {
                let _ = orderer.0.send(Order::Refused(number, error));
            }
        });
        number
    }

    /// The control socket. Without one the memory is managed all the same.
    fn listen(&self, inquiry: MemoryInquiry) -> Option<ControlServer> {
        let path = self.control.as_deref()?;
        let subject = match &self.whose {
            Whose::Vm(config, file, _) => Subject::vm_memory(config, file, inquiry),
            Whose::Process(_) | Whose::Once(_) => Subject::memory(inquiry),
        };
        let started = ControlServer::start(path, Arc::new(subject));
        started
            .inspect_err(|error| tracing::error!("it is managed, but nobody can ask for it: {error}"))
            .ok()
    }

    /// Reads the file again, and does what it says as far as that can be done now.
    fn reload(&mut self, managed: Option<&MemoryInquiry>) -> Result<(), String> {
        let Whose::Vm(config, file, qemu) = &mut self.whose else {
            return Err("there is no file".to_owned());
        };
        let read = VmConfig::read(file).map_err(|error| error.to_string())?;
        let Some(wanted) = read.memory.clone() else {
            let file = file.display();
            return Err(format!(
                "{file} says nothing of memory any more; stop this service to have it let go of"
            ));
        };
        if let Some(managed) = managed {
            // The usual share depends on the swap cache that there is.
            let swap = self.in_use.swap.clone();
            let limits = MemoryWish {
                swap,
                ..wanted.wish.clone()
            }
            .limits();
            managed.limit_blocking(limits).unwrap_or(Ok(()))?;
            for key in wanted.wish.fixed_differences(&self.in_use) {
                // It brings everything back first, so that pages may go elsewhere.
                tracing::warn!("left: {key}: as before until this service is started again, which the guest survives");
            }
        }
        **config = read;
        *qemu = wanted.qemu;
        self.wish = wanted.wish;
        Ok(())
    }
}
