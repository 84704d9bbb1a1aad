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
//! - A frame that came whole is counted before it is decoded, and only over the link that is the session's then: whatever is
//!   lost on the way comes again, and nothing that was counted does.
//! - A link is let go when another one shows the session's number and that it is the same sender's, and not before.
//! - Only a channel that its sender has closed, and of which all was delivered, ends in order; all else is a connection
//!   that is shut in the middle, or a QEMU that has all that it needs.
//! - Strangers at its port, however many and however silent, keep neither a sender out nor the end from coming.
//! - Memory is bounded by the window times the channels, and the old pages, whatever the peer says.

mod claim;
mod greetings;
mod lane;
mod qemu;
mod queue;
mod session;
mod taking_in;

use std::io;
use std::net::IpAddr;
use std::os::unix::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use thiserror::Error;

use self::session::Session;
pub use self::taking_in::Port;
use crate::control::ControlError;
use crate::decode::DecodeError;
use crate::link::LinkError;
use crate::notes::Notes;
use crate::progress::LinkState;
use crate::session::{self as both, Side as _, Weight};
use crate::tls::ReceiverTls;
use crate::wire::{CHANNEL_FRAMES_MAX, WireError};

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
pub struct Watched(Mutex<Seen>);

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    delivered: Delivered,
    peer: Option<IpAddr>,
    link: LinkState,
}

impl Watched {
    /// What was delivered.
    #[must_use]
    pub fn delivered(&self) -> Delivered {
        lock(&self.0).delivered
    }

    /// Who sends, or has sent last.
    #[must_use]
    pub fn peer(&self) -> Option<IpAddr> {
        lock(&self.0).peer
    }

    /// Whether the connections are there.
    #[must_use]
    pub fn link(&self) -> LinkState {
        lock(&self.0).link
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
    #[error("the connection was lost ({lost}), and the sender did not come back in {} s", waited.as_secs())]
    Away { lost: ControlError, waited: Duration },
    #[error("another sender has come after the one that there was had lost its connection")]
    Replaced,
    #[error("stopped")]
    Stopped,
}

impl ReceiveError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl both::Failure for ReceiveError {
    fn weight(&self) -> Weight {
        match self {
            Self::Sender(_) => Weight::Told,
            Self::Control(error) if error.is_symptom() => Weight::Symptom,
            Self::Wire(WireError::Io { .. }) | Self::Lane => Weight::Symptom,
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

/// Waits for a sender at `port` and delivers what it carries until both QEMUs have closed all channels.
///
/// # Errors
/// Something broke, and QEMU's sockets were shut.
pub fn receive(
    port: &Port,
    options: &Options,
    stop: &AtomicBool,
    agent: Option<&Agent<'_>>,
) -> Result<Delivered, ReceiveError> {
    if SocketAddr::from_pathname(&options.connect).is_err() {
        return Err(ReceiveError::Path(options.connect.clone()));
    }
    let session = Session::new(options, agent)?;
    thread::scope(|scope| {
        let session = &session;
        session.part("taking in connections", || session.take_in(scope, port, stop));
        session.shut_greetings();
    });
    let delivered = session.delivered();
    session.into_error().map_or(Ok(delivered), Err)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
