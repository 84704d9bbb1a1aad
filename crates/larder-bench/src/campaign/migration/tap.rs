//! A relay between QEMU and Larder that records a digest of all bytes, so that sent and received bytes can be
//! compared.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context;

/// Digest of a channel's bytes in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Number of bytes.
    pub bytes: u64,
    /// 64-bit FNV-1a hash of the bytes.
    pub hash: u64,
}

impl Default for Digest {
    fn default() -> Self {
        Self { bytes: 0, hash: 0xcbf2_9ce4_8422_2325 }
    }
}

impl Digest {
    fn take(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        for &byte in bytes {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// Digests of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// From the source to the destination.
    pub there: Digest,
    /// From the destination to the source.
    pub back: Digest,
}

type Channel = [JoinHandle<Digest>; 2];

/// A listening socket whose connections are relayed to another socket.
pub struct Tap {
    listener: Arc<UnixListener>,
    accepting: JoinHandle<Vec<Channel>>,
}

impl Tap {
    /// Listens at `path`, and relays each connection to `to`.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn start(path: &Path, to: &Path) -> anyhow::Result<Self> {
        let listener = Arc::new(UnixListener::bind(path)?);
        let to = to.to_owned();
        let accept_listener = Arc::clone(&listener);
        let accepting = std::thread::spawn(move || accept(&accept_listener, &to));
        Ok(Self { listener, accepting })
    }

    /// Waits until all connections have ended. Returns their digests, in the order in which they were made.
    ///
    /// # Errors
    /// If a thread of the tap has failed.
    pub fn finish(self) -> anyhow::Result<Vec<Carried>> {
        rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both)?;
        let channels = self.accepting.join().ok().context("a thread of the tap panicked")?;
        let digest = |pump: JoinHandle<Digest>| pump.join().ok().context("a thread of the tap panicked");
        channels.into_iter().map(|[there, back]| Ok(Carried { there: digest(there)?, back: digest(back)? })).collect()
    }
}

fn accept(listener: &UnixListener, to: &PathBuf) -> Vec<Channel> {
    let mut channels = Vec::new();
    // `finish` shuts the listener down.
    while let Ok((from, _)) = listener.accept() {
        // If nothing listens at `to`, the connection is closed, which stands for a refusal.
        let Ok(to) = UnixStream::connect(to) else { continue };
        let (from, to) = (Arc::new(from), Arc::new(to));
        let pump = |from: &Arc<UnixStream>, to: &Arc<UnixStream>| {
            let (from, to) = (Arc::clone(from), Arc::clone(to));
            std::thread::spawn(move || pump(&from, &to))
        };
        channels.push([pump(&from, &to), pump(&to, &from)]);
    }
    channels
}

fn pump(mut from: &UnixStream, mut to: &UnixStream) -> Digest {
    let mut digest = Digest::default();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(len) => {
                digest.take(&buffer[..len]);
                if to.write_all(&buffer[..len]).is_err() {
                    // The receiver no longer reads.
                    let _ = from.shutdown(Shutdown::Read);
                    break;
                }
            }
            Err(_) => {
                let _ = to.shutdown(Shutdown::Both);
                break;
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    digest
}
