//! The memory of a VM, kept within a budget by a thread of its own.

pub mod attach_retry;
mod path_trust;
mod qemu_ram;
pub mod range;
pub mod service;
pub mod spec;
pub(crate) mod swap;

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::mpsc as thread_mpsc;
use std::time::Duration;

use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::signal::first_of;
use larder_block::{ByteLen, Loop};
use larder_memory::attach::{AttachCandidate, AttachError, Attached};
use larder_memory::entry::Tier;
use larder_memory::headroom::common_cgroup_limit;
use larder_memory::pager;
use larder_memory::service::{DetachError, PagerExit, PagerService};
use larder_memory::target::{InspectOptions, Target, TargetError};
use rustix::process::{DumpableBehavior, Pid, getpid, set_dumpable_behavior};
use tokio::sync::{mpsc, oneshot};

use crate::control::memory::{MemoryPatch, MemoryState};
use crate::runtime_directory::detach_ledger_directory;
use crate::thread_result::ThreadResult;
use range::{BudgetRange, BudgetRangeError};

/// Maximum number of queued requests to the thread; senders of further ones wait.
const REQUEST_QUEUE_MAX: usize = 16;

pub use swap::{SwapConfig, SwapError, check_swap_disk};

/// Parses `data` as the beginning of a swap disk, and as the body of `PATCH /v1/memory`, for fuzzing.
#[doc(hidden)]
pub fn fuzz_parse(data: &[u8]) {
    swap::fuzz_parse(data);
    if let Ok(patch) = serde_json::from_slice::<MemoryPatch>(data) {
        let limits = patch.limits();
        let bytes = 1 << 30;
        let budget = limits.budget.unwrap_or(BUDGET_MIN);
        if let Ok((limit, compressed)) = check_budget(bytes, budget, limits.compressed, true) {
            assert!(limit == budget.get() && compressed < limit);
        }
    }
}

/// Smallest budget, in addition to the pager's metadata of each page.
pub const BUDGET_MIN: ByteLen = ByteLen::new(16 << 20);

/// Time after which device I/O that was in flight when writes to a page were stopped is complete.
pub const QUARANTINE_DEFAULT: Duration = Duration::from_secs(2);

/// Configuration of managed memory.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// Process ID.
    pub pid: Pid,
    /// Start time of the process, in ticks since boot, which excludes a later process with the same ID. `None`
    /// accepts any process.
    pub started: Option<u64>,
    /// Limit on the memory used for the process in all.
    pub budget: ByteLen,
    /// Limit on the part of the budget that compressed pages use; by default half, or a 16th with a swap cache or a
    /// slow store.
    pub compressed: Option<ByteLen>,
    /// Bounds within which the budget may be moved.
    pub range: BudgetRange,
    /// Time for which pages wait until device I/O is complete. The default is [`QUARANTINE_DEFAULT`] for a process
    /// that has files open for direct I/O, and zero for any other.
    pub quarantine: Option<Duration>,
    /// Swap cache: receives the pages for which compressed RAM has no space.
    pub swap: Option<SwapConfig>,
    /// Slow store: receives the pages for which the swap cache has no space.
    pub slow: Option<SwapConfig>,
    /// Prefetch pages when the guest accesses memory sequentially.
    pub prefetch: bool,
    /// Encrypt data on the disks, with a key that ends with the process.
    pub encrypt: bool,
    /// Longest time for which the thread polls for faults before it sleeps.
    pub poll_max: Duration,
}

impl MemoryConfig {
    /// Returns whether there is a tier below compressed RAM.
    fn has_disk(&self) -> bool {
        self.swap.is_some() || self.slow.is_some()
    }

    /// Returns the default configuration.
    pub fn new(pid: Pid, budget: ByteLen) -> Self {
        Self {
            pid,
            started: None,
            budget,
            compressed: None,
            range: BudgetRange::default(),
            quarantine: None,
            swap: None,
            slow: None,
            prefetch: true,
            encrypt: true,
            poll_max: POLL_MAX_DEFAULT,
        }
    }
}

/// Reason why no memory is managed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum MemoryError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Swap(#[from] SwapError),
    #[error(transparent)]
    Budget(#[from] BudgetError),
    #[error(transparent)]
    Spec(#[from] spec::MemorySpecError),
    #[error("cannot start the thread that manages the memory: {0}")]
    Thread(io::Error),
    #[error("cannot set up io_uring: {0}")]
    Uring(io::Error),
    #[error("the thread that manages the memory has died")]
    ThreadDied,
}

/// Reason why a budget is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum BudgetError {
    #[error("a budget of {budget} is too small: memory of {bytes} needs at least {needed}")]
    TooSmall { budget: ByteLen, needed: ByteLen, bytes: ByteLen },
    #[error("{compressed} of compressed pages leave too little of a budget of {budget} for the guest")]
    Compressed { compressed: ByteLen, budget: ByteLen },
    #[error(transparent)]
    Range(#[from] BudgetRangeError),
    #[error("a detach is running, and all pages are being paged in: limits have no effect any more")]
    Detaching,
}

/// Result of an attach.
#[derive(Clone, Debug)]
pub struct AttachSummary {
    /// Name of the process.
    pub name: String,
    /// Size of its memory.
    pub bytes: ByteLen,
    /// Longest pause of one of its threads; `None` if another pager was attached before, which this one replaces.
    pub pause: Option<Duration>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

impl AttachSummary {
    /// Logs the result.
    pub fn log(&self, pid: Pid, budget: ByteLen) {
        for caution in &self.warnings {
            tracing::warn!("{caution}");
        }
        tracing::info!(
            process = self.name,
            pid = pid.as_raw_pid(),
            size = %self.bytes,
            %budget,
            stood_still = self.pause.map(tracing::field::debug),
            "{}",
            match self.pause {
                Some(_) => "attached",
                None => "attached, in place of another pager, which has ended",
            }
        );
    }
}

/// Logs why management has ended.
pub fn log_end(end: PagerExit) {
    match end {
        PagerExit::Detached => tracing::info!("detached"),
        PagerExit::ProcessEnded => tracing::info!("the process has ended"),
    }
}

/// Memory that is managed.
pub struct ManagedMemory {
    outcome: ThreadResult<Result<PagerExit, MemoryError>>,
    handle: MemoryHandle,
    summary: AttachSummary,
}

/// Handle for requests to the thread of a VM's memory, usable from any thread.
#[derive(Clone)]
pub struct MemoryHandle(mpsc::Sender<MemoryRequest>);

enum MemoryRequest {
    State(oneshot::Sender<MemoryState>),
    Limit(MemoryLimits, oneshot::Sender<Result<MemoryState, String>>),
    Detach(oneshot::Sender<Result<(), DetachError>>),
    CancelDetach(oneshot::Sender<bool>),
}

/// Limits of managed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MemoryLimits {
    /// See [`MemoryConfig::budget`]; `None` leaves it unchanged.
    pub budget: Option<ByteLen>,
    /// See [`MemoryConfig::compressed`].
    pub compressed: Option<ByteLen>,
    /// See [`MemoryConfig::range`].
    pub range: Option<BudgetRange>,
}

impl ManagedMemory {
    /// Attaches to the process, and from then on handles its page faults on a thread of its own.
    ///
    /// # Errors
    /// The process cannot be attached to; it is left unchanged then.
    pub fn start(config: MemoryConfig) -> Result<Self, MemoryError> {
        let (sender, inquiries) = mpsc::channel(REQUEST_QUEUE_MAX);
        let (attached_sender, ready) = thread_mpsc::channel();
        let thread = std::thread::Builder::new().name("larder-memory".to_owned());
        let outcome = ThreadResult::spawn(thread, move || run_pager(&config, inquiries, &attached_sender))
            .map_err(MemoryError::Thread)?;
        match ready.recv() {
            Ok(began) => Ok(Self { outcome, handle: MemoryHandle(sender), summary: began }),
            Err(thread_mpsc::RecvError) => match outcome.wait() {
                Some(Err(error)) => Err(error),
                Some(Ok(_)) | None => Err(MemoryError::ThreadDied),
            },
        }
    }

    /// Returns the result of the attach.
    pub fn summary(&self) -> &AttachSummary {
        &self.summary
    }

    /// Returns a handle for requests, usable from any thread.
    pub fn handle(&self) -> MemoryHandle {
        self.handle.clone()
    }

    /// Waits until management ends, and returns the reason.
    ///
    /// # Errors
    /// The thread has died.
    pub fn wait(self) -> Result<PagerExit, MemoryError> {
        self.outcome.wait().unwrap_or(Err(MemoryError::ThreadDied))
    }
}

impl MemoryHandle {
    /// Returns the current state; `None` if management has ended.
    pub async fn state(&self) -> Option<MemoryState> {
        let (reply, reply_receiver) = oneshot::channel();
        self.0.send(MemoryRequest::State(reply)).await.ok()?;
        reply_receiver.await.ok()
    }

    /// Sets limits; returns the state afterwards, or an error message. `None` if management has ended.
    pub async fn limit(&self, limits: MemoryLimits) -> Option<Result<MemoryState, String>> {
        let (reply, answer) = oneshot::channel();
        self.0.send(MemoryRequest::Limit(limits, reply)).await.ok()?;
        answer.await.ok()
    }

    /// Sets limits, for a thread that may block; an error is a message for the user. `None` if management has ended.
    pub fn limit_blocking(&self, limits: MemoryLimits) -> Option<Result<(), String>> {
        let (reply, answer) = oneshot::channel();
        self.0.blocking_send(MemoryRequest::Limit(limits, reply)).ok()?;
        Some(answer.blocking_recv().ok()?.map(|_| ()))
    }

    /// Pages everything in, and detaches from the process; `None` if management has ended.
    pub async fn detach(&self) -> Option<Result<(), DetachError>> {
        let (reply, answer) = oneshot::channel();
        self.0.send(MemoryRequest::Detach(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Cancels a running detach; returns whether there was one. `None` if management has ended.
    pub async fn cancel_detach(&self) -> Option<bool> {
        let (reply, answer) = oneshot::channel();
        self.0.send(MemoryRequest::CancelDetach(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Cancels a running detach, for a thread that may block.
    pub fn cancel_detach_blocking(&self) -> Option<bool> {
        let (reply, answer) = oneshot::channel();
        self.0.blocking_send(MemoryRequest::CancelDetach(reply)).ok()?;
        answer.blocking_recv().ok()
    }

    /// Detaches, for a thread that may block.
    pub fn detach_blocking(&self) -> Option<Result<(), DetachError>> {
        self.start_detach_blocking()()
    }

    /// Starts a detach that precedes all later requests. Returns a function that waits for its end.
    pub fn start_detach_blocking(&self) -> impl FnOnce() -> Option<Result<(), DetachError>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let sent = self.0.blocking_send(MemoryRequest::Detach(reply));
        move || sent.ok().and_then(|()| answer.blocking_recv().ok())
    }
}

/// Returns the default limit of compressed pages. Above a disk, compressed RAM only holds pages that are needed again
/// soon: uncompressed memory helps the guest more, even if the disk takes milliseconds.
fn compressed_default(budget: u64, has_disk: bool) -> u64 {
    match has_disk {
        true => budget / 16,
        false => budget / 2,
    }
}

/// Returns the size of the pager's metadata for memory of `bytes`.
fn metadata_bytes(bytes: u64) -> u64 {
    bytes / larder_memory::units::PAGE_BYTES * pager::OVERHEAD_BYTES_PER_PAGE
}

/// Checks a budget for memory of `bytes`; returns budget and limit of compressed pages.
fn check_budget(
    bytes: u64,
    budget: ByteLen,
    compressed: Option<ByteLen>,
    has_disk: bool,
) -> Result<(u64, u64), BudgetError> {
    let overhead = metadata_bytes(bytes);
    let needed = range::budget_min(bytes);
    if budget.get() < needed {
        return Err(BudgetError::TooSmall {
            budget,
            needed: ByteLen::new(needed.next_multiple_of(1 << 20)),
            bytes: ByteLen::new(bytes),
        });
    }
    let compressed = compressed.map_or(compressed_default(budget.get(), has_disk), ByteLen::get);
    // Some pages must be resident for the guest to make progress.
    if compressed > budget.get() - overhead - BUDGET_MIN.get() / 4 {
        return Err(BudgetError::Compressed { compressed: ByteLen::new(compressed), budget });
    }
    Ok((budget.get(), compressed))
}

fn run_pager(
    config: &MemoryConfig,
    mut requests: mpsc::Receiver<MemoryRequest>,
    report: &thread_mpsc::Sender<AttachSummary>,
) -> Result<PagerExit, MemoryError> {
    let _span = tracing::debug_span!("pager", pid = config.pid.as_raw_pid()).entered();
    tracing::debug!("the process is being examined");
    let on = Loop::new(config.poll_max).map_err(MemoryError::Uring)?;
    on.block_on(async {
        let options = InspectOptions { ram_of: qemu_ram::ram_files, ..InspectOptions::default() };
        let target = Target::inspect(config.pid, &options)?;
        // From here on a pidfd identifies the process.
        if config.started.is_some_and(|started| started != target.start_time()) {
            return Err(TargetError::Ended { pid: config.pid }.into());
        }
        let bytes: u64 = target.ram_mappings.iter().map(|memory| memory.location.bytes).sum();
        let (limit_bytes, compressed_bytes) = check_budget(bytes, config.budget, config.compressed, config.has_disk())?;
        config.range.check(bytes, limit_bytes).map_err(BudgetError::from)?;
        let name = target.name.clone();
        let quarantine = config.quarantine.unwrap_or(match target.uses_direct_io {
            true => QUARANTINE_DEFAULT,
            false => Duration::ZERO,
        });
        let (workers, started) = (target.guest_threads(), target.start_time());
        let found = AttachCandidate::open(target)?;
        let cautions = found.warnings();
        swap::check_distinct(config.swap.as_ref(), config.slow.as_ref())?;
        let owner = swap::SwapOwner { pid: config.pid.as_raw_pid().unsigned_abs(), started };
        let was_managed = found.was_managed();
        let encrypt = found.is_encrypted().unwrap_or(config.encrypt);
        let (mut swaps, mut releases) = (Vec::new(), Vec::new());
        let mut failed = None;
        for (tier, disk) in [(Tier::Ssd, &config.swap), (Tier::Slow, &config.slow)] {
            match swap::open_swap(&on, tier, owner, disk.as_ref(), found.swap(tier), encrypt).await {
                Ok(None) => {}
                Ok(Some(opened)) => {
                    swaps.push(opened.swap);
                    releases.push((opened.release, opened.is_new && !was_managed));
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        tracing::debug!(bytes, was_managed, disks = swaps.len(), "attaching");
        let pager_options = pager::PagerOptions {
            limit_bytes,
            compressed_bytes,
            quarantine,
            priority_thread: u32::try_from(config.pid.as_raw_pid()).ok(),
            prefetch: config.prefetch,
            guest_threads: workers,
        };
        let attached = match failed {
            Some(error) => Err(MemoryError::from(error)),
            None => found.attach(pager_options, swaps, config.encrypt).map_err(MemoryError::from),
        };
        let attached = match attached {
            Ok(attached) => attached,
            Err(error) => {
                for (disk, release_on_failure) in releases {
                    if release_on_failure {
                        disk.release().await;
                    }
                }
                return Err(error);
            }
        };
        // This must come before the process may become non-dumpable, because its files in /proc belong to root then.
        raise_oom_score(config.pid, bytes);
        check_encryption(&attached, config);
        let began = AttachSummary {
            name: name.clone(),
            bytes: ByteLen::new(bytes),
            pause: attached.paused_for,
            warnings: cautions,
        };
        let ledger = detach_ledger_directory();
        let ledger = ledger
            .inspect_err(|error| tracing::debug!("cannot detect other pagers that detach at the same time: {error}"))
            .ok();
        let service = PagerService::start(&on, attached, options, ledger).map_err(MemoryError::Uring)?;
        tracing::debug!("attached; faults are resolved from now on");
        // The starter may have given up; then there are no requests, and management continues.
        let _ = report.send(began);
        let managed = Rc::new(RequestHandler {
            config: config.clone(),
            range: Cell::new(config.range),
            name,
            service: Rc::clone(&service),
        });
        let answering = async {
            while let Some(request) = requests.recv().await {
                managed.handle_request(&on, request);
            }
            std::future::pending().await
        };
        let end = first_of(answering, service.ended()).await;
        tracing::debug!("the disks of evicted pages are being released");
        for (disk, _) in releases {
            disk.release().await;
        }
        Ok(end)
    })
}

/// Makes the OOM killer prefer this process to the one whose memory it manages: no page is lost by the death of a
/// pager, and the next one takes over. This process is not preferred to any other. `bytes` is the size of that
/// process's memory.
fn raise_oom_score(pid: Pid, bytes: u64) {
    let read = |of: &str| -> Option<i64> {
        let text = std::fs::read_to_string(format!("/proc/{of}/oom_score_adj")).ok()?;
        text.trim().parse().ok()
    };
    let total = oom_total_bytes(pid);
    let Some(score) = read(&pid.as_raw_pid().to_string()).and_then(|of| oom_score_above(of, bytes, total)) else {
        return;
    };
    if read("self").is_some_and(|current| current >= score) {
        return;
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", score.to_string()) {
        tracing::warn!("if memory runs out, the kernel may kill the guest before this process: oom_score_adj: {error}");
    }
}

/// Returns the `oom_score_adj` with which a process of any size is killed before one of `bytes` whose own value is
/// `of`: the kernel adds that many thousandths of `total` to the size of each process (proc_pid_oom_score_adj(5)).
/// `None` if that process is exempt.
fn oom_score_above(score: i64, bytes: u64, total: u64) -> Option<i64> {
    const EXEMPT: i64 = -1000;
    const MAX: i64 = 1000;
    // Allowance for QEMU's memory other than its guest's, and for rounding.
    const MARGIN: i64 = 20;
    let size = (u128::from(bytes) * 1000).div_ceil(u128::from(total.max(1)));
    let size = i64::try_from(size).unwrap_or(MAX).min(MAX);
    (score > EXEMPT).then(|| (score + size + MARGIN).min(MAX))
}

/// Returns the memory size that the kernel compares with: the host's, or the smallest control group limit common to
/// both processes.
fn oom_total_bytes(pid: Pid) -> u64 {
    // SAFETY: these calls take no pointers.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let host = u64::try_from(pages).unwrap_or(0) * u64::try_from(page).unwrap_or(0);
    common_cgroup_limit(pid, getpid()).map_or(host, |limit| limit.min(host))
}

/// Keeps the key out of core dumps, and warns if a previous pager's choice about encryption is in effect.
fn check_encryption(attached: &Attached, config: &MemoryConfig) {
    let is_encrypted = attached.is_encrypted();
    if is_encrypted && let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!("if this process crashes, its core dump may contain the key of the data on the disks: {error}");
    }
    let has_disks = config.has_disk();
    if has_disks && is_encrypted != config.encrypt {
        tracing::warn!(
            "data on the disks is {}, as the previous pager was configured; to change that, detach and attach again",
            if is_encrypted { "encrypted" } else { "not encrypted" }
        );
    }
}

/// Managed memory, as seen by the task that answers requests.
struct RequestHandler {
    config: MemoryConfig,
    range: Cell<BudgetRange>,
    name: String,
    service: Rc<PagerService>,
}

impl RequestHandler {
    /// Answers a request. Its sender may have stopped waiting.
    fn handle_request(&self, on: &Loop, inquiry: MemoryRequest) {
        match inquiry {
            MemoryRequest::State(reply) => {
                if let Some(state) = self.state(on) {
                    let _ = reply.send(state);
                }
            }
            MemoryRequest::Limit(limits, reply) => {
                let result = self.limit(limits);
                if let Some(state) = self.state(on) {
                    let _ = reply.send(result.map(|()| state).map_err(|error| error.to_string()));
                }
            }
            // The detach starts at once, so that a request to cancel it, which may be the next one, finds it running.
            MemoryRequest::Detach(reply) => match self.service.begin_detach() {
                Ok(detach) => {
                    let (service, on_loop) = (Rc::clone(&self.service), on.clone());
                    on.spawn(async move {
                        let _ = reply.send(service.detach(&on_loop, detach).await.map(|_| ()));
                    });
                }
                Err(error) => {
                    let _ = reply.send(Err(error));
                }
            },
            MemoryRequest::CancelDetach(reply) => {
                let _ = reply.send(self.service.cancel_detach());
            }
        }
    }

    fn state(&self, on: &Loop) -> Option<MemoryState> {
        let status = self.service.status()?;
        let pid = self.config.pid.as_raw_pid();
        let (time_ns, range) = (on.now().as_nanos(), self.range.get());
        Some(MemoryState::new(&self.name, pid, time_ns, &range, &status))
    }

    fn limit(&self, limits: MemoryLimits) -> Result<(), BudgetError> {
        let Some(status) = self.service.status() else {
            return Ok(());
        };
        if status.detaching {
            return Err(BudgetError::Detaching);
        }
        let budget = limits.budget.unwrap_or(ByteLen::new(status.limit_bytes));
        // A default share remains the default share.
        let has_disk = self.config.has_disk();
        let is_default = status.compressed_limit_bytes == compressed_default(status.limit_bytes, has_disk);
        let compressed = limits.compressed.or((!is_default).then(|| ByteLen::new(status.compressed_limit_bytes)));
        let (limit, compressed) = check_budget(status.bytes, budget, compressed, has_disk)?;
        let range = limits.range.unwrap_or(self.range.get());
        range.check(status.bytes, limit)?;
        self.range.set(range);
        self.service.set_limit(limit, compressed);
        tracing::info!(budget = %ByteLen::new(limit), compressed = %ByteLen::new(compressed), "limits changed");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn oom_killer_chooses_pager_before_guest() {
        const GIB: u64 = 1 << 30;
        for (of, bytes, expected) in [
            (0, 4 * GIB, Some(270)),
            (-500, 4 * GIB, Some(-230)),
            (300, 16 * GIB, Some(1000)),
            (0, u64::MAX, Some(1000)),
            (-1000, 4 * GIB, None),
        ] {
            assert_eq!(oom_score_above(of, bytes, 16 * GIB), expected, "{of} {bytes}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_parsers(start: bool, data: Vec<u8>, budget: u64, compressed: u64) {
            fuzz_parse(&data);
            let start: &[u8] = if start { b"LRDRSWAP\x01\0\0\0" } else { b"LRDRSWAP" };
            fuzz_parse(&[start, &data].concat());
            fuzz_parse(format!("{{\"budget\":{budget},\"compressed\":{compressed}}}").as_bytes());
        }
    }
}
