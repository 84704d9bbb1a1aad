//! How large a disk may be that grows while it is used: a growth that failed or was cut off leaves either size.

use larder_block::ByteLen;
use larder_block::backend::simulated::Stop;

/// What is known of the size of a disk.
#[derive(Debug)]
pub(super) struct Sizes {
    /// It is no smaller than this, unless power is lost.
    now: ByteLen,
    /// Nor smaller than this at all.
    durable: ByteLen,
    /// It is one of these.
    possible: Vec<ByteLen>,
    /// Power was lost since it was opened last.
    settled: bool,
}

impl Sizes {
    /// A disk of this size.
    pub(super) fn new(size: ByteLen) -> Self {
        Self {
            now: size,
            durable: size,
            possible: vec![size],
            settled: false,
        }
    }

    /// A growth has been asked for.
    pub(super) fn start_growth(&mut self, to: ByteLen) {
        self.possible.push(to);
    }

    /// What a flush that starts now makes durable; for [`Sizes::end_flush`].
    pub(super) fn start_flush(&self) -> ByteLen {
        self.now
    }

    /// A flush has succeeded. Somebody else may have made the disk smaller meanwhile.
    pub(super) fn end_flush(&mut self, size: ByteLen) {
        self.durable = self.durable.max(size.min(self.now));
    }

    /// The disk says that it has this size.
    ///
    /// # Errors
    /// It cannot.
    pub(super) fn see(&mut self, size: ByteLen) -> Result<(), String> {
        let Self { now, possible, .. } = &self;
        if size < *now || !possible.contains(&size) {
            return Err(format!(
                "the disk has {size}; it may be one of {possible:?}, at least {now}"
            ));
        }
        self.now = size;
        Ok(())
    }

    /// The disk has been opened, and says that it has this size.
    ///
    /// # Errors
    /// It cannot.
    pub(super) fn open(&mut self, size: ByteLen) -> Result<(), String> {
        self.see(size)?;
        if std::mem::take(&mut self.settled) {
            *self = Self::new(size);
        }
        Ok(())
    }

    /// The disk has stopped.
    pub(super) fn stop(&mut self, how: Stop) {
        if how == Stop::PowerLoss {
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
    fn a_growth_under_way_leaves_either_size_and_no_other() {
        for (how, size) in [(Stop::Kill, SMALL), (Stop::Kill, LARGE), (Stop::PowerLoss, LARGE)] {
            let mut sizes = Sizes::new(SMALL);
            sizes.start_growth(LARGE);
            sizes.stop(how);
            assert!(sizes.open(ByteLen::kib(3)).is_err());
            assert!(sizes.open(size).is_ok());
        }
    }

    #[test]
    fn a_growth_that_was_seen_is_undone_by_no_kill_and_when_flushed_by_no_loss_of_power() {
        for (how, flushed, comes_back) in [
            (Stop::Kill, false, false),
            (Stop::PowerLoss, false, true),
            (Stop::PowerLoss, true, false),
        ] {
            let mut sizes = Sizes::new(SMALL);
            sizes.start_growth(LARGE);
            let before = sizes.start_flush();
            sizes.see(LARGE).expect("it was asked for");
            let after = sizes.start_flush();
            sizes.end_flush(if flushed { after } else { before });
            sizes.stop(how);
            assert_eq!(sizes.open(SMALL).is_ok(), comes_back, "{how:?} {flushed}");
        }
    }
}
