//! A stopped thread of another process: its restore frame, the calls that it makes, and its resumption.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;

use super::arch::{Frame, RED_ZONE_BYTES, Registers, VectorRegisters};
use super::code::Code;
use super::error::{CallName, InjectError};
use super::memory;
use super::threads::{Candidate, Refusal};
use super::tracee::{Resume, Stop, Tracee};

/// Size of the memory in the process that a [`StoppedThread`] offers for arguments of calls, in bytes.
pub const SCRATCH_BYTES: usize = 2048;

/// Minimum time to wait for an interrupted thread to stop again. The thread leaves its call as soon as it gets a
/// processor, unless the call is uninterruptible. A thread that is detached during a waiting call would stay in it.
const RESTORE_TIMEOUT_MIN: Duration = Duration::from_secs(30);

/// Blocks all signals except SIGKILL and SIGSTOP, which the kernel excludes.
const ALL_SIGNALS: u64 = u64::MAX;

/// A stopped thread of another process. It resumes when this is dropped.
#[derive(Debug)]
pub struct StoppedThread {
    tracee: Tracee,
    code: Code,
    original: Registers,
    mask: u64,
    restore_area: RestoreArea,
    position: ThreadPosition,
    limit: Duration,
    stopped_at: Instant,
    /// An injected call has overwritten the kernel's restart information of the thread's own call.
    restart_block_lost: bool,
}

/// State of the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ThreadPosition {
    /// Stopped at its own position, with its own registers.
    Original,
    /// After an injected call, or before the next one. The restore frame is under it.
    AtFrame,
    /// In an injected call that has not returned.
    InCall,
    /// Stopped during an injected call.
    StoppedInCall,
    /// Not traced any more.
    Detached,
}

/// Data written below the thread's stack: from the lowest address on, scratch memory for arguments of calls, and the
/// restore frame.
#[derive(Debug)]
struct RestoreArea {
    /// Address of the scratch memory.
    scratch_at: u64,
    /// Address of the restore frame, which begins with the return address of a call.
    frame_at: u64,
    /// Previous content of the memory.
    saved: Vec<u8>,
}

impl std::fmt::Debug for Registers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {:#x}, stack at {:#x}", self.instruction(), self.stack_pointer())
    }
}

impl StoppedThread {
    /// Stops a thread within `stop_timeout`, and writes the restore frame.
    pub(super) fn stop(
        candidate: &Candidate,
        stop_timeout: Duration,
        limit: Duration,
    ) -> Result<Result<Self, Refusal>, InjectError> {
        let (pid, tid) = (candidate.pid, candidate.tid);
        // All look-ups that are possible without it are made before the stop, so that the stop is short.
        let mappings = memory::mappings(pid, tid)?;
        if mappings.is_empty() {
            return Ok(Err(Refusal::temporary(InjectError::Exited { pid })));
        }
        let code = match Code::find(pid, tid, &mappings) {
            // A program that has just started has not loaded its libraries yet.
            Err(error @ InjectError::NoInstruction { .. }) => return Ok(Err(Refusal::temporary(error))),
            found => found?,
        };
        let tracee = match Tracee::seize(pid, tid) {
            Ok(tracee) => tracee,
            Err(Errno::SRCH) => return Ok(Err(Refusal::temporary(InjectError::Exited { pid }))),
            Err(Errno::PERM | Errno::ACCESS) => return Ok(Err(candidate.trace_refusal())),
            Err(errno) => {
                return Err(InjectError::Request { pid, tid, tried: "PTRACE_SEIZE", errno });
            }
        };
        let since = Instant::now();
        tracee.interrupt()?;
        match first_stop(&tracee, since + stop_timeout)? {
            Stop::Event => {}
            Stop::Ended => return Ok(Err(Refusal::temporary(InjectError::Exited { pid }))),
            _ => {
                return Ok(Err(Refusal::temporary(InjectError::NotStopped { pid, threads: 1, limit })));
            }
        }

        // From here on an error ends this tracing thread, which resumes the other thread: its registers are still its
        // own.
        let original = Registers::read(&tracee)?;
        if !original.is_64_bit() {
            return Ok(Err(Refusal::permanent(InjectError::Not64Bit { pid })));
        }
        if !candidate.exists() || !code.is_present_in(tid) {
            return Ok(Err(Refusal::temporary(InjectError::Exited { pid })));
        }
        if tracee.is_in_rseq(original.instruction())? {
            return Ok(Err(Refusal::temporary(InjectError::InRseq { pid, tid })));
        }
        if tracee.has_syscall_user_dispatch() {
            return Ok(Err(candidate.filtered()));
        }
        let mask = tracee.signal_mask()?;
        let vectors = VectorRegisters::read(&tracee)?;
        let stack = original.stack_pointer();
        let top = stack.saturating_sub(RED_ZONE_BYTES);
        let no_stack = |bytes| Ok(Err(Refusal::temporary(InjectError::NoStack { pid, tid, at: stack, bytes })));
        let Some(frame) = Frame::new(&original, &vectors, mask, top, code.sigreturn) else {
            return no_stack(0);
        };
        let scratch_at = frame.at.saturating_sub(SCRATCH_BYTES as u64) & !15;
        // All of it must be in one mapping with the thread's own stack data, and so in the space of its stack.
        let has_room = |mapping: &memory::Mapping| {
            mapping.is_private_and_writable() && mapping.range.start <= scratch_at && stack < mapping.range.end
        };
        if scratch_at == 0 || !mappings.iter().any(has_room) {
            return no_stack(stack - scratch_at);
        }
        let mut before = vec![0; (frame.at - scratch_at) as usize + frame.bytes.len()];
        // No code may rely on memory below the red zone, because a signal would overwrite it too. So a crash here
        // does no harm, and the thread's registers do not refer to the frame yet.
        let written =
            memory::read(tid, scratch_at, &mut before).and_then(|()| memory::write(tid, frame.at, &frame.bytes));
        if written.is_err() {
            return no_stack(stack - scratch_at);
        }
        let net = RestoreArea { scratch_at, frame_at: frame.at, saved: before };
        Ok(Ok(Self {
            tracee,
            code,
            original,
            mask,
            restore_area: net,
            position: ThreadPosition::Original,
            limit,
            stopped_at: since,
            restart_block_lost: false,
        }))
    }

    /// Returns the process.
    pub fn pid(&self) -> Pid {
        self.tracee.pid
    }

    /// Returns the thread.
    pub fn tid(&self) -> Pid {
        self.tracee.tid
    }

    /// Raises the time limit of calls to `limit`, if that is longer.
    pub fn raise_limit(&mut self, limit: Duration) {
        self.limit = self.limit.max(limit);
    }

    /// Makes a system call. It should not wait; a call that does is interrupted after the time limit. `nanosleep` and
    /// similar calls are not allowed: the kernel keeps restart information for only one sleep of a thread, and the
    /// thread's own sleep would continue as this one.
    ///
    /// # Errors
    /// If the call fails ([`InjectError::errno`]) or does not return in time, or if the thread is killed.
    pub fn system_call(&mut self, number: i64, arguments: [u64; 6]) -> Result<u64, InjectError> {
        let (pid, tid, call) = (self.pid(), self.tid(), CallName(number));
        match self.position {
            ThreadPosition::Original | ThreadPosition::AtFrame => {}
            ThreadPosition::InCall | ThreadPosition::StoppedInCall => {
                return Err(InjectError::CallTimedOut { pid, tid, call, limit: self.limit });
            }
            ThreadPosition::Detached => return Err(InjectError::Exited { pid }),
        }
        let registers = self.original.for_call(number, arguments, self.code.call, self.restore_area.frame_at);
        if self.position == ThreadPosition::Original {
            self.enter_restore_frame()?;
        }
        // After a kill from here on, the thread makes the call, and then the restore frame restores it.
        registers.write(&self.tracee)?;
        self.position = ThreadPosition::InCall;
        let returned = self.run(call)?;
        self.position = ThreadPosition::AtFrame;
        match u64::try_from(returned) {
            Ok(value) => Ok(value),
            // Error numbers are -4095 to -1; other values are addresses.
            Err(_) if returned < -4095 => Ok(returned as u64),
            Err(_) => {
                Err(InjectError::SystemCall { pid, tid, call, errno: Errno::from_raw_os_error(-returned as i32) })
            }
        }
    }

    /// Sets the registers so that the thread would restore itself if it were resumed, and then blocks its signals.
    /// After a kill between any two steps, the thread is unharmed.
    fn enter_restore_frame(&mut self) -> Result<(), InjectError> {
        // In `sigsuspend` and similar calls the thread has a temporary mask until it takes a signal. It must not take
        // one now and then wait for another: with its own mask the call is restarted, and takes the signal.
        self.tracee.set_signal_mask(self.mask)?;
        // Not a call yet: a signal that arrives now is handled on top, and would overwrite arguments of a call.
        let registers = self.original.at_frame(self.code.sigreturn, self.restore_area.frame_at);
        registers.write(&self.tracee)?;
        self.position = ThreadPosition::AtFrame;
        // Signals are blocked only now, because the restore frame unblocks them.
        self.tracee.set_signal_mask(ALL_SIGNALS)
    }

    /// Resumes the thread, whose registers are set for a call, and stops it at the end of the call.
    fn run(&mut self, call: CallName) -> Result<i64, InjectError> {
        let (pid, tid) = (self.pid(), self.tid());
        let until = Instant::now() + self.limit;
        let hangs = InjectError::CallTimedOut { pid, tid, call, limit: self.limit };
        let mut signal = 0;
        loop {
            self.tracee.resume(Resume::ToSyscallStop, signal)?;
            signal = 0;
            match self.tracee.wait(until)? {
                Stop::SystemCall if self.tracee.is_entering()? => {}
                Stop::SystemCall => {
                    let registers = Registers::read(&self.tracee)?;
                    if let Some(returned) = registers.call_result() {
                        return Ok(returned);
                    }
                    // The call was interrupted because the process is stopped or continued. The kernel restarts it.
                    self.restart_block_lost |= registers.needs_restart_block();
                }
                // A signal stops or continues the process. The thread finishes the injected call all the same, and
                // follows the signal afterwards.
                Stop::Event => {}
                // The code is missing, or has a breakpoint. These are not sent signals, which are all blocked.
                Stop::Signal(raised @ (libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS)) => {
                    self.position = ThreadPosition::AtFrame;
                    return Err(InjectError::Fault { pid, tid, call, signal: raised });
                }
                // SIGSTOP, which cannot be blocked.
                Stop::Signal(sent) => signal = sent,
                Stop::Ended => {
                    self.position = ThreadPosition::Detached;
                    return Err(InjectError::Exited { pid });
                }
                Stop::NotYet => return Err(hangs),
            }
            // The process may be stopped and continued without end.
            if signal == 0 && Instant::now() > until {
                self.position = ThreadPosition::StoppedInCall;
                return Err(hangs);
            }
        }
    }

    /// Returns the address of the scratch memory, [`SCRATCH_BYTES`] long, to which arguments of calls may point.
    pub fn scratch(&self) -> u64 {
        self.restore_area.scratch_at
    }

    /// Writes to the scratch memory at offset `at`.
    ///
    /// # Errors
    /// If the process has ended, or has unmapped its stack.
    ///
    /// # Panics
    /// If the range is not within [`SCRATCH_BYTES`].
    pub fn write_scratch(&mut self, at: usize, bytes: &[u8]) -> Result<(), InjectError> {
        assert!(at + bytes.len() <= SCRATCH_BYTES, "{} bytes at {at} are past the scratch memory", bytes.len());
        memory::write(self.tid(), self.restore_area.scratch_at + at as u64, bytes)
    }

    /// Reads from the scratch memory at offset `at`.
    ///
    /// # Errors
    /// If the process has ended, or has unmapped its stack.
    ///
    /// # Panics
    /// If the range is not within [`SCRATCH_BYTES`].
    pub fn read_scratch(&self, at: usize, to: &mut [u8]) -> Result<(), InjectError> {
        assert!(at + to.len() <= SCRATCH_BYTES, "{} bytes at {at} are past the scratch memory", to.len());
        memory::read(self.tid(), self.restore_area.scratch_at + at as u64, to)
    }

    /// Restores the thread and resumes it. Returns the maximum time that it was stopped.
    pub(super) fn resume(mut self) -> Result<Duration, InjectError> {
        self.restore()?;
        Ok(self.stopped_at.elapsed())
    }

    fn restore(&mut self) -> Result<(), InjectError> {
        let position = std::mem::replace(&mut self.position, ThreadPosition::Detached);
        match position {
            ThreadPosition::Detached => return Ok(()),
            ThreadPosition::Original => {}
            ThreadPosition::AtFrame | ThreadPosition::InCall | ThreadPosition::StoppedInCall => {
                self.run_to_event_stop(position)?;
                self.restart_block_lost |= Registers::read(&self.tracee)?.needs_restart_block();
                let original =
                    if self.restart_block_lost { self.original.without_restart_block() } else { self.original };
                // The mask comes first: after a kill in between, the restore frame still applies. Signals that arrive
                // then are handled on top of the frame.
                self.tracee.set_signal_mask(self.mask)?;
                // From here on the kernel handles pending signals, and restarts the thread's own call if these
                // registers say so.
                original.write(&self.tracee)?;
            }
        }
        // The memory comes last, when no register refers to it any more.
        let restored = memory::write(self.tid(), self.restore_area.scratch_at, &self.restore_area.saved);
        self.tracee.detach()?;
        restored
    }

    /// Runs the thread to a stop by [`Tracee::interrupt`], the kind of stop that it was in at first.
    fn run_to_event_stop(&self, position: ThreadPosition) -> Result<(), InjectError> {
        let (pid, tid) = (self.pid(), self.tid());
        self.tracee.interrupt()?;
        if position != ThreadPosition::InCall {
            self.tracee.resume(Resume::Continue, 0)?;
        }
        match first_stop(&self.tracee, Instant::now() + self.limit.max(RESTORE_TIMEOUT_MIN))? {
            Stop::Event => Ok(()),
            Stop::Ended => Err(InjectError::Exited { pid }),
            // The thread restores itself when this tracing thread ends.
            _ => Err(InjectError::Request { pid, tid, tried: "stop it again", errno: Errno::TIMEDOUT }),
        }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            // Logged only, because the error or panic of the work is what the caller receives.
            tracing::warn!("{error}; the thread restores itself");
        }
    }
}

/// Waits for the thread to stop on its way to user mode. Signals that come first are delivered: the thread stops
/// right after.
fn first_stop(tracee: &Tracee, until: Instant) -> Result<Stop, InjectError> {
    loop {
        let signal = match tracee.wait(until)? {
            Stop::Signal(signal) => signal,
            Stop::SystemCall => 0,
            stop => return Ok(stop),
        };
        // Another stop cancels the one that was requested before.
        tracee.interrupt()?;
        tracee.resume(Resume::Continue, signal)?;
    }
}
