//! Receiver of a front-end's messages: from its connection, or from the previous process's record.

use std::io;
use std::os::fd::OwnedFd;

use larder_block::event_loop::Socket;

use super::message::{self, FrontendRequest, HEADER_BYTES, MessageHeader, parse_header, parse_request};
use super::message_record::RecordedMessage;
use super::session::SessionError;

/// Received message.
pub(super) struct Received {
    pub(super) header: MessageHeader,
    pub(super) request: FrontendRequest,
    /// Copy for the record, with duplicated descriptors, if one was requested.
    pub(super) raw: Option<RecordedMessage>,
}

/// Receives the next message; returns `None` if the front-end has closed the connection between two messages.
pub(super) async fn next(socket: &Socket, copies_for_record: bool) -> Result<Option<Received>, SessionError> {
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
        return Err(unexpected_end().into());
    }
    let copied = copies_for_record.then(|| duplicate_all(&descriptors)).transpose()?;
    let request = parse_request(&header, &bytes[HEADER_BYTES..], descriptors)?;
    tracing::trace!(?request, "vhost-user");
    let raw = copied.map(|copied| RecordedMessage::new(bytes, copied));
    Ok(Some(Received { header, request, raw }))
}

/// Parses recorded messages again.
pub(super) fn reparse(messages: &[RecordedMessage]) -> Result<Vec<FrontendRequest>, SessionError> {
    let request = |message: &RecordedMessage| {
        let (head, payload) = message.bytes().split_first_chunk().ok_or_else(unexpected_end)?;
        let header = parse_header(head)?;
        Ok(parse_request(&header, payload, duplicate_all(message.descriptors())?)?)
    };
    messages.iter().map(request).collect()
}

/// Fills `bytes`, and adds the descriptors that arrive with them; returns false if the stream ends before the first
/// byte.
async fn fill(socket: &Socket, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<bool, SessionError> {
    let mut filled = 0;
    while filled < bytes.len() {
        let (count, received) = socket.read_with_descriptors(&mut bytes[filled..]).await?;
        if count == 0 && filled == 0 {
            return Ok(false);
        }
        if count == 0 {
            return Err(unexpected_end().into());
        }
        filled += count;
        message::add_descriptors(descriptors, received)?;
    }
    Ok(true)
}

fn duplicate_all(descriptors: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    descriptors.iter().map(OwnedFd::try_clone).collect()
}

/// Returns the error for a message that ended early.
fn unexpected_end() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}
