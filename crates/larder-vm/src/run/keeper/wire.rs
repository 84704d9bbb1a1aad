//! vhost-user messages, taken from one connection and handed to another as they are.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use larder_export::vhost_user::message::{HEADER_BYTES, PAYLOAD_BYTES_MAX, TABLE_REGIONS_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A message of either side, with the descriptors that came along.
#[derive(Debug)]
pub(super) struct Message {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Message {
    /// One that a front-end might have sent, without descriptors.
    pub(super) fn new(request: u32, payload: &[u8]) -> Self {
        let head = [request, 1, payload.len() as u32].map(u32::to_le_bytes).concat();
        Self {
            bytes: [&head, payload].concat(),
            descriptors: Vec::new(),
        }
    }

    /// The request that it is, or replies to.
    pub(super) fn request(&self) -> u32 {
        word(&self.bytes, 0)
    }

    /// Whether an acknowledgement is asked for.
    pub(super) fn needs_reply(&self) -> bool {
        word(&self.bytes, 4) & FLAG_NEED_REPLY != 0
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..]
    }

    /// The little-endian u32 at byte `at` of the payload; 0 where there is none.
    pub(super) fn word(&self, at: usize) -> u32 {
        word(self.payload(), at)
    }

    /// Takes the next message from `stream`; `None` if it was closed between two.
    pub(super) fn receive(stream: &UnixStream, bell: &OwnedFd) -> Result<Option<Self>, Broken> {
        let mut this = Self {
            bytes: vec![0; HEADER_BYTES],
            descriptors: Vec::new(),
        };
        if !this.fill(0, stream, bell)? {
            return Ok(None);
        }
        let payload_bytes = word(&this.bytes, 8) as usize;
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(io::Error::other(format!("a message of {payload_bytes} bytes")).into());
        }
        this.bytes.resize(HEADER_BYTES + payload_bytes, 0);
        match this.fill(HEADER_BYTES, stream, bell)? {
            true => Ok(Some(this)),
            false => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        }
    }

    /// Fills `bytes` from `from` on; false if the stream ends before the first of them.
    fn fill(&mut self, from: usize, stream: &UnixStream, bell: &OwnedFd) -> Result<bool, Broken> {
        let mut done = from;
        while done < self.bytes.len() {
            wait(&[stream.as_fd()], bell, None)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TABLE_REGIONS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut pieces = [IoSliceMut::new(&mut self.bytes[done..])];
            match rustix::net::recvmsg(stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(came) if came.bytes == 0 && done == from => return Ok(false),
                Ok(came) if came.bytes == 0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(came) if came.flags.contains(ReturnFlags::CTRUNC) => {
                    let error = "descriptors of a message were lost: this process has too many open (ulimit -n)";
                    return Err(io::Error::other(error).into());
                }
                Ok(came) => {
                    done += came.bytes;
                    for item in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = item {
                            self.descriptors.extend(rights);
                        }
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(true)
    }

    /// Hands it to `stream`.
    pub(super) fn send(&self, stream: &UnixStream, bell: &OwnedFd) -> Result<(), Broken> {
        let mut done = 0;
        while done < self.bytes.len() {
            let descriptors: Vec<BorrowedFd<'_>> = self.descriptors.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TABLE_REGIONS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if done == 0 && !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&descriptors));
            }
            let pieces = [IoSlice::new(&self.bytes[done..])];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(stream, &pieces, &mut control, flags) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                // Who is to take it does not read.
                Err(Errno::AGAIN) => {
                    wait_for(PollFlags::OUT, &[stream.as_fd()], bell, None)?;
                }
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }
}

/// A connection to whoever listens at `path`; an error also where the queue of those that wait for it is full.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u32::from_le_bytes)
}

/// Why nothing more is to be had from a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// The bell was rung.
    #[error("it is over")]
    Over,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Waits until one of `streams` can be read, and gives which; `None` after `limit`.
pub(super) fn wait(
    streams: &[BorrowedFd<'_>],
    bell: &OwnedFd,
    limit: Option<Timespec>,
) -> Result<Option<usize>, Broken> {
    wait_for(PollFlags::IN, streams, bell, limit)
}

fn wait_for(
    event: PollFlags,
    streams: &[BorrowedFd<'_>],
    bell: &OwnedFd,
    limit: Option<Timespec>,
) -> Result<Option<usize>, Broken> {
    let fds = streams.iter().map(|stream| PollFd::from_borrowed_fd(*stream, event));
    let mut fds: Vec<PollFd<'_>> = fds.chain([PollFd::new(bell, PollFlags::IN)]).collect();
    loop {
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if fds.last().is_some_and(|bell| !bell.revents().is_empty()) {
            return Err(Broken::Over);
        }
        return Ok(fds.iter().position(|fd| !fd.revents().is_empty()));
    }
}
