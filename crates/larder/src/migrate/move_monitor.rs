//! A move's state on its control socket, and the commands that change or cancel the move.

use std::path::{Path, absolute};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use larder_codec::batch::Method;
use larder_codec::select::{BatchEncoding, ExpectedResult};
use larder_migrate::limits::{Limits, SharedLimits};
use larder_migrate::moving::destination::{DestinationMover, IncomingStage};
use larder_migrate::moving::watch::MigrationReport;
use larder_migrate::progress::{LinkState, SelectorChoice, SenderProgress, SenderTotals};
use larder_migrate::receive::{self, Delivered};
use larder_vm::control::migration::{
    DeliveredState, Direction, MethodChoiceState, MethodCostState, MethodState, MigrationControl, MigrationLimits,
    MigrationPatch, MigrationPhase, MigrationProgressState, MigrationState, MoveLinkState, MoveRates, PageClassState,
    SentState,
};
use larder_vm::control::{ControlError, ControlServer, Subject};
use larder_vm::listen::SocketFile;
use larder_vm::vm::find::{create_migration_control_directory, migration_sockets};

/// A client that has asked within this time watches the move, and should get its final state.
const WATCHER_WINDOW: Duration = Duration::from_secs(3);
/// Maximum time that the process waits for a watcher to get the final state.
const FINAL_STATUS_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval at which this wait is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Age from which a killed process's socket is removed.
const STALE_SOCKET_AGE: Duration = Duration::from_secs(600);
/// Interval at which the progress is sampled.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Averaging window of the incoming rates.
const RATE_WINDOW: Duration = Duration::from_secs(1);

/// Direction and sources of a move's state.
pub(super) enum MoveSource {
    /// The VM is sent from this host.
    Sent {
        progress: Arc<SenderProgress>,
        limits: Arc<SharedLimits>,
        /// This process also controls QEMU.
        controls_qemu: bool,
    },
    /// The VM is received on this host.
    Received {
        incoming: Arc<receive::ReceiverProgress>,
        /// Controller of QEMU; `None` if this process only carries the stream.
        destination: Option<Arc<DestinationMover>>,
    },
}

/// A move whose state can be queried.
pub(super) struct MoveMonitor {
    vm: String,
    qemu: String,
    peer: Option<String>,
    source: MoveSource,
    cancel: Box<dyn Fn() + Send + Sync>,
    started: (Instant, SystemTime),
    state: Mutex<MonitoredState>,
}

struct MonitoredState {
    phase: MigrationPhase,
    reason: Option<String>,
    location: Option<&'static str>,
    report: Option<MigrationReport>,
    /// Recent samples of the delivered bytes.
    delivered_samples: Vec<(Instant, Delivered)>,
    /// Time of the last query.
    last_query: Option<Instant>,
    /// A client has got the final state.
    is_final_sent: bool,
}

impl MoveMonitor {
    /// Creates the state of a move of the QEMU at `qemu`. The VM is named after the file `vm`, or else after the
    /// socket `qemu`.
    pub(super) fn new(
        vm: Option<&Path>,
        qemu: &Path,
        peer: Option<&str>,
        moved: MoveSource,
        cancel: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        let name = |path: &Path| path.file_stem().map(|name| name.to_string_lossy().into_owned());
        Arc::new(Self {
            vm: vm.and_then(name).or_else(|| name(qemu)).unwrap_or_default(),
            // Clients that look for this path have other working directories.
            qemu: absolute(qemu).unwrap_or_else(|_| qemu.to_owned()).display().to_string(),
            peer: peer.map(str::to_owned),
            source: moved,
            cancel: Box::new(cancel),
            started: (Instant::now(), SystemTime::now()),
            state: Mutex::new(MonitoredState {
                phase: MigrationPhase::Preparing,
                reason: None,
                location: None,
                report: None,
                delivered_samples: Vec::new(),
                last_query: None,
                is_final_sent: false,
            }),
        })
    }

    /// Listens at `control`, or by default where watchers look; there, a failure only logs a warning, and does not
    /// stop the move.
    ///
    /// # Errors
    /// The socket at `control` cannot be created.
    pub(super) fn listen(self: &Arc<Self>, control: Option<&Path>) -> Result<Option<ControlServer>, ControlError> {
        let direction = self.direction();
        let handle: Arc<dyn MigrationControl> = Arc::<Self>::clone(self);
        let subject = Arc::new(Subject::migration(&self.vm, handle));
        if let Some(path) = control {
            return ControlServer::start(path, subject).map(Some);
        }
        for (_, _, path) in migration_sockets() {
            SocketFile::remove_stale(&path, STALE_SOCKET_AGE);
        }
        let listen = |name: &str| {
            let path = create_migration_control_directory(name, direction).map_err(|error| error.to_string())?;
            ControlServer::start(&path, Arc::clone(&subject)).map_err(|error| error.to_string())
        };
        // Another QEMU's socket, in another directory, may have the same name.
        let with_pid = || listen(&format!("{}.{}", self.vm, std::process::id()));
        let started = listen(&self.vm).or_else(|_| with_pid());
        Ok(started
            .inspect_err(|error| {
                tracing::warn!("the move has no control socket, so its state cannot be queried: {error}")
            })
            .ok())
    }

    /// Updates the state from a progress report.
    pub(super) fn update(&self, report: &MigrationReport) {
        let mut now = self.lock();
        now.phase = match report.status.as_str() {
            status if status.starts_with("postcopy") => MigrationPhase::PostCopy,
            "device" | "pre-switchover" | "completed" => MigrationPhase::HandingOver,
            // QEMU does not answer in time, so the phase is unknown and stays.
            "late" => now.phase,
            // QEMU is not queried.
            "none" if report.totals.raw_bytes == 0 => now.phase,
            _ => MigrationPhase::Moving,
        };
        now.report = Some(report.clone());
    }

    /// Calls `see` periodically while `done` runs.
    pub(super) fn run_with_sampling<T>(see: impl FnMut() + Send, done: impl FnOnce() -> T) -> T {
        let ended = AtomicBool::new(false);
        let mut see = see;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    see();
                    std::thread::sleep(SAMPLE_INTERVAL);
                }
            });
            let result = done();
            ended.store(true, Ordering::Relaxed);
            result
        })
    }

    /// Samples the delivered bytes.
    pub(super) fn sample_delivered(&self) {
        let MoveSource::Received { incoming: watched, .. } = &self.source else {
            return;
        };
        let mut now = self.lock();
        let at = Instant::now();
        now.delivered_samples.push((at, watched.delivered()));
        now.delivered_samples.retain(|(then, _)| at - *then <= RATE_WINDOW);
    }

    /// Records the end of the move: the error if it failed, and where the VM is.
    pub(super) fn finish(&self, failed: Option<String>, place: Option<&'static str>) {
        let mut now = self.lock();
        now.phase = match failed {
            None => MigrationPhase::Done,
            Some(_) => MigrationPhase::Failed,
        };
        (now.reason, now.location) = (failed, place);
    }

    /// Waits until a watcher, if there is one, has got the final state.
    pub(super) fn wait_for_watchers(&self) {
        let since = Instant::now();
        while since.elapsed() < FINAL_STATUS_TIMEOUT {
            let now = self.lock();
            if now.is_final_sent
                || now.last_query.is_none_or(|asked| asked.elapsed() > WATCHER_WINDOW + FINAL_STATUS_TIMEOUT)
            {
                return;
            }
            drop(now);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    const fn direction(&self) -> Direction {
        match self.source {
            MoveSource::Sent { .. } => Direction::Leaving,
            MoveSource::Received { .. } => Direction::Coming,
        }
    }

    fn lock(&self) -> MutexGuard<'_, MonitoredState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn base_state(&self, now: &MonitoredState) -> MigrationState {
        let started = self.started.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        MigrationState {
            vm: self.vm.clone(),
            direction: self.direction(),
            qemu: self.qemu.clone(),
            peer: self.peer.clone(),
            phase: now.phase,
            reason: now.reason.clone(),
            place: now.location.map(str::to_owned),
            time_ns: u64::try_from(self.started.0.elapsed().as_nanos()).unwrap_or(u64::MAX),
            started_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
            ..MigrationState::default()
        }
    }
}

impl MigrationControl for MoveMonitor {
    fn state(&self) -> MigrationState {
        let mut now = self.lock();
        now.last_query = Some(Instant::now());
        now.is_final_sent = now.phase.has_ended();
        let base = self.base_state(&now);
        match &self.source {
            MoveSource::Received { incoming: watched, destination } => {
                let delivered = watched.delivered();
                let stage = destination.as_ref().map(|destination| destination.stage());
                MigrationState {
                    whole: destination.is_some(),
                    phase: match (base.phase, stage) {
                        (phase, _) if phase.has_ended() => phase,
                        (_, Some(IncomingStage::PostCopy)) => MigrationPhase::PostCopy,
                        (_, Some(IncomingStage::HandingOver)) => MigrationPhase::HandingOver,
                        _ if delivered.raw > 0 => MigrationPhase::Moving,
                        (phase, _) => phase,
                    },
                    peer: watched.peer().map(|peer| peer.to_string()),
                    rates: incoming_rates(&now.delivered_samples),
                    delivered: Some(delivered_state(&delivered)),
                    link: link_state(&watched.link()),
                    ..base
                }
            }
            MoveSource::Sent { progress, limits, controls_qemu: whole } => {
                let report = now.report.as_ref();
                MigrationState {
                    whole: *whole,
                    course: report.filter(|_| *whole).map(progress_state),
                    rates: report.map(outgoing_rates),
                    sent: Some(sent_state(&progress.totals())),
                    limits: Some(limits_state(&limits.get(), *whole)),
                    evidence: Some(method_choice_state(&progress.choice())),
                    downtime_ms: report.and_then(|report| report.downtime_ms),
                    link: link_state(&progress.link()),
                    ..base
                }
            }
        }
    }

    fn limit(&self, patch: &MigrationPatch) -> Result<(), String> {
        let MoveSource::Sent { limits, controls_qemu: whole, .. } = &self.source else {
            return Err("the source enforces the limits: set them on the host that the VM comes from".to_owned());
        };
        if !whole && (patch.downtime_ms.is_some() || patch.timeout_s.is_some()) {
            return Err(
                "this process only carries the migration, and cannot limit its downtime or duration: set these limits in QEMU"
                    .to_owned(),
            );
        }
        let now = limits.update(|limits| {
            if let Some(rate) = patch.bandwidth {
                limits.bandwidth = (rate > 0).then_some(rate);
            }
            if let Some(processors) = patch.processors {
                limits.processors = (processors > 0.0).then_some(processors);
            }
            if let Some(downtime) = patch.downtime_ms {
                limits.downtime_ms = downtime;
            }
            if let Some(seconds) = patch.timeout_s {
                limits.timeout = (seconds > 0).then(|| Duration::from_secs(seconds));
            }
        });
        tracing::info!("limits changed: {}", format_limits(&limits_state(&now, *whole)));
        Ok(())
    }

    fn cancel(&self) {
        tracing::info!("cancelled over the control socket");
        (self.cancel)();
    }
}

/// Returns a function that cancels the move by setting a flag.
pub(super) fn cancel_by_flag(flag: &Arc<AtomicBool>) -> impl Fn() + Send + Sync + 'static {
    let flag = Arc::clone(flag);
    move || flag.store(true, Ordering::Relaxed)
}

/// Formats limits, for people.
pub(super) fn format_limits(limits: &MigrationLimits) -> String {
    let mut all = Vec::new();
    if let Some(rate) = limits.bandwidth {
        all.push(format!("{}/s on the link", crate::disk_image::format_size(rate)));
    }
    if let Some(processors) = limits.processors {
        all.push(format!("{processors} CPUs"));
    }
    if let Some(downtime) = limits.downtime_ms {
        all.push(format!("a downtime of {downtime} ms"));
    }
    if let Some(seconds) = limits.timeout_s {
        all.push(format!("{seconds} s in all"));
    }
    match all.is_empty() {
        true => "none".to_owned(),
        false => all.join(", "),
    }
}

/// Converts limits to their API form.
pub(super) fn limits_state(limits: &Limits, whole: bool) -> MigrationLimits {
    MigrationLimits {
        bandwidth: limits.bandwidth,
        processors: limits.processors,
        downtime_ms: whole.then_some(limits.downtime_ms),
        timeout_s: limits.timeout.map(|timeout| timeout.as_secs()),
    }
}

fn progress_state(report: &MigrationReport) -> MigrationProgressState {
    MigrationProgressState {
        seconds: report.seconds,
        round: report.round,
        total_bytes: report.total_bytes,
        remaining_bytes: report.remaining_bytes,
        dirty_bytes_per_s: report.dirty_bytes_per_s,
        expected_seconds: report.expected_seconds,
        expected_downtime_ms: report.expected_downtime_ms,
        verdict: report.verdict.clone(),
    }
}

fn link_state(link: &LinkState) -> MoveLinkState {
    MoveLinkState { losses: link.losses, lost_seconds: link.lost_since.map(|lost| lost.elapsed().as_secs_f64()) }
}

fn outgoing_rates(report: &MigrationReport) -> MoveRates {
    MoveRates {
        stream_bytes_per_s: report.stream_bytes_per_s,
        wire_bytes_per_s: report.wire_bytes_per_s,
        processors: report.processors,
        encoding: report.encoding,
        waiting: Some(report.waiting),
    }
}

/// Returns the incoming rates per second; `None` before there are two samples.
fn incoming_rates(samples: &[(Instant, Delivered)]) -> Option<MoveRates> {
    let ((since, first), (at, last)) = (samples.first()?, samples.last()?);
    let seconds = (*at - *since).as_secs_f64();
    let per_second = |now: u64, then: u64| (now - then) as f64 / seconds;
    (seconds > 0.0).then(|| MoveRates {
        stream_bytes_per_s: per_second(last.raw, first.raw) as u64,
        wire_bytes_per_s: per_second(last.wire, first.wire) as u64,
        processors: per_second(last.cpu_ns, first.cpu_ns) / 1e9,
        encoding: per_second(last.decode_cpu_ns, first.decode_cpu_ns) / 1e9,
        waiting: None,
    })
}

/// Converts the counters of delivered data to their API form.
pub(super) fn delivered_state(delivered: &Delivered) -> DeliveredState {
    DeliveredState {
        raw_bytes: delivered.raw,
        wire_bytes: delivered.wire,
        frames: delivered.frames,
        cpu_seconds: delivered.cpu_ns as f64 / 1e9,
        decode_cpu_seconds: delivered.decode_cpu_ns as f64 / 1e9,
    }
}

/// Converts the counters of sent data and pages to their API form.
pub(super) fn sent_state(totals: &SenderTotals) -> SentState {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let method_state = |method: &str, pages: u64, bytes: u64| MethodState { method: method.to_owned(), pages, bytes };
    let mut methods = vec![
        method_state("zero", totals.zero_pages, 0),
        method_state("same", totals.same_pages, 0),
        method_state("delta", totals.delta_pages, totals.delta_bytes),
    ];
    for method in Method::ALL {
        let (pages, bytes) = (totals.encoded_pages[method.index()], totals.encoded_bytes[method.index()]);
        methods.push(method_state(method.name(), pages, bytes));
    }
    let page = larder_codec::PAGE as u64;
    methods.push(method_state("plain", totals.plain_pages, totals.plain_pages * page));
    SentState {
        raw_bytes: totals.raw_bytes,
        wire_bytes: totals.wire_bytes,
        delivered_bytes: totals.delivered_bytes,
        frames: totals.frames,
        cpu_seconds: seconds(totals.cpu_ns),
        encode_cpu_seconds: seconds(totals.encode_cpu_ns),
        encode_seconds: seconds(totals.encode_ns),
        write_seconds: seconds(totals.write_ns),
        methods,
        device_pages: totals.device_pages,
    }
}

/// Converts the choice of methods, with its evidence, to its API form.
pub(super) fn method_choice_state(choice: &SelectorChoice) -> MethodChoiceState {
    let name = |way: Option<BatchEncoding>| way.map_or("plain", BatchEncoding::name).to_owned();
    let offer = |offer: &ExpectedResult| MethodCostState {
        method: name(offer.encoding),
        ratio: larder_codec::PAGE as f64 / f64::from(offer.bytes.max(1.0)),
        ns: offer.ns.into(),
        cost_ns: offer.cost_ns.into(),
    };
    let classes = choice.classes.iter().map(|chosen| PageClassState {
        class: chosen.class.describe(),
        batches: chosen.batches.into(),
        method: name(chosen.encoding),
        offers: chosen.expected_results.iter().map(offer).collect(),
    });
    MethodChoiceState { ns_per_byte: choice.ns_per_byte.into(), classes: classes.collect() }
}
