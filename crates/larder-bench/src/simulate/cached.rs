//! The cache over another stack, on a disk of its own, so small that it is always full.

use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{Medium, Random, SimulatedDevice};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteOffset, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_cache::{Cache, CreateOptions, DiskId, Mode, OpenOptions, SettleOptions, Witness, create};

use super::stack::{Disk, Opened, Outcome, Stack};

/// Of its disks the last but one is the cache's. The last one is where it is noted that the cache is not to be believed;
/// that one never fails.
pub(super) struct Cached {
    pub(super) name: &'static str,
    pub(super) below: &'static dyn Stack,
}

impl Stack for Cached {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        let mut disks = self.below.disks(random);
        disks.push(Disk {
            size: ByteLen::kib(random.pick(&[96, 100, 112, 128, 160, 256, 400])),
            ..Disk::small(random)
        });
        disks.push(Disk {
            size: ByteLen::new(WITNESS.len() as u64),
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
            let mut noted = WITNESS;
            witness.read(ByteOffset::ZERO, ReadBuf::new(&mut noted)).await?;
            let mode = random.pick(&[
                None,
                Some(Mode::WriteThrough),
                Some(Mode::WriteAround),
                Some(Mode::PassThrough),
            ]);
            let load_ahead = random.chance(500);
            let settling = SettleOptions {
                after: random.duration(Duration::from_micros(100), Duration::from_millis(50)),
                lines_max: Some(random.pick(&[1, 4, 16, 64])),
            };
            let lower = self.below.open(on, below, random).await?.device;
            let options = OpenOptions {
                mode,
                disk: DiskId::default(),
                stamp: Box::new(Vec::new),
                is_detached: noted != WITNESS,
                witness: Box::new(Noted(Rc::clone(witness))),
                load_ahead,
                settling,
            };
            let cache = Cache::open(on, lower, Rc::clone(fast) as _, options).await?;
            witness
                .write(ByteOffset::ZERO, WriteBuf::new(&WITNESS), WriteFlags::FUA)
                .await?;
            Ok(Opened::plain(cache))
        })
    }

    fn check(&self, media: &[Medium]) -> Result<(), String> {
        self.below.check(&media[..media.len() - 2])
    }

    fn tables(&self, media: &[Medium]) -> Vec<[u64; 2]> {
        self.below.tables(&media[..media.len() - 2])
    }

    fn failing(&self, disks: usize) -> usize {
        self.below.failing(disks - 2) + 1
    }

    fn is_resizable(&self) -> bool {
        self.below.is_resizable()
    }

    fn survives_kill(&self) -> bool {
        self.below.survives_kill()
    }

    fn keeps_host_memory(&self) -> bool {
        self.below.keeps_host_memory()
    }
}

/// A sector that says that the cache is to be believed.
const WITNESS: [u8; 512] = [0; 512];

struct Noted(Rc<SimulatedDevice>);

impl Witness for Noted {
    fn detach(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(async {
            let written = self
                .0
                .write(ByteOffset::ZERO, WriteBuf::new(&[1; 512]), WriteFlags::FUA);
            written.await.map_err(|error| std::io::Error::other(error.to_string()))
        })
    }
}

type Disks = [Rc<SimulatedDevice>];

fn split(disks: &Disks) -> Outcome<(&Disks, &Rc<SimulatedDevice>, &Rc<SimulatedDevice>)> {
    match disks {
        [below @ .., fast, witness] => Ok((below, fast, witness)),
        _ => Err("too few disks".into()),
    }
}
