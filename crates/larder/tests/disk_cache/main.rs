//! Disks with a cache, through the program: `larder disk serve --cache`, `larder run --disk IMAGE,cache=`, and
//! `larder disk cache`.

mod commands;
mod damaged;
mod failing;
mod refused;
mod replaced;
mod served;
#[path = "../support/mod.rs"]
mod support;
mod write_back;

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_bench::campaign::process::Process;
use serde_json::Value;
use support::{
    TEST_TIMEOUT, disk_serve_command, larder_path, run_command, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs,
    wait_until,
};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Directory of a test's images, caches, sockets, and of Larder's notes about its caches.
pub(crate) struct Place {
    pub(crate) folder: TempDir,
    sockets: TempDir,
}

/// Waits until one of the files is no older than `file`.
fn newer_than(file: &Path, files: &[PathBuf]) {
    let modified = |path: &Path| path.metadata().and_then(|found| found.modified()).ok();
    let changed = modified(file).expect("has a time");
    wait_until("the note is renewed", || files.iter().any(|path| modified(path) >= Some(changed)));
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { folder: temp_dir_on_disk(), sockets: temp_dir_on_tmpfs() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// Creates a raw image of `mib` MiB full of 7.
    pub(crate) fn image(&self, name: &str, mib: u64) -> PathBuf {
        let path = self.path(name);
        run_tool("qemu-img", &["create", "-q", "-f", "raw", text(&path), &format!("{mib}M")]);
        qemu_io("raw", text(&path), &[&format!("write -P 7 0 {mib}M")]);
        path
    }

    pub(crate) fn nbd(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.socket("n")))
    }

    /// Returns `larder disk serve` for an image with a cache. Read-ahead is off, so that the guest's reads reach the
    /// cache.
    pub(crate) fn serve_command(&self, image: &Path, cache: &str, options: &[&str]) -> Command {
        let control = self.socket("c");
        let mut command = disk_serve_command(&[text(image), "--nbd", &self.nbd(), "--control", text(&control)]);
        command.args(["--prefetch", "off", "--cache", cache]).args(options);
        self.with_state(command)
    }

    /// Returns `larder disk serve` for an image without its cache.
    pub(crate) fn without_cache(&self, image: &Path) -> Command {
        let control = self.socket("c");
        self.with_state(disk_serve_command(&[text(image), "--nbd", &self.nbd(), "--control", text(&control)]))
    }

    /// Waits until the note records the server's write to the image.
    pub(crate) fn noted(&self, image: &Path) {
        newer_than(image, &[self.note()]);
    }

    /// Waits until the note in the host's memory, which is updated without delay, records the server's write to the
    /// image.
    pub(crate) fn noted_lately(&self, image: &Path) {
        let name = self.note().file_name().expect("a name").to_owned();
        let user = std::env::var("XDG_RUNTIME_DIR").unwrap_or_default() + "/larder";
        let folders = ["/run/larder", &user, "/dev/shm/larder-0"];
        newer_than(image, &folders.map(|folder| Path::new(folder).join("caches").join(&name)));
    }

    /// Returns the path of the only cache's note.
    pub(crate) fn note(&self) -> PathBuf {
        let notes = std::fs::read_dir(self.path("state/caches")).expect("notes");
        let mut notes = notes.map(|note| note.expect("is there").path());
        notes.find(|path| path.extension().is_none()).expect("one")
    }

    fn with_state(&self, mut command: Command) -> Command {
        command.env("STATE_DIRECTORY", self.path("state"));
        command
    }

    pub(crate) fn serve(&self, image: &Path, cache: &Path, options: &[&str]) -> Served {
        self.start(self.serve_command(image, text(cache), options))
    }

    pub(crate) fn start(&self, command: Command) -> Served {
        let process = Process::start(command).expect("larder starts");
        process.wait_for("serving", TEST_TIMEOUT).expect("it serves");
        self.served(process)
    }

    /// Returns a server once it serves.
    pub(crate) fn served(&self, process: Process) -> Served {
        Served { process, uri: self.nbd(), control: self.socket("c") }
    }

    /// Asserts that a server does not start, and reports all of `words`.
    pub(crate) fn refused(&self, image: &Path, cache: &str, options: &[&str], words: &[&str]) -> String {
        assert_fails(self.serve_command(image, cache, options), words)
    }

    /// Returns the output of `larder disk cache info`.
    pub(crate) fn info(&self, cache: &Path) -> Value {
        let (code, said) = self.cache_command(&["info", text(cache), "--output", "json"]);
        assert_eq!(code, Some(0), "{said}");
        serde_json::from_str(&said).expect("JSON")
    }

    /// Waits until a killed server's I/O has ended, and the cache is free.
    pub(crate) fn left(&self, cache: &Path) {
        wait_until("the cache is free", || self.info(cache)["in_use"] == false);
    }

    /// Runs `larder disk cache`; returns the exit status and the output.
    pub(crate) fn cache_command(&self, arguments: &[&str]) -> (Option<i32>, String) {
        run_command(self.disk_command(&[&["cache"], arguments].concat()))
    }

    /// Returns `larder disk` with these arguments.
    pub(crate) fn disk_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(larder_path());
        command.arg("disk").args(arguments);
        self.with_state(command)
    }
}

/// Asserts that the command fails with all of `words` in its output.
pub(crate) fn assert_fails(command: Command, words: &[&str]) -> String {
    let shown = format!("{command:?}");
    let (code, said) = run_command(command);
    assert_eq!(code, Some(2), "{shown}: {said}");
    for word in words {
        assert!(said.contains(word), "{shown} says nothing of '{word}': {said}");
    }
    said
}

/// Runs commands of qemu-io on an image, all of which must succeed and verify.
pub(crate) fn qemu_io(format: &str, image: &str, commands: &[impl AsRef<str>]) {
    let commands = commands.iter().flat_map(|command| ["-c", command.as_ref()]);
    let all: Vec<&str> = ["-f", format].into_iter().chain(commands).chain([image]).collect();
    let said = run_tool("qemu-io", &all);
    assert!(!said.contains("failed"), "{said}");
}

/// A server with a cache.
pub(crate) struct Served {
    pub(crate) process: Process,
    pub(crate) uri: String,
    pub(crate) control: PathBuf,
}

impl Served {
    pub(crate) fn io(&self, commands: &[impl AsRef<str>]) {
        qemu_io("raw", &self.uri, commands);
    }

    /// Reads the first `mib` MiB sequentially, 4 KiB at a time.
    pub(crate) fn read_all(&self, mib: u64) {
        let count = (mib * 256).to_string();
        let options = ["bench", "-f", "raw", "-s", "4096", "-d", "1", "-c", &count, &self.uri];
        run_tool("qemu-img", &options);
    }

    /// Reads until the cache has the first `mib` MiB: lines that are read under load may not be cached at once.
    pub(crate) fn warm_up(&self, mib: u64) {
        wait_until("the cache has all", || {
            let before = self.count("misses");
            self.read_all(mib);
            self.count("misses") == before
        });
    }

    /// Returns the cache's state from `larder status`.
    pub(crate) fn cache(&self) -> Value {
        let said = run_tool(text(larder_path()), &["status", text(&self.control), "--output", "json"]);
        let all: Value = serde_json::from_str(&said).expect("JSON");
        all["disks"][0]["cache"].clone()
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        let cache = self.cache();
        cache[name].as_u64().unwrap_or_else(|| panic!("no {name} in {cache}"))
    }

    /// Waits until the disk has all data of the cache.
    pub(crate) fn cleaned(&self) {
        wait_until("nothing is dirty", || self.count("dirty") == 0);
    }

    /// Waits until all contents of the cache would survive a crash.
    pub(crate) fn settle(&self) {
        wait_until("all is settled", || self.count("unsettled") == 0);
    }

    /// Stops the server, and returns its output.
    pub(crate) fn stop(mut self) -> String {
        self.process.signal(libc::SIGTERM);
        let status = self.process.wait(TEST_TIMEOUT).expect("ends");
        let said = self.process.output();
        assert!(status.success(), "{said}");
        said
    }

    pub(crate) fn kill(mut self) {
        self.process.kill();
    }
}
