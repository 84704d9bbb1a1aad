//! A remote store: an NBD server in this process that answers each request after a fixed delay.
//!
//! It stores nothing: writes are discarded, and reads return zeros. It reports all of the disk as data, so that no
//! client skips it as a hole. (nbdkit's `delay` filter counts in whole milliseconds, and takes `0.5ms` for none.)

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use larder_block::event_loop::Listener;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, ExtentKind, Geometry, Io, IoResult, Loop,
    Operation, ReadBuf, SizeChanges, WriteBuf, WriteFlags, ZeroFlags, check_request,
};
use larder_export::nbd::{NbdServer, NbdServerOptions};

use super::place::Place;
use super::servers::text;

/// Maximum number of concurrent requests.
const REQUESTS_MAX: usize = 256;

const SECTOR_BYTES: u32 = 512;

/// The server, on a thread that ends when this value is dropped.
pub(crate) struct SlowStore {
    uri: String,
    /// Closing this connection stops the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl SlowStore {
    /// Starts a disk of `size` bytes with a latency of `delay` for each read and write.
    pub(crate) fn start(scratch: &Place, size: u64, delay: Duration) -> anyhow::Result<Self> {
        let path = scratch.unused("store");
        let listener = UnixListener::bind(&path).with_context(|| format!("listening on {}", path.display()))?;
        let (stop, stopped) = UnixStream::pair()?;
        let serve = move || match serve(listener, &stopped, size, delay) {
            Ok(()) => {}
            // The client fails too: it waits for the connection and reports that.
            Err(error) => eprintln!("the slow store failed: {error:#}"),
        };
        Ok(Self {
            uri: uri(&path)?,
            stop: Some(stop),
            thread: Some(std::thread::Builder::new().name("slow-store".to_owned()).spawn(serve)?),
        })
    }

    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }
}

impl Drop for SlowStore {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has printed its message already.
            let _ = thread.join();
        }
    }
}

/// Returns the URI of the NBD server at this socket.
pub(crate) fn uri(socket: &Path) -> anyhow::Result<String> {
    Ok(format!("nbd+unix:///?socket={}", text(socket)?))
}

/// Serves until the other end of `stopped` is closed.
fn serve(listener: UnixListener, stopped: &UnixStream, size: u64, delay: Duration) -> anyhow::Result<()> {
    // The loop does not spin: the processors are for the measured server and its client.
    let event_loop = Loop::new(Duration::ZERO)?;
    let device = Rc::new(SlowDevice {
        name: "slow store".into(),
        geometry: Geometry {
            size: ByteLen::new(size),
            block_size: SECTOR_BYTES,
            physical_block_size: SECTOR_BYTES,
            discard_granularity: SECTOR_BYTES,
            memory_alignment: 1,
            read_only: false,
            fast_zeroes: true,
        },
        delay,
        on: event_loop.clone(),
        changes: SizeChanges::default(),
    });
    let options = NbdServerOptions { requests_max: REQUESTS_MAX, ..NbdServerOptions::default() };
    let server = NbdServer::new(&event_loop, device, options);
    server.listen(Listener::from_descriptor(&event_loop, listener.into())?);
    event_loop.block_on(async {
        let result = event_loop.readable(stopped.as_fd()).await;
        server.stop().await;
        Ok(result?)
    })
}

struct SlowDevice {
    name: Rc<str>,
    geometry: Geometry,
    delay: Duration,
    on: Loop,
    changes: SizeChanges,
}

impl SlowDevice {
    fn delayed(&self, operation: Operation, range: ByteRange) -> Io<'_> {
        Io::task(async move {
            self.on.sleep(self.delay).await;
            check_request(&self.name, &self.geometry, operation, range)
        })
    }
}

impl BlockDevice for SlowDevice {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let read = self.delayed(Operation::Read, start.range(buffer.byte_len()));
        Io::task(async move {
            read.await?;
            buffer.fill_zero();
            Ok(())
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, _: WriteFlags) -> Io<'a> {
        self.delayed(Operation::Write, start.range(buffer.byte_len()))
    }

    fn flush(&self) -> Io<'_> {
        Io::ready(Ok(()))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.delayed(Operation::Discard, range)
    }

    fn write_zeroes(&self, range: ByteRange, _: ZeroFlags) -> Io<'_> {
        self.delayed(Operation::WriteZeroes, range)
    }

    fn extents(&self, range: ByteRange, _: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(async move {
            self.delayed(Operation::Extents, range).await?;
            let kind = ExtentKind::Data;
            Ok(vec![Extent { range, kind }])
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}
