//! `larder memory attach`, and a process that verifies its own memory: shared by the pager's campaigns and its tests.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use larder_vm::control::fetch_memory;
use larder_vm::control::memory::MemoryState;

use super::process::{Process, killed_with_parent};

/// Limit for operations that may be slow on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Poll interval while waiting for a condition.
const LOOK: Duration = Duration::from_millis(5);

/// Command line of `larder memory attach`.
#[derive(Clone, Debug)]
pub struct Attach {
    /// Command prefix that stands before the program.
    before: Vec<OsString>,
    larder: PathBuf,
    control: PathBuf,
    words: Vec<OsString>,
}

impl Attach {
    /// Attaches to process `pid`, with the control socket in `directory`, and further arguments.
    pub fn new(larder: &Path, directory: &Path, pid: u32, arguments: &[&str]) -> Self {
        let pid = pid.to_string();
        Self::of(larder, directory, &[&["--pid", &pid], arguments].concat())
    }

    /// Attaches to the process that `words` selects, with the control socket in `directory`.
    pub fn of(larder: &Path, directory: &Path, arguments: &[&str]) -> Self {
        Self {
            before: Vec::new(),
            larder: larder.to_owned(),
            control: directory.join("control"),
            words: arguments.iter().map(OsString::from).collect(),
        }
    }

    /// Adds a prefix: a program with its arguments, which executes Larder.
    pub fn by(mut self, arguments: &[&str]) -> Self {
        self.before = arguments.iter().map(OsString::from).collect();
        self
    }

    /// Sets the path of the control socket.
    pub fn at(mut self, control: &Path) -> Self {
        self.control = control.to_owned();
        self
    }

    /// Returns the path of the control socket.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// Returns the whole command.
    pub fn command(&self) -> Command {
        let mut command = killed_with_parent("env");
        command
            .args(&self.before)
            .arg(&self.larder)
            .args(["memory", "attach", "--control"])
            .arg(&self.control)
            .args(&self.words);
        command
    }

    /// Starts the pager, and waits until it has attached.
    ///
    /// # Errors
    /// If it does not attach, with its output.
    pub fn start(&self) -> anyhow::Result<Pager> {
        let process = Process::start(self.command())?;
        let output = process.wait_for(ATTACHED_TEXT, LIMIT)?;
        Ok(Pager { process, control: self.control.clone(), stood_still: stood_still(&output) })
    }
}

/// Part of the pager's log line after an attach. Warnings before that line may contain "attached" without "INFO".
pub const ATTACHED_TEXT: &str = "INFO attached";

/// Parses from the log line how long a thread of the process was paused.
fn stood_still(output: &str) -> Option<Duration> {
    let text = output.split_once("stood_still=")?.1.split_whitespace().next()?;
    let number = text.trim_end_matches(char::is_alphabetic);
    let seconds = match &text[number.len()..] {
        "s" => 1.0,
        "ms" => 1e-3,
        "µs" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    };
    Some(Duration::from_secs_f64(number.parse::<f64>().ok()? * seconds))
}

/// A `larder memory attach` that has attached; killed when this is dropped.
pub struct Pager {
    /// The pager's process.
    pub process: Process,
    /// Duration for which the attach paused a thread of the managed process; `None` if the pager has taken over from
    /// another one.
    pub stood_still: Option<Duration>,
    control: PathBuf,
}

impl Pager {
    /// Returns the memory's state.
    ///
    /// # Errors
    /// If the pager does not answer.
    pub fn state(&self) -> anyhow::Result<MemoryState> {
        let response = fetch_memory(&self.control);
        let (_, state) =
            response.with_context(|| format!("querying the pager; its output: {}", self.process.output()))?;
        Ok(state)
    }

    /// Waits until the memory's state satisfies a condition.
    ///
    /// # Errors
    /// If that does not happen in time.
    pub fn wait_until(&self, condition: impl Fn(&MemoryState) -> bool) -> anyhow::Result<MemoryState> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let state = self.state()?;
            if condition(&state) {
                return Ok(state);
            }
            if Instant::now() > deadline {
                bail!("the memory does not reach the expected state: {state:#?}\n{}", self.process.output());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until the memory in use is about within the budget.
    ///
    /// # Errors
    /// If the budget is not kept.
    pub fn wait_for_budget(&self) -> anyhow::Result<MemoryState> {
        // Evictions lag behind page-ins while direct I/O pins pages.
        self.wait_until(|state| state.used <= state.budget + state.budget / 16)
    }

    /// Sends a signal, and waits for the process to exit.
    ///
    /// # Errors
    /// If it does not exit.
    pub fn end(&mut self, signal: i32) -> anyhow::Result<ExitStatus> {
        self.process.signal(signal);
        self.process.wait(LIMIT)
    }

    /// Makes the pager detach, and waits for it to exit.
    ///
    /// # Errors
    /// If it does not.
    pub fn detach(&mut self) -> anyhow::Result<()> {
        let ended = self.end(libc::SIGTERM)?;
        let output = self.process.output();
        ensure!(ended.success() && output.contains(" detached"), "{ended}: {output}");
        Ok(())
    }
}

/// A running `verify-memory`.
pub struct Verifier {
    /// The verifier's process.
    pub process: Process,
    pid: u32,
}

/// A verifier's report; `stalls` and `longest` cover the time since the last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Accesses so far.
    pub accesses: u64,
    /// Pages with wrong content, so far.
    pub mismatches: u64,
    /// Accesses that took long.
    pub stalls: u64,
    /// The longest access.
    pub longest: Duration,
}

impl Verifier {
    /// Starts a verifier, and waits until it is ready.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(command: Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let output = process.wait_for("ready ", LIMIT)?;
        let pid = output.split_once("ready ").context("no PID")?.1.trim().parse()?;
        Ok(Self { process, pid })
    }

    /// Returns the process number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Requests a report.
    ///
    /// # Errors
    /// If the process has exited, or a page has wrong content.
    pub fn report(&mut self) -> anyhow::Result<Verified> {
        let before = self.process.lines();
        self.process.say("report")?;
        let line = self.process.wait_for_after(before, "report ", LIMIT)?;
        let report = parse(&line).with_context(|| format!("unexpected report: {line}"))?;
        ensure!(report.mismatches == 0, "the memory has wrong content: {}", self.process.output());
        Ok(report)
    }

    /// Restricts the accesses to this share of the memory, in %.
    ///
    /// # Errors
    /// If the process has exited.
    pub fn set_hot_percent(&mut self, percent: u64) -> anyhow::Result<()> {
        self.process.say(&format!("hot {percent}"))
    }

    /// Waits until at least 1000 more accesses are done.
    ///
    /// # Errors
    /// If there is no progress, or a page has wrong content.
    pub fn works(&mut self) -> anyhow::Result<()> {
        let goal = self.report()?.accesses + 1000;
        let deadline = Instant::now() + LIMIT;
        while self.report()?.accesses < goal {
            ensure!(Instant::now() < deadline, "the verifier makes no progress: {}", self.process.output());
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Makes the verifier check every page once more, and exit. Returns its number of accesses.
    ///
    /// # Errors
    /// If a page has wrong content.
    pub fn stop(mut self) -> anyhow::Result<u64> {
        self.process.say("stop")?;
        let ended = self.process.wait(LIMIT)?;
        let output = self.process.output();
        ensure!(ended.success() && output.contains("mismatches=0"), "{ended}: {output}");
        let line = output.lines().find(|line| line.starts_with("verified "));
        line.and_then(|line| number(line, "accesses")).context("no access count in the verifier's output")
    }
}

fn parse(line: &str) -> Option<Verified> {
    Some(Verified {
        accesses: number(line, "accesses")?,
        mismatches: number(line, "mismatches")?,
        stalls: number(line, "stalls")?,
        longest: Duration::from_micros(number(line, "longest_us")?),
    })
}

fn number(line: &str, name: &str) -> Option<u64> {
    let fields = line.split_whitespace().filter_map(|word| word.split_once('='));
    fields.filter(|(key, _)| *key == name).find_map(|(_, value)| value.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// The pause in a pager's log line, and a verifier's report, are parsed.
    fn program_output_is_parsed() {
        let output = "INFO attached process=\"x\" budget=32 MiB stood_still=51.5ms";
        assert_eq!(stood_still(output), Some(Duration::from_micros(51_500)));
        assert_eq!(stood_still("stood_still=210µs"), Some(Duration::from_micros(210)));
        assert_eq!(stood_still("attached, in place of another pager"), None);
        let report = parse("report accesses=5 mismatches=0 stalls=1 longest_us=1200");
        assert_eq!(report.map(|report| report.longest), Some(Duration::from_micros(1200)));
        assert_eq!(parse("report accesses=5"), None);
    }
}
