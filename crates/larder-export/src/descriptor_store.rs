//! Store for descriptors that outlive this process: the service manager (usually systemd) keeps them and passes them
//! to the next process (`FDSTORE=1` of sd_notify(3)).
//!
//! The manager stores each open file once for a service, however often and under whichever name it is sent, and guest
//! memory is sent for each of a VM's disks. Shared files therefore have numbers and reference counts here, and are
//! removed when the last user releases them. A file of one disk alone has a name.
//!
//! Calls wait for the manager, which usually takes almost no time, but may take [`SEND_TIMEOUT`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Time within which the manager must accept a message. It reads none while it reloads its units.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Prefix of all names in the store.
pub const STORED_NAME_PREFIX: &str = "larder/";

/// Descriptors that the manager keeps for this process and its successors.
#[derive(Debug)]
pub struct DescriptorStore {
    manager: UnixDatagram,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    shared: Vec<SharedFile>,
    last_number: u64,
    /// Files that the previous process left, by name.
    inherited: Vec<(String, OwnedFd)>,
    /// True after the manager has once failed to accept a message in time.
    is_unresponsive: bool,
}

/// Shared file with its number of users.
#[derive(Debug)]
struct SharedFile {
    number: u64,
    file: OwnedFd,
    uses: usize,
}

impl DescriptorStore {
    /// Creates a store that is kept by `manager`, a socket connected to `$NOTIFY_SOCKET`. `inherited` has the files of
    /// the previous process, by names without [`STORED_NAME_PREFIX`].
    ///
    /// # Errors
    /// The write timeout of the socket cannot be set.
    pub fn new(manager: UnixDatagram, inherited: Vec<(String, OwnedFd)>) -> io::Result<Self> {
        manager.set_write_timeout(Some(SEND_TIMEOUT))?;
        let mut state = State::default();
        for (name, file) in inherited {
            match name.parse() {
                Ok(number) => {
                    state.last_number = state.last_number.max(number);
                    state.shared.push(SharedFile { number, file, uses: 0 });
                }
                Err(_) => state.inherited.push((name, file)),
            }
        }
        Ok(Self { manager, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a file under a name, which must not be a number.
    ///
    /// # Errors
    /// The manager accepts no message.
    pub fn put(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        self.notify(&mut self.state(), "FDSTORE", name, Some(file))
    }

    /// Removes the file of this name. If the manager accepts no message, it drops the file when the service ends.
    pub fn remove(&self, name: &str) {
        let _ = self.notify(&mut self.state(), "FDSTOREREMOVE", name, None);
    }

    /// Stores a file that several users may share, until each of them has released it. Returns its number.
    ///
    /// # Errors
    /// The manager accepts no message, or the process is out of descriptors.
    pub fn share(&self, file: BorrowedFd<'_>) -> io::Result<u64> {
        let mut state = self.state();
        let shared = state.shared.iter_mut().find(|known| is_same(known.file.as_fd(), file));
        if let Some(known) = shared {
            known.uses += 1;
            return Ok(known.number);
        }
        let number = state.last_number + 1;
        let copy = file.try_clone_to_owned()?;
        self.notify(&mut state, "FDSTORE", &number.to_string(), Some(file))?;
        state.last_number = number;
        state.shared.push(SharedFile { number, file: copy, uses: 1 });
        Ok(number)
    }

    /// Releases one use of a shared or adopted file.
    pub fn release(&self, number: u64) {
        let mut state = self.state();
        let Some(index) = state.shared.iter().position(|shared| shared.number == number) else {
            return;
        };
        let shared = &mut state.shared[index];
        shared.uses = shared.uses.saturating_sub(1);
        if shared.uses == 0 {
            state.shared.remove(index);
            let _ = self.notify(&mut state, "FDSTOREREMOVE", &number.to_string(), None);
        }
    }

    /// Returns the file that the previous process left under this name. It is returned once, and stays in the store.
    pub fn take_inherited(&self, name: &str) -> Option<OwnedFd> {
        let mut state = self.state();
        let index = state.inherited.iter().position(|(stored_name, _)| stored_name == name)?;
        Some(state.inherited.remove(index).1)
    }

    /// Returns the file that the previous process left under this number, and counts one use of it.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn adopt(&self, number: u64) -> io::Result<Option<OwnedFd>> {
        let mut state = self.state();
        let Some(shared) = state.shared.iter_mut().find(|shared| shared.number == number) else {
            return Ok(None);
        };
        let copy = shared.file.try_clone()?;
        shared.uses += 1;
        Ok(Some(copy))
    }

    /// Removes all files that were left and have no user, and returns their names.
    pub fn remove_unclaimed(&self) -> Vec<String> {
        let mut state = self.state();
        let mut names = Vec::new();
        for (name, file) in std::mem::take(&mut state.inherited) {
            // Shutting a socket down ends it for the peer, too; for other files the call has no effect.
            let _ = rustix::net::shutdown(&file, rustix::net::Shutdown::Both);
            names.push(name);
        }
        let (used, unused): (Vec<_>, Vec<_>) =
            std::mem::take(&mut state.shared).into_iter().partition(|shared| shared.uses > 0);
        state.shared = used;
        let unused = unused.iter().map(|shared| shared.number.to_string());
        for name in names.iter().cloned().chain(unused) {
            let _ = self.notify(&mut state, "FDSTOREREMOVE", &name, None);
        }
        names
    }

    fn notify(&self, state: &mut State, action: &str, name: &str, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let timed_out =
            || io::Error::new(io::ErrorKind::TimedOut, "the service manager ($NOTIFY_SOCKET) does not accept messages");
        if state.is_unresponsive {
            return Err(timed_out());
        }
        let text = format!("{action}=1\nFDNAME={STORED_NAME_PREFIX}{name}");
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        loop {
            let pieces = [io::IoSlice::new(text.as_bytes())];
            match rustix::net::sendmsg(&self.manager, &pieces, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    state.is_unresponsive = true;
                    return Err(timed_out());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns whether both descriptors are of one open file description. Returns false if the kernel has no KCMP.
fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    /// `KCMP_FILE` of linux/kcmp.h.
    const FILE: libc::c_long = 0;
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let files = [one, other].map(|file| file.as_raw_fd());
    // SAFETY: only numbers are passed, and the kernel writes no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, FILE, files[0], files[1]) == 0 }
}
