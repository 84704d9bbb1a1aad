//! A repair that is interrupted anywhere leaves the image no worse.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Geometry, Io, IoResult, Loop, ReadBuf, SizeChanges,
    WriteBuf, WriteFlags, ZeroFlags,
};
use larder_qcow2::check::{CheckOptions, CheckReport, Repair, check, repair};

use crate::damage::{Bytes, DAMAGES};
use crate::made::{KINDS, Made};
use crate::{qemu_img, text_of};

/// A file in memory that records its changes.
struct Recorder {
    name: Rc<str>,
    bytes: RefCell<Vec<u8>>,
    log: RefCell<Vec<Change>>,
    size: Cell<u64>,
    changes: SizeChanges,
}

enum Change {
    Write(usize, Vec<u8>),
    Grow(usize),
    Flush,
}

impl Recorder {
    /// Creates a recorder; the file is padded to whole blocks.
    fn new(bytes: &[u8]) -> Rc<Self> {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        Rc::new(Self {
            name: "recorder".into(),
            size: Cell::new(bytes.len() as u64),
            bytes: RefCell::new(bytes),
            log: RefCell::default(),
            changes: SizeChanges::default(),
        })
    }
}

impl BlockDevice for Recorder {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: ByteLen::new(self.size.get()),
            block_size: 512,
            physical_block_size: 512,
            discard_granularity: 512,
            memory_alignment: 1,
            read_only: false,
            fast_zeroes: false,
        }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let at = start.get() as usize;
        buffer.copy_from_slice(&self.bytes.borrow()[at..at + buffer.len()]);
        Io::ready(Ok(()))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, _: WriteFlags) -> Io<'a> {
        let at = start.get() as usize;
        let mut new = vec![0; buffer.len()];
        buffer.copy_to_slice(&mut new);
        self.bytes.borrow_mut()[at..at + new.len()].copy_from_slice(&new);
        self.log.borrow_mut().push(Change::Write(at, new));
        Io::ready(Ok(()))
    }

    fn flush(&self) -> Io<'_> {
        self.log.borrow_mut().push(Change::Flush);
        Io::ready(Ok(()))
    }

    fn discard(&self, _: ByteRange) -> Io<'_> {
        unreachable!("a repair does not discard")
    }

    fn write_zeroes(&self, _: ByteRange, _: ZeroFlags) -> Io<'_> {
        unreachable!("a repair does not zero")
    }

    fn extents(&self, _: ByteRange, _: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        unreachable!("a repair does not ask for extents")
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        if size.get() > self.size.get() {
            self.size.set(size.get());
            self.bytes.borrow_mut().resize(size.as_usize(), 0);
            self.log.borrow_mut().push(Change::Grow(size.as_usize()));
        }
        Box::pin(std::future::ready(Ok(())))
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}

/// Returns the image after each step, and with each single write since the last flush missing.
fn crashed(before: &[u8], log: &[Change]) -> Vec<Vec<u8>> {
    let apply = |bytes: &mut Vec<u8>, change: &Change| match change {
        Change::Write(at, new) => bytes[*at..*at + new.len()].copy_from_slice(new),
        Change::Grow(size) => bytes.resize(bytes.len().max(*size), 0),
        Change::Flush => {}
    };
    let mut images = Vec::new();
    let mut durable = before.to_vec();
    for part in log.split_inclusive(|change| matches!(change, Change::Flush)) {
        let mut all = durable.clone();
        for change in part {
            apply(&mut all, change);
            images.push(all.clone());
        }
        for left_out in 0..part.len() {
            let mut bytes = durable.clone();
            bytes.resize(all.len(), 0);
            let others = part.iter().enumerate().filter(|(index, _)| *index != left_out);
            others.for_each(|(_, change)| apply(&mut bytes, change));
            images.push(bytes);
        }
        durable = all;
    }
    images.sort();
    images.dedup();
    images
}

/// Returns the errors that may cost data. A missing flag only costs time, and a flag to be cleared was there before.
fn dangers(report: &CheckReport) -> Vec<String> {
    let all = report.findings.iter().map(ToString::to_string);
    all.filter(|text| text.starts_with("error") && !text.contains("is wrongly flagged")).collect()
}

#[test]
fn interrupted_repair_is_safe_and_repeatable() {
    let on = Loop::simulated().expect("a loop");
    let options = CheckOptions::default();
    for kind in [&KINDS[0], &KINDS[4]] {
        let made = Made::new(kind);
        let sound = Bytes::of(&made.image);
        for damage in DAMAGES.iter().filter(|damage| damage.mendable && (damage.fits)(kind)) {
            let what = format!("{}: {}", kind.name, damage.name);
            let mut bytes = Bytes(sound.0.clone());
            (damage.apply)(&mut bytes);
            let at_first = Recorder::new(&bytes.0);
            let before = at_first.bytes.borrow().clone();
            let file: Rc<dyn BlockDevice> = Rc::clone(&at_first) as Rc<dyn BlockDevice>;
            let repaired = on.block_on(repair(&file, Repair::All, options)).expect("it can");
            let known = dangers(&repaired.before);
            let marked = repaired.before.dirty || repaired.before.corrupt;
            Bytes(at_first.bytes.borrow().clone()).put(&made.image);
            let expected = made.content("expected.raw").expect("QEMU reads what was repaired");
            for (index, crashed) in crashed(&before, &at_first.log.borrow()).iter().enumerate() {
                let again: Rc<dyn BlockDevice> = Recorder::new(crashed);
                let report = on.block_on(check(&again, options)).expect("it can");
                let new: Vec<String> = dangers(&report).into_iter().filter(|text| !known.contains(text)).collect();
                assert_eq!(new, Vec::<String>::new(), "{what}, crash {index}");
                let is_marked = report.dirty || report.corrupt;
                assert!(!marked || is_marked || report.errors == 0, "{what}, crash {index}: unmarked too early");
                let twice = Recorder::new(crashed);
                let file: Rc<dyn BlockDevice> = Rc::clone(&twice) as Rc<dyn BlockDevice>;
                let repaired = on.block_on(repair(&file, Repair::All, options)).expect("it can");
                assert!(repaired.after.is_clean(), "{what}, crash {index}: {:#?}", repaired.after);
                if index % 4 == 0 {
                    Bytes(twice.bytes.borrow().clone()).put(&made.image);
                    let (expected, image) = (text_of(&expected), text_of(&made.image));
                    let compare = ["compare", "-f", "raw", "-F", "qcow2", expected, image];
                    let (code, said, errors) = qemu_img(&compare);
                    assert_eq!(code, 0, "{what}, crash {index}: {said} {errors}");
                }
            }
        }
    }
}
