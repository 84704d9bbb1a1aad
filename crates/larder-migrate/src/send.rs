//! The sender: takes QEMU's channels on a UNIX socket and carries them to a receiver.
//!
//! ```text
//! QEMU --channel--.                        .--lane 0 (encode, write)--TCP--.
//! QEMU --channel--+-- epoll: who is free --+--lane 1 (encode, write)--TCP--+--> receiver
//! QEMU --channel--'   reads the next batch '--lane 2 (encode, write)--TCP--'
//!                                           control: opened, closed, delivered, return path
//! ```
//!
//! A lane is a thread with a connection of its own. It takes a channel that has bytes, reads a batch, gives it its place
//! among all frames, lets the others have the channel, and encodes and writes the frame. Nothing is queued in between: a
//! link that is slow makes lanes wait in their writes, so that QEMU waits in its own, and measures what the link carries.
//!
//! Invariants:
//! - A channel's bytes are read by one lane at a time, and its batches are given their places in their order.
//! - A frame that has its place is sent, or the session fails.
//! - Of each channel at most the receiver's window is on its way; the receiver has room for all of it.
//! - A session that fails shuts QEMU's sockets, which then sees a broken connection, and its guest runs on.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use larder_codec::batch::{self, Method};
use larder_codec::select::{self, Selector};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::net::{RecvFlags, recv};
use rustix::time::Timespec;
use thiserror::Error;

use crate::base::{Frontier, Slots};
use crate::batch::Batch;
use crate::control::{Control, ControlError, Mailbox};
use crate::decode::Bases;
use crate::encode::{Failed, FrameEncoder, Order};
use crate::link::{Link, LinkError};
use crate::notes::Notes;
use crate::pace::Pace;
use crate::progress::Progress;
use crate::session::{Ending, Shut};
use crate::stream::{Blocks, Parser};
use crate::tls::SenderTls;
use crate::wire::{FRAME_RAW_MAX, Hello, Kind, Message, Role, Welcome, WireError};

/// How long a reader waits for the rest of a page that has begun to arrive.
const REST_TIMEOUT: Duration = Duration::from_millis(1);
/// How long QEMU may take to read what comes back from the destination.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes per second that a link is taken to carry until it is known: 10 Gbit/s.
const LINK_EXPECTED: u64 = 1_250_000_000;
/// Of a MiB each, of which the selector remembers how they differ from others like them.
const REGIONS_MAX: usize = 16 << 10;

/// What a sender is to do.
pub struct Options {
    /// `HOST:PORT` of the receiver.
    pub to: String,
    /// Without it, everything goes in the clear.
    pub tls: Option<SenderTls>,
    /// Connections that carry frames, and threads that encode, 1 to 64; the receiver may allow fewer.
    pub lanes: u16,
    /// Bytes of old pages to keep, on each host; the receiver may allow less.
    pub delta_memory: u64,
    /// Bytes per second on the link, at most.
    pub bandwidth: Option<u64>,
}

/// Why a sender ended without having carried everything.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum SendError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("the receiver: {0}")]
    Receiver(String),
    #[error("the receiver sent '{0}', which no receiver sends")]
    Message(String),
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error("QEMU opened more than {most} channels: give the receiver a larger --channels")]
    Channels { most: u16 },
    #[error("there is no memory for old versions of pages: give --delta-memory less")]
    NoMemory,
    #[error("stopped")]
    Stopped,
}

impl SendError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// How a session is steered from outside.
#[derive(Default)]
pub struct Steering {
    /// It ends, as a failure.
    pub stop: AtomicBool,
    /// It does not end in order, though all channels are closed: there are still notes to exchange.
    pub hold: AtomicBool,
}

/// A sender that is connected to its receiver.
pub struct Sender {
    mailbox: Arc<Mailbox>,
    notes: Notes,
    control: Link,
    lanes: Vec<Link>,
    welcome: Welcome,
    pace: Pace,
}

impl Sender {
    /// Connects to the receiver, all lanes too, so that what is wrong with the link shows before QEMU begins.
    ///
    /// # Errors
    /// The receiver is not there, is none, or refuses.
    pub fn connect(options: &Options) -> Result<Self, SendError> {
        let tls = options.tls.as_ref();
        let mut control = Link::connect(&options.to, tls)?;
        let mut hello = Hello {
            role: Role::Control,
            delta_memory: options.delta_memory,
            lanes: options.lanes,
        };
        hello.write(&mut control)?;
        let welcome = Welcome::read(&mut control)?;
        hello.role = Role::Lane(welcome.session);
        let mut lanes = Vec::new();
        for _ in 0..welcome.lanes.min(options.lanes) {
            let mut lane = Link::connect(&options.to, tls)?;
            hello.write(&mut lane)?;
            Welcome::read(&mut lane)?;
            lane.ready().map_err(SendError::io("setting up a lane"))?;
            lanes.push(lane);
        }
        let mailbox = Mailbox::new().map_err(SendError::io("setting up the control connection"))?;
        let mailbox = Arc::new(mailbox);
        Ok(Self {
            notes: Notes::new(Arc::clone(&mailbox)),
            mailbox,
            control,
            lanes,
            welcome,
            pace: Pace::new(options.bandwidth),
        })
    }

    /// How many lanes there are.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Bytes of old pages that each host keeps, at most.
    #[must_use]
    pub fn delta_memory(&self) -> u64 {
        self.welcome.delta_memory
    }

    /// For whoever moves the VM; what is sent before [`Self::carry`] goes with it.
    #[must_use]
    pub fn notes(&self) -> Notes {
        self.notes.clone()
    }

    /// Carries the channels that QEMU opens at `listener` until both QEMUs have closed all of them.
    ///
    /// # Errors
    /// Something broke, and QEMU's sockets were shut; both QEMUs know that they are not done, but for one that has all that
    /// it waits for.
    pub fn carry(self, listener: &UnixListener, progress: &Progress, steering: &Steering) -> Result<(), SendError> {
        let Self {
            mailbox,
            notes,
            control,
            lanes,
            welcome,
            pace,
        } = self;
        let delta_memory = welcome.delta_memory;
        let session = Session {
            poller: Poller::new().map_err(SendError::io("setting up epoll"))?,
            mailbox,
            notes,
            channels: Mutex::default(),
            blocks: Blocks::new(),
            order: Order::new(
                Bases {
                    slots: Slots::new(delta_memory),
                    frontier: Frontier::new(),
                },
                selector(&welcome, lanes.len()),
            ),
            lanes: lanes.len(),
            welcome,
            pace,
            progress,
            steering,
            end_sent: AtomicBool::new(false),
            ending: Ending::new(),
        };
        session.run(control, lanes, listener)
    }
}

struct Session<'a> {
    poller: Poller,
    mailbox: Arc<Mailbox>,
    notes: Notes,
    channels: Mutex<Channels>,
    blocks: Blocks,
    order: Order,
    /// How many there are.
    lanes: usize,
    welcome: Welcome,
    pace: Pace,
    progress: &'a Progress,
    steering: &'a Steering,
    end_sent: AtomicBool,
    ending: Ending<SendError>,
}

#[derive(Default)]
struct Channels {
    /// By number.
    all: Vec<Arc<Channel>>,
    /// Not closed by both QEMUs.
    open: usize,
}

/// One connection of QEMU's.
struct Channel {
    number: u16,
    socket: UnixStream,
    reading: Mutex<Reading>,
    /// Bytes that the destination's QEMU has taken.
    delivered: AtomicU64,
}

struct Reading {
    parser: Parser,
    /// Read, but not yet part of a frame.
    left_over: Vec<u8>,
    /// Bytes that are part of frames.
    offset: u64,
    /// Nobody reads until more is delivered.
    paused: bool,
    /// QEMU has closed it, and the receiver was told.
    ended: bool,
    /// The destination's QEMU has closed it.
    closed: bool,
}

impl Channel {
    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session<'_> {
    fn run(self, control: Link, lanes: Vec<Link>, listener: &UnixListener) -> Result<(), SendError> {
        self.ending.shut_later(Shut::Link(
            control.handle().map_err(SendError::io("the control connection"))?,
        ));
        for lane in &lanes {
            let handle = lane.handle().map_err(SendError::io("a lane"))?;
            self.ending.shut_later(Shut::Link(handle));
        }
        listener
            .set_nonblocking(true)
            .map_err(SendError::io("the socket for QEMU"))?;
        thread::scope(|scope| {
            let session = &self;
            let spawned = scope.spawn(move || {
                let result = Control::new(control, &session.mailbox)
                    .map_err(SendError::io("the control connection"))
                    .and_then(|control| control.run(|message| session.hear(message)));
                if let Err(error) = result {
                    session.fail(error);
                }
                session.notes.end();
                session.poller.stop();
            });
            for lane in lanes {
                scope.spawn(move || {
                    if let Err(error) = session.lane(lane) {
                        session.fail(error);
                    }
                });
            }
            if let Err(error) = session.accept(listener) {
                session.fail(error);
            }
            let _ = spawned.join();
        });
        self.ending.into_error().map_or(Ok(()), Err)
    }

    fn fail(&self, error: SendError) {
        if !matches!(error, SendError::Control(_)) {
            self.mailbox
                .send(&Message::with_body(Kind::Failed, 0, error.to_string().as_bytes()));
        }
        self.mailbox.close();
        self.ending.fail(error);
        self.order.bases.frontier.stop();
        self.poller.stop();
    }

    /// Takes in QEMU's connections until the session ends.
    fn accept(&self, listener: &UnixListener) -> Result<(), SendError> {
        // One that was held from the beginning may end without a channel; another has its first one coming.
        let waits_for_channel = !self.steering.hold.load(Ordering::Relaxed);
        loop {
            if self.poller.is_stopped() {
                return Ok(());
            }
            if self.steering.stop.load(Ordering::Relaxed) {
                return Err(SendError::Stopped);
            }
            if !waits_for_channel {
                self.end_if_done();
            }
            match listener.accept() {
                Ok((socket, _)) => self.open(socket)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.poller.wait_for(listener)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(SendError::Io {
                        what: "waiting for QEMU",
                        source,
                    });
                }
            }
        }
    }

    fn open(&self, socket: UnixStream) -> Result<(), SendError> {
        let failed = SendError::io("taking in a connection of QEMU's");
        socket.set_nonblocking(false).map_err(&failed)?;
        socket.set_write_timeout(Some(RETURN_TIMEOUT)).map_err(&failed)?;
        self.ending.shut_later(Shut::Qemu(socket.try_clone().map_err(&failed)?));
        let mut channels = lock(&self.channels);
        let number = channels.all.len() as u16;
        if number >= self.welcome.channels {
            return Err(SendError::Channels {
                most: self.welcome.channels,
            });
        }
        let channel = Arc::new(Channel {
            number,
            socket,
            reading: Mutex::new(Reading {
                parser: Parser::new(&self.blocks),
                left_over: Vec::new(),
                offset: 0,
                paused: false,
                ended: false,
                closed: false,
            }),
            delivered: AtomicU64::new(0),
        });
        channels.all.push(Arc::clone(&channel));
        channels.open += 1;
        self.progress.channel_opened(number);
        self.mailbox.send(&Message::new(Kind::Open, number, 0));
        self.poller.add(&channel).map_err(failed)
    }

    fn channel(&self, number: u16) -> Option<Arc<Channel>> {
        lock(&self.channels).all.get(usize::from(number)).map(Arc::clone)
    }

    /// A message of the receiver's.
    fn hear(&self, message: Message) -> Result<(), SendError> {
        let unexpected = |message: &Message| SendError::Message(format!("{message:?}"));
        match message.kind {
            Kind::Failed => return Err(SendError::Receiver(message.text())),
            Kind::End => {
                self.mailbox.close();
                return Ok(());
            }
            Kind::Note => {
                return if self.notes.deliver(message.body) {
                    Ok(())
                } else {
                    Err(SendError::Message("more notes than anybody reads".to_owned()))
                };
            }
            _ => {}
        }
        let channel = self.channel(message.channel).ok_or_else(|| unexpected(&message))?;
        match message.kind {
            Kind::Delivered => self.delivered(&channel, message.value),
            Kind::Return => match (&channel.socket).write_all(&message.body) {
                Ok(()) => Ok(()),
                // QEMU has closed it, which the reader sees.
                Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                    Ok(())
                }
                Err(source) => Err(SendError::Io {
                    what: "QEMU does not take what comes back from the destination",
                    source,
                }),
            },
            Kind::Closed => {
                // A QEMU that still has something to say must not take it for said.
                let how = if message.value == 0 {
                    Shutdown::Write
                } else {
                    Shutdown::Both
                };
                let _ = channel.socket.shutdown(how);
                let mut reading = channel.reading();
                let was_closed = std::mem::replace(&mut reading.closed, true);
                let done = reading.ended && !was_closed;
                drop(reading);
                if done {
                    self.channel_done();
                }
                Ok(())
            }
            _ => Err(unexpected(&message)),
        }
    }

    fn delivered(&self, channel: &Channel, bytes: u64) -> Result<(), SendError> {
        let mut reading = channel.reading();
        if bytes > reading.offset || bytes < channel.delivered.load(Ordering::Relaxed) {
            return Err(SendError::Message(format!(
                "that {bytes} bytes of channel {} were delivered, of which {} were sent",
                channel.number, reading.offset
            )));
        }
        let before = channel.delivered.swap(bytes, Ordering::Relaxed);
        self.progress.delivered(bytes - before);
        if reading.paused && !self.must_pause(channel, &reading) {
            reading.paused = false;
            self.again(channel, &reading)?;
        }
        Ok(())
    }

    fn must_pause(&self, channel: &Channel, reading: &Reading) -> bool {
        let under_way = reading.offset - channel.delivered.load(Ordering::Relaxed);
        under_way + FRAME_RAW_MAX as u64 > u64::from(self.welcome.window)
    }

    /// Lets the next lane have the channel.
    fn again(&self, channel: &Channel, reading: &Reading) -> Result<(), SendError> {
        let again = if reading.left_over.is_empty() {
            self.poller.arm(channel)
        } else {
            self.poller.has_left_over(channel.number)
        };
        again.map_err(SendError::io("waiting for QEMU"))
    }

    fn channel_done(&self) {
        let mut channels = lock(&self.channels);
        channels.open -= 1;
        drop(channels);
        self.end_if_done();
    }

    /// Ends the session in order if all channels are closed and nobody holds it.
    fn end_if_done(&self) {
        let open = lock(&self.channels).open;
        if open == 0 && !self.steering.hold.load(Ordering::Relaxed) && !self.end_sent.swap(true, Ordering::Relaxed) {
            self.mailbox.send(&Message::new(Kind::End, 0, 0));
        }
    }

    fn lane(&self, mut link: Link) -> Result<(), SendError> {
        let mut batch = Batch::new();
        let mut encoder = FrameEncoder::new();
        let mut places = Vec::new();
        while let Some(number) = self.poller.next().map_err(SendError::io("waiting for QEMU"))? {
            let Some(channel) = self.channel(number) else { continue };
            let mut reading = channel.reading();
            let ended = read(&channel.socket, &mut reading, &mut batch)?;
            let offset = reading.offset;
            let len = batch.bytes().len();
            let ordered = (len > 0).then(|| {
                reading.offset += len as u64;
                self.order.order(&batch, true, std::mem::take(&mut places))
            });
            self.progress.facts(number, reading.parser.facts());
            self.go_on(&channel, reading, ended)?;
            let Some(ordered) = ordered else { continue };
            let begun = Instant::now();
            let outcome =
                encoder
                    .encode(&batch, number, offset, &ordered, &self.order)
                    .map_err(|failed| match failed {
                        Failed::Stopped => SendError::Stopped,
                        Failed::NoMemory => SendError::NoMemory,
                    })?;
            places = ordered.into_places();
            let encoded = Instant::now();
            let pause = self.pace.take(outcome.wire_bytes.into(), encoded);
            if !pause.is_zero() {
                thread::sleep(pause);
            }
            // Most slices: a header, three sections, and each page by itself.
            let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(4 + crate::wire::FRAME_PAGES_MAX);
            encoder.slices(&batch, &mut slices);
            link.write_all_vectored(&mut slices)
                .map_err(SendError::io("the connection to the receiver"))?;
            let sending = encoded.elapsed();
            self.order.sent(outcome.wire_bytes.into(), sending, self.lanes);
            self.progress.sent(len, &outcome, encoded - begun, sending);
        }
        Ok(())
    }

    /// After a batch was read: the channel goes back, or is at its end.
    fn go_on(&self, channel: &Channel, mut reading: MutexGuard<'_, Reading>, ended: bool) -> Result<(), SendError> {
        if ended && reading.left_over.is_empty() {
            reading.ended = true;
            self.mailbox
                .send(&Message::new(Kind::Close, channel.number, reading.offset));
            let done = reading.closed;
            drop(reading);
            if done {
                self.channel_done();
            }
            return Ok(());
        }
        if self.must_pause(channel, &reading) {
            reading.paused = true;
            return Ok(());
        }
        self.again(channel, &reading)
    }
}

/// Reads what there is, up to a frame; returns whether QEMU has closed the channel. What has arrived of a page waits for
/// its rest, but not for long.
fn read(socket: &UnixStream, reading: &mut Reading, batch: &mut Batch) -> Result<bool, SendError> {
    batch.begin(&mut reading.left_over);
    let mut ended = false;
    let mut waited = false;
    loop {
        let incomplete = batch.look(&mut reading.parser);
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
            Err(rustix::io::Errno::AGAIN) if incomplete && !waited => {
                waited = true;
                let timeout = Timespec::try_from(REST_TIMEOUT).expect("a millisecond");
                let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
            }
            Err(rustix::io::Errno::AGAIN) => break,
            // A QEMU that was killed resets it: what follows is missing, and the receiver must not take it for an end.
            Err(error) => {
                return Err(SendError::Io {
                    what: "reading from QEMU",
                    source: error.into(),
                });
            }
        }
    }
    if !batch.is_full() {
        batch.flush(&mut reading.parser);
    }
    batch.end(&mut reading.left_over);
    Ok(ended)
}

/// Among what both sides do fast.
fn selector(welcome: &Welcome, lanes: usize) -> Selector {
    let encoder = batch::Encoder::new();
    let methods: Vec<Method> = Method::ALL
        .into_iter()
        .filter(|method| encoder.is_fast(*method) && welcome.methods & 1 << method.number() != 0)
        .collect();
    let sender = select::Sender {
        encoders: lanes,
        link_bytes_per_second: LINK_EXPECTED,
    };
    Selector::new(&methods, sender, REGIONS_MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which channel is next, for lanes that wait.
struct Poller {
    epoll: OwnedFd,
    /// Counts the channels in `left_over`.
    left_over_event: OwnedFd,
    /// Channels of which something was read and is not yet part of a frame.
    left_over: Mutex<VecDeque<u16>>,
    stop_event: OwnedFd,
    stopped: AtomicBool,
}

impl Poller {
    const LEFT_OVER: u64 = 1 << 32;
    const STOP: u64 = 1 << 33;

    fn new() -> io::Result<Self> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let poller = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            left_over_event: eventfd(0, flags | EventfdFlags::SEMAPHORE)?,
            left_over: Mutex::default(),
            stop_event: eventfd(0, flags)?,
            stopped: AtomicBool::new(false),
        };
        for (fd, data) in [
            (&poller.left_over_event, Self::LEFT_OVER),
            (&poller.stop_event, Self::STOP),
        ] {
            epoll::add(
                &poller.epoll,
                fd,
                epoll::EventData::new_u64(data),
                epoll::EventFlags::IN,
            )?;
        }
        Ok(poller)
    }

    fn add(&self, channel: &Channel) -> io::Result<()> {
        let data = epoll::EventData::new_u64(channel.number.into());
        Ok(epoll::add(&self.epoll, &channel.socket, data, Self::once())?)
    }

    fn arm(&self, channel: &Channel) -> io::Result<()> {
        let data = epoll::EventData::new_u64(channel.number.into());
        Ok(epoll::modify(&self.epoll, &channel.socket, data, Self::once())?)
    }

    fn once() -> epoll::EventFlags {
        epoll::EventFlags::IN | epoll::EventFlags::ONESHOT
    }

    fn has_left_over(&self, number: u16) -> io::Result<()> {
        lock(&self.left_over).push_back(number);
        rustix::io::write(&self.left_over_event, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// A channel to read, which nobody else gets until it is armed; `None` at the end of the session.
    fn next(&self) -> io::Result<Option<u16>> {
        loop {
            if self.is_stopped() {
                return Ok(None);
            }
            let mut events = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            match epoll::wait(&self.epoll, &mut events[..], None) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            match events[0].data.u64() {
                Self::STOP => return Ok(None),
                Self::LEFT_OVER => {
                    // Several may be woken for one.
                    let mut count = [0; 8];
                    if rustix::io::read(&self.left_over_event, &mut count).is_ok()
                        && let Some(number) = lock(&self.left_over).pop_front()
                    {
                        return Ok(Some(number));
                    }
                }
                number => return Ok(Some(number as u16)),
            }
        }
    }

    /// Waits until QEMU connects or the session ends, for a while.
    fn wait_for(&self, listener: &UnixListener) -> Result<(), SendError> {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::new(&self.stop_event, PollFlags::IN),
        ];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(SendError::Io {
                what: "waiting for QEMU",
                source: error.into(),
            }),
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.stop_event, &1_u64.to_ne_bytes());
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}
