//! Conversion of a QEMU `-drive` to the options of a Larder disk, or a reason why that is impossible.

use std::fmt;
use std::path::Path;

use super::keyval::{KeyValues, parse_bool};
use crate::disk_spec::limits::SetOutcome;
use crate::disk_spec::{DiskSpec, PageCacheMode};
use crate::image::{Format, ImageAddress, driver_prefix};

/// Reason why a drive stays with QEMU, as a clause for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuOnlyReason(pub String);

impl fmt::Display for QemuOnlyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) fn qemu_only<T>(text: impl Into<String>) -> Result<T, QemuOnlyReason> {
    Err(QemuOnlyReason(text.into()))
}

/// Converts a drive. Each option is carried over, or has no effect that the guest could notice, or is a reason to
/// leave the drive to QEMU.
///
/// # Errors
/// The reason why the drive stays with QEMU.
pub fn parse_drive(drive: &KeyValues) -> Result<DiskSpec, QemuOnlyReason> {
    let Some(file) = drive.get("file") else {
        return qemu_only("it names no file=");
    };
    let mut disk = DiskSpec::new(parse_image_name(file)?);
    disk.format = drive_format(drive, &disk.image)?;
    // These are QEMU's defaults where they differ from Larder's.
    disk.page_cache = PageCacheMode::Buffered;
    disk.discard = false;
    for (key, value) in drive.iter() {
        apply_option(&mut disk, key, value)?;
    }
    match disk.limits.check() {
        Ok(()) => Ok(disk),
        Err(error) => qemu_only(error.to_string()),
    }
}

/// Returns the given format; `None` if there is none, and Larder probes the image as QEMU does.
fn drive_format(drive: &KeyValues, image: &ImageAddress) -> Result<Option<Format>, QemuOnlyReason> {
    match (drive.get("format").or_else(|| drive.get("driver")), image) {
        (Some(name), _) => match Format::from_driver(name) {
            Some(format) => Ok(Some(format)),
            None => qemu_only(format!("Larder serves raw and qcow2 images, not {name}")),
        },
        (None, ImageAddress::Path(_)) => Ok(None),
        // Some servers exit after their first client, so Larder does not probe an export beforehand.
        (None, ImageAddress::Nbd(_)) => {
            qemu_only("it does not give its format, which Larder does not detect over NBD; add format=raw if it is raw")
        }
    }
}

/// Returns whether an option of QEMU's qcow2 driver only tunes the driver, without affecting the disk.
fn is_tuning(key: &str) -> bool {
    let exact = [
        "cache-size",
        "l2-cache-size",
        "l2-cache-entry-size",
        "refcount-cache-size",
        "cache-clean-interval",
        "lazy-refcounts",
        "overlap-check",
    ];
    exact.contains(&key) || key.starts_with("overlap-check.")
}

/// Returns the options of a drive that are accepted, but have no effect.
pub(super) fn ignored_options(drive: &KeyValues) -> Vec<&str> {
    let mut keys: Vec<&str> = drive.iter().map(|(key, _)| key).filter(|key| is_tuning(key)).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Returns the image that a QEMU file name denotes.
fn parse_image_name(file: &str) -> Result<ImageAddress, QemuOnlyReason> {
    if file.starts_with("json:") {
        return qemu_only("its file is described in JSON; give its path as file=... and its format as format=...");
    }
    match file.parse() {
        Ok(ImageAddress::Path(path)) if path.starts_with("/dev/fdset") => {
            qemu_only("its file is a descriptor that was handed to QEMU")
        }
        Ok(ImageAddress::Path(path)) => match driver_prefix(file) {
            // QEMU would not take this for a path.
            Some(driver) if path == Path::new(file) => {
                qemu_only(format!("Larder does not know the protocol '{driver}'"))
            }
            _ => Ok(ImageAddress::Path(path)),
        },
        Ok(address) => Ok(address),
        Err(error) => qemu_only(error.to_string()),
    }
}

fn apply_option(disk: &mut DiskSpec, key: &str, value: &str) -> Result<(), QemuOnlyReason> {
    let switch = || parse_bool(value).ok_or_else(|| QemuOnlyReason(format!("{key}={value} is neither on nor off")));
    match (key, value) {
        // The caller handles where the drive is attached; aio only selects how QEMU would do its I/O.
        ("file" | "format" | "if" | "index" | "bus" | "unit" | "id" | "node-name" | "aio", _) => {}
        ("driver", _) if disk.format.is_some() && disk.format == Format::from_driver(value) => {}
        ("media", "disk") => {}
        ("readonly" | "read-only", _) => disk.read_only = switch()?,
        // The guest controls durability: it sees a write cache and flushes it, and for a guest that cannot flush,
        // each write is made durable. directsync and writethrough exist for that purpose.
        ("cache", "none" | "directsync") => disk.page_cache = PageCacheMode::Direct,
        ("cache", "writeback" | "writethrough" | "unsafe") => disk.page_cache = PageCacheMode::Buffered,
        ("cache.direct", _) => {
            disk.page_cache = if switch()? { PageCacheMode::Direct } else { PageCacheMode::Buffered }
        }
        ("cache.writeback" | "cache.no-flush", _) => {}
        ("discard", "unmap" | "on") => disk.discard = true,
        ("discard", "ignore" | "off") => disk.discard = false,
        ("detect-zeroes" | "snapshot" | "copy-on-read" | "auto-read-only", "off") => {}
        ("snapshot", _) => return qemu_only("snapshot=on: QEMU keeps its writes in a temporary file"),
        ("detect-zeroes", _) => {
            return qemu_only(format!("{key}={value}: Larder does not detect zeros in written data"));
        }
        ("werror" | "rerror", "report") => {}
        ("werror" | "rerror", _) => {
            return qemu_only(format!("{key}={value}: Larder reports every error to the guest"));
        }
        // QEMU refuses these options on a raw image, and reports that itself.
        _ if disk.format != Some(Format::Raw) && is_qcow2_option(key) => return apply_qcow2_option(key, value),
        _ => match disk.limits.set(key, value) {
            SetOutcome::Set => {}
            SetOutcome::UnknownKey => return qemu_only(format!("Larder does not support its option {key}={value}")),
            SetOutcome::BadValue => return qemu_only(format!("{key}={value} is not a number")),
        },
    }
    Ok(())
}

/// Returns whether this is an option of QEMU's qcow2 driver, other than those of encryption.
fn is_qcow2_option(key: &str) -> bool {
    let is_file_option =
        |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    is_tuning(key)
        || key.starts_with("pass-discard-")
        || key == "discard-no-unref"
        || is_file_option("backing")
        || is_file_option("data-file")
}

fn apply_qcow2_option(key: &str, value: &str) -> Result<(), QemuOnlyReason> {
    match (key, parse_bool(value)) {
        _ if is_tuning(key) => Ok(()),
        // These values match Larder's behaviour; Larder deletes no snapshots, and the guest cannot notice other
        // discards.
        ("pass-discard-request", Some(true)) | ("discard-no-unref", Some(false)) => Ok(()),
        ("pass-discard-snapshot" | "pass-discard-other", Some(_)) => Ok(()),
        ("pass-discard-request" | "discard-no-unref", _) => qemu_only(format!(
            "{key}={value}: Larder frees discarded data in the image's file, or keeps it with discard=ignore"
        )),
        _ => qemu_only(format!("{key}={value}: Larder only uses the other files that the image names")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<DiskSpec, String> {
        parse_drive(&KeyValues::parse(text, None)).map_err(|reason| reason.0)
    }

    #[test]
    fn drive_options_are_carried_over() {
        let disk =
            read("file=/srv/a,,b.raw,if=virtio,format=raw,cache=none,aio=native,readonly=on,discard=unmap,index=3")
                .expect("can be served");
        assert_eq!(disk.image.to_string(), "/srv/a,b.raw");
        assert_eq!((disk.page_cache, disk.read_only, disk.discard), (PageCacheMode::Direct, true, true));
        let disk = read("file=nbd://host/x,format=raw").expect("can be served");
        assert!(matches!(disk.image, ImageAddress::Nbd(_)));
        let disk = read("file=odd:name/x.raw,format=raw");
        assert_eq!(disk, Err("Larder does not know the protocol 'odd'".to_owned()));
        for (name, path) in [
            ("file:odd:name/x.raw", "./odd:name/x.raw"),
            ("nbd:unix:/s:exportname=x", "nbd+unix:///x?socket=/s"),
            ("host_device:/dev/sdx", "/dev/sdx"),
        ] {
            let disk = read(&format!("file={name},format=raw")).expect("can be served");
            assert_eq!(disk.image.to_string(), path);
        }
        let disk = read("file=/dev/sdx,format=host_device").expect("can be served");
        assert_eq!(disk.format, Some(Format::Raw));
        let disk =
            read("file=./odd:name.raw,format=raw,throttling.iops-total=7,bps_wr=1M,detect-zeroes=off").expect("served");
        assert_eq!(disk.limits.to_string(), "bps-write=1048576,iops-total=7");
        assert_eq!((disk.page_cache, disk.read_only, disk.discard), (PageCacheMode::Buffered, false, false));
    }

    /// qcow2 images and images without a format are served; options that only tune QEMU's driver have no effect.
    #[test]
    fn qcow2_tuning_options_have_no_effect() {
        let disk = read("file=/a,format=qcow2,discard=unmap,pass-discard-request=on").expect("can be served");
        assert_eq!((disk.format, disk.discard), (Some(Format::Qcow2), true));
        assert_eq!(read("file=/a").expect("can be served").format, None);
        let disk = read("file=/a,driver=qcow2").expect("can be served");
        assert_eq!(disk.format, Some(Format::Qcow2));
        let tuned = "file=/a,cache-clean-interval=60,l2-cache-size=8M,lazy-refcounts=on,overlap-check.template=all,\
                     cache-size=1M,l2-cache-entry-size=4k,refcount-cache-size=1M,overlap-check=none,l2-cache-size=9M";
        assert_eq!(read(tuned), read("file=/a"));
        let list = KeyValues::parse(tuned, None);
        let expected = "cache-clean-interval cache-size l2-cache-entry-size l2-cache-size lazy-refcounts overlap-check \
                        overlap-check.template refcount-cache-size";
        assert_eq!(ignored_options(&list).join(" "), expected);
    }

    #[test]
    fn unsupported_option_leaves_drive_to_qemu() {
        for (text, why) in [
            ("format=raw", "names no file"),
            ("file=nbd://host/x", "does not give its format"),
            ("file=/a,format=vmdk", "raw and qcow2 images, not vmdk"),
            ("file=/a,driver=vmdk", "not vmdk"),
            ("file=/a,format=raw,driver=qcow2", "driver=qcow2"),
            ("file=/a,format=raw,l2-cache-size=1M", "l2-cache-size"),
            ("file=/a,format=qcow2,backing.file.filename=/b", "other files that the image names"),
            ("file=/a,backing=", "other files that the image names"),
            ("file=/a,format=qcow2,data-file.filename=/b", "other files that the image names"),
            ("file=/a,format=qcow2,pass-discard-request=off", "pass-discard-request=off"),
            ("file=/a,format=qcow2,discard-no-unref=on", "discard-no-unref=on"),
            ("file=/a,format=qcow2,encrypt.format=luks", "encrypt.format=luks"),
            ("file=nbd:host,format=raw", "needs a port"),
            ("file=rbd:pool/web,format=raw", "an image in a Ceph cluster"),
            ("file=/a,format=raw,iops=1,iops_rd=1", "not both"),
            ("file=json:{},format=raw", "described in JSON"),
            ("file=/dev/fdset/1,format=raw", "handed to QEMU"),
            ("file=/a,format=raw,snapshot=on", "temporary file"),
            ("file=/a,format=raw,snapshot", "temporary file"),
            ("file=/a,format=raw,werror=stop", "reports every error"),
            ("file=/a,format=raw,detect-zeroes=unmap", "detect-zeroes=unmap"),
            ("file=/a,format=raw,media=cdrom", "media=cdrom"),
            ("file=/a,format=raw,file.locking=off", "file.locking"),
            ("file=/a,format=raw,throttling.group=g", "throttling.group"),
            ("file=/a,format=raw,readonly=perhaps", "neither on nor off"),
            ("file=/a,format=raw,cache=wild", "cache=wild"),
        ] {
            let left = read(text).expect_err(text);
            assert!(left.contains(why), "{text}: {left}");
        }
    }
}
