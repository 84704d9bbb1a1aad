//! A short campaign of the simulator on every stack, and that the simulator finds what it is there to find.

use std::rc::Rc;

use larder_bench::simulate::memory::MEMORIES;
use larder_bench::simulate::stack::{Disk, Opened, Outcome, STACKS, Stack, find};
use larder_bench::simulate::{Subject, Summary, simulate};
use larder_block::backend::simulated::{Random, SimulatedDevice};
use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, Loop, ReadBuf,
    SizeChanges, WriteBuf, WriteFlags, ZeroFlags,
};

/// Seeds for each stack; `larder-bench simulate` runs more.
const SEEDS: u64 = 2000;

#[test]
fn every_stack_keeps_the_contract_through_faults_and_crashes() {
    std::thread::scope(|scope| {
        for stack in STACKS {
            scope.spawn(|| {
                for seed in 0..SEEDS {
                    if let Err(finding) = simulate(Subject::Stack(*stack), seed) {
                        panic!("{finding}");
                    }
                }
            });
        }
    });
}

/// The same for each kind of memory.
const MEMORY_SEEDS: u64 = 300;

#[test]
fn memory_is_what_was_written_to_it_through_faults_and_kills_of_its_pager() {
    for memory in MEMORIES {
        let mut total = Summary::default();
        for seed in 0..MEMORY_SEEDS {
            match simulate(Subject::Memory(memory), seed) {
                Ok(summary) => {
                    total.stops += summary.stops;
                    total.pages_out += summary.pages_out;
                    total.pages_lost += summary.pages_lost;
                }
                Err(finding) => panic!("{finding}"),
            }
        }
        let name = memory.name();
        assert!(total.stops > MEMORY_SEEDS, "{name}: {total:?}");
        assert!(total.pages_out > 100 * MEMORY_SEEDS, "{name}: {total:?}");
        assert!(total.pages_lost > 0, "{name}: {total:?}");
    }
}

#[test]
fn a_seed_of_memory_always_does_the_same() {
    for memory in MEMORIES {
        let run = |seed| {
            let Summary {
                requests,
                stops,
                pages_out,
                virtual_time,
                ..
            } = simulate(Subject::Memory(memory), seed).expect("keeps its promises");
            (requests, stops, pages_out, virtual_time)
        };
        for seed in 1000..1020 {
            assert_eq!(run(seed), run(seed), "seed {seed}");
        }
    }
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
        } = simulate(Subject::Stack(stack), seed).expect("keeps its promises");
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

    fn open<'a>(&'a self, _: &'a Loop, disks: &'a [Rc<SimulatedDevice>], _: Random) -> BoxFuture<'a, Outcome<Opened>> {
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
            .filter_map(|seed| simulate(Subject::Stack(lie), seed).err())
            .map(|found| found.broken)
            .collect();
        let hits = found.iter().filter(|broken| broken.contains(expected)).count();
        assert!(hits >= 5, "{lie:?} is found {hits} times: {found:?}");
    }
}

/// Where the data of [`Headed`] begins: behind a header that is written when the disk is formatted.
const HEADER: u64 = 4096;

/// A format of the simplest kind: a header, and data behind it.
struct Headed;

struct HeadedDevice {
    lower: Rc<SimulatedDevice>,
    changes: SizeChanges,
}

impl Stack for Headed {
    fn name(&self) -> &'static str {
        "headed"
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn format<'a>(&'a self, _: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(async {
            let mut header = AlignedBuf::zeroed(HEADER as usize);
            header.fill(0x4c);
            disks[0]
                .write(ByteOffset::ZERO, WriteBuf::new(&header), WriteFlags::FUA)
                .await?;
            Ok(())
        })
    }

    fn open<'a>(&'a self, _: &'a Loop, disks: &'a [Rc<SimulatedDevice>], _: Random) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async {
            let lower = Rc::clone(&disks[0]);
            let mut header = AlignedBuf::zeroed(HEADER as usize);
            lower.read(ByteOffset::ZERO, ReadBuf::new(&mut header)).await?;
            if header.iter().any(|byte| *byte != 0x4c) {
                return Err("the header is damaged".into());
            }
            let changes = SizeChanges::default();
            Ok(Opened::plain(Rc::new(HeadedDevice { lower, changes })))
        })
    }

    fn is_resizable(&self) -> bool {
        false
    }
}

impl HeadedDevice {
    fn shifted(range: ByteRange) -> ByteRange {
        // What does not fit lies outside anyway.
        ByteRange::new(range.start.get().saturating_add(HEADER), range.len.get())
    }
}

impl BlockDevice for HeadedDevice {
    fn name(&self) -> &Rc<str> {
        self.lower.name()
    }

    fn geometry(&self) -> Geometry {
        let lower = self.lower.geometry();
        let size = lower.size - ByteLen::new(HEADER);
        Geometry { size, ..lower }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.lower
            .read(Self::shifted(start.range(buffer.byte_len())).start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.lower
            .write(Self::shifted(start.range(buffer.byte_len())).start, buffer, flags)
    }

    fn flush(&self) -> Io<'_> {
        self.lower.flush()
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.lower.discard(Self::shifted(range))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.lower.write_zeroes(Self::shifted(range), flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        let extents = self.lower.extents(Self::shifted(range), limit);
        Box::pin(async {
            let mut extents = extents.await?;
            for extent in &mut extents {
                extent.range = ByteRange::new(extent.range.start.get() - HEADER, extent.range.len.get());
            }
            Ok(extents)
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}

#[test]
fn a_stack_is_formatted_once_and_opened_after_stops_at_any_moment() {
    for seed in 0..SEEDS {
        if let Err(finding) = simulate(Subject::Stack(&Headed), seed) {
            panic!("{finding}");
        }
    }
}
