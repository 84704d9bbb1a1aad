//! Messages on their way to the other side, and how many of its own have come.
//!
//! A message is kept until the other side has confirmed it, and is sent again over the next link if it was not. What comes
//! is counted, and only over the link that is the session's now: so each message is taken once, however links end.
//!
//! Memory is bounded: nothing more is taken once [`KEPT_MAX`] bytes wait to be confirmed, and the session fails.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::ControlError;
use crate::wire::{Kind, LANES_MAX, Message};

/// Bytes that may be kept before [`Mailbox::send_when_room`] waits.
const WAITING_MAX: usize = 1 << 20;
/// Bytes that may be kept at all: what a peer that never confirms makes this side hold.
const KEPT_MAX: usize = 8 << 20;
/// Bytes that are sent at a time, at least if there are so many.
const SENT_AT_ONCE: usize = 64 << 10;
/// What comes is confirmed after so many bytes, besides each second.
const CONFIRM_EVERY: usize = 128 << 10;
/// Of a lane, after so many frames.
const CONFIRM_FRAMES: u64 = 4;

/// What came over one link after the other, counted over the one that is the session's now.
#[derive(Debug, Default)]
pub struct Counted {
    link: u32,
    count: u64,
}

impl Counted {
    /// Another link is the session's: what still comes over those before does not count. Returns how much has come.
    pub fn turn(&mut self, link: u32) -> u64 {
        self.link = link;
        self.count
    }

    /// One more has come over this link; how many that are. `None`: it is not the session's any more.
    pub fn one(&mut self, link: u32) -> Option<u64> {
        if link != self.link {
            return None;
        }
        self.count += 1;
        Some(self.count)
    }
}

/// Both ways of a control connection, whatever link it goes over.
pub struct Mailbox {
    state: Mutex<State>,
    room: Condvar,
    wake: OwnedFd,
}

/// When a connection may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Once all is sent, or the connection is lost.
    Sent,
    /// Once the other side has confirmed all.
    Confirmed,
}

#[derive(Default)]
struct State {
    /// Messages that are not confirmed, one after another.
    bytes: VecDeque<u8>,
    lens: VecDeque<u32>,
    /// The number of the first of them.
    first: u64,
    /// Of these, those that were handed out for the link that there is now, and their bytes.
    handed: usize,
    handed_bytes: usize,
    /// Messages that were handed out at all.
    sent: u64,
    too_much: bool,
    came: Counted,
    /// Bytes that came and are not confirmed.
    unconfirmed: usize,
    /// Of each lane.
    receipts: Vec<Receipt>,
    /// A lane of this link is lost.
    lost: Option<u32>,
    closing: Option<Closing>,
    closed: bool,
}

#[derive(Clone, Copy, Default)]
struct Receipt {
    frames: u64,
    told: u64,
}

/// What was found in the mailbox.
pub(super) struct Collected {
    /// Nothing more will be left in it.
    pub(super) closing: Option<Closing>,
    /// Something is still in it.
    pub(super) has_more: bool,
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            room: Condvar::new(),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    /// Leaves a message, which is sent soon, or never if the session ends before.
    pub fn send(&self, message: &Message) {
        let mut state = self.lock();
        self.append(&mut state, message);
    }

    /// The same, but waits while too much waits: for what a QEMU says, of which there is no end.
    pub fn send_when_room(&self, message: &Message) {
        let mut state = self.lock();
        while state.bytes.len() > WAITING_MAX && state.closing.is_none() && !state.closed {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.append(&mut state, message);
    }

    /// So many frames of a lane have come whole, which is told at times.
    pub fn receipt(&self, lane: u16, frames: u64) {
        let at = usize::from(lane.min(LANES_MAX - 1));
        let mut state = self.lock();
        if state.receipts.len() <= at {
            state.receipts.resize(at + 1, Receipt::default());
        }
        let receipt = &mut state.receipts[at];
        receipt.frames = frames;
        if frames - receipt.told == CONFIRM_FRAMES {
            self.wake();
        }
    }

    /// Lets the connection end once all that waits is sent.
    pub fn close(&self) {
        self.close_when(Closing::Sent);
    }

    /// Lets the connection end once the other side has confirmed all, for which it may connect again.
    pub fn close_when_confirmed(&self) {
        self.close_when(Closing::Confirmed);
    }

    fn close_when(&self, closing: Closing) {
        self.lock().closing.get_or_insert(closing);
        self.room.notify_all();
        self.wake();
    }

    fn append(&self, state: &mut State, message: &Message) {
        if state.closing.is_some() || state.closed {
            return;
        }
        if state.bytes.len() > KEPT_MAX {
            state.too_much = true;
            self.wake();
            return;
        }
        let was_empty = state.handed == state.lens.len();
        message.append_to(&mut state.bytes);
        state.lens.push_back(message.wire_len() as u32);
        if was_empty {
            self.wake();
        }
    }

    fn wake(&self) {
        // It fails only when it counts up to 2^64: somebody is awake then.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Readable when there is something to do; [`Self::collect`] ends that.
    pub(super) fn wake_event(&self) -> &OwnedFd {
        &self.wake
    }

    /// A lane of this link is lost, and so the link. The control connection lives on a little: perhaps the other side has
    /// ended, and says why.
    pub(crate) fn lane_lost(&self, link: u32) {
        let mut state = self.lock();
        state.lost = state.lost.max(Some(link));
        drop(state);
        self.wake();
    }

    /// Whether one of this link is.
    pub(super) fn has_lost_lane(&self, link: u32) -> bool {
        self.lock().lost == Some(link)
    }

    /// Another link is the session's. How many messages have come, for the other side to go on from.
    pub(crate) fn turn(&self, link: u32) -> u64 {
        self.lock().came.turn(link)
    }

    /// A message that is kept has come over this link; `None` if it is not the session's any more, else whether it is time
    /// to confirm.
    pub(super) fn heard(&self, link: u32, len: usize) -> Option<bool> {
        let mut state = self.lock();
        state.came.one(link)?;
        state.unconfirmed += len;
        Some(state.unconfirmed > CONFIRM_EVERY)
    }

    /// The other side has so many messages.
    ///
    /// # Errors
    /// It has not been sent so many, or had more before.
    pub(crate) fn confirm(&self, count: u64) -> Result<(), ControlError> {
        let mut state = self.lock();
        if count < state.first || count > state.sent {
            return Err(ControlError::Confirmed {
                count,
                least: state.first,
                most: state.sent,
            });
        }
        for _ in state.first..count {
            let len = state.lens.pop_front().map_or(0, |len| len as usize);
            state.bytes.drain(..len);
            if state.handed > 0 {
                state.handed -= 1;
                state.handed_bytes -= len;
            }
        }
        state.first = count;
        self.room.notify_all();
        Ok(())
    }

    /// Goes on over another link, on which the other side has shown that it has so many messages.
    ///
    /// # Errors
    /// As [`Self::confirm`].
    pub(crate) fn resume(&self, count: u64) -> Result<(), ControlError> {
        self.confirm(count)?;
        let mut state = self.lock();
        (state.handed, state.handed_bytes) = (0, 0);
        Ok(())
    }

    /// Appends what was left, in whole messages, to `out`, with what has come before it if `confirms`.
    ///
    /// # Errors
    /// The other side has confirmed nothing for too long.
    pub(super) fn collect(&self, out: &mut Vec<u8>, confirms: bool) -> Result<Collected, ControlError> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        let mut state = self.lock();
        if state.too_much {
            return Err(ControlError::Unconfirmed);
        }
        if confirms {
            state.unconfirmed = 0;
            Message::new(Kind::Alive, 0, state.came.count).append_to(out);
        }
        for (lane, receipt) in (0..).zip(&mut state.receipts) {
            if receipt.frames - receipt.told >= CONFIRM_FRAMES || confirms && receipt.frames > receipt.told {
                receipt.told = receipt.frames;
                Message::new(Kind::Received, lane, receipt.frames).append_to(out);
            }
        }
        while out.len() < SENT_AT_ONCE && state.handed < state.lens.len() {
            let len = state.lens[state.handed] as usize;
            let from = state.handed_bytes;
            append_range(&state.bytes, from..from + len, out);
            state.handed += 1;
            state.handed_bytes += len;
            state.sent = state.sent.max(state.first + state.handed as u64);
        }
        Ok(Collected {
            closing: state.closing,
            has_more: state.handed < state.lens.len(),
        })
    }

    /// The same, and hands out nothing.
    pub(super) fn look(&self) -> Result<Collected, ControlError> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        let state = self.lock();
        if state.too_much {
            return Err(ControlError::Unconfirmed);
        }
        Ok(Collected {
            closing: state.closing,
            has_more: state.handed < state.lens.len(),
        })
    }

    /// Whether, and how, the connection is to end.
    pub(crate) fn closing(&self) -> Option<Closing> {
        self.lock().closing
    }

    /// Whether the other side has all that was left.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.lock().lens.is_empty()
    }

    /// Nothing is sent any more.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.bytes.clear();
        state.lens.clear();
        (state.handed, state.handed_bytes) = (0, 0);
        self.room.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn append_range(bytes: &VecDeque<u8>, range: std::ops::Range<usize>, out: &mut Vec<u8>) {
    let (front, back) = bytes.as_slices();
    let split = front.len();
    let clamp = |at: usize| at.saturating_sub(split);
    out.extend_from_slice(&front[range.start.min(split)..range.end.min(split)]);
    out.extend_from_slice(&back[clamp(range.start)..clamp(range.end)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(mailbox: &Mailbox, text: &str) {
        mailbox.send(&Message::with_body(Kind::Note, 0, text.as_bytes()));
    }

    /// All that is handed out now, as text.
    fn handed(mailbox: &Mailbox) -> Vec<String> {
        let mut bytes = Vec::new();
        while mailbox.collect(&mut bytes, false).expect("little waits").has_more {}
        let mut texts = Vec::new();
        let mut rest = &bytes[..];
        while let Some((message, len)) = Message::parse(rest).expect("messages") {
            texts.push(message.text());
            rest = &rest[len..];
        }
        texts
    }

    #[test]
    fn what_was_not_confirmed_is_sent_again_in_its_order_and_nothing_else() {
        let mailbox = Mailbox::new().expect("an eventfd");
        ["a", "b", "c"].iter().for_each(|text| note(&mailbox, text));
        assert_eq!(handed(&mailbox), ["a", "b", "c"]);
        assert!(handed(&mailbox).is_empty());
        mailbox.confirm(1).expect("it was sent");
        note(&mailbox, "d");
        mailbox.resume(2).expect("it was sent");
        assert_eq!(handed(&mailbox), ["c", "d"]);
        mailbox.resume(4).expect("it was sent");
        assert!(mailbox.is_confirmed() && handed(&mailbox).is_empty());
    }

    #[test]
    fn a_peer_can_confirm_only_what_it_was_sent_and_never_less_than_before() {
        let mailbox = Mailbox::new().expect("an eventfd");
        ["a", "b"].iter().for_each(|text| note(&mailbox, text));
        assert!(mailbox.confirm(1).is_err(), "nothing was sent");
        let _ = handed(&mailbox);
        mailbox.confirm(1).expect("it was sent");
        assert!(mailbox.resume(3).is_err() && mailbox.resume(0).is_err());
        mailbox.resume(1).expect("as before");
        // It was sent over the link before.
        mailbox.confirm(2).expect("it was sent");
        assert!(handed(&mailbox).is_empty());
    }

    #[test]
    fn what_still_comes_over_an_old_link_does_not_count() {
        let mailbox = Mailbox::new().expect("an eventfd");
        assert_eq!(mailbox.heard(0, 24), Some(false));
        assert_eq!(mailbox.turn(3), 1);
        assert_eq!(mailbox.heard(0, 24), None);
        assert_eq!(mailbox.heard(3, 24), Some(false));
        assert_eq!(mailbox.turn(4), 2);
    }

    #[test]
    fn a_peer_that_confirms_nothing_cannot_make_it_keep_more_and_more() {
        let mailbox = Mailbox::new().expect("an eventfd");
        let text = "x".repeat(60 << 10);
        (0..1000).for_each(|_| note(&mailbox, &text));
        assert!(mailbox.lock().bytes.len() < KEPT_MAX + (64 << 10));
        assert!(matches!(
            mailbox.collect(&mut Vec::new(), false),
            Err(ControlError::Unconfirmed)
        ));
    }
}
