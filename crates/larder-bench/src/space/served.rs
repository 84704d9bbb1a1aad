//! A served image and an NBD client of it.

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::nbd::NbdUri;
use larder_block::{
    AlignedBuf, BlockDevice, ByteOffset, ByteRange, Failure, IoError, Loop, ReadBuf, WriteBuf, WriteFlags,
};

use crate::campaign::process::{Process, killed_with_parent};

/// Time within which a server must start or exit.
const LIMIT: Duration = Duration::from_secs(120);

/// A request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Writes zeros, with a number at their beginning.
    Write {
        at: u64,
        len: u64,
        stamp: u64,
    },
    Discard {
        at: u64,
        len: u64,
    },
}

/// Results of some requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub(super) done: u64,
    /// Requests that failed for lack of space.
    pub(super) refused: u64,
    pub(super) longest: Duration,
}

/// `larder disk serve` of an image, and a connection to it.
pub(super) struct Served {
    process: Process,
    on: Loop,
    disk: Rc<NbdDevice>,
}

impl Served {
    pub(super) fn start(program: &Path, image: &Path, directory: &Path) -> anyhow::Result<Self> {
        let uri = format!("nbd+unix:///?socket={}/socket", directory.display());
        let mut command = killed_with_parent(program.to_str().context("the program's path is not UTF-8")?);
        command.args(["disk", "serve", "--format", "qcow2", "--nbd", &uri]).arg(image);
        let process = Process::start(command)?;
        process.wait_for("serving", LIMIT)?;
        let on = Loop::new(Duration::ZERO)?;
        let uri: NbdUri = uri.parse().context("parsing the server's URI")?;
        let options = NbdOptions { replay_log: larder_block::ByteLen::ZERO, ..NbdOptions::default() };
        let disk = on.block_on(NbdDevice::open(&on, &uri, options))?;
        Ok(Self { process, on, disk })
    }

    /// Sends requests, `depth` at a time.
    pub(super) fn run(&self, steps: &[Step], depth: usize) -> anyhow::Result<Outcome> {
        let mut outcome = Outcome::default();
        for steps in steps.chunks(depth) {
            let tasks: Vec<_> = steps
                .iter()
                .map(|step| {
                    let (disk, step) = (Rc::clone(&self.disk), *step);
                    self.on.spawn_with_result(async move {
                        let started = Instant::now();
                        (carry_out(&disk, step).await, started.elapsed())
                    })
                })
                .collect();
            for task in tasks {
                let (result, elapsed) = self.on.block_on(task);
                outcome.longest = outcome.longest.max(elapsed);
                match result {
                    Ok(()) => outcome.done += 1,
                    Err(error) if error.failure() == Failure::NoSpace => outcome.refused += 1,
                    Err(error) => bail!("{error}"),
                }
            }
        }
        Ok(outcome)
    }

    /// Returns the number at the beginning of a cluster.
    pub(super) fn stamp(&self, at: u64) -> anyhow::Result<u64> {
        let mut bytes = AlignedBuf::zeroed(512);
        let read = self.disk.read(ByteOffset::new(at), ReadBuf::new(&mut bytes));
        self.on.block_on(read).map_err(plain)?;
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[..8]);
        Ok(u64::from_be_bytes(word))
    }

    /// Returns the CPU time of all threads of the server.
    pub(super) fn cpu_time(&self) -> anyhow::Result<Duration> {
        let mut nanos = 0;
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            let text = std::fs::read_to_string(thread?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().context("schedstat is empty")?;
            nanos += first.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(nanos))
    }

    /// Stops the server, which must close the image cleanly.
    pub(super) fn stop(mut self) -> anyhow::Result<()> {
        self.on.block_on(self.disk.close()).map_err(plain)?;
        self.process.signal(libc::SIGTERM);
        let status = self.process.wait(LIMIT)?;
        ensure!(status.success(), "the server exited with {status}: {}", self.process.output());
        Ok(())
    }
}

/// Converts an error that is not `Send` into one that is.
fn plain(error: IoError) -> anyhow::Error {
    anyhow!("{error}")
}

async fn carry_out(disk: &NbdDevice, step: Step) -> Result<(), IoError> {
    match step {
        Step::Write { at, len, stamp } => {
            let mut bytes = AlignedBuf::zeroed(len as usize);
            bytes[..8].copy_from_slice(&stamp.to_be_bytes());
            disk.write(ByteOffset::new(at), WriteBuf::new(&bytes), WriteFlags::NONE).await
        }
        Step::Discard { at, len } => disk.discard(ByteRange::new(at, len)).await,
    }
}
