//! Messages queued for the other side, and the count of those received from it.
//!
//! A message is kept until the other side has confirmed it, and is otherwise sent again over the next link. Received
//! messages are counted, and only over the session's current link: so each message is taken once, however links end.
//!
//! Memory is bounded: once more than [`UNCONFIRMED_BYTES_MAX`] bytes are unconfirmed, no message is accepted and the
//! session fails.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::ControlError;
use crate::wire::{LANES_MAX, Message, MessageKind};

/// Unconfirmed bytes above which [`Mailbox::send_when_room`] waits.
const UNCONFIRMED_BYTES_WAIT: usize = 1 << 20;
/// Unconfirmed bytes above which no message is accepted. It bounds the memory that a peer can occupy by never
/// confirming.
const UNCONFIRMED_BYTES_MAX: usize = 8 << 20;
/// Minimum bytes per send, if that many are queued.
const SEND_BATCH_BYTES: usize = 64 << 10;
/// Received bytes after which they are confirmed early; otherwise they are confirmed each second.
const CONFIRM_BYTES: usize = 128 << 10;
/// Received frames of a lane after which they are confirmed early.
const CONFIRM_FRAMES: u64 = 4;

/// Count of items received over successive links; only those over the session's current link count.
#[derive(Debug, Default)]
pub struct ReceivedCount {
    link: u32,
    count: u64,
}

impl ReceivedCount {
    /// Switches to another link; items that still arrive over earlier links do not count. Returns the count so far.
    pub fn switch_link(&mut self, link: u32) -> u64 {
        self.link = link;
        self.count
    }

    /// Counts one more item received over `link`; returns the new count, or `None` if `link` is no longer the
    /// session's.
    pub fn count_one(&mut self, link: u32) -> Option<u64> {
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
pub(crate) enum CloseCondition {
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
    sent_on_link: usize,
    sent_on_link_bytes: usize,
    /// Number of messages that were handed to any link.
    sent: u64,
    overflowed: bool,
    received: ReceivedCount,
    /// Received bytes that are not confirmed yet.
    unconfirmed_bytes: usize,
    /// Received frames of each lane.
    receipts: Vec<Receipt>,
    /// Number of the link of which a lane is lost.
    lost_lane_link: Option<u32>,
    closing: Option<CloseCondition>,
    closed: bool,
}

#[derive(Clone, Copy, Default)]
struct Receipt {
    frames: u64,
    confirmed: u64,
}

/// State of the mailbox after a collection.
pub(super) struct Collected {
    /// Set if no more messages will be queued.
    pub(super) closing: Option<CloseCondition>,
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
        while state.bytes.len() > UNCONFIRMED_BYTES_WAIT && state.closing.is_none() && !state.closed {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.append(&mut state, message);
    }

    /// Records that `frames` frames of a lane have been received in full; this is confirmed now and then.
    pub fn record_receipt(&self, lane: u16, frames: u64) {
        let at = usize::from(lane.min(LANES_MAX - 1));
        let mut state = self.lock();
        if state.receipts.len() <= at {
            state.receipts.resize(at + 1, Receipt::default());
        }
        let receipt = &mut state.receipts[at];
        receipt.frames = frames;
        if frames - receipt.confirmed == CONFIRM_FRAMES {
            self.wake();
        }
    }

    /// Lets the connection end once all queued messages are sent.
    pub fn close(&self) {
        self.close_when(CloseCondition::Sent);
    }

    /// Lets the connection end once the other side has confirmed all messages; it may reconnect for that.
    pub fn close_when_confirmed(&self) {
        self.close_when(CloseCondition::Confirmed);
    }

    fn close_when(&self, closing: CloseCondition) {
        self.lock().closing.get_or_insert(closing);
        self.room.notify_all();
        self.wake();
    }

    fn append(&self, state: &mut State, message: &Message) {
        if state.closing.is_some() || state.closed {
            return;
        }
        if state.bytes.len() > UNCONFIRMED_BYTES_MAX {
            state.overflowed = true;
            self.wake();
            return;
        }
        let was_empty = state.sent_on_link == state.lens.len();
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
    pub(crate) fn mark_lane_lost(&self, link: u32) {
        let mut state = self.lock();
        state.lost_lane_link = state.lost_lane_link.max(Some(link));
        drop(state);
        self.wake();
    }

    /// Returns true if a lane of this link is lost.
    pub(super) fn has_lost_lane(&self, link: u32) -> bool {
        self.lock().lost_lane_link == Some(link)
    }

    /// Switches to another link; returns how many messages were received, from which the other side is to resume.
    pub(crate) fn switch_link(&self, link: u32) -> u64 {
        self.lock().received.switch_link(link)
    }

    /// Counts a message of a kept kind received over this link. Returns `None` if the link is no longer the
    /// session's, else whether to confirm now.
    pub(super) fn count_received(&self, link: u32, len: usize) -> Option<bool> {
        let mut state = self.lock();
        state.received.count_one(link)?;
        state.unconfirmed_bytes += len;
        Some(state.unconfirmed_bytes > CONFIRM_BYTES)
    }

    /// Records that the other side has received `count` messages.
    ///
    /// # Errors
    /// The other side was not sent so many, or has confirmed more before.
    pub(crate) fn confirm(&self, count: u64) -> Result<(), ControlError> {
        let mut state = self.lock();
        if count < state.first || count > state.sent {
            return Err(ControlError::InvalidCount { count, least: state.first, most: state.sent });
        }
        for _ in state.first..count {
            let len = state.lens.pop_front().map_or(0, |len| len as usize);
            state.bytes.drain(..len);
            if state.sent_on_link > 0 {
                state.sent_on_link -= 1;
                state.sent_on_link_bytes -= len;
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
        (state.sent_on_link, state.sent_on_link_bytes) = (0, 0);
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
        if state.overflowed {
            return Err(ControlError::Unconfirmed);
        }
        if confirms {
            state.unconfirmed_bytes = 0;
            Message::new(MessageKind::Alive, 0, state.received.count).append_to(out);
        }
        for (lane, receipt) in (0..).zip(&mut state.receipts) {
            if receipt.frames - receipt.confirmed >= CONFIRM_FRAMES || confirms && receipt.frames > receipt.confirmed {
                receipt.confirmed = receipt.frames;
                Message::new(MessageKind::Received, lane, receipt.frames).append_to(out);
            }
        }
        while out.len() < SEND_BATCH_BYTES && state.sent_on_link < state.lens.len() {
            let len = state.lens[state.sent_on_link] as usize;
            let from = state.sent_on_link_bytes;
            append_range(&state.bytes, from..from + len, out);
            state.sent_on_link += 1;
            state.sent_on_link_bytes += len;
            state.sent = state.sent.max(state.first + state.sent_on_link as u64);
        }
        Ok(Collected { closing: state.closing, has_more: state.sent_on_link < state.lens.len() })
    }

    /// Returns the state of the mailbox without taking messages.
    pub(super) fn peek(&self) -> Result<Collected, ControlError> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        let state = self.lock();
        if state.overflowed {
            return Err(ControlError::Unconfirmed);
        }
        Ok(Collected { closing: state.closing, has_more: state.sent_on_link < state.lens.len() })
    }

    /// Returns the condition for the end of the connection, or `None` while it is not closing.
    pub(crate) fn closing(&self) -> Option<CloseCondition> {
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
        (state.sent_on_link, state.sent_on_link_bytes) = (0, 0);
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
        mailbox.send(&Message::with_body(MessageKind::Note, 0, text.as_bytes()));
    }

    /// Takes all messages that are to be sent now; returns their texts.
    fn collect_texts(mailbox: &Mailbox) -> Vec<String> {
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
        assert_eq!(collect_texts(&mailbox), ["a", "b", "c"]);
        assert!(collect_texts(&mailbox).is_empty());
        mailbox.confirm(1).expect("it was sent");
        note(&mailbox, "d");
        mailbox.resume(2).expect("it was sent");
        assert_eq!(collect_texts(&mailbox), ["c", "d"]);
        mailbox.resume(4).expect("it was sent");
        assert!(mailbox.is_confirmed() && collect_texts(&mailbox).is_empty());
    }

    /// A count above the messages sent, or below an earlier count, is an error.
    #[test]
    fn confirm_rejects_unsent_and_decreasing_counts() {
        let mailbox = Mailbox::new().expect("an eventfd");
        ["a", "b"].iter().for_each(|text| note(&mailbox, text));
        assert!(mailbox.confirm(1).is_err(), "nothing was sent");
        let _ = collect_texts(&mailbox);
        mailbox.confirm(1).expect("it was sent");
        assert!(mailbox.resume(3).is_err() && mailbox.resume(0).is_err());
        mailbox.resume(1).expect("as before");
        // Both messages were sent over the previous link.
        mailbox.confirm(2).expect("it was sent");
        assert!(collect_texts(&mailbox).is_empty());
    }

    /// A message that still arrives over a previous link is not counted.
    #[test]
    fn old_link_messages_are_not_counted() {
        let mailbox = Mailbox::new().expect("an eventfd");
        assert_eq!(mailbox.count_received(0, 24), Some(false));
        assert_eq!(mailbox.switch_link(3), 1);
        assert_eq!(mailbox.count_received(0, 24), None);
        assert_eq!(mailbox.count_received(3, 24), Some(false));
        assert_eq!(mailbox.switch_link(4), 2);
    }

    /// A peer that confirms nothing fails the session before the mailbox exceeds its limit by more than a message.
    #[test]
    fn unconfirmed_messages_are_bounded() {
        let mailbox = Mailbox::new().expect("an eventfd");
        let text = "x".repeat(60 << 10);
        (0..1000).for_each(|_| note(&mailbox, &text));
        assert!(mailbox.lock().bytes.len() < UNCONFIRMED_BYTES_MAX + (64 << 10));
        assert!(matches!(mailbox.collect(&mut Vec::new(), false), Err(ControlError::Unconfirmed)));
    }
}
