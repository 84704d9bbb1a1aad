//! System calls are made in real processes, by threads that wait in each kind of call or compute, under signals,
//! stops and kills. The processes check themselves that nothing of theirs has changed.

// Other architectures are not supported yet.
#![cfg(target_arch = "x86_64")]

#[path = "inject/death.rs"]
mod death;
#[path = "inject/guest.rs"]
mod guest;
#[path = "inject/process.rs"]
mod process;
#[path = "inject/spin.rs"]
mod spin;
#[path = "inject/target.rs"]
mod target;

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use larder_memory::inject::{InjectError, StoppedThread, with_stopped_thread};
use larder_memory::userfaultfd::{FillResult, Userfaultfd};
use rustix::io::Errno;
use rustix::process::Pid;

use guest::Guest;
use process::{Chance, Killed, Target, Watchdog, is_same_file, pause};

/// Longer than any wait for a thread on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Makes typical calls: some that return a value, and descriptors that are given, taken back, and closed. Returns the
/// thread that made them, and the maximum time that it was stopped.
pub(crate) fn make_calls(pid: Pid) -> Result<(Pid, Duration), InjectError> {
    let (mut ours, theirs) = std::io::pipe().expect("a pipe");
    let (tid, stood_still) = with_stopped_thread(pid, LIMIT, |thread| {
        let number = thread.system_call(libc::SYS_getpid, [0; 6])?;
        assert_eq!(number, pid.as_raw_pid() as u64);
        assert_eq!(thread.pid(), pid);
        let numbers = thread.send_descriptors(&[theirs.as_fd(), ours.as_fd()])?;
        assert_eq!(numbers.len(), 2);
        assert_ne!(numbers[0], numbers[1]);
        let taken = thread.fetch_descriptor(numbers[0])?;
        assert!(is_same_file(taken.as_fd(), theirs.as_fd()));
        for number in numbers {
            thread.close(number)?;
        }
        fs::File::from(taken).write_all(b"x").expect("the pipe has room");
        Ok(thread.tid())
    })?;
    drop(theirs);
    let mut read = Vec::new();
    // Its end of file is reached: no writer is open in the process any more, nor in transit to it.
    ours.read_to_end(&mut read).expect("a pipe");
    assert_eq!(read, b"x");
    Ok((tid, stood_still))
}

/// Makes calls in a process in this state until it has finished `rounds` rounds, with or without a rain of signals.
fn exercise(state: &str, calls: u64, rounds: u64, rains: bool) {
    let role = if rains { format!("{state} interrupted") } else { state.to_owned() };
    let mut target = Target::start(&role);
    let (pid, page) = (target.pid(), target.page);
    let descriptors = target.descriptors();
    page.calls_end.store(1, Ordering::SeqCst);
    let sent = thread::scope(|scope| {
        let calls = scope.spawn(|| {
            let mut made = 0;
            while made < calls || page.rounds.load(Ordering::SeqCst) < rounds {
                let (tid, _) = make_calls(pid).unwrap();
                assert_eq!(tid, pid);
                made += 1;
            }
        });
        let mut sent = [0; 2];
        let mut turns = 0;
        while !calls.is_finished() {
            turns += 1;
            // In bursts, so that a wait can end in between.
            if rains && turns % 128 < 64 {
                for (count, signal) in sent.iter_mut().zip(target::rain()) {
                    target.send(signal, *count);
                    *count += 1;
                }
            }
            target.feed(&role);
            target.assert_lives();
            pause();
        }
        calls.join().unwrap();
        sent
    });
    for (handled, sent) in page.handled.iter().zip(sent) {
        while handled.load(Ordering::SeqCst) != sent {
            target.assert_lives();
            pause();
        }
    }
    target.wait_for_rounds(&role, 3);
    assert_eq!(target.descriptors(), descriptors, "descriptors were left in the target");
    assert_eq!(target.status("TracerPid"), "0");
    target.finish(&role);
    for (handled, sent) in page.handled.iter().zip(sent) {
        assert_eq!(handled.load(Ordering::SeqCst), sent, "signals handled");
    }
}

const STATES: [&str; 11] = [
    "spin",
    "nanosleep",
    "poll",
    "ppoll",
    "futex-timed",
    "futex",
    "read",
    "epoll_wait",
    "accept",
    "sigsuspend",
    "sigwaitinfo",
];

/// An interrupted call continues with its remaining time, or is restarted, in each kind of wait.
#[test]
fn thread_resumes_its_call_unchanged() {
    let _watchdog = Watchdog::new();
    for state in STATES {
        exercise(state, 60, 20, false);
    }
}

#[test]
fn memory_below_stack_pointer_is_unchanged() {
    let _watchdog = Watchdog::new();
    exercise("spin-deep", 200, 20, false);
}

/// No signal is lost, duplicated, or handled during an injected call.
#[test]
fn signals_are_handled_once_between_calls() {
    let _watchdog = Watchdog::new();
    for state in STATES {
        exercise(state, 80, 20, true);
    }
}

/// The target continues unharmed when the injecting process is killed at a random time.
#[test]
fn target_survives_injector_killed_anytime() {
    let _watchdog = Watchdog::new();
    let mut chance = Chance::new();
    for (state, kills) in STATES.iter().zip([100, 30, 30, 30, 30, 30, 30, 30, 30, 60, 30]) {
        let role = format!("{state} interrupted");
        let mut target = Target::start(&role);
        let pid = target.pid();
        for _ in 0..kills {
            let injector = Killed::start(&format!("inject {}", pid.as_raw_pid()));
            thread::scope(|scope| {
                let killer = scope.spawn(|| {
                    while injector.page.rounds.load(Ordering::SeqCst) == 0 {
                        thread::yield_now();
                    }
                    thread::sleep(Duration::from_micros(chance.below(1000)));
                    let ended = injector.kill();
                    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(libc::SIGKILL));
                });
                while !killer.is_finished() {
                    target.feed(&role);
                    pause();
                }
            });
            target.wait_for_rounds(&role, 1);
        }
        assert_eq!(target.status("TracerPid"), "0");
        make_calls(pid).unwrap();
        target.finish(&role);
    }
}

/// The injecting process is killed before each of its requests to the kernel in turn, just after it has sent the
/// target a signal.
#[test]
fn target_survives_injector_killed_at_step() {
    let _watchdog = Watchdog::new();
    for state in ["spin", "read", "nanosleep", "sigsuspend", "ppoll"] {
        let role = format!("{state} interrupted");
        let mut target = Target::start(&role);
        let pid = target.pid().as_raw_pid();
        let mut steps = 0;
        loop {
            // The signal is the one that `sigsuspend` waits for: it must end the wait, and is sent once.
            let wakes = state == "sigsuspend";
            let signal = if wakes { target::WAKE } else { target::rain()[1] };
            let value = if wakes { 0 } else { steps };
            let rounds = target.rounds();
            let injector = Killed::start(&format!("inject-and-die {pid} {} {signal} {value}", steps + 1));
            let page = injector.page;
            let ended = injector.wait();
            if page.rounds.load(Ordering::SeqCst) == 1 {
                assert!(ended.success());
                break;
            }
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(libc::SIGKILL));
            steps += 1;
            if wakes {
                target.fed += 1;
                while target.rounds() == rounds {
                    target.assert_lives();
                    pause();
                }
            } else {
                while target.page.handled[1].load(Ordering::SeqCst) != steps {
                    target.assert_lives();
                    pause();
                }
                target.wait_for_rounds(&role, 1);
            }
        }
        assert!(steps > 40, "{steps} steps");
        target.finish(&role);
    }
}

#[test]
fn killed_injector_loses_no_signals() {
    let _watchdog = Watchdog::new();
    let mut chance = Chance::new();
    for state in ["spin", "sigsuspend", "read"] {
        let role = format!("{state} interrupted");
        let mut target = Target::start(&role);
        let pid = target.pid();
        let mut sent = [0; 2];
        for _ in 0..40 {
            let injector = Killed::start(&format!("inject {}", pid.as_raw_pid()));
            for _ in 0..chance.below(8) {
                for (count, signal) in sent.iter_mut().zip(target::rain()) {
                    target.send(signal, *count);
                    *count += 1;
                }
                target.feed(&role);
                thread::sleep(Duration::from_micros(chance.below(300)));
            }
            injector.kill();
            target.wait_for_rounds(&role, 1);
        }
        for (handled, sent) in target.page.handled.iter().zip(sent) {
            while handled.load(Ordering::SeqCst) != sent {
                target.assert_lives();
                pause();
            }
        }
        target.finish(&role);
    }
}

/// Returns the state letter of a process.
fn letter(target: &Target) -> char {
    target.status("State").chars().next().unwrap()
}

fn signal(target: &Target, signal: i32) {
    // SAFETY: takes no pointers.
    assert_eq!(unsafe { libc::kill(target.pid().as_raw_pid(), signal) }, 0);
}

fn wait_for_letter(target: &mut Target, is_wanted: impl Fn(char) -> bool) {
    while !is_wanted(letter(target)) {
        pause();
    }
}

#[test]
fn stopped_process_stays_stopped_after_calls() {
    let _watchdog = Watchdog::new();
    for state in ["spin", "nanosleep", "read", "futex"] {
        let mut target = Target::start(state);
        for _ in 0..10 {
            signal(&target, libc::SIGSTOP);
            wait_for_letter(&mut target, |letter| letter == 'T');
            let rounds = target.rounds();
            for _ in 0..2 {
                make_calls(target.pid()).unwrap();
                // The process is still on its way to the stop for a moment.
                wait_for_letter(&mut target, |letter| letter == 'T');
            }
            assert_eq!(target.rounds(), rounds, "it has gone on");
            signal(&target, libc::SIGCONT);
            target.wait_for_rounds(state, 2);
        }
        target.finish(state);
    }
}

#[test]
fn process_stopped_during_calls_stays_stopped() {
    let _watchdog = Watchdog::new();
    for state in ["spin", "nanosleep", "read"] {
        let mut target = Target::start(state);
        let pid = target.pid();
        let done = AtomicBool::new(false);
        for _ in 0..5 {
            thread::scope(|scope| {
                let calls = scope.spawn(|| {
                    while !done.load(Ordering::SeqCst) {
                        make_calls(pid).unwrap();
                    }
                });
                for _ in 0..50 {
                    signal(&target, libc::SIGSTOP);
                    thread::yield_now();
                    signal(&target, libc::SIGCONT);
                    target.feed(state);
                    assert!(!calls.is_finished());
                }
                signal(&target, libc::SIGSTOP);
                done.store(true, Ordering::SeqCst);
            });
            done.store(false, Ordering::SeqCst);
            wait_for_letter(&mut target, |letter| letter == 'T');
            make_calls(pid).unwrap();
            wait_for_letter(&mut target, |letter| letter == 'T');
            signal(&target, libc::SIGCONT);
            target.wait_for_rounds(state, 2);
        }
        target.finish(state);
    }
}

#[test]
fn killed_injector_leaves_process_stopped() {
    let _watchdog = Watchdog::new();
    let mut chance = Chance::new();
    let role = "spin";
    let mut target = Target::start(role);
    for _ in 0..30 {
        signal(&target, libc::SIGSTOP);
        wait_for_letter(&mut target, |letter| letter == 'T');
        let injector = Killed::start(&format!("inject {}", target.pid().as_raw_pid()));
        while injector.page.rounds.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        thread::sleep(Duration::from_micros(chance.below(1000)));
        injector.kill();
        wait_for_letter(&mut target, |letter| letter == 'T');
        signal(&target, libc::SIGCONT);
        target.wait_for_rounds(role, 2);
    }
    target.finish(role);
}

#[test]
fn thread_in_fault_stops_and_refaults() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("fault");
    for round in 0..10 {
        while target.page.fault_at.load(Ordering::SeqCst) == 0 {
            pause();
        }
        let by = target.page.fault_by.load(Ordering::SeqCst) as i32;
        let (userfaultfd, _) = with_stopped_thread(target.pid(), LIMIT, |thread| thread.fetch_descriptor(by)).unwrap();
        let userfaultfd = Userfaultfd::new(userfaultfd);
        for _ in 0..5 {
            make_calls(target.pid()).unwrap();
        }
        assert_eq!(target.rounds(), round);
        answer(&mut target, &userfaultfd, round + 1);
    }
}

/// Fills the memory that the target waits for, until the target has finished its round.
fn answer(target: &mut Target, userfaultfd: &Userfaultfd, rounds: u64) {
    let at = target.page.fault_at.load(Ordering::SeqCst);
    while target.rounds() < rounds {
        let _: FillResult = userfaultfd.zero(at);
        target.assert_lives();
        pause();
    }
}

/// A fault of the kernel, during a system call, cannot be interrupted.
#[test]
fn thread_faulting_in_call_is_skipped() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("fault-in-call");
    let pid = target.pid();
    let wchan = format!("/proc/{}/wchan", pid.as_raw_pid());
    while fs::read_to_string(&wchan).unwrap() != "handle_userfault" {
        pause();
    }
    match with_stopped_thread(pid, Duration::from_millis(50), |_| Ok(())) {
        Err(InjectError::NotStopped { threads: 1, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(letter(&target), 'S', "it tries in vain without a pause");
    let by = target.page.fault_by.load(Ordering::SeqCst) as i32;
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    let userfaultfd = rustix::process::pidfd_getfd(process, by, rustix::process::PidfdGetfdFlags::empty()).unwrap();
    answer(&mut target, &Userfaultfd::new(userfaultfd), 1);
}

/// Calls [`with_stopped_thread`] until the thread does stop: on a busy machine it may not run for longer than
/// `limit`.
fn once_stopped(
    pid: Pid,
    limit: Duration,
    work: impl Fn(&mut StoppedThread) -> Result<(), InjectError> + Sync,
) -> Result<(), InjectError> {
    loop {
        match with_stopped_thread(pid, limit, &work) {
            Err(InjectError::NotStopped { .. }) => pause(),
            other => return other.map(|(done, _)| done),
        }
    }
}

/// A thread left in such a call would be stopped forever, so the call is interrupted however short the limit is and
/// however busy the machine.
#[test]
fn hanging_call_is_interrupted() {
    let _watchdog = Watchdog::new();
    for state in ["nanosleep", "spin", "futex-timed", "read"] {
        let role = format!("{state} interrupted");
        let mut target = Target::start(&role);
        for _ in 0..5 {
            // Two calls that the kernel restarts, or continues, after an interruption.
            for number in [libc::SYS_pause, libc::SYS_poll] {
                let failed = once_stopped(target.pid(), Duration::from_millis(1), |thread| {
                    let hangs = thread.system_call(number, [0, 0, 3_600_000, 0, 0, 0]);
                    // This thread accepts no more calls.
                    let refused = thread.system_call(libc::SYS_getpid, [0; 6]);
                    assert!(matches!(refused, Err(InjectError::CallTimedOut { .. })), "{refused:?}");
                    hangs.map(drop)
                });
                assert!(matches!(failed, Err(InjectError::CallTimedOut { .. })), "{failed:?}");
                target.wait_for_rounds(&role, 2);
            }
        }
        target.finish(&role);
    }
}

/// Code of this process that waits for the child may receive reports of its stops.
#[test]
fn waitpid_in_parent_may_see_stops() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("spin");
    let pid = target.pid();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let mut status = 0;
                // SAFETY: `status` is alive.
                let told = unsafe { libc::waitpid(pid.as_raw_pid(), &mut status, libc::WNOHANG) };
                assert!(told == 0 || libc::WIFSTOPPED(status));
            }
        });
        for _ in 0..200 {
            make_calls(pid).unwrap();
        }
        done.store(true, Ordering::SeqCst);
    });
    target.wait_for_rounds("spin", 2);
    target.finish("spin");
}

#[test]
fn failed_or_panicking_work_resumes_thread() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("read");
    let failed = with_stopped_thread(target.pid(), LIMIT, |thread| thread.close(54_321));
    let failed = failed.unwrap_err();
    assert_eq!(failed.errno(), Some(Errno::BADF));
    assert!(failed.to_string().contains("injected call close failed"), "{failed}");
    target.wait_for_rounds("read", 2);
    let pid = target.pid();
    let panicked = thread::spawn(move || {
        with_stopped_thread(pid, LIMIT, |thread| -> Result<(), InjectError> {
            thread.system_call(libc::SYS_getpid, [0; 6])?;
            panic!("as it is tested")
        })
    });
    assert!(panicked.join().is_err());
    target.wait_for_rounds("read", 2);
    target.finish("read");
}

#[test]
fn descriptors_are_given_all_or_none() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("read");
    let before = target.descriptors();
    let file = fs::File::open("/dev/null").unwrap();
    let most = vec![file.as_fd(); 253];
    let (numbers, _) = with_stopped_thread(target.pid(), LIMIT, |thread| thread.send_descriptors(&most)).unwrap();
    assert_eq!(numbers.len(), 253);
    for number in &numbers {
        let path = format!("/proc/{}/fd/{number}", target.child.id());
        assert_eq!(fs::read_link(path).unwrap().to_str(), Some("/dev/null"));
    }
    let close = |numbers: Vec<i32>| {
        with_stopped_thread(target.pid(), LIMIT, |thread| numbers.iter().try_for_each(|number| thread.close(*number)))
    };
    close(numbers).unwrap();
    assert_eq!(target.descriptors(), before);
    let too_many = vec![file.as_fd(); 254];
    let refused = with_stopped_thread(target.pid(), LIMIT, |thread| thread.send_descriptors(&too_many));
    assert!(matches!(refused, Err(InjectError::TooManyDescriptors { count: 254, max: 253 })));

    let limit = rustix::process::Rlimit { current: Some(110), maximum: Some(4096) };
    rustix::process::prlimit(Some(target.pid()), rustix::process::Resource::Nofile, limit).unwrap();
    let refused = with_stopped_thread(target.pid(), LIMIT, |thread| thread.send_descriptors(&most));
    assert!(matches!(refused, Err(InjectError::DescriptorsNotReceived { sent: 253, .. })), "{refused:?}");
    assert_eq!(target.descriptors(), before);
    target.wait_for_rounds("read", 2);
    target.finish("read");
}

#[test]
fn exec_during_calls_is_harmless() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("execute 0");
    let mut done = 0;
    while done < 30 || target.rounds() < 30 {
        match make_calls(target.pid()) {
            Ok(_) => done += 1,
            // The thread ends with execve, which also closes the descriptors that were given. No program starts
            // between two calls.
            Err(InjectError::Exited { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        target.assert_lives();
    }
    target.finish("execute 0");
}

#[test]
fn uninterruptible_thread_is_skipped() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("vfork");
    for _ in 0..5 {
        wait_for_letter(&mut target, |letter| letter == 'D');
        match with_stopped_thread(target.pid(), Duration::from_millis(30), |_| Ok(())) {
            // The other thread is a kernel thread.
            Err(InjectError::NotStopped { threads: 1, .. }) => {}
            other => panic!("{other:?}"),
        }
        target.wait_for_rounds("vfork", 1);
    }
    target.finish("vfork");
}

#[test]
fn calls_work_in_other_pid_namespace() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start_in_namespace("read");
    let pid = target.grandchild();
    for _ in 0..20 {
        let (number, _) = with_stopped_thread(pid, LIMIT, |thread| {
            let given = thread.send_descriptors(&[std::io::stdin().as_fd()])?;
            let taken = thread.fetch_descriptor(given[0])?;
            assert!(is_same_file(taken.as_fd(), std::io::stdin().as_fd()));
            thread.close(given[0])?;
            thread.system_call(libc::SYS_getpid, [0; 6])
        })
        .unwrap();
        assert_eq!(number, 1);
        target.wait_for_rounds("read", 1);
    }
    target.finish("read");
}

#[test]
fn calls_work_among_short_lived_threads() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("threads");
    for _ in 0..150 {
        make_calls(target.pid()).unwrap();
        target.assert_lives();
    }
    target.wait_for_rounds("threads", 10);
    target.finish("threads");
}

/// Makes calls in a QEMU, from before its guest boots until the guest has done its work. Returns the maximum time
/// that a thread was stopped at each call.
fn make_calls_in_a_guest(rounds: u32, calls: usize, arguments: &[&str]) -> Vec<Duration> {
    let guest = Guest::start(rounds, arguments);
    let mut pauses = Vec::new();
    loop {
        match make_calls(guest.pid()) {
            Ok((_, stood_still)) => pauses.push(stood_still),
            Err(_) if guest.has_ended() => break,
            Err(error) => panic!("{error}"),
        }
        if guest.rounds() == rounds {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert!(pauses.len() >= calls, "too short a guest: {} calls", pauses.len());
    guest.finish();
    pauses
}

#[test]
fn sandboxed_qemu_guest_runs_undisturbed() {
    let _watchdog = Watchdog::new();
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    make_calls_in_a_guest(10, 20, &["-sandbox", sandbox]);
}

/// Run by the next test, in a guest.
#[test]
#[ignore = "run in a guest"]
fn registers_are_kept() {
    for state in ["spin", "spin-deep", "nanosleep"] {
        exercise(state, 5, 3, false);
    }
}

/// A processor like QEMU's models qemu64 and kvm64 has only the registers of x87 and SSE.
#[test]
fn calls_work_on_processor_without_xsave() {
    let check = "if grep -qw xsave /proc/cpuinfo; then exit 1; fi";
    guest::run_in_guest("registers_are_kept", check, &["-cpu", "qemu64,-xsave"]);
}

fn refusal(pid: Pid) -> String {
    match once_stopped(pid, Duration::from_millis(200), |_| Ok(())) {
        Ok(_) => panic!("calls can be made in {pid:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn ended_process_is_reported_gone() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("read");
    let pid = target.pid();
    let gone = format!("process {} has ended", pid.as_raw_pid());
    let killed = with_stopped_thread(pid, LIMIT, |thread| {
        thread.system_call(libc::SYS_getpid, [0; 6])?;
        target.kill();
        loop {
            thread.system_call(libc::SYS_getpid, [0; 6])?;
        }
        #[expect(unreachable_code, reason = "says what the work returns")]
        Ok(())
    });
    assert_eq!(killed.unwrap_err().to_string(), gone);
    // The process is a zombie, which has not been waited for.
    assert_eq!(refusal(pid), gone);
    drop(target);
    assert_eq!(refusal(pid), gone);
}

#[test]
fn traced_process_is_refused() {
    let _watchdog = Watchdog::new();
    let mut target = Target::start("read");
    let pid = target.pid();
    let tracer = Killed::start(&format!("trace {}", pid.as_raw_pid()));
    let told = refusal(pid);
    assert!(told.contains("traces it: detach that first"), "{told}");
    tracer.kill();
    make_calls(pid).unwrap();
    target.finish("read");
}

#[test]
fn missing_right_to_trace_is_named() {
    let _watchdog = Watchdog::new();
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let mut target = Target::start("read");
    let told = Target::start_and_read(&format!("inject-as-nobody {}", target.pid().as_raw_pid()));
    assert!(told.contains("no permission to") && told.contains("CAP_SYS_PTRACE"), "{told}");
    target.finish("read");
}

#[test]
fn process_with_syscall_filter_is_refused() {
    let _watchdog = Watchdog::new();
    for role in ["filtered", "strict", "dispatched"] {
        let mut target = Target::start(role);
        let told = refusal(target.pid());
        assert!(told.contains("filters its system calls"), "{role}: {told}");
        target.assert_lives();
    }
}

#[test]
fn program_of_32_bits_is_refused() {
    let _watchdog = Watchdog::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("program");
    // An ELF file of one segment: mov $29, %eax (pause); int $0x80; jmp back.
    let code = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7];
    let header: [&[u8]; 3] = [b"\x7fELF\x01\x01\x01", &[0; 9], &[2, 0, 3, 0, 1, 0, 0, 0]];
    let words = [0x0804_8054_u32, 52, 0, 0, 52 | 32 << 16, 1, 0];
    let segment = [1, 0, 0x0804_8000, 0x0804_8000, 84 + code.len() as u32, 84 + code.len() as u32, 5, 0x1000];
    let mut bytes = header.concat();
    bytes.extend(words.iter().chain(&segment).flat_map(|word| word.to_le_bytes()));
    assert_eq!(bytes.len(), 84);
    bytes.extend(code);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut child = loop {
        match Command::new(&path).spawn() {
            Ok(child) => break child,
            // Another test is starting a process, which has the file open until it runs its own program.
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => pause(),
            Err(error) => panic!("a 32-bit program: {error}"),
        }
    };
    let told = refusal(Pid::from_child(&child));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(told.contains("is a 32-bit program"), "{told}");
}

#[test]
fn calls_work_in_static_program() {
    let _watchdog = Watchdog::new();
    let folder = tempfile::tempdir().unwrap();
    let (source, path) = (folder.path().join("program.c"), folder.path().join("program"));
    let code = "#include <unistd.h>\nint main(void) { for (;;) { char c; if (read(0, &c, 1) != 1 || write(1, &c, 1) != 1) return 1; } }\n";
    fs::write(&source, code).unwrap();
    let compiled = Command::new("cc").args(["-static", "-o"]).arg(&path).arg(&source).status();
    assert!(compiled.expect("a C compiler").success(), "cc -static");
    let mut child = Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut to, mut from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    for number in 0..50 {
        let mut byte = [0];
        to.write_all(&[number]).unwrap();
        from.read_exact(&mut byte).unwrap();
        assert_eq!(byte[0], number);
        make_calls(Pid::from_child(&child)).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
