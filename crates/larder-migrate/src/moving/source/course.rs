//! State of a move.

use std::time::{Duration, Instant};

use super::ending::{Ending, LIMIT_MS};
use super::{MoveError, Options};
use crate::moving::messages::{Tell, ToDestination, VERSION};
use crate::moving::record::Leaving;
use crate::moving::watch::Watch;

/// Time limit for QEMU to detect in post-copy that its sockets are shut; QEMU 7.2 does not detect it once all is
/// sent.
const CUT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum attempts to make QEMU detect the loss.
const CUT_TRIES: u32 = 6;

/// State of a move that QEMU has begun.
pub(super) struct Course {
    pub(super) leaving: Leaving,
    pub(super) begun: Instant,
    pub(super) watch: Watch,
    pub(super) ending: Ending,
    /// Downtime to expect if QEMU were allowed to end the migration now.
    pub(super) expected_downtime: Option<Duration>,
    /// Current `downtime-limit` of QEMU, in milliseconds.
    pub(super) limit_ms: u64,
    /// Progress of the switch to post-copy.
    pub(super) postcopy: Postcopy,
    /// Set once the destination has answered that it runs the VM.
    pub(super) answered: bool,
    pub(super) downtime_ms: Option<u64>,
    /// Set if an earlier mover had begun the move.
    pub(super) resumed: bool,
    /// Set if the session carries QEMU's channels.
    pub(super) carries: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Postcopy {
    No,
    Asked,
    Yes,
}

impl Course {
    pub(super) fn new(leaving: Leaving, options: &Options) -> Self {
        let downtime_ms = options.limits().downtime_ms;
        Self {
            leaving,
            begun: Instant::now(),
            watch: Watch::new(downtime_ms),
            ending: Ending::default(),
            expected_downtime: None,
            limit_ms: LIMIT_MS,
            postcopy: Postcopy::No,
            answered: false,
            downtime_ms: None,
            resumed: false,
            carries: true,
        }
    }

    /// Returns true if `Go` may have been sent, so that the destination may run the VM.
    pub(super) const fn told(&self) -> bool {
        self.leaving.told
    }

    pub(super) fn tell(&self, tell: Tell) -> ToDestination {
        ToDestination {
            version: VERSION,
            id: self.leaving.id.clone(),
            tell,
        }
    }

    pub(super) fn go(&self) -> ToDestination {
        self.tell(Tell::Go {
            run: self.leaving.run,
            postcopy: self.postcopy == Postcopy::Yes,
        })
    }
}

/// Loss of the connection in post-copy that QEMU does not detect.
#[derive(Default)]
pub(super) struct Cut {
    since: Option<Instant>,
    tries: u32,
}

impl Cut {
    /// Returns true if it is time to make QEMU detect the loss.
    pub(super) fn is_unseen(&mut self, is_cut: bool) -> Result<bool, MoveError> {
        if !is_cut {
            self.since = None;
            return Ok(false);
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() < CUT_TIMEOUT {
            return Ok(false);
        }
        self.since = None;
        self.tries += 1;
        if self.tries > CUT_TRIES {
            return Err(MoveError::Broken {
                reason: "the source's QEMU does not detect that the connection is lost".to_owned(),
            });
        }
        Ok(true)
    }
}
