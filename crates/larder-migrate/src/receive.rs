//! Receiver: takes a sender's frames and passes the bytes of its channels to the destination's QEMU.
//!
//! ```text
//! sender --TCP-- lane 0 (read, decode) --.   a queue per channel, in the order of its bytes
//! sender --TCP-- lane 1 (read, decode) --+-- channel 0: writer --> QEMU --> return path
//! sender --TCP-- control                 '-- channel 1: writer --> QEMU
//! ```
//!
//! Invariants:
//! - A lane never waits for QEMU: decoded bytes are put into the channel's queue, which has room for the window that
//!   the sender obeys. So a frame on which another one waits is always decoded ([`crate::base`]).
//! - QEMU gets a channel's bytes in order, each once, and nothing after a gap.
//! - A frame received in full is counted before it is decoded, and only over the session's current link. Everything
//!   lost on the way is sent again, and nothing that was counted is.
//! - A link is abandoned only when a new one shows the session's number and the proof of the same sender.
//! - A channel ends in order only if its sender has closed it and all of it was delivered. Any other end is a
//!   connection that is shut early, or a QEMU that has all that it needs.
//! - Other connections to the port, however many and however silent, keep neither a sender out nor the session from
//!   ending.
//! - Memory is bounded by the window times the channels, and the delta memory, whatever the peer sends.

mod accept;
mod claim;
mod greetings;
mod lane;
mod qemu;
mod queue;
mod session;

use std::io;
use std::net::IpAddr;
use std::os::unix::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use thiserror::Error;

pub use self::accept::Port;
use self::session::ReceiveSession;
use crate::control::ControlError;
use crate::decode::DecodeError;
use crate::link::LinkError;
use crate::notes::Notes;
use crate::progress::LinkState;
use crate::session::{self as both, ErrorRank, SessionSide as _};
use crate::tls::ReceiverTls;
use crate::wire::{CHANNEL_FRAMES_MAX, WireError};

/// Options of a receiver.
pub struct Options {
    /// Path of the socket where the destination's QEMU waits: PATH of `-incoming unix:PATH`.
    pub connect: PathBuf,
    /// User that QEMU runs as. If set, a socket of any other user is refused.
    pub user: Option<u32>,
    /// TLS configuration; without it, everything is received unencrypted.
    pub tls: Option<ReceiverTls>,
    /// Maximum bytes of delta memory.
    pub delta_memory: u64,
    /// Maximum bytes of each channel that wait for QEMU.
    pub window: u32,
    /// Maximum channels, 1 to 256.
    pub channels: u16,
    /// Maximum lanes, 1 to 64.
    pub lanes: u16,
    /// Progress, for monitoring.
    pub progress: Arc<ReceiverProgress>,
}

/// Progress of a receiver, over all of its sessions.
#[derive(Debug, Default)]
pub struct ReceiverProgress(Mutex<ProgressState>);

#[derive(Clone, Copy, Debug, Default)]
struct ProgressState {
    delivered: Delivered,
    peer: Option<IpAddr>,
    link: LinkState,
}

impl ReceiverProgress {
    /// Returns the sums of what was delivered.
    #[must_use]
    pub fn delivered(&self) -> Delivered {
        lock(&self.0).delivered
    }

    /// Returns the address of the current sender, or of the last one.
    #[must_use]
    pub fn peer(&self) -> Option<IpAddr> {
        lock(&self.0).peer
    }

    /// Returns the state of the connections.
    #[must_use]
    pub fn link(&self) -> LinkState {
        lock(&self.0).link
    }
}

/// Reasons why a receiver ended before everything was delivered.
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
    #[error("the sender sent {0}, which violates the protocol")]
    UnexpectedMessage(String),
    #[error("the sender sent bytes {begin} to {end} of channel {channel}, of which it may send up to {most} now")]
    OutsideWindow { channel: u16, begin: u64, end: u64, most: u64 },
    #[error("the sender sent more than {CHANNEL_FRAMES_MAX} frames of channel {channel} before QEMU accepted any")]
    TooManyFrames { channel: u16 },
    #[error("a thread panicked ({what}), which is a bug in Larder: please report it with the messages before this one")]
    Panicked { what: &'static str },
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error(
        "the sender closed a connection in the middle of the session: its larder process ended, or something between the hosts cut the connection"
    )]
    LaneClosed,
    #[error("cannot connect to QEMU at {}: {source}; was it started with '-incoming unix:{}', and is it waiting?", path.display(), path.display())]
    Qemu { path: PathBuf, source: io::Error },
    #[error("the path of QEMU's socket, {}, is {} bytes long; the kernel takes at most 107: start QEMU with a shorter one, for example in /run", .0.display(), .0.as_os_str().len())]
    PathTooLong(PathBuf),
    #[error(
        "the sender moves a complete virtual machine (larder migrate VM), and this receiver only carries a stream: \
         start it with --qmp instead of --connect"
    )]
    SenderIsMover,
    #[error(
        "the sender only carries a stream (larder migrate send), and this receiver also controls QEMU: \
         start it with --connect instead of --qmp, or send with larder migrate VM"
    )]
    SenderIsStream,
    #[error("the connection was lost ({lost}), and the sender did not reconnect within {} s", waited.as_secs())]
    ReconnectTimeout { lost: ControlError, waited: Duration },
    #[error("another sender connected after the previous one had lost its connection")]
    Replaced,
    #[error("stopped")]
    Stopped,
}

impl ReceiveError {
    const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl both::SessionFailure for ReceiveError {
    fn rank(&self) -> ErrorRank {
        match self {
            Self::Sender(_) => ErrorRank::Reported,
            Self::Control(error) if error.is_symptom() => ErrorRank::Symptom,
            Self::Wire(WireError::Io { .. }) | Self::LaneClosed => ErrorRank::Symptom,
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

/// Sums of what a session has delivered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Delivered {
    /// Bytes that QEMU has taken.
    pub raw: u64,
    /// Bytes of the frames that contained them.
    pub wire: u64,
    /// Number of frames.
    pub frames: u64,
    /// Nanoseconds of CPU time of the lanes, which read, decrypt and decode, and of the threads that write to QEMU.
    pub cpu_ns: u64,
    /// Part of the CPU time spent decoding.
    pub decode_cpu_ns: u64,
}

/// Handler of a session's notes, called in a separate thread when the session begins. It returns once
/// [`Notes::receive`] reports that the session is over.
pub type NotesHandler<'a> = dyn Fn(Notes) + Sync + 'a;

/// Waits for a sender at `port` and delivers its channels until both QEMUs have closed all of them.
///
/// # Errors
/// The session failed, and QEMU's sockets were shut.
pub fn receive(
    port: &Port,
    options: &Options,
    stop: &AtomicBool,
    notes_handler: Option<&NotesHandler<'_>>,
) -> Result<Delivered, ReceiveError> {
    if SocketAddr::from_pathname(&options.connect).is_err() {
        return Err(ReceiveError::PathTooLong(options.connect.clone()));
    }
    let session = ReceiveSession::new(options, notes_handler)?;
    thread::scope(|scope| {
        let session = &session;
        session.run_task("accepting connections", || session.accept_connections(scope, port, stop));
        session.shut_greetings();
    });
    let delivered = session.delivered();
    session.into_error().map_or(Ok(delivered), Err)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
