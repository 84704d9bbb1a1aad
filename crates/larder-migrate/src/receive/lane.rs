//! Lane of a receiver: reads frames and decodes them, over successive connections.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::session::ReceiveSession;
use super::{ReceiveError, lock};
use crate::control::ReceivedCount;
use crate::decode::{Bases, DecodeError, FrameDecoder};
use crate::link::{self, Link};
use crate::progress::CpuTime;
use crate::wire::{FrameHeader, WireError};

/// Slot where a new connection waits to replace a lost one.
#[derive(Default)]
pub(super) struct PendingLink {
    state: Mutex<PendingState>,
    changed: Condvar,
}

#[derive(Default)]
struct PendingState {
    /// Number of the connection's link, the connection, and the count that the other side has received.
    next: Option<(u32, Link, u64)>,
    is_over: bool,
}

/// Result of waiting for a connection.
pub(super) enum AwaitedLink {
    /// Connection of the link with this number, whose other side has received this count.
    Link(u32, Link, u64),
    /// No connection came in time.
    Timeout,
    /// The session is over; no connection will come.
    SessionEnded,
}

impl PendingLink {
    /// Leaves a connection for the reader; it replaces an older one that was not taken.
    pub(super) fn offer(&self, number: u32, link: Link, received: u64) {
        let mut state = lock(&self.state);
        if state.next.as_ref().is_none_or(|(before, ..)| *before <= number) {
            state.next = Some((number, link, received));
        }
        self.changed.notify_all();
    }

    /// Waits for a connection.
    pub(super) fn wait(&self, patience: Option<Duration>) -> AwaitedLink {
        let started = Instant::now();
        let mut state = lock(&self.state);
        loop {
            // Checked even after the end, so that a new connection still gets the reason.
            if let Some((number, link, received)) = state.next.take() {
                return AwaitedLink::Link(number, link, received);
            }
            if state.is_over {
                return AwaitedLink::SessionEnded;
            }
            let remaining = patience.map(|patience| patience.saturating_sub(started.elapsed()));
            state = match remaining {
                Some(Duration::ZERO) => return AwaitedLink::Timeout,
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
    pub(super) pending_link: PendingLink,
    /// Number of frames received in full.
    received: Mutex<ReceivedCount>,
    /// Set once a thread reads the lane.
    has_reader: AtomicBool,
}

impl Lane {
    pub(super) fn new(number: u16) -> Self {
        Self {
            number,
            pending_link: PendingLink::default(),
            received: Mutex::default(),
            has_reader: AtomicBool::new(false),
        }
    }

    /// Switches the lane to another link; returns the number of frames received.
    pub(super) fn switch_link(&self, link: u32) -> u64 {
        lock(&self.received).switch_link(link)
    }

    /// Returns true to the first caller, which must then read the lane.
    pub(super) fn claim_reader(&self) -> bool {
        !self.has_reader.swap(true, Ordering::AcqRel)
    }
}

/// Reasons to stop reading a connection.
enum ReadEnd {
    /// The connection is lost, or another one has replaced it.
    Lost(ReceiveError),
    /// The bytes received end the session.
    Failed(ReceiveError),
}

impl<E: Into<ReceiveError>> From<E> for ReadEnd {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Buffers and state that are reused for each frame.
struct Reader {
    decoder: FrameDecoder,
    body: Vec<u8>,
    /// Number of the last frame.
    last_frame: Option<u64>,
    cpu: CpuTime,
}

impl ReceiveSession<'_> {
    /// Reads and decodes the frames of a lane until the session has ended.
    pub(super) fn run_lane(&self, lane: &Lane, bases: &Bases, patience: Duration) -> Result<(), ReceiveError> {
        let mut reader =
            Reader { decoder: FrameDecoder::new(), body: Vec::new(), last_frame: None, cpu: CpuTime::now() };
        loop {
            let AwaitedLink::Link(number, mut link, _) = lane.pending_link.wait(None) else {
                return Ok(());
            };
            let lost = match self.read_frames(lane, number, &mut link, bases, &mut reader) {
                ReadEnd::Failed(error) => return Err(error),
                ReadEnd::Lost(error) => error,
            };
            if self.ended.load(Ordering::Acquire) {
                return Ok(());
            }
            if patience.is_zero() {
                return Err(lost);
            }
            // All connections of the link are replaced together.
            self.mailbox.mark_lane_lost(number);
        }
    }

    fn read_frames(&self, lane: &Lane, number: u32, link: &mut Link, bases: &Bases, reader: &mut Reader) -> ReadEnd {
        loop {
            if let Err(end) = self.read_frame(lane, number, link, bases, reader) {
                return end;
            }
        }
    }

    fn read_frame(
        &self,
        lane: &Lane,
        number: u32,
        link: &mut Link,
        bases: &Bases,
        reader: &mut Reader,
    ) -> Result<(), ReadEnd> {
        let read_error = |error| {
            ReadEnd::Lost(if link::is_disconnect(&error) {
                ReceiveError::LaneClosed
            } else {
                WireError::io("reading a frame")(error).into()
            })
        };
        let mut header = [0; FrameHeader::LEN];
        link.read_exact(&mut header).map_err(read_error)?;
        let header = FrameHeader::from_bytes(&header)?;
        if reader.last_frame.is_some_and(|before| header.number <= before) {
            return Err(DecodeError::Order { number: header.number }.into());
        }
        let len = header.body_len();
        if reader.body.len() < len {
            reader.body.resize(len, 0);
        }
        let body = &mut reader.body[..len];
        link.read_exact(body).map_err(read_error)?;
        // A frame counted here is not sent again; an uncounted one is.
        let Some(count) = lock(&lane.received).count_one(number) else {
            return Err(ReadEnd::Lost(ReceiveError::LaneClosed));
        };
        self.mailbox.record_receipt(lane.number, count);
        reader.last_frame = Some(header.number);
        let queue = self.queue(header.channel)?;
        let mut out = queue.buffer(&header)?;
        let started = CpuTime::now();
        reader.decoder.decode(&header, body, bases, &mut out)?;
        reader.cpu.add_codec_time(started);
        queue.put(header.offset, out)?;
        let usage = reader.cpu.lap();
        self.add_delivered(|delivered| {
            delivered.cpu_ns += usage.total_ns;
            delivered.decode_cpu_ns += usage.codec_ns;
            delivered.wire += (FrameHeader::LEN + header.body_len()) as u64;
            delivered.frames += 1;
        });
        Ok(())
    }
}
