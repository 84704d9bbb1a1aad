//! What a process gives up once everything that it works with is open: so that a guest which takes it over by a fault in it
//! has this VM's disks, which it had before, and nothing of the host or of other VMs.
//!
//! Invariants, of every thread, when [`confine`] has returned:
//! - It has no capabilities, and can never get any again (`no_new_privs`).
//! - It can open nothing (Landlock), but for what [`Needs`] lists: the process's own notes and sockets, to be replaced and
//!   removed, and, if a server is known by a name, what a name is looked up in. Folders that processes share are never
//!   readable.
//! - It can connect to the TCP ports of its disks only, signal nobody, and look into no other process.
//! - It makes no system calls but those of a server at work (seccomp); others fail with EPERM, so that one that was
//!   forgotten costs a function, not the VM's disks. No program can be started, and no memory be made executable.
//!
//! A ring of io_uring is restricted when it is made (`larder_block::event_loop`), because the kernel's workers may have
//! been started before; they run nothing but what a ring may ask for, with the rights of the thread that asks.
//!
//! Capabilities and Landlock are each thread's own. A signal has every thread give them up by itself, wherever it is, one
//! after the other; threads that are started meanwhile inherit what their maker has given up, or are found in the next
//! round. seccomp takes all threads at once, last.
//!
//! If something cannot be given up, [`confine`] fails, and the process is half confined: it must end. Only Landlock may
//! be missing, wholly or in part, in an older kernel; that is a warning.

mod calls;
mod files;
mod threads;

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use larder_block::event_loop::SocketAddress;

/// What a process needs after it was confined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Folders in which files are made, written, replaced and removed.
    written: BTreeSet<PathBuf>,
    /// The same, and the folder is flushed afterwards, which takes that it can be listed.
    flushed: BTreeSet<PathBuf>,
    /// Folders from which files are removed.
    removed_from: BTreeSet<PathBuf>,
    /// TCP ports of NBD servers.
    ports: BTreeSet<u16>,
    /// One of them has a name, which is looked up again when the connection is made again.
    looks_up_names: bool,
    /// An NBD server is on a unix socket.
    connects_to_unix_sockets: bool,
}

impl Needs {
    /// Files are made, written, replaced and removed in `folder`.
    pub fn write_in(&mut self, folder: impl Into<PathBuf>) {
        self.written.insert(folder.into());
    }

    /// The same, durably.
    pub fn write_durably_in(&mut self, folder: impl Into<PathBuf>) {
        self.flushed.insert(folder.into());
    }

    /// Files are removed from `folder`.
    pub fn remove_from(&mut self, folder: impl Into<PathBuf>) {
        self.removed_from.insert(folder.into());
    }

    /// The connection to an NBD server is made again if it breaks.
    pub fn connect_to(&mut self, server: &SocketAddress) {
        match server {
            SocketAddress::Unix(_) => self.connects_to_unix_sockets = true,
            SocketAddress::Tcp { host, port } => {
                self.ports.insert(*port);
                self.looks_up_names |= host.parse::<IpAddr>().is_err();
            }
        }
    }
}

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfineError {
    #[error("Landlock: {what}: {source}; start it without --confine if this host cannot do it")]
    Landlock { what: String, source: io::Error },
    #[error("{step} in thread {thread}: {source}; start it without --confine if this host cannot do it")]
    Thread {
        step: &'static str,
        thread: String,
        source: io::Error,
    },
    #[error(
        "thread {thread} has not given up its rights for {seconds} s: is its storage stuck? Start it again once that answers, or without --confine"
    )]
    Silent { thread: String, seconds: u64 },
    #[error("the threads of this process cannot be listed: {0}; --confine needs /proc")]
    Threads(io::Error),
    #[error("seccomp: {0}; --confine needs a kernel with CONFIG_SECCOMP_FILTER")]
    Calls(String),
}

/// Has this process give up all but what it `needs`. Called by one thread, once, when no other one opens anything any more.
///
/// # Errors
/// See [`ConfineError`]; the process must end then.
pub fn confine(needs: &Needs) -> Result<(), ConfineError> {
    let ruleset = files::ruleset(needs)?;
    let filters = calls::filters(needs)?;
    threads::give_up(ruleset.as_ref())?;
    calls::apply(&filters)
}
