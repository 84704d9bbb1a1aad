//! A sender and a receiver between two ends that stand for QEMU's and that a test controls.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_bench::campaign::migration::larder::{Side, send_command};
use larder_bench::campaign::migration::relay::{Relay, Tamper, Way};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use tempfile::TempDir;

use crate::support::{TEST_TIMEOUT, larder_path, run_command, temp_dir_on_tmpfs, test_pattern};

const PAGE: usize = 4096;

/// Returns QEMU's main channel for a guest of `pages` pages, each sent once: header, memory, a device, end. There is
/// no return path, as the stream does not ask for it.
pub(crate) fn main_channel(pages: usize) -> Vec<u8> {
    let mut out = b"QEVM\0\0\0\x03".to_vec();
    let section = |out: &mut Vec<u8>, kind: u8| out.extend_from_slice(&[kind, 0, 0, 0, 2]);
    let records_end = |out: &mut Vec<u8>| {
        out.extend_from_slice(&0x10_u64.to_be_bytes());
        out.extend_from_slice(&[0x7e, 0, 0, 0, 2]);
    };
    section(&mut out, 1);
    out.extend_from_slice(b"\x03ram\0\0\0\0\0\0\0\x04");
    let bytes = (pages * PAGE) as u64;
    out.extend_from_slice(&(bytes | 4).to_be_bytes());
    out.extend_from_slice(b"\x06pc.ram");
    out.extend_from_slice(&bytes.to_be_bytes());
    records_end(&mut out);
    for (number, kind) in [(0..pages / 2, 2), (pages / 2..pages, 3)] {
        section(&mut out, kind);
        for page in number.clone() {
            let first = page == number.start;
            let zero = page % 5 == 0;
            let flags = if zero { 2 } else { 8 } | if first { 0 } else { 0x20 };
            out.extend_from_slice(&((page * PAGE) as u64 | flags).to_be_bytes());
            if first {
                out.extend_from_slice(b"\x06pc.ram");
            }
            match page % 5 {
                0 => out.push(0),
                1 => out.extend_from_slice(&[page as u8; PAGE]),
                _ => out.extend_from_slice(&test_pattern(page as u64, PAGE)),
            }
        }
        records_end(&mut out);
    }
    out.extend_from_slice(b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x02");
    out.extend_from_slice(&test_pattern(7, 20_000));
    out.extend_from_slice(&[0x7e, 0, 0, 0, 3, 0]);
    out
}

/// A receiver that waits for its sender, and the socket where QEMU would wait.
pub(crate) struct Waiting {
    folder: TempDir,
    incoming: UnixListener,
    pub(crate) receiver: Side,
}

impl Waiting {
    /// Starts a receiver with further arguments.
    pub(crate) fn start(words: &[&str]) -> Self {
        let folder = temp_dir_on_tmpfs();
        let incoming = UnixListener::bind(folder.path().join("qemu")).expect("a socket");
        incoming.set_nonblocking(true).expect("a socket");
        let receiver = Side::receiver(larder_path(), &folder.path().join("qemu"), words).expect("it listens");
        Self { folder, incoming, receiver }
    }

    /// Starts a receiver that gives up root for this user, with further arguments. QEMU runs as the user if `is_his`
    /// is set.
    pub(crate) fn start_as(user: u32, is_his: bool, words: &[&str]) -> Self {
        let folder = temp_dir_on_tmpfs();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).expect("ours");
        let path = folder.path().join("qemu");
        let listens = || {
            if is_his {
                let user = Uid::from_raw(user);
                set_thread_res_uid(user, user, user).expect("root");
            }
            UnixListener::bind(&path).expect("a socket")
        };
        // A socket belongs to the user of the thread that creates it.
        let incoming = std::thread::scope(|scope| scope.spawn(listens).join().expect("no panic"));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).expect("ours");
        incoming.set_nonblocking(true).expect("a socket");
        let user = user.to_string();
        let words = [&["--user", &user], words].concat();
        let receiver = Side::receiver(larder_path(), &path, &words).expect("it listens");
        Self { folder, incoming, receiver }
    }

    /// Returns true if no connection to QEMU was made.
    pub(crate) fn is_untouched(&self) -> bool {
        self.incoming.accept().is_err()
    }

    /// Returns the connection that QEMU gets.
    pub(crate) fn qemu(&self) -> UnixStream {
        connected(&self.incoming, &self.receiver).expect("the receiver connects")
    }

    /// Returns the output of a sender with these arguments, which must be refused.
    pub(crate) fn refuses(&self, words: &[&str]) -> String {
        let to = self.receiver.address().to_string();
        let (code, said) = run_command(send_command(larder_path(), &self.folder.path().join("refused"), &to, words));
        assert_eq!(code, Some(2), "{said}");
        assert!(!said.contains("ready to send"), "{said}");
        said
    }

    /// Starts a sender with two lanes and further arguments, which connects through a relay.
    pub(crate) fn joined(self, words: &[&str]) -> Between {
        self.joined_by(words, |_, _| None)
    }

    /// Starts a sender like [`Self::joined`], through a relay that changes the data.
    pub(crate) fn joined_by(
        self,
        words: &[&str],
        tamper: impl Fn(usize, Way) -> Option<Box<dyn Tamper>> + Send + Sync + 'static,
    ) -> Between {
        let relay = Relay::start_with_tamper(self.receiver.address(), tamper).expect("a port");
        self.joined_over(relay, larder_path(), words)
    }

    /// Starts a sender like [`Self::joined`], without a relay.
    pub(crate) fn joined_directly(self, words: &[&str]) -> Between {
        // The relay is not used.
        let relay = Relay::start(self.receiver.address()).expect("a port");
        let to = self.receiver.address();
        self.joined_to(to, relay, larder_path(), words)
    }

    /// Starts a sender like [`Self::joined`], with this program as the sender.
    pub(crate) fn joined_with(self, larder: &Path, words: &[&str]) -> Between {
        let relay = Relay::start_with_tamper(self.receiver.address(), |_, _| None).expect("a port");
        self.joined_over(relay, larder, words)
    }

    fn joined_over(self, relay: Relay, larder: &Path, words: &[&str]) -> Between {
        let to = relay.address();
        self.joined_to(to, relay, larder, words)
    }

    fn joined_to(self, to: SocketAddr, relay: Relay, larder: &Path, words: &[&str]) -> Between {
        let words = [&["--lanes", "2"], words].concat();
        let sender = Side::sender(larder, &self.folder.path().join("sender"), to, &words);
        Between {
            folder: self.folder,
            incoming: self.incoming,
            receiver: self.receiver,
            relay,
            sender: sender.expect("it connects"),
        }
    }
}

/// Returns the connection that a receiver makes to QEMU; `None` if it ends before.
fn connected(incoming: &UnixListener, receiver: &Side) -> Option<UnixStream> {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        // Checked before accepting: the receiver may have connected and ended.
        let has_ended = receiver.process.has_ended();
        match incoming.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false).expect("a socket");
                return Some(socket);
            }
            Err(_) if has_ended => return None,
            Err(_) => {}
        }
        assert!(Instant::now() < give_up, "the receiver does not connect");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Both sides of Larder, a relay between them, and sockets for QEMU's ends.
pub(crate) struct Between {
    folder: TempDir,
    incoming: UnixListener,
    pub(crate) receiver: Side,
    pub(crate) relay: Relay,
    pub(crate) sender: Side,
}

impl Between {
    pub(crate) fn start() -> Self {
        Waiting::start(&[]).joined(&[])
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a connection of the source's QEMU.
    pub(crate) fn source(&self) -> UnixStream {
        UnixStream::connect(self.path("sender")).expect("the sender listens")
    }

    /// Returns a connection of the source's QEMU; `None` if the sender has ended before.
    pub(crate) fn source_unless_over(&self) -> Option<UnixStream> {
        UnixStream::connect(self.path("sender")).ok()
    }

    /// Returns the connection that the destination's QEMU gets.
    pub(crate) fn destination(&self) -> UnixStream {
        self.destination_unless_over().expect("the receiver connects")
    }

    /// Returns the connection that the destination's QEMU gets; `None` if the receiver ends before.
    pub(crate) fn destination_unless_over(&self) -> Option<UnixStream> {
        connected(&self.incoming, &self.receiver)
    }

    /// Waits until both sides have failed, and returns the output of sender and receiver.
    pub(crate) fn fail(&mut self) -> [String; 2] {
        [&mut self.sender, &mut self.receiver].map(|side| {
            let (code, said) = side.end().expect("it ends");
            // A killed side has no exit status.
            assert!(code.is_none_or(|code| code == 2), "{code:?} {said}");
            said
        })
    }

    /// Waits until both sides have succeeded, and returns the sender's output.
    pub(crate) fn succeed(&mut self) -> String {
        let [said, _] = [&mut self.sender, &mut self.receiver].map(|side| {
            let (code, said) = side.end().expect("it ends");
            assert_eq!(code, Some(0), "{said}");
            said
        });
        said
    }
}

/// Writes a whole channel in a thread, as far as possible; the socket stays open.
pub(crate) fn write(mut socket: UnixStream, bytes: Vec<u8>) -> JoinHandle<UnixStream> {
    std::thread::spawn(move || {
        // The test may break the connection.
        let _ = socket.write_all(&bytes);
        socket
    })
}

/// Data received from a channel, read in a thread.
pub(crate) struct Received {
    state: Arc<(Mutex<Vec<u8>>, Condvar)>,
    thread: JoinHandle<()>,
}

impl Received {
    pub(crate) fn from(mut socket: UnixStream) -> Self {
        let state = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            let mut piece = vec![0; 256 << 10];
            // Any error or end of the stream ends the reading.
            while let Ok(len @ 1..) = socket.read(&mut piece) {
                shared.0.lock().expect("whole").extend_from_slice(&piece[..len]);
                shared.1.notify_all();
            }
        });
        Self { state, thread }
    }

    /// Returns received data that consists of these bytes only.
    pub(crate) fn of(bytes: Vec<u8>) -> Self {
        Self { state: Arc::new((Mutex::new(bytes), Condvar::new())), thread: std::thread::spawn(|| {}) }
    }

    /// Waits until this many bytes were received.
    pub(crate) fn wait_for(&self, count: usize) {
        let bytes = self.state.0.lock().expect("whole");
        let waited = self.state.1.wait_timeout_while(bytes, TEST_TIMEOUT, |bytes| bytes.len() < count);
        let (bytes, timeout) = waited.expect("whole");
        assert!(!timeout.timed_out(), "{} of {count} bytes came", bytes.len());
    }

    /// Waits for the end, and returns everything that was received.
    pub(crate) fn end(self) -> Vec<u8> {
        self.thread.join().expect("read");
        std::mem::take(&mut self.state.0.lock().expect("whole"))
    }
}

/// Waits until Larder has closed a socket of QEMU's, in either way.
pub(crate) fn was_closed(mut socket: &UnixStream) -> bool {
    socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
    match socket.read(&mut [0]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Carries a whole channel, and lets everything end properly.
pub(crate) fn carries(between: &mut Between, pages: usize) {
    let stream = main_channel(pages);
    let writer = write(between.source(), stream.clone());
    carries_on(between, &stream, || writer.join().expect("written"));
}

/// Carries a channel that `written` writes to a socket and returns; returns the sender's output.
pub(crate) fn carries_on(between: &mut Between, stream: &[u8], written: impl FnOnce() -> UnixStream) -> String {
    let destination = between.destination();
    let received = Received::from(destination.try_clone().expect("a socket"));
    let source = written();
    source.shutdown(Shutdown::Write).expect("a socket");
    let received = received.end();
    assert!(received == stream, "{} bytes became {}", stream.len(), received.len());
    drop(destination);
    assert!(was_closed(&source));
    between.succeed()
}
