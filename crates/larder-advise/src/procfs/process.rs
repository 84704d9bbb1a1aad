//! Counters of a process and of its threads.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::host::{DeviceNumber, kib_of};
use super::{Procfs, ReadError, ReadResult, malformed, read_error};

/// Process identity, which differs when the PID is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId {
    /// Process ID.
    pub pid: i32,
    /// Start time, in clock ticks since the host was booted.
    pub started: u64,
}

/// Times since a thread was started, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// Time on a CPU.
    pub run: u64,
    /// Time in a run queue.
    pub wait: u64,
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Resident memory.
    pub resident: u64,
    /// Proportional share of the resident memory (PSS); only from `smaps_rollup`.
    pub proportional: Option<u64>,
    /// Memory in the kernel's swap.
    pub swapped: u64,
}

impl Procfs {
    /// Returns the IDs of all visible processes.
    pub(crate) fn processes(&self) -> Vec<i32> {
        numbers(&self.path(""))
    }

    fn process_directory(&self, pid: i32) -> PathBuf {
        self.path(pid.to_string())
    }

    pub(crate) fn id(&self, pid: i32) -> ReadResult<ProcessId> {
        let directory = self.process_directory(pid);
        let text = self.process_text(&directory, "stat")?;
        // The name may contain spaces and parentheses, so fields are counted from the last parenthesis: first the
        // state, and as the 20th field from there, the 22nd of the line, the start time.
        let after_name = text.rsplit_once(')').map_or("", |(_, behind)| behind);
        if after_name.trim_start().starts_with(['Z', 'X']) {
            // A zombie has ended, although its parent has not reaped it yet.
            return Err(ReadError::Exited);
        }
        let started = after_name.split_whitespace().nth(19).and_then(|ticks| ticks.parse().ok());
        let started = started.ok_or_else(|| malformed(directory.join("stat"), "the start time"))?;
        Ok(ProcessId { pid, started })
    }

    /// Returns the user ID of the process.
    pub(crate) fn owner(&self, pid: i32) -> Option<u32> {
        Some(fs::metadata(self.process_directory(pid)).ok()?.uid())
    }

    /// Returns the name that the process gave itself, as the kernel stores it: at most 15 bytes.
    pub(crate) fn name(&self, pid: i32) -> ReadResult<String> {
        name_in(self, &self.process_directory(pid))
    }

    /// Returns the file name of the process's program, even if the file was replaced since.
    pub(crate) fn program(&self, pid: i32) -> Option<String> {
        let path = fs::read_link(self.process_directory(pid).join("exe")).ok()?;
        let name = path.file_name()?.to_string_lossy().into_owned();
        Some(name.strip_suffix(" (deleted)").unwrap_or(&name).to_owned())
    }

    pub(crate) fn working_directory(&self, pid: i32) -> Option<PathBuf> {
        fs::read_link(self.process_directory(pid).join("cwd")).ok()
    }

    /// Returns the words of the command line; none for a kernel thread or a zombie.
    pub(crate) fn command_line(&self, pid: i32) -> ReadResult<Vec<OsString>> {
        let directory = self.process_directory(pid);
        let path = directory.join("cmdline");
        let bytes = fs::read(&path).map_err(|error| read_error(&path, &error, || ReadError::Exited))?;
        let words = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let words = words.split(|byte| *byte == 0);
        Ok(words.map(|word| OsString::from_vec(word.to_vec())).collect())
    }

    /// Returns the IDs of the process's threads.
    pub(crate) fn threads(&self, pid: i32) -> ReadResult<Vec<i32>> {
        let threads = numbers(&self.process_directory(pid).join("task"));
        match threads.is_empty() {
            true => Err(ReadError::Exited),
            false => Ok(threads),
        }
    }

    fn thread_directory(&self, pid: i32, thread: i32) -> PathBuf {
        self.process_directory(pid).join("task").join(thread.to_string())
    }

    pub(crate) fn thread_name(&self, pid: i32, thread: i32) -> ReadResult<String> {
        name_in(self, &self.thread_directory(pid, thread))
    }

    /// Reads `schedstat`, which exists in kernels that were built with `CONFIG_SCHED_INFO`. It does not depend on
    /// `sched_schedstats`.
    pub(crate) fn thread_times(&self, pid: i32, thread: i32) -> ReadResult<ThreadTimes> {
        let directory = self.thread_directory(pid, thread);
        let text = self.process_text(&directory, "schedstat")?;
        let mut words = text.split_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(run)), Some(Ok(wait))) => Ok(ThreadTimes { run, wait }),
            _ => Err(malformed(directory.join("schedstat"), "two times in nanoseconds")),
        }
    }

    /// Reads `smaps_rollup` if that is permitted, otherwise `status`. `smaps_rollup` walks the page tables once,
    /// which takes about a second for 100 GiB in small pages; the process keeps running meanwhile.
    pub(crate) fn footprint(&self, pid: i32) -> ReadResult<Footprint> {
        let directory = self.process_directory(pid);
        if let Ok(text) = self.process_text(&directory, "smaps_rollup")
            && let (Some(resident), Some(proportional)) = (kib_of(&text, "Rss"), kib_of(&text, "Pss"))
        {
            // Pages of the hugetlb pool are in neither field.
            let kib_field = |name| kib_of(&text, name).unwrap_or_default();
            let pool = kib_field("Private_Hugetlb").saturating_add(kib_field("Shared_Hugetlb"));
            return Ok(Footprint {
                resident: resident.saturating_add(pool),
                proportional: Some(proportional.saturating_add(pool)),
                swapped: kib_of(&text, "SwapPss").unwrap_or_else(|| kib_field("Swap")),
            });
        }
        let text = self.process_text(&directory, "status")?;
        let resident = kib_of(&text, "VmRSS").ok_or_else(|| malformed(directory.join("status"), "VmRSS is missing"))?;
        Ok(Footprint {
            resident: resident.saturating_add(kib_of(&text, "HugetlbPages").unwrap_or_default()),
            proportional: None,
            swapped: kib_of(&text, "VmSwap").unwrap_or_default(),
        })
    }

    /// Returns the block devices that contain its open files, or are opened themselves.
    pub(crate) fn devices_of(&self, pid: i32) -> ReadResult<BTreeSet<DeviceNumber>> {
        let path = self.process_directory(pid).join("fd");
        let entries = fs::read_dir(&path).map_err(|error| read_error(&path, &error, || ReadError::Exited))?;
        let number = |entry: fs::DirEntry| {
            // Pipes and sockets are skipped.
            let file = fs::metadata(entry.path()).ok()?;
            let kind = rustix::fs::FileType::from_raw_mode(file.mode());
            let device = match kind {
                rustix::fs::FileType::BlockDevice => file.rdev(),
                rustix::fs::FileType::RegularFile => file.dev(),
                _ => return None,
            };
            Some(DeviceNumber { major: rustix::fs::major(device), minor: rustix::fs::minor(device) })
        };
        Ok(entries.flatten().filter_map(number).collect())
    }
}

fn name_in(procfs: &Procfs, directory: &Path) -> ReadResult<String> {
    let text = procfs.process_text(directory, "comm")?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Returns the entries of a directory whose names are numbers, in order.
fn numbers(directory: &Path) -> Vec<i32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut numbers: Vec<i32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        directory: tempfile::TempDir,
        procfs: Procfs,
    }

    impl Fixture {
        fn new(files: &[(&str, &[u8])]) -> Self {
            let directory = tempfile::tempdir().expect("a folder");
            let procfs = Procfs::at(directory.path());
            let fixture = Self { directory, procfs };
            for (name, bytes) in files {
                let path = fixture.directory.path().join(name);
                fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
                fs::write(path, bytes).expect("a file");
            }
            fixture
        }

        /// Returns the message, with `/proc` in place of the directory.
        fn message(&self, unread: ReadError) -> String {
            unread.to_string().replace(&self.directory.path().display().to_string(), "/proc")
        }
    }

    /// Rest of a `stat` line after the name: state, 18 more fields, then the start time.
    const AFTER_NAME: &str = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 5 6\n";

    #[test]
    fn unusual_process_names_are_parsed() {
        for name in ["qemu-system-x86", "a) S 1 (b", ") ) )", ""] {
            let stat = format!("7 ({name}) {AFTER_NAME}");
            let comm = format!("{name}\n");
            let fixture = Fixture::new(&[("7/stat", stat.as_bytes()), ("7/comm", comm.as_bytes())]);
            assert_eq!(fixture.procfs.id(7), Ok(ProcessId { pid: 7, started: 4242 }), "{name}");
            assert_eq!(fixture.procfs.name(7).as_deref(), Ok(name));
        }
        let fixture = Fixture::new(&[("7/comm", b"a\nb\xff\n"), ("7/stat", b"7 (a) S 1\n")]);
        assert_eq!(fixture.procfs.name(7).as_deref(), Ok("a\nb\u{fffd}"));
        assert_eq!(fixture.message(fixture.procfs.id(7).unwrap_err()), "/proc/7/stat cannot be parsed: the start time");
    }

    #[test]
    fn ended_process_differs_from_missing_file() {
        let zombie = AFTER_NAME.replacen('S', "Z", 1);
        let zombie = format!("5 (a) {zombie}");
        let fixture =
            Fixture::new(&[("7/task/8/comm", b"CPU 0/KVM\n"), ("7/comm", b"x\n"), ("5/stat", zombie.as_bytes())]);
        let procfs = &fixture.procfs;
        assert_eq!(procfs.thread_times(7, 9), Err(ReadError::Exited));
        assert_eq!(procfs.threads(6), Err(ReadError::Exited));
        assert_eq!(procfs.id(6), Err(ReadError::Exited));
        assert_eq!(procfs.id(5), Err(ReadError::Exited), "it is not waited for");
        assert_eq!(procfs.command_line(6), Err(ReadError::Exited));
        assert_eq!(procfs.threads(7), Ok(vec![8]));
        assert_eq!(
            fixture.message(procfs.thread_times(7, 8).unwrap_err()),
            "this kernel has no /proc/7/task/8/schedstat"
        );
    }

    #[test]
    fn thread_times_and_command_line_parse() {
        let fixture = Fixture::new(&[
            ("7/task/8/schedstat", b"1500 2500 12\n"),
            ("7/task/9/schedstat", b"nonsense\n"),
            ("7/cmdline", b"/usr/bin/qemu-system-x86_64\0-name\0a b\0\0-m\0\x31G\0"),
            ("8/cmdline", b""),
        ]);
        let procfs = &fixture.procfs;
        assert_eq!(procfs.thread_times(7, 8), Ok(ThreadTimes { run: 1500, wait: 2500 }));
        assert!(matches!(procfs.thread_times(7, 9), Err(ReadError::Malformed { .. })));
        let words = procfs.command_line(7).expect("is read");
        assert_eq!(words, ["/usr/bin/qemu-system-x86_64", "-name", "a b", "", "-m", "1G"]);
        assert_eq!(procfs.command_line(8), Ok(Vec::new()));
    }

    #[test]
    fn footprint_prefers_smaps_rollup() {
        let rollup = b"55d-7ff ---p 00000000 00:00 0 [rollup]\nRss: 100 kB\nPss: 80 kB\nPss_Dirty: 7 kB\n\
            Private_Hugetlb: 10 kB\nShared_Hugetlb: 20 kB\nSwap: 9 kB\nSwapPss: 4 kB\n";
        let status = b"Name:\tVmRSS: 1 kB\nVmRSS:\t     100 kB\nVmSwap:\t 3 kB\nHugetlbPages:\t 8 kB\n";
        let fixture = Fixture::new(&[("7/smaps_rollup", rollup), ("7/status", status), ("8/status", status)]);
        let kib = |kib: u64| kib << 10;
        let expected = Footprint { resident: kib(130), proportional: Some(kib(110)), swapped: kib(4) };
        assert_eq!(fixture.procfs.footprint(7), Ok(expected));
        let expected = Footprint { resident: kib(108), proportional: None, swapped: kib(3) };
        assert_eq!(fixture.procfs.footprint(8), Ok(expected));
    }
}
