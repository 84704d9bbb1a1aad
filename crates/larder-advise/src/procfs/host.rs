//! Counters of the whole host.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Procfs, ReadError, ReadResult, malformed};

/// CPU times since the host was booted, in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// CPUs that are online.
    pub cpus: u32,
    /// Idle ticks of all CPUs together.
    pub idle: u64,
    /// Ticks of all CPUs together that a hypervisor below this host took.
    pub stolen: u64,
    /// All ticks of all CPUs together.
    pub all: u64,
}

/// Memory of the host, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Total memory.
    pub total: u64,
    /// Memory that is available without swapping.
    pub available: u64,
    /// Size of the kernel's swap.
    pub swap_total: u64,
    /// Free part of the kernel's swap.
    pub swap_free: u64,
}

/// Resource for which the kernel counts the time that some task waited (PSI, `some`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    /// A CPU.
    Cpu,
    /// Memory that was reclaimed.
    Memory,
    /// Disks.
    Io,
}

impl Resource {
    fn file(self) -> &'static str {
        match self {
            Self::Cpu => "pressure/cpu",
            Self::Memory => "pressure/memory",
            Self::Io => "pressure/io",
        }
    }
}

/// Device number of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceNumber {
    /// Major number, which identifies the driver.
    pub major: u32,
    /// Minor number, which identifies the device of that driver.
    pub minor: u32,
}

/// Counters of a block device since the host was booted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Name, as in `/dev`.
    pub name: String,
    /// Completed reads and writes.
    pub requests: u64,
    /// Total time of these requests, in milliseconds.
    pub request_ms: u64,
    /// Time in which requests were in flight, in milliseconds.
    pub busy_ms: u64,
}

impl Procfs {
    pub(crate) fn cpu_times(&self) -> ReadResult<CpuTimes> {
        let text = self.text("stat")?;
        let first = text.lines().find_map(|line| line.strip_prefix("cpu "));
        let malformed_stat = |problem: &str| malformed(self.path("stat"), problem);
        let ticks: Vec<u64> = first
            .ok_or_else(|| malformed_stat("no line for all CPUs"))?
            .split_whitespace()
            .map_while(|field| field.parse().ok())
            .collect();
        // Fields: user, nice, system, idle, iowait, irq, softirq, steal. The time of guests is included in user and
        // nice.
        let [_, _, _, idle, waiting, ..] = ticks[..] else {
            return Err(malformed_stat("too few numbers"));
        };
        let cpus = text.lines().filter(|line| is_cpu(line)).count();
        Ok(CpuTimes {
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX).max(1),
            idle: idle.saturating_add(waiting),
            stolen: ticks.get(7).copied().unwrap_or_default(),
            all: ticks.iter().take(8).fold(0, |all, ticks| all.saturating_add(*ticks)),
        })
    }

    pub(crate) fn memory(&self) -> ReadResult<Memory> {
        let text = self.text("meminfo")?;
        let field = |name: &str| {
            kib_of(&text, name).ok_or_else(|| malformed(self.path("meminfo"), &format!("{name} is missing")))
        };
        Ok(Memory {
            total: field("MemTotal")?,
            available: field("MemAvailable")?,
            swap_total: field("SwapTotal").unwrap_or_default(),
            swap_free: field("SwapFree").unwrap_or_default(),
        })
    }

    /// Returns the total time for which some task waited for the resource.
    pub(crate) fn pressure(&self, resource: Resource) -> ReadResult<Duration> {
        let text = match self.text(resource.file()) {
            // The kernel was started with psi=0.
            Err(ReadError::Os { path, .. }) => {
                return Err(malformed(path, "it cannot be read; the kernel may be started with psi=0"));
            }
            text => text?,
        };
        let some = text.lines().find_map(|line| line.strip_prefix("some "));
        let total = some.and_then(|line| line.split_whitespace().find_map(|field| field.strip_prefix("total=")));
        let us = total.and_then(|us| us.parse().ok());
        us.map(Duration::from_micros).ok_or_else(|| malformed(self.path(resource.file()), "no total of `some`"))
    }

    /// Returns the number of pages that were read back from the kernel's swap.
    pub(crate) fn swapped_in(&self) -> ReadResult<u64> {
        let text = self.text("vmstat")?;
        let pages = text.lines().find_map(|line| line.strip_prefix("pswpin "));
        pages
            .and_then(|pages| pages.trim().parse().ok())
            .ok_or_else(|| malformed(self.path("vmstat"), "pswpin is missing"))
    }

    pub(crate) fn devices(&self) -> ReadResult<BTreeMap<DeviceNumber, DeviceCounts>> {
        Ok(self.text("diskstats")?.lines().filter_map(device).collect())
    }
}

/// Returns whether a line of `/proc/stat` is about one CPU: `cpu0 ...`.
fn is_cpu(line: &str) -> bool {
    let number = line.strip_prefix("cpu").and_then(|rest| rest.split(' ').next());
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns the bytes of a line `NAME:   123 kB`.
pub(super) fn kib_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

/// Parses a line of diskstats: major, minor, name; then for reads: count, merged, sectors, ms; the same for writes;
/// in flight; ms busy.
fn device(line: &str) -> Option<(DeviceNumber, DeviceCounts)> {
    let mut fields = line.split_whitespace();
    let number = DeviceNumber { major: fields.next()?.parse().ok()?, minor: fields.next()?.parse().ok()? };
    let name = fields.next()?.to_owned();
    let counts: Vec<u64> = fields.map_while(|field| field.parse().ok()).take(10).collect();
    let [reads, _, _, reading, writes, _, _, writing, _, busy_ms] = counts[..] else {
        return None;
    };
    Some((
        number,
        DeviceCounts {
            name,
            requests: reads.saturating_add(writes),
            request_ms: reading.saturating_add(writing),
            busy_ms,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn procfs(files: &[(&str, &str)]) -> (tempfile::TempDir, Procfs) {
        let directory = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        let procfs = Procfs::at(directory.path());
        (directory, procfs)
    }

    #[test]
    fn kernel_counters_are_parsed() {
        let (_directory, procfs) = procfs(&[
            ("stat", "cpu  10 1 5 70 4 2 3 5 9 0\ncpu0 1 2 3\ncpu1 1 2 3\nctxt 5\ncpufreq 1\n"),
            (
                "meminfo",
                "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\nSwapTotal: 8 kB\nSwapFree: 2 kB\n",
            ),
            ("pressure/memory", "some avg10=1.00 avg60=0.00 avg300=0.00 total=2500\nfull avg10=0.00 total=7\n"),
            ("vmstat", "pswpinx 4\npswpin 12\npswpout 3\n"),
            ("diskstats", " 8 0 sda 100 0 800 250 50 0 400 750 0 600 900 0 0 0 0 0 0\n 8 1 sda1 1 2\n"),
        ]);
        let cpu = procfs.cpu_times().expect("is read");
        assert_eq!((cpu.cpus, cpu.idle, cpu.stolen, cpu.all), (2, 74, 5, 100));
        let memory = procfs.memory().expect("is read");
        assert_eq!((memory.total, memory.available), (1000 << 10, 600 << 10));
        assert_eq!((memory.swap_total, memory.swap_free), (8 << 10, 2 << 10));
        assert_eq!(procfs.pressure(Resource::Memory), Ok(Duration::from_micros(2500)));
        assert_eq!(procfs.swapped_in(), Ok(12));
        let devices = procfs.devices().expect("is read");
        let sda = &devices[&DeviceNumber { major: 8, minor: 0 }];
        assert_eq!((sda.requests, sda.request_ms, sda.busy_ms), (150, 1000, 600));
        assert_eq!(devices.len(), 1, "a line that is cut off is left out");
    }

    #[test]
    fn missing_kernel_files_are_named() {
        let (directory, procfs) =
            procfs(&[("stat", "nonsense\n"), ("meminfo", "MemTotal: 4 kB\n"), ("pressure/io", "x\n")]);
        let why = |unread: ReadError| unread.to_string().replace(&directory.path().display().to_string(), "/proc");
        assert_eq!(why(procfs.pressure(Resource::Cpu).unwrap_err()), "this kernel has no /proc/pressure/cpu");
        assert_eq!(
            why(procfs.pressure(Resource::Io).unwrap_err()),
            "/proc/pressure/io cannot be parsed: no total of `some`"
        );
        assert_eq!(why(procfs.cpu_times().unwrap_err()), "/proc/stat cannot be parsed: no line for all CPUs");
        assert_eq!(why(procfs.memory().unwrap_err()), "/proc/meminfo cannot be parsed: MemAvailable is missing");
    }
}
