//! A thread traced by the current thread: the requests of ptrace(2), and the resulting stops.

use std::ffi::c_void;
use std::io;
use std::mem::{offset_of, size_of};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;

use super::error::InjectError;
use super::memory;

// Constants that libc lacks for some C libraries (linux/ptrace.h).
const PTRACE_EVENT_STOP: i32 = 128;
const PTRACE_GET_SYSCALL_INFO: libc::c_uint = 0x420e;
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;
const PTRACE_SYSCALL_INFO_ENTRY: u8 = 1;

/// Size of the kernel's signal mask, in bytes.
const MASK_BYTES: usize = 8;

/// Time to poll for a stop without a pause. A stop without delay comes within some 10 us.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// The traced thread. ptrace binds it to the thread of this process that has seized it, so the type is not `Send`.
#[derive(Debug)]
pub(super) struct Tracee {
    pub(super) pid: Pid,
    pub(super) tid: Pid,
    _on_this_thread: std::marker::PhantomData<*const ()>,
}

/// Kind of a stop.
#[derive(Debug)]
pub(super) enum Stop {
    /// On the way to user mode, before signals and the restart of a call: because of [`Tracee::interrupt`], or
    /// because a signal stops or continues the process.
    Event,
    /// A signal is about to be delivered. [`Tracee::resume`] with its number delivers it, with all of its data.
    Signal(i32),
    /// Entry to or exit from a system call.
    SystemCall,
    /// The thread has ended.
    Ended,
    /// No stop in time.
    NotYet,
}

/// Mode of resuming a thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Resume {
    Continue,
    ToSyscallStop,
}

/// Location of a thread's restartable sequences (linux/ptrace.h).
#[repr(C)]
#[derive(Default)]
struct RseqConfiguration {
    area: u64,
    area_bytes: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}

/// Used part of the description of a restartable sequence (linux/rseq.h).
#[repr(C)]
#[derive(Default)]
struct RseqCriticalSection {
    version: u32,
    flags: u32,
    start: u64,
    bytes: u64,
    abort: u64,
}

/// Offset of a thread's pointer to its current sequence (linux/rseq.h).
const RSEQ_CS_AT: u64 = 8;

impl Tracee {
    /// Starts to trace a thread, which keeps running. When the tracing thread or this process ends, the kernel
    /// detaches it.
    pub(super) fn seize(pid: Pid, tid: Pid) -> Result<Self, Errno> {
        let tracee = Self { pid, tid, _on_this_thread: std::marker::PhantomData };
        let options = libc::PTRACE_O_TRACESYSGOOD as *mut c_void;
        // SAFETY: PTRACE_SEIZE takes no pointers, but options in the place of one.
        unsafe { tracee.ptrace(libc::PTRACE_SEIZE as _, ptr::null_mut(), options) }?;
        Ok(tracee)
    }

    /// Makes the thread stop.
    pub(super) fn interrupt(&self) -> Result<(), InjectError> {
        // SAFETY: PTRACE_INTERRUPT takes no pointers.
        let done = unsafe { self.ptrace(libc::PTRACE_INTERRUPT as _, ptr::null_mut(), ptr::null_mut()) };
        self.map_errno("PTRACE_INTERRUPT", done)
    }

    /// Resumes the stopped thread, with a signal if `signal` is not 0.
    pub(super) fn resume(&self, mode: Resume, signal: i32) -> Result<(), InjectError> {
        let (request, name) = match mode {
            Resume::Continue => (libc::PTRACE_CONT, "PTRACE_CONT"),
            Resume::ToSyscallStop => (libc::PTRACE_SYSCALL, "PTRACE_SYSCALL"),
        };
        // SAFETY: these take no pointers, but a signal's number in the place of one.
        let done = unsafe { self.ptrace(request as _, ptr::null_mut(), signal as usize as *mut c_void) };
        self.map_errno(name, done)
    }

    /// Resumes the stopped thread, and ends tracing it.
    pub(super) fn detach(&self) -> Result<(), InjectError> {
        // SAFETY: PTRACE_DETACH takes no pointers, but a signal's number in the place of one, 0 for none.
        let done = unsafe { self.ptrace(libc::PTRACE_DETACH as _, ptr::null_mut(), ptr::null_mut()) };
        self.map_errno("PTRACE_DETACH", done)
    }

    /// Waits for the next stop.
    pub(super) fn wait(&self, until: Instant) -> Result<Stop, InjectError> {
        let began = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            if let Some(stop) = self.stop()? {
                return Ok(stop);
            }
            if self.has_ended()? {
                return Ok(Stop::Ended);
            }
            let now = Instant::now();
            if now > until {
                return Ok(Stop::NotYet);
            }
            if now - began < SPIN_TIME {
                thread::yield_now();
            } else {
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
    }

    /// Returns the current stop of the thread, if it is stopped.
    ///
    /// Does not use waitpid(2), which reports a stop only once: a reported signal would be lost if this process is
    /// killed then. And if the process is a child of this one, other code that waits for its end could receive the
    /// report.
    fn stop(&self) -> Result<Option<Stop>, InjectError> {
        // SAFETY: the kernel writes a siginfo_t, which is of plain numbers.
        let (done, told) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let to = ptr::from_mut(&mut info).cast();
            (self.ptrace(libc::PTRACE_GETSIGINFO as _, ptr::null_mut(), to), info)
        };
        match done {
            Ok(()) => Ok(Some(decode(told.si_signo, told.si_code))),
            Err(Errno::SRCH) => Ok(None),
            Err(errno) => Err(self.failed("PTRACE_GETSIGINFO", errno)),
        }
    }

    /// Returns true if the thread has ended. The exit status stays available for its parent.
    fn has_ended(&self) -> Result<bool, InjectError> {
        // Only children traced by the current thread: others of this process trace for themselves.
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL | libc::__WNOTHREAD;
        // SAFETY: the kernel writes a siginfo_t, which is of plain numbers.
        let (done, told) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let done = libc::waitid(libc::P_PID, self.tid.as_raw_pid() as _, &mut info, options);
            (done, info)
        };
        if done == 0 {
            // Any other code means a stop, or no change.
            return Ok(matches!(told.si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED));
        }
        match last_errno() {
            Errno::INTR => Ok(false),
            // The thread has become the main thread of another program (execve), with another number.
            Errno::CHILD => Ok(true),
            errno => Err(self.failed("waitid", errno)),
        }
    }

    /// Returns true if the thread, which is stopped at a system call, is about to make it.
    pub(super) fn is_entering(&self) -> Result<bool, InjectError> {
        // `struct ptrace_syscall_info` begins with its kind; the kernel truncates it to the given size.
        let mut operation = [0_u8; 8];
        // SAFETY: the kernel writes up to `size_of` bytes, the address argument, to `operation`.
        let done = unsafe {
            let (size, to) = (operation.len() as *mut c_void, operation.as_mut_ptr().cast());
            self.ptrace(PTRACE_GET_SYSCALL_INFO, size, to)
        };
        self.map_errno("PTRACE_GET_SYSCALL_INFO", done)?;
        Ok(operation[0] == PTRACE_SYSCALL_INFO_ENTRY)
    }

    /// Returns the blocked signals of the stopped thread. In a call with a temporary mask (`ppoll`), returns the
    /// original mask.
    pub(super) fn signal_mask(&self) -> Result<u64, InjectError> {
        let mut mask = 0_u64;
        // SAFETY: the kernel writes MASK_BYTES to `mask`.
        let done = unsafe {
            let to = ptr::from_mut(&mut mask).cast();
            self.ptrace(libc::PTRACE_GETSIGMASK as _, MASK_BYTES as *mut c_void, to)
        };
        self.map_errno("PTRACE_GETSIGMASK", done)?;
        Ok(mask)
    }

    /// Blocks these signals, and no others.
    pub(super) fn set_signal_mask(&self, mask: u64) -> Result<(), InjectError> {
        // SAFETY: the kernel reads MASK_BYTES from `mask`.
        let done = unsafe {
            let from = ptr::from_ref(&mask).cast_mut().cast();
            self.ptrace(libc::PTRACE_SETSIGMASK as _, MASK_BYTES as *mut c_void, from)
        };
        self.map_errno("PTRACE_SETSIGMASK", done)
    }

    /// Reads a register set of the stopped thread, as much of it as exists, and returns the number of bytes.
    pub(super) fn register_set(&self, kind: usize, to: &mut [u8]) -> Result<usize, InjectError> {
        let mut part = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
        // SAFETY: the kernel writes to the buffer that `part` describes, which is `to`, and writes the length to
        // `part`.
        let done = unsafe {
            let part = ptr::from_mut(&mut part).cast();
            self.ptrace(libc::PTRACE_GETREGSET as _, kind as *mut c_void, part)
        };
        self.map_errno("PTRACE_GETREGSET", done)?;
        Ok(part.iov_len)
    }

    /// Writes a register set of the stopped thread.
    pub(super) fn set_register_set(&self, kind: usize, from: &[u8]) -> Result<(), InjectError> {
        let mut part = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
        // SAFETY: the kernel reads from the buffer that `part` describes, which is `from`, and writes the length to
        // `part`.
        let done = unsafe {
            let part = ptr::from_mut(&mut part).cast();
            self.ptrace(libc::PTRACE_SETREGSET as _, kind as *mut c_void, part)
        };
        self.map_errno("PTRACE_SETREGSET", done)
    }

    /// Returns true if calls from some code raise signals in the stopped thread (syscall user dispatch), as in
    /// emulators.
    pub(super) fn has_syscall_user_dispatch(&self) -> bool {
        // `struct ptrace_sud_config`: a mode, 0 for off, the address of a selector, and the range of code that may
        // call.
        let mut setup = [0_u64; 4];
        // SAFETY: the kernel writes `size_of` bytes, the address argument, to `setup`.
        let done = unsafe {
            let (size, to) = (size_of_val(&setup) as *mut c_void, setup.as_mut_ptr().cast());
            self.ptrace(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, size, to)
        };
        // Unknown before Linux 6.4.
        done.is_ok() && setup[0] != 0
    }

    /// Returns true if the stopped thread, about to continue at `instruction`, is in a restartable sequence. After
    /// any other code has run, the thread would continue in the middle of a sequence that it should restart.
    pub(super) fn is_in_rseq(&self, instruction: u64) -> Result<bool, InjectError> {
        let mut setup = RseqConfiguration::default();
        // SAFETY: the kernel writes up to the size given to `setup`, which is of plain numbers.
        let done = unsafe {
            let (size, to) = (size_of::<RseqConfiguration>() as *mut c_void, ptr::from_mut(&mut setup).cast());
            self.ptrace(PTRACE_GET_RSEQ_CONFIGURATION, size, to)
        };
        // Unknown before Linux 5.13, and absent without rseq. libc itself has no such sequences.
        if done.is_err() || setup.area == 0 {
            return Ok(false);
        }
        let mut pointer = [0; 8];
        memory::read(self.tid, setup.area + RSEQ_CS_AT, &mut pointer)?;
        let pointer = u64::from_ne_bytes(pointer);
        if pointer == 0 {
            return Ok(false);
        }
        let mut sequence = [0; size_of::<RseqCriticalSection>()];
        memory::read(self.tid, pointer, &mut sequence)?;
        let number = |at: usize| {
            let bytes = sequence[at..at + 8].try_into();
            bytes.map_or(0, u64::from_ne_bytes)
        };
        let (start, bytes) =
            (number(offset_of!(RseqCriticalSection, start)), number(offset_of!(RseqCriticalSection, bytes)));
        Ok(instruction.wrapping_sub(start) < bytes)
    }

    /// Makes a request of ptrace(2).
    ///
    /// # Safety
    /// `address` and `data` must be what the request takes.
    unsafe fn ptrace(&self, request: libc::c_uint, address: *mut c_void, data: *mut c_void) -> Result<(), Errno> {
        // SAFETY: as promised by the caller. Requests that return a value (PEEK*) are not made.
        let done = unsafe { libc::ptrace(request as _, self.tid.as_raw_pid(), address, data) };
        if done == -1 { Err(last_errno()) } else { Ok(()) }
    }

    fn map_errno(&self, tried: &'static str, done: Result<(), Errno>) -> Result<(), InjectError> {
        done.map_err(|errno| self.failed(tried, errno))
    }

    fn failed(&self, tried: &'static str, errno: Errno) -> InjectError {
        match errno {
            // A stopped thread exists until it is killed.
            Errno::SRCH => InjectError::Exited { pid: self.pid },
            errno => InjectError::Request { pid: self.pid, tid: self.tid, tried, errno },
        }
    }
}

/// Decodes the kernel's description of a stop (ptrace(2)). Stops that are not signals have a code that no signal has.
fn decode(signal: i32, code: i32) -> Stop {
    match (signal, code) {
        (_, code) if code >> 8 == PTRACE_EVENT_STOP => Stop::Event,
        (libc::SIGTRAP, code) if code == libc::SIGTRAP | 0x80 => Stop::SystemCall,
        (signal, _) => Stop::Signal(signal),
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
