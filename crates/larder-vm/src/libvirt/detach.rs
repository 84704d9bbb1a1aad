//! Restoring a domain to its state before Larder served its disks.
//!
//! The disks and the memory are restored; all other changes that were made to the domain's XML since remain. A disk's
//! address in the machine and its boot order also remain as they are now.

use super::xml::{Edits, Element, XmlError};
use super::{disks, memory, target, vhost_user_socket};

/// Result of a restore.
#[derive(Debug)]
pub struct RestoredDomain {
    /// New XML of the domain.
    pub xml: String,
    /// Disks that QEMU serves again.
    pub disks: Vec<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// Restores in `now` what `before` has for the disks that Larder serves, and for the memory.
///
/// # Errors
/// One of them is not valid XML.
pub fn restore(now: &str, before: &str) -> Result<RestoredDomain, XmlError> {
    let (domain, domain_before) = (Element::parse(now)?, Element::parse(before)?);
    let (mut edits, mut restored_disks, mut notes) = (Edits::default(), Vec::new(), Vec::new());
    for disk_before in disks(&domain_before).filter(|disk| vhost_user_socket(disk).is_none()) {
        let Some(name) = target(disk_before) else { continue };
        let Some(disk) = disks(&domain).find(|disk| target(disk) == Some(name)) else {
            notes.push(format!("{name}: the domain no longer has this disk"));
            continue;
        };
        if vhost_user_socket(disk).is_some() {
            edits.replace(disk.span.clone(), merge_disk(now, disk, before, disk_before));
            restored_disks.push(name.to_owned());
        }
    }
    let mut remaining = domain.clone();
    for devices in remaining.children.iter_mut().filter(|child| child.name == "devices") {
        devices.children.retain(|device| {
            device.name != "disk" || !target(device).is_some_and(|name| restored_disks.iter().any(|it| it == name))
        });
    }
    match memory::needs_shared_memory(&remaining) {
        _ if restored_disks.is_empty() => {}
        true => notes.push("its memory remains shared, because other devices need that".to_owned()),
        false => memory::restore(now, &domain, &domain_before, before, &mut edits),
    }
    Ok(RestoredDomain { xml: edits.apply(now), disks: restored_disks, notes })
}

/// Returns the disk as it was before, with its present address and boot order.
fn merge_disk(now: &str, disk: &Element, before: &str, disk_before: &Element) -> String {
    let mut edits = Edits::default();
    for name in ["boot", "address"] {
        match (disk.child(name), disk_before.child(name)) {
            (Some(current), Some(old)) if current.source(now) != old.source(before) => {
                edits.replace(old.span.clone(), current.source(now));
            }
            (Some(_), Some(_)) | (None, None) => {}
            (Some(current), None) => edits.append_child(before, disk_before, current.source(now)),
            (None, Some(old)) => edits.remove(before, old),
        }
    }
    // The edits apply to the whole text, in which the disk's end keeps its distance from the end of the text.
    let suffix_len = before.len() - disk_before.span.end;
    let edited = edits.apply(before);
    edited[disk_before.span.start..edited.len() - suffix_len].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "<domain type='kvm'>\n  <name>web</name>\n  <memory>1</memory>\n  <devices>\n    <disk type='file' device='disk'>\n      <source file='/a'/>\n      <target dev='vda' bus='virtio'/>\n      <boot order='1'/>\n    </disk>\n  </devices>\n</domain>\n";
    const NOW: &str = "<domain type='kvm'>\n  <name>web</name>\n  <memory>2</memory>\n  <memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n  <devices>\n    <disk type='vhostuser' device='disk'>\n      <source type='unix' path='/run/larder/web-vda.sock'/>\n      <target dev='vda' bus='virtio'/>\n      <boot order='1'/>\n    </disk>\n  </devices>\n</domain>\n";

    #[test]
    fn detach_restores_disks_and_memory_only() {
        let restored = restore(NOW, BEFORE).expect("is XML");
        assert_eq!(restored.xml, BEFORE.replace("<memory>1", "<memory>2"));
        assert_eq!(restored.disks, ["vda"]);
        // A second restore has nothing to do.
        let again = restore(&restored.xml, BEFORE).expect("is XML");
        assert_eq!((again.xml, again.disks.len()), (restored.xml, 0));
    }

    #[test]
    fn changed_boot_order_survives_detach() {
        let now = NOW.replace("order='1'", "order='2'");
        assert_eq!(
            restore(&now, BEFORE).expect("is XML").xml,
            BEFORE.replace("<memory>1", "<memory>2").replace("order='1'", "order='2'")
        );
        let now = NOW.replace("\n      <boot order='1'/>", "");
        let xml = restore(&now, BEFORE).expect("is XML").xml;
        assert!(!xml.contains("boot") && xml.contains("<target dev='vda' bus='virtio'/>\n    </disk>"));
        let before = BEFORE.replace("\n      <boot order='1'/>", "");
        let xml = restore(NOW, &before).expect("is XML").xml;
        assert_eq!(xml, BEFORE.replace("<memory>1", "<memory>2"));
    }

    #[test]
    fn memory_needed_by_others_stays_shared() {
        let net = "<interface type='vhostuser'/>\n  </devices>";
        let now = NOW.replace("  </devices>", net);
        let restored = restore(&now, BEFORE).expect("is XML");
        assert!(restored.xml.contains("<access mode='shared'/>"), "{}", restored.xml);
        assert_eq!(restored.notes.len(), 1);
        let now = NOW.replace("<memoryBacking>", "<memoryBacking>\n    <locked/>");
        let xml = restore(&now, BEFORE).expect("is XML").xml;
        assert!(xml.contains("<memoryBacking>\n    <locked/>\n  </memoryBacking>"), "{xml}");
    }

    #[test]
    fn edited_disk_is_not_restored() {
        let gone = NOW.replace("dev='vda'", "dev='vdb'");
        let restored = restore(&gone, BEFORE).expect("is XML");
        assert_eq!((restored.xml.as_str(), restored.disks.len()), (gone.as_str(), 0));
        assert_eq!(restored.notes.len(), 1, "{:?}", restored.notes);
    }
}
