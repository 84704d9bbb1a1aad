//! Selection of the channel that a lane reads next.
//!
//! A lane that gets a channel from [`Poller::next`] has it exclusively until it arms the channel again, or reports
//! bytes left over from its read.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::time::Timespec;

use super::channel::SourceChannel;
use super::lock;

/// Queue of readable channels, for lanes that wait.
pub(super) struct Poller {
    epoll: OwnedFd,
    /// Semaphore that counts the channels in `left_over`.
    left_over_event: OwnedFd,
    /// Channels with bytes that were read and are not yet part of a frame.
    left_over: Mutex<VecDeque<u16>>,
    stop_event: OwnedFd,
    stopped: AtomicBool,
}

/// Next action of a lane.
pub(super) enum LaneAction {
    /// Read this channel, which no other lane gets until it is armed.
    Channel(u16),
    /// No channel is readable.
    Idle,
    /// End the lane.
    End,
}

impl Poller {
    const LEFT_OVER: u64 = 1 << 32;
    const STOP: u64 = 1 << 33;
    /// Interval at which the user's stop request is checked.
    const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);
    /// Maximum sleep before the clock is checked again.
    const SLEEP_MAX: Duration = Duration::from_secs(60);

    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let poller = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            left_over_event: eventfd(0, flags | EventfdFlags::SEMAPHORE)?,
            left_over: Mutex::default(),
            stop_event: eventfd(0, flags)?,
            stopped: AtomicBool::new(false),
        };
        for (fd, data) in [(&poller.left_over_event, Self::LEFT_OVER), (&poller.stop_event, Self::STOP)] {
            epoll::add(&poller.epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)?;
        }
        Ok(poller)
    }

    pub(super) fn add(&self, channel: &SourceChannel) -> io::Result<()> {
        let data = epoll::EventData::new_u64(channel.number.into());
        Ok(epoll::add(&self.epoll, &channel.socket, data, Self::oneshot_flags())?)
    }

    pub(super) fn arm(&self, channel: &SourceChannel) -> io::Result<()> {
        let data = epoll::EventData::new_u64(channel.number.into());
        Ok(epoll::modify(&self.epoll, &channel.socket, data, Self::oneshot_flags())?)
    }

    fn oneshot_flags() -> epoll::EventFlags {
        epoll::EventFlags::IN | epoll::EventFlags::ONESHOT
    }

    pub(super) fn enqueue_left_over(&self, number: u16) -> io::Result<()> {
        lock(&self.left_over).push_back(number);
        rustix::io::write(&self.left_over_event, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// Returns a lane's next action; [`LaneAction::Idle`] only without `wait`.
    pub(super) fn next(&self, wait: bool) -> io::Result<LaneAction> {
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = if wait { None } else { Some(&no_wait) };
        loop {
            if self.is_stopped() {
                return Ok(LaneAction::End);
            }
            let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
            match epoll::wait(&self.epoll, &mut events[..], timeout) {
                Ok(0) if !wait => return Ok(LaneAction::Idle),
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            match events[0].data.u64() {
                Self::STOP => return Ok(LaneAction::End),
                Self::LEFT_OVER => {
                    // Several lanes may be woken for one channel.
                    let mut count = [0; 8];
                    if rustix::io::read(&self.left_over_event, &mut count).is_ok()
                        && let Some(number) = lock(&self.left_over).pop_front()
                    {
                        return Ok(LaneAction::Channel(number));
                    }
                }
                number => return Ok(LaneAction::Channel(number as u16)),
            }
        }
    }

    /// Waits until QEMU connects, the session ends, or [`Self::STOP_CHECK_INTERVAL`] has passed.
    pub(super) fn wait_for_connection(&self, listener: &UnixListener) -> io::Result<()> {
        let mut fds =
            [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN), PollFd::new(&self.stop_event, PollFlags::IN)];
        wait(&mut fds, Self::STOP_CHECK_INTERVAL)
    }

    /// Waits for `pause`; returns false if the session ends during the wait.
    pub(super) fn sleep(&self, pause: Duration) -> io::Result<bool> {
        let started = Instant::now();
        loop {
            if self.is_stopped() {
                return Ok(false);
            }
            let remaining = pause.saturating_sub(started.elapsed());
            if remaining.is_zero() {
                return Ok(true);
            }
            wait(&mut [PollFd::new(&self.stop_event, PollFlags::IN)], remaining.min(Self::SLEEP_MAX))?;
        }
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.stop_event, &1_u64.to_ne_bytes());
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

fn wait(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<()> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
