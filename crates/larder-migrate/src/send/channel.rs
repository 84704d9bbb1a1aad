//! Connection of the source's QEMU, and the detection of how its migration ends.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::lock;
use crate::stream::{self, Blocks, Parser};
use crate::wire::{CHANNEL_FRAMES_MAX, FRAME_RAW_MAX};

/// One connection of QEMU.
pub(super) struct SourceChannel {
    pub(super) number: u16,
    pub(super) socket: Arc<UnixStream>,
    read_state: Mutex<ReadState>,
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

    pub(super) fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(self.0.len())..];
        self.0.copy_within(bytes.len().., 0);
        let from = self.0.len() - bytes.len();
        self.0[from..].copy_from_slice(bytes);
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.0 == Self::LOADED
    }
}

/// Limit of the bytes in flight between the QEMUs: as few as keep the path busy. QEMU counts bytes in flight as sent
/// and estimates the bandwidth from them, so its downtime is longer by the time that they take.
///
/// Bytes that do not queue behind others take the minimum time; any time beyond the minimum is queueing.
struct FlightLimit {
    bytes: u64,
    least_time: Duration,
    changed: Instant,
}

impl FlightLimit {
    const BYTES_MIN: u64 = 2 << 20;
    const BYTES_INITIAL: u64 = 4 << 20;
    /// Limit that exceeds any window.
    const BYTES_MAX: u64 = 1 << 32;
    /// Queueing time that the limit aims for.
    const QUEUEING_TARGET: Duration = Duration::from_millis(40);

    fn new() -> Self {
        Self { bytes: Self::BYTES_INITIAL, least_time: Duration::MAX, changed: Instant::now() }
    }

    /// Adjusts the limit after bytes that took `time`; `was_paused` is true if reading was paused because of the
    /// limit.
    fn update(&mut self, time: Duration, was_paused: bool) {
        self.least_time = self.least_time.min(time);
        // A change affects only bytes that were sent after it.
        if self.changed.elapsed() < time {
            return;
        }
        let goal = self.least_time + Self::QUEUEING_TARGET;
        if time > goal {
            let share = goal.as_secs_f64() / time.as_secs_f64();
            let fewer = (self.bytes as f64 * share.max(0.5)) as u64;
            self.bytes = fewer.max(Self::BYTES_MIN);
        } else if was_paused {
            self.bytes = (self.bytes + self.bytes / 2).min(Self::BYTES_MAX);
        } else {
            return;
        }
        self.changed = Instant::now();
    }
}

pub(super) struct ReadState {
    pub(super) parser: Parser,
    /// Bytes read that are not yet part of a frame.
    pub(super) left_over: Vec<u8>,
    /// Number of bytes that are part of frames.
    pub(super) offset: u64,
    /// Number of bytes that the destination's QEMU has taken.
    pub(super) delivered: u64,
    /// End offsets of the frames that it has not taken, with the times at which they were cut.
    in_flight: VecDeque<(u64, Instant)>,
    flight_limit: FlightLimit,
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

impl ReadState {
    /// Returns true the first time that the channel is complete: nothing is left to read, to deliver, or to return.
    pub(super) fn becomes_done(&mut self) -> bool {
        let delivered = self.refused || self.delivered == self.offset;
        let was_done = self.done;
        self.done = self.ended && self.closed && delivered;
        self.done && !was_done
    }

    /// Counts `len` more bytes as part of a frame.
    pub(super) fn add_frame(&mut self, len: usize) {
        self.offset += len as u64;
        self.in_flight.push_back((self.offset, Instant::now()));
    }

    /// Records that the destination's QEMU has taken the first `bytes` bytes. Returns how many are new, and the time
    /// in flight of the last of their frames. The time is `None` for frames cut before the last loss of the link,
    /// since they waited for the link. Returns `None` if the count exceeds the bytes sent or is below an earlier
    /// count.
    pub(super) fn record_delivered(
        &mut self,
        bytes: u64,
        link_since: Option<Instant>,
    ) -> Option<(u64, Option<Duration>)> {
        if bytes > self.offset {
            return None;
        }
        let more = bytes.checked_sub(self.delivered)?;
        self.delivered = bytes;
        let mut last = None;
        while self.in_flight.front().is_some_and(|&(end, _)| end <= bytes) {
            last = self.in_flight.pop_front();
        }
        let time = last.filter(|(_, at)| link_since.is_none_or(|since| *at > since)).map(|(_, at)| at.elapsed());
        if let Some(time) = time {
            self.flight_limit.update(time, self.paused);
        }
        Some((more, time))
    }

    /// Returns true if the receiver may have no room for another frame.
    pub(super) fn must_pause(&self, window: u32) -> bool {
        let bytes = self.offset - self.delivered + FRAME_RAW_MAX as u64;
        bytes > self.flight_limit.bytes.min(window.into()) || self.in_flight.len() >= CHANNEL_FRAMES_MAX
    }
}

impl SourceChannel {
    /// Creates the state of a channel that QEMU has just opened.
    pub(super) fn new(number: u16, socket: Arc<UnixStream>, blocks: &Blocks) -> Self {
        Self {
            number,
            socket,
            read_state: Mutex::new(ReadState {
                parser: Parser::new(blocks),
                left_over: Vec::new(),
                offset: 0,
                delivered: 0,
                in_flight: VecDeque::new(),
                flight_limit: FlightLimit::new(),
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
    pub(super) fn abort_reason(&self) -> Option<&'static str> {
        let reading = self.lock_state();
        let facts = reading.parser.facts();
        let is_main = matches!(facts.channel, stream::ChannelKind::Main | stream::ChannelKind::Resumed);
        if !is_main || facts.losses > 0 || facts.colo {
            return None;
        }
        let has_return_path = facts.return_path || facts.postcopy_resumed;
        let succeeded =
            if has_return_path { lock(&self.returned).is_loaded() } else { facts.ram_ended && !reading.refused };
        match (succeeded, reading.closed_first || reading.refused) {
            (true, _) => None,
            (false, true) => Some("the destination's QEMU has closed its end, or has exited"),
            (false, false) => Some("the source's QEMU has cancelled it, aborted it, or exited"),
        }
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, ReadState> {
        self.read_state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// The limit grows while reading is held back without queueing, and shrinks when bytes queue.
    fn bytes_in_flight_adapt_to_queueing() {
        let mut flight = FlightLimit::new();
        let mut step = |millis: u64, kept_back: bool| {
            // Pretends that the last change was long ago.
            flight.changed = Instant::now().checked_sub(Duration::from_secs(9)).expect("a clock");
            flight.update(Duration::from_millis(millis), kept_back);
            flight.bytes
        };
        // A long path without other bytes in flight.
        assert_eq!(step(100, false), FlightLimit::BYTES_INITIAL);
        let more = step(120, true);
        assert!(more > FlightLimit::BYTES_INITIAL);
        // Bytes queue behind one another.
        let fewer = step(280, true);
        assert_eq!(fewer, more / 2);
        for _ in 0..20 {
            step(1_000, true);
        }
        assert_eq!(step(1_000, true), FlightLimit::BYTES_MIN);
    }

    /// The last message of a return path is recognised however its bytes are split.
    #[test]
    fn tail_is_independent_of_read_sizes() {
        let bytes = [&[9; 30][..], &Tail::LOADED].concat();
        for piece in 1..=bytes.len() {
            let mut tail = Tail::default();
            for bytes in bytes.chunks(piece) {
                assert!(!tail.is_loaded());
                tail.push(bytes);
            }
            assert!(tail.is_loaded(), "{piece}");
            tail.push(&[]);
            assert!(tail.is_loaded());
            tail.push(&[0]);
            assert!(!tail.is_loaded());
        }
    }
}
