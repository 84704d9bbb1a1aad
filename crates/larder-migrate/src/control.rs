//! Control connection: ordered messages both ways, and a keep-alive each second.
//!
//! One thread, in [`Control::exchange`], owns the connection; all others enqueue messages with [`Mailbox::send`]. The
//! connection is lost if it breaks or if nothing is received for a while, because the other host or the network is
//! down. The messages continue over the next one, and each is received once.
//!
//! The control connection is the last connection to close. A side that fails enqueues the reason and closes the
//! mailbox. Both sides may then still receive each other's reasons for [`CLOSE_TIMEOUT`], until either closes its end.

mod mailbox;

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use thiserror::Error;

pub(crate) use self::mailbox::CloseCondition;
pub use self::mailbox::{Mailbox, ReceivedCount};
use crate::link::{self, Link};
use crate::wire::{BODY_MAX, Message, MessageKind, WireError};

/// Interval of keep-alives.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// Time without any message after which a link counts as lost and a new one is tried.
const RECONNECT_SILENCE_MAX: Duration = Duration::from_secs(3);
/// Time without any message after which the session ends, where no new link is tried.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time limit for emptying a closed mailbox, and for the other side to send its last messages and close its end.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which a link with a lost lane may still deliver the reason of the loss.
const LANE_REASON_TIMEOUT: Duration = Duration::from_millis(500);
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
    LaneClosed,
    /// No message was received for this long.
    #[error("nothing was received from the other side for {} s: its host or the network is down", .0.as_secs())]
    Silent(Duration),
    /// Waiting for events failed.
    #[error("cannot wait for the control connection: {0}")]
    Poll(io::Error),
    /// The other side confirms more messages than were sent, or fewer than before.
    #[error("the other side confirms {count} messages; the valid range is {least} to {most}")]
    InvalidCount {
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
        matches!(self, Self::Wire(WireError::Io { .. }) | Self::Closed | Self::LaneClosed | Self::Silent(_))
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
    read_buffer: Box<[u8]>,
    /// Bytes received that are not yet a whole message.
    received: Vec<u8>,
    /// Invalid bytes were received, so nothing that follows can be a message.
    input_invalid: bool,
    /// Received messages are to be confirmed now.
    confirm_due: bool,
    sending: Vec<u8>,
    sent: usize,
}

impl<'a> Control<'a> {
    /// Creates the end of a control connection whose greetings are done. With `reconnects`, silence ends the
    /// connection sooner, because a new link is tried then.
    ///
    /// # Errors
    /// The socket cannot be set up.
    pub fn new(mut link: Link, number: u32, mailbox: &'a Mailbox, reconnects: bool) -> io::Result<Self> {
        link.finish_setup_nonblocking()?;
        Ok(Self {
            link,
            number,
            mailbox,
            silence_max: if reconnects { RECONNECT_SILENCE_MAX } else { SILENCE_MAX },
            read_buffer: vec![0; READ_LEN].into(),
            received: Vec::new(),
            input_invalid: false,
            confirm_due: false,
            sending: Vec::new(),
            sent: 0,
        })
    }

    /// Sends and receives until the mailbox is closed, the other side closes the connection, or an error occurs.
    /// `on_message` gets each message except keep-alives, including those that arrive after the mailbox was closed, and
    /// invalid bytes once, as an error.
    ///
    /// # Errors
    /// The connection ended before the mailbox was closed and its messages were sent, or confirmed, as required.
    pub fn exchange(mut self, mut on_message: impl FnMut(Result<Message, ControlError>)) -> Result<(), ControlError> {
        let result = self.run(&mut on_message);
        if self.mailbox.closing().is_some() {
            // The other side has sent its last message, but may still read this side's.
            self.confirm_due = true;
            let _ = self.collect().and_then(|_| self.write());
        }
        match self.mailbox.closing() {
            // The result does not matter: nothing more was expected.
            Some(CloseCondition::Sent) => Ok(()),
            Some(CloseCondition::Confirmed) if self.mailbox.is_confirmed() => Ok(()),
            _ => result,
        }
    }

    fn run(&mut self, on_message: &mut impl FnMut(Result<Message, ControlError>)) -> Result<(), ControlError> {
        let mut closing_since = None;
        let mut lost_since = None;
        let mut last_received = Instant::now();
        let mut keepalive_at = last_received;
        let mut end_sent = false;
        let mut has_more = false;
        loop {
            let now = Instant::now();
            if now >= keepalive_at && !end_sent {
                self.confirm_due = true;
                keepalive_at = now + KEEPALIVE_INTERVAL;
            }
            let mut wait = KEEPALIVE_INTERVAL;
            if self.mailbox.has_lost_lane(self.number) {
                wait = LANE_REASON_TIMEOUT.saturating_sub(lost_since.get_or_insert(now).elapsed());
                if wait.is_zero() {
                    return Err(ControlError::LaneClosed);
                }
            }
            let collected = self.collect()?;
            let closing = collected.closing.is_some();
            if let Err(error) = self.write() {
                // The other side may have sent the reason why it no longer reads.
                let _ = self.read(on_message);
                return Err(error);
            }
            let all_sent = self.sending.is_empty() && !collected.has_more && !self.link.wants_write();
            if closing {
                let since = *closing_since.get_or_insert(now);
                if all_sent && !end_sent {
                    end_sent = true;
                    self.link.queue_close_notify();
                    let _ = self.link.flush();
                }
                if end_sent && !self.link.wants_write() {
                    self.link.shut_down_write();
                }
                if now.duration_since(since) > CLOSE_TIMEOUT {
                    return Ok(());
                }
            }
            let timeout = match (has_more || collected.has_more && self.sending.is_empty(), closing) {
                (true, _) => Duration::ZERO,
                (false, true) => wait,
                (false, false) => wait.min(keepalive_at.saturating_duration_since(now)),
            };
            self.wait(!all_sent || self.link.wants_write(), timeout)?;
            let any;
            (any, has_more) = self.read(on_message)?;
            // Silence is checked after the read: this process may have been stopped itself.
            if any {
                last_received = Instant::now();
            } else if last_received.elapsed() > self.silence_max {
                return Err(ControlError::Silent(self.silence_max));
            }
        }
    }

    /// Takes the messages in the mailbox, unless some are still being sent.
    fn collect(&mut self) -> Result<mailbox::Collected, ControlError> {
        let confirms = self.confirm_due && self.sending.is_empty();
        if !self.sending.is_empty() {
            return self.mailbox.peek();
        }
        self.sent = 0;
        self.confirm_due &= !confirms;
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
                Err(error) => return Err(connection_error(WHAT, error)),
            }
        }
        self.sending.clear();
        self.sent = 0;
        match self.link.flush() {
            Err(error) if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Err(connection_error(WHAT, error))
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
    fn read(
        &mut self,
        on_message: &mut impl FnMut(Result<Message, ControlError>),
    ) -> Result<(bool, bool), ControlError> {
        let mut any = false;
        for _ in 0..READS_MAX {
            match self.link.read(&mut self.read_buffer) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(len) => {
                    self.received.extend_from_slice(&self.read_buffer[..len]);
                    match self.process_messages(on_message) {
                        Ok(got_message) => any |= got_message,
                        Err(error @ ControlError::Closed) => return Err(error),
                        Err(error) => {
                            self.input_invalid = true;
                            on_message(Err(error));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok((any, false)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(connection_error("reading from the control connection", error)),
            }
        }
        Ok((any, true))
    }

    fn process_messages(
        &mut self,
        on_message: &mut impl FnMut(Result<Message, ControlError>),
    ) -> Result<bool, ControlError> {
        if self.input_invalid {
            self.received.clear();
            return Ok(false);
        }
        let mut at = 0;
        while let Some((message, len)) = Message::parse(&self.received[at..])? {
            at += len;
            if message.kind.is_retained() {
                // The link is no longer the session's; the message will be sent again.
                let Some(confirms) = self.mailbox.count_received(self.number, len) else {
                    return Err(ControlError::Closed);
                };
                self.confirm_due |= confirms;
            }
            match message.kind {
                MessageKind::Alive => self.mailbox.confirm(message.value)?,
                kind => {
                    // The side that ends the session waits for this confirmation.
                    self.confirm_due |= kind == MessageKind::End;
                    on_message(Ok(message));
                }
            }
        }
        self.received.drain(..at);
        debug_assert!(self.received.len() < Message::HEADER_LEN + BODY_MAX);
        Ok(at > 0)
    }
}

fn connection_error(what: &'static str, error: io::Error) -> ControlError {
    if link::is_disconnect(&error) { ControlError::Closed } else { WireError::io(what)(error).into() }
}
