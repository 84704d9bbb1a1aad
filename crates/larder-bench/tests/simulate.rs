//! A short campaign of the simulator on every stack, and that the simulator finds what it is there to find.

use std::rc::Rc;

use larder_bench::simulate::stack::{Disk, Opened, STACKS, Stack, find};
use larder_bench::simulate::{Summary, simulate};
use larder_block::backend::simulated::{Random, SimulatedDevice};
use larder_block::{
    BlockDevice, BoxFuture, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, Loop, ReadBuf, SizeChanges,
    WriteBuf, WriteFlags, ZeroFlags,
};

/// Seeds for each stack; `larder-bench simulate` runs more.
const SEEDS: u64 = 2000;

#[test]
fn every_stack_keeps_the_contract_through_faults_and_crashes() {
    std::thread::scope(|scope| {
        for stack in STACKS {
            scope.spawn(|| {
                for seed in 0..SEEDS {
                    if let Err(finding) = simulate(*stack, seed) {
                        panic!("{finding}");
                    }
                }
            });
        }
    });
}

#[test]
fn a_seed_always_does_the_same() {
    let stack = find("align-throttle").expect("it is registered");
    let run = |seed| {
        let Summary {
            requests,
            stops,
            virtual_time,
            ..
        } = simulate(stack, seed).expect("keeps its promises");
        (requests, stops, virtual_time)
    };
    for seed in 0..50 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}

/// What a broken layer does wrong.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Completes flushes without flushing.
    Flush,
    /// Takes a FUA write for a plain one.
    Force,
    /// Reports failed writes as done.
    Success,
    /// Reads the sector beside.
    Place,
    /// Never completes a flush.
    Hang,
    /// Lists data as holes.
    Hole,
}

struct Liar {
    lower: Rc<SimulatedDevice>,
    lie: Lie,
}

impl BlockDevice for Liar {
    fn name(&self) -> &Rc<str> {
        self.lower.name()
    }

    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let start = match self.lie {
            Lie::Place if start.get() >= 512 => ByteOffset::new(start.get() - 512),
            _ => start,
        };
        self.lower.read(start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        match self.lie {
            Lie::Force => self.lower.write(start, buffer, WriteFlags::NONE),
            Lie::Success => Io::task(async move {
                let range = start.range(buffer.byte_len());
                match self.lower.write(start, buffer, flags).await {
                    Err(error) if range.end().get() > self.geometry().size.get() => Err(error),
                    _ => Ok(()),
                }
            }),
            _ => self.lower.write(start, buffer, flags),
        }
    }

    fn flush(&self) -> Io<'_> {
        match self.lie {
            Lie::Flush => Io::ready(Ok(())),
            Lie::Hang => Io::task(std::future::pending()),
            _ => self.lower.flush(),
        }
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.lower.discard(range)
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.lower.write_zeroes(range, flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        let extents = self.lower.extents(range, limit);
        Box::pin(async move {
            let mut extents = extents.await?;
            if let Lie::Hole = self.lie {
                extents
                    .iter_mut()
                    .for_each(|extent| extent.kind = larder_block::ExtentKind::Hole);
            }
            Ok(extents)
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        self.lower.size_changes()
    }
}

impl Stack for Lie {
    fn name(&self) -> &'static str {
        "liar"
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        _: Random,
    ) -> BoxFuture<'a, anyhow::Result<Opened>> {
        let lower = Rc::clone(&disks[0]);
        let device = Rc::new(Liar { lower, lie: *self });
        Box::pin(async { Ok(Opened::plain(device)) })
    }
}

#[test]
fn a_layer_that_breaks_a_promise_is_found() {
    const LIES: &[(Lie, &str)] = &[
        (Lie::Flush, "reads as"),
        (Lie::Force, "reads as"),
        (Lie::Success, "reads as"),
        (Lie::Place, "belongs to sector"),
        (Lie::Hang, "hangs"),
        (Lie::Hole, "Hole"),
    ];
    for (lie, expected) in LIES {
        let found: Vec<String> = (0..200)
            .filter_map(|seed| simulate(lie, seed).err())
            .map(|found| found.broken)
            .collect();
        let hits = found.iter().filter(|broken| broken.contains(expected)).count();
        assert!(hits >= 5, "{lie:?} is found {hits} times: {found:?}");
    }
}
