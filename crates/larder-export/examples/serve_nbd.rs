//! An NBD export of a disk in memory, on a unix socket, until Ctrl-C.
//!
//! The device, the server and its clients run on one event loop. Start it in one terminal, with the path of a new
//! socket and the disk's size (64 MiB by default):
//!
//! ```sh
//! cargo run -p larder-export --example serve_nbd -- /tmp/disk.sock 128MiB
//! ```
//!
//! It prints the URI of the export, which any NBD client can open in another terminal:
//!
//! ```sh
//! nbdinfo 'nbd+unix:///?socket=/tmp/disk.sock'
//! qemu-img info 'nbd+unix:///?socket=/tmp/disk.sock'
//! qemu-io -f raw -c 'write -P 65 0 1M' -c 'read -P 65 0 1M' 'nbd+unix:///?socket=/tmp/disk.sock'
//! ```
//!
//! After Ctrl-C (SIGINT) or SIGTERM it completes the requests in flight, removes the socket, and prints the number of
//! clients and requests. The content of the disk is lost.

use std::error::Error;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::{Listener, POLL_MAX_DEFAULT};
use larder_block::{ByteLen, Loop};
use larder_export::nbd::{NbdServer, NbdServerOptions};

/// Serves a disk of `size` bytes on `socket` until `end` completes, and returns its result.
async fn serve<T>(on: &Loop, socket: &Path, size: ByteLen, end: impl Future<Output = T>) -> io::Result<T> {
    // Any stack of layers can be exported: the server needs only its top.
    let device = Rc::new(MemoryDevice::new(size, 512));
    let server = NbdServer::new(on, device, NbdServerOptions::default());
    let listener = UnixListener::bind(socket)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display())))?;
    server.listen(Listener::from_descriptor(on, listener.into())?);
    println!("{size} are served at {}", uri(socket));
    let result = end.await;
    server.stop().await;
    std::fs::remove_file(socket)?;
    let counts = server.statistics();
    println!("{} clients, {} requests", counts.connections_accepted, counts.requests);
    Ok(result)
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

/// Blocks SIGINT and SIGTERM, and returns a descriptor that is readable once one has arrived. No other thread must run
/// yet, because it would receive the signals.
fn stop_signals() -> io::Result<OwnedFd> {
    // SAFETY: a zeroed set is a valid place for sigemptyset, which makes it a valid set; the other calls only read or
    // fill it. The descriptor is new, and has no other owner.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) {
            -1 => Err(io::Error::last_os_error()),
            descriptor => Ok(OwnedFd::from_raw_fd(descriptor)),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let socket = arguments.next().ok_or("usage: serve_nbd SOCKET [SIZE]")?;
    let size = match arguments.next() {
        Some(size) => size.to_string_lossy().parse::<ByteLen>()?,
        None => ByteLen::mib(64),
    };
    let signals = stop_signals()?;
    let on = Loop::new(POLL_MAX_DEFAULT)?;
    on.block_on(serve(&on, &PathBuf::from(socket), size, on.readable(signals.as_fd())))??;
    Ok(())
}

/// nbdinfo connects, reads the size of the disk, and disconnects; the server then removes its socket.
#[test]
fn nbdinfo_reads_size_of_export() {
    let directory = tempfile::tempdir_in("/tmp").expect("a directory");
    let socket = directory.path().join("disk.sock");
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring is available");
    let mut nbdinfo = std::process::Command::new("nbdinfo");
    nbdinfo.arg("--size").arg(uri(&socket));
    // The program runs on a thread of its own, because the server needs this one.
    let ended = on.run_blocking(move || nbdinfo.output());
    let served = on.block_on(serve(&on, &socket, ByteLen::mib(8), ended));
    let started = served.expect("serves").expect("a thread");
    let output = started.expect("nbdinfo is needed: apt-get install -y libnbd-bin");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "8388608");
    assert!(!socket.exists());
}
