//! `larder disk check --discard-journal`: discards the changes that a killed server left in a journal, and reports
//! them.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use larder_block::ByteRange;
use larder_qcow2::header::Header;
use larder_vm::image::ImageAddress;
use larder_vm::image::journal::{self, JournalStatus, PendingJournal};
use serde_json::{Value, json};

use crate::disk_image::{format_date, format_size};

/// Maximum number of ranges that are listed individually.
const RANGES_LISTED_MAX: usize = 8;

/// State of the journal and the image, read before anything is changed.
pub(crate) struct JournalDiscard {
    left: JournalStatus,
    /// Modification times of the journal and of the image, in seconds since 1970.
    time_range: Option<(u64, u64)>,
}

/// Changes that were discarded.
pub(crate) struct DiscardedChanges {
    /// Journals that were removed.
    files: Vec<PathBuf>,
    /// Number of mapping changes in the journals.
    changes: u64,
    /// Guest ranges that the changes affected, in order and disjoint.
    ranges: Vec<ByteRange>,
    made_at: Option<(u64, u64)>,
    left: JournalStatus,
}

impl JournalDiscard {
    pub(crate) fn start(image: &ImageAddress, header: &Header) -> std::io::Result<Self> {
        let left = journal::status(image, header)?;
        let made_at = match (&left, image) {
            (JournalStatus::Pending(pending) | JournalStatus::Stale(pending), ImageAddress::Path(image)) => {
                modified_seconds(&pending.file).zip(modified_seconds(image))
            }
            _ => None,
        };
        Ok(Self { left, time_range: made_at })
    }

    /// Removes the journals. The image's session must have been discarded before.
    pub(crate) fn finish(self, image: &ImageAddress, header: &Header) -> std::io::Result<DiscardedChanges> {
        let all = journal::discard(image)?;
        Ok(DiscardedChanges {
            changes: all.iter().map(|pending| pending.changes).sum(),
            ranges: guest_ranges(&all, header),
            files: all.into_iter().map(|pending| pending.file).collect(),
            made_at: self.time_range,
            left: self.left,
        })
    }
}

fn modified_seconds(path: &Path) -> Option<u64> {
    let at = path.metadata().ok()?.modified().ok()?;
    Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

fn guest_ranges(all: &[PendingJournal], header: &Header) -> Vec<ByteRange> {
    let cluster_len = header.shape.cluster_len();
    let offset = |cluster: u64| cluster.saturating_mul(cluster_len).min(header.size);
    let clusters = all.iter().flat_map(PendingJournal::guest_clusters);
    let mut found: Vec<(u64, u64)> = clusters
        .map(|(first, count)| (offset(first), offset(first.saturating_add(count))))
        .filter(|(start, end)| start < end)
        .collect();
    found.sort_unstable();
    let mut disjoint: Vec<(u64, u64)> = Vec::new();
    for (start, end) in found {
        match disjoint.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => disjoint.push((start, end)),
        }
    }
    disjoint.into_iter().map(|(start, end)| ByteRange::new(start, end - start)).collect()
}

impl DiscardedChanges {
    pub(crate) fn format_text(&self) -> String {
        let mut text = match &self.left {
            _ if self.changes > 0 => self.format_changes(),
            JournalStatus::Missing(searched) => format!(
                "discarded: changes that a killed server had not applied to the image; they are unknown, because its journal cannot be found ({searched})\n"
            ),
            JournalStatus::LostAtReboot => {
                "discarded: only what was already lost when the host was rebooted\n".to_owned()
            }
            JournalStatus::Clean => "nothing to discard: no server of the image was killed\n".to_owned(),
            JournalStatus::Pending(_) | JournalStatus::Stale(_) => {
                "nothing discarded: the image has all written data\n".to_owned()
            }
        };
        for file in &self.files {
            text.push_str(&format!("removed: {}\n", file.display()));
        }
        text
    }

    fn format_changes(&self) -> String {
        let bytes: u64 = self.ranges.iter().map(|range| range.len.get()).sum();
        let when = self.made_at.map_or_else(String::new, |(from, to)| {
            format!(", made between {} and {} UTC", format_date(from), format_date(to.max(from)))
        });
        let changes = match self.changes {
            1 => "1 change".to_owned(),
            changes => format!("{changes} changes"),
        };
        let mut text = format!(
            "discarded: {changes} of the mapping of the guest's data, for {} of its disk{when}; there the disk has the content of the image:\n",
            format_size(bytes)
        );
        for range in self.ranges.iter().take(RANGES_LISTED_MAX) {
            let (start, end) = (range.start.get(), range.end().get());
            text.push_str(&format!("  guest offsets {start:#x} to {end:#x} ({})\n", format_size(end - start)));
        }
        let unlisted = self.ranges.len().saturating_sub(RANGES_LISTED_MAX);
        if unlisted > 0 {
            text.push_str(&format!("  and {unlisted} more ranges\n"));
        }
        text
    }

    pub(crate) fn to_json(&self) -> Value {
        let range = |range: &ByteRange| json!({"offset": range.start.get(), "length": range.len.get()});
        json!({
            "changes": self.changes,
            "ranges": self.ranges.iter().map(range).collect::<Vec<_>>(),
            "files": self.files.iter().map(|file| file.to_string_lossy()).collect::<Vec<_>>(),
            "from-sec": self.made_at.map(|(from, _)| from),
            "to-sec": self.made_at.map(|(_, to)| to),
        })
    }
}
