//! The load of guests: hostile ones, and a well-behaved one for comparison.

use std::fmt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use larder_bench::campaign::front_end::queue::{Request, T_DISCARD, T_IN, T_OUT, T_WRITE_ZEROES};
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::process::Process;

pub(super) const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;
const SECTOR: u64 = 512;
const PAGE: u64 = 4 * KIB;

/// Guest memory of one descriptor of a long request; all descriptors refer to the same memory.
const LONG_FRAGMENT_BYTES: u64 = 2 * MIB;

/// The largest ring, and its number of data descriptors: the header and the status need one each.
const RING_ENTRIES_MAX: u64 = 32_768;
const FRAGMENTS_MAX: u64 = RING_ENTRIES_MAX - 2;

/// Longest indirect table that the server follows, without header and status.
const INDIRECT_FRAGMENTS_MAX: u64 = 2_046;

/// Queues of a flood, and requests in each.
const QUEUES: u16 = 64;
const DEPTH: u16 = 128;

/// Queue depth and request length of a well-behaved guest.
const WELL_BEHAVED_DEPTH: u16 = 32;
const WELL_BEHAVED_BYTES: u64 = MIB;

/// Discard and write-zeroes: the maximum number of segments, the size of a segment in the list, and the flag that
/// permits a write-zeroes to unmap.
const SEGMENTS: u64 = 256;
const SEGMENT_BYTES: u64 = 16;
const UNMAP_FLAG: u32 = 1;

/// Time limit of a request, for any machine.
const LIMIT: Duration = Duration::from_secs(900);

const VIRTIO_DESCRIPTOR_BYTES: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    Read,
    Write,
}

impl Transfer {
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    fn request(self, at: u64, data: &[Buffer]) -> Request<'_> {
        let (kind, out, into): (u32, &[Buffer], &[Buffer]) = match self {
            Self::Read => (T_IN, &[], data),
            Self::Write => (T_OUT, data, &[]),
        };
        Request { kind, sector: at / SECTOR, out, into }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clear {
    Discard,
    /// Write-zeroes that may unmap the range.
    Unmap,
    /// Write-zeroes that keeps the range's space.
    Zero,
}

/// A guest's load, which it repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attack {
    Idle,
    /// Requests of 1 MiB, 32 at a time.
    Usual(Transfer),
    /// One request at a time, with descriptors of length `fragment`, all of which refer to the same guest memory.
    Long {
        transfer: Transfer,
        len: u64,
        fragment: u64,
    },
    /// 64 queues with 128 requests each.
    Flood {
        transfer: Transfer,
        len: u64,
        fragment: u64,
    },
    /// An indirect table longer than the server follows, for which the server stops the queue.
    Refused,
    /// One request at a time with the maximum number of segments, which cover the whole disk together or each.
    Segments {
        clear: Clear,
        each_is_whole: bool,
    },
}

fn length(bytes: u64) -> String {
    match bytes {
        bytes if bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        bytes if bytes.is_multiple_of(KIB) => format!("{} KiB", bytes / KIB),
        bytes => format!("{bytes} B"),
    }
}

impl fmt::Display for Attack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Idle => f.write_str("idle"),
            Self::Usual(transfer) => write!(f, "well-behaved: {}s of 1 MiB, depth 32", transfer.name()),
            Self::Long { transfer, len, fragment: LONG_FRAGMENT_BYTES | MIB } => {
                write!(f, "{} of {}", transfer.name(), length(len))
            }
            Self::Long { transfer, len, fragment } => {
                let count = len / fragment;
                let (kind, fragment) = (transfer.name(), length(fragment));
                write!(f, "{kind} of {count} descriptors of {fragment}")
            }
            Self::Flood { transfer, len, fragment } => {
                let (kind, len) = (transfer.name(), length(len));
                write!(f, "64 queues x 128 {kind}s of {len}")?;
                match fragment {
                    MIB => Ok(()),
                    fragment => write!(f, " in {}", length(fragment)),
                }
            }
            Self::Refused => write!(f, "indirect table of {RING_ENTRIES_MAX} descriptors"),
            Self::Segments { clear, each_is_whole } => {
                let kind = match clear {
                    Clear::Discard => "discard",
                    Clear::Unmap => "write-zeroes, unmap,",
                    Clear::Zero => "write-zeroes",
                };
                let what = match each_is_whole {
                    true => "each the whole disk",
                    false => "the whole disk together",
                };
                write!(f, "{kind} of {SEGMENTS} segments, {what}")
            }
        }
    }
}

/// Completed requests of a guest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

impl Attack {
    /// Returns the attacks in the order in which they are carried out.
    pub(super) fn all(disk: u64, quick: bool) -> Vec<Self> {
        let lengths: &[u64] = match quick {
            true => &[16, 3072],
            false => &[1, 16, 128, 512, 1024, 3072],
        };
        let mut all = vec![Self::Idle];
        // Writes come first, so that reads find data.
        let transfers = [Transfer::Write, Transfer::Read];
        all.extend(transfers.map(Self::Usual));
        for transfer in transfers {
            let long = |len, fragment| Self::Long { transfer, len, fragment };
            let flood = |len, fragment| Self::Flood { transfer, len, fragment };
            all.extend(
                lengths
                    .iter()
                    .map(|mib| mib * MIB)
                    .filter(|len| *len <= disk)
                    .map(|len| long(len, LONG_FRAGMENT_BYTES.min(len))),
            );
            all.extend([
                long(16 * MIB, PAGE),
                long(FRAGMENTS_MAX * PAGE, PAGE),
                long(FRAGMENTS_MAX * SECTOR, SECTOR),
                flood(MIB, MIB),
                flood(MIB, PAGE),
                flood(INDIRECT_FRAGMENTS_MAX * SECTOR, SECTOR),
            ]);
        }
        all.push(Self::Refused);
        for clear in [Clear::Discard, Clear::Unmap, Clear::Zero] {
            all.push(Self::Segments { clear, each_is_whole: false });
            // Write-zeroes that keeps the space may have to write the zeros.
            if clear != Clear::Zero {
                all.push(Self::Segments { clear, each_is_whole: true });
            }
        }
        all
    }

    /// Returns whether the disk must be full of data before the attack.
    pub(super) fn needs_filled_disk(self) -> bool {
        matches!(self, Self::Segments { .. })
    }

    /// Returns the shorter request that this long one is compared with: both must cost the same per byte.
    pub(super) fn shorter_reference(self) -> Option<Self> {
        match self {
            Self::Long { transfer, len, fragment: fragment @ (LONG_FRAGMENT_BYTES | PAGE) } if len > 16 * MIB => {
                Some(Self::Long { transfer, len: 16 * MIB, fragment })
            }
            _ => None,
        }
    }

    fn options(self) -> Options {
        let defaults = Options { size: DEPTH, ..Options::default() };
        match self {
            Self::Idle => defaults,
            Self::Usual(_) => {
                Options { data_bytes: usize::from(WELL_BEHAVED_DEPTH) * WELL_BEHAVED_BYTES as usize, ..defaults }
            }
            Self::Long { len, fragment, .. } => Options {
                size: (len / fragment + 2).next_power_of_two().max(u64::from(DEPTH)) as u16,
                data_bytes: LONG_FRAGMENT_BYTES as usize,
                ..defaults
            },
            Self::Flood { len, fragment, .. } => Options {
                queues: QUEUES,
                indirect: true,
                data_bytes: (MIB + table_bytes(len / fragment) * u64::from(QUEUES) * u64::from(DEPTH)) as usize,
                ..defaults
            },
            Self::Refused => {
                Options { indirect: true, data_bytes: (MIB + table_bytes(RING_ENTRIES_MAX)) as usize, ..defaults }
            }
            Self::Segments { .. } => Options { data_bytes: (SEGMENTS * SEGMENT_BYTES) as usize, ..defaults },
        }
    }
}

/// Guest memory for an indirect table with this number of data descriptors.
fn table_bytes(fragments: u64) -> u64 {
    (fragments + 2) * VIRTIO_DESCRIPTOR_BYTES
}

/// A guest that attacks.
pub(super) struct Guest {
    attack: Attack,
    front_end: FrontEnd,
    disk: u64,
}

impl Guest {
    pub(super) fn connect(attack: Attack, socket: &Path) -> anyhow::Result<Self> {
        let front_end = FrontEnd::connect(socket, attack.options()).context("connecting a front-end")?;
        let disk = front_end.capacity()?;
        let pattern: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8).collect();
        let data = front_end.data();
        if front_end.options.data_bytes >= pattern.len() {
            front_end.memory.write(data, &pattern);
        }
        Ok(Self { attack, front_end, disk })
    }

    /// Attacks `server` for at least the time `duration_min`, and until all requests have been answered.
    pub(super) fn run(&mut self, server: &Process, duration_min: Duration) -> anyhow::Result<Done> {
        let end = Instant::now() + duration_min;
        match self.attack {
            Attack::Idle => {
                thread::sleep(duration_min);
                Ok(Done::default())
            }
            Attack::Usual(transfer) => self.usual(transfer, |_| Instant::now() < end),
            Attack::Long { transfer, len, fragment } => {
                let data = fragments(self.front_end.data(), len, fragment);
                // Each request addresses another part of the disk: data that was just copied is in the processor's
                // cache.
                let parts = self.disk / len;
                self.run_one_at_a_time(end, len, |sent| transfer.request(sent % parts * len, &data))
            }
            Attack::Flood { transfer, len, fragment } => self.flood(end, transfer, len, fragment),
            Attack::Refused => self.refused(server, end),
            Attack::Segments { clear, each_is_whole } => self.segments(end, clear, each_is_whole),
        }
    }

    /// Writes the whole disk.
    pub(super) fn fill(socket: &Path) -> anyhow::Result<()> {
        let mut guest = Self::connect(Attack::Usual(Transfer::Write), socket)?;
        let disk = guest.disk;
        let done = guest.usual(Transfer::Write, |done| done.bytes < disk)?;
        ensure!(done.bytes >= disk, "only {} of {disk} bytes were written", done.bytes);
        Ok(())
    }

    /// Sends sequential requests over the whole disk while `should_continue` returns true for the requests begun so
    /// far.
    fn usual(&mut self, transfer: Transfer, should_continue: impl Fn(&Done) -> bool) -> anyhow::Result<Done> {
        let (memory, disk) = (self.front_end.data(), self.disk);
        let queue = self.front_end.queue();
        let mut buffers: Vec<u64> =
            (0..u64::from(WELL_BEHAVED_DEPTH)).map(|at| memory + at * WELL_BEHAVED_BYTES).collect();
        let mut in_flight = Vec::new();
        let mut done = Done::default();
        loop {
            while should_continue(&done) {
                let Some(address) = buffers.pop() else { break };
                let data = fragments(address, WELL_BEHAVED_BYTES, WELL_BEHAVED_BYTES);
                let id = queue.add(&transfer.request(done.bytes % disk, &data));
                in_flight.push((id, address));
                done.requests += 1;
                done.bytes += WELL_BEHAVED_BYTES;
            }
            queue.go();
            if in_flight.is_empty() {
                return Ok(done);
            }
            let completion = queue.complete(LIMIT)?;
            ensure!(completion.status == 0, "a request failed: {completion:?}");
            let at = in_flight.iter().position(|(id, _)| *id == completion.id);
            let (_, address) = in_flight.swap_remove(at.context("a completion of an unknown request")?);
            buffers.push(address);
        }
    }

    /// Sends one request after the other, each of `bytes` bytes. `request` is called with the number of previous
    /// requests.
    fn run_one_at_a_time<'a>(
        &mut self,
        end: Instant,
        bytes: u64,
        request: impl Fn(u64) -> Request<'a>,
    ) -> anyhow::Result<Done> {
        let queue = self.front_end.queue();
        let mut done = Done::default();
        while done.requests == 0 || Instant::now() < end {
            queue.add(&request(done.requests));
            queue.go();
            let completion = queue.complete(LIMIT)?;
            ensure!(completion.status == 0, "a request failed: {completion:?}");
            done.requests += 1;
            done.bytes += bytes;
        }
        Ok(done)
    }

    /// Fills all queues with requests, each for another part of the disk, waits for all answers, and repeats.
    fn flood(&mut self, end: Instant, transfer: Transfer, len: u64, fragment: u64) -> anyhow::Result<Done> {
        let memory = self.front_end.data();
        let data = fragments(memory, len, fragment);
        let (tables, table_bytes) = (memory + MIB, table_bytes(len / fragment));
        let mut done = Done::default();
        while done.requests == 0 || Instant::now() < end {
            for _ in 0..DEPTH {
                for (index, queue) in self.front_end.queues.iter_mut().enumerate() {
                    let id = queue.ring.next_id().context("a ring is full")?;
                    let table = tables + (index as u64 * u64::from(DEPTH) + u64::from(id)) * table_bytes;
                    let at = (done.requests * MIB) % self.disk;
                    queue.add_through(&transfer.request(at, &data), table);
                    done.requests += 1;
                    done.bytes += len;
                }
            }
            self.front_end.queues.iter_mut().for_each(|queue| queue.go());
            for queue in &mut self.front_end.queues {
                while queue.ring.free_slots() < usize::from(DEPTH) {
                    let completion = queue.complete(LIMIT)?;
                    ensure!(completion.status == 0, "a request failed: {completion:?}");
                }
            }
        }
        Ok(done)
    }

    fn refused(&mut self, server: &Process, end: Instant) -> anyhow::Result<Done> {
        let memory = self.front_end.data();
        let lines_before = server.lines();
        let data = fragments(memory, FRAGMENTS_MAX * PAGE, PAGE);
        let queue = self.front_end.queue();
        queue.add_through(&Transfer::Read.request(0, &data), memory + MIB);
        queue.go();
        server.wait_for_after(lines_before, "corrupted its virtqueue", LIMIT)?;
        thread::sleep(end.saturating_duration_since(Instant::now()));
        Ok(Done { requests: 1, bytes: 0 })
    }

    fn segments(&mut self, end: Instant, clear: Clear, each_is_whole: bool) -> anyhow::Result<Done> {
        let address = self.front_end.data();
        let sectors = match each_is_whole {
            true => self.disk / SECTOR,
            false => self.disk / SECTOR / SEGMENTS,
        };
        let mut list = Vec::new();
        for index in 0..SEGMENTS {
            let start = match each_is_whole {
                true => 0,
                false => index * sectors,
            };
            let flags = match clear {
                Clear::Unmap => UNMAP_FLAG,
                Clear::Discard | Clear::Zero => 0,
            };
            list.extend(start.to_le_bytes());
            list.extend((sectors as u32).to_le_bytes());
            list.extend(flags.to_le_bytes());
        }
        self.front_end.memory.write(address, &list);
        let data = fragments(address, list.len() as u64, list.len() as u64);
        let request = Request {
            kind: match clear {
                Clear::Discard => T_DISCARD,
                Clear::Unmap | Clear::Zero => T_WRITE_ZEROES,
            },
            sector: 0,
            out: &data,
            into: &[],
        };
        self.run_one_at_a_time(end, SEGMENTS * sectors * SECTOR, |_| request.clone())
    }
}

/// Returns a scatter list of `len` bytes, all of whose fragments are the same memory.
fn fragments(address: u64, len: u64, fragment: u64) -> Vec<Buffer> {
    let buffer = Buffer { address, len: fragment as u32 };
    vec![buffer; (len / fragment) as usize]
}
