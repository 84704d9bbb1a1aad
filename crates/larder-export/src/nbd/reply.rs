//! Outgoing replies: built when a request has ended, sent in batches.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use larder_block::nbd::flags::errors;
use larder_block::nbd::transmission::{
    Framing, RequestHeader, chunks, push_chunk_header, push_error_chunk, push_simple_reply,
};
use larder_block::signal::Signal;
use larder_block::tls::MaybeTlsStream;
use larder_block::{IoVec, WriteBuf};
use smallvec::SmallVec;

use super::buffers::Buffer;
use super::limits::{Limits, Permit};

/// Replies that one system call sends at most.
const BATCH_MAX: usize = 16;

/// Reply to a request: headers, and parts of its buffer between them.
pub(super) struct Reply {
    head: SmallVec<[u8; 64]>,
    parts: SmallVec<[ReplyPart; 3]>,
    buffer: Option<Buffer>,
    /// Released when the reply has been sent.
    _permit: Permit,
}

enum ReplyPart {
    /// Range of `head`.
    Head(Range<usize>),
    /// Range of `buffer`.
    Data(Range<usize>),
}

/// Builder of the reply to one request, chunk by chunk.
pub(super) struct ReplyBuilder<'a> {
    framing: Framing,
    request: &'a RequestHeader,
    head: SmallVec<[u8; 64]>,
    parts: SmallVec<[ReplyPart; 3]>,
}

impl<'a> ReplyBuilder<'a> {
    pub(super) fn new(framing: Framing, request: &'a RequestHeader) -> Self {
        Self { framing, request, head: SmallVec::new(), parts: SmallVec::new() }
    }

    /// Builds a reply that reports a failure.
    pub(super) fn error(mut self, error: u32, text: &str, permit: Permit) -> Reply {
        match self.framing {
            Framing::Simple => push_simple_reply(&mut self.head, error, self.request.cookie),
            framing => push_error_chunk(&mut self.head, framing, self.request, error, text),
        }
        self.finish(None, permit)
    }

    /// Builds a reply that reports success.
    pub(super) fn success(mut self, permit: Permit) -> Reply {
        match self.framing {
            // Spec, "Simple reply message": a simple reply is allowed, and shorter, wherever there is no payload,
            // except for reads.
            Framing::Structured if self.request.command == 0 => {
                self.chunk(chunks::NONE, true, 0);
            }
            Framing::Simple | Framing::Structured => {
                push_simple_reply(&mut self.head, 0, self.request.cookie);
            }
            Framing::Extended => self.chunk(chunks::NONE, true, 0),
        }
        self.finish(None, permit)
    }

    /// Builds a reply with all data of a read.
    pub(super) fn data(mut self, buffer: Buffer, permit: Permit) -> Reply {
        let len = buffer.len();
        if self.framing == Framing::Simple {
            push_simple_reply(&mut self.head, 0, self.request.cookie);
            let head = self.head.len();
            self.parts.push(ReplyPart::Head(0..head));
            self.parts.push(ReplyPart::Data(0..len));
        } else {
            self.data_chunk(0..len, true);
        }
        self.finish(Some(buffer), permit)
    }

    /// Adds a chunk with data of a read: a part of the buffer that is sent with the reply.
    pub(super) fn data_chunk(&mut self, part: Range<usize>, last: bool) {
        let start = self.head.len();
        self.chunk(chunks::OFFSET_DATA, last, 8 + part.len() as u64);
        let offset = self.request.offset + part.start as u64;
        self.head.extend(offset.to_be_bytes());
        self.parts.push(ReplyPart::Head(start..self.head.len()));
        self.parts.push(ReplyPart::Data(part));
    }

    /// Adds a chunk for a part of a read that is all zeros. It is at most the longest payload, so 32 bits hold its
    /// length.
    pub(super) fn hole_chunk(&mut self, part: Range<usize>, last: bool) {
        let start = self.head.len();
        self.chunk(chunks::OFFSET_HOLE, last, 12);
        let offset = self.request.offset + part.start as u64;
        self.head.extend(offset.to_be_bytes());
        self.head.extend((part.len() as u32).to_be_bytes());
        self.parts.push(ReplyPart::Head(start..self.head.len()));
    }

    /// Adds a chunk with the lengths and states of extents, in order.
    pub(super) fn status_chunk(&mut self, context: u32, extents: &[(u64, u64)]) {
        let count = extents.len() as u64;
        match self.framing {
            Framing::Extended => {
                self.chunk(chunks::BLOCK_STATUS_EXT, true, 8 + 16 * count);
                self.head.extend(context.to_be_bytes());
                self.head.extend((count as u32).to_be_bytes());
                for (len, state) in extents {
                    self.head.extend(len.to_be_bytes());
                    self.head.extend(state.to_be_bytes());
                }
            }
            Framing::Simple | Framing::Structured => {
                self.chunk(chunks::BLOCK_STATUS, true, 4 + 8 * count);
                self.head.extend(context.to_be_bytes());
                for (len, state) in extents {
                    self.head.extend((*len as u32).to_be_bytes());
                    self.head.extend((*state as u32).to_be_bytes());
                }
            }
        }
    }

    pub(super) fn finish(mut self, buffer: Option<Buffer>, permit: Permit) -> Reply {
        if self.parts.is_empty() {
            self.parts.push(ReplyPart::Head(0..self.head.len()));
        }
        Reply { head: self.head, parts: self.parts, buffer, _permit: permit }
    }

    fn chunk(&mut self, kind: u16, done: bool, len: u64) {
        push_chunk_header(&mut self.head, self.framing, self.request, kind, done, len);
    }
}

/// Returns the default message for an error number.
pub(super) fn error_text(error: u32) -> &'static str {
    match error {
        errors::ESHUTDOWN => "the server is shutting down",
        errors::EOVERFLOW => "the request is longer than the largest payload",
        errors::EPERM => "the export is read-only",
        errors::ENOTSUP => "not faster than writing zeros",
        _ => "invalid request",
    }
}

impl Reply {
    /// Appends the pieces of memory that make up the reply.
    fn push_pieces(&self, pieces: &mut Vec<IoVec>) {
        for part in &self.parts {
            let bytes = match part {
                ReplyPart::Head(range) => &self.head[range.clone()],
                ReplyPart::Data(range) => match &self.buffer {
                    Some(buffer) => &buffer[range.clone()],
                    None => &[],
                },
            };
            pieces.push(IoVec::new(bytes.as_ptr().cast_mut(), bytes.len()));
        }
    }
}

/// Replies that wait for the socket. Bounded by the permits that they hold.
#[derive(Default)]
pub(super) struct Outgoing {
    queue: RefCell<VecDeque<Reply>>,
    added: Signal,
    /// True if the connection is closed: replies are dropped.
    closed: Cell<bool>,
}

impl Outgoing {
    pub(super) fn push(&self, reply: Reply) {
        if self.closed.get() {
            return;
        }
        self.queue.borrow_mut().push_back(reply);
        self.added.raise();
    }

    /// Drops the waiting replies, and all later ones.
    pub(super) fn close(&self) {
        self.closed.set(true);
        let dropped = self.queue.take();
        drop(dropped);
    }

    /// Sends replies until the connection breaks; returns the error.
    pub(super) async fn send_all(&self, stream: &Rc<MaybeTlsStream>, limits: &Limits) -> io::Error {
        let mut batch: Vec<Reply> = Vec::with_capacity(BATCH_MAX);
        let mut pieces: Vec<IoVec> = Vec::new();
        loop {
            let is_due = || (!self.queue.borrow().is_empty()).then_some(());
            self.added.until(is_due).await;
            {
                let mut queue = self.queue.borrow_mut();
                let count = queue.len().min(BATCH_MAX);
                batch.extend(queue.drain(..count));
            }
            pieces.clear();
            for reply in &batch {
                reply.push_pieces(&mut pieces);
            }
            if let Err(error) = send_pieces(stream, limits, &pieces).await {
                return error;
            }
            // Dropping the replies releases their permits, so the reader can continue.
            batch.clear();
        }
    }
}

/// Sends pieces of memory. They belong to replies that the caller keeps alive until this has ended.
async fn send_pieces(stream: &MaybeTlsStream, limits: &Limits, pieces: &[IoVec]) -> io::Result<()> {
    let mut done = 0;
    loop {
        // SAFETY: the replies that own the memory live, unmoved and unchanged, until the caller drops them after this
        // call.
        let left = unsafe { WriteBuf::from_pieces(pieces) }.skip(done);
        if left.is_empty() {
            return limits.wait_for_client(stream.flush()).await;
        }
        match stream.try_write(&[], left) {
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                limits.wait_for_client(stream.writable()).await?;
            }
            Err(error) => return Err(error),
        }
    }
}
