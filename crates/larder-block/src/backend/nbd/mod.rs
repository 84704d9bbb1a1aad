//! A disk on an NBD server.
//!
//! Many requests are in flight at once on one connection. Requests that exceed the server's limits are split;
//! features that the server lacks are emulated. When the connection breaks, or the server stalls or breaks the
//! protocol, the device reconnects and repeats the unanswered requests. Users of the device see a delay only, up to a
//! limit.
//!
//! Invariants:
//! - Acknowledged, unflushed changes are in the replay log (where the server supports flushes), and reach a new
//!   connection before anything else does.
//! - A connection is only ever made to an export that has all features of the first one.
//! - Memory is bounded by the callers' requests, the log's capacity, and fixed buffers, whatever a server sends.
//!
//! How it fails: an error that the server reports is returned to the request that met it. When a server is
//! unreachable for longer than [`NbdOptions::reconnect`], requests fail with [`Failure::Unreachable`], and the device
//! keeps trying to reconnect. The time ends with an answered request, not with a handshake.
//!
//! One fault cannot be ruled out by any client: a server that survives a broken connection may still carry out a
//! request of the old connection after its repetition on the new one, and after later writes.

mod connect;
mod error;
mod log;
mod receive;
mod requests;
mod run;
mod transmit;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use self::connect::Export;
use self::log::ReplayLog;
use self::requests::{NbdRequest, PayloadBuffer, RequestId, Requests};
use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{
    BlockDevice, BoxFuture, Extent, ExtentKind, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags, check_request,
};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::event_loop::{Loop, LoopTime, SocketAddress};
use crate::nbd::transmission::Framing;
use crate::nbd::{Command, CommandFlags, NbdUri, TransmissionFlags};
use crate::signal::Signal;
use crate::tls::{ClientTls, TlsError};
use crate::units::{ByteLen, ByteOffset, ByteRange};

pub use self::error::{ConnectError, ConnectStep, ConnectionLoss, ExportChange, NbdOpenError, OptionRefusal};

/// The smallest sector size that guests use, in bytes.
const SECTOR: u32 = 512;

/// The maximum length of a request without a payload, in bytes: well within 32 bits, and quick enough for most
/// servers.
const NO_PAYLOAD_LEN_MAX: u64 = 1 << 30;

/// Zeros for servers that cannot write zeroes by themselves.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// The minimum size of the replay log, in bytes: a few requests of every block size must fit.
const REPLAY_LOG_MIN: ByteLen = ByteLen::mib(1);

/// Options for the use of an export.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// Refuse changes, even if the server allows them.
    pub read_only: bool,
    /// The maximum number of requests on the wire; further requests wait.
    pub depth: usize,
    /// The time that requests wait after a broken connection, through any number of new connections on which the
    /// server answers no request, before they fail.
    pub reconnect: Duration,
    /// The time without any transferred byte after which a connection with requests on the wire counts as broken.
    pub request_timeout: Duration,
    /// The maximum time for connecting and the handshake.
    pub handshake_timeout: Duration,
    /// The capacity for changes that the server has acknowledged and not flushed, which are repeated if the server
    /// dies. Raised to 1 MiB if it is less. Zero disables the log: then a server's death can lose writes that a later
    /// flush reports as durable.
    pub replay_log: ByteLen,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            depth: 64,
            reconnect: Duration::from_secs(60),
            request_timeout: Duration::from_secs(30),
            handshake_timeout: Duration::from_secs(10),
            replay_log: ByteLen::mib(16),
        }
    }
}

/// Counters of a device, for status output and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdStatistics {
    /// Connections that became ready for requests, the first one included.
    pub connections: u64,
    /// Changes that were replayed from the log.
    pub replayed: u64,
    /// Requests that have been answered.
    pub answered: u64,
    /// Requests that have not been answered.
    pub unanswered: usize,
    /// The used capacity of the log, in bytes.
    pub log_used: ByteLen,
    /// Requests fail because the server is unreachable.
    pub unreachable: bool,
    /// The connection uses extended headers.
    pub extended_headers: bool,
}

/// An export of an NBD server as a disk.
pub struct NbdDevice {
    shared: Rc<Shared>,
}

/// The state that the device shares with the task that maintains its connection.
struct Shared {
    on: Loop,
    name: Rc<str>,
    uri: NbdUri,
    options: NbdOptions,
    export: Cell<Export>,
    geometry: Cell<Geometry>,
    requests: RefCell<Requests>,
    log: RefCell<ReplayLog>,
    /// Raised when there is something to send, or the device is closing.
    changed: Signal,
    is_closing: Cell<bool>,
    is_unreachable: Cell<bool>,
    last_activity: Cell<LoopTime>,
    connections: Cell<u64>,
    replayed: Cell<u64>,
    changes: SizeChanges,
    /// The certificates that were last read.
    tls: RefCell<Option<ClientTls>>,
}

impl NbdDevice {
    /// Connects to the export and keeps it connected.
    ///
    /// # Errors
    /// See [`NbdOpenError`]. The first connection is not retried, so that the start of a disk fails at once.
    pub async fn open(on: &Loop, uri: &NbdUri, options: NbdOptions) -> Result<Rc<Self>, NbdOpenError> {
        let failed = |source| NbdOpenError::Connect { uri: uri.to_string(), source };
        let tls = load_tls(uri).map_err(|error| failed(error.into()))?;
        let connection =
            connect::connect_with_warning(on, uri, tls.as_ref(), options.handshake_timeout).await.map_err(failed)?;
        let export = connection.export;
        let geometry = geometry_of(&export, options.read_only);
        tracing::debug!(event = "upstream-connected", %uri, ?export, ?geometry, "connected");
        warn_odd_size(uri, export.size, &geometry);
        let log_capacity = if export.has(TransmissionFlags::FLUSH) && !options.replay_log.is_zero() {
            options.replay_log.max(REPLAY_LOG_MIN).get()
        } else {
            0
        };
        let shared = Rc::new(Shared {
            on: on.clone(),
            name: uri.to_string().into(),
            uri: uri.clone(),
            export: Cell::new(export),
            geometry: Cell::new(geometry),
            requests: RefCell::new(Requests::new(options.depth.max(1))),
            log: RefCell::new(ReplayLog::new(log_capacity)),
            options,
            changed: Signal::default(),
            is_closing: Cell::new(false),
            is_unreachable: Cell::new(false),
            last_activity: Cell::new(on.now()),
            connections: Cell::new(1),
            replayed: Cell::new(0),
            changes: SizeChanges::default(),
            tls: RefCell::new(tls),
        });
        on.spawn(run::maintain_connection(Rc::clone(&shared), connection));
        Ok(Rc::new(Self { shared }))
    }

    /// Returns the device's counters.
    pub fn statistics(&self) -> NbdStatistics {
        let shared = &self.shared;
        NbdStatistics {
            connections: shared.connections.get(),
            replayed: shared.replayed.get(),
            answered: shared.requests.borrow().answered(),
            unanswered: shared.requests.borrow().unanswered(),
            log_used: ByteLen::new(shared.log.borrow().used()),
            unreachable: shared.is_unreachable.get(),
            extended_headers: shared.export.get().framing == Framing::Extended,
        }
    }
}

impl Drop for NbdDevice {
    fn drop(&mut self) {
        self.shared.is_closing.set(true);
        self.shared.changed.raise();
    }
}

fn load_tls(uri: &NbdUri) -> Result<Option<ClientTls>, TlsError> {
    let Some(tls) = &uri.tls else {
        return Ok(None);
    };
    let host = match (&tls.hostname, &uri.address) {
        (Some(name), _) => name,
        (None, SocketAddress::Tcp { host, .. }) => host,
        // As in libnbd: the server of a unix socket is on this host.
        (None, SocketAddress::Unix(_)) => "localhost",
    };
    ClientTls::load(tls.certificates.as_deref(), host).map(Some)
}

/// Returns the size of the disk in whole blocks. Like a file's, the last sector of an odd export is padded with
/// zeros.
fn visible_size(size: u64, block_size: u32) -> ByteLen {
    let unit = u64::from(block_size);
    if block_size == SECTOR { ByteLen::new(size.next_multiple_of(unit)) } else { ByteLen::new(size - size % unit) }
}

fn warn_odd_size(uri: &NbdUri, size: u64, geometry: &Geometry) {
    let (visible, unit) = (geometry.size.get(), geometry.block_size);
    if visible > size {
        tracing::warn!(
            "{uri}: its size ({size} bytes) is not a multiple of {SECTOR}: the disk appears {} bytes larger; they read as zeros, and \
             writes of other data there fail",
            visible - size
        );
    } else if visible < size {
        tracing::warn!(
            "{uri}: the last {} bytes are not accessible: the server requires whole blocks of {unit} bytes",
            size - visible
        );
    }
}

fn geometry_of(export: &Export, read_only: bool) -> Geometry {
    let block_size = export.sizes.minimum.max(SECTOR);
    let preferred = export.sizes.preferred.clamp(block_size, 1 << 20);
    let can_trim = export.has(TransmissionFlags::TRIM);
    Geometry {
        size: visible_size(export.size, block_size),
        block_size,
        physical_block_size: preferred.min(65536),
        discard_granularity: if can_trim { preferred } else { 0 },
        memory_alignment: 1,
        read_only: read_only || export.has(TransmissionFlags::READ_ONLY),
        fast_zeroes: export.has(TransmissionFlags::WRITE_ZEROES),
    }
}

impl Shared {
    /// Loads the present certificates. If they cannot be read any more, the previous ones stay in use.
    fn load_tls(&self) -> Result<Option<ClientTls>, TlsError> {
        match load_tls(&self.uri) {
            Ok(tls) => *self.tls.borrow_mut() = tls,
            Err(error) => {
                if self.tls.borrow().is_none() {
                    return Err(error);
                }
                tracing::warn!(export = %self.name, "continuing with the previous certificates: {error}");
            }
        }
        Ok(self.tls.borrow().clone())
    }

    fn has(&self, flag: TransmissionFlags) -> bool {
        self.export.get().has(flag)
    }

    fn check(&self, operation: Operation, range: ByteRange) -> Result<(), IoError> {
        check_request(&self.name, &self.geometry.get(), operation, range)
    }

    fn error(&self, operation: Operation, range: ByteRange, failure: Failure) -> IoError {
        IoError::new(&self.name, operation, range, failure)
    }

    /// Returns the part of `range` that the export contains: all but the padding of the last sector of an odd one.
    fn within_export(&self, range: ByteRange) -> ByteRange {
        let end = ByteOffset::new(self.export.get().size).min(range.end());
        ByteRange::between(range.start, end)
    }

    /// Returns true if a request with a payload can be sent without being split.
    fn is_single(&self, range: ByteRange, len_max: u64) -> bool {
        range.len.get() <= len_max && range.end().get() <= self.export.get().size
    }

    /// Returns the maximum length of a read or write, in bytes: whole blocks.
    fn payload_len_max(&self, operation: Operation) -> u64 {
        let server = u64::from(self.export.get().sizes.payload_max);
        let len = match operation {
            Operation::Write => match self.log.borrow().write_len_max() {
                Some(log) => log.min(server),
                None => server,
            },
            _ => server,
        };
        let block = u64::from(self.geometry.get().block_size);
        (len - len % block).max(block)
    }

    fn submit<'a>(
        &'a self,
        operation: Operation,
        request: NbdRequest,
        memory: PayloadBuffer,
        extents_limit: usize,
    ) -> PendingReply<'a> {
        let mut requests = self.requests.borrow_mut();
        let id = if self.is_unreachable.get() {
            requests.submit_failed(request, Failure::Unreachable)
        } else {
            requests.submit(request, memory, extents_limit)
        };
        drop(requests);
        self.changed.raise();
        PendingReply { shared: self, id, operation, range: request.range, buffer: PhantomData }
    }

    fn submit_read<'a>(&'a self, range: ByteRange, buffer: ReadBuf<'a>) -> PendingReply<'a> {
        // SAFETY: only the lifetime changes. The slot drops the buffer when the request is answered, or when
        // `PendingReply`, which has the true lifetime, is dropped.
        let buffer = unsafe { std::mem::transmute::<ReadBuf<'a>, ReadBuf<'static>>(buffer) };
        let request = NbdRequest { command: Command::Read, flags: CommandFlags::NONE, range };
        self.submit(Operation::Read, request, PayloadBuffer::ReadInto(buffer), 0)
    }

    fn submit_write<'a>(
        &'a self,
        operation: Operation,
        range: ByteRange,
        buffer: WriteBuf<'a>,
        flags: CommandFlags,
    ) -> PendingReply<'a> {
        // SAFETY: as in `submit_read`.
        let buffer = unsafe { std::mem::transmute::<WriteBuf<'a>, WriteBuf<'static>>(buffer) };
        let request = NbdRequest { command: Command::Write, flags, range };
        self.submit(operation, request, PayloadBuffer::WriteFrom(buffer), 0)
    }

    fn submit_plain(
        &self,
        operation: Operation,
        command: Command,
        flags: CommandFlags,
        range: ByteRange,
    ) -> PendingReply<'_> {
        let request = NbdRequest { command, flags, range };
        self.submit(operation, request, PayloadBuffer::None, 0)
    }

    /// Reads a range that must be split or ends beyond the export's exact end.
    async fn read_in_parts(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let within_export = self.within_export(range);
        let len_max = self.payload_len_max(Operation::Read);
        let mut done = 0;
        for part in parts(within_export, len_max) {
            let target = buffer.slice(done, part.len.as_usize());
            self.submit_read(part, target).await?;
            done += part.len.as_usize();
        }
        buffer.skip(done).fill_zero();
        Ok(())
    }

    /// Refuses a write of anything but zeros beyond the end of an export of an odd size, which has no space for the
    /// padding of its last sector.
    fn check_padding(&self, range: ByteRange, buffer: WriteBuf<'_>) -> IoResult {
        let mut padding = [0; SECTOR as usize];
        let beyond = buffer.skip(self.within_export(range).len.as_usize());
        beyond.copy_to_slice(&mut padding[..beyond.len()]);
        match padding == [0; SECTOR as usize] {
            true => Ok(()),
            false => Err(self.error(Operation::Write, range, Failure::NoSpace)),
        }
    }

    async fn write_in_parts(&self, range: ByteRange, buffer: WriteBuf<'_>, fua: Fua) -> IoResult {
        self.check_padding(range, buffer)?;
        let within_export = self.within_export(range);
        let mut done = 0;
        for part in parts(within_export, self.payload_len_max(Operation::Write)) {
            let source = buffer.slice(done, part.len.as_usize());
            self.submit_write(Operation::Write, part, source, fua.flag()).await?;
            done += part.len.as_usize();
        }
        self.make_durable(Operation::Write, range, fua).await
    }

    /// Discards or zeroes a range in parts.
    async fn change_in_parts(
        &self,
        operation: Operation,
        command: Command,
        range: ByteRange,
        flags: CommandFlags,
    ) -> IoResult {
        for part in parts(self.within_export(range), NO_PAYLOAD_LEN_MAX) {
            self.submit_plain(operation, command, flags, part).await?;
        }
        Ok(())
    }

    async fn zero_in_parts(&self, range: ByteRange, flags: ZeroFlags) -> IoResult {
        let operation = Operation::WriteZeroes;
        let fua = self.fua(flags.fua);
        let unsupported = || Err(self.error(operation, range, Failure::Unsupported));
        let mut done = unsupported();
        if self.has(TransmissionFlags::WRITE_ZEROES) {
            if flags.fast_only && !self.has(TransmissionFlags::FAST_ZERO) {
                return unsupported();
            }
            let command_flags = fua
                .flag()
                .with_if(!flags.unmap, CommandFlags::NO_HOLE)
                .with_if(flags.fast_only, CommandFlags::FAST_ZERO);
            done = self.change_in_parts(operation, Command::WriteZeroes, range, command_flags).await;
        }
        match done {
            Err(error) if error.failure() == Failure::Unsupported && !flags.fast_only => {
                let len_max = self.payload_len_max(Operation::Write).min(ZEROS.len() as u64);
                for part in parts(self.within_export(range), len_max) {
                    let zeros = WriteBuf::new(&ZEROS[..part.len.as_usize()]);
                    self.submit_write(operation, part, zeros, fua.flag()).await?;
                }
            }
            done => done?,
        }
        self.make_durable(operation, range, fua).await
    }

    fn fua(&self, requested: bool) -> Fua {
        match (requested, self.has(TransmissionFlags::FUA)) {
            (false, _) => Fua::No,
            (true, true) => Fua::Flag,
            (true, false) if self.has(TransmissionFlags::FLUSH) => Fua::Flush,
            // A server without flushes has nothing to make durable.
            (true, false) => Fua::No,
        }
    }

    async fn make_durable(&self, operation: Operation, range: ByteRange, fua: Fua) -> IoResult {
        if fua == Fua::Flush {
            self.flush().await.map_err(|error| self.error(operation, range, error.failure()))?;
        }
        Ok(())
    }

    fn flush(&self) -> PendingReply<'_> {
        let nothing = ByteRange::default();
        self.submit_plain(Operation::Flush, Command::Flush, CommandFlags::NONE, nothing)
    }

    async fn extents(&self, range: ByteRange, limit: usize) -> IoResult<Vec<Extent>> {
        self.check(Operation::Extents, range)?;
        let within_export = self.within_export(range);
        let all_data = Extent { range, kind: ExtentKind::Data };
        if self.export.get().allocation.is_none() || within_export.is_empty() {
            return Ok(vec![all_data]);
        }
        let Some(part) = parts(within_export, NO_PAYLOAD_LEN_MAX).next() else {
            return Ok(vec![all_data]);
        };
        let limit = limit.max(1);
        let request = NbdRequest {
            command: Command::BlockStatus,
            flags: CommandFlags::NONE.with_if(limit == 1, CommandFlags::REQ_ONE),
            range: part,
        };
        let found = self.submit(Operation::Extents, request, PayloadBuffer::None, limit).extents().await?;
        let unit = u64::from(self.geometry.get().block_size);
        Ok(align_extents(range, &found, unit))
    }
}

/// The way in which a durable change is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fua {
    No,
    Flag,
    Flush,
}

impl Fua {
    fn flag(self) -> CommandFlags {
        CommandFlags::NONE.with_if(self == Self::Flag, CommandFlags::FUA)
    }
}

/// Splits `range` into parts of at most `len_max` bytes. They end at multiples of `len_max`, so that a server can
/// discard the blocks on both sides of such a boundary.
fn parts(range: ByteRange, len_max: u64) -> impl Iterator<Item = ByteRange> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let remaining = ByteRange::between(at, range.end());
        if remaining.is_empty() {
            return None;
        }
        let part = at.range(remaining.len.min(ByteLen::new(len_max - at.get() % len_max)));
        at = part.end();
        Some(part)
    })
}

/// Aligns the boundaries of extents to whole blocks: a block that contains data is data. The rest of the range after
/// the export's exact end, less than a block, belongs to the last extent.
fn align_extents(range: ByteRange, found: &[Extent], unit: u64) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::with_capacity(found.len());
    let mut push = |at: &mut ByteOffset, end: ByteOffset, kind| {
        let range = ByteRange::between(*at, end);
        match extents.last_mut() {
            Some(last) if last.kind == kind => last.range.len += range.len,
            _ => extents.push(Extent { range, kind }),
        }
        *at = end;
    };
    let mut at = range.start;
    for extent in found {
        let end = extent.range.end();
        let reaches_end = range.end() - end < ByteLen::new(unit);
        let aligned_end = match extent.kind {
            _ if reaches_end => range.end(),
            ExtentKind::Data => end.align_up(unit).min(range.end()),
            ExtentKind::Zero | ExtentKind::Hole => end.align_down(unit),
        };
        if aligned_end > at {
            push(&mut at, aligned_end, extent.kind);
        }
    }
    if at == range.start {
        // The extents cover only parts of the first block.
        let end = (at + ByteLen::new(unit)).min(range.end());
        push(&mut at, end, ExtentKind::Data);
    }
    extents
}

impl BlockDevice for NbdDevice {
    fn name(&self) -> &Rc<str> {
        &self.shared.name
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry.get()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        let shared = &*self.shared;
        match shared.check(Operation::Read, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) if range.is_empty() => Io::ready(Ok(())),
            Ok(()) if shared.is_single(range, shared.payload_len_max(Operation::Read)) => {
                Io::nbd(shared.submit_read(range, buffer))
            }
            Ok(()) => Io::task(shared.read_in_parts(range, buffer)),
        }
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        let shared = &*self.shared;
        if let Err(error) = shared.check(Operation::Write, range) {
            return Io::ready(Err(error));
        }
        if range.is_empty() {
            return Io::ready(Ok(()));
        }
        let fua = shared.fua(flags.fua);
        let len_max = shared.payload_len_max(Operation::Write);
        if shared.is_single(range, len_max) && fua != Fua::Flush {
            return Io::nbd(shared.submit_write(Operation::Write, range, buffer, fua.flag()));
        }
        Io::task(shared.write_in_parts(range, buffer, fua))
    }

    fn may_reject_content(&self, range: ByteRange) -> bool {
        range.checked_end().is_some_and(|end| end.get() > self.shared.export.get().size)
    }

    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        let range = start.range(buffer.byte_len());
        self.shared.check(Operation::Write, range)?;
        self.shared.check_padding(range, buffer)
    }

    fn flush(&self) -> Io<'_> {
        if self.shared.has(TransmissionFlags::FLUSH) {
            Io::nbd(self.shared.flush())
        } else {
            // A server without flushes has nothing to flush.
            Io::ready(Ok(()))
        }
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        let shared = &*self.shared;
        let operation = Operation::Discard;
        match shared.check(operation, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) if shared.has(TransmissionFlags::TRIM) => {
                let none = CommandFlags::NONE;
                Io::task(shared.change_in_parts(operation, Command::Trim, range, none))
            }
            Ok(()) => Io::ready(Ok(())),
        }
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        match self.shared.check(Operation::WriteZeroes, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.shared.zero_in_parts(range, flags)),
        }
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(self.shared.extents(range, limit))
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.shared.changes
    }
}

/// A request that the server has not answered yet, or whose answer the caller has not taken.
pub(crate) struct PendingReply<'a> {
    shared: &'a Shared,
    id: RequestId,
    operation: Operation,
    range: ByteRange,
    buffer: PhantomData<&'a mut [u8]>,
}

impl PendingReply<'_> {
    fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<IoResult<Vec<Extent>>> {
        let mut requests = self.shared.requests.borrow_mut();
        match requests.poll(self.id, context.waker()) {
            None => Poll::Pending,
            Some(Ok(extents)) => Poll::Ready(Ok(extents)),
            Some(Err(failure)) => Poll::Ready(Err(self.shared.error(self.operation, self.range, failure))),
        }
    }

    async fn extents(mut self) -> IoResult<Vec<Extent>> {
        std::future::poll_fn(|context| self.poll_answer(context)).await
    }
}

impl Future for PendingReply<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        self.poll_answer(context).map_ok(|_| ())
    }
}

impl Drop for PendingReply<'_> {
    fn drop(&mut self) {
        let mut requests = self.shared.requests.borrow_mut();
        requests.abandon(self.id, &self.shared.log.borrow());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, len: u64, kind: ExtentKind) -> Extent {
        Extent { range: ByteRange::new(start, len), kind }
    }

    #[test]
    fn partial_data_block_is_data_extent() {
        let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
        let found = [extent(0, 700, data), extent(700, 2000, hole), extent(2700, 100, data), extent(2800, 1296, hole)];
        let aligned = align_extents(ByteRange::new(0, 4096), &found, 512);
        assert_eq!(
            aligned,
            [extent(0, 1024, data), extent(1024, 1536, hole), extent(2560, 512, data), extent(3072, 1024, hole),]
        );
        let found = [extent(512, 100, hole), extent(612, 100, data)];
        let aligned = align_extents(ByteRange::new(512, 4096), &found, 512);
        assert_eq!(aligned, [extent(512, 512, data)]);
        let found = [extent(512, 100, hole)];
        let aligned = align_extents(ByteRange::new(512, 512), &found, 512);
        assert_eq!(aligned, [extent(512, 512, hole)], "the export ends there");
    }
}
