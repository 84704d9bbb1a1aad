//! How long what was fetched is believed, where others may write to the device.

use std::rc::Weak;
use std::time::Duration;

use crate::Prefetch;

impl Prefetch {
    /// Others may change the device behind this one's back: what was fetched is dropped between `time` and twice that
    /// later, and when [`Prefetch::clients_left`] is told.
    pub fn believe_for(&self, time: Duration) {
        self.believed_for.set(Some(time));
    }

    /// Nobody uses the device for now: whoever comes next finds nothing of what was fetched before, if others may have
    /// changed it meanwhile.
    pub fn clients_left(&self) {
        if self.believed_for.get().is_some() {
            self.state.borrow_mut().forget_all();
        }
    }

    /// A fetch begins.
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

/// Looks every `time`, as long as there is something: what was there the last time goes. It costs a walk through the memory
/// then, and requests nothing.
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
