//! Helpers shared by the commands about images: opening an image's file, and formatting sizes and dates.

use std::os::unix::fs::MetadataExt;
use std::rc::Rc;

use anyhow::{anyhow, bail};
use larder_block::backend::file::FileRole;
use larder_block::backend::image_lock;
use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, Loop, ReadBuf};
use larder_vm::image::journal::JournalStatus;
use larder_vm::image::{
    Author, ChainPolicy, Format, ImageAddress, ImageOptions, PROBE_BYTES, detect_format, mark_caches_stale,
    open_bytes_and_author, probe, refuse_protected_file,
};

use serde_json::{Value, json};

use crate::cli::FormatName;

/// An open image whose bytes can be read.
pub(crate) struct OpenImage {
    pub(crate) format: Format,
    /// The file itself, as bytes, whatever its format.
    pub(crate) file: Rc<dyn BlockDevice>,
    /// The author of its content.
    pub(crate) author: Author,
}

/// Sharing of an image with other processes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Other processes may do anything with the image; it is opened read-only.
    Share,
    /// Like `Share`, for a backing file, which a header names. Unless root trusts other users' images, it follows no
    /// symbolic link of another user.
    Backing { trust_image: bool },
    /// Other processes may only read the image; it is opened read-only.
    NoWriters,
    /// Other processes may not use the image; it is opened for writing.
    Exclusive,
    /// Like `Exclusive`, but the caller handles the image's caches.
    ExclusiveWithCaches,
}

/// Opens an image as the server would.
pub(crate) async fn open(
    on: &Loop,
    image: &ImageAddress,
    format: Option<FormatName>,
    sharing: Sharing,
) -> anyhow::Result<OpenImage> {
    let is_detected = format.is_none();
    let format = match format {
        Some(format) => format.into(),
        None => probe(image)?,
    };
    let is_container = format != Format::Raw;
    let mut options = ImageOptions {
        read_only: !matches!(sharing, Sharing::Exclusive | Sharing::ExclusiveWithCaches),
        share: matches!(sharing, Sharing::Share | Sharing::Backing { .. }),
        ..ImageOptions::default()
    };
    if let Sharing::Backing { trust_image } = sharing {
        options.role = FileRole::Referenced;
        options.chain = ChainPolicy::Follow { trust_image };
    }
    let (file, author) = open_bytes_and_author(on, image, &options, is_container, is_detected).await?;
    if is_container && detect_magic(&file).await != Some("qcow2") {
        bail!("{image}: it is not a qcow2 image; without --format its format is detected");
    }
    if sharing == Sharing::Exclusive {
        mark_caches_stale(on, image, format).await?;
        if format == Format::Raw {
            refuse_protected_file(image, &file).await?;
        }
    }
    Ok(OpenImage { format, file, author })
}

/// Returns the file of a qcow2 image.
///
/// # Errors
/// The image has another format, and so no metadata for `what`; the message hints at `--format qcow2` if it begins
/// like one.
pub(crate) async fn require_qcow2(
    image: &ImageAddress,
    opened: OpenImage,
    what: &str,
) -> anyhow::Result<Rc<dyn BlockDevice>> {
    if opened.format == Format::Qcow2 {
        return Ok(opened.file);
    }
    let hint = match detect_magic(&opened.file).await {
        Some("qcow2") => "; it begins like a qcow2 image: if it is one, give --format qcow2",
        _ => "",
    };
    bail!("{image} is a raw image: it has no metadata {what}{hint}");
}

/// Closes an image: all writes are durable, and other processes may use it.
pub(crate) async fn close(disk: &Rc<dyn BlockDevice>) -> anyhow::Result<()> {
    disk.close().await.map_err(|error| anyhow!(error.to_string()))
}

/// Returns the format, other than raw, whose magic bytes the image begins with.
pub(crate) async fn detect_magic(file: &Rc<dyn BlockDevice>) -> Option<&'static str> {
    let mut head = AlignedBuf::zeroed(PROBE_BYTES);
    if file.geometry().size.get() < PROBE_BYTES as u64 {
        return None;
    }
    file.read(ByteOffset::ZERO, ReadBuf::new(&mut head)).await.ok()?;
    detect_format(&head)
}

/// Returns the other processes that may write an image or keep others from writing it. `None` means that there are
/// none, or that they are unknown, as for an NBD export.
pub(crate) fn processes_using(image: &ImageAddress) -> Option<Vec<String>> {
    let ImageAddress::Path(path) = image else { return None };
    image_lock::other_users(path).ok()?
}

/// Returns the length of a regular file; the device opened on it may be padded to whole blocks.
pub(crate) fn file_len(image: &ImageAddress) -> Option<ByteLen> {
    let ImageAddress::Path(path) = image else { return None };
    let metadata = path.metadata().ok()?;
    metadata.is_file().then(|| ByteLen::new(metadata.len()))
}

/// Returns the space that a regular file takes on the host, in bytes.
pub(crate) fn allocated_bytes(image: &ImageAddress) -> Option<u64> {
    let ImageAddress::Path(path) = image else { return None };
    let metadata = path.metadata().ok()?;
    metadata.is_file().then(|| metadata.blocks() * 512)
}

/// Describes the journal or session that a killed server left, for people; `None` if it left nothing.
pub(crate) fn describe_left_behind(left: &JournalStatus) -> Option<String> {
    match left {
        JournalStatus::Clean => None,
        JournalStatus::Pending(pending) if pending.changes == 0 => {
            Some("a server of it was killed; the image has all written data".to_owned())
        }
        JournalStatus::Pending(pending) => Some(format!(
            "a server of it was killed: {} changes that the image lacks are in {}; the next server applies them",
            pending.changes,
            pending.file.display()
        )),
        JournalStatus::Stale(pending) => Some(format!(
            "a server of it was killed, and the image has been changed since: {} changes in {} do not apply to it any more; discard them with `larder disk check --discard-journal`",
            pending.changes,
            pending.file.display()
        )),
        JournalStatus::Missing(looked) => Some(format!(
            "a server of it was killed, or it is a copy that was made while one ran, and its journal cannot be found ({looked}); serve it as the same user, or as root, or discard what was not flushed with `larder disk check --discard-journal`"
        )),
        JournalStatus::LostAtReboot => Some(
            "a server of it was killed before the last boot of the host: data that its guest had not flushed is lost"
                .to_owned(),
        ),
    }
}

/// Describes the journal or session that a killed server left, for programs.
pub(crate) fn left_behind_json(left: &JournalStatus) -> Value {
    match left {
        JournalStatus::Clean => Value::Null,
        JournalStatus::Pending(pending) => {
            json!({"state": "pending", "changes": pending.changes, "file": pending.file.to_string_lossy()})
        }
        JournalStatus::Stale(pending) => {
            json!({"state": "overtaken", "changes": pending.changes, "file": pending.file.to_string_lossy()})
        }
        JournalStatus::Missing(_) => json!({"state": "missing"}),
        JournalStatus::LostAtReboot => json!({"state": "gone"}),
    }
}

/// Formats a size with three significant digits.
pub(crate) fn format_size(bytes: u64) -> String {
    round_size(bytes).0
}

/// Formats a ratio as ` (12.5 %)`, or as nothing if `whole` is 0.
pub(crate) fn format_percent(part: u64, whole: u64) -> String {
    match whole {
        0 => String::new(),
        _ => format!(" ({:.1} %)", 100.0 * part as f64 / whole as f64),
    }
}

/// Formats a size both in bytes and with three digits; a rounded value is marked with "about".
pub(crate) fn format_exact_size(bytes: u64) -> String {
    match round_size(bytes) {
        (text, true) => format!("{text} ({bytes} bytes)"),
        (text, false) => format!("{bytes} bytes (about {text})"),
    }
}

/// Formats a size with three digits; the flag is true if no precision is lost.
fn round_size(bytes: u64) -> (String, bool) {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return (format!("{bytes} B"), true);
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1000.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    let digits = match size {
        _ if size.fract() == 0.0 || size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{size:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let is_exact = text.parse() == Ok(size) && bytes.trailing_zeros() >= 10;
    (format!("{text} {}", UNITS[unit]), is_exact)
}

/// Formats a point in time, in seconds since 1970, as `2026-11-21 10:01:15` in UTC.
pub(crate) fn format_date(seconds: u64) -> String {
    let (days, second_of_day) = (seconds / 86400, seconds % 86400);
    // Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hours, minutes, seconds) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hours:02}:{minutes:02}:{seconds:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 16, "64 KiB"),
            (5_529_600, "5.27 MiB"),
            (1000 << 10, "0.98 MiB"),
            (1 << 40, "1 TiB"),
            (123_456_789_012, "115 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }

    /// A size that three digits cannot express is given in bytes, with the rounded value marked as "about".
    #[test]
    fn rounded_sizes_are_marked() {
        for (bytes, text) in [
            (512, "512 B (512 bytes)"),
            (3 << 19, "1.5 MiB (1572864 bytes)"),
            (2047 << 10, "2096128 bytes (about 2 MiB)"),
            ((1 << 60) + 1, "1152921504606846977 bytes (about 1 EiB)"),
        ] {
            assert_eq!(format_exact_size(bytes), text);
        }
    }

    #[test]
    fn dates_follow_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_795_255_275, "2026-11-21 10:01:15"),
            (u64::from(u32::MAX), "2106-02-07 06:28:15"),
        ] {
            assert_eq!(format_date(seconds), text);
        }
    }
}
