//! Descriptors that outlive this process: whoever starts it again keeps them, and hands them to the next process
//! (`FDSTORE=1` of sd_notify(3); systemd, as a rule).
//!
//! The manager keeps what is open once only once for a service, however often and by whichever name it comes: guest memory
//! comes with each of a VM's disks. So such files have numbers here, and are let go when nobody uses them any more. What is
//! one disk's alone has a name.
//!
//! Calls wait for the manager, which takes next to no time, but may take [`PATIENCE`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// How long the manager may take. It reads nothing while it reloads its units.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the names of all of it begin with.
pub const PREFIX: &str = "larder/";

/// What the manager keeps for this process and its successors.
#[derive(Debug)]
pub struct Store {
    manager: UnixDatagram,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    shared: Vec<Shared>,
    last_number: u64,
    /// What the process before this one has left, by name.
    left: Vec<(String, OwnedFd)>,
    /// The manager has not listened once.
    is_deaf: bool,
}

/// A file, and how many use it.
#[derive(Debug)]
struct Shared {
    number: u64,
    file: OwnedFd,
    uses: usize,
}

impl Store {
    /// What is kept by `manager`, a socket that is connected to `$NOTIFY_SOCKET`; the process before this one has `left`
    /// that, by names without [`PREFIX`].
    ///
    /// # Errors
    /// The socket is none.
    pub fn new(manager: UnixDatagram, left: Vec<(String, OwnedFd)>) -> io::Result<Self> {
        manager.set_write_timeout(Some(PATIENCE))?;
        let mut state = State::default();
        for (name, file) in left {
            match name.parse() {
                Ok(number) => {
                    state.last_number = state.last_number.max(number);
                    state.shared.push(Shared { number, file, uses: 0 });
                }
                Err(_) => state.left.push((name, file)),
            }
        }
        Ok(Self {
            manager,
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a file by a name, which is no number.
    ///
    /// # Errors
    /// The manager does not listen.
    pub fn put(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(&mut self.state(), "FDSTORE", name, Some(file))
    }

    /// Lets it go. A manager that does not listen lets it go when the service ends.
    pub fn remove(&self, name: &str) {
        let _ = self.tell(&mut self.state(), "FDSTOREREMOVE", name, None);
    }

    /// Keeps a file that others may keep too, until it was released as often. Its number.
    ///
    /// # Errors
    /// The manager does not listen, or the process is out of descriptors.
    pub fn share(&self, file: BorrowedFd<'_>) -> io::Result<u64> {
        let mut state = self.state();
        let known = state.shared.iter_mut().find(|known| is_same(known.file.as_fd(), file));
        if let Some(known) = known {
            known.uses += 1;
            return Ok(known.number);
        }
        let number = state.last_number + 1;
        let copy = file.try_clone_to_owned()?;
        self.tell(&mut state, "FDSTORE", &number.to_string(), Some(file))?;
        state.last_number = number;
        state.shared.push(Shared {
            number,
            file: copy,
            uses: 1,
        });
        Ok(number)
    }

    /// One who has shared or adopted it needs it no more.
    pub fn release(&self, number: u64) {
        let mut state = self.state();
        let Some(place) = state.shared.iter().position(|shared| shared.number == number) else {
            return;
        };
        let shared = &mut state.shared[place];
        shared.uses = shared.uses.saturating_sub(1);
        if shared.uses == 0 {
            state.shared.remove(place);
            let _ = self.tell(&mut state, "FDSTOREREMOVE", &number.to_string(), None);
        }
    }

    /// What the process before this one has left by that name, which is given once and stays kept.
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        let mut state = self.state();
        let place = state.left.iter().position(|(left, _)| left == name)?;
        Some(state.left.remove(place).1)
    }

    /// What it has left by that number, to be released later.
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

    /// Lets go what was left and nobody wants; the names of it.
    pub fn forget_rest(&self) -> Vec<String> {
        let mut state = self.state();
        let mut names = Vec::new();
        for (name, file) in std::mem::take(&mut state.left) {
            // A socket ends for its other end, too; to other files this means nothing.
            let _ = rustix::net::shutdown(&file, rustix::net::Shutdown::Both);
            names.push(name);
        }
        let (used, unused): (Vec<_>, Vec<_>) = std::mem::take(&mut state.shared)
            .into_iter()
            .partition(|it| it.uses > 0);
        state.shared = used;
        let unused = unused.iter().map(|shared| shared.number.to_string());
        for name in names.iter().cloned().chain(unused) {
            let _ = self.tell(&mut state, "FDSTOREREMOVE", &name, None);
        }
        names
    }

    fn tell(&self, state: &mut State, what: &str, name: &str, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let deaf = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                "the service manager ($NOTIFY_SOCKET) does not listen",
            )
        };
        if state.is_deaf {
            return Err(deaf());
        }
        let text = format!("{what}=1\nFDNAME={PREFIX}{name}");
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
                    state.is_deaf = true;
                    return Err(deaf());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether both are of one open file. Unknown (no KCMP in the kernel) is no.
fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    /// `KCMP_FILE` of linux/kcmp.h.
    const FILE: libc::c_long = 0;
    let ours = rustix::process::getpid().as_raw_nonzero().get();
    let files = [one, other].map(|file| file.as_raw_fd());
    // SAFETY: only numbers are passed, and nothing is written.
    unsafe { libc::syscall(libc::SYS_kcmp, ours, ours, FILE, files[0], files[1]) == 0 }
}
