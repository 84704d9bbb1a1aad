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
//! - Memory is bounded by the window times the channels, and the old pages, whatever the peer says.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use ring::rand::SecureRandom as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;
use thiserror::Error;

use crate::base::{Frontier, Slots};
use crate::control::{Control, ControlError, Mailbox};
use crate::decode::{Bases, DecodeError, FrameDecoder};
use crate::link::{Link, LinkError};
use crate::notes::Notes;
use crate::session::{Ending, Shut};
use crate::tls::ReceiverTls;
use crate::wire::{
    CHANNELS_MAX, FRAME_RAW_MAX, FrameHeader, Hello, Kind, LANES_MAX, Message, Role, SessionId, Welcome, WireError,
};

/// Connections that may be in the middle of their greeting.
const GREETING_MAX: usize = 16;

/// What a receiver offers.
pub struct Options {
    /// Where the destination's QEMU waits: the path of `-incoming unix:PATH`.
    pub connect: PathBuf,
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
    #[error("the sender sent {0}, which no sender sends")]
    Message(String),
    #[error("the sender sent bytes {begin} to {end} of channel {channel}, of which it may send up to {most} now")]
    Window {
        channel: u16,
        begin: u64,
        end: u64,
        most: u64,
    },
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error("cannot connect to QEMU at {}: {source}; is it started with '-incoming unix:{}', and waiting?", path.display(), path.display())]
    Qemu { path: PathBuf, source: io::Error },
    #[error("stopped")]
    Stopped,
}

impl ReceiveError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
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
    listener
        .set_nonblocking(true)
        .map_err(ReceiveError::io("the socket for senders"))?;
    let session = Session::new(options, agent)?;
    let (greeted, arrivals) = mpsc::sync_channel(GREETING_MAX);
    thread::scope(|scope| {
        let session = &session;
        let result = session.take_in(scope, listener, stop, &greeted, &arrivals);
        if let Err(error) = result {
            session.fail(error);
        }
        drop(arrivals);
    });
    let delivered = *lock(&session.delivered);
    session.ending.into_error().map_or(Ok(delivered), Err)
}

struct Session<'a> {
    options: &'a Options,
    agent: Option<&'a Agent<'a>>,
    id: SessionId,
    notes: Notes,
    mailbox: Arc<Mailbox>,
    queues: Mutex<BTreeMap<u16, Arc<Queue>>>,
    bases: Mutex<Option<Arc<Bases>>>,
    delivered: Mutex<Delivered>,
    ending: Ending<ReceiveError>,
    over: AtomicBool,
    over_event: OwnedFd,
}

/// A connection whose greeting is read.
struct Arrival {
    link: Link,
    hello: Hello,
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
            queues: Mutex::default(),
            bases: Mutex::default(),
            delivered: Mutex::default(),
            ending: Ending::new(),
            over: AtomicBool::new(false),
            over_event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .map_err(|error| ReceiveError::io("setting up an eventfd")(error.into()))?,
        })
    }

    fn fail(&self, error: ReceiveError) {
        if !matches!(error, ReceiveError::Control(_)) {
            self.mailbox
                .send(&Message::with_body(Kind::Failed, 0, error.to_string().as_bytes()));
        }
        self.mailbox.close();
        self.ending.fail(error);
        self.end();
    }

    /// Lets everybody go home.
    fn end(&self) {
        self.notes.end();
        self.over.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.over_event, &1_u64.to_ne_bytes());
        if let Some(bases) = &*lock(&self.bases) {
            bases.frontier.stop();
        }
        for queue in lock(&self.queues).values() {
            queue.stop();
        }
    }

    /// Accepts connections until the session is over. Each is greeted in a thread of its own, so that a stranger who says
    /// nothing keeps nobody waiting.
    fn take_in<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        listener: &TcpListener,
        stop: &AtomicBool,
        greeted: &mpsc::SyncSender<Option<Arrival>>,
        arrivals: &mpsc::Receiver<Option<Arrival>>,
    ) -> Result<(), ReceiveError> {
        let mut greeting = 0;
        let mut lanes = 0;
        loop {
            while let Ok(arrival) = arrivals.try_recv() {
                greeting -= 1;
                if let Some(arrival) = arrival {
                    self.arrived(scope, arrival, &mut lanes)?;
                }
            }
            if self.over.load(Ordering::Acquire) {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                return Err(ReceiveError::Stopped);
            }
            match listener.accept() {
                Ok((socket, peer)) => {
                    if greeting == GREETING_MAX {
                        tracing::warn!("{peer}: too many connections have not said what they are; closing this one");
                        continue;
                    }
                    greeting += 1;
                    let greeted = greeted.clone();
                    scope.spawn(move || {
                        let arrival = self.greet(socket);
                        if let Err(error) = &arrival {
                            tracing::warn!("{peer}: {error}");
                        }
                        let _ = greeted.send(arrival.ok());
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for(listener, greeting > 0)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(ReceiveError::Io {
                        what: "waiting for a sender",
                        source,
                    });
                }
            }
        }
    }

    fn greet(&self, socket: TcpStream) -> Result<Arrival, ReceiveError> {
        socket
            .set_nonblocking(false)
            .map_err(ReceiveError::io("taking in a connection"))?;
        let mut link = Link::accept(socket, self.options.tls.as_ref())?;
        let hello = Hello::read(&mut link)?;
        Ok(Arrival { link, hello })
    }

    fn wait_for(&self, listener: &TcpListener, soon: bool) -> Result<(), ReceiveError> {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::new(&self.over_event, PollFlags::IN),
        ];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: if soon { 2_000_000 } else { 100_000_000 },
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ReceiveError::Io {
                what: "waiting for a sender",
                source: error.into(),
            }),
        }
    }

    fn arrived<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        arrival: Arrival,
        lanes: &mut u16,
    ) -> Result<(), ReceiveError> {
        let Arrival { mut link, hello } = arrival;
        let opened = lock(&self.bases).clone();
        match (hello.role, opened) {
            (Role::Control, None) => self.begin(scope, link, &hello),
            (Role::Control, Some(_)) => {
                let _ = Welcome::refuse(&mut link, "it is in the middle of a migration");
                Ok(())
            }
            (Role::Lane(session), Some(bases)) if session == self.id && *lanes < self.lanes(&hello) => {
                *lanes += 1;
                let welcome = self.welcome(&hello, &bases);
                let handle = link.handle().map_err(ReceiveError::io("a lane"))?;
                self.ending.shut_later(Shut::Link(handle));
                let ready = welcome
                    .write(&mut link)
                    .map_err(ReceiveError::from)
                    .and_then(|()| link.ready().map_err(ReceiveError::io("a lane")));
                scope.spawn(move || {
                    if let Err(error) = ready.and_then(|()| self.lane(link, &bases)) {
                        self.fail(error);
                    }
                });
                Ok(())
            }
            (Role::Lane(_), _) => {
                let _ = Welcome::refuse(&mut link, "there is no such session here, or it has all its lanes");
                Ok(())
            }
        }
    }

    fn lanes(&self, hello: &Hello) -> u16 {
        hello.lanes.clamp(1, self.options.lanes.clamp(1, LANES_MAX))
    }

    fn welcome(&self, hello: &Hello, bases: &Bases) -> Welcome {
        Welcome {
            session: self.id,
            delta_memory: u64::from(bases.slots.len()) * larder_codec::PAGE as u64,
            window: self.options.window.max(2 * FRAME_RAW_MAX as u32),
            lanes: self.lanes(hello),
            channels: self.options.channels.clamp(1, CHANNELS_MAX),
            methods: FrameDecoder::methods(),
        }
    }

    fn begin<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        mut link: Link,
        hello: &Hello,
    ) -> Result<(), ReceiveError> {
        let bases = Arc::new(Bases {
            slots: Slots::new(hello.delta_memory.min(self.options.delta_memory)),
            frontier: Frontier::new(),
        });
        self.welcome(hello, &bases).write(&mut link)?;
        *lock(&self.bases) = Some(bases);
        let handle = link.handle().map_err(ReceiveError::io("the control connection"))?;
        self.ending.shut_later(Shut::Link(handle));
        if let Some(agent) = self.agent {
            scope.spawn(move || agent(self.notes.clone()));
        }
        scope.spawn(move || {
            let result = Control::new(link, &self.mailbox)
                .map_err(ReceiveError::io("the control connection"))
                .and_then(|control| control.run(|message| self.hear(scope, message)));
            match result {
                Ok(()) => self.end(),
                Err(error) => self.fail(error),
            }
        });
        Ok(())
    }

    /// A message of the sender's.
    fn hear<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        message: Message,
    ) -> Result<(), ReceiveError> {
        let unexpected = || Err(ReceiveError::Message(format!("{message:?}")));
        match message.kind {
            Kind::Open => {
                let queue = self.queue(message.channel)?;
                if lock(&queue.state).opened {
                    return unexpected();
                }
                self.open(scope, &queue)
            }
            Kind::Close => self.queue(message.channel)?.close(message.value),
            Kind::Failed => Err(ReceiveError::Sender(message.text())),
            Kind::End => {
                if let Some(number) = lock(&self.queues).values().find_map(|queue| queue.is_open()) {
                    return Err(ReceiveError::Message(format!(
                        "the end of all, while channel {number} is open"
                    )));
                }
                self.mailbox.send(&Message::new(Kind::End, 0, 0));
                self.mailbox.close();
                Ok(())
            }
            Kind::Note if self.notes.deliver(message.body.clone()) => Ok(()),
            Kind::Note => Err(ReceiveError::Message("more notes than anybody reads".to_owned())),
            Kind::Delivered | Kind::Return | Kind::Closed | Kind::Alive => unexpected(),
        }
    }

    /// The queue of a channel, which a frame may need before the channel is opened.
    fn queue(&self, number: u16) -> Result<Arc<Queue>, ReceiveError> {
        if number >= self.options.channels.clamp(1, CHANNELS_MAX) {
            return Err(ReceiveError::Message(format!("something of channel {number}")));
        }
        let mut queues = lock(&self.queues);
        let queue = queues
            .entry(number)
            .or_insert_with(|| Arc::new(Queue::new(number, self.options.window.max(2 * FRAME_RAW_MAX as u32))));
        Ok(Arc::clone(queue))
    }

    /// Connects to QEMU, in the order in which the other QEMU has connected: 7.2 takes the first one for the main channel.
    fn open<'scope, 'env>(
        &'scope self,
        scope: &'scope thread::Scope<'scope, 'env>,
        queue: &Arc<Queue>,
    ) -> Result<(), ReceiveError> {
        let path: &Path = &self.options.connect;
        let failed = |source| ReceiveError::Qemu {
            path: path.to_owned(),
            source,
        };
        let socket = UnixStream::connect(path).map_err(failed)?;
        let reader = socket.try_clone().map_err(failed)?;
        self.ending.shut_later(Shut::Qemu(socket.try_clone().map_err(failed)?));
        lock(&queue.state).opened = true;
        let writer = Arc::clone(queue);
        scope.spawn(move || self.write(&writer, &socket));
        let queue = Arc::clone(queue);
        scope.spawn(move || self.bring_back(&queue, reader));
        Ok(())
    }

    /// Hands QEMU the bytes of a channel.
    fn write(&self, queue: &Queue, mut socket: &UnixStream) {
        while let Some(next) = queue.next() {
            let Next::Bytes(bytes) = next else {
                // All is delivered; QEMU may still have something to say.
                let _ = socket.shutdown(Shutdown::Write);
                return;
            };
            if socket.write_all(&bytes).is_err() {
                // QEMU has ended or closed it, with bytes before it that it did not want.
                self.mailbox.send(&Message::new(Kind::Closed, queue.number, 1));
                let _ = socket.shutdown(Shutdown::Both);
                queue.refuse();
                return;
            }
            let raw = bytes.len() as u64;
            let total = queue.taken(bytes);
            lock(&self.delivered).raw += raw;
            self.mailbox.send(&Message::new(Kind::Delivered, queue.number, total));
        }
    }

    /// Brings what QEMU says to the sender.
    fn bring_back(&self, queue: &Queue, mut socket: UnixStream) {
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
        lock(&queue.state).closed = true;
        self.mailbox.send(&Message::new(Kind::Closed, queue.number, 0));
    }

    /// Reads and decodes the frames of one connection until the sender closes it.
    fn lane(&self, mut link: Link, bases: &Bases) -> Result<(), ReceiveError> {
        const WHAT: &str = "reading a frame";
        let mut decoder = FrameDecoder::new();
        let mut body = Vec::new();
        let mut before: Option<u64> = None;
        let mut header = [0; FrameHeader::LEN];
        loop {
            if !read_header(&mut link, &mut header).map_err(WireError::io(WHAT))? {
                // The control connection says whether that was the end.
                return Ok(());
            }
            let header = FrameHeader::from_bytes(&header)?;
            if before.is_some_and(|before| header.number <= before) {
                return Err(DecodeError::Order { number: header.number }.into());
            }
            before = Some(header.number);
            body.resize(header.body_len(), 0);
            link.read_exact(&mut body).map_err(WireError::io(WHAT))?;
            let queue = self.queue(header.channel)?;
            let mut out = queue.buffer(&header)?;
            decoder.decode(&header, &body, bases, &mut out)?;
            queue.put(header.offset, out)?;
            let mut delivered = lock(&self.delivered);
            delivered.wire += (FrameHeader::LEN + header.body_len()) as u64;
            delivered.frames += 1;
        }
    }
}

/// Reads a frame's header; `false` at the end of the connection.
fn read_header(link: &mut Link, header: &mut [u8; FrameHeader::LEN]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < header.len() {
        match link.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => filled += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// The bytes of a channel, in pieces that may come in any order.
struct Queue {
    number: u16,
    window: u64,
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// By the offset of their first byte, none of which is below `next`.
    pieces: BTreeMap<u64, Vec<u8>>,
    /// The offset of the next byte for the writer.
    next: u64,
    /// Bytes that QEMU took.
    taken: u64,
    /// Bytes in all, once the sender has closed the channel.
    total: Option<u64>,
    /// Buffers to use again.
    spare: Vec<Vec<u8>>,
    opened: bool,
    stopped: bool,
    /// QEMU takes nothing more; what comes is dropped.
    refused: bool,
    /// QEMU has closed it.
    closed: bool,
}

enum Next {
    Bytes(Vec<u8>),
    End,
}

impl Queue {
    /// Buffers that are kept for use again.
    const SPARE_MAX: usize = 16;

    fn new(number: u16, window: u32) -> Self {
        Self {
            number,
            window: window.into(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// An empty buffer for a frame, which must lie within the window.
    fn buffer(&self, header: &FrameHeader) -> Result<Vec<u8>, ReceiveError> {
        let mut state = lock(&self.state);
        let end = header.offset + u64::from(header.raw_len);
        let most = (state.taken + self.window).min(state.total.unwrap_or(u64::MAX));
        if header.offset < state.next || end > most {
            return Err(ReceiveError::Window {
                channel: self.number,
                begin: header.offset,
                end,
                most,
            });
        }
        Ok(state.spare.pop().unwrap_or_default())
    }

    fn put(&self, offset: u64, bytes: Vec<u8>) -> Result<(), ReceiveError> {
        let mut state = lock(&self.state);
        if state.refused {
            return Ok(());
        }
        let end = offset + bytes.len() as u64;
        let fits_before = state
            .pieces
            .range(..=offset)
            .next_back()
            .is_none_or(|(at, piece)| at + piece.len() as u64 <= offset);
        let fits_after = state.pieces.range(offset..).next().is_none_or(|(at, _)| end <= *at);
        if offset < state.next || !fits_before || !fits_after {
            return Err(ReceiveError::Window {
                channel: self.number,
                begin: offset,
                end,
                most: state.next,
            });
        }
        state.pieces.insert(offset, bytes);
        if offset == state.next {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits for what comes next; `None` when the session is over.
    fn next(&self) -> Option<Next> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            let next = state.next;
            if let Some(bytes) = state.pieces.remove(&next) {
                state.next += bytes.len() as u64;
                return Some(Next::Bytes(bytes));
            }
            if state.total == Some(next) {
                return Some(Next::End);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// QEMU took these bytes; returns how many in all.
    fn taken(&self, bytes: Vec<u8>) -> u64 {
        let mut state = lock(&self.state);
        state.taken += bytes.len() as u64;
        if state.spare.len() < Self::SPARE_MAX {
            state.spare.push(bytes);
        }
        state.taken
    }

    /// The sender has closed the channel after so many bytes.
    fn close(&self, total: u64) -> Result<(), ReceiveError> {
        let mut state = lock(&self.state);
        let last = state
            .pieces
            .last_key_value()
            .map_or(state.next, |(at, piece)| at + piece.len() as u64);
        if state.total.is_some() || total < last {
            return Err(ReceiveError::Message(format!(
                "the end of channel {} at {total} bytes, of which {last} have come, or a second end",
                self.number
            )));
        }
        state.total = Some(total);
        self.changed.notify_all();
        Ok(())
    }

    /// Its number, if something is still to be delivered or QEMU has not closed it.
    fn is_open(&self) -> Option<u16> {
        let state = lock(&self.state);
        let delivered = state.refused || state.total == Some(state.taken);
        (!delivered || !state.closed).then_some(self.number)
    }

    fn refuse(&self) {
        let mut state = lock(&self.state);
        state.refused = true;
        state.pieces.clear();
    }

    fn stop(&self) {
        lock(&self.state).stopped = true;
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
