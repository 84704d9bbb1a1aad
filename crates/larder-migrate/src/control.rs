//! Control connection: ordered messages both ways, and a keep-alive each second.
//!
//! One thread, in [`Control::exchange`], owns the connection; all others enqueue messages with [`Mailbox::send`]. The
//! connection is lost if it breaks or if nothing is received for a while, because the other host or the network is
//! down. The messages continue over the next one, and each is received once.
//!
//! The control connection is the last connection to close. A side that fails enqueues the reason and closes the
//! mailbox. Both sides may then still receive each other's reasons for [`LAST_WORDS`], until either closes its end.

mod mailbox;

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use thiserror::Error;

pub(crate) use self::mailbox::Closing;
pub use self::mailbox::{Counted, Mailbox};
use crate::link::{self, Link};
use crate::wire::{BODY_MAX, Kind, Message, WireError};

/// Interval of keep-alives.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// Time without any message after which a link counts as lost and a new one is tried.
const SILENCE_TO_TRY_AGAIN: Duration = Duration::from_secs(3);
/// Time without any message after which the session ends, where no new link is tried.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time limit for emptying a closed mailbox, and for the other side to send its last messages and close its end.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(2);
/// Time for which a link with a lost lane may still deliver the reason of the loss.
const LANE_REASON: Duration = Duration::from_millis(500);
/// Bytes per read.
const READ_LEN: usize = 64 << 10;
/// Maximum reads in a row before other work is done, however much the other side sends.
const READS_MAX: usize = 16;

/// Reasons for the end of a control connection.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The system call failed, or the bytes received are no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The other side has closed the connection.
    #[error(
        "the other side closed the connection without giving a reason: its larder process ended, or something between the hosts cut the connection"
    )]
    Closed,
    /// Another connection of the link is lost.
    #[error(
        "the other side closed a connection in the middle of the session: its larder process ended, or something between the hosts cut the connection"
    )]
    Lane,
    /// No message was received for this long.
    #[error("nothing was received from the other side for {} s: its host or the network is down", .0.as_secs())]
    Silent(Duration),
    /// Waiting for events failed.
    #[error("cannot wait for the control connection: {0}")]
    Poll(io::Error),
    /// The other side confirms more messages than were sent, or fewer than before.
    #[error("the other side confirms {count} messages; the valid range is {least} to {most}")]
    Confirmed {
        /// Count that it confirms.
        count: u64,
        /// Count that it has confirmed before.
        least: u64,
        /// Count of messages sent.
        most: u64,
    },
    /// The other side does not confirm the messages that it is sent.
    #[error("the other side does not confirm the messages sent to it")]
    Unconfirmed,
}

impl ControlError {
    /// Returns true if the error shows only that the connection broke, and not why.
    pub(crate) fn is_symptom(&self) -> bool {
        matches!(
            self,
            Self::Wire(WireError::Io { .. }) | Self::Closed | Self::Lane | Self::Silent(_)
        )
    }
}

/// One side's end of a control connection.
pub struct Control<'a> {
    link: Link,
    /// Number of the link, among those of the session.
    number: u32,
    mailbox: &'a Mailbox,
    /// Time without any message after which the other side is given up.
    silence_max: Duration,
    /// Buffer of the last read.
    piece: Box<[u8]>,
    /// Bytes received that are not yet a whole message.
    received: Vec<u8>,
    /// Invalid bytes were received, so nothing that follows can be a message.
    is_deaf: bool,
    /// Received messages are to be confirmed now.
    confirms: bool,
    sending: Vec<u8>,
    sent: usize,
}

impl<'a> Control<'a> {
    /// Creates the end of a control connection whose greetings are done. With `tries_again`, silence ends the
    /// connection sooner, because a new link is tried then.
    ///
    /// # Errors
    /// The socket cannot be set up.
    pub fn new(mut link: Link, number: u32, mailbox: &'a Mailbox, tries_again: bool) -> io::Result<Self> {
        link.ready_nonblocking()?;
        Ok(Self {
            link,
            number,
            mailbox,
            silence_max: if tries_again { SILENCE_TO_TRY_AGAIN } else { SILENCE_MAX },
            piece: vec![0; READ_LEN].into(),
            received: Vec::new(),
            is_deaf: false,
            confirms: false,
            sending: Vec::new(),
            sent: 0,
        })
    }

    /// Sends and receives until the mailbox is closed, the other side closes the connection, or an error occurs.
    /// `take` gets each message except keep-alives, including those that arrive after the mailbox was closed, and
    /// invalid bytes once, as an error.
    ///
    /// # Errors
    /// The connection ended before the mailbox was closed and its messages were sent, or confirmed, as required.
    pub fn exchange(mut self, mut take: impl FnMut(Result<Message, ControlError>)) -> Result<(), ControlError> {
        let result = self.run(&mut take);
        if self.mailbox.closing().is_some() {
            // The other side has sent its last message, but may still read this side's.
            self.confirms = true;
            let _ = self.collect().and_then(|_| self.write());
        }
        match self.mailbox.closing() {
            // The result does not matter: nothing more was expected.
            Some(Closing::Sent) => Ok(()),
            Some(Closing::Confirmed) if self.mailbox.is_confirmed() => Ok(()),
            _ => result,
        }
    }

    fn run(&mut self, take: &mut impl FnMut(Result<Message, ControlError>)) -> Result<(), ControlError> {
        let mut closing_since = None;
        let mut lost_since = None;
        let mut heard = Instant::now();
        let mut alive_at = heard;
        let mut said_all = false;
        let mut has_more = false;
        loop {
            let now = Instant::now();
            if now >= alive_at && !said_all {
                self.confirms = true;
                alive_at = now + ALIVE_EVERY;
            }
            let mut wait = ALIVE_EVERY;
            if self.mailbox.has_lost_lane(self.number) {
                wait = LANE_REASON.saturating_sub(lost_since.get_or_insert(now).elapsed());
                if wait.is_zero() {
                    return Err(ControlError::Lane);
                }
            }
            let collected = self.collect()?;
            let closing = collected.closing.is_some();
            if let Err(error) = self.write() {
                // The other side may have sent the reason why it no longer reads.
                let _ = self.read(take);
                return Err(error);
            }
            let all_sent = self.sending.is_empty() && !collected.has_more && !self.link.wants_write();
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
            }
            let timeout = match (has_more || collected.has_more && self.sending.is_empty(), closing) {
                (true, _) => Duration::ZERO,
                (false, true) => wait,
                (false, false) => wait.min(alive_at.saturating_duration_since(now)),
            };
            self.wait(!all_sent || self.link.wants_write(), timeout)?;
            let any;
            (any, has_more) = self.read(take)?;
            // Silence is checked after the read: this process may have been stopped itself.
            if any {
                heard = Instant::now();
            } else if heard.elapsed() > self.silence_max {
                return Err(ControlError::Silent(self.silence_max));
            }
        }
    }

    /// Takes the messages in the mailbox, unless some are still being sent.
    fn collect(&mut self) -> Result<mailbox::Collected, ControlError> {
        let confirms = self.confirms && self.sending.is_empty();
        if !self.sending.is_empty() {
            return self.mailbox.look();
        }
        self.sent = 0;
        self.confirms &= !confirms;
        self.mailbox.collect(&mut self.sending, confirms)
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
            PollFd::new(self.mailbox.wake_event(), PollFlags::IN),
        ];
        let timeout = Timespec::try_from(timeout).expect("a second or less");
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ControlError::Poll(error.into())),
        }
    }

    /// Reads all that has arrived. Returns whether a whole message was among it, and whether more may be readable. A
    /// message that claims to be long and never completes counts as silence.
    fn read(&mut self, take: &mut impl FnMut(Result<Message, ControlError>)) -> Result<(bool, bool), ControlError> {
        let mut any = false;
        for _ in 0..READS_MAX {
            match self.link.read(&mut self.piece) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(len) => {
                    self.received.extend_from_slice(&self.piece[..len]);
                    match self.take_whole(take) {
                        Ok(whole) => any |= whole,
                        Err(error @ ControlError::Closed) => return Err(error),
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
            if message.kind.is_kept() {
                // The link is no longer the session's; the message will be sent again.
                let Some(confirms) = self.mailbox.heard(self.number, len) else {
                    return Err(ControlError::Closed);
                };
                self.confirms |= confirms;
            }
            match message.kind {
                Kind::Alive => self.mailbox.confirm(message.value)?,
                kind => {
                    // The side that ends the session waits for this confirmation.
                    self.confirms |= kind == Kind::End;
                    take(Ok(message));
                }
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
