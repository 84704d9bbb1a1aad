//! Server in a thread of the test, over a device that the test can block and observe.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::Socket;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, Loop, ReadBuf, SizeChanges,
    WriteBuf, WriteFlags, ZeroFlags,
};
use larder_export::activity::Activity;
use larder_export::vhost_user::{Serial, VhostUserOptions, VhostUserServer};

/// Size of the test disk, in bytes.
pub const DISK_BYTES: u64 = 8 << 20;

/// State that the test shares with the device.
#[derive(Default)]
pub struct Probe {
    held: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
    pub started: AtomicU64,
    pub durable_writes: AtomicU64,
    pub plain_writes: AtomicU64,
    pub flushes: AtomicU64,
    /// Number of errors that the server logged.
    pub errors: AtomicU64,
}

/// Log subscriber that counts errors of the server.
struct ErrorCounter(Arc<Probe>);

impl tracing::Subscriber for ErrorCounter {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.errors.fetch_add(1, Ordering::SeqCst);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

impl Probe {
    /// Blocks requests from now on, until [`Probe::release`].
    pub fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    pub fn release(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.held.store(false, Ordering::SeqCst);
        for waker in waiting.drain(..) {
            waker.wake();
        }
    }

    /// Waits until `count` requests have reached the device since it was created.
    pub fn wait_started(&self, count: u64) {
        while self.started.load(Ordering::SeqCst) < count {
            std::thread::yield_now();
        }
    }

    async fn pass(&self) {
        self.started.fetch_add(1, Ordering::SeqCst);
        std::future::poll_fn(|context| {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.held.load(Ordering::SeqCst) {
                return Poll::Ready(());
            }
            waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

struct ProbeDevice {
    inner: MemoryDevice,
    probe: Arc<Probe>,
}

impl BlockDevice for ProbeDevice {
    fn name(&self) -> &Rc<str> {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        Io::task(async move {
            self.probe.pass().await;
            self.inner.read(start, buffer).await
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let counter = if flags.fua { &self.probe.durable_writes } else { &self.probe.plain_writes };
        counter.fetch_add(1, Ordering::SeqCst);
        Io::task(async move {
            self.probe.pass().await;
            self.inner.write(start, buffer, flags).await
        })
    }

    fn flush(&self) -> Io<'_> {
        self.probe.flushes.fetch_add(1, Ordering::SeqCst);
        Io::task(async move {
            self.probe.pass().await;
            self.inner.flush().await
        })
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.inner.discard(range)
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.inner.write_zeroes(range, flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.inner.extents(range, limit)
    }

    fn size_changes(&self) -> &SizeChanges {
        self.inner.size_changes()
    }
}

/// Server that serves one connection after the other, as the real one does. It ends when it is dropped.
pub struct Server {
    pub probe: Arc<Probe>,
    connections: Option<mpsc::Sender<UnixStream>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start() -> Self {
        let probe = Arc::new(Probe::default());
        let (connections, incoming) = mpsc::channel::<UnixStream>();
        let theirs = Arc::clone(&probe);
        let thread = std::thread::spawn(move || {
            let _log = tracing::subscriber::set_default(ErrorCounter(Arc::clone(&theirs)));
            let on = Loop::new(Duration::from_micros(20)).expect("io_uring");
            let device =
                Rc::new(ProbeDevice { inner: MemoryDevice::new(ByteLen::new(DISK_BYTES), 512), probe: theirs });
            let options = VhostUserOptions { serial: Serial::of("a serial"), ..VhostUserOptions::default() };
            let server = VhostUserServer::new(&on, device, &options, &Activity::new(&on)).expect("sound options");
            while let Ok(stream) = incoming.recv() {
                let socket = Socket::from_descriptor(&on, stream.into()).expect("a socket");
                on.block_on(server.serve(socket));
            }
        });
        Self { probe, connections: Some(connections), thread: Some(thread) }
    }

    /// Returns a connection, which is served once the earlier ones have ended.
    pub fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let connections = self.connections.as_ref().expect("runs");
        connections.send(theirs).expect("the server's thread died: see its panic");
        ours
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.probe.release();
        drop(self.connections.take());
        let result = self.thread.take().map_or(Ok(()), JoinHandle::join);
        if !std::thread::panicking() {
            assert!(result.is_ok(), "the server panicked");
        }
    }
}
