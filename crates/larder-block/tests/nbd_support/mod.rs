//! Support code for the tests of NBD: third-party servers and clients as helper processes.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

pub mod certificates;
pub mod fake;

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use larder_block::nbd::NbdUri;

/// The Debian package of each program.
const PACKAGES: [(&str, &str); 9] = [
    ("nbdkit", "nbdkit"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("qemu-nbd", "qemu-utils"),
    ("fio", "fio"),
    ("certtool", "gnutls-bin"),
    ("openssl", "openssl"),
];

/// Returns a command for `program`, which must be installed.
pub fn program(program: &str) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).exists());
    let package = PACKAGES.iter().find(|(name, _)| *name == program).map_or(program, |(_, package)| package);
    assert!(found, "{program} is needed: apt-get install -y {package}, or run testbed/setup.sh");
    Command::new(program)
}

/// Returns a command for a program of the Debian 13 chroot, whose QEMU supports extended headers.
pub fn program_of_debian13(program: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let stamp = root.join("target/testbed/debian13.stamp");
    assert!(stamp.exists(), "the Debian 13 chroot is needed: run testbed/setup.sh");
    let mut command = Command::new(root.join("testbed/debian13.sh"));
    command.arg(program);
    command
}

/// Runs a program, which must succeed, and returns its output.
pub fn run(command: &mut Command) -> String {
    let output = output(command);
    assert!(
        output.status.success(),
        "{command:?} failed ({}):\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a program to its end, with any exit status.
pub fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// A helper process that is killed when this value is dropped.
pub struct Helper(Child);

impl Helper {
    pub fn start(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::null()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self(child)
    }

    /// Sends SIGKILL, and waits until the process has exited.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Sends SIGTERM, and waits until the process has exited.
    pub fn terminate(&mut self) {
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(self.0.id() as i32, libc::SIGTERM) };
        let _ = self.0.wait();
    }

    /// Waits until the process has exited successfully, and returns its piped output.
    pub fn finish(&mut self) -> String {
        let mut printed = String::new();
        if let Some(mut stdout) = self.0.stdout.take() {
            stdout.read_to_string(&mut printed).expect("is text");
        }
        let status = self.0.wait().expect("is our child");
        assert!(status.success(), "the helper failed: {status}");
        printed
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Creates a directory for sockets and images that is removed after the test.
pub fn folder() -> tempfile::TempDir {
    // The path is short, because socket paths must be.
    tempfile::Builder::new().prefix("larder-nbd-").tempdir_in("/tmp").expect("a temporary folder")
}

/// The listening socket of an NBD server. It exists before the server starts and while the server is down, so that
/// tests need not wait for the server (socket activation: LISTEN_FDS).
pub struct Place {
    pub folder: tempfile::TempDir,
    listener: UnixListener,
}

impl Place {
    pub fn new() -> Self {
        let folder = folder();
        let listener = UnixListener::bind(folder.path().join("nbd.sock")).expect("a socket");
        Self { folder, listener }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn uri(&self, export: &str) -> NbdUri {
        let uri = format!("nbd+unix:///{export}?socket={}", self.socket().display());
        uri.parse().expect("a URI")
    }

    /// Starts `program ARGUMENTS` with the socket.
    pub fn serve(&self, program_name: &str, arguments: &[&str]) -> Helper {
        self.serve_by(program(program_name).args(arguments))
    }

    /// Starts `server` with the socket.
    pub fn serve_by(&self, server: &Command) -> Helper {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"LISTEN_PID=$$ LISTEN_FDS=1 exec "$@""#, "sh"])
            .arg(server.get_program())
            .args(server.get_args());
        pass_descriptor(&mut command, self.listener.as_raw_fd());
        Helper::start(&mut command)
    }

    /// Starts nbdkit, which exits with this process.
    pub fn nbdkit(&self, arguments: &[&str]) -> Helper {
        let mut all = vec!["-f", "--exit-with-parent"];
        all.extend(arguments);
        self.serve("nbdkit", &all)
    }

    /// Returns another handle to the listening socket.
    pub fn listener(&self) -> OwnedFd {
        self.listener.try_clone().expect("a descriptor").into()
    }

    pub fn std_listener(&self) -> UnixListener {
        self.listener.try_clone().expect("a descriptor")
    }
}

/// Makes `descriptor` descriptor 3 of the child.
fn pass_descriptor(command: &mut Command, descriptor: i32) {
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(move || {
            let result = if descriptor == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(descriptor, 3) };
            if result < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// Returns pseudo-random bytes that depend on `seed`.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        let word = random.next().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    bytes
}

/// A small seeded generator of random numbers (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound
    }
}

/// Returns the whole content of an export, as read by nbdcopy.
pub fn contents(uri: &NbdUri, folder: &Path) -> Vec<u8> {
    let image = folder.join("contents");
    run(program("nbdcopy").arg("--request-size=8192").arg(uri.to_string()).arg(&image));
    std::fs::read(image).expect("is there")
}
