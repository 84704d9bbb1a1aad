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
//! among all frames, lets the others have the channel, and encodes and writes the frame. Nothing is queued in between, but
//! for a few frames that a device has: a link that is slow makes lanes wait in their writes, so that QEMU waits in its own,
//! and measures what the link carries.
//!
//! Invariants:
//! - A channel's bytes are read by one lane at a time, and its batches are given their places in their order.
//! - A frame that has its place is sent, or the session fails.
//! - Of each channel at most the receiver's window is on its way; the receiver has room for all of it.
//! - What the thread of the control connection does waits for nothing: a QEMU that does not read what comes back keeps
//!   nobody from hearing that this side is alive.
//! - A session that fails shuts QEMU's sockets, which then sees a broken connection, and its guest runs on.
//! - A session of which QEMU's channels have ended well, but QEMU's migration has not, is a failure too.

mod channel;
mod lane;
mod poller;
mod returns;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, Scope};

use larder_codec::accelerator::{self, Accelerator};
use larder_codec::batch::Method;
use larder_codec::select::{self, Selector};
use thiserror::Error;

use self::channel::{Channel, Reading};
use self::poller::Poller;
use self::returns::{Back, Returns};
use crate::base::{Frontier, Slots};
use crate::control::{Control, ControlError, LAST_WORDS, Mailbox};
use crate::decode::Bases;
use crate::encode;
use crate::encode::{Codecs, Order};
use crate::limits::InForce;
use crate::link::{Link, LinkError};
use crate::notes::Notes;
use crate::pace::Pace;
use crate::progress::Progress;
use crate::session::{self, Ending, Shut, Weight};
use crate::stream::Blocks;
use crate::tls::SenderTls;
use crate::wire::{Hello, Kind, Message, Role, Welcome, WireError};

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
    /// What it may take; whoever keeps a copy of this may change it.
    pub limits: Arc<InForce>,
    /// What encodes beside the lanes' own threads.
    pub accelerators: Accelerators,
}

/// Which devices encode beside the lanes' own threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accelerators {
    /// Those that are there.
    #[default]
    Devices,
    /// None.
    None,
    /// Their libraries without the devices, where there are none, to see that they work.
    Software,
}

impl Accelerators {
    fn find(self) -> Vec<Box<dyn Accelerator>> {
        let software = match self {
            Self::Devices => accelerator::Software::No,
            Self::Software => accelerator::Software::Yes,
            Self::None => return Vec::new(),
        };
        let found = accelerator::find(software);
        for (name, why) in &found.missing {
            tracing::debug!("{name}: {why}");
        }
        found.there.into_iter().filter(|one| one.is_device()).collect()
    }
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
    #[error(
        "the receiver has closed a connection in the middle: its larder was ended, or something in between cut it off"
    )]
    Lane,
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error(
        "the source's QEMU does not read what the destination's says on channel {channel}: look whether it hangs, or was \
        stopped"
    )]
    Return { channel: u16 },
    #[error("a thread panicked ({what}), which is a bug of Larder's: please report it, with what was said before this")]
    Panicked { what: &'static str },
    #[error("QEMU opened more than {most} channels: give the receiver a larger --channels")]
    Channels { most: u16 },
    #[error("{0}")]
    Encode(#[from] encode::Failed),
    #[error(
        "the migration did not end well: {0}, and nothing says that the destination has all of the guest; ask both QEMUs \
        (info migrate)"
    )]
    BrokenOff(&'static str),
    #[error("stopped")]
    Stopped,
}

/// What a lane does with its connection.
const LANE: &str = "the connection to the receiver";

impl SendError {
    fn weight(&self) -> Weight {
        match self {
            Self::Receiver(_) => Weight::Told,
            Self::Control(error) if error.is_symptom() => Weight::Symptom,
            Self::Encode(encode::Failed::Stopped) => Weight::Symptom,
            Self::Io { what: LANE, .. } | Self::Lane => Weight::Symptom,
            _ => Weight::Cause,
        }
    }

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
    limits: Arc<InForce>,
    accelerators: Vec<Box<dyn Accelerator>>,
}

impl Sender {
    /// Connects to the receiver, all lanes too, so that what is wrong with the link shows before QEMU begins.
    ///
    /// # Errors
    /// The receiver is not there, is none, or refuses.
    pub fn connect(options: &Options) -> Result<Self, SendError> {
        let accelerators = options.accelerators.find();
        let tls = options.tls.as_ref();
        let mut control = Link::connect(&options.to, tls)?;
        let mut hello = Hello {
            role: Role::Control,
            delta_memory: options.delta_memory,
            lanes: options.lanes,
        };
        hello.write(&mut control)?;
        let welcome = Welcome::read(&mut control).map_err(refused)?;
        welcome.answers(&hello)?;
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
            limits: Arc::clone(&options.limits),
            accelerators,
        })
    }

    /// How many lanes there are.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The devices that encode beside them.
    pub fn accelerators(&self) -> impl Iterator<Item = &'static str> {
        self.accelerators.iter().map(|accelerator| accelerator.name())
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
            limits,
            accelerators,
        } = self;
        let delta_memory = welcome.delta_memory;
        let codecs: Vec<_> = lanes.iter().map(|_| Codecs::new(&accelerators)).collect();
        let selector = selector(&welcome, &codecs);
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
                selector,
            ),
            lanes: lanes.len(),
            welcome,
            limits,
            link_pace: Pace::new(),
            cpu_pace: Pace::new(),
            progress,
            steering,
            end_sent: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            ending: Ending::new(),
        };
        session.run(control, lanes.into_iter().zip(codecs).collect(), listener)
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
    limits: Arc<InForce>,
    link_pace: Pace,
    /// Of the lanes' CPU time.
    cpu_pace: Pace,
    progress: &'a Progress,
    steering: &'a Steering,
    end_sent: AtomicBool,
    /// The receiver has said so too.
    ended: AtomicBool,
    ending: Ending<SendError>,
}

#[derive(Default)]
struct Channels {
    /// By number.
    all: Vec<Arc<Channel>>,
    /// Not closed by both QEMUs.
    open: usize,
}

impl Session<'_> {
    fn run(self, control: Link, lanes: Vec<(Link, Codecs)>, listener: &UnixListener) -> Result<(), SendError> {
        for (lane, _) in &lanes {
            let handle = lane.handle().map_err(SendError::io("a lane"))?;
            self.ending.shut_later(Shut::Link(handle));
        }
        listener
            .set_nonblocking(true)
            .map_err(SendError::io("the socket for QEMU"))?;
        thread::scope(|scope| {
            let session = &self;
            let (returns, returning) = Returns::new();
            session.spawn(scope, "what comes back", move || session.bring_back(&returning));
            session.spawn(scope, "the control connection", move || {
                session.control(control, &returns)
            });
            let (running, all_ended) = mpsc::channel::<()>();
            for (lane, codecs) in lanes {
                let running = running.clone();
                session.spawn(scope, "a lane", move || {
                    let _until_it_ends = running;
                    session.lane(lane, codecs)
                });
            }
            drop(running);
            session.part("taking in QEMU's connections", || session.accept(listener));
            session.notes.end();
            // All is over, and lanes that wait for nobody say so to the receiver.
            let _ = all_ended.recv_timeout(LAST_WORDS);
            session.ending.shut();
        });
        self.ending.into_error().map_or(Ok(()), Err)
    }

    /// Has a thread do its part of the session, which fails if that does.
    fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        what: &'static str,
        does: impl FnOnce() -> Result<(), SendError> + Send + 'scope,
    ) {
        let thread = thread::Builder::new().name("larder-send".to_owned());
        if let Err(source) = thread.spawn_scoped(scope, move || self.part(what, does)) {
            self.fail(SendError::Io {
                what: "starting a thread",
                source,
            });
        }
    }

    fn part(&self, what: &'static str, does: impl FnOnce() -> Result<(), SendError>) {
        match session::part(does, || SendError::Panicked { what }) {
            // What nobody takes any more may still be on its way when all is over.
            Err(error) if self.ended.load(Ordering::Acquire) && !matches!(error, SendError::Panicked { .. }) => {}
            Err(error) => self.fail(error),
            Ok(()) => {}
        }
    }

    fn fail(&self, error: SendError) {
        let weight = error.weight();
        self.ending.fail(error, weight, |error| {
            // The receiver knows what it has said itself.
            if weight != Weight::Told {
                let told = error.to_string();
                self.mailbox.send(&Message::with_body(Kind::Failed, 0, told.as_bytes()));
            }
            self.mailbox.close();
        });
        self.ending.shut();
        self.stop();
    }

    /// Lets everybody go home.
    fn stop(&self) {
        self.order.bases.frontier.stop();
        self.poller.stop();
    }

    fn control(&self, link: Link, returns: &Returns) -> Result<(), SendError> {
        let result = Control::new(link, &self.mailbox)
            .map_err(SendError::io("the control connection"))
            .and_then(|control| Ok(control.run(|message| self.take(message, returns))?));
        if result.is_ok() {
            self.stop();
        }
        result
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
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self
                    .poller
                    .wait_for(listener)
                    .map_err(SendError::io("waiting for QEMU"))?,
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
        returns::set_up(&socket).map_err(&failed)?;
        let socket = Arc::new(socket);
        self.ending.shut_later(Shut::Qemu(Arc::clone(&socket)));
        let mut channels = lock(&self.channels);
        let number = channels.all.len() as u16;
        if number >= self.welcome.channels {
            return Err(SendError::Channels {
                most: self.welcome.channels,
            });
        }
        let channel = Arc::new(Channel::new(number, socket, &self.blocks));
        channels.all.push(Arc::clone(&channel));
        channels.open += 1;
        self.progress.channel_opened(number);
        self.mailbox.send(&Message::new(Kind::Open, number, 0));
        self.poller.add(&channel).map_err(failed)
    }

    fn channel(&self, number: u16) -> Option<Arc<Channel>> {
        lock(&self.channels).all.get(usize::from(number)).map(Arc::clone)
    }

    /// What comes from the receiver, to the end of the control connection.
    fn take(&self, message: Result<Message, ControlError>, returns: &Returns) {
        let is_reason = matches!(&message, Ok(message) if message.kind == Kind::Failed);
        if self.ending.has_failed() && !is_reason {
            return;
        }
        let heard = message
            .map_err(SendError::from)
            .and_then(|message| self.hear(message, returns));
        if let Err(error) = heard {
            self.fail(error);
        }
    }

    /// A message of the receiver's.
    fn hear(&self, message: Message, returns: &Returns) -> Result<(), SendError> {
        let unexpected = |message: &Message| SendError::Message(format!("{message:?}"));
        match message.kind {
            Kind::Failed => return Err(SendError::Receiver(message.text())),
            Kind::End if self.end_sent.load(Ordering::Relaxed) => {
                self.ended.store(true, Ordering::Release);
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
            Kind::Return => returns.put(channel, Back::Bytes(message.body)),
            Kind::Closed => {
                let refused = message.value != 0;
                returns.put(channel, Back::Closed { refused })
            }
            _ => Err(unexpected(&message)),
        }
    }

    /// Hands the source's QEMU what the destination's has said, and last that it has closed a channel.
    fn bring_back(&self, returning: &returns::Returning) -> Result<(), SendError> {
        while let Some((channel, back)) = returning.next() {
            match back {
                Back::Bytes(bytes) => {
                    lock(&channel.returned).take(&bytes);
                    returning.write(&channel, &bytes)?;
                }
                Back::Closed { refused } => self.closed(&channel, refused),
            }
        }
        Ok(())
    }

    /// The destination's QEMU has closed a channel, perhaps with bytes of it that it does not take.
    fn closed(&self, channel: &Channel, refused: bool) {
        // A QEMU that still has something to say must not take it for said.
        let how = if refused { Shutdown::Both } else { Shutdown::Write };
        let _ = channel.socket.shutdown(how);
        let mut reading = channel.reading();
        reading.closed_first |= !reading.ended;
        reading.closed = true;
        reading.refused |= refused;
        if refused && !reading.ended {
            // Nobody would read on where as much is on its way as may be.
            reading.ended = true;
            self.mailbox
                .send(&Message::new(Kind::Close, channel.number, reading.offset));
        }
        self.end_if_channel_is_done(reading);
    }

    fn delivered(&self, channel: &Channel, bytes: u64) -> Result<(), SendError> {
        let mut reading = channel.reading();
        let Some((more, time)) = reading.delivered(bytes) else {
            return Err(SendError::Message(format!(
                "that {bytes} bytes of channel {} were delivered, of which {} were sent",
                channel.number, reading.offset
            )));
        };
        self.progress.delivered(more, time);
        if reading.paused && !reading.must_pause(self.welcome.window) {
            reading.paused = false;
            self.again(channel, &reading)?;
        }
        self.end_if_channel_is_done(reading);
        Ok(())
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

    fn end_if_channel_is_done(&self, mut reading: MutexGuard<'_, Reading>) {
        let is_done = reading.is_done_now();
        drop(reading);
        if is_done {
            lock(&self.channels).open -= 1;
            self.end_if_done();
        }
    }

    /// Ends the session in order if all channels are closed and nobody holds it.
    fn end_if_done(&self) {
        let channels = lock(&self.channels);
        if channels.open > 0
            || self.steering.hold.load(Ordering::Relaxed)
            || self.end_sent.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let all = channels.all.clone();
        drop(channels);
        match all.iter().find_map(|channel| channel.broke_off()) {
            Some(why) => self.fail(SendError::BrokenOff(why)),
            None => self.mailbox.send(&Message::new(Kind::End, 0, 0)),
        }
    }
}

/// With TLS 1.3 a sender learns only after its handshake what the receiver thinks of its certificate.
fn refused(error: WireError) -> SendError {
    if let WireError::Io { source, .. } = &error
        && let Some(rustls::Error::AlertReceived(alert)) = source.get_ref().and_then(|error| error.downcast_ref())
    {
        return LinkError::Refused(*alert).into();
    }
    error.into()
}

/// Among what both sides do fast.
fn selector(welcome: &Welcome, codecs: &[Codecs]) -> Selector {
    let sender = select::Sender {
        encoders: codecs.len(),
        link_bytes_per_second: LINK_EXPECTED,
    };
    let is_decoded = |method: Method| welcome.methods & 1 << method.number() != 0;
    let ways = codecs.first().map(|codecs| codecs.ways(is_decoded));
    Selector::new(&ways.unwrap_or_default(), sender, REGIONS_MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
