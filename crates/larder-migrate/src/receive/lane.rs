//! A lane, over one connection after the other: reads frames and decodes them.

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

/// Where a connection waits that is to take another one's place.
#[derive(Default)]
pub(super) struct Berth {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// The number of its link, and what the other side has received.
    next: Option<(u32, Link, u64)>,
    is_over: bool,
}

/// What there was at a berth.
pub(super) enum Landed {
    /// A connection of the link with this number, whose other side has received so much.
    Link(u32, Link, u64),
    /// Nothing in this time.
    Late,
    /// Nothing will come.
    Over,
}

impl Berth {
    /// Leaves a connection there; an older one that nobody has taken goes.
    pub(super) fn put(&self, number: u32, link: Link, received: u64) {
        let mut state = lock(&self.state);
        if state.next.as_ref().is_none_or(|(before, ..)| *before <= number) {
            state.next = Some((number, link, received));
        }
        self.changed.notify_all();
    }

    /// Waits for one.
    pub(super) fn take(&self, patience: Option<Duration>) -> Landed {
        let begun = Instant::now();
        let mut state = lock(&self.state);
        loop {
            // Also in the end: whoever has come is to hear why.
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

    /// Nobody waits there any more.
    pub(super) fn stop(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_all();
    }
}

/// A lane of a session.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) berth: Berth,
    /// Frames that have come whole.
    came: Mutex<Counted>,
    /// A thread reads it.
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

    /// The lane goes on over this link; how many frames have come.
    pub(super) fn turn(&self, link: u32) -> u64 {
        lock(&self.came).turn(link)
    }

    /// Whether the caller is to read it: the first one that asks.
    pub(super) fn needs_reader(&self) -> bool {
        !self.has_reader.swap(true, Ordering::AcqRel)
    }
}

/// Why a connection is read no more.
enum Ended {
    /// It is lost, or another one has taken its place.
    Lost(ReceiveError),
    /// What came over it ends the session.
    Failed(ReceiveError),
}

impl<E: Into<ReceiveError>> From<E> for Ended {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// What is used for one frame after the other.
struct Reader {
    decoder: FrameDecoder,
    body: Vec<u8>,
    /// The number of the last frame.
    before: Option<u64>,
    cpu: CpuTime,
}

impl Session<'_> {
    /// Reads and decodes the frames of a lane until the sender closes it, which it may once all has ended.
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
            // The others are made anew as well.
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
        // From here on it does not come again; before, it does.
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
