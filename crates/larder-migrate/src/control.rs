//! The control connection: messages both ways, in order, and a sign of life each second.
//!
//! One thread, [`Control::run`], owns the connection; everybody else leaves messages with [`Mailbox::send`]. The session
//! ends with an error if the other side is not heard for [`SILENCE_MAX`]: a host that is gone, or a link that is.
//!
//! It is the last connection to go. Whoever fails leaves the reason with the mailbox and closes that; then both sides may
//! still hear one another's reasons for [`LAST_WORDS`], until either closes its end.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;
use thiserror::Error;

use crate::link::{self, Link};
use crate::wire::{BODY_MAX, Kind, Message, WireError};

/// Between two signs of life.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Without any message, after which the other side counts as gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long a closed mailbox may take to be emptied, and the other side to say its last and close its end.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(2);
/// Bytes that may wait to be sent before [`Mailbox::send_when_room`] waits.
const WAITING_MAX: usize = 1 << 20;
/// Bytes that are read at a time.
const READ_LEN: usize = 64 << 10;
/// Reads before the other things are seen to again, however much the other side says.
const READS_MAX: usize = 16;

/// Why a control connection ended.
#[derive(Debug, Error)]
pub enum ControlError {
    /// As the system says it, or what came was no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The other side has closed it.
    #[error(
        "the other side has closed the connection without a reason: its larder was ended, or something in between cut it off"
    )]
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

impl ControlError {
    /// It tells that the connection broke, and not why.
    pub(crate) fn is_symptom(&self) -> bool {
        matches!(self, Self::Wire(WireError::Io { .. }) | Self::Closed | Self::Silent)
    }
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
        while waiting.bytes.len() > WAITING_MAX && !waiting.closing && !waiting.closed {
            waiting = self.room.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        self.append(&mut waiting, message);
    }

    /// Lets the connection end once all that waits is sent.
    pub fn close(&self) {
        self.lock().closing = true;
        self.room.notify_all();
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

    /// The connection has ended; whether it was to.
    fn end(&self) -> bool {
        let mut waiting = self.lock();
        waiting.closed = true;
        waiting.bytes.clear();
        self.room.notify_all();
        waiting.closing
    }
}

/// What was found in the mailbox.
struct Collected {
    /// Nothing more will be left in it.
    is_closing: bool,
    /// Something is still in it.
    has_more: bool,
}

/// One side's end of the connection.
pub struct Control<'a> {
    link: Link,
    mailbox: &'a Mailbox,
    /// What was read last.
    piece: Box<[u8]>,
    /// What is no whole message yet.
    received: Vec<u8>,
    /// What came was no message: nothing that follows can be one.
    is_deaf: bool,
    sending: Vec<u8>,
    sent: usize,
}

impl<'a> Control<'a> {
    /// Of a link whose greetings are done.
    ///
    /// # Errors
    /// The socket is of no use.
    pub fn new(mut link: Link, mailbox: &'a Mailbox) -> io::Result<Self> {
        link.ready_nonblocking()?;
        Ok(Self {
            link,
            mailbox,
            piece: vec![0; READ_LEN].into(),
            received: Vec::new(),
            is_deaf: false,
            sending: Vec::new(),
            sent: 0,
        })
    }

    /// Sends and receives until the mailbox is closed, the other side closes, or something breaks. `take` hears each
    /// message but signs of life, also those that come when the mailbox is closed already; and of what is none, once.
    ///
    /// # Errors
    /// Anything but that the mailbox was closed.
    pub fn run(mut self, mut take: impl FnMut(Result<Message, ControlError>)) -> Result<(), ControlError> {
        let result = self.exchange(&mut take);
        if self.collect().is_closing {
            // The other side has said its last, and may still hear this one's.
            let _ = self.write();
        }
        // However it ends once it was closed: there was nothing more to come.
        if self.mailbox.end() { Ok(()) } else { result }
    }

    fn exchange(&mut self, take: &mut impl FnMut(Result<Message, ControlError>)) -> Result<(), ControlError> {
        let mut closing_since = None;
        let mut heard = Instant::now();
        let mut alive_at = heard;
        let mut said_all = false;
        let mut has_more = false;
        loop {
            let collected = self.collect();
            let closing = collected.is_closing;
            if let Err(error) = self.write() {
                // Perhaps it has said why it does not listen any more.
                let _ = self.read(take);
                return Err(error);
            }
            let all_sent = self.sending.is_empty() && !collected.has_more && !self.link.wants_write();
            let now = Instant::now();
            if closing {
                let since = *closing_since.get_or_insert(now);
                if all_sent && !said_all {
                    said_all = true;
                    self.link.say_end();
                    let _ = self.link.flush();
                }
                if said_all && !self.link.wants_write() {
                    self.link.shut_write();
                }
                if now.duration_since(since) > LAST_WORDS {
                    return Ok(());
                }
            } else if now >= alive_at {
                self.mailbox.send(&Message::new(Kind::Alive, 0, 0));
                alive_at = now + ALIVE_EVERY;
                continue;
            }
            let timeout = match (has_more, closing) {
                (true, _) => Duration::ZERO,
                (false, true) => ALIVE_EVERY,
                (false, false) => alive_at - now,
            };
            self.wait(!all_sent || self.link.wants_write(), timeout)?;
            let any;
            (any, has_more) = self.read(take)?;
            // Only what has not come by now counts: this side may have been stopped itself.
            if any {
                heard = Instant::now();
            } else if heard.elapsed() > SILENCE_MAX {
                return Err(ControlError::Silent);
            }
        }
    }

    /// Takes what was left in the mailbox, unless there is still something to send.
    fn collect(&mut self) -> Collected {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.mailbox.wake, &mut count);
        let mut waiting = self.mailbox.lock();
        if self.sending.is_empty() {
            std::mem::swap(&mut self.sending, &mut waiting.bytes);
            self.sent = 0;
            self.mailbox.room.notify_all();
        }
        Collected {
            is_closing: waiting.closing,
            has_more: !waiting.bytes.is_empty(),
        }
    }

    fn write(&mut self) -> Result<(), ControlError> {
        const WHAT: &str = "writing to the control connection";
        while self.sent < self.sending.len() {
            match self.link.write(&self.sending[self.sent..]) {
                Ok(0) => return Ok(()),
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(WHAT, error)),
            }
        }
        self.sending.clear();
        self.sent = 0;
        match self.link.flush() {
            Err(error) if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Err(broken(WHAT, error))
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

    /// Reads what has come; returns whether a whole message was among it, and whether there is more. A message that pretends
    /// to be long, and of which no end comes, is as good as silence.
    fn read(&mut self, take: &mut impl FnMut(Result<Message, ControlError>)) -> Result<(bool, bool), ControlError> {
        let mut any = false;
        for _ in 0..READS_MAX {
            match self.link.read(&mut self.piece) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(len) => {
                    self.received.extend_from_slice(&self.piece[..len]);
                    match self.take_whole(take) {
                        Ok(whole) => any |= whole,
                        Err(error) => {
                            self.is_deaf = true;
                            take(Err(error));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok((any, false)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken("reading from the control connection", error)),
            }
        }
        Ok((any, true))
    }

    fn take_whole(&mut self, take: &mut impl FnMut(Result<Message, ControlError>)) -> Result<bool, ControlError> {
        if self.is_deaf {
            self.received.clear();
            return Ok(false);
        }
        let mut at = 0;
        while let Some((message, len)) = Message::parse(&self.received[at..])? {
            at += len;
            if message.kind != Kind::Alive {
                take(Ok(message));
            }
        }
        self.received.drain(..at);
        debug_assert!(self.received.len() < Message::HEADER_LEN + BODY_MAX);
        Ok(at > 0)
    }
}

fn broken(what: &'static str, error: io::Error) -> ControlError {
    if link::is_end(&error) {
        ControlError::Closed
    } else {
        WireError::io(what)(error).into()
    }
}
