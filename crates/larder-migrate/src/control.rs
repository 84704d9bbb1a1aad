//! The control connection: messages both ways, in order, and a sign of life each second.
//!
//! One thread, [`Control::run`], owns the connection; everybody else leaves messages with [`Mailbox::send`]. The session
//! ends with an error if the other side is not heard for [`SILENCE_MAX`]: a host that is gone, or a link that is.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;
use thiserror::Error;

use crate::link::Link;
use crate::wire::{BODY_MAX, Kind, Message, WireError};

/// Between two signs of life.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Without any message, after which the other side counts as gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Bytes that may wait to be sent before [`Mailbox::send_when_room`] waits.
const WAITING_MAX: usize = 1 << 20;

/// Why a control connection ended.
#[derive(Debug, Error)]
pub enum ControlError {
    /// As the system says it, or what came was no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The other side has closed it.
    #[error("the other side has closed the connection")]
    Closed,
    /// Nothing was heard.
    #[error("nothing was heard from the other side for {} s: its host or the network is down", SILENCE_MAX.as_secs())]
    Silent,
    /// This side cannot wait for anything.
    #[error("cannot wait for the control connection: {0}")]
    Poll(io::Error),
}

/// Messages on their way to the other side.
pub struct Mailbox {
    waiting: Mutex<Waiting>,
    room: Condvar,
    wake: OwnedFd,
}

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    /// Nothing more is taken; what waits is sent, then the connection ends.
    closing: bool,
    closed: bool,
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            room: Condvar::new(),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    /// Leaves a message, which is sent soon, or never if the session ends before.
    pub fn send(&self, message: &Message) {
        let mut waiting = self.lock();
        self.append(&mut waiting, message);
    }

    /// The same, but waits while too much waits: for what a QEMU says, of which there is no end.
    pub fn send_when_room(&self, message: &Message) {
        let mut waiting = self.lock();
        while waiting.bytes.len() > WAITING_MAX && !waiting.closed {
            waiting = self.room.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        self.append(&mut waiting, message);
    }

    /// Lets the connection end once all that waits is sent.
    pub fn close(&self) {
        self.lock().closing = true;
        self.wake();
    }

    fn append(&self, waiting: &mut Waiting, message: &Message) {
        if waiting.closing || waiting.closed {
            return;
        }
        let was_empty = waiting.bytes.is_empty();
        message.append_to(&mut waiting.bytes);
        if was_empty {
            self.wake();
        }
    }

    fn wake(&self) {
        // It fails only when it counts up to 2^64: somebody is awake then.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        waiting.bytes.clear();
        self.room.notify_all();
    }
}

/// One side's end of the connection.
pub struct Control<'a> {
    link: Link,
    mailbox: &'a Mailbox,
    received: Vec<u8>,
    sending: Vec<u8>,
    sent: usize,
}

impl<'a> Control<'a> {
    /// Of a link whose greetings are done.
    ///
    /// # Errors
    /// The socket is of no use.
    pub fn new(link: Link, mailbox: &'a Mailbox) -> io::Result<Self> {
        link.ready_nonblocking()?;
        Ok(Self {
            link,
            mailbox,
            received: Vec::new(),
            sending: Vec::new(),
            sent: 0,
        })
    }

    /// Sends and receives until the mailbox is closed, the other side closes, or something breaks. `take` hears each
    /// message but signs of life; what it returns as an error ends the connection.
    ///
    /// # Errors
    /// Anything but that the mailbox was closed.
    pub fn run<E: From<ControlError>>(mut self, mut take: impl FnMut(Message) -> Result<(), E>) -> Result<(), E> {
        let result = self.exchange(&mut take);
        self.mailbox.end();
        result
    }

    fn exchange<E: From<ControlError>>(&mut self, take: &mut impl FnMut(Message) -> Result<(), E>) -> Result<(), E> {
        let mut heard = Instant::now();
        let mut alive_at = heard;
        loop {
            let closing = self.collect();
            self.write()?;
            let all_sent = self.sending.is_empty() && !self.link.wants_write();
            if closing && all_sent {
                return Ok(());
            }
            let now = Instant::now();
            if now >= alive_at {
                self.mailbox.send(&Message::new(Kind::Alive, 0, 0));
                alive_at = now + ALIVE_EVERY;
                continue;
            }
            if now.duration_since(heard) > SILENCE_MAX {
                return Err(ControlError::Silent.into());
            }
            self.wait(!all_sent, alive_at - now)?;
            if self.read(take)? {
                heard = Instant::now();
            }
        }
    }

    /// Takes what was left in the mailbox; returns whether it is closing and empty.
    fn collect(&mut self) -> bool {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.mailbox.wake, &mut count);
        if !self.sending.is_empty() {
            return false;
        }
        let mut waiting = self.mailbox.lock();
        std::mem::swap(&mut self.sending, &mut waiting.bytes);
        self.sent = 0;
        self.mailbox.room.notify_all();
        waiting.closing
    }

    fn write(&mut self) -> Result<(), ControlError> {
        const WHAT: &str = "writing to the control connection";
        while self.sent < self.sending.len() {
            match self.link.write(&self.sending[self.sent..]) {
                Ok(0) => return Ok(()),
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(WireError::io(WHAT)(error).into()),
            }
        }
        self.sending.clear();
        self.sent = 0;
        match self.link.flush() {
            Err(error) if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Err(WireError::io(WHAT)(error).into())
            }
            _ => Ok(()),
        }
    }

    fn wait(&self, to_write: bool, timeout: Duration) -> Result<(), ControlError> {
        let mut events = PollFlags::IN;
        if to_write {
            events |= PollFlags::OUT;
        }
        let mut fds = [
            PollFd::from_borrowed_fd(self.link.as_fd(), events),
            PollFd::new(&self.mailbox.wake, PollFlags::IN),
        ];
        let timeout = Timespec::try_from(timeout).expect("a second or less");
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ControlError::Poll(error.into())),
        }
    }

    /// Reads all that has come; returns whether anything has.
    fn read<E: From<ControlError>>(&mut self, take: &mut impl FnMut(Message) -> Result<(), E>) -> Result<bool, E> {
        const PIECE: usize = 64 << 10;
        let mut any = false;
        loop {
            let len = self.received.len();
            self.received.resize(len + PIECE, 0);
            let result = self.link.read(&mut self.received[len..]);
            self.received.truncate(len + *result.as_ref().unwrap_or(&0));
            match result {
                Ok(0) => return Err(ControlError::Closed.into()),
                Ok(_) => {
                    any = true;
                    self.take_whole(take)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(any),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(ControlError::from(WireError::io("reading from the control connection")(error)).into());
                }
            }
        }
    }

    fn take_whole<E: From<ControlError>>(&mut self, take: &mut impl FnMut(Message) -> Result<(), E>) -> Result<(), E> {
        let mut at = 0;
        while let Some((message, len)) = Message::parse(&self.received[at..]).map_err(ControlError::from)? {
            at += len;
            if message.kind != Kind::Alive {
                take(message)?;
            }
        }
        self.received.drain(..at);
        debug_assert!(self.received.len() < Message::HEADER_LEN + BODY_MAX);
        Ok(())
    }
}
