//! Keys and values of a disk's options, and `--disk IMAGE,key=value,...`, which combines them in one argument.

use super::limits::{self, SetOutcome};
use super::{DiskSpec, DiskSpecError, PageCacheMode};
use crate::disk::{POLL_US_MAX, RECONNECT_SECONDS_MAX};
use crate::image::{
    Format, ImageAddressError, PrefetchMemoryError, parse_cache_endurance, parse_cache_line, parse_cache_mode,
    parse_prefetch_len,
};
use crate::run::keyval::{KeyValues, parse_bool};
use larder_block::SizeError;
use larder_export::vhost_user::{QUEUE_SIZE_MAX, QUEUE_SIZE_MIN, QUEUES_MAX};

pub(crate) const KEYS: [&str; 21] = [
    "format",
    "metadata-memory",
    "prefetch",
    "prefetch-ahead",
    "prefetch-largest-read",
    "control",
    "readonly",
    "share",
    "cache",
    "cache-size",
    "cache-line",
    "cache-mode",
    "cache-endurance",
    "cache-exclusive",
    "queues",
    "queue-size",
    "serial",
    "block-size",
    "discard",
    "poll-us",
    "nbd-reconnect",
];

/// Reason why a `--disk` argument is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DiskOptionError {
    #[error("--disk {image}: {source}")]
    Image { image: String, source: ImageAddressError },
    #[error("--disk {image}: {source}")]
    Spec { image: String, source: DiskSpecError },
    #[error("--disk begins with the image: --disk /srv/vm.raw,readonly=on")]
    NoImage,
    #[error(
        "--disk {image}: unknown option '{key}'{}; known are {}, and the limits {}",
        nearest(key, names()), KEYS.join(", "), limits::names().collect::<Vec<_>>().join(", ")
    )]
    UnknownKey { image: String, key: String },
    #[error("--disk {image}: {key}={value}: {expected}")]
    BadValue { image: String, key: String, value: String, expected: String },
}

/// Parses one `--disk` argument. The image comes first; a comma in its name is doubled.
///
/// # Errors
/// Unknown keys and invalid values.
pub fn parse_disk(text: &str) -> Result<DiskSpec, DiskOptionError> {
    // The first part is the image even if it has a '=', unlike in QEMU's own lists.
    let list = KeyValues::parse(&format!("image={text}"), None);
    let mut pairs = list.iter();
    let image = pairs.next().map(|(_, image)| image).filter(|image| !image.is_empty());
    let image = image.ok_or(DiskOptionError::NoImage)?;
    let address = image.parse().map_err(|source| DiskOptionError::Image { image: image.to_owned(), source })?;
    let mut disk = DiskSpec::new(address);
    for (key, value) in pairs {
        set(&mut disk, key, value).map_err(|problem| match problem {
            OptionProblem::UnknownKey => DiskOptionError::UnknownKey { image: image.to_owned(), key: key.to_owned() },
            OptionProblem::InvalidValue(expected) => DiskOptionError::BadValue {
                image: image.to_owned(),
                key: key.to_owned(),
                value: value.to_owned(),
                expected,
            },
        })?;
    }
    disk.check().map_err(|source| DiskOptionError::Spec { image: image.to_owned(), source })?;
    Ok(disk)
}

/// Reason why a key and its value are not valid for a disk.
pub(crate) enum OptionProblem {
    UnknownKey,
    /// Description of valid values, for users.
    InvalidValue(String),
}

fn invalid_value(what: impl Into<String>) -> OptionProblem {
    OptionProblem::InvalidValue(what.into())
}

/// Sets an option of a disk. `key` is one of [`KEYS`], or the name of a limit.
pub(crate) fn set(disk: &mut DiskSpec, key: &str, value: &str) -> Result<(), OptionProblem> {
    let switch = || parse_bool(value).ok_or_else(|| invalid_value("give on or off"));
    let size = || value.parse().map_err(|error: SizeError| invalid_value(error.to_string()));
    match key {
        "format" => disk.format = Some(Format::from_name(value).ok_or_else(|| invalid_value("give raw or qcow2"))?),
        "metadata-memory" => disk.metadata_memory = Some(size()?),
        "prefetch" => {
            disk.prefetch.memory =
                Some(value.parse().map_err(|error: PrefetchMemoryError| invalid_value(error.to_string()))?)
        }
        "prefetch-ahead" => disk.prefetch.ahead = Some(parse_prefetch_len(value).map_err(invalid_value)?),
        "prefetch-largest-read" => disk.prefetch.largest_read = Some(parse_prefetch_len(value).map_err(invalid_value)?),
        "control" => {
            let path = Some(value).filter(|path| !path.is_empty());
            disk.control = Some(path.ok_or_else(|| invalid_value("give a path"))?.into());
        }
        "readonly" => disk.read_only = switch()?,
        "share" => disk.share = switch()?,
        "discard" => {
            disk.discard = match value {
                "unmap" | "on" => true,
                "ignore" | "off" => false,
                _ => return Err(invalid_value("give unmap or ignore")),
            }
        }
        "serial" => disk.serial = Some(value.to_owned()),
        "cache" => match value {
            "direct" => disk.page_cache = PageCacheMode::Direct,
            "buffered" => disk.page_cache = PageCacheMode::Buffered,
            file if file.contains('/') => {
                let address = file.parse().map_err(|error: ImageAddressError| invalid_value(error.to_string()))?;
                disk.disk_cache.file = Some(address);
            }
            _ => {
                return Err(invalid_value(
                    "give direct or buffered for the host's page cache, or a disk cache's file with a / in it, as in ./FILE",
                ));
            }
        },
        "cache-size" => disk.disk_cache.size = Some(size()?),
        "cache-line" => disk.disk_cache.line = Some(parse_cache_line(value).map_err(invalid_value)?),
        "cache-mode" => disk.disk_cache.mode = Some(parse_cache_mode(value).map_err(invalid_value)?),
        "cache-endurance" => disk.disk_cache.endurance = Some(parse_cache_endurance(value).map_err(invalid_value)?),
        "cache-exclusive" => disk.disk_cache.exclusive = switch()?,
        "block-size" => {
            let bytes = value.parse().ok().filter(|bytes| matches!(bytes, 512 | 4096));
            disk.block_size = Some(bytes.ok_or_else(|| invalid_value("give 512 or 4096"))?);
        }
        "queue-size" => {
            let sizes = QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX;
            let size = value.parse().ok();
            let size = size.filter(|size: &u16| size.is_power_of_two() && sizes.contains(size));
            disk.queue_size = Some(size.ok_or_else(|| invalid_value("give a power of two from 4 to 1024"))?);
        }
        "poll-us" => {
            let us = value.parse().ok().filter(|us| *us <= POLL_US_MAX);
            disk.poll_us = Some(us.ok_or_else(|| invalid_value(format!("give microseconds, {POLL_US_MAX} at most")))?);
        }
        "nbd-reconnect" => {
            let seconds = value.parse().ok().filter(|seconds| *seconds <= RECONNECT_SECONDS_MAX);
            disk.nbd_reconnect = Some(
                seconds
                    .ok_or_else(|| invalid_value(format!("give seconds, {RECONNECT_SECONDS_MAX} (a year) at most")))?,
            );
        }
        "queues" => {
            let queues = value.parse().ok().filter(|queues| (1..=QUEUES_MAX).contains(queues));
            disk.queues = Some(queues.ok_or_else(|| invalid_value("give a number of virtqueues from 1 to 64"))?);
        }
        _ => match disk.limits.set(key, value) {
            SetOutcome::Set => {}
            SetOutcome::UnknownKey => return Err(OptionProblem::UnknownKey),
            SetOutcome::BadValue => return Err(invalid_value("give a number; 0 for no limit")),
        },
    }
    Ok(())
}

/// Returns all keys, and the names of limits.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    KEYS.into_iter().chain(limits::names())
}

/// Returns ` (did you mean 'serial'?)` for the closest of the `known` words, if one is close.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> String {
    let near = known.map(|name| (distance(word, name), name)).min();
    match near {
        Some((edits, name)) if edits <= 2.max(word.len() / 3) => format!(" (did you mean '{name}'?)"),
        _ => String::new(),
    }
}

/// Returns the edit distance (Levenshtein) of two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, char_a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, char_b) in b.iter().enumerate() {
            let changed = diagonal + usize::from(char_a != *char_b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use larder_block::ByteLen;

    use super::*;
    use crate::image::ImageAddress;

    #[test]
    fn all_disk_options_are_parsed() {
        let disk =
            parse_disk("/a,,b=c.raw,format=qcow2,metadata-memory=64MiB,serial=S1,readonly=on,share,cache=direct,queues=4,discard=off,iops=9")
                .expect("is right");
        assert_eq!(disk.image.to_string(), "/a,b=c.raw");
        assert_eq!((disk.format, disk.metadata_memory), (Some(Format::Qcow2), Some(ByteLen::mib(64))));
        assert_eq!((disk.read_only, disk.share, disk.discard), (true, true, false));
        assert_eq!((disk.page_cache, disk.queues), (PageCacheMode::Direct, Some(4)));
        assert_eq!(disk.serial.as_deref(), Some("S1"));
        assert_eq!(disk.limits.to_string(), "iops-total=9");
        assert_eq!(parse_disk("/a"), Ok(DiskSpec::new(ImageAddress::Path("/a".into()))));
    }

    #[test]
    fn server_options_become_arguments() {
        let disk = parse_disk(
            "/a,format=raw,metadata-memory=1M,prefetch=8M,prefetch-ahead=2M,prefetch-largest-read=32k,cache=/x,,y,cache-size=1G,cache-line=8k,cache-mode=wa,cache-endurance=1g,cache-exclusive=on,control=/c,,d,discard=ignore,queue-size=1024,poll-us=0,nbd-reconnect=5,block-size=4096",
        );
        let disk = disk.expect("is right");
        assert_eq!(disk.queue_size, Some(1024));
        let arguments = disk.serve_arguments("/s".as_ref(), "/p".as_ref());
        let line = crate::run::shell::command_line(&arguments);
        assert_eq!(
            line,
            "disk serve /a --socket /s --pidfile /p --format raw --metadata-memory 1048576 --prefetch 8388608 --prefetch-ahead 2097152 --prefetch-largest-read 32768 --cache=/x,y --cache-size 1073741824 --cache-line 8192 --cache-mode wa --cache-endurance 1073741824 --cache-exclusive --control=/c,d --discard ignore --queue-size 1024 --block-size 4096 --poll-us 0 \
             --nbd-reconnect 5"
        );
        assert!(parse_disk("/a,discard=unmap").expect("is right").discard);
        let disk = parse_disk("-a").expect("is right");
        let arguments = disk.serve_arguments("/s".as_ref(), "/p".as_ref());
        assert_eq!(arguments[2], "./-a", "it must not be taken for an option");
    }

    #[test]
    fn cache_key_has_two_meanings() {
        let disk = parse_disk("/a,cache=buffered,cache=nbd://host/x").expect("is right");
        assert_eq!(disk.page_cache, PageCacheMode::Buffered);
        let line = disk.serve_arguments("/s".as_ref(), "/p".as_ref());
        let line = crate::run::shell::command_line(&line);
        assert!(line.contains(" --cache nbd://host/x --buffered"), "{line}");
        for text in ["/a,cache-size=1G", "/a,cache=/c,share=on", "/a,cache=direct,cache-mode=wt"] {
            let refused =
                matches!(parse_disk(text), Err(DiskOptionError::Spec { source: DiskSpecError::Cache(_), .. }));
            assert!(refused, "{text}");
        }
    }

    #[test]
    fn unknown_key_error_suggests_nearest_key() {
        let error = parse_disk("/a,serail=x").expect_err("is wrong").to_string();
        assert!(
            error.starts_with("--disk /a: unknown option 'serail' (did you mean 'serial'?); known are format, "),
            "{error}"
        );
        assert!(error.contains("iops-total") && error.contains("bps_wr"), "{error}");
        let error = parse_disk("/a,colour=red").expect_err("is wrong").to_string();
        assert!(!error.contains("did you mean"), "{error}");
    }

    #[test]
    fn invalid_values_are_refused_with_hint() {
        for text in [
            "/a,queues=0",
            "/a,queues=65",
            "/a,cache=none",
            "/a,cache=ftp://x/y",
            "/a,cache-size=much",
            "/a,cache-line=2k",
            "/a,cache-line=128k",
            "/a,cache-line=12k",
            "/a,cache-endurance=1M",
            "/a,cache-mode=writeback",
            "/a,readonly=perhaps",
            "/a,bps=x",
            "/a,format=vmdk",
            "/a,metadata-memory=much",
            "/a,prefetch=on",
            "/a,prefetch=4k",
            "/a,prefetch=16TiB",
            "/a,prefetch-ahead=far",
            "/a,prefetch-ahead=0",
            "/a,prefetch-largest-read=0",
            "/a,prefetch-largest-read=off",
            "/a,control=",
            "/a,block-size=1",
            "/a,discard=perhaps",
            "/a,queue-size=100",
            "/a,queue-size=2048",
            "/a,poll-us=x",
            "/a,poll-us=10001",
            "/a,nbd-reconnect=-1",
        ] {
            assert!(matches!(parse_disk(text), Err(DiskOptionError::BadValue { .. })), "{text}");
        }
        assert!(matches!(parse_disk("http://x/y"), Err(DiskOptionError::Image { .. })));
        assert!(matches!(
            parse_disk("/a,iops=1,iops_rd=1"),
            Err(DiskOptionError::Spec { source: DiskSpecError::Limits(_), .. })
        ));
        for text in
            ["/a,share=on,prefetch=8M", "/a,prefetch-ahead=1M,share=on", "/a,prefetch=off,prefetch-largest-read=64k"]
        {
            assert!(
                matches!(parse_disk(text), Err(DiskOptionError::Spec { source: DiskSpecError::Prefetch(_), .. })),
                "{text}"
            );
        }
        assert!(parse_disk("/a,share=on,prefetch=off").is_ok());
        assert_eq!(parse_disk(""), Err(DiskOptionError::NoImage));
        assert_eq!(parse_disk(",serial=x"), Err(DiskOptionError::NoImage));
    }
}
