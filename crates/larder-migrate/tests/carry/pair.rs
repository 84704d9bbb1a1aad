//! Sender and receiver on this machine, between two UNIX sockets at which a test does what QEMU does.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use larder_migrate::limits::SharedLimits;
use larder_migrate::progress::{SenderProgress, SenderTotals};
use larder_migrate::receive::{self, Delivered, NotesHandler, Port, ReceiveError, receive};
use larder_migrate::send::{self, SendError, Sender, Steering};
use larder_migrate::tls::{ReceiverTls, SenderTls};

use crate::certificates;

/// Time after which a test counts as hung.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

pub(crate) struct Pair {
    folder: tempfile::TempDir,
    source: UnixListener,
    /// Socket where the destination's QEMU waits.
    pub(crate) incoming: UnixListener,
    pub(crate) lanes: u16,
    pub(crate) delta_memory: u64,
    pub(crate) window: u32,
    /// Limits of the sender.
    pub(crate) limits: Arc<SharedLimits>,
    pub(crate) tls: Option<(SenderTls, ReceiverTls)>,
    pub(crate) tcp: Port,
    /// Time for which the sender tries to reconnect.
    pub(crate) patience: Duration,
    pub(crate) steering: Steering,
    /// Stops the receiver.
    pub(crate) stop: AtomicBool,
    pub(crate) progress: SenderProgress,
}

/// Results of the four participants.
pub(crate) struct Ended<S, D> {
    pub(crate) source: S,
    pub(crate) destination: D,
    pub(crate) sender: Result<(), SendError>,
    pub(crate) receiver: Result<Delivered, ReceiveError>,
}

impl<S, D> Ended<S, D> {
    /// Returns the errors of the sender and the receiver.
    pub(crate) fn errors(self) -> [String; 2] {
        let sender = self.sender.err().map_or_else(String::new, |error| error.to_string());
        let receiver = self.receiver.err().map_or_else(String::new, |error| error.to_string());
        [sender, receiver]
    }
}

impl Pair {
    pub(crate) fn new(lanes: u16, delta_memory: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let listen = |name: &str| UnixListener::bind(folder.path().join(name)).expect("a socket");
        Self {
            source: listen("source"),
            incoming: listen("destination"),
            folder,
            lanes,
            delta_memory,
            window: 16 << 20,
            limits: Arc::default(),
            tls: None,
            tcp: Port::new(TcpListener::bind("127.0.0.1:0").expect("a port")).expect("a port"),
            patience: Duration::from_secs(30),
            steering: Steering::default(),
            stop: AtomicBool::new(false),
            progress: SenderProgress::new(),
        }
    }

    /// Enables TLS.
    pub(crate) fn encrypted(mut self) -> Self {
        let folder = self.folder.path();
        certificates::make(folder);
        let sender = SenderTls::load(folder, "127.0.0.1").expect("certificates");
        let receiver = ReceiverTls::load(folder).expect("certificates");
        self.tls = Some((sender, receiver));
        self
    }

    pub(crate) fn connect(&self) -> PathBuf {
        self.folder.path().join("destination")
    }

    pub(crate) fn receiver(&self) -> receive::Options {
        receive::Options {
            connect: self.connect(),
            user: None,
            tls: self.tls.as_ref().map(|(_, receiver)| receiver.clone()),
            delta_memory: self.delta_memory,
            window: self.window,
            channels: 16,
            lanes: self.lanes,
            progress: Arc::default(),
        }
    }

    pub(crate) fn sender(&self) -> send::Options {
        send::Options {
            to: self.tcp.local_addr().expect("bound").to_string(),
            tls: self.tls.as_ref().map(|(sender, _)| sender.clone()),
            lanes: self.lanes,
            delta_memory: self.delta_memory,
            patience: self.patience,
            limits: Arc::clone(&self.limits),
            accelerators: send::Accelerators::None,
        }
    }

    /// Runs sender and receiver until both end, successfully or not, while `source` and `destination` do what QEMU
    /// does. `destination` gets the channels in the order in which `source` has opened them.
    pub(crate) fn end<S: Send, D: Send>(
        &self,
        source: impl FnOnce(&Path) -> S + Send,
        destination: impl FnOnce(&UnixListener) -> D + Send,
    ) -> Ended<S, D> {
        self.end_with(None, |_| {}, source, destination)
    }

    /// Runs like [`Self::end`], with an agent at the receiver and a callback once the sender is connected.
    pub(crate) fn end_with<S: Send, D: Send>(
        &self,
        agent: Option<&NotesHandler<'_>>,
        connected: impl FnOnce(&Sender) + Send,
        source: impl FnOnce(&Path) -> S + Send,
        destination: impl FnOnce(&UnixListener) -> D + Send,
    ) -> Ended<S, D> {
        let _watched = watch();
        thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&self.tcp, &self.receiver(), &self.stop, agent));
            let sender = scope.spawn(|| {
                let sender = Sender::connect(&self.sender()).expect("it connects");
                connected(&sender);
                sender.carry(&self.source, &self.progress, &self.steering)
            });
            let path = self.folder.path().join("source");
            let source = scope.spawn(move || source(&path));
            let destination = scope.spawn(|| destination(&self.incoming));
            Ended {
                source: source.join().expect("the source"),
                destination: destination.join().expect("the destination"),
                sender: sender.join().expect("the sender"),
                receiver: receiver.join().expect("the receiver"),
            }
        })
    }

    /// Runs sender and receiver, which must succeed.
    pub(crate) fn run<S: Send, D: Send>(
        &self,
        source: impl FnOnce(&Path) -> S + Send,
        destination: impl FnOnce(&UnixListener) -> D + Send,
    ) -> (S, D, SenderTotals) {
        let ended = self.end(source, destination);
        ended.sender.expect("it carries");
        ended.receiver.expect("it receives");
        (ended.source, ended.destination, self.progress.totals())
    }

    /// Waits until the sender's sums fulfil a condition.
    pub(crate) fn wait_until(&self, done: impl Fn(&SenderTotals) -> bool) {
        while !done(&self.progress.totals()) {
            thread::yield_now();
        }
    }
}

/// Aborts all tests if the returned value lives longer than [`LIMIT`]: hung threads cannot be ended otherwise.
pub(crate) fn watch() -> mpsc::Sender<()> {
    let (watched, ended) = mpsc::channel();
    let name = thread::current().name().unwrap_or("a test").to_owned();
    thread::spawn(move || {
        if ended.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name} hangs");
            std::process::abort();
        }
    });
    watched
}
