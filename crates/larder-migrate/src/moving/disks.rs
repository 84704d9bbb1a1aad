//! Disks of a VM that a process beside QEMU serves and that move along: the movers' interface to their servers.
//!
//! QEMU knows these disks as sockets of its character devices. `docs/migration-wire.md` has the owner of their images
//! at every moment of a move.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::qmp::{Qmp, QmpError};

/// Action of a server of disks. Each may be requested again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoverAction {
    /// Use caches as before the move.
    RestoreCaches,
    /// Close the images for another host, and do not open them again without a request. The guest has stopped, and
    /// continues elsewhere with its QEMU's state of the queues. Refused where QEMU cannot have that state.
    Inactivate,
    /// Close the images for another host, whatever the state of the queues: the guest does not run here after all.
    AwaitIncoming,
    /// Open the images.
    Activate,
    /// Open the images, now and whenever the server is started again: no other host has them.
    Commit,
    /// Close the images that [`HandoverAction::Activate`] has opened.
    RollBack,
}

/// Servers of disks on this host.
pub trait DiskServers: Send + Sync {
    /// Returns the disks served on these sockets, each with the socket as it was passed; nothing for a socket without
    /// a known server.
    ///
    /// # Errors
    /// A text for users: a known server does not answer.
    fn list(&self, sockets: &[PathBuf]) -> Result<Vec<(PathBuf, ServedDisk)>, String>;

    /// Makes these servers write the data that only their caches have to the images, and write through until
    /// [`HandoverAction::RestoreCaches`] or the end of the move. Returns true once that is done; while it returns
    /// false, the caller must call again.
    ///
    /// # Errors
    /// A text for users.
    fn flush_caches(&self, sockets: &[PathBuf]) -> Result<bool, String>;

    /// Returns the hot ranges of each of these disks, as reported by their servers: separated by commas, the hottest
    /// first. Disks without such data are left out. Best effort.
    fn hot_ranges(&self, sockets: &[PathBuf]) -> Vec<(PathBuf, String)>;

    /// Passes ranges that were hot on another host to the server of a disk. Best effort.
    fn warm_cache(&self, socket: &Path, ranges: &str);

    /// Makes the servers on these sockets perform an action, and waits until it is done.
    ///
    /// # Errors
    /// A text for users; with several servers, some may have performed it.
    fn apply(&self, sockets: &[PathBuf], action: HandoverAction) -> Result<(), String>;
}

/// Stub for a host without servers of disks.
pub struct NoDiskServers;

impl DiskServers for NoDiskServers {
    fn list(&self, _: &[PathBuf]) -> Result<Vec<(PathBuf, ServedDisk)>, String> {
        Ok(Vec::new())
    }

    fn flush_caches(&self, _: &[PathBuf]) -> Result<bool, String> {
        Ok(true)
    }

    fn hot_ranges(&self, _: &[PathBuf]) -> Vec<(PathBuf, String)> {
        Vec::new()
    }

    fn warm_cache(&self, _: &Path, _: &str) {}

    fn apply(&self, _: &[PathBuf], _: HandoverAction) -> Result<(), String> {
        Ok(())
    }
}

/// Served disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServedDisk {
    /// Path of the image, for messages.
    pub image: String,
    /// Size in bytes.
    pub size: u64,
    /// Sector size that the guest sees, in bytes.
    pub block_size: u32,
    /// Serial number that the guest sees.
    pub serial: String,
    /// Format of the image, `raw` or `qcow2`.
    pub format: String,
    /// True if writes are refused.
    pub read_only: bool,
    /// True if the server does not lock the image against other users.
    pub shared: bool,
    /// True if the server waits for the disk to arrive.
    pub away: bool,
    /// Inode number of the image, if it is a file.
    pub inode: Option<u64>,
}

/// Disk of the VM to be moved, with the properties that it must have on the other host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskDescription {
    /// Name of QEMU's character device (`-chardev socket,id=...`).
    pub chardev: String,
    /// Properties of the disk.
    #[serde(flatten)]
    pub served: ServedDisk,
}

/// Returns the character devices of a QEMU that are UNIX sockets, with their paths. (`query-chardev` does not report
/// the path of a connected one.)
///
/// # Errors
/// QEMU does not answer.
pub fn socket_chardevs(qmp: &mut Qmp) -> Result<Vec<(String, PathBuf)>, QmpError> {
    let devices = qmp.execute("query-chardev", json!({}))?;
    let labels = devices.as_array().into_iter().flatten();
    let labels: Vec<String> = labels.filter_map(|device| device["label"].as_str().map(str::to_owned)).collect();
    let mut found = Vec::new();
    for label in labels {
        let query = json!({"path": format!("/chardevs/{label}"), "property": "addr"});
        let address = match qmp.execute("qom-get", query) {
            // The device is no socket.
            Err(QmpError::Refused { .. }) => continue,
            address => address?,
        };
        let path = address["path"].as_str().filter(|path| path.starts_with('/'));
        if let Some(path) = path.filter(|_| address["type"] == "unix") {
            found.push((label, PathBuf::from(path)));
        }
    }
    Ok(found)
}

/// Returns the disks behind these character devices.
///
/// # Errors
/// Same as [`DiskServers::list`].
pub fn describe(servers: &dyn DiskServers, devices: &[(String, PathBuf)]) -> Result<Vec<DiskDescription>, String> {
    let sockets = paths(devices);
    let served = servers.list(&sockets)?;
    let chardev = |socket: &Path| devices.iter().find(|(_, path)| path == socket);
    let described = served.into_iter().filter_map(|(socket, served)| {
        let chardev = chardev(&socket)?.0.clone();
        Some(DiskDescription { chardev, served })
    });
    Ok(described.collect())
}

/// Maximum bytes of hot ranges in one message, and maximum messages for one disk.
const HOT_MESSAGE_BYTES_MAX: usize = 48 << 10;
const HOT_MESSAGES_MAX: usize = 16;

/// Splits hot ranges into parts that fit in a message: whole ranges, the hottest first, up to a useful number of
/// parts.
pub fn split_hot_ranges(ranges: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = ranges;
    while !rest.is_empty() && parts.len() < HOT_MESSAGES_MAX {
        let (part, tail) = match rest.len() <= HOT_MESSAGE_BYTES_MAX {
            true => (rest, ""),
            // The text is ASCII; other text is not sent.
            false => match rest.get(..HOT_MESSAGE_BYTES_MAX).and_then(|head| head.rsplit_once(',')) {
                Some((head, _)) => (head, &rest[head.len() + 1..]),
                None => break,
            },
        };
        parts.push(part);
        rest = tail;
    }
    parts
}

/// Returns the paths of these devices.
pub fn paths(devices: &[(String, PathBuf)]) -> Vec<PathBuf> {
    devices.iter().map(|(_, path)| path.clone()).collect()
}

/// Agreement on how the disks of a VM get from one host to the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreement {
    /// Character devices of the disks that move along, whose servers wait for them: their images are closed here
    /// before they are opened there.
    pub moving_chardevs: Vec<String>,
    /// Problems that do not prevent the move.
    pub warnings: Vec<String>,
}

/// Checks that the disks of the source can become those of the destination, `there`.
///
/// # Errors
/// All obstacles.
pub fn agree(here: &[DiskDescription], there: &[DiskDescription]) -> Result<Agreement, Vec<String>> {
    let mut agreement = Agreement::default();
    let mut reasons = Vec::new();
    for disk in here {
        let name = format!("disk {} ({})", disk.chardev, disk.served.image);
        let Some(other) = there.iter().find(|other| other.chardev == disk.chardev) else {
            if disk.served.shared {
                agreement
                    .warnings
                    .push(format!("{name}: at the destination it is not served by a `larder vm` that is known there"));
            } else {
                reasons.push(format!(
                    "{name}: no `larder vm` serves it at the destination's QEMU, which must have a chardev with the same id"
                ));
            }
            continue;
        };
        match (other.served.away, disk.served.shared && other.served.shared) {
            (true, _) => agreement.moving_chardevs.push(disk.chardev.clone()),
            (false, true) => {}
            (false, false) => reasons.push(format!(
                "{name}: its server at the destination does not wait for it: start it with `larder vm NAME --incoming`"
            )),
        }
        reasons.extend(disk.served.differences(&name, &other.served));
        if disk.served.inode.zip(other.served.inode).is_some_and(|(one, other)| one != other) {
            agreement.warnings.push(format!(
                "{name}: {} at the destination does not seem to be the same file: its inode number differs",
                other.served.image
            ));
        }
    }
    for other in there.iter().filter(|other| other.served.away) {
        if !here.iter().any(|disk| disk.chardev == other.chardev) {
            reasons.push(format!(
                "disk {} ({}): the destination waits for it, and no `larder vm` serves it at the source, or none that is found \
                 there: two servers with the same name on one host are not found",
                other.chardev, other.served.image
            ));
        }
    }
    if !agreement.moving_chardevs.is_empty() && there.iter().any(|other| !other.served.away) {
        reasons.push("the destination's servers wait for some of the disks, and have others open".to_owned());
    }
    if here.iter().any(|disk| disk.served.away) {
        reasons.push("the source's disk server itself waits for its VM to arrive".to_owned());
    }
    if reasons.is_empty() { Ok(agreement) } else { Err(reasons) }
}

impl ServedDisk {
    fn differences(&self, name: &str, there: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let mut differ = |what: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            found.push(format!("{name}: {what}: {here} at the source, {there} at the destination"));
        };
        if self.size != there.size {
            differ("bytes", &self.size, &there.size);
        }
        if self.block_size != there.block_size {
            differ("bytes of a sector (block-size)", &self.block_size, &there.block_size);
        }
        if self.serial != there.serial {
            differ("serial number (serial)", &format!("'{}'", self.serial), &format!("'{}'", there.serial));
        }
        if self.format != there.format {
            differ("format", &self.format, &there.format);
        }
        if self.read_only != there.read_only {
            differ("read-only (readonly)", &self.read_only, &there.read_only);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(away: bool) -> DiskDescription {
        DiskDescription {
            chardev: "vda".to_owned(),
            served: ServedDisk {
                image: "/srv/web.qcow2".to_owned(),
                size: 1 << 30,
                block_size: 512,
                serial: "A".to_owned(),
                format: "qcow2".to_owned(),
                read_only: false,
                shared: false,
                away,
                inode: Some(7),
            },
        }
    }

    /// Returns the disk with the changes of `change`.
    fn other(away: bool, change: impl FnOnce(&mut ServedDisk)) -> DiskDescription {
        let mut disk = disk(away);
        change(&mut disk.served);
        disk
    }

    /// A disk moves only to a server that waits for it and has the same properties; the reasons against it are
    /// reported.
    #[test]
    fn disk_moves_only_to_matching_server() {
        assert_eq!(agree(&[disk(false)], &[disk(true)]).expect("it goes").moving_chardevs, ["vda"]);
        assert_eq!(agree(&[], &[]), Ok(Agreement::default()));
        for (there, why) in [
            (vec![], "no `larder vm` serves it at the destination"),
            (vec![disk(false)], "does not wait for it"),
            (
                vec![other(true, |disk| disk.size = 1 << 20)],
                "bytes: 1073741824 at the source, 1048576 at the destination",
            ),
            (
                vec![other(true, |disk| disk.serial = "B".to_owned())],
                "serial number (serial): 'A' at the source, 'B' at the destination",
            ),
            (
                vec![disk(true), DiskDescription { chardev: "vdb".to_owned(), ..disk(true) }],
                "the destination waits for it, and no `larder vm` serves it at the source",
            ),
        ] {
            let reasons = agree(&[disk(false)], &there).expect_err(why);
            assert!(reasons.iter().any(|reason| reason.contains(why)), "{reasons:?}");
        }
        let other_file = other(true, |disk| disk.inode = Some(8));
        assert_eq!(agree(&[disk(false)], &[other_file]).expect("perhaps").warnings.len(), 1);
    }

    #[test]
    fn hot_ranges_are_split_between_ranges() {
        assert!(split_hot_ranges("").is_empty());
        assert_eq!(split_hot_ranges("17+3,4+1"), ["17+3,4+1"]);
        let many = vec!["123456+7"; 10_000].join(",");
        let parts = split_hot_ranges(&many);
        assert!(parts.len() == 2 && parts.iter().all(|part| part.len() <= HOT_MESSAGE_BYTES_MAX));
        assert_eq!(parts.join(","), many);
        let endless = vec!["1+1"; 1 << 20].join(",");
        assert_eq!(split_hot_ranges(&endless).len(), HOT_MESSAGES_MAX);
        assert!(split_hot_ranges(&"1".repeat(HOT_MESSAGE_BYTES_MAX + 1)).is_empty());
    }

    #[test]
    fn shared_disk_needs_no_waiting_server() {
        let both = [other(false, |disk| disk.shared = true)];
        assert_eq!(agree(&both, &both), Ok(Agreement::default()));
    }
}
