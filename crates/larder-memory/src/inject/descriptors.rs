//! Descriptors passed to another process, and taken from it.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::error::InjectError;
use super::stopped::{SCRATCH_BYTES, StoppedThread};

/// Maximum number of descriptors that the kernel transfers at once (SCM_MAX_FD, include/net/scm.h).
const DESCRIPTORS_MAX: usize = 253;

// Offsets in the scratch memory of the arguments of `recvmsg`: `struct msghdr`, its one `struct iovec`, the byte that
// this points to, and the control messages.
const HEADER_AT: usize = 0;
const PART_AT: usize = 64;
const BYTE_AT: usize = 80;
const CONTROL_AT: usize = 96;

/// Size of `struct cmsghdr`: a length of 8 bytes, a level and a type of 4 bytes each.
const CONTROL_HEADER_BYTES: usize = 16;
const CONTROL_BYTES_MAX: usize = CONTROL_HEADER_BYTES + DESCRIPTORS_MAX * 4 + 4;
const _: () = assert!(CONTROL_AT + CONTROL_BYTES_MAX <= SCRATCH_BYTES);

/// Offset in `struct msghdr` of the length of the control messages.
const CONTROL_LENGTH_AT: usize = 40;

impl StoppedThread {
    /// Opens these descriptors in the process, and returns their numbers there, in the same order. They are closed if
    /// the process runs another program (CLOEXEC).
    ///
    /// # Errors
    /// If there are more than 253, or if the process cannot receive all of them. It has none of them then.
    pub fn send_descriptors(&mut self, descriptors: &[BorrowedFd<'_>]) -> Result<Vec<RawFd>, InjectError> {
        let count = descriptors.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        if count > DESCRIPTORS_MAX {
            return Err(InjectError::TooManyDescriptors { count, max: DESCRIPTORS_MAX });
        }
        let kind = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC) as u64;
        self.system_call(libc::SYS_socketpair, [libc::AF_UNIX as u64, kind, 0, self.scratch(), 0, 0])?;
        // After a kill before they are closed, these two stay open, without harm.
        let mut pair = [0; 8];
        self.read_scratch(0, &mut pair)?;
        let number = |at: usize| RawFd::from_ne_bytes([pair[at], pair[at + 1], pair[at + 2], pair[at + 3]]);
        let (receiving, sending) = (number(0), number(4));
        let received = self.transfer(receiving, sending, descriptors);
        let closed = self.close(receiving).and(self.close(sending));
        let received = received?;
        closed?;
        if received.len() == count {
            return Ok(received);
        }
        for number in &received {
            self.close(*number)?;
        }
        let (pid, tid, received) = (self.pid(), self.tid(), received.len());
        Err(InjectError::DescriptorsNotReceived { pid, tid, sent: count, received })
    }

    /// Takes a descriptor of the process, by its number for the stopped thread: the same open file description, in
    /// this process.
    ///
    /// # Errors
    /// If the process has no such descriptor, or this process has no right to it.
    pub fn fetch_descriptor(&self, number: RawFd) -> Result<OwnedFd, InjectError> {
        let failed = |tried| {
            let (pid, tid) = (self.pid(), self.tid());
            move |errno| InjectError::Request { pid, tid, tried, errno }
        };
        // Through the thread (Linux 6.9), because a main thread that has ended has no descriptors; else through the
        // process.
        let by_thread = PidfdFlags::from_bits_retain(libc::O_EXCL as u32);
        let process = match pidfd_open(self.tid(), by_thread) {
            Err(Errno::INVAL) => pidfd_open(self.pid(), PidfdFlags::empty()),
            opened => opened,
        };
        let process = process.map_err(failed("pidfd_open"))?;
        pidfd_getfd(process, number, PidfdGetfdFlags::empty()).map_err(failed("pidfd_getfd"))
    }

    /// Closes a descriptor in the process.
    ///
    /// # Errors
    /// Errors of close(2), after most of which the descriptor is closed.
    pub fn close(&mut self, number: RawFd) -> Result<(), InjectError> {
        self.system_call(libc::SYS_close, [number as u64, 0, 0, 0, 0, 0]).map(drop)
    }

    /// Sends descriptors through one end of a socket pair in the process, and makes the process receive them from the
    /// other end.
    fn transfer(
        &mut self,
        receiving: RawFd,
        ours: RawFd,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Vec<RawFd>, InjectError> {
        let sending = self.fetch_descriptor(ours)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let is_pushed = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(is_pushed, "no more than DESCRIPTORS_MAX");
        let (pid, tid) = (self.pid(), self.tid());
        let sent = sendmsg(sending.as_fd(), &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL);
        sent.map_err(|errno| InjectError::Request { pid, tid, tried: "send descriptors to it", errno })?;
        self.receive(receiving)
    }

    /// Makes the process receive descriptors from a socket of its own.
    fn receive(&mut self, socket: RawFd) -> Result<Vec<RawFd>, InjectError> {
        let scratch = self.scratch();
        let at = |offset: usize| scratch + offset as u64;
        // Fields: name, its length, parts, their number, control messages, their length, flags.
        let header = [0, 0, at(PART_AT), 1, at(CONTROL_AT), CONTROL_BYTES_MAX as u64, 0];
        let part = [at(BYTE_AT), 1];
        self.write_scratch(HEADER_AT, &bytes_of(&header))?;
        self.write_scratch(PART_AT, &bytes_of(&part))?;
        let flags = (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64;
        self.system_call(libc::SYS_recvmsg, [socket as u64, at(HEADER_AT), flags, 0, 0, 0])?;

        let mut length = [0; 8];
        self.read_scratch(HEADER_AT + CONTROL_LENGTH_AT, &mut length)?;
        let length = usize::try_from(u64::from_ne_bytes(length)).unwrap_or(0).min(CONTROL_BYTES_MAX);
        let mut control = vec![0; length];
        self.read_scratch(CONTROL_AT, &mut control)?;
        Ok(rights_in(&control))
    }
}

/// Returns the descriptors in a control message. The length of a truncated message says how many there are.
fn rights_in(control: &[u8]) -> Vec<RawFd> {
    let Some((header, data)) = control.split_at_checked(CONTROL_HEADER_BYTES) else {
        return Vec::new();
    };
    let length = u64::from_ne_bytes(header[..8].try_into().unwrap_or_default());
    let kind = [libc::SOL_SOCKET.to_ne_bytes(), libc::SCM_RIGHTS.to_ne_bytes()].concat();
    if header[8..] != kind {
        return Vec::new();
    }
    let bytes = usize::try_from(length).unwrap_or(0).saturating_sub(CONTROL_HEADER_BYTES).min(data.len());
    let numbers = data[..bytes].chunks_exact(4);
    numbers.map(|bytes| RawFd::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
