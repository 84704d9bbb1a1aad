//! `larder libvirt detach`: gives a domain's disks back to QEMU.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::Loop;
use larder_qcow2::read_header;
use larder_vm::image::journal::{LeftBehind, left_behind};
use larder_vm::image::{Format, ImageAddress, dirty_caches, use_without_cache};
use larder_vm::libvirt::attach::attached_disk;
use larder_vm::libvirt::detach::restore;
use larder_vm::libvirt::xml::Element;
use larder_vm::vm::config::{VmConfig, path_of};

use super::attach::name_of;
use super::kept::{self, Kept};
use super::virsh::Virsh;
use super::{apparmor, difference, disks};
use crate::cli::LibvirtDetachArguments;
use crate::disk_image::{self, Sharing, left_line};
use crate::output::{complain, print};

/// State of the VM's file, which decides what detach does with it.
enum File {
    /// The file does not exist.
    Gone,
    /// The file is as attach wrote it, and is removed.
    Ours,
    /// The user has changed the file, which is renamed to this path.
    Changed(PathBuf),
}

pub(crate) fn run(arguments: LibvirtDetachArguments) -> anyhow::Result<ExitCode> {
    let virsh = Virsh::new(arguments.connect);
    let domain = virsh.domain(&arguments.domain)?;
    let now = Element::parse(&domain.xml)?;
    let (name, uuid) = name_of(&domain.xml)?;
    let kept = Kept::of(&uuid)?;
    let Some(before) = Kept::read(&kept.xml)? else {
        match attached_disk(&name, &now) {
            Some(disk) => bail!(
                "domain {name}: the previous state of disk {disk} is unknown, because there is no {}; edit it by hand: virsh edit {name}",
                kept.xml.display()
            ),
            None => bail!("Larder serves no disk of domain {name}; there is nothing to detach"),
        }
    };
    // The VM's file has the name that the domain had when it was attached.
    let (name_before, _) = name_of(&before).with_context(|| kept.xml.display().to_string())?;
    let path = path_of(Path::new(&name_before))?;
    // A server that dies under a running guest needs the file to be restarted. Besides, data in its caches may not
    // all be on the disk before the guest has ended.
    if let Some(running) = &domain.running
        && let Some(disk) = attached_disk(&name_before, &Element::parse(running)?)
    {
        bail!("domain {name} runs, and Larder serves its disk {disk}; shut it down first: virsh shutdown {name}");
    }
    let restored = restore(&domain.xml, &before)?;
    let file = file_at(&path, &kept)?;
    let file_kept = Kept::read(&kept.file)?;
    refuse_unfinished(&path, file_kept.as_deref(), arguments.apply)?;
    if !arguments.apply {
        let names = (format!("{name} (now)"), format!("{name} (without Larder)"));
        let mut text = difference(&domain.xml, &restored.xml, (&names.0, &names.1));
        notes(&mut text, &path, &file, &restored.notes);
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
                kept.xml.display()
            )
        })?;
    }
    match &file {
        File::Gone => {}
        File::Ours => kept::remove(&path)?,
        File::Changed(aside) => {
            fs::rename(&path, aside).with_context(|| format!("cannot rename {}", path.display()))?;
            kept::sync_folder(&path)?;
        }
    }
    kept.remove()?;
    if let Err(error) = apparmor::forbid(&uuid) {
        complain(&format!(
            "AppArmor still allows the domain's QEMU to use Larder's sockets: {error:#}"
        ));
    }
    let names: Vec<&str> = restored.disks.iter().map(String::as_str).collect();
    let mut text = match names.as_slice() {
        [] => format!("{name}: Larder served none of its disks any more\n"),
        names => format!("{name}: QEMU serves {} from the next start on\n", disks(names)),
    };
    notes(&mut text, &path, &file, &restored.notes);
    for cache in caches(file_kept.as_deref(), &path) {
        text.push_str(&format!(
            "{cache} is not needed any more: larder disk cache drop removes the cache\n"
        ));
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn file_at(path: &Path, kept: &Kept) -> anyhow::Result<File> {
    let Some(there) = Kept::read(path)? else {
        return Ok(File::Gone);
    };
    if Kept::read(&kept.file)?.is_some_and(|written| written == there) {
        return Ok(File::Ours);
    }
    let named = |ending: String| path.with_extension(format!("toml.bak{ending}"));
    let mut names = std::iter::once(named(String::new())).chain((1..).map(|number| named(format!(".{number}"))));
    let free = names.find(|name| !name.exists());
    Ok(File::Changed(free.unwrap_or_else(|| named(String::new()))))
}

fn notes(text: &mut String, path: &Path, file: &File, notes: &[String]) {
    for note in notes {
        text.push_str(&format!("{note}\n"));
    }
    let path = path.display();
    match file {
        File::Gone => {}
        File::Ours => text.push_str(&format!("{path} is removed\n")),
        File::Changed(aside) => text.push_str(&format!(
            "{path} was changed by hand; it is renamed to {}\n",
            aside.display()
        )),
    }
}

/// Returns the VM's configurations: that of its current file, and that of the file as attach wrote it.
fn configs(written: Option<&str>, path: &Path) -> Vec<VmConfig> {
    let now = VmConfig::read(path).ok();
    let written = written.and_then(|text| VmConfig::parse(path, text).ok());
    now.into_iter().chain(written).collect()
}

fn caches(written: Option<&str>, path: &Path) -> Vec<ImageAddress> {
    let mut caches: Vec<ImageAddress> = Vec::new();
    for config in configs(written, path) {
        let of_config = config.disks.into_iter().filter_map(|disk| disk.wish.disk_cache.file);
        for cache in of_config {
            let is_there = matches!(&cache, ImageAddress::Path(path) if path.exists());
            if is_there && !caches.contains(&cache) {
                caches.push(cache);
            }
        }
    }
    caches
}

/// Refuses to detach while QEMU would use images that lack data which only Larder has: in a running server, in a
/// write-back cache, or in a killed server's journal.
fn refuse_unfinished(path: &Path, written: Option<&str>, apply: bool) -> anyhow::Result<()> {
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
            let image = &disk.wish.image;
            let format = disk.wish.format.unwrap_or(Format::Raw);
            if let Some(cache) = dirty_caches(image, format).first() {
                bail!(
                    "disk {}: {cache} may have data that was never written to {image}; write it there: larder disk cache flush {cache}",
                    disk.name
                );
            }
            if let Some(left) = on.block_on(journal_of(&on, image, format)) {
                bail!(
                    "disk {}: {image}: {left}; larder disk check --repair {image} repairs what a killed server left",
                    disk.name
                );
            }
            if apply {
                on.block_on(use_without_cache(&on, image, format))?;
            }
        }
    }
    Ok(())
}

/// Describes a killed server's changes that are not in the image, if there are any.
async fn journal_of(on: &Loop, image: &ImageAddress, format: Format) -> Option<String> {
    if format != Format::Qcow2 || disk_image::used_by(image).is_some() {
        return None;
    }
    // A missing image is no reason to refuse the detach.
    let opened = disk_image::open(on, image, None, Sharing::Share).await.ok()?;
    let header = read_header(&opened.file).await.ok()?;
    let left = left_behind(image, &header).ok()?;
    match &left {
        LeftBehind::Changes(pending) if pending.changes == 0 => None,
        LeftBehind::Changes(_) | LeftBehind::Missing(_) => left_line(&left),
        LeftBehind::Nothing | LeftBehind::Overtaken(_) | LeftBehind::Gone => None,
    }
}
