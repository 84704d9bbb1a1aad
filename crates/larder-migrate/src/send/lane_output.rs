//! Output of a lane: its frames and its connection, over successive links.

use std::io::{self, IoSlice, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use super::lock;
use super::unconfirmed::{FreeFrames, UnconfirmedFrames};
use crate::encode::{Frame, SLICES_MAX};
use crate::link::Link;

/// Connection of a lane, and the frames that were sent over it.
#[derive(Default)]
pub(super) struct LaneOutput {
    state: Mutex<State>,
    /// Number of frames that were sent, or would have been if the link were up.
    sent: AtomicU64,
    confirmation: Mutex<Confirmation>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Connection of the lane; `None` while the link is lost.
    link: Option<Link>,
    /// Number of that link.
    number: u32,
    unconfirmed: UnconfirmedFrames,
}

#[derive(Default)]
struct Confirmation {
    /// Number of frames that the receiver has confirmed.
    confirmed: u64,
    is_over: bool,
}

/// Error: a frame could not be written and its link is lost. The frame is kept.
pub(super) struct LinkLost {
    pub(super) number: u32,
    pub(super) error: io::Error,
}

impl LaneOutput {
    /// Waits until there is room to keep another frame. Frames that need not be kept any more are moved to `free`.
    /// Returns false if the session is over.
    pub(super) fn make_room(&self, free: &mut FreeFrames) -> bool {
        let mut confirmation = lock(&self.confirmation);
        loop {
            let confirmed = confirmation.confirmed;
            if confirmation.is_over {
                return false;
            }
            drop(confirmation);
            let mut state = lock(&self.state);
            state.unconfirmed.release(confirmed, free);
            if !state.unconfirmed.is_full() {
                return true;
            }
            drop(state);
            confirmation = lock(&self.confirmation);
            while confirmation.confirmed == confirmed && !confirmation.is_over {
                confirmation = self.changed.wait(confirmation).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Sends a frame if the link is up, and keeps it. Returns the frame if a copy of its bytes is kept, and whether
    /// it was sent.
    pub(super) fn send(&self, mut frame: Box<Frame>, by_device: bool) -> (Option<Box<Frame>>, Result<bool, LinkLost>) {
        let mut state = lock(&self.state);
        // Counted before the receiver can confirm the frame.
        self.sent.fetch_add(1, Ordering::AcqRel);
        let number = state.number;
        let written = match &mut state.link {
            None => Ok(false),
            Some(link) => {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let count = frame.slices(&mut slices);
                match link.write_all_vectored(&mut slices[..count]) {
                    Ok(()) => Ok(true),
                    Err(error) => Err(LinkLost { number, error }),
                }
            }
        };
        if written.is_err() {
            state.link = None;
        }
        (state.unconfirmed.push(frame, by_device), written)
    }

    /// Continues over another link, whose receiver has `received` frames. A link older than the current or last one
    /// is ignored: on a busy host, the thread that sets up the older link may run last.
    ///
    /// # Errors
    /// The new link is lost as well.
    pub(super) fn resume_over(&self, mut link: Link, number: u32, received: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        if number < state.number {
            return Ok(());
        }
        state.number = number;
        state.link = None;
        let repeated = state.unconfirmed.resend(received, &mut link)?;
        state.link = Some(link);
        if repeated > 0 {
            tracing::debug!("{repeated} frames were resent");
        }
        Ok(())
    }

    /// Records that the receiver has `count` frames, according to a message, which may be older than the last
    /// greeting.
    ///
    /// # Errors
    /// The receiver was sent fewer; returns the valid range.
    pub(super) fn confirm(&self, count: u64) -> Result<(), (u64, u64)> {
        self.confirm_at_least(0, count)
    }

    /// Records that the receiver has `count` frames, according to the greeting of the link over which the lane
    /// resumes.
    ///
    /// # Errors
    /// The receiver was sent fewer, or has confirmed more before; returns the valid range.
    pub(super) fn resume(&self, count: u64) -> Result<(), (u64, u64)> {
        let confirmed = lock(&self.confirmation).confirmed;
        self.confirm_at_least(confirmed, count)
    }

    fn confirm_at_least(&self, least: u64, count: u64) -> Result<(), (u64, u64)> {
        let mut confirmation = lock(&self.confirmation);
        let sent = self.sent.load(Ordering::Acquire);
        if count < least || count > sent {
            return Err((least, sent));
        }
        confirmation.confirmed = confirmation.confirmed.max(count);
        self.changed.notify_all();
        Ok(())
    }

    /// Ends all waits.
    pub(super) fn stop(&self) {
        lock(&self.confirmation).is_over = true;
        self.changed.notify_all();
    }

    /// Sends the orderly end of the lane to the receiver.
    pub(super) fn send_end(&self) {
        if let Some(link) = &mut lock(&self.state).link {
            link.queue_close_notify();
            // An error does not matter: a receiver that has disconnected needs no end.
            let _ = link.flush();
            link.shut_down_write();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// An older link that is set up late does not replace a newer one, even if that is lost by then.
    #[test]
    fn late_link_does_not_replace_newer() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let address = listener.local_addr().expect("is bound");
        let link = || {
            let here = TcpStream::connect(address).expect("connects");
            let (there, _) = listener.accept().expect("is there");
            (Link::accept(here, None).expect("a link"), there)
        };
        let ((old, old_end), (new, _new_end)) = (link(), link());
        let output = LaneOutput::default();
        output.resume_over(new, 2, 0).expect("nothing to repeat");
        // The newer link is lost by now.
        drop(old_end);
        output.resume_over(old, 1, 0).expect("it is ignored");
        let sent = output.send(Box::new(Frame::new()), false).1;
        assert!(matches!(sent, Ok(true)), "the newer link is there");
        let state = lock(&output.state);
        assert_eq!((state.link.is_some(), state.number), (true, 2));
    }
}
