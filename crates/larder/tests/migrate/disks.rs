//! `larder migrate --qmp`, of guests whose disk `larder vm` serves on both hosts: it goes along. The hosts are folders for
//! what each remembers; the image is on storage that both reach.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::migration::larder::{Side, move_command, receive_whole_command};
use larder_bench::campaign::migration::vm::{Machine, Release, Vm, counted};
use larder_bench::campaign::process::{Process, mortal};
use larder_vm::control::fetch_disks;
use larder_vm::control::state::DiskState;
use tempfile::TempDir;

use crate::support::{LIMIT, larder, on_disk, on_tmpfs, run, tool};

/// Memory of the guests in MiB: their file system takes half of it.
const MEMORY_MIB: u64 = 288;

/// Places on the disk that the guest writes to, one each tick.
const PLACES: usize = 24;

/// Writes something new to one place after the other, and looks whether what was written to the next one a round ago is
/// still there. Past the guest's page cache: all comes from the disk's server.
const SCRIPT: &str = r#"
mkdir /was
# What nobody asks for again.
dd if=/dev/urandom of=/dev/vda bs=64k seek=64 count=64 oflag=direct conv=fsync 2>/dev/null || echo "MISMATCH: cannot write"
tick=0
while :; do
  place=$((tick % 24))
  next=$(((tick + 1) % 24))
  yes "tick $tick" | head -c 65536 >/was/$place
  dd if=/was/$place of=/dev/vda bs=64k seek=$place oflag=direct conv=fsync 2>/dev/null || echo "MISMATCH: cannot write"
  if [ -e /was/$next ]; then
    dd if=/dev/vda of=/is bs=64k skip=$next count=1 iflag=direct 2>/dev/null || echo "MISMATCH: cannot read"
    cmp /is /was/$next || { echo "MISMATCH: $(head -n 1 /is), not $(head -n 1 /was/$next)"; exit 1; }
  fi
  echo "TICK $tick"
  tick=$((tick + 1))
done
"#;

/// A host, of which there may be several on one.
struct Host {
    /// Sockets and what is remembered until it restarts.
    folder: TempDir,
    /// What is remembered longer, and caches.
    lasting: TempDir,
}

impl Host {
    /// That serves the image, with a cache in this mode.
    fn new(image: &Path, mode: &str) -> Self {
        let host = Self {
            folder: on_tmpfs(),
            lasting: on_disk(),
        };
        let file = format!(
            "control = 'control'\n[[disk]]\nimage = '{}'\nsocket = 'vda'\nserial = 'WEB'\ncache = '{}'\n\
             cache-size = '16MiB'\ncache-mode = '{mode}'\n",
            image.display(),
            host.cache().display()
        );
        std::fs::write(host.path("web.toml"), file).expect("writes the file");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn cache(&self) -> PathBuf {
        self.lasting.path().join("cache")
    }

    /// The command runs on this host.
    fn has(&self, mut command: Command) -> Command {
        command
            .env("RUNTIME_DIRECTORY", self.folder.path())
            .env("STATE_DIRECTORY", self.lasting.path());
        command
    }

    /// `larder vm` for its VM's file.
    fn vm(&self, options: &[&str]) -> Command {
        let mut command = mortal(larder().to_str().expect("UTF-8"));
        command.arg("vm").arg(self.path("web.toml")).args(options);
        self.has(command)
    }

    fn serve(&self, options: &[&str]) -> Process {
        let process = Process::start(self.vm(options)).expect("larder starts");
        process.wait_for(" ready ", LIMIT).expect("it serves");
        process
    }

    fn disk(&self) -> DiskState {
        let (_, disks) = fetch_disks(&self.path("control")).expect("it answers");
        disks.disks.into_iter().next().expect("it has one")
    }

    fn receiver(&self, vm: &Vm) -> Side {
        let command = receive_whole_command(larder(), "127.0.0.1:0", vm.qmp_for_others(), &[]);
        Side::listening(self.has(command)).expect("it listens")
    }

    fn mover(&self, source: &Vm, receiver: &Side, words: &[&str]) -> Command {
        let to = receiver.address().to_string();
        self.has(move_command(larder(), source.qmp_for_others(), &to, words))
    }

    fn incoming(&self, machine: &Machine) -> Vm {
        machine.incoming_with(&self.path("vda")).expect("QEMU starts")
    }
}

fn machine(release: Release) -> Machine {
    Machine::running(release, MEMORY_MIB, SCRIPT).expect("the test bed is set up")
}

fn image(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("web.qcow2");
    let text = path.to_str().expect("UTF-8");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text, "64M"]);
    path
}

/// All places were written anew, and found so.
fn works_for_a_round(vm: &Vm) {
    vm.wait_for_console("TICK", 2 * PLACES)
        .expect("it goes on, and finds what it wrote");
}

/// Moves the guest; it is at the other host then, and its disk with it.
fn moves(machine: &Machine, (from, source): (&Host, Vm), to: &Host, consoles: &mut Vec<String>) -> Vm {
    let mut source = source;
    let destination = to.incoming(machine);
    let mut receiver = to.receiver(&destination);
    assert!(to.disk().away && !from.disk().away);
    let (code, said) = run(from.mover(&source, &receiver, &[]));
    assert_eq!(code, Some(0), "{said}");
    let (code, heard) = receiver.end().expect("it ends");
    assert_eq!(code, Some(0), "{heard}");
    assert!(!to.disk().away && from.disk().away);
    source.process.wait(LIMIT).expect("it ends");
    consoles.push(source.console());
    destination
}

#[test]
fn a_disk_goes_along_and_comes_back_and_nothing_old_is_read_from_a_cache() {
    let storage = on_disk();
    let image = image(&storage);
    let (here, there) = (Host::new(&image, "wb"), Host::new(&image, "wt"));
    let machine = machine(Release::Debian12);
    let mut consoles = Vec::new();

    let mut server_here = here.serve(&[]);
    let guest = machine.boot_with(&here.path("vda")).expect("the guest boots");
    works_for_a_round(&guest);
    assert!(here.disk().cache.is_some_and(|cache| cache.occupancy > 0));

    let server_there = there.serve(&["--incoming"]);
    let guest = moves(&machine, (&here, guest), &there, &mut consoles);
    works_for_a_round(&guest);
    // What the guest did not ask for there was hot here.
    let give_up = Instant::now() + LIMIT;
    while there.disk().cache.expect("it has one").warmed == 0 {
        assert!(Instant::now() < give_up, "{}", server_there.output());
    }

    // However its server ends, it does not open the image while the VM is elsewhere.
    server_here.kill();
    server_here = here.serve(&[]);
    assert!(here.disk().away);
    let (code, said) = run(here.vm(&["--take"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("web.qcow2"), "{said}");
    assert!(here.disk().away, "{}", server_here.output());

    let mut guest = moves(&machine, (&there, guest), &here, &mut consoles);
    works_for_a_round(&guest);
    let mode = here.disk().cache.expect("it has one").mode;
    assert_eq!(mode, "wb", "as its file says");

    guest.process.kill();
    consoles.push(guest.console());
    counted(&consoles).expect("it has counted on");
    for mut server in [server_here, server_there] {
        server.signal(libc::SIGTERM);
        let status = server.wait(LIMIT).expect("it ends");
        assert!(status.success(), "{}", server.output());
    }
    tool("qemu-img", &["check", "-q", image.to_str().expect("UTF-8")]);
}

#[test]
fn a_vm_goes_on_with_its_disk_where_the_destination_cannot_open_it() {
    let storage = on_disk();
    let image = image(&storage);
    let (here, there) = (Host::new(&image, "wb"), Host::new(&image, "wb"));
    let machine = machine(Release::Debian12);
    let _server = here.serve(&[]);
    let source = machine.boot_with(&here.path("vda")).expect("the guest boots");

    // Nobody waits for it there.
    let destination = machine.incoming().expect("QEMU starts");
    let receiver = there.receiver(&destination);
    let (code, said) = run(here.mover(&source, &receiver, &[]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("nothing was changed: "), "{said}");
    assert!(said.contains("no `larder vm` serves it at the destination"), "{said}");
    drop((receiver, destination));

    // What is to be its cache is something else by then.
    let _waits = there.serve(&["--incoming"]);
    std::fs::write(there.cache(), vec![7; 16 << 20]).expect("writes");
    let destination = there.incoming(&machine);
    let receiver = there.receiver(&destination);
    let (code, said) = run(here.mover(&source, &receiver, &[]));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("its disks cannot be opened at the destination"), "{said}");
    assert!(said.contains("it is no cache, and not empty"), "{said}");
    works_for_a_round(&source);
    let disk = here.disk();
    assert!(!disk.away && there.disk().away);
    assert_eq!(disk.cache.expect("it has one").mode, "wb", "as before");
    assert!(!destination.console().contains("TICK"));
}

#[test]
fn a_move_ends_well_whose_mover_or_servers_are_killed_on_the_way() {
    let storage = on_disk();
    let image = image(&storage);
    let (here, there) = (Host::new(&image, "wb"), Host::new(&image, "wb"));
    // QEMU 7.2 never sees again that a server has ended, once one has while QEMU waited for its VM.
    let machine = machine(Release::Debian13);
    let mut server_here = here.serve(&[]);
    let mut source = machine.boot_with(&here.path("vda")).expect("the guest boots");
    let mut server_there = there.serve(&["--incoming"]);
    let destination = there.incoming(&machine);
    let mut receiver = there.receiver(&destination);

    let mut mover = Process::start(here.mover(&source, &receiver, &["--bandwidth", "64MiB"])).expect("starts");
    mover.wait_for("round 1", LIMIT).expect("it has begun");
    // Either server, while the guest's memory is on its way.
    server_there.kill();
    server_there = there.serve(&[]);
    assert!(there.disk().away);
    server_here.kill();
    server_here = here.serve(&[]);
    assert!(!here.disk().away);
    // The mover, and the server, once the disk is open nowhere, or at the destination already.
    server_here.wait_for("its image is closed", LIMIT).expect("it leaves");
    mover.kill();
    server_here.kill();
    let _server_here = here.serve(&[]);
    assert!(here.disk().away);

    let (code, said) = run(here.mover(&source, &receiver, &[]));
    assert_eq!(code, Some(0), "{said}");
    let (code, heard) = receiver.end().expect("it ends");
    assert_eq!(code, Some(0), "{heard}");
    works_for_a_round(&destination);
    assert!(here.disk().away && !there.disk().away);
    // It is there for good.
    server_there.kill();
    let _server_there = there.serve(&[]);
    works_for_a_round(&destination);
    assert!(source.process.wait(LIMIT).is_ok());
    counted(&[source.console(), destination.console()]).expect("it has counted on");
}
