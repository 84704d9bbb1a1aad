//! Lane of a receiver: reads frames and decodes them, over successive connections.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::session::Session;
use super::{ReceiveError, lock};
use crate::control::Counted;
use crate::decode::{Bases, DecodeError, FrameDecoder};
use crate::link::{self, Link};
use crate::progress::CpuTime;
use crate::wire::{FrameHeader, WireError};

/// Slot where a new connection waits to replace a lost one.
#[derive(Default)]
pub(super) struct Berth {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// Number of the connection's link, the connection, and the count that the other side has received.
    next: Option<(u32, Link, u64)>,
    is_over: bool,
}

/// Result of waiting for a connection.
pub(super) enum Landed {
    /// Connection of the link with this number, whose other side has received this count.
    Link(u32, Link, u64),
    /// No connection came in time.
    Late,
    /// The session is over; no connection will come.
    Over,
}

impl Berth {
    /// Leaves a connection for the reader; it replaces an older one that was not taken.
    pub(super) fn put(&self, number: u32, link: Link, received: u64) {
        let mut state = lock(&self.state);
        if state.next.as_ref().is_none_or(|(before, ..)| *before <= number) {
            state.next = Some((number, link, received));
        }
        self.changed.notify_all();
    }

    /// Waits for a connection.
    pub(super) fn take(&self, patience: Option<Duration>) -> Landed {
        let begun = Instant::now();
        let mut state = lock(&self.state);
        loop {
            // Checked even after the end, so that a new connection still gets the reason.
            if let Some((number, link, received)) = state.next.take() {
                return Landed::Link(number, link, received);
            }
            if state.is_over {
                return Landed::Over;
            }
            let left = patience.map(|patience| patience.saturating_sub(begun.elapsed()));
            state = match left {
                Some(Duration::ZERO) => return Landed::Late,
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Ends all waits.
    pub(super) fn stop(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_all();
    }
}

/// Lane of a session.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) berth: Berth,
    /// Number of frames received in full.
    came: Mutex<Counted>,
    /// Set once a thread reads the lane.
    has_reader: AtomicBool,
}

impl Lane {
    pub(super) fn new(number: u16) -> Self {
        Self {
            number,
            berth: Berth::default(),
            came: Mutex::default(),
            has_reader: AtomicBool::new(false),
        }
    }

    /// Switches the lane to another link; returns the number of frames received.
    pub(super) fn turn(&self, link: u32) -> u64 {
        lock(&self.came).turn(link)
    }

    /// Returns true to the first caller, which must then read the lane.
    pub(super) fn needs_reader(&self) -> bool {
        !self.has_reader.swap(true, Ordering::AcqRel)
    }
}

/// Reasons to stop reading a connection.
enum Ended {
    /// The connection is lost, or another one has replaced it.
    Lost(ReceiveError),
    /// The bytes received end the session.
    Failed(ReceiveError),
}

impl<E: Into<ReceiveError>> From<E> for Ended {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Buffers and state that are reused for each frame.
struct Reader {
    decoder: FrameDecoder,
    body: Vec<u8>,
    /// Number of the last frame.
    before: Option<u64>,
    cpu: CpuTime,
}

impl Session<'_> {
    /// Reads and decodes the frames of a lane until the session has ended.
    pub(super) fn lane(&self, lane: &Lane, bases: &Bases, patience: Duration) -> Result<(), ReceiveError> {
        let mut reader = Reader {
            decoder: FrameDecoder::new(),
            body: Vec::new(),
            before: None,
            cpu: CpuTime::of_thread(),
        };
        loop {
            let Landed::Link(number, mut link, _) = lane.berth.take(None) else {
                return Ok(());
            };
            let lost = match self.frames(lane, number, &mut link, bases, &mut reader) {
                Ended::Failed(error) => return Err(error),
                Ended::Lost(error) => error,
            };
            if self.ended.load(Ordering::Acquire) {
                return Ok(());
            }
            if patience.is_zero() {
                return Err(lost);
            }
            // All connections of the link are replaced together.
            self.mailbox.lane_lost(number);
        }
    }

    fn frames(&self, lane: &Lane, number: u32, link: &mut Link, bases: &Bases, reader: &mut Reader) -> Ended {
        loop {
            if let Err(ended) = self.frame(lane, number, link, bases, reader) {
                return ended;
            }
        }
    }

    fn frame(
        &self,
        lane: &Lane,
        number: u32,
        link: &mut Link,
        bases: &Bases,
        reader: &mut Reader,
    ) -> Result<(), Ended> {
        let broken = |error| {
            Ended::Lost(if link::is_end(&error) {
                ReceiveError::Lane
            } else {
                WireError::io("reading a frame")(error).into()
            })
        };
        let mut header = [0; FrameHeader::LEN];
        link.read_exact(&mut header).map_err(broken)?;
        let header = FrameHeader::from_bytes(&header)?;
        if reader.before.is_some_and(|before| header.number <= before) {
            return Err(DecodeError::Order { number: header.number }.into());
        }
        let len = header.body_len();
        if reader.body.len() < len {
            reader.body.resize(len, 0);
        }
        let body = &mut reader.body[..len];
        link.read_exact(body).map_err(broken)?;
        // A frame counted here is not sent again; an uncounted one is.
        let Some(count) = lock(&lane.came).one(number) else {
            return Err(Ended::Lost(ReceiveError::Lane));
        };
        self.mailbox.receipt(lane.number, count);
        reader.before = Some(header.number);
        let queue = self.queue(header.channel)?;
        let mut out = queue.buffer(&header)?;
        let begun = CpuTime::of_thread();
        reader.decoder.decode(&header, body, bases, &mut out)?;
        reader.cpu.worked(begun);
        queue.put(header.offset, out)?;
        let spent = reader.cpu.spent();
        self.count(|delivered| {
            delivered.cpu_ns += spent.all_ns;
            delivered.decode_cpu_ns += spent.work_ns;
            delivered.wire += (FrameHeader::LEN + header.body_len()) as u64;
            delivered.frames += 1;
        });
        Ok(())
    }
}
