//! The receiving half of a connection: replies in any order, payloads straight into the callers' buffers. A server is
//! not trusted: everything that it sends must answer a request that is on the wire, within the bounds of that
//! request, or the connection is closed.

use super::Shared;
use super::connect::Export;
use super::error::ConnectionLoss;
use super::requests::{NbdRequest, RequestId};
use crate::buffer::ReadBuf;
use crate::device::{Extent, ExtentKind};
use crate::error::Failure;
use crate::nbd::flags::{errors, failure_of};
use crate::nbd::transmission::{ERROR_CHUNK_LEN_MAX, ErrorChunk, Framing, ReplyHeader, StatusLayout, chunks};
use crate::nbd::{Command, STATE_HOLE, STATE_ZERO, StreamReader};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The length in bytes of the buffer for payloads whose caller has dropped the request.
const SCRATCH_LEN: usize = 64 << 10;

pub(super) struct Receiver<'a> {
    shared: &'a Shared,
    input: StreamReader,
    export: Export,
    scratch: Vec<u8>,
}

/// The chunk of a reply that is being read.
#[derive(Clone, Copy)]
struct Chunk {
    id: RequestId,
    request: NbdRequest,
    kind: u16,
    len: u64,
}

/// Reads the header of the next reply.
pub(super) async fn read_header(input: &mut StreamReader, framing: Framing) -> Result<ReplyHeader, ConnectionLoss> {
    let start = input.peek(4).await?;
    let start = [start[0], start[1], start[2], start[3]];
    let len = ReplyHeader::len(framing, start)?;
    let header = ReplyHeader::parse(input.peek(len).await?)?;
    input.consume(len);
    Ok(header)
}

/// Reads the payload of an error chunk of `len` bytes.
pub(super) async fn read_error_chunk(input: &mut StreamReader, len: u64) -> Result<ErrorChunk, ConnectionLoss> {
    if len > ERROR_CHUNK_LEN_MAX {
        return Err(ConnectionLoss::Malformed(crate::nbd::Malformed::Length {
            what: "an error chunk",
            len,
            allowed: "4160 bytes are",
        }));
    }
    let mut payload = vec![0; len as usize];
    input.read_exact(&mut payload).await?;
    Ok(ErrorChunk::parse(&payload)?)
}

impl<'a> Receiver<'a> {
    pub(super) fn new(shared: &'a Shared, input: StreamReader, export: Export) -> Self {
        Self { shared, input, export, scratch: Vec::new() }
    }

    /// Receives replies until the connection breaks, and returns the reason.
    pub(super) async fn receive(mut self) -> ConnectionLoss {
        loop {
            if let Err(broken) = self.receive_reply().await {
                return broken;
            }
        }
    }

    async fn receive_reply(&mut self) -> Result<(), ConnectionLoss> {
        let header = read_header(&mut self.input, self.export.framing).await?;
        self.shared.touch();
        match header {
            ReplyHeader::Simple { error, cookie } => self.receive_simple_reply(error, cookie).await,
            ReplyHeader::Chunk { done, kind, cookie, offset, len } => {
                let (id, request) = self.request_on_wire(cookie)?;
                let chunk = Chunk { id, request, kind, len };
                if offset.is_some_and(|offset| offset != request.range.start.get()) {
                    return Err(unexpected_reply(&request, "chunk with another offset than the request's"));
                }
                self.receive_chunk(chunk).await?;
                if done { self.complete_reply(chunk) } else { Ok(()) }
            }
        }
    }

    fn request_on_wire(&self, cookie: u64) -> Result<(RequestId, NbdRequest), ConnectionLoss> {
        self.shared.requests.borrow().on_wire_request(cookie).ok_or(ConnectionLoss::UnknownCookie(cookie))
    }

    async fn receive_simple_reply(&mut self, error: u32, cookie: u64) -> Result<(), ConnectionLoss> {
        let (id, request) = self.request_on_wire(cookie)?;
        let payload = match request.command {
            Command::Read if self.export.framing != Framing::Simple => {
                return Err(unexpected_reply(&request, "simple reply"));
            }
            Command::BlockStatus if error == 0 => return Err(unexpected_reply(&request, "simple reply")),
            Command::Read if error == 0 => request.range.len.as_usize(),
            _ => 0,
        };
        if error == errors::ESHUTDOWN {
            return Err(ConnectionLoss::ShuttingDown);
        }
        self.receive_payload(id, 0, payload).await?;
        let result = if error == 0 { Ok(()) } else { Err(failure_of(error)) };
        self.finish(id, result);
        Ok(())
    }

    async fn receive_chunk(&mut self, chunk: Chunk) -> Result<(), ConnectionLoss> {
        match (chunk.kind, chunk.request.command) {
            (chunks::NONE, _) if chunk.len == 0 => Ok(()),
            (chunks::OFFSET_DATA, Command::Read) if chunk.len > 8 => self.receive_data(chunk).await,
            (chunks::OFFSET_HOLE, Command::Read) if chunk.len == 12 => self.receive_hole(chunk).await,
            (chunks::BLOCK_STATUS, Command::BlockStatus) if self.export.framing == Framing::Structured => {
                self.receive_block_status(chunk).await
            }
            (chunks::BLOCK_STATUS_EXT, Command::BlockStatus) if self.export.framing == Framing::Extended => {
                self.receive_block_status(chunk).await
            }
            (kind, _) if kind & chunks::ERROR_BIT != 0 => self.receive_error(chunk).await,
            (kind, _) => {
                let got = format!("chunk of type {kind} with {} bytes", chunk.len);
                Err(unexpected_reply(&chunk.request, got))
            }
        }
    }

    async fn receive_data(&mut self, chunk: Chunk) -> Result<(), ConnectionLoss> {
        let offset = u64::from_be_bytes(self.input.take().await?);
        let from = self.check_content_chunk(chunk, offset, chunk.len - 8, "data chunk")?;
        self.receive_payload(chunk.id, from, (chunk.len - 8) as usize).await
    }

    async fn receive_hole(&mut self, chunk: Chunk) -> Result<(), ConnectionLoss> {
        let offset = u64::from_be_bytes(self.input.take().await?);
        let len = u64::from(u32::from_be_bytes(self.input.take().await?));
        let from = self.check_content_chunk(chunk, offset, len, "hole chunk")?;
        let requests = self.shared.requests.borrow();
        if let Some(target) = requests.read_target(chunk.id, from, len as usize) {
            target.fill_zero();
        }
        Ok(())
    }

    /// Checks that a content chunk lies in the request and that the chunks do not exceed its length. Returns the
    /// chunk's offset in the buffer.
    fn check_content_chunk(
        &self,
        chunk: Chunk,
        offset: u64,
        len: u64,
        what: &'static str,
    ) -> Result<usize, ConnectionLoss> {
        let range = chunk.request.range;
        let part = ByteRange::new(offset, len);
        if len == 0 || part.checked_end().is_none() || !range.contains(part) {
            let got = format!("{what} of {len} bytes at {offset:#x}");
            return Err(unexpected_reply(&chunk.request, got));
        }
        let received = self.shared.requests.borrow_mut().received(chunk.id, len);
        if received > range.len.get() {
            let got = format!("{what} that brings the total to {received} bytes");
            return Err(unexpected_reply(&chunk.request, got));
        }
        Ok((part.start - range.start).as_usize())
    }

    /// Receives `len` bytes into the request's buffer, from the offset `from` on.
    async fn receive_payload(&mut self, id: RequestId, from: usize, len: usize) -> Result<(), ConnectionLoss> {
        let mut done = 0;
        while done < len {
            let moved = {
                let requests = self.shared.requests.borrow();
                match requests.read_target(id, from + done, len - done) {
                    Some(target) => self.input.try_payload(target)?,
                    None => {
                        self.scratch.resize(SCRATCH_LEN, 0);
                        let part = (len - done).min(SCRATCH_LEN);
                        let scratch = ReadBuf::new(&mut self.scratch[..part]);
                        self.input.try_payload(scratch)?
                    }
                }
            };
            done += moved;
            if moved == 0 {
                self.input.readable().await?;
            } else {
                self.shared.touch();
            }
        }
        Ok(())
    }

    async fn receive_block_status(&mut self, chunk: Chunk) -> Result<(), ConnectionLoss> {
        let layout = StatusLayout::from_chunk(chunk.kind, chunk.len)?;
        let context = layout.parse_head(self.input.peek(layout.head_len).await?)?;
        self.input.consume(layout.head_len);
        if Some(context) != self.export.allocation {
            let got = format!("block status of context {context}");
            return Err(unexpected_reply(&chunk.request, got));
        }
        if self.shared.requests.borrow().has_extents(chunk.id) {
            return Err(unexpected_reply(&chunk.request, "second block status"));
        }
        let mut at = chunk.request.range.start;
        for _ in 0..layout.count {
            let descriptor = self.input.peek(layout.descriptor_len).await?;
            let (len, status) = layout.parse_descriptor(descriptor)?;
            self.input.consume(layout.descriptor_len);
            // The last extent may go beyond the request; further extents are ignored.
            let end =
                at.checked_add(ByteLen::new(len)).unwrap_or(ByteOffset::new(u64::MAX)).min(chunk.request.range.end());
            if end > at {
                let extent = Extent { range: ByteRange::between(at, end), kind: kind_of(status) };
                let mut requests = self.shared.requests.borrow_mut();
                requests.push_extent(chunk.id, extent);
            }
            at = end;
        }
        Ok(())
    }

    async fn receive_error(&mut self, chunk: Chunk) -> Result<(), ConnectionLoss> {
        let error = read_error_chunk(&mut self.input, chunk.len).await?;
        if error.error == errors::ESHUTDOWN {
            return Err(ConnectionLoss::ShuttingDown);
        }
        tracing::debug!(
            export = %self.shared.name, command = ?chunk.request.command, range = %chunk.request.range,
            error = error.error, text = error.text, "the server failed a request"
        );
        let mut requests = self.shared.requests.borrow_mut();
        requests.record_failure(chunk.id, failure_of(error.error));
        Ok(())
    }

    /// Completes a request after the last chunk of its reply.
    fn complete_reply(&self, chunk: Chunk) -> Result<(), ConnectionLoss> {
        let (failure, received, extents) = {
            let requests = self.shared.requests.borrow();
            (requests.failure_so_far(chunk.id), requests.received_so_far(chunk.id), requests.has_extents(chunk.id))
        };
        let range = chunk.request.range;
        let result = match (failure, chunk.request.command) {
            (Some(failure), _) => Err(failure),
            (None, Command::Read) if received != range.len.get() => {
                return Err(ConnectionLoss::ShortRead { offset: range.start.get(), len: range.len.get(), received });
            }
            (None, Command::BlockStatus) if !extents => {
                return Err(unexpected_reply(&chunk.request, "success without an extent"));
            }
            (None, _) => Ok(()),
        };
        self.finish(chunk.id, result);
        Ok(())
    }

    fn finish(&self, id: RequestId, result: Result<(), Failure>) {
        let mut requests = self.shared.requests.borrow_mut();
        requests.finish(id, result, &mut self.shared.log.borrow_mut());
        let waiting = requests.is_waiting();
        drop(requests);
        if waiting {
            // There is room on the wire, and perhaps in the log.
            self.shared.changed.raise();
        }
    }
}

/// Returns the meaning of a status of `base:allocation`. A hole that need not read as zeros is treated as data.
fn kind_of(status: u64) -> ExtentKind {
    match (status & STATE_ZERO != 0, status & STATE_HOLE != 0) {
        (true, true) => ExtentKind::Hole,
        (true, false) => ExtentKind::Zero,
        (false, _) => ExtentKind::Data,
    }
}

fn unexpected_reply(request: &NbdRequest, got: impl Into<String>) -> ConnectionLoss {
    ConnectionLoss::UnexpectedReply {
        got: got.into(),
        command: match request.command {
            Command::Read => "read",
            Command::Write => "write",
            Command::Disconnect => "disconnect",
            Command::Flush => "flush",
            Command::Trim => "trim",
            Command::Cache => "cache",
            Command::WriteZeroes => "write zeroes",
            Command::BlockStatus => "block status",
        },
        offset: request.range.start.get(),
        len: request.range.len.get(),
    }
}
