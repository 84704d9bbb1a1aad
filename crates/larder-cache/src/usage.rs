//! Write budget of the cache device, and the estimated miss ratio of caches of other sizes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::filter::meter::ByteMeter;
use larder_block::{ByteLen, ByteRange};
use larder_policy::curve::{CurvePoint, MissRatioCurve};

use crate::Cache;

/// Lines that the curve samples: 0.25 MiB of memory.
const CURVE_SAMPLE: usize = 4 << 10;

/// Cache sizes that are reported: this cache's size times these powers of two.
const CURVE_POWERS: std::ops::RangeInclusive<i32> = -4..=3;

/// Traffic to the disk, and the statistics of requested lines.
pub(crate) struct Usage {
    pub(crate) disk: Rc<ByteMeter>,
    /// Bytes that may be written in a day.
    endurance: Cell<Option<ByteLen>>,
    /// Written bytes that the policy knows or has counted in advance, if there is a limit.
    budgeted: Cell<u64>,
    curve: RefCell<MissRatioCurve>,
}

impl Usage {
    pub(crate) fn new(disk: Rc<ByteMeter>, endurance: Option<ByteLen>) -> Self {
        Self {
            disk,
            endurance: Cell::new(endurance),
            budgeted: Cell::default(),
            curve: RefCell::new(MissRatioCurve::new(CURVE_SAMPLE)),
        }
    }

    /// Records that the policy has counted bytes that are going to be written.
    pub(crate) fn count_admitted(&self, bytes: u64) {
        self.budgeted.set(self.budgeted.get() + bytes);
    }
}

impl Cache {
    /// Records that a guest requests the lines of a range, and would benefit if they were cached.
    pub(crate) fn record_use(&self, range: ByteRange) {
        let mut curve = self.usage.curve.borrow_mut();
        self.layout.lines_of(range).for_each(|line| curve.record_use(line));
    }

    /// Returns the share of line accesses, 0 to 1, that an LRU cache would have missed so far, for some cache sizes
    /// in bytes, smallest first. Empty before the first access.
    pub fn miss_ratios(&self) -> Vec<(ByteLen, f64)> {
        let curve = self.usage.curve.borrow();
        let points = curve.points();
        if points.is_empty() {
            return Vec::new();
        }
        let point = |power: i32| {
            let lines = (self.layout.slots() as f64 * 2f64.powi(power)) as u64;
            (ByteLen::new(lines * self.layout.line_len()), CurvePoint::miss_ratio(&points, lines))
        };
        CURVE_POWERS.map(point).collect()
    }

    /// Returns the bytes that may be written to the cache device in a day; `None` if unlimited.
    pub fn endurance(&self) -> Option<ByteLen> {
        self.usage.endurance.get()
    }

    /// Limits the bytes that are written to the cache device in a day from now on.
    pub fn set_endurance(&self, endurance: Option<ByteLen>) {
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.report_written(now);
        self.usage.endurance.set(endurance);
        self.usage.budgeted.set(self.fast.bytes().1);
        let budget = endurance.map(ByteLen::get);
        self.index.borrow_mut().policy().set_budget(budget, now);
    }

    /// Reports to the policy the written bytes that it does not know of.
    pub(crate) fn report_written(&self, now: Duration) {
        if self.endurance().is_none() {
            return;
        }
        let budgeted = &self.usage.budgeted;
        let (_, written) = self.fast.bytes();
        if let Some(new_bytes) = written.checked_sub(budgeted.get()).filter(|more| *more > 0) {
            budgeted.set(written);
            self.index.borrow_mut().policy().record_write(new_bytes, now);
        }
    }

    /// Returns whether `bytes` exceed the present write budget of the cache device.
    pub(crate) fn exceeds_write_budget(&self, bytes: ByteLen) -> bool {
        if self.endurance().is_none() {
            return false;
        }
        let now = Duration::from_nanos(self.turn_time().as_nanos());
        self.report_written(now);
        self.index.borrow_mut().policy().exceeds_budget(bytes.get(), now)
    }
}
