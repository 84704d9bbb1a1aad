//! Threads of a process, in the order in which they are tried, and the reasons not to use one.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, getpid};

use super::error::InjectError;

/// A thread that may be stopped, as it was a moment ago.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) pid: Pid,
    pub(super) tid: Pid,
    /// Priority, the lowest first. A stop of a thread with a low rank is fast, and disturbs the process little.
    rank: u8,
    /// Waits for memory during a system call: see [`Candidate::read`].
    is_in_fault: bool,
    status: Status,
}

/// Reason why a thread was not used.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) error: InjectError,
    /// The reason is temporary: it may disappear soon, and without any action.
    pub(super) is_temporary: bool,
}

impl Refusal {
    pub(super) fn temporary(error: InjectError) -> Self {
        Self { error, is_temporary: true }
    }

    pub(super) fn permanent(error: InjectError) -> Self {
        Self { error, is_temporary: false }
    }
}

/// Fields of `/proc/PID/task/TID/status` (proc(5)).
#[derive(Debug, Default)]
struct Status {
    state: u8,
    tracer: i32,
    filters: u32,
    has_shadow_stack: bool,
}

impl Status {
    /// Reads the status of a thread. Returns `None` if the thread has ended.
    fn read(task_directory: &str) -> Option<Self> {
        let text = fs::read_to_string(format!("{task_directory}/status")).ok()?;
        let mut status = Self::default();
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            match key {
                "State" => status.state = *value.as_bytes().first()?,
                "TracerPid" => status.tracer = value.parse().ok()?,
                "Seccomp" => status.filters = value.parse().ok()?,
                "x86_Thread_features" => status.has_shadow_stack = value.split(' ').any(|word| word == "shstk"),
                _ => {}
            }
        }
        (!matches!(status.state, b'Z' | b'X')).then_some(status)
    }
}

impl Candidate {
    /// Reads a thread. Returns `None` if it has ended, or is a kernel thread.
    fn read(pid: Pid, tid: Pid) -> Option<Self> {
        let task_directory = task_directory(pid, tid);
        let status = Status::read(&task_directory)?;
        if is_kernel_worker(&task_directory)? {
            return None;
        }
        let is_main = u8::from(pid == tid);
        let call = current_syscall(&task_directory);
        let waits_in = |name: &str| fs::read_to_string(format!("{task_directory}/wchan")).is_ok_and(|at| at == name);
        let in_fault = status.state == b'S' && waits_in("handle_userfault");
        // A fault in the kernel, as during a read into such memory, cannot be interrupted: the thread would retry in
        // a busy loop until the fault is resolved. A fault of a vCPU can be interrupted (Linux 6.1).
        let is_in_fault = in_fault && call.is_some_and(|call| call != libc::SYS_ioctl);
        let rank = match (status.state, call) {
            _ if in_fault => 8,
            (b'S', Some(libc::SYS_futex)) => is_main,
            // Usually a vCPU in KVM_RUN.
            (b'S', Some(libc::SYS_ioctl)) => 4 + is_main,
            (b'S', _) => 2 + is_main,
            (b'R', _) => 6 + is_main,
            (b'D', _) => 10 + is_main,
            _ => 5,
        };
        Some(Self { pid, tid, rank, is_in_fault, status })
    }

    /// Returns the reason not to use this thread, if there is one.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let (pid, tid) = (self.pid, self.tid);
        if self.status.tracer != 0 {
            return Some(traced(pid, tid, self.status.tracer));
        }
        if self.status.has_shadow_stack {
            return Some(Refusal::permanent(InjectError::ShadowStack { pid, tid }));
        }
        if self.status.filters != 0 {
            // QEMU's filter (-sandbox on) is a list of forbidden calls, none of which is needed here. The filter of
            // Larder's own processes (larder vm --confine) allows the calls that are needed. Strict mode (1) kills
            // for any call.
            let is_known = |program: &str| ["qemu", "larder"].iter().any(|known| program.starts_with(known));
            if self.status.filters != 2 || !is_known(&program_name(pid, tid)) {
                return Some(self.filtered());
            }
        }
        let (threads, limit) = (1, Duration::ZERO);
        self.is_in_fault.then(|| Refusal::temporary(InjectError::NotStopped { pid, threads, limit }))
    }

    /// Returns the reason not to make calls in a thread with a filter.
    pub(super) fn filtered(&self) -> Refusal {
        let (pid, tid) = (self.pid, self.tid);
        let program = program_name(pid, tid);
        Refusal::permanent(InjectError::Filtered { pid, tid, program })
    }

    /// Returns true if the number still belongs to a thread of this process.
    pub(super) fn exists(&self) -> bool {
        Path::new(&task_directory(self.pid, self.tid)).exists()
    }

    /// Returns true if the thread has ended, even if its number is not free yet.
    pub(super) fn has_ended(&self) -> bool {
        Status::read(&task_directory(self.pid, self.tid)).is_none()
    }

    /// Returns the reason why the kernel refuses tracing (EPERM).
    pub(super) fn trace_refusal(&self) -> Refusal {
        let (pid, tid) = (self.pid, self.tid);
        match Status::read(&task_directory(pid, tid)) {
            Some(Status { tracer: tracer @ 1.., .. }) => traced(pid, tid, tracer),
            Some(_) => {
                let (tried, takes) = ("trace it", rights_needed());
                Refusal::permanent(InjectError::PermissionDenied { pid, tid, tried, required: takes })
            }
            None => Refusal::temporary(InjectError::Exited { pid }),
        }
    }
}

/// Returns the threads of a process in the order in which they should be tried.
pub(super) fn candidates(pid: Pid) -> Result<Vec<Candidate>, InjectError> {
    let path = format!("/proc/{}/task", pid.as_raw_pid());
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(InjectError::Exited { pid }),
        Err(error) => return Err(InjectError::Unreadable { path, error }),
    };
    // A read error within the list means that the process is ending.
    let tids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    let mut found: Vec<Candidate> = tids.filter_map(|tid| Candidate::read(pid, tid)).collect();
    found.sort_by_key(|candidate| candidate.rank);
    let Some(first) = found.first() else {
        return Err(InjectError::Exited { pid });
    };
    if is_32_bit(pid, first.tid) {
        return Err(InjectError::Not64Bit { pid });
    }
    Ok(found)
}

/// Returns the error to report after all threads have been refused.
pub(super) fn combined_error(pid: Pid, limit: Duration, refusals: Vec<Refusal>) -> InjectError {
    let threads = refusals.len();
    let is_busy = |refusal: &Refusal| matches!(refusal.error, InjectError::NotStopped { .. });
    if refusals.iter().any(is_busy) {
        return InjectError::NotStopped { pid, threads, limit };
    }
    // Each thread has its own reason; that of the best candidate is as good as any. An ended thread says the least.
    let (ended, others): (Vec<_>, Vec<_>) =
        refusals.into_iter().partition(|refusal| matches!(refusal.error, InjectError::Exited { .. }));
    let first = others.into_iter().chain(ended).next();
    first.map_or(InjectError::Exited { pid }, |refusal| refusal.error)
}

/// Returns the rights that the kernel requires of a tracer (ptrace(2), "Ptrace access mode checking").
pub(super) fn rights_needed() -> String {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.ok().and_then(|scope| scope.trim().parse::<u8>().ok()).unwrap_or(0);
    match scope {
        0 => "CAP_SYS_PTRACE, or the same user and a dumpable process".into(),
        1 | 2 => format!("CAP_SYS_PTRACE, because /proc/sys/kernel/yama/ptrace_scope is {scope}"),
        _ => format!(
            "a lower /proc/sys/kernel/yama/ptrace_scope: it is {scope}, which forbids all tracing until the host is \
             rebooted"
        ),
    }
}

/// Returns the refusal of a thread that is traced by thread `tracer`.
fn traced(pid: Pid, tid: Pid, tracer: i32) -> Refusal {
    let status = fs::read_to_string(format!("/proc/{tracer}/status")).unwrap_or_default();
    let tgid = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    let by_pid = tgid.and_then(|tgid| tgid.trim().parse().ok()).unwrap_or(tracer);
    let name = fs::read_to_string(format!("/proc/{by_pid}/comm")).unwrap_or_default();
    let by = if name.is_empty() { "an unknown process".into() } else { name.trim_end().to_owned() };
    let error = InjectError::Traced { pid, tid, tracer_name: by, tracer_pid: by_pid };
    // Temporary if the tracer is this process: another injection, or an attempt whose thread has not quite ended. A
    // tracer that has disappeared is about to be detached.
    let is_temporary = by_pid == getpid().as_raw_pid() || status.is_empty();
    Refusal { error, is_temporary }
}

/// Returns the name of the program file that a process runs or, if that is unavailable, the process's own name.
fn program_name(pid: Pid, tid: Pid) -> String {
    let task_directory = task_directory(pid, tid);
    let file_name = fs::read_link(format!("{task_directory}/exe")).ok();
    let of_file = file_name.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    of_file.unwrap_or_else(|| {
        let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_pid())).unwrap_or_default();
        name.trim_end().to_owned()
    })
}

/// Returns true for a 32-bit program, by the class in the ELF header (elf(5)). A file that cannot be read is reported
/// later.
fn is_32_bit(pid: Pid, tid: Pid) -> bool {
    let mut start = [0; 5];
    let exe = File::open(format!("{}/exe", task_directory(pid, tid)));
    exe.and_then(|mut exe| exe.read_exact(&mut start)).is_ok() && start == *b"\x7fELF\x01"
}

/// Returns the number of the system call in which a thread waits, or `None` if it is in no call.
fn current_syscall(folder: &str) -> Option<i64> {
    let call = fs::read_to_string(format!("{folder}/syscall")).ok()?;
    let number = call.split(' ').next()?.trim_end().parse().ok()?;
    (number >= 0).then_some(number)
}

/// Returns true if the thread belongs to the process but never runs its code: a worker of io_uring or vhost.
fn is_kernel_worker(folder: &str) -> Option<bool> {
    const PF_IO_WORKER: u64 = 0x10;
    const PF_USER_WORKER: u64 = 0x4000;
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    // The name, in parentheses, may contain any characters. After it: state, parent, group, session, terminal, its
    // group, flags (proc(5)).
    let (_, fields) = stat.rsplit_once(") ")?;
    let flags: u64 = fields.split(' ').nth(6)?.parse().ok()?;
    Some(flags & (PF_IO_WORKER | PF_USER_WORKER) != 0)
}

fn task_directory(pid: Pid, tid: Pid) -> String {
    format!("/proc/{}/task/{}", pid.as_raw_pid(), tid.as_raw_pid())
}
