//! `larder disk check --discard-journal`: discards the changes that a killed server left in a journal, and reports
//! them.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use larder_block::ByteRange;
use larder_qcow2::header::Header;
use larder_vm::image::ImageAddress;
use larder_vm::image::journal::{self, LeftBehind, Pending};
use serde_json::{Value, json};

use crate::disk_image::{date, human};

/// Maximum number of ranges that are listed individually.
const RANGES_TOLD_MAX: usize = 8;

/// State of the journal and the image, read before anything is changed.
pub(crate) struct Discarding {
    left: LeftBehind,
    /// Modification times of the journal and of the image, in seconds since 1970.
    made_at: Option<(u64, u64)>,
}

/// Changes that were discarded.
pub(crate) struct GivenUp {
    /// Journals that were removed.
    files: Vec<PathBuf>,
    /// Number of mapping changes in the journals.
    changes: u64,
    /// Guest ranges that the changes affected, in order and disjoint.
    ranges: Vec<ByteRange>,
    made_at: Option<(u64, u64)>,
    left: LeftBehind,
}

impl Discarding {
    pub(crate) fn begin(image: &ImageAddress, header: &Header) -> std::io::Result<Self> {
        let left = journal::left_behind(image, header)?;
        let made_at = match (&left, image) {
            (LeftBehind::Changes(pending) | LeftBehind::Overtaken(pending), ImageAddress::Path(image)) => {
                written_at(&pending.file).zip(written_at(image))
            }
            _ => None,
        };
        Ok(Self { left, made_at })
    }

    /// Removes the journals. The image's session must have been discarded before.
    pub(crate) fn end(self, image: &ImageAddress, header: &Header) -> std::io::Result<GivenUp> {
        let all = journal::discard(image)?;
        Ok(GivenUp {
            changes: all.iter().map(|pending| pending.changes).sum(),
            ranges: ranges(&all, header),
            files: all.into_iter().map(|pending| pending.file).collect(),
            made_at: self.made_at,
            left: self.left,
        })
    }
}

fn written_at(path: &Path) -> Option<u64> {
    let at = path.metadata().ok()?.modified().ok()?;
    Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

fn ranges(all: &[Pending], header: &Header) -> Vec<ByteRange> {
    let cluster_len = header.shape.cluster_len();
    let offset = |cluster: u64| cluster.saturating_mul(cluster_len).min(header.size);
    let clusters = all.iter().flat_map(Pending::guest_clusters);
    let mut found: Vec<(u64, u64)> = clusters
        .map(|(first, count)| (offset(first), offset(first.saturating_add(count))))
        .filter(|(start, end)| start < end)
        .collect();
    found.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (start, end) in found {
        match apart.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => apart.push((start, end)),
        }
    }
    apart
        .into_iter()
        .map(|(start, end)| ByteRange::new(start, end - start))
        .collect()
}

impl GivenUp {
    pub(crate) fn text(&self) -> String {
        let mut text = match &self.left {
            _ if self.changes > 0 => self.changes_text(),
            LeftBehind::Missing(looked) => format!(
                "discarded: changes that a killed server had not applied to the image; they are unknown, because its journal cannot be found ({looked})\n"
            ),
            LeftBehind::Gone => "discarded: only what was already lost when the host was rebooted\n".to_owned(),
            LeftBehind::Nothing => "nothing to discard: no server of the image was killed\n".to_owned(),
            LeftBehind::Changes(_) | LeftBehind::Overtaken(_) => {
                "nothing discarded: the image has all written data\n".to_owned()
            }
        };
        for file in &self.files {
            text.push_str(&format!("removed: {}\n", file.display()));
        }
        text
    }

    fn changes_text(&self) -> String {
        let bytes: u64 = self.ranges.iter().map(|range| range.len.get()).sum();
        let when = self.made_at.map_or_else(String::new, |(from, to)| {
            format!(", made between {} and {} UTC", date(from), date(to.max(from)))
        });
        let changes = match self.changes {
            1 => "1 change".to_owned(),
            changes => format!("{changes} changes"),
        };
        let mut text = format!(
            "discarded: {changes} of the mapping of the guest's data, for {} of its disk{when}; there the disk has the content of the image:\n",
            human(bytes)
        );
        for range in self.ranges.iter().take(RANGES_TOLD_MAX) {
            let (start, end) = (range.start.get(), range.end().get());
            text.push_str(&format!(
                "  guest offsets {start:#x} to {end:#x} ({})\n",
                human(end - start)
            ));
        }
        let untold = self.ranges.len().saturating_sub(RANGES_TOLD_MAX);
        if untold > 0 {
            text.push_str(&format!("  and {untold} more ranges\n"));
        }
        text
    }

    pub(crate) fn json(&self) -> Value {
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
