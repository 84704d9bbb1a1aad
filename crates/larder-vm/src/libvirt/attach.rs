//! Plan for serving the disks of a libvirt domain: the VM's file, and the domain's new XML.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Group, Uid, User};

use super::disk;
pub use super::disk::ServedDisk;
use super::xml::{Edits, Element, XmlError};
use super::{disks, memory, socket_directory, target, vhost_user_socket};
use crate::image::{NamedChain, PinnedChain, toml_string};
use crate::vm::config::{ConfigError, VmConfig};

/// Reason why Larder cannot serve disks of a domain.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DomainAttachError {
    #[error("its XML: {0}")]
    Xml(#[from] XmlError),
    #[error("its XML does not give its {what}")]
    MissingElement { what: &'static str },
    #[error("its type is '{kind}'; Larder serves domains of QEMU: kvm and qemu")]
    NotQemu { kind: String },
    #[error("Larder already serves {disk}; to change that, detach it first: larder libvirt detach {domain}")]
    AlreadyServed { domain: String, disk: String },
    #[error("it has no disk {disk}; it has {}", known.join(", "))]
    NoSuchDisk { disk: String, known: Vec<String> },
    #[error("Larder cannot serve disk {disk}: {why}")]
    DiskNotServable { disk: String, why: String },
    #[error("it has no disk that Larder can serve{}", list_skipped(skipped))]
    NoServableDisk { skipped: Vec<SkippedDisk> },
    #[error("{0}")]
    Memory(String),
    #[error("{0}; libvirt renames a domain that is shut off: virsh domrename")]
    Name(ConfigError),
    #[error("the VM's file would be invalid: {0}")]
    File(ConfigError),
}

fn list_skipped(skipped: &[SkippedDisk]) -> String {
    let lines = skipped.iter().map(|it| format!("\n  {}: {}", it.name, it.why));
    lines.collect()
}

/// A disk that stays with QEMU.
#[derive(Debug, Clone)]
pub struct SkippedDisk {
    /// Name of the disk in the guest.
    pub name: String,
    /// Reason why the disk stays with QEMU.
    pub why: String,
}

/// Options of the user.
#[derive(Debug, Clone, Default)]
pub struct AttachOptions {
    /// If not empty, only these disks are attached.
    pub disks: Vec<String>,
    /// Disks that are not attached, with reasons.
    pub excluded: BTreeMap<String, String>,
    /// For each disk, the files that its image may lead to, for the VM's file.
    pub chains: BTreeMap<String, PinnedChain>,
    /// Directory for caches of all disks, and size of each cache in TOML syntax.
    pub cache: Option<(PathBuf, String)>,
    /// User and group of QEMU, if they differ from Larder's.
    pub qemu: Option<(String, String)>,
}

/// A plan for attaching a domain.
#[derive(Debug)]
pub struct AttachPlan {
    /// Name of the domain.
    pub name: String,
    /// UUID of the domain.
    pub uuid: String,
    /// Text of the VM's file.
    pub file: String,
    /// Parsed form of `file`.
    pub config: VmConfig,
    /// New XML of the domain.
    pub xml: String,
    /// Disks that Larder will serve.
    pub served: Vec<ServedDisk>,
    /// The other disks.
    pub skipped: Vec<SkippedDisk>,
}

/// Returns a domain's name and UUID.
///
/// # Errors
/// One of them is missing.
pub fn identity(domain: &Element) -> Result<(String, String), DomainAttachError> {
    let required_text = |what: &'static str| match domain.child(what) {
        Some(found) if !found.text.is_empty() => Ok(found.text.clone()),
        _ => Err(DomainAttachError::MissingElement { what }),
    };
    let uuid = required_text("uuid")?;
    match uuid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
        true => Ok((required_text("name")?, uuid)),
        // The UUID becomes part of a file name.
        false => Err(DomainAttachError::MissingElement { what: "uuid" }),
    }
}

/// Returns user and group of a domain's QEMU, from the domain's own label, or else from the default in libvirt's
/// `capabilities`. They are given by name where they have one.
pub fn qemu_user_and_group(domain: &Element, capabilities: &Element) -> Option<(String, String)> {
    let mut labels = domain.children_named("seclabel").filter(|it| it.attribute("model") == Some("dac"));
    let domain_label = labels.find_map(|it| it.child("label"));
    let models = capabilities.child("host").into_iter().flat_map(|host| host.children_named("secmodel"));
    let mut models = models.filter(|it| it.child("model").is_some_and(|model| model.text == "dac"));
    let kind = domain.attribute("type").unwrap_or_default();
    let host_label =
        models.find_map(|model| model.children_named("baselabel").find(|it| it.attribute("type") == Some(kind)));
    let (user, group) = domain_label.or(host_label)?.text.split_once(':')?;
    let user = match user.trim_start_matches('+').parse() {
        Ok(number) => User::from_uid(Uid::from_raw(number)).ok().flatten().map(|user| user.name),
        Err(_) => None,
    }
    .unwrap_or_else(|| user.trim_start_matches('+').to_owned());
    let group = match group.trim_start_matches('+').parse() {
        Ok(number) => Group::from_gid(Gid::from_raw(number)).ok().flatten().map(|group| group.name),
        Err(_) => None,
    }
    .unwrap_or_else(|| group.trim_start_matches('+').to_owned());
    Some((user, group))
}

/// Plans the change. `path_of` returns the path of the VM's file for the domain's name.
///
/// # Errors
/// See [`DomainAttachError`].
pub fn plan(
    text: &str,
    options: &AttachOptions,
    path_of: impl FnOnce(&Path) -> Result<PathBuf, ConfigError>,
) -> Result<AttachPlan, DomainAttachError> {
    let domain = Element::parse(text)?;
    let (name, uuid) = identity(&domain)?;
    match domain.attribute("type") {
        Some("kvm" | "qemu") => {}
        kind => {
            return Err(DomainAttachError::NotQemu { kind: kind.unwrap_or_default().to_owned() });
        }
    }
    check_not_attached(&name, &domain)?;
    let path = path_of(Path::new(&name)).map_err(DomainAttachError::Name)?;
    let (served, left) = partition_disks(&domain, options, |mut disk| {
        add_user_options(&name, &mut disk, options);
        check_vm_file_text(&path, &render_vm_file(&name, &uuid, std::iter::once(&disk)))?;
        Ok(disk)
    })?;
    if served.is_empty() {
        return Err(DomainAttachError::NoServableDisk { skipped: left });
    }
    let file = render_vm_file(&name, &uuid, served.iter().map(|(disk, _)| disk));
    let config = VmConfig::parse(&path, &file).map_err(DomainAttachError::File)?;
    let mut edits = Edits::default();
    memory::make_shared(text, &domain, &mut edits).map_err(DomainAttachError::Memory)?;
    for ((_, element), config_disk) in served.iter().zip(&config.disks) {
        let socket = config_disk.socket.as_deref().unwrap_or(Path::new(""));
        let socket = socket.display().to_string();
        disk::rewrite(text, element, &socket, disk::required_queues(&domain), &mut edits);
    }
    Ok(AttachPlan {
        name,
        uuid,
        config,
        file,
        xml: edits.apply(text),
        served: served.into_iter().map(|(disk, _)| disk).collect(),
        skipped: left,
    })
}

/// Returns a disk of the domain that already has a socket of Larder's for this domain.
pub fn attached_disk(name: &str, domain: &Element) -> Option<String> {
    let begin = format!("{name}-");
    let mut larder_disks = disks(domain).filter(|disk| {
        vhost_user_socket(disk).is_some_and(|path| {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            path.parent() == Some(&socket_directory()) && file.starts_with(&begin)
        })
    });
    larder_disks.find_map(|disk| target(disk).map(str::to_owned))
}

fn check_not_attached(name: &str, domain: &Element) -> Result<(), DomainAttachError> {
    match attached_disk(name, domain) {
        Some(disk) => Err(DomainAttachError::AlreadyServed { domain: name.to_owned(), disk }),
        None => Ok(()),
    }
}

type PartitionedDisks<'a> = (Vec<(ServedDisk, &'a Element)>, Vec<SkippedDisk>);

/// Sorts the disks into those to be served and those that stay with QEMU.
fn partition_disks<'a>(
    domain: &'a Element,
    wish: &AttachOptions,
    finish: impl Fn(ServedDisk) -> Result<ServedDisk, String>,
) -> Result<PartitionedDisks<'a>, DomainAttachError> {
    let known: Vec<String> = disks(domain).filter_map(target).map(str::to_owned).collect();
    if let Some(disk) = wish.disks.iter().find(|disk| !known.contains(disk)) {
        return Err(DomainAttachError::NoSuchDisk { disk: disk.clone(), known });
    }
    let (mut served, mut left) = (Vec::new(), Vec::new());
    for element in disks(domain) {
        let name = target(element).unwrap_or("a disk").to_owned();
        let is_requested = wish.disks.contains(&name);
        let found = match wish.excluded.get(&name) {
            _ if !wish.disks.is_empty() && !is_requested => Err("it was not named".to_owned()),
            Some(why) => Err(why.clone()),
            None => disk::parse_disk(element).and_then(&finish),
        };
        match found {
            Ok(disk) => served.push((disk, element)),
            Err(why) if is_requested => return Err(DomainAttachError::DiskNotServable { disk: name, why }),
            Err(why) => left.push(SkippedDisk { name, why }),
        }
    }
    Ok((served, left))
}

/// Checks a disk with the parser of the VM's file, so that the file never has a disk that is refused later.
fn check_vm_file_text(path: &Path, file: &str) -> Result<(), String> {
    match VmConfig::parse(path, file) {
        Ok(_) => Ok(()),
        Err(ConfigError::Mistakes { mistakes }) => {
            let all: Vec<String> = mistakes.into_iter().map(|mistake| mistake.what).collect();
            Err(all.join("; "))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Adds the user's options to those from the domain.
fn add_user_options(domain: &str, disk: &mut ServedDisk, wish: &AttachOptions) {
    if let Some(chain) = wish.chains.get(&disk.name) {
        disk.keys.extend(NamedChain::from(chain).keys());
    }
    if let Some((directory, size)) = &wish.cache {
        if let Some(at) = disk.keys.iter().position(|(key, _)| *key == "cache") {
            disk.keys.remove(at);
            disk.notes
                .push("its image now bypasses the host's page cache, because it gets a cache of its own".to_owned());
        }
        let file = directory.join(format!("{domain}-{}.cache", disk.name));
        disk.keys.push(("cache", toml_string(&file.display().to_string())));
        disk.keys.push(("cache-size", size.clone()));
    }
    if let Some((user, group)) = &wish.qemu {
        disk.keys.push(("socket-owner", toml_string(user)));
        disk.keys.push(("socket-group", toml_string(group)));
        disk.keys.push(("socket-mode", toml_string("0660")));
    }
}

fn render_vm_file<'a>(domain: &str, uuid: &str, disks: impl Iterator<Item = &'a ServedDisk>) -> String {
    let mut file = format!(
        "# Created by larder libvirt attach {domain}, and removed by larder libvirt detach {domain}.\n# All keys are described in docs/vm-file.md.\n\nuuid = {}\n",
        toml_string(uuid)
    );
    for disk in disks {
        file.push_str(&format!(
            "\n[[disk]]\nname = {}\nimage = {}\n",
            toml_string(&disk.name),
            toml_string(&disk.image)
        ));
        for (key, value) in &disk.keys {
            file.push_str(&format!("{key} = {value}\n"));
        }
    }
    file
}
