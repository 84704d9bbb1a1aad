//! Detaching from a process: its memory is unregistered, and the descriptors that it was given are closed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Attached, INJECT_LIMIT};
use crate::external_mappings::ExternalMapping;
use crate::inject::{InjectError, with_stopped_thread};
use crate::state::Region;
use crate::userfaultfd::{AddressRange, Userfaultfd};

impl Attached {
    /// Unregisters the memory. All pages must be in memory (`Pager::page_in_step`), or they are lost.
    pub(super) fn unregister(&self) {
        unregister_all(self.pager.guest().userfaultfd(), &self.ranges());
    }

    fn ranges(&self) -> Vec<AddressRange> {
        let regions = self.pager.regions().iter().filter(|region| !region.is_unmapped());
        let range = |region: &Region| AddressRange { start: region.address, len: region.bytes() };
        regions.map(range).collect()
    }

    /// Detaches from the process. Returns the maximum time that a thread of it was stopped, or `None` if a descriptor
    /// could not be closed, which is logged. All pages must be in memory. `limit` is the maximum time for stopping
    /// the thread.
    ///
    /// # Errors
    /// If no thread of the process can be stopped now, because it is frozen or another process traces it. Nothing has
    /// changed then.
    pub fn detach(&self, limit: Duration) -> Result<Option<Duration>, InjectError> {
        let mut numbers = self.donated.all(self.pid);
        let lost = self.state.lost_pages();
        if lost > 0 {
            numbers.retain(|number| *number != self.donated.pages);
        }
        // The memory is unregistered only once a stopped thread can close the descriptors. Otherwise the marks would
        // make disk servers wait for a pager. After a kill between the two steps, a successor finds the userfaultfd
        // and manages the memory again, or finds none and nothing stored, and closes the rest.
        //
        // Servers come first: after a kill their descriptors stay open and do nothing. If a server's memory stayed
        // registered, it would wait for a pager that is never started, because the process was detached from.
        let (userfaultfd, ranges) = (self.pager.guest().userfaultfd(), self.ranges());
        let is_started = AtomicBool::new(false);
        let mappings = self.pager.guest().external_mappings();
        let detached = mappings.with_all(|servers| {
            with_stopped_thread(self.pid, limit, |thread| {
                is_started.store(true, Ordering::Relaxed);
                // There is no second attempt, and on a busy host a thread can wait for a processor longer than the
                // limit for stopping it.
                thread.raise_limit(INJECT_LIMIT);
                servers.iter().for_each(ExternalMapping::unregister);
                unregister_all(userfaultfd, &ranges);
                numbers.iter().try_for_each(|number| thread.close(*number))
            })
        });
        let paused_for = match detached {
            Ok(((), stood_still)) => Some(stood_still),
            Err(InjectError::Exited { .. }) => None,
            Err(error) if !is_started.load(Ordering::Relaxed) => return Err(error),
            Err(error) => {
                tracing::warn!("detached, but unused descriptors stay open in the process: {error}");
                None
            }
        };
        mappings.close_all();
        if lost > 0 {
            tracing::warn!(
                "{lost} lost pages stay unreadable; process {} keeps the list of them, and cannot be managed again",
                self.pid
            );
        }
        if paused_for.is_some() {
            // Wiped only now: until here a successor would need the key.
            self.state.wipe_key();
        }
        Ok(paused_for)
    }
}

fn unregister_all(userfaultfd: &Userfaultfd, ranges: &[AddressRange]) {
    for range in ranges {
        // While the process gives memory up, pages cannot be unprotected (EAGAIN). Unregistering unprotects them,
        // too.
        let unprotected = userfaultfd.unprotect(*range);
        let unregistered = userfaultfd.unregister(*range);
        if let Err(error) = unregistered.and_then(|()| match unprotected {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }) {
            tracing::warn!("memory at {:#x} cannot be unregistered: {error}", range.start);
        }
    }
}
