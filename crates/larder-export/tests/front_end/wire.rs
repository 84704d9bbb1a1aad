//! vhost-user messages of the front-end (QEMU `docs/interop/vhost-user.rst`), valid ones and others.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const RESET_OWNER: u32 = 4;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_LOG_BASE: u32 = 6;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const SET_BACKEND_REQ_FD: u32 = 21;
pub const GET_CONFIG: u32 = 24;
pub const SET_CONFIG: u32 = 25;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const RESET_DEVICE: u32 = 34;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;
pub const SET_STATUS: u32 = 39;

const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Time without a reply after which a test fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(240);

/// Received message.
pub struct Message {
    pub request: u32,
    pub flags: u32,
    pub payload: Vec<u8>,
    pub files: Vec<OwnedFd>,
}

/// Connection to the back-end.
pub struct Wire {
    stream: UnixStream,
    /// True if REPLY_ACK was negotiated: every request is acknowledged.
    pub acknowledged: bool,
}

impl Wire {
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, acknowledged: false })
    }

    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends any bytes with any descriptors.
    pub fn send_raw(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if done == 0 && !files.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(files));
            }
            let pieces = [IoSlice::new(&bytes[done..])];
            match rustix::net::sendmsg(&self.stream, &pieces, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Encodes a message.
    pub fn encode(request: u32, need_reply: bool, payload: &[u8]) -> Vec<u8> {
        let flags = VERSION | if need_reply { NEED_REPLY } else { 0 };
        let mut bytes = Vec::new();
        for word in [request, flags, payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    /// Receives one message.
    pub fn receive(&self) -> io::Result<Message> {
        let mut files = Vec::new();
        let mut head = [0; 12];
        self.fill(&mut head, &mut files)?;
        let [request, flags, size] = [0, 4, 8].map(|at| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte])));
        let mut payload = vec![0; size as usize];
        self.fill(&mut payload, &mut files)?;
        Ok(Message { request, flags, payload, files })
    }

    fn fill(&self, buffer: &mut [u8], files: &mut Vec<OwnedFd>) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut pieces = [IoSliceMut::new(&mut buffer[done..])];
            match rustix::net::recvmsg(&self.stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) if message.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(message) => {
                    done += message.bytes;
                    for item in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = item {
                            files.extend(rights);
                        }
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a request that has a reply of its own, and returns the reply.
    pub fn ask(&self, request: u32, payload: &[u8]) -> io::Result<Message> {
        self.send_raw(&Self::encode(request, false, payload), &[])?;
        self.reply_to(request)
    }

    /// Sends a request without a reply; waits for the acknowledgement, if that was negotiated.
    pub fn tell(&self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_raw(&Self::encode(request, self.acknowledged, payload), files)?;
        if !self.acknowledged {
            return Ok(());
        }
        let reply = self.reply_to(request)?;
        if reply.payload.iter().any(|byte| *byte != 0) {
            return Err(io::Error::other(format!("request {request} was refused")));
        }
        Ok(())
    }

    fn reply_to(&self, request: u32) -> io::Result<Message> {
        let reply = self.receive()?;
        if reply.request != request || reply.flags & REPLY == 0 {
            return Err(io::Error::other(format!("request {request} was answered by {}", reply.request)));
        }
        Ok(reply)
    }

    pub fn ask_u64(&self, request: u32) -> io::Result<u64> {
        let reply = self.ask(request, &[])?;
        let bytes: [u8; 8] = reply.payload.try_into().map_err(|_| io::Error::other("no u64"))?;
        Ok(u64::from_ne_bytes(bytes))
    }

    pub fn tell_u64(&self, request: u32, value: u64) -> io::Result<()> {
        self.tell(request, &value.to_ne_bytes(), &[])
    }

    /// Sends a request about one ring: index and a number.
    pub fn tell_ring(&self, request: u32, ring: u32, value: u32) -> io::Result<()> {
        self.tell(request, &words(&[ring, value]), &[])
    }
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}
