//! Replay after a kill: changes that are in the killed process's journal and not in the image are applied again.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use larder_block::event_loop::WorkSlice;
use larder_block::{ByteRange, Failure, IoResult, Operation};

use crate::device::Qcow2;
use crate::entry::L2Entry;
use crate::journal::Record;
use crate::shape::Shape;
use crate::space::STEPS_PER_SLICE;

impl Qcow2 {
    /// Replays the journal's changes in memory; the next commit writes them, unless the image is read-only. Returns
    /// false, without any change, if they do not fit the image's mapping: then another program has changed the image.
    /// Changes past the disk's end belong to an interrupted growth and are skipped.
    ///
    /// Clusters that the last states do not use are then free: clusters are released only after the journal has
    /// discarded the records that ended their use. Clusters that were taken for requests which had not completed stay
    /// taken: a leak.
    pub(crate) async fn replay(&self, records: &[Record]) -> IoResult<bool> {
        let clusters = self.geometry.get().size.get().div_ceil(self.shape.cluster_len());
        let records: Vec<Record> = records.iter().copied().filter(|record| record.cluster < clusters).collect();
        let mut states = match self.collect_states(&records, clusters).await? {
            Some(states) => states,
            None => return Ok(false),
        };
        let read_only = self.geometry.get().read_only;
        // The clusters are taken before any other is allocated.
        for record in records.iter().filter(|_| !read_only && !self.shape.data_file) {
            self.reallocate(*record).await?;
        }
        let mut slice = WorkSlice::new(STEPS_PER_SLICE);
        for record in &records {
            if !read_only {
                self.make_table_writable(record.cluster >> self.shape.table_bits()).await?;
            }
            for step in 0..record.count {
                slice.complete_steps(1).await;
                let cluster = record.cluster + step;
                let new = record.new.advanced(self.shape, step);
                self.load_leaf(cluster).await?;
                self.map.borrow_mut().set_run(cluster, 1, new);
                if let Some(state) = states.get_mut(&cluster) {
                    state.apply(self.shape, new);
                }
            }
        }
        for state in states.values().filter(|_| !read_only) {
            state.abandoned.iter().for_each(|entry| self.free_host(*entry, 1));
        }
        Ok(true)
    }

    /// Returns the old state of each cluster, and its state in the image; `None` if the image has an unknown state.
    async fn collect_states(&self, records: &[Record], clusters: u64) -> IoResult<Option<HashMap<u64, ReplayState>>> {
        let mut states: HashMap<u64, ReplayState> = HashMap::new();
        let mut slice = WorkSlice::new(STEPS_PER_SLICE);
        for record in records {
            let is_in_range = record.count <= clusters && record.cluster <= clusters - record.count;
            if !is_in_range {
                return Ok(None);
            }
            for step in 0..record.count {
                slice.complete_steps(1).await;
                let cluster = record.cluster + step;
                let old = record.old.advanced(self.shape, step);
                let new = record.new.advanced(self.shape, step);
                let state = match states.entry(cluster) {
                    Slot::Occupied(slot) => slot.into_mut(),
                    Slot::Vacant(slot) => {
                        let in_image = self.load_entry(cluster).await?;
                        slot.insert(ReplayState {
                            in_image,
                            current: old,
                            is_counted: in_image == old || has_same_host(in_image, old, self.shape),
                            abandoned: Vec::new(),
                            is_known: in_image == old,
                        })
                    }
                };
                state.is_known |= state.in_image == new;
            }
        }
        Ok(states.values().all(|state| state.is_known).then_some(states))
    }

    async fn load_entry(&self, cluster: u64) -> IoResult<L2Entry> {
        loop {
            if let Some((entry, _)) = self.map.borrow_mut().run_at(cluster, 1) {
                return Ok(entry);
            }
            self.load_leaf(cluster).await?;
        }
    }

    /// Takes the host clusters of a record that the killed process had allocated for it.
    async fn reallocate(&self, record: Record) -> IoResult {
        let host = record.new.host(self.shape);
        let Some(first) = host.map(|host| host >> self.shape.cluster_bits) else {
            return Ok(());
        };
        for cluster in first..first + record.count {
            if host != record.old.host(self.shape) {
                self.mark_used_once(cluster).await?;
            }
            self.space.borrow_mut().mark_written(cluster);
        }
        Ok(())
    }

    /// Sets the refcount of a cluster that was free when it was allocated. The image may have any value: a refcount
    /// that was lowered to 0 is written by the next commit, and the process was killed before that.
    async fn mark_used_once(&self, cluster: u64) -> IoResult {
        let has_block = {
            let refcounts = self.refcounts.borrow();
            refcounts.has_block(refcounts.block_of(cluster))
        };
        if !has_block {
            // Blocks are durable before any of their clusters is used.
            return Err(self.error(Operation::Write, ByteRange::default(), Failure::Invalid));
        }
        if self.refcount(cluster).await? != 1 {
            self.refcounts.borrow_mut().set(cluster, 1);
        }
        Ok(())
    }
}

/// The state of a guest cluster during a replay.
struct ReplayState {
    in_image: L2Entry,
    current: L2Entry,
    /// The refcount of the present host cluster includes this use. If the image has a later state than the first one,
    /// a repair may have freed the first one's cluster. Then it is not freed again, because others may have taken it:
    /// at most a leak.
    is_counted: bool,
    /// Earlier states whose host clusters are no longer used.
    abandoned: Vec<L2Entry>,
    /// The image has one of the states in the journal.
    is_known: bool,
}

/// Returns true if both have the same host cluster.
fn has_same_host(entry: L2Entry, other: L2Entry, shape: Shape) -> bool {
    entry.host(shape).is_some() && entry.host(shape) == other.host(shape)
}

impl ReplayState {
    fn apply(&mut self, shape: Shape, new: L2Entry) {
        let host = self.current.host(shape);
        let keeps_host = host.is_some() && host == new.host(shape);
        if !keeps_host && self.current != new {
            if self.is_counted {
                self.abandoned.push(self.current);
            }
            // The new host cluster was taken before, by `reallocate`.
            self.is_counted = true;
        }
        self.current = new;
    }
}
