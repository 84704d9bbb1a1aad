//! Location of a disk's image (a file, a loop device, or an NBD server), and the ways in which another program writes
//! to it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use larder_block::AlignedBuf;
use rustix::mm::{MapFlags, ProtFlags};

use super::super::Random;
use super::super::disk::Format;
use super::super::guest::LIMIT;
use super::super::process::{Process, killed_with_parent};

/// Location of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A file.
    File,
    /// A loop device.
    Loop,
    /// An export of qemu-nbd.
    Nbd,
}

impl Place {
    /// All locations.
    pub const ALL: [Self; 3] = [Self::File, Self::Loop, Self::Nbd];

    /// Returns the location's name in tables.
    pub fn word(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Loop => "loop",
            Self::Nbd => "NBD",
        }
    }
}

/// Method by which another program writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// pwrite(2) to the file.
    Pwrite,
    /// pwrite(2) to the file, after which the file's modification time is restored.
    RestoredTime,
    /// Stores into a shared mapping of the file.
    Map,
    /// pwrite(2) to the loop device, through the page cache.
    Buffered,
    /// pwrite(2) to the loop device, bypassing the page cache.
    Direct,
    /// pwrite(2) to the file behind the loop device.
    Behind,
    /// `qemu-io`, which opens the image as a guest's QEMU does.
    QemuIo,
    /// `qemu-io`, bypassing the page cache.
    QemuIoDirect,
    /// `qemu-io`, after which the file's modification time is restored.
    QemuIoRestoredTime,
}

impl Way {
    /// Returns a random method for images of this kind.
    pub(super) fn any(location: Place, format: Format, random: &mut Random) -> Self {
        let ways: &[Self] = match (location, format) {
            (Place::File, Format::Raw) => &[Self::Pwrite, Self::RestoredTime, Self::Map],
            (Place::File, Format::Qcow2) => &[Self::QemuIo, Self::QemuIoRestoredTime],
            (Place::Loop, Format::Raw) => &[Self::Buffered, Self::Direct, Self::Behind],
            (Place::Loop, Format::Qcow2) => &[Self::QemuIo, Self::QemuIoDirect],
            (Place::Nbd, _) => &[Self::QemuIo],
        };
        ways[random.below(ways.len() as u64) as usize]
    }

    fn restores_mtime(self) -> bool {
        matches!(self, Self::RestoredTime | Self::QemuIoRestoredTime)
    }
}

/// An image, with the device or the server in front of it.
pub(super) struct Store {
    format: Format,
    /// The image, or the file behind the device or the NBD server.
    file: PathBuf,
    /// Path or URI that Larder is given.
    address: String,
    device: Option<LoopDevice>,
    _server: Option<Process>,
}

impl Store {
    /// Creates an image of a disk of `len` bytes in `directory`. An NBD server listens in `sockets`.
    ///
    /// # Errors
    /// If a tool is missing or fails, or a system call fails.
    pub(super) fn make(
        location: Place,
        format: Format,
        len: u64,
        directory: &Path,
        sockets: &Path,
        random: &mut Random,
    ) -> anyhow::Result<Self> {
        let file = directory.join("disk");
        let clusters = ["4k", "64k"][random.below(2) as usize];
        let mut command = Command::new("qemu-img");
        match format {
            Format::Raw => command.args(["create", "-q", "-f", "raw"]),
            Format::Qcow2 => command.args(["create", "-q", "-f", "qcow2", "-o"]),
        };
        if format == Format::Qcow2 {
            command.arg(format!("cluster_size={clusters}"));
        }
        tool(command.arg(&file).arg(len.to_string()))?;
        if location != Place::File && format == Format::Qcow2 {
            // A device or an export cannot grow.
            OpenOptions::new().write(true).open(&file)?.set_len(len * 2)?;
        }
        let (mut device, mut server) = (None, None);
        let address = match location {
            Place::File => text(&file)?.to_owned(),
            Place::Loop => text(&device.insert(LoopDevice::new(&file)?).0)?.to_owned(),
            Place::Nbd => {
                let socket = sockets.join("store");
                let mut command = killed_with_parent("qemu-nbd");
                command.args(["-f", "raw", "--persistent", "--shared=8", "--cache=writeback"]);
                command.args(["--discard=unmap", "-k"]).arg(&socket).arg(&file);
                let server = server.insert(Process::start(command)?);
                wait_until_listening(server, &socket)?;
                format!("nbd+unix:///?socket={}", socket.display())
            }
        };
        Ok(Self { format, file, address, device, _server: server })
    }

    /// Returns the path or URI of the image.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the bytes of the image file.
    ///
    /// # Errors
    /// If a system call fails.
    pub(super) fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        if let Some(device) = &self.device {
            // The device's page cache may have data that the kernel has not yet written to the file.
            File::open(&device.0)?.sync_all()?;
        }
        Ok(std::fs::read(&self.file)?)
    }

    /// Returns the bytes of the disk, as QEMU reads them.
    ///
    /// # Errors
    /// If a system call fails, or the image has errors.
    pub(super) fn contents(&self) -> anyhow::Result<Vec<u8>> {
        let bytes = self.bytes()?;
        match self.format {
            Format::Raw => Ok(bytes),
            Format::Qcow2 => super::super::disk::qcow2_contents(&self.file),
        }
    }

    /// Lets another program write `pieces` of the disk, each a range with its bytes.
    ///
    /// # Errors
    /// If a tool or a system call fails.
    pub(super) fn write_foreign(
        &self,
        way: Way,
        pieces: &[(Range<u64>, Vec<u8>)],
        random: &mut Random,
    ) -> anyhow::Result<()> {
        let modified = self.file.metadata()?.modified()?;
        let is_flushed = random.below(2) == 0;
        match way {
            Way::Pwrite | Way::RestoredTime | Way::Behind => write(&self.file, 0, pieces, is_flushed)?,
            Way::Buffered => write(self.device()?, 0, pieces, is_flushed)?,
            Way::Direct => write(self.device()?, libc::O_DIRECT, pieces, is_flushed)?,
            Way::Map => store(&self.file, pieces, is_flushed)?,
            Way::QemuIo | Way::QemuIoRestoredTime => self.qemu_io("writeback", pieces, is_flushed)?,
            Way::QemuIoDirect => self.qemu_io("none", pieces, is_flushed)?,
        }
        if way.restores_mtime() {
            let file = OpenOptions::new().write(true).open(&self.file)?;
            file.set_modified(modified)?;
        }
        Ok(())
    }

    fn device(&self) -> anyhow::Result<&Path> {
        Ok(&self.device.as_ref().context("the image has no loop device")?.0)
    }

    fn qemu_io(&self, cache: &str, pieces: &[(Range<u64>, Vec<u8>)], is_flushed: bool) -> anyhow::Result<()> {
        let mut command = Command::new("qemu-io");
        let format = match self.format {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        };
        command.args(["-f", format, "-t", cache]);
        let mut sources = Vec::new();
        for (range, bytes) in pieces {
            let mut source = tempfile::NamedTempFile::new()?;
            source.write_all(bytes)?;
            let len = range.end - range.start;
            command.arg("-c");
            command.arg(format!("write -s {} {} {len}", text(source.path())?, range.start));
            sources.push(source);
        }
        if is_flushed {
            command.args(["-c", "flush"]);
        }
        command.arg(&self.address);
        // A killed server's locks stay until its last I/O has ended.
        let deadline = Instant::now() + LIMIT;
        loop {
            match tool(&mut command) {
                Err(error) if format!("{error:#}").contains("\" lock") && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                output => {
                    let output = output?;
                    ensure!(output.matches("wrote").count() == pieces.len(), "{command:?}: {output}");
                    return Ok(());
                }
            }
        }
    }
}

/// Writes pieces to the file or device at `path`, opened with these additional flags.
fn write(path: &Path, flags: i32, pieces: &[(Range<u64>, Vec<u8>)], is_flushed: bool) -> anyhow::Result<()> {
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path)?;
    for (range, bytes) in pieces {
        let mut aligned = AlignedBuf::zeroed(bytes.len());
        aligned.copy_from_slice(bytes);
        file.write_all_at(&aligned, range.start)?;
    }
    if is_flushed {
        file.sync_all()?;
    }
    Ok(())
}

/// Writes pieces to the file at `path` through a shared mapping.
fn store(path: &Path, pieces: &[(Range<u64>, Vec<u8>)], is_flushed: bool) -> anyhow::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let len = file.metadata()?.len() as usize;
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping, at an address that the kernel chooses. Only this function refers to it, and no process
    // truncates the file.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &file, 0)? };
    for (range, bytes) in pieces {
        ensure!(range.end as usize <= len, "{range:?} is after the end of the file");
        // SAFETY: within the mapping, as was ensured; no reference to it exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.cast::<u8>().add(range.start as usize), bytes.len())
        };
    }
    // SAFETY: the mapping made above, which is no longer used.
    unsafe {
        if is_flushed {
            rustix::mm::msync(base, len, rustix::mm::MsyncFlags::SYNC)?;
        }
        rustix::mm::munmap(base, len)?;
    }
    Ok(())
}

/// A loop device, detached when this is dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(file: &Path) -> anyhow::Result<Self> {
        let path = tool(Command::new("losetup").args(["--find", "--show"]).arg(file));
        let path = path.context("creating a loop device, which needs root")?;
        Ok(Self(path.into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Runs a tool to its end, and returns its output.
///
/// # Errors
/// If the tool is missing, or fails; with its output.
pub(super) fn tool(command: &mut Command) -> anyhow::Result<String> {
    let output =
        command.output().with_context(|| format!("{command:?}; testbed/setup.sh installs what the tests need"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {said}", output.status);
    Ok(said.trim().to_owned())
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().context("a path is not UTF-8")
}

fn wait_until_listening(server: &Process, socket: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = std::os::unix::net::UnixStream::connect(socket) {
        if Instant::now() > deadline || server.has_ended() {
            return Err(error).with_context(|| format!("the NBD server does not listen: {}", server.output()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
