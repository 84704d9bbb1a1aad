//! Programs that the tests start: this test program itself, which plays a role before any test runs, in a process
//! with one thread.

use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use larder_memory::inject::with_stopped_thread;
use rustix::process::Pid;

use super::{death, spin};

/// Environment variable with the name of the role and its arguments.
pub(crate) const ROLE: &str = "LARDER_TEST_ROLE";

/// Descriptor numbers of the page shared with the test, and of the file that a role reads.
pub(crate) const PAGE: i32 = 100;
pub(crate) const INPUT: i32 = 101;

/// Memory that a role shares with its test.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Page {
    /// Set when the role is ready.
    pub(crate) ready: AtomicU32,
    /// Set to make the role end after its round.
    pub(crate) stop: AtomicU32,
    /// Number of finished rounds.
    pub(crate) rounds: AtomicU64,
    /// Word whose change the role waits for.
    pub(crate) word: AtomicU32,
    /// Numbers of handled signals, of the two kinds that are sent at any time.
    pub(crate) handled: [AtomicU64; 2],
    /// Number of handled signals of [`WAKE`].
    pub(crate) woken: AtomicU64,
    /// Set if the injecting process is never killed, so that no signal may arrive during an injected call.
    pub(crate) calls_end: AtomicU32,
    /// Address of memory that the test must fill.
    pub(crate) fault_at: AtomicU64,
    /// Descriptor number of the userfaultfd of that memory.
    pub(crate) fault_by: AtomicU32,
}

/// Returns the signals that are sent at any time: one whose handler allows calls to be restarted, and one whose
/// handler does not and has a stack of its own. Each signal carries the number of those sent before.
pub(crate) fn rain() -> [i32; 2] {
    [libc::SIGRTMIN() + 2, libc::SIGRTMIN() + 3]
}

/// Blocked, except in `sigsuspend`.
pub(crate) const WAKE: i32 = libc::SIGUSR1;

/// Returns the signal that is blocked, and received by `sigwaitinfo`. It carries the number of those sent before.
pub(crate) fn queued() -> i32 {
    libc::SIGRTMIN() + 4
}

/// Timeout of calls that have one, in which nothing arrives.
const WAIT: Duration = Duration::from_millis(5);

// Runs before `main`, so that there is only one thread, with which the calls are made.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    if let Ok(role) = std::env::var(ROLE) {
        play(&role);
        // SAFETY: there is nothing to clean up.
        unsafe { libc::_exit(0) };
    }
}

/// Maps the page of descriptor `number`.
pub(crate) fn page(number: i32) -> &'static Page {
    // SAFETY: new memory where the kernel chooses, for as long as the process lives; a page of atomics.
    unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let at = libc::mmap(ptr::null_mut(), 4096, rights, libc::MAP_SHARED, number, 0);
        assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        &*at.cast::<Page>()
    }
}

fn play(role: &str) {
    // SAFETY: takes no pointers. The role ends with its test.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // The remaining time of a sleep would include the slack of the timer. SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    let words: Vec<&str> = role.split(' ').collect();
    let page = page(PAGE);
    match words[..] {
        ["inject", pid] => return inject(page, pid),
        ["inject-and-die", pid, at, signal, value] => {
            let pid: i32 = pid.parse().unwrap();
            page.ready.store(1, Ordering::SeqCst);
            death::at(at.parse().unwrap(), pid, signal.parse().unwrap(), value.parse().unwrap());
            super::make_calls(Pid::from_raw(pid).unwrap()).unwrap();
            page.rounds.store(1, Ordering::SeqCst);
            return;
        }
        ["inject-as-nobody", pid] => return inject_as_nobody(page, pid),
        ["trace", pid] => return trace(page, pid),
        ["execute", round] => return execute(page, round),
        _ => {}
    }
    let may_be_interrupted = words.get(1) == Some(&"interrupted");
    let mut state = State { page, round: 0, may_be_interrupted };
    state.prepare(words[0]);
    let mask = signal_mask();
    page.ready.store(1, Ordering::SeqCst);
    while page.stop.load(Ordering::SeqCst) == 0 {
        if state.play(words[0]) {
            state.round += 1;
            page.rounds.fetch_add(1, Ordering::SeqCst);
        }
        assert_eq!(signal_mask(), mask, "the signal mask has changed");
    }
}

struct State {
    page: &'static Page,
    round: u64,
    /// Calls may be interrupted, by signals or because the injecting process is killed.
    may_be_interrupted: bool,
}

impl State {
    fn prepare(&mut self, name: &str) {
        let handlers: [(i32, extern "C" fn(i32, *const libc::siginfo_t, *const libc::c_void), i32); 3] =
            [(rain()[0], handle::<0>, libc::SA_RESTART), (rain()[1], handle::<1>, libc::SA_ONSTACK), (WAKE, wake, 0)];
        let stack = libc::stack_t {
            ss_sp: Box::leak(vec![0_u8; 128 << 10].into_boxed_slice()).as_mut_ptr().cast(),
            ss_flags: 0,
            ss_size: 128 << 10,
        };
        HANDLERS_PAGE.store(ptr::from_ref(self.page) as u64, Ordering::SeqCst);
        // SAFETY: the pointers are valid and of the right kind; the stack is never freed.
        unsafe {
            assert_eq!(libc::sigaltstack(&stack, ptr::null_mut()), 0);
            for (signal, handler, flags) in handlers {
                let mut action: libc::sigaction = zeroed();
                action.sa_sigaction = handler as usize;
                action.sa_flags = flags | libc::SA_SIGINFO;
                action.sa_mask = set_of(&[rain()[0], rain()[1], WAKE]);
                assert_eq!(libc::sigaction(signal, &action, ptr::null_mut()), 0);
            }
            let blocked = set_of(&[WAKE, queued()]);
            assert_eq!(libc::sigprocmask(libc::SIG_BLOCK, &blocked, ptr::null_mut()), 0);
        }
        match name {
            "epoll_wait" => epoll(),
            "fault" | "fault-in-call" => self.prepare_fault(),
            "strict" => {
                // SAFETY: takes no pointers.
                let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, 1) };
                assert_eq!(done, 0, "{}", io::Error::last_os_error());
                self.page.ready.store(1, Ordering::SeqCst);
                loop {
                    std::hint::spin_loop();
                }
            }
            "filtered" => filter(),
            "vfork" => worker(),
            "dispatched" => {
                static SELECTOR: u8 = 0;
                // SAFETY: the selector is never freed, and allows all calls.
                let done = unsafe { libc::prctl(59, 1, 0_usize, 0_usize, &raw const SELECTOR) };
                assert_eq!(done, 0, "{}", io::Error::last_os_error());
            }
            _ => {}
        }
    }

    /// Plays one round. Returns true if it was finished.
    fn play(&mut self, name: &str) -> bool {
        let began = Instant::now();
        let waited = || assert!(began.elapsed() >= WAIT, "a wait of {WAIT:?} ended too soon");
        match name {
            "spin" => spin::hold(self.round, spin::RED_ZONE_BYTES),
            "spin-deep" => spin::hold(self.round, spin::DEEP_BYTES),
            "nanosleep" => {
                let (time, mut left) = (timespec(WAIT), timespec(Duration::MAX / 2));
                // SAFETY: both are alive.
                let done = unsafe { libc::nanosleep(&time, &mut left) };
                if !self.is_done(done.into()) {
                    let left = Duration::new(left.tv_sec as u64, left.tv_nsec as u32);
                    assert!(left <= WAIT && began.elapsed() + left >= WAIT, "{left:?} left");
                    return false;
                }
                waited();
            }
            "poll" => {
                // SAFETY: there is nothing to point to.
                let done = unsafe { libc::poll(ptr::null_mut(), 0, WAIT.as_millis() as i32) };
                if !self.is_done(done.into()) {
                    return false;
                }
                waited();
            }
            "ppoll" => {
                // SAFETY: the pointers are valid.
                let done = unsafe {
                    let unblocked = set_of(&[]);
                    libc::ppoll(ptr::null_mut(), 0, &timespec(WAIT), &unblocked)
                };
                if !self.is_done(done.into()) {
                    return false;
                }
                waited();
            }
            "futex-timed" => {
                if self.is_done(futex_wait(&AtomicU32::new(0), 0, Some(WAIT))) {
                    return false;
                }
                if errno() == libc::EINTR {
                    return false;
                }
                assert_eq!(errno(), libc::ETIMEDOUT);
                waited();
            }
            "futex" => {
                let seen = self.round as u32;
                if self.page.word.load(Ordering::SeqCst) == seen {
                    if futex_wait(&self.page.word, seen, None) == -1 {
                        let is_ok = errno() == libc::EAGAIN || (self.may_be_interrupted && errno() == libc::EINTR);
                        assert!(is_ok, "futex: {}", io::Error::last_os_error());
                    }
                    return false;
                }
                assert_eq!(self.page.word.load(Ordering::SeqCst), seen + 1);
            }
            "read" => return self.read(INPUT),
            "epoll_wait" => {
                let mut event = MaybeUninit::<libc::epoll_event>::uninit();
                // SAFETY: there is room for one.
                let done = unsafe { libc::epoll_wait(EPOLL, event.as_mut_ptr(), 1, -1) };
                if done == -1 {
                    assert_eq!(errno(), libc::EINTR, "epoll_wait");
                    return false;
                }
                assert_eq!(done, 1);
                while !self.read(INPUT) {}
            }
            "accept" => {
                // SAFETY: nothing is pointed to.
                let done = unsafe { libc::accept4(INPUT, ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC) };
                if !self.is_done(done.into()) {
                    return false;
                }
                while !self.read(done) {}
                // SAFETY: just accepted.
                assert_eq!(unsafe { libc::close(done) }, 0);
            }
            "sigsuspend" => {
                let woken = self.page.woken.load(Ordering::SeqCst);
                assert!(woken == self.round || woken == self.round + 1, "{woken} signals of one");
                if woken == self.round {
                    // SAFETY: the set is alive.
                    let done = unsafe { libc::sigsuspend(&set_of(&[queued()])) };
                    assert!(done == -1 && errno() == libc::EINTR, "sigsuspend");
                    return false;
                }
            }
            "sigwaitinfo" => {
                let mut told = MaybeUninit::<libc::siginfo_t>::uninit();
                // SAFETY: both are alive, and the second is filled if a signal is returned.
                let value = unsafe {
                    let done = libc::sigwaitinfo(&set_of(&[queued()]), told.as_mut_ptr());
                    if done == -1 {
                        assert_eq!(errno(), libc::EINTR, "sigwaitinfo");
                        return false;
                    }
                    assert_eq!(done, queued());
                    told.assume_init_ref().si_value().sival_ptr as u64
                };
                assert_eq!(value, self.round, "a signal is lost or doubled");
            }
            "fault" => {
                // SAFETY: it is mapped; the test resolves the fault.
                let value = unsafe { (self.page.fault_at.load(Ordering::SeqCst) as *const u64).read_volatile() };
                assert_eq!(value, 0);
                self.forget_fault();
            }
            "fault-in-call" => {
                let at = self.page.fault_at.load(Ordering::SeqCst);
                // SAFETY: it is mapped; the test resolves the fault.
                let done = unsafe { libc::syscall(libc::SYS_getrandom, at, 8, 0) };
                assert_eq!(done, 8);
                self.forget_fault();
            }
            "filtered" | "dispatched" => thread::sleep(WAIT),
            "vfork" => vfork(),
            "threads" => {
                let other = thread::spawn(|| thread::sleep(Duration::from_micros(50)));
                thread::yield_now();
                other.join().unwrap();
            }
            _ => panic!("{name}?"),
        }
        true
    }

    /// Reads a byte, and checks that it is the number of the round.
    fn read(&self, from: i32) -> bool {
        let mut byte = 0_u8;
        // SAFETY: there is room for one byte.
        let done = unsafe { libc::read(from, (&raw mut byte).cast(), 1) };
        if !self.is_done(done as i64) {
            return false;
        }
        assert_eq!((done, byte), (1, self.round as u8), "what is read is not what was written");
        true
    }

    /// Returns true if a call was successful, and checks that it was interrupted otherwise.
    fn is_done(&self, returned: i64) -> bool {
        let is_timeout = errno() == libc::ETIMEDOUT;
        if returned == -1 && !is_timeout {
            assert!(self.may_be_interrupted && errno() == libc::EINTR, "{}", io::Error::last_os_error());
        }
        returned >= 0
    }

    fn prepare_fault(&self) {
        // SAFETY: new memory where the kernel chooses; the requests are of two and four numbers, which live.
        unsafe {
            let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let at = libc::mmap(ptr::null_mut(), 4096, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            let number = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            assert!(number >= 0, "userfaultfd: {}", io::Error::last_os_error());
            // UFFDIO_API, UFFDIO_REGISTER (MISSING) of linux/userfaultfd.h.
            let mut api = [0xaa_u64, 0, 0];
            assert_eq!(libc::ioctl(number, 0xc018_aa3f, &mut api), 0);
            let mut register = [at as u64, 4096, 1, 0];
            assert_eq!(libc::ioctl(number, 0xc020_aa00, &mut register), 0);
            self.page.fault_at.store(at as u64, Ordering::SeqCst);
            self.page.fault_by.store(number as u32, Ordering::SeqCst);
        }
    }

    fn forget_fault(&self) {
        let at = self.page.fault_at.load(Ordering::SeqCst) as *mut libc::c_void;
        // SAFETY: mapped by `prepare_fault`, for this only.
        assert_eq!(unsafe { libc::madvise(at, 4096, libc::MADV_DONTNEED) }, 0);
    }
}

/// Address of the role's page, for the signal handlers.
static HANDLERS_PAGE: AtomicU64 = AtomicU64::new(0);

fn handlers_page() -> &'static Page {
    // SAFETY: set before there are handlers, to a page that stays mapped.
    unsafe { &*(HANDLERS_PAGE.load(Ordering::SeqCst) as *const Page) }
}

extern "C" fn handle<const KIND: usize>(_: i32, told: *const libc::siginfo_t, context: *const libc::c_void) {
    // SAFETY: the kernel passes a valid pointer; the signal was sent with a value.
    let value = unsafe { (*told).si_value().sival_ptr as u64 };
    // SAFETY: the kernel passes a valid context, with the handler's return address before it. No handler interrupts
    // another one, so the interrupted code has a word on its stack.
    let (returns_to, interrupted) = unsafe {
        let stack = (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RSP as usize];
        (*context.cast::<u64>().sub(1), *(stack as *const u64))
    };
    let is_amid = returns_to == interrupted && handlers_page().calls_end.load(Ordering::SeqCst) != 0;
    assert!(!is_amid, "a signal is handled amid a call made from outside");
    let before = handlers_page().handled[KIND].fetch_add(1, Ordering::SeqCst);
    assert_eq!(value, before, "a signal is lost or doubled");
    // The signal return must undo this change of the registers.
    spin_vectors();
}

extern "C" fn wake(_: i32, _: *const libc::siginfo_t, _: *const libc::c_void) {
    handlers_page().woken.fetch_add(1, Ordering::SeqCst);
}

fn spin_vectors() {
    // SAFETY: all registers that are changed are declared.
    unsafe {
        std::arch::asm!(
            "vpcmpeqd xmm0, xmm0, xmm0", "vpcmpeqd xmm7, xmm7, xmm7", "vpcmpeqd xmm15, xmm15, xmm15",
            out("xmm0") _, out("xmm7") _, out("xmm15") _,
        );
    }
}

const EPOLL: i32 = 102;

fn epoll() {
    // SAFETY: the event is alive.
    unsafe {
        let number = libc::epoll_create1(0);
        assert_eq!(libc::dup2(number, EPOLL), EPOLL);
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        assert_eq!(libc::epoll_ctl(EPOLL, libc::EPOLL_CTL_ADD, INPUT, &mut event), 0);
    }
}

/// Installs a filter that allows all system calls.
fn filter() {
    let mut allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x7fff_0000 };
    let program = libc::sock_fprog { len: 1, filter: &mut allow };
    // SAFETY: a program of one instruction, which lives for the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, 2, &program), 0);
    }
}

/// Adds a kernel thread to the process: that of a polled ring (IORING_SETUP_SQPOLL).
fn worker() {
    const IDLE_MS: u32 = 1;
    // `struct io_uring_params`: two numbers of entries, flags, a processor, idle time.
    let mut parameters = [0_u32; 30];
    (parameters[2], parameters[4]) = (2, IDLE_MS);
    // SAFETY: parameters of the right length, which live for the call.
    let number = unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, &mut parameters) };
    assert!(number >= 0, "io_uring: {}", io::Error::last_os_error());
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    assert_eq!(threads, 2);
}

/// Waits until a byte arrives, in a wait that only a fatal signal can end.
fn vfork() {
    extern "C" fn wait(_: *mut libc::c_void) -> i32 {
        let mut byte = 0_u8;
        // SAFETY: there is room for one byte.
        unsafe { libc::read(INPUT, (&raw mut byte).cast(), 1) as i32 - 1 }
    }
    let mut stack = vec![0_u128; 4096];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the new process has a stack of its own, and has ended when this continues.
    unsafe {
        let child = libc::clone(wait, stack.as_mut_ptr_range().end.cast(), flags, ptr::null_mut());
        assert!(child > 0, "{}", io::Error::last_os_error());
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
}

/// Makes calls in another process until this process is killed.
fn inject(page: &Page, pid: &str) {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    page.ready.store(1, Ordering::SeqCst);
    loop {
        super::make_calls(pid).unwrap();
        page.rounds.fetch_add(1, Ordering::SeqCst);
    }
}

/// Tries to inject without rights, and prints the result.
fn inject_as_nobody(_: &Page, pid: &str) {
    // SAFETY: takes no pointers.
    unsafe {
        assert_eq!(libc::setgroups(0, ptr::null()), 0);
        assert_eq!(libc::setresgid(65534, 65534, 65534), 0);
        assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
    }
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    match with_stopped_thread(pid, Duration::from_secs(2), |_| Ok(())) {
        Ok(_) => println!("done"),
        Err(error) => println!("{error}"),
    }
}

/// Traces another process.
fn trace(page: &Page, pid: &str) {
    let pid: i32 = pid.parse().unwrap();
    // SAFETY: takes no pointers.
    let done = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    page.ready.store(1, Ordering::SeqCst);
    loop {
        thread::sleep(Duration::from_secs(1));
    }
}

/// Executes this program again and again.
fn execute(page: &Page, round: &str) {
    use std::os::unix::process::CommandExt as _;
    let round: u64 = round.parse().unwrap();
    page.rounds.store(round, Ordering::SeqCst);
    page.ready.store(1, Ordering::SeqCst);
    if page.stop.load(Ordering::SeqCst) != 0 {
        return;
    }
    // About the time that it takes to find the program's code.
    thread::sleep(Duration::from_millis(round % 16));
    let mut next = std::process::Command::new("/proc/self/exe");
    panic!("{}", next.env(ROLE, format!("execute {}", round + 1)).exec());
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) -> i64 {
    let limit = limit.map(timespec);
    let at = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: both are alive for the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, at) }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: a set is plain memory, which sigemptyset fills.
    unsafe {
        let mut set = zeroed();
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
        set
    }
}

fn signal_mask() -> u64 {
    let mut mask = 0_u64;
    // SAFETY: the kernel's mask has 8 bytes.
    let done = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, 0, 0, &mut mask, 8) };
    assert_eq!(done, 0);
    mask
}
