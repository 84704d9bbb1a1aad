//! Tests of the plan of `larder run`: from QEMU's command line to the processes that are started.

use std::ffi::OsString;
use std::path::Path;

use larder_vm::disk_spec::keys::parse_disk;
use larder_vm::disk_spec::{DiskSpec, PageCacheMode};
use larder_vm::image::ImageAddress;
use larder_vm::memory::SwapConfig;
use larder_vm::memory::spec::MemorySpec;
use larder_vm::run::drive::QemuOnlyReason;
use larder_vm::run::plan::{PlanEnvironment, PlanError, RunPlan, guest_name, plan};
use larder_vm::run::shell::command_line;
use larder_vm::run::version::QemuVersion;
use proptest::prelude::*;

const RAM: &str = "-object memory-backend-file,id=larder-ram,size=134217728,share=on,mem-path=/dev/shm/larder-vm-1 \
                   -machine memory-backend=larder-ram";

/// A disk that Larder can serve.
const DRIVE: &str = "-drive file=/a,if=virtio,format=raw,discard=on";

fn setting(version: QemuVersion) -> PlanEnvironment<'static> {
    PlanEnvironment {
        version,
        sockets: Path::new("/run/larder/larder-run-1"),
        ram: Path::new("/dev/shm/larder-vm-1"),
        left_to_qemu: &[],
        memory: None,
    }
}

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(Into::into).collect()
}

fn try_plan(line: &str, extra: &[DiskSpec]) -> Result<RunPlan, PlanError> {
    plan(&words(line), extra, &setting(QemuVersion(7, 2)))
}

fn planned(line: &str) -> RunPlan {
    try_plan(line, &[]).expect("can be planned")
}

fn is_change(plan: &RunPlan, parts: &[&str]) -> bool {
    plan.changes.iter().any(|change| parts.iter().all(|part| change.contains(part)))
}

/// Returns the arguments that represent the disk with this number.
fn disk(number: usize, more: &str) -> String {
    format!(
        "-chardev socket,id=larder-chr-{number},path=/run/larder/larder-run-1/disk-{number}.sock,reconnect=1 \
         -device vhost-user-blk-pci,chardev=larder-chr-{number},{more}"
    )
}

#[test]
fn virtio_drive_becomes_vhost_user_disk() {
    let drive = "file=/srv/vm.raw,if=virtio,format=raw,cache=none,discard=unmap";
    let plan = planned(&format!("qemu-system-x86_64 -drive {drive} -m 128"));
    let expected = format!("qemu-system-x86_64 -m 128 {} {RAM}", disk(0, "queue-size=256"));
    assert_eq!(command_line(&plan.qemu), expected);
    assert_eq!(plan.disks.len(), 1);
    assert_eq!(plan.disks[0].disk.page_cache, PageCacheMode::Direct);
    assert_eq!(plan.disks[0].socket, Path::new("/run/larder/larder-run-1/disk-0.sock"));
    let change = format!("disk /srv/vm.raw: served over vhost-user-blk as vda (was -drive {drive})");
    assert!(is_change(&plan, &[&change]));
    assert!(is_change(&plan, &["memory: shared as /dev/shm/larder-vm-1 (was private)"]));
}

#[test]
fn reconnect_option_fits_qemu_version() {
    let line = words("qemu-system-x86_64 -drive file=/a,if=virtio,format=raw");
    for (version, option) in [(QemuVersion(9, 1), ",reconnect=1 "), (QemuVersion(9, 2), ",reconnect-ms=100 ")] {
        let plan = plan(&line, &[], &setting(version)).expect("can be planned");
        assert!(command_line(&plan.qemu).contains(option), "{version}");
    }
}

#[test]
fn device_keeps_position_and_properties() {
    let plan = planned(
        "qemu-system-x86_64 -device virtio-blk-pci,drive=d1,id=root,bootindex=1,serial=S1,addr=07.0 \
         -device virtio-rng-pci -drive if=none,id=d1,file=/srv/a.raw,format=raw,discard=on -s",
    );
    let device = disk(0, "id=root,bootindex=1,addr=07.0,queue-size=256");
    let expected = format!("qemu-system-x86_64 {device} -device virtio-rng-pci -s {RAM}");
    assert_eq!(command_line(&plan.qemu), expected);
    assert_eq!(plan.disks[0].disk.serial.as_deref(), Some("S1"));
    // The device has an address of the user's choice, so the guest's name for it is not predicted.
    assert!(is_change(&plan, &["disk /srv/a.raw: served over vhost-user-blk (was -device virtio-blk-pci"]));
}

/// A qcow2 drive is served, and options that only tune QEMU's cache are reported as not needed.
#[test]
fn qcow2_tuning_options_are_reported_unneeded() {
    let drive = "file=/srv/vm.qcow2,if=virtio,format=qcow2,l2-cache-size=8M,cache-clean-interval=60";
    let plan = planned(&format!("kvm -drive {drive} -drive file=/b,if=virtio,discard=on"));
    assert_eq!(plan.disks.len(), 2);
    let arguments = command_line(&plan.disks[0].serve_arguments());
    assert!(arguments.contains(" --format qcow2 "), "{arguments}");
    let arguments = command_line(&plan.disks[1].serve_arguments());
    assert!(!arguments.contains("--format"), "{arguments}");
    assert!(is_change(
        &plan,
        &[
            &format!(
                "disk /srv/vm.qcow2: served over vhost-user-blk as vda (was -drive {drive}); ignored, because Larder does not need them"
            ),
            "cache-clean-interval, l2-cache-size; discard is not offered to the guest"
        ]
    ));
    assert!(is_change(
        &plan,
        &["disk /b: served over vhost-user-blk as vdb (was -drive file=/b,if=virtio,discard=on)"]
    ));
}

#[test]
fn qemus_disks_keep_their_order() {
    let plan = planned(
        "qemu-system-x86_64 -drive file=/a.raw,if=virtio,format=raw \
         -drive file=/b.vmdk,if=virtio,format=vmdk,cache=none -drive file=/c.raw,if=virtio,format=raw",
    );
    let line = command_line(&plan.qemu);
    let devices: Vec<&str> = line.split(" -device ").skip(1).collect();
    assert_eq!(devices.len(), 3);
    assert!(line.contains("-drive file=/b.vmdk,format=vmdk,cache=none,if=none,id=virtio1 "));
    assert!(devices[0].starts_with("vhost-user-blk-pci,chardev=larder-chr-0,"), "{line}");
    assert!(devices[1].starts_with("virtio-blk,drive=virtio1 "), "{line}");
    assert!(devices[2].starts_with("vhost-user-blk-pci,chardev=larder-chr-1,"), "{line}");
    assert!(is_change(&plan, &["/a.raw", " as vda"]));
    assert!(is_change(&plan, &["/b.vmdk: stays with QEMU", "not vmdk"]));
    assert!(is_change(&plan, &["/c.raw", " as vdc"]));
}

/// Command lines with one disk that stays with QEMU, and parts of the message about it: the image, the reason, and
/// advice.
const STAYING: [(&str, &[&str]); 39] = [
    ("-drive file=nbd://b/c,if=virtio", &["disk nbd://b/c: stays", "add format=raw"]),
    ("-drive file=/b,if=virtio,format=vmdk", &["disk /b: stays", "not vmdk"]),
    (
        "-drive file=/b,if=virtio,format=qcow2,backing.file.filename=/c",
        &["disk /b: stays", "backing.file.filename=/c", "other files"],
    ),
    ("-drive file=/b,if=virtio,format=qcow2,detect-zeroes=unmap", &["disk /b: stays", "detect-zeroes=unmap"]),
    ("-drive file=/b,if=virtio,format=qcow2 -snapshot", &["disk /b: stays", "-snapshot"]),
    ("-drive file=/b,if=virtio,format=raw,snapshot=on", &["disk /b: stays", "snapshot=on"]),
    ("-drive file=/b,if=virtio,format=raw -snapshot", &["disk /b: stays", "-snapshot"]),
    ("-drive file=json:{},if=virtio,format=raw", &["disk json:{}: stays", "described in JSON", "give its path"]),
    ("-drive file.filename=/b,if=virtio,format=raw", &["disk /b: stays", "names no file="]),
    ("-drive file=/b,if=ide,format=raw", &["disk /b: stays", "if=ide", "if=virtio it would be"]),
    ("-drive file=/b,if=scsi,format=raw", &["disk /b: stays", "if=scsi", "if=virtio it would be"]),
    ("-drive file=/b,format=raw", &["disk /b: stays", "without if=", "if=virtio it would be"]),
    ("-drive file=/b,media=cdrom", &["disk /b: stays", "CD-ROM"]),
    ("-drive file=/b,if=floppy", &["disk /b: stays", "floppy"]),
    ("-drive file=/b,if=none,id=x,format=raw", &["disk /b: stays", "no -device", "virtio-blk-pci"]),
    ("-hda /b", &["disk /b: stays", "-hda", "if=virtio it would be"]),
    ("-hdd /b,c", &["disk /b,c: stays", "-hdd", "if=virtio it would be"]),
    ("/b", &["disk /b: stays", "-hda", "if=virtio it would be"]),
    ("-cdrom /b", &["disk /b: stays", "CD-ROM"]),
    ("-fda /b", &["disk /b: stays", "floppy"]),
    ("-sd /b", &["disk /b: stays", "-sd", "if=virtio it would be"]),
    ("-drive if=none,id=x,file=/b,format=raw -device ide-hd,drive=x", &["disk /b: stays", "ide-hd", "virtio-blk-pci"]),
    (
        "-device virtio-scsi -drive if=none,id=x,file=/b,format=raw -device scsi-hd,drive=x",
        &["disk /b: stays", "scsi-hd", "virtio-blk-pci"],
    ),
    ("-drive if=none,id=x,file=/b -device scsi-cd,drive=x", &["disk /b: stays", "CD-ROM"]),
    (
        "-drive if=none,id=x,file=/b,format=raw -device {\"driver\":\"usb-storage\",\"drive\":\"x\"}",
        &["disk /b: stays", "usb-storage"],
    ),
    (
        "-drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,write-cache=off",
        &["disk /b: stays", "write-cache=off"],
    ),
    (
        "-drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,share-rw=on \
         -device virtio-blk-pci,drive=x,share-rw=on",
        &["disk /b: stays", "several devices"],
    ),
    ("-drive if=ide,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x", &["disk /b: stays", "give it if=none"]),
    (
        "-drive if=none,id=x,file=/b,format=raw -device {\"driver\":\"virtio-blk-pci\",\"drive\":\"x\"}",
        &["disk /b: stays", "written in JSON", "key=value"],
    ),
    (
        "-drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,num-queues=65",
        &["disk /b: stays", "queues 65", "1 to 64"],
    ),
    (
        "-drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,num-queues=many",
        &["disk /b: stays", "num-queues=many"],
    ),
    (
        "-drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,queue-size=100",
        &["disk /b: stays", "queue-size 100: a queue has"],
    ),
    (
        "-drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,logical_block_size=1k",
        &["disk /b: stays", "block-size 1024"],
    ),
    ("-device virtio-blk-pci,drive=x", &["stays with QEMU", "no -drive if=none,id=x"]),
    (
        "-blockdev driver=file,node-name=x,filename=/b -device virtio-blk-pci,drive=x",
        &["disk /b: stays", "-blockdev", "write -drive if=none"],
    ),
    (
        "-blockdev driver=file,node-name=f,filename=/b -blockdev driver=qcow2,node-name=x,file=f -device ide-hd,drive=x",
        &["disk /b: stays", "ide-hd"],
    ),
    (
        "-blockdev {\"node-name\":\"x\",\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"/b\"}} \
         -device {\"driver\":\"virtio-blk-pci\",\"drive\":\"x\"}",
        &["disk /b: stays", "written in JSON"],
    ),
    ("-blockdev driver=file,node-name=x,filename=/b", &["disk /b: stays", "no -device"]),
    ("-chardev socket,id=c,path=/s -device vhost-user-blk-pci,chardev=c", &["unchanged", "server of its own"]),
];

/// Each disk that stays with QEMU causes one message with the reason, and the command line does not change.
#[test]
fn disk_left_with_qemu_is_explained() {
    for (line, parts) in STAYING {
        let line = format!("qemu-system-x86_64 {line} -m lots");
        let plan = planned(&line);
        assert_eq!(command_line(&plan.qemu), command_line(&words(&line)));
        assert!(plan.disks.is_empty() && plan.ram.is_empty(), "{line}");
        assert_eq!(plan.changes.len(), 2, "{line}: {:?}", plan.changes);
        assert!(is_change(&plan, parts), "{line}: {:?}", plan.changes);
        assert_eq!(plan.changes[1], "no disk is served: QEMU is started with the command line as given");
    }
}

#[test]
fn non_utf8_drive_stays_with_qemu() {
    let bytes = |more: &str| [b"file=/b\xff", more.as_bytes()].concat();
    let odd = |more: &str| -> OsString { std::os::unix::ffi::OsStringExt::from_vec(bytes(more)) };
    let mut line = words("kvm -drive file=/a,if=virtio,format=raw,discard=on -drive");
    line.push(odd(",if=virtio,format=raw"));
    let plan = plan(&line, &[parse_disk("/c").expect("is right")], &setting(QemuVersion(7, 2)));
    let plan = plan.expect("can be planned");
    let first = disk(0, "queue-size=256");
    let last = disk(1, "queue-size=256");
    let mut expected = words("kvm -drive");
    expected.push(odd(",if=virtio,format=raw,if=none,id=virtio1"));
    expected.extend(words(&format!("{first} -device virtio-blk,drive=virtio1 {last} {RAM}")));
    assert_eq!(plan.qemu, expected);
    assert!(is_change(&plan, &["disk /b\u{fffd}: stays with QEMU", "not UTF-8", "link"]));
    assert!(is_change(&plan, &["disk /c: served over vhost-user-blk as vdc"]));
}

#[test]
fn firmware_and_empty_drives_are_ignored() {
    let line = "-drive if=pflash,format=raw,readonly=on,file=/ovmf -drive media=cdrom,if=ide -pflash /ovmf \
                -blockdev driver=file,node-name=fw,filename=/ovmf -machine q35,pflash0=fw";
    let plan = planned(&format!("kvm {line}"));
    assert_eq!(plan.changes.len(), 1, "{:?}", plan.changes);
}

#[test]
fn short_option_keeps_disk_order() {
    let line = words("qemu-system-aarch64 -M virt -hda /a -drive file=/b,if=virtio,format=raw,discard=on,index=1");
    let served = plan(&line, &[], &setting(QemuVersion(7, 2))).expect("can be planned");
    assert!(is_change(&served, &["disk /a: served", "as vda (was -hda)"]));
    assert_eq!(served.disks[0].disk.format, None);

    let left = [(ImageAddress::Path("/a".into()), QemuOnlyReason("it is odd".to_owned()))];
    let setting = PlanEnvironment { left_to_qemu: &left, memory: None, ..setting(QemuVersion(7, 2)) };
    let plan = plan(&line, &[], &setting).expect("can be planned");
    let line = command_line(&plan.qemu);
    assert!(line.contains("-drive media=disk,file=/a,if=none,id=virtio0"), "{line}");
    let devices: Vec<&str> = line.split(" -device ").skip(1).collect();
    assert!(devices[0].starts_with("virtio-blk,drive=virtio0 "), "{line}");
    assert!(devices[1].starts_with("vhost-user-blk-pci,"), "{line}");
    assert!(is_change(&plan, &["disk /a: stays with QEMU: it is odd"]));
    assert!(is_change(&plan, &["disk /b: served", "as vdb"]));
}

#[test]
fn external_server_disk_takes_guest_name() {
    let plan = planned(&format!("kvm -chardev socket,id=c,path=/s -device vhost-user-blk-pci,chardev=c {DRIVE}"));
    assert!(is_change(&plan, &["disk /a: served", "as vdb"]));
}

#[test]
fn readconfig_causes_warning() {
    let plan = planned("kvm -readconfig vm.cfg");
    assert!(is_change(&plan, &["-readconfig vm.cfg", "not read"]));
}

#[test]
fn additional_disks_come_last() {
    let extra = [parse_disk("/x.raw,serial=X,queues=2").expect("is right")];
    let plan = try_plan("kvm -drive file=/a,if=virtio,format=raw,discard=on", &extra).expect("can be planned");
    let first = disk(0, "queue-size=256");
    let second = disk(1, "num-queues=2,queue-size=256");
    assert_eq!(command_line(&plan.qemu), format!("kvm {first} {second} {RAM}"));
    assert!(is_change(&plan, &["disk /x.raw: served over vhost-user-blk as vdb (added by --disk)"]));
}

#[test]
fn vhost_user_device_fits_machine() {
    let extra = [DiskSpec::new(ImageAddress::Path("/x".into()))];
    let plan = try_plan("qemu-system-x86_64 -M microvm", &extra).expect("can be planned");
    assert!(command_line(&plan.qemu).contains("-device vhost-user-blk,chardev=larder-chr-0,"));
    let result = try_plan("qemu-system-s390x -m 1G", &extra);
    assert!(matches!(result, Err(PlanError::NoDevice { .. })), "{result:?}");
    let plan = planned("qemu-system-s390x -m 1G -drive file=/a,if=virtio,format=raw");
    assert!(is_change(&plan, &["/a: stays with QEMU: QEMU has no vhost-user-blk device"]));
    let plan = planned("qemu-system-aarch64 -M virt -m 1G -drive file=/a,format=raw");
    assert_eq!(plan.disks.len(), 1);
}

#[test]
fn queue_count_is_bounded_by_server() {
    let plan = planned("kvm -smp 128 -drive file=/a,if=virtio,format=raw,discard=on");
    assert!(command_line(&plan.qemu).contains(",queue-size=256,num-queues=64 "));
}

#[test]
fn ram_file_has_requested_size() {
    for (option, bytes) in [
        ("", 128_u64 << 20),
        ("-m 512", 512 << 20),
        ("-m 2G", 2 << 30),
        ("-m size=1G,slots=2,maxmem=4G", 1 << 30),
        ("-m 256M -m 1.5G", 1536 << 20),
        ("-m 0", 128 << 20),
        ("-m 1000001b", 1_007_616),
    ] {
        let plan = planned(&format!("kvm {option} {DRIVE}"));
        assert_eq!(plan.ram.len(), 1);
        assert_eq!(plan.ram[0].bytes, bytes, "{option}");
        let line = command_line(&plan.qemu);
        let object = format!("size={bytes},share=on,mem-path=/dev/shm/larder-vm-1 ");
        assert!(line.contains(&object), "{line}");
        assert!(line.contains(option), "{line}");
    }
}

#[test]
fn ram_of_unknown_size_is_refused() {
    for line in ["kvm -m lots", "kvm -object memory-backend-ram,id=r -machine memory-backend=r"] {
        let result = try_plan(&format!("{line} {DRIVE}"), &[]);
        assert!(matches!(result, Err(PlanError::RamSize { .. })), "{result:?}");
    }
    // QEMU knows the size; but a disk of `--disk` requires Larder to know it as well.
    let line = format!("qemu-system-ppc64 {DRIVE}");
    let plan = planned(&line);
    assert_eq!(command_line(&plan.qemu), command_line(&words(&line)));
    assert!(is_change(&plan, &["disk /a: stays with QEMU", "give it with -m"]));
    let extra = [parse_disk("/x.raw").expect("is right")];
    let result = try_plan("qemu-system-ppc64", &extra);
    assert_eq!(result, Err(PlanError::NoRamSize));
}

/// The device and the server of a disk agree on its queues, in every notation of numbers that QEMU accepts.
#[test]
fn server_has_queues_of_its_device() {
    for (given, queues, queue_size) in [
        ("num-queues=0x10", Some(16), 256),
        ("num-queues=65535", None, 256),
        ("queue-size=0x80,num-queues=1,num-queues=3", Some(3), 128),
    ] {
        let line = format!("kvm -drive if=none,id=x,file=/b,format=raw -device virtio-blk-pci,drive=x,{given}");
        let plan = planned(&line);
        let disk = &plan.disks[0].disk;
        assert_eq!((disk.queues, disk.queue_size), (queues, Some(queue_size)), "{given}");
        let queues = queues.map_or(String::new(), |queues| format!("num-queues={queues},"));
        let device = format!(",{queues}queue-size={queue_size} ");
        assert!(command_line(&plan.qemu).contains(&device), "{given}: {:?}", plan.qemu);
    }
}

#[test]
fn shared_ram_is_left_unchanged() {
    for line in [
        "kvm -m 1G -object memory-backend-memfd,id=r,size=1G,share=on -machine q35,memory-backend=r",
        "kvm -m 1G -object memory-backend-memfd,id=r,size=1G -M memory-backend=r",
        "kvm -object memory-backend-file,id=r,size=1G,mem-path=/dev/shm/x,share=on -numa node,memdev=r",
    ] {
        let plan = planned(&format!("{line} {DRIVE}"));
        let expected = format!("{line} {}", disk(0, "queue-size=256"));
        assert_eq!(command_line(&plan.qemu), expected);
        assert!(plan.ram.is_empty() && plan.changes.len() == 1, "{:?}", plan.changes);
    }
}

#[test]
fn all_private_ram_becomes_shared() {
    let plan = planned(&format!(
        "kvm -m 2G,slots=2,maxmem=4G -object memory-backend-ram,id=a,size=1G,host-nodes=0,policy=bind \
         -object memory-backend-ram,id=b,size=1G,share=on -numa node,memdev=a -numa node,memdev=b {DRIVE}"
    ));
    let expected = "kvm -m 2G,slots=2,maxmem=4G \
         -object memory-backend-file,id=a,size=1G,host-nodes=0,policy=bind,share=on,mem-path=/dev/shm/larder-vm-1 \
         -object memory-backend-file,id=b,size=1G,share=on,mem-path=/dev/shm/larder-vm-1.1 \
         -numa node,memdev=a -numa node,memdev=b";
    let expected = format!("{expected} {}", disk(0, "queue-size=256"));
    assert_eq!(command_line(&plan.qemu), expected);
    let sizes: Vec<u64> = plan.ram.iter().map(|file| file.bytes).collect();
    assert_eq!(sizes, [1 << 30, 1 << 30]);
}

#[test]
fn huge_pages_stay_in_their_directory() {
    let plan = planned(&format!("kvm -m 128 -mem-path /dev/hugepages -mem-prealloc {DRIVE}"));
    let ram = RAM.replace("/dev/shm/larder-vm-1", "/dev/hugepages");
    let disk = disk(0, "queue-size=256");
    assert_eq!(command_line(&plan.qemu), format!("kvm -m 128 -mem-prealloc {disk} {ram}"));
    assert!(plan.ram.is_empty());
    assert_eq!(plan.directories, [Path::new("/dev/hugepages")]);
    let plan = planned(&format!(
        "kvm -m 1G -object memory-backend-file,id=r,size=1G,mem-path=/dev/hugepages -M memory-backend=r {DRIVE}"
    ));
    assert!(command_line(&plan.qemu).contains("mem-path=/dev/hugepages,share=on"));
    assert_eq!(plan.directories, [Path::new("/dev/hugepages")]);
}

#[test]
fn impossible_command_lines_are_refused() {
    assert_eq!(try_plan("", &[]), Err(PlanError::NoCommand));
    assert_eq!(try_plan("kvm -daemonize", &[]), Err(PlanError::DaemonizeUnsupported));
    let extra = [parse_disk("/x.raw").expect("is right")];
    let result = try_plan("kvm -snapshot", &extra);
    assert!(matches!(result, Err(PlanError::SnapshotOfDisk { .. })), "{result:?}");
}

#[test]
fn help_options_are_passed_on() {
    for question in ["kvm -help", "kvm --version", "kvm -h"] {
        assert_eq!(command_line(&planned(question).qemu), question);
    }
}

#[test]
fn guest_name_becomes_valid_file_name() {
    assert_eq!(guest_name(&words("kvm -name guest=web/1,process=x")), "web_1");
    assert_eq!(guest_name(&words("kvm -name db")), "db");
    assert_eq!(guest_name(&words("kvm -m 1")), "vm");
}

/// Generates options that do not concern Larder, with values that look as if they did.
fn unrelated() -> impl Strategy<Value = Vec<String>> {
    let fixed = |words: &[&str]| Just(words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
    let with = |name: &'static str| move |value: String| vec![name.to_owned(), value];
    prop_oneof![
        fixed(&["-nographic"]),
        fixed(&["--enable-kvm"]),
        fixed(&["-S"]),
        fixed(&["disk.img"]),
        fixed(&["-append", "-drive file=/x,if=virtio,format=raw"]),
        "[ -~]{0,20}".prop_map(with("-append")),
        "[a-z0-9,=]{1,20}".prop_map(with("-netdev")),
        "e1000,netdev=[a-z]{1,9}".prop_map(with("-device")),
        "iothread,id=[a-z]{1,9}".prop_map(with("--object")),
        "file=[a-z/]{1,9},if=ide,,x".prop_map(with("-drive")),
        "[a-z/]{1,9}".prop_map(with("-cdrom")),
        "[a-z]{1,9}".prop_map(with("-not-yet-known")),
    ]
}

proptest! {
    #[test]
    fn unrelated_arguments_keep_order_and_text(
        before in prop::collection::vec(unrelated(), 0..6),
        after in prop::collection::vec(unrelated(), 0..6),
    ) {
        let flat = |groups: Vec<Vec<String>>| groups.into_iter().flatten().map(OsString::from).collect::<Vec<_>>();
        let program = words("qemu-system-x86_64");
        let drive = words("-drive file=/a.raw,if=virtio,format=raw,discard=unmap");
        let (before, after) = (flat(before), flat(after));
        let command = [program.clone(), before.clone(), drive, after.clone()].concat();
        let plan = plan(&command, &[], &setting(QemuVersion(7, 2))).expect("can be planned");
        let added = words(&format!("{} {RAM}", disk(0, "queue-size=256")));
        prop_assert_eq!(plan.qemu, [program, before, after, added].concat());
    }

    #[test]
    fn server_accepts_every_planned_disk(
        properties in prop::collection::vec(
            ("num-queues|queue-size|logical_block_size|serial|share-rw",
             "[0-9]{1,6}|0x[0-9a-f]{1,5}|[a-z0-9-]{1,40}|on|off|4k|512|1024|4096|256"),
            0..4,
        ),
        limits in prop::collection::vec(("iops|iops_rd|iops_max|bps|bps_wr_max|iops_size", "[0-9]{1,18}|1k|x"), 0..3),
    ) {
        let list = |pairs: Vec<(String, String)>| pairs
            .into_iter()
            .map(|(key, value)| format!(",{key}={value}"))
            .collect::<String>();
        let (properties, limits) = (list(properties), list(limits));
        let line = format!(
            "kvm -drive if=none,id=x,file=/b,format=raw{limits} -device virtio-blk-pci,drive=x{properties}"
        );
        let plan = planned(&line);
        for planned in &plan.disks {
            prop_assert_eq!(planned.disk.check(), Ok(()));
            prop_assert!(planned.disk.image_options().is_ok());
        }
        prop_assert!(!plan.disks.is_empty() || is_change(&plan, &["disk /b: stays with QEMU: "]));
    }

    #[test]
    fn arbitrary_command_lines_never_panic(line in prop::collection::vec(
        "-drive|-device|-m|-object|-machine|-numa|-smp|-name|[a-z=,.:{}0-9-]{0,16}|memory-backend-[a-z]{3}\
         |virtio-blk-pci,drive=a|if=none,id=a,file=b",
        1..10,
    )) {
        let line: Vec<OsString> = line.into_iter().map(Into::into).collect();
        let _ = plan(&line, &[], &setting(QemuVersion(10, 0)));
    }
}

#[test]
fn budget_shares_ram_and_adds_pager() {
    let budget = |size: &str| MemorySpec {
        swap: Some(SwapConfig {
            address: "/ssd/swap".parse().expect("a path"),
            size: Some("4GiB".parse().expect("a size")),
        }),
        prefetch: false,
        ..MemorySpec::new(size.parse().expect("a size"))
    };
    let with = |line: &str, wish: &MemorySpec| {
        let setting = PlanEnvironment { memory: Some(wish), ..setting(QemuVersion(7, 2)) };
        plan(&words(line), &[], &setting)
    };
    let plan = with("qemu-system-x86_64 -m 128 -hda /a", &budget("64MiB")).expect("can be planned");
    let line = command_line(&plan.qemu);
    assert_eq!(line, format!("qemu-system-x86_64 -m 128 -hda /a {RAM}"));
    assert!(is_change(&plan, &["memory: shared as /dev/shm/larder-vm-1"]));
    assert!(is_change(
        &plan,
        &["memory: kept within 64 MiB; larder memory status /run/larder/larder-run-1/memory.sock"]
    ));
    let memory = plan.memory.expect("it is managed");
    assert_eq!(
        command_line(&memory.attach_arguments("4711")),
        "memory attach --pid 4711 --wait --budget=67108864 --swap-cache=/ssd/swap --swap-size=4294967296 \
         --prefetch=off --control /run/larder/larder-run-1/memory.sock"
    );
    // Without knowing anything about the memory, only the minimum can be checked.
    let error = with("qemu-system-x86_64 -m 8G", &budget("64MiB")).expect_err("is too small");
    assert!(error.to_string().contains("memory of 8 GiB needs at least 68 MiB"), "{error}");
    with(
        "qemu-system-x86_64 -m 8G -object memory-backend-memfd,id=r,size=8G,share=on -M memory-backend=r",
        &budget("64MiB"),
    )
    .expect("QEMU has the memory");
    let error = with("qemu-system-x86_64", &budget("1MiB")).expect_err("is too small");
    assert!(error.to_string().contains("--memory-budget: a budget of 1 MiB is too small"), "{error}");
    assert!(with("qemu-system-x86_64 -version", &budget("64MiB")).expect("prints").memory.is_none());
}
