//! System calls in the threads of another process, as by a guest that has taken the process over.

use std::fs;
use std::io;

use libc::{c_long, c_void, user_regs_struct};

use crate::confine::threads;

/// A process that was taken over.
pub(crate) struct Victim {
    process: u32,
    /// Address of a `syscall` instruction in the process's memory.
    instruction: u64,
}

/// Argument of a system call.
#[derive(Clone, Debug)]
pub(crate) enum Argument {
    Number(u64),
    /// The address of a copy of these bytes.
    Bytes(Vec<u8>),
}

/// Returns the address of a NUL-terminated text.
pub(crate) fn path(text: &str) -> Argument {
    Argument::Bytes([text.as_bytes(), b"\0"].concat())
}

pub(crate) fn number(value: impl Into<i64>) -> Argument {
    Argument::Number(value.into() as u64)
}

impl Victim {
    pub(crate) fn new(process: u32) -> Self {
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).expect("it runs");
        let of_libc = |line: &&str| line.contains(" r-xp ") && line.contains("libc.so");
        let line = maps.lines().find(of_libc).expect("it uses the C library");
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let (start, end) = range.expect("a range");
        let address = |text: &str| u64::from_str_radix(text, 16).expect("an address");
        let (start, end) = (address(start), address(end));
        let code = read(process as i32, start, (end - start) as usize);
        let at = code.windows(2).position(|two| two == [0x0f, 0x05]);
        Self { process, instruction: start + at.expect("the C library makes system calls") as u64 }
    }

    /// Returns the threads with their names, except the kernel's own threads, which cannot be taken over.
    pub(crate) fn threads(&self) -> Vec<(i32, String)> {
        let all = threads(self.process).into_iter();
        all.filter(|(_, name)| !name.starts_with("iou-")).collect()
    }

    /// Returns the kernel's result of a thread's system call: at least 0, or a negative error number. `None` if the
    /// thread has ended.
    pub(crate) fn call(&self, thread: i32, call: c_long, arguments: &[Argument]) -> Option<i64> {
        let stopped = Stopped::new(thread)?;
        let before = stopped.registers();
        let mut registers = before;
        // Below the part of the stack that is in use.
        let mut place = (before.rsp - (64 << 10)) & !0xf;
        let mut values = [0; 6];
        for (value, argument) in values.iter_mut().zip(arguments) {
            *value = match argument {
                Argument::Number(number) => *number,
                Argument::Bytes(bytes) => {
                    place -= (bytes.len() as u64 + 16) & !0xf;
                    write(thread, place, bytes);
                    place
                }
            };
        }
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = values;
        registers.rax = call as u64;
        registers.rip = self.instruction;
        // Prevents the restart of an interrupted system call until the thread continues normally.
        registers.orig_rax = u64::MAX;
        stopped.set_registers(&registers);
        stopped.step();
        let result = stopped.registers().rax as i64;
        stopped.set_registers(&before);
        Some(result)
    }
}

/// A stopped thread, which continues on drop.
struct Stopped(i32);

impl Stopped {
    fn new(thread: i32) -> Option<Self> {
        // SAFETY: the request has no data.
        let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) };
        let error = io::Error::last_os_error();
        if seized != 0 && error.raw_os_error() == Some(libc::ESRCH) {
            return None;
        }
        assert_eq!(seized, 0, "PTRACE_SEIZE: {error}");
        let stopped = Self(thread);
        stopped.ptrace(libc::PTRACE_INTERRUPT, std::ptr::null_mut());
        stopped.wait();
        Some(stopped)
    }

    fn ptrace(&self, request: libc::c_uint, data: *mut c_void) {
        // SAFETY: `data` is null, or points to memory of the size that the request needs.
        let result = unsafe { libc::ptrace(request, self.0, std::ptr::null_mut::<c_void>(), data) };
        assert_eq!(result, 0, "ptrace {request}: {}", io::Error::last_os_error());
    }

    fn wait(&self) {
        let mut status = 0;
        // SAFETY: `status` can be written.
        let waited = unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) };
        assert!(waited == self.0 && libc::WIFSTOPPED(status), "{waited}: {status:#x}");
    }

    fn registers(&self) -> user_regs_struct {
        // SAFETY: zeros are valid numbers.
        let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
        self.ptrace(libc::PTRACE_GETREGS, (&raw mut registers).cast());
        registers
    }

    fn set_registers(&self, registers: &user_regs_struct) {
        self.ptrace(libc::PTRACE_SETREGS, (&raw const *registers).cast_mut().cast());
    }

    /// Makes the thread execute one instruction.
    fn step(&self) {
        self.ptrace(libc::PTRACE_SINGLESTEP, std::ptr::null_mut());
        self.wait();
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.ptrace(libc::PTRACE_DETACH, std::ptr::null_mut());
        }
    }
}

fn vectors(here: *mut u8, there: u64, len: usize) -> (libc::iovec, libc::iovec) {
    let vector = |base: *mut c_void| libc::iovec { iov_base: base, iov_len: len };
    (vector(here.cast()), vector(there as *mut c_void))
}

fn read(process: i32, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let (here, there) = vectors(bytes.as_mut_ptr(), at, len);
    // SAFETY: `here` covers exactly `bytes`; the kernel checks the remote range.
    let count = unsafe { libc::process_vm_readv(process, &raw const here, 1, &raw const there, 1, 0) };
    assert_eq!(count, len as isize, "{}", io::Error::last_os_error());
    bytes
}

fn write(process: i32, at: u64, bytes: &[u8]) {
    let (here, there) = vectors(bytes.as_ptr().cast_mut(), at, bytes.len());
    // SAFETY: `here` covers exactly `bytes`, and is only read; the kernel checks the remote range.
    let count = unsafe { libc::process_vm_writev(process, &raw const here, 1, &raw const there, 1, 0) };
    assert_eq!(count, bytes.len() as isize, "{}", io::Error::last_os_error());
}
