//! Errors of invalid command lines.

mod support;

use std::process::Command;

use larder_bench::campaign::process::install_script;
use support::{larder_path, run_command, temp_dir_on_tmpfs};

/// Command lines, and the complete errors. `ok.raw` is an image of 1 MiB.
const WRONG: [(&str, &str); 51] = [
    (
        "frobnicate",
        "error: unrecognized subcommand 'frobnicate'\n\nUsage: larder <COMMAND>\n\nFor more information, try '--help'.",
    ),
    (
        "disk serv ok.raw",
        "error: unrecognized subcommand 'serv'\n\n  tip: a similar subcommand exists: 'serve'\n\nUsage: larder disk <COMMAND>\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve",
        "error: the following required arguments were not provided:\n  <IMAGE>\n\nUsage: larder disk serve <IMAGE>\n\nFor more information, try '--help'.",
    ),
    ("disk serve ok.raw", "larder: nothing to serve on: give --socket PATH (vhost-user-blk), --nbd URI, or both"),
    (
        "disk serve nosuch.raw --socket s",
        "larder: cannot open nosuch.raw: No such file or directory (os error 2); check the path, or create the image first",
    ),
    (
        "disk serve http://x/y --socket s",
        "error: invalid value 'http://x/y' for '[IMAGE]': 'http://x/y' is QEMU's name for a file on a web server, which Larder does not open: download it and name the file, or serve it over NBD (qemu-nbd, nbdkit) and name the export, as in nbd+unix:///?socket=/run/disk.nbd; for a path that begins like that, put ./ before it\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket /nosuch/s",
        "larder: cannot listen on /nosuch/s: No such file or directory (os error 2); its directory does not exist",
    ),
    (
        "disk serve ok.raw --nbd http://x",
        "error: invalid value 'http://x' for '--nbd <URI>': 'http://x' does not begin with nbd://, nbds://, nbd+unix:// or nbds+unix://\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --nbd nbd://0.0.0.0",
        "larder: 0.0.0.0:10809 is open to other hosts and has no TLS: anyone who reaches it could read and write the disk; use nbds:// with ?tls-certificates=DIR, or a loopback address; --nbd-insecure allows it, if the network itself is protected",
    ),
    ("disk serve ok.raw --socket s --queues 0", "larder: queues 0: a disk has 1 to 64 virtqueues"),
    (
        "disk serve ok.raw --socket s --queue-size 100",
        "error: invalid value '100' for '--queue-size <N>': give a power of two from 4 to 1024; virtqueues have no other size\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket s --block-size 1000",
        "larder: block-size 1000: a disk has sectors of 512 or 4096 bytes",
    ),
    (
        "disk serve ok.raw --socket s --poll-us 99999999",
        "error: invalid value '99999999' for '--poll-us <US>': at most 10000 microseconds (10 ms): a thread that spins keeps a processor busy\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket s --throttle iops-totl=5",
        "error: invalid value 'iops-totl=5' for '--throttle <LIMITS>': 'iops-totl' is not a limit; known are iops-total, iops-read, iops-write, bps-total, bps-read, bps-write, each also with -max and -max-length, and iops-size\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket s --throttle iops-total=5,iops-read=2",
        "error: invalid value 'iops-total=5,iops-read=2' for '--throttle <LIMITS>': requests: set either the total or reads and writes, not both\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket s --prefetch 100k",
        "error: invalid value '100k' for '--prefetch <SIZE|off>': give at least 512 KiB, or off\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket s --cache ./c",
        "larder: cache of ok.raw: ./c: no such file; to create it, give its size (cache-size)",
    ),
    (
        "disk serve ok.raw --socket s --cache ./c --cache-size 12X",
        "error: invalid value '12X' for '--cache-size <SIZE>': 'X' in '12X' is not a unit of size: use KiB, MiB, GiB or TiB\n\nFor more information, try '--help'.",
    ),
    (
        "disk serve ok.raw --socket s --cache-mode wt",
        "larder: --cache-mode has no effect without cache, the file or device of the cache; give that option too",
    ),
    (
        "disk resize ok.raw 512K",
        "larder: ok.raw: it has 1 MiB (1048576 bytes), and shrinking it would discard the data past 512 KiB (524288 bytes): no file system survives that unless it was shrunk first; if it was, `qemu-img resize --shrink` does it",
    ),
    ("disk cache info ok.raw", "larder: ok.raw: it is not a Larder cache"),
    ("status 0", "larder: an interval of 0 s: give more than 0 s, and at most 86400 s"),
    ("status web soon", "larder: 'soon' is not an interval in seconds, such as 1 or 0.5"),
    ("vm ./nosuch.toml", "larder: ./nosuch.toml: No such file or directory (os error 2); check the path, or write one"),
    (
        "vm ./web.toml --check --reload",
        "error: the argument '--check' cannot be used with '--reload'\n\nUsage: larder vm --check <NAME>\n\nFor more information, try '--help'.",
    ),
    (
        "memory attach",
        "error: the following required arguments were not provided:\n  --pid <PID>\n  --budget <SIZE>\n\nUsage: larder memory attach --pid <PID> --budget <SIZE>\n\nFor more information, try '--help'.",
    ),
    (
        "memory attach --pid 1 --budget 12X",
        "error: invalid value '12X' for '--budget <SIZE>': 'X' in '12X' is not a unit of size: use KiB, MiB, GiB or TiB\n\nFor more information, try '--help'.",
    ),
    (
        "memory attach --pid 1 --qmp x --budget 1G",
        "error: the argument '--pid <PID>' cannot be used with '--qmp <PATH>'\n\nUsage: larder memory attach --pid <PID> --budget <SIZE>\n\nFor more information, try '--help'.",
    ),
    ("memory attach --pid 0 --budget 1G", "larder: --pid: not a PID"),
    (
        "memory attach --pid 99999999 --budget 1G",
        "larder: there is no process 99999999: is the PID from another namespace (a container), or has the process ended?",
    ),
    (
        "memory attach --qmp ok.raw --budget 1G",
        "larder: ok.raw is not a UNIX socket: give the path that QEMU has with -qmp unix:PATH,server=on,wait=off",
    ),
    (
        "memory attach --qmp ./nosuch --budget 1G",
        "larder: ./nosuch: No such file or directory (os error 2): give the path that QEMU has with -qmp unix:PATH,server=on,wait=off",
    ),
    (
        "memory status --control ./nosuch",
        "larder: there is no ./nosuch: give the path that the server was given with --control; a server that has ended has removed it",
    ),
    (
        "memory detach --control ok.raw",
        "larder: ok.raw is not a socket; give the path that the server was given with --control",
    ),
    (
        "memory status",
        "error: the following required arguments were not provided:\n  <NAME|--control <PATH>>\n\nUsage: larder memory status <NAME|--control <PATH>>\n\nFor more information, try '--help'.",
    ),
    (
        "memory limit web --control x --budget 1G",
        "error: the argument '[NAME]' cannot be used with '--control <PATH>'\n\nUsage: larder memory limit --budget <SIZE> <NAME|--control <PATH>>\n\nFor more information, try '--help'.",
    ),
    (
        "memory limit web",
        "error: the following required arguments were not provided:\n  --budget <SIZE>\n\nUsage: larder memory limit --budget <SIZE> <NAME|--control <PATH>>\n\nFor more information, try '--help'.",
    ),
    (
        "memory status .web",
        "larder: '.web' is not a valid name of a VM: a name consists of letters, digits, '.', '_' and '-', and does not begin with '.' or '-'; a path contains a '/', as in ./.web",
    ),
    (
        "memory detach ./nosuch",
        "larder: there is no ./nosuch: give the path that the server was given with --control; a server that has ended has removed it",
    ),
    (
        "memory attach --vm web --budget 1G",
        "error: the argument '--vm <NAME>' cannot be used with '--budget <SIZE>'\n\nUsage: larder memory attach --vm <NAME>\n\nFor more information, try '--help'.",
    ),
    (
        "memory attach --vm ./nosuch.toml",
        "larder: ./nosuch.toml: No such file or directory (os error 2); check the path, or write one",
    ),
    (
        "run --memory-swap-size 1G -- ls",
        "error: the following required arguments were not provided:\n  --memory-budget <SIZE>\n  --memory-swap-cache <FILE>\n\nUsage: larder run --memory-budget <SIZE> --memory-swap-cache <FILE> --memory-swap-size <SIZE> -- <QEMU COMMAND>...\n\nFor more information, try '--help'.",
    ),
    (
        "run --memory-compressed 1G -- ls",
        "error: the following required arguments were not provided:\n  --memory-budget <SIZE>\n\nUsage: larder run --memory-budget <SIZE> --memory-compressed <SIZE> -- <QEMU COMMAND>...\n\nFor more information, try '--help'.",
    ),
    (
        "advise --for 10",
        "error: invalid value '10' for '--for <TIME>': give a time from 100ms to 24h, as in 500ms, 10s, 5m or 1h\n\nFor more information, try '--help'.",
    ),
    (
        "advise --for 99h",
        "error: invalid value '99h' for '--for <TIME>': give a time from 100ms to 24h, as in 500ms, 10s, 5m or 1h\n\nFor more information, try '--help'.",
    ),
    (
        "advise --would-fit 8GB",
        "error: invalid value '8GB' for '--would-fit <SIZE>': 'GB' in '8GB' is not a unit of size: use KiB, MiB, GiB or TiB\n\nFor more information, try '--help'.",
    ),
    (
        "advise --active-share 180%",
        "error: invalid value '180%' for '--active-share <PERCENT>': give percent from 0% to 100%, as in 80%\n\nFor more information, try '--help'.",
    ),
    (
        "advise --overcommit 80%",
        "error: invalid value '80%' for '--overcommit <PERCENT>': give percent from 100% (no over-commit) to 1000%, as in 150%\n\nFor more information, try '--help'.",
    ),
    (
        "advise --stall much",
        "error: invalid value 'much' for '--stall <PERCENT>': give percent from 0% to 100%, as in 80%\n\nFor more information, try '--help'.",
    ),
    (
        "advise --disk-latency 0ms",
        "error: invalid value '0ms' for '--disk-latency <TIME>': give a time from 1us to 60s, as in 500us or 20ms\n\nFor more information, try '--help'.",
    ),
    (
        "run -- ./other",
        "larder: ./other --version does not print QEMU's version ('other 9.1'); give the QEMU program after --",
    ),
];

#[test]
fn invalid_command_lines_are_explained() {
    let folder = temp_dir_on_tmpfs();
    let image = std::fs::File::create(folder.path().join("ok.raw"));
    image.and_then(|image| image.set_len(1 << 20)).expect("an image");
    let other = folder.path().join("other");
    install_script("#!/bin/sh\necho other 9.1\n", &other);
    for (line, wanted) in WRONG {
        let mut command = Command::new(larder_path());
        command.current_dir(folder.path()).args(line.split(' '));
        let (code, said) = run_command(command);
        assert_eq!((code, said.trim_end()), (Some(2), wanted), "larder {line}");
    }
    // Nothing is left behind.
    let left = std::fs::read_dir(folder.path()).expect("a folder").flatten();
    let mut left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    left.sort();
    assert_eq!(left, ["ok.raw", "other"]);
}
