//! A stopped thread of another process: its restore frame, the calls that it makes, and its resumption.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;

use super::arch::{Frame, RED_ZONE_BYTES, Registers, Vectors};
use super::code::Code;
use super::error::{CallName, InjectError};
use super::memory;
use super::threads::{Candidate, Refusal};
use super::tracee::{Resume, Stop, Tracee};

/// Size of the memory in the process that a [`StoppedThread`] offers for arguments of calls, in bytes.
pub const SCRATCH_BYTES: usize = 2048;

/// Minimum time to wait for an interrupted thread to stop again. The thread leaves its call as soon as it gets a
/// processor, unless the call is uninterruptible. A thread that is detached during a waiting call would stay in it.
const BRING_BACK_LIMIT: Duration = Duration::from_secs(30);

/// Blocks all signals except SIGKILL and SIGSTOP, which the kernel excludes.
const ALL_SIGNALS: u64 = u64::MAX;

/// A stopped thread of another process. It resumes when this is dropped.
#[derive(Debug)]
pub struct StoppedThread {
    tracee: Tracee,
    code: Code,
    original: Registers,
    mask: u64,
    net: Net,
    place: Place,
    limit: Duration,
    since: Instant,
    /// An injected call has overwritten the kernel's restart information of the thread's own call.
    note_is_lost: bool,
}

/// State of the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Stopped at its own position, with its own registers.
    Own,
    /// After an injected call, or before the next one. The restore frame is under it.
    Caught,
    /// In an injected call that has not returned.
    Calling,
    /// Stopped during an injected call.
    Halted,
    /// Not traced any more.
    Gone,
}

/// Data written below the thread's stack: from the lowest address on, scratch memory for arguments of calls, and the
/// restore frame.
#[derive(Debug)]
struct Net {
    /// Address of the scratch memory.
    scratch_at: u64,
    /// Address of the restore frame, which begins with the return address of a call.
    frame_at: u64,
    /// Previous content of the memory.
    before: Vec<u8>,
}

impl std::fmt::Debug for Registers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {:#x}, stack at {:#x}", self.instruction(), self.stack_pointer())
    }
}

impl StoppedThread {
    /// Stops a thread within `patience`, and writes the restore frame.
    pub(super) fn stop(
        candidate: &Candidate,
        patience: Duration,
        limit: Duration,
    ) -> Result<Result<Self, Refusal>, InjectError> {
        let (pid, tid) = (candidate.pid, candidate.tid);
        // All look-ups that are possible without it are made before the stop, so that the stop is short.
        let mappings = memory::mappings(pid, tid)?;
        if mappings.is_empty() {
            return Ok(Err(Refusal::for_now(InjectError::Gone { pid })));
        }
        let code = match Code::find(pid, tid, &mappings) {
            // A program that has just started has not loaded its libraries yet.
            Err(error @ InjectError::NoInstruction { .. }) => return Ok(Err(Refusal::for_now(error))),
            found => found?,
        };
        let tracee = match Tracee::seize(pid, tid) {
            Ok(tracee) => tracee,
            Err(Errno::SRCH) => return Ok(Err(Refusal::for_now(InjectError::Gone { pid }))),
            Err(Errno::PERM | Errno::ACCESS) => return Ok(Err(candidate.why_not_traced())),
            Err(errno) => {
                return Err(InjectError::Request {
                    pid,
                    tid,
                    tried: "PTRACE_SEIZE",
                    errno,
                });
            }
        };
        let since = Instant::now();
        tracee.interrupt()?;
        match first_stop(&tracee, since + patience)? {
            Stop::Event => {}
            Stop::Ended => return Ok(Err(Refusal::for_now(InjectError::Gone { pid }))),
            _ => {
                return Ok(Err(Refusal::for_now(InjectError::NotStopped {
                    pid,
                    threads: 1,
                    limit,
                })));
            }
        }

        // From here on an error ends this tracing thread, which resumes the other thread: its registers are still its
        // own.
        let original = Registers::of(&tracee)?;
        if !original.is_64_bit() {
            return Ok(Err(Refusal::for_good(InjectError::NotSixtyFourBit { pid })));
        }
        if !candidate.is_still_there() || !code.is_in(tid) {
            return Ok(Err(Refusal::for_now(InjectError::Gone { pid })));
        }
        if tracee.is_in_sequence(original.instruction())? {
            return Ok(Err(Refusal::for_now(InjectError::InSequence { pid, tid })));
        }
        if tracee.has_calls_dispatched() {
            return Ok(Err(candidate.filtered()));
        }
        let mask = tracee.signal_mask()?;
        let vectors = Vectors::of(&tracee)?;
        let stack = original.stack_pointer();
        let top = stack.saturating_sub(RED_ZONE_BYTES);
        let no_stack = |bytes| {
            Ok(Err(Refusal::for_now(InjectError::NoStack {
                pid,
                tid,
                at: stack,
                bytes,
            })))
        };
        let Some(frame) = Frame::new(&original, &vectors, mask, top, code.give_back) else {
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
        let laid = memory::read(tid, scratch_at, &mut before).and_then(|()| memory::write(tid, frame.at, &frame.bytes));
        if laid.is_err() {
            return no_stack(stack - scratch_at);
        }
        let net = Net {
            scratch_at,
            frame_at: frame.at,
            before,
        };
        Ok(Ok(Self {
            tracee,
            code,
            original,
            mask,
            net,
            place: Place::Own,
            limit,
            since,
            note_is_lost: false,
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
    pub fn allow(&mut self, limit: Duration) {
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
        match self.place {
            Place::Own | Place::Caught => {}
            Place::Calling | Place::Halted => {
                return Err(InjectError::Hangs {
                    pid,
                    tid,
                    call,
                    limit: self.limit,
                });
            }
            Place::Gone => return Err(InjectError::Gone { pid }),
        }
        let calling = self
            .original
            .calling(number, arguments, self.code.call, self.net.frame_at);
        if self.place == Place::Own {
            self.step_onto_net()?;
        }
        // After a kill from here on, the thread makes the call, and then the restore frame restores it.
        calling.write(&self.tracee)?;
        self.place = Place::Calling;
        let returned = self.run(call)?;
        self.place = Place::Caught;
        match u64::try_from(returned) {
            Ok(value) => Ok(value),
            // Error numbers are -4095 to -1; other values are addresses.
            Err(_) if returned < -4095 => Ok(returned as u64),
            Err(_) => Err(InjectError::SystemCall {
                pid,
                tid,
                call,
                errno: Errno::from_raw_os_error(-returned as i32),
            }),
        }
    }

    /// Sets the registers so that the thread would restore itself if it were resumed, and then blocks its signals.
    /// After a kill between any two steps, the thread is unharmed.
    fn step_onto_net(&mut self) -> Result<(), InjectError> {
        // In `sigsuspend` and similar calls the thread has a temporary mask until it takes a signal. It must not take
        // one now and then wait for another: with its own mask the call is restarted, and takes the signal.
        self.tracee.set_signal_mask(self.mask)?;
        // Not a call yet: a signal that arrives now is handled on top, and would overwrite arguments of a call.
        let caught = self.original.caught(self.code.give_back, self.net.frame_at);
        caught.write(&self.tracee)?;
        self.place = Place::Caught;
        // Signals are blocked only now, because the restore frame unblocks them.
        self.tracee.set_signal_mask(ALL_SIGNALS)
    }

    /// Resumes the thread, whose registers are set for a call, and stops it at the end of the call.
    fn run(&mut self, call: CallName) -> Result<i64, InjectError> {
        let (pid, tid) = (self.pid(), self.tid());
        let until = Instant::now() + self.limit;
        let hangs = InjectError::Hangs {
            pid,
            tid,
            call,
            limit: self.limit,
        };
        let mut signal = 0;
        loop {
            self.tracee.resume(Resume::ToSystemCall, signal)?;
            signal = 0;
            match self.tracee.wait(until)? {
                Stop::SystemCall if self.tracee.is_entering()? => {}
                Stop::SystemCall => {
                    let registers = Registers::of(&self.tracee)?;
                    if let Some(returned) = registers.returned() {
                        return Ok(returned);
                    }
                    // The call was interrupted because the process is stopped or continued. The kernel restarts it.
                    self.note_is_lost |= registers.go_on_by_note();
                }
                // A signal stops or continues the process. The thread finishes the injected call all the same, and
                // follows the signal afterwards.
                Stop::Event => {}
                // The code is missing, or has a breakpoint. These are not sent signals, which are all blocked.
                Stop::Signal(raised @ (libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS)) => {
                    self.place = Place::Caught;
                    return Err(InjectError::Fault {
                        pid,
                        tid,
                        call,
                        signal: raised,
                    });
                }
                // SIGSTOP, which cannot be blocked.
                Stop::Signal(sent) => signal = sent,
                Stop::Ended => {
                    self.place = Place::Gone;
                    return Err(InjectError::Gone { pid });
                }
                Stop::NotYet => return Err(hangs),
            }
            // The process may be stopped and continued without end.
            if signal == 0 && Instant::now() > until {
                self.place = Place::Halted;
                return Err(hangs);
            }
        }
    }

    /// Returns the address of the scratch memory, [`SCRATCH_BYTES`] long, to which arguments of calls may point.
    pub fn scratch(&self) -> u64 {
        self.net.scratch_at
    }

    /// Writes to the scratch memory at offset `at`.
    ///
    /// # Errors
    /// If the process has ended, or has unmapped its stack.
    ///
    /// # Panics
    /// If the range is not within [`SCRATCH_BYTES`].
    pub fn write_scratch(&mut self, at: usize, bytes: &[u8]) -> Result<(), InjectError> {
        assert!(
            at + bytes.len() <= SCRATCH_BYTES,
            "{} bytes at {at} are past the scratch memory",
            bytes.len()
        );
        memory::write(self.tid(), self.net.scratch_at + at as u64, bytes)
    }

    /// Reads from the scratch memory at offset `at`.
    ///
    /// # Errors
    /// If the process has ended, or has unmapped its stack.
    ///
    /// # Panics
    /// If the range is not within [`SCRATCH_BYTES`].
    pub fn read_scratch(&self, at: usize, to: &mut [u8]) -> Result<(), InjectError> {
        assert!(
            at + to.len() <= SCRATCH_BYTES,
            "{} bytes at {at} are past the scratch memory",
            to.len()
        );
        memory::read(self.tid(), self.net.scratch_at + at as u64, to)
    }

    /// Restores the thread and resumes it. Returns the maximum time that it was stopped.
    pub(super) fn let_go(mut self) -> Result<Duration, InjectError> {
        self.bring_back()?;
        Ok(self.since.elapsed())
    }

    fn bring_back(&mut self) -> Result<(), InjectError> {
        let place = std::mem::replace(&mut self.place, Place::Gone);
        match place {
            Place::Gone => return Ok(()),
            Place::Own => {}
            Place::Caught | Place::Calling | Place::Halted => {
                self.come_to_event(place)?;
                self.note_is_lost |= Registers::of(&self.tracee)?.go_on_by_note();
                let original = if self.note_is_lost {
                    self.original.without_note()
                } else {
                    self.original
                };
                // The mask comes first: after a kill in between, the restore frame still applies. Signals that arrive
                // then are handled on top of the frame.
                self.tracee.set_signal_mask(self.mask)?;
                // From here on the kernel handles pending signals, and restarts the thread's own call if these
                // registers say so.
                original.write(&self.tracee)?;
            }
        }
        // The memory comes last, when no register refers to it any more.
        let restored = memory::write(self.tid(), self.net.scratch_at, &self.net.before);
        self.tracee.detach()?;
        restored
    }

    /// Runs the thread to a stop by [`Tracee::interrupt`], the kind of stop that it was in at first.
    fn come_to_event(&self, from: Place) -> Result<(), InjectError> {
        let (pid, tid) = (self.pid(), self.tid());
        self.tracee.interrupt()?;
        if from != Place::Calling {
            self.tracee.resume(Resume::Freely, 0)?;
        }
        match first_stop(&self.tracee, Instant::now() + self.limit.max(BRING_BACK_LIMIT))? {
            Stop::Event => Ok(()),
            Stop::Ended => Err(InjectError::Gone { pid }),
            // The thread restores itself when this tracing thread ends.
            _ => Err(InjectError::Request {
                pid,
                tid,
                tried: "stop it again",
                errno: Errno::TIMEDOUT,
            }),
        }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        if let Err(error) = self.bring_back() {
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
        tracee.resume(Resume::Freely, signal)?;
    }
}
