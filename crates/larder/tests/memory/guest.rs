//! Guests that use more memory than their budget, while they do and verify disk I/O.

use larder_bench::campaign::guest::Monitor;
use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::memory_guest::{DiskIo, MemoryGuest, Options, create_disk, disk_image, disk_socket};
use larder_bench::campaign::server::Server;

use crate::support::{larder_path, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{Alone, MIB};

const MEMORY_MIB: u64 = 384;

fn options(disk: Option<DiskIo>) -> Options {
    Options { mib: MEMORY_MIB, old_mib: 32, new_mib: 8, disk, sandbox: disk.is_none(), pluggable: false }
}

/// Inflates or deflates the balloon until the guest has `mib` MiB of memory.
fn balloon(monitor: &mut Monitor, mib: u64) {
    let wanted = mib * MIB;
    monitor.run("balloon", &format!("{{\"value\": {wanted}}}")).expect("there is a balloon");
    for _ in 0..1200 {
        let told = monitor.run("query-balloon", "{}").expect("there is a balloon");
        let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
        if told["return"]["actual"] == wanted {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("the balloon does not become as it should");
}

/// A guest works within a budget below its memory use, with a balloon, and after a reset.
#[test]
fn guest_survives_small_budget_balloon_reset() {
    let (folder, images) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let guest = MemoryGuest::start(options(None), images.path()).expect("a guest");
    let before = Alone::of(guest.pid());
    // Compressed pages count towards the budget, so that half of the memory would stall the guest without a swap
    // cache.
    let budget = (guest.used().expect("a guest") / 5 * 4).to_string();
    let attach = Attach::new(larder_path(), folder.path(), guest.pid(), &["--budget", &budget]);
    let mut pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    // The pager also works with QEMU's own sandbox.
    let during = Alone::of(guest.pid()).descriptors;
    let userfaultfd = during.values().find(|link| link.as_os_str() == "anon_inode:[userfaultfd]");
    assert_eq!(userfaultfd, None, "{}", pager.process.output());
    guest.works(0).expect("goes on");
    assert!(pager.state().expect("answers").faults.compressed.count > 0);
    let mut monitor = guest.monitor().expect("a monitor");
    balloon(&mut monitor, 256);
    let given_up = pager.state().expect("answers").given_up_pages;
    assert!(given_up > 0, "the balloon took nothing");
    balloon(&mut monitor, MEMORY_MIB);
    guest.works(0).expect("goes on");
    pager.process.kill();
    let mut pager = attach.start().expect("it takes the place");
    let told = guest.process.lines();
    monitor.run("system_reset", "{}").expect("resets");
    guest.process.wait_for_after(told, "ROUND 1", crate::support::TEST_TIMEOUT).expect("boots again");
    pager.wait_for_budget().expect("within the budget");
    guest.works(0).expect("goes on");
    pager.detach().expect("lets go");
    assert_eq!(Alone::of(guest.pid()).watched, 0);
    assert_eq!(Alone::of(guest.pid()).descriptors.len(), before.descriptors.len() + 1, "the monitor's connection only");
    drop(monitor);
    guest.finish().expect("all is as it was written");
}

#[test]
fn hotplugged_memory_is_managed() {
    const MORE_MIB: u64 = 128;
    let (folder, images) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let options = Options { pluggable: true, ..options(None) };
    let guest = MemoryGuest::start(options, images.path()).expect("a guest");
    let budget = (guest.used().expect("a guest") / 5 * 4).to_string();
    let swap = images.path().join("swap").display().to_string();
    let words = ["--budget", &budget, "--swap-cache", &swap, "--swap-size", "1GiB"];
    let attach = Attach::new(larder_path(), folder.path(), guest.pid(), &words);
    let mut pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    let mut monitor = guest.monitor().expect("a monitor");
    let bytes = MORE_MIB * MIB;
    let backend =
        format!("{{\"qom-type\": \"memory-backend-memfd\", \"id\": \"more\", \"size\": {bytes}, \"share\": true}}");
    monitor.run("object-add", &backend).expect("memory");
    let module = "{\"driver\": \"pc-dimm\", \"id\": \"dimm\", \"memdev\": \"more\"}";
    monitor.run("device_add", module).expect("a memory module");
    let limit = crate::support::TEST_TIMEOUT;
    pager.process.wait_for("memory was hotplugged", limit).expect("it is told");
    guest.process.wait_for("GROWN", limit).expect("it has more memory");
    guest.works(0).expect("goes on");
    let state = pager.wait_for_budget().expect("within the budget");
    assert_eq!(state.size, (MEMORY_MIB + MORE_MIB) * MIB);
    // A successor finds the memory, too.
    pager.process.kill();
    let mut pager = attach.start().expect("it takes the place");
    guest.works(0).expect("goes on");
    assert_eq!(pager.state().expect("answers").size, state.size);
    pager.detach().expect("lets go");
    assert_eq!(Alone::of(guest.pid()).watched, 0);
    drop(monitor);
    guest.finish().expect("all is as it was written");
}

/// Checks disk I/O of a guest whose pager finds it by its QMP socket, across a kill of the pager.
fn with_a_disk(io: DiskIo) {
    let (folder, images) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let guest = MemoryGuest::start(options(Some(io)), images.path()).expect("a guest");
    let (qmp, budget) = (guest.qmp(), (guest.used().expect("a guest") / 2).to_string());
    let swap = images.path().join("swap").display().to_string();
    let words =
        ["--qmp", qmp.to_str().expect("UTF-8"), "--budget", &budget, "--swap-cache", &swap, "--swap-size", "1GiB"];
    let attach = Attach::of(larder_path(), folder.path(), &words);
    let mut pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    guest.works(0).expect("goes on");
    pager.process.kill();
    let mut pager = attach.start().expect("it takes the place");
    guest.works(0).expect("goes on");
    let state = pager.wait_for_budget().expect("within the budget");
    assert!(state.faults.compressed.count > 0, "{state:#?}");
    pager.detach().expect("lets go");
    assert_eq!(Alone::of(guest.pid()).watched, 0);
    guest.finish().expect("all is as it was written");
}

/// Disk I/O by QEMU's threads into evicted memory is right.
#[test]
fn threaded_disk_io_into_evicted_memory() {
    with_a_disk(DiskIo::Threads);
}

/// Direct disk I/O by io_uring into evicted memory is right.
#[test]
fn direct_io_uring_into_evicted_memory() {
    with_a_disk(DiskIo::Uring);
}

/// I/O of a disk that Larder serves into evicted memory is right, also after kills of the server and the pager.
#[test]
fn served_disk_io_into_evicted_memory() {
    let (folder, images) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    create_disk(images.path()).expect("an image");
    let serve = || {
        let (image, socket) = (disk_image(images.path()), disk_socket(images.path()));
        Server::start(larder_path(), &image, &socket, &["--format", "raw"]).expect("it serves")
    };
    let mut server = serve();
    let guest = MemoryGuest::start(options(Some(DiskIo::Larder)), images.path()).expect("a guest");
    let budget = (guest.used().expect("a guest") / 2).to_string();
    let swap = images.path().join("swap").display().to_string();
    let words = ["--budget", &budget, "--swap-cache", &swap, "--swap-size", "1GiB"];
    let attach = Attach::new(larder_path(), folder.path(), guest.pid(), &words);
    let pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    guest.works(0).expect("goes on");
    assert!(Alone::of(server.process.id()).watched > 0, "the server's faults are told");

    // The server's successor maps the memory anew.
    server.process.kill();
    let mut server = serve();
    guest.works(0).expect("goes on");
    let mut pager = pager;
    pager.process.kill();
    let pager = attach.start().expect("it takes the place");
    guest.works(0).expect("goes on");

    // A server that starts while there is no pager waits for one.
    let mut pager = pager;
    pager.process.kill();
    server.process.kill();
    let server = serve();
    let mut pager = attach.start().expect("it takes the place");
    guest.works(1).expect("goes on");
    let state = pager.wait_for_budget().expect("within the budget");
    assert!(state.faults.disk.count + state.faults.compressed.count > 0, "{state:#?}");
    pager.detach().expect("lets go");
    let alone = Alone::of(server.process.id());
    assert_eq!(alone.watched, 0);
    guest.works(0).expect("goes on");
    guest.finish().expect("all is as it was written");
    drop(server);
}
