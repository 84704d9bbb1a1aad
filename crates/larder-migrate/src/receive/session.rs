//! Session with a sender, over successive links.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Shutdown};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::Scope;
use std::time::Duration;

use ring::rand::SecureRandom as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;

use super::claim::Claim;
use super::greetings::Greetings;
use super::lane::{AwaitedLink, PendingLink};
use super::queue::{ChannelQueue, QueueItem};
use super::{Delivered, NotesHandler, Options, ReceiveError, lock, qemu};
use crate::control::{Control, ControlError, Mailbox};
use crate::link::Link;
use crate::notes::Notes;
use crate::progress::CpuTime;
use crate::session::{SessionOutcome, SessionSide};
use crate::wire::{CHANNELS_MAX, FRAME_RAW_MAX, Message, MessageKind, SessionId};

pub(super) struct ReceiveSession<'a> {
    pub(super) options: &'a Options,
    pub(super) notes_handler: Option<&'a NotesHandler<'a>>,
    pub(super) id: SessionId,
    notes: Notes,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) greetings: Mutex<Greetings>,
    pub(super) claim: Mutex<Claim>,
    /// Slot where a new control connection waits to be taken.
    pub(super) pending_link: PendingLink,
    /// True while the session has no link.
    pub(super) lost: AtomicBool,
    queues: Mutex<BTreeMap<u16, Arc<ChannelQueue>>>,
    delivered: Mutex<Delivered>,
    pub(super) outcome: SessionOutcome<ReceiveError>,
    /// Set once the sender has sent a note; a mover sends one before its QEMU's channels.
    received_note: AtomicBool,
    /// Set once the sender has sent END.
    pub(super) ended: AtomicBool,
    over: AtomicBool,
    pub(super) over_event: OwnedFd,
}

impl SessionSide for ReceiveSession<'_> {
    type Error = ReceiveError;
    const THREAD: &'static str = "larder-receive";

    fn outcome(&self) -> &SessionOutcome<ReceiveError> {
        &self.outcome
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn ended(&self) -> &AtomicBool {
        &self.ended
    }

    fn shutdown(&self) {
        self.outcome.shut();
        self.notes.end();
        self.over.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.over_event, &1_u64.to_ne_bytes());
        self.pending_link.stop();
        lock(&self.claim).stop();
        for queue in lock(&self.queues).values() {
            queue.stop();
        }
    }
}

impl<'a> ReceiveSession<'a> {
    pub(super) fn new(options: &'a Options, notes_handler: Option<&'a NotesHandler<'a>>) -> Result<Self, ReceiveError> {
        let mut id = [0; 16];
        ring::rand::SystemRandom::new()
            .fill(&mut id)
            .map_err(|_| ReceiveError::io("random numbers")(io::Error::other("the system has none")))?;
        let mailbox = Mailbox::new().map_err(ReceiveError::io("setting up the control connection"))?;
        let mailbox = Arc::new(mailbox);
        Ok(Self {
            options,
            notes_handler,
            id,
            notes: Notes::new(Arc::clone(&mailbox)),
            mailbox,
            greetings: Mutex::default(),
            claim: Mutex::default(),
            pending_link: PendingLink::default(),
            lost: AtomicBool::new(false),
            queues: Mutex::default(),
            delivered: Mutex::default(),
            outcome: SessionOutcome::new(),
            received_note: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            over: AtomicBool::new(false),
            over_event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map_err(|error| ReceiveError::io("setting up an eventfd")(error.into()))?,
        })
    }

    pub(super) fn delivered(&self) -> Delivered {
        *lock(&self.delivered)
    }

    pub(super) fn into_error(self) -> Option<ReceiveError> {
        self.outcome.into_error()
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    pub(super) fn shut_greetings(&self) {
        lock(&self.greetings).shut();
    }

    /// Waits for `time`; returns false if the session is over.
    fn pause(&self, time: Duration) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let _ = poll(&mut [PollFd::new(&self.over_event, PollFlags::IN)], timeout.as_ref());
        !self.is_over()
    }

    pub(super) fn channels(&self) -> u16 {
        self.options.channels.clamp(1, CHANNELS_MAX)
    }

    pub(super) fn window(&self) -> u32 {
        self.options.window.max(2 * FRAME_RAW_MAX as u32)
    }

    /// Runs the session's control connection: the first one, and those that replace it. The session ends with the
    /// last.
    pub(super) fn run_control<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        first: Link,
        peer: IpAddr,
        patience: Duration,
    ) -> Result<(), ReceiveError> {
        lock(&self.options.progress.0).peer = Some(peer);
        if let Some(notes_handler) = self.notes_handler {
            self.spawn(scope, "moving the VM", move || {
                notes_handler(self.notes.clone());
                Ok(())
            });
        }
        let (opened, to_open) = mpsc::channel();
        self.spawn(scope, "connecting to QEMU", move || self.open_channels(scope, &to_open));
        let result = self.run_links(first, patience, &opened);
        self.mailbox.end();
        if result.is_ok() {
            self.shutdown();
        }
        result
    }

    fn run_links(
        &self,
        first: Link,
        patience: Duration,
        opened: &mpsc::Sender<Arc<ChannelQueue>>,
    ) -> Result<(), ReceiveError> {
        let mut link = first;
        let mut number = 0;
        loop {
            let control = Control::new(link, number, &self.mailbox, !patience.is_zero())
                .map_err(ReceiveError::io("the control connection"))?;
            let lost = match control.exchange(|message| self.handle_result(opened, message)) {
                Ok(()) => return Ok(()),
                // Without patience, the sender does not reconnect to confirm the END.
                Err(_) if patience.is_zero() && self.ended.load(Ordering::Relaxed) => return Ok(()),
                Err(error) if patience.is_zero() || !error.is_symptom() => return Err(error.into()),
                Err(error) => error,
            };
            self.outcome.sockets.shut_link(number);
            self.lost.store(true, Ordering::Release);
            lock(&self.options.progress.0).link.mark_lost();
            if !self.outcome.has_failed() {
                tracing::warn!("link lost ({lost}); waiting for the sender to reconnect");
            }
            match self.pending_link.wait(Some(patience)) {
                AwaitedLink::Link(new_number, new_link, received) => {
                    (number, link) = (new_number, new_link);
                    if let Err(error) = self.mailbox.resume(received) {
                        // The new link can carry the reason to the sender.
                        self.fail(error.into());
                    }
                }
                AwaitedLink::SessionEnded => return Ok(()),
                // All is delivered; only the sender's confirmation of the END is missing.
                AwaitedLink::Timeout if self.ended.load(Ordering::Relaxed) => return Ok(()),
                AwaitedLink::Timeout => return Err(ReceiveError::ReconnectTimeout { lost, waited: patience }),
            }
            self.lost.store(false, Ordering::Release);
            let outage = lock(&self.options.progress.0).link.restore();
            tracing::info!("the link was restored after {:.1} s", outage.as_secs_f64());
        }
    }

    /// Handles a message of the sender or an error, until the control connection ends.
    fn handle_result(&self, opened: &mpsc::Sender<Arc<ChannelQueue>>, message: Result<Message, ControlError>) {
        let is_reason = matches!(&message, Ok(message) if message.kind == MessageKind::Failed);
        if self.outcome.has_failed() && !is_reason {
            return;
        }
        let result = message.map_err(ReceiveError::from).and_then(|message| self.handle_message(opened, message));
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Handles a message of the sender.
    fn handle_message(&self, opened: &mpsc::Sender<Arc<ChannelQueue>>, message: Message) -> Result<(), ReceiveError> {
        let unexpected = || Err(ReceiveError::UnexpectedMessage(format!("{message:?}")));
        if self.ended.load(Ordering::Relaxed) && message.kind != MessageKind::Failed {
            return unexpected();
        }
        match message.kind {
            MessageKind::Open => {
                let queue = self.queue(message.channel)?;
                if !queue.mark_opened() {
                    return unexpected();
                }
                // It fails only when the session is over.
                let _ = opened.send(queue);
                Ok(())
            }
            MessageKind::Close => self.queue(message.channel)?.close(message.value),
            MessageKind::Failed => Err(ReceiveError::Sender(message.text())),
            MessageKind::End => {
                if let Some(number) = lock(&self.queues).values().find_map(|queue| queue.open_channel()) {
                    return Err(ReceiveError::UnexpectedMessage(format!("END while channel {number} is open")));
                }
                self.ended.store(true, Ordering::Release);
                self.mailbox.send(&Message::new(MessageKind::End, 0, 0));
                self.mailbox.close_when_confirmed();
                Ok(())
            }
            MessageKind::Note if self.notes_handler.is_none() => Err(ReceiveError::SenderIsMover),
            MessageKind::Note if self.notes.deliver(message.body.clone()) => {
                self.received_note.store(true, Ordering::Relaxed);
                Ok(())
            }
            MessageKind::Note => Err(ReceiveError::UnexpectedMessage("too many unread notes".to_owned())),
            MessageKind::Delivered
            | MessageKind::Return
            | MessageKind::Closed
            | MessageKind::Alive
            | MessageKind::Received => unexpected(),
        }
    }

    /// Returns the queue of a channel. A frame may need it before the channel is opened.
    pub(super) fn queue(&self, number: u16) -> Result<Arc<ChannelQueue>, ReceiveError> {
        if number >= self.channels() {
            return Err(ReceiveError::UnexpectedMessage(format!("data of channel {number}, which was not offered")));
        }
        let mut queues = lock(&self.queues);
        let queue = queues.entry(number).or_insert_with(|| Arc::new(ChannelQueue::new(number, self.window())));
        Ok(Arc::clone(queue))
    }

    /// Connects to QEMU for each channel, in the order in which the source's QEMU has connected: QEMU 7.2 takes the
    /// first connection as the main channel. Runs in a separate thread, since QEMU may delay this and the control
    /// connection must not wait.
    fn open_channels<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        to_open: &mpsc::Receiver<Arc<ChannelQueue>>,
    ) -> Result<(), ReceiveError> {
        let path = &self.options.connect;
        for queue in to_open {
            let connected = qemu::connect(path, self.options.user, |time| self.pause(time));
            let connected = connected.map_err(|source| match self.notes_handler {
                // The sender is no mover, so QEMU was not prepared to wait there.
                Some(_) if !self.received_note.load(Ordering::Relaxed) => ReceiveError::SenderIsStream,
                _ => ReceiveError::Qemu { path: path.clone(), source },
            })?;
            let Some(socket) = connected else { return Ok(()) };
            let socket = Arc::new(socket);
            self.outcome.add_qemu_socket(Arc::clone(&socket));
            let (writer, written) = (Arc::clone(&queue), Arc::clone(&socket));
            self.spawn(scope, "writing to QEMU", move || {
                self.write_channel(&writer, &written);
                Ok(())
            });
            self.spawn(scope, "reading from QEMU", move || {
                self.forward_return_path(&queue, &socket);
                Ok(())
            });
        }
        Ok(())
    }

    /// Writes the bytes of a channel to QEMU.
    fn write_channel(&self, queue: &ChannelQueue, mut socket: &UnixStream) {
        let report = |bytes| self.mailbox.send(&Message::new(MessageKind::Delivered, queue.number, bytes));
        let mut cpu = CpuTime::now();
        while let Some(next) = queue.next(report) {
            let QueueItem::Bytes(bytes) = next else {
                // All is delivered; QEMU may still write to the return path.
                let _ = socket.shutdown(Shutdown::Write);
                return;
            };
            if socket.write_all(&bytes).is_err() {
                // QEMU has ended or closed the channel, with bytes left that it does not want.
                let _ = socket.shutdown(Shutdown::Both);
                queue.refuse();
                self.mailbox.send(&Message::new(MessageKind::Closed, queue.number, 1));
                return;
            }
            let raw = bytes.len() as u64;
            let usage = cpu.lap();
            self.add_delivered(|delivered| {
                delivered.raw += raw;
                delivered.cpu_ns += usage.total_ns;
            });
            queue.mark_taken(bytes);
        }
    }

    /// Forwards QEMU's return path to the sender.
    fn forward_return_path(&self, queue: &ChannelQueue, mut socket: &UnixStream) {
        let mut buffer = vec![0; 32 << 10];
        loop {
            match socket.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => {
                    self.mailbox.send_when_room(&Message::with_body(MessageKind::Return, queue.number, &buffer[..len]))
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        queue.mark_closed();
        self.mailbox.send(&Message::new(MessageKind::Closed, queue.number, 0));
    }

    /// Updates the sums of the session and those for monitoring.
    pub(super) fn add_delivered(&self, count: impl Fn(&mut Delivered)) {
        count(&mut lock(&self.delivered));
        count(&mut lock(&self.options.progress.0).delivered);
    }
}
