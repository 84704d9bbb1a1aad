//! Lane: reads channels, makes frames, and writes them to its connection.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};
use rustix::time::Timespec;

use super::channel::{ReadState, SourceChannel};
use super::lane_output::LaneOutput;
use super::poller::LaneAction;
use super::session::SendSession;
use super::unconfirmed::FreeFrames;
use super::{LANE_CONNECTION, SendError};
use crate::batch::Batch;
use crate::encode::{Codecs, Frame, FrameStats};
use crate::link;
use crate::progress::CpuTime;
use crate::wire::{Message, MessageKind};

/// Time for which a reader waits for the rest of a page that has begun to arrive.
const PARTIAL_PAGE_TIMEOUT: Duration = Duration::from_millis(1);
/// Maximum such waits per frame, which delay the bytes already read.
const PARTIAL_PAGE_WAITS_MAX: u32 = 64;

impl SendSession<'_> {
    /// Runs the lane until the session ends. Frames are sent in the order of their numbers, as the receiver requires.
    /// So a frame may wait for an earlier one that a device still has.
    pub(super) fn run_lane(&self, output: &LaneOutput, mut codecs: Codecs) -> Result<(), SendError> {
        let mut cpu = CpuTime::now();
        let mut written = Instant::now();
        let mut free: Vec<_> = (0..codecs.frames_max()).map(|_| Box::new(Frame::new())).collect();
        let mut in_flight: VecDeque<Box<Frame>> = VecDeque::with_capacity(free.len());
        loop {
            let next = match free.last() {
                Some(_) => self.poller.next(in_flight.is_empty()),
                None => Ok(LaneAction::Idle),
            };
            let is_idle = match next.map_err(SendError::io("waiting for QEMU"))? {
                LaneAction::End => break,
                LaneAction::Idle => true,
                LaneAction::Channel(number) => {
                    let mut frame = free.pop().expect("one is free, see above");
                    if self.start_frame(number, &mut frame, &mut codecs, &mut cpu)? {
                        in_flight.push_back(frame);
                    } else {
                        free.push(frame);
                    }
                    false
                }
            };
            while let Some(mut frame) = in_flight.pop_front() {
                if !frame.is_done(&self.sequencer, &mut codecs, is_idle)? {
                    in_flight.push_front(frame);
                    break;
                }
                let continues = match self.send_frame(frame, output, &mut codecs, &mut free, &mut written)? {
                    Some(stats) => self.wait_for_cpu(&mut cpu, stats.method_time)?,
                    None => false,
                };
                if !continues {
                    break;
                }
            }
            // All frames are kept until the receiver confirms them, so another one is needed. They are free again
            // later.
            if free.is_empty() && in_flight.is_empty() {
                free.push(Box::new(Frame::new()));
            }
        }
        output.send_end();
        Ok(())
    }

    /// Reads a channel and starts a frame of its bytes; returns false if there was nothing to send.
    fn start_frame(
        &self,
        number: u16,
        frame: &mut Frame,
        codecs: &mut Codecs,
        cpu: &mut CpuTime,
    ) -> Result<bool, SendError> {
        let Some(channel) = self.channel(number) else {
            return Ok(false);
        };
        let mut reading = channel.lock_state();
        if reading.ended {
            return Ok(false);
        }
        let ended = read(&channel.socket, &mut reading, &mut frame.batch)?;
        let len = frame.batch.bytes().len();
        if len > 0 {
            frame.assign_number(number, reading.offset, &self.sequencer);
            reading.add_frame(len);
        }
        self.progress.set_facts(number, reading.parser.facts());
        self.continue_channel(&channel, reading, ended)?;
        if len > 0 {
            let started = CpuTime::now();
            frame.encode(&self.sequencer, codecs)?;
            cpu.add_codec_time(started);
        }
        Ok(len > 0)
    }

    /// Sends a finished frame, which is then kept or moved to `free`. `written` is the time of the last write and is
    /// updated. Returns the statistics of the frame, or `None` if the session ends.
    fn send_frame(
        &self,
        mut frame: Box<Frame>,
        output: &LaneOutput,
        codecs: &mut Codecs,
        free: &mut FreeFrames,
        written: &mut Instant,
    ) -> Result<Option<FrameStats>, SendError> {
        let stats = frame.finish();
        let encoded = Instant::now();
        if !self.wait_for_link(stats.wire_bytes.into())? || !output.make_room(free) {
            return Ok(None);
        }
        let raw_len = frame.batch.bytes().len();
        let started = CpuTime::now();
        let (returned, sent) = output.send(frame, stats.by_device);
        if let Some(mut frame) = returned {
            frame.release_request(codecs);
            free.push(frame);
        }
        let cpu_time = started.elapsed();
        let now = Instant::now();
        let sending = now - encoded;
        // A write that had to wait found a link that was busy since the last write.
        let link_took = if sending > cpu_time * 2 { now - *written } else { sending };
        *written = now;
        match sent {
            Ok(true) => self.sequencer.sent(stats.wire_bytes.into(), link_took, self.outputs.len()),
            // The time of an unsent frame shows nothing about the link.
            Ok(false) => {}
            Err(lost) if !self.patience.is_zero() => self.mailbox.mark_lane_lost(lost.number),
            Err(lost) if link::is_disconnect(&lost.error) => return Err(SendError::LaneClosed),
            Err(lost) => return Err(SendError::io(LANE_CONNECTION)(lost.error)),
        }
        self.progress.add_frame(raw_len, &stats, stats.encode_time, sending);
        Ok(Some(stats))
    }

    /// Waits until the bandwidth limit allows a frame; returns false if the session ends.
    fn wait_for_link(&self, bytes: u64) -> Result<bool, SendError> {
        let rate = || self.limits.get().bandwidth.map(|rate| rate as f64);
        let reservation = self.link_limiter.reserve(bytes, rate(), Instant::now());
        self.wait("waiting for the bandwidth limit", || {
            self.link_limiter.delay_before(reservation, rate(), Instant::now())
        })
    }

    /// Reports the lane's CPU time, of which `picked` was spent on the selector's pick, and waits until the CPU limit
    /// allows more. Returns false if the session ends. The wait delays no other lane, since this lane's frame is
    /// sent.
    fn wait_for_cpu(&self, cpu: &mut CpuTime, picked: Duration) -> Result<bool, SendError> {
        let usage = cpu.lap();
        self.sequencer.record_other_work(usage.total_ns.saturating_sub(picked.as_nanos() as u64));
        self.progress.add_cpu_usage(usage, || self.sequencer.choice());
        let limit = || self.limits.get().processors;
        let rate = || limit().map(|processors| processors * 1e9);
        let lanes = self.outputs.len() as f64;
        self.sequencer.set_encoders(limit().map_or(lanes, |most| most.min(lanes)));
        let reservation = self.cpu_limiter.reserve(usage.total_ns, rate(), Instant::now());
        self.wait("waiting for the CPU limit", || self.cpu_limiter.delay_after(reservation, rate(), Instant::now()))
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
    fn continue_channel(
        &self,
        channel: &SourceChannel,
        mut reading: MutexGuard<'_, ReadState>,
        ended: bool,
    ) -> Result<(), SendError> {
        if ended && reading.left_over.is_empty() {
            reading.ended = true;
            self.mailbox.send(&Message::new(MessageKind::Close, channel.number, reading.offset));
            self.end_if_channel_is_done(reading);
            return Ok(());
        }
        if reading.must_pause(self.welcome.window) {
            reading.paused = true;
            return Ok(());
        }
        self.release_channel(channel, &reading)
    }
}

/// Reads the available bytes, up to a frame; returns true if QEMU has closed the channel. Waits a short time for the
/// rest of a page of which a part has arrived.
fn read(socket: &UnixStream, reading: &mut ReadState, batch: &mut Batch) -> Result<bool, SendError> {
    batch.begin(&mut reading.left_over);
    let mut ended = false;
    let mut waits = 0;
    let mut waited = false;
    loop {
        let incomplete = batch.parse(&mut reading.parser);
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
            Err(rustix::io::Errno::AGAIN) if incomplete && !waited && waits < PARTIAL_PAGE_WAITS_MAX => {
                waited = true;
                waits += 1;
                let timeout = Timespec::try_from(PARTIAL_PAGE_TIMEOUT).expect("a millisecond");
                let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
            }
            Err(rustix::io::Errno::AGAIN) => break,
            // A QEMU that is killed resets the connection. The rest is missing, and the receiver must not see an
            // orderly end.
            Err(error) => {
                return Err(SendError::Io { what: "reading from QEMU", source: error.into() });
            }
        }
    }
    if !batch.is_full() {
        batch.flush(&mut reading.parser);
    }
    batch.end(&mut reading.left_over);
    Ok(ended)
}
