//! Inventory of all disk images and devices of a command line, in every notation that QEMU accepts.

use std::cell::Cell;
use std::ffi::OsStr;

use super::arguments::Argument;
use super::device::is_virtio_blk;
use super::keyval::KeyValues;
use super::machine::Machine;
use super::rewrite::CommandLineRewrite;

/// Notation of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriveNotation {
    /// `-drive`.
    Drive,
    /// `-drive` with a value that is not UTF-8; its parsed form must not be written back.
    NonUtf8Drive,
    /// `-hda`, `-cdrom`, ..., or a word that is not an option, which is equivalent to `-hda`.
    Shorthand(&'static str),
    /// `-blockdev`.
    Blockdev,
}

/// An image that the command line names.
#[derive(Debug)]
pub(super) struct Drive {
    /// Index of its argument.
    pub(super) index: usize,
    pub(super) notation: DriveNotation,
    /// Options in the form of `-drive`.
    pub(super) options: KeyValues,
    /// QEMU makes a virtio disk of it, without a `-device`.
    pub(super) is_virtio: bool,
    /// A message about it has been shown to the user.
    pub(super) is_reported: Cell<bool>,
}

/// QEMU's short options for images, the equivalent options of `-drive`, and the index of the disk.
const SHORTHANDS: [(&str, &str, &str); 9] = [
    ("hda", "media=disk", "0"),
    ("hdb", "media=disk", "1"),
    ("hdc", "media=disk", "2"),
    ("hdd", "media=disk", "3"),
    ("cdrom", "media=cdrom", "2"),
    ("fda", "if=floppy", "0"),
    ("fdb", "if=floppy", "1"),
    ("mtdblock", "if=mtd", ""),
    ("sd", "if=sd", ""),
];

impl Drive {
    /// Returns all images, in order.
    pub(super) fn parse_all(line: &CommandLineRewrite, machine: &Machine) -> Vec<Self> {
        let arguments = line.arguments().iter().enumerate();
        let mut drives: Vec<Self> =
            arguments.filter_map(|(index, argument)| Self::parse(index, argument, machine)).collect();
        remove_inner_nodes(&mut drives, line);
        drives
    }

    fn parse(index: usize, argument: &Argument, machine: &Machine) -> Option<Self> {
        let (source, options) = match (argument.name(), argument.value(), argument.plain_word()) {
            (_, _, Some(word)) => (DriveNotation::Shorthand("hda"), shorthand("media=disk", "0", word)),
            (Some("drive"), Some(value), _) => {
                let options = KeyValues::parse(&value.to_string_lossy(), None);
                match value.to_str() {
                    Some(_) => (DriveNotation::Drive, options),
                    None => (DriveNotation::NonUtf8Drive, options),
                }
            }
            (Some("blockdev"), Some(value), _) => {
                (DriveNotation::Blockdev, parse_options(&value.to_string_lossy(), "driver").0)
            }
            (Some(name), Some(value), _) => {
                let (name, stands_for, number) = SHORTHANDS.into_iter().find(|(known, ..)| *known == name)?;
                (DriveNotation::Shorthand(name), shorthand(stands_for, number, value))
            }
            _ => return None,
        };
        let is_virtio = match options.get("if") {
            _ if source == DriveNotation::Blockdev => false,
            Some(interface) => interface == "virtio",
            None => machine.drives_are_virtio() && options.get("media") != Some("cdrom"),
        };
        Some(Self { index, notation: source, options, is_virtio, is_reported: Cell::new(false) })
    }

    /// Returns the name by which a device refers to the image.
    pub(super) fn id(&self) -> Option<&str> {
        match self.notation {
            DriveNotation::Blockdev => self.options.get("node-name"),
            _ => self.options.get("id").or_else(|| self.options.get("node-name")),
        }
    }

    /// Returns whether the image is only used by a device that names it.
    pub(super) fn is_for_device(&self) -> bool {
        self.notation == DriveNotation::Blockdev || self.options.get("if") == Some("none")
    }

    /// Returns a name for messages: the image's file, or another identifier.
    pub(super) fn display_name(&self) -> &str {
        let keys = ["file", "filename", "file.filename", "file.file.filename", "id", "node-name"];
        let names = keys.iter().filter_map(|key| self.options.get(key));
        names.into_iter().next().unwrap_or("(no file)")
    }

    /// Returns whether this is no disk: firmware, or a drive without a medium.
    pub(super) fn is_firmware_or_empty(&self) -> bool {
        let is_removable = self.options.get("media") == Some("cdrom") || self.options.get("if") == Some("floppy");
        let has_medium =
            ["file", "driver", "file.driver", "file.filename"].iter().any(|key| self.options.get(key).is_some());
        self.options.get("if") == Some("pflash") || (is_removable && !has_medium)
    }
}

fn shorthand(equivalent: &str, index: &str, file: &OsStr) -> KeyValues {
    let mut options = KeyValues::parse(equivalent, None);
    if !index.is_empty() {
        options.push("index", index);
    }
    // In this notation a comma in the name is not doubled.
    options.with("file", file.to_string_lossy())
}

/// Removes the nodes of `-blockdev` on which another node, or the machine, is built: only the top nodes are disks.
/// Each top node gets the file name of the nodes below it.
fn remove_inner_nodes(drives: &mut Vec<Drive>, line: &CommandLineRewrite) {
    let nodes: Vec<KeyValues> = drives
        .iter()
        .filter(|drive| drive.notation == DriveNotation::Blockdev)
        .map(|drive| drive.options.clone())
        .collect();
    let machine: Vec<KeyValues> = ["machine", "M", "global"]
        .into_iter()
        .flat_map(|name| line.options(name))
        .map(|(_, text)| KeyValues::parse(text, Some("type")))
        .collect();
    let refers = |list: &KeyValues, node: &str| {
        list.iter().any(|(key, value)| value == node && !key.ends_with("node-name") && !key.ends_with("driver"))
    };
    drives.retain(|drive| match (drive.notation, drive.id()) {
        (DriveNotation::Blockdev, Some(id)) => !nodes.iter().chain(&machine).any(|list| refers(list, id)),
        _ => true,
    });
    for drive in drives.iter_mut().filter(|drive| drive.notation == DriveNotation::Blockdev) {
        // The number of nodes bounds the depth, in case they form a cycle.
        for _ in 0..nodes.len() {
            let Some(child_name) = drive.options.get("file") else {
                break;
            };
            let child_name = nodes.iter().find(|node| node.get("node-name") == Some(child_name));
            let Some(file) = child_name.and_then(|node| node.get("filename").or_else(|| node.get("file"))) else {
                break;
            };
            let file = file.to_owned();
            drive.options.set("file", &file);
        }
    }
}

/// A `-device` option.
#[derive(Debug)]
pub(super) struct Device {
    /// Index of its argument.
    pub(super) index: usize,
    /// Text of the option.
    pub(super) text: String,
    pub(super) options: KeyValues,
    pub(super) is_json: bool,
}

impl Device {
    /// Returns all devices, in order.
    pub(super) fn parse_all(line: &CommandLineRewrite) -> Vec<Self> {
        let arguments = line.arguments().iter().enumerate();
        let devices = arguments.filter_map(|(index, argument)| {
            let value = argument.value().filter(|_| argument.name() == Some("device"))?;
            let text = value.to_string_lossy().into_owned();
            let (options, is_json) = parse_options(&text, "driver");
            Some(Self { index, text, options, is_json })
        });
        devices.collect()
    }

    pub(super) fn driver(&self) -> &str {
        self.options.get("driver").unwrap_or_default()
    }

    /// Returns the drive that the device refers to.
    pub(super) fn drive(&self) -> Option<&str> {
        self.options.get("drive")
    }

    /// Returns whether the guest sees the device as `vda`, `vdb`, ...
    pub(super) fn is_virtio_disk(&self) -> bool {
        is_virtio_blk(self.driver()) || self.is_vhost_user_disk()
    }

    /// Returns whether another process already serves this disk.
    pub(super) fn is_vhost_user_disk(&self) -> bool {
        self.driver() == "vhost-user-blk" || self.driver().starts_with("vhost-user-blk-")
    }
}

/// Parses a list or a JSON object; also returns whether it was JSON.
fn parse_options(text: &str, implied: &str) -> (KeyValues, bool) {
    let is_json = text.trim_start().starts_with('{');
    let list = match is_json {
        true => KeyValues::parse_json(text).unwrap_or_default(),
        false => KeyValues::parse(text, Some(implied)),
    };
    (list, is_json)
}
