//! Control socket types for the migration of a VM. Sizes are in bytes. Counters of sent and delivered data start at
//! zero when the process starts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The interface of a process that moves a VM to its control socket. All calls return at once.
pub trait MigrationControl: Send + Sync {
    /// Returns the state of the move.
    fn state(&self) -> MigrationState;

    /// Changes limits, effective at once.
    ///
    /// # Errors
    /// This end has no limits, or the values are invalid; the error is a message for the user.
    fn limit(&self, patch: &MigrationPatch) -> Result<(), String>;

    /// Cancels like SIGINT: the VM stays on its host, as long as that is still possible.
    fn cancel(&self);
}

/// Handle for requests, usable from any thread.
pub type MigrationHandle = Arc<dyn MigrationControl>;

/// The answer to `GET /v1/migration`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationState {
    /// The VM's name; if it is unknown, the name of its QEMU's socket.
    pub vm: String,
    /// Direction of the move, as seen from this host.
    pub direction: Direction,
    /// Socket of the local QEMU: its monitor, or the socket of its migration stream.
    pub qemu: String,
    /// `true` if Larder controls both QEMUs (`larder migrate`), `false` if it only carries the stream between them
    /// (`larder migrate send`).
    pub whole: bool,
    /// The other host, if it is known.
    pub peer: Option<String>,
    /// Phase of the move.
    pub phase: MigrationPhase,
    /// Reason of a failure, as a message for the user.
    pub reason: Option<String>,
    /// Location of the VM after the move has ended: `here`, `there`, `in doubt`, `between`, `lost` or `unknown`.
    pub place: Option<String>,
    /// Time of this report: nanoseconds since the process started.
    pub time_ns: u64,
    /// Start of the process, in milliseconds since 1970 (UTC).
    pub started_ms: u64,
    /// QEMU's own progress report; `null` at the destination, or if Larder does not query QEMU.
    pub course: Option<MigrationProgressState>,
    /// Rates over the last second.
    pub rates: Option<MoveRates>,
    /// Sent data; `null` at the destination.
    pub sent: Option<SentState>,
    /// Data delivered to QEMU; `null` at the source.
    pub delivered: Option<DeliveredState>,
    /// Limits in force; `null` at the destination.
    pub limits: Option<MigrationLimits>,
    /// Choice of encoding methods, with reasons; `null` at the destination.
    pub evidence: Option<MethodChoiceState>,
    /// Downtime of the guest in milliseconds, once it has occurred and is known.
    pub downtime_ms: Option<u64>,
    /// The connections between the hosts.
    pub link: MoveLinkState,
}

/// The connections between the hosts of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveLinkState {
    /// Number of times that they were lost.
    pub losses: u64,
    /// Time in seconds for which they have been lost now, while Larder tries to reconnect; `null` while they are up.
    pub lost_seconds: Option<f64>,
}

/// Direction of a move.
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
    /// Returns the value in the JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Leaving => "leaving",
            Self::Coming => "coming",
        }
    }
}

/// Phase of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationPhase {
    /// Both QEMUs are compared and configured, or the other end is awaited; nothing has moved.
    #[default]
    Preparing,
    /// Memory is being transferred; the guest runs at the source.
    Moving,
    /// The guest runs at the destination, and some of its memory is still to come.
    PostCopy,
    /// All or nearly all memory is transferred; the guest is paused.
    HandingOver,
    /// The move has succeeded.
    Done,
    /// The move has failed.
    Failed,
}

impl MigrationPhase {
    /// All variants.
    pub const ALL: [Self; 6] =
        [Self::Preparing, Self::Moving, Self::PostCopy, Self::HandingOver, Self::Done, Self::Failed];

    /// Returns the value in the JSON.
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

    /// Returns whether the move has ended.
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }
}

/// QEMU's own report on its migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationProgressState {
    /// Seconds since QEMU started the migration.
    pub seconds: f64,
    /// Round of memory transfer, from 1; the first sends all memory.
    pub round: u64,
    /// Size of the memory.
    pub total_bytes: u64,
    /// Bytes still to be sent in this round.
    pub remaining_bytes: u64,
    /// Bytes per second that the guest dirties, as QEMU measured them in the previous round.
    pub dirty_bytes_per_s: u64,
    /// Estimated seconds until the end at the current rate.
    pub expected_seconds: Option<f64>,
    /// Estimated downtime in milliseconds if the move ended now, according to QEMU.
    pub expected_downtime_ms: Option<u64>,
    /// Reason why the move will not end at this rate, and advice; `null` while it may end.
    pub verdict: Option<String>,
}

/// Rates of the transfer over the last second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveRates {
    /// Bytes of QEMU's stream.
    pub stream_bytes_per_s: u64,
    /// Bytes on the wire.
    pub wire_bytes_per_s: u64,
    /// CPUs that Larder's lanes use on this host; at the destination, including the threads that deliver to QEMU.
    pub processors: f64,
    /// The part of these CPUs that encodes; at the destination, that decodes.
    pub encoding: f64,
    /// Mean number of lanes that wait for the link; `null` at the destination, where lanes always wait.
    pub waiting: Option<f64>,
}

/// Data that was sent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SentState {
    /// Bytes of QEMU's stream.
    pub raw_bytes: u64,
    /// Bytes on the wire.
    pub wire_bytes: u64,
    /// Bytes of the stream that the destination's QEMU has received.
    pub delivered_bytes: u64,
    /// Frames.
    pub frames: u64,
    /// CPU time of the lanes, in seconds.
    pub cpu_seconds: f64,
    /// CPU time of the lanes for encoding, in seconds.
    pub encode_cpu_seconds: f64,
    /// Elapsed time of encoding, in seconds, summed over all lanes.
    pub encode_seconds: f64,
    /// Time for which lanes waited for the link, in seconds, summed over all lanes.
    pub write_seconds: f64,
    /// Pages by method: `zero`, `same` (one repeated word), `delta`, `plain` (unencoded), and the encoding methods.
    pub methods: Vec<MethodState>,
    /// Encoded pages that a device has encoded.
    pub device_pages: u64,
}

/// Pages sent with one method.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MethodState {
    /// Name of the method.
    pub method: String,
    /// Number of pages.
    pub pages: u64,
    /// Their bytes on the wire without framing; reported as 0 for `zero` and `same`, which take next to nothing.
    pub bytes: u64,
}

/// Data that was received and delivered to QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeliveredState {
    /// Bytes that QEMU has received.
    pub raw_bytes: u64,
    /// Bytes of the frames that contained them.
    pub wire_bytes: u64,
    /// Frames.
    pub frames: u64,
    /// CPU time of the lanes, and of the threads that deliver to QEMU, in seconds.
    pub cpu_seconds: f64,
    /// CPU time for decoding, in seconds.
    pub decode_cpu_seconds: f64,
}

/// Limits; `null` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationLimits {
    /// Bytes per second on the wire.
    pub bandwidth: Option<u64>,
    /// CPUs that the lanes may use.
    pub processors: Option<f64>,
    /// Maximum downtime of the guest, in milliseconds; `null` if Larder does not control QEMU.
    pub downtime_ms: Option<u64>,
    /// Seconds after which a move that has not ended is cancelled.
    pub timeout_s: Option<u64>,
}

/// Limits to change: the body of `PATCH /v1/migration`. Limits that are left out do not change; 0 removes a limit,
/// except that of the downtime.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationPatch {
    /// Bytes per second on the wire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// CPUs that the lanes may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<f64>,
    /// Maximum downtime of the guest, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// Seconds from the start after which a move that has not ended is cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u64>,
}

/// Reasons for the choice of encoding methods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MethodChoiceState {
    /// Encoding time, in nanoseconds, that saving one byte on the wire is worth: high if the link is the bottleneck.
    pub ns_per_byte: f64,
    /// Classes of pages seen so far.
    pub classes: Vec<PageClassState>,
}

/// Knowledge about one class of pages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PageClassState {
    /// Description of the class: how evenly the byte values are distributed, and whether the words increase.
    pub class: String,
    /// Number of batches so far.
    pub batches: u64,
    /// The method chosen now; `plain` sends pages unencoded.
    pub method: String,
    /// Cost of a page with each method: measured, or estimated if the method has not been tried.
    pub offers: Vec<MethodCostState>,
}

/// Cost of a page with one method.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MethodCostState {
    /// Name of the method.
    pub method: String,
    /// Compression ratio.
    pub ratio: f64,
    /// Encoding time in nanoseconds.
    pub ns: f64,
    /// Cost in nanoseconds: encoding time plus the worth of the remaining bytes. The method with the lowest cost is
    /// chosen.
    pub cost_ns: f64,
}

/// The answer to `POST /v1/migration/cancel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CancelResult {
    /// The request was forwarded; `phase` shows its result.
    pub cancelling: bool,
}

/// Maximum configurable downtime, in milliseconds (QEMU's own limit).
pub const DOWNTIME_MS_MAX: u64 = 2_000_000;

impl MigrationPatch {
    /// Checks the values.
    ///
    /// # Errors
    /// A value is out of range; the error is a message for the user.
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
    /// Returns the ratio of QEMU's stream to the bytes on the wire; `None` without data.
    pub fn ratio(&self) -> Option<f64> {
        let (raw, wire) = match (&self.sent, &self.delivered) {
            (Some(sent), _) => (sent.raw_bytes, sent.wire_bytes),
            (None, Some(delivered)) => (delivered.raw_bytes, delivered.wire_bytes),
            (None, None) => return None,
        };
        (wire > 0).then(|| raw as f64 / wire as f64)
    }

    /// Describes the state in a few words: `moving, round 3`, perhaps with `; link lost, trying again since 2 s`.
    pub fn summary(&self) -> String {
        let round = self.course.as_ref().map_or(0, |course| course.round);
        let phase = match self.phase {
            MigrationPhase::Moving if round > 0 => format!("moving, round {round}"),
            MigrationPhase::PostCopy => "post-copy".to_owned(),
            MigrationPhase::HandingOver => "handing over".to_owned(),
            phase => phase.name().to_owned(),
        };
        match self.link.lost_seconds {
            Some(seconds) if !self.phase.has_ended() => format!("{phase}; link lost, reconnecting for {seconds:.0} s"),
            _ => phase,
        }
    }
}
