//! Messages queued for the other side, and the count of those received from it.
//!
//! A message is kept until the other side has confirmed it, and is otherwise sent again over the next link. Received
//! messages are counted, and only over the session's current link: so each message is taken once, however links end.
//!
//! Memory is bounded: once more than [`KEPT_MAX`] bytes are unconfirmed, no message is accepted and the session
//! fails.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::ControlError;
use crate::wire::{Kind, LANES_MAX, Message};

/// Unconfirmed bytes above which [`Mailbox::send_when_room`] waits.
const WAITING_MAX: usize = 1 << 20;
/// Unconfirmed bytes above which no message is accepted. It bounds the memory that a peer can occupy by never
/// confirming.
const KEPT_MAX: usize = 8 << 20;
/// Minimum bytes per send, if that many are queued.
const SENT_AT_ONCE: usize = 64 << 10;
/// Received bytes after which they are confirmed early; otherwise they are confirmed each second.
const CONFIRM_EVERY: usize = 128 << 10;
/// Received frames of a lane after which they are confirmed early.
const CONFIRM_FRAMES: u64 = 4;

/// Count of items received over successive links; only those over the session's current link count.
#[derive(Debug, Default)]
pub struct Counted {
    link: u32,
    count: u64,
}

impl Counted {
    /// Switches to another link; items that still arrive over earlier links do not count. Returns the count so far.
    pub fn turn(&mut self, link: u32) -> u64 {
        self.link = link;
        self.count
    }

    /// Counts one more item received over `link`; returns the new count, or `None` if `link` is no longer the
    /// session's.
    pub fn one(&mut self, link: u32) -> Option<u64> {
        if link != self.link {
            return None;
        }
        self.count += 1;
        Some(self.count)
    }
}

/// Both directions of a control connection, independent of the link that carries them.
pub struct Mailbox {
    state: Mutex<State>,
    room: Condvar,
    wake: OwnedFd,
}

/// Condition under which a connection may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// All messages are sent, or the connection is lost.
    Sent,
    /// The other side has confirmed all messages.
    Confirmed,
}

#[derive(Default)]
struct State {
    /// Unconfirmed messages, encoded, one after another.
    bytes: VecDeque<u8>,
    lens: VecDeque<u32>,
    /// Number of the first unconfirmed message.
    first: u64,
    /// Unconfirmed messages that were handed to the current link, and their bytes.
    handed: usize,
    handed_bytes: usize,
    /// Number of messages that were handed to any link.
    sent: u64,
    too_much: bool,
    came: Counted,
    /// Received bytes that are not confirmed yet.
    unconfirmed: usize,
    /// Received frames of each lane.
    receipts: Vec<Receipt>,
    /// Number of the link of which a lane is lost.
    lost: Option<u32>,
    closing: Option<Closing>,
    closed: bool,
}

#[derive(Clone, Copy, Default)]
struct Receipt {
    frames: u64,
    told: u64,
}

/// State of the mailbox after a collection.
pub(super) struct Collected {
    /// Set if no more messages will be queued.
    pub(super) closing: Option<Closing>,
    /// True if messages are still queued.
    pub(super) has_more: bool,
}

impl Mailbox {
    /// Creates an empty mailbox.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            room: Condvar::new(),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    /// Queues a message. It is sent soon, or never if the session ends before.
    pub fn send(&self, message: &Message) {
        let mut state = self.lock();
        self.append(&mut state, message);
    }

    /// Queues a message like [`Self::send`], but waits while too much is queued. For output of QEMU, which is
    /// unbounded.
    pub fn send_when_room(&self, message: &Message) {
        let mut state = self.lock();
        while state.bytes.len() > WAITING_MAX && state.closing.is_none() && !state.closed {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.append(&mut state, message);
    }

    /// Records that `frames` frames of a lane have been received in full; this is confirmed now and then.
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

    /// Lets the connection end once all queued messages are sent.
    pub fn close(&self) {
        self.close_when(Closing::Sent);
    }

    /// Lets the connection end once the other side has confirmed all messages; it may reconnect for that.
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
        // The write fails only when the counter is at its maximum, and then the reader is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Returns the event that is readable while there is work to do; [`Self::collect`] clears it.
    pub(super) fn wake_event(&self) -> &OwnedFd {
        &self.wake
    }

    /// Records that a lane of this link is lost, and thereby the link. The control connection stays open for a
    /// moment: the other side may have ended and sent the reason.
    pub(crate) fn lane_lost(&self, link: u32) {
        let mut state = self.lock();
        state.lost = state.lost.max(Some(link));
        drop(state);
        self.wake();
    }

    /// Returns true if a lane of this link is lost.
    pub(super) fn has_lost_lane(&self, link: u32) -> bool {
        self.lock().lost == Some(link)
    }

    /// Switches to another link; returns how many messages were received, from which the other side is to resume.
    pub(crate) fn turn(&self, link: u32) -> u64 {
        self.lock().came.turn(link)
    }

    /// Counts a message of a kept kind received over this link. Returns `None` if the link is no longer the
    /// session's, else whether to confirm now.
    pub(super) fn heard(&self, link: u32, len: usize) -> Option<bool> {
        let mut state = self.lock();
        state.came.one(link)?;
        state.unconfirmed += len;
        Some(state.unconfirmed > CONFIRM_EVERY)
    }

    /// Records that the other side has received `count` messages.
    ///
    /// # Errors
    /// The other side was not sent so many, or has confirmed more before.
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

    /// Resumes over another link, on which the other side has confirmed `count` messages.
    ///
    /// # Errors
    /// The count is invalid, as for [`Self::confirm`].
    pub(crate) fn resume(&self, count: u64) -> Result<(), ControlError> {
        self.confirm(count)?;
        let mut state = self.lock();
        (state.handed, state.handed_bytes) = (0, 0);
        Ok(())
    }

    /// Appends the queued messages to `out`, whole ones only, preceded by a confirmation of received ones if
    /// `confirms`.
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

    /// Returns the state of the mailbox without taking messages.
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

    /// Returns the condition for the end of the connection, or `None` while it is not closing.
    pub(crate) fn closing(&self) -> Option<Closing> {
        self.lock().closing
    }

    /// Returns true if the other side has confirmed all messages.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.lock().lens.is_empty()
    }

    /// Drops all messages and accepts no more.
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

    /// Takes all messages that are to be sent now; returns their texts.
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

    /// A new link gets the messages that the other side lacks, in order, and no others.
    #[test]
    fn unconfirmed_messages_are_resent_in_order() {
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

    /// A count above the messages sent, or below an earlier count, is an error.
    #[test]
    fn confirm_rejects_unsent_and_decreasing_counts() {
        let mailbox = Mailbox::new().expect("an eventfd");
        ["a", "b"].iter().for_each(|text| note(&mailbox, text));
        assert!(mailbox.confirm(1).is_err(), "nothing was sent");
        let _ = handed(&mailbox);
        mailbox.confirm(1).expect("it was sent");
        assert!(mailbox.resume(3).is_err() && mailbox.resume(0).is_err());
        mailbox.resume(1).expect("as before");
        // Both messages were sent over the previous link.
        mailbox.confirm(2).expect("it was sent");
        assert!(handed(&mailbox).is_empty());
    }

    /// A message that still arrives over a previous link is not counted.
    #[test]
    fn old_link_messages_are_not_counted() {
        let mailbox = Mailbox::new().expect("an eventfd");
        assert_eq!(mailbox.heard(0, 24), Some(false));
        assert_eq!(mailbox.turn(3), 1);
        assert_eq!(mailbox.heard(0, 24), None);
        assert_eq!(mailbox.heard(3, 24), Some(false));
        assert_eq!(mailbox.turn(4), 2);
    }

    /// A peer that confirms nothing fails the session before the mailbox exceeds its limit by more than a message.
    #[test]
    fn unconfirmed_messages_are_bounded() {
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
