//! Limit of a server's private memory (`RLIMIT_DATA`), computed from the bounds of its disks. If a fault lets a guest
//! or an image make the server allocate without bound, the server is aborted, instead of the host's OOM killer being
//! invoked.
//!
//! The limit of a control group (`MemoryMax=`) is no substitute: guest memory that the server touches first is
//! charged to the server's group. `RLIMIT_DATA` counts private writable mappings: the heap and the stacks, whether
//! they have been touched or not.
//!
//! Invariants:
//! - Each layer whose memory depends on a size that is not known before confinement takes a [`MemoryShare`] before it
//!   allocates, which raises the limit. All other memory is in the sum with which the limit is set ([`enforce`]).
//! - The limit never falls: memory that a layer has freed may still be in the heap.
//! - Only the soft limit is set, so that a later share can raise it. It is never raised past the soft limit that the
//!   process was started with.
//!
//! Requests of guests use bounded pools, all of which are in the sum, so no request fails because of the limit. An
//! allocation past it aborts the process, and the next process continues to serve the guest. A compromised server can
//! raise the limit, and can allocate shared memory, which the limit does not count.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sum of all shares, and the limit once it is set.
struct State {
    /// Sum of the existing shares, in bytes.
    shared: u64,
    limit: Option<Limit>,
}

struct Limit {
    /// Allowed bytes in addition to shares.
    base: u64,
    /// Value to which the limit was last raised, if the process was not started with a lower one.
    raised_to: u64,
    /// The limits that the process was started with.
    initial: Rlimit,
}

static STATE: Mutex<State> = Mutex::new(State { shared: 0, limit: None });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of private memory that a layer may use as long as this exists.
#[derive(Debug)]
pub(crate) struct MemoryShare(u64);

impl MemoryShare {
    /// Raises the limit by `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        let mut state = state();
        state.shared = state.shared.saturating_add(bytes);
        if let Err(error) = state.raise() {
            tracing::warn!("the limit of this server's private memory cannot be raised: {error}");
        }
        Self(bytes)
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        let mut state = state();
        state.shared = state.shared.saturating_sub(self.0);
    }
}

impl State {
    /// Raises the limit to the present sum of the shares.
    fn raise(&mut self) -> io::Result<()> {
        let Some(limit) = &mut self.limit else { return Ok(()) };
        let requested = limit.base.saturating_add(self.shared);
        if requested <= limit.raised_to {
            return Ok(());
        }
        limit.set(requested)
    }
}

impl Limit {
    fn set(&mut self, requested: u64) -> io::Result<()> {
        let soft = self.initial.current.map_or(requested, |before| before.min(requested));
        let maximum = self.initial.maximum;
        setrlimit(Resource::Data, Rlimit { current: Some(soft), maximum })?;
        self.raised_to = requested;
        tracing::debug!("this server's private memory is limited to {} MiB", soft >> 20);
        Ok(())
    }
}

/// Limits this process's private memory to `base` bytes and the shares, present and future.
///
/// # Errors
/// The kernel refuses; there is no limit then.
pub(crate) fn enforce(base: u64) -> io::Result<()> {
    let mut state = state();
    let mut limit = Limit { base, raised_to: 0, initial: getrlimit(Resource::Data) };
    limit.set(base.saturating_add(state.shared))?;
    state.limit = Some(limit);
    Ok(())
}
