//! Errors of invalid VM files.

use super::support::TEST_TIMEOUT;
use super::{Process, Vm, ends, run_command, two};

/// Files, and the complete errors; `FILE` stands for the file's path.
const WRONG: [(&str, &str); 40] = [
    (
        "",
        "FILE:1:1: there is no disk; add one: a line [[disk]], and below it image = \"/path/of/the/image\" and its format",
    ),
    ("disk = 3", "FILE:1:8: disk: write [[disk]], with two brackets, above the keys of each disk"),
    ("[disk]\nimage = \"/a\"", "FILE:1:1: disk: write [[disk]], with two brackets, above the keys of each disk"),
    ("[[disk]\nimage = \"/a\"", "FILE:1:8: unclosed array table, expected `]`"),
    ("[[disk]]\nimage = /a", "FILE:2:9: string values must be quoted, expected literal string"),
    ("[[disk]]\nimage = \"/a\"\nimage = \"/b\"", "FILE:3:1: duplicate key"),
    ("[[disk]]", "FILE:1:1: this disk has no image; add image = \"/path/of/the/image\""),
    (
        "[[disk]]\nimage = \"http://x/y\"",
        "FILE:2:9: image: 'http://x/y' is QEMU's name for a file on a web server, which Larder does not open: download it and name the file, or serve it over NBD (qemu-nbd, nbdkit) and name the export, as in nbd+unix:///?socket=/run/disk.nbd; for a path that begins like that, put ./ before it",
    ),
    ("[[disk]]\nimage = \"/a\"\nserail = \"x\"", "FILE:3:1: unknown key 'serail' (did you mean 'serial'?)"),
    (
        "serial = \"x\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:1: unknown key 'serial'; it is a key of a disk: write it below [[disk]]",
    ),
    (
        "[[disk]]\nimage = \"/a\"\ncontrol-mode = \"0600\"",
        "FILE:3:1: unknown key 'control-mode'; it is a key of the VM: write it above the first [[disk]]",
    ),
    (
        "[[disk]]\nimage = \"/a\"\ncontrol = \"/b\"",
        "FILE:3:1: control: the VM has one control socket for all its disks; write this above the first [[disk]]",
    ),
    (
        "colour = \"red\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:1: unknown key 'colour'; the known keys are uuid, control, control-mode, control-owner, control-group, disk, memory",
    ),
    (
        "memory = \"4GiB\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:10: memory: write a line [memory], and its keys below it, as in budget = \"1GiB\"",
    ),
    (
        "budget = \"4GiB\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:1: unknown key 'budget'; it is a key of the memory: write it below [memory]",
    ),
    (
        "[[disk]]\nimage = \"/a\"\nswap-size = \"1GiB\"",
        "FILE:3:1: unknown key 'swap-size'; it is a key of the memory: write it below [memory]",
    ),
    (
        "[memory]\nqmp = \"/q\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:1: memory: there is no budget; add one, as in budget = \"1GiB\"",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:1: memory: it does not give the location of QEMU; add qmp = \"/path/of/its/QMP/socket\", or pid-file = \"/path/of/its/pid/file\"",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\npid-file = \"/p\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:1: memory: QEMU is located by either qmp or pid-file: omit one of them",
    ),
    (
        "[[disk]]\nimage = \"/a\"\n[memory]\nqmp = \"/q\"\nbudget = \"1GX\"",
        "FILE:5:10: budget = 1GX: 'GX' in '1GX' is not a unit of size: use KiB, MiB, GiB or TiB",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nswapcache = \"/s\"",
        "FILE:4:1: unknown key 'swapcache' (did you mean 'swap-cache'?)",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nimage = \"/a\"",
        "FILE:4:1: unknown key 'image'; the memory has budget, budget-min, budget-low, budget-high, budget-max, compressed, swap-cache, swap-size, slow-store, slow-size, quarantine-ms, prefetch, encrypt, qmp, pid-file",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nuuid = \"x\"",
        "FILE:4:1: unknown key 'uuid'; it is a key of the VM: write it above [memory]",
    ),
    (
        "[memory]\nbudget = 1000000\nqmp = \"/q\"",
        "FILE:1:1: memory: a budget of 1000000 B is too small: the minimum is 16 MiB, and 26 bytes for each page of the memory",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\ncompressed = \"1GiB\"\nqmp = \"/q\"",
        "FILE:1:1: memory: 1 GiB of compressed pages leave too little of a budget of 1 GiB for the guest",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nswap-size = \"1GiB\"",
        "FILE:1:1: memory: swap-size has no effect without swap-cache; give both, or neither",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nslow-store = \"/s\"\nslow-size = \"1MiB\"",
        "FILE:1:1: memory: a slow store of 1 MiB is too small; the minimum is 16 MiB",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nswap-cache = \"/s\"\nslow-store = \"/s\"",
        "FILE:1:1: memory: the swap cache and the slow store are both /s; give each its own disk, or omit the slow store",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nquarantine-ms = 600001",
        "FILE:4:17: quarantine-ms = 600001: give milliseconds, at most 600000",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nprefetch = \"8MiB\"",
        "FILE:4:12: prefetch = 8MiB: give on or off, or true or false",
    ),
    (
        "[memory]\nbudget = \"1GiB\"\nqmp = \"/q\"\nswap-cache = \"\"",
        "FILE:4:14: swap-cache: give a path or an NBD URI",
    ),
    ("[[disk]]\nimage = \"/a\"\nqueues = 65", "FILE:3:10: queues = 65: give a number of virtqueues from 1 to 64"),
    (
        "[[disk]]\nimage = \"/a\"\nqueues = [1]",
        "FILE:3:10: queues: give a text in quotes, a number, or true or false; this is an array",
    ),
    (
        "[[disk]]\nimage = \"/a\"\nprefetch = \"8X\"",
        "FILE:3:12: prefetch = 8X: give a size, or off: 'X' in '8X' is not a unit of size: use KiB, MiB, GiB or TiB",
    ),
    (
        "[[disk]]\nimage = \"/a\"\ncache-size = \"8G\"",
        "FILE:1:1: disk vda: cache-size has no effect without cache, the file or device of the cache; give that option too",
    ),
    (
        "[[disk]]\nimage = \"/a\"\ncache = \"a.cache\"",
        "FILE:3:9: cache = a.cache: give direct or buffered for the host's page cache, or a disk cache's file with a / in it, as in ./FILE",
    ),
    (
        "control-mode = \"0999\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:16: control-mode: give an octal mode in quotes that has at least 0600, as in \"0660\"",
    ),
    (
        "control-owner = \"no such user\"\n[[disk]]\nimage = \"/a\"",
        "FILE:1:17: control-owner: there is no user 'no such user' on this host",
    ),
    (
        "[[disk]]\nimage = \"/a\"\nname = \"x\"\n[[disk]]\nimage = \"/b\"\nname = \"x\"",
        "FILE:4:1: disk x: another disk has that name; give it a different one: name = \"...\"",
    ),
    (
        "[[disk]]\nimage = \"/a\"\nsocket = \"s\"\n[[disk]]\nimage = \"/b\"\nsocket = \"./s\"",
        "the socket of disk vda and the socket of disk vdb are the same path; give each its own",
    ),
];

/// Each invalid file is refused with the position of the mistake, and advice.
#[test]
fn invalid_file_error_names_position() {
    let vm = two();
    for (file, wanted) in WRONG {
        vm.write(file);
        let wanted = format!("larder: {}", wanted.replace("FILE:", &format!("{}:", super::text(&vm.file()))));
        for options in [&[][..], &["--check"]] {
            let (code, said) = run_command(vm.command(options));
            assert_eq!((code, said.as_str()), (Some(2), wanted.as_str()), "{file}");
        }
    }
}

/// `--check` covers `[memory]`, which the server of the disks does not manage.
#[test]
fn check_covers_memory() {
    let vm = two();
    let memory = |more: &str| format!("{}\n[memory]\nbudget = \"1GiB\"\nqmp = \"qmp\"\n{more}", super::TWO);
    let check = |vm: &Vm| run_command(vm.command(&["--check"]));
    vm.write(&memory("swap-cache = \"IMAGES/swap\"\nswap-size = \"32MiB\"\nprefetch = false"));
    let right = "web: 2 disks can be served\nweb: its memory can be managed, within 1 GiB";
    assert_eq!(check(&vm), (Some(0), right.to_owned()));
    for (more, wanted) in [
        (
            "swap-cache = \"IMAGES/swap\"",
            "memory: swap cache IMAGES/swap: it does not exist; give its maximum size (--swap-size, swap-size in a VM's file)",
        ),
        ("swap-cache = \"IMAGES/data.raw\"", "memory: IMAGES/data.raw is the image of disk data"),
        ("slow-store = \"IMAGES/system.cache\"", "memory: IMAGES/system.cache is the cache of disk vda"),
        (
            "swap-cache = \"IMAGES/swap\"\nswap-size = \"900TiB\"",
            "memory: swap cache IMAGES/swap: 900 TiB was requested, and",
        ),
        (
            "swap-cache = \"IMAGES/no/swap\"\nswap-size = \"32MiB\"",
            "memory: swap cache IMAGES/no/swap: cannot inspect its directory: ",
        ),
        (
            "swap-cache = \"IMAGES/other\"\nswap-size = \"32MiB\"",
            "memory: swap cache IMAGES/other: its first MiB is not empty",
        ),
    ] {
        std::fs::write(vm.images.path().join("other"), [7; 8192]).expect("writes");
        vm.write(&memory(more));
        let (code, said) = check(&vm);
        let wanted = wanted.replace("IMAGES", super::text(vm.images.path()));
        assert!(code == Some(2) && said.contains(&wanted), "{more}: {said}");
    }
    assert!(!vm.images.path().join("swap").exists(), "a check has made something");
    // A file with memory alone can be valid, but has nothing to serve.
    vm.write("[memory]\nbudget = \"1GiB\"\npid-file = \"pid\"");
    let alone = "web: its memory can be managed, within 1 GiB";
    assert_eq!(check(&vm), (Some(0), alone.to_owned()));
    let (code, said) = run_command(vm.command(&[]));
    assert!(code == Some(2) && said.contains("web.toml: there is no disk; add one"), "{said}");
}

/// `larder memory attach --vm` is refused for a file without `[memory]`.
#[test]
fn memory_needs_its_section() {
    let vm = two();
    let mut command = std::process::Command::new(crate::support::larder_path());
    command.args(["memory", "attach", "--vm"]).arg(vm.file());
    let (code, said) = run_command(command);
    let wanted = format!("larder: {}: it has no [memory] section: add one", super::text(&vm.file()));
    assert!(code == Some(2) && said.starts_with(&wanted), "{said}");
}

/// A name that is too long for a socket's address is found before a server is started.
#[test]
fn check_refuses_names_longer_than_sockets() {
    let vm = two();
    let long = "n".repeat(100);
    let disks = "[[disk]]\nimage = \"/a\"\n";
    let socket = "control = \"/run/c\"\n[[disk]]\nname = \"LONG\"\nimage = \"/a\"\n";
    let memory = "control = \"/run/c\"\n[memory]\nbudget = \"1GiB\"\npid-file = \"pid\"\n";
    let qmp = "[memory]\nbudget = \"1GiB\"\nqmp = \"LONG/q\"\n";
    for (name, text, key) in [
        (long.as_str(), disks, ":1:1: control: "),
        ("web", socket, ":2:1: socket: "),
        (&long, memory, ":2:2: memory: "),
        ("web", qmp, ":3:7: qmp: "),
    ] {
        let file = vm.images.path().join(format!("{name}.toml"));
        std::fs::write(&file, text.replace("LONG", &long)).expect("writes");
        let mut command = std::process::Command::new(crate::support::larder_path());
        command.args(["vm", "--check"]).arg(&file);
        let (code, said) = run_command(command);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(key), "{key}: {said}");
        assert!(said.contains("the path of a socket has at most 107"), "{said}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let vm = Vm::new("disks = 1\n[[disk]]\nimage = 3\nreadonly = 3\n[[disk]]\nimage = \"/b\"\niops-total = \"many\"\n");
    let (code, said) = run_command(vm.command(&[]));
    let file = super::text(&vm.file()).to_owned();
    let wanted = [
        "larder: 3 mistakes:".to_owned(),
        format!("  {file}:1:1: unknown key 'disks' (did you mean 'disk'?)"),
        format!("  {file}:4:12: readonly = 3: give on or off"),
        format!("  {file}:7:14: iops-total = many: give a number; 0 for no limit"),
    ];
    assert_eq!((code, said), (Some(2), wanted.join("\n")));
}

#[test]
fn vm_is_named_by_its_file() {
    let vm = two();
    for (name, wanted) in [
        (
            "no-such-vm",
            "/etc/larder/vms/no-such-vm.toml: No such file or directory (os error 2); write one, or give the path of one with a / in it",
        ),
        ("two words", "'two words' is not a valid name of a VM"),
        (".hidden", "'.hidden' is not a valid name of a VM"),
    ] {
        let mut command = std::process::Command::new(crate::support::larder_path());
        command.args(["vm", name]);
        let (code, said) = run_command(command);
        assert!(code == Some(2) && said.contains(wanted), "{said}");
    }
    // The directory of users other than root.
    crate::support::require_root("to be another user");
    let home = vm.path("home");
    std::fs::create_dir_all(home.join("larder/vms")).expect("a folder");
    let mut named = std::process::Command::new(crate::support::larder_path());
    std::os::unix::process::CommandExt::uid(&mut named, 65534);
    named.args(["vm", "web"]).env("XDG_CONFIG_HOME", &home);
    let (code, said) = run_command(named);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains(&format!("{}/larder/vms/web.toml: ", home.display())), "{said}");
}

/// If two VMs have the same name, the second one reports that it cannot be found by name.
#[test]
fn duplicate_vm_name_is_reported() {
    let [one, other] = [two(), two()];
    let runtime = crate::support::temp_dir_on_tmpfs();
    let start = |vm: &Vm| {
        let mut command = vm.command(&[]);
        command.env("RUNTIME_DIRECTORY", runtime.path());
        let process = Process::start(command).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        process
    };
    let mut first = start(&one);
    let second = start(&other);
    let told = format!("another `larder vm` serves a VM of this name, at {}", one.path("control").display());
    assert!(second.output().contains(&told), "{}", second.output());
    ends(second);
    // The record of a killed server is no obstacle.
    let mut second = start(&other);
    second.kill();
    first.kill();
    let first = start(&one);
    assert!(!first.output().contains("another `larder vm`"), "{}", first.output());
}
