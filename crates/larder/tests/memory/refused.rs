//! Processes that cannot be attached to, and the errors.

use std::path::Path;
use std::process::Command;

use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::process::{Process, install_program};

use crate::support::{
    TEST_TIMEOUT, larder_path, require_root, run_command, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs,
};
use crate::{BUDGET, Fixture};

/// Returns the error of an attach that must be refused.
fn refusal(attach: &Attach) -> String {
    let (code, said) = run_command(attach.command());
    assert_eq!(code, Some(2), "{said}");
    assert!(!attach.control().exists(), "the control socket is left");
    said
}

/// Returns the error of an attach to the process with this PID, which must be refused.
fn refusal_of(pid: u32) -> String {
    let folder = temp_dir_on_tmpfs();
    refusal(&Attach::new(larder_path(), folder.path(), pid, &["--budget", BUDGET]))
}

#[test]
fn second_pager_is_refused() {
    let mut fixture = Fixture::new();
    let mut pager = fixture.start();
    let wanted =
        format!("larder: process {} is already managed by another larder: detach or stop that one", fixture.pid());
    let other = temp_dir_on_tmpfs();
    let attach = Attach::new(larder_path(), other.path(), fixture.pid(), &["--budget", BUDGET]);
    assert!(refusal(&attach).contains(&wanted));
    // The first pager's socket is not taken over either.
    let (code, said) = run_command(fixture.attach(&["--budget", BUDGET]).command());
    assert!(code == Some(2) && said.contains(&wanted), "{said}");
    pager.state().expect("answers");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.verify();
}

#[test]
fn too_small_budgets_are_refused() {
    let fixture = Fixture::new();
    let before = fixture.alone();
    for (words, wanted) in [
        (&["--budget", "16MiB"][..], "larder: a budget of 16 MiB is too small: memory of 64 MiB needs at least 17 MiB"),
        (
            &["--budget", "32MiB", "--compressed", "31MiB"],
            "larder: 31 MiB of compressed pages leave too little of a budget of 32 MiB for the guest",
        ),
    ] {
        let said = refusal(&fixture.attach(words));
        assert!(said.contains(wanted), "{said}");
    }
    assert_eq!(fixture.alone(), before);
    fixture.verify();
}

#[test]
fn impossible_control_socket_changes_nothing() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    std::fs::write(fixture.path("control"), "a file").expect("writes");
    let (code, said) = run_command(fixture.attach(&["--budget", BUDGET]).command());
    assert!(code == Some(2) && said.contains("control"), "{said}");
    assert_eq!(fixture.alone(), before);
    fixture.works();
    fixture.verify();
}

#[test]
fn unsuitable_processes_are_refused() {
    let mut sleep = Process::start(Command::new("cat")).expect("starts");
    let said = refusal_of(sleep.id());
    assert!(
        said.contains("(cat): its memory cannot be managed:") && said.contains("is this the process that runs the VM?"),
        "{said}"
    );
    sleep.kill();
    // Larder itself is refused as well.
    let folder = temp_dir_on_tmpfs();
    let attach = Attach::of(larder_path(), folder.path(), &["--budget", BUDGET]);
    let attach = attach.by(&["sh", "-c", "exec \"$@\" --pid $$", "sh"]);
    let said = refusal(&attach);
    assert!(said.contains("(larder): its memory cannot be managed:"), "{said}");
    let said = refusal_of(kernel_thread());
    assert!(said.contains("is a kernel thread"), "{said}");
}

/// Returns the PID of a kernel thread.
fn kernel_thread() -> u32 {
    let comm = std::fs::read_to_string("/proc/2/comm").unwrap_or_default();
    assert_eq!(comm, "kthreadd\n", "this test must not run in a container, where no thread of the kernel is seen");
    2
}

#[test]
fn private_memory_error_advises_sharing() {
    let mut qemu = larder_bench::campaign::process::killed_with_parent("qemu-system-x86_64");
    qemu.args("-accel tcg -m 128 -nodefaults -display none -S -qmp stdio".split(' '));
    let mut qemu = Process::start(qemu).expect("starts");
    qemu.wait_for("QMP", TEST_TIMEOUT).expect("runs");
    let said = refusal_of(qemu.id());
    assert!(said.contains("its memory is private") && said.contains("memory-backend-memfd,id=m"), "{said}");
    qemu.kill();
}

#[test]
fn attach_without_rights_is_refused() {
    require_root("to have processes of two users");
    let fixture = Fixture::new();
    // A copy of the program at a path where any user may run it.
    let folder = temp_dir_on_disk();
    let program = Path::new("/dev/shm").join(format!("larder-{}", std::process::id()));
    install_program(larder_path(), &program);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.arg(&program).args(["memory", "attach", "--budget", BUDGET, "--pid", &fixture.pid().to_string()]);
    let (code, said) = run_command(command);
    std::fs::remove_file(&program).expect("was there");
    drop(folder);
    assert!(code == Some(2) && said.contains(": no permission to ") && said.contains("run as root"), "{said}");
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
fn process_of_32_bits_is_refused() {
    let folder = temp_dir_on_disk();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("narrow.s"), NARROW).expect("writes");
    run_tool("as", &["--32", "-o", &path("narrow.o"), &path("narrow.s")]);
    run_tool("ld", &["-m", "elf_i386", "-o", &path("narrow"), &path("narrow.o")]);
    let mut narrow = Process::start(Command::new(path("narrow"))).expect("starts");
    narrow.wait_for("ready", TEST_TIMEOUT).expect("runs; it takes a kernel with CONFIG_IA32_EMULATION");
    let before = crate::Alone::of(narrow.id());
    let said = refusal_of(narrow.id());
    assert!(said.contains("32-bit"), "{said}");
    assert_eq!(crate::Alone::of(narrow.id()), before);
    narrow.kill();
}
