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
use super::lane::{Berth, Landed};
use super::queue::{Next, Queue};
use super::{Agent, Delivered, Options, ReceiveError, lock, qemu};
use crate::control::{Control, ControlError, Mailbox};
use crate::link::Link;
use crate::notes::Notes;
use crate::progress::CpuTime;
use crate::session::{Ending, Side};
use crate::wire::{CHANNELS_MAX, FRAME_RAW_MAX, Kind, Message, SessionId};

pub(super) struct Session<'a> {
    pub(super) options: &'a Options,
    pub(super) agent: Option<&'a Agent<'a>>,
    pub(super) id: SessionId,
    notes: Notes,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) greetings: Mutex<Greetings>,
    pub(super) claim: Mutex<Claim>,
    /// Slot where a new control connection waits to be taken.
    pub(super) berth: Berth,
    /// True while the session has no link.
    pub(super) lost: AtomicBool,
    queues: Mutex<BTreeMap<u16, Arc<Queue>>>,
    delivered: Mutex<Delivered>,
    pub(super) ending: Ending<ReceiveError>,
    /// Set once the sender has sent a note; a mover sends one before its QEMU's channels.
    noted: AtomicBool,
    /// Set once the sender has sent END.
    pub(super) ended: AtomicBool,
    over: AtomicBool,
    pub(super) over_event: OwnedFd,
}

impl Side for Session<'_> {
    type Error = ReceiveError;
    const THREAD: &'static str = "larder-receive";

    fn ending(&self) -> &Ending<ReceiveError> {
        &self.ending
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn ended(&self) -> &AtomicBool {
        &self.ended
    }

    fn go_home(&self) {
        self.ending.shut();
        self.notes.end();
        self.over.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.over_event, &1_u64.to_ne_bytes());
        self.berth.stop();
        lock(&self.claim).stop();
        for queue in lock(&self.queues).values() {
            queue.stop();
        }
    }
}

impl<'a> Session<'a> {
    pub(super) fn new(options: &'a Options, agent: Option<&'a Agent<'a>>) -> Result<Self, ReceiveError> {
        let mut id = [0; 16];
        ring::rand::SystemRandom::new()
            .fill(&mut id)
            .map_err(|_| ReceiveError::io("random numbers")(io::Error::other("the system has none")))?;
        let mailbox = Mailbox::new().map_err(ReceiveError::io("setting up the control connection"))?;
        let mailbox = Arc::new(mailbox);
        Ok(Self {
            options,
            agent,
            id,
            notes: Notes::new(Arc::clone(&mailbox)),
            mailbox,
            greetings: Mutex::default(),
            claim: Mutex::default(),
            berth: Berth::default(),
            lost: AtomicBool::new(false),
            queues: Mutex::default(),
            delivered: Mutex::default(),
            ending: Ending::new(),
            noted: AtomicBool::new(false),
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
        self.ending.into_error()
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
    pub(super) fn control<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        first: Link,
        peer: IpAddr,
        patience: Duration,
    ) -> Result<(), ReceiveError> {
        lock(&self.options.watched.0).peer = Some(peer);
        if let Some(agent) = self.agent {
            self.spawn(scope, "moving the VM", move || {
                agent(self.notes.clone());
                Ok(())
            });
        }
        let (opened, to_open) = mpsc::channel();
        self.spawn(scope, "connecting to QEMU", move || self.open_all(scope, &to_open));
        let result = self.over_links(first, patience, &opened);
        self.mailbox.end();
        if result.is_ok() {
            self.go_home();
        }
        result
    }

    fn over_links(
        &self,
        first: Link,
        patience: Duration,
        opened: &mpsc::Sender<Arc<Queue>>,
    ) -> Result<(), ReceiveError> {
        let mut link = first;
        let mut number = 0;
        loop {
            let control = Control::new(link, number, &self.mailbox, !patience.is_zero())
                .map_err(ReceiveError::io("the control connection"))?;
            let lost = match control.exchange(|message| self.take(opened, message)) {
                Ok(()) => return Ok(()),
                // Without patience, the sender does not reconnect to confirm the END.
                Err(_) if patience.is_zero() && self.ended.load(Ordering::Relaxed) => return Ok(()),
                Err(error) if patience.is_zero() || !error.is_symptom() => return Err(error.into()),
                Err(error) => error,
            };
            self.ending.sockets.cut(number);
            self.lost.store(true, Ordering::Release);
            lock(&self.options.watched.0).link.lose();
            if !self.ending.has_failed() {
                tracing::warn!("link lost ({lost}); waiting for the sender to reconnect");
            }
            match self.berth.take(Some(patience)) {
                Landed::Link(again, over, received) => {
                    (number, link) = (again, over);
                    if let Err(error) = self.mailbox.resume(received) {
                        // The new link can carry the reason to the sender.
                        self.fail(error.into());
                    }
                }
                Landed::Over => return Ok(()),
                // All is delivered; only the sender's confirmation of the END is missing.
                Landed::Late if self.ended.load(Ordering::Relaxed) => return Ok(()),
                Landed::Late => return Err(ReceiveError::Away { lost, waited: patience }),
            }
            self.lost.store(false, Ordering::Release);
            let away = lock(&self.options.watched.0).link.restore();
            tracing::info!("the link was restored after {:.1} s", away.as_secs_f64());
        }
    }

    /// Handles a message of the sender or an error, until the control connection ends.
    fn take(&self, opened: &mpsc::Sender<Arc<Queue>>, message: Result<Message, ControlError>) {
        let is_reason = matches!(&message, Ok(message) if message.kind == Kind::Failed);
        if self.ending.has_failed() && !is_reason {
            return;
        }
        let heard = message
            .map_err(ReceiveError::from)
            .and_then(|message| self.hear(opened, message));
        if let Err(error) = heard {
            self.fail(error);
        }
    }

    /// Handles a message of the sender.
    fn hear(&self, opened: &mpsc::Sender<Arc<Queue>>, message: Message) -> Result<(), ReceiveError> {
        let unexpected = || Err(ReceiveError::Message(format!("{message:?}")));
        if self.ended.load(Ordering::Relaxed) && message.kind != Kind::Failed {
            return unexpected();
        }
        match message.kind {
            Kind::Open => {
                let queue = self.queue(message.channel)?;
                if !queue.open() {
                    return unexpected();
                }
                // It fails only when the session is over.
                let _ = opened.send(queue);
                Ok(())
            }
            Kind::Close => self.queue(message.channel)?.close(message.value),
            Kind::Failed => Err(ReceiveError::Sender(message.text())),
            Kind::End => {
                if let Some(number) = lock(&self.queues).values().find_map(|queue| queue.is_open()) {
                    return Err(ReceiveError::Message(format!("END while channel {number} is open")));
                }
                self.ended.store(true, Ordering::Release);
                self.mailbox.send(&Message::new(Kind::End, 0, 0));
                self.mailbox.close_when_confirmed();
                Ok(())
            }
            Kind::Note if self.agent.is_none() => Err(ReceiveError::Whole),
            Kind::Note if self.notes.deliver(message.body.clone()) => {
                self.noted.store(true, Ordering::Relaxed);
                Ok(())
            }
            Kind::Note => Err(ReceiveError::Message("too many unread notes".to_owned())),
            Kind::Delivered | Kind::Return | Kind::Closed | Kind::Alive | Kind::Received => unexpected(),
        }
    }

    /// Returns the queue of a channel. A frame may need it before the channel is opened.
    pub(super) fn queue(&self, number: u16) -> Result<Arc<Queue>, ReceiveError> {
        if number >= self.channels() {
            return Err(ReceiveError::Message(format!(
                "data of channel {number}, which was not offered"
            )));
        }
        let mut queues = lock(&self.queues);
        let queue = queues
            .entry(number)
            .or_insert_with(|| Arc::new(Queue::new(number, self.window())));
        Ok(Arc::clone(queue))
    }

    /// Connects to QEMU for each channel, in the order in which the source's QEMU has connected: QEMU 7.2 takes the
    /// first connection as the main channel. Runs in a separate thread, since QEMU may delay this and the control
    /// connection must not wait.
    fn open_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        to_open: &mpsc::Receiver<Arc<Queue>>,
    ) -> Result<(), ReceiveError> {
        let path = &self.options.connect;
        for queue in to_open {
            let connected = qemu::connect(path, self.options.user, |time| self.pause(time));
            let connected = connected.map_err(|source| match self.agent {
                // The sender is no mover, so QEMU was not prepared to wait there.
                Some(_) if !self.noted.load(Ordering::Relaxed) => ReceiveError::Stream,
                _ => ReceiveError::Qemu {
                    path: path.clone(),
                    source,
                },
            })?;
            let Some(socket) = connected else { return Ok(()) };
            let socket = Arc::new(socket);
            self.ending.shut_later(Arc::clone(&socket));
            let (writer, written) = (Arc::clone(&queue), Arc::clone(&socket));
            self.spawn(scope, "writing to QEMU", move || {
                self.write(&writer, &written);
                Ok(())
            });
            self.spawn(scope, "reading from QEMU", move || {
                self.bring_back(&queue, &socket);
                Ok(())
            });
        }
        Ok(())
    }

    /// Writes the bytes of a channel to QEMU.
    fn write(&self, queue: &Queue, mut socket: &UnixStream) {
        let tell = |bytes| self.mailbox.send(&Message::new(Kind::Delivered, queue.number, bytes));
        let mut cpu = CpuTime::of_thread();
        while let Some(next) = queue.next(tell) {
            let Next::Bytes(bytes) = next else {
                // All is delivered; QEMU may still write to the return path.
                let _ = socket.shutdown(Shutdown::Write);
                return;
            };
            if socket.write_all(&bytes).is_err() {
                // QEMU has ended or closed the channel, with bytes left that it does not want.
                let _ = socket.shutdown(Shutdown::Both);
                queue.refuse();
                self.mailbox.send(&Message::new(Kind::Closed, queue.number, 1));
                return;
            }
            let raw = bytes.len() as u64;
            let spent = cpu.spent();
            self.count(|delivered| {
                delivered.raw += raw;
                delivered.cpu_ns += spent.all_ns;
            });
            queue.taken(bytes);
        }
    }

    /// Forwards QEMU's return path to the sender.
    fn bring_back(&self, queue: &Queue, mut socket: &UnixStream) {
        let mut buffer = vec![0; 32 << 10];
        loop {
            match socket.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => self
                    .mailbox
                    .send_when_room(&Message::with_body(Kind::Return, queue.number, &buffer[..len])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        queue.closed();
        self.mailbox.send(&Message::new(Kind::Closed, queue.number, 0));
    }

    /// Updates the sums of the session and those for monitoring.
    pub(super) fn count(&self, count: impl Fn(&mut Delivered)) {
        count(&mut lock(&self.delivered));
        count(&mut lock(&self.options.watched.0).delivered);
    }
}
