//! Disks that a swap cache and a slow store must not take: devices in use, devices with a label at their end, user
//! files.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, lchown, symlink};
use std::path::{Path, PathBuf};

use larder_bench::campaign::memory::Attach;
use tempfile::TempDir;

use crate::support::{LoopDevice, require_root, run_command, start_server, temp_dir_on_disk, write_raid_label};
use crate::{BUDGET, Fixture, MIB};

fn sparse(path: &Path, mib: u64) {
    let file = File::create_new(path).expect("a file");
    file.set_len(mib * MIB).expect("a size");
}

/// Returns the error of an attach whose `option` names `disk`.
fn refusal(fixture: &Fixture, option: &str, disk: &str) -> String {
    let attach = fixture.attach(&["--budget", BUDGET, option, disk]);
    let (code, said) = run_command(attach.command());
    assert_eq!(code, Some(2), "{said}");
    said
}

/// Claims a device like a mount does.
fn claim(device: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(libc::O_EXCL).open(device)
}

/// Returns an empty block device over a sparse file in a directory.
fn empty_device() -> (TempDir, PathBuf, LoopDevice) {
    let folder = temp_dir_on_disk();
    let path = folder.path().join("disk");
    sparse(&path, 64);
    let device = LoopDevice::new(&path, 512);
    (folder, path, device)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn with_swap(fixture: &Fixture, swap: &Path, more: &[&str]) -> Attach {
    let words = ["--budget", BUDGET, "--compressed", "2MiB", "--swap-cache", text(swap)];
    fixture.attach(&[&words, more].concat())
}

/// A device that another program has opened with O_EXCL is neither used nor changed.
#[test]
fn claimed_device_cannot_be_swap_cache() {
    let (_folder, path, device) = empty_device();
    let fixture = Fixture::new();
    let claimed = claim(&device.0).expect("nothing else uses it");
    for option in ["--swap-cache", "--slow-store"] {
        let said = refusal(&fixture, option, text(&device.0));
        assert!(said.contains("is claimed by another program"), "{said}");
    }
    drop(claimed);
    assert_eq!(path.metadata().expect("the file").blocks(), 0, "something was written");
    fixture.verify();
}

/// While pages are on a device, no other program can claim it; after the detach it is free again.
#[test]
fn swap_device_is_claimed_until_detach() {
    let (_folder, _, device) = empty_device();
    let mut fixture = Fixture::new();
    let mut pager = with_swap(&fixture, &device.0, &[]).start().expect("it attaches");
    let refused = claim(&device.0).expect_err("pages are on it");
    assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
    pager.process.kill();
    let mut pager = with_swap(&fixture, &device.0, &[]).start().expect("a successor has it");
    claim(&device.0).expect_err("pages are on it");
    fixture.works();
    pager.detach().expect("it detaches");
    claim(&device.0).expect("nothing uses it");
    fixture.verify();
}

/// A successor of a killed pager uses the device with the guest's pages, even if another program has claimed it
/// meanwhile.
#[test]
fn successor_uses_swap_device_claimed_meanwhile() {
    let (_folder, _, device) = empty_device();
    let mut fixture = Fixture::new();
    let mut pager = with_swap(&fixture, &device.0, &[]).start().expect("it attaches");
    let state = pager.wait_until(|state| state.disks.iter().any(|disk| disk.live > 0));
    state.expect("pages are on it");
    pager.process.kill();
    // The kernel closes a killed process's files with some delay.
    let claimed = loop {
        if let Ok(claimed) = claim(&device.0) {
            break claimed;
        }
    };
    let mut pager = with_swap(&fixture, &device.0, &[]).start().expect("it goes on");
    let said = pager.process.output();
    assert!(said.contains("Larder uses it nevertheless"), "{said}");
    fixture.works();
    pager.detach().expect("it detaches");
    drop(claimed);
    fixture.verify();
}

/// A RAID member with its label at the end is not overwritten, on a device, in a file or behind an NBD server.
#[test]
fn raid_member_cannot_be_swap_cache() {
    let folder = temp_dir_on_disk();
    let path = folder.path().join("disk");
    sparse(&path, 64);
    write_raid_label(&path);
    let fixture = Fixture::new();
    let before = std::fs::read(&path).expect("the file");
    {
        let device = LoopDevice::new(&path, 512);
        for disk in [&device.0, &path] {
            for option in ["--swap-cache", "--slow-store"] {
                let said = refusal(&fixture, option, text(disk));
                assert!(said.contains("linux_raid_member"), "{said}");
            }
        }
    }
    let server = start_server(&path, folder.path(), &["--nbd", &nbd(folder.path())]);
    let said = refusal(&fixture, "--slow-store", &nbd(folder.path()));
    assert!(said.contains("linux_raid_member"), "{said}");
    drop(server);
    assert!(std::fs::read(&path).expect("the file") == before, "it was changed");
    fixture.verify();
}

/// A file that begins with zeros and has data behind them, such as a disk of a guest, is neither used nor changed. A
/// file of zeros that takes space is used.
#[test]
fn file_with_later_data_is_refused() {
    let folder = temp_dir_on_disk();
    let path = folder.path().join("disk");
    sparse(&path, 64);
    let data = File::options().write(true).open(&path).expect("a file");
    data.write_all_at(b"data", 40 * MIB + 7).expect("is written");
    let fixture = Fixture::new();
    let before = std::fs::read(&path).expect("the file");
    for option in ["--swap-cache", "--slow-store"] {
        let said = refusal(&fixture, option, text(&path));
        let words = format!("it has data at byte {}, and is not overwritten", 40 * MIB + 7);
        assert!(said.contains(&words), "{said}");
    }
    assert!(std::fs::read(&path).expect("the file") == before, "it was changed");
    std::fs::write(&path, vec![0; 64 * MIB as usize]).expect("is written");
    let mut pager = with_swap(&fixture, &path, &[]).start().expect("it attaches");
    pager.detach().expect("it detaches");
    fixture.verify();
}

/// Root follows no link of another user to a disk for evicted pages: nothing is emptied, and nothing is created.
#[test]
fn foreign_link_is_no_swap_cache() {
    require_root("links of another user");
    let folder = temp_dir_on_disk();
    let at = |name: &str| folder.path().join(name);
    sparse(&at("disk"), 64);
    std::fs::create_dir(at("d")).expect("a folder");
    for (target, name) in [("disk", "link"), ("none", "dangling"), ("d", "folder")] {
        symlink(at(target), at(name)).expect("a link");
        lchown(at(name), Some(65534), None).expect("root may");
    }
    let fixture = Fixture::new();
    for (option, size) in [("--swap-cache", "--swap-size"), ("--slow-store", "--slow-size")] {
        for path in ["link", "dangling", "folder/new"] {
            for more in [&[][..], &[size, "32MiB"]] {
                let path = at(path);
                let words = [&["--budget", BUDGET, option, text(&path)], more].concat();
                let (code, said) = run_command(fixture.attach(&words).command());
                assert_eq!(code, Some(2), "{said}");
                assert!(said.contains("on the way belongs to user 65534"), "{said}");
            }
        }
    }
    assert!(!at("none").exists() && !at("d/new").exists(), "it was created");
    let left = at("disk").metadata().expect("the file");
    assert_eq!((left.len(), left.blocks()), (64 * MIB, 0), "it was changed");
    // A link of root is followed.
    lchown(at("link"), Some(0), None).expect("root may");
    let mut pager = with_swap(&fixture, &at("link"), &[]).start().expect("it attaches");
    pager.detach().expect("it detaches");
    fixture.verify();
}

fn nbd(folder: &Path) -> String {
    format!("nbd+unix:///?socket={}", text(&folder.join("nbd")))
}

/// A file that existed before is not removed: it keeps its size, has no pages any more, and can be used again.
#[test]
fn existing_swap_file_is_kept_erased() {
    let folder = temp_dir_on_disk();
    let path: PathBuf = folder.path().join("given");
    sparse(&path, 80);
    let fixture = Fixture::new();
    for size in [&[][..], &["--swap-size", "64MiB"]] {
        let before = path.metadata().expect("the file");
        let mut pager = with_swap(&fixture, &path, size).start().expect("it attaches");
        let state = pager.wait_until(|state| state.disks.iter().any(|disk| disk.live > 0));
        state.expect("pages are on it");
        // A successor knows only what the disk says.
        pager.process.kill();
        let mut pager = with_swap(&fixture, &path, size).start().expect("it goes on");
        pager.detach().expect("it detaches");
        let after = path.metadata().expect("the file is there");
        assert_eq!(after.ino(), before.ino());
        let content = std::fs::read(&path).expect("the file");
        assert!(content.iter().all(|byte| *byte == 0), "pages are left in it");
    }
    fixture.verify();
}

/// A file that Larder created is removed, also by a successor; a file that has replaced it is not. If it was moved
/// away, its pages are erased.
#[test]
fn only_made_swap_file_is_removed() {
    let folder = temp_dir_on_disk();
    let path = folder.path().join("made");
    let fixture = Fixture::new();
    let size = ["--swap-size", "64MiB"];
    let mut pager = with_swap(&fixture, &path, &size).start().expect("it attaches");
    pager.process.kill();
    let mut pager = with_swap(&fixture, &path, &size).start().expect("it goes on");
    pager.detach().expect("it detaches");
    assert!(!path.exists(), "the file is left");
    let mut pager = with_swap(&fixture, &path, &size).start().expect("it attaches");
    let moved = folder.path().join("moved");
    std::fs::rename(&path, &moved).expect("moves");
    std::fs::write(&path, "of somebody else").expect("a file");
    pager.detach().expect("it detaches");
    assert_eq!(std::fs::read(&path).expect("is there"), b"of somebody else");
    let content = std::fs::read(&moved).expect("is there");
    assert!(content.iter().all(|byte| *byte == 0), "pages are left in it");
    fixture.verify();
}
