//! Receiver of a front-end's messages: from its connection, or from the previous process's record.

use std::io;
use std::os::fd::OwnedFd;

use larder_block::event_loop::Socket;

use super::message::{self, HEADER_BYTES, Header, Request, parse_header, parse_request};
use super::record::Message;
use super::session::SessionError;

/// Received message.
pub(super) struct Received {
    pub(super) header: Header,
    pub(super) request: Request,
    /// Copy for the record, with duplicated descriptors, if one was requested.
    pub(super) raw: Option<Message>,
}

/// Receives the next message; returns `None` if the front-end has closed the connection between two messages.
pub(super) async fn next(socket: &Socket, for_record: bool) -> Result<Option<Received>, SessionError> {
    let mut bytes = vec![0; HEADER_BYTES];
    let mut descriptors = Vec::new();
    if !fill(socket, &mut bytes, &mut descriptors).await? {
        return Ok(None);
    }
    let mut head = [0; HEADER_BYTES];
    head.copy_from_slice(&bytes);
    let header = parse_header(&head)?;
    bytes.resize(HEADER_BYTES + header.payload_bytes, 0);
    if !fill(socket, &mut bytes[HEADER_BYTES..], &mut descriptors).await? {
        return Err(cut().into());
    }
    let copied = for_record.then(|| copies(&descriptors)).transpose()?;
    let request = parse_request(&header, &bytes[HEADER_BYTES..], descriptors)?;
    tracing::trace!(?request, "vhost-user");
    let raw = copied.map(|copied| Message::new(bytes, copied));
    Ok(Some(Received { header, request, raw }))
}

/// Parses recorded messages again.
pub(super) fn again(messages: &[Message]) -> Result<Vec<Request>, SessionError> {
    let request = |said: &Message| {
        let (head, payload) = said.bytes().split_first_chunk().ok_or_else(cut)?;
        let header = parse_header(head)?;
        Ok(parse_request(&header, payload, copies(said.descriptors())?)?)
    };
    messages.iter().map(request).collect()
}

/// Fills `bytes`, and adds the descriptors that arrive with them; returns false if the stream ends before the first
/// byte.
async fn fill(socket: &Socket, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<bool, SessionError> {
    let mut filled = 0;
    while filled < bytes.len() {
        let (count, came) = socket.read_with_descriptors(&mut bytes[filled..]).await?;
        if count == 0 && filled == 0 {
            return Ok(false);
        }
        if count == 0 {
            return Err(cut().into());
        }
        filled += count;
        message::collect(descriptors, came)?;
    }
    Ok(true)
}

fn copies(descriptors: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    descriptors.iter().map(OwnedFd::try_clone).collect()
}

/// Returns the error for a message that ended early.
fn cut() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}
