//! seccomp: an allow list of the system calls that a running server makes.

use std::collections::BTreeMap;

use libc::{
    SYS_clone, SYS_clone3, SYS_fcntl, SYS_ioctl, SYS_kcmp, SYS_mmap, SYS_mprotect, SYS_prctl, SYS_prlimit64,
    SYS_socket, SYS_socketpair, SYS_tgkill,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use super::{ConfineError, Needs};

/// Calls that are allowed with any arguments: the open descriptors and Landlock limit what they can reach.
#[rustfmt::skip]
const ALLOWED_CALLS: &[libc::c_long] = &[
    // Descriptors.
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
    libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_close, libc::SYS_lseek,
    libc::SYS_dup, libc::SYS_dup3, libc::SYS_fstat, libc::SYS_flock, libc::SYS_ftruncate,
    libc::SYS_fallocate, libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_sync_file_range, libc::SYS_fadvise64,
    libc::SYS_eventfd2, libc::SYS_pipe2, libc::SYS_memfd_create, libc::SYS_timerfd_create, libc::SYS_timerfd_settime,
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_ppoll,
    libc::SYS_io_uring_enter,
    // Paths: the process's own directories, and files for host name lookup.
    libc::SYS_openat, libc::SYS_newfstatat, libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_readlinkat,
    libc::SYS_name_to_handle_at, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_getcwd, libc::SYS_getdents64, libc::SYS_mkdirat,
    libc::SYS_unlinkat, libc::SYS_renameat, libc::SYS_renameat2,
    // The timestamp of a guest memory file is set to notify the pager.
    libc::SYS_utimensat,
    // Existing sockets; bind is not allowed any more.
    libc::SYS_connect, libc::SYS_accept4, libc::SYS_sendto, libc::SYS_sendmsg, libc::SYS_sendmmsg, libc::SYS_recvfrom,
    libc::SYS_recvmsg, libc::SYS_recvmmsg, libc::SYS_shutdown, libc::SYS_getsockname, libc::SYS_getpeername,
    libc::SYS_getsockopt, libc::SYS_setsockopt,
    // Memory; mmap and mprotect have rules below.
    libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_mincore, libc::SYS_msync, libc::SYS_brk,
    libc::SYS_membarrier,
    // Threads; clone has a rule below.
    libc::SYS_futex, libc::SYS_set_robust_list, libc::SYS_rseq, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_gettid,
    libc::SYS_getpid, libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_getcpu, libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // Clocks, and queries about the process itself.
    libc::SYS_nanosleep, libc::SYS_clock_nanosleep, libc::SYS_clock_gettime, libc::SYS_clock_getres,
    libc::SYS_gettimeofday, libc::SYS_getrandom, libc::SYS_getrusage, libc::SYS_uname, libc::SYS_sysinfo,
    libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid,
    // The other filter refuses this with ENOSYS, which makes the C library fall back to clone.
    libc::SYS_clone3,
];

/// Older calls that the C library still uses on this architecture.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_LEGACY_CALLS: &[libc::c_long] = &[
    libc::SYS_open, libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_readlink, libc::SYS_mkdir,
    libc::SYS_unlink, libc::SYS_rename, libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_dup2, libc::SYS_time,
];

#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_BESIDES: &[libc::c_long] = &[];

/// Permitted ioctls: non-blocking mode, bytes available, terminal check, and properties of a block device; also
/// creating a userfaultfd, which the pager does in this process, on a device that it passes for that.
#[rustfmt::skip]
const IOCTLS: [u64; 9] = [
    libc::FIONBIO, libc::FIONREAD, libc::TCGETS,
    0x125e, // BLKROGET
    0x1260, // BLKGETSIZE
    0x1268, // BLKSSZGET
    0x127b, // BLKPBSZGET
    0x8008_1272, // BLKGETSIZE64
    0xaa00, // USERFAULTFD_IOC_NEW
];

/// Permitted fcntl commands: flags, duplication, locks of open file descriptions, and seals of a memfd. Commands that
/// cause signals are excluded (F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE).
const FCNTLS: [libc::c_int; 10] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// Clone flags that a thread has, and a process does not.
const THREAD_CLONE_FLAGS: u64 = (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as u64;

/// Mask of a socket's type without its flags.
const TYPE_MASK: u64 = 0xf;

/// Returns the filters, to be applied in this order.
pub(super) fn filters(needs: &Needs) -> Result<[BpfProgram; 2], ConfineError> {
    let filter_error = |error: seccompiler::BackendError| ConfineError::Seccomp(error.to_string());
    let rules = rules(needs).map_err(filter_error)?;
    let no_clone3 = BTreeMap::from([(SYS_clone3, Vec::new())]);
    let deny = SeccompAction::Errno(libc::EPERM as u32);
    let unsupported = SeccompAction::Errno(libc::ENOSYS as u32);
    let filter = |rules, mismatch_action, match_action| -> Result<BpfProgram, seccompiler::BackendError> {
        let architecture = std::env::consts::ARCH.try_into()?;
        SeccompFilter::new(rules, mismatch_action, match_action, architecture)?.try_into()
    };
    Ok([
        filter(no_clone3, SeccompAction::Allow, unsupported).map_err(filter_error)?,
        filter(rules, deny, SeccompAction::Allow).map_err(filter_error)?,
    ])
}

/// Applies the filters to all threads.
pub(super) fn apply(filters: &[BpfProgram]) -> Result<(), ConfineError> {
    for filter in filters {
        seccompiler::apply_filter_all_threads(filter).map_err(|error| ConfineError::Seccomp(error.to_string()))?;
    }
    Ok(())
}

type Rules = BTreeMap<libc::c_long, Vec<SeccompRule>>;

fn rules(needs: &Needs) -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = BTreeMap::new();
    for call in ALLOWED_CALLS.iter().chain(ALLOWED_LEGACY_CALLS) {
        rules.insert(*call, Vec::new());
    }
    // Only threads can be created, and no memory can become executable that was not before.
    let threads = arg_masked_eq(0, THREAD_CLONE_FLAGS, THREAD_CLONE_FLAGS)?;
    rules.insert(SYS_clone, vec![SeccompRule::new(vec![threads])?]);
    for call in [SYS_mmap, SYS_mprotect] {
        let not_executable = arg_masked_eq(2, libc::PROT_EXEC as u64, 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![not_executable])?]);
    }
    // Only this process's own threads may be signalled.
    let own_pid = arg_eq(0, u64::from(std::process::id()))?;
    rules.insert(SYS_tgkill, vec![SeccompRule::new(vec![own_pid.clone()])?]);
    // Comparison of two descriptors' open file descriptions (KCMP_FILE) within this process.
    let own_descriptors = vec![own_pid, arg_eq(1, u64::from(std::process::id()))?, arg_eq(2, 0)?];
    rules.insert(SYS_kcmp, vec![SeccompRule::new(own_descriptors)?]);
    // Setting thread names, and reading own limits.
    let name = arg_eq(0, libc::PR_SET_NAME as u64)?;
    rules.insert(SYS_prctl, vec![SeccompRule::new(vec![name])?]);
    let reads_limits = vec![arg_eq(0, 0)?, arg_eq_64(2, 0)?];
    // The limit of private memory rises with a larger cache (`data_limit`).
    let sets_data_limit = vec![arg_eq(0, 0)?, arg_eq(1, u64::from(libc::RLIMIT_DATA))?];
    rules.insert(SYS_prlimit64, vec![SeccompRule::new(reads_limits)?, SeccompRule::new(sets_data_limit)?]);
    let fcntls: Result<Vec<_>, _> = FCNTLS.iter().map(|it| SeccompRule::new(vec![arg_eq(1, *it as u64)?])).collect();
    let mut fcntls = fcntls?;
    // O_ASYNC would cause signals.
    let without_signals = arg_masked_eq(2, libc::O_ASYNC as u64, 0)?;
    fcntls.push(SeccompRule::new(vec![arg_eq(1, libc::F_SETFL as u64)?, without_signals])?);
    rules.insert(SYS_fcntl, fcntls);
    let ioctls: Result<Vec<_>, _> = IOCTLS.iter().map(|it| SeccompRule::new(vec![arg_eq(1, *it)?])).collect();
    rules.insert(SYS_ioctl, ioctls?);
    let sockets: Result<Vec<_>, _> = sockets(needs)
        .into_iter()
        .map(|(family, kind)| {
            SeccompRule::new(vec![arg_eq(0, family as u64)?, arg_masked_eq(1, TYPE_MASK, kind as u64)?])
        })
        .collect();
    let sockets = sockets?;
    // An empty list of rules for a call would allow all of it.
    if !sockets.is_empty() {
        rules.insert(SYS_socket, sockets);
    }
    // Pairs are connected only to each other: the pager passes descriptors over one, and the opener answers on one.
    let pairs: Result<Vec<_>, _> = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET]
        .into_iter()
        .map(|kind| SeccompRule::new(vec![arg_eq(0, libc::AF_UNIX as u64)?, arg_masked_eq(1, TYPE_MASK, kind as u64)?]))
        .collect();
    rules.insert(SYS_socketpair, pairs?);
    Ok(rules)
}

/// Returns families and types of the sockets that may still be created.
fn sockets(needs: &Needs) -> Vec<(i32, i32)> {
    // The sockets to the service manager and to the opener exist already. A new unix socket could be connected to any
    // path, such as another VM's socket or the journal's.
    let mut all = Vec::new();
    let internet = [libc::AF_INET, libc::AF_INET6];
    if !needs.ports.is_empty() {
        all.extend(internet.map(|family| (family, libc::SOCK_STREAM)));
    }
    if needs.resolves_names {
        all.extend(internet.map(|family| (family, libc::SOCK_DGRAM)));
    }
    all
}

fn arg_eq(argument: u8, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn arg_eq_64(argument: u8, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
}

fn arg_masked_eq(argument: u8, mask: u64, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value)
}

#[cfg(test)]
mod tests {
    use larder_block::event_loop::SocketAddress;

    use super::*;

    #[test]
    fn only_needed_socket_types_are_allowed() {
        let mut needs = Needs::default();
        assert_eq!(sockets(&needs), []);
        let all = rules(&needs).expect("they can be made");
        assert!(!all.contains_key(&SYS_socket), "none is made, so none is allowed");
        let server = |host: &str| SocketAddress::Tcp { host: host.to_owned(), port: 10809 };
        needs.add_nbd_server(&server("192.0.2.1"));
        assert_eq!(sockets(&needs).len(), 2);
        needs.add_nbd_server(&server("2001:db8::1"));
        assert_eq!(sockets(&needs).len(), 2);
        needs.add_nbd_server(&server("store.invalid"));
        assert_eq!(sockets(&needs).len(), 4);
        needs.add_nbd_server(&SocketAddress::Unix("/run/nbd".into()));
        assert_eq!(sockets(&needs).len(), 4, "the opener connects to it");
        filters(&needs).expect("they can be made");
    }
}
