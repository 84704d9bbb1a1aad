//! Connection of the source's QEMU, and the detection of how its migration ends.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::lock;
use crate::stream::{self, Blocks, Parser};
use crate::wire::{CHANNEL_FRAMES_MAX, FRAME_RAW_MAX};

/// One connection of QEMU.
pub(super) struct Channel {
    pub(super) number: u16,
    pub(super) socket: Arc<UnixStream>,
    reading: Mutex<Reading>,
    /// Last bytes that the destination's QEMU returned.
    pub(super) returned: Mutex<Tail>,
}

/// Last bytes of a stream.
#[derive(Default)]
pub(super) struct Tail([u8; 8]);

impl Tail {
    /// Last message of QEMU on a return path once it has loaded everything (`MIG_RP_MSG_SHUT`: be16 1, be16 4, be32
    /// 0).
    const LOADED: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

    pub(super) fn take(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(self.0.len())..];
        self.0.copy_within(bytes.len().., 0);
        let from = self.0.len() - bytes.len();
        self.0[from..].copy_from_slice(bytes);
    }

    pub(super) fn says_loaded(&self) -> bool {
        self.0 == Self::LOADED
    }
}

/// Limit of the bytes in flight between the QEMUs: as few as keep the path busy. QEMU counts bytes in flight as sent
/// and estimates the bandwidth from them, so its downtime is longer by the time that they take.
///
/// Bytes that do not queue behind others take the minimum time; any time beyond the minimum is queueing.
struct Flight {
    bytes: u64,
    least: Duration,
    changed: Instant,
}

impl Flight {
    const BYTES_MIN: u64 = 2 << 20;
    const BYTES_FIRST: u64 = 4 << 20;
    /// Limit that exceeds any window.
    const BYTES_MAX: u64 = 1 << 32;
    /// Queueing time that the limit aims for.
    const WAIT: Duration = Duration::from_millis(40);

    fn new() -> Self {
        Self {
            bytes: Self::BYTES_FIRST,
            least: Duration::MAX,
            changed: Instant::now(),
        }
    }

    /// Adjusts the limit after bytes that took `time`; `kept_back` is true if reading was paused because of the
    /// limit.
    fn took(&mut self, time: Duration, kept_back: bool) {
        self.least = self.least.min(time);
        // A change affects only bytes that were sent after it.
        if self.changed.elapsed() < time {
            return;
        }
        let goal = self.least + Self::WAIT;
        if time > goal {
            let share = goal.as_secs_f64() / time.as_secs_f64();
            let fewer = (self.bytes as f64 * share.max(0.5)) as u64;
            self.bytes = fewer.max(Self::BYTES_MIN);
        } else if kept_back {
            self.bytes = (self.bytes + self.bytes / 2).min(Self::BYTES_MAX);
        } else {
            return;
        }
        self.changed = Instant::now();
    }
}

pub(super) struct Reading {
    pub(super) parser: Parser,
    /// Bytes read that are not yet part of a frame.
    pub(super) left_over: Vec<u8>,
    /// Number of bytes that are part of frames.
    pub(super) offset: u64,
    /// Number of bytes that the destination's QEMU has taken.
    pub(super) delivered: u64,
    /// End offsets of the frames that it has not taken, with the times at which they were cut.
    under_way: VecDeque<(u64, Instant)>,
    flight: Flight,
    /// Set while no lane reads, until more bytes are delivered.
    pub(super) paused: bool,
    /// Set once QEMU has closed the channel and CLOSE was sent to the receiver.
    pub(super) ended: bool,
    /// Set once the destination's QEMU has closed the channel.
    pub(super) closed: bool,
    /// Set if the destination's QEMU closed it before the source's QEMU did.
    pub(super) closed_first: bool,
    /// Set if the destination's QEMU closed it without taking all bytes.
    pub(super) refused: bool,
    done: bool,
}

impl Reading {
    /// Returns true the first time that the channel is complete: nothing is left to read, to deliver, or to return.
    pub(super) fn is_done_now(&mut self) -> bool {
        let delivered = self.refused || self.delivered == self.offset;
        let was_done = self.done;
        self.done = self.ended && self.closed && delivered;
        self.done && !was_done
    }

    /// Counts `len` more bytes as part of a frame.
    pub(super) fn framed(&mut self, len: usize) {
        self.offset += len as u64;
        self.under_way.push_back((self.offset, Instant::now()));
    }

    /// Records that the destination's QEMU has taken the first `bytes` bytes. Returns how many are new, and the time
    /// in flight of the last of their frames. The time is `None` for frames cut before the last loss of the link,
    /// since they waited for the link. Returns `None` if the count exceeds the bytes sent or is below an earlier
    /// count.
    pub(super) fn delivered(&mut self, bytes: u64, link_since: Option<Instant>) -> Option<(u64, Option<Duration>)> {
        if bytes > self.offset {
            return None;
        }
        let more = bytes.checked_sub(self.delivered)?;
        self.delivered = bytes;
        let mut last = None;
        while self.under_way.front().is_some_and(|&(end, _)| end <= bytes) {
            last = self.under_way.pop_front();
        }
        let time = last
            .filter(|(_, at)| link_since.is_none_or(|since| *at > since))
            .map(|(_, at)| at.elapsed());
        if let Some(time) = time {
            self.flight.took(time, self.paused);
        }
        Some((more, time))
    }

    /// Returns true if the receiver may have no room for another frame.
    pub(super) fn must_pause(&self, window: u32) -> bool {
        let bytes = self.offset - self.delivered + FRAME_RAW_MAX as u64;
        bytes > self.flight.bytes.min(window.into()) || self.under_way.len() >= CHANNEL_FRAMES_MAX
    }
}

impl Channel {
    /// Creates the state of a channel that QEMU has just opened.
    pub(super) fn new(number: u16, socket: Arc<UnixStream>, blocks: &Blocks) -> Self {
        Self {
            number,
            socket,
            reading: Mutex::new(Reading {
                parser: Parser::new(blocks),
                left_over: Vec::new(),
                offset: 0,
                delivered: 0,
                under_way: VecDeque::new(),
                flight: Flight::new(),
                paused: false,
                ended: false,
                closed: false,
                closed_first: false,
                refused: false,
                done: false,
            }),
            returned: Mutex::default(),
        }
    }

    /// Returns why the migration on this main channel has not ended well, or `None` if it has, or if that cannot be
    /// known. The parser's facts are used only if it has understood the whole channel.
    pub(super) fn broke_off(&self) -> Option<&'static str> {
        let reading = self.reading();
        let facts = reading.parser.facts();
        let is_main = matches!(facts.channel, stream::Channel::Main | stream::Channel::Resumed);
        if !is_main || facts.losses > 0 || facts.colo {
            return None;
        }
        let answers = facts.return_path || facts.postcopy_resumed;
        let well = if answers {
            lock(&self.returned).says_loaded()
        } else {
            facts.ram_ended && !reading.refused
        };
        match (well, reading.closed_first || reading.refused) {
            (true, _) => None,
            (false, true) => Some("the destination's QEMU has closed its end, or has exited"),
            (false, false) => Some("the source's QEMU has cancelled it, aborted it, or exited"),
        }
    }

    pub(super) fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// The limit grows while reading is held back without queueing, and shrinks when bytes queue.
    fn bytes_in_flight_adapt_to_queueing() {
        let mut flight = Flight::new();
        let mut step = |millis: u64, kept_back: bool| {
            // Pretends that the last change was long ago.
            flight.changed = Instant::now().checked_sub(Duration::from_secs(9)).expect("a clock");
            flight.took(Duration::from_millis(millis), kept_back);
            flight.bytes
        };
        // A long path without other bytes in flight.
        assert_eq!(step(100, false), Flight::BYTES_FIRST);
        let more = step(120, true);
        assert!(more > Flight::BYTES_FIRST);
        // Bytes queue behind one another.
        let fewer = step(280, true);
        assert_eq!(fewer, more / 2);
        for _ in 0..20 {
            step(1_000, true);
        }
        assert_eq!(step(1_000, true), Flight::BYTES_MIN);
    }

    /// The last message of a return path is recognised however its bytes are split.
    #[test]
    fn tail_is_independent_of_read_sizes() {
        let said = [&[9; 30][..], &Tail::LOADED].concat();
        for piece in 1..=said.len() {
            let mut tail = Tail::default();
            for bytes in said.chunks(piece) {
                assert!(!tail.says_loaded());
                tail.take(bytes);
            }
            assert!(tail.says_loaded(), "{piece}");
            tail.take(&[]);
            assert!(tail.says_loaded());
            tail.take(&[0]);
            assert!(!tail.says_loaded());
        }
    }
}
