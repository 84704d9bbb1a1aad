//! Fills: data read from the disk is stored in the cache, after the guest has got it.
//!
//! A fill reads the disk into its own memory. The guest's read copies from there and completes. Then the data is
//! written to the cache device, and the line is cached once that has completed. Until then other reads of the same
//! bytes are served from the fill's memory, or wait for it. A change of any of its bytes ([`Fills::invalidate`]) makes
//! a fill void: its data is used neither by later reads nor by the cache.
//!
//! The memory of fills is bounded: when none is free, a read goes to the disk and fills nothing.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_block::{AlignedBuf, ByteRange, IoResult, ReadBuf, WriteFlags};
use larder_policy::policy::AccessContext;
use smallvec::SmallVec;

use crate::Cache;
use crate::layout::Line;
use crate::line_parts::LinePart;
use larder_block::signal::Signal;

/// The most bytes of one fill.
pub(crate) const FILL_LEN_MAX: u64 = 64 << 10;
/// The most concurrent fills.
const FILLS_MAX: usize = 32;

/// Fill that is under way.
pub(crate) struct Fill {
    range: ByteRange,
    /// Lines of the range that are to be cached.
    lines: SmallVec<[Line; 16]>,
    context: AccessContext,
    /// Data from the disk, from its arrival to the end of the fill.
    memory: RefCell<Option<Rc<AlignedBuf>>>,
    /// Set while the data is being written to the cache device.
    is_storing: Cell<bool>,
    has_ended: Cell<bool>,
    is_void: Cell<bool>,
}

/// All fills that are under way.
#[derive(Default)]
pub(crate) struct Fills {
    running: RefCell<Vec<Rc<Fill>>>,
    free_buffers: RefCell<Vec<AlignedBuf>>,
    changed: Signal,
}

/// Result of a read's search among the fills.
pub(crate) enum FillLookup {
    /// No fill has usable data of the range.
    Missing,
    /// A fill has all of the range in memory.
    Ready(Rc<Fill>),
    /// A fill is reading all of the range.
    InFlight(Rc<Fill>),
    /// A fill has or reads a part of the range.
    Partial,
}

impl Fills {
    /// Begins a fill, if there is memory and no other fill overlaps the range.
    fn begin(&self, range: ByteRange, lines: &[Line], context: AccessContext) -> Option<Rc<Fill>> {
        let mut running = self.running.borrow_mut();
        let is_overlapped = running.iter().any(|fill| fill.range.overlaps(range));
        if is_overlapped || running.len() >= FILLS_MAX || range.len.get() > FILL_LEN_MAX {
            return None;
        }
        let fill = Rc::new(Fill {
            range,
            lines: lines.into(),
            context,
            memory: RefCell::default(),
            is_storing: Cell::new(false),
            has_ended: Cell::new(false),
            is_void: Cell::new(false),
        });
        running.push(Rc::clone(&fill));
        Some(fill)
    }

    fn end(&self, fill: &Rc<Fill>) {
        self.running.borrow_mut().retain(|other| !Rc::ptr_eq(fill, other));
        fill.has_ended.set(true);
        let memory = fill.memory.borrow_mut().take();
        self.free_buffers.borrow_mut().extend(memory.and_then(Rc::into_inner));
        self.changed.raise();
    }

    /// Makes all fills that overlap `range` void, because a change of it begins.
    pub(crate) fn invalidate(&self, range: ByteRange) {
        for fill in self.running.borrow().iter() {
            if fill.range.overlaps(range) {
                fill.is_void.set(true);
            }
        }
    }

    /// Completes once no fill of `range`, which was forgotten, is writing to the cache device: it could land after a
    /// later write to the same slot, and overwrite that.
    pub(crate) async fn wait_stores(&self, range: ByteRange) {
        let is_storing = |fill: &Rc<Fill>| fill.is_storing.get() && fill.range.overlaps(range);
        self.changed.when(|| !self.running.borrow().iter().any(is_storing)).await;
    }

    /// Returns the state of `range` among the fills.
    pub(crate) fn find(&self, range: ByteRange) -> FillLookup {
        let running = self.running.borrow();
        let mut overlapping = running.iter().filter(|fill| fill.range.overlaps(range) && !fill.is_void.get());
        match overlapping.next() {
            None => FillLookup::Missing,
            Some(fill) if !fill.range.contains(range) => FillLookup::Partial,
            Some(fill) if fill.memory.borrow().is_some() => FillLookup::Ready(Rc::clone(fill)),
            Some(fill) => FillLookup::InFlight(Rc::clone(fill)),
        }
    }

    /// Completes once a fill's data has arrived, or the fill has failed.
    pub(crate) async fn wait_data(&self, fill: &Rc<Fill>) {
        self.changed.when(|| fill.has_ended.get() || fill.memory.borrow().is_some()).await;
    }

    /// Completes once no fill of `range` reads the disk or writes to the cache device.
    pub(crate) async fn wait_ended(&self, range: ByteRange) {
        let overlaps = |fill: &Rc<Fill>| fill.range.overlaps(range);
        self.changed.when(|| !self.running.borrow().iter().any(overlaps)).await;
    }

    /// Completes once no fill is under way.
    pub(crate) async fn wait_idle(&self) {
        self.changed.when(|| self.running.borrow().is_empty()).await;
    }
}

impl Fill {
    /// Returns whether a change of the fill's range has begun since the fill did.
    pub(crate) fn is_void(&self) -> bool {
        self.is_void.get()
    }

    /// Copies data that has arrived to `buffer`; returns whether that was possible.
    pub(crate) fn copy(&self, range: ByteRange, buffer: ReadBuf<'_>) -> bool {
        let memory = self.memory.borrow();
        let Some(memory) = memory.as_ref().filter(|_| !self.is_void.get()) else {
            return false;
        };
        let from = (range.start.get() - self.range.start.get()) as usize;
        buffer.copy_from_slice(&memory[from..from + buffer.len()]);
        true
    }
}

/// Ends a fill if its reader is cancelled.
struct FillGuard<'a> {
    cache: &'a Cache,
    fill: Option<Rc<Fill>>,
}

impl Drop for FillGuard<'_> {
    fn drop(&mut self) {
        if let Some(fill) = self.fill.take() {
            self.cache.fills.end(&fill);
        }
    }
}

impl Cache {
    /// Reads from the disk, and stores the data in the cache if possible.
    pub(crate) async fn read_and_fill(
        &self,
        range: ByteRange,
        buffer: ReadBuf<'_>,
        lines: &[Line],
        context: AccessContext,
    ) -> IoResult {
        let fill = match self.changes.overlaps(range) {
            true => None,
            false => self.fills.begin(range, lines, context),
        };
        let Some(fill) = fill else {
            self.counts.borrow_mut().bypassed_busy += 1;
            return self.lower.read(range.start, buffer).await;
        };
        let mut guard = FillGuard { cache: self, fill: Some(Rc::clone(&fill)) };
        let memory = self.fills.free_buffers.borrow_mut().pop();
        let mut memory = memory.unwrap_or_else(|| AlignedBuf::zeroed(FILL_LEN_MAX as usize));
        let len = range.len.as_usize();
        self.lower.read(range.start, ReadBuf::new(&mut memory[..len])).await?;
        buffer.copy_from_slice(&memory[..len]);
        *fill.memory.borrow_mut() = Some(Rc::new(memory));
        self.fills.changed.raise();
        let fill = guard.fill.take();
        if let (Some(fill), Some(cache)) = (fill, self.this.upgrade()) {
            self.spawn(async move {
                cache.store(&fill).await;
                cache.fills.end(&fill);
            });
        }
        Ok(())
    }

    /// Writes the data of a fill to the cache device.
    async fn store(&self, fill: &Rc<Fill>) {
        let Some(memory) = fill.memory.borrow().clone() else {
            return;
        };
        fill.is_storing.set(true);
        for line in &fill.lines {
            let part = self.layout.part_of(*line, fill.range);
            if fill.is_void.get() || self.has_failed() || self.load(self.layout.set_of(part.line)).await.is_err() {
                return;
            }
            self.store_part(fill, &memory, part).await;
        }
    }

    async fn store_part(&self, fill: &Fill, memory: &Rc<AlignedBuf>, part: LinePart) {
        let from = (part.range.start.get() - fill.range.start.get()) as usize;
        let bytes = from..from + part.range.len.as_usize();
        let is_unproven = self.index.borrow().unproven.contains(part.line);
        if is_unproven && !self.compare_filled(fill, &memory[bytes.clone()], part).await {
            return;
        }
        let Some(target) = self.slot_for_store(part) else {
            return;
        };
        let at = self.data_at(target.slot(), part.range.start);
        let written = self.fast.write(at, Rc::clone(memory), bytes, WriteFlags::NONE);
        match written.await {
            Err(error) => self.fail(&error),
            Ok(()) if fill.is_void.get() => {}
            Ok(()) => {
                self.counts.borrow_mut().filled += part.range.len.get();
                self.finish_store(&target, part, 0, fill.context);
            }
        }
    }
}
