//! A process that manages a VM's memory across restarts of QEMU: it waits for QEMU, attaches, and when that QEMU
//! ends, waits for the next one. It can also manage one process only, which may have only just started.
//!
//! Invariants:
//! - A process that waits because its pager was killed is attached to at once, whatever the file says by now.
//! - A stop request is completed once all memory is paged in, or the process has ended, and the detach is retried
//!   until then: a guest with evicted pages and no pager blocks.
//! - A process from which a client has detached is left alone until a reload.

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

/// Interval between searches for QEMU, which doubles up to the maximum.
const LOOK: Duration = Duration::from_millis(250);
const LOOK_MAX: Duration = Duration::from_secs(2);

/// First pause before the retry of a detach that was refused for lack of host memory.
const DETACH_AGAIN: Duration = Duration::from_secs(2);
/// Longest such pause. It doubles with each attempt, because pages that were paged in have to be evicted again.
const DETACH_AGAIN_MAX: Duration = Duration::from_secs(30);

/// Progress of the service, reported to the process that started it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Waiting for QEMU, at this location.
    Waiting(String),
    /// About to manage the memory of this process.
    Approaching(i32),
    /// Managing the memory of this process, within this budget.
    Managing(i32, ByteLen),
    /// A client has detached from this process, and the next one is awaited.
    LetGo(i32),
    /// Reloading the VM's file; another state follows.
    Reloading,
    /// Paging everything in.
    Stopping,
}

/// Reason why the service cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ServiceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{}: it has no [memory] section: add one, with a budget and qmp or pid-file (docs/vm-file.md)", .0.display())]
    NoMemory(PathBuf),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Whose memory is managed.
enum Whose {
    /// This process only.
    Process(Process),
    /// The QEMU found at this location, and no later one.
    Once(QemuAt),
    /// A VM's QEMU, and every later one, as configured in its file.
    Vm(Box<VmConfig>, PathBuf, QemuAt),
}

/// A service that manages the memory of a VM or of a process.
pub struct MemoryService {
    whose: Whose,
    /// The requested options.
    wish: MemoryWish,
    /// The options of the current or last attach.
    in_use: MemoryWish,
    poll_max: Duration,
    /// Control socket while memory is managed.
    control: Option<PathBuf>,
    orders: Receiver<Order>,
    orderer: MemoryOrders,
    finder: QemuFinder,
    /// The process from which a client has detached.
    let_go: Option<Process>,
    progress: Progress,
    /// Number of the last detach that was started.
    detaches: u64,
}

enum Order {
    Stop,
    Reload,
    /// The detach of this number has failed.
    Refused(u64, DetachError),
    /// The memory is no longer managed.
    Ended(Result<End, MemoryError>),
}

/// Handle for commands to the service, usable from any thread.
#[derive(Clone)]
pub struct MemoryOrders(Sender<Order>);

impl MemoryOrders {
    /// Pages everything in, and ends the service.
    pub fn stop(&self) {
        // Sending fails only if the service has ended.
        let _ = self.0.send(Order::Stop);
    }

    /// Reloads the VM's file.
    pub fn reload(&self) {
        let _ = self.0.send(Order::Reload);
    }
}

/// A stop request, which a detach completes.
struct Stop {
    /// Number of its last detach.
    detach: u64,
    /// Pause before the next attempt, after one was refused.
    again: Option<Duration>,
    /// Pause for the attempt after that.
    pause: Duration,
    /// The reason of the refusal has been logged.
    is_logged: bool,
}

impl Stop {
    /// Handles a refused detach, which is retried later.
    fn refused(&mut self, error: &DetachError) {
        self.again = Some(self.pause);
        if matches!(error, DetachError::UnderWay) {
            tracing::debug!("not detached: {error}; Larder will try again");
            return;
        }
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::error!("not detached, and the memory is still managed: {error}; Larder will try again");
        }
        self.pause = (self.pause * 2).min(DETACH_AGAIN_MAX);
    }
}

/// Action after the end of a process.
enum After {
    Next,
    Stop,
}

impl MemoryService {
    /// Returns a service for the VM that `file` describes.
    ///
    /// # Errors
    /// The file is invalid, or has no memory section.
    pub fn of_vm(file: &Path, poll_max: Duration) -> Result<Self, ServiceError> {
        let config = VmConfig::read(file)?;
        let Some(VmMemory { wish, qemu }) = config.memory.clone() else {
            return Err(ServiceError::NoMemory(file.to_owned()));
        };
        let control = make_memory_control(&config.name);
        let control = control.inspect_err(|error| {
            tracing::warn!("no control socket: its directory cannot be created: {error}");
        });
        let whose = Whose::Vm(Box::new(config), file.to_owned(), qemu);
        Ok(Self::new(whose, wish, poll_max, control.ok()))
    }

    /// Returns a service for one process, which may not have all of its memory yet. If the process has ended, the
    /// service ends too.
    pub fn of_process(process: Process, wish: MemoryWish, poll_max: Duration, control: Option<PathBuf>) -> Self {
        Self::new(Whose::Process(process), wish, poll_max, control)
    }

    /// Returns a service for one QEMU, which may not have been started yet.
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

    /// Returns a handle for commands to this service.
    pub fn orders(&self) -> MemoryOrders {
        self.orderer.clone()
    }

    /// Runs until a stop command, or until the only process has ended.
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

    /// Reloads the file, and reports the progress.
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

    /// Waits for a process to manage, and returns it; `None` if the service must end.
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
                    // A reload means that the process is to be managed again.
                    self.let_go = None;
                    self.reload_and_tell(None, tell);
                    pause = LOOK;
                }
                // `self` has a sender, so receiving cannot fail while it exists.
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => return None,
                // These concern earlier processes.
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
                            "process {} blocks on its evicted pages until it is managed again",
                            process.pid.as_raw_pid()
                        );
                    }
                    return Err(After::Stop);
                }
                Ok(Order::Refused(..) | Order::Ended(_)) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Manages the memory of a process until it ends or is detached from.
    fn manage(
        &mut self,
        process: Process,
        managed: ManagedMemory,
        tell: &impl Fn(Progress),
    ) -> Result<After, ServiceError> {
        let inquiry = managed.inquiry();
        // The control socket must work before the log says that the memory is attached.
        let control = self.listen(inquiry.clone());
        managed.began().tell(process.pid, self.wish.budget);
        self.tell(tell, Progress::Managing(process.pid.as_raw_pid(), self.wish.budget));
        let orderer = self.orderer.clone();
        std::thread::spawn(move || {
            let ended = managed.wait();
            // The service ends only after it has received this.
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
                // A reload during a stop means that the memory is to be managed further.
                (Ok(Order::Reload), Some(_)) => {
                    inquiry.cancel_detach_blocking();
                    stop = None;
                    self.reload_and_tell(Some(&inquiry), tell);
                    self.tell(tell, Progress::Managing(process.pid.as_raw_pid(), self.wish.budget));
                }
                (Ok(Order::Reload), None) => self.reload_and_tell(Some(&inquiry), tell),
                (Ok(Order::Stop), Some(_)) => {
                    tracing::warn!(
                        "a detach is already running (SIGHUP cancels it); after a kill the guest blocks until it is managed again"
                    );
                }
                (Ok(Order::Stop), None) => {
                    self.tell(tell, Progress::Stopping);
                    tracing::info!("detaching: all pages are being paged in");
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
                // This is the answer to a detach that was cancelled meanwhile.
                (Ok(Order::Refused(..)), _) => {}
                (Err(_), Some(now)) => {
                    now.again = None;
                    now.detach = self.detach(&inquiry);
                }
                // Impossible: `self` has a sender.
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

    /// Starts a detach without waiting for it; returns its number.
    fn detach(&mut self, inquiry: &MemoryInquiry) -> u64 {
        self.detaches += 1;
        let (number, orderer) = (self.detaches, self.orderer.clone());
        // The request is sent here, so that no later request overtakes it.
        let wait = inquiry.begin_detach_blocking();
        std::thread::spawn(move || match wait() {
            // The memory is no longer managed, which `Order::Ended` reports.
            Some(Ok(()) | Err(DetachError::Over)) | None => {}
            // Another detach that is running may fail: this one is then retried.
            Some(Err(error)) => {
                let _ = orderer.0.send(Order::Refused(number, error));
            }
        });
        number
    }

    /// Starts the control socket. If that fails, the memory is managed without one.
    fn listen(&self, inquiry: MemoryInquiry) -> Option<ControlServer> {
        let path = self.control.as_deref()?;
        let subject = match &self.whose {
            Whose::Vm(config, file, _) => Subject::vm_memory(config, file, inquiry),
            Whose::Process(_) | Whose::Once(_) => Subject::memory(inquiry),
        };
        let started = ControlServer::start(path, Arc::new(subject));
        started
            .inspect_err(|error| tracing::error!("the memory is managed, but without a control socket: {error}"))
            .ok()
    }

    /// Reloads the file, and applies all changes that are possible now.
    fn reload(&mut self, managed: Option<&MemoryInquiry>) -> Result<(), String> {
        let Whose::Vm(config, file, qemu) = &mut self.whose else {
            return Err("there is no file to reload".to_owned());
        };
        let read = VmConfig::read(file).map_err(|error| error.to_string())?;
        let Some(wanted) = read.memory.clone() else {
            let file = file.display();
            return Err(format!(
                "{file} has no [memory] section any more; stop this service to detach from the memory"
            ));
        };
        if let Some(managed) = managed {
            // The default share of compressed pages depends on the swap cache in use.
            let swap = self.in_use.swap.clone();
            let limits = MemoryWish {
                swap,
                ..wanted.wish.clone()
            }
            .limits();
            managed.limit_blocking(limits).unwrap_or(Ok(()))?;
            for key in wanted.wish.fixed_differences(&self.in_use) {
                // The restart pages everything in first, so pages may be evicted to another disk afterwards.
                tracing::warn!("{key}: takes effect when this service is restarted, which the guest survives");
            }
        }
        **config = read;
        *qemu = wanted.qemu;
        self.wish = wanted.wish;
        Ok(())
    }
}
