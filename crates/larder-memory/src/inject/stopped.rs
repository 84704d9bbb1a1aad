//! A stopped thread of another process: the net under it, the calls that it makes for us, and how it goes on.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;

use super::arch::{Frame, RED_ZONE_BYTES, Registers, Vectors};
use super::code::Code;
use super::error::{CallName, InjectError};
use super::memory;
use super::threads::{Candidate, Refusal};
use super::tracee::{Resume, Stop, Tracee};

/// How much memory of the process a [`StoppedThread`] offers for what calls point to.
pub const SCRATCH_BYTES: usize = 2048;

/// The shortest wait for an interrupted thread to stop again. It leaves its call as soon as it gets a processor, unless the
/// kernel lets nothing interrupt that call. A thread that is detached within a call that waits stays in it.
const BRING_BACK_LIMIT: Duration = Duration::from_secs(30);

/// Of all signals but SIGKILL and SIGSTOP, which the kernel leaves out.
const ALL_SIGNALS: u64 = u64::MAX;

/// A thread of another process that stands still for us. It goes on when this is dropped.
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
    /// Whether a call made for us has overwritten what the kernel had noted of the call that the thread was in.
    note_is_lost: bool,
}

/// Where the thread is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Where it was stopped, with its own registers.
    Own,
    /// At the end of a call made for us, or before the next one: the net is under it.
    Caught,
    /// Somewhere in such a call: it has not returned.
    Calling,
    /// Stopped amid such a call.
    Halted,
    /// It is not ours any more.
    Gone,
}

/// What is written below the thread's stack: from the lowest address on, room for what calls point to, and the signal
/// frame.
#[derive(Debug)]
struct Net {
    /// Of the room for what calls point to.
    scratch_at: u64,
    /// Of the frame, which begins with the address that a call returns to.
    frame_at: u64,
    /// What was there before.
    before: Vec<u8>,
}

impl std::fmt::Debug for Registers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {:#x}, stack at {:#x}", self.instruction(), self.stack_pointer())
    }
}

impl StoppedThread {
    /// Stops a thread, waiting `patience` for it, and lays the net.
    pub(super) fn stop(
        candidate: &Candidate,
        patience: Duration,
        limit: Duration,
    ) -> Result<Result<Self, Refusal>, InjectError> {
        let (pid, tid) = (candidate.pid, candidate.tid);
        // All that can be looked up before is, so that the thread stands still for less.
        let mappings = memory::mappings(pid, tid)?;
        if mappings.is_empty() {
            return Ok(Err(Refusal::for_now(InjectError::Gone { pid })));
        }
        let code = match Code::find(pid, tid, &mappings) {
            // As in a program that has just begun, before its libraries are loaded.
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

        // From here on an error, too, ends this thread of ours, which lets the other one go on: its registers are its own.
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
        // The whole of it is in one mapping with what the thread itself has on its stack, so it is the stack's room.
        let has_room = |mapping: &memory::Mapping| {
            mapping.is_private_and_writable() && mapping.range.start <= scratch_at && stack < mapping.range.end
        };
        if scratch_at == 0 || !mappings.iter().any(has_room) {
            return no_stack(stack - scratch_at);
        }
        let mut before = vec![0; (frame.at - scratch_at) as usize + frame.bytes.len()];
        // No code may rely on what is below the red zone: a signal would overwrite it as well. So a crash of ours
        // amid this leaves no harm, and the thread does not know of it yet.
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

    /// The process.
    pub fn pid(&self) -> Pid {
        self.tracee.pid
    }

    /// The thread.
    pub fn tid(&self) -> Pid {
        self.tracee.tid
    }

    /// From now on a call may take so long, if it is longer than before.
    pub fn allow(&mut self, limit: Duration) {
        self.limit = self.limit.max(limit);
    }

    /// Makes a system call. It should be one that does not wait; if it does, it is interrupted after the limit given for
    /// the thread to be stopped. `nanosleep` and its like must not be called: the kernel notes no more than one sleep of
    /// a thread, and the thread's own would go on as this one.
    ///
    /// # Errors
    /// It fails ([`InjectError::errno`]), does not return in time, or the thread is killed meanwhile.
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
        // If we are killed from here on, the call is made, and the net restores the thread.
        calling.write(&self.tracee)?;
        self.place = Place::Calling;
        let returned = self.run(call)?;
        self.place = Place::Caught;
        match u64::try_from(returned) {
            Ok(value) => Ok(value),
            // The kernel's errors are -4095 to -1; else it is an address.
            Err(_) if returned < -4095 => Ok(returned as u64),
            Err(_) => Err(InjectError::SystemCall {
                pid,
                tid,
                call,
                errno: Errno::from_raw_os_error(-returned as i32),
            }),
        }
    }

    /// Has the thread restore itself if it went on, and blocks its signals. Whatever the step, it may be the last of us.
    fn step_onto_net(&mut self) -> Result<(), InjectError> {
        // In `sigsuspend` and its like it has another mask, until it takes a signal. It is not to take one now and then
        // wait for it again: with its own mask the call begins again, and takes it.
        self.tracee.set_signal_mask(self.mask)?;
        // No call yet: a signal that it takes now is handled where calls have what they point to.
        let caught = self.original.caught(self.code.give_back, self.net.frame_at);
        caught.write(&self.tracee)?;
        self.place = Place::Caught;
        // Only now: the net unblocks them again.
        self.tracee.set_signal_mask(ALL_SIGNALS)
    }

    /// Lets the thread make the call that its registers are set for, and stops it at its end.
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
                    // It was interrupted as the process is stopped or continued: the kernel makes it again.
                    self.note_is_lost |= registers.go_on_by_note();
                }
                // The process is stopped or continued. This thread is still, which nobody sees; it keeps to it afterwards.
                Stop::Event => {}
                // The code is not there, or a debugger's: not a signal that was sent, as all those are blocked.
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
            // It may be stopped and continued without end.
            if signal == 0 && Instant::now() > until {
                self.place = Place::Halted;
                return Err(hangs);
            }
        }
    }

    /// Memory of the process, [`SCRATCH_BYTES`] from `at` on, that calls may point to: its address, for `at` 0.
    pub fn scratch(&self) -> u64 {
        self.net.scratch_at
    }

    /// Writes to it.
    ///
    /// # Errors
    /// The process has ended, or unmapped its stack.
    ///
    /// # Panics
    /// If that is not all within [`SCRATCH_BYTES`].
    pub fn write_scratch(&mut self, at: usize, bytes: &[u8]) -> Result<(), InjectError> {
        assert!(
            at + bytes.len() <= SCRATCH_BYTES,
            "{} bytes at {at} are past the scratch memory",
            bytes.len()
        );
        memory::write(self.tid(), self.net.scratch_at + at as u64, bytes)
    }

    /// Reads from it.
    ///
    /// # Errors
    /// The process has ended, or unmapped its stack.
    ///
    /// # Panics
    /// If that is not all within [`SCRATCH_BYTES`].
    pub fn read_scratch(&self, at: usize, to: &mut [u8]) -> Result<(), InjectError> {
        assert!(
            at + to.len() <= SCRATCH_BYTES,
            "{} bytes at {at} are past the scratch memory",
            to.len()
        );
        memory::read(self.tid(), self.net.scratch_at + at as u64, to)
    }

    /// Brings the thread back to where it was, and lets it go on. Returns for how long it stood still at most.
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
                // The mask first: if we are killed in between, the net is still there. Whatever the thread gets
                // then it handles on top of it.
                self.tracee.set_signal_mask(self.mask)?;
                // From here the kernel goes on to signals, and to the restart of the call that the thread was in, which
                // it tells by these registers.
                original.write(&self.tracee)?;
            }
        }
        // The net last: nothing leads to it any more.
        let restored = memory::write(self.tid(), self.net.scratch_at, &self.net.before);
        self.tracee.detach()?;
        restored
    }

    /// Lets the thread go on to where a stop by [`Tracee::interrupt`] is, in which it was at first.
    fn come_to_event(&self, from: Place) -> Result<(), InjectError> {
        let (pid, tid) = (self.pid(), self.tid());
        self.tracee.interrupt()?;
        if from != Place::Calling {
            self.tracee.resume(Resume::Freely, 0)?;
        }
        match first_stop(&self.tracee, Instant::now() + self.limit.max(BRING_BACK_LIMIT))? {
            Stop::Event => Ok(()),
            Stop::Ended => Err(InjectError::Gone { pid }),
            // The thread goes on by itself, as this one of ours ends.
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
            // After an error or a panic of the work, which is what is told.
            tracing::warn!("{error}; the thread restores itself");
        }
    }
}

/// Waits for the thread to stop on its way to user mode. A signal that comes before is delivered: it stops right after.
fn first_stop(tracee: &Tracee, until: Instant) -> Result<Stop, InjectError> {
    loop {
        let signal = match tracee.wait(until)? {
            Stop::Signal(signal) => signal,
            Stop::SystemCall => 0,
            stop => return Ok(stop),
        };
        // Any stop takes the place of the one that was asked for before.
        tracee.interrupt()?;
        tracee.resume(Resume::Freely, signal)?;
    }
}
