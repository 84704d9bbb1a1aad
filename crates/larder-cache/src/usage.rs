//! What the cache device is written, against what it may be; and what a cache of another size would do.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::filter::meter::Meter;
use larder_block::{ByteLen, ByteRange};
use larder_policy::curve::{CurvePoint, MissRatioCurve};

use crate::Cache;

/// Lines that the curve is made from: 0.25 MiB of memory.
const CURVE_SAMPLE: usize = 4 << 10;

/// Sizes that the curve is told of: this one's, and by powers of two smaller and larger ones.
const CURVE_POWERS: std::ops::RangeInclusive<i32> = -4..=3;

/// What goes to the disk, and what is asked for.
pub(crate) struct Usage {
    pub(crate) disk: Rc<Meter>,
    /// Bytes that may be written in a day.
    endurance: Cell<Option<ByteLen>>,
    /// Bytes written that the policy knows of, or has counted in advance, if that is limited.
    budgeted: Cell<u64>,
    curve: RefCell<MissRatioCurve>,
}

impl Usage {
    pub(crate) fn new(disk: Rc<Meter>, endurance: Option<ByteLen>) -> Self {
        Self {
            disk,
            endurance: Cell::new(endurance),
            budgeted: Cell::default(),
            curve: RefCell::new(MissRatioCurve::new(CURVE_SAMPLE)),
        }
    }

    /// The policy has counted bytes that are going to be written.
    pub(crate) fn admitted(&self, bytes: u64) {
        self.budgeted.set(self.budgeted.get() + bytes);
    }
}

impl Cache {
    /// A guest asks for the lines of a range, and a cache that had them would be of use.
    pub(crate) fn uses(&self, range: ByteRange) {
        let mut curve = self.usage.curve.borrow_mut();
        self.shape.lines_of(range).for_each(|line| curve.used(line));
    }

    /// How often an LRU cache of some sizes, in bytes of the disk, would have missed lines so far, 0 to 1. From the
    /// smallest on; empty if nothing was used.
    pub fn miss_ratios(&self) -> Vec<(ByteLen, f64)> {
        let curve = self.usage.curve.borrow();
        let points = curve.points();
        if points.is_empty() {
            return Vec::new();
        }
        let of = |power: i32| {
            let lines = (self.shape.slots() as f64 * 2f64.powi(power)) as u64;
            (
                ByteLen::new(lines * self.shape.line_len()),
                CurvePoint::miss_ratio(&points, lines),
            )
        };
        CURVE_POWERS.map(of).collect()
    }

    /// What may be written to the cache device in a day; `None`: any number of bytes.
    pub fn endurance(&self) -> Option<ByteLen> {
        self.usage.endurance.get()
    }

    /// Has it be written so much in a day at most from now on.
    pub fn set_endurance(&self, endurance: Option<ByteLen>) {
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.tell_written(now);
        self.usage.endurance.set(endurance);
        self.usage.budgeted.set(self.fast.bytes().1);
        let budget = endurance.map(ByteLen::get);
        self.index.borrow_mut().policy().set_budget(budget, now);
    }

    /// Tells the policy what was written that it does not know of.
    pub(crate) fn tell_written(&self, now: Duration) {
        if self.endurance().is_none() {
            return;
        }
        let budgeted = &self.usage.budgeted;
        let (_, written) = self.fast.bytes();
        if let Some(more) = written.checked_sub(budgeted.get()).filter(|more| *more > 0) {
            budgeted.set(written);
            self.index.borrow_mut().policy().written(more, now);
        }
    }

    /// So many bytes are more than may be written to the cache device now.
    pub(crate) fn is_spent(&self, bytes: ByteLen) -> bool {
        if self.endurance().is_none() {
            return false;
        }
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.tell_written(now);
        self.index.borrow_mut().policy().is_spent(bytes.get(), now)
    }
}
