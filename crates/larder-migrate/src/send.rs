//! Sender: accepts QEMU's channels on a UNIX socket and carries them to a receiver.
//!
//! ```text
//! QEMU --channel--.                        .--lane 0 (encode, write)--TCP--.
//! QEMU --channel--+-- epoll: free lanes  --+--lane 1 (encode, write)--TCP--+--> receiver
//! QEMU --channel--'   reads the next batch '--lane 2 (encode, write)--TCP--'
//!                                           control: opened, closed, delivered, return path
//! ```
//!
//! A lane is a thread with its own connection. It takes a channel that has bytes, reads a batch, assigns it a frame
//! number, releases the channel to the other lanes, and encodes and writes the frame. Nothing is queued in between,
//! except a few frames that a device has. So a slow link makes the lanes block in their writes, which makes QEMU
//! block in its own, and measures the bandwidth of the link.
//!
//! Invariants:
//! - One lane at a time reads a channel, and frame numbers are assigned in the order of its batches.
//! - A numbered frame is sent, and kept until the receiver has it, or the session fails. A link that replaces a lost
//!   one first carries the frames that the receiver lacks, and then new ones.
//! - At most the receiver's window of each channel is in flight; the receiver has room for all of it.
//! - The thread of the control connection never blocks on QEMU: keep-alives continue even if QEMU does not read its
//!   return path.
//! - A session that fails shuts QEMU's sockets. QEMU then sees a broken connection, and its guest runs on.
//! - A session fails too if QEMU's channels have ended in order but QEMU's migration has not.

mod channel;
mod connector;
mod lane;
mod lane_output;
mod poller;
mod return_path;
mod session;
mod unconfirmed;

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_codec::accelerator::{self, Accelerator};
use thiserror::Error;

use self::connector::{Connector, LinkConnections};
use self::session::SendSession;
use crate::control::{ControlError, Mailbox};
use crate::encode;
use crate::encode::Codecs;
use crate::limits::SharedLimits;
use crate::link::LinkError;
use crate::notes::Notes;
use crate::progress::SenderProgress;
use crate::session::{ErrorRank, SessionFailure};
use crate::tls::SenderTls;
use crate::wire::{Welcome, WireError};

/// Options of a sender.
pub struct Options {
    /// Address of the receiver, as `HOST:PORT`.
    pub to: String,
    /// TLS configuration; without it, everything is sent unencrypted.
    pub tls: Option<SenderTls>,
    /// Number of connections that carry frames, each with an encoding thread, 1 to 64; the receiver may allow fewer.
    pub lanes: u16,
    /// Bytes of delta memory on each host; the receiver may allow less.
    pub delta_memory: u64,
    /// Time for which the sender tries to reconnect a lost link, up to an hour; at 0 the session fails at once.
    pub patience: Duration,
    /// Resource limits, which the holder of another reference may change during the session.
    pub limits: Arc<SharedLimits>,
    /// Devices that encode in addition to the lanes' threads.
    pub accelerators: Accelerators,
}

/// Selection of devices that encode in addition to the lanes' threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accelerators {
    /// Devices that are present.
    #[default]
    Devices,
    /// No devices.
    None,
    /// Software versions in the devices' libraries, without the devices, for tests.
    Software,
}

impl Accelerators {
    fn detect(self) -> Vec<Box<dyn Accelerator>> {
        let software = match self {
            Self::Devices => accelerator::SoftwarePath::Disabled,
            Self::Software => accelerator::SoftwarePath::Enabled,
            Self::None => return Vec::new(),
        };
        let found = accelerator::find(software);
        for (name, why) in &found.missing {
            tracing::debug!("{name}: {why}");
        }
        found.available.into_iter().filter(|accelerator| accelerator.is_device()).collect()
    }
}

/// Reasons why a sender ended before everything was carried.
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
    #[error("the receiver sent '{0}', which violates the protocol")]
    UnexpectedMessage(String),
    #[error(
        "the receiver closed a connection in the middle of the session: its larder process ended, or something between the hosts cut the connection"
    )]
    LaneClosed,
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error(
        "the source's QEMU does not read the return path of channel {channel}: check whether it hangs or was \
        stopped"
    )]
    ReturnPathStalled { channel: u16 },
    #[error("a thread panicked ({what}), which is a bug in Larder: please report it with the messages before this one")]
    Panicked { what: &'static str },
    #[error("QEMU opened more than {most} channels: give the receiver a larger --channels")]
    TooManyChannels { most: u16 },
    #[error("{0}")]
    Encode(#[from] encode::EncodeError),
    #[error(
        "the migration did not end properly: {0}, and nothing confirms that the destination has all of the guest; check both QEMUs \
        (info migrate)"
    )]
    MigrationAborted(&'static str),
    #[error("the connection was lost ({lost}), and could not be restored within {} s: {last}", waited.as_secs())]
    ReconnectTimeout { lost: ControlError, waited: Duration, last: Box<SendError> },
    #[error("the connection was lost ({lost}), and cannot be re-established: {error}")]
    ReconnectFailed { lost: ControlError, error: Box<SendError> },
    #[error("the connections were lost more often than they can be re-established ({} times)", crate::wire::LINKS_MAX)]
    TooManyLinks,
    #[error("the receiver continues with another session")]
    OtherSession,
    #[error("the receiver confirms {count} frames of lane {lane}; the valid range is {least} to {most}")]
    InvalidCount { lane: u16, count: u64, least: u64, most: u64 },
    #[error("stopped")]
    Stopped,
}

/// Subject of I/O errors on a lane's connection.
const LANE_CONNECTION: &str = "the connection to the receiver";

impl SendError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl SessionFailure for SendError {
    fn rank(&self) -> ErrorRank {
        match self {
            Self::Receiver(_) => ErrorRank::Reported,
            Self::Control(error) if error.is_symptom() => ErrorRank::Symptom,
            Self::Encode(encode::EncodeError::Stopped) => ErrorRank::Symptom,
            Self::Io { what: LANE_CONNECTION, .. } | Self::LaneClosed => ErrorRank::Symptom,
            _ => ErrorRank::Cause,
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

/// Requests to a running session from outside.
#[derive(Default)]
pub struct Steering {
    /// Ends the session, as a failure.
    pub stop: AtomicBool,
    /// Keeps the session open after all channels are closed, because notes are still to be exchanged.
    pub hold: AtomicBool,
}

/// Sender that is connected to its receiver.
pub struct Sender {
    mailbox: Arc<Mailbox>,
    notes: Notes,
    connector: Connector,
    connected: LinkConnections,
    welcome: Welcome,
    limits: Arc<SharedLimits>,
    accelerators: Vec<Box<dyn Accelerator>>,
}

impl Sender {
    /// Connects to the receiver with all lanes, so that faults of the link show before QEMU starts.
    ///
    /// # Errors
    /// The receiver is not reachable, is not a Larder, or refuses.
    pub fn connect(options: &Options) -> Result<Self, SendError> {
        let accelerators = options.accelerators.detect();
        let (connector, connected, welcome) = Connector::open(options)?;
        let mailbox = Mailbox::new().map_err(SendError::io("setting up the control connection"))?;
        let mailbox = Arc::new(mailbox);
        Ok(Self {
            notes: Notes::new(Arc::clone(&mailbox)),
            mailbox,
            connector,
            connected,
            welcome,
            limits: Arc::clone(&options.limits),
            accelerators,
        })
    }

    /// Returns the number of lanes.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.connected.lanes.len()
    }

    /// Returns the names of the devices that encode in addition to the lanes.
    pub fn accelerators(&self) -> impl Iterator<Item = &'static str> {
        self.accelerators.iter().map(|accelerator| accelerator.name())
    }

    /// Returns the maximum bytes of delta memory on each host.
    #[must_use]
    pub fn delta_memory(&self) -> u64 {
        self.welcome.delta_memory
    }

    /// Returns the notes of the session, for the mover. Notes sent before [`Self::carry`] are sent with its start.
    #[must_use]
    pub fn notes(&self) -> Notes {
        self.notes.clone()
    }

    /// Carries the channels that QEMU opens at `listener` until both QEMUs have closed all of them.
    ///
    /// # Errors
    /// The session failed, and QEMU's sockets were shut. Both QEMUs see an incomplete migration, except one that
    /// already has all that it waits for.
    pub fn carry(
        self,
        listener: &UnixListener,
        progress: &SenderProgress,
        steering: &Steering,
    ) -> Result<(), SendError> {
        let codecs: Vec<_> = self.connected.lanes.iter().map(|_| Codecs::new(&self.accelerators)).collect();
        let Self { mailbox, notes, connector: dial, connected, welcome, limits, accelerators: _accelerators } = self;
        let session = SendSession::new(mailbox, notes, welcome, &dial, limits, &codecs, (progress, steering))?;
        session.run(dial, connected, codecs, listener)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
