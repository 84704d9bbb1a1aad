//! Lane: reads channels, makes frames, and writes them to its connection.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};
use rustix::time::Timespec;

use super::channel::{Channel, Reading};
use super::kept::Spare;
use super::out::Out;
use super::poller::Next;
use super::session::Session;
use super::{LANE, SendError};
use crate::batch::Batch;
use crate::encode::{Codecs, Frame, Outcome};
use crate::link;
use crate::progress::CpuTime;
use crate::wire::{Kind, Message};

/// Time for which a reader waits for the rest of a page that has begun to arrive.
const REST_TIMEOUT: Duration = Duration::from_millis(1);
/// Maximum such waits per frame, which delay the bytes already read.
const RESTS_MAX: u32 = 64;

impl Session<'_> {
    /// Runs the lane until the session ends. Frames are sent in the order of their numbers, as the receiver requires.
    /// So a frame may wait for an earlier one that a device still has.
    pub(super) fn lane(&self, out: &Out, mut codecs: Codecs) -> Result<(), SendError> {
        let mut cpu = CpuTime::of_thread();
        let mut written = Instant::now();
        let mut free: Vec<_> = (0..codecs.frames()).map(|_| Box::new(Frame::new())).collect();
        let mut under_way: VecDeque<Box<Frame>> = VecDeque::with_capacity(free.len());
        loop {
            let next = match free.last() {
                Some(_) => self.poller.next(under_way.is_empty()),
                None => Ok(Next::Nothing),
            };
            let is_idle = match next.map_err(SendError::io("waiting for QEMU"))? {
                Next::Ended => break,
                Next::Nothing => true,
                Next::Channel(number) => {
                    let mut frame = free.pop().expect("one is free, see above");
                    if self.begin(number, &mut frame, &mut codecs, &mut cpu)? {
                        under_way.push_back(frame);
                    } else {
                        free.push(frame);
                    }
                    false
                }
            };
            while let Some(mut frame) = under_way.pop_front() {
                if !frame.is_done(&self.order, &mut codecs, is_idle)? {
                    under_way.push_front(frame);
                    break;
                }
                let goes_on = match self.send(frame, out, &mut codecs, &mut free, &mut written)? {
                    Some(outcome) => self.wait_for_cpu(&mut cpu, outcome.picked)?,
                    None => false,
                };
                if !goes_on {
                    break;
                }
            }
            // All frames are kept until the receiver confirms them, so another one is needed. They are free again
            // later.
            if free.is_empty() && under_way.is_empty() {
                free.push(Box::new(Frame::new()));
            }
        }
        out.end();
        Ok(())
    }

    /// Reads a channel and starts a frame of its bytes; returns false if there was nothing to send.
    fn begin(&self, number: u16, frame: &mut Frame, codecs: &mut Codecs, cpu: &mut CpuTime) -> Result<bool, SendError> {
        let Some(channel) = self.channel(number) else {
            return Ok(false);
        };
        let mut reading = channel.reading();
        if reading.ended {
            return Ok(false);
        }
        let ended = read(&channel.socket, &mut reading, &mut frame.batch)?;
        let len = frame.batch.bytes().len();
        if len > 0 {
            frame.order(number, reading.offset, &self.order);
            reading.framed(len);
        }
        self.progress.facts(number, reading.parser.facts());
        self.go_on(&channel, reading, ended)?;
        if len > 0 {
            let begun = CpuTime::of_thread();
            frame.encode(&self.order, codecs)?;
            cpu.worked(begun);
        }
        Ok(len > 0)
    }

    /// Sends a finished frame, which is then kept or moved to `free`. `written` is the time of the last write and is
    /// updated. Returns the statistics of the frame, or `None` if the session ends.
    fn send(
        &self,
        mut frame: Box<Frame>,
        out: &Out,
        codecs: &mut Codecs,
        free: &mut Spare,
        written: &mut Instant,
    ) -> Result<Option<Outcome>, SendError> {
        let outcome = frame.finish();
        let encoded = Instant::now();
        if !self.wait_for_link(outcome.wire_bytes.into())? || !out.make_room(free) {
            return Ok(None);
        }
        let raw_len = frame.batch.bytes().len();
        let begun = CpuTime::of_thread();
        let (back, sent) = out.send(frame, outcome.by_device);
        if let Some(mut frame) = back {
            frame.clear(codecs);
            free.push(frame);
        }
        let worked = begun.elapsed();
        let now = Instant::now();
        let sending = now - encoded;
        // A write that had to wait found a link that was busy since the last write.
        let link_took = if sending > worked * 2 { now - *written } else { sending };
        *written = now;
        match sent {
            Ok(true) => self.order.sent(outcome.wire_bytes.into(), link_took, self.outs.len()),
            // The time of an unsent frame shows nothing about the link.
            Ok(false) => {}
            Err(lost) if !self.patience.is_zero() => self.mailbox.lane_lost(lost.number),
            Err(lost) if link::is_end(&lost.error) => return Err(SendError::Lane),
            Err(lost) => return Err(SendError::io(LANE)(lost.error)),
        }
        self.progress.sent(raw_len, &outcome, outcome.took, sending);
        Ok(Some(outcome))
    }

    /// Waits until the bandwidth limit allows a frame; returns false if the session ends.
    fn wait_for_link(&self, bytes: u64) -> Result<bool, SendError> {
        let rate = || self.limits.now().bandwidth.map(|rate| rate as f64);
        let taken = self.link_pace.take(bytes, rate(), Instant::now());
        self.wait("waiting for the bandwidth limit", || {
            self.link_pace.before(taken, rate(), Instant::now())
        })
    }

    /// Reports the lane's CPU time, of which `picked` was spent on the selector's pick, and waits until the CPU limit
    /// allows more. Returns false if the session ends. The wait delays no other lane, since this lane's frame is
    /// sent.
    fn wait_for_cpu(&self, cpu: &mut CpuTime, picked: Duration) -> Result<bool, SendError> {
        let spent = cpu.spent();
        self.order
            .besides(spent.all_ns.saturating_sub(picked.as_nanos() as u64));
        self.progress.spent(spent, || self.order.chosen());
        let limit = || self.limits.now().processors;
        let rate = || limit().map(|processors| processors * 1e9);
        let lanes = self.outs.len() as f64;
        self.order.set_encoders(limit().map_or(lanes, |most| most.min(lanes)));
        let taken = self.cpu_pace.take(spent.all_ns, rate(), Instant::now());
        self.wait("waiting for the CPU limit", || {
            self.cpu_pace.after(taken, rate(), Instant::now())
        })
    }

    /// Sleeps until `pause` returns zero; returns false if the session ends.
    fn wait(&self, what: &'static str, pause: impl Fn() -> Duration) -> Result<bool, SendError> {
        loop {
            let pause = pause();
            if pause.is_zero() {
                return Ok(true);
            }
            if !self.poller.sleep(pause).map_err(SendError::io(what))? {
                return Ok(false);
            }
        }
    }

    /// Ends a channel that QEMU has closed, pauses it, or releases it to the other lanes, after a batch was read.
    fn go_on(&self, channel: &Channel, mut reading: MutexGuard<'_, Reading>, ended: bool) -> Result<(), SendError> {
        if ended && reading.left_over.is_empty() {
            reading.ended = true;
            self.mailbox
                .send(&Message::new(Kind::Close, channel.number, reading.offset));
            self.end_if_channel_is_done(reading);
            return Ok(());
        }
        if reading.must_pause(self.welcome.window) {
            reading.paused = true;
            return Ok(());
        }
        self.again(channel, &reading)
    }
}

/// Reads the available bytes, up to a frame; returns true if QEMU has closed the channel. Waits a short time for the
/// rest of a page of which a part has arrived.
fn read(socket: &UnixStream, reading: &mut Reading, batch: &mut Batch) -> Result<bool, SendError> {
    batch.begin(&mut reading.left_over);
    let mut ended = false;
    let mut rests = 0;
    let mut waited = false;
    loop {
        let incomplete = batch.look(&mut reading.parser);
        if batch.is_full() {
            break;
        }
        match recv(socket, batch.room(), RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                ended = true;
                break;
            }
            Ok((_, len)) => {
                batch.fill(len);
                waited = false;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) if incomplete && !waited && rests < RESTS_MAX => {
                waited = true;
                rests += 1;
                let timeout = Timespec::try_from(REST_TIMEOUT).expect("a millisecond");
                let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
            }
            Err(rustix::io::Errno::AGAIN) => break,
            // A QEMU that is killed resets the connection. The rest is missing, and the receiver must not see an
            // orderly end.
            Err(error) => {
                return Err(SendError::Io {
                    what: "reading from QEMU",
                    source: error.into(),
                });
            }
        }
    }
    if !batch.is_full() {
        batch.flush(&mut reading.parser);
    }
    batch.end(&mut reading.left_over);
    Ok(ended)
}
