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
use larder_memory::service::{DetachError, PagerExit};

use super::attach_retry::{AttachRetry, AttachStep, QemuFinder, QemuProcess};
use super::spec::MemorySpec;
use super::{ManagedMemory, MemoryConfig, MemoryError, MemoryHandle, log_end};
use crate::control::{ControlServer, Subject};
use crate::vm::config::{ConfigError, QemuLocation, VmConfig, VmMemory};
use crate::vm::find::create_memory_control_directory;

/// Interval between searches for QEMU, which doubles up to the maximum.
const SEARCH_INTERVAL: Duration = Duration::from_millis(250);
const SEARCH_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// First pause before the retry of a detach that was refused for lack of host memory.
const DETACH_RETRY_DELAY: Duration = Duration::from_secs(2);
/// Longest such pause. It doubles with each attempt, because pages that were paged in have to be evicted again.
const DETACH_RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

/// Progress of the service, reported to the process that started it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceProgress {
    /// Waiting for QEMU, at this location.
    Waiting(String),
    /// About to manage the memory of this process.
    Attaching(i32),
    /// Managing the memory of this process, within this budget.
    Managing(i32, ByteLen),
    /// A client has detached from this process, and the next one is awaited.
    Detached(i32),
    /// Reloading the VM's file; another state follows.
    Reloading,
    /// Paging everything in.
    Stopping,
}

/// Reason why the service cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MemoryServiceError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{}: it has no [memory] section: add one, with a budget and qmp or pid-file (docs/vm-file.md)", .0.display())]
    NoMemory(PathBuf),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Whose memory is managed.
enum ManagedTarget {
    /// This process only.
    Process(QemuProcess),
    /// The QEMU found at this location, and no later one.
    Qemu(QemuLocation),
    /// A VM's QEMU, and every later one, as configured in its file.
    Vm(Box<VmConfig>, PathBuf, QemuLocation),
}

/// A service that manages the memory of a VM or of a process.
pub struct MemoryService {
    target: ManagedTarget,
    /// The requested options.
    spec: MemorySpec,
    /// The options of the current or last attach.
    active_spec: MemorySpec,
    poll_max: Duration,
    /// Control socket while memory is managed.
    control: Option<PathBuf>,
    commands: Receiver<ServiceCommand>,
    command_sender: MemoryServiceHandle,
    finder: QemuFinder,
    /// The process from which a client has detached.
    detached_process: Option<QemuProcess>,
    progress: ServiceProgress,
    /// Number of the last detach that was started.
    detach_count: u64,
}

enum ServiceCommand {
    Stop,
    Reload,
    /// The detach of this number has failed.
    DetachFailed(u64, DetachError),
    /// The memory is no longer managed.
    Ended(Result<PagerExit, MemoryError>),
}

/// Handle for commands to the service, usable from any thread.
#[derive(Clone)]
pub struct MemoryServiceHandle(Sender<ServiceCommand>);

impl MemoryServiceHandle {
    /// Pages everything in, and ends the service.
    pub fn stop(&self) {
        // Sending fails only if the service has ended.
        let _ = self.0.send(ServiceCommand::Stop);
    }

    /// Reloads the VM's file.
    pub fn reload(&self) {
        let _ = self.0.send(ServiceCommand::Reload);
    }
}

/// A stop request, which a detach completes.
struct PendingStop {
    /// Number of its last detach.
    detach: u64,
    /// Pause before the next attempt, after one was refused.
    retry_delay: Option<Duration>,
    /// Pause for the attempt after that.
    next_retry_delay: Duration,
    /// The reason of the refusal has been logged.
    is_logged: bool,
}

impl PendingStop {
    /// Handles a refused detach, which is retried later.
    fn on_detach_failed(&mut self, error: &DetachError) {
        self.retry_delay = Some(self.next_retry_delay);
        if matches!(error, DetachError::InProgress) {
            tracing::debug!("not detached: {error}; Larder will try again");
            return;
        }
        if !std::mem::replace(&mut self.is_logged, true) {
            tracing::error!("not detached, and the memory is still managed: {error}; Larder will try again");
        }
        self.next_retry_delay = (self.next_retry_delay * 2).min(DETACH_RETRY_DELAY_MAX);
    }
}

/// Action after the end of a process.
enum NextAction {
    WaitForNext,
    Stop,
}

impl MemoryService {
    /// Returns a service for the VM that `file` describes.
    ///
    /// # Errors
    /// The file is invalid, or has no memory section.
    pub fn for_vm(file: &Path, poll_max: Duration) -> Result<Self, MemoryServiceError> {
        let config = VmConfig::read(file)?;
        let Some(VmMemory { spec, qemu }) = config.memory.clone() else {
            return Err(MemoryServiceError::NoMemory(file.to_owned()));
        };
        let control = create_memory_control_directory(&config.name);
        let control = control.inspect_err(|error| {
            tracing::warn!("no control socket: its directory cannot be created: {error}");
        });
        let whose = ManagedTarget::Vm(Box::new(config), file.to_owned(), qemu);
        Ok(Self::new(whose, spec, poll_max, control.ok()))
    }

    /// Returns a service for one process, which may not have all of its memory yet. If the process has ended, the
    /// service ends too.
    pub fn for_process(process: QemuProcess, spec: MemorySpec, poll_max: Duration, control: Option<PathBuf>) -> Self {
        Self::new(ManagedTarget::Process(process), spec, poll_max, control)
    }

    /// Returns a service for one QEMU, which may not have been started yet.
    pub fn for_qemu(qemu: QemuLocation, spec: MemorySpec, poll_max: Duration, control: Option<PathBuf>) -> Self {
        Self::new(ManagedTarget::Qemu(qemu), spec, poll_max, control)
    }

    fn new(whose: ManagedTarget, spec: MemorySpec, poll_max: Duration, control: Option<PathBuf>) -> Self {
        let (sender, orders) = mpsc::channel();
        Self {
            target: whose,
            active_spec: spec.clone(),
            spec,
            poll_max,
            control,
            commands: orders,
            command_sender: MemoryServiceHandle(sender),
            finder: QemuFinder::default(),
            detached_process: None,
            progress: ServiceProgress::Stopping,
            detach_count: 0,
        }
    }

    /// Returns a handle for commands to this service.
    pub fn handle(&self) -> MemoryServiceHandle {
        self.command_sender.clone()
    }

    /// Runs until a stop command, or until the only process has ended.
    ///
    /// # Errors
    /// The thread that manages the memory has died.
    pub fn run(mut self, tell: impl Fn(ServiceProgress)) -> Result<(), MemoryServiceError> {
        loop {
            let Some(process) = self.wait_for_process(&tell) else {
                tell(ServiceProgress::Stopping);
                return Ok(());
            };
            self.report_progress(&tell, ServiceProgress::Attaching(process.pid.as_raw_pid()));
            let managed = match self.attach(process, &tell) {
                Ok(managed) => managed,
                Err(NextAction::WaitForNext) if matches!(self.target, ManagedTarget::Vm(..)) => continue,
                Err(NextAction::WaitForNext | NextAction::Stop) => return Ok(()),
            };
            let after = self.manage(process, managed, &tell)?;
            if matches!(after, NextAction::Stop) || !matches!(self.target, ManagedTarget::Vm(..)) {
                return Ok(());
            }
        }
    }

    fn report_progress(&mut self, tell: &impl Fn(ServiceProgress), progress: ServiceProgress) {
        if self.progress != progress {
            tracing::debug!(from = ?self.progress, to = ?progress, "the service changes its state");
            self.progress = progress;
            tell(self.progress.clone());
        }
    }

    /// Reloads the file, and reports the progress.
    fn reload_and_report(&mut self, managed: Option<&MemoryHandle>, tell: &impl Fn(ServiceProgress)) {
        tell(ServiceProgress::Reloading);
        if let Err(why) = self.reload(managed) {
            tracing::error!("nothing has changed: {why}");
        }
        if let (ServiceProgress::Managing(pid, _), Some(_)) = (&self.progress, managed) {
            self.progress = ServiceProgress::Managing(*pid, self.spec.budget);
        }
        tell(self.progress.clone());
    }

    /// Waits for a process to manage, and returns it; `None` if the service must end.
    fn wait_for_process(&mut self, tell: &impl Fn(ServiceProgress)) -> Option<QemuProcess> {
        let mut pause = SEARCH_INTERVAL;
        let mut last_error = None;
        loop {
            let (qemu, uuid) = match &self.target {
                ManagedTarget::Process(process) => return Some(*process),
                ManagedTarget::Qemu(qemu) => (qemu.clone(), None),
                ManagedTarget::Vm(config, _, qemu) => (qemu.clone(), config.uuid.clone()),
            };
            match self.finder.find(&qemu, uuid.as_deref()) {
                Ok(Some(process)) if self.detached_process != Some(process) => return Some(process),
                Ok(Some(process)) => self.report_progress(tell, ServiceProgress::Detached(process.pid.as_raw_pid())),
                Ok(None) => {
                    self.report_progress(tell, ServiceProgress::Waiting(qemu.to_string()));
                    last_error = None;
                }
                Err(error) => {
                    let why = error.to_string();
                    if last_error.as_ref() != Some(&why) {
                        tracing::error!("{why}");
                        last_error = Some(why);
                    }
                    self.report_progress(tell, ServiceProgress::Waiting(qemu.to_string()));
                }
            }
            match self.commands.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(SEARCH_INTERVAL_MAX),
                Ok(ServiceCommand::Reload) => {
                    // A reload means that the process is to be managed again.
                    self.detached_process = None;
                    self.reload_and_report(None, tell);
                    pause = SEARCH_INTERVAL;
                }
                // `self` has a sender, so receiving cannot fail while it exists.
                Ok(ServiceCommand::Stop) | Err(RecvTimeoutError::Disconnected) => return None,
                // These concern earlier processes.
                Ok(ServiceCommand::DetachFailed(..) | ServiceCommand::Ended(_)) => {}
            }
        }
    }

    fn attach(&mut self, process: QemuProcess, tell: &impl Fn(ServiceProgress)) -> Result<ManagedMemory, NextAction> {
        let mut attach_retry = AttachRetry::new(process);
        loop {
            let config = MemoryConfig { poll_max: self.poll_max, ..self.spec.config(process.pid) };
            let pause = match attach_retry.attempt(&config) {
                AttachStep::Attached(managed) => {
                    self.active_spec = self.spec.clone();
                    return Ok(managed);
                }
                AttachStep::Exited => return Err(NextAction::WaitForNext),
                AttachStep::RetryAfter(pause) => pause,
            };
            match self.commands.recv_timeout(pause) {
                Ok(ServiceCommand::Reload) => {
                    self.reload_and_report(None, tell);
                    attach_retry.reset_delay();
                }
                Ok(ServiceCommand::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    if process.has_pager_state() && !attach_retry.is_managed_by_other() {
                        tracing::error!(
                            "process {} blocks on its evicted pages until it is managed again",
                            process.pid.as_raw_pid()
                        );
                    }
                    return Err(NextAction::Stop);
                }
                Ok(ServiceCommand::DetachFailed(..) | ServiceCommand::Ended(_)) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Manages the memory of a process until it ends or is detached from.
    fn manage(
        &mut self,
        process: QemuProcess,
        managed: ManagedMemory,
        tell: &impl Fn(ServiceProgress),
    ) -> Result<NextAction, MemoryServiceError> {
        let handle = managed.handle();
        // The control socket must work before the log says that the memory is attached.
        let control = self.start_control(handle.clone());
        managed.summary().log(process.pid, self.spec.budget);
        self.report_progress(tell, ServiceProgress::Managing(process.pid.as_raw_pid(), self.spec.budget));
        let orderer = self.command_sender.clone();
        std::thread::spawn(move || {
            let ended = managed.wait();
            // The service ends only after it has received this.
            let _ = orderer.0.send(ServiceCommand::Ended(ended));
        });
        let mut stop: Option<PendingStop> = None;
        let end = loop {
            let order = match stop.as_ref().and_then(|stop| stop.retry_delay) {
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(pause) => self.commands.recv_timeout(pause),
            };
            match (order, &mut stop) {
                (Ok(ServiceCommand::Ended(end)), _) => break end?,
                // A reload during a stop means that the memory is to be managed further.
                (Ok(ServiceCommand::Reload), Some(_)) => {
                    handle.cancel_detach_blocking();
                    stop = None;
                    self.reload_and_report(Some(&handle), tell);
                    self.report_progress(tell, ServiceProgress::Managing(process.pid.as_raw_pid(), self.spec.budget));
                }
                (Ok(ServiceCommand::Reload), None) => self.reload_and_report(Some(&handle), tell),
                (Ok(ServiceCommand::Stop), Some(_)) => {
                    tracing::warn!(
                        "a detach is already running (SIGHUP cancels it); after a kill the guest blocks until it is managed again"
                    );
                }
                (Ok(ServiceCommand::Stop), None) => {
                    self.report_progress(tell, ServiceProgress::Stopping);
                    tracing::info!("detaching: all pages are being paged in");
                    stop = Some(PendingStop {
                        detach: self.start_detach(&handle),
                        retry_delay: None,
                        next_retry_delay: DETACH_RETRY_DELAY,
                        is_logged: false,
                    });
                }
                (Ok(ServiceCommand::DetachFailed(detach, error)), Some(pending_stop))
                    if detach == pending_stop.detach =>
                {
                    match error {
                        DetachError::Cancelled => {
                            tracing::warn!("not detached: {error}");
                            stop = None;
                            self.report_progress(
                                tell,
                                ServiceProgress::Managing(process.pid.as_raw_pid(), self.spec.budget),
                            );
                        }
                        error => pending_stop.on_detach_failed(&error),
                    }
                }
                // This is the answer to a detach that was cancelled meanwhile.
                (Ok(ServiceCommand::DetachFailed(..)), _) => {}
                (Err(_), Some(pending_stop)) => {
                    pending_stop.retry_delay = None;
                    pending_stop.detach = self.start_detach(&handle);
                }
                // Impossible: `self` has a sender.
                (Err(_), None) => {}
            }
        };
        let is_stopping = stop.is_some();
        if let Some(control) = control {
            control.shut_down_gracefully();
        }
        log_end(end);
        if end == PagerExit::Detached && !is_stopping {
            self.detached_process = Some(process);
        }
        Ok(match is_stopping {
            true => NextAction::Stop,
            false => NextAction::WaitForNext,
        })
    }

    /// Starts a detach without waiting for it; returns its number.
    fn start_detach(&mut self, handle: &MemoryHandle) -> u64 {
        self.detach_count += 1;
        let (detach_number, orderer) = (self.detach_count, self.command_sender.clone());
        // The request is sent here, so that no later request overtakes it.
        let wait = handle.start_detach_blocking();
        std::thread::spawn(move || match wait() {
            // The memory is no longer managed, which `ServiceCommand::Ended` reports.
            Some(Ok(()) | Err(DetachError::Ended)) | None => {}
            // Another detach that is running may fail: this one is then retried.
            Some(Err(error)) => {
                let _ = orderer.0.send(ServiceCommand::DetachFailed(detach_number, error));
            }
        });
        detach_number
    }

    /// Starts the control socket. If that fails, the memory is managed without one.
    fn start_control(&self, handle: MemoryHandle) -> Option<ControlServer> {
        let path = self.control.as_deref()?;
        let subject = match &self.target {
            ManagedTarget::Vm(config, file, _) => Subject::vm_memory(config, file, handle),
            ManagedTarget::Process(_) | ManagedTarget::Qemu(_) => Subject::memory(handle),
        };
        let started = ControlServer::start(path, Arc::new(subject));
        started
            .inspect_err(|error| tracing::error!("the memory is managed, but without a control socket: {error}"))
            .ok()
    }

    /// Reloads the file, and applies all changes that are possible now.
    fn reload(&mut self, managed: Option<&MemoryHandle>) -> Result<(), String> {
        let ManagedTarget::Vm(config, file, qemu) = &mut self.target else {
            return Err("there is no file to reload".to_owned());
        };
        let new_config = VmConfig::read(file).map_err(|error| error.to_string())?;
        let Some(new_memory) = new_config.memory.clone() else {
            let file = file.display();
            return Err(format!(
                "{file} has no [memory] section any more; stop this service to detach from the memory"
            ));
        };
        if let Some(managed) = managed {
            // The default share of compressed pages depends on the swap cache in use.
            let swap = self.active_spec.swap.clone();
            let limits = MemorySpec { swap, ..new_memory.spec.clone() }.limits();
            managed.limit_blocking(limits).unwrap_or(Ok(()))?;
            for key in new_memory.spec.restart_only_changes(&self.active_spec) {
                // The restart pages everything in first, so pages may be evicted to another disk afterwards.
                tracing::warn!("{key}: takes effect when this service is restarted, which the guest survives");
            }
        }
        **config = new_config;
        *qemu = new_memory.qemu;
        self.spec = new_memory.spec;
        Ok(())
    }
}
