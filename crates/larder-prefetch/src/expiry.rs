//! Maximum age of fetched data, where other programs may write to the device.

use std::rc::Weak;
use std::time::Duration;

use crate::Prefetch;

impl Prefetch {
    /// Limits the age of fetched data, because other programs may change the device: data is dropped between `time`
    /// and twice `time` after its fetch, and when [`Prefetch::clients_disconnected`] is called.
    pub fn set_max_age(&self, time: Duration) {
        self.max_age.set(Some(time));
    }

    /// Drops all data if other programs may change the device: the device has no clients now, and the next one must
    /// not get data from before.
    pub fn clients_disconnected(&self) {
        if self.max_age.get().is_some() {
            self.state.borrow_mut().invalidate_all();
        }
    }

    /// Starts the expiry task when a fetch begins, if data expires.
    pub(crate) fn start_expiry(&self) {
        let Some(time) = self.max_age.get() else { return };
        if self.expiry_running.replace(true) {
            return;
        }
        if let Some(on) = self.on.upgrade() {
            on.spawn(expire(Weak::clone(&self.this), time));
        }
    }
}

/// Drops, every `time`, the data that was fetched before the last round; ends when no data is left. A round walks
/// through the memory, and makes no requests.
async fn expire(prefetch: Weak<Prefetch>, time: Duration) {
    let mut limit = None;
    loop {
        let sleep = match prefetch.upgrade().and_then(|prefetch| prefetch.on.upgrade()) {
            Some(on) => on.sleep(time),
            None => return,
        };
        sleep.await;
        let Some(prefetch) = prefetch.upgrade() else { return };
        let mut state = prefetch.state.borrow_mut();
        if let Some(before) = limit {
            state.expire_before(before);
        }
        if state.closing || (state.cache.is_empty() && state.running.is_empty()) {
            prefetch.expiry_running.set(false);
            return;
        }
        limit = Some(state.next_fetch());
    }
}
