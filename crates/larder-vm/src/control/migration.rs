//! What the control socket tells of a VM that is moved, and is told to do with it. Sizes are in bytes. What has been sent or
//! delivered counts from when the process began.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A process that moves a VM, as far as its control socket has to do with it. Each call answers at once.
pub trait Migration: Send + Sync {
    /// How it is.
    fn state(&self) -> MigrationState;

    /// Changes limits that are in force from then on.
    ///
    /// # Errors
    /// This end has none, or they make no sense; the text says so.
    fn limit(&self, patch: &MigrationPatch) -> Result<(), String>;

    /// Does what SIGINT does: the VM stays where it is, as long as that can be.
    fn cancel(&self);
}

/// Asks, from any thread.
pub type MigrationInquiry = Arc<dyn Migration>;

/// The answer to `GET /v1/migration`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationState {
    /// The VM's name; where that is not known, what the socket of its QEMU is called.
    pub vm: String,
    /// Whether the VM leaves this host, or comes to it.
    pub direction: Direction,
    /// The socket of the QEMU here: its monitor, or that over which its migration goes.
    pub qemu: String,
    /// Whether Larder looks after both QEMUs (`larder migrate`), or carries what goes between them and does nothing else
    /// (`larder migrate send`).
    pub whole: bool,
    /// The other end: where it goes to, or comes from, if that is known.
    pub peer: Option<String>,
    /// How far it is.
    pub phase: MigrationPhase,
    /// Why it has failed, for people.
    pub reason: Option<String>,
    /// Where the VM is, once that is over: `here`, `there`, `in doubt`, `between`, `lost` or `unknown`.
    pub place: Option<String>,
    /// When all this was so: the time since the process began, in nanoseconds.
    pub time_ns: u64,
    /// When the process began, in milliseconds since 1970 (UTC).
    pub started_ms: u64,
    /// What QEMU says of it; `null` on the side where it comes to, or where nobody asks.
    pub course: Option<CourseState>,
    /// What goes over in a second.
    pub rates: Option<MoveRates>,
    /// What was sent; `null` on the side where it comes to.
    pub sent: Option<SentState>,
    /// What was handed to QEMU; `null` on the side where it comes from.
    pub delivered: Option<DeliveredState>,
    /// Those in force; `null` on the side where it comes to.
    pub limits: Option<MigrationLimits>,
    /// Which methods are picked, and why; `null` on the side where it comes to.
    pub evidence: Option<EvidenceState>,
    /// For how long the guest stood still, in milliseconds, if that has been and is known.
    pub downtime_ms: Option<u64>,
    /// The connections between the hosts.
    pub link: MoveLinkState,
}

/// The connections between the hosts of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveLinkState {
    /// How often they were lost.
    pub losses: u64,
    /// For how long they have been lost now, in seconds; `null` while they are there. It is tried to make them again.
    pub lost_seconds: Option<f64>,
}

/// Which way a VM goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// To another host.
    #[default]
    Leaving,
    /// From another host.
    Coming,
}

impl Direction {
    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Leaving => "leaving",
            Self::Coming => "coming",
        }
    }
}

/// How far a move is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationPhase {
    /// Both QEMUs are compared and set, or the other end is waited for; nothing has moved.
    #[default]
    Preparing,
    /// Memory goes over; the guest runs at the source.
    Moving,
    /// The guest runs at the destination, and some of its memory is still to come.
    PostCopy,
    /// All is over there, or as good as; the guest stands still.
    HandingOver,
    /// It is over, and well.
    Done,
    /// It is over.
    Failed,
}

impl MigrationPhase {
    /// All there are.
    pub const ALL: [Self; 6] = [
        Self::Preparing,
        Self::Moving,
        Self::PostCopy,
        Self::HandingOver,
        Self::Done,
        Self::Failed,
    ];

    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Moving => "moving",
            Self::PostCopy => "post-copy",
            Self::HandingOver => "handing-over",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    /// Nothing will happen any more.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }
}

/// What QEMU says of its migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CourseState {
    /// Since QEMU began, in seconds.
    pub seconds: f64,
    /// From 1 on; the first sends all memory.
    pub round: u64,
    /// All of the memory.
    pub total_bytes: u64,
    /// What of it is still to be sent in this round.
    pub remaining_bytes: u64,
    /// What the guest changes of it in a second, as QEMU saw it in the round before.
    pub dirty_bytes_per_s: u64,
    /// In seconds, if it goes on so.
    pub expected_seconds: Option<f64>,
    /// How long the guest would stand still now, in milliseconds, as QEMU expects it.
    pub expected_downtime_ms: Option<u64>,
    /// Why it will not end at this rate, and what can be done; `null` as long as it may.
    pub verdict: Option<String>,
}

/// What goes over in a second, over the last one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveRates {
    /// Bytes of QEMU's stream.
    pub stream_bytes_per_s: u64,
    /// Bytes on the link.
    pub wire_bytes_per_s: u64,
    /// Processors that Larder's lanes take here, and on the side where it comes to those who hand it to QEMU.
    pub processors: f64,
    /// Of these, for encoding; on the side where it comes to, for decoding.
    pub encoding: f64,
    /// Lanes that wait for the link, on an average; `null` on the side where it comes to, whose lanes wait all the time.
    pub waiting: Option<f64>,
}

/// What was sent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SentState {
    /// Bytes of QEMU's stream.
    pub raw_bytes: u64,
    /// Bytes on the link.
    pub wire_bytes: u64,
    /// Bytes of the stream that the destination's QEMU has taken.
    pub delivered_bytes: u64,
    /// Frames.
    pub frames: u64,
    /// CPU time of the lanes, in seconds.
    pub cpu_seconds: f64,
    /// Of it, for encoding.
    pub encode_cpu_seconds: f64,
    /// Time that encoding took, in seconds by the clock, of all lanes together.
    pub encode_seconds: f64,
    /// Time that lanes waited for the link, in seconds, all together.
    pub write_seconds: f64,
    /// How pages went: `zero`, `same` (of one word), `delta`, `plain` (as they are), and the methods of encoding.
    pub methods: Vec<MethodState>,
    /// Of the encoded pages those that a device has encoded.
    pub device_pages: u64,
}

/// The pages that went in one way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MethodState {
    /// Which.
    pub method: String,
    /// How many.
    pub pages: u64,
    /// What they took on the link, without the frames around them; of `zero` and `same` next to nothing, told as 0.
    pub bytes: u64,
}

/// What has come, and was handed to QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeliveredState {
    /// Bytes that QEMU took.
    pub raw_bytes: u64,
    /// Bytes of frames that came for them.
    pub wire_bytes: u64,
    /// Frames.
    pub frames: u64,
    /// CPU time of the lanes, and of those who hand it to QEMU, in seconds.
    pub cpu_seconds: f64,
    /// Of it, for decoding.
    pub decode_cpu_seconds: f64,
}

/// Bounds; `null` is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationLimits {
    /// Bytes per second on the link.
    pub bandwidth: Option<u64>,
    /// Processors whose time the lanes take.
    pub processors: Option<f64>,
    /// How long the guest may stand still in the end, in milliseconds; `null` where Larder does not look after QEMU.
    pub downtime_ms: Option<u64>,
    /// After so many seconds without an end it is given up.
    pub timeout_s: Option<u64>,
}

/// Which limits shall be others: the body of `PATCH /v1/migration`. What is not said stays; 0 takes a limit away, but that
/// of the downtime.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationPatch {
    /// Bytes per second on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Processors whose time the lanes take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<f64>,
    /// How long the guest may stand still in the end, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// Seconds from the beginning after which it is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u64>,
}

/// Why pages go as they do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvidenceState {
    /// What a byte on the link is worth in nanoseconds of encoding: high where the link is what is waited for.
    pub ns_per_byte: f64,
    /// Of each kind of pages that there was.
    pub classes: Vec<ClassState>,
}

/// What is known of one kind of pages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClassState {
    /// What they are like: how evenly their bytes are spread, and whether their words grow.
    pub class: String,
    /// Batches of them so far.
    pub batches: u64,
    /// The method that is picked now; `plain`: they go as they are.
    pub method: String,
    /// What each method would make of a page: measured, or expected as long as it was not tried.
    pub offers: Vec<OfferState>,
}

/// What a method makes of a page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OfferState {
    /// Which.
    pub method: String,
    /// How many times as large as what is left of it.
    pub ratio: f64,
    /// What encoding takes, in nanoseconds.
    pub ns: f64,
    /// That and what the bytes are worth that are left, in nanoseconds: what costs least is picked.
    pub cost_ns: f64,
}

/// The answer to `POST /v1/migration/cancel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cancelling {
    /// It was told; what becomes of it says `phase`.
    pub cancelling: bool,
}

/// The longest time that a guest may be let stand still, in milliseconds (QEMU's own bound).
pub const DOWNTIME_MS_MAX: u64 = 2_000_000;

impl MigrationPatch {
    /// Whether it makes sense.
    ///
    /// # Errors
    /// It does not; the text says why.
    pub fn check(&self) -> Result<(), String> {
        if self.downtime_ms.is_some_and(|ms| !(1..=DOWNTIME_MS_MAX).contains(&ms)) {
            return Err(format!("downtime_ms: from 1 to {DOWNTIME_MS_MAX}"));
        }
        match self.processors {
            Some(processors) if processors != 0.0 && !(0.01..=1024.0).contains(&processors) => {
                Err("processors: from 0.01 to 1024, or 0 for no limit".to_owned())
            }
            _ => Ok(()),
        }
    }
}

impl MigrationState {
    /// How many times as large what was sent is as what went over the link.
    pub fn ratio(&self) -> Option<f64> {
        let (raw, wire) = match (&self.sent, &self.delivered) {
            (Some(sent), _) => (sent.raw_bytes, sent.wire_bytes),
            (None, Some(delivered)) => (delivered.raw_bytes, delivered.wire_bytes),
            (None, None) => return None,
        };
        (wire > 0).then(|| raw as f64 / wire as f64)
    }

    /// How it is, in a few words: `moving, round 3`, or that and `; link lost, trying again since 2 s`.
    pub fn words(&self) -> String {
        let round = self.course.as_ref().map_or(0, |course| course.round);
        let words = match self.phase {
            MigrationPhase::Moving if round > 0 => format!("moving, round {round}"),
            MigrationPhase::PostCopy => "post-copy".to_owned(),
            MigrationPhase::HandingOver => "handing over".to_owned(),
            phase => phase.name().to_owned(),
        };
        match self.link.lost_seconds {
            Some(seconds) if !self.phase.is_over() => format!("{words}; link lost, trying again since {seconds:.0} s"),
            _ => words,
        }
    }
}
