//! What cannot be attached to, and what is said of it.

use std::path::Path;
use std::process::Command;

use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::process::{Process, install_program};

use crate::support::{LIMIT, larder, need_root, on_disk, on_tmpfs, run, tool};
use crate::{BUDGET, Fixture};

/// What is said of an attach that must be refused.
fn refusal(attach: &Attach) -> String {
    let (code, said) = run(attach.command());
    assert_eq!(code, Some(2), "{said}");
    assert!(!attach.control().exists(), "the control socket is left");
    said
}

/// The same for a process by its number.
fn refusal_of(pid: u32) -> String {
    let folder = on_tmpfs();
    refusal(&Attach::new(larder(), folder.path(), pid, &["--budget", BUDGET]))
}

#[test]
fn a_second_pager_is_refused_and_the_first_one_goes_on() {
    let mut fixture = Fixture::new();
    let mut pager = fixture.start();
    let wanted = format!(
        "larder: process {} is managed by another larder already: detach that, or stop it",
        fixture.pid()
    );
    let other = on_tmpfs();
    let attach = Attach::new(larder(), other.path(), fixture.pid(), &["--budget", BUDGET]);
    assert!(refusal(&attach).contains(&wanted));
    // Nor is the first one's socket taken away.
    let (code, said) = run(fixture.attach(&["--budget", BUDGET]).command());
    assert!(code == Some(2) && said.contains(&wanted), "{said}");
    pager.state().expect("answers");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn budgets_that_are_too_small_are_refused_and_change_nothing() {
    let fixture = Fixture::new();
    let before = fixture.alone();
    for (words, wanted) in [
        (
            &["--budget", "16MiB"][..],
            "larder: a budget of 16 MiB is too small: 17 MiB is the least for memory of 64 MiB",
        ),
        (
            &["--budget", "32MiB", "--compressed", "31MiB"],
            "larder: 31 MiB of compressed pages in a budget of 32 MiB leave nothing for the guest",
        ),
    ] {
        let said = refusal(&fixture.attach(words));
        assert!(said.contains(wanted), "{said}");
    }
    assert_eq!(fixture.alone(), before);
    fixture.verify();
}

#[test]
fn a_control_socket_that_cannot_be_leaves_the_process_as_it_was() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    std::fs::write(fixture.path("control"), "a file").expect("writes");
    let (code, said) = run(fixture.attach(&["--budget", BUDGET]).command());
    assert!(code == Some(2) && said.contains("control"), "{said}");
    assert_eq!(fixture.alone(), before);
    fixture.works();
    fixture.verify();
}

#[test]
fn processes_that_are_no_vm_are_refused() {
    let mut sleep = Process::start(Command::new("cat")).expect("starts");
    let said = refusal_of(sleep.id());
    assert!(
        said.contains("(cat): its memory cannot be managed:") && said.contains("is this the process that runs the VM?"),
        "{said}"
    );
    sleep.kill();
    // Larder itself.
    let folder = on_tmpfs();
    let attach = Attach::of(larder(), folder.path(), &["--budget", BUDGET]);
    let attach = attach.by(&["sh", "-c", "exec \"$@\" --pid $$", "sh"]);
    let said = refusal(&attach);
    assert!(said.contains("(larder): its memory cannot be managed:"), "{said}");
    let said = refusal_of(kernel_thread());
    assert!(said.contains("is a thread of the kernel"), "{said}");
}

/// The process number of a thread of the kernel.
fn kernel_thread() -> u32 {
    let comm = std::fs::read_to_string("/proc/2/comm").unwrap_or_default();
    assert_eq!(
        comm, "kthreadd\n",
        "this test must not run in a container, where no thread of the kernel is seen"
    );
    2
}

#[test]
fn a_guest_with_private_memory_is_told_how_to_share_it() {
    let mut qemu = larder_bench::campaign::process::mortal("qemu-system-x86_64");
    qemu.args("-accel tcg -m 128 -nodefaults -display none -S -qmp stdio".split(' '));
    let mut qemu = Process::start(qemu).expect("starts");
    qemu.wait_for("QMP", LIMIT).expect("runs");
    let said = refusal_of(qemu.id());
    assert!(
        said.contains("its memory is private") && said.contains("memory-backend-memfd,id=m"),
        "{said}"
    );
    qemu.kill();
}

#[test]
fn whoever_has_no_right_to_a_process_is_refused() {
    need_root("to have processes of two users");
    let fixture = Fixture::new();
    // Where anyone may run it.
    let folder = on_disk();
    let program = Path::new("/dev/shm").join(format!("larder-{}", std::process::id()));
    install_program(larder(), &program);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.arg(&program).args([
        "memory",
        "attach",
        "--budget",
        BUDGET,
        "--pid",
        &fixture.pid().to_string(),
    ]);
    let (code, said) = run(command);
    std::fs::remove_file(&program).expect("was there");
    drop(folder);
    assert!(
        code == Some(2) && said.contains(": no right to ") && said.contains("be root"),
        "{said}"
    );
    fixture.verify();
}

/// A program for 32-bit x86 that has 32 MiB of a memfd mapped, and waits.
const NARROW: &str = r#"
.globl _start
_start:
  mov $356, %eax      # memfd_create(name, 0)
  mov $name, %ebx
  xor %ecx, %ecx
  int $0x80
  mov %eax, %edi
  mov %eax, %ebx
  mov $93, %eax       # ftruncate(memfd, 32 MiB)
  mov $0x2000000, %ecx
  int $0x80
  mov $192, %eax      # mmap2(0, 32 MiB, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0)
  xor %ebx, %ebx
  mov $3, %edx
  mov $1, %esi
  xor %ebp, %ebp
  int $0x80
  mov $4, %eax        # write(1, "ready\n", 6)
  mov $1, %ebx
  mov $said, %ecx
  mov $6, %edx
  int $0x80
1:
  mov $29, %eax       # pause()
  int $0x80
  jmp 1b
name: .asciz "narrow"
said: .ascii "ready\n"
"#;

#[cfg(target_arch = "x86_64")]
#[test]
fn a_process_of_32_bits_is_refused() {
    let folder = on_disk();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("narrow.s"), NARROW).expect("writes");
    tool("as", &["--32", "-o", &path("narrow.o"), &path("narrow.s")]);
    tool("ld", &["-m", "elf_i386", "-o", &path("narrow"), &path("narrow.o")]);
    let mut narrow = Process::start(Command::new(path("narrow"))).expect("starts");
    narrow
        .wait_for("ready", LIMIT)
        .expect("runs; it takes a kernel with CONFIG_IA32_EMULATION");
    let before = crate::Alone::of(narrow.id());
    let said = refusal_of(narrow.id());
    assert!(said.contains("32-bit"), "{said}");
    assert_eq!(crate::Alone::of(narrow.id()), before);
    narrow.kill();
}
