//! The replay log: changes that the server has acknowledged and that no flush covers yet.
//!
//! A server that dies may lose such changes, and a flush by its successor would succeed nonetheless. So the log keeps
//! them, with a copy of their data, until a flush that covers them has completed, and they are replayed in order on a
//! new connection.
//!
//! Invariants: entries are in the order in which they were acknowledged; the data of writes lies in the ring in that
//! order; the space used together with the space reserved for in-flight changes stays within the capacity, so that an
//! acknowledged change always fits.

use std::collections::VecDeque;

use crate::buffer::WriteBuf;
use crate::nbd::Command;
use crate::units::ByteRange;

/// The capacity that an entry takes in addition to its data, in bytes.
const ENTRY_COST: u64 = 64;

/// The log of acknowledged, unflushed changes. See the [module](self).
pub(super) struct ReplayLog {
    /// The capacity in bytes; 0 for a disabled log, which stores nothing and accepts everything.
    capacity: u64,
    /// The data of writes, in a ring buffer whose oldest byte is at `head`; empty until the first write.
    ring: Box<[u8]>,
    head: usize,
    /// The number of bytes of `ring` in use.
    filled: usize,
    entries: VecDeque<Entry>,
    /// The number of entries that were ever released.
    released: u64,
    /// The capacity that `entries` take, in bytes.
    used: u64,
    reserved: u64,
}

/// An acknowledged change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) command: Command,
    pub(super) range: ByteRange,
}

impl Entry {
    fn data_len(&self) -> usize {
        match self.command {
            Command::Write => self.range.len.as_usize(),
            _ => 0,
        }
    }
}

/// A position in the log: it covers everything acknowledged before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LogPosition(u64);

/// Returns the capacity in bytes that a change with `data_len` bytes of data takes.
fn cost(data_len: u64) -> u64 {
    data_len + ENTRY_COST
}

impl ReplayLog {
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity,
            ring: Box::default(),
            head: 0,
            filled: 0,
            entries: VecDeque::new(),
            released: 0,
            used: 0,
            reserved: 0,
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Returns the maximum length of a write, of which several fit into the log; `None` if the log is disabled.
    pub(super) fn write_len_max(&self) -> Option<u64> {
        self.is_enabled().then_some(self.capacity / 4)
    }

    /// Returns the capacity in use, in bytes.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_half_full(&self) -> bool {
        self.is_enabled() && self.used >= self.capacity / 2
    }

    /// Reserves capacity for a change with `data_len` bytes of data that is about to be sent. Returns false if there
    /// is not enough now.
    pub(super) fn reserve(&mut self, data_len: u64) -> bool {
        if !self.is_enabled() {
            return true;
        }
        if self.used + self.reserved + cost(data_len) > self.capacity {
            return false;
        }
        self.reserved += cost(data_len);
        true
    }

    /// Releases a reservation, because the change was not acknowledged.
    pub(super) fn unreserve(&mut self, data_len: u64) {
        if self.is_enabled() {
            debug_assert!(self.reserved >= cost(data_len));
            self.reserved -= cost(data_len);
        }
    }

    /// Appends an acknowledged change, for which capacity was reserved. `data` is the data of a write.
    pub(super) fn append(&mut self, entry: Entry, data: Option<WriteBuf<'_>>) {
        if !self.is_enabled() {
            return;
        }
        let data_len = entry.data_len();
        self.unreserve(data_len as u64);
        self.used += cost(data_len as u64);
        self.entries.push_back(entry);
        let Some(data) = data else { return };
        debug_assert_eq!(data.len(), data_len);
        if self.ring.is_empty() {
            self.ring = vec![0; self.capacity as usize].into_boxed_slice();
        }
        let start = (self.head + self.filled) % self.ring.len();
        let first = data_len.min(self.ring.len() - start);
        data.copy_to_slice(&mut self.ring[start..start + first]);
        data.skip(first).copy_to_slice(&mut self.ring[..data_len - first]);
        self.filled += data_len;
        debug_assert!(self.filled <= self.ring.len());
    }

    /// Returns the present end of the log.
    pub(super) fn end_position(&self) -> LogPosition {
        LogPosition(self.released + self.entries.len() as u64)
    }

    /// Removes the changes acknowledged before `position`, which are durable now.
    pub(super) fn release(&mut self, position: LogPosition) {
        while self.released < position.0 {
            let Some(entry) = self.entries.pop_front() else {
                return;
            };
            let data_len = entry.data_len();
            self.released += 1;
            self.used -= cost(data_len as u64);
            self.filled -= data_len;
            if data_len > 0 {
                self.head = (self.head + data_len) % self.ring.len();
            }
        }
    }

    /// Returns every entry with the offset of its data, counted from the oldest data.
    pub(super) fn entries(&self) -> impl Iterator<Item = (Entry, usize)> + '_ {
        let mut at = 0;
        self.entries.iter().map(move |entry| {
            let start = at;
            at += entry.data_len();
            (*entry, start)
        })
    }

    /// Appends an entry's data to `to`; `start` is the offset from [`ReplayLog::entries`].
    pub(super) fn copy_data(&self, entry: &Entry, start: usize, to: &mut Vec<u8>) {
        let len = entry.data_len();
        if len == 0 {
            return;
        }
        let start = (self.head + start) % self.ring.len();
        let first = len.min(self.ring.len() - start);
        to.extend_from_slice(&self.ring[start..start + first]);
        to.extend_from_slice(&self.ring[..len - first]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn contents(log: &ReplayLog) -> Vec<(Entry, Vec<u8>)> {
        let each = log.entries().map(|(entry, start)| {
            let mut data = Vec::new();
            log.copy_data(&entry, start, &mut data);
            (entry, data)
        });
        each.collect()
    }

    proptest! {
        #[test]
        fn log_keeps_order_within_capacity(
            steps in prop::collection::vec((0usize..700, 0u8..8, any::<u8>()), 1..200),
        ) {
            let mut log = ReplayLog::new(4096);
            let mut model: Vec<(Entry, Vec<u8>)> = Vec::new();
            let mut refused = 0;
            for (len, kind, byte) in steps {
                if kind == 0 {
                    let half = model.len() / 2;
                    let position = LogPosition(log.end_position().0 - (model.len() - half) as u64);
                    log.release(position);
                    model.drain(..half);
                } else {
                    let data = vec![byte; if kind == 1 { 0 } else { len.max(1) }];
                    let command = if kind == 1 { Command::Trim } else { Command::Write };
                    let entry = Entry { command, range: ByteRange::new(u64::from(byte), data.len() as u64) };
                    if log.reserve(data.len() as u64) {
                        if kind == 2 {
                            log.unreserve(data.len() as u64);
                            continue;
                        }
                        log.append(entry, (kind != 1).then(|| WriteBuf::new(&data)));
                        model.push((entry, data));
                    } else {
                        refused += 1;
                    }
                }
                prop_assert!(log.used() <= 4096);
                prop_assert_eq!(log.reserved, 0);
                prop_assert_eq!(&contents(&log), &model);
            }
            log.release(log.end_position());
            prop_assert_eq!((log.used(), log.filled, log.len()), (0, 0, 0));
            prop_assert!(refused == 0 || log.reserve(4000));
        }
    }

    #[test]
    fn log_without_capacity_stores_nothing() {
        let mut log = ReplayLog::new(0);
        let data = [1; 512];
        assert!(log.reserve(u64::MAX / 2));
        let entry = Entry { command: Command::Write, range: ByteRange::new(0, 512) };
        log.append(entry, Some(WriteBuf::new(&data)));
        assert_eq!((log.len(), log.used(), log.is_half_full()), (0, 0, false));
    }
}
