//! Helpers shared by the tests of the program: directories for images, servers, loop devices, mounts.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

#[path = "../../../larder-block/tests/nbd_support/certificates.rs"]
pub mod certificates;

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::front_end::FrontEnd;
use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::process::Process;
use larder_bench::campaign::server::Server;
use tempfile::TempDir;

/// Time limit for operations that may take long on a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Returns the path of the program.
pub fn larder_path() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_larder"))
}

/// Creates a directory on the disk that the project is built on.
pub fn temp_dir_on_disk() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("creating a directory in target/tmp")
}

/// Creates a directory on tmpfs.
pub fn temp_dir_on_tmpfs() -> TempDir {
    tempfile::tempdir_in("/dev/shm").expect("creating a directory in /dev/shm")
}

/// Creates an image of zeros.
pub fn create_image(directory: &Path, bytes: u64) -> PathBuf {
    let path = directory.join("disk.raw");
    File::create(&path).and_then(|file| file.set_len(bytes)).expect("creating the image");
    path
}

/// Starts a server for `image` with a socket in `directory`, which should have a short path.
pub fn start_server(image: &Path, directory: &Path, options: &[&str]) -> Server {
    Server::start(larder_path(), image, &directory.join("socket"), options).expect("the server starts")
}

/// Checks that a guest can write, and reads its data back.
pub fn assert_io_works(guest: &mut FrontEnd, seed: u64) {
    let (data, bytes) = (guest.data(), test_pattern(seed, 4096));
    guest.memory.write(data, &bytes);
    let (out, into) = ([Buffer { address: data, len: 4096 }], [Buffer { address: data + 4096, len: 4096 }]);
    assert_eq!(guest.queue().run(&Request::write(8, &out)).expect("writes").status, 0);
    assert_eq!(guest.queue().run(&Request::read(8, &into)).expect("reads").status, 0);
    assert_eq!(guest.memory.read_vec(data + 4096, 4096), bytes);
}

/// Waits until `condition` holds; `what` names the condition in the error after [`TEST_TIMEOUT`].
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "still not true after {TEST_TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until a server listens on a unix socket.
pub fn wait_until_listening(socket: &Path) {
    wait_until(&format!("a server listens on {}", socket.display()), || UnixStream::connect(socket).is_ok());
}

/// Runs a command to its end; returns the exit status and the output.
pub fn run_command(command: Command) -> (Option<i32>, String) {
    let mut process = Process::start(command).expect("starts");
    let status = process.wait(TEST_TIMEOUT).expect("ends");
    (status.code(), process.output())
}

/// Returns `larder disk serve` with these arguments.
pub fn disk_serve_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(larder_path());
    command.args(["disk", "serve"]).args(arguments);
    command
}

/// Runs a tool that must succeed, and returns its output.
pub fn run_tool(program: &str, arguments: &[&str]) -> String {
    // Error of QEMU's tools on a busy host when they encrypt an image: they first measure CPU time, and got too
    // little of it.
    const CPU_MEASUREMENT_ERROR: &str = "Unable to get accurate CPU usage";
    let mut attempts = 0;
    loop {
        // The timeout ends a tool whose server does not answer.
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", &TEST_TIMEOUT.as_secs().to_string(), program]);
        let output = command.args(arguments).output().expect("timeout(1) is installed");
        let is_missing = output.status.code() == Some(127);
        assert!(!is_missing, "{program} is missing: testbed/setup.sh installs what the tests need");
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        attempts += 1;
        if attempts < 20 && !output.status.success() && text.contains(CPU_MEASUREMENT_ERROR) {
            continue;
        }
        assert!(output.status.success(), "{program} {arguments:?}: {}: {text}", output.status);
        return text.trim().to_owned();
    }
}

/// Fails a test that needs root if it runs without, so that it does not pass unnoticed.
pub fn require_root(purpose: &str) {
    assert!(rustix::process::geteuid().is_root(), "this test needs root: {purpose}");
}

/// Returns arbitrary bytes that depend on `seed`.
pub fn test_pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| step()).collect()
}

/// A loop device over a file; detached on drop.
pub struct LoopDevice(pub PathBuf);

impl LoopDevice {
    pub fn new(file: &Path, sector_bytes: u32) -> Self {
        require_root("to make a loop device");
        let sector = sector_bytes.to_string();
        let path = run_tool("losetup", &["--find", "--show", "--sector-size", &sector, file.to_str().expect("UTF-8")]);
        Self(path.into())
    }

    /// Attaches the loop device at `device`.
    pub fn attach_at(device: &Path, file: &Path) -> Self {
        require_root("to make a loop device");
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        run_tool("losetup", &[&text(device), &text(file)]);
        Self(device.into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Makes a sparse file a member of an md RAID 1 with metadata 1.0, whose label is near its end.
pub fn write_raid_label(path: &Path) {
    use std::os::unix::fs::FileExt as _;
    let file = File::options().write(true).open(path).expect("a file");
    let size = file.metadata().expect("a file").len();
    let at = (size - (8 << 10)) & !4095;
    let mut label = [0_u8; 256];
    let mut write = |at: usize, bytes: &[u8]| label[at..at + bytes.len()].copy_from_slice(bytes);
    write(0, &0xa92b_4efc_u32.to_le_bytes());
    write(4, &1_u32.to_le_bytes());
    write(16, b"raid of the test");
    write(72, &1_u32.to_le_bytes());
    write(80, &((at - (64 << 10)) / 512).to_le_bytes());
    write(144, &(at / 512).to_le_bytes());
    let (words, _) = label.as_chunks::<4>();
    let sum: u64 = words.iter().map(|word| u64::from(u32::from_le_bytes(*word))).sum();
    let sum = (sum as u32).wrapping_add((sum >> 32) as u32);
    label[216..220].copy_from_slice(&sum.to_le_bytes());
    file.write_all_at(&label, at).expect("room");
}

/// A mounted file system; unmounted on drop.
pub struct Mount(pub PathBuf);

impl Mount {
    pub fn new(at: &Path, arguments: &[&str]) -> Self {
        require_root("to mount a file system");
        std::fs::create_dir_all(at).expect("creating the mount point");
        let mut all = arguments.to_vec();
        all.push(at.to_str().expect("UTF-8"));
        run_tool("mount", &all);
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Mounts a small tmpfs; `size` is an option such as `size=12M`.
pub fn mount_tmpfs(at: &Path, size: &str) -> Mount {
    Mount::new(at, &["-t", "tmpfs", "-o", size, "tmpfs"])
}

/// Fills a file system with a file.
pub fn fill_file_system(path: &Path) {
    let mut file = File::options().create(true).append(true).open(path).expect("a file");
    for step in [64 << 10, 4 << 10, 512] {
        while file.write_all(&vec![7; step]).is_ok() {}
    }
    // Delayed allocations must be done, too.
    let _ = file.sync_all();
}

/// Returns the number of a process's open descriptors.
pub fn open_descriptor_count(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).expect("procfs").count()
}

/// A command of qemu-io, and text of its output, which marks that the commands before it have ended.
pub const QEMU_IO_MARKER: (&str, &str) = ("help quit", "exit the program");

/// Runs commands of qemu-io on the server at `uri` without a flush, and returns when they have ended. The client
/// stays connected, because it flushes when it ends.
pub fn start_io_without_flush<S: AsRef<str>>(uri: &str, commands: &[S]) -> Process {
    let mut command = Command::new("stdbuf");
    command.args(["-oL", "qemu-io", "-f", "raw", "-d", "unmap", "-t", "writeback"]);
    for text in commands {
        command.args(["-c", text.as_ref()]);
    }
    command.args(["-c", QEMU_IO_MARKER.0, "-c", "sleep 1000000", uri]);
    let client = Process::start(command).expect("starts");
    client.wait_for(QEMU_IO_MARKER.1, TEST_TIMEOUT).expect("the commands complete");
    let output = client.output();
    assert!(!output.contains("failed"), "{output}");
    client
}
