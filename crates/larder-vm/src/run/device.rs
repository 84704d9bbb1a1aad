//! QEMU's virtio-blk devices, and the vhost-user-blk devices that replace them.

use super::drive::{QemuOnlyReason, qemu_only};
use super::keyval::{KeyValues, parse_bool};
use super::machine::VirtioBus;
use super::size::{parse_number, parse_size};
use crate::disk_spec::DiskSpec;

/// Properties that both devices have, with the same meaning (QEMU 7.2 to 10).
#[rustfmt::skip]
const SHARED_PROPERTIES: &[&str] = &[
    "id", "bus", "addr", "acpi-index", "bootindex", "multifunction", "romfile", "rombar", "romsize", "packed",
    "vectors", "config-wce", "discard", "write-zeroes", "event_idx", "indirect_desc",
    "any_layout", "notify_on_empty", "queue_reset", "in_order", "disable-legacy", "disable-modern",
    "modern-pio-notify", "page-per-vq", "ats", "aer", "class", "failover_pair_id", "migrate-extra",
    "x-disable-legacy-check", "x-disable-pcie", "x-pcie-deverr-init", "x-pcie-extcap-init", "x-pcie-flr-init",
    "x-pcie-lnkctl-init", "x-pcie-lnksta-dllla", "x-pcie-pm-init", "x-ats-page-aligned",
];

/// virtio-blk's default queue size; vhost-user-blk's is 128.
const QUEUE_SIZE_DEFAULT: u16 = 256;

/// Value of QEMU's `num-queues` for one queue per processor.
const QUEUES_AUTO: u64 = u16::MAX as u64;

/// Returns whether `driver` is one of QEMU's virtio-blk devices.
pub fn is_virtio_blk(driver: &str) -> bool {
    driver == "virtio-blk" || driver.starts_with("virtio-blk-")
}

/// Returns the vhost-user-blk device for a virtio-blk device. `virtio-blk` itself depends on the machine's virtio
/// bus.
fn vhost_user_driver(driver: &str, bus: VirtioBus) -> Option<&'static str> {
    match (driver, bus) {
        ("virtio-blk-pci", _) | ("virtio-blk", VirtioBus::Pci) => Some("vhost-user-blk-pci"),
        ("virtio-blk-pci-transitional", _) => Some("vhost-user-blk-pci-transitional"),
        ("virtio-blk-pci-non-transitional", _) => Some("vhost-user-blk-pci-non-transitional"),
        ("virtio-blk-device", _) | ("virtio-blk", VirtioBus::Mmio) => Some("vhost-user-blk"),
        _ => None,
    }
}

/// Returns the device that replaces `device`; properties of the disk itself are moved to `disk`.
///
/// # Errors
/// The reason why the device cannot be replaced.
pub fn replace_device(
    device: &KeyValues,
    disk: &mut DiskSpec,
    chardev: &str,
    bus: VirtioBus,
) -> Result<KeyValues, QemuOnlyReason> {
    let driver = device.get("driver").unwrap_or_default();
    let Some(new_driver) = vhost_user_driver(driver, bus) else {
        return qemu_only(format!("QEMU has no vhost-user-blk device in place of {driver} on this machine"));
    };
    let mut new = KeyValues::with_implied("driver", new_driver).with("chardev", chardev);
    for (key, value) in device.iter() {
        match (key, value) {
            ("driver" | "drive", _) => {}
            // These properties tune QEMU's own I/O, which Larder does now.
            ("ioeventfd" | "iothread" | "request-merging" | "x-data-plane" | "seg-max-adjust", _) => {}
            ("account-failed" | "account-invalid" | "backend_defaults" | "report-discard-granularity", _) => {}
            ("scsi" | "iommu_platform", _) if parse_bool(value) == Some(false) => {}
            ("write-cache", "on" | "auto") | ("werror" | "rerror", "report" | "auto") => {}
            ("logical_block_size", _) => disk.block_size = Some(convert_number(key, value, parse_size(value, 1))?),
            ("serial", _) => disk.serial = Some(value.to_owned()),
            ("share-rw", _) => disk.share = parse_bool(value) == Some(true),
            // These two are added by `add_queue_options`.
            ("num-queues", _) => {
                disk.queues = match parse_number(value) {
                    Some(QUEUES_AUTO) => None,
                    queues => Some(convert_number(key, value, queues)?),
                }
            }
            ("queue-size", _) => disk.queue_size = Some(convert_number(key, value, parse_number(value))?),
            _ if SHARED_PROPERTIES.contains(&key) => new.push(key, value),
            _ => return qemu_only(format!("vhost-user-blk does not support the property {key}={value}")),
        }
    }
    add_queue_options(new, disk)
}

/// Converts a number to the target type; QEMU reports numbers that do not fit.
fn convert_number<T: TryFrom<u64>>(key: &str, value: &str, number: Option<u64>) -> Result<T, QemuOnlyReason> {
    let converted = number.and_then(|number| T::try_from(number).ok());
    converted.map_or_else(|| qemu_only(format!("{key}={value} is not a number that Larder supports")), Ok)
}

/// Returns a device for a disk that the command line does not mention.
///
/// # Errors
/// The machine has no virtio bus that vhost-user-blk supports.
pub fn create_device(disk: &mut DiskSpec, chardev: &str, bus: VirtioBus) -> Result<KeyValues, QemuOnlyReason> {
    let Some(driver) = vhost_user_driver("virtio-blk", bus) else {
        return qemu_only("QEMU has no vhost-user-blk device for this machine");
    };
    add_queue_options(KeyValues::with_implied("driver", driver).with("chardev", chardev), disk)
}

/// Adds the numbers that the device and the disk's server must agree on. A disk that its server would refuse stays
/// with QEMU.
fn add_queue_options(device: KeyValues, disk: &mut DiskSpec) -> Result<KeyValues, QemuOnlyReason> {
    let queue_size = *disk.queue_size.get_or_insert(QUEUE_SIZE_DEFAULT);
    if let Err(error) = disk.check() {
        return qemu_only(error.to_string());
    }
    let device = match disk.queues {
        Some(queues) => device.with("num-queues", queues.to_string()),
        None => device,
    };
    Ok(device.with("queue-size", queue_size.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::ImageAddress;

    fn replaced(device: &str, bus: VirtioBus) -> Result<(String, DiskSpec), String> {
        let mut disk = DiskSpec::new(ImageAddress::Path("/a".into()));
        let device = KeyValues::parse(device, Some("driver"));
        match replace_device(&device, &mut disk, "c", bus) {
            Ok(new) => Ok((new.to_string(), disk)),
            Err(reason) => Err(reason.0),
        }
    }

    #[test]
    fn only_disk_properties_leave_device() {
        let device = "virtio-blk-pci,drive=d0,id=disk0,addr=05.0,bootindex=1,serial=S1,num-queues=4,iothread=io0,\
                      share-rw=on,packed=on,logical_block_size=4096";
        let (new, disk) = replaced(device, VirtioBus::Pci).expect("is replaced");
        assert_eq!(
            new,
            "vhost-user-blk-pci,chardev=c,id=disk0,addr=05.0,bootindex=1,packed=on,num-queues=4,queue-size=256"
        );
        assert_eq!((disk.serial.as_deref(), disk.queues, disk.share), (Some("S1"), Some(4), true));
        assert_eq!(disk.block_size, Some(4096));
    }

    #[test]
    fn replacement_device_fits_machine() {
        let driver = |device, bus| replaced(device, bus).map(|(new, _)| new.split(',').next().unwrap_or("").to_owned());
        assert_eq!(driver("virtio-blk", VirtioBus::Pci), Ok("vhost-user-blk-pci".to_owned()));
        assert_eq!(driver("virtio-blk", VirtioBus::Mmio), Ok("vhost-user-blk".to_owned()));
        assert_eq!(driver("virtio-blk-device", VirtioBus::Pci), Ok("vhost-user-blk".to_owned()));
        assert!(driver("virtio-blk", VirtioBus::Ccw).is_err());
        assert!(driver("virtio-blk-ccw", VirtioBus::Ccw).is_err());
    }

    #[test]
    fn unsupported_property_leaves_device_to_qemu() {
        for property in ["write-cache=off", "werror=stop", "iommu_platform=on", "secs=63"] {
            let reason = replaced(&format!("virtio-blk-pci,drive=d0,{property}"), VirtioBus::Pci).expect_err(property);
            assert!(reason.contains(property), "{reason}");
        }
    }
}
