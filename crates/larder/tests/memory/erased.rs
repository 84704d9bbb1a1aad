//! Unencrypted pages are erased from a disk as soon as they are not needed any more.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use larder_bench::campaign::memory::Pager;
use tempfile::TempDir;

use crate::failures::Server;
use crate::holder::{Holder, NONE, readable};
use crate::support::{LoopDevice, run_command, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{BUDGET, Fixture, MIB};

/// Size of each disk, in MiB.
const DISK_MIB: u64 = 512;

/// A disk that is backed by a file.
struct Disk {
    /// Value for `--swap-cache`.
    name: String,
    bytes: PathBuf,
    _folder: TempDir,
    _device: Option<LoopDevice>,
    _server: Option<Server>,
}

impl Disk {
    fn empty() -> (TempDir, PathBuf) {
        let folder = temp_dir_on_disk();
        let path = folder.path().join("disk");
        let file = File::create_new(&path).expect("a file");
        file.set_len(DISK_MIB * MIB).expect("a size");
        (folder, path)
    }

    /// Creates a block device that supports discard.
    fn device() -> Self {
        let (folder, bytes) = Self::empty();
        let device = LoopDevice::new(&bytes, 512);
        Self { name: device.0.display().to_string(), bytes, _folder: folder, _device: Some(device), _server: None }
    }

    /// Creates an export of a server that refuses to write zeroes itself.
    fn export() -> Self {
        let (folder, bytes) = Self::empty();
        let server = Server::start(&folder, &["--filter=nozero", "file", bytes.to_str().expect("UTF-8")]);
        Self { name: server.uri(), bytes, _folder: folder, _device: None, _server: Some(server) }
    }

    /// Returns the number of bytes allocated for the disk.
    fn allocated(&self) -> u64 {
        self.bytes.metadata().expect("the file").blocks() * 512
    }
}

/// Starts a pager that has written unencrypted pages to the disk.
fn plain_pages(holder: &Holder, folder: &Path, swap: &str, more: &[&str]) -> Pager {
    let words = [&["--swap-cache", swap, "--encrypt", "off"], more].concat();
    let pager = holder.attach(folder, &words).start().expect("it attaches");
    let there = pager.wait_until(|state| state.used <= state.budget && state.disks[0].written_bytes >= 20 * MIB);
    there.expect("pages go to the disk");
    pager
}

/// Returns the error of an attach of another process to this disk.
fn refusal(swap: &str, size: &str) -> String {
    let other = Fixture::new();
    let words = ["--budget", BUDGET, "--swap-cache", swap, "--swap-size", size];
    let (code, said) = run_command(other.attach(&words).command());
    assert_eq!(code, Some(2), "{said}");
    other.verify();
    said
}

/// After a detach, a device and an export have zeros where pages were, and nothing was written past the pages.
#[test]
fn detach_erases_plain_swap_disk() {
    for disk in [Disk::device(), Disk::export()] {
        let (mut holder, folder) = (Holder::start(), temp_dir_on_tmpfs());
        let mut pager = plain_pages(&holder, folder.path(), &disk.name, &[]);
        assert!(readable(&disk.bytes).len() > 4000);
        pager.detach().expect("it detaches");
        let content = std::fs::read(&disk.bytes).expect("the file");
        assert!(content.iter().all(|byte| *byte == 0), "{} has data", disk.name);
        assert!(disk.allocated() < 100 * MIB, "{} bytes of {} are used", disk.allocated(), disk.name);
        assert_eq!(holder.check(), NONE);
        holder.stop();
    }
}

/// The end of the process also erases its pages.
#[test]
fn process_end_erases_plain_swap_disk() {
    let (disk, holder, folder) = (Disk::device(), Holder::start(), temp_dir_on_tmpfs());
    let mut pager = plain_pages(&holder, folder.path(), &disk.name, &[]);
    holder.stop();
    assert!(pager.process.wait(crate::support::TEST_TIMEOUT).expect("it ends").success());
    assert!(readable(&disk.bytes).is_empty());
}

/// The next pager erases the pages of a killed pager's process that has ended, whether it uses the disk or not.
#[test]
fn pages_of_ended_process_are_erased() {
    for is_refused in [true, false] {
        for disk in [Disk::device(), Disk::export()] {
            let (holder, folder) = (Holder::start(), temp_dir_on_tmpfs());
            let mut pager = plain_pages(&holder, folder.path(), &disk.name, &[]);
            // The second pager learns only from the disk how far the first has written.
            pager.process.kill();
            let mut pager = plain_pages_again(&holder, folder.path(), &disk.name);
            pager.process.kill();
            holder.stop();
            assert!(readable(&disk.bytes).len() > 4000);
            if is_refused {
                let said = refusal(&disk.name, "1TiB");
                assert!(said.contains("was requested"), "{said}");
                assert!(readable(&disk.bytes).is_empty(), "{}", disk.name);
            } else {
                let other = Fixture::new();
                let attach = other.attach(&["--budget", BUDGET, "--swap-cache", &disk.name]);
                let mut pager = attach.start().expect("it attaches");
                assert!(readable(&disk.bytes).is_empty(), "{}", disk.name);
                pager.detach().expect("it detaches");
                other.verify();
            }
            assert!(disk.allocated() < 100 * MIB + 300 * MIB, "all of {} is written", disk.name);
        }
    }
}

fn plain_pages_again(holder: &Holder, folder: &Path, swap: &str) -> Pager {
    let attach = holder.attach(folder, &["--swap-cache", swap, "--encrypt", "off"]);
    attach.start().expect("it takes the place")
}

/// A file is emptied before another process gets it, and also when that is refused.
#[test]
fn swap_file_of_ended_process_emptied() {
    for size in ["1000TiB", "32MiB"] {
        let (holder, folder, disk) = (Holder::start(), temp_dir_on_tmpfs(), temp_dir_on_disk());
        let path = disk.path().join("swap");
        let name = path.display().to_string();
        let mut pager = plain_pages(&holder, folder.path(), &name, &["--swap-size", "128MiB"]);
        pager.process.kill();
        holder.stop();
        assert!(readable(&path).len() > 4000);
        let other = Fixture::new();
        let attach = other.attach(&["--budget", BUDGET, "--swap-cache", &name, "--swap-size", size]);
        match size {
            "32MiB" => {
                let mut pager = attach.start().expect("it attaches");
                assert!(readable(&path).is_empty());
                pager.detach().expect("it detaches");
                assert!(!path.exists(), "the file is left");
            }
            _ => {
                let (code, said) = run_command(attach.command());
                assert!(code == Some(2) && said.contains("there is space for"), "{said}");
                assert!(!path.exists(), "the file is left");
            }
        }
        other.verify();
    }
}

/// Another process is refused while the owner of the pages lives, whatever size it asks for, and no page is lost.
#[test]
fn pages_of_living_process_survive_refusals() {
    let disk = Disk::device();
    let (mut holder, folder, file) = (Holder::start(), temp_dir_on_tmpfs(), temp_dir_on_disk());
    let path = file.path().join("swap");
    let name = path.display().to_string();
    for (swap, size) in [(&disk.name, &[][..]), (&name, &["--swap-size", "128MiB"][..])] {
        let mut pager = plain_pages(&holder, folder.path(), swap, size);
        pager.process.kill();
        for size in ["16MiB", "256MiB"] {
            let said = refusal(swap, size);
            assert!(said.contains("whose pager has ended"), "{said}");
        }
        let mut pager = plain_pages_again(&holder, folder.path(), swap);
        assert_eq!(holder.check(), NONE);
        pager.detach().expect("it detaches");
    }
    assert_eq!(holder.check(), NONE);
    holder.stop();
}
