//! Records of caches that were replaced while their disk was in use: a server whose options still name the old cache
//! uses the new one. So a server that is killed and restarted, by `larder run` or by systemd, does not miss the data
//! that only the new cache has.
//!
//! There is one file for each new cache, in the directory of the caches' state files. Each line is a word and a
//! hexadecimal value, except the last:
//!
//! ```text
//! disk 72617720...     the disk's identity
//! new 2f737364...      the new cache: a path or URI
//! old 2f6e766d...      a cache that it has replaced; several, if that one had itself replaced others
//! end                  the file is complete
//! ```

use std::fs;
use std::io;
use std::path::PathBuf;

use larder_block::opener;
use larder_block::small_file::{self, STATE_BYTES_MAX};

use super::cache_spec::CacheOptions;
use super::cache_state::{StateFile, from_hex, hex, state_file_directory, write_atomically};
use super::open_cache::OpenCache;
use super::{ImageAddress, absolute};

/// Extension of the records' file names, which state files do not have.
const EXTENSION: &str = "replaced";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ReplacementRecord {
    disk: Vec<u8>,
    new: Vec<u8>,
    old: Vec<Vec<u8>>,
}

impl ReplacementRecord {
    /// Parses a record; returns `None` if it is incomplete, or in a format that this program does not write.
    fn parse(text: &str) -> Option<Self> {
        let mut replaced = Self::default();
        let lines = text.strip_suffix("end\n")?;
        for line in lines.lines() {
            let (keyword, value) = line.split_once(' ')?;
            let value = from_hex(value)?;
            match keyword {
                "disk" => replaced.disk = value,
                "new" => replaced.new = value,
                "old" => replaced.old.push(value),
                _ => return None,
            }
        }
        Some(replaced)
    }

    fn text(&self) -> String {
        let mut text = format!("disk {}\nnew {}\n", hex(&self.disk), hex(&self.new));
        for old in &self.old {
            text.push_str(&format!("old {}\n", hex(old)));
        }
        text + "end\n"
    }
}

/// Returns all records, with their paths.
fn read_all() -> Vec<(PathBuf, ReplacementRecord)> {
    let files = state_file_directory().map(fs::read_dir).into_iter().flatten().flatten().flatten();
    let files = files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|it| it == EXTENSION));
    let known = files.filter_map(|path| {
        let replaced = ReplacementRecord::parse(&small_file::read_text(&path, STATE_BYTES_MAX).ok()?)?;
        Some((path, replaced))
    });
    known.collect()
}

/// Records durably that `new` has replaced `old`.
///
/// # Errors
/// Reading or writing the state directory fails.
pub(super) fn record(disk: &[u8], old: &ImageAddress, new: &OpenCache) -> io::Result<()> {
    let record_path = record_path(new.state_file.state_file());
    let record_path = record_path
        .ok_or_else(|| io::Error::other("no state directory is known: neither $XDG_STATE_HOME nor $HOME is set"))?;
    let (old, new) = (absolute(old).into_bytes(), absolute(&new.file).into_bytes());
    let earlier_records: Vec<(PathBuf, ReplacementRecord)> =
        read_all().into_iter().filter(|(_, it)| it.disk == disk).collect();
    // Caches that the old one had replaced are now replaced by the new one.
    let superseded = earlier_records.iter().filter(|(_, it)| it.new == old || it.new == new);
    let mut names = vec![old.clone()];
    for name in superseded.flat_map(|(_, it)| &it.old) {
        if *name != new && !names.contains(name) {
            names.push(name.clone());
        }
    }
    let record = ReplacementRecord { disk: disk.to_vec(), new, old: names };
    if let Some(directory) = record_path.parent() {
        fs::create_dir_all(directory)?;
    }
    write_atomically(&record_path, &record.text())?;
    for (path, _) in earlier_records.iter().filter(|(path, it)| it.new == old && *path != record_path) {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// Returns the caches that the cache with this state file has replaced. At that time all their dirty data was written
/// to the disk, or discarded.
pub(super) fn replaced_caches(state_file: &StateFile) -> Vec<Vec<u8>> {
    let text =
        record_path(state_file).and_then(|record_path| small_file::read_text(&record_path, STATE_BYTES_MAX).ok());
    text.as_deref().and_then(ReplacementRecord::parse).map(|it| it.old).unwrap_or_default()
}

/// Removes the record of a cache that no longer exists: it replaces no other cache.
pub(super) fn remove_record(state_file: &StateFile) {
    if let Some(record_path) = record_path(state_file) {
        // Usually there is no record.
        let _ = fs::remove_file(record_path);
    }
}

fn record_path(state_file: &StateFile) -> Option<PathBuf> {
    state_file.companion_path(EXTENSION)
}

/// Returns the options of the cache that has replaced the requested one, or the requested ones if none has. A record
/// of the requested cache itself is removed.
pub(super) fn resolve(options: &CacheOptions, disk: &[u8]) -> CacheOptions {
    let requested = absolute(&options.file).into_bytes();
    if !options.ignores_replacement {
        for (path, _) in read_all().into_iter().filter(|(_, it)| it.disk == disk && it.new == requested) {
            // The server's options name the new cache by now.
            let _ = fs::remove_file(path);
        }
    }
    resolve_read_only(options, disk)
}

/// Returns the same options as [`resolve`], and changes nothing.
pub(super) fn resolve_read_only(options: &CacheOptions, disk: &[u8]) -> CacheOptions {
    if options.ignores_replacement {
        return options.clone();
    }
    let requested = absolute(&options.file).into_bytes();
    for (_, replaced) in read_all().into_iter().filter(|(_, it)| it.disk == disk && it.new != requested) {
        let new = std::str::from_utf8(&replaced.new).ok().and_then(|new| new.parse().ok());
        let Some(new) = new else { continue };
        // The new cache may be on a file system that is not mounted yet. If it has dirty data, that is reported
        // later.
        let is_missing = matches!(&new, ImageAddress::Path(path) if opener::metadata(path).is_err());
        if !is_missing && replaced.old.contains(&requested) {
            tracing::info!(
                "cache {new}: it has replaced {}; from now on, start the server with cache={new}",
                options.file
            );
            return CacheOptions { file: new, size: None, line: None, ..options.clone() };
        }
    }
    options.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record parses back as written; cut off anywhere, or with an unknown word, it is rejected.
    #[test]
    fn torn_replacement_record_is_rejected() {
        let replaced = ReplacementRecord {
            disk: b"raw file x".to_vec(),
            new: b"/ssd/new".to_vec(),
            old: vec![b"/ssd/old".to_vec(), b"/ssd/older".to_vec()],
        };
        let text = replaced.text();
        assert_eq!(ReplacementRecord::parse(&text), Some(replaced), "{text}");
        for len in 0..text.len() {
            assert_eq!(ReplacementRecord::parse(&text[..len]), None, "{text}, cut off at {len}");
        }
        assert_eq!(ReplacementRecord::parse(&text.replace("old", "odd")), None);
    }
}
