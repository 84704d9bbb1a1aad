//! `larder vm` for a VM that arrives from another host, or has moved to one, as far as one host shows it.

use std::process::Command;

use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;

use super::confine::{status, threads};
use super::support::{LoopDevice, TEST_TIMEOUT, assert_io_works, run_command};
use super::{FrontEnd, Options, Process, Vm, ends, run_tool, text};

const ONE: &str = r#"
control = "control"

[[disk]]
image = "IMAGES/data.raw"
format = "raw"
socket = "vda"
cache = "IMAGES/data.cache"
cache-size = "16MiB"
"#;

fn one() -> Vm {
    let vm = Vm::new(ONE);
    vm.raw("data.raw", 8);
    vm
}

fn start(vm: &Vm, options: &[&str]) -> Process {
    let process = Process::start(vm.command(options)).expect("larder starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    process
}

fn is_away(vm: &Vm) -> bool {
    vm.disks()[0]["away"] == true
}

/// Returns true if a process has the image open for writing.
fn is_open(vm: &Vm) -> bool {
    let image = vm.images.path().join("data.raw");
    let written = Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 0 7M 512", text(&image)])
        .output()
        .expect("qemu-io is there");
    String::from_utf8_lossy(&written.stderr).contains("lock")
}

fn says(vm: &Vm, option: &str) {
    let (code, said) = run_command(vm.command(&[option]));
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn incoming_guest_waits_for_its_disk() {
    let vm = one();
    let process = start(&vm, &["--incoming"]);
    assert!(is_away(&vm) && !is_open(&vm));
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| assert_io_works(&mut guest, 1));
        // By then its queue is started, and a request is pending.
        process.wait_for("front-end connected", TEST_TIMEOUT).expect("it connects");
        assert!(is_away(&vm) && !is_open(&vm));
        assert_eq!(vm.disks()[0]["requests"]["write"]["count"], 0);
        says(&vm, "--take");
        guest.join().expect("its requests are carried out");
    });
    assert!(!is_away(&vm) && is_open(&vm));
    drop(guest);
    ends(process);
    // The server opens the disk again after a restart.
    let process = start(&vm, &[]);
    assert!(!is_away(&vm));
    ends(process);
}

/// A server leaves a disk that was moved away alone until `--take`.
#[test]
fn departed_disk_is_untouched_until_taken() {
    let vm = one();
    let mut process = start(&vm, &[]);
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    let (code, said) = run_command(vm.command(&["--expect"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("its guest is running"), "{said}");
    assert_io_works(&mut guest, 2);
    drop(guest);
    says(&vm, "--expect");
    assert!(is_away(&vm) && !is_open(&vm));
    let (code, said) = run_command(vm.command(&["--reload"]));
    assert!(code == Some(2) && said.contains("on another host"), "{said}");
    for _ in 0..2 {
        process.kill();
        process = start(&vm, &[]);
        assert!(is_away(&vm) && !is_open(&vm));
    }
    says(&vm, "--take");
    assert!(!is_away(&vm) && is_open(&vm));
    ends(process);
}

/// A cache has no data from before its device was on another host.
#[test]
fn returning_device_gets_empty_cache() {
    let vm = one();
    let image = vm.images.path().join("data.raw");
    let device = LoopDevice::new(&image, 512);
    vm.write(&ONE.replace("IMAGES/data.raw", text(&device.0)));
    let mut process = start(&vm, &[]);
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    // Devices have no timestamps. A foreign write would be found only where the guest wrote last, and other hosts
    // write elsewhere.
    assert_io_works(&mut guest, 1);
    drop(guest);
    let occupancy = || vm.disks()[0]["cache"]["occupancy"].as_u64().expect("a number");
    assert!(occupancy() > 0);
    says(&vm, "--expect");
    process.kill();
    process = start(&vm, &[]);
    says(&vm, "--take");
    assert_eq!(occupancy(), 0);
    ends(process);
}

/// Returns the byte that the guest reads at the beginning of its disk.
fn first_byte(vm: &Vm) -> u8 {
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    let into = guest.data();
    let buffers = [Buffer { address: into, len: 4096 }];
    let read = guest.queue().run(&Request::read(0, &buffers)).expect("reads");
    assert_eq!(read.status, 0);
    guest.memory.read_vec(into, 4096)[0]
}

/// The cache of a killed server is not trusted after its disk was on another host. Exports have no timestamps that
/// would reveal foreign writes.
#[test]
fn killed_servers_cache_is_stale_elsewhere() {
    let vm = one();
    let (image, socket) = (vm.images.path().join("data.raw"), vm.path("nbd"));
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["-f", "-v", "-U", text(&socket), "file", text(&image)]);
    let nbdkit = Process::start(nbdkit).expect("nbdkit starts");
    let give_up = std::time::Instant::now() + TEST_TIMEOUT;
    while !socket.exists() {
        assert!(std::time::Instant::now() < give_up, "{}", nbdkit.output());
    }
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    let write_back = ONE.replace("cache-size", "cache-mode = \"wb\"\ncache-size");
    vm.write(&write_back.replace("IMAGES/data.raw", &uri));
    let writes = |byte: u8| {
        let write = format!("write -P {byte} 0 64k");
        run_tool("qemu-io", &["-f", "raw", "-c", &write, text(&image)]);
    };
    writes(1);
    let mut process = start(&vm, &["--incoming"]);
    says(&vm, "--take");
    assert_eq!(first_byte(&vm), 1);
    let give_up = std::time::Instant::now() + TEST_TIMEOUT;
    while vm.disks()[0]["cache"]["occupancy"] == 0 {
        assert!(std::time::Instant::now() < give_up, "{}", process.output());
    }
    // A clean stop, so that the cache has the data after the later kill.
    ends(process);
    process = start(&vm, &[]);
    assert_eq!(first_byte(&vm), 1);
    process.kill();
    // The write of another host.
    writes(2);
    process = start(&vm, &["--incoming"]);
    says(&vm, "--take");
    assert_eq!(first_byte(&vm), 2);
    // Dirty data of the cache is not dropped silently.
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    drop(guest);
    process.kill();
    let (code, said) = run_command(vm.command(&["--incoming"]));
    assert!(code == Some(2) && said.contains("may have data that was never written to the disk"), "{said}");
}

#[test]
fn confined_server_reopens_arriving_disks() {
    let vm = one();
    let process = start(&vm, &["--incoming", "--confine"]);
    let is_confined = |process: &Process| {
        threads(process.id()).iter().all(|(thread, _)| status(process.id(), *thread, "Seccomp") == "2")
    };
    assert!(is_confined(&process), "before it has read anything of the image");
    says(&vm, "--take");
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    drop(guest);
    says(&vm, "--expect");
    assert!(is_away(&vm) && !is_open(&vm));
    says(&vm, "--take");
    assert!(!is_away(&vm) && is_open(&vm) && is_confined(&process));
    ends(process);
}

/// Ranges that were hot on another host are prefetched into the cache.
#[test]
fn hot_ranges_are_prefetched_on_arrival() {
    let vm = one();
    let image = vm.images.path().join("data.raw");
    run_tool("qemu-io", &["-f", "raw", "-c", "write -P 5 0 4M", text(&image)]);
    let process = start(&vm, &["--incoming"]);
    let socket = vm.path("control");
    let curl = |words: &[&str]| run_tool("curl", &[&["-sS", "--unix-socket", text(&socket)], words].concat());
    let hot = "http://x/v1/disks/vda/hot";
    assert_eq!(curl(&[hot]), r#"{"ranges":""}"#);
    curl(&["-d", r#"{"ranges":"512+256,0+64,999999+5"}"#, hot]);
    says(&vm, "--take");
    let cache = |what: &str| vm.disks()[0]["cache"][what].as_u64().expect("a number");
    let give_up = std::time::Instant::now() + TEST_TIMEOUT;
    while cache("occupancy") < (256 + 64) * 4096 {
        assert!(std::time::Instant::now() < give_up, "{}", process.output());
    }
    assert_eq!(cache("warmed"), (256 + 64) * 4096);
    let told: serde_json::Value = serde_json::from_str(&curl(&[hot])).expect("JSON");
    let ranges = told["ranges"].as_str().expect("a text").split(',');
    let blocks = ranges.flat_map(|range| {
        let (start, len) = range.split_once('+').expect("a range");
        let start: u64 = start.parse().expect("a number");
        start..start + len.parse::<u64>().expect("a number")
    });
    let blocks: std::collections::BTreeSet<u64> = blocks.collect();
    assert_eq!(blocks, (0..64).chain(512..768).collect());
    let wrong = curl(&["-d", r#"{"ranges":"x"}"#, hot]);
    assert!(wrong.contains("'x' is not a range"), "{wrong}");
    ends(process);
}
