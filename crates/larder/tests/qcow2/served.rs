//! A served image, with QEMU's tools as its clients.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::process::Process;
use tempfile::TempDir;

use crate::support::{TEST_TIMEOUT, disk_serve_command, run_tool, start_io_without_flush, temp_dir_on_tmpfs};

/// Returns a path as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A running `larder disk serve` of an image over NBD.
pub(crate) struct Served {
    pub(crate) process: Process,
    image: PathBuf,
    folder: TempDir,
}

fn uri_in(folder: &Path) -> String {
    format!("nbd+unix:///?socket={}/socket", folder.display())
}

impl Served {
    /// Starts a server without waiting for its success.
    pub(crate) fn unchecked(image: &Path, options: &[&str]) -> Self {
        let folder = temp_dir_on_tmpfs();
        let uri = uri_in(folder.path());
        let mut arguments = vec![text(image), "--nbd", &uri];
        arguments.extend(options);
        let process = Process::start(disk_serve_command(&arguments)).expect("starts");
        Self { process, image: image.to_owned(), folder }
    }

    pub(crate) fn new(image: &Path, options: &[&str]) -> Self {
        let served = Self::unchecked(image, options);
        if let Err(error) = served.process.wait_for("serving", TEST_TIMEOUT) {
            panic!("{}: {error:#}", image.display());
        }
        served
    }

    pub(crate) fn uri(&self) -> String {
        uri_in(self.folder.path())
    }

    /// Runs commands of qemu-io; returns true if all succeeded, and the output.
    pub(crate) fn try_io<S: AsRef<str>>(&self, commands: &[S]) -> (bool, String) {
        qemu_io("raw", &self.uri(), commands)
    }

    /// Runs commands of qemu-io, all of which must succeed.
    pub(crate) fn io<S: AsRef<str>>(&self, commands: &[S]) -> String {
        let (success, said) = self.try_io(commands);
        assert!(success, "{said}\n{}", self.process.output());
        said
    }

    /// Runs commands as [`io_without_flush`] does.
    pub(crate) fn io_without_flush<S: AsRef<str>>(&self, commands: &[S]) -> Process {
        start_io_without_flush(&self.uri(), commands)
    }

    /// Returns the content of the whole disk as a client reads it.
    pub(crate) fn dump(&self) -> Vec<u8> {
        let into = self.folder.path().join("dump");
        dump("raw", &self.uri(), &into)
    }

    /// Stops the server, which must succeed, and returns its output.
    pub(crate) fn stop(mut self) -> String {
        self.process.signal(libc::SIGTERM);
        let status = self.process.wait(TEST_TIMEOUT).expect("ends");
        let said = self.process.output();
        assert_eq!(status.code(), Some(0), "{said}");
        await_release(&self.image);
        said
    }

    /// Kills the server.
    pub(crate) fn kill(mut self) {
        self.process.kill();
        await_release(&self.image);
    }
}

/// Asserts that Larder refuses to serve an image; returns the output, which names the file, or a file of the same
/// directory that the image refers to.
pub(crate) fn refused(image: &Path, options: &[&str]) -> String {
    let mut served = Served::unchecked(image, options);
    assert!(served.process.wait_for("serving", TEST_TIMEOUT).is_err(), "{} is served", image.display());
    let status = served.process.wait(TEST_TIMEOUT).expect("ends");
    let said = served.process.output();
    assert_eq!(status.code(), Some(2), "{said}");
    let folder = image.parent().expect("a file");
    assert!(said.contains(text(folder)), "the file is not named: {said}");
    said
}

/// Waits until no process has the image locked: the kernel drops the locks of a process that has exited only after
/// its last I/O.
pub(crate) fn await_release(image: &Path) {
    let give_up = Instant::now() + TEST_TIMEOUT;
    loop {
        // This opens a data file, too.
        let output = Command::new("qemu-img").args(["check", "-f", "qcow2", text(image)]).output();
        let said = String::from_utf8_lossy(&output.expect("qemu-img is there").stderr).into_owned();
        if !said.contains("Failed to get") {
            return;
        }
        assert!(Instant::now() < give_up, "{said}");
    }
}

/// Runs commands of qemu-io; returns true if all succeeded, and the output.
pub(crate) fn qemu_io<S: AsRef<str>>(format: &str, image: &str, commands: &[S]) -> (bool, String) {
    qemu_io_with(&[], format, image, commands)
}

/// Runs commands of qemu-io with more options. With `-t writeback` writes are flushed at the end; otherwise after
/// each write.
pub(crate) fn qemu_io_with<S: AsRef<str>>(
    options: &[&str],
    format: &str,
    image: &str,
    commands: &[S],
) -> (bool, String) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", format, "-d", "unmap"]).args(options);
    for text in commands {
        command.args(["-c", text.as_ref()]);
    }
    let output = command.arg(image).output().expect("qemu-io is there");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    // Errors of asynchronous commands do not affect the exit status.
    let success = output.status.success() && !said.contains("failed") && !said.to_lowercase().contains("error");
    (success, said)
}

/// Returns the content of a disk as QEMU reads it.
pub(crate) fn dump(format: &str, image: &str, into: &Path) -> Vec<u8> {
    run_tool("qemu-img", &["convert", "-f", format, "-O", "raw", image, text(into)]);
    let bytes = fs::read(into).expect("reads");
    fs::remove_file(into).expect("removes");
    bytes
}

/// Compares a raw file and an image with `qemu-img compare`, including their sizes.
pub(crate) fn compare(raw: &Path, format: &str, image: &str) {
    let said = run_tool("qemu-img", &["compare", "-f", "raw", "-F", format, text(raw), image]);
    assert!(!said.contains("size mismatch"), "{image}: {said}");
}

/// Result of `qemu-img check`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Health {
    Clean,
    Leaks,
}

/// Checks an image with `qemu-img check`; errors fail the test.
pub(crate) fn health(image: &Path) -> Health {
    let output =
        Command::new("qemu-img").args(["check", "-f", "qcow2", text(image)]).output().expect("qemu-img is there");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => Health::Clean,
        Some(3) => Health::Leaks,
        _ => panic!("qemu-img check {}: {said}", image.display()),
    }
}

/// A temporary directory that is kept if the test fails.
pub(crate) struct Folder(Option<TempDir>);

impl Folder {
    pub(crate) fn new(folder: TempDir) -> Self {
        Self(Some(folder))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.as_ref().expect("until it is dropped").path().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(folder) = self.0.take()
        {
            eprintln!("the images are kept in {}", folder.keep().display());
        }
    }
}
