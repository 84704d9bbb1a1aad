//! Maximum age of fetched data, where other programs may write to the device.

use std::rc::Weak;
use std::time::Duration;

use crate::Prefetch;

impl Prefetch {
    /// Limits the age of fetched data, because other programs may change the device: data is dropped between `time`
    /// and twice `time` after its fetch, and when [`Prefetch::clients_left`] is called.
    pub fn believe_for(&self, time: Duration) {
        self.believed_for.set(Some(time));
    }

    /// Drops all data if other programs may change the device: the device has no clients now, and the next one must
    /// not get data from before.
    pub fn clients_left(&self) {
        if self.believed_for.get().is_some() {
            self.state.borrow_mut().forget_all();
        }
    }

    /// Starts the expiry task when a fetch begins, if data expires.
    pub(crate) fn doubt(&self) {
        let Some(time) = self.believed_for.get() else { return };
        if self.is_doubting.replace(true) {
            return;
        }
        if let Some(on) = self.on.upgrade() {
            on.spawn(forget_what_is_old(Weak::clone(&self.this), time));
        }
    }
}

/// Drops, every `time`, the data that was fetched before the last round; ends when no data is left. A round walks
/// through the memory, and makes no requests.
async fn forget_what_is_old(prefetch: Weak<Prefetch>, time: Duration) {
    let mut before = None;
    loop {
        let sleep = match prefetch.upgrade().and_then(|prefetch| prefetch.on.upgrade()) {
            Some(on) => on.sleep(time),
            None => return,
        };
        sleep.await;
        let Some(prefetch) = prefetch.upgrade() else { return };
        let mut state = prefetch.state.borrow_mut();
        if let Some(before) = before {
            state.forget_before(before);
        }
        if state.closing || (state.cache.is_empty() && state.running.is_empty()) {
            prefetch.is_doubting.set(false);
            return;
        }
        before = Some(state.next_fetch());
    }
}
