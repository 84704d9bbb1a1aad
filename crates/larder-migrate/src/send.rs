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
//! - A frame that has its place is sent, and kept until the receiver has it, or the session fails. Over a link that takes
//!   the place of a lost one goes what the receiver lacks, and then what is new.
//! - Of each channel at most the receiver's window is on its way; the receiver has room for all of it.
//! - What the thread of the control connection does waits for nothing: a QEMU that does not read what comes back keeps
//!   nobody from hearing that this side is alive.
//! - A session that fails shuts QEMU's sockets, which then sees a broken connection, and its guest runs on.
//! - A session of which QEMU's channels have ended well, but QEMU's migration has not, is a failure too.

mod channel;
mod dial;
mod kept;
mod lane;
mod out;
mod poller;
mod returns;
mod session;

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_codec::accelerator::{self, Accelerator};
use thiserror::Error;

use self::dial::{Connected, Dial};
use self::session::Session;
use crate::control::{ControlError, Mailbox};
use crate::encode;
use crate::encode::Codecs;
use crate::limits::InForce;
use crate::link::LinkError;
use crate::notes::Notes;
use crate::progress::Progress;
use crate::session::{Failure, Weight};
use crate::tls::SenderTls;
use crate::wire::{Welcome, WireError};

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
    /// How long it tries to connect again when the link was lost, up to an hour; at 0 the session fails at once.
    pub patience: Duration,
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
    #[error("the connection was lost ({lost}), and did not come back in {} s: {last}", waited.as_secs())]
    Away {
        lost: ControlError,
        waited: Duration,
        last: Box<SendError>,
    },
    #[error("the connection was lost ({lost}), and cannot be made again: {error}")]
    NotAgain { lost: ControlError, error: Box<SendError> },
    #[error(
        "the connections were lost more often than they can be made again ({} times)",
        crate::wire::LINKS_MAX
    )]
    TooOften,
    #[error("the receiver goes on with another session")]
    OtherSession,
    #[error("the receiver says that it has received {count} frames of lane {lane}, which may be {least} to {most}")]
    Received {
        lane: u16,
        count: u64,
        least: u64,
        most: u64,
    },
    #[error("stopped")]
    Stopped,
}

/// What a lane does with its connection.
const LANE: &str = "the connection to the receiver";

impl SendError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl Failure for SendError {
    fn weight(&self) -> Weight {
        match self {
            Self::Receiver(_) => Weight::Told,
            Self::Control(error) if error.is_symptom() => Weight::Symptom,
            Self::Encode(encode::Failed::Stopped) => Weight::Symptom,
            Self::Io { what: LANE, .. } | Self::Lane => Weight::Symptom,
            _ => Weight::Cause,
        }
    }

    fn panicked(what: &'static str) -> Self {
        Self::Panicked { what }
    }

    fn is_panic(&self) -> bool {
        matches!(self, Self::Panicked { .. })
    }

    fn system(what: &'static str, source: io::Error) -> Self {
        Self::Io { what, source }
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
    dial: Dial,
    connected: Connected,
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
        let (dial, connected, welcome) = Dial::open(options)?;
        let mailbox = Mailbox::new().map_err(SendError::io("setting up the control connection"))?;
        let mailbox = Arc::new(mailbox);
        Ok(Self {
            notes: Notes::new(Arc::clone(&mailbox)),
            mailbox,
            dial,
            connected,
            welcome,
            limits: Arc::clone(&options.limits),
            accelerators,
        })
    }

    /// How many lanes there are.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.connected.lanes.len()
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
        let codecs: Vec<_> = self
            .connected
            .lanes
            .iter()
            .map(|_| Codecs::new(&self.accelerators))
            .collect();
        let Self {
            mailbox,
            notes,
            dial,
            connected,
            welcome,
            limits,
            accelerators: _while_they_are_used,
        } = self;
        let session = Session::new(mailbox, notes, welcome, &dial, limits, &codecs, (progress, steering))?;
        session.run(dial, connected, codecs, listener)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
