//! A real guest under `larder run`: the test bed's kernel and initramfs, with a script of the test.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use larder_bench::campaign::guest::KERNEL_ARGUMENTS;
use larder_bench::campaign::process::install_script;

/// Time limit that a guest keeps on a loaded machine without KVM.
const PATIENCE: Duration = Duration::from_secs(600);

/// Additional time for Debian, which boots twice and works.
const DEBIANS_PATIENCE: Duration = Duration::from_secs(480);

/// A process ID.
pub(crate) type Pid = i32;

/// Directory of a run's files, with a guest name that no other test uses.
pub(crate) struct Place {
    pub(crate) folder: tempfile::TempDir,
    name: String,
}

impl Place {
    pub(crate) fn new(name: &str) -> Self {
        // The directory is on a disk, not on tmpfs, and its path is short enough for sockets.
        let folder = tempfile::Builder::new().prefix("run-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let folder = folder.expect("a folder in the target directory");
        fs::create_dir(folder.path().join("runtime")).expect("a folder");
        let name = format!("{name}_{}", std::process::id());
        Self { folder, name }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates an image of zeros.
    pub(crate) fn image(&self, name: &str, mib: u64) -> PathBuf {
        let path = self.path(name);
        let file = fs::File::create(&path).expect("creates the image");
        file.set_len(mib << 20).expect("makes it that large");
        path
    }

    /// Returns `larder run OPTIONS -- QEMU`, with a name for the guest.
    pub(crate) fn larder_run(&self, options: &[&str], qemu: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.arg("run").args(options).arg("--").arg(qemu).args(["-name", &self.name]);
        command
            .env("XDG_RUNTIME_DIR", self.path("runtime"))
            .env("STATE_DIRECTORY", self.path("state"))
            .env_remove("LARDER_LOG");
        command
    }

    /// Returns the files that a run has, or has left, wherever they are: one directory, and one file for each piece
    /// of RAM.
    pub(crate) fn leftovers(&self) -> Vec<PathBuf> {
        let user = rustix::process::geteuid().as_raw();
        let places = [
            "/run/larder".into(),
            self.path("runtime/larder"),
            format!("/dev/shm/larder-{user}").into(),
            "/dev/shm".into(),
        ];
        let all = places.iter().filter(|place| place.exists()).flat_map(|place| entries(place));
        all.filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&format!("larder-{}-", self.name))
        })
        .collect()
    }

    /// Returns a program that passes for QEMU, and idles.
    pub(crate) fn idle_qemu(&self) -> PathBuf {
        self.program(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec echo QEMU emulator version 9.2.0\necho IDLE\nexec sleep 1000\n",
        )
    }

    /// Returns a program that runs QEMU 10, from the test bed's Debian 13.
    pub(crate) fn qemu_10(&self) -> PathBuf {
        let script = testbed("debian13.sh");
        self.program(&format!("#!/bin/sh\nexec {} qemu-system-x86_64 \"$@\"\n", script.display()))
    }

    fn program(&self, text: &str) -> PathBuf {
        let path = self.path("qemu-system-x86_64");
        install_script(text, &path);
        path
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("lists the folder");
    entries.map(|entry| entry.expect("is readable").path()).collect()
}

/// Returns the project's directory.
fn project() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    path.canonicalize().expect("the project is there")
}

fn testbed(name: &str) -> PathBuf {
    project().join("testbed").join(name)
}

/// Returns the path of a file that `make setup` builds.
pub(crate) fn built(name: &str) -> PathBuf {
    let path = project().join("target/testbed").join(name);
    assert!(path.exists(), "{} is missing: run make setup", path.display());
    path
}

/// Runs a script of the test bed, and returns its output.
fn call(script: &str, arguments: &[&Path]) -> String {
    let output = Command::new(testbed(script)).args(arguments).output().expect("runs the script");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Returns the host's QEMU.
pub(crate) fn qemu() -> &'static Path {
    Path::new("qemu-system-x86_64")
}

/// A running guest.
pub(crate) struct Guest {
    larder: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    seen: Vec<String>,
    deadline: Instant,
}

impl Guest {
    /// Boots a guest that runs `script`, with `drives` in addition to the devices that every guest needs.
    pub(crate) fn boot(place: &Place, qemu: &Path, options: &[&str], drives: &[&str], script: &str) -> Self {
        Self::boot_by(&built("guest.cpio.gz"), place, qemu, options, drives, script, "")
    }

    /// Boots Debian from the first of `drives`, where it runs `script` at each boot.
    ///
    /// Where QEMU emulates the processors, the guest uses one of two. While one processor patches the kernel's code,
    /// as systemd causes at each boot, QEMU (seen in 7.2 and 10.0) may keep the intermediate int3 for the other one,
    /// and both spin for ever (Red Hat bug 2216496; it takes hundreds of boots).
    pub(crate) fn boot_debian(place: &Place, drives: &[&str], script: &str) -> Self {
        let kernel = match call("accel.sh", &[]).as_str() {
            "tcg" => "maxcpus=1",
            _ => "",
        };
        let mut guest = Self::boot_by(&built("boot.cpio.gz"), place, qemu(), &[], drives, script, kernel);
        guest.deadline += DEBIANS_PATIENCE;
        guest
    }

    /// Boots a guest with this initramfs; `kernel` is added to its kernel command line.
    fn boot_by(
        initramfs: &Path,
        place: &Place,
        qemu: &Path,
        options: &[&str],
        drives: &[&str],
        script: &str,
        kernel: &str,
    ) -> Self {
        let script_file = place.path("script.sh");
        fs::write(&script_file, script).expect("writes the script");
        let initrd = place.path("initrd");
        call("with-script.sh", &[initramfs, &script_file, &initrd]);
        let accel = call("accel.sh", &[]);
        let mut command = place.larder_run(options, qemu);
        command
            .args(["-accel", &accel, "-m", "512", "-smp", "2", "-nodefaults", "-display", "none"])
            .args(["-serial", "stdio", "-no-reboot", "-append", &format!("{KERNEL_ARGUMENTS} {kernel}")])
            .arg("-kernel")
            .arg(built("vmlinuz"))
            .arg("-initrd")
            .arg(&initrd)
            .args(drives);
        if accel == "kvm" {
            command.args(["-cpu", "host"]);
        }
        Self::start(command)
    }

    /// Starts larder with the QEMU of the command.
    pub(crate) fn start(mut command: Command) -> Self {
        let mut larder =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts larder");
        let (sender, lines) = channel();
        let output = larder.stdout.take().expect("is piped");
        let errors = larder.stderr.take().expect("is piped");
        let both: [Box<dyn std::io::Read + Send>; 2] = [Box::new(output), Box::new(errors)];
        for stream in both {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                    // The test may have ended.
                    let _ = sender.send(String::from_utf8_lossy(&line).trim_end().to_owned());
                }
            });
        }
        Self { stdin: larder.stdin.take(), larder, lines, seen: Vec::new(), deadline: Instant::now() + PATIENCE }
    }

    /// Waits for a line that begins with `start`, on the guest's console or among larder's messages.
    pub(crate) fn line(&mut self, start: &str) -> String {
        self.line_that(&format!("line '{start}'"), |line| line.starts_with(start))
    }

    /// Waits for a line that contains `text`.
    pub(crate) fn line_with(&mut self, text: &str) -> String {
        self.line_that(&format!("line with '{text}'"), |line| line.contains(text))
    }

    fn line_that(&mut self, name: &str, wanted: impl Fn(&str) -> bool) -> String {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if wanted(&line) {
                        return line;
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("no {name} came; there were:\n{}", self.seen.join("\n"));
                }
            }
        }
    }

    /// Types a line at the guest's console.
    pub(crate) fn type_line(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("is piped");
        writeln!(stdin, "{text}").expect("QEMU reads");
    }

    /// Returns the PID of larder's own process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::try_from(self.larder.id()).expect("a process number")
    }

    /// Returns its children whose command line contains `word`.
    pub(crate) fn children(&self, word: &str) -> Vec<Pid> {
        let pid = self.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("larder lives");
        let children = children.split_whitespace().filter_map(|text| text.parse().ok());
        children.filter(|pid| command_line(*pid).contains(word)).collect()
    }

    /// Waits for a child whose command line contains `word` and for which `wanted` is true.
    pub(crate) fn child_when(&self, word: &str, wanted: impl Fn(Pid) -> bool) -> Pid {
        loop {
            if let Some(pid) = self.children(word).into_iter().find(|pid| wanted(*pid)) {
                return pid;
            }
            self.pause(&format!("no child '{word}' became what was waited for"));
        }
    }

    /// Connects to QEMU's monitor once QEMU has set up its devices.
    pub(crate) fn monitor(&self, socket: &Path) -> UnixStream {
        let mut stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(_) => self.pause("QEMU has made no monitor"),
            }
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("takes a limit");
        let mut text = Vec::new();
        while !text.ends_with(b"(qemu) ") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a prompt");
            text.extend(byte);
        }
        stream
    }

    /// Kills the only server, and waits until the next one listens.
    pub(crate) fn replace_server(&self) {
        let killed = self.child_when("disk serve", listens);
        signal(killed, rustix::process::Signal::KILL);
        self.wait_until_gone(&[killed]);
        self.child_when("disk serve", |pid| pid != killed && listens(pid));
    }

    /// Waits until none of the processes exists.
    pub(crate) fn wait_until_gone(&self, pids: &[Pid]) {
        while pids.iter().any(|pid| is_alive(*pid)) {
            self.pause("a process did not end");
        }
    }

    fn pause(&self, problem: &str) {
        assert!(Instant::now() < self.deadline, "{problem}; the lines so far:\n{}", self.seen.join("\n"));
        std::thread::sleep(Duration::from_millis(5));
    }

    /// Waits for larder's end. Returns its exit status, or 1000 plus the signal that ended it, and the whole output.
    pub(crate) fn end(mut self) -> (i32, String) {
        drop(self.stdin.take());
        let status = loop {
            if let Some(status) = self.larder.try_wait().expect("can be waited for") {
                break status;
            }
            self.pause("larder did not end");
        };
        self.seen.extend(self.lines.iter());
        let code = status.code().or_else(|| status.signal().map(|signal| 1000 + signal));
        (code.expect("it ended by either"), std::mem::take(&mut self.seen).join("\n"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Reached with a running larder after a failed assertion; its children end with it.
        let _ = self.larder.kill();
        let _ = self.larder.wait();
    }
}

/// Returns a process's name in process lists.
pub(crate) fn short_name(pid: Pid) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).expect("the process exists");
    name.trim_end().to_owned()
}

pub(crate) fn command_line(pid: Pid) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Returns true if the process exists and is no zombie.
pub(crate) fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, behind)| !behind.starts_with(['Z', 'X']))
}

/// Returns true if a server listens: its PID file then has its PID.
pub(crate) fn listens(server: Pid) -> bool {
    let line = command_line(server);
    let file = line.split(' ').skip_while(|word| *word != "--pidfile").nth(1);
    let text = file.and_then(|file| fs::read_to_string(file).ok());
    text.is_some_and(|text| text.trim() == server.to_string())
}

/// Returns the number of bytes that the process has written to disks.
pub(crate) fn bytes_written(pid: Pid) -> u64 {
    let counters = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let value = counters.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    value.and_then(|value| value.parse().ok()).unwrap_or_default()
}

/// Sends a signal.
pub(crate) fn signal(pid: Pid, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process number");
    rustix::process::kill_process(pid, signal).expect("the process exists");
}

/// Takes an OFD lock on a byte, until the file is closed. Waits while another process has the byte locked, such as a
/// server that was just killed.
pub(crate) fn lock_byte(file: &fs::File, byte: i64, kind: libc::c_int) {
    // SAFETY: all fields are integers, for which zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = byte;
    lock.l_len = 1;
    // SAFETY: the file is open, and `lock` is a valid structure.
    let result = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(file), libc::F_OFD_SETLKW, &raw const lock) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
