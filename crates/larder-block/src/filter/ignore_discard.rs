//! Keeps a disk's space allocated: discards are ignored, and zeroes are written without deallocating. For images that
//! were allocated in full on purpose (QEMU's `discard=ignore`).

use std::rc::Rc;

use crate::device::{BlockDevice, Geometry, Io, check_request};
use crate::error::Operation;
use crate::filter::Filter;
use crate::units::ByteRange;

/// A device that never deallocates space, over one that may. All promises are the lower device's.
pub struct IgnoreDiscard(Rc<dyn BlockDevice>);

impl IgnoreDiscard {
    /// Creates a layer over `lower` that ignores discards.
    pub fn new(lower: Rc<dyn BlockDevice>) -> Self {
        Self(lower)
    }
}

impl Filter for IgnoreDiscard {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.0
    }

    fn geometry(&self) -> Geometry {
        Geometry { discard_granularity: 0, ..self.0.geometry() }
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        Io::ready(check_request(self.0.name(), &Filter::geometry(self), Operation::Discard, range))
    }
}
