//! `larder memory attach`, and a process that would notice if its memory were not what it wrote: what the campaigns of the
//! pager and its tests share.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use larder_vm::control::fetch_memory;
use larder_vm::control::memory::MemoryState;

use super::process::{Process, mortal};

/// For whatever may take long on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// How often it is looked for what is waited for.
const LOOK: Duration = Duration::from_millis(5);

/// How `larder memory attach` is started.
#[derive(Clone, Debug)]
pub struct Attach {
    /// What stands before the program.
    before: Vec<OsString>,
    larder: PathBuf,
    control: PathBuf,
    words: Vec<OsString>,
}

impl Attach {
    /// To process `pid`, with its control socket in `folder`, and further words.
    pub fn new(larder: &Path, folder: &Path, pid: u32, words: &[&str]) -> Self {
        let pid = pid.to_string();
        Self::of(larder, folder, &[&["--pid", &pid], words].concat())
    }

    /// Likewise, where the words say which process it is.
    pub fn of(larder: &Path, folder: &Path, words: &[&str]) -> Self {
        Self {
            before: Vec::new(),
            larder: larder.to_owned(),
            control: folder.join("control"),
            words: words.iter().map(OsString::from).collect(),
        }
    }

    /// With a program and its words in front, which is to become Larder.
    pub fn by(mut self, words: &[&str]) -> Self {
        self.before = words.iter().map(OsString::from).collect();
        self
    }

    /// With its control socket at that path.
    pub fn at(mut self, control: &Path) -> Self {
        self.control = control.to_owned();
        self
    }

    /// The path of the control socket.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// All of it.
    pub fn command(&self) -> Command {
        let mut command = mortal("env");
        command
            .args(&self.before)
            .arg(&self.larder)
            .args(["memory", "attach", "--control"])
            .arg(&self.control)
            .args(&self.words);
        command
    }

    /// Starts it, and waits until it has attached.
    ///
    /// # Errors
    /// It has not, with what it said.
    pub fn start(&self) -> anyhow::Result<Pager> {
        let process = Process::start(self.command())?;
        let said = process.wait_for(ATTACHED, LIMIT)?;
        Ok(Pager {
            process,
            control: self.control.clone(),
            stood_still: stood_still(&said),
        })
    }
}

/// Part of the pager's log line after an attach. Warnings before that line may contain "attached" without "INFO".
pub const ATTACHED: &str = "INFO attached";

/// For how long a thread of the process stood still, by what was said.
fn stood_still(said: &str) -> Option<Duration> {
    let text = said.split_once("stood_still=")?.1.split_whitespace().next()?;
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
    /// It.
    pub process: Process,
    /// For how long a thread of the process stood still; nothing, where it has taken another pager's place.
    pub stood_still: Option<Duration>,
    control: PathBuf,
}

impl Pager {
    /// How the memory is.
    ///
    /// # Errors
    /// It does not answer.
    pub fn state(&self) -> anyhow::Result<MemoryState> {
        let asked = fetch_memory(&self.control);
        let (_, state) = asked.with_context(|| format!("the pager: {}", self.process.output()))?;
        Ok(state)
    }

    /// Waits until the memory is so.
    ///
    /// # Errors
    /// It does not become so.
    pub fn wait_until(&self, is_so: impl Fn(&MemoryState) -> bool) -> anyhow::Result<MemoryState> {
        let give_up = Instant::now() + LIMIT;
        loop {
            let state = self.state()?;
            if is_so(&state) {
                return Ok(state);
            }
            if Instant::now() > give_up {
                bail!(
                    "the memory does not become as it should: {state:#?}\n{}",
                    self.process.output()
                );
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until no more is used than the budget.
    ///
    /// # Errors
    /// The budget is not kept.
    pub fn wait_for_budget(&self) -> anyhow::Result<MemoryState> {
        // While pages wait for direct I/O into them to end, what goes lags behind what comes.
        self.wait_until(|state| state.used <= state.budget + state.budget / 16)
    }

    /// Sends a signal, and waits for the end.
    ///
    /// # Errors
    /// It does not end.
    pub fn end(&mut self, signal: i32) -> anyhow::Result<ExitStatus> {
        self.process.signal(signal);
        self.process.wait(LIMIT)
    }

    /// Has it detach, and waits for its end.
    ///
    /// # Errors
    /// It does not.
    pub fn detach(&mut self) -> anyhow::Result<()> {
        let ended = self.end(libc::SIGTERM)?;
        let said = self.process.output();
        ensure!(ended.success() && said.contains(" detached"), "{ended}: {said}");
        Ok(())
    }
}

/// A running `verify-memory`.
pub struct Verifier {
    /// It.
    pub process: Process,
    pid: u32,
}

/// What it has said, of the time since it was last asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Accesses so far.
    pub accesses: u64,
    /// Pages that were not as they were written, so far.
    pub mismatches: u64,
    /// Accesses that took long.
    pub stalls: u64,
    /// The longest of them.
    pub longest: Duration,
}

impl Verifier {
    /// Starts one, and waits until it works.
    ///
    /// # Errors
    /// It does not.
    pub fn start(command: Command) -> anyhow::Result<Self> {
        let process = Process::start(command)?;
        let said = process.wait_for("ready ", LIMIT)?;
        let pid = said.split_once("ready ").context("no PID")?.1.trim().parse()?;
        Ok(Self { process, pid })
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it has found.
    ///
    /// # Errors
    /// It has ended, or something is not as it was written.
    pub fn report(&mut self) -> anyhow::Result<Verified> {
        let before = self.process.lines();
        self.process.say("report")?;
        let line = self.process.wait_for_after(before, "report ", LIMIT)?;
        let report = parse(&line).with_context(|| format!("what does this mean: {line}"))?;
        ensure!(report.mismatches == 0, "the memory is wrong: {}", self.process.output());
        Ok(report)
    }

    /// Has it work on so much of its memory only, in %.
    ///
    /// # Errors
    /// It has ended.
    pub fn works_on(&mut self, percent: u64) -> anyhow::Result<()> {
        self.process.say(&format!("hot {percent}"))
    }

    /// Waits until it has done some more accesses.
    ///
    /// # Errors
    /// It stands still, or something is not as it was written.
    pub fn works(&mut self) -> anyhow::Result<()> {
        let goal = self.report()?.accesses + 1000;
        let give_up = Instant::now() + LIMIT;
        while self.report()?.accesses < goal {
            ensure!(Instant::now() < give_up, "it stands still: {}", self.process.output());
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Has it look at every page once more, and end; its accesses.
    ///
    /// # Errors
    /// Something is not as it was written.
    pub fn stop(mut self) -> anyhow::Result<u64> {
        self.process.say("stop")?;
        let ended = self.process.wait(LIMIT)?;
        let said = self.process.output();
        ensure!(ended.success() && said.contains("mismatches=0"), "{ended}: {said}");
        let line = said.lines().find(|line| line.starts_with("verified "));
        line.and_then(|line| number(line, "accesses"))
            .context("no count of accesses")
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
    let words = line.split_whitespace().filter_map(|word| word.split_once('='));
    words
        .filter(|(key, _)| *key == name)
        .find_map(|(_, value)| value.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_say_is_understood() {
        let said = "INFO attached process=\"x\" budget=32 MiB stood_still=51.5ms";
        assert_eq!(stood_still(said), Some(Duration::from_micros(51_500)));
        assert_eq!(stood_still("stood_still=210µs"), Some(Duration::from_micros(210)));
        assert_eq!(stood_still("attached, in the place of another pager"), None);
        let report = parse("report accesses=5 mismatches=0 stalls=1 longest_us=1200");
        assert_eq!(report.map(|report| report.longest), Some(Duration::from_micros(1200)));
        assert_eq!(parse("report accesses=5"), None);
    }
}
