//! What a process gives up before it reads anything that a guest or an image's author has written: so that a fault in it lets
//! them have this VM's disks, which the guest had before, and nothing of the host or of other VMs.
//!
//! Invariants, of every thread, when [`confine`] has returned:
//! - It has no capabilities, and can never get any again (`no_new_privs`).
//! - It can open nothing (Landlock) but what is in folders of its own ([`Needs`]), what its kernel says of the process itself,
//!   and, if a server is known by a name, what a name is looked up in. All else is opened for it ([`crate::opener`]).
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
use std::fs::File;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;

use larder_block::boot;
use larder_block::event_loop::SocketAddress;

/// What a process needs after it was confined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Folders of its own, in which files are made, read, written, replaced and removed.
    own: BTreeSet<PathBuf>,
    /// TCP ports of NBD servers.
    ports: BTreeSet<u16>,
    /// One of them has a name, which is looked up when the connection is made.
    looks_up_names: bool,
}

impl Needs {
    /// This process has `folder` to itself.
    pub fn have(&mut self, folder: impl Into<PathBuf>) {
        self.own.insert(folder.into());
    }

    /// It connects to an NBD server, by TCP; the opener connects to those on unix sockets. The server's name is looked up once
    /// now, because no library can be loaded later.
    pub fn connect_to(&mut self, server: &SocketAddress) {
        let SocketAddress::Tcp { host, port } = server else {
            return;
        };
        self.ports.insert(*port);
        if host.parse::<IpAddr>().is_err() {
            self.looks_up_names = true;
            // Whoever connects says what is wrong.
            let _ = (host.as_str(), *port).to_socket_addrs();
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

/// Has this thread, and the programs that it starts, reach nothing but programs and `file`, which is only read: what looks at a
/// file that anybody may have written must not become him.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn only_programs_and(file: &File) -> io::Result<()> {
    files::only_programs_and(file)
}

/// Has this process give up all but what it `needs`. Called by one thread, once, when no other one opens anything any more.
///
/// # Errors
/// See [`ConfineError`]; the process must end then.
pub fn confine(needs: &Needs) -> Result<(), ConfineError> {
    boot::learn();
    let ruleset = files::ruleset(needs)?;
    let filters = calls::filters(needs)?;
    threads::give_up(ruleset.as_ref())?;
    calls::apply(&filters)
}
