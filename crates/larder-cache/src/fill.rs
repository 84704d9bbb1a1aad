//! Brings what was read from the disk into the cache, after the guest has got it.
//!
//! A fill is a read of the disk into memory of ours. The guest's read copies from there and is over; then the data is
//! written to the cache device, and the line is in the cache once it is there. Until then other reads of the same bytes
//! are served from that memory, or wait for it. A change of any of its bytes ([`Fills::forget`]) makes a fill void: what
//! it has is not believed any more, neither by reads that come later nor by the cache.
//!
//! Bounded by its memory: when none is free a read goes to the disk and is not kept.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_block::{AlignedBuf, ByteRange, IoResult, ReadBuf, WriteFlags};
use larder_policy::policy::Context;
use smallvec::SmallVec;

use crate::Cache;
use crate::parts::Part;
use crate::shape::Line;
use larder_block::signal::Signal;

/// Bytes of one fill at most.
pub(crate) const FILL_LEN: u64 = 64 << 10;
/// Fills at the same time.
const FILLS_MAX: usize = 32;

/// One fill.
pub(crate) struct Fill {
    range: ByteRange,
    /// Those of its lines that are to be brought in.
    lines: SmallVec<[Line; 16]>,
    context: Context,
    /// Once it has arrived, and until the fill ends.
    memory: RefCell<Option<Rc<AlignedBuf>>>,
    /// It is being written to the cache device.
    is_stored: Cell<bool>,
    ended: Cell<bool>,
    void: Cell<bool>,
}

/// All that are under way.
#[derive(Default)]
pub(crate) struct Fills {
    running: RefCell<Vec<Rc<Fill>>>,
    idle: RefCell<Vec<AlignedBuf>>,
    waiting: Signal,
}

/// What a read finds.
pub(crate) enum Found {
    /// Nothing that it may use.
    Nothing,
    /// All of it is in memory.
    Here(Rc<Fill>),
    /// All of it is on its way.
    Coming(Rc<Fill>),
    /// A part of it is there or on its way.
    Some,
}

impl Fills {
    /// Begins one, if there is memory, and nothing of it is being brought in already.
    fn begin(&self, range: ByteRange, lines: &[Line], context: Context) -> Option<Rc<Fill>> {
        let mut running = self.running.borrow_mut();
        let is_taken = running.iter().any(|fill| fill.range.overlaps(range));
        if is_taken || running.len() >= FILLS_MAX || range.len.get() > FILL_LEN {
            return None;
        }
        let fill = Rc::new(Fill {
            range,
            lines: lines.into(),
            context,
            memory: RefCell::default(),
            is_stored: Cell::new(false),
            ended: Cell::new(false),
            void: Cell::new(false),
        });
        running.push(Rc::clone(&fill));
        Some(fill)
    }

    fn end(&self, fill: &Rc<Fill>) {
        self.running.borrow_mut().retain(|other| !Rc::ptr_eq(fill, other));
        fill.ended.set(true);
        let memory = fill.memory.borrow_mut().take();
        self.idle.borrow_mut().extend(memory.and_then(Rc::into_inner));
        self.waiting.raise();
    }

    /// A change of `range` begins: what is being brought in of it is not believed.
    pub(crate) fn forget(&self, range: ByteRange) {
        for fill in self.running.borrow().iter() {
            if fill.range.overlaps(range) {
                fill.void.set(true);
            }
        }
    }

    /// Completes once nothing of `range`, which was forgotten, is on its way to the cache device: it could land on what is
    /// written there after it.
    pub(crate) async fn landing(&self, range: ByteRange) {
        let is_landing = |fill: &Rc<Fill>| fill.is_stored.get() && fill.range.overlaps(range);
        self.waiting
            .when(|| !self.running.borrow().iter().any(is_landing))
            .await;
    }

    /// What there is of `range`.
    pub(crate) fn find(&self, range: ByteRange) -> Found {
        let running = self.running.borrow();
        let mut near = running
            .iter()
            .filter(|fill| fill.range.overlaps(range) && !fill.void.get());
        match near.next() {
            None => Found::Nothing,
            Some(fill) if !fill.range.contains(range) => Found::Some,
            Some(fill) if fill.memory.borrow().is_some() => Found::Here(Rc::clone(fill)),
            Some(fill) => Found::Coming(Rc::clone(fill)),
        }
    }

    /// Completes once a fill has arrived, or has failed.
    pub(crate) async fn arrival(&self, fill: &Rc<Fill>) {
        self.waiting
            .when(|| fill.ended.get() || fill.memory.borrow().is_some())
            .await;
    }

    /// Completes once nothing of `range` is being brought in, nor written to the cache device.
    pub(crate) async fn ended(&self, range: ByteRange) {
        let is_near = |fill: &Rc<Fill>| fill.range.overlaps(range);
        self.waiting.when(|| !self.running.borrow().iter().any(is_near)).await;
    }

    /// Completes once none is under way.
    pub(crate) async fn idle(&self) {
        self.waiting.when(|| self.running.borrow().is_empty()).await;
    }
}

impl Fill {
    /// A change of what it has read has begun since.
    pub(crate) fn is_void(&self) -> bool {
        self.void.get()
    }

    /// Copies what has arrived; whether it could.
    pub(crate) fn copy(&self, range: ByteRange, buffer: ReadBuf<'_>) -> bool {
        let memory = self.memory.borrow();
        let Some(memory) = memory.as_ref().filter(|_| !self.void.get()) else {
            return false;
        };
        let from = (range.start.get() - self.range.start.get()) as usize;
        buffer.copy_from_slice(&memory[from..from + buffer.len()]);
        true
    }
}

/// Ends a fill whose reader has gone.
struct Guard<'a> {
    cache: &'a Cache,
    fill: Option<Rc<Fill>>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(fill) = self.fill.take() {
            self.cache.fills.end(&fill);
        }
    }
}

impl Cache {
    /// Reads from the disk, and keeps what is read if it can.
    pub(crate) async fn read_and_fill(
        &self,
        range: ByteRange,
        buffer: ReadBuf<'_>,
        lines: &[Line],
        context: Context,
    ) -> IoResult {
        let fill = match self.changes.touch(range) {
            true => None,
            false => self.fills.begin(range, lines, context),
        };
        let Some(fill) = fill else {
            self.counts.borrow_mut().bypassed_busy += 1;
            return self.lower.read(range.start, buffer).await;
        };
        let mut guard = Guard {
            cache: self,
            fill: Some(Rc::clone(&fill)),
        };
        let memory = self.fills.idle.borrow_mut().pop();
        let mut memory = memory.unwrap_or_else(|| AlignedBuf::zeroed(FILL_LEN as usize));
        let len = range.len.as_usize();
        self.lower.read(range.start, ReadBuf::new(&mut memory[..len])).await?;
        buffer.copy_from_slice(&memory[..len]);
        *fill.memory.borrow_mut() = Some(Rc::new(memory));
        self.fills.waiting.raise();
        let fill = guard.fill.take();
        if let (Some(fill), Some(cache)) = (fill, self.this.upgrade()) {
            self.spawn(async move {
                cache.store(&fill).await;
                cache.fills.end(&fill);
            });
        }
        Ok(())
    }

    /// Writes what a fill has brought to the cache device.
    async fn store(&self, fill: &Rc<Fill>) {
        let Some(memory) = fill.memory.borrow().clone() else {
            return;
        };
        fill.is_stored.set(true);
        for line in &fill.lines {
            let part = self.shape.part_of(*line, fill.range);
            if fill.void.get() || self.has_failed() || self.load(self.shape.set_of(part.line)).await.is_err() {
                return;
            }
            self.store_part(fill, &memory, part).await;
        }
    }

    async fn store_part(&self, fill: &Fill, memory: &Rc<AlignedBuf>, part: Part) {
        let from = (part.range.start.get() - fill.range.start.get()) as usize;
        let bytes = from..from + part.range.len.as_usize();
        let is_unproven = self.index.borrow().unproven.contains(part.line);
        if is_unproven && !self.compare_filled(fill, &memory[bytes.clone()], part).await {
            return;
        }
        let Some(place) = self.place_for(part) else {
            return;
        };
        let at = self.data_at(place.slot(), part.range.start);
        let written = self.fast.write(at, Rc::clone(memory), bytes, WriteFlags::NONE);
        match written.await {
            Err(error) => self.fail(&error),
            Ok(()) if fill.void.get() => {}
            Ok(()) => {
                self.counts.borrow_mut().filled += part.range.len.get();
                self.is_stored(&place, part, 0, fill.context);
            }
        }
    }
}
