//! Mover at the source: starts QEMU's migration, watches it, and hands the VM over.

mod carrier;
mod downtime;
mod finish;
mod hand_over;
mod move_state;
mod mover;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use thiserror::Error;

use self::mover::SourceMover;
use super::disks::{DiskServers, HandoverAction};
use super::record::{OutgoingRecord, RecordFile};
use super::watch::MigrationReport;
use super::{has_ended, status_of};
use crate::limits::Limits;
use crate::progress::SenderProgress;
use crate::qmp::{Qmp, QmpError};
use crate::send;

/// Interval of warnings that an answer is late.
const LATE_WARNING_INTERVAL: Duration = Duration::from_secs(30);
/// Interval at which QEMU is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval at which the destination is asked whether the VM runs there.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Options of a move.
pub struct Options {
    /// Socket of the source QEMU's monitor.
    pub qmp: PathBuf,
    /// Directory of this user alone, for the records that a later mover needs ([`super::record`]).
    pub records: PathBuf,
    /// Servers of the VM's disks.
    pub servers: Arc<dyn DiskServers>,
    /// Destination, connection and limits.
    pub send: send::Options,
    /// Number of multifd channels, in addition to QEMU's main channel; 0: none.
    pub multifd_channels: u8,
    /// Allows post-copy if the migration does not converge.
    pub postcopy: bool,
    /// Allows throttling if the migration does not converge.
    pub throttle: bool,
    /// Keeps the source's QEMU after the move.
    pub keep_qemu: bool,
}

impl Options {
    /// Returns the current limits.
    fn limits(&self) -> Limits {
        self.send.limits.get()
    }
}

/// Result of a successful move.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CompletedMove {
    /// Seconds from the start of QEMU's migration until the VM ran at the destination with nothing left to transfer.
    pub seconds: f64,
    /// Milliseconds from the stop of the guest here until the destination reported that it runs.
    pub downtime_ms: Option<u64>,
    /// Number of rounds, as counted by QEMU.
    pub rounds: u64,
    /// True if post-copy was used.
    pub postcopy: bool,
    /// True if an earlier mover had handed the VM over without getting the answer.
    pub resumed: bool,
}

/// Reasons why a VM was not moved.
#[derive(Debug, Error)]
pub enum MoveError {
    /// An obstacle was found before anything was changed.
    #[error("the VM cannot be moved, and nothing was changed: {}", .0.join("; "))]
    Preflight(Vec<String>),
    /// The owner of the VM could not be determined; nothing was changed.
    #[error("the VM cannot be moved: {0}")]
    OwnerUnknown(String),
    /// The VM runs on at the source.
    #[error("not moved; the VM continues here: {reason}")]
    NotMoved {
        /// Reason why.
        reason: String,
    },
    /// The user has cancelled the move, and the VM runs on at the source.
    #[error("cancelled; the VM continues here")]
    Cancelled,
    /// The VM is stopped at the source, and may run at the destination.
    #[error(
        "the VM is paused here: it was handed over, and it is not known whether it runs at the destination ({reason}); run \
        the same command again once the destination can be reached, and the VM will run there or here. Only if its QEMU there \
        has exited, and the VM will not run there: larder migrate --take-back resumes it here"
    )]
    OutcomeUnknown {
        /// Reason why there is no answer.
        reason: String,
    },
    /// Post-copy was interrupted and could not be resumed.
    #[error("post-copy was interrupted and could not be resumed, and the VM needs both QEMUs: {reason}")]
    PostcopyBroken {
        /// Reason why.
        reason: String,
    },
    /// The source's QEMU exited before everything was sent.
    #[error(
        "the source's QEMU exited in the middle of the move, and the VM is lost unless it runs at the destination: {reason}"
    )]
    VmLost {
        /// Reason why.
        reason: String,
    },
    /// The VM was shut down during the move, and runs on neither host.
    #[error(
        "not moved: {cause} during the move, and its QEMU has exited. The VM runs on neither host, and its disks are as it left \
        them: start it on either host"
    )]
    ShutDown {
        /// Event that ended it: a subject and a verb.
        cause: &'static str,
    },
    /// Error of the source's QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The VM was not moved, and QEMU did not resume as it should.
    #[error("{0}")]
    Unresolved(String),
}

/// Moves the VM.
///
/// # Errors
/// The VM is not at the destination, or its place is unknown; the error states where it is.
pub fn run(
    options: &Options,
    progress: &Arc<SenderProgress>,
    cancel: &AtomicBool,
    report: &mut dyn FnMut(&MigrationReport),
) -> Result<CompletedMove, MoveError> {
    let _span = tracing::debug_span!("move", to = options.send.to).entered();
    let mut mover = SourceMover::new(options, Arc::clone(progress), cancel)?;
    let record: Option<OutgoingRecord> =
        mover.record_file.load().map_err(|error| MoveError::OwnerUnknown(error.to_string()))?;
    let (mut state, migration) = mover.wait_until_idle(record.is_some())?;
    let status = status_of(&migration);
    tracing::debug!(state, status, is_recorded = record.is_some(), "the state of QEMU at the start");
    let has_ended = has_ended(status);
    let is_postcopy = status.starts_with("postcopy-");
    if let Some(record) = record {
        let is_complete = status == "completed" && state == "postmigrate";
        if record.told && status == "completed" && !is_complete {
            return Err(MoveError::OwnerUnknown(format!(
                "it was handed over to {}, and another program has resumed it here since: if it does not run there, confirm that with \
                larder migrate --take-back",
                record.to
            )));
        }
        if is_complete || is_postcopy || record.told && has_ended {
            return mover.resume_move(record, status, report);
        }
        if has_ended {
            mover.clean_up(record)?;
            state = mover.qmp.run_state()?;
        }
    }
    match (state.as_str(), status) {
        ("running" | "paused" | "suspended" | "io-error", "none" | "completed" | "failed" | "cancelled") => {
            mover.start_move(is_running(&state), report)
        }
        ("postmigrate", "completed") => Err(MoveError::OwnerUnknown(
            "QEMU's VM was migrated, and there is no record of that: it was moved already, or another program moves it. If it runs \
             nowhere else, QEMU's 'cont' resumes it here"
                .to_owned(),
        )),
        ("postmigrate", "failed" | "cancelled") => Err(preflight_error(
            "it is paused since a migration that has failed, and QEMU does not migrate it again before it has run: 'cont' lets \
             it run, and 'stop' pauses it again",
        )),
        (state, "setup" | "active" | "pre-switchover" | "device" | "cancelling") => Err(MoveError::OwnerUnknown(format!(
            "it is being moved already, or was, by another program: QEMU's VM is '{state}', and its migration '{status}'"
        ))),
        _ => Err(MoveError::OwnerUnknown(format!(
            "QEMU's VM is '{state}', and its migration '{status}'"
        ))),
    }
}

/// Returns true if the VM runs. A guest that is suspended is woken at the destination, as QEMU does it.
fn is_running(state: &str) -> bool {
    matches!(state, "running" | "suspended")
}

/// Runs a VM here again that was handed over, with the disks that had moved along. The caller must have made sure
/// that the destination's QEMU has exited.
///
/// # Errors
/// The VM was not handed over, or can never run here again.
pub fn take_back(qmp: &Path, records: &Path, servers: &dyn DiskServers) -> Result<(), MoveError> {
    let _span = tracing::debug_span!("move", take_back = %qmp.display()).entered();
    let mut qmp = Qmp::connect(qmp)?;
    let record_file = RecordFile::new(records, "from", &qmp);
    let record: Option<OutgoingRecord> = record_file.load().map_err(preflight_error)?;
    let migration = qmp.migration()?;
    let state = qmp.run_state()?;
    match (record, state.as_str(), status_of(&migration)) {
        (Some(record), "running" | "postmigrate" | "paused", "completed" | "failed" | "cancelled") => {
            if record.disks_left {
                servers.apply(&record.disks, HandoverAction::Commit).map_err(|error| {
                    MoveError::Unresolved(format!(
                        "the VM is paused here, because its disks cannot be opened: {error}; if they are open at \
                         {}, larder vm NAME --expect closes them there, or end their server; then run the same command again",
                        record.to
                    ))
                })?;
            }
            if record.run && state != "running" {
                qmp.execute("cont", json!({}))?;
            }
            record_file.remove();
            record.before.restore(&mut qmp);
            restore_caches(servers, &record.disks);
            Ok(())
        }
        (_, _, status) => Err(MoveError::Preflight(vec![format!(
            "QEMU's VM is '{state}', and its migration '{status}': there is nothing to take back"
        )])),
    }
}

/// Makes the servers use the disks' caches as before the move.
fn restore_caches(servers: &dyn DiskServers, sockets: &[PathBuf]) {
    if sockets.is_empty() {
        return;
    }
    if let Err(error) = servers.apply(sockets, HandoverAction::RestoreCaches) {
        tracing::warn!("caches of the VM's disks may remain write-through until their server is restarted: {error}");
    }
}

fn preflight_error(error: impl std::fmt::Display) -> MoveError {
    MoveError::Preflight(vec![error.to_string()])
}

/// Rate limiter for warnings that something is late.
#[derive(Default)]
struct WarningLimiter(Option<Instant>);

impl WarningLimiter {
    fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|last| last.elapsed() > LATE_WARNING_INTERVAL);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}
