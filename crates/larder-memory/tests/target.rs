//! Inspections of real processes: each obstacle to managing their memory is found and reported.

#[path = "target/helper.rs"]
mod helper;

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::process::Command;

use larder_memory::target::{InspectOptions, Obstacle, OrphanedDescriptors, QmpError, Target, TargetError, pid_of_qmp};
use rustix::process::Pid;

use helper::{Helper, Qemu};

const MIB: u64 = 1 << 20;

/// Process that the other tests inspect.
#[test]
#[ignore = "started by the other tests"]
fn helper() {
    helper::obey();
}

fn examine(pid: Pid) -> Result<Target, TargetError> {
    Target::inspect(pid, &InspectOptions::default())
}

fn obstacles(pid: Pid) -> Vec<Obstacle> {
    match examine(pid) {
        Err(TargetError::Obstacles { obstacles, .. }) => obstacles,
        other => panic!("{other:?}"),
    }
}

fn only_obstacle(pid: Pid) -> Obstacle {
    let mut found = obstacles(pid);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Makes a file in tmpfs.
fn in_tmpfs(mib: u64) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().prefix("larder test ").tempfile_in("/dev/shm").unwrap();
    file.as_file().set_len(mib * MIB).unwrap();
    file
}

#[test]
fn qemu_shared_memfd_is_found() {
    let memfd = "memory-backend-memfd,id=m,size=64M,share=on";
    let qemu = Qemu::start(&["-machine", "q35,memory-backend=m", "-object", memfd]);
    let target = examine(qemu.pid()).unwrap();
    assert_eq!(target.pid(), qemu.pid());
    assert_eq!(target.name, "qemu-system-x86");
    assert_eq!(target.orphaned, None);
    assert_eq!(target.ram_mappings.len(), 1);
    let memory = &target.ram_mappings[0];
    assert_eq!(memory.name, "memory-backend-memfd");
    assert_eq!((memory.location.bytes, memory.location.offset), (64 * MIB, 0));
    let stat = memory.file.metadata().unwrap();
    assert_eq!((stat.dev(), stat.ino()), (memory.location.device, memory.location.inode));
    memory.file.write_all_at(b"x", 5 * MIB).unwrap();
}

#[test]
fn qemu_file_in_tmpfs_is_found() {
    let file = in_tmpfs(64);
    let path = file.path().to_str().unwrap();
    let object = format!("memory-backend-file,id=m,size=64M,share=on,mem-path={path}");
    let qemu = Qemu::start(&["-machine", "q35,memory-backend=m", "-object", &object]);
    let target = examine(qemu.pid()).unwrap();
    assert_eq!(target.ram_mappings.len(), 1);
    assert_eq!(target.ram_mappings[0].name, path);
    assert_eq!(target.ram_mappings[0].location.inode, file.as_file().metadata().unwrap().ino());
    // A file without a name is found, too.
    file.close().unwrap();
    assert_eq!(examine(qemu.pid()).unwrap().ram_mappings[0].location, target.ram_mappings[0].location);
}

#[test]
fn private_memory_error_explains_sharing() {
    for arguments in [
        &["-machine", "q35", "-m", "64M"][..],
        &["-machine", "q35,memory-backend=m", "-object", "memory-backend-memfd,id=m,size=64M,share=off"],
    ] {
        let qemu = Qemu::start(arguments);
        let error = examine(qemu.pid()).unwrap_err().to_string();
        assert!(error.contains("64 MiB") && error.contains("private"), "{error}");
        assert!(error.contains("-object memory-backend-memfd,id=m,size=SIZE,share=on"), "{error}");
        assert_eq!(error.lines().count(), 2, "{error}");
    }
}

#[test]
fn process_without_large_memory_is_refused() {
    let mut helper = Helper::new(&["memfd small 8"]);
    assert!(matches!(only_obstacle(helper.pid()), Obstacle::NoMemory { .. }));
    let small = InspectOptions { bytes_min: 8 * MIB, ..InspectOptions::default() };
    assert_eq!(Target::inspect(helper.pid(), &small).unwrap().ram_mappings.len(), 1);
    helper.tell("private 64");
    assert!(matches!(only_obstacle(helper.pid()), Obstacle::Private { location, .. } if location.bytes >= 64 * MIB));
}

#[test]
fn extra_private_memory_is_a_warning() {
    let helper = Helper::new(&["memfd ram 32", "private 200"]);
    let cautions = examine(helper.pid()).unwrap().warnings;
    assert!(cautions.iter().any(|caution| caution.contains("of private memory at")), "{cautions:?}");
}

#[test]
fn memory_mapped_by_other_is_refused() {
    let file = in_tmpfs(32);
    let open = format!("open {}", file.path().display());
    let target = Helper::new(&[&open, "map 32"]);
    let other = Helper::new(&[&open, "map 1", "name evil\u{1b}[2J"]);
    match only_obstacle(target.pid()) {
        Obstacle::MappedByOther { pid, process_name: by, .. } => {
            assert_eq!((pid, by.as_str()), (other.pid(), "evil\u{fffd}[2J"));
        }
        found => panic!("{found}"),
    }
    drop(other);
    examine(target.pid()).unwrap();
}

/// Disjoint mappings of two parts of a file are accepted.
#[test]
fn overlapping_mappings_of_file_are_refused() {
    let mut helper = Helper::new(&["memfd ram 64"]);
    for again in ["map 64", "map 1", "copy 32"] {
        helper.tell(again);
        // Both mappings are reported if both are large enough to be memory.
        let found = obstacles(helper.pid());
        assert!(found.iter().all(|found| matches!(found, Obstacle::MappedTwice { .. })), "{found:?}");
        helper.tell("unmap");
    }
    helper.tell("unmap");
    helper.tell("map 32");
    helper.tell("memfd between 16");
    helper.tell("close");
    helper.tell("map 32 from 32");
    assert_eq!(examine(helper.pid()).unwrap().ram_mappings.len(), 3);
}

#[test]
fn all_obstacles_are_reported_together() {
    let mut helper = Helper::new(&["memfd ram 32", "map 1", "seal", "lock", "io_uring", "register"]);
    let userfaultfd: i32 = helper.tell("userfaultfd").parse().unwrap();
    let error = examine(helper.pid()).unwrap_err();
    let text = error.to_string();
    let TargetError::Obstacles { obstacles, .. } = error else {
        panic!("{text}");
    };
    assert_eq!(text.lines().count(), 1 + obstacles.len());
    let has = |what: fn(&Obstacle) -> bool| assert!(obstacles.iter().any(what), "{text}");
    has(|found| matches!(found, Obstacle::Sealed { seals: "F_SEAL_FUTURE_WRITE", .. }));
    has(|found| matches!(found, Obstacle::Locked { bytes } if *bytes == 32 * MIB));
    has(|found| matches!(found, Obstacle::MappedTwice { .. }));
    has(|found| matches!(found, Obstacle::RegisteredBuffers { count: 1, .. }));
    has(|found| matches!(found, Obstacle::Pinned { .. }));
    assert!(
        obstacles
            .iter()
            .any(|found| matches!(found, Obstacle::Userfaultfd { descriptor } if *descriptor == userfaultfd))
    );
    assert_eq!(obstacles.len(), 6, "{text}");
}

#[test]
fn io_uring_without_buffers_is_accepted() {
    let helper = Helper::new(&["memfd ram 32", "io_uring"]);
    examine(helper.pid()).unwrap();
}

#[test]
fn huge_pages_are_refused() {
    // The host needs no huge pages for this, because none is touched.
    let helper = Helper::new(&["huge 32"]);
    let found = only_obstacle(helper.pid());
    assert!(matches!(found, Obstacle::Hugetlbfs { .. }), "{found}");
}

/// The file is ignored if there is other memory.
#[test]
fn memory_in_disk_file_is_refused() {
    // Not in /tmp, which may be tmpfs.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(32 * MIB).unwrap();
    let mut helper = Helper::new(&[&format!("open {}", file.path().display()), "map 32"]);
    let found = only_obstacle(helper.pid());
    assert!(matches!(found, Obstacle::OnDisk { .. }), "{found}");
    helper.tell("memfd ram 32");
    let target = examine(helper.pid()).unwrap();
    assert_eq!(target.ram_mappings.len(), 1);
    assert_eq!(target.ram_mappings[0].name, "ram");
    assert!(target.warnings.iter().any(|caution| caution.starts_with("not managed: ")), "{:?}", target.warnings);
}

#[test]
fn file_shorter_than_mapping_is_refused() {
    let helper = Helper::new(&["memfd ram 32", "shorten 31"]);
    let found = only_obstacle(helper.pid());
    assert!(matches!(found, Obstacle::PastEnd { file_bytes, .. } if file_bytes == 31 * MIB), "{found}");
}

#[test]
fn tracer_is_reported() {
    let helper = Helper::new(&["memfd ram 32"]);
    let pid = helper.pid();
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: neither takes an address of this process; the helper is its child.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid.as_raw_pid(), none, none) };
    assert_eq!(seized, 0);
    match only_obstacle(pid) {
        Obstacle::Traced { tid, tracer_pid: by_pid, .. } => {
            assert_eq!((tid, by_pid), (pid, std::process::id() as i32));
        }
        found => panic!("{found}"),
    }
}

#[test]
fn files_for_direct_io_are_detected() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut helper = Helper::new(&["memfd ram 32"]);
    assert!(!examine(helper.pid()).unwrap().uses_direct_io);
    helper.tell(&format!("direct {}", file.path().display()));
    assert!(examine(helper.pid()).unwrap().uses_direct_io);
}

/// The state of an earlier pager is not an obstacle.
#[test]
fn state_of_earlier_pager_is_found() {
    let mut helper = Helper::new(&["memfd ram 32"]);
    let pages = helper.tell("memfd larder-pages 32").parse().unwrap();
    let target = examine(helper.pid()).unwrap();
    assert_eq!(target.ram_mappings.len(), 1);
    assert!(target.warnings.iter().any(|caution| caution.contains("no userfaultfd")), "{:?}", target.warnings);
    let compressed = helper.tell("memfd larder-compressed 32").parse().unwrap();
    let userfaultfd = helper.tell("userfaultfd").parse().unwrap();
    let target = examine(helper.pid()).unwrap();
    let left = OrphanedDescriptors {
        pages,
        compressed: Some(compressed),
        unrecorded_userfaultfds: vec![userfaultfd],
        ring_memories: Vec::new(),
    };
    assert_eq!(target.orphaned, Some(left));
    assert_eq!(target.ram_mappings.len(), 1);
}

/// Successor of a killed pager, which may not use /proc/PID/map_files.
#[test]
fn unopenable_memory_allows_successor() {
    let mut looked_at = Helper::unprivileged(&["memfd ram 32", "memfd larder-pages 1", "memfd more 32", "close"]);
    let mut looks = Helper::unprivileged(&[]);
    let examine = format!("examine {}", looked_at.pid());
    let answer = looks.tell(&examine);
    assert!(answer.starts_with("1 memories"), "{answer}");
    // A first attach is refused.
    looked_at.tell("close");
    let answer = looks.tell(&examine);
    assert!(answer.contains("cannot be opened"), "{answer}");
}

#[test]
fn memory_changes_are_reported_once() {
    let mut helper = Helper::new(&["memfd ram 32"]);
    let options = InspectOptions::default();
    let mut target = examine(helper.pid()).unwrap();
    let is_quiet = |target: &mut Target| {
        let changes = target.rescan(&options).unwrap();
        assert!(changes.added.is_empty() && changes.unmapped.is_empty() && changes.refused.is_empty(), "{changes:?}");
    };
    is_quiet(&mut target);

    helper.tell("memfd plugged 64");
    let changes = target.rescan(&options).unwrap();
    assert_eq!(changes.added.len(), 1);
    assert_eq!((changes.added[0].name.as_str(), changes.added[0].location.bytes), ("plugged", 64 * MIB));
    assert!(changes.unmapped.is_empty() && changes.refused.is_empty());
    // From here on the kernel shows it as two mappings.
    helper.tell("split");
    is_quiet(&mut target);

    helper.tell("unmap");
    let gone = target.rescan(&options).unwrap().unmapped;
    assert_eq!(gone, [changes.added[0].location]);
    helper.tell("huge 32");
    let changes = target.rescan(&options).unwrap();
    assert!(matches!(changes.refused[..], [Obstacle::Hugetlbfs { .. }]), "{changes:?}");
    assert!(changes.added.is_empty());
    is_quiet(&mut target);
    helper.tell("memfd twice 32");
    helper.tell("map 16");
    let changes = target.rescan(&options).unwrap();
    assert!(changes.added.is_empty() && !changes.refused.is_empty(), "{changes:?}");

    helper.kill();
    helper.wait();
    assert!(matches!(target.rescan(&options), Err(TargetError::Ended { .. })));
}

#[test]
fn process_exit_anytime_is_reported() {
    for _ in 0..30 {
        let mut helper = Helper::new(&["memfd ram 32"]);
        let pid = helper.pid();
        let looking = std::thread::spawn(move || examine(pid));
        helper.kill();
        let found = looking.join().unwrap();
        // A complete result from before the end is valid; an incomplete one must not be returned.
        assert!(matches!(found, Ok(_) | Err(TargetError::Ended { .. })), "{found:?}");
        helper.wait();
        assert!(matches!(examine(pid), Err(TargetError::NoSuchProcess { .. })));
    }
}

#[test]
fn missing_rights_are_reported() {
    let mut looks = Helper::unprivileged(&[]);
    let answer = looks.tell("examine 1");
    assert!(answer.contains("no permission to") && answer.contains("CAP_SYS_PTRACE"), "{answer}");
}

/// An unprivileged process of the same user opens memory through a descriptor of the target.
#[test]
fn unprivileged_user_needs_open_descriptor() {
    let mut looked_at = Helper::unprivileged(&["memfd ram 32"]);
    let mut looks = Helper::unprivileged(&[]);
    let examine = format!("examine {}", looked_at.pid());
    let answer = looks.tell(&examine);
    assert!(answer.starts_with("1 memories") && answer.contains("that is not detected"), "{answer}");
    looked_at.tell("close");
    let answer = looks.tell(&examine);
    assert!(answer.contains("cannot be opened"), "{answer}");
}

#[test]
fn qmp_socket_leads_to_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a qmp");
    let monitor = format!("unix:{},server=on,wait=off", path.display());
    let qemu = Qemu::start(&["-machine", "none", "-qmp", &monitor]);
    assert_eq!(pid_of_qmp(&path).unwrap(), qemu.pid());
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert_eq!(pid_of_qmp(&link).unwrap(), qemu.pid());
    drop(qemu);
    assert!(matches!(pid_of_qmp(&path), Err(QmpError::NoListener { .. } | QmpError::NoFile { .. })));
}

/// The socket's path is relative, and its process is in another network namespace and working directory.
#[test]
fn qmp_process_is_found_across_namespaces() {
    let folder = tempfile::tempdir().unwrap();
    let mut unshare = Command::new("unshare");
    unshare.args(["--net", "qemu-system-x86_64"]).current_dir(folder.path());
    let qemu = Qemu::by(unshare, &["-machine", "none", "-qmp", "unix:qmp,server=on,wait=off"]);
    assert_eq!(pid_of_qmp(&folder.path().join("qmp")).unwrap(), qemu.pid());
}

#[test]
fn invalid_qmp_path_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("there");
    assert!(matches!(pid_of_qmp(&path), Err(QmpError::NoFile { .. })));
    File::create(&path).unwrap();
    assert!(matches!(pid_of_qmp(&path), Err(QmpError::NoSocket { .. })));
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    assert_eq!(pid_of_qmp(&path).unwrap(), rustix::process::getpid());
    drop(listener);
    assert!(matches!(pid_of_qmp(&path), Err(QmpError::NoListener { .. })));
}
