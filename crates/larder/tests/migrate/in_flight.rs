//! A guest whose disk's server is killed with requests in flight just when the guest is paused for the end of its
//! move: its QEMU does not know the position of the queue, so the guest must not run at the destination.

use std::process::Command;
use std::time::{Duration, Instant};

use larder_bench::campaign::migration::host::Host;
use larder_bench::campaign::migration::vm::{Machine, Release, Vm, counted};
use larder_bench::campaign::process::Process;
use tempfile::TempDir;

use super::disks::{disk, host, image, moves, receive, send, serve};
use crate::MEMORY_MIB;
use crate::support::{TEST_TIMEOUT, run_command, temp_dir_on_disk};

/// Reads overtake writes, of which the server executes one per second: requests are not answered in order.
const SLOW: &str = "iops-write = 1";

/// Guest script with several writers, which verify their earlier writes, and one reader.
const SCRIPT: &str = r#"
mkdir /was
writes() {
  tick=0
  while :; do
    place=$(($1 * 4 + tick % 4))
    next=$(($1 * 4 + (tick + 1) % 4))
    yes "$1 wrote tick $tick" | head -c 16384 >/was/$place
    dd if=/was/$place of=/dev/vda bs=16k seek=$place oflag=direct 2>/dev/null || echo "MISMATCH: cannot write"
    if [ -e /was/$next ]; then
      dd if=/dev/vda of=/is-$1 bs=16k skip=$next count=1 iflag=direct 2>/dev/null || echo "MISMATCH: cannot read"
      cmp /is-$1 /was/$next || echo "MISMATCH: $(head -n 1 /is-$1), not $(head -n 1 /was/$next)"
    fi
    tick=$((tick + 1))
    echo "WROTE $1 $tick"
  done
}
for writer in 0 1 2 3; do
  writes $writer &
done
tick=0
while :; do
  dd if=/dev/vda of=/dev/null bs=4k skip=4096 count=8 iflag=direct 2>/dev/null || echo "MISMATCH: cannot read"
  echo "TICK $tick"
  tick=$((tick + 1))
  sleep 0.1
done
"#;

/// A guest under load, and the hosts between which it is moved.
struct Bed {
    machine: Machine,
    here: Host,
    there: Host,
    server_here: Process,
    _server_there: Process,
    _storage: TempDir,
}

impl Bed {
    fn new(release: Release) -> (Self, Vm) {
        let storage = temp_dir_on_disk();
        let image = image(&storage);
        let [here, there] = ["wb", "wt"].map(|mode| host(&image, mode));
        let here = here.with_lines(SLOW).expect("its VM's file can be written");
        let machine = Machine::running(release, MEMORY_MIB, SCRIPT).expect("the test bed is set up");
        let server_here = serve(&here, &[]);
        let guest = here.boot(&machine).expect("the guest boots");
        writes(&guest);
        let bed = Self {
            _server_there: serve(&there, &["--incoming"]),
            server_here,
            machine,
            here,
            there,
            _storage: storage,
        };
        (bed, guest)
    }

    /// Checks that the guest has stayed with its disk and that its requests were repeated, and then moves it.
    fn goes_on_and_moves(self, source: Vm) {
        let is = disk(&self.here);
        assert!(!is.away && disk(&self.there).away);
        let writes_on = writes_on(&source);
        writes_on.unwrap_or_else(|error| panic!("{error:#}\n{}", self.server_here.output()));
        let mut consoles = Vec::new();
        let destination = moves(&self.machine, (&self.here, source), &self.there, &mut consoles);
        writes(&destination);
        consoles.push(destination.console());
        counted(&consoles).expect("it has counted on, and found what it wrote");
    }
}

/// Waits until all of the guest's writers make progress.
fn writes_on(guest: &Vm) -> anyhow::Result<()> {
    (0..4).try_for_each(|writer| guest.wait_for_console(&format!("WROTE {writer} "), 3))
}

fn writes(guest: &Vm) {
    writes_on(guest).expect("it goes on, and finds what it wrote");
}

fn mover(bed: &Bed, source: &Vm, receiver: &larder_bench::campaign::migration::larder::Side) -> Process {
    let mover = Process::start(send(&bed.here, source, receiver, &["--bandwidth", "64MiB"])).expect("starts");
    mover.wait_for("round 1", TEST_TIMEOUT).expect("it has begun");
    mover
}

/// Asserts that the move failed because QEMU does not know the position of the queue.
fn stayed(mover: &mut Process, destination: &Vm) {
    let code = mover.wait(TEST_TIMEOUT).expect("it ends").code();
    let said = mover.output();
    if code == Some(0) {
        panic!("it was moved, and then: {:#?}", writes_on(destination));
    }
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the VM continues here"), "{said}");
    assert!(said.contains("QEMU does not know the position of its queue 0"), "{said}");
}

/// Waits until some of the guest's writes are pending. On a busy machine that need not be all of them, because a
/// writer takes seconds between two writes.
fn is_asked_for_much(host: &Host) {
    let give_up = Instant::now() + TEST_TIMEOUT;
    while disk(host).requests.under_way < 2 {
        assert!(Instant::now() < give_up, "its writers do not wait");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until QEMU has sent a message to the server of a disk that does not read it.
fn is_spoken_to(host: &Host) {
    let give_up = Instant::now() + TEST_TIMEOUT;
    let socket = host.socket();
    loop {
        let mut ss = Command::new("ss");
        ss.args(["-xH", "src"]).arg(&socket);
        let (code, listed) = run_command(ss);
        assert_eq!(code, Some(0), "{listed}");
        let waits =
            |line: &&str| line.contains("ESTAB") && line.split_whitespace().nth(2).is_some_and(|bytes| bytes != "0");
        if listed.lines().any(|line| waits(&line)) {
            return;
        }
        assert!(Instant::now() < give_up, "{listed}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills the server while the guest's writes are pending and its VM is being moved; checks that the VM runs on at the
/// source, and can be moved then.
fn goes_on_at_the_source(release: Release, dies: impl FnOnce(&mut Bed, &mut Vm)) {
    let (mut bed, mut source) = Bed::new(release);
    let destination = bed.there.incoming(&bed.machine).expect("QEMU starts");
    let receiver = receive(&bed.there, &destination);
    let mut mover = mover(&bed, &source, &receiver);
    is_asked_for_much(&bed.here);
    dies(&mut bed, &mut source);
    bed.server_here = serve(&bed.here, &[]);
    stayed(&mut mover, &destination);
    assert!(!destination.console().contains("TICK"));
    drop((receiver, destination));
    bed.goes_on_and_moves(source);
}

/// If the server is killed while QEMU asks it for the queue's position, the guest continues to run at the source.
#[test]
fn kill_during_queue_query_aborts_move() {
    // QEMU before 9.1 has no disk after that, at the source or anywhere else: it does not send the memory table to
    // the next server.
    goes_on_at_the_source(Release::Debian13, |bed, _| {
        bed.server_here.signal(libc::SIGSTOP);
        is_spoken_to(&bed.here);
        bed.server_here.kill();
    });
}

/// If the guest is paused while its server restarts, it continues to run at the source.
#[test]
fn pause_during_server_restart_aborts_move() {
    for release in [Release::Host, Release::Debian13] {
        goes_on_at_the_source(release, |bed, source| {
            bed.server_here.kill();
            source.wait_for_migration(&["completed"]).expect("it has sent all, and stands still");
        });
    }
}

#[test]
fn paused_vm_moves_despite_server_kill() {
    for release in [Release::Host, Release::Debian13] {
        let (mut bed, mut source) = Bed::new(release);
        source.ask("stop", &serde_json::json!({})).expect("it stops");
        // QEMU gets the queue's position just before its server records that; once this query is answered, it is
        // recorded.
        disk(&bed.here);
        bed.server_here.kill();
        bed.server_here = serve(&bed.here, &[]);
        let mut consoles = Vec::new();
        let mut destination = moves(&bed.machine, (&bed.here, source), &bed.there, &mut consoles);
        assert_eq!(destination.run_state().expect("answers"), "paused");
        destination.ask("cont", &serde_json::json!({})).expect("it runs");
        writes(&destination);
        consoles.push(destination.console());
        counted(&consoles).expect("it has counted on, and found what it wrote");
    }
}
