//! The cache over another stack, on a disk of its own, so small that it is always full.

use std::cell::Cell;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{Random, SimulatedDevice};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_cache::{
    Cache, CleanOptions, CreateOptions, Detached, DiskId, Mode, OpenOptions, SettleOptions, Witness, create,
};

use super::stack::{Disk, Opened, Outcome, Stack};

/// Of its disks the last but one is the cache's. The last one is where it is noted that the cache is not to be believed;
/// that one never fails.
pub(super) struct Cached {
    pub(super) name: &'static str,
    pub(super) below: &'static dyn Stack,
    /// Sometimes only the cache has what was written.
    pub(super) write_back: bool,
}

impl Stack for Cached {
    fn name(&self) -> &'static str {
        self.name
    }

    fn below(&self) -> Option<&'static dyn Stack> {
        Some(self.below)
    }

    /// The cache's, and the witness.
    fn own_disks(&self) -> usize {
        2
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        let mut disks = self.below.disks(random);
        disks.push(Disk {
            size: ByteLen::kib(random.pick(&[96, 100, 112, 128, 160, 256, 400])),
            ..Disk::small(random)
        });
        disks.push(Disk {
            size: ByteLen::new(NOTES * SECTOR),
            ..Disk::small(random)
        });
        disks
    }

    fn format<'a>(&'a self, on: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(async move {
            let (below, fast, _) = split(disks)?;
            self.below.format(on, below).await?;
            let mut random = Random::new(fast.seed());
            let options = CreateOptions {
                line_bits: if fast.geometry().size < ByteLen::kib(300) {
                    12
                } else {
                    random.between(12, 14) as u32
                },
                mode: Mode::WriteThrough,
                uuid: [7; 16],
                disk: DiskId::default(),
                disk_size: disks[0].geometry().size,
            };
            let fast: Rc<dyn BlockDevice> = Rc::clone(fast) as _;
            create(&fast, &options).await?;
            Ok(())
        })
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            let (below, fast, witness) = split(disks)?;
            let noted = Noted::new(witness);
            let detached = noted.read().await?;
            let mode = match self.write_back && random.chance(700) {
                true => Some(Mode::WriteBack),
                false => random.pick(&[
                    None,
                    Some(Mode::WriteThrough),
                    Some(Mode::WriteAround),
                    Some(Mode::PassThrough),
                ]),
            };
            let load_ahead = random.chance(500);
            let boot = boot_of(fast, &mut random)?;
            let cleaning = CleanOptions {
                after: random.duration(Duration::from_micros(100), Duration::from_millis(100)),
                percent: random.pick(&[1, 20, 50, 100]),
            };
            let settling = SettleOptions {
                after: random.duration(Duration::from_micros(100), Duration::from_millis(50)),
                lines_max: Some(random.pick(&[1, 4, 16, 64])),
            };
            let lower = self.below.open(on, below, random).await?.device;
            let options = OpenOptions {
                mode,
                disk: DiskId::default(),
                stamp: Box::new(Vec::new),
                detached,
                witness: Box::new(noted),
                boot,
                cleaning,
                load_ahead,
                settling,
            };
            let cache = Cache::open(on, lower, Rc::clone(fast) as _, options).await?;
            Ok(Opened::plain(cache))
        })
    }

    fn failing(&self, disks: usize) -> usize {
        self.below.failing(disks - self.own_disks()) + 1
    }

    fn keeps_host_memory(&self) -> bool {
        self.write_back
    }

    /// What only the cache has fails with the cache, again and again.
    fn fails_only_with_a_disk(&self) -> bool {
        !self.write_back
    }
}

/// Sectors of the witness: each has a note, or zeros. The first one says that the cache is not to be believed, any other
/// one names a range that is superseded.
const NOTES: u64 = 4096;

const SECTOR: u64 = 512;

struct Noted {
    disk: Rc<SimulatedDevice>,
    next: Cell<u64>,
}

impl Noted {
    fn new(disk: &Rc<SimulatedDevice>) -> Self {
        Self {
            disk: Rc::clone(disk),
            next: Cell::new(1),
        }
    }

    async fn read(&self) -> Outcome<Option<Detached>> {
        let mut bytes = vec![0; (NOTES * SECTOR) as usize];
        self.disk.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await?;
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let mut detached = Detached::default();
        for note in 1..NOTES {
            let at = (note * SECTOR) as usize;
            if number(at) != 0 {
                self.next.set(note + 1);
                detached
                    .superseded
                    .push(ByteRange::new(number(at + 8), number(at + 16)));
            }
        }
        Ok((number(0) != 0).then_some(detached))
    }

    async fn write(&self, note: u64, numbers: [u64; 3]) -> std::io::Result<()> {
        let mut bytes = [0; SECTOR as usize];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let at = ByteOffset::new(note * SECTOR);
        let written = self.disk.write(at, WriteBuf::new(&bytes), WriteFlags::FUA);
        written.await.map_err(|error| std::io::Error::other(error.to_string()))
    }
}

impl Witness for Noted {
    fn detach(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(self.write(0, [1, 0, 0]))
    }

    fn supersede(&self, range: ByteRange) -> BoxFuture<'_, std::io::Result<()>> {
        let note = self.next.get();
        self.next.set(note + 1);
        Box::pin(self.write(note, [1, range.start.get(), range.len.get()]))
    }

    fn attach(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(async {
            while self.next.get() > 1 {
                self.next.set(self.next.get() - 1);
                self.write(self.next.get(), [0; 3]).await?;
            }
            self.write(0, [0; 3]).await
        })
    }
}

/// What the host was booted as: another one whenever it has lost its memory.
fn boot_of(fast: &SimulatedDevice, random: &mut Random) -> std::io::Result<[u8; 16]> {
    let file = fast.host_memory(0)?;
    let mut boot = [0; 16];
    if file.read_at(&mut boot, 0)? == 0 {
        boot[..8].copy_from_slice(&(random.between(1, u64::MAX - 1)).to_le_bytes());
        file.write_at(&boot, 0)?;
    }
    Ok(boot)
}

type Disks = [Rc<SimulatedDevice>];

fn split(disks: &Disks) -> Outcome<(&Disks, &Rc<SimulatedDevice>, &Rc<SimulatedDevice>)> {
    match disks {
        [below @ .., fast, witness] => Ok((below, fast, witness)),
        _ => Err("too few disks".into()),
    }
}
