//! The guest of an attempt: an NBD client that fills the disk, keeps requests in flight when the server is killed,
//! and reads everything again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, ensure};

use super::super::Random;
use super::model::Model;
use crate::fuzz_disks::nbd::{self, Client};

/// Requests in flight.
const DEPTH: usize = 16;

/// Size of a granule, which belongs to the guest's writes, the guest's discards, or the other program. A granule
/// consists of one or more clusters of the image.
const GRANULE_BYTES: u64 = 64 << 10;

/// Bytes of the disk.
pub(super) const DISK: u64 = 4 << 20;

/// End of the area that the guest writes to.
pub(super) const FILLED_BYTES: u64 = DISK - 8 * GRANULE_BYTES;

/// Owner of a granule.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// The guest writes to it, before the kill and up to it.
    Written,
    /// The guest has discards of parts of it in flight at the kill.
    Discarded,
    /// The other program writes to it; the guest has no writes in flight there at the kill.
    Foreign,
}

/// Returns a random range of up to 64 KiB for a request or a foreign write, in a granule for this use.
pub(super) fn random_range(of: Use, random: &mut Random) -> Range<u64> {
    let (end, offset, step) = match of {
        Use::Foreign => (DISK, 0, 2),
        Use::Written => (FILLED_BYTES, 1, 4),
        Use::Discarded => (FILLED_BYTES, 3, 4),
    };
    let granule = random.below(end / GRANULE_BYTES / step) * step + offset;
    let (unit, units) = [(512, 1), (512, 24), (4096, 1), (4096, 4), (GRANULE_BYTES, 1)][random.below(5) as usize];
    let len = unit * (1 + random.below(units));
    let start = granule * GRANULE_BYTES + random.below((GRANULE_BYTES - len) / unit + 1) * unit;
    start..start + len
}

/// Requests in flight when the server is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// None; the last write has just completed.
    Idle,
    /// Writes are in flight.
    Writes,
    /// Discards and writes are in flight.
    Discards,
}

impl Load {
    pub(super) const ALL: [Self; 3] = [Self::Idle, Self::Writes, Self::Discards];
}

/// A request in flight.
enum Task {
    Write(Range<u64>, u64),
    Discard(Range<u64>),
}

impl Task {
    fn range(&self) -> &Range<u64> {
        match self {
            Self::Write(range, _) | Self::Discard(range) => range,
        }
    }
}

/// A client of the export.
pub(super) struct Guest {
    client: Client,
    tasks: BTreeMap<u64, Task>,
}

impl Guest {
    /// Connects to the export at this socket.
    ///
    /// # Errors
    /// If the server does not answer, or the export has another size.
    pub(super) fn connect(socket: &Path) -> anyhow::Result<Self> {
        let client = Client::connect(socket, "").context("connecting to the export")?;
        ensure!(client.size == DISK, "the export has {} bytes", client.size);
        Ok(Self { client, tasks: BTreeMap::new() })
    }

    fn send_write(&mut self, range: Range<u64>, model: &mut Model) -> anyhow::Result<()> {
        let (version, bytes) = model.new_version(&range);
        model.begin(&range, version);
        let cookie = self.client.send(nbd::WRITE, 0, &range, &bytes)?;
        self.tasks.insert(cookie, Task::Write(range, version));
        Ok(())
    }

    fn receive(&mut self, model: &mut Model) -> anyhow::Result<()> {
        let reply = self.client.receive()?;
        ensure!(reply.error == 0, "a request failed: {} {}", reply.error, reply.message);
        match self.tasks.remove(&reply.cookie).context("a reply to an unknown request")? {
            Task::Write(range, version) => model.complete(&range, version),
            // Until the next read, the old content and zeros are both allowed.
            Task::Discard(_) => {}
        }
        Ok(())
    }

    /// Waits for all replies.
    pub(super) fn finish(&mut self, model: &mut Model) -> anyhow::Result<()> {
        while !self.tasks.is_empty() {
            self.receive(model)?;
        }
        Ok(())
    }

    /// Receives the replies that a killed server has sent. Returns the number of requests without a reply.
    pub(super) fn drain(mut self, model: &mut Model) -> usize {
        while !self.tasks.is_empty() && self.receive(model).is_ok() {}
        self.tasks.len()
    }

    /// Writes one range.
    pub(super) fn write(&mut self, range: Range<u64>, model: &mut Model) -> anyhow::Result<()> {
        self.send_write(range, model)?;
        self.finish(model)
    }

    /// Writes the whole disk except for its unused end, and flushes it.
    pub(super) fn fill(&mut self, model: &mut Model) -> anyhow::Result<()> {
        for start in (0..FILLED_BYTES).step_by(GRANULE_BYTES as usize) {
            if self.tasks.len() == DEPTH {
                self.receive(model)?;
            }
            self.send_write(start..start + GRANULE_BYTES, model)?;
        }
        self.finish(model)?;
        self.flush()
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        let cookie = self.client.send(nbd::FLUSH, 0, &(0..0), &[])?;
        let reply = self.client.receive()?;
        ensure!(reply.cookie == cookie && reply.error == 0, "the flush failed: {reply:?}");
        Ok(())
    }

    /// Fills up the requests in flight.
    pub(super) fn submit(&mut self, load: Load, model: &mut Model, random: &mut Random) -> anyhow::Result<()> {
        while load != Load::Idle && self.tasks.len() < DEPTH {
            let is_discard = load == Load::Discards && random.below(2) == 0;
            let range = match is_discard {
                true => random_range(Use::Discarded, random),
                false => random_range(Use::Written, random),
            };
            let overlaps = |task: &Task| task.range().start < range.end && range.start < task.range().end;
            if self.tasks.values().any(overlaps) {
                // The order of two concurrent requests to a sector is undefined.
                return Ok(());
            }
            if is_discard {
                model.discard(&range);
                let cookie = self.client.send(nbd::TRIM, 0, &range, &[])?;
                self.tasks.insert(cookie, Task::Discard(range));
            } else {
                self.send_write(range, model)?;
            }
        }
        Ok(())
    }

    /// Waits for one reply, if anything is in flight.
    pub(super) fn receive_one(&mut self, model: &mut Model) -> anyhow::Result<()> {
        match self.tasks.is_empty() {
            true => Ok(()),
            false => self.receive(model),
        }
    }

    /// Reads the whole disk in blocks of `block` bytes, in a random order, and checks it against the model.
    ///
    /// # Errors
    /// A [`super::model::Mismatch`], or a read fails.
    pub(super) fn read_all(&mut self, block: u64, model: &mut Model, random: &mut Random) -> anyhow::Result<()> {
        let mut starts: Vec<u64> = (0..DISK).step_by(block as usize).collect();
        for index in (1..starts.len()).rev() {
            starts.swap(index, random.below(index as u64 + 1) as usize);
        }
        for batch in starts.chunks(DEPTH) {
            let mut reads = BTreeMap::new();
            for start in batch {
                let range = *start..start + block;
                reads.insert(self.client.send(nbd::READ, 0, &range, &[])?, range);
            }
            while !reads.is_empty() {
                let reply = self.client.receive()?;
                ensure!(reply.error == 0, "a read failed: {} {}", reply.error, reply.message);
                let range = reads.remove(&reply.cookie).context("a reply to an unknown request")?;
                let bytes = reply.data(&range).map_err(anyhow::Error::msg)?;
                model.check(range.start, &bytes)?;
            }
        }
        Ok(())
    }
}
