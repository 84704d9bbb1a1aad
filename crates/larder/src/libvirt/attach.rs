//! `larder libvirt attach`: has Larder serve the disks of a domain from its next start on.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use larder_block::Loop;
use larder_block::small_file::{self, CONFIG_BYTES_MAX};
use larder_vm::disk_spec::DiskSpec;
use larder_vm::image::{CacheSpec, NamedChain, NamedImage, PinnedChain, PrefetchSpec, is_same_image, named_chain};
use larder_vm::libvirt::attach::{AttachOptions, AttachPlan, ServedDisk, identity, plan, qemu_user_and_group};
use larder_vm::libvirt::detach::restore;
use larder_vm::libvirt::xml::Element;
use larder_vm::run::check::check_disks;
use larder_vm::run::plan::OptionSource;
use larder_vm::vm::config::{VmDisk, vm_file_path};
use larder_vm::vm::problems::find_problems;

use super::backup::{self, DomainBackup};
use super::virsh::{Domain, Virsh};
use super::{disk_list, unified_diff};
use crate::cli::LibvirtAttachArguments;
use crate::output::print;

/// Path of Larder's hook among libvirt's hooks.
const HOOK_PATH: &str = "/etc/libvirt/hooks/qemu.d/larder";

/// File in which a host grants AppArmor permissions to every domain's QEMU.
const APPARMOR_ABSTRACTION: &str = "/etc/apparmor.d/local/abstractions/libvirt-qemu";

pub(crate) fn run(arguments: LibvirtAttachArguments) -> anyhow::Result<ExitCode> {
    let virsh = Virsh::new(arguments.connect.clone());
    let domain = virsh.domain(&arguments.domain)?;
    let is_system = virsh.is_system()?;
    if is_system && !rustix::process::geteuid().is_root() {
        bail!("the host's libvirt starts Larder as root, which reads root's files of VMs: run this as root");
    }
    let capabilities = virsh.capabilities()?;
    let mut options = AttachOptions {
        disks: arguments.disk.clone(),
        cache: cache_from_arguments(&arguments)?,
        qemu: match is_system {
            true => qemu_user_and_group(&Element::parse(&domain.xml)?, &capabilities),
            false => None,
        },
        ..AttachOptions::default()
    };
    let plan = plan_servable(&domain, &mut options, arguments.trust_image)
        .with_context(|| format!("domain {}", arguments.domain))?;
    let path = vm_file_path(Path::new(&plan.name))?;
    let backup = DomainBackup::for_domain(&plan.uuid)?;
    check_no_backup(&plan, &backup, &domain)?;
    let is_written_by_attach = is_written_by_attach(&path, &backup)?;
    if !arguments.apply {
        let mut text = describe_changes(&plan, &path, &domain.xml);
        append_notes(&mut text, &plan, &domain, &capabilities, is_system);
        text.push_str("\nNothing has been changed. Apply the changes with --apply.\n");
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    apply(&virsh, &plan, &path, &backup, &domain.xml, is_written_by_attach)?;
    let names: Vec<&str> = plan.served.iter().map(|disk| disk.name.as_str()).collect();
    let mut text = format!(
        "{}: Larder serves {} from the next start on, as configured in {}\n",
        plan.name,
        disk_list(&names),
        path.display()
    );
    text.push_str(&format!("the domain's previous XML is in {}\n", backup.xml.display()));
    append_notes(&mut text, &plan, &domain, &capabilities, is_system);
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn cache_from_arguments(arguments: &LibvirtAttachArguments) -> anyhow::Result<Option<(PathBuf, String)>> {
    let (Some(directory), Some(size)) = (&arguments.cache_dir, arguments.cache_size) else {
        return Ok(None);
    };
    let directory = std::path::absolute(directory).with_context(|| format!("--cache-dir {}", directory.display()))?;
    if !directory.is_dir() {
        bail!("--cache-dir {}: there is no such directory; create it, or mount its file system", directory.display());
    }
    Ok(Some((directory, format!("\"{}\"", size.to_string().replace(' ', "")))))
}

/// Plans the attach. A disk that Larder could not serve is left to QEMU. An image may use the files that the domain's
/// XML names, or, with `trust_image`, those that the image itself names where the XML names none.
fn plan_servable(domain: &Domain, wish: &mut AttachOptions, trust_image: bool) -> anyhow::Result<AttachPlan> {
    let full_plan = plan(&domain.xml, wish, vm_file_path)?;
    for (disk, config) in full_plan.served.iter().zip(&full_plan.config.disks) {
        match allowed_chain(disk, &config.spec, trust_image) {
            Ok(chain) => drop(wish.chains.insert(disk.name.clone(), chain)),
            Err(why) => drop(wish.excluded.insert(disk.name.clone(), why.to_string())),
        }
    }
    loop {
        let plan = plan(&domain.xml, wish, vm_file_path)?;
        let both = plan.served.iter().zip(&plan.config.disks);
        let trouble = both.filter_map(|(disk, config)| {
            let why = disk_problem(config, domain.running.is_some())?;
            Some((disk.name.clone(), why))
        });
        let trouble: Vec<_> = trouble.collect();
        if trouble.is_empty() {
            return match find_problems(&plan.config, &|_| false).as_slice() {
                [] => Ok(plan),
                problems => bail!("its disks could not be served: {}", problems.join("; ")),
            };
        }
        // The loop ends, because each turn has fewer disks to serve.
        wish.excluded.extend(trouble);
    }
}

/// Returns the files that the VM's file will allow for a disk.
fn allowed_chain(disk: &ServedDisk, wish: &DiskSpec, trust_image: bool) -> anyhow::Result<PinnedChain> {
    let on = Loop::new(Duration::ZERO)?;
    let format = wish.format.context("its format is not known")?;
    let mut named = on.block_on(named_chain(&on, &wish.image, format))?;
    match &disk.backing {
        Some(of_domain) => merge_backing(of_domain, &mut named)?,
        None if !named.backing.is_empty() && !trust_image => bail!(
            "its image refers to files that the domain's XML does not name; if they are the right ones, give --trust-image: {}",
            named.lines()
        ),
        None => {}
    }
    let has_data_file = named.data_file.is_some() || named.backing.iter().any(|image| image.data_file.is_some());
    if has_data_file && !trust_image {
        bail!(
            "its image has an external data file, which the domain's XML cannot name; if it is the right one, give --trust-image: {}",
            named.lines()
        );
    }
    named.pinned().with_context(|| {
        let unknown = named.backing.iter().find(|image| image.format.is_none());
        format!(
            "the format of its backing file {} is not given; write it into the header of its overlay, with qemu-img rebase -u -F, or into the domain's XML, as backingStore",
            unknown.map_or_else(String::new, |image| image.image.to_string())
        )
    })
}

/// Checks that the domain names the same backing files as the headers, and adds the formats that only the domain
/// gives.
fn merge_backing(domain_backing: &[NamedImage], named: &mut NamedChain) -> anyhow::Result<()> {
    let both = || domain_backing.iter().zip(&named.backing);
    let is_matching = domain_backing.len() == named.backing.len()
        && both().all(|(one, other)| {
            let formats = (one.format, other.format);
            is_same_image(&one.image, &other.image) && !matches!(formats, (Some(one), Some(other)) if one != other)
        });
    if !is_matching {
        let list = |all: &[NamedImage]| match all {
            [] => "none".to_owned(),
            all => {
                let each = all.iter().map(|it| match it.format {
                    Some(format) => format!("{}, {}", it.image, format.name()),
                    None => it.image.to_string(),
                });
                each.collect::<Vec<_>>().join("; ")
            }
        };
        bail!(
            "its backingStore names other backing files ({}) than the image itself ({}); correct the one that is wrong",
            list(domain_backing),
            list(&named.backing)
        );
    }
    for (image, domain_backing) in named.backing.iter_mut().zip(domain_backing) {
        image.format = image.format.or(domain_backing.format);
    }
    Ok(())
}

/// Returns the reason why Larder could not serve this disk, if there is one.
fn disk_problem(config: &VmDisk, in_use: bool) -> Option<String> {
    let problems: Vec<String> = match in_use {
        true => permanent_problems(&config.spec),
        false => check_disks(&[(&config.spec, OptionSource::File)]).problems.iter().map(ToString::to_string).collect(),
    };
    (!problems.is_empty()).then(|| problems.join("; "))
}

/// Returns the reasons that would still keep a disk from being served after the running domain has ended. The image
/// is opened read-only, because QEMU holds its locks.
fn permanent_problems(wish: &DiskSpec) -> Vec<String> {
    let read_only_spec = DiskSpec {
        read_only: true,
        share: true,
        prefetch: PrefetchSpec::default(),
        disk_cache: CacheSpec::default(),
        ..wish.clone()
    };
    let found = check_disks(&[(&read_only_spec, OptionSource::File)]).problems;
    let permanent = found.iter().filter(|problem| problem.is_permanent());
    permanent.map(ToString::to_string).collect()
}

/// Refuses to overwrite a backup that is still needed: a renamed domain is attached under its old name already.
fn check_no_backup(plan: &AttachPlan, kept: &DomainBackup, domain: &Domain) -> anyhow::Result<()> {
    let Some(before) = DomainBackup::read(&kept.xml)? else {
        return Ok(());
    };
    let restored = restore(&domain.xml, &before).with_context(|| kept.xml.display().to_string())?;
    match restored.disks.first() {
        Some(disk) => bail!(
            "Larder already serves disk {disk} of domain {}; to change that, detach it first: larder libvirt detach {}",
            plan.name,
            plan.name
        ),
        None => Ok(()),
    }
}

/// Returns true if an earlier attach of this domain wrote the VM's file, and false if there is none.
///
/// # Errors
/// The file exists and has another origin.
fn is_written_by_attach(path: &Path, kept: &DomainBackup) -> anyhow::Result<bool> {
    let Some(current) = DomainBackup::read(path)? else {
        return Ok(false);
    };
    match DomainBackup::read(&kept.file)? {
        Some(written) if written == current => Ok(true),
        _ => bail!(
            "{} exists, and was not written for this domain by larder libvirt attach; it was not changed: move it away, or connect the domain by hand as docs/guide/libvirt.md describes",
            path.display()
        ),
    }
}

/// Applies the plan. A crash after any step leaves a state that the next attach or detach can handle:
///
/// 1. The domain's XML and the VM's file are backed up. Nothing refers to the backup; the next attach replaces it,
///    because the domain has no disk of Larder's.
/// 2. The VM's file is written. The domain does not use it yet, so the hook does nothing. The file equals its backup,
///    so the next attach recognises it as its own, and detach removes it.
/// 3. libvirt takes the new XML, whole or not at all. From then on detach has all that it needs.
///
/// If libvirt refuses the XML, steps 1 and 2 are undone at once.
fn apply(
    virsh: &Virsh,
    plan: &AttachPlan,
    path: &Path,
    kept: &DomainBackup,
    before: &str,
    ours: bool,
) -> anyhow::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.with_context(|| format!("cannot create {}", directory.display()))?;
    // An earlier attach's file is recognised by its backup, which is about to change.
    if ours {
        backup::remove(path)?;
    }
    kept.write(before, &plan.file)?;
    backup::write(path, &plan.file, 0o644, false)?;
    if let Err(error) = virsh.define(&plan.xml) {
        backup::remove(path)?;
        kept.remove()?;
        return Err(error.context("the domain is unchanged"));
    }
    Ok(())
}

fn describe_changes(plan: &AttachPlan, path: &Path, before: &str) -> String {
    let mut text = format!("{}:\n\n", path.display());
    for line in plan.file.lines() {
        text.push_str(&match line {
            "" => "\n".to_owned(),
            line => format!("    {line}\n"),
        });
    }
    text.push('\n');
    let names = (format!("{} (now)", plan.name), format!("{} (with Larder)", plan.name));
    text + &unified_diff(before, &plan.xml, (&names.0, &names.1))
}

/// Appends further notes for the user.
fn append_notes(text: &mut String, plan: &AttachPlan, domain: &Domain, capabilities: &Element, is_system: bool) {
    let mut notes: Vec<String> =
        plan.skipped.iter().map(|disk| format!("{} stays with QEMU: {}", disk.name, disk.why)).collect();
    for disk in &plan.served {
        notes.extend(disk.notes.iter().map(|note| format!("{}: {note}", disk.name)));
    }
    if domain.running.is_some() {
        notes.push("the domain runs: QEMU serves its disks until it is shut down and started again; its images are in use, so only their content was checked".to_owned());
    }
    if !is_system {
        notes.push(format!(
            "libvirt runs no hooks for a user's own domains: start larder vm {} before the domain",
            plan.name
        ));
    } else if !Path::new(HOOK_PATH).exists() {
        notes.push(format!(
            "there is no {HOOK_PATH}: without the hook Larder is not started with the domain (docs/guide/libvirt.md)"
        ));
    }
    let models = capabilities.child("host").into_iter().flat_map(|host| host.children_named("secmodel"));
    let models = models.filter_map(|it| it.child("model"));
    for model in models {
        match model.text.as_str() {
            "apparmor"
                if small_file::read_text(Path::new(APPARMOR_ABSTRACTION), CONFIG_BYTES_MAX)
                    .is_ok_and(|text| text.contains("/run/larder/*.sock")) =>
            {
                notes.push(format!(
                    "{APPARMOR_ABSTRACTION} allows every domain's QEMU to use the sockets of all domains; the hook now allows each to use its own: remove the line /run/larder/*.sock rw, there"
                ));
            }
            "selinux" => notes.push(
                "SELinux prevents QEMU from using Larder's sockets until its policy allows it (docs/guide/libvirt.md)"
                    .to_owned(),
            ),
            _ => {}
        }
    }
    if !notes.is_empty() {
        text.push('\n');
    }
    for note in notes {
        text.push_str(&format!("{note}\n"));
    }
}

/// Returns the name and the UUID in a domain's XML.
pub(super) fn domain_identity(xml: &str) -> anyhow::Result<(String, String)> {
    Ok(identity(&Element::parse(xml)?)?)
}
