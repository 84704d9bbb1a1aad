//! A child process whose output lines are kept, and that is killed when its handle is dropped.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Returns a command that the kernel kills when the thread that started it ends.
pub fn killed_with_parent(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]);
    command
}

/// Installs a program for all users at `path`, a copy of `from`. A separate process writes it: a file that this
/// process has open for writing may be inherited by a child that another thread has just forked, and the kernel
/// executes no file that is open for writing.
///
/// # Panics
/// If the copy fails.
pub fn install_program(from: &Path, path: &Path) {
    let status = Command::new("install").args(["-m", "755", "--"]).args([from, path]).status();
    assert!(
        status.as_ref().is_ok_and(std::process::ExitStatus::success),
        "{} was not installed: {status:?}",
        from.display()
    );
}

/// Installs a script for all users at `path`; see [`install_program`].
///
/// # Panics
/// If the script cannot be written or copied.
pub fn install_script(text: &str, path: &Path) {
    let source = path.with_extension("source");
    std::fs::write(&source, text).expect("the script can be written");
    install_program(&source, path);
    std::fs::remove_file(source).expect("the script's source can be removed");
}

const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Longer than a process takes to exit if it waits for no device, however large its memory.
const DROP_TIMEOUT: Duration = Duration::from_secs(60);

/// A child process.
pub struct Process {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: Arc<Output>,
}

#[derive(Default)]
struct Output {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<String>,
    /// Output streams that are still open.
    open: u32,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn collect(self: &Arc<Self>, stream: impl Read + Send + 'static) {
        self.lock().open += 1;
        let this = Arc::clone(self);
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                this.lock().lines.push(text);
                this.changed.notify_all();
                line.clear();
            }
            this.lock().open -= 1;
            this.changed.notify_all();
        });
    }
}

impl Process {
    /// Starts `command`, and keeps its stdout and stderr.
    ///
    /// # Errors
    /// If the program is missing, or cannot be started.
    pub fn start(mut command: Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {name}; testbed/setup.sh installs what the tests need"))?;
        let output = Arc::new(Output::default());
        if let Some(stream) = child.stdout.take() {
            output.collect(stream);
        }
        if let Some(stream) = child.stderr.take() {
            output.collect(stream);
        }
        Ok(Self { name, input: child.stdin.take(), child, output })
    }

    /// Returns the process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the output so far.
    pub fn output(&self) -> String {
        self.output.lock().lines.join("\n")
    }

    /// Returns the number of output lines so far.
    pub fn lines(&self) -> usize {
        self.output.lock().lines.len()
    }

    /// Returns whether a line after the first `skip` lines contains `text`.
    pub fn has_output_after(&self, skip: usize, text: &str) -> bool {
        let state = self.output.lock();
        state.lines.iter().skip(skip).any(|line| line.contains(text))
    }

    /// Returns whether the process has closed its outputs and all output has been read.
    pub fn has_ended(&self) -> bool {
        self.output.lock().open == 0
    }

    /// Writes a line to the process's stdin.
    ///
    /// # Errors
    /// If the process no longer reads.
    pub fn say(&mut self, line: &str) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("the process's stdin is closed")?;
        writeln!(input, "{line}")?;
        Ok(input.flush()?)
    }

    /// Waits for a line that contains `text`.
    ///
    /// # Errors
    /// If the process exits without such a line, or `limit` expires; with its output.
    pub fn wait_for(&self, text: &str, limit: Duration) -> anyhow::Result<String> {
        self.wait_for_after(0, text, limit)
    }

    /// Waits for a line that contains `text` after the first `skip` lines.
    ///
    /// # Errors
    /// As in [`Process::wait_for`].
    pub fn wait_for_after(&self, skip: usize, text: &str, limit: Duration) -> anyhow::Result<String> {
        self.wait_for_lines(text, limit, |lines| {
            let mut following = lines.iter().skip(skip);
            following.find(|line| line.contains(text)).cloned()
        })
    }

    /// Waits until `count` lines contain `text`. A line is read some time after the program has written it.
    ///
    /// # Errors
    /// As in [`Process::wait_for`].
    pub fn wait_for_count(&self, text: &str, count: usize, limit: Duration) -> anyhow::Result<()> {
        self.wait_for_lines(text, limit, |lines| {
            let found = lines.iter().filter(|line| line.contains(text)).count();
            (found >= count).then_some(())
        })
    }

    fn wait_for_lines<T>(
        &self,
        text: &str,
        limit: Duration,
        find: impl Fn(&[String]) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + limit;
        let mut state = self.output.lock();
        loop {
            if let Some(found) = find(&state.lines) {
                return Ok(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.open == 0 || left.is_zero() {
                let outcome = if state.open == 0 { "exited" } else { "timed out" };
                bail!("{} {outcome} without printing '{text}':\n{}", self.name, state.lines.join("\n"));
            }
            let waited = self.output.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: `kill` accesses no memory. The child has not been waited for, so its PID is not reused.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Waits until the process has exited, and all its output has been read.
    ///
    /// # Errors
    /// If `limit` expires.
    pub fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        let mut state = self.output.lock();
        while state.open > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{} does not exit:\n{}", self.name, state.lines.join("\n"));
            }
            let waited = self.output.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        // Both outputs are closed: the process is exiting.
        match self.wait_exit_until(deadline)? {
            Some(status) => Ok(status),
            None => bail!("{} has closed its outputs, and does not exit:\n{}", self.name, self.output()),
        }
    }

    /// Kills the process, and waits until it has exited.
    pub fn kill(&mut self) {
        // The process may have exited by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the exit status if the process exits in time.
    fn wait_exit_until(&mut self, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(EXIT_POLL_INTERVAL);
        }
    }
}

/// A killed process that has not exited within [`DROP_TIMEOUT`] is abandoned: the kernel may make it wait for a device
/// whose server is a process that is dropped later.
impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.wait_exit_until(Instant::now() + DROP_TIMEOUT);
    }
}
