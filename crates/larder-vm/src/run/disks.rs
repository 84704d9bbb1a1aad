//! The disks of a command line: which of them Larder serves, and which QEMU device represents each in the guest.
//!
//! The guest numbers its disks (vda, vdb, ...) by their PCI addresses, which QEMU assigns in the order in which it
//! creates the devices: first those of `-device`, then those of `-drive if=virtio`. So a `-device` is replaced in
//! place, and drives become devices at the end of the command line, in their order. If some drives are served and
//! others stay with QEMU, the latter are replaced by the device that QEMU would have created, in their place.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::arguments::Argument;
use super::device;
use super::drive::{QemuOnlyReason, ignored_options, parse_drive, qemu_only};
use super::inventory::{Device, Drive, DriveNotation};
use super::keyval::KeyValues;
use super::machine::{Machine, VirtioBus};
use super::plan::OptionSource;
use super::plan::{PlanError, PlannedDisk};
use super::rewrite::CommandLineRewrite;
use super::version::QemuVersion;
use crate::disk_spec::DiskSpec;
use crate::image::ImageAddress;
use larder_export::vhost_user::QUEUES_MAX;

/// Context of the rewriting, in addition to the command line.
pub(super) struct DiskContext<'a> {
    pub(super) machine: &'a Machine,
    pub(super) version: QemuVersion,
    /// Directory of the sockets.
    pub(super) sockets: &'a Path,
    /// Images that Larder cannot serve, with reasons.
    pub(super) left_to_qemu: &'a [(ImageAddress, QemuOnlyReason)],
    /// Reason to leave every drive with QEMU, if there is one.
    pub(super) leave_all_reason: Option<QemuOnlyReason>,
}

/// Rewrites drives, and adds the disks of `--disk`.
pub(super) fn rewrite_disks(
    line: &mut CommandLineRewrite,
    extra: &[DiskSpec],
    context: &DiskContext<'_>,
) -> Result<Vec<PlannedDisk>, PlanError> {
    let mut disks = DiskRewriter {
        context,
        bus: context.machine.virtio_bus(),
        snapshot: line.arguments().iter().any(|argument| argument.name() == Some("snapshot")),
        served: Vec::new(),
        guest_names: GuestNames::default(),
        outcomes: Vec::new(),
    };
    let drives = Drive::parse_all(line, context.machine);
    disks.replace_devices(line, &drives);
    disks.replace_virtio_drives(line, &drives);
    disks.leave_other_drives(&drives);
    for disk in extra {
        disks.add_disk(line, disk)?;
    }
    let changes = disks.describe_outcomes();
    line.changes.extend(changes);
    Ok(disks.served)
}

struct DiskRewriter<'a> {
    context: &'a DiskContext<'a>,
    bus: VirtioBus,
    /// `-snapshot`: QEMU writes to temporary files.
    snapshot: bool,
    served: Vec<PlannedDisk>,
    guest_names: GuestNames,
    outcomes: Vec<DiskOutcome>,
}

/// Result for one disk.
struct DiskOutcome {
    image: String,
    /// Index among the guest's virtio disks, if it is one.
    position: Option<usize>,
    text: String,
    served: bool,
}

impl DiskRewriter<'_> {
    /// Replaces `-device virtio-blk-...,drive=ID` with its `-drive if=none,id=ID`.
    fn replace_devices(&mut self, line: &mut CommandLineRewrite, drives: &[Drive]) {
        let devices = Device::parse_all(line);
        for device in &devices {
            let has_address = device.options.get("addr").is_some() || device.options.get("bus").is_some();
            if device.is_virtio_disk() && (has_address || device.is_json) {
                self.guest_names.mark_unpredictable();
            }
            let position = device.is_virtio_disk().then(|| self.guest_names.next());
            if device.is_vhost_user_disk() {
                let text = &device.text;
                line.changes.push(format!("-device {text}: unchanged: it has a server of its own"));
                continue;
            }
            let id = device.drive().unwrap_or_default();
            let Some(drive) = drives.iter().find(|drive| drive.id() == Some(id)) else {
                if device.is_virtio_disk() {
                    let text = &device.text;
                    line.changes.push(format!("-device {text}: stays with QEMU: there is no -drive if=none,id={id}"));
                }
                continue;
            };
            let users = devices.iter().filter(|device| device.drive() == Some(id)).count();
            let converted = self.convert_device_drive(drive, device, users).and_then(|mut disk| {
                let new = device::replace_device(&device.options, &mut disk, &self.next_chardev(), self.bus)?;
                Ok((disk, new))
            });
            match converted {
                Ok((disk, new)) => {
                    let previous = format!("was -device {} and its -drive", device.driver());
                    let previous = describe_previous(&previous, &drive.options);
                    drive.is_reported.set(true);
                    let new = self.add_served_disk(disk, OptionSource::Device, new, position, &previous);
                    line.replace(device.index, new);
                    line.replace(drive.index, Vec::new());
                }
                Err(reason) => self.leave_to_qemu(drive, position, &reason),
            }
        }
    }

    fn convert_device_drive(&self, drive: &Drive, device: &Device, users: usize) -> Result<DiskSpec, QemuOnlyReason> {
        let driver = device.driver();
        let interface = drive.options.get("if").unwrap_or("(its default)");
        match () {
            () if users > 1 => qemu_only("several devices use it"),
            () if is_cd_drive(driver) => qemu_only(CD_ROM_REASON),
            () if !device.is_virtio_disk() => qemu_only(format!(
                "the guest sees it as {driver}; with -device virtio-blk-pci it would be served, as a vd... in the guest"
            )),
            () if device.is_json => {
                qemu_only("its -device is written in JSON; write it as key=value,... to have it served")
            }
            () if !drive.is_for_device() => {
                qemu_only(format!("its -drive has if={interface} and a -device at once; give it if=none"))
            }
            () => self.convert_drive(drive),
        }
    }

    /// Replaces `-drive if=virtio`.
    fn replace_virtio_drives(&mut self, line: &mut CommandLineRewrite, drives: &[Drive]) {
        let drives: Vec<&Drive> = drives.iter().filter(|drive| drive.is_virtio && !drive.is_reported.get()).collect();
        let attempts: Vec<Result<DiskSpec, QemuOnlyReason>> =
            drives.iter().map(|drive| self.convert_virtio_drive(drive)).collect();
        let any_served = attempts.iter().any(Result::is_ok);
        let ids = qemu_drive_ids(&drives);
        for ((drive, attempt), id) in drives.into_iter().zip(attempts).zip(ids) {
            let position = self.guest_names.next();
            let converted = attempt.and_then(|mut disk| {
                let new = device::create_device(&mut disk, &self.next_chardev(), self.bus)?;
                Ok((disk, new))
            });
            match converted {
                Ok((disk, new)) => {
                    line.replace(drive.index, Vec::new());
                    drive.is_reported.set(true);
                    let previous = match drive.notation {
                        DriveNotation::Shorthand(name) => format!("was -{name}"),
                        _ => format!("was -drive {}", drive.options),
                    };
                    let previous = describe_previous(&previous, &drive.options);
                    for argument in self.add_served_disk(disk, OptionSource::Drive, new, Some(position), &previous) {
                        line.append(argument);
                    }
                }
                Err(reason) => {
                    self.leave_to_qemu(drive, Some(position), &reason);
                    if any_served {
                        expand_virtio_drive(line, drive, &id);
                    }
                }
            }
        }
    }

    fn convert_virtio_drive(&self, drive: &Drive) -> Result<DiskSpec, QemuOnlyReason> {
        let mut disk = self.convert_drive(drive)?;
        device::create_device(&mut disk, "", self.bus).map(|_| disk)
    }

    fn convert_drive(&self, drive: &Drive) -> Result<DiskSpec, QemuOnlyReason> {
        if self.snapshot {
            return qemu_only("-snapshot: QEMU keeps its writes in a temporary file");
        }
        if let Some(reason) = &self.context.leave_all_reason {
            return Err(reason.clone());
        }
        match drive.notation {
            DriveNotation::Drive | DriveNotation::Shorthand(_) => {
                let disk = parse_drive(&drive.options)?;
                let left = self.context.left_to_qemu.iter().find(|(image, _)| *image == disk.image);
                left.map_or(Ok(disk), |(_, reason)| Err(reason.clone()))
            }
            DriveNotation::NonUtf8Drive => {
                qemu_only("its -drive is not UTF-8; give the image a name that is UTF-8 (a link is enough)")
            }
            DriveNotation::Blockdev => qemu_only(
                "it is given by -blockdev; to have it served, write -drive if=none,id=...,file=...,format=...",
            ),
        }
    }

    /// Leaves with QEMU all drives that are not virtio disks and have no device.
    fn leave_other_drives(&mut self, drives: &[Drive]) {
        let other_drives = drives.iter().filter(|drive| !drive.is_reported.get() && !drive.is_firmware_or_empty());
        for drive in other_drives {
            self.leave_to_qemu(drive, None, &not_virtio_reason(drive));
        }
    }

    /// Adds a disk of `--disk`.
    fn add_disk(&mut self, line: &mut CommandLineRewrite, disk: &DiskSpec) -> Result<(), PlanError> {
        let image = disk.image.clone();
        if self.snapshot && !disk.read_only {
            return Err(PlanError::SnapshotOfDisk { image });
        }
        let position = self.guest_names.next();
        let mut disk = disk.clone();
        let new = device::create_device(&mut disk, &self.next_chardev(), self.bus);
        let new = new.map_err(|_| PlanError::NoDevice { image })?;
        for argument in self.add_served_disk(disk, OptionSource::Option, new, Some(position), "(added by --disk)") {
            line.append(argument);
        }
        Ok(())
    }

    fn next_chardev(&self) -> String {
        format!("larder-chr-{}", self.served.len())
    }

    /// Adds a served disk; returns the arguments that attach it.
    fn add_served_disk(
        &mut self,
        disk: DiskSpec,
        given_by: OptionSource,
        mut new: KeyValues,
        position: Option<usize>,
        why: &str,
    ) -> Vec<Argument> {
        let socket = self.context.sockets.join(format!("disk-{}.sock", self.served.len()));
        let chardev = KeyValues::with_implied("backend", "socket")
            .with("id", self.next_chardev())
            .with("path", socket.to_string_lossy());
        let (reconnect, delay) = self.context.version.reconnect();
        // By default QEMU uses one queue per processor, but fails if the server offers fewer.
        if new.get("num-queues").is_none() && self.context.machine.processors > u64::from(QUEUES_MAX) {
            new.push("num-queues", QUEUES_MAX.to_string());
        }
        let discard = if disk.discard || disk.read_only {
            ""
        } else {
            "; discard is not offered to the guest, because discard=unmap is not set"
        };
        let serial = disk.serial_warning().map_or(String::new(), |note| format!("; {note}"));
        self.outcomes.push(DiskOutcome {
            image: disk.image.to_string(),
            position,
            text: format!("{why}{discard}{serial}"),
            served: true,
        });
        self.served.push(PlannedDisk { disk, source: given_by, socket });
        vec![Argument::option("chardev", chardev.with(reconnect, delay)), Argument::option("device", new)]
    }

    /// Records why a drive stays with QEMU, once.
    fn leave_to_qemu(&mut self, drive: &Drive, position: Option<usize>, reason: &QemuOnlyReason) {
        if drive.is_reported.replace(true) {
            return;
        }
        self.outcomes.push(DiskOutcome {
            image: drive.display_name().to_owned(),
            position,
            text: format!("stays with QEMU: {reason}"),
            served: false,
        });
    }

    fn describe_outcomes(&self) -> Vec<String> {
        let lines = self.outcomes.iter().map(|DiskOutcome { image, position, text, served }| {
            let name = position.and_then(|position| self.guest_names.name(position));
            match (served, name) {
                (true, Some(name)) => format!("disk {image}: served over vhost-user-blk as {name} {text}"),
                (true, None) => format!("disk {image}: served over vhost-user-blk {text}"),
                (false, _) => format!("disk {image}: {text}"),
            }
        });
        lines.collect()
    }
}

/// Describes the disk before the change, and the options of its drive that have no effect.
fn describe_previous(was: &str, drive: &KeyValues) -> String {
    match ignored_options(drive).as_slice() {
        [] => format!("({was})"),
        keys => format!("({was}); ignored, because Larder does not need them: {}", keys.join(", ")),
    }
}

const CD_ROM_REASON: &str = "it is a CD-ROM, which Larder does not serve";

fn is_cd_drive(driver: &str) -> bool {
    driver.ends_with("-cd")
}

/// Returns why a drive without a device is not one of the guest's virtio disks, with advice.
fn not_virtio_reason(drive: &Drive) -> QemuOnlyReason {
    let advice = "with -drive file=...,if=virtio it would be served, as a vd... in the guest";
    let text = match (drive.notation, drive.options.get("if")) {
        _ if drive.options.get("media") == Some("cdrom") => CD_ROM_REASON.to_owned(),
        (DriveNotation::Blockdev, _) | (_, Some("none")) => {
            "no -device on the command line uses it; add -device virtio-blk-pci with its name as drive=".to_owned()
        }
        (_, Some("floppy")) => "it is a floppy disk, which Larder does not serve".to_owned(),
        (DriveNotation::Shorthand(name), _) => format!("-{name} is not a virtio disk; {advice}"),
        (_, Some(interface)) => format!("if={interface} is not a virtio disk; {advice}"),
        (_, None) => format!("without if= it is not a virtio disk on this machine; {advice}"),
    };
    QemuOnlyReason(text)
}

/// Returns the IDs that QEMU assigns to virtio drives without one: by `index=`, or the lowest free index.
fn qemu_drive_ids(drives: &[&Drive]) -> Vec<String> {
    let mut used: Vec<u64> = Vec::new();
    let ids = drives.iter().map(|drive| {
        let index = drive.options.get("index").or_else(|| drive.options.get("unit"));
        let index = index.and_then(|text| text.parse().ok());
        let index = index.or_else(|| (0..).find(|index| !used.contains(index))).unwrap_or_default();
        used.push(index);
        drive.options.get("id").map_or_else(|| format!("virtio{index}"), str::to_owned)
    });
    ids.collect()
}

/// Replaces `-drive if=virtio` by the two options to which QEMU expands it; the second one keeps the order of
/// devices.
fn expand_virtio_drive(line: &mut CommandLineRewrite, drive: &Drive, id: &str) {
    let value = line.arguments()[drive.index].value().map(OsStr::to_owned);
    let argument = match (drive.notation, value) {
        // The last value of a repeated key is used.
        (DriveNotation::NonUtf8Drive, Some(mut bytes)) => {
            bytes.push(format!(",if=none,id={id}"));
            Argument::option_os("drive", bytes)
        }
        _ => {
            let mut options = drive.options.clone();
            for key in ["if", "index", "bus", "unit", "id"] {
                options.remove(key);
            }
            Argument::option("drive", options.with("if", "none").with("id", id))
        }
    };
    line.replace(drive.index, vec![argument]);
    line.append(Argument::option("device", KeyValues::with_implied("driver", "virtio-blk").with("drive", id)));
}

/// The names that the guest will give to its virtio disks, as long as they can be predicted.
#[derive(Default)]
struct GuestNames {
    count: usize,
    is_unpredictable: bool,
}

impl GuestNames {
    /// Returns the index of one more disk.
    fn next(&mut self) -> usize {
        self.count += 1;
        self.count - 1
    }

    /// Records that names cannot be predicted, because a disk has an address of the user's choice.
    fn mark_unpredictable(&mut self) {
        self.is_unpredictable = true;
    }

    fn name(&self, position: usize) -> Option<String> {
        let letter = char::from(b'a' + u8::try_from(position).ok().filter(|position| *position < 26)?);
        (!self.is_unpredictable).then(|| format!("vd{letter}"))
    }
}

/// Returns the longest path that a disk's socket in the directory of the sockets can have.
pub(super) fn longest_socket_path(sockets: &Path) -> PathBuf {
    sockets.join("disk-999.server")
}
