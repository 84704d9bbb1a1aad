//! Memory that other programs map: they find their own data in it, and harm no page of the guest.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;

use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::process::{Process, killed_with_parent};
use rustix::mm::{MapFlags, ProtFlags};

use crate::MIB;
use crate::holder::{Holder, NONE, PAGE, PAGES};
use crate::support::{TEST_TIMEOUT, larder_path, temp_dir_on_disk, temp_dir_on_tmpfs, test_pattern};

/// No page of an ivshmem region is evicted, since a host program may map it at any time.
#[test]
fn ivshmem_region_keeps_its_pages() {
    const REGION_MIB: u64 = 32;
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let region = folder.path().join("region");
    let content = test_pattern(7, (REGION_MIB * MIB) as usize);
    std::fs::write(&region, &content).expect("room in tmpfs");
    let ram = folder.path().join("ram");
    let mut qemu = killed_with_parent("qemu-system-x86_64");
    qemu.args("-accel tcg -m 64 -nodefaults -display none -S".split(' '));
    let file = |id: &str, path: &std::path::Path, mib: u64| {
        format!("memory-backend-file,id={id},size={mib}M,share=on,prealloc=on,mem-path={}", path.display())
    };
    qemu.args(["-object", &file("m", &ram, 64), "-machine", "q35,memory-backend=m"]);
    qemu.args(["-object", &file("iv", &region, REGION_MIB), "-device", "ivshmem-plain,memdev=iv"]);
    let mut qemu = Process::start(qemu).expect("starts");
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--wait", "--budget", "20MiB", "--swap-cache", &swap, "--swap-size", "256MiB"];
    let attach = Attach::new(larder_path(), folder.path(), qemu.id(), &words);
    let mut pager = attach.start().expect("it attaches");
    let state = pager.wait_for_budget().expect("within the budget");
    assert_eq!(state.size, 64 * MIB, "more than the RAM is managed");
    let said = pager.process.output();
    assert!(said.contains("not managed") && said.contains("/region"), "{said}");
    assert_eq!(region.metadata().expect("is there").blocks() * 512, REGION_MIB * MIB);
    assert!(std::fs::read(&region).expect("is there") == content, "its content has changed");
    pager.detach().expect("it detaches");
    assert!(std::fs::read(&region).expect("is there") == content, "its content has changed");
    qemu.kill();
}

/// A program that maps a VM's memory gets zero pages where pages were evicted; the guest still gets its own pages.
#[test]
fn page_touched_externally_keeps_its_content() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let swap = disk.path().join("swap").display().to_string();
    let mut holder = Holder::start();
    let attach = holder.attach(folder.path(), &["--swap-cache", &swap, "--swap-size", "256MiB"]);
    let mut pager = attach.start().expect("it attaches");
    let state = pager.wait_for_budget().expect("within the budget");
    assert!(state.evicted_pages > 0);
    let file = File::open(holder.memfd("held")).expect("root may");
    let size = PAGES * PAGE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let base =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), 0) };
    let base: *const u8 = base.expect("a mapping").cast();
    let touched = (0..PAGES).filter(|page| {
        // SAFETY: the page is in the mapping, which is not longer than the file.
        unsafe { base.add(page * PAGE).read_volatile() == 0 }
    });
    assert!(touched.count() > 0, "nothing was evicted");
    // SAFETY: the mapping is not used any more.
    unsafe { rustix::mm::munmap(base.cast_mut().cast(), size) }.expect("a mapping");
    assert_eq!(holder.check(), NONE);
    pager
        .process
        .wait_for("found in memory, filled with zeros, which its stored copy replaces", TEST_TIMEOUT)
        .expect("it is reported");
    pager.detach().expect("it detaches");
    assert_eq!(holder.check(), NONE);
    holder.stop();
}
