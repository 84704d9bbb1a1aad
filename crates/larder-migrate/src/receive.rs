//! The receiver: takes a sender's frames and hands the destination's QEMU the bytes of its channels.
//!
//! ```text
//! sender --TCP-- lane 0 (read, decode) --.   a queue for each channel, in the order of its bytes
//! sender --TCP-- lane 1 (read, decode) --+-- channel 0: writer --> QEMU --> return path
//! sender --TCP-- control                 '-- channel 1: writer --> QEMU
//! ```
//!
//! Invariants:
//! - A lane never waits for QEMU: what is decoded is put into the channel's queue, which has room for the window that the
//!   sender keeps to. So a frame that another one waits for is always decoded ([`crate::base`]).
//! - QEMU gets a channel's bytes in their order, each once, and nothing after a gap.
//! - Only a channel that its sender has closed, and of which all was delivered, ends in order; all else is a connection
//!   that is shut in the middle, or a QEMU that has all that it needs.
//! - Strangers at its port, however many and however silent, keep neither a sender out nor the end from coming.
//! - Memory is bounded by the window times the channels, and the old pages, whatever the peer says.

mod greetings;
mod qemu;
mod queue;

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, Scope};
use std::time::Duration;

use ring::rand::SecureRandom as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;
use thiserror::Error;

use self::greetings::Greetings;
use self::queue::{Next, Queue};
use crate::base::{Frontier, Slots};
use crate::control::{Control, ControlError, Mailbox};
use crate::decode::{Bases, DecodeError, FrameDecoder};
use crate::link::{self, Link, LinkError};
use crate::notes::Notes;
use crate::progress::CpuTime;
use crate::session::{self, Ending, Shut, Weight};
use crate::tls::ReceiverTls;
use crate::wire::{
    CHANNEL_FRAMES_MAX, CHANNELS_MAX, FRAME_RAW_MAX, FrameHeader, Hello, Kind, LANES_MAX, Message, Role, SessionId,
    Welcome, WireError,
};

/// What a receiver offers.
pub struct Options {
    /// Where the destination's QEMU waits: the path of `-incoming unix:PATH`.
    pub connect: PathBuf,
    /// The user that QEMU runs as, and nobody else may listen there.
    pub user: Option<u32>,
    /// Without it, everything comes in the clear.
    pub tls: Option<ReceiverTls>,
    /// Bytes of old pages to keep at most.
    pub delta_memory: u64,
    /// Bytes of each channel that may wait for QEMU.
    pub window: u32,
    /// Channels at most, 1 to 256.
    pub channels: u16,
    /// Lanes at most, 1 to 64.
    pub lanes: u16,
    /// For those who watch.
    pub watched: Arc<Watched>,
}

/// What a receiver has done so far, in all of its sessions.
#[derive(Debug, Default)]
pub struct Watched(Mutex<(Delivered, Option<IpAddr>)>);

impl Watched {
    /// What was delivered.
    #[must_use]
    pub fn delivered(&self) -> Delivered {
        lock(&self.0).0
    }

    /// Who sends, or has sent last.
    #[must_use]
    pub fn peer(&self) -> Option<IpAddr> {
        lock(&self.0).1
    }
}

/// Why a receiver ended without having delivered everything.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ReceiveError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error("the sender: {0}")]
    Sender(String),
    #[error("refused: {0}")]
    Refused(&'static str),
    #[error("the sender sent {0}, which no sender sends")]
    Message(String),
    #[error("the sender sent bytes {begin} to {end} of channel {channel}, of which it may send up to {most} now")]
    Window {
        channel: u16,
        begin: u64,
        end: u64,
        most: u64,
    },
    #[error("the sender sent more than {CHANNEL_FRAMES_MAX} frames of channel {channel} before QEMU took any")]
    Frames { channel: u16 },
    #[error("a thread panicked ({what}), which is a bug of Larder's: please report it, with what was said before this")]
    Panicked { what: &'static str },
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error(
        "the sender has closed a connection in the middle: its larder was ended, or something in between cut it off"
    )]
    Lane,
    #[error("cannot connect to QEMU at {}: {source}; is it started with '-incoming unix:{}', and waiting?", path.display(), path.display())]
    Qemu { path: PathBuf, source: io::Error },
    #[error("the path of QEMU's socket, {}, is {} bytes long; the kernel takes at most 107: start QEMU with a shorter one, for example in /run", .0.display(), .0.as_os_str().len())]
    Path(PathBuf),
    #[error(
        "the sender moves a whole virtual machine (larder migrate VM), and this receiver carries a stream and does nothing \
         else: start it with --qmp in the place of --connect"
    )]
    Whole,
    #[error(
        "the sender carries a stream and does nothing else (larder migrate send), and this receiver looks after QEMU, too: \
         start it with --connect in the place of --qmp, or send by larder migrate VM"
    )]
    Stream,
    #[error("stopped")]
    Stopped,
}

impl ReceiveError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    fn weight(&self) -> Weight {
        match self {
            Self::Sender(_) => Weight::Told,
            Self::Control(error) if error.is_symptom() => Weight::Symptom,
            Self::Wire(WireError::Io { .. }) | Self::Lane => Weight::Symptom,
            _ => Weight::Cause,
        }
    }
}

/// What a session has delivered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Delivered {
    /// Bytes that QEMU took.
    pub raw: u64,
    /// Bytes of frames that came for them.
    pub wire: u64,
    /// Frames.
    pub frames: u64,
    /// Nanoseconds of processors: lanes, which read, decrypt and decode, and those who hand it to QEMU.
    pub cpu_ns: u64,
    /// Of these, for decoding.
    pub decode_cpu_ns: u64,
}

/// Hears of the notes of a session, which begins with its first and ends when [`Notes::receive`] says so. It runs in a
/// thread of its own.
pub type Agent<'a> = dyn Fn(Notes) + Sync + 'a;

/// Waits for a sender at `listener` and delivers what it carries until both QEMUs have closed all channels.
///
/// # Errors
/// Something broke, and QEMU's sockets were shut.
pub fn receive(
    listener: &TcpListener,
    options: &Options,
    stop: &AtomicBool,
    agent: Option<&Agent<'_>>,
) -> Result<Delivered, ReceiveError> {
    if SocketAddr::from_pathname(&options.connect).is_err() {
        return Err(ReceiveError::Path(options.connect.clone()));
    }
    listener
        .set_nonblocking(true)
        .map_err(ReceiveError::io("the socket for senders"))?;
    let session = Session::new(options, agent)?;
    thread::scope(|scope| {
        let session = &session;
        session.part("taking in connections", || session.take_in(scope, listener, stop));
        lock(&session.greetings).shut();
    });
    let delivered = *lock(&session.delivered);
    session.ending.into_error().map_or(Ok(delivered), Err)
}

/// A connection that is part of the session.
enum Greeted {
    Control(Link),
    Lane(Link, Arc<Bases>),
}

struct Session<'a> {
    options: &'a Options,
    agent: Option<&'a Agent<'a>>,
    id: SessionId,
    notes: Notes,
    mailbox: Arc<Mailbox>,
    greetings: Mutex<Greetings>,
    claim: Mutex<Claim>,
    queues: Mutex<BTreeMap<u16, Arc<Queue>>>,
    delivered: Mutex<Delivered>,
    ending: Ending<ReceiveError>,
    /// The sender has said something to whoever moves the VM, which comes before it sends any.
    noted: AtomicBool,
    /// The sender has said that nothing will follow.
    ended: AtomicBool,
    over: AtomicBool,
    over_event: OwnedFd,
}

/// What a sender has of the session.
#[derive(Default)]
struct Claim {
    /// Since there is a control connection.
    bases: Option<Arc<Bases>>,
    lanes: u16,
}

impl<'a> Session<'a> {
    fn new(options: &'a Options, agent: Option<&'a Agent<'a>>) -> Result<Self, ReceiveError> {
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

    /// Has a thread do its part of the session, which fails if that does.
    fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        what: &'static str,
        does: impl FnOnce() -> Result<(), ReceiveError> + Send + 'scope,
    ) {
        let thread = thread::Builder::new().name("larder-receive".to_owned());
        if let Err(source) = thread.spawn_scoped(scope, move || self.part(what, does)) {
            self.fail(ReceiveError::Io {
                what: "starting a thread",
                source,
            });
        }
    }

    fn part(&self, what: &'static str, does: impl FnOnce() -> Result<(), ReceiveError>) {
        match session::part(does, || ReceiveError::Panicked { what }) {
            // What nobody takes any more may still be on its way when all is over.
            Err(error) if self.ended.load(Ordering::Acquire) && !matches!(error, ReceiveError::Panicked { .. }) => {}
            Err(error) => self.fail(error),
            Ok(()) => {}
        }
    }

    fn fail(&self, error: ReceiveError) {
        let weight = error.weight();
        self.ending.fail(error, weight, |error| {
            // The sender knows what it has said itself.
            if weight != Weight::Told {
                let told = error.to_string();
                self.mailbox.send(&Message::with_body(Kind::Failed, 0, told.as_bytes()));
            }
            self.mailbox.close();
        });
        self.end();
    }

    /// Lets everybody go home, whatever has become of the sender's host meanwhile.
    fn end(&self) {
        self.ending.shut();
        self.notes.end();
        self.over.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.over_event, &1_u64.to_ne_bytes());
        if let Some(bases) = &lock(&self.claim).bases {
            bases.frontier.stop();
        }
        for queue in lock(&self.queues).values() {
            queue.stop();
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Waits for so long; whether the session goes on.
    fn pause(&self, time: Duration) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let _ = poll(&mut [PollFd::new(&self.over_event, PollFlags::IN)], timeout.as_ref());
        !self.is_over()
    }

    /// Accepts connections until the session is over. Each has a thread of its own from its beginning, so that a stranger
    /// who says nothing keeps nobody waiting.
    fn take_in<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: &TcpListener,
        stop: &AtomicBool,
    ) -> Result<(), ReceiveError> {
        loop {
            if self.is_over() {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                return Err(ReceiveError::Stopped);
            }
            match listener.accept() {
                Ok((socket, peer)) => {
                    let handle = socket.try_clone().map_err(ReceiveError::io("taking in a connection"))?;
                    let number = lock(&self.greetings).begin(handle);
                    self.spawn(scope, "a connection", move || {
                        let greeted = self.greet(socket);
                        lock(&self.greetings).end(number);
                        match greeted {
                            Ok(Greeted::Control(link)) => {
                                lock(&self.options.watched.0).1 = Some(peer.ip());
                                self.control(scope, link)
                            }
                            Ok(Greeted::Lane(link, bases)) => self.lane(link, &bases),
                            // It is nobody's who has anything to do with the session.
                            Err(error) => {
                                tracing::warn!("{peer}: {error}");
                                Ok(())
                            }
                        }
                    });
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => self.wait_for(listener)?,
                    // It has gone before it was taken in.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => return Err(ReceiveError::io("waiting for a sender")(error)),
                },
            }
        }
    }

    fn wait_for(&self, listener: &TcpListener) -> Result<(), ReceiveError> {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::new(&self.over_event, PollFlags::IN),
        ];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ReceiveError::io("waiting for a sender")(error.into())),
        }
    }

    /// Greets whoever has connected; those who are no part of the session are told so.
    fn greet(&self, socket: TcpStream) -> Result<Greeted, ReceiveError> {
        socket
            .set_nonblocking(false)
            .map_err(ReceiveError::io("taking in a connection"))?;
        let mut link = Link::accept(socket, self.options.tls.as_ref())?;
        let hello = Hello::read(&mut link)?;
        if let Err(error) = link.check(self.options.tls.as_ref()) {
            let _ = Welcome::refuse(&mut link, &error.to_string());
            return Err(LinkError::from(error).into());
        }
        let bases = self.claim(&hello).or_else(|reason| {
            Welcome::refuse(&mut link, reason)?;
            Err(ReceiveError::Refused(reason))
        })?;
        self.welcome(&hello, bases, link)
            .inspect_err(|_| self.give_back(&hello))
    }

    /// What a connection with this greeting may have of the session; or why nothing.
    fn claim(&self, hello: &Hello) -> Result<Arc<Bases>, &'static str> {
        const NO_LANE: &str = "there is no such session here, or it has all its lanes";
        let mut claim = lock(&self.claim);
        if self.is_over() {
            return Err("it has ended");
        }
        match (hello.role, &claim.bases) {
            (Role::Control, None) => {
                let bases = Arc::new(Bases {
                    slots: Slots::new(hello.delta_memory.min(self.options.delta_memory)),
                    frontier: Frontier::new(),
                });
                claim.bases = Some(Arc::clone(&bases));
                Ok(bases)
            }
            (Role::Control, Some(_)) => Err("it is in the middle of a migration"),
            (Role::Lane(session), Some(bases)) if session == self.id && claim.lanes < self.lanes(hello) => {
                let bases = Arc::clone(bases);
                claim.lanes += 1;
                Ok(bases)
            }
            (Role::Lane(_), _) => Err(NO_LANE),
        }
    }

    /// One that had a claim has gone before it was told.
    fn give_back(&self, hello: &Hello) {
        let mut claim = lock(&self.claim);
        match hello.role {
            Role::Control => claim.bases = None,
            Role::Lane(_) => claim.lanes -= 1,
        }
    }

    fn welcome(&self, hello: &Hello, bases: Arc<Bases>, mut link: Link) -> Result<Greeted, ReceiveError> {
        let welcome = Welcome {
            session: self.id,
            delta_memory: u64::from(bases.slots.len()) * larder_codec::PAGE as u64,
            window: self.window(),
            lanes: self.lanes(hello),
            channels: self.channels(),
            methods: FrameDecoder::methods(),
        };
        welcome.write(&mut link)?;
        if hello.role == Role::Control {
            return Ok(Greeted::Control(link));
        }
        link.ready().map_err(ReceiveError::io("setting up a lane"))?;
        let handle = link.handle().map_err(ReceiveError::io("setting up a lane"))?;
        self.ending.shut_later(Shut::Link(handle));
        Ok(Greeted::Lane(link, bases))
    }

    fn lanes(&self, hello: &Hello) -> u16 {
        hello.lanes.clamp(1, self.options.lanes.clamp(1, LANES_MAX))
    }

    fn channels(&self) -> u16 {
        self.options.channels.clamp(1, CHANNELS_MAX)
    }

    fn window(&self) -> u32 {
        self.options.window.max(2 * FRAME_RAW_MAX as u32)
    }

    /// Goes on with the control connection, with which the session begins and ends.
    fn control<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, link: Link) -> Result<(), ReceiveError> {
        if let Some(agent) = self.agent {
            self.spawn(scope, "moving the VM", move || {
                agent(self.notes.clone());
                Ok(())
            });
        }
        let (opened, to_open) = mpsc::channel();
        self.spawn(scope, "connecting to QEMU", move || self.open_all(scope, &to_open));
        let result = Control::new(link, &self.mailbox)
            .map_err(ReceiveError::io("the control connection"))
            .and_then(|control| Ok(control.run(|message| self.take(&opened, message))?));
        if result.is_ok() {
            self.end();
        }
        result
    }

    /// What comes from the sender, to the end of the control connection.
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

    /// A message of the sender's.
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
                // It fails when the session is over.
                let _ = opened.send(queue);
                Ok(())
            }
            Kind::Close => self.queue(message.channel)?.close(message.value),
            Kind::Failed => Err(ReceiveError::Sender(message.text())),
            Kind::End => {
                if let Some(number) = lock(&self.queues).values().find_map(|queue| queue.is_open()) {
                    return Err(ReceiveError::Message(format!(
                        "the end of all, while channel {number} is open"
                    )));
                }
                self.ended.store(true, Ordering::Release);
                self.mailbox.send(&Message::new(Kind::End, 0, 0));
                self.mailbox.close();
                Ok(())
            }
            Kind::Note if self.agent.is_none() => Err(ReceiveError::Whole),
            Kind::Note if self.notes.deliver(message.body.clone()) => {
                self.noted.store(true, Ordering::Relaxed);
                Ok(())
            }
            Kind::Note => Err(ReceiveError::Message("more notes than anybody reads".to_owned())),
            Kind::Delivered | Kind::Return | Kind::Closed | Kind::Alive => unexpected(),
        }
    }

    /// The queue of a channel, which a frame may need before the channel is opened.
    fn queue(&self, number: u16) -> Result<Arc<Queue>, ReceiveError> {
        if number >= self.channels() {
            return Err(ReceiveError::Message(format!("something of channel {number}")));
        }
        let mut queues = lock(&self.queues);
        let queue = queues
            .entry(number)
            .or_insert_with(|| Arc::new(Queue::new(number, self.window())));
        Ok(Arc::clone(queue))
    }

    /// Connects to QEMU for each channel, in the order in which the other QEMU has connected: 7.2 takes the first one for the
    /// main channel. QEMU may let this wait, which the control connection must not.
    fn open_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        to_open: &mpsc::Receiver<Arc<Queue>>,
    ) -> Result<(), ReceiveError> {
        let path = &self.options.connect;
        for queue in to_open {
            let connected = qemu::connect(path, self.options.user, |time| self.pause(time));
            let connected = connected.map_err(|source| match self.agent {
                // Nobody has asked for QEMU to wait there.
                Some(_) if !self.noted.load(Ordering::Relaxed) => ReceiveError::Stream,
                _ => ReceiveError::Qemu {
                    path: path.clone(),
                    source,
                },
            })?;
            let Some(socket) = connected else { return Ok(()) };
            let socket = Arc::new(socket);
            self.ending.shut_later(Shut::Qemu(Arc::clone(&socket)));
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

    /// Hands QEMU the bytes of a channel.
    fn write(&self, queue: &Queue, mut socket: &UnixStream) {
        let tell = |bytes| self.mailbox.send(&Message::new(Kind::Delivered, queue.number, bytes));
        let mut cpu = CpuTime::of_thread();
        while let Some(next) = queue.next(tell) {
            let Next::Bytes(bytes) = next else {
                // All is delivered; QEMU may still have something to say.
                let _ = socket.shutdown(Shutdown::Write);
                return;
            };
            if socket.write_all(&bytes).is_err() {
                // QEMU has ended or closed it, with bytes before it that it did not want.
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

    /// Brings what QEMU says to the sender.
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

    /// Reads and decodes the frames of one connection until the sender closes it, which it may once all has ended.
    fn lane(&self, mut link: Link, bases: &Bases) -> Result<(), ReceiveError> {
        let broken = |error| {
            if link::is_end(&error) {
                ReceiveError::Lane
            } else {
                WireError::io("reading a frame")(error).into()
            }
        };
        let mut decoder = FrameDecoder::new();
        let mut cpu = CpuTime::of_thread();
        let mut body = Vec::new();
        let mut before: Option<u64> = None;
        let mut header = [0; FrameHeader::LEN];
        loop {
            link.read_exact(&mut header).map_err(broken)?;
            let header = FrameHeader::from_bytes(&header)?;
            if before.is_some_and(|before| header.number <= before) {
                return Err(DecodeError::Order { number: header.number }.into());
            }
            before = Some(header.number);
            let len = header.body_len();
            if body.len() < len {
                body.resize(len, 0);
            }
            let body = &mut body[..len];
            link.read_exact(body).map_err(broken)?;
            let queue = self.queue(header.channel)?;
            let mut out = queue.buffer(&header)?;
            let begun = CpuTime::of_thread();
            decoder.decode(&header, body, bases, &mut out)?;
            cpu.worked(begun);
            queue.put(header.offset, out)?;
            let spent = cpu.spent();
            self.count(|delivered| {
                delivered.cpu_ns += spent.all_ns;
                delivered.decode_cpu_ns += spent.work_ns;
                delivered.wire += (FrameHeader::LEN + header.body_len()) as u64;
                delivered.frames += 1;
            });
        }
    }

    /// Counts, for the session and for those who watch.
    fn count(&self, count: impl Fn(&mut Delivered)) {
        count(&mut lock(&self.delivered));
        count(&mut lock(&self.options.watched.0).0);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
