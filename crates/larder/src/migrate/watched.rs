//! A move as its control socket tells of it, and how it is told to do otherwise.

use std::path::{Path, absolute};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use larder_codec::batch::Method;
use larder_codec::select::{Offer, Way};
use larder_migrate::limits::{InForce, Limits};
use larder_migrate::moving::destination::{Destination, Stage};
use larder_migrate::moving::watch::Report;
use larder_migrate::progress::{Choice, LinkState, Progress, Totals};
use larder_migrate::receive::{self, Delivered};
use larder_vm::control::migration::{
    ClassState, CourseState, DeliveredState, Direction, EvidenceState, MethodState, Migration, MigrationLimits,
    MigrationPatch, MigrationPhase, MigrationState, MoveLinkState, MoveRates, OfferState, SentState,
};
use larder_vm::control::{ControlError, ControlServer, Subject};
use larder_vm::listen::SocketFile;
use larder_vm::vm::find::{make_migration_control, moves};

/// Whoever has asked within so long watches, and is to hear how it ended.
const WATCHES: Duration = Duration::from_secs(3);
/// How long that is waited for, at most.
const HEARS_IN: Duration = Duration::from_millis(1500);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// A socket that is older, of a process that was killed, is removed.
const DEAD_KEPT: Duration = Duration::from_secs(600);
/// Between two looks at how it goes.
const SEE_EVERY: Duration = Duration::from_millis(100);
/// Rates of what comes are averages over this long.
const RATE_OVER: Duration = Duration::from_secs(1);

/// What moves.
pub(super) enum Moved {
    /// It is sent from here.
    Sent {
        progress: Arc<Progress>,
        limits: Arc<InForce>,
        /// QEMU is looked after, too.
        whole: bool,
    },
    /// It comes.
    Received {
        watched: Arc<receive::Watched>,
        /// Who looks after QEMU, too.
        destination: Option<Arc<Destination>>,
    },
}

/// A move that can be watched.
pub(super) struct Watched {
    vm: String,
    qemu: String,
    peer: Option<String>,
    moved: Moved,
    cancel: Box<dyn Fn() + Send + Sync>,
    begun: (Instant, SystemTime),
    now: Mutex<Now>,
}

struct Now {
    phase: MigrationPhase,
    reason: Option<String>,
    place: Option<&'static str>,
    report: Option<Report>,
    /// What has come, over the last while.
    came: Vec<(Instant, Delivered)>,
    /// When somebody has asked last.
    asked: Option<Instant>,
    /// Somebody was told how it ended.
    is_told: bool,
}

impl Watched {
    /// Of a VM whose QEMU is at `qemu`, and that is called so, or as that socket.
    pub(super) fn new(
        vm: Option<&Path>,
        qemu: &Path,
        peer: Option<&str>,
        moved: Moved,
        cancel: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        let name = |path: &Path| path.file_stem().map(|name| name.to_string_lossy().into_owned());
        Arc::new(Self {
            vm: vm.and_then(name).or_else(|| name(qemu)).unwrap_or_default(),
            // Others that look for it are elsewhere.
            qemu: absolute(qemu).unwrap_or_else(|_| qemu.to_owned()).display().to_string(),
            peer: peer.map(str::to_owned),
            moved,
            cancel: Box::new(cancel),
            begun: (Instant::now(), SystemTime::now()),
            now: Mutex::new(Now {
                phase: MigrationPhase::Preparing,
                reason: None,
                place: None,
                report: None,
                came: Vec::new(),
                asked: None,
                is_told: false,
            }),
        })
    }

    /// Listens at `control`, or where those who watch look; a move is not refused because nobody can watch it there.
    ///
    /// # Errors
    /// It cannot at `control`.
    pub(super) fn listen(self: &Arc<Self>, control: Option<&Path>) -> Result<Option<ControlServer>, ControlError> {
        let direction = self.direction();
        let inquiry: Arc<dyn Migration> = Arc::<Self>::clone(self);
        let subject = Arc::new(Subject::migration(&self.vm, inquiry));
        if let Some(path) = control {
            return ControlServer::start(path, subject).map(Some);
        }
        for (_, _, path) in moves() {
            SocketFile::remove_dead(&path, DEAD_KEPT);
        }
        let listen = |name: &str| {
            let path = make_migration_control(name, direction).map_err(|error| error.to_string())?;
            ControlServer::start(&path, Arc::clone(&subject)).map_err(|error| error.to_string())
        };
        // Another QEMU's socket may be called the same, elsewhere.
        let beside = || listen(&format!("{}.{}", self.vm, std::process::id()));
        let started = listen(&self.vm).or_else(|_| beside());
        Ok(started
            .inspect_err(|error| tracing::warn!("nobody can watch this move: {error}"))
            .ok())
    }

    /// How it goes.
    pub(super) fn see(&self, report: &Report) {
        let mut now = self.lock();
        now.phase = match report.status.as_str() {
            status if status.starts_with("postcopy") => MigrationPhase::PostCopy,
            "device" | "pre-switchover" | "completed" => MigrationPhase::HandingOver,
            // Of one that does not answer nothing new is known.
            "late" => now.phase,
            // Nobody asks QEMU.
            "none" if report.totals.raw_bytes == 0 => now.phase,
            _ => MigrationPhase::Moving,
        };
        now.report = Some(report.clone());
    }

    /// Looks again and again at how it goes while something is done.
    pub(super) fn while_seen<T>(see: impl FnMut() + Send, done: impl FnOnce() -> T) -> T {
        let ended = AtomicBool::new(false);
        let mut see = see;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    see();
                    std::thread::sleep(SEE_EVERY);
                }
            });
            let result = done();
            ended.store(true, Ordering::Relaxed);
            result
        })
    }

    /// How much has come.
    pub(super) fn see_what_came(&self) {
        let Moved::Received { watched, .. } = &self.moved else {
            return;
        };
        let mut now = self.lock();
        let at = Instant::now();
        now.came.push((at, watched.delivered()));
        now.came.retain(|(then, _)| at - *then <= RATE_OVER);
    }

    /// It is over: why it has failed, if it has, and where the VM is.
    pub(super) fn is_over(&self, failed: Option<String>, place: Option<&'static str>) {
        let mut now = self.lock();
        now.phase = match failed {
            None => MigrationPhase::Done,
            Some(_) => MigrationPhase::Failed,
        };
        (now.reason, now.place) = (failed, place);
    }

    /// Waits until those who watch have heard how it ended, if there are any.
    pub(super) fn is_heard(&self) {
        let since = Instant::now();
        while since.elapsed() < HEARS_IN {
            let now = self.lock();
            if now.is_told || now.asked.is_none_or(|asked| asked.elapsed() > WATCHES + HEARS_IN) {
                return;
            }
            drop(now);
            std::thread::sleep(LOOK_EVERY);
        }
    }

    const fn direction(&self) -> Direction {
        match self.moved {
            Moved::Sent { .. } => Direction::Leaving,
            Moved::Received { .. } => Direction::Coming,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn base(&self, now: &Now) -> MigrationState {
        let started = self.begun.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        MigrationState {
            vm: self.vm.clone(),
            direction: self.direction(),
            qemu: self.qemu.clone(),
            peer: self.peer.clone(),
            phase: now.phase,
            reason: now.reason.clone(),
            place: now.place.map(str::to_owned),
            time_ns: u64::try_from(self.begun.0.elapsed().as_nanos()).unwrap_or(u64::MAX),
            started_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
            ..MigrationState::default()
        }
    }
}

impl Migration for Watched {
    fn state(&self) -> MigrationState {
        let mut now = self.lock();
        now.asked = Some(Instant::now());
        now.is_told = now.phase.is_over();
        let base = self.base(&now);
        match &self.moved {
            Moved::Received { watched, destination } => {
                let delivered = watched.delivered();
                let stage = destination.as_ref().map(|destination| destination.stage());
                MigrationState {
                    whole: destination.is_some(),
                    phase: match (base.phase, stage) {
                        (phase, _) if phase.is_over() => phase,
                        (_, Some(Stage::PostCopy)) => MigrationPhase::PostCopy,
                        (_, Some(Stage::HandingOver)) => MigrationPhase::HandingOver,
                        _ if delivered.raw > 0 => MigrationPhase::Moving,
                        (phase, _) => phase,
                    },
                    peer: watched.peer().map(|peer| peer.to_string()),
                    rates: rates_of_what_came(&now.came),
                    delivered: Some(delivered_state(&delivered)),
                    link: link_state(&watched.link()),
                    ..base
                }
            }
            Moved::Sent {
                progress,
                limits,
                whole,
            } => {
                let report = now.report.as_ref();
                MigrationState {
                    whole: *whole,
                    course: report.filter(|_| *whole).map(course_state),
                    rates: report.map(rates_of),
                    sent: Some(sent_state(&progress.totals())),
                    limits: Some(limits_state(&limits.now(), *whole)),
                    evidence: Some(evidence_state(&progress.choice())),
                    downtime_ms: report.and_then(|report| report.downtime_ms),
                    link: link_state(&progress.link()),
                    ..base
                }
            }
        }
    }

    fn limit(&self, patch: &MigrationPatch) -> Result<(), String> {
        let Moved::Sent { limits, whole, .. } = &self.moved else {
            return Err("the limits are the source's: say it on the host that the VM comes from".to_owned());
        };
        if !whole && (patch.downtime_ms.is_some() || patch.timeout_s.is_some()) {
            return Err(
                "downtime and time are not this process's, which carries the migration and does nothing else: tell QEMU"
                    .to_owned(),
            );
        }
        let now = limits.change(|limits| {
            if let Some(rate) = patch.bandwidth {
                limits.bandwidth = (rate > 0).then_some(rate);
            }
            if let Some(most) = patch.processors {
                limits.processors = (most > 0.0).then_some(most);
            }
            if let Some(downtime) = patch.downtime_ms {
                limits.downtime_ms = downtime;
            }
            if let Some(seconds) = patch.timeout_s {
                limits.timeout = (seconds > 0).then(|| Duration::from_secs(seconds));
            }
        });
        tracing::info!("other limits from now on: {}", limits_text(&limits_state(&now, *whole)));
        Ok(())
    }

    fn cancel(&self) {
        tracing::info!("cancelled over the control socket");
        (self.cancel)();
    }
}

/// Cancels by a flag.
pub(super) fn by(flag: &Arc<AtomicBool>) -> impl Fn() + Send + Sync + 'static {
    let flag = Arc::clone(flag);
    move || flag.store(true, Ordering::Relaxed)
}

/// Limits, for people.
pub(super) fn limits_text(limits: &MigrationLimits) -> String {
    let mut all = Vec::new();
    if let Some(rate) = limits.bandwidth {
        all.push(format!("{}/s on the link", crate::disk_image::human(rate)));
    }
    if let Some(most) = limits.processors {
        all.push(format!("{most} CPUs"));
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

/// Limits, as they are told.
pub(super) fn limits_state(limits: &Limits, whole: bool) -> MigrationLimits {
    MigrationLimits {
        bandwidth: limits.bandwidth,
        processors: limits.processors,
        downtime_ms: whole.then_some(limits.downtime_ms),
        timeout_s: limits.timeout.map(|timeout| timeout.as_secs()),
    }
}

fn course_state(report: &Report) -> CourseState {
    CourseState {
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
    MoveLinkState {
        losses: link.losses,
        lost_seconds: link.lost.map(|lost| lost.elapsed().as_secs_f64()),
    }
}

fn rates_of(report: &Report) -> MoveRates {
    MoveRates {
        stream_bytes_per_s: report.stream_bytes_per_s,
        wire_bytes_per_s: report.wire_bytes_per_s,
        processors: report.processors,
        encoding: report.encoding,
        waiting: Some(report.waiting),
    }
}

/// What comes in a second; `None` before there is anything to tell it by.
fn rates_of_what_came(came: &[(Instant, Delivered)]) -> Option<MoveRates> {
    let ((since, first), (at, last)) = (came.first()?, came.last()?);
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

/// What has come.
pub(super) fn delivered_state(delivered: &Delivered) -> DeliveredState {
    DeliveredState {
        raw_bytes: delivered.raw,
        wire_bytes: delivered.wire,
        frames: delivered.frames,
        cpu_seconds: delivered.cpu_ns as f64 / 1e9,
        decode_cpu_seconds: delivered.decode_cpu_ns as f64 / 1e9,
    }
}

/// Sums, and how pages went.
pub(super) fn sent_state(totals: &Totals) -> SentState {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let way = |method: &str, pages: u64, bytes: u64| MethodState {
        method: method.to_owned(),
        pages,
        bytes,
    };
    let mut methods = vec![
        way("zero", totals.zero_pages, 0),
        way("same", totals.same_pages, 0),
        way("delta", totals.delta_pages, totals.delta_bytes),
    ];
    for method in Method::ALL {
        let (pages, bytes) = (
            totals.encoded_pages[method.index()],
            totals.encoded_bytes[method.index()],
        );
        methods.push(way(method.name(), pages, bytes));
    }
    let page = larder_codec::PAGE as u64;
    methods.push(way("plain", totals.plain_pages, totals.plain_pages * page));
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

/// Which methods are picked, and why.
pub(super) fn evidence_state(choice: &Choice) -> EvidenceState {
    let name = |way: Option<Way>| way.map_or("plain", Way::name).to_owned();
    let offer = |offer: &Offer| OfferState {
        method: name(offer.way),
        ratio: larder_codec::PAGE as f64 / f64::from(offer.bytes.max(1.0)),
        ns: offer.ns.into(),
        cost_ns: offer.cost_ns.into(),
    };
    let classes = choice.classes.iter().map(|chosen| ClassState {
        class: chosen.class.words(),
        batches: chosen.batches.into(),
        method: name(chosen.way),
        offers: chosen.offers.iter().map(offer).collect(),
    });
    EvidenceState {
        ns_per_byte: choice.ns_per_byte.into(),
        classes: classes.collect(),
    }
}
