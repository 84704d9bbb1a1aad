//! State of a move.

use std::time::{Duration, Instant};

use super::downtime::{DOWNTIME_LIMIT_RUN_MS, DowntimeEstimator};
use super::{MoveError, Options};
use crate::moving::messages::{MoverRequest, ToDestination, VERSION};
use crate::moving::record::OutgoingRecord;
use crate::moving::watch::MigrationMonitor;

/// Time limit for QEMU to detect in post-copy that its sockets are shut; QEMU 7.2 does not detect it once all is
/// sent.
const LOSS_DETECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum attempts to make QEMU detect the loss.
const LOSS_TRIES_MAX: u32 = 6;

/// State of a move that QEMU has begun.
pub(super) struct MoveState {
    pub(super) record: OutgoingRecord,
    pub(super) started: Instant,
    pub(super) monitor: MigrationMonitor,
    pub(super) estimator: DowntimeEstimator,
    /// Downtime to expect if QEMU were allowed to end the migration now.
    pub(super) expected_downtime: Option<Duration>,
    /// Current `downtime-limit` of QEMU, in milliseconds.
    pub(super) downtime_limit_ms: u64,
    /// Progress of the switch to post-copy.
    pub(super) postcopy: PostcopyState,
    /// Set once the destination has answered that it runs the VM.
    pub(super) destination_runs: bool,
    pub(super) downtime_ms: Option<u64>,
    /// Set if an earlier mover had begun the move.
    pub(super) resumed: bool,
    /// Set if the session carries QEMU's channels.
    pub(super) carries_channels: bool,
    /// Last status of QEMU's migration that was logged.
    logged_status: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PostcopyState {
    Inactive,
    Requested,
    Active,
}

impl MoveState {
    pub(super) fn new(record: OutgoingRecord, options: &Options) -> Self {
        let downtime_ms = options.limits().downtime_ms;
        Self {
            record,
            started: Instant::now(),
            monitor: MigrationMonitor::new(downtime_ms),
            estimator: DowntimeEstimator::default(),
            expected_downtime: None,
            downtime_limit_ms: DOWNTIME_LIMIT_RUN_MS,
            postcopy: PostcopyState::Inactive,
            destination_runs: false,
            downtime_ms: None,
            resumed: false,
            carries_channels: true,
            logged_status: String::new(),
        }
    }

    /// Logs the status of QEMU's migration, if it has changed.
    pub(super) fn log_status(&mut self, status: &str) {
        if self.logged_status != status {
            tracing::debug!(status, "the status of QEMU's migration has changed");
            status.clone_into(&mut self.logged_status);
        }
    }

    /// Returns true if `Go` may have been sent, so that the destination may run the VM.
    pub(super) const fn start_sent(&self) -> bool {
        self.record.told
    }

    pub(super) fn request(&self, request: MoverRequest) -> ToDestination {
        ToDestination { version: VERSION, id: self.record.id.clone(), tell: request }
    }

    pub(super) fn start_request(&self) -> ToDestination {
        self.request(MoverRequest::Go { run: self.record.run, postcopy: self.postcopy == PostcopyState::Active })
    }
}

/// Loss of the connection in post-copy that QEMU does not detect.
#[derive(Default)]
pub(super) struct UndetectedLoss {
    since: Option<Instant>,
    tries: u32,
}

impl UndetectedLoss {
    /// Returns true if it is time to make QEMU detect the loss.
    pub(super) fn is_overdue(&mut self, is_lost: bool) -> Result<bool, MoveError> {
        if !is_lost {
            self.since = None;
            return Ok(false);
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() < LOSS_DETECTION_TIMEOUT {
            return Ok(false);
        }
        self.since = None;
        self.tries += 1;
        if self.tries > LOSS_TRIES_MAX {
            return Err(MoveError::PostcopyBroken {
                reason: "the source's QEMU does not detect that the connection is lost".to_owned(),
            });
        }
        Ok(true)
    }
}
