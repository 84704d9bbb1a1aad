//! Images of every kind, created by QEMU.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::process::Process;
use tempfile::TempDir;

use crate::support::{TEST_TIMEOUT, run_tool, temp_dir_on_tmpfs};
use crate::text_of;

/// Options with which an image is created.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) options: &'static str,
    pub(crate) backing: bool,
    pub(crate) snapshots: bool,
    pub(crate) compressed: bool,
    pub(crate) bitmap: bool,
}

const PLAIN: Kind = Kind {
    name: "plain",
    options: "cluster_size=64k",
    backing: false,
    snapshots: true,
    compressed: true,
    bitmap: true,
};

pub(crate) const KINDS: [Kind; 7] = [
    PLAIN,
    Kind { name: "version 2", options: "compat=0.10", bitmap: false, ..PLAIN },
    Kind { name: "small clusters", options: "cluster_size=4k,refcount_bits=64", ..PLAIN },
    Kind { name: "narrow refcounts", options: "cluster_size=16k,refcount_bits=2", compressed: false, ..PLAIN },
    Kind {
        name: "extended L2",
        options: "extended_l2=on,cluster_size=128k",
        backing: true,
        compressed: false,
        ..PLAIN
    },
    Kind { name: "zstd, lazy, backed", options: "compression_type=zstd,lazy_refcounts=on", backing: true, ..PLAIN },
    Kind { name: "data file", options: "data_file=data.raw", snapshots: false, compressed: false, ..PLAIN },
];

/// Size of every disk, in bytes.
pub(crate) const DISK_BYTES: u64 = 24 << 20;

/// An image in its own directory.
pub(crate) struct Made {
    pub(crate) folder: TempDir,
    pub(crate) image: PathBuf,
}

impl Made {
    pub(crate) fn new(kind: &Kind) -> Self {
        let folder = temp_dir_on_tmpfs();
        let image = folder.path().join("disk.qcow2");
        let base = folder.path().join("base.raw");
        let mut options = kind.options.to_owned();
        if let Some(name) = options.strip_prefix("data_file=") {
            options = format!("data_file={}", folder.path().join(name).display());
        }
        let (path, size) = (text_of(&image), DISK_BYTES.to_string());
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if kind.backing {
            run_tool("qemu-img", &["create", "-q", "-f", "raw", text_of(&base), &size]);
            io(&base, "raw", &["write -P 0x11 0 24M"]);
            create.extend(["-b", text_of(&base), "-F", "raw"]);
        }
        create.extend([path, &size]);
        run_tool("qemu-img", &create);
        io(&image, "qcow2", &["write -P 0x21 0 4M", "write -P 0x22 9M 1M", "write -z 5M 256k"]);
        if kind.compressed {
            io(&image, "qcow2", &["write -c -P 0x23 12M 1M", "write -c -P 0x24 14M 512k"]);
        }
        if kind.bitmap {
            run_tool("qemu-img", &["bitmap", "--add", path, "marks"]);
        }
        if kind.snapshots {
            run_tool("qemu-img", &["snapshot", "-c", "before lunch", path]);
            io(&image, "qcow2", &["write -P 0x25 1M 512k", "write -P 0x26 16M 1M"]);
        }
        io(&image, "qcow2", &["write -P 0x27 20M 384k", "discard 9M 128k"]);
        Self { folder, image }
    }

    /// Starts `qemu-nbd` with the image open for writing, as a disk of this format; returns it with the disk's URI.
    pub(crate) fn serve_by_qemu(&self, format: &str) -> (Process, String) {
        let socket = self.folder.path().join("qemu-nbd");
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-f", format, "-k", text_of(&socket), text_of(&self.image)]);
        let server = Process::start(command).expect("qemu-nbd");
        let deadline = Instant::now() + TEST_TIMEOUT;
        // qemu-nbd listens before it has opened the image, but sends its greeting only after that.
        while !is_greeted(&socket) {
            assert!(Instant::now() < deadline, "qemu-nbd does not listen: {}", server.output());
            std::thread::yield_now();
        }
        (server, format!("nbd+unix:///?socket={}", socket.display()))
    }

    /// Converts the image to a raw file with QEMU; `None` if QEMU cannot read it.
    pub(crate) fn content(&self, name: &str) -> Option<PathBuf> {
        convert(&self.image, &self.folder.path().join(name))
    }
}

/// Returns whether an NBD server at the socket sends its greeting.
fn is_greeted(socket: &Path) -> bool {
    let mut greeting = [0; 8];
    UnixStream::connect(socket).is_ok_and(|mut stream| stream.read_exact(&mut greeting).is_ok())
}

fn convert(image: &Path, to: &Path) -> Option<PathBuf> {
    let arguments = ["convert", "-f", "qcow2", "-O", "raw", text_of(image), text_of(to)];
    (crate::qemu_img(&arguments).0 == 0).then(|| to.to_owned())
}

pub(crate) fn io(image: &Path, format: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", format];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(text_of(image));
    run_tool("qemu-io", &arguments);
}
