//! Confinement: the rights that a process gives up before it reads anything that a guest or an image's author has
//! written. After that, a fault in the process gives them access to this VM's disks, which the guest had before, and
//! to nothing of the host or of other VMs.
//!
//! Invariants, for every thread, once [`confine`] has returned:
//! - It has no capabilities, and can never gain any (`no_new_privs`).
//! - It can open nothing (Landlock) except files in directories of its own ([`Needs`]), what the kernel shows about
//!   the process itself, and, if an NBD server is known by name, the files for host name lookup. All other files are
//!   opened by the opener ([`crate::opener`]).
//! - It can connect only to the TCP ports of its disks, signal no other process, and inspect none.
//! - It makes only the system calls of a running server (seccomp); others fail with EPERM, so a forgotten call costs
//!   a feature, not the VM's disks. No program can be started, and no memory can be made executable.
//!
//! An io_uring is restricted when it is created (`larder_block::event_loop`), because the kernel's workers may have
//! been started before; they execute only the operations that a ring permits, with the rights of the submitting
//! thread.
//!
//! Capabilities and Landlock are per thread. A signal makes every thread give them up itself, whatever it is doing,
//! one after the other. Threads that are started meanwhile inherit what their creator has given up, or are found in
//! the next round. seccomp is applied to all threads at once, last.
//!
//! If a right cannot be given up, [`confine`] fails, and the process is partly confined: it must end. Only Landlock
//! may be missing in an older kernel, wholly or in part; that is logged as a warning.

mod landlock_rules;
mod seccomp;
mod threads;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;

use larder_block::boot;
use larder_block::event_loop::SocketAddress;

/// Resources that a process needs after it is confined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Directories of its own, in which it creates, reads, writes, replaces and removes files.
    own_directories: BTreeSet<PathBuf>,
    /// TCP ports of NBD servers.
    ports: BTreeSet<u16>,
    /// A server is given by a name, which is looked up when the connection is made.
    resolves_names: bool,
}

impl Needs {
    /// Adds a directory that belongs to this process alone.
    pub fn add_directory(&mut self, directory: impl Into<PathBuf>) {
        self.own_directories.insert(directory.into());
    }

    /// Adds a TCP connection to an NBD server; the opener makes connections to unix sockets. The server's name is
    /// looked up once now, because no library can be loaded later.
    pub fn add_nbd_server(&mut self, server: &SocketAddress) {
        let SocketAddress::Tcp { host, port } = server else {
            return;
        };
        self.ports.insert(*port);
        if host.parse::<IpAddr>().is_err() {
            self.resolves_names = true;
            // A later connection reports the error.
            let _ = (host.as_str(), *port).to_socket_addrs();
        }
    }
}

/// Reason why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfineError {
    #[error("Landlock: {what}: {source}; start the server without --confine if this host does not support it")]
    Landlock { what: String, source: io::Error },
    #[error("{step} in thread {thread}: {source}; start the server without --confine if this host does not support it")]
    Thread { step: &'static str, thread: String, source: io::Error },
    #[error(
        "thread {thread} has not dropped its rights within {seconds} s: its storage may be stuck. Start the server again once the storage responds, or without --confine"
    )]
    Unresponsive { thread: String, seconds: u64 },
    #[error("the threads of this process cannot be listed: {0}; --confine needs /proc")]
    Threads(io::Error),
    #[error("seccomp: {0}; --confine needs a kernel with CONFIG_SECCOMP_FILTER")]
    Seccomp(String),
}

/// Restricts this thread, and the programs that it starts, to programs and to reading `file`. A program that parses
/// an untrusted file must not give its author the rights of this process.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn restrict_to_programs_and(file: &File) -> io::Result<()> {
    landlock_rules::restrict_to_programs_and(file)
}

/// Makes this process give up all rights except those that it `needs`. One thread calls it, once, when no other
/// thread opens files any more.
///
/// # Errors
/// See [`ConfineError`]; the process must end then.
pub fn confine(needs: &Needs) -> Result<(), ConfineError> {
    boot::cache_host_facts();
    let ruleset = landlock_rules::ruleset(needs)?;
    let filters = seccomp::filters(needs)?;
    threads::drop_rights(ruleset.as_ref())?;
    seccomp::apply(&filters)
}
