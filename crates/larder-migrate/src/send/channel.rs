//! A connection of the source's QEMU, and how what goes over it ends.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::lock;
use crate::stream::{self, Blocks, Parser};
use crate::wire::{CHANNEL_FRAMES_MAX, FRAME_RAW_MAX};

/// One connection of QEMU's.
pub(super) struct Channel {
    pub(super) number: u16,
    pub(super) socket: Arc<UnixStream>,
    reading: Mutex<Reading>,
    /// The last that it has said.
    pub(super) returned: Mutex<Tail>,
}

/// The last bytes of a stream.
#[derive(Default)]
pub(super) struct Tail([u8; 8]);

impl Tail {
    /// What QEMU says last on a return path (`MIG_RP_MSG_SHUT`: be16 1, be16 4, be32 0) once it has loaded all.
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

/// How many bytes may be on their way: as few as keep the way busy. QEMU takes what is on its way for sent, measures the link
/// by it, and stops its guest for so much longer.
///
/// As long as bytes wait for no others they take the least time that any have taken; what they take more, they wait.
struct Flight {
    bytes: u64,
    least: Duration,
    changed: Instant,
}

impl Flight {
    const BYTES_MIN: u64 = 2 << 20;
    const BYTES_FIRST: u64 = 4 << 20;
    /// More than any window.
    const BYTES_MAX: u64 = 1 << 32;
    /// Bytes are to wait for others for so long.
    const WAIT: Duration = Duration::from_millis(40);

    fn new() -> Self {
        Self {
            bytes: Self::BYTES_FIRST,
            least: Duration::MAX,
            changed: Instant::now(),
        }
    }

    /// Bytes took so long, and others were or were not kept back because of them.
    fn took(&mut self, time: Duration, kept_back: bool) {
        self.least = self.least.min(time);
        // What a change does is seen only by bytes that were sent after it.
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
    /// Read, but not yet part of a frame.
    pub(super) left_over: Vec<u8>,
    /// Bytes that are part of frames.
    pub(super) offset: u64,
    /// Bytes that the destination's QEMU has taken.
    pub(super) delivered: u64,
    /// Where the frames end that it has not, and when they were cut.
    under_way: VecDeque<(u64, Instant)>,
    flight: Flight,
    /// Nobody reads until more is delivered.
    pub(super) paused: bool,
    /// QEMU has closed it, and the receiver was told.
    pub(super) ended: bool,
    /// The destination's QEMU has closed it.
    pub(super) closed: bool,
    /// Before the source's.
    pub(super) closed_first: bool,
    /// With bytes to come that it does not take.
    pub(super) refused: bool,
    done: bool,
}

impl Reading {
    /// Whether it has just come to its end for both QEMUs: there is nothing more to read, to deliver, or to bring back.
    pub(super) fn is_done_now(&mut self) -> bool {
        let delivered = self.refused || self.delivered == self.offset;
        let was_done = self.done;
        self.done = self.ended && self.closed && delivered;
        self.done && !was_done
    }

    /// So many bytes more are in a frame.
    pub(super) fn framed(&mut self, len: usize) {
        self.offset += len as u64;
        self.under_way.push_back((self.offset, Instant::now()));
    }

    /// The destination's QEMU has taken so many bytes from the beginning; how many more than before, and how long the last
    /// frame of them was on its way, if that was since a link was lost the last time: before, it waited for that. `None`: so
    /// many it cannot have, or had before.
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

    /// Whether the receiver may have no room for another frame.
    pub(super) fn must_pause(&self, window: u32) -> bool {
        let bytes = self.offset - self.delivered + FRAME_RAW_MAX as u64;
        bytes > self.flight.bytes.min(window.into()) || self.under_way.len() >= CHANNEL_FRAMES_MAX
    }
}

impl Channel {
    /// That QEMU has just opened.
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

    /// Why the migration that this channel was the main one of has not ended well; `None` if it has, or if that cannot be
    /// known. The parser is believed only as far as it has understood all.
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
            (false, true) => Some("the destination's QEMU has closed its end, or has ended"),
            (false, false) => Some("the source's QEMU has cancelled it, given it up, or ended"),
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
    fn as_much_is_on_its_way_as_keeps_the_way_busy() {
        let mut flight = Flight::new();
        let mut step = |millis: u64, kept_back: bool| {
            // As if the last change were long ago.
            flight.changed = Instant::now().checked_sub(Duration::from_secs(9)).expect("a clock");
            flight.took(Duration::from_millis(millis), kept_back);
            flight.bytes
        };
        // A long way, with nothing else on it.
        assert_eq!(step(100, false), Flight::BYTES_FIRST);
        let more = step(120, true);
        assert!(more > Flight::BYTES_FIRST);
        // They wait for one another.
        let fewer = step(280, true);
        assert_eq!(fewer, more / 2);
        for _ in 0..20 {
            step(1_000, true);
        }
        assert_eq!(step(1_000, true), Flight::BYTES_MIN);
    }

    #[test]
    fn what_came_last_is_known_however_it_came() {
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
