//! A server's use of the host's resources: memory and CPU time.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context;

use crate::migrate::cpu;

/// Interval at which the memory is read.
const INTERVAL: Duration = Duration::from_millis(2);

/// Returns a process's anonymous memory (RssAnon) in bytes, which excludes files and guest memory.
pub(super) fn memory_bytes(process: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: Option<u64> = kib.and_then(|kib| kib.trim().parse().ok());
    kib.map(|kib| kib << 10).with_context(|| format!("no RssAnon in {path}"))
}

/// A server's resource use during an attack.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Use {
    /// Peak anonymous memory, in bytes.
    pub(super) memory_bytes: u64,
    /// CPU time of all threads in seconds, including the kernel's threads that work for the server.
    pub(super) cpu_seconds: f64,
}

/// Sets a flag when it is dropped, even by a panic.
pub(super) struct Flag<'a>(pub(super) &'a AtomicBool);

impl Drop for Flag<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Measures a process's resource use during `action`.
pub(super) fn during<T>(process: u32, action: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, Use)> {
    let (stop, memory_bytes_max) = (AtomicBool::new(false), AtomicU64::new(memory_bytes(process)?));
    let before = cpu::of_process(process)?;
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                memory_bytes_max.fetch_max(memory_bytes(process).unwrap_or(0), Ordering::Relaxed);
                thread::sleep(INTERVAL);
            }
        });
        let _flag = Flag(&stop);
        action()
    })?;
    let used = Use { memory_bytes: memory_bytes_max.into_inner(), cpu_seconds: cpu::of_process(process)? - before };
    Ok((result, used))
}
