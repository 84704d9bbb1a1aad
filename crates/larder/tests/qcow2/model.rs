//! A model of a disk: for each sector, all contents that the operations allow, now and after a kill.

use crate::operations::{Fill, Operation, SECTOR};

/// A content that a sector may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// The initial content.
    Base,
    /// A fill, and the sector's offset within it.
    Filled(Fill, u64),
}

#[derive(Clone)]
struct Sectors(Vec<Vec<Content>>);

/// Model of a disk.
pub(crate) struct Model {
    base: Vec<u8>,
    now: Sectors,
    /// Contents that are possible after a kill.
    durable: Sectors,
}

impl Sectors {
    fn may_be(&mut self, sector: usize, content: Content) {
        let all = &mut self.0[sector];
        if !all.contains(&content) {
            all.push(content);
        }
    }

    /// Returns an error that names the first sector of `bytes` with an impossible content.
    fn check(&self, base: &[u8], bytes: &[u8]) -> Result<(), String> {
        if bytes.len() != base.len() {
            return Err(format!("{} bytes instead of {}", bytes.len(), base.len()));
        }
        for (index, allowed) in self.0.iter().enumerate() {
            let at = index * SECTOR as usize;
            let (was, is) = (&base[at..at + SECTOR as usize], &bytes[at..at + SECTOR as usize]);
            let fits = allowed.iter().any(|content| match content {
                Content::Base => was == is,
                Content::Filled(fill, from) => fill.sector(*from) == is,
            });
            if !fits {
                return Err(format!(
                    "offset {at} ({at:#x}) holds {:02x?}..., which is none of {allowed:?}; it began as {:02x?}...",
                    &is[..16],
                    &was[..16],
                ));
            }
        }
        Ok(())
    }
}

impl Model {
    /// Creates the model of a disk that durably holds `base`.
    pub(crate) fn new(base: Vec<u8>) -> Self {
        let sectors = Sectors(vec![vec![Content::Base]; base.len() / SECTOR as usize]);
        Self { base, now: sectors.clone(), durable: sectors }
    }

    pub(crate) fn size(&self) -> u64 {
        self.base.len() as u64
    }

    /// Records operations that succeed. After a kill each of them may be missing.
    pub(crate) fn apply(&mut self, operations: &[Operation]) {
        operations.iter().for_each(|operation| self.change(operation));
    }

    fn change(&mut self, operation: &Operation) {
        let first = operation.start / SECTOR;
        for sector in first..first + operation.len / SECTOR {
            let index = sector as usize;
            match operation.fill() {
                Some(fill) => {
                    let content = Content::Filled(fill, sector * SECTOR - operation.start);
                    self.now.0[index] = vec![content];
                    self.durable.may_be(index, content);
                }
                // A discarded sector keeps its content, or becomes zeros.
                None => {
                    self.now.may_be(index, Content::Filled(Fill::Zero, 0));
                    self.durable.may_be(index, Content::Filled(Fill::Zero, 0));
                }
            }
        }
    }

    /// Records a flush: everything so far is durable.
    pub(crate) fn flushed(&mut self) {
        self.durable = self.now.clone();
    }

    /// Checks `bytes`, which a client has read.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<(), String> {
        self.now.check(&self.base, bytes)
    }

    /// Checks `bytes`, the image's content after a kill.
    pub(crate) fn check_after_kill(&self, bytes: &[u8]) -> Result<(), String> {
        self.durable.check(&self.base, bytes)
    }
}
