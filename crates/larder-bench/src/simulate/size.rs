//! Allowed sizes of a disk that grows while it is in use: an incomplete or failed growth leaves either size.

use larder_block::ByteLen;
use larder_block::backend::simulated::DeviceStop;

/// Knowledge of the disk's size.
#[derive(Debug)]
pub(super) struct SizeOracle {
    /// Minimum size, except after a power loss.
    now: ByteLen,
    /// Minimum size, even after a power loss.
    durable: ByteLen,
    /// All possible sizes.
    possible: Vec<ByteLen>,
    /// True if power was lost since the disk was last opened.
    settled: bool,
}

impl SizeOracle {
    /// Creates the state of a disk of this size.
    pub(super) fn new(size: ByteLen) -> Self {
        Self { now: size, durable: size, possible: vec![size], settled: false }
    }

    /// Records the start of a growth.
    pub(super) fn start_growth(&mut self, to: ByteLen) {
        self.possible.push(to);
    }

    /// Returns the size that a flush starting now makes durable, for [`SizeOracle::end_flush`].
    pub(super) fn start_flush(&self) -> ByteLen {
        self.now
    }

    /// Records a successful flush. Another process may have shrunk the disk meanwhile.
    pub(super) fn end_flush(&mut self, size: ByteLen) {
        self.durable = self.durable.max(size.min(self.now));
    }

    /// Checks the size that the disk reports.
    ///
    /// # Errors
    /// If the size is not allowed.
    pub(super) fn see(&mut self, size: ByteLen) -> Result<(), String> {
        let Self { now, possible, .. } = &self;
        if size < *now || !possible.contains(&size) {
            return Err(format!("the disk has a size of {size}; allowed are {possible:?}, at least {now}"));
        }
        self.now = size;
        Ok(())
    }

    /// Checks the size that a newly opened disk reports.
    ///
    /// # Errors
    /// If the size is not allowed.
    pub(super) fn open(&mut self, size: ByteLen) -> Result<(), String> {
        self.see(size)?;
        if std::mem::take(&mut self.settled) {
            *self = Self::new(size);
        }
        Ok(())
    }

    /// Records a stop of the disk.
    pub(super) fn stop(&mut self, how: DeviceStop) {
        if how == DeviceStop::PowerLoss {
            self.now = self.durable;
            self.settled = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: ByteLen = ByteLen::kib(1);
    const LARGE: ByteLen = ByteLen::kib(2);

    #[test]
    /// A stop during a growth leaves the old or the new size.
    fn interrupted_growth_leaves_either_size() {
        for (how, size) in [(DeviceStop::Kill, SMALL), (DeviceStop::Kill, LARGE), (DeviceStop::PowerLoss, LARGE)] {
            let mut sizes = SizeOracle::new(SMALL);
            sizes.start_growth(LARGE);
            sizes.stop(how);
            assert!(sizes.open(ByteLen::kib(3)).is_err());
            assert!(sizes.open(size).is_ok());
        }
    }

    #[test]
    /// No kill undoes a growth that was reported, and no power loss one that was flushed.
    fn reported_growth_survives_stop() {
        for (how, flushed, old_size_allowed) in [
            (DeviceStop::Kill, false, false),
            (DeviceStop::PowerLoss, false, true),
            (DeviceStop::PowerLoss, true, false),
        ] {
            let mut sizes = SizeOracle::new(SMALL);
            sizes.start_growth(LARGE);
            let before = sizes.start_flush();
            sizes.see(LARGE).expect("the growth was requested");
            let after = sizes.start_flush();
            sizes.end_flush(if flushed { after } else { before });
            sizes.stop(how);
            assert_eq!(sizes.open(SMALL).is_ok(), old_size_allowed, "{how:?} {flushed}");
        }
    }
}
