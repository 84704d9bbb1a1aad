//! The pager's userfaultfd in the managed process: in a ring, or, where there can be no ring, as a descriptor.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::{BUDGET, Fixture};

/// Variable with the command that the program below executes.
const COMMAND: &str = "LARDER_TEST_WITHOUT_RINGS";

/// `IORING_REGISTER_FILES` of linux/io_uring.h: only the ring with the userfaultfd has registered files.
const REGISTER_FILES: u32 = 2;

/// Counts the process's descriptors of a userfaultfd, of a ring, and of a ring's memory.
fn held(fixture: &Fixture) -> [usize; 3] {
    let descriptors = fixture.alone().descriptors;
    ["anon_inode:[userfaultfd]", "anon_inode:[io_uring]", "/memfd:larder-ring (deleted)"]
        .map(|wanted| descriptors.values().filter(|link| link.as_os_str() == wanted).count())
}

const IN_RING: [usize; 3] = [0, 1, 1];
const OPEN: [usize; 3] = [1, 0, 0];

/// Code that takes QEMU over finds no userfaultfd, yet the userfaultfd lives as long as QEMU: a page that is missing
/// between two pagers is waited for, and does not become zeros, which the program would notice.
#[test]
fn managed_process_has_no_userfaultfd() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    let mut pager = fixture.start();
    let said = pager.process.output();
    assert!(!said.contains("keeps a userfaultfd"), "Linux 6.8 and io_uring are needed: {said}");
    assert_eq!(held(&fixture), IN_RING);
    for _ in 0..5 {
        pager.wait_for_budget().expect("within the budget");
        pager.process.kill();
        assert_eq!(held(&fixture), IN_RING);
        // Long enough for the program to touch missing pages.
        std::thread::sleep(std::time::Duration::from_millis(20));
        fixture.verifier.report().expect("nothing is wrong");
        pager = fixture.start();
        assert!(pager.process.output().contains("in place of another pager"));
        assert_eq!(held(&fixture), IN_RING);
        fixture.works();
    }
    pager.wait_for_budget().expect("within the budget");
    pager.detach().expect("lets go");
    assert_eq!(fixture.alone(), before);
    fixture.works();
    fixture.verify();
}

/// Where rings are unavailable, as on Linux before 6.8 or with a seccomp filter, the descriptor stays in the process,
/// which is logged. Pagers with ring support continue with it, as after an upgrade.
#[test]
fn userfaultfd_stays_where_rings_are_forbidden() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    let program = std::env::current_exe().expect("this program").display().to_string();
    let become_larder =
        format!("{COMMAND}=\"$*\" exec {program} --ignored --exact userfaultfd::without_rings --nocapture");
    let attach = fixture.attach(&["--budget", BUDGET]);
    let forbidden = attach.by(&["sh", "-c", &become_larder, "sh"]);
    let mut pager = forbidden.start().expect("it attaches");
    let said = pager.process.output();
    assert!(said.contains("keeps a userfaultfd that it could use itself"), "{said}");
    assert_eq!(held(&fixture), OPEN);
    for _ in 0..2 {
        pager.wait_for_budget().expect("within the budget");
        pager.process.kill();
        pager = fixture.start();
        fixture.works();
        assert_eq!(held(&fixture), OPEN);
    }
    pager.detach().expect("lets go");
    assert_eq!(fixture.alone(), before);
    fixture.verify();
}

/// Program that executes another one with a seccomp filter, so that its rings cannot register files. It is no test:
/// other tests start it.
#[test]
#[ignore = "started by other tests"]
fn without_rings() {
    let Ok(command) = std::env::var(COMMAND) else { return };
    let filter =
        |code: u32, jump_true, jump_false, k| libc::sock_filter { code: code as u16, jt: jump_true, jf: jump_false, k };
    let load = |offset| filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
    let skip_unless = |value, count| filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, count, value);
    let answer = |action| filter(libc::BPF_RET | libc::BPF_K, 0, 0, action);
    let mut filters = [
        // Loads the number of the system call, then its second argument.
        load(0),
        skip_unless(libc::SYS_io_uring_register as u32, 3),
        load(24),
        skip_unless(REGISTER_FILES, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filters.len() as u16, filter: filters.as_mut_ptr() };
    // SAFETY: the filter applies to this thread, which executes the other program, and outlives the call.
    let done = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::c_ulong::from(libc::SECCOMP_MODE_FILTER), &raw const program)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    let mut words = command.split(' ');
    let error = Command::new(words.next().expect("a program")).args(words).exec();
    panic!("{command}: {error}");
}
