//! QEMU's virtio-blk devices, and the vhost-user-blk device that takes the place of each.

use super::drive::{Reason, reason};
use super::keyval::{KeyValues, parse_bool};
use super::machine::VirtioBus;
use crate::wish::DiskWish;

/// Properties that both devices have, with the same meaning (QEMU 7.2 to 10).
#[rustfmt::skip]
const KEPT: &[&str] = &[
    "id", "bus", "addr", "acpi-index", "bootindex", "multifunction", "romfile", "rombar", "romsize", "num-queues",
    "queue-size", "packed", "vectors", "config-wce", "discard", "write-zeroes", "event_idx", "indirect_desc",
    "any_layout", "notify_on_empty", "queue_reset", "in_order", "disable-legacy", "disable-modern",
    "modern-pio-notify", "page-per-vq", "ats", "aer", "class", "failover_pair_id", "migrate-extra",
    "x-disable-legacy-check", "x-disable-pcie", "x-pcie-deverr-init", "x-pcie-extcap-init", "x-pcie-flr-init",
    "x-pcie-lnkctl-init", "x-pcie-lnksta-dllla", "x-pcie-pm-init", "x-ats-page-aligned",
];

/// virtio-blk's default; vhost-user-blk's is 128.
const QUEUE_SIZE: u16 = 256;

/// Whether `driver` is one of QEMU's virtio-blk devices.
pub fn is_virtio_blk(driver: &str) -> bool {
    driver == "virtio-blk" || driver.starts_with("virtio-blk-")
}

/// The vhost-user-blk device for a virtio-blk device. `virtio-blk` itself is whatever the machine's virtio bus needs.
fn driver_for(driver: &str, bus: VirtioBus) -> Option<&'static str> {
    match (driver, bus) {
        ("virtio-blk-pci", _) | ("virtio-blk", VirtioBus::Pci) => Some("vhost-user-blk-pci"),
        ("virtio-blk-pci-transitional", _) => Some("vhost-user-blk-pci-transitional"),
        ("virtio-blk-pci-non-transitional", _) => Some("vhost-user-blk-pci-non-transitional"),
        ("virtio-blk-device", _) | ("virtio-blk", VirtioBus::Mmio) => Some("vhost-user-blk"),
        _ => None,
    }
}

/// The device that takes the place of `device`; what it says of the disk itself goes into `disk`.
///
/// # Errors
/// Why it must stay as it is.
pub fn replace(device: &KeyValues, disk: &mut DiskWish, chardev: &str, bus: VirtioBus) -> Result<KeyValues, Reason> {
    let driver = device.get("driver").unwrap_or_default();
    let Some(new_driver) = driver_for(driver, bus) else {
        return reason(format!(
            "QEMU has no vhost-user-blk device in place of {driver} on this machine"
        ));
    };
    let mut new = KeyValues::of("driver", new_driver).with("chardev", chardev);
    for (key, value) in device.iter() {
        match (key, value) {
            ("driver" | "drive", _) => {}
            // How QEMU would do the work that Larder does now.
            ("ioeventfd" | "iothread" | "request-merging" | "x-data-plane" | "seg-max-adjust", _) => {}
            ("account-failed" | "account-invalid" | "backend_defaults" | "report-discard-granularity", _) => {}
            ("scsi" | "iommu_platform", _) if parse_bool(value) == Some(false) => {}
            ("write-cache", "on" | "auto") | ("werror" | "rerror", "report" | "auto") => {}
            ("logical_block_size", "512" | "4096") => disk.block_size = value.parse().ok(),
            ("serial", _) => disk.serial = Some(value.to_owned()),
            ("share-rw", _) => disk.share = parse_bool(value) == Some(true),
            ("num-queues", _) => {
                disk.queues = value.parse().ok();
                new.push(key, value);
            }
            _ if KEPT.contains(&key) => new.push(key, value),
            _ => return reason(format!("vhost-user-blk has nothing for the property {key}={value}")),
        }
    }
    complete(&mut new, disk);
    Ok(new)
}

/// A device for a disk that the command line does not mention.
///
/// # Errors
/// The machine has no virtio bus that vhost-user-blk fits.
pub fn create(disk: &DiskWish, chardev: &str, bus: VirtioBus) -> Result<KeyValues, Reason> {
    let Some(driver) = driver_for("virtio-blk", bus) else {
        return reason("QEMU has no vhost-user-blk device for this machine");
    };
    let mut new = KeyValues::of("driver", driver).with("chardev", chardev);
    complete(&mut new, disk);
    Ok(new)
}

fn complete(device: &mut KeyValues, disk: &DiskWish) {
    if let (Some(queues), None) = (disk.queues, device.get("num-queues")) {
        device.push("num-queues", queues.to_string());
    }
    if device.get("queue-size").is_none() {
        device.push("queue-size", disk.queue_size.unwrap_or(QUEUE_SIZE).to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::ImageAddress;

    fn replaced(device: &str, bus: VirtioBus) -> Result<(String, DiskWish), String> {
        let mut disk = DiskWish::new(ImageAddress::Path("/a".into()));
        let device = KeyValues::parse(device, Some("driver"));
        match replace(&device, &mut disk, "c", bus) {
            Ok(new) => Ok((new.to_string(), disk)),
            Err(reason) => Err(reason.0),
        }
    }

    #[test]
    fn properties_stay_and_those_of_the_disk_move_to_it() {
        let device = "virtio-blk-pci,drive=d0,id=disk0,addr=05.0,bootindex=1,serial=S1,num-queues=4,iothread=io0,\
                      share-rw=on,packed=on,logical_block_size=4096";
        let (new, disk) = replaced(device, VirtioBus::Pci).expect("is replaced");
        assert_eq!(
            new,
            "vhost-user-blk-pci,chardev=c,id=disk0,addr=05.0,bootindex=1,num-queues=4,packed=on,queue-size=256"
        );
        assert_eq!(
            (disk.serial.as_deref(), disk.queues, disk.share),
            (Some("S1"), Some(4), true)
        );
        assert_eq!(disk.block_size, Some(4096));
    }

    #[test]
    fn the_device_fits_the_machine() {
        let driver = |device, bus| replaced(device, bus).map(|(new, _)| new.split(',').next().unwrap_or("").to_owned());
        assert_eq!(
            driver("virtio-blk", VirtioBus::Pci),
            Ok("vhost-user-blk-pci".to_owned())
        );
        assert_eq!(driver("virtio-blk", VirtioBus::Mmio), Ok("vhost-user-blk".to_owned()));
        assert_eq!(
            driver("virtio-blk-device", VirtioBus::Pci),
            Ok("vhost-user-blk".to_owned())
        );
        assert!(driver("virtio-blk", VirtioBus::Ccw).is_err());
        assert!(driver("virtio-blk-ccw", VirtioBus::Ccw).is_err());
    }

    #[test]
    fn a_property_that_would_be_lost_is_a_reason_to_leave_the_device_alone() {
        for property in [
            "logical_block_size=1024",
            "write-cache=off",
            "werror=stop",
            "iommu_platform=on",
            "secs=63",
        ] {
            let left = replaced(&format!("virtio-blk-pci,drive=d0,{property}"), VirtioBus::Pci).expect_err(property);
            assert!(left.contains(property), "{left}");
        }
    }
}
