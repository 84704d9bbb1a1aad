//! Forwarding of vhost-user messages between two connections, unchanged.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use larder_export::vhost_user::message::{HEADER_BYTES, PAYLOAD_BYTES_MAX, TABLE_REGIONS_MAX};
use larder_export::vhost_user::message_record::RecordedMessage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Receives the next message from `stream`; `None` if it was closed between two messages.
pub(super) fn receive(stream: &UnixStream, bell: &OwnedFd) -> Result<Option<RecordedMessage>, ProxyStop> {
    let mut bytes = vec![0; HEADER_BYTES];
    let mut descriptors = Vec::new();
    if !fill(&mut bytes, &mut descriptors, stream, bell)? {
        return Ok(None);
    }
    let payload_bytes = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
    if payload_bytes > PAYLOAD_BYTES_MAX {
        return Err(io::Error::other(format!("a message of {payload_bytes} bytes is too long")).into());
    }
    bytes.resize(HEADER_BYTES + payload_bytes, 0);
    match fill(&mut bytes[HEADER_BYTES..], &mut descriptors, stream, bell)? {
        true => Ok(Some(RecordedMessage::new(bytes, descriptors))),
        false => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
    }
}

/// Fills `bytes`, and adds received descriptors; false if the stream ends before the first byte.
fn fill(
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    stream: &UnixStream,
    bell: &OwnedFd,
) -> Result<bool, ProxyStop> {
    let mut done = 0;
    while done < bytes.len() {
        wait_readable(&[stream.as_fd()], bell, None)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TABLE_REGIONS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iovecs = [IoSliceMut::new(&mut bytes[done..])];
        match rustix::net::recvmsg(stream, &mut iovecs, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes == 0 && done == 0 => return Ok(false),
            Ok(received) if received.bytes == 0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(received) if received.flags.contains(ReturnFlags::CTRUNC) => {
                let error = "descriptors of a message were lost: this process has too many open (ulimit -n)";
                return Err(io::Error::other(error).into());
            }
            Ok(received) => {
                done += received.bytes;
                for item in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = item {
                        descriptors.extend(rights);
                    }
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
    Ok(true)
}

/// Sends a message to `stream`.
pub(super) fn send(message: &RecordedMessage, stream: &UnixStream, bell: &OwnedFd) -> Result<(), ProxyStop> {
    let mut done = 0;
    while done < message.bytes().len() {
        let descriptors: Vec<BorrowedFd<'_>> = message.descriptors().iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TABLE_REGIONS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if done == 0 && !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let pieces = [IoSlice::new(&message.bytes()[done..])];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(stream, &pieces, &mut control, flags) {
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            // The receiver does not read, so the socket's buffer is full.
            Err(Errno::AGAIN) => {
                wait_event(PollFlags::OUT, &[stream.as_fd()], bell, None)?;
            }
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
    Ok(())
}

/// Connects to the listener at `path`; fails also if its backlog is full.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Reason why a connection cannot be used further.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyStop {
    /// The eventfd `bell` is readable: the thread must end.
    #[error("the proxy is being stopped")]
    Stopped,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Waits until one of `streams` is readable, and returns its index; `None` after `limit`.
pub(super) fn wait_readable(
    streams: &[BorrowedFd<'_>],
    bell: &OwnedFd,
    limit: Option<Timespec>,
) -> Result<Option<usize>, ProxyStop> {
    wait_event(PollFlags::IN, streams, bell, limit)
}

fn wait_event(
    event: PollFlags,
    streams: &[BorrowedFd<'_>],
    bell: &OwnedFd,
    limit: Option<Timespec>,
) -> Result<Option<usize>, ProxyStop> {
    let fds = streams.iter().map(|stream| PollFd::from_borrowed_fd(*stream, event));
    let mut fds: Vec<PollFd<'_>> = fds.chain([PollFd::new(bell, PollFlags::IN)]).collect();
    loop {
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if fds.last().is_some_and(|bell| !bell.revents().is_empty()) {
            return Err(ProxyStop::Stopped);
        }
        return Ok(fds.iter().position(|fd| !fd.revents().is_empty()));
    }
}
