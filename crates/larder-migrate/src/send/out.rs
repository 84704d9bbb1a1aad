//! Where a lane's frames go: its connection, over one link after the other.

use std::io::{self, IoSlice, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use super::kept::{Kept, Spare};
use super::lock;
use crate::encode::{Frame, SLICES_MAX};
use crate::link::Link;

/// A lane's connection and what was sent over it.
#[derive(Default)]
pub(super) struct Out {
    state: Mutex<State>,
    /// Frames that were sent, or would have been if there were a link.
    sent: AtomicU64,
    room: Mutex<Room>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// None while it is lost.
    link: Option<Link>,
    /// The number of that link.
    number: u32,
    kept: Kept,
}

#[derive(Default)]
struct Room {
    /// Frames that the receiver has.
    confirmed: u64,
    is_over: bool,
}

/// A frame could not be written, and its link is lost; the frame is kept.
pub(super) struct Lost {
    pub(super) number: u32,
    pub(super) error: io::Error,
}

impl Out {
    /// Waits until there is room to keep another frame; those that need not be kept any more are put into `free`. `false`:
    /// the session is over.
    pub(super) fn make_room(&self, free: &mut Spare) -> bool {
        let mut room = lock(&self.room);
        loop {
            let confirmed = room.confirmed;
            if room.is_over {
                return false;
            }
            drop(room);
            let mut state = lock(&self.state);
            state.kept.release(confirmed, free);
            if !state.kept.is_full() {
                return true;
            }
            drop(state);
            room = lock(&self.room);
            while room.confirmed == confirmed && !room.is_over {
                room = self.changed.wait(room).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Sends a frame, if there is a link, and keeps it; it comes back if a copy is kept. Whether it was sent.
    pub(super) fn send(&self, mut frame: Box<Frame>, by_device: bool) -> (Option<Box<Frame>>, Result<bool, Lost>) {
        let mut state = lock(&self.state);
        // Before the receiver can say that it has it.
        self.sent.fetch_add(1, Ordering::AcqRel);
        let number = state.number;
        let written = match &mut state.link {
            None => Ok(false),
            Some(link) => {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let count = frame.slices(&mut slices);
                match link.write_all_vectored(&mut slices[..count]) {
                    Ok(()) => Ok(true),
                    Err(error) => Err(Lost { number, error }),
                }
            }
        };
        if written.is_err() {
            state.link = None;
        }
        (state.kept.push(frame, by_device), written)
    }

    /// Goes on over another link, at whose other end so many frames are; not over one that is older than the one that it has
    /// or has lost: on a busy host the thread that an older link was left to may come last.
    ///
    /// # Errors
    /// It is lost as well.
    pub(super) fn go_on_over(&self, mut link: Link, number: u32, received: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        if number < state.number {
            return Ok(());
        }
        state.number = number;
        state.link = None;
        let repeated = state.kept.repeat(received, &mut link)?;
        state.link = Some(link);
        if repeated > 0 {
            tracing::debug!("{repeated} frames were sent again");
        }
        Ok(())
    }

    /// The receiver has so many frames, as a message says, which may be older than what a greeting has said.
    ///
    /// # Errors
    /// It was sent fewer: how many it may have.
    pub(super) fn confirm(&self, count: u64) -> Result<(), (u64, u64)> {
        self.confirm_at_least(0, count)
    }

    /// The same, as the greeting of another link says, from which the lane goes on.
    ///
    /// # Errors
    /// Besides, it has had more before.
    pub(super) fn resume(&self, count: u64) -> Result<(), (u64, u64)> {
        let confirmed = lock(&self.room).confirmed;
        self.confirm_at_least(confirmed, count)
    }

    fn confirm_at_least(&self, least: u64, count: u64) -> Result<(), (u64, u64)> {
        let mut room = lock(&self.room);
        let sent = self.sent.load(Ordering::Acquire);
        if count < least || count > sent {
            return Err((least, sent));
        }
        room.confirmed = room.confirmed.max(count);
        self.changed.notify_all();
        Ok(())
    }

    /// Nobody waits for anything any more.
    pub(super) fn stop(&self) {
        lock(&self.room).is_over = true;
        self.changed.notify_all();
    }

    /// Tells the receiver that nothing more will come.
    pub(super) fn end(&self) {
        if let Some(link) = &mut lock(&self.state).link {
            link.say_end();
            // Whoever is not there any more need not hear it.
            let _ = link.flush();
            link.shut_write();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn an_older_link_that_comes_late_does_not_take_a_newer_ones_place() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let address = listener.local_addr().expect("is bound");
        let link = || {
            let here = TcpStream::connect(address).expect("connects");
            let (there, _) = listener.accept().expect("is there");
            (Link::accept(here, None).expect("a link"), there)
        };
        let ((old, old_end), (new, _new_end)) = (link(), link());
        let out = Out::default();
        out.go_on_over(new, 2, 0).expect("nothing to repeat");
        // It is lost by then.
        drop(old_end);
        out.go_on_over(old, 1, 0).expect("is of no matter");
        let sent = out.send(Box::new(Frame::new()), false).1;
        assert!(matches!(sent, Ok(true)), "the newer link is there");
        let state = lock(&out.state);
        assert_eq!((state.link.is_some(), state.number), (true, 2));
    }
}
