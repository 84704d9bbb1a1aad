//! A short campaign of the simulator on every stack, and tests that the simulator detects violations.

use std::rc::Rc;

use larder_bench::simulate::memory::MEMORY_SUBJECTS;
use larder_bench::simulate::stack::{Disk, Opened, Outcome, STACKS, Stack, find};
use larder_bench::simulate::{Subject, Summary, simulate};
use larder_block::backend::simulated::{SeededRng, SimulatedDevice};
use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, Loop, ReadBuf,
    SizeChanges, WriteBuf, WriteFlags, ZeroFlags,
};

/// Seeds for each stack; `larder-bench simulate` runs more.
const SEEDS: u64 = 2000;

#[test]
/// Every stack keeps the contract of block devices through faults and crashes.
fn stacks_keep_contract_through_faults() {
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

/// Seeds for each kind of memory.
const MEMORY_SEEDS: u64 = 300;

#[test]
/// Memory reads as it was written through faults and kills of its pager.
fn memory_survives_faults_and_pager_kills() {
    for memory in MEMORY_SUBJECTS {
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
fn memory_seed_is_deterministic() {
    for memory in MEMORY_SUBJECTS {
        let run = |seed| {
            let Summary { requests, stops, pages_out, virtual_time, .. } =
                simulate(Subject::Memory(memory), seed).expect("the seed has no violation");
            (requests, stops, pages_out, virtual_time)
        };
        for seed in 1000..1020 {
            assert_eq!(run(seed), run(seed), "seed {seed}");
        }
    }
}

#[test]
fn stack_seed_is_deterministic() {
    let stack = find("align-throttle").expect("the stack is registered");
    let run = |seed| {
        let Summary { requests, stops, virtual_time, .. } =
            simulate(Subject::Stack(stack), seed).expect("the seed has no violation");
        (requests, stops, virtual_time)
    };
    for seed in 0..50 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}

/// Defect of a broken layer.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Completes flushes without flushing.
    Flush,
    /// Ignores the FUA flag of writes.
    Force,
    /// Reports failed writes as successful.
    Success,
    /// Reads from the preceding sector.
    Place,
    /// Never completes a flush.
    Hang,
    /// Reports data as holes.
    Hole,
}

struct DefectiveDevice {
    lower: Rc<SimulatedDevice>,
    lie: Lie,
}

impl BlockDevice for DefectiveDevice {
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
                extents.iter_mut().for_each(|extent| extent.kind = larder_block::ExtentKind::Hole);
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

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        _: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let lower = Rc::clone(&disks[0]);
        let device = Rc::new(DefectiveDevice { lower, lie: *self });
        Box::pin(async { Ok(Opened::plain(device)) })
    }
}

#[test]
/// The simulator detects each kind of broken layer.
fn broken_layer_is_detected() {
    const LIES: &[(Lie, &str)] = &[
        (Lie::Flush, "reads as"),
        (Lie::Force, "reads as"),
        (Lie::Success, "reads as"),
        (Lie::Place, "belongs to sector"),
        (Lie::Hang, "hangs"),
        (Lie::Hole, "Hole"),
    ];
    for (lie, expected) in LIES {
        let found: Vec<String> =
            (0..200).filter_map(|seed| simulate(Subject::Stack(lie), seed).err()).map(|found| found.broken).collect();
        let hits = found.iter().filter(|broken| broken.contains(expected)).count();
        assert!(hits >= 5, "{lie:?} is detected {hits} times: {found:?}");
    }
}

/// Offset of the data of [`HeaderStack`], after a header that is written when the disk is formatted.
const HEADER: u64 = 4096;

/// A minimal format: a header, followed by data.
struct HeaderStack;

struct HeadedDevice {
    lower: Rc<SimulatedDevice>,
    changes: SizeChanges,
}

impl Stack for HeaderStack {
    fn name(&self) -> &'static str {
        "headed"
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn format<'a>(&'a self, _: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(async {
            let mut header = AlignedBuf::zeroed(HEADER as usize);
            header.fill(0x4c);
            disks[0].write(ByteOffset::ZERO, WriteBuf::new(&header), WriteFlags::FUA).await?;
            Ok(())
        })
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        _: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
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
        // A range that does not fit is past the end anyway.
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
        self.lower.read(Self::shifted(start.range(buffer.byte_len())).start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.lower.write(Self::shifted(start.range(buffer.byte_len())).start, buffer, flags)
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
/// A stack that needs formatting is formatted once, and opened after stops at any moment.
fn formatted_stack_reopens_after_any_stop() {
    for seed in 0..SEEDS {
        if let Err(finding) = simulate(Subject::Stack(&HeaderStack), seed) {
            panic!("{finding}");
        }
    }
}
