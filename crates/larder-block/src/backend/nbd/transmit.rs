//! The sending half of a connection: takes requests in order and writes them, with gathered headers, and payloads
//! straight from the callers' buffers.

use std::io;

use super::Shared;
use super::connect::Export;
use super::error::ConnectionLoss;
use super::requests::{NbdRequest, RequestId};
use crate::buffer::WriteBuf;
use crate::nbd::transmission::RequestHeader;
use crate::nbd::{Command, CommandFlags};
use crate::tls::MaybeTlsStream;

/// The maximum length of gathered headers, in bytes.
const GATHERED_LEN_MAX: usize = 4 << 10;

/// Sends requests until the connection breaks, or the device is closed and everything has been sent.
pub(super) async fn transmit(shared: &Shared, stream: &MaybeTlsStream, export: Export) -> Result<(), ConnectionLoss> {
    let mut head = Vec::with_capacity(GATHERED_LEN_MAX + 64);
    loop {
        head.clear();
        let payload = gather(shared, export, &mut head);
        if head.is_empty() {
            if shared.is_closing.get() {
                return disconnect(stream, export).await;
            }
            wait_for_work(shared).await;
            continue;
        }
        send(shared, stream, &head, payload).await?;
    }
}

/// Appends the headers of as many requests as can be sent at once. The last of them may have a payload, which is sent
/// after the headers.
fn gather(shared: &Shared, export: Export, head: &mut Vec<u8>) -> Option<RequestId> {
    let mut requests = shared.requests.borrow_mut();
    let mut log = shared.log.borrow_mut();
    while head.len() < GATHERED_LEN_MAX {
        if requests.on_wire() == 0 {
            shared.touch();
        }
        let mut next = requests.start_next(&mut log);
        if next.is_none() {
            requests.flush_for_log_space(&log);
            next = requests.start_next(&mut log);
        }
        let (id, request) = next?;
        push_header(head, export, id, request);
        if request.payload_len() > 0 {
            return Some(id);
        }
        requests.sent(id, &mut log);
    }
    None
}

fn push_header(head: &mut Vec<u8>, export: Export, id: RequestId, request: NbdRequest) {
    RequestHeader {
        flags: request.flags,
        command: request.command.code(),
        cookie: id.cookie(),
        offset: request.range.start.get(),
        len: request.range.len.get(),
    }
    .push(export.framing, head);
}

async fn wait_for_work(shared: &Shared) {
    let mut first = true;
    // `gather` decides after every change whether there is work.
    shared.changed.until(|| (!std::mem::take(&mut first)).then_some(())).await;
}

/// Writes `head` and the payload of the request `payload`. Every call looks the payload up again, because its caller
/// may drop the request at any time.
async fn send(
    shared: &Shared,
    stream: &MaybeTlsStream,
    head: &[u8],
    payload: Option<RequestId>,
) -> Result<(), ConnectionLoss> {
    let mut head = head;
    loop {
        let written = {
            let requests = shared.requests.borrow();
            let body = match payload {
                Some(id) => requests.unsent(id),
                None => WriteBuf::new(&[]),
            };
            if head.is_empty() && body.is_empty() {
                break;
            }
            stream.try_write(head, body)
        };
        match written {
            Ok(count) => {
                shared.touch();
                let head_written = count.min(head.len());
                head = &head[head_written..];
                if let Some(id) = payload {
                    shared.requests.borrow_mut().advance(id, count - head_written);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(id) = payload {
        let mut requests = shared.requests.borrow_mut();
        requests.sent(id, &mut shared.log.borrow_mut());
    }
    Ok(stream.flush().await?)
}

/// Announces to the server that no more requests follow (spec, `NBD_CMD_DISC`).
async fn disconnect(stream: &MaybeTlsStream, export: Export) -> Result<(), ConnectionLoss> {
    let mut message = Vec::new();
    RequestHeader { flags: CommandFlags::NONE, command: Command::Disconnect.code(), cookie: 0, offset: 0, len: 0 }
        .push(export.framing, &mut message);
    Ok(stream.write_all(&message).await?)
}
