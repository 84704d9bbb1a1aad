//! The disks of a command line: which of them Larder serves, and by which device of QEMU's the guest sees each.
//!
//! The guest numbers its disks (vda, vdb, ...) by their PCI addresses, which QEMU gives out in the order in which it
//! makes the devices: first those of `-device`, then those of `-drive if=virtio`. So a `-device` is replaced where it
//! stands, and drives become devices at the end of the command line, in their order. Where some drives are served and
//! others stay with QEMU, the latter are spelled out as the device that QEMU would have made of them, at their place.

use std::path::{Path, PathBuf};

use super::arguments::Argument;
use super::device;
use super::disk::Disk;
use super::drive::{Reason, disk_of, reason};
use super::keyval::KeyValues;
use super::machine::{Machine, VirtioBus};
use super::plan::{PlanError, PlannedDisk};
use super::rewrite::Rewrite;
use super::version::QemuVersion;
use larder_export::vhost_user::QUEUES_MAX;

/// What the rewriting needs to know besides the command line.
pub(super) struct DiskContext<'a> {
    pub(super) machine: &'a Machine,
    pub(super) version: QemuVersion,
    /// The folder of the sockets.
    pub(super) sockets: &'a Path,
}

/// Rewrites drives, and adds the disks of `--disk`.
pub(super) fn rewrite(
    line: &mut Rewrite,
    extra: &[Disk],
    context: &DiskContext<'_>,
) -> Result<Vec<PlannedDisk>, PlanError> {
    let mut disks = Disks {
        context,
        bus: context.machine.virtio_bus(),
        snapshot: line
            .arguments()
            .iter()
            .any(|argument| argument.name() == Some("snapshot")),
        served: Vec::new(),
        guest_names: GuestNames::default(),
        outcomes: Vec::new(),
    };
    let drives = Drive::all(line, context.machine);
    disks.replace_devices(line, &drives);
    disks.replace_virtio_drives(line, &drives);
    for disk in extra {
        disks.add(line, disk)?;
    }
    let changes = disks.report();
    line.changes.extend(changes);
    Ok(disks.served)
}

/// A `-drive` of the command line.
struct Drive {
    index: usize,
    options: KeyValues,
    is_virtio: bool,
}

impl Drive {
    fn all(line: &Rewrite, machine: &Machine) -> Vec<Self> {
        let drives = line.options("drive").map(|(index, text)| {
            let options = KeyValues::parse(text, None);
            let is_virtio = match options.get("if") {
                Some(interface) => interface == "virtio",
                None => machine.drives_are_virtio() && options.get("media") != Some("cdrom"),
            };
            Self {
                index,
                options,
                is_virtio,
            }
        });
        drives.collect()
    }

    /// Whether it waits for a device that names it.
    fn is_for_device(&self, id: &str) -> bool {
        self.options.get("if") == Some("none") && self.options.get("id") == Some(id)
    }

    fn file(&self) -> &str {
        self.options.get("file").unwrap_or("(no file)")
    }
}

struct Disks<'a> {
    context: &'a DiskContext<'a>,
    bus: VirtioBus,
    /// `-snapshot`: QEMU writes to temporary files.
    snapshot: bool,
    served: Vec<PlannedDisk>,
    guest_names: GuestNames,
    outcomes: Vec<Outcome>,
}

/// What became of a disk.
struct Outcome {
    image: String,
    /// Which of the guest's virtio disks it is.
    position: usize,
    text: String,
    served: bool,
}

impl Disks<'_> {
    /// `-device virtio-blk-...,drive=ID` with its `-drive if=none,id=ID`.
    fn replace_devices(&mut self, line: &mut Rewrite, drives: &[Drive]) {
        let devices: Vec<(usize, String)> = line
            .options("device")
            .map(|(index, text)| (index, text.to_owned()))
            .collect();
        for (index, text) in &devices {
            if text.trim_start().starts_with('{') {
                if text.contains("\"virtio-blk") {
                    self.guest_names.give_up();
                    line.changes
                        .push(format!("-device {text}: stays with QEMU: it is written in JSON"));
                }
                continue;
            }
            let options = KeyValues::parse(text, Some("driver"));
            if !options.get("driver").is_some_and(device::is_virtio_blk) {
                continue;
            }
            if options.get("addr").is_some() || options.get("bus").is_some() {
                self.guest_names.give_up();
            }
            let position = self.guest_names.next();
            let id = options.get("drive").unwrap_or_default();
            let Some(drive) = drives.iter().find(|drive| drive.is_for_device(id)) else {
                line.changes.push(format!(
                    "-device {text}: stays with QEMU: there is no -drive if=none,id={id}"
                ));
                continue;
            };
            let uses = |(_, text): &&(usize, String)| refers_to(text, id);
            let result = match devices.iter().filter(uses).count() {
                1 => self.disk(drive).and_then(|mut disk| {
                    let chardev = self.next_chardev();
                    let new = device::replace(&options, &mut disk, &chardev, self.bus)?;
                    Ok((disk, new))
                }),
                _ => reason("several devices use it"),
            };
            match result {
                Ok((disk, new)) => {
                    let was = format!(
                        "was -device {} and its -drive",
                        options.get("driver").unwrap_or_default()
                    );
                    let new = self.serve(disk, new, position, &was);
                    line.replace(*index, new);
                    line.replace(drive.index, Vec::new());
                }
                Err(reason) => self.leave(drive, position, &reason),
            }
        }
    }

    /// `-drive if=virtio`.
    fn replace_virtio_drives(&mut self, line: &mut Rewrite, drives: &[Drive]) {
        let drives: Vec<&Drive> = drives.iter().filter(|drive| drive.is_virtio).collect();
        let attempts: Vec<Result<Disk, Reason>> = drives.iter().map(|drive| self.disk_of_virtio(drive)).collect();
        let any_served = attempts.iter().any(Result::is_ok);
        let ids = ids_by_qemu(&drives);
        for ((drive, attempt), id) in drives.into_iter().zip(attempts).zip(ids) {
            let position = self.guest_names.next();
            let made = attempt.and_then(|disk| {
                let new = device::create(&disk, &self.next_chardev(), self.bus)?;
                Ok((disk, new))
            });
            match made {
                Ok((disk, new)) => {
                    line.replace(drive.index, Vec::new());
                    let was = format!("was -drive {}", drive.options);
                    for argument in self.serve(disk, new, position, &was) {
                        line.append(argument);
                    }
                }
                Err(reason) => {
                    self.leave(drive, position, &reason);
                    if any_served {
                        spell_out(line, drive, &id);
                    }
                }
            }
        }
    }

    fn disk_of_virtio(&self, drive: &Drive) -> Result<Disk, Reason> {
        let disk = self.disk(drive)?;
        device::create(&disk, "", self.bus).map(|_| disk)
    }

    fn disk(&self, drive: &Drive) -> Result<Disk, Reason> {
        if self.snapshot {
            return reason("-snapshot: QEMU keeps its writes in a temporary file");
        }
        disk_of(&drive.options)
    }

    /// `--disk`.
    fn add(&mut self, line: &mut Rewrite, disk: &Disk) -> Result<(), PlanError> {
        let image = disk.image.clone();
        if self.snapshot && !disk.read_only {
            return Err(PlanError::SnapshotOfDisk { image });
        }
        let position = self.guest_names.next();
        let new = device::create(disk, &self.next_chardev(), self.bus).map_err(|_| PlanError::NoDevice { image })?;
        for argument in self.serve(disk.clone(), new, position, "added by --disk") {
            line.append(argument);
        }
        Ok(())
    }

    fn next_chardev(&self) -> String {
        format!("larder-chr-{}", self.served.len())
    }

    /// Takes the disk up; the arguments that attach it.
    fn serve(&mut self, mut disk: Disk, mut new: KeyValues, position: usize, why: &str) -> Vec<Argument> {
        let socket = self.context.sockets.join(format!("disk-{}.sock", self.served.len()));
        let chardev = KeyValues::of("backend", "socket")
            .with("id", self.next_chardev())
            .with("path", socket.to_string_lossy());
        let (reconnect, delay) = self.context.version.reconnect();
        // QEMU takes a queue for each processor by itself, but fails if that is more than we offer.
        if new.get("num-queues").is_none() && self.context.machine.processors > u64::from(QUEUES_MAX) {
            new.push("num-queues", QUEUES_MAX.to_string());
        }
        disk.queue_size = new.get("queue-size").and_then(|size| size.parse().ok());
        let discard = if disk.discard || disk.read_only {
            ""
        } else {
            "; the guest is offered no discard, as without discard=unmap"
        };
        self.outcomes.push(Outcome {
            image: disk.image.to_string(),
            position,
            text: format!("({why}){discard}"),
            served: true,
        });
        self.served.push(PlannedDisk { disk, socket });
        vec![
            Argument::option("chardev", chardev.with(reconnect, delay)),
            Argument::option("device", new),
        ]
    }

    fn leave(&mut self, drive: &Drive, position: usize, reason: &Reason) {
        self.outcomes.push(Outcome {
            image: drive.file().to_owned(),
            position,
            text: format!("stays with QEMU: {reason}"),
            served: false,
        });
    }

    fn report(&self) -> Vec<String> {
        let lines = self.outcomes.iter().map(
            |Outcome {
                 image,
                 position,
                 text,
                 served,
             }| {
                let name = self.guest_names.name(*position);
                match (served, name) {
                    (true, Some(name)) => format!("disk {image}: served over vhost-user-blk as {name} {text}"),
                    (true, None) => format!("disk {image}: served over vhost-user-blk {text}"),
                    (false, _) => format!("disk {image}: {text}"),
                }
            },
        );
        lines.collect()
    }
}

/// Whether a `-device` has that drive.
fn refers_to(device: &str, drive: &str) -> bool {
    KeyValues::parse(device, Some("driver")).get("drive") == Some(drive)
}

/// The ids that QEMU gives to virtio drives without one: by `index=`, or the lowest that is free.
fn ids_by_qemu(drives: &[&Drive]) -> Vec<String> {
    let mut taken: Vec<u64> = Vec::new();
    let ids = drives.iter().map(|drive| {
        let index = drive.options.get("index").or_else(|| drive.options.get("unit"));
        let index = index.and_then(|text| text.parse().ok());
        let index = index
            .or_else(|| (0..).find(|index| !taken.contains(index)))
            .unwrap_or_default();
        taken.push(index);
        drive
            .options
            .get("id")
            .map_or_else(|| format!("virtio{index}"), str::to_owned)
    });
    ids.collect()
}

/// What QEMU makes of `-drive if=virtio`, said in two options, the second of which has its place among the devices.
fn spell_out(line: &mut Rewrite, drive: &Drive, id: &str) {
    let mut options = drive.options.clone();
    for key in ["if", "index", "bus", "unit", "id"] {
        options.remove(key);
    }
    options.push("if", "none");
    options.push("id", id);
    line.replace(drive.index, vec![Argument::option("drive", options)]);
    line.append(Argument::option(
        "device",
        KeyValues::of("driver", "virtio-blk").with("drive", id),
    ));
}

/// The names that the guest will give to its virtio disks, as long as they can be told.
#[derive(Default)]
struct GuestNames {
    count: usize,
    unknown: bool,
}

impl GuestNames {
    /// The position of one more disk.
    fn next(&mut self) -> usize {
        self.count += 1;
        self.count - 1
    }

    /// Some disk has a place of its own choice.
    fn give_up(&mut self) {
        self.unknown = true;
    }

    fn name(&self, position: usize) -> Option<String> {
        let letter = char::from(b'a' + u8::try_from(position).ok().filter(|position| *position < 26)?);
        (!self.unknown).then(|| format!("vd{letter}"))
    }
}

/// The socket of the disk at `index` lies in the folder of the sockets.
pub(super) fn longest_socket(sockets: &Path) -> PathBuf {
    sockets.join("disk-999.sock")
}
