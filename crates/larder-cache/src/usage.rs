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
    /// There is a budget: bytes written that the policy knows of, or has counted in advance.
    budgeted: Option<Cell<u64>>,
    curve: RefCell<MissRatioCurve>,
}

impl Usage {
    pub(crate) fn new(disk: Rc<Meter>, has_budget: bool) -> Self {
        Self {
            disk,
            budgeted: has_budget.then(Cell::default),
            curve: RefCell::new(MissRatioCurve::new(CURVE_SAMPLE)),
        }
    }

    /// The policy has counted bytes that are going to be written.
    pub(crate) fn admitted(&self, bytes: u64) {
        if let Some(budgeted) = &self.budgeted {
            budgeted.set(budgeted.get() + bytes);
        }
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

    /// Tells the policy what was written that it does not know of.
    pub(crate) fn tell_written(&self, now: Duration) {
        let Some(budgeted) = &self.usage.budgeted else { return };
        let (_, written) = self.fast.bytes();
        if let Some(more) = written.checked_sub(budgeted.get()).filter(|more| *more > 0) {
            budgeted.set(written);
            self.index.borrow_mut().policy().written(more, now);
        }
    }

    /// So many bytes are more than may be written to the cache device now.
    pub(crate) fn is_spent(&self, bytes: ByteLen) -> bool {
        if self.usage.budgeted.is_none() {
            return false;
        }
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.tell_written(now);
        self.index.borrow_mut().policy().is_spent(bytes.get(), now)
    }
}
