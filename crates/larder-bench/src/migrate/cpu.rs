//! The CPU time of other processes.

use std::fs;
use std::io;

use anyhow::Context;
use larder_bench::campaign::migration::vm::Vm;
use serde_json::json;

/// Returns the CPU seconds of all threads of a process, including those that have ended. A zombie process still has
/// its time.
pub(crate) fn of_process(id: u32) -> anyhow::Result<f64> {
    let mut clock = 0;
    // SAFETY: `clock` is valid for the result.
    let error = unsafe { libc::clock_getcpuclockid(id as libc::pid_t, &raw mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error))
            .with_context(|| format!("reading the CPU time of process {id}"));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the result.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("reading the CPU time of process {id}"));
    }
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

/// Threads of a QEMU that are its guest's vCPUs.
pub(super) struct VcpuThreads(Vec<u64>);

impl VcpuThreads {
    pub(super) fn of(vm: &mut Vm) -> anyhow::Result<Self> {
        let list = vm.ask("query-cpus-fast", &json!({}))?;
        let threads = list.as_array().context("query-cpus-fast returned no list")?;
        let numbers: Option<_> = threads.iter().map(|cpu| cpu["thread-id"].as_u64()).collect();
        Ok(Self(numbers.context("query-cpus-fast returned no thread IDs")?))
    }

    /// Returns QEMU's CPU seconds without those of its guest's vCPUs. A missing thread is one of an aborted
    /// destination, whose vCPUs have not run.
    pub(super) fn others(&self, vm: &Vm) -> anyhow::Result<f64> {
        let qemu = vm.process.id();
        let mut seconds = of_process(qemu)?;
        for thread in &self.0 {
            let path = format!("/proc/{qemu}/task/{thread}/schedstat");
            let text = match fs::read_to_string(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
                text => text.with_context(|| format!("reading {path}"))?,
            };
            let nanoseconds = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
            seconds -=
                nanoseconds.with_context(|| format!("{path} contains '{text}', not a number of nanoseconds"))? / 1e9;
        }
        Ok(seconds)
    }
}
