//! A file server that hangs stalls the disk that needs it, but no other disk, nor the control socket, nor the
//! process's exit. The file server is a FUSE file system with one file; processes that wait for it in the kernel
//! behave as with NFS.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use tempfile::TempDir;

use crate::support::{require_root, temp_dir_on_tmpfs};
use crate::{FrontEnd, MIB, Options, Process, TEST_TIMEOUT, Vm, assert_io_works, ends, run_command, text};

const FILE_NAME: &str = "disk.raw";
const FILE_BYTES: usize = 8 << 20;

/// Node ID of the root directory.
const ROOT: u64 = 1;
/// Node ID of the file.
const FILE: u64 = 2;

/// The kernel's requests (linux/fuse.h).
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// A mounted file system with one file, which can stop answering.
struct FileServer {
    folder: TempDir,
    device: Arc<File>,
    state: Arc<State>,
}

struct State {
    is_hung: Mutex<bool>,
    changed: Condvar,
}

impl State {
    fn is_hung(&self) -> MutexGuard<'_, bool> {
        self.is_hung.lock().expect("no thread has panicked")
    }
}

/// Waits for a request up to `limit`; returns true if there is one.
fn has_request(device: &File, limit: Duration) -> io::Result<bool> {
    let mut wanted = libc::pollfd { fd: device.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one structure, which outlives the call.
    let ready = unsafe { libc::poll(&raw mut wanted, 1, limit.as_millis() as i32) };
    match ready {
        // The file system was unmounted.
        _ if wanted.revents & libc::POLLERR != 0 => Err(io::ErrorKind::NotConnected.into()),
        ready => Ok(ready > 0),
    }
}

impl FileServer {
    fn mount() -> Self {
        let folder = temp_dir_on_tmpfs();
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/fuse")
            .expect("the kernel has FUSE");
        let device = Arc::new(device);
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", device.as_raw_fd());
        let target = format!("{}\0", text(folder.path()));
        // SAFETY: all of these texts are NUL-terminated.
        let mounted = unsafe {
            libc::mount(
                c"larder-test".as_ptr(),
                target.as_ptr().cast(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        assert_eq!(mounted, 0, "cannot mount: {}", io::Error::last_os_error());
        let state = Arc::new(State { is_hung: Mutex::new(false), changed: Condvar::new() });
        let (ours, theirs) = (Arc::clone(&device), Arc::clone(&state));
        std::thread::spawn(move || serve(&ours, &theirs));
        Self { folder, device, state }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join(FILE_NAME)
    }

    /// Stops answering requests.
    fn hang(&self) {
        *self.state.is_hung() = true;
    }

    /// Waits until a process waits for an answer.
    fn wait_for_request(&self) {
        let asked = has_request(&self.device, TEST_TIMEOUT).expect("it is mounted");
        assert!(asked, "nobody asks the file server anything");
    }

    fn answer(&self) {
        *self.state.is_hung() = false;
        self.state.changed.notify_all();
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.answer();
        let target = format!("{}\0", text(self.folder.path()));
        // SAFETY: the text is NUL-terminated.
        unsafe { libc::umount2(target.as_ptr().cast(), libc::MNT_DETACH) };
    }
}

fn serve(device: &File, state: &State) {
    let mut data = vec![0_u8; FILE_BYTES];
    let mut request = vec![0_u8; 2 << 20];
    while let Ok(has_request) = has_request(device, Duration::from_millis(20)) {
        let mut is_hung = state.is_hung();
        while *is_hung {
            is_hung = state.changed.wait(is_hung).expect("no thread has panicked");
        }
        if !has_request {
            continue;
        }
        let mut device = device;
        let bytes = match device.read(&mut request) {
            Ok(bytes) => bytes,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
            // The requesting process was killed.
            Err(_) => continue,
        };
        let request = &request[..bytes];
        let Some(reply) = answer_to(request, &mut data) else {
            continue;
        };
        let (error, body) = match reply {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let mut message = Vec::new();
        message.extend((16 + body.len() as u32).to_ne_bytes());
        message.extend(error.to_ne_bytes());
        message.extend(&request[8..16]);
        message.extend(body);
        // The requesting process may have been killed.
        let _ = device.write(&message);
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Returns the body of the reply, or an error number; `None` if the request has no reply.
fn answer_to(request: &[u8], data: &mut [u8]) -> Option<Result<Vec<u8>, i32>> {
    let (opcode, node, body) = (u32_at(request, 4), u64_at(request, 16), &request[40..]);
    Some(match opcode {
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
        opcode::INIT => {
            let mut reply = Vec::new();
            reply.extend(7_u32.to_ne_bytes());
            reply.extend(31_u32.to_ne_bytes());
            reply.extend([0; 12]);
            // The maximum size of a write.
            reply.extend((1_u32 << 20).to_ne_bytes());
            reply.resize(64, 0);
            Ok(reply)
        }
        opcode::LOOKUP if body.strip_suffix(b"\0") == Some(FILE_NAME.as_bytes()) => {
            let mut reply = FILE.to_ne_bytes().to_vec();
            // Zero timeouts, so that the kernel caches neither entry nor attributes.
            reply.resize(40, 0);
            reply.extend(attributes(FILE));
            Ok(reply)
        }
        opcode::LOOKUP => Err(libc::ENOENT),
        opcode::GETATTR | opcode::SETATTR => {
            let mut reply = vec![0; 16];
            reply.extend(attributes(node));
            Ok(reply)
        }
        opcode::OPEN => Ok(vec![0; 16]),
        opcode::READ => {
            let at = (u64_at(body, 8) as usize).min(data.len());
            let end = (at + u32_at(body, 16) as usize).min(data.len());
            Ok(data[at..end].to_vec())
        }
        opcode::WRITE => {
            let (at, bytes) = (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
            data[at..at + bytes].copy_from_slice(&body[40..40 + bytes]);
            Ok([(bytes as u32).to_ne_bytes(), [0; 4]].concat())
        }
        opcode::STATFS => {
            let mut reply = vec![0; 40];
            reply.extend(4096_u32.to_ne_bytes());
            reply.resize(80, 0);
            Ok(reply)
        }
        opcode::RELEASE | opcode::FSYNC | opcode::FLUSH => Ok(Vec::new()),
        _ => Err(libc::ENOSYS),
    })
}

/// Returns a `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let (bytes, mode, links) = match node {
        ROOT => (0, libc::S_IFDIR | 0o755, 2_u32),
        _ => (FILE_BYTES as u64, libc::S_IFREG | 0o600, 1),
    };
    let mut all = Vec::new();
    for word in [node, bytes, bytes / 512, 0, 0, 0] {
        all.extend(word.to_ne_bytes());
    }
    all.extend([0; 12]);
    all.extend(mode.to_ne_bytes());
    all.extend(links.to_ne_bytes());
    // Owned by root, and no device.
    all.extend([0; 12]);
    all.extend(4096_u32.to_ne_bytes());
    all.extend([0; 4]);
    all
}

/// Returns a VM with a disk on this host, and one on the file server.
fn near_and_far(far: &FileServer) -> Vm {
    let vm = Vm::new(&format!(
        "control = \"control\"\n\n[[disk]]\nname = \"near\"\nimage = \"IMAGES/near.raw\"\nformat = \"raw\"\nsocket = \"near\"\n\n\
         [[disk]]\nname = \"far\"\nimage = \"{}\"\nformat = \"raw\"\nsocket = \"far\"\n",
        text(&far.file())
    ));
    vm.raw("near.raw", FILE_BYTES as u64 / MIB);
    vm
}

/// While the file server hangs, the other disk, the control socket and a reload work.
#[test]
fn hung_file_server_stalls_one_disk() {
    require_root("to mount a file system");
    let far = FileServer::mount();
    let vm = near_and_far(&far);
    for options in [&[] as &[&str], &["--confine"]] {
        let process = Process::start(vm.command(options)).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        let mut near = FrontEnd::connect(&vm.path("near"), Options::default()).expect("connects");
        let mut guest = FrontEnd::connect(&vm.path("far"), Options::default()).expect("connects");
        assert_io_works(&mut near, 1);
        assert_io_works(&mut guest, 1);
        far.hang();
        far.wait_for_request();
        assert_io_works(&mut near, 2);
        // The status covers both disks: neither disk's thread waits in the kernel.
        assert_eq!(vm.disks().len(), 2);
        let reloaded = run_command(vm.command(&["--reload"]));
        assert_eq!(reloaded, (Some(0), "web: already as configured in its file".to_owned()));
        far.answer();
        assert_io_works(&mut guest, 2);
        drop((near, guest));
        ends(process);
    }
}

/// A server that is opening a file on a hung file server can be stopped.
#[test]
fn hung_opening_can_be_stopped() {
    require_root("to mount a file system");
    let far = FileServer::mount();
    let vm = near_and_far(&far);
    // The kernel has initialised the file system by now.
    fs::metadata(far.file()).expect("it answers");
    // A service manager keeps the connections of the disks.
    let _manager = UnixDatagram::bind(vm.path("notify")).expect("binds");
    for options in [&[] as &[&str], &["--confine"]] {
        far.hang();
        let mut command = vm.command(options);
        command.env("NOTIFY_SOCKET", vm.path("notify"));
        let mut process = Process::start(command).expect("larder starts");
        far.wait_for_request();
        process.signal(libc::SIGTERM);
        let ended = process.wait(TEST_TIMEOUT).expect("it ends");
        assert!(ended.success(), "{}", process.output());
        far.answer();
    }
}
