//! `larder libvirt detach`: gives a domain's disks back to QEMU.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::Loop;
use larder_qcow2::read_header;
use larder_vm::image::journal::{JournalStatus, status};
use larder_vm::image::{Format, ImageAddress, dirty_caches, mark_caches_stale};
use larder_vm::libvirt::attach::attached_disk;
use larder_vm::libvirt::detach::restore;
use larder_vm::libvirt::xml::Element;
use larder_vm::vm::config::{VmConfig, vm_file_path};

use super::attach::domain_identity;
use super::backup::{self, DomainBackup};
use super::virsh::Virsh;
use super::{apparmor, disk_list, unified_diff};
use crate::cli::LibvirtDetachArguments;
use crate::disk_image::{self, Sharing, describe_left_behind};
use crate::output::{print, print_stderr};

/// State of the VM's file, which decides what detach does with it.
enum VmFileState {
    /// The file does not exist.
    Missing,
    /// The file is as attach wrote it, and is removed.
    Unchanged,
    /// The user has changed the file, which is renamed to this path.
    Changed(PathBuf),
}

pub(crate) fn run(arguments: LibvirtDetachArguments) -> anyhow::Result<ExitCode> {
    let virsh = Virsh::new(arguments.connect);
    let domain = virsh.domain(&arguments.domain)?;
    let now = Element::parse(&domain.xml)?;
    let (name, uuid) = domain_identity(&domain.xml)?;
    let backup = DomainBackup::for_domain(&uuid)?;
    let Some(before) = DomainBackup::read(&backup.xml)? else {
        match attached_disk(&name, &now) {
            Some(disk) => bail!(
                "domain {name}: the previous state of disk {disk} is unknown, because there is no {}; edit it by hand: virsh edit {name}",
                backup.xml.display()
            ),
            None => bail!("Larder serves no disk of domain {name}; there is nothing to detach"),
        }
    };
    // The VM's file has the name that the domain had when it was attached.
    let (name_before, _) = domain_identity(&before).with_context(|| backup.xml.display().to_string())?;
    let path = vm_file_path(Path::new(&name_before))?;
    // A server that dies under a running guest needs the file to be restarted. Besides, data in its caches may not
    // all be on the disk before the guest has ended.
    if let Some(running) = &domain.running
        && let Some(disk) = attached_disk(&name_before, &Element::parse(running)?)
    {
        bail!("domain {name} runs, and Larder serves its disk {disk}; shut it down first: virsh shutdown {name}");
    }
    let restored = restore(&domain.xml, &before)?;
    let file = vm_file_state(&path, &backup)?;
    let file_backup = DomainBackup::read(&backup.file)?;
    check_no_pending_data(&path, file_backup.as_deref(), arguments.apply)?;
    if !arguments.apply {
        let names = (format!("{name} (now)"), format!("{name} (without Larder)"));
        let mut text = unified_diff(&domain.xml, &restored.xml, (&names.0, &names.1));
        append_notes(&mut text, &path, &file, &restored.notes);
        text.push_str("\nNothing has been changed. Apply the changes with --apply.\n");
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    // In this order, a crash leaves either a domain that is still attached, or files that the next detach removes
    // (and the next attach replaces): detach looks for the files whatever the domain's XML says.
    if restored.xml != domain.xml {
        virsh.define(&restored.xml).with_context(|| {
            format!(
                "the domain is unchanged; its XML from before Larder served its disks is in {}, and virsh define would restore all of it",
                backup.xml.display()
            )
        })?;
    }
    match &file {
        VmFileState::Missing => {}
        VmFileState::Unchanged => backup::remove(&path)?,
        VmFileState::Changed(backup_path) => {
            fs::rename(&path, backup_path).with_context(|| format!("cannot rename {}", path.display()))?;
            backup::sync_parent_directory(&path)?;
        }
    }
    backup.remove()?;
    if let Err(error) = apparmor::forbid(&uuid) {
        print_stderr(&format!("AppArmor still allows the domain's QEMU to use Larder's sockets: {error:#}"));
    }
    let names: Vec<&str> = restored.disks.iter().map(String::as_str).collect();
    let mut text = match names.as_slice() {
        [] => format!("{name}: Larder served none of its disks any more\n"),
        names => format!("{name}: QEMU serves {} from the next start on\n", disk_list(names)),
    };
    append_notes(&mut text, &path, &file, &restored.notes);
    for cache in existing_caches(file_backup.as_deref(), &path) {
        text.push_str(&format!("{cache} is not needed any more: larder disk cache drop removes the cache\n"));
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn vm_file_state(path: &Path, kept: &DomainBackup) -> anyhow::Result<VmFileState> {
    let Some(current) = DomainBackup::read(path)? else {
        return Ok(VmFileState::Missing);
    };
    if DomainBackup::read(&kept.file)?.is_some_and(|written| written == current) {
        return Ok(VmFileState::Unchanged);
    }
    let named = |ending: String| path.with_extension(format!("toml.bak{ending}"));
    let mut names = std::iter::once(named(String::new())).chain((1..).map(|number| named(format!(".{number}"))));
    let free = names.find(|name| !name.exists());
    Ok(VmFileState::Changed(free.unwrap_or_else(|| named(String::new()))))
}

fn append_notes(text: &mut String, path: &Path, file: &VmFileState, notes: &[String]) {
    for note in notes {
        text.push_str(&format!("{note}\n"));
    }
    let path = path.display();
    match file {
        VmFileState::Missing => {}
        VmFileState::Unchanged => text.push_str(&format!("{path} is removed\n")),
        VmFileState::Changed(aside) => {
            text.push_str(&format!("{path} was changed by hand; it is renamed to {}\n", aside.display()))
        }
    }
}

/// Returns the VM's configurations: that of its current file, and that of the file as attach wrote it.
fn configs(written: Option<&str>, path: &Path) -> Vec<VmConfig> {
    let now = VmConfig::read(path).ok();
    let written = written.and_then(|text| VmConfig::parse(path, text).ok());
    now.into_iter().chain(written).collect()
}

fn existing_caches(written: Option<&str>, path: &Path) -> Vec<ImageAddress> {
    let mut caches: Vec<ImageAddress> = Vec::new();
    for config in configs(written, path) {
        let config_caches = config.disks.into_iter().filter_map(|disk| disk.spec.disk_cache.file);
        for cache in config_caches {
            let exists = matches!(&cache, ImageAddress::Path(path) if path.exists());
            if exists && !caches.contains(&cache) {
                caches.push(cache);
            }
        }
    }
    caches
}

/// Refuses to detach while QEMU would use images that lack data which only Larder has: in a running server, in a
/// write-back cache, or in a killed server's journal.
fn check_no_pending_data(path: &Path, written: Option<&str>, apply: bool) -> anyhow::Result<()> {
    let on = Loop::new(Duration::ZERO)?;
    for config in configs(written, path) {
        if UnixStream::connect(&config.control).is_ok() {
            bail!(
                "Larder still serves the disks of {} ({} answers); stop it first: systemctl stop larder@{}, or a SIGTERM",
                config.name,
                config.control.display(),
                config.name
            );
        }
        for disk in &config.disks {
            let image = &disk.spec.image;
            let format = disk.spec.format.unwrap_or(Format::Raw);
            if let Some(cache) = dirty_caches(image, format).first() {
                bail!(
                    "disk {}: {cache} may have data that was never written to {image}; write it there: larder disk cache flush {cache}",
                    disk.name
                );
            }
            if let Some(left) = on.block_on(pending_journal(&on, image, format)) {
                bail!(
                    "disk {}: {image}: {left}; larder disk check --repair {image} repairs what a killed server left",
                    disk.name
                );
            }
            if apply {
                on.block_on(mark_caches_stale(&on, image, format))?;
            }
        }
    }
    Ok(())
}

/// Describes a killed server's changes that are not in the image, if there are any.
async fn pending_journal(on: &Loop, image: &ImageAddress, format: Format) -> Option<String> {
    if format != Format::Qcow2 || disk_image::processes_using(image).is_some() {
        return None;
    }
    // A missing image is no reason to refuse the detach.
    let opened = disk_image::open(on, image, None, Sharing::Share).await.ok()?;
    let header = read_header(&opened.file).await.ok()?;
    let left = status(image, &header).ok()?;
    match &left {
        JournalStatus::Pending(pending) if pending.changes == 0 => None,
        JournalStatus::Pending(_) | JournalStatus::Missing(_) => describe_left_behind(&left),
        JournalStatus::Clean | JournalStatus::Stale(_) | JournalStatus::LostAtReboot => None,
    }
}
