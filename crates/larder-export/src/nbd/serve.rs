//! Execution of requests on the device, and their replies.

use std::rc::Rc;
use std::task::Poll;

use larder_block::nbd::flags::{error_of, errors};
use larder_block::nbd::transmission::{Framing, RequestHeader};
use larder_block::nbd::{Command, CommandFlags, PAYLOAD_LEN_MAX, STATE_HOLE, STATE_ZERO, STATUS_DESCRIPTORS_MAX};
use larder_block::{
    ByteLen, ByteOffset, ByteRange, Extent, ExtentKind, Failure, IoError, IoResult, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};

use super::Shared;
use super::buffers::Buffer;
use super::connection::Connection;
use super::handshake::ALLOCATION_CONTEXT;
use super::limits::Permit;
use super::reply::{Reply, ReplyBuilder, error_text};
use crate::activity::RequestKind;

/// Shortest read, in bytes, that may be answered with holes; for shorter ones an extent query costs more than the
/// data.
const SPARSE_BYTES_MIN: u64 = 64 << 10;

/// Extents that a sparse read queries; the range after them is sent as data.
const SPARSE_EXTENTS_MAX: usize = 32;

/// Reads answered with data after an extent query that had to wait, because such a query may be a request to a
/// server.
const SPARSE_SKIP_READS: u32 = 16;

/// Extents in one reply to block status. The client queries the rest again.
const STATUS_EXTENTS_MAX: usize = 4096;

/// Bytes that a cache request reads at a time.
pub(super) const CACHE_STEP_BYTES: u64 = 1 << 20;

/// Bytes that a cache request reads in all; the request is only a hint, and the rest of it is ignored.
const CACHE_BYTES_MAX: u64 = PAYLOAD_LEN_MAX as u64;

/// Returns the memory that the reply to a request without a buffer may take, in bytes.
pub(super) fn reply_bytes_max(command: Command) -> usize {
    match command {
        // Each extent takes a length and a state of 8 bytes, once as queried and once as sent.
        Command::BlockStatus => 2 * 16 * STATUS_EXTENTS_MAX,
        _ => 0,
    }
}

/// Error number of a request that is refused without using the device.
pub(super) struct Refused(pub(super) u32);

/// Checks a request before any payload is read. A refusal is sent when the payload has been consumed.
pub(super) fn check(connection: &Connection, request: &RequestHeader) -> Result<Command, Refused> {
    let framing = connection.negotiated.framing;
    let command = Command::from_code(request.command).ok_or(Refused(errors::EINVAL))?;
    let none = CommandFlags::NONE;
    let known = match command {
        Command::Read if framing != Framing::Simple => CommandFlags::DF,
        Command::Write if framing == Framing::Extended => CommandFlags::PAYLOAD_LEN,
        Command::WriteZeroes => CommandFlags::NO_HOLE.with(CommandFlags::FAST_ZERO),
        Command::BlockStatus => CommandFlags::REQ_ONE,
        _ => none,
    };
    let unknown = request.flags.without(known.with(CommandFlags::FUA));
    if unknown != none {
        return Err(Refused(errors::EINVAL));
    }
    if command.is_change() && connection.shared.is_read_only() {
        return Err(Refused(errors::EPERM));
    }
    let allocation = connection.negotiated.allocation;
    if command == Command::BlockStatus && (!allocation || request.len == 0) {
        return Err(Refused(errors::EINVAL));
    }
    if command == Command::Read && request.len > u64::from(PAYLOAD_LEN_MAX) {
        return Err(Refused(errors::EOVERFLOW));
    }
    let range = ByteRange::new(request.offset, request.len);
    let size = connection.shared.device.geometry().size;
    let inside = range.checked_end().is_some_and(|end| end <= ByteOffset::new(size.get()));
    if !inside && command != Command::Flush {
        // Spec, "Error values".
        let writes = matches!(command, Command::Write | Command::WriteZeroes);
        return Err(Refused(if writes { errors::ENOSPC } else { errors::EINVAL }));
    }
    Ok(command)
}

/// Builds the reply to a refused request.
pub(super) fn refuse(connection: &Connection, request: &RequestHeader, refused: &Refused, permit: Permit) -> Reply {
    connection.shared.counters.failed();
    ReplyBuilder::new(connection.negotiated.framing, request).error(refused.0, error_text(refused.0), permit)
}

/// Result of a successful request.
enum RequestResult {
    Done,
    /// Data that was read.
    Data(Buffer),
    /// Data that was read, with its runs, some of which are zeros.
    Sparse(Vec<Run>, Buffer),
    /// Lengths and states of extents, in order.
    Status(Vec<(u64, u64)>),
}

/// Executes a request and queues the reply. `buffer` is a write's payload, or memory for a read's data.
pub(super) async fn execute(
    connection: Rc<Connection>,
    request: RequestHeader,
    command: Command,
    buffer: Option<Buffer>,
    permit: Permit,
) {
    let shared = &connection.shared;
    let in_flight = shared.activity.start_request();
    let result = execute_command(&connection, &request, command, buffer).await;
    match kind_of(command) {
        Some(kind) => in_flight.finish(kind, request.len, result.is_ok()),
        None => drop(in_flight),
    }
    connection.member.record_activity(shared.on.turn_time());
    let builder = ReplyBuilder::new(connection.negotiated.framing, &request);
    connection.outgoing.push(match result {
        Ok(RequestResult::Done) => builder.success(permit),
        Ok(RequestResult::Data(buffer)) => builder.data(buffer, permit),
        Ok(RequestResult::Sparse(runs, buffer)) => sparse_reply(builder, &runs, buffer, permit),
        Ok(RequestResult::Status(extents)) => status_reply(builder, &extents, permit),
        Err(error) => failure_reply(&connection, &request, command, &error, permit),
    });
}

/// Returns the kind as which a command is counted, if it is counted.
fn kind_of(command: Command) -> Option<RequestKind> {
    match command {
        Command::Read => Some(RequestKind::Read),
        Command::Write => Some(RequestKind::Write),
        Command::Flush => Some(RequestKind::Flush),
        Command::Trim => Some(RequestKind::Discard),
        Command::WriteZeroes => Some(RequestKind::WriteZeroes),
        Command::Cache | Command::BlockStatus | Command::Disconnect => None,
    }
}

async fn execute_command(
    connection: &Connection,
    request: &RequestHeader,
    command: Command,
    buffer: Option<Buffer>,
) -> IoResult<RequestResult> {
    match command {
        Command::Read => read(connection, request, buffer).await,
        Command::BlockStatus => block_status(connection, request).await,
        command => execute_change(connection, request, command, buffer).await.map(|()| RequestResult::Done),
    }
}

fn failure_reply(
    connection: &Connection,
    request: &RequestHeader,
    command: Command,
    error: &IoError,
    permit: Permit,
) -> Reply {
    connection.shared.counters.failed();
    // With FAST_ZERO, "not faster than data" is a regular result that the client asked for.
    let is_expected = request.flags.contains(CommandFlags::FAST_ZERO) && error.failure() == Failure::Unsupported;
    if !is_expected {
        connection.shared.activity.report(error);
    }
    let writes = matches!(command, Command::Write | Command::WriteZeroes);
    let number = error_of(error.failure(), writes);
    ReplyBuilder::new(connection.negotiated.framing, request).error(number, &error.to_string(), permit)
}

fn range_of(request: &RequestHeader) -> ByteRange {
    ByteRange::new(request.offset, request.len)
}

/// Executes a command whose reply is only success or failure.
async fn execute_change(
    connection: &Connection,
    request: &RequestHeader,
    command: Command,
    buffer: Option<Buffer>,
) -> IoResult {
    let device = &*connection.shared.device;
    let range = range_of(request);
    let fua = request.flags.contains(CommandFlags::FUA);
    match command {
        Command::Write => {
            let Some(buffer) = buffer else { return Ok(()) };
            connection.shared.counters.wrote(range.len);
            let payload = WriteBuf::new(&buffer);
            let flags = WriteFlags { fua };
            connection.shared.scheduler.write(device, range.start, payload, flags).await
        }
        Command::Flush => device.flush().await,
        _ if range.is_empty() => Ok(()),
        Command::Trim => {
            device.discard(range).await?;
            if fua { device.flush().await } else { Ok(()) }
        }
        Command::WriteZeroes => {
            let flags = ZeroFlags {
                unmap: !request.flags.contains(CommandFlags::NO_HOLE),
                fast_only: request.flags.contains(CommandFlags::FAST_ZERO),
                fua,
            };
            device.write_zeroes(range, flags).await
        }
        Command::Cache => {
            let Some(mut buffer) = buffer else { return Ok(()) };
            cache(connection, range, &mut buffer).await
        }
        Command::Read | Command::BlockStatus | Command::Disconnect => Ok(()),
    }
}

/// Reads, so that the layers below cache the data. This is only a hint: an error of the device reappears in the next
/// read.
async fn cache(connection: &Connection, range: ByteRange, buffer: &mut Buffer) -> IoResult {
    let end = range.end();
    let mut at = range.start;
    let mut left = CACHE_BYTES_MAX;
    while at < end && left > 0 {
        let step = ByteRange::between(at, end).len.min(ByteLen::new(left));
        let step = step.min(ByteLen::of_buffer(buffer.len()));
        let target = ReadBuf::new(&mut buffer[..step.as_usize()]);
        connection.shared.device.read(at, target).await?;
        at += step;
        left -= step.get();
    }
    Ok(())
}

async fn read(connection: &Connection, request: &RequestHeader, buffer: Option<Buffer>) -> IoResult<RequestResult> {
    let Some(mut buffer) = buffer else {
        return Ok(RequestResult::Done);
    };
    let range = range_of(request);
    connection.shared.counters.read(range.len);
    let may_be_sparse = connection.negotiated.framing != Framing::Simple
        && !request.flags.contains(CommandFlags::DF)
        && request.len >= SPARSE_BYTES_MIN;
    let runs = if may_be_sparse { query_runs(connection, range).await } else { Vec::new() };
    if runs.iter().all(|run| !run.zero) {
        let target = ReadBuf::new(&mut buffer);
        let shared = &connection.shared;
        shared.scheduler.read(&*shared.device, range.start, target).await?;
        return Ok(RequestResult::Data(buffer));
    }
    read_runs(connection, range, &runs, &mut buffer).await?;
    Ok(RequestResult::Sparse(runs, buffer))
}

/// Part of a read that is all data or all zeros, relative to the start of the read.
struct Run {
    start: usize,
    len: usize,
    zero: bool,
}

/// Returns the runs of a read, or none if the device would have to wait for them. A server behind the device may be
/// slower than the read, or disconnected while a cache has the data.
async fn query_runs(connection: &Connection, range: ByteRange) -> Vec<Run> {
    let shared = &connection.shared;
    if shared.has_extent_query.get() {
        return Vec::new();
    }
    if let skipped @ 1.. = shared.sparse_skipped.get() {
        shared.sparse_skipped.set(skipped - 1);
        return Vec::new();
    }
    let Some(extents) = query_extents_without_waiting(shared, range).await else {
        return Vec::new();
    };
    let mut runs: Vec<Run> = Vec::with_capacity(extents.len() + 1);
    let mut push = |len: usize, zero: bool| match runs.last_mut() {
        Some(last) if last.zero == zero => last.len += len,
        last => {
            let start = last.map_or(0, |last| last.start + last.len);
            runs.push(Run { start, len, zero });
        }
    };
    let mut known = 0;
    for extent in extents {
        let len = extent.range.len.as_usize();
        known += len;
        push(len, extent.kind != ExtentKind::Data);
    }
    let unknown = range.len.as_usize().saturating_sub(known);
    if unknown > 0 {
        push(unknown, false);
    }
    runs
}

/// Returns the extents of a range, if the device has them without waiting.
///
/// A query that has to wait continues in the background, one at a time. The kernel may be reading into its memory, so
/// dropping it would stop the whole thread until the device has answered.
async fn query_extents_without_waiting(shared: &Rc<Shared>, range: ByteRange) -> Option<Vec<Extent>> {
    let device_owner = Rc::clone(shared);
    let mut query = Box::pin(async move { device_owner.device.extents(range, SPARSE_EXTENTS_MAX).await });
    match std::future::poll_fn(|context| Poll::Ready(query.as_mut().poll(context))).await {
        Poll::Ready(extents) => extents.ok(),
        Poll::Pending => {
            shared.sparse_skipped.set(SPARSE_SKIP_READS);
            shared.has_extent_query.set(true);
            let shared_for_task = Rc::clone(shared);
            shared.on.spawn(async move {
                // The result comes too late for any read.
                let _ = query.await;
                shared_for_task.has_extent_query.set(false);
                shared_for_task.changed.raise();
            });
            None
        }
    }
}

async fn read_runs(connection: &Connection, range: ByteRange, runs: &[Run], buffer: &mut Buffer) -> IoResult {
    for run in runs.iter().filter(|run| !run.zero) {
        let at = range.start + ByteLen::of_buffer(run.start);
        let target = ReadBuf::new(&mut buffer[run.start..run.start + run.len]);
        let shared = &connection.shared;
        shared.scheduler.read(&*shared.device, at, target).await?;
    }
    Ok(())
}

fn sparse_reply(mut reply: ReplyBuilder<'_>, runs: &[Run], buffer: Buffer, permit: Permit) -> Reply {
    for (index, run) in runs.iter().enumerate() {
        let part = run.start..run.start + run.len;
        let last = index + 1 == runs.len();
        if run.zero {
            reply.hole_chunk(part, last);
        } else {
            reply.data_chunk(part, last);
        }
    }
    reply.finish(Some(buffer), permit)
}

async fn block_status(connection: &Connection, request: &RequestHeader) -> IoResult<RequestResult> {
    const { assert!(STATUS_EXTENTS_MAX <= STATUS_DESCRIPTORS_MAX as usize) };
    let one = request.flags.contains(CommandFlags::REQ_ONE);
    let limit = if one { 1 } else { STATUS_EXTENTS_MAX };
    let mut range = range_of(request);
    if connection.negotiated.framing != Framing::Extended {
        // Lengths have 32 bits there, in requests too; a merged extent cannot be longer than the request.
        range.len = range.len.min(ByteLen::new(u64::from(u32::MAX)));
    }
    let found = connection.shared.device.extents(range, limit).await?;
    let mut extents: Vec<(u64, u64)> = Vec::with_capacity(found.len());
    for extent in found.iter().take(limit) {
        let state = match extent.kind {
            ExtentKind::Data => 0,
            ExtentKind::Zero => STATE_ZERO,
            ExtentKind::Hole => STATE_HOLE | STATE_ZERO,
        };
        let len = extent.range.len.get();
        match extents.last_mut() {
            Some((last, same)) if *same == state => *last += len,
            _ => extents.push((len, state)),
        }
    }
    Ok(RequestResult::Status(extents))
}

fn status_reply(mut reply: ReplyBuilder<'_>, extents: &[(u64, u64)], permit: Permit) -> Reply {
    reply.status_chunk(ALLOCATION_CONTEXT, extents);
    reply.finish(None, permit)
}
